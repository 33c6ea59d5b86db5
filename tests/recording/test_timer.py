"""The timing loop, exactly: a fake clock, a fake device with a queue, and no tolerance."""

from collections.abc import Callable, Sequence

import pytest

from stepscope.core.run import Settings
from stepscope.recording.step import Phase
from stepscope.recording.timer import AFTER_S, Measurement, Peers, Progress, StepFailed, TimeLimit, is_steady, measure
from tests.conftest import FakeClock, FakeDevice

FIXED = Settings(warmup_floor=2, warmup_cap=2, steps_floor=3, steps_cap=3, seconds=0)


class FakeStep:
    """A step whose phases take host time to issue and device time to run."""

    def __init__(self, clock: FakeClock, device: FakeDevice, phases: dict[str, tuple[float, float]]) -> None:
        self.clock, self.device, self.times = clock, device, phases
        self.order: list[str] = []
        self.scale: Callable[[int], float] = lambda _: 1.0
        self.steps = 0

    @property
    def phases(self) -> Sequence[Phase]:
        return [Phase(name=name, run=lambda name=name: self._run(name)) for name in self.times]

    def prepare(self) -> None:
        self.order.append("prepare")
        self.steps += 1
        self.clock.pass_s(100.0)  # must be in no figure

    def _run(self, name: str) -> None:
        self.order.append(name)
        host_s, device_s = self.times[name]
        self.clock.pass_s(host_s)
        self.device.give(device_s * self.scale(self.steps))


def machine(**phases: tuple[float, float]) -> tuple[FakeClock, FakeDevice, FakeStep]:
    clock = FakeClock()
    device = FakeDevice(clock)
    return clock, device, FakeStep(clock, device, phases)


def run_one(clock: FakeClock, device: FakeDevice, step: FakeStep, settings: Settings = FIXED) -> Measurement:
    return measure({"step": step}, device=device, settings=settings, clock=clock)["step"]


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # The device sets the pace. It starts when the first launch arrives, 1 ms after the step began.
        ((0.001, 2.0), (0.001, 4.0), {"step": 6.001, "host": 0.002, "forward": 2.001, "backward": 4.0}),
        # The host does: its time is near the step's. A phase ends on the device before the next one is launched.
        ((1.0, 0.1), (2.0, 0.1), {"step": 3.1, "host": 3.0, "forward": 1.1, "backward": 2.0}),
    ],
    ids=["device-bound", "launch-bound"],
)
def test_a_step_is_timed_by_phase_on_the_device_and_whole_on_the_host(
    forward: tuple[float, float], backward: tuple[float, float], expected: dict[str, float]
):
    samples = run_one(*machine(forward=forward, backward=backward)).samples
    assert {name: found.values_s for name, found in samples.items()} == {
        name: pytest.approx([value_s] * 3) for name, value_s in expected.items()
    }


def repeated(clock: FakeClock, device: FakeDevice, phases: list[tuple[str, float, float]]) -> list[Phase]:
    """Phases of these names, host and device seconds, a name as often as it is given."""

    def run(host_s: float, device_s: float) -> None:
        clock.pass_s(host_s)
        device.give(device_s)

    return [Phase(name=name, run=lambda h=host_s, d=device_s: run(h, d)) for name, host_s, device_s in phases]


class MicroBatches(FakeStep):
    """Two micro-batches, the second slower, and one optimizer step."""

    @property
    def phases(self) -> Sequence[Phase]:
        return repeated(
            self.clock,
            self.device,
            [
                ("forward", 0.001, 2.0), ("backward", 0.001, 4.0), ("forward", 0.001, 3.0), ("backward", 0.001, 5.0),
                ("optimizer", 0.001, 1.0),
            ],
        )  # fmt: skip


def test_phases_of_one_name_add_up_to_one_sample_a_step():
    clock = FakeClock()
    device = FakeDevice(clock)
    samples = run_one(clock, device, MicroBatches(clock, device, {})).samples
    # The device begins 1 ms after the step, with the first launch, and is never idle then: 2.001 + 3, 4 + 5, 1.
    assert list(samples) == ["step", "host", "forward", "backward", "optimizer"]
    assert samples["forward"].values_s == pytest.approx([5.001] * 3, abs=1e-9)
    assert samples["backward"].values_s == pytest.approx([9.0] * 3, abs=1e-9)
    assert samples["optimizer"].values_s == pytest.approx([1.0] * 3, abs=1e-9)
    assert samples["step"].values_s == pytest.approx([15.001] * 3, abs=1e-9)
    assert samples["host"].values_s == pytest.approx([0.005] * 3, abs=1e-9)
    assert samples["forward"].warmup_s == pytest.approx([5.001] * 2, abs=1e-9)
    assert device.synchronisations == 2 * 5  # none between micro-batches either


def test_phases_are_not_separated_by_synchronisation():
    clock, device, step = machine(forward=(0.001, 2.0), backward=(0.001, 4.0), optimizer=(0.001, 1.0))
    run_one(clock, device, step)
    assert device.synchronisations == 2 * 5  # before and after each of five steps
    assert step.order == ["prepare", "forward", "backward", "optimizer"] * 5


