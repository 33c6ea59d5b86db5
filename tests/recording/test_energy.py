"""Energy of steps: counters that are played or written to files, and a real GPU's where there is one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.evidence import Energy
from stepscope.core.run import Settings
from stepscope.core.run_directory import load_run
from stepscope.engine import stages as timed
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.recording import nvml
from stepscope.recording.nvml import EnergyMeter
from tests.conftest import mini, workload

CPU = torch.device("cpu")


class Clock:
    """A clock in the place of time.monotonic, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(nvml, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def zone(
    powercap: Path, name: str, energy_uj: int, *, called: str = "package-0", range_uj: int = 262_143_328_850
) -> None:
    """A counter as Linux shows it."""
    folder = powercap / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{called}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, meter = Clock(monkeypatch), EnergyMeter(CPU, tmp_path)
    for end_uj, at_s in ((0, 100.0), (30_000_000, 102.5)):
        clock.now_s = at_s
        zone(tmp_path, "intel-rapl:0", 1_000_000 + end_uj)
        zone(tmp_path, "intel-rapl:1", 2_000_000 + 2 * end_uj, called="package-1")
        zone(tmp_path, "intel-rapl:0:0", 5_000_000 + end_uj, called="core")
        zone(tmp_path, "intel-rapl:2", 9_000_000 + 5 * end_uj, called="psys")
        if not end_uj:
            assert meter.start()
    found = meter.read(10, are_samples=True)
    assert found == Energy(energy_j=90.0, steps=10, duration_s=2.5, of="cpu-packages", are_samples=True)


@given(before=st.integers(0, 999_999_999), taken=st.integers(0, 999_999_999))
def test_a_counter_that_began_again_at_zero(tmp_path_factory: pytest.TempPathFactory, before: int, taken: int):
    powercap = tmp_path_factory.mktemp("powercap")
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, meter = Clock(monkeypatch), EnergyMeter(CPU, powercap)
        zone(powercap, "intel-rapl:0", before, range_uj=1_000_000_000)
        assert meter.start()
        clock.now_s += 3
        zone(powercap, "intel-rapl:0", (before + taken) % 1_000_000_000, range_uj=1_000_000_000)
        found = meter.read(1, are_samples=True)
    assert found is not None and found.energy_j == pytest.approx(taken * 1e-6, abs=1e-6)


def test_less_than_two_seconds_no_steps_or_no_counter_is_no_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, meter = Clock(monkeypatch), EnergyMeter(CPU, tmp_path)
    assert not meter.start()
    clock.now_s += 5
    assert meter.read(10, are_samples=True) is None
    zone(tmp_path, "intel-rapl:0", 0)
    assert meter.read(10, are_samples=True) is None, "the counter was not there when the steps began"
    assert meter.start()
    clock.now_s += 1.99
    zone(tmp_path, "intel-rapl:0", 10_000_000)
    assert meter.read(10, are_samples=True) is None
    clock.now_s += 0.02
    assert meter.read(0, are_samples=True) is None
    assert meter.read(10, are_samples=True) is not None
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("not a number")
    assert meter.read(10, are_samples=True) is None


def test_a_gpus_counter_that_was_reset_is_no_energy(monkeypatch: pytest.MonkeyPatch):
    counts = iter([500.0, 1700.0, 20.0])
    monkeypatch.setattr(nvml, "total_energy_j", lambda _: next(counts))
    clock, meter = Clock(monkeypatch), EnergyMeter(torch.device("cuda", 0))
    assert meter.start()
    clock.now_s += 4
    found = meter.read(6, are_samples=False)
    assert found == Energy(energy_j=1200.0, steps=6, duration_s=4.0, of="gpu", are_samples=False)
    assert meter.read(6, are_samples=False) is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that counts its energy, as far as the engine can see: one more joule at each reading."""
    read = iter(range(1_000))

    def packages(_: EnergyMeter) -> dict[str, object]:
        return {"intel-rapl:0": nvml._Counter(float(next(read)), 262_000.0)}

    monkeypatch.setattr(EnergyMeter, "_read", packages)
    _ask_for(0.05, monkeypatch)


def _ask_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nvml, timed):
        monkeypatch.setattr(module, "LEAST_S", seconds)


def measured(out: Path, seconds: float, steps: int):
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=1, steps_cap=steps, seconds=seconds, profile=False)
    run, directory = measure_step(StepRequest(workload=mini(), settings=settings, device="cpu", out=str(out)))
    assert load_run(directory) == run
    return run


@pytest.mark.usefixtures("package")
def test_the_measured_steps_are_counted_where_they_last(out: Path):
    run = measured(out, seconds=0.2, steps=10_000)
    found = run.evidence.energy
    assert found is not None and found.are_samples and found.steps == run.samples["step"].count
    assert run.summary["joules_per_step"] == found.energy_j / found.steps > 0
    assert run.summary["joules_per_token"] == pytest.approx(found.energy_j / found.steps / mini().tokens)


@pytest.mark.usefixtures("package")
def test_more_steps_run_where_the_measured_ones_were_too_short(out: Path, monkeypatch: pytest.MonkeyPatch):
    _ask_for(0.8, monkeypatch)  # more than a small step takes on the busiest machine
    run = measured(out, seconds=1.0, steps=1)
    found = run.evidence.energy
    assert found is not None and not found.are_samples and found.duration_s >= 0.8
    assert run.samples["step"].count == 1 and not run.evidence.notes


@pytest.mark.usefixtures("package")
def test_whoever_asks_for_less_time_gets_no_more_steps(out: Path, monkeypatch: pytest.MonkeyPatch):
    _ask_for(0.8, monkeypatch)
    run = measured(out, seconds=0.0, steps=1)
    assert run.evidence.energy is None and run.summary["joules_per_step"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny", "large"])
def test_a_gpus_energy_is_its_power_times_the_time(model: str, tmp_path: Path):
    """Of steps that last, and of short ones, after which others run. The mean power lies between idle and the cap."""
    settings = Settings(warmup_floor=3, warmup_cap=3, steps_floor=20, steps_cap=100, profile=False)
    request = StepRequest(
        workload=workload(model=model, dtype="bf16"), settings=settings, device="cuda", out=str(tmp_path)
    )
    run, _ = measure_step(request)
    found, environment = run.evidence.energy, run.environment
    if found is None:
        pytest.skip("this GPU counts no energy of its own")
    assert found.of == "gpu" and found.duration_s >= 2 and environment is not None
    assert found.are_samples is (found.steps == run.samples["step"].count)
    assert environment.after is not None and environment.after.power_limit_w
    power_w = found.energy_j / found.duration_s
    assert 20 < power_w < 1.2 * environment.after.power_limit_w
    during = environment.during
    if found.are_samples and during is not None and during.power_w is not None:
        # Power readings are means of up to a second, which begins before the steps do.
        assert 0.5 * during.power_w.median < power_w < 1.5 * during.power_w.median
