"""The process that reads a GPU while steps run: real processes, and NVML's answers played to them by a module in its
place. With a GPU, the real library answers, and a real step runs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stepscope
from stepscope.core.environment import Extent, GpuSamples
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import load_run, load_runs
from stepscope.engine import watched_run
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_in_turns, measure_step
from stepscope.recording import nvml
from stepscope.recording.nvml import GpuSampler, gpu_sampled, gpu_uuid, summarised
from tests.conftest import mini, workload
from tests.recording.watch.loops import Net, train_step

PLAYED = """
    import itertools, os, sys, time

    class NVMLError(Exception): ...

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, manner = 1, 0, os.environ["PLAYED"]
    calls = itertools.count()
    nvmlInit = lambda: time.sleep(60) if manner == "hangs" else None
    nvmlDeviceGetMigMode = lambda handle: [int(manner == "divided"), 0]
    nvmlDeviceGetPowerUsage = lambda handle: 345_678
    nvmlDeviceGetTemperature = lambda handle, sensor: 61

    def nvmlShutdown():
        with open(os.environ["PLAYED_MODULES"], "w") as file:
            file.write(" ".join(sys.modules))

    def nvmlDeviceGetHandleByUUID(uuid):
        if uuid != "GPU-1":
            raise NVMLError()
        return "a handle"

    def nvmlDeviceGetClockInfo(handle, kind):
        call = next(calls)
        if manner == "dies" and call == 2:
            os._exit(1)
        if manner == "stops" and call == 2:
            time.sleep(60)
        return (1980, 1500, 1800)[call % 3]
"""


Play = Callable[[str], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Makes the processes that are started find a library of this manner."""

    def played(manner: str) -> None:
        (tmp_path / "pynvml.py").write_text(textwrap.dedent(PLAYED))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("PLAYED", manner)
        monkeypatch.setenv("PLAYED_MODULES", str(tmp_path / "modules"))
        monkeypatch.setattr(nvml, "_ANSWER_S", 1.0 if manner in ("hangs", "stops") else 30.0)

    return played


def read_for(seconds: float, uuid: str = "GPU-1") -> GpuSamples | None:
    sampler = GpuSampler(uuid, period_s=0.01)
    try:
        begin_s = time.monotonic()
        time.sleep(seconds)
        return sampler.read(begin_s, time.monotonic())
    finally:
        sampler.close()


def test_another_process_reads_and_knows_no_torch(play: Play, tmp_path: Path):
    play("well")
    found = read_for(0.5)
    assert found is not None and found.count >= 3 and found.period_s == 0.01
    assert found.power_w == Extent(lowest=345.678, median=345.678, highest=345.678)
    assert found.sm_clock_mhz is not None and found.sm_clock_mhz.lowest == 1500 and found.sm_clock_mhz.highest == 1980
    modules = (tmp_path / "modules").read_text().split()
    assert "stepscope.core.environment" in modules and "torch" not in modules


def test_what_was_read_before_and_after_the_steps_does_not_count(play: Play):
    play("well")
    began_s, sampler = time.monotonic(), GpuSampler("GPU-1", period_s=0.01)
    time.sleep(0.2)
    assert sampler.read(0.0, began_s) is None
    whole, again = (sampler.read(began_s, time.monotonic()) for _ in range(2))
    assert whole == again is not None and sampler.read(time.monotonic(), time.monotonic() + 60) is None


def test_the_power_of_a_gpu_that_mig_divides_is_not_known(play: Play):
    play("divided")
    found = read_for(0.2)
    assert found is not None and found.power_w is None and found.temperature_c is not None


@pytest.mark.parametrize("manner", ["dies", "hangs", "stops"])
def test_a_sampler_that_fails_leaves_nothing_and_no_error(play: Play, manner: str):
    play(manner)
    assert read_for(0.2) is None


def test_a_sampler_that_is_killed_leaves_nothing_and_no_error(play: Play):
    play("well")
    sampler = GpuSampler("GPU-1", period_s=0.01)
    assert sampler._process is not None
    os.kill(sampler._process.pid, signal.SIGKILL)
    assert sampler.read(0.0, time.monotonic()) is None


def test_no_gpu_of_this_name_or_no_library_is_a_blank(play: Play):
    assert read_for(0.0, "GPU-of-nobody") is None  # by the real library, which may find no driver
    play("well")
    assert read_for(0.0, "GPU-2") is None


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "_COMMAND", ("/no/such/python",))
    assert read_for(0.0) is None


def test_a_cpu_has_no_sampler():
    with gpu_sampled(torch.device("cpu")) as sampler:
        assert sampler is None