def test_warmups_are_kept_apart_and_clocks_are_named():
    clock, device, step = machine(forward=(0.0, 1.0))
    step.scale = float
    samples = run_one(clock, device, step).samples
    assert samples["forward"].warmup_s == pytest.approx([1.0, 2.0])
    assert samples["forward"].values_s == pytest.approx([3.0, 4.0, 5.0])
    assert samples["forward"].clock == "fake events"
    assert samples["step"].clock == samples["host"].clock == "fake clock"


def test_warm_up_goes_on_until_steady():
    clock, device, step = machine(forward=(0.0, 1.0))
    step.scale = lambda n: 10.0 if n <= 4 else 1.0
    settings = Settings(warmup_floor=3, warmup_cap=50, warmup_seconds=1e9, steps_floor=1, steps_cap=1, seconds=0)
    result = run_one(clock, device, step, settings)
    # Steady needs two windows of three alike: the last slow step is the fourth, so 4 + 6, or 2 where medians hide it.
    assert 8 <= len(result.samples["step"].warmup_s) <= 10
    assert result.warmup_steady


def test_warm_up_that_never_steadies_stops_at_its_cap_and_says_so():
    clock, device, step = machine(forward=(0.0, 1.0))
    step.scale = lambda n: 1.5**n
    settings = Settings(warmup_floor=3, warmup_cap=12, warmup_seconds=1e9, steps_floor=1, steps_cap=1, seconds=0)
    result = run_one(clock, device, step, settings)
    assert len(result.samples["step"].warmup_s) == 12
    assert not result.warmup_steady


def test_a_long_compilation_does_not_use_up_the_time_for_warming_up():
    clock, device, step = machine(forward=(0.0, 1.0))
    step.scale = lambda n: 1000.0 if n == 1 else 1.0
    settings = Settings(warmup_floor=3, warmup_cap=50, warmup_seconds=1e4, steps_floor=1, steps_cap=1, seconds=0)
    assert run_one(clock, device, step, settings).warmup_steady


def test_no_warm_up_when_none_is_asked():
    clock, device, step = machine(forward=(0.0, 1.0))
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=2, steps_cap=2, seconds=0)
    samples = run_one(clock, device, step, settings).samples
    assert samples["step"].warmup_s == () and samples["step"].count == 2


def test_measuring_lasts_until_the_time_has_passed_between_floor_and_cap():
    clock, device, step = machine(forward=(0.0, 1.0))
    # A step takes 1 s, and its preparation 100 s more of wall time.
    for seconds, expected in ((0, 4), (1000, 10), (1e9, 25)):
        settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=4, steps_cap=25, seconds=seconds)
        assert run_one(clock, device, step, settings).samples["step"].count == expected


@pytest.mark.parametrize(
    ("step_s", "seconds", "warmups", "steps"),
    [
        (2.0, 1.0, 2, 1),  # 1 + 1 + 2 s from the end of the first step on: one step is timed, however late it is
        (0.7, 2.0, 3, 3),  # 2 + 1 + 2 s: fewer than the ten that are asked for
        (0.3, 1.0, 5, 3),
    ],
)
def test_a_limit_of_the_whole_run_takes_fewer_steps_and_one_at_least(
    step_s: float, seconds: float, warmups: int, steps: int
):
    clock, device, step = machine(forward=(step_s, 0.0))
    step.prepare = lambda: None
    limit = TimeLimit(seconds, lambda: clock.now_ns() * 1e-9)
    settings = Settings(seconds=seconds)
    found = measure({"step": step}, device=device, settings=settings, clock=clock, limit=limit)["step"]
    assert (len(found.samples["step"].warmup_s), found.samples["step"].count) == (warmups, steps)
    assert limit.left_s() < AFTER_S


def test_a_number_of_steps_that_is_fixed_has_no_limit_in_warm_up():
    clock, device, step = machine(forward=(5.0, 0.0))
    limit = TimeLimit(1.0, lambda: clock.now_ns() * 1e-9)
    settings = Settings(warmup_floor=3, warmup_cap=3, seconds=1.0)
    found = measure({"step": step}, device=device, settings=settings, clock=clock, limit=limit)["step"]
    assert (len(found.samples["step"].warmup_s), found.samples["step"].count) == (3, 1)


def test_several_subjects_are_interleaved():
    clock = FakeClock()
    device = FakeDevice(clock)
    a, b = (FakeStep(clock, device, {"forward": (0.0, s)}) for s in (1.0, 2.0))
    order: list[str] = []
    a.prepare = lambda: order.append("a")
    b.prepare = lambda: order.append("b")
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0)
    results = measure({"a": a, "b": b}, device=device, settings=settings, clock=clock)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"], "two that warm up, then rounds that begin with each"
    assert results["a"].samples["step"].values_s == pytest.approx([1.0] * 3)
    assert results["b"].samples["step"].values_s == pytest.approx([2.0] * 3)


