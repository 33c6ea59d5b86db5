"""Reads a GPU's clocks, power, temperature and energy through NVIDIA's management library, NVML.

A value is None where NVML does not give it.
"""

import contextlib
import importlib
import itertools
import os
import select
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stepscope.core.environment import Extent, GpuReading, GpuSamples

if TYPE_CHECKING:
    import torch  # a sweep asks for the memory of the GPUs without it, and the sampler starts without it

    from stepscope.core.evidence import Energy

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


def nvml_kept_open(device: "torch.device") -> AbstractContextManager[object]:
    """A context in which NVML stays initialised for a GPU, since starting it takes longer than reading it."""
    return _session() if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def _session(uuid: str | None = None) -> Iterator[tuple[Any, Ask, Any] | None]:
    """NVML, what asks it, and the handle of the GPU that is named, if one is; None without NVML, or such a GPU."""
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
        handle = ask("nvmlDeviceGetHandleByUUID", uuid) if uuid is not None else None
        yield None if uuid is not None and handle is None else (nvml, ask, handle)
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    """The version of the NVIDIA driver."""
    with _session() as session:
        return None if session is None else session[1]("nvmlSystemGetDriverVersion")


class Gpu(NamedTuple):
    """A GPU of this machine, whoever uses it."""

    name: str
    total_bytes: int
    free_bytes: int
    """What no process holds now."""


def gpus_here() -> list[Gpu]:
    """The GPUs that a process started here sees, that of the least memory first; none where there are none, or NVML is
    missing. CUDA_VISIBLE_DEVICES hides GPUs from CUDA, and not from NVML."""
    with _session() as session:
        if session is None:
            return []
        _, ask, _ = session
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = range(ask("nvmlDeviceGetCount") or 0) if visible is None else visible.split(",")
        handles = [_handle(ask, str(name).strip()) for name in names]
        handles = list(itertools.takewhile(lambda handle: handle is not None, handles))  # CUDA ignores what follows
        gpus = [(ask("nvmlDeviceGetName", handle), ask("nvmlDeviceGetMemoryInfo", handle)) for handle in handles]
    found = [Gpu(str(name), int(memory.total), int(memory.free)) for name, memory in gpus if memory is not None]
    return sorted(found, key=lambda gpu: (gpu.total_bytes, gpu.name))


def _handle(ask: Ask, name: str) -> Any:
    """NVML's handle of a GPU by its place or its UUID; None where there is no such GPU."""
    if name.isdecimal():
        return ask("nvmlDeviceGetHandleByIndex", int(name))
    return ask("nvmlDeviceGetHandleByUUID", name)


def smallest_gpu() -> tuple[str, int] | None:
    """Name and bytes of the GPU here that has the least memory; None where there is none, or NVML is missing."""
    return next(((gpu.name, gpu.total_bytes) for gpu in gpus_here()), None)


def gpu_uuid(device: "torch.device") -> str:
    """The name by which NVML finds a GPU, whatever CUDA_VISIBLE_DEVICES renumbered."""
    import torch  # noqa: PLC0415

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def total_energy_j(device: "torch.device") -> float | None:
    """Energy that the whole GPU has taken since its driver was loaded.

    None on a CPU, where NVML does not tell, and under MIG, whose parts are counted together.
    """
    if device.type != "cuda":
        return None
    with _session(gpu_uuid(device)) as session:
        if session is None or _is_divided(*session[1:]):
            return None
        energy = session[1]("nvmlDeviceGetTotalEnergyConsumption", session[2])
        return None if energy is None else energy / 1000


Sample = tuple[float | None, float | None, float | None]
"""A GPU's SM clock in MHz, power in W and temperature in degrees at one moment."""


@contextlib.contextmanager
def gpu_sampling(uuid: str) -> Iterator[Callable[[], Sample] | None]:
    """A function that reads a GPU's clock, power and temperature; None where NVML does not find it. Power is None under
    MIG, whose parts are counted together."""
    with _session(uuid) as session:
        if session is None:
            yield None
            return
        nvml, ask, handle = session
        divided = _is_divided(ask, handle)

        def read() -> Sample:
            power = None if divided else ask("nvmlDeviceGetPowerUsage", handle)
            return (
                ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
                None if power is None else power / 1000,
                ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            )

        yield read


