"""`stepscope.measure`: the phases of anything, on the one timer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.errors import InputError
from stepscope.core.run import settings_from
from stepscope.core.samples import Samples
from stepscope.recording.device import timing_device
from stepscope.recording.environment import read_environment, resolve_device
from stepscope.recording.step import Phase
from stepscope.recording.timer import StepFailed
from stepscope.recording.timer import measure as measure_steps
from stepscope.runs.answer import answer_times

_TAKEN = ("step", "host")
"""Names of samples that the timer gives itself."""


@dataclass(frozen=True, repr=False)
class Timed(Shown):
    """Times of callables that were run one after the other, as one step, many times."""

    samples: dict[str, Samples]
    """Seconds by phase; of the whole `step`, with the device synchronised at its end; and of the `host`, until it had
    given the step to the device. Each has `values_s`, `median_s`, `interval()` and `speedup_over(other)`."""
    steady: bool | None
    """Whether the steps were steady when warm-up ended; None where there were too few to tell."""
    answer: ShownAnswer
    """Medians and intervals by phase."""


@dataclass(frozen=True)
class _Callables:
    """Callables as a subject that the timer drives."""

    phases: tuple[Phase, ...]
    before: Callable[[], object] | None

    def prepare(self) -> None:
        if self.before is not None:
            self.before()


def measure(
    callables: Mapping[str, Callable[[], object]] | Callable[[], object],
    *,
    prepare: Callable[[], object] | None = None,
    device: str = "auto",
    warmup: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
) -> Timed:
    """Time callables as the phases of one step, with the timer that times training steps.

        timed = stepscope.measure({"forward": forward, "backward": backward})
        timed                                        # in a notebook: a table of medians and intervals
        timed.samples["forward"].median_s            # seconds
        timed.samples["forward"].interval()          # 95 % of this process, as .low and .high, or None

    callables: functions without arguments, by the names of their phases, which run in this order in each step; or one
    function, whose phase has its name. Phases are timed by marks in the device's own stream, without synchronising
    between them; the whole step by the host's clock, with the device idle before it and after it.
    prepare: what runs before each step, untimed.
    device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`: whose work is timed.
    warmup, steps: exactly so many. If left out, 3 to 30 steps warm up until they are steady, and 10 to 100 are timed.
    seconds: how long to go on measuring between the least and the most steps; 5 if left out.

    Raises InputError for what cannot be called, a name that is taken (`step`, `host`) and a device that is not there;
    and whatever a callable raises.
    """
    phases = _phases(callables)
    if prepare is not None and not callable(prepare):
        raise InputError(f"prepare is {type(prepare).__name__}, which cannot be called: give a function")
    chosen = resolve_device(device)
    subject = _Callables(phases, prepare)
    try:
        timed = measure_steps(
            {"step": subject}, device=timing_device(chosen), settings=settings_from(warmup, steps, seconds)
        )["step"]
    except StepFailed as failure:
        raise failure.__cause__ or failure from None
    if timed.interrupted:
        raise KeyboardInterrupt
    answer = answer_times(timed.samples, timed.warmup_steady, read_environment(chosen))
    return Timed(timed.samples, timed.warmup_steady, shown_answer(answer))


def _phases(callables: object) -> tuple[Phase, ...]:
    if callable(callables) and not isinstance(callables, Mapping):
        name = getattr(callables, "__name__", type(callables).__name__)
        return _phases({f"{name}()" if name in _TAKEN else name: callables})
    if not isinstance(callables, Mapping) or not callables:
        fault = "are empty" if isinstance(callables, Mapping) else f"are {type(callables).__name__}"
        raise InputError(f"the callables {fault}: give a function, or functions by the names of their phases")
    phases: list[Phase] = []
    for name, run in cast("Mapping[Any, Any]", callables).items():
        if not isinstance(name, str) or not name or name in _TAKEN:
            reserved = f"{' and '.join(_TAKEN)} are the timer's own names"
            raise InputError(f"a phase is named {name!r}: give it a name of its own; {reserved}")
        if not callable(run):
            raise InputError(f"the phase {name!r} is {type(run).__name__}, which cannot be called: give a function")
        phases.append(Phase(name=name, run=run))
    return tuple(phases)