def test_a_failing_phase_is_named_and_what_was_measured_is_kept():
    clock, device, step = machine(forward=(0.0, 1.0), backward=(0.0, 2.0))

    def scale(n: int) -> float:
        if n == 4 and step.order[-1] == "backward":
            raise RuntimeError("out of memory")
        return 1.0

    step.scale = scale
    with pytest.raises(StepFailed) as caught:
        run_one(clock, device, step)
    assert (caught.value.stage, caught.value.phase) == ("measure", "backward")
    assert str(caught.value.__cause__) == "out of memory"
    assert caught.value.partial["step"].samples["step"].count == 1


def test_ctrl_c_leaves_what_was_measured():
    clock, device, step = machine(forward=(0.0, 1.0))

    def scale(n: int) -> float:
        if n == 5:
            raise KeyboardInterrupt
        return 1.0

    step.scale = scale
    result = run_one(clock, device, step)
    assert result.interrupted
    assert result.samples["step"].count == 2


def test_progress_is_told_for_every_step():
    clock, device, step = machine(forward=(0.0, 1.0))
    told: list[Progress] = []
    measure({"step": step}, device=device, settings=FIXED, clock=clock, on_progress=told.append)
    assert [(p.stage, p.done) for p in told] == [
        ("warm-up", 1), ("warm-up", 2), ("measure", 1), ("measure", 2), ("measure", 3),
    ]  # fmt: skip
    assert told[-1].last_step_s == pytest.approx(1.0)


def test_the_fraction_done_reaches_one_at_the_end_and_not_before():
    clock, device, step = machine(forward=(0.0, 1.0))
    told: list[Progress] = []
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=4, steps_cap=100, seconds=1010)
    measure({"step": step}, device=device, settings=settings, clock=clock, on_progress=told.append)
    fractions = [p.fraction for p in told]
    assert fractions == sorted(fractions) and len(told) == 10
    assert fractions[-2] < 1.0 and fractions[-1] == 1.0


def test_steady_means_two_windows_alike():
    assert not is_steady([1.0] * 5)
    assert is_steady([9.0, 1.0, 1.0, 1.0, 1.01, 1.01, 1.01])
    assert not is_steady([1.0, 1.0, 1.0, 1.1, 1.1, 1.1])


def test_before_measuring_runs_once_between_the_last_warm_up_step_and_the_first_measured_one():
    clock, device, step = machine(forward=(0.0, 1.0))
    step.scale = lambda n: 10.0 if n <= 4 else 1.0
    settings = Settings(warmup_floor=3, warmup_cap=50, warmup_seconds=1e9, steps_floor=4, steps_cap=4, seconds=0)
    seen: list[int] = []

    def read() -> None:
        seen.append(step.steps)
        clock.pass_s(50.0)  # must be in no figure

    result = measure({"step": step}, device=device, settings=settings, clock=clock, before_measuring=read)["step"]
    assert seen == [len(result.samples["step"].warmup_s)] and seen[0] > settings.warmup_floor
    assert result.samples["step"].values_s == pytest.approx([1.0] * 4)


def test_before_measuring_runs_before_a_cold_step_and_not_where_warm_up_fails():
    clock, device, step = machine(forward=(0.0, 1.0))
    seen: list[int] = []

    def read() -> None:
        seen.append(step.steps)

    cold = Settings(warmup_floor=0, warmup_cap=0, steps_floor=2, steps_cap=2, seconds=0)
    measure({"step": step}, device=device, settings=cold, clock=clock, before_measuring=read)
    assert seen == [0]

    def fails(_: int) -> float:
        raise RuntimeError("out of memory")

    step.scale = fails
    with pytest.raises(StepFailed):
        measure({"step": step}, device=device, settings=FIXED, clock=clock, before_measuring=read)
    assert seen == [0]


def test_processes_that_share_a_step_stop_where_all_agree_and_say_when_each_step_ran():
    clock, device, step = machine(forward=(0.001, 1.0))
    asked: list[bool] = []

    class Others(Peers):
        def agree(self, here: bool) -> bool:
            asked.append(here)
            return len(asked) in (3, 5)  # whatever this process would do

        def barrier(self) -> None:
            step.order.append("barrier")
            clock.pass_s(7.0)  # must be in no figure

    settings = Settings(warmup_floor=1, warmup_cap=9, warmup_seconds=0, steps_floor=1, steps_cap=9, seconds=0)
    found = measure({"step": step}, device=device, settings=settings, clock=clock, peers=Others())["step"]
    assert (len(found.samples["step"].warmup_s), found.samples["step"].count) == (3, 2)
    assert asked == [True] * 5
    assert [end - begin for begin, end in found.spans_ns] == [round(s * 1e9) for s in found.samples["step"].values_s]
    assert found.spans_ns[1][0] - found.spans_ns[0][1] == 107_000_000_000
    assert step.order == ["prepare", "barrier", "forward"] * 5
