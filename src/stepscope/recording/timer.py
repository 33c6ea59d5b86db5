"""The one timing loop of stepscope.

A subject's step is a sequence of phases. Each step is timed in two ways at once. Marks in the device's stream time
each phase, without synchronisation between phases. The host's clock times the whole step, around a synchronised
region. The two must agree, which `runs/checks` checks. Phases of one name, such as those of micro-batches,
count as one: their times in a step add up.

    mark  forward  mark  backward  mark  optimizer  mark          device events
    |t0 -------------------------------------- issued -- sync -- t1|   host clock

`host` is t(issued) - t0: the time that the host needed to issue the step to the device.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.core.range_names import STEP
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.recording.device import Clock, Device, HostClock, Mark
from stepscope.recording.ranges import named_range
from stepscope.recording.step import Driven, Recorder, drive

STEADY_WINDOW = 3
STEADY_TOLERANCE = 0.03
"""The share by which the medians of two successive windows of steps may differ when warm-up ends."""


class Peers:
    """The other processes that take part in each step; none, unless a subclass knows some."""

    def agree(self, here: bool) -> bool:
        """What the first of all these processes says, in each of them."""
        return here

    def barrier(self) -> None:
        """Return when all of them have come here."""


ALONE = Peers()
"""No other process takes part."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a measurement, for a display."""

    stage: str
    """The name of the stage: warm-up or measure."""
    done: int
    """Steps of the stage that are done."""
    last_step_s: float
    fraction: float
    """The share of the stage that is done, by steps or by time, whichever ends first."""


@dataclass(kw_only=True)
class Measurement:
    """The times of one subject's steps."""

    samples: dict[str, Samples]
    warmup_steady: bool | None
    """Whether the steps were steady when warm-up ended; None if there were too few to decide."""
    interrupted: bool = False
    spans_ns: tuple[tuple[int, int], ...] = ()
    """When each measured step began and ended, by the host's clock: for steps that other processes take part in."""


class StepFailed(Exception):
    """A phase raised an exception, which is the cause. `partial` holds what was measured before."""

    def __init__(self, subject: str, stage: str, phase: str | None, partial: dict[str, Measurement]) -> None:
        super().__init__(f"{subject}: {phase or 'step'} failed during {stage}")
        self.subject, self.stage, self.phase, self.partial = subject, stage, phase, partial


@dataclass
class _Record:
    """The times of one subject so far, with one entry for each step."""

    names: tuple[str, ...]
    rows: list[tuple[float, ...]] = field(default_factory=list)
    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    warmups: int = 0
    steady: bool | None = None

    def steps_s(self) -> list[float]:
        return [row[0] for row in self.rows]


