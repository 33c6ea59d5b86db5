"""Reads a GPU's state through NVIDIA's management library, NVML; a value is None where NVML does not give it."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from stepscope.core.environment import GpuReading

if TYPE_CHECKING:
    import torch  # a sweep asks for the memory of the GPUs without it

_SLOWDOWN_BITS = {
    # nvmlClocksEventReasons. Idle (0x1) and clocks set on purpose (0x2) slow nothing down unexpectedly.
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

Ask = Callable[..., Any]
"""ask(function_name, *arguments): the result of one call to NVML, or None where this driver or card has none."""


@contextlib.contextmanager
def nvml_kept_open(device: "torch.device") -> Iterator[None]:
    """A context in which NVML stays initialised for a GPU, since starting it takes longer than reading it."""
    with _session() if device.type == "cuda" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _session() -> Iterator[tuple[Any, Ask] | None]:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    try:
        yield nvml, ask
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    """The version of the NVIDIA driver."""
    with _session() as session:
        return None if session is None else session[1]("nvmlSystemGetDriverVersion")


def smallest_gpu() -> tuple[str, int] | None:
    """Name and bytes of the GPU here that has the least memory; None where there is none, or NVML is missing."""
    with _session() as session:
        if session is None:
            return None
        _, ask = session
        handles = [ask("nvmlDeviceGetHandleByIndex", i) for i in range(ask("nvmlDeviceGetCount") or 0)]
        found = [(ask("nvmlDeviceGetName", handle), ask("nvmlDeviceGetMemoryInfo", handle)) for handle in handles]
        sizes = [(int(memory.total), str(name)) for name, memory in found if memory is not None]
    return None if not sizes else (min(sizes)[1], min(sizes)[0])


def read_gpu(device: "torch.device") -> GpuReading | None:
    """A GPU's clocks, power, temperature and other processes now; None on a CPU or without NVML."""
    if device.type != "cuda":
        return None
    import torch  # noqa: PLC0415

    with _session() as session:
        if session is None:
            return None
        nvml, ask = session
        # The UUID finds the card whatever CUDA_VISIBLE_DEVICES renumbered.
        handle = ask("nvmlDeviceGetHandleByUUID", f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        if handle is None:
            return None
        power, limit = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        limited = {
            policy: ask("nvmlDeviceGetViolationStatus", handle, getattr(nvml, f"NVML_PERF_POLICY_{policy}"))
            for policy in ("POWER", "THERMAL")
        }
        limited_s = {policy: status and status.violationTime * 1e-9 for policy, status in limited.items()}
        return GpuReading(
            read_at_s=time.monotonic(),
            sm_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            temperature_c=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_reasons=tuple(name for bit, name in _SLOWDOWN_BITS.items() if reasons & bit),
            power_limited_s=limited_s["POWER"],
            thermal_limited_s=limited_s["THERMAL"],
            other_processes=None if processes is None else _others([process.pid for process in processes]),
            memory_used_bytes=None if memory is None else int(memory.used),
        )


def _others(pids: list[int]) -> int:
    """Number of processes on the GPU besides this one, which NVML may list under another pid in a container."""
    import torch  # noqa: PLC0415

    own = os.getpid() in pids or (bool(pids) and torch.cuda.is_initialized())
    return len(pids) - own
