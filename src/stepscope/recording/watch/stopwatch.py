"""Times the parts of watched steps on one clock: events on a GPU, which are read later, or else the host's clock.

A step lasts from the end of the step before it to its own end. The stopwatch does not wait for the device.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, REST, STEP, TIMED
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.recording.step import Recorder
from stepscope.recording.timer import STEADY_WINDOW, is_steady

Mark = Any
_SHORTEST_S = 1e-9
"""A shorter time is only the rounding of a difference."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """A clock whose readings are taken at once and read later. As it is, it is the host's clock, for devices whose work
    is done when the call returns."""

    clock_name: str = "perf_counter_ns"
    mark: Callable[[], Mark] = time.perf_counter_ns
    """Puts a mark at this point of the work."""
    elapsed_s: Callable[[Mark, Mark], float] = lambda start, end: (end - start) * 1e-9
    """Seconds between two marks that were reached."""
    reached: Callable[[Mark], bool] = lambda _: True
    """Whether the device has reached this mark."""
    wait: Callable[[Mark], object] = lambda _: None
    """Waits until the device has reached this mark."""
    free: Callable[[list[Mark]], object] = lambda _: None
    """Takes back marks that have been read, to use them again."""


def marks_for(device: torch.device, beforehand: int) -> Marks:
    """The clock of a device: events in a GPU's stream, of which `beforehand` are made now, since making one takes the
    host longer than recording it."""
    if device.type != "cuda":
        return Marks()
    stream = torch.cuda.current_stream(device)
    free = [torch.cuda.Event(enable_timing=True) for _ in range(beforehand)]
    record: Any = torch.cuda.Event.__mro__[1].record  # that of Event itself only looks for the stream
    for event in free:
        record(event, stream)  # The driver makes an event only when it is recorded for the first time.

    def mark() -> Mark:
        event = free.pop() if free else torch.cuda.Event(enable_timing=True)
        record(event, stream)
        return event

    return Marks(
        clock_name="cuda events",
        mark=mark,
        elapsed_s=lambda start, end: start.elapsed_time(end) * 1e-3,
        reached=lambda event: event.query(),
        wait=lambda event: event.synchronize(),
        free=free.extend,
    )


class Stopwatch(Recorder):
    """Marks every change from one part of a step to the next."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self._mark = marks, marks.mark
        self._names: list[str] = []
        self._row: list[Mark] = []
        self._last: Mark = None
        self._waiting: list[tuple[list[str], list[Mark]]] = []
        """For each step the names of its parts, and its marks: where each part began, and where the last ended."""
        self._times: list[dict[str, float]] = []
        self._entered: list[dict[str, int]] = []
        """How often each step entered forward and backward."""

    @property
    def count(self) -> int:
        """Steps that have ended."""
        return len(self._times) + len(self._waiting)

    def step_begins(self) -> None:
        self._names = [REST]
        self._row = [self._mark() if self._last is None else self._last]

    def phase_begins(self, name: str) -> None:
        self._names.append(name)
        self._row.append(self._mark())

    def phase_ends(self, name: str) -> None:
        self._names.append(REST)
        self._row.append(self._mark())

    def evaluation_begins(self) -> None:
        self.phase_begins(EVALUATION)

    def evaluation_ends(self) -> None:
        self.phase_ends(EVALUATION)

    def step_ends(self) -> None:
        self._last = self._mark()
        self._row.append(self._last)
        self._waiting.append((self._names, self._row))

    def break_off(self) -> None:
        """Let the next step begin with a mark of its own, since something else comes between it and the last one."""
        self._last = None

    def drop_last(self) -> None:
        """Forget the last step."""
        self.read(wait=True)
        del self._times[-1:], self._entered[-1:]

    def drop_all_but(self, last: int) -> None:
        """Forget the times of all steps except the last ones."""
        self.read()
        too_many = max(0, self.count - last)
        del self._times[:too_many], self._entered[:too_many]

    def read(self, *, wait: bool = False) -> list[dict[str, float]]:
        """Seconds by name, of the step and of each of its parts, for each step that the device has finished.

        With `wait`, for all steps. The parts of a step add up to it.
        """
        done = 0
        for names, marks in self._waiting:
            if wait:
                self._marks.wait(marks[-1])
            elif not self._marks.reached(marks[-1]):
                break
            seconds: dict[str, float] = dict.fromkeys((*TIMED, EVALUATION), 0.0)
            for i, name in enumerate(_whole_evaluations(names) if EVALUATION in names else names):
                if name is not REST:
                    seconds[name] += self._marks.elapsed_s(marks[i], marks[i + 1])
            whole = self._marks.elapsed_s(marks[0], marks[-1])
            rest = whole - sum(seconds.values())
            seconds[REST] = rest if rest > _SHORTEST_S else 0.0
            self._times.append({STEP: whole, **seconds})
            self._entered.append({name: names.count(name) for name in (FORWARD, BACKWARD)})
            # The last mark is the next step's first.
            self._marks.free(marks[:-1])
            done += 1
        del self._waiting[:done]
        return self._times

    def entered(self, name: str, last: int) -> list[int]:
        """How often each of the last steps entered forward, or backward."""
        return [counts[name] for counts in (self._entered[-last:] if last else [])]

    def samples(self, warmups: int) -> dict[str, Samples]:
        """The samples of the step and its parts; the first `warmups` steps are warm-up. Steps that evaluate now and
        then count without their evaluations; where at least half do, that is a part like the others, as a teacher's
        forward is.

        If the device has failed, they are those of the steps that it had finished at the last look.
        """
        with contextlib.suppress(RuntimeError):
            self.read(wait=True)
        rows = self._times
        evaluations = self.evaluations(len(rows) - warmups)
        if 2 * sum(each > 0 for each in evaluations) < max(1, len(evaluations)):
            rows = [{**row, STEP: row[STEP] - row[EVALUATION], EVALUATION: 0.0} for row in rows]
        return {
            name: Samples(
                values_s=tuple(row[name] for row in rows[warmups:]),
                warmup_s=tuple(row[name] for row in rows[:warmups]),
                clock=self._marks.clock_name,
            )
            for name in (STEP, *TIMED, EVALUATION)
            if name is not EVALUATION or any(row[name] for row in rows)
        }

    def evaluations(self, last: int) -> list[float]:
        """Seconds of the evaluation in each of the last steps that were read."""
        return [row[EVALUATION] for row in (self._times[-last:] if last else [])]


