"""Times the parts of watched steps on one clock: events on a GPU, which are read later, or else the host's clock.

A step lasts from the end of the step before it to its own end. The stopwatch does not wait for the device.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, REST, STEP, TIMED
from stepscope.core.samples import Samples
from stepscope.recording.step import Recorder

Mark = Any
_SHORTEST_S = 1e-9
"""A shorter time is only the rounding of a difference."""


class Marks(Protocol):
    """A clock whose readings are taken at once and read later."""

    clock_name: str
    mark: Callable[[], Mark]
    """Puts a mark at this point of the work."""

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks that were reached."""
        ...

    def reached(self, mark: Mark) -> bool:
        """Whether the device has reached this mark."""
        ...

    def wait(self, mark: Mark) -> None:
        """Wait until the device has reached this mark."""
        ...

    def free(self, marks: list[Mark]) -> None:
        """Take back marks that have been read, to use them again."""
        ...


class HostMarks:
    """Marks by the host's clock, for devices whose work is done when the call returns."""

    clock_name = "perf_counter_ns"

    def __init__(self) -> None:
        self.mark = time.perf_counter_ns

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return (end - start) * 1e-9

    def reached(self, mark: Mark) -> bool:
        return True

    def wait(self, mark: Mark) -> None:
        pass

    def free(self, marks: list[Mark]) -> None:
        pass


class EventMarks:
    """Marks by events in a GPU's stream. They are made beforehand, since making one takes the host longer than
    recording it."""

    clock_name = "cuda events"

    def __init__(self, device: torch.device, beforehand: int) -> None:
        stream = torch.cuda.current_stream(device)
        free = self._free = [torch.cuda.Event(enable_timing=True) for _ in range(beforehand)]
        record: Any = torch.cuda.Event.__mro__[1].record  # that of Event itself only looks for the stream
        for event in free:
            record(event, stream)  # The driver makes an event only when it is recorded for the first time.

        def mark() -> Mark:
            event = free.pop() if free else torch.cuda.Event(enable_timing=True)
            record(event, stream)
            return event

        self.mark = mark

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) * 1e-3

    def reached(self, mark: Mark) -> bool:
        return mark.query()

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def free(self, marks: list[Mark]) -> None:
        self._free += marks


def marks_for(device: torch.device, beforehand: int) -> Marks:
    """The clock of a device; `beforehand` marks of it are made now."""
    return EventMarks(device, beforehand) if device.type == "cuda" else HostMarks()


@dataclass(slots=True)
class _Row:
    """The marks of one step: where it began, where each part began, and where it ended."""

    names: list[str]
    marks: list[Mark]


class Stopwatch(Recorder):
    """Marks every change from one part of a step to the next."""

    def __init__(self, marks: Marks) -> None:
        self._marks, self._mark = marks, marks.mark
        self._names: list[str] = []
        self._row: list[Mark] = []
        self._last: Mark = None
        self._waiting: list[_Row] = []
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
        self._waiting.append(_Row(self._names, self._row))

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
        for row in self._waiting:
            if wait:
                self._marks.wait(row.marks[-1])
            elif not self._marks.reached(row.marks[-1]):
                break
            self._times.append(self._seconds(row))
            self._entered.append({name: row.names.count(name) for name in (FORWARD, BACKWARD)})
            # The last mark is the next step's first.
            self._marks.free(row.marks[:-1])
            done += 1
        del self._waiting[:done]
        return self._times

    def _seconds(self, row: _Row) -> dict[str, float]:
        elapsed_s, marks = self._marks.elapsed_s, row.marks
        seconds: dict[str, float] = dict.fromkeys((*TIMED, EVALUATION), 0.0)
        for i, name in enumerate(_whole_evaluations(row.names) if EVALUATION in row.names else row.names):
            if name is not REST:
                seconds[name] += elapsed_s(marks[i], marks[i + 1])
        whole = elapsed_s(marks[0], marks[-1])
        rest = whole - sum(seconds.values())
        seconds[REST] = rest if rest > _SHORTEST_S else 0.0
        return {STEP: whole, **seconds}

    def entered(self, name: str, last: int) -> list[int]:
        """How often each of the last steps entered forward, or backward."""
        return [counts[name] for counts in (self._entered[-last:] if last else [])]

    def samples(self, warmups: int) -> dict[str, Samples]:
        """The samples of the step and its parts; the first `warmups` steps are warm-up. Steps that evaluate now and
        then count without their evaluations; where most steps do, that is a part like the others.

        If the device has failed, they are those of the steps that it had finished at the last look.
        """
        with contextlib.suppress(RuntimeError):
            self.read(wait=True)
        rows = self._times
        if not evaluates_in_most(self.evaluations(len(rows) - warmups)):
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


def evaluates_in_most(seconds: Sequence[float]) -> bool:
    """Whether at least half of the steps evaluate, so that it is a part of a step, as a teacher's forward is."""
    return 2 * sum(each > 0 for each in seconds) >= max(1, len(seconds))


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
