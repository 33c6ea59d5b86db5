"""What is read from NVML, in the units of its documentation; no GPU is needed: NVML's own answers are played.

NVML API Reference Guide: power is in milliwatts (nvmlDeviceGetPowerUsage, nvmlDeviceGetEnforcedPowerLimit); in
nvmlViolationTime_t, referenceTime is in microseconds and violationTime in nanoseconds; energy is in millijoules
(nvmlDeviceGetTotalEnergyConsumption). `tests/gpu/test_gpu.py` holds
the same figures against nvidia-smi where there is a GPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.core.run_directory import load_run
from stepscope.recording.nvml import gpu_sampling, gpus_here, read_gpu, total_energy_j

RESULTS = Path(__file__).parents[2] / "results"

pynvml: Any = pytest.importorskip("pynvml")

ANSWERS: dict[str, Any] = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetHandleByUUID": "a handle",
    "nvmlDeviceGetPowerUsage": 345_678,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x40,
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 2**30, used=3 * 2**30),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTotalEnergyConsumption": 1_234_567_890,
    "nvmlDeviceGetMigMode": [0, 0],
}


def answers(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The real module of NVML, its constants and structures, with functions that answer without a driver."""
    limited_ns = {pynvml.NVML_PERF_POLICY_POWER: 12_500_000_000, pynvml.NVML_PERF_POLICY_THERMAL: 250_000_000}
    for name, answer in {**ANSWERS, **changes}.items():
        monkeypatch.setattr(pynvml, name, lambda *_, _answer=answer: _answer)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetViolationStatus",
        lambda _, policy: pynvml.c_nvmlViolationTime_t(
            referenceTime=1_700_000_000_000_000, violationTime=limited_ns[policy]
        ),
    )
    clocks = {pynvml.NVML_CLOCK_SM: (1500, 1980), pynvml.NVML_CLOCK_MEM: (2619, 2619)}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda _, kind: clocks[kind][0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda _, kind: clocks[kind][1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0-1-2-3"))


def test_milliwatts_become_watts_and_nanoseconds_seconds(monkeypatch: pytest.MonkeyPatch):
    answers(monkeypatch)
    reading = read_gpu(torch.device("cuda", 0))
    assert reading is not None
    assert (reading.power_w, reading.power_limit_w) == (345.678, 700.0)
    assert reading.power_limited_s == pytest.approx(12.5) and reading.thermal_limited_s == pytest.approx(0.25)
    assert (reading.sm_clock_mhz, reading.sm_clock_max_mhz, reading.memory_clock_mhz) == (1500, 1980, 2619)
    assert (reading.temperature_c, reading.memory_used_bytes) == (61, 3 * 2**30)
    assert reading.slowdown_reasons == ("power cap", "hardware thermal slowdown")


def test_millijoules_become_joules_and_those_of_a_divided_gpu_are_not_known(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda", 0)
    answers(monkeypatch)
    assert total_energy_j(gpu) == pytest.approx(1_234_567.89) and total_energy_j(torch.device("cpu")) is None
    with gpu_sampling("GPU-0-1-2-3") as read:
        assert read is not None and read() == (1500, 345.678, 61)
    answers(monkeypatch, nvmlDeviceGetMigMode=[1, 1])
    assert total_energy_j(gpu) is None
    with gpu_sampling("GPU-0-1-2-3") as read:
        assert read is not None and read() == (1500, None, 61)
    answers(monkeypatch, nvmlDeviceGetTotalEnergyConsumption=None)
    assert total_energy_j(gpu) is None
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", _refused)  # by GPUs that know no MIG
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda _: 5_000)
    assert total_energy_j(gpu) == 5.0


def _refused(*_: object) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_what_a_card_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch):
    answers(monkeypatch)
    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetViolationStatus", "nvmlDeviceGetMemoryInfo"):
        monkeypatch.setattr(pynvml, name, _refused)
    reading = read_gpu(torch.device("cuda", 0))
    assert reading is not None and reading.power_limit_w == 700.0
    assert reading.power_w is reading.power_limited_s is reading.thermal_limited_s is reading.memory_used_bytes is None


def test_measured_violation_times_fit_the_time_that_passed():
    """The documented unit is the true one: in stored runs the cap held for up to all of the time between two readings.

    In microseconds, or taken for seconds a thousand times too long, no run would be near its own length.
    """
    shares = []
    for file in (RESULTS / "h200").glob("*/*/run.json"):
        environment = load_run(file.parent).environment
        before, after = (environment.before, environment.after) if environment else (None, None)
        if before and after and before.read_at_s and after.read_at_s:
            assert before.power_limited_s is not None and after.power_limited_s is not None
            shares.append((after.power_limited_s - before.power_limited_s) / (after.read_at_s - before.read_at_s))
    assert len(shares) > 100
    assert min(shares) >= 0 and 0.99 < max(shares) < 1.01


def test_gpus_hidden_from_cuda_do_not_count(monkeypatch: pytest.MonkeyPatch):
    sizes = {0: 80, 1: 24, "GPU-c": 12}
    memory = {key: SimpleNamespace(total=size * 2**30, free=size * 2**30) for key, size in sizes.items()}
    answers(monkeypatch, nvmlDeviceGetCount=2)
    for name in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID"):
        monkeypatch.setattr(pynvml, name, lambda key: key if key in sizes else None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", str)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory.__getitem__)

    def seen() -> list[str]:
        return [gpu.name for gpu in gpus_here()]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen() == ["1", "0"]
    for visible, expected in {"0": ["0"], "GPU-c,0": ["GPU-c", "0"], "1, 7, 0": ["1"], "": [], "-1": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert seen() == expected, visible
