"""The search: round after round, the fastest change that surely helps is taken; then the end is confirmed.

It knows neither processes nor clocks: what races, confirms and trains is given. `racing.py` has what measures.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from stepscope.core.own_workload import DrivenWorkload, OwnWorkload
from stepscope.core.parts import PARTS
from stepscope.core.processes import standing
from stepscope.core.tuned import Tried, Tuned, Verdict, change_words
from stepscope.core.units import format_seconds
from stepscope.questions.tuning.rounds import (
    BEFORE,
    MEMORY_AGAIN,
    ROUNDS,
    TOGETHER,
    Change,
    Round,
    blocks,
    changes_of,
    groups_that_may,
    together,
    without,
    without_parts,
)  # fmt: skip

NOT_REACHED = "the time was over"
FAR = 1.15
"""How many times as long as the shortest plan another may be and still be measured: plans of steps that ran are off by
up to a tenth (docs/planning.md)."""


class Bench(Protocol):
    """What measures for a search."""

    def fits(self, workload: DrivenWorkload) -> str | None:
        """Why the step does not fit, by prediction; None where it does, or nothing predicts it."""
        ...

    def planned_s(self, workload: DrivenWorkload) -> float | None:
        """Seconds that the step takes by prediction; None where nothing predicts it."""
        ...

    def race(self, best: DrivenWorkload, other: DrivenWorkload) -> Tried:
        """The other step beside the best one; its round and its change are filled in later."""
        ...

    def time_left(self, baseline: DrivenWorkload, best: DrivenWorkload) -> bool:
        """Whether there is time for another race, and to confirm the best step afterwards."""
        ...


@dataclass
class Search:
    """A search as it goes on: stopped at any moment, it has what it found."""

    baseline: DrivenWorkload
    on_gpu: bool
    kept: frozenset[str] = frozenset()
    best: DrivenWorkload = field(init=False)
    tried: list[Tried] = field(default_factory=list[Tried])

    def __post_init__(self) -> None:
        self.best = self.baseline

    def run(self, bench: Bench, tell: Callable[[str], None] = lambda _: None) -> None:
        """Go through the rounds. A KeyboardInterrupt leaves what was found."""
        for round_ in BEFORE:
            self._go(round_, bench, tell)
        self._go_between("blocks", bench, tell)
        before = self.best
        usual = groups_that_may(before, self.kept) if self.on_gpu else []
        usual = self._go_together(usual, bench, tell)
        taken = self.best != before
        for round_ in ROUNDS:
            if round_.name == MEMORY_AGAIN and self.best == before:
                continue  # it needs what it needed
            self._go(round_, bench, tell)
            if round_.name == MEMORY_AGAIN:
                self._go_between("blocks again", bench, tell)
        if taken:
            self._go(without(usual, before), bench, tell)

    def _go_between(self, name: str, bench: Bench, tell: Callable[[str], None]) -> None:
        """Try as many blocks that keep their products as fit."""
        if "checkpointing" not in self.kept:
            self._go(blocks(name, self.best, lambda step: bench.fits(step) is None), bench, tell)

    def _go_together(self, usual: list[Change], bench: Bench, tell: Callable[[str], None]) -> list[Change]:
        """Try all of these as one change; returns those that were tried last.

        Whether a user's model has modules that other kernels compute, only its process can tell: it makes the model,
        and holds each module against its replacement on the device. Where it has none, the race is refused as soon as
        the model is made. So nobody asks before: the change is tried again without the kernels. Where it then runs,
        they were the reason, and no later round asks for them.
        """
        self._go(together(usual), bench, tell)
        others, tries = without_parts(usual), len(self.tried)
        refused = isinstance(self.best, OwnWorkload) and self._last_verdict(TOGETHER) in ("refused", "failed")
        if not refused or len(others) == len(usual):
            return usual
        because_of = self._last_verdict(TOGETHER)
        self._go(together(others), bench, tell)
        if because_of == "refused" and len(self.tried) > tries and self.tried[-1].ratio is not None:
            self.kept |= PARTS.keys()
        return others

    def _last_verdict(self, round_: str) -> Verdict | None:
        """The verdict of the last change that was tried; None where another round tried it."""
        return self.tried[-1].verdict if self.tried and self.tried[-1].round == round_ else None

    def _go(self, round_: Round, bench: Bench, tell: Callable[[str], None]) -> None:
        if (taken := self._round(round_, bench, tell)) is not None:
            self.best = taken

    def _round(self, round_: Round, bench: Bench, tell: Callable[[str], None]) -> DrivenWorkload | None:
        """Try the changes of a round; returns the step with the one that is taken."""
        raced: list[tuple[int, DrivenWorkload]] = []
        found = list(changes_of(round_, self.best, on_gpu=self.on_gpu, kept=self.kept))
        possible = [made for _, made in found if round_.by_plan and not isinstance(made, str)]
        planned = self._planned(possible, bench) if possible else {}
        least_s = min(planned.values(), default=0.0)
        for change, made in found:
            if isinstance(made, str):
                self._note(round_, change, Tried(round="", change={}, verdict="refused", why=made))
            elif not bench.time_left(self.baseline, self.best):
                self._note(round_, change, Tried(round="", change={}, verdict="not reached", why=NOT_REACHED))
            elif (why := bench.fits(made)) is not None:
                self._note(round_, change, Tried(round="", change={}, verdict="does not fit", why=why))
            elif (far_s := planned.get(made.key, 0.0)) > FAR * least_s:
                why = f"planned to take {format_seconds(far_s)}, and another {format_seconds(least_s)}"
                self._note(round_, change, Tried(round="", change={}, verdict="slower by plan", why=why))
            else:
                tell(f"{round_.name}: {change_words(change)}")
                raced.append((len(self.tried), made))
                self._note(round_, change, bench.race(self.best, made))
        return self._judged(raced)

    def _planned(self, steps: Iterable[DrivenWorkload], bench: Bench) -> dict[str, float]:
        """By key, the seconds that these and the best one take, as far as they are planned; none of what does not
        fit, beside which nothing else is slow."""
        planned = {step.key: bench.planned_s(step) for step in (self.best, *steps) if bench.fits(step) is None}
        return {key: seconds for key, seconds in planned.items() if seconds is not None}

    def _note(self, round_: Round, change: Change, tried: Tried) -> None:
        self.tried.append(msgspec.structs.replace(tried, round=round_.name, change=change))

    def _judged(self, raced: list[tuple[int, DrivenWorkload]]) -> DrivenWorkload | None:
        """Judge the races of a round together, and take the fastest that surely is faster."""
        places = [place for place, _ in raced if self.tried[place].ratio is not None]
        stands = standing(self.tried[place].p_value for place in places)
        faster: list[tuple[float, int]] = []
        for place, stand in zip(places, stands, strict=True):
            tried = self.tried[place]
            if tried.ratio is None or tried.verdict != "undecided":
                continue
            if stand or tried.apart:
                self._set(place, verdict="faster" if tried.ratio < 1 else "slower")
                faster += [(tried.ratio, place)] if tried.ratio < 1 else []
        if not faster:
            return None
        _, place = min(faster)
        self._set(place, verdict="taken")
        return dict(raced)[place]

    def _set(self, place: int, **fields: str) -> None:
        self.tried[place] = msgspec.structs.replace(self.tried[place], **fields)

    def so_far(self, asked: DrivenWorkload) -> Tuned:
        """What was found until now."""
        return Tuned(asked=asked, baseline=self.baseline, best=self.best, tried=tuple(self.tried))