@contextlib.contextmanager
def free_memory(uuid: str | None) -> Iterator[Callable[[], int | None]]:
    """A function that reads how many bytes of a GPU's memory are free, without the CUDA driver: a script may be
    capturing a graph. It gives None without a GPU, without NVML, and under MIG."""
    with _session(uuid) if uuid is not None else contextlib.nullcontext() as session:
        if session is None or session[2] is None or _is_divided(*session[1:]):
            yield lambda: None
            return
        _, ask, handle = session

        def read() -> int | None:
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            return None if memory is None else int(memory.free)

        yield read


def _is_divided(ask: Ask, handle: Any) -> bool:
    """Whether MIG divides the GPU."""
    mode = ask("nvmlDeviceGetMigMode", handle)
    return mode is not None and bool(mode[0])


def read_gpu(device: "torch.device") -> GpuReading | None:
    """A GPU's clocks, power, temperature and other processes now; None on a CPU or without NVML."""
    if device.type != "cuda":
        return None
    with _session(gpu_uuid(device)) as session:
        if session is None:
            return None
        nvml, ask, handle = session
        power, limit = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
        processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        others = None
        if processes is not None:
            import torch  # noqa: PLC0415

            # NVML may list this process under another pid in a container.
            pids = [process.pid for process in processes]
            others = len(pids) - (os.getpid() in pids or (bool(pids) and torch.cuda.is_initialized()))
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
            other_processes=others,
            memory_used_bytes=None if memory is None else int(memory.used),
        )


# ---- the energy that a device takes while steps run, by the counter that it keeps itself

LEAST_S = 2.0
"""The shortest time that a counter is asked about. Recent GPUs renew theirs every 20 to 100 ms (PETSc's manual of
PetscLogGpuEnergyMeter), so that two readings are off by 5 % at most."""
POWERCAP = Path("/sys/class/powercap")


class _Counter(NamedTuple):
    energy_j: float
    wraps_at_j: float
    """Where the counter begins again at zero; 0 where it does not."""