def test_a_sampler_ends_with_the_process_that_it_reads_for(play: Play):
    """Also where another process holds the pipe open, as a worker that was forked does."""
    play("well")
    code = """
        import os, signal, time
        from stepscope.recording.nvml import GpuSampler
        sampler = GpuSampler("GPU-1", period_s=0.01)
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        print(sampler._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.wait()
    process.stdout.close()
    status = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        pytest.skip("this system shows no processes")
    patience_s = time.monotonic() + 4
    while time.monotonic() < patience_s and _runs(status):
        time.sleep(0.05)
    assert not _runs(status)


def _runs(status: Path) -> bool:
    try:
        return status.read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def run_of(out: Path) -> Run:
    settings = Settings(warmup_floor=2, warmup_cap=2, steps_floor=5, steps_cap=10_000, seconds=0.3, profile=False)
    run, directory = measure_step(StepRequest(workload=mini(), settings=settings, device="cpu", out=str(out)))
    assert load_run(directory) == run
    return run


@pytest.mark.parametrize("manner", ["well", "dies"])
def test_a_run_keeps_what_was_read_while_its_steps_ran(
    play: Play, manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A CPU's step, beside which the played GPU is read."""
    play(manner)
    monkeypatch.setattr(nvml, "sampler_of", lambda _: GpuSampler("GPU-1", period_s=0.01))
    run = run_of(tmp_path / "runs")
    assert run.status == "done" and not run.evidence.notes and run.environment is not None
    during = run.environment.during
    assert (during is not None) is (manner == "well")
    if during is not None:
        steps_s = sum(run.samples["step"].values_s)
        assert 1 <= during.count <= 2 * steps_s / during.period_s + 2 and run.summary["power_w"] == 345.678


def test_steps_that_take_turns_have_clocks_in_common_and_neither_power_nor_energy(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    play("well")
    monkeypatch.setattr(nvml, "sampler_of", lambda _: GpuSampler("GPU-1", period_s=0.01))
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=5, steps_cap=5, seconds=5, profile=False)
    request = StepRequest(
        workload=mini(), against=mini(seq_len=32), settings=settings, device="cpu", out=str(tmp_path / "runs")
    )
    measure_in_turns(request)
    runs, _ = load_runs([tmp_path / "runs"])
    assert len(runs) == 2
    for run in runs:
        during = run.environment.during if run.environment else None
        assert during is not None and during.sm_clock_mhz is not None and during.power_w is None
        assert run.evidence.energy is None and not any("energy" in note for note in run.evidence.notes)


def test_a_watched_loop_keeps_it_too_and_ends_the_sampler(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    play("well")
    samplers: list[GpuSampler] = []

    def started(_: torch.device) -> GpuSampler:
        samplers.append(GpuSampler("GPU-1", period_s=0.01))
        return samplers[-1]

    monkeypatch.setattr(watched_run, "sampler_of", started)
    for steps in (12, 4):  # the second loop ends before its steps are timed
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stepscope.watch(model, optimizer, steps=(3, 10), runs=tmp_path / str(steps), quiet=True) as watched:
            for _ in range(steps):
                train_step(model, optimizer)
                time.sleep(0.03)
        if steps == 12:
            assert watched.run is not None and watched.run.environment is not None
            assert watched.run.environment.during is not None and watched.run.environment.during.count >= 3
        assert samplers[-1]._process is None
    assert len(samplers) == 2


def test_lowest_median_and_highest_by_hand():
    samples = [(1500, 300.0, None), (1980, None, None), (1800, 500.0, None), (1740, 310.0, None)]
    assert summarised(samples, 0.1) == GpuSamples(
        count=4, period_s=0.1,
        sm_clock_mhz=Extent(lowest=1500, median=1770, highest=1980),
        power_w=Extent(lowest=300.0, median=310.0, highest=500.0),
    )  # fmt: skip
    assert summarised([], 0.1) is None


@pytest.mark.gpu
def test_a_real_gpu_is_read_while_a_real_step_runs(tmp_path: Path):
    settings = Settings(warmup_floor=3, warmup_cap=3, steps_floor=5, steps_cap=100_000, seconds=3, profile=False)
    request = StepRequest(
        workload=workload(model="small", seq_len=256), settings=settings, device="cuda", out=str(tmp_path)
    )
    run, _ = measure_step(request)
    assert run.environment is not None
    before, during, after = run.environment.before, run.environment.during, run.environment.after
    assert during is not None and during.period_s == nvml.PERIOD_S
    assert before is not None and before.read_at_s and after is not None and after.read_at_s
    assert 3 <= during.count <= (after.read_at_s - before.read_at_s) / during.period_s + 1 and after.sm_clock_max_mhz
    assert during.sm_clock_mhz is not None and 100 < during.sm_clock_mhz.median <= after.sm_clock_max_mhz
    assert during.temperature_c is not None and 10 < during.temperature_c.median < 110
    assert after.other_processes == 0 or "PYTEST_XDIST_WORKER" in os.environ, "the sampler is no company on the GPU"


@pytest.mark.gpu
def test_the_sampler_finds_the_gpu_by_the_name_that_torch_gives():
    gpu = torch.device("cuda", 0)
    found = read_for(0.5, gpu_uuid(gpu))
    assert found is not None and found.count >= 3 and found.sm_clock_mhz is not None


@pytest.mark.gpu
def test_a_loop_on_a_real_gpu_is_read_too(tmp_path: Path):
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with stepscope.watch(model, optimizer, steps=(5, 105), runs=tmp_path, quiet=True) as watched:
        for _ in range(110):
            model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    assert watched.run is not None and watched.run.environment is not None
    during = watched.run.environment.during
    assert during is not None and during.count >= 3 and during.sm_clock_mhz is not None
    assert watched.run.evidence.energy is None
