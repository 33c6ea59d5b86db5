"""The stage in which a watched loop's steps are timed: warm-up first, then the steps that count."""

import time
from collections.abc import Callable

from stepscope.core.range_names import STEP
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.recording.step import Recorder
from stepscope.recording.timer import STEADY_WINDOW, is_steady
from stepscope.recording.watch.stopwatch import Stopwatch

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
    def recorders(self) -> tuple[Recorder, ...]:
        return (self._stopwatch,)

    @property
    def measuring(self) -> bool:
        """Whether the steps that count have begun."""
        return self._ready

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
