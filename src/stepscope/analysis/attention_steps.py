"""A model's step with each attention beside the same with another: groups, what moved, and what is told apart.

Each step is measured in a process of its own, and two processes differ though they do the same. So what attention
cannot have changed stands beside what it changed: the optimizer's phase, and the kernels of other modules. A difference
that is no larger than there is not called a gain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope.analysis.metrics import median_s, samples_of
from stepscope.core.run import Run
from stepscope.core.samples import Ratio
from stepscope.core.units import format_share

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest  # a module that needs polars

BASELINE = "reference"
LEAST = 0.005
"""Of the step: what moved less is not named."""
OUTSIDE_PHASE = "optimizer"
"""The phase that no attention runs in."""
OUTSIDE_FAMILIES = ("optimizer", "normalisation", "embedding/gather", "random", "communication")
"""Kernels that no attention launches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCell:
    """A run, and what is kept of its captured step, if it has one."""

    run: Run
    digest: "TraceDigest | None" = None

    @property
    def attention(self) -> str:
        return self.run.workload.attention

    @property
    def group(self) -> tuple[object, ...]:
        """Equal where nothing but the attention differs, and the device is the same."""
        fields = {field: value for field, value in self.run.workload.identity.items() if field != "attention"}
        environment = self.run.environment
        return (repr(fields), environment.device_name if environment else None)

    @property
    def name(self) -> str:
        """Model, batch, sequence and dtype, and what else is not as usual: two groups have two names."""
        of = self.run.workload
        parts = [of.model.name, f"b{of.batch_size}", f"s{of.seq_len}", of.dtype]
        parts += [of.phase] if of.phase != "train" else []
        parts += [f"compile-{of.compile}"] if of.compile != "eager" else []
        parts += [of.optimizer] if of.optimizer not in (None, "adamw-foreach") else []
        parts += [f"checkpoint-{of.checkpointing}"] if of.checkpointing != "none" else []
        parts += [f"accumulate-{of.accumulation}"] if of.accumulation != 1 else []
        return " ".join(parts)

    @property
    def measured(self) -> bool:
        return self.run.status == "done" and bool(median_s(self.run, "step"))

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


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Cells that differ in their attention alone; the first is what the others are set beside."""

    cells: tuple[StepCell, ...]

    @property
    def base(self) -> StepCell:
        return self.cells[0]

    @cached_property
    def noise(self) -> float | None:
        """By what share of the base's the optimizer's phase differs at most, though no attention runs in it; None
        where there is no such phase.
        """
        times = [median_s(cell.run, OUTSIDE_PHASE) for cell in self.cells]
        base, *others = times
        found = [abs(other / base - 1) for other in others if other and base]
        return max(found, default=None)

    def speed_up(self, cell: StepCell, over: StepCell | None = None) -> Ratio | None:
        """Of the whole step over another's, the base's if none is named."""
        over = over or self.base
        own, base = samples_of(cell.run, "step"), samples_of(over.run, "step")
        return own.speedup_over(base) if own and base and cell is not over else None

    def why_alike(self, cell: StepCell, other: StepCell) -> str:
        """Why nothing can be said of who is faster; empty where it can."""
        ratio = self.speed_up(cell, other)
        if ratio is None:
            return "one has no time"
        if ratio.undecided:
            return ratio.why_undecided
        change = abs(1 / ratio.value - 1)
        if self.noise is not None and change <= self.noise:
            return (
                f"the steps differ by {format_share(change)}, and the optimizer, which runs no attention, by up to "
                f"{format_share(self.noise)} between these runs"
            )
        return ""

    def moves(self, cell: StepCell) -> list[tuple[str, float]]:
        """(family, seconds a step more than the base's), the largest changes first; empty without both captures."""
        if not cell.families or not self.base.families:
            return []
        return _changes(self.base.families, cell.families)

    def moves_inside(self, cell: StepCell) -> list[tuple[str, float]]:
        """The same of kernels that attention itself launched; empty unless both captures say which."""
        if not cell.inside or not self.base.inside:
            return []
        return _changes(self.base.inside, cell.inside)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float]]:
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**before, **after}]
    return sorted(changes, key=lambda change: -abs(change[1]))


def group_cells(found: Iterable[StepCell]) -> tuple[list[StepGroup], list[StepCell]]:
    """Groups with a time, `reference` first in each, and the cells without. Of several runs of one cell, one with a
    capture goes before one without, then the newest.
    """
    best: dict[tuple[object, ...], StepCell] = {}
    for cell in sorted(found, key=lambda c: (c.measured, c.digest is not None, c.run.created, c.run.id)):
        best[*cell.group, cell.attention] = cell
    groups: dict[tuple[object, ...], list[StepCell]] = {}
    for cell in sorted(best.values(), key=lambda c: (c.run.created, c.run.id)):
        if cell.measured:
            groups.setdefault(cell.group, []).append(cell)
    ordered = [
        StepGroup(cells=tuple(sorted(cells, key=lambda cell: cell.attention != BASELINE))) for cells in groups.values()
    ]
    return ordered, [cell for cell in best.values() if not cell.measured]
