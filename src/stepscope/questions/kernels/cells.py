"""The cells of the kernel study: a run with what was kept of its captured step, by one profiler or by two."""

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from stepscope.core.evidence import Capture
from stepscope.core.model_config import ModelConfig
from stepscope.core.range_names import BACKWARD, FORWARD, STEP
from stepscope.questions.compare.comparison import ComparedRun
from stepscope.runs.metrics import median_s
from stepscope.traces.captures.digest import KEPT_ROWS, TraceDigest
from stepscope.traces.captures.summary import FORWARD_AND_BACKWARD, KernelRow


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedCell(ComparedRun):
    """A run and the digest of its capture; `other` is that of another profiler's capture of the same cell."""

    FIELD: ClassVar[str] = "phase"
    BASELINE: ClassVar[str] = "forward"

    other: TraceDigest | None = None

    @property
    def tables(self) -> TraceDigest:
        """The digest of the run's own capture: a cell of this study has one."""
        assert self.digest is not None, "a cell of the kernel study is a captured run"
        return self.digest

    @property
    def cell(self) -> str:
        return "-".join(self.run.workload.words())

    @property
    def trains(self) -> bool:
        return not self.is_base

    @property
    def order(self) -> tuple[int, int, str, bool]:
        """Small models first, then by sequence length, dtype, inference before training."""
        workload = self.run.workload
        model = workload.model
        size = model.layers * model.d_model if isinstance(model, ModelConfig) else self.parameters
        return (size, workload.seq_len or 0, workload.dtype, self.trains)

    @property
    def capture(self) -> Capture | None:
        """The steps that the digest is of, as the run timed them."""
        tool = self.tables.tool
        return next((capture for capture in self.run.evidence.captures if capture.tool == tool), None)

    @property
    def slowed(self) -> float | None:
        """How many times as long a step takes under the profiler."""
        traced, plain = self.capture.step_s if self.capture else None, median_s(self.run, STEP)
        return traced / plain if traced and plain else None

    def kernel_ns(self, part: str) -> float | None:
        """Kernel time of a phase or of the whole `step`; None where no kernel ran in it."""
        if part == STEP:
            return self.tables.busy_ns / self.tables.steps
        phase = self.tables.phase(part)
        return phase.busy_ns if phase else None

    def family_ns(self, family: str) -> float:
        return sum(row.busy_ns for row in self.tables.families if row.family == family)

    def longest(self, phase: str) -> KernelRow | None:
        """The kernel that takes longest in a phase, or in forward and backward together."""
        if phase == FORWARD_AND_BACKWARD:
            return self.tables.top_together[0] if self.tables.top_together else longest_of_both(self.tables)
        return next((row for row in self.tables.top if row.phase == phase), None)


def longest_of_both(digest: TraceDigest) -> KernelRow | None:
    """What takes longest in forward and backward together, by the longest kernels of each.

    None where they do not tell: a kernel that is not among the longest of a phase may take as long there as the last
    of these.
    """
    names = (FORWARD, BACKWARD)
    phases = [digest.phase(name) for name in names]
    kept = [{row.name: row for row in digest.top if row.phase == name} for name in names]
    if not all(phases) or not all(kept):
        return None
    unseen = [min(row.busy_ns for row in rows.values()) if len(rows) >= KEPT_ROWS else 0.0 for rows in kept]
    found = {name: [rows[name] for rows in kept if name in rows] for name in (*kept[0], *kept[1])}
    known = {name: sum(row.busy_ns for row in rows) for name, rows in found.items()}
    first = max(known, key=lambda name: known[name])
    at_most = [
        known[name] + sum(more for rows, more in zip(kept, unseen, strict=True) if name not in rows) for name in known
    ]
    if max(*at_most, sum(unseen)) > known[first]:
        return None
    return msgspec.structs.replace(
        found[first][0],
        phase=FORWARD_AND_BACKWARD,
        calls=sum(row.calls for row in found[first]),
        busy_ns=known[first],
        share=known[first] / sum(phase.busy_ns for phase in phases if phase),
    )


def busiest_families(cells: list[CapturedCell]) -> list[str]:
    """The six families that take most time over all cells."""
    families = sorted({row.family for cell in cells for row in cell.tables.families})
    return sorted(families, key=lambda family: -sum(cell.family_ns(family) for cell in cells))[:6]