class EnergyMeter:
    """Counts a device's energy from `start` on: a GPU's by NVML, a processor's by RAPL as Linux shows it.

    Both count a whole device, with whatever else runs on it.
    """

    def __init__(self, device: "torch.device", powercap: Path = POWERCAP) -> None:
        self._device, self._powercap = device, powercap
        self._began_s = 0.0
        self._began: dict[str, _Counter] = {}

    def start(self) -> bool:
        """Begin to count. Returns whether the device has a counter."""
        self._began, self._began_s = self._read(), time.monotonic()
        return bool(self._began)

    def read(self, steps: int, *, are_samples: bool) -> "Energy | None":
        """The energy of the steps that ran since `start`; None if they took less than LEAST_S, or nothing counts."""
        duration_s, now = time.monotonic() - self._began_s, self._read()
        if not steps or not now or duration_s < LEAST_S or now.keys() != self._began.keys():
            return None
        used_j = [end.energy_j - self._began[name].energy_j for name, end in now.items()]
        used_j = [used + end.wraps_at_j if used < 0 else used for used, end in zip(used_j, now.values(), strict=True)]
        if min(used_j) < 0:  # the driver was loaded anew
            return None
        from stepscope.core.evidence import Energy  # noqa: PLC0415  (the sampler, which starts often, does without it)

        of = "gpu" if self._device.type == "cuda" else "cpu-packages"
        return Energy(energy_j=sum(used_j), steps=steps, duration_s=duration_s, of=of, are_samples=are_samples)

    def _read(self) -> dict[str, _Counter]:
        """The counters of a GPU, or of the processor's packages; none where the system has none, or lets only its owner
        read them."""
        if self._device.type == "cuda":
            energy = total_energy_j(self._device)
            return {} if energy is None else {"gpu": _Counter(energy, 0.0)}
        counters: dict[str, _Counter] = {}
        with contextlib.suppress(OSError, ValueError):
            for zone in self._powercap.glob("intel-rapl:*"):
                # A zone may also be a part of a package, or the whole platform.
                if (zone / "name").read_text().startswith("package-"):
                    energy, wraps_at = ((zone / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                    counters[zone.name] = _Counter(int(energy) * 1e-6, int(wraps_at) * 1e-6)
            return counters
        return {}


# A GPU's clocks, power and temperature while steps run, read by a small process of its own.
#
# To read them takes the driver's time and the host's, so the process that is measured does not. The sampler reads until
# it is told to stop, and only then writes what it read. It knows nothing of PyTorch, and the GPU has no context of it.
# One that dies, or does not answer, leaves nothing; it never fails a run.


PERIOD_S = 0.1
_COMMAND = (sys.executable, "-P", "-m", "stepscope.recording.nvml")
"""-P, since the user's current directory may hold a select.py of theirs."""
_ANSWER_S = 5.0
"""The longest wait for the sampler, when it starts and when it ends."""
_READY = b"ready\n"
_MOST = 36_000
"""The most readings that are kept, the last ones: an hour's."""

_Row = tuple[float, Sample]
"""When the GPU was read, on the monotonic clock that all processes of a system share, and what it was."""


class GpuSampler:
    """A running sampler of one GPU; `close` it whatever happens."""

    def __init__(self, uuid: str, period_s: float = PERIOD_S) -> None:
        """Return when the sampler reads, so that its start falls into no measured step."""
        self._period_s = period_s
        self._rows: list[_Row] = []
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                (*_COMMAND, uuid, str(period_s)),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on the terminal interrupts the steps alone
            )
        ready = False
        try:
            if self._process is not None and (output := self._process.stdout) is not None:
                readable, _, _ = select.select([output], [], [], _ANSWER_S)
                ready = bool(readable) and os.read(output.fileno(), len(_READY)) == _READY
        finally:
            if not ready:
                self.close()

    def read(self, begin_s: float, end_s: float) -> GpuSamples | None:
        """Stop, and return what was read between two moments of the monotonic clock; None where nothing was."""
        if self._process is not None:
            try:
                # A byte, and not the pipe's end alone: a process that was forked meanwhile may hold it open.
                written, _ = self._process.communicate(b"\n", timeout=_ANSWER_S)
                self._rows = msgspec.json.decode(written, type=list[_Row])
            except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
                pass
            finally:
                self.close()
        return summarised([sample for at_s, sample in self._rows if begin_s <= at_s <= end_s], self._period_s)

    def close(self) -> None:
        """End the sampler. What it has not told is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def sampler_of(device: "torch.device") -> GpuSampler | None:
    """A sampler that reads the device from now on; None on a CPU."""
    return GpuSampler(gpu_uuid(device)) if device.type == "cuda" else None


def gpu_sampled(device: "torch.device") -> AbstractContextManager[GpuSampler | None]:
    """A context in which a sampler reads the device; None on a CPU."""
    sampler = sampler_of(device)
    return contextlib.closing(sampler) if sampler is not None else contextlib.nullcontext()


def summarised(samples: Sequence[Sample], period_s: float) -> GpuSamples | None:
    """The lowest, median and highest of each quantity; None without samples."""
    if not samples:
        return None
    extents: list[Extent | None] = []
    for column in zip(*samples, strict=True):
        values = [value for value in column if value is not None]
        extent = Extent(lowest=min(values), median=statistics.median(values), highest=max(values)) if values else None
        extents.append(extent)
    clock, power, temperature = extents
    return GpuSamples(
        count=len(samples), period_s=period_s, sm_clock_mhz=clock, power_w=power, temperature_c=temperature
    )


def main(uuid: str, period_s: float) -> int:
    """Read the GPU until a byte comes on stdin, then write the readings to stdout."""
    parent, rows = os.getppid(), deque[_Row](maxlen=_MOST)
    os.nice(19)  # it must not take a core from the steps
    with gpu_sampling(uuid) as read:
        if read is None:
            return 1
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()
        next_s = time.monotonic()
        while not select.select([sys.stdin], [], [], max(0.0, next_s - time.monotonic()))[0]:
            if os.getppid() != parent:  # killed, it said nothing
                return 1
            now_s = time.monotonic()
            rows.append((now_s, read()))
            next_s = max(next_s + period_s, now_s)
    sys.stdout.buffer.write(msgspec.json.encode(list(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