class _Stopwatch(Recorder):
    """The marks and clock readings of one step."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._marks: list[Mark] = []
        self.start_ns = self._issued_ns = self.end_ns = 0
        self.phases: list[str] = []
        """The names of the phases that have begun."""

    def step_begins(self) -> None:
        self.start_ns = self._clock.now_ns()
        self._marks.append(self._device.mark())

    def phase_begins(self, name: str) -> None:
        self.phases.append(name)

    def phase_ends(self, name: str) -> None:
        self._marks.append(self._device.mark())

    def step_ends(self) -> None:
        self._issued_ns = self._clock.now_ns()
        self._device.synchronize()
        self.end_ns = self._clock.now_ns()

    def row(self) -> tuple[float, ...]:
        """The seconds of the step, of the host, and of each phase by name."""
        phases_s: dict[str, float] = {}
        for name, (before, after) in zip(self.phases, itertools.pairwise(self._marks), strict=True):
            phases_s[name] = phases_s.get(name, 0.0) + self._device.elapsed_s(before, after)
        times_s = ((end_ns - self.start_ns) * 1e-9 for end_ns in (self.end_ns, self._issued_ns))
        return (*times_s, *phases_s.values())


AFTER_S = 2.0
"""Seconds that a TimeLimit leaves for what is looked at after the timed steps."""


@dataclass(eq=False)
class TimeLimit:
    """The time that a whole run may take from the end of its first step on, which may compile: that of warm-up, of the
    measured steps, and of what is looked at after them."""

    seconds: float
    """The time that the measured steps may take."""
    now: Callable[[], float] = time.monotonic
    _end_s: float = field(init=False, default=math.inf)

    def begin(self) -> None:
        """Begin to count; later calls change nothing."""
        if self._end_s == math.inf:
            self._end_s = self.now() + self.seconds + max(1.0, self.seconds / 5) + AFTER_S

    def left_s(self) -> float:
        """Seconds that are left; below zero where it is over."""
        return self._end_s - self.now()


def measure(
    subjects: Mapping[str, Driven],
    *,
    device: Device,
    settings: Settings,
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    before_measuring: Callable[[], None] | None = None,
    recorders: Sequence[Recorder] = (),
    peers: Peers = ALONE,
    limit: TimeLimit | None = None,
) -> dict[str, Measurement]:
    """Time the steps of one or several subjects; several are interleaved, one step each in turn, in an order that is
    reversed each time.

    Each subject warms up alone until it is steady (between the settings' floor and cap). Ctrl-C returns what was
    measured, marked interrupted. Any other exception of a phase becomes StepFailed with the partial result.

    before_measuring runs once, after the last warm-up step and before the first measured one. The device is idle
    meanwhile, so it must be short. Every step begins on an idle device; only this gap differs from the others.
    Recorders are told of every step. Their work counts in the step's time.
    peers: the other processes that take part in each step. All begin it together, and all end warm-up and measuring
    where the first of them does; both is settled between steps, untimed.
    limit: the time of the whole run, for which fewer steps than the settings' floors are taken, one of each at least.
    """
    timer = _Timer(subjects, device, settings, clock or HostClock(), on_progress, recorders, peers, limit)
    try:
        for name in subjects:
            timer.warm_up(name)
        timer.stage = "measure"
        if before_measuring:
            before_measuring()
        timer.measure()
    except KeyboardInterrupt:
        return timer.results(interrupted=True)
    except (Exception, SystemExit) as error:  # a user's own step may call sys.exit
        subject, phases = timer.current
        phase = phases[-1] if phases else None
        raise StepFailed(subject, timer.stage, phase, timer.results(interrupted=True)) from error
    return timer.results(interrupted=False)


def measure_one(
    subject: Driven, *, device: Device, settings: Settings, recorders: Sequence[Recorder] = (), peers: Peers = ALONE
) -> dict[str, Samples]:
    """Time the steps of one subject. Raises the exception of its phases, and KeyboardInterrupt."""
    try:
        subjects = {"step": subject}
        measured = measure(subjects, device=device, settings=settings, recorders=recorders, peers=peers)["step"]
    except StepFailed as failure:
        raise failure.__cause__ or failure from None
    if measured.interrupted:
        raise KeyboardInterrupt
    return measured.samples


def timed_steps(
    subject: Driven, device: Device, steps: int, *recorders: Recorder, peers: Peers = ALONE
) -> dict[str, Samples]:
    """Time exactly `steps` steps, without warm-up. peers: the other processes that take part in each."""
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=steps, steps_cap=steps, seconds=0)
    return measure_one(subject, device=device, settings=settings, recorders=recorders, peers=peers)


@dataclass
class _Timer:
    """One call of `measure`, and what it has measured so far."""

    _subjects: Mapping[str, Driven]
    _device: Device
    _settings: Settings
    _clock: Clock
    _on_progress: Callable[[Progress], None] | None
    _recorders: Sequence[Recorder]
    _peers: Peers
    _limit: TimeLimit | None

    def __post_init__(self) -> None:
        self._records = {
            name: _Record(("step", "host", *dict.fromkeys(phase.name for phase in subject.phases)))
            for name, subject in self._subjects.items()
        }
        self.stage = "warm-up"
        self._began_ns = self._clock.now_ns()
        self.current: tuple[str, list[str]] = ("", [])
        """The subject that ran last, and the phases of its step that have begun."""

    def warm_up(self, name: str) -> None:
        settings, record = self._settings, self._records[name]
        floor_ns = self._clock.now_ns()
        fixed = settings.warmup_floor == settings.warmup_cap
        while record.warmups < settings.warmup_cap:
            if record.warmups and not fixed and self._is_late(settings.seconds):
                break
            if record.warmups >= settings.warmup_floor:
                elapsed_s = (self._clock.now_ns() - floor_ns) * 1e-9
                if self._peers.agree(is_steady(record.steps_s()) or elapsed_s >= settings.warmup_seconds):
                    break
            else:
                # The first steps may compile for minutes, so the time limit counts only after the floor.
                floor_ns = self._clock.now_ns()
            self._step(name)
            record.warmups += 1
            if self._limit is not None:
                self._limit.begin()
            self._tell(name, record.warmups, settings.warmup_floor, settings.warmup_cap)
        if record.warmups >= 2 * STEADY_WINDOW:
            record.steady = is_steady(record.steps_s())

    def measure(self) -> None:
        settings = self._settings
        self._began_ns = start_ns = self._clock.now_ns()
        for done in range(1, settings.steps_cap + 1):
            # What runs second finds other caches than what runs first: each is first in every other round.
            for name in self._subjects if done % 2 else reversed(list(self._subjects)):
                self._step(name)
                self._tell(name, done, settings.steps_floor, settings.steps_cap)
            elapsed_s = (self._clock.now_ns() - start_ns) * 1e-9
            long_enough = elapsed_s >= settings.seconds * len(self._subjects)
            if self._is_late() or (done >= settings.steps_floor and self._peers.agree(long_enough)):
                break

    def _is_late(self, before_s: float = 0.0) -> bool:
        """Whether the limit leaves less than what comes after the steps takes, and so many seconds before that."""
        return self._limit is not None and self._peers.agree(self._limit.left_s() < AFTER_S + before_s)

    def _step(self, name: str) -> None:
        subject, watch = self._subjects[name], _Stopwatch(self._device, self._clock)
        self.current = (name, watch.phases)
        subject.prepare()
        self._device.synchronize()
        self._peers.barrier()
        with named_range(STEP):
            drive(subject, *self._recorders, watch)
        self._records[name].rows.append(watch.row())
        self._records[name].spans_ns.append((watch.start_ns, watch.end_ns))

    def _tell(self, name: str, done: int, at_least: int, at_most: int) -> None:
        if self._on_progress:
            last = self._records[name].rows[-1][0]
            elapsed_s = (self._clock.now_ns() - self._began_ns) * 1e-9
            seconds = self._settings.seconds if self.stage == "measure" else self._settings.warmup_seconds
            by_time = min(1.0, elapsed_s / seconds if seconds else 1.0)
            fraction = max(done / max(1, at_most), min(by_time, done / max(1, at_least)))
            self._on_progress(Progress(stage=self.stage, done=done, last_step_s=last, fraction=fraction))

    def results(self, interrupted: bool) -> dict[str, Measurement]:
        results: dict[str, Measurement] = {}
        for name, record in self._records.items():
            warmups, measured = record.rows[: record.warmups], record.rows[record.warmups :]
            samples = {
                part: Samples(
                    values_s=tuple(row[i] for row in measured),
                    warmup_s=tuple(row[i] for row in warmups),
                    clock=self._clock.name if part in ("step", "host") else self._device.clock_name,
                )
                for i, part in enumerate(record.names)
            }
            spans_ns = tuple(record.spans_ns[record.warmups :])
            results[name] = Measurement(
                samples=samples, warmup_steady=record.steady, interrupted=interrupted, spans_ns=spans_ns
            )
        return results


def is_steady(steps_s: Sequence[float]) -> bool:
    """Whether the last two windows of steps have the same median within the tolerance."""
    if len(steps_s) < 2 * STEADY_WINDOW:
        return False
    earlier = statistics.median(steps_s[-2 * STEADY_WINDOW : -STEADY_WINDOW])
    later = statistics.median(steps_s[-STEADY_WINDOW:])
    return math.isclose(earlier, later, rel_tol=STEADY_TOLERANCE)
