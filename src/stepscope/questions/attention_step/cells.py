"""A model's steps with different attentions, side by side: groups, what moved, and what can be told apart.

Each step is measured in a process of its own, and two processes differ even if they do the same. So a change is set
beside the changes of what attention cannot affect: the optimizer's phase, and the kernels of other modules. A
difference that is no larger than those is not called a gain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stepscope.core.range_names import OPTIMIZER
from stepscope.core.units import format_share
from stepscope.questions.compare.comparison import ComparedRun, Comparison, Pair, compare_runs
from stepscope.runs.metrics import median_s

LEAST = 0.005
"""Share of the step: a change that is smaller is not named."""
OUTSIDE_PHASE = OPTIMIZER
"""The phase that no attention runs in."""
OUTSIDE_FAMILIES = ("optimizer", "normalisation", "embedding/gather", "random", "communication")
"""Kernels that no attention launches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCell(ComparedRun):
    """A training step with one attention."""

    FIELD = "attention"
    BASELINE = "reference"
    WITH_BACKWARD = True

    @property
    def name(self) -> str:
        """Model, batch, sequence and dtype, and what else is not as usual: two groups have two names."""
        usual = ["phase"] if self.run.workload.phase == "train" else []
        return " ".join(self.run.workload.words("attention", *usual))

    @property
    def label(self) -> str:
        return f"{self.name} with {self.value}"

    @cached_property
    def families(self) -> dict[str, float]:
        """Seconds of kernel time a step, by family; empty without a capture."""
        found: dict[str, float] = {}
        for row in self.digest.families if self.digest else ():
            found[row.family] = found.get(row.family, 0.0) + row.busy_ns * 1e-9
        return found

    @cached_property
    def inside(self) -> dict[str, float]:
        """The part of it launched by the attention itself, not by its projections; empty where the capture does not
        say (no modules in it, or a compiled step).
        """
        found: dict[str, float] = {}
        for row in self.digest.places if self.digest else ():
            if row.module.rpartition(".")[2] == "attention":
                found[row.family] = found.get(row.family, 0.0) + row.busy_ns * 1e-9
        return found

    @property
    def outside_s(self) -> float:
        """Kernel time a step of everything else, which is the same whatever the attention."""
        return sum(self.families.values()) - sum(self.inside.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPair(Pair[StepCell]):
    """Two steps that differ in their attention alone."""

    @property
    def moves(self) -> list[tuple[str, float]]:
        """(family, seconds a step more than the base's), the largest changes first; empty without both captures."""
        return _changes(self.base.families, self.other.families)

    @property
    def moves_inside(self) -> list[tuple[str, float]]:
        """(family, seconds per step more than the base's) of the kernels that attention launched; empty unless both
        captures say which those are."""
        return _changes(self.base.inside, self.other.inside)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float]]:
    if not before or not after:
        return []
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**before, **after}]
    return sorted(changes, key=lambda change: -abs(change[1]))


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Cells that differ in their attention alone; the first is what the others are set beside."""

    cells: tuple[StepCell, ...]

    @property
    def base(self) -> StepCell:
        return self.cells[0]

    @cached_property
    def pairs(self) -> tuple[StepPair, ...]:
        """Each of the others beside the base."""
        return tuple(StepPair(base=self.base, other=cell) for cell in self.cells[1:])

    @cached_property
    def noise(self) -> float | None:
        """By what share of the base's the optimizer's phase differs at most, though no attention runs in it; None
        where there is no such phase.
        """
        times = [median_s(cell.run, OUTSIDE_PHASE) for cell in self.cells]
        base, *others = times
        found = [abs(other / base - 1) for other in others if other and base]
        return max(found, default=None)

    def why_alike(self, pair: StepPair) -> str:
        """Why nothing can be said of which is faster of two cells of the group; empty where it can."""
        ratio = pair.speed_up
        if ratio.undecided:
            return ratio.why_undecided
        change = abs(1 / ratio.value - 1)
        if self.noise is not None and change <= self.noise:
            return (
                f"the steps differ by {format_share(change)}, and the optimizer, which runs no attention, by up to "
                f"{format_share(self.noise)} between these runs"
            )
        return ""


StepStudy = Comparison[StepCell, StepPair]


def compare_steps(found: Iterable[StepCell]) -> StepStudy:
    """The steps in the order of measuring."""
    return compare_runs(found, StepPair, order=lambda cell: (cell.run.instant, cell.run.id))


def step_groups(study: StepStudy) -> list[StepGroup]:
    """Groups with a time, `reference` first in each."""
    return [StepGroup(cells=cells) for cells in study.groups]