def _whole_evaluations(names: Sequence[str]) -> list[str]:
    """The parts of a step in which what lies between two calls of an evaluation (its batches, its metrics) belongs to
    it."""
    whole, last = list(names), None
    for i, name in enumerate(names):
        if name == EVALUATION:
            if last is not None:
                whole[last:i] = [EVALUATION] * (i - last)
            last = i
        elif name not in (REST, DATA):
            last = None
    return whole


# The stage in which a watched loop's steps are timed: warm-up first, then the steps that count.


BEFORE = 2
"""Steps that pass until it is known what a step is. They also warm the loop up."""
SOON_STEADY = BEFORE + 2 * STEADY_WINDOW
"""The first step after which it can be told whether steps are steady."""
_MOST_WARM_ROWS = 30
_READ_EVERY = 1000
"""Steps between two looks at what the device has finished, each of which delays the loop. A device that fails takes
the times of at most these steps with it."""


class TimedSteps:
    """Times steps until there are enough. Warm-up and measuring end as the settings say, or at given steps.

    A stage may have two parts, where it begins twice: the fewest steps that are enough, and when other stages had their
    steps, the rest.
    """

    name = "measure"

    def __init__(
        self,
        stopwatch: Stopwatch,
        settings: Settings,
        *,
        between: tuple[int, int] | None = None,
        before_measuring: Callable[[], None] = lambda: None,
        after_measuring: Callable[[], None] = lambda: None,
        in_two_parts: bool = False,
    ) -> None:
        """between: the first step that is timed, and the first after it that is not. If it is None, the settings
        decide.

        `before_measuring` delays the loop, so one more step passes before the first step that counts.
        """
        self._stopwatch, self._settings, self._between = stopwatch, settings, between
        self.recorders: tuple[Recorder, ...] = (stopwatch,)
        self._before, self._after = before_measuring, after_measuring
        self._began_s = self._measuring_since_s = 0.0
        self._last_step = 0
        self._warm = 0
        """The number of the stopwatch's rows that are warm-up."""
        self._settled = self._ready = self._resumes = False
        self._in_two_parts = in_two_parts
        self._before_s = 0.0
        """Seconds of measuring in the part before this one."""
        self.steady: bool | None = None
        self.spans: list[tuple[int, int]] = []
        """The numbers of the steps that count: the first and the last of each part that is over."""

    @property
    def measured(self) -> int:
        """Steps that count, so far."""
        return self._stopwatch.count - self._warm if self._ready else 0

    def begins(self, step: int) -> None:
        if self._ready:
            self._resumes = True
            self._stopwatch.break_off()
            self._before()
            return
        self._began_s = time.perf_counter()
        if self._between is not None and step >= self._between[0] - 1:
            self._prepare()
        if self._between is not None and step >= self._between[0]:
            self._measure()

    def is_over(self, step: int) -> bool:
        self._last_step = step
        if self._resumes:  # The step after the other stages is like the one before those that count.
            self._resumes = False
            self._stopwatch.drop_last()
            self._measuring_since_s = time.perf_counter()
            return self._enough(step)
        if self._ready:
            return self._enough(step)
        if self._settled:
            self._measure()
            return False
        if self._between is not None:
            if self._stopwatch.count >= 2 * _MOST_WARM_ROWS:
                self._stopwatch.drop_all_but(_MOST_WARM_ROWS)
            if step + 2 >= self._between[0]:
                self._prepare()
            return False
        if self._is_warm():
            self._prepare()
        return False

    def ends(self) -> None:
        if self._resumes:  # The loop has ended before a step counted.
            return
        count = self.samples()[STEP].count - sum(last - first + 1 for first, last in self.spans)
        if count > 0:
            self.spans.append((self._last_step - count + 1, self._last_step))
        self._before_s += time.perf_counter() - self._measuring_since_s
        self._after()

    def samples(self) -> dict[str, Samples]:
        """The samples so far. Where the loop ended in warm-up, or as that was over, its last steps count, from the
        floor of warm-up on; but no step counts before the given steps."""
        count = self._stopwatch.count
        if self._between is not None and not self.measured:
            return self._stopwatch.samples(count)
        warm = self._warm if self.measured else min(max(0, self._settings.warmup_floor - BEFORE), max(0, count - 1))
        return self._stopwatch.samples(warm)

    def entered(self, name: str, count: int) -> list[int]:
        """How often each of the `count` steps that `samples` gave entered forward, or backward."""
        return self._stopwatch.entered(name, count)

    def evaluations(self, count: int) -> list[float]:
        """Seconds of the evaluation in each of the `count` steps that `samples` gave."""
        return self._stopwatch.evaluations(count)

    def _is_warm(self) -> bool:
        settings, rows = self._settings, self._stopwatch.read()
        done = self._stopwatch.count + BEFORE
        if done < settings.warmup_floor:
            self._began_s = time.perf_counter()  # The first steps may compile for minutes.
            return False
        times = [row[STEP] for row in rows]
        too_long = time.perf_counter() - self._began_s >= settings.warmup_seconds
        return done >= settings.warmup_cap or too_long or is_steady(times)

    def _prepare(self) -> None:
        self._settled = True
        times = [row[STEP] for row in self._stopwatch.read()]
        self.steady = is_steady(times) if len(times) >= 2 * STEADY_WINDOW else None
        self._stopwatch.break_off()
        self._before()

    def _measure(self) -> None:
        self._ready = True
        self._warm = self._stopwatch.count
        self._measuring_since_s = time.perf_counter()

    def _enough(self, step: int) -> bool:
        settings, done = self._settings, self._stopwatch.count - self._warm
        if done % _READ_EVERY == 0:
            self._stopwatch.read()
        if self._between is not None:
            return step + 1 >= self._between[1]
        if done >= settings.steps_cap:
            return True
        measuring_s = self._before_s + time.perf_counter() - self._measuring_since_s
        first_part = self._in_two_parts and not self.spans
        return done >= settings.steps_floor and (first_part or measuring_s >= settings.seconds)
