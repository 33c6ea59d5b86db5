"""What a capture says about a step: phases, families, kernels, modules, and what softmax costs beside its products.

Times are of kernels, summed, per traced step; copies and fills stand apart. Shares are of that kernel time.
"""

from dataclasses import dataclass
from functools import cached_property

import msgspec
import polars as pl

from stepscope.analysis.captures.attribution import ROOT, Attribution
from stepscope.analysis.captures.critical_path import CriticalPath, critical_path
from stepscope.analysis.captures.occupation import Occupation, occupation
from stepscope.analysis.captures.overlap import Overlap, overlap
from stepscope.analysis.kernels.names.decoding import decode
from stepscope.analysis.roofline.roofline import roofline
from stepscope.analysis.roofline.roofs import Roofline
from stepscope.core.attentions import scores_of
from stepscope.core.range_names import ATTENTION_PARTS, GRADIENT_ACCUMULATION, PHASES, RECOMPUTATION, SOFTMAX
from stepscope.core.run import Run
from stepscope.core.shown_text import name_shown
from stepscope.core.workload import Workload
from stepscope.trace.nesting import union
from stepscope.work.attention import attention_product_flops, softmax_flops
from stepscope.work.transformer import products_per_forward, recomputed_products

GEMM = "matrix multiplication"
OUTSIDE = "outside"
"""The phase of what was launched outside the three phases, or by no call that was recorded."""
FORWARD_AND_BACKWARD = "forward + backward"
"""Both phases taken as one."""


_LAYERS_TOGETHER = pl.col("module").cast(pl.String).fill_null("?").str.replace_all(r"(^|\.)\d+(\.|$)", "${1}*${2}")


class PhaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the step. Times and counts are per step.

    `kernels`: graphs recorded as a whole are not counted. `range_ns`: how long its range was open on the host; None
    outside. `product_kernels`: matrix products, the second passes of split ones left out; None on a CPU, whose
    operators call one another. `expected_products`: by the model's sizes, where a run says them. `unprofiled_s`:
    the phase's median when nobody watched, by the device's clock.
    """

    phase: str
    kernels: float
    busy_ns: float
    gemm_ns: float
    range_ns: float | None
    product_kernels: float | None
    expected_products: int | None
    unprofiled_s: float | None

    @property
    def gemm_fraction(self) -> float:
        return self.gemm_ns / self.busy_ns if self.busy_ns else 0.0


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel within one phase, or within forward and backward together, per step.

    `share` is of the kernel time that the rows are of: of the phase, of both phases, or of softmax.
    """

    phase: str
    name: str
    family: str
    calls: float
    busy_ns: float
    share: float


class AttentionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One part of attention in forward, per step: its time and its FLOPs, None where no run says the sizes."""

    part: str
    busy_ns: float
    flops: int | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a summary is limited to: work launched in this step, in this phase, inside ranges of this name.

    `instances`: the ranges that launched some of it, where a range is named. `whole`: the whole capture.
    """

    step: int | None
    phase: str | None
    range: str | None
    instances: int | None
    whole: Attribution

    @property
    def words(self) -> str:
        """The part in words: `forward of step 1, inside range softmax`."""
        step = f"step {self.step}" if self.step is not None else ""
        inside = f"range {name_shown(self.range)}" if self.range is not None else ""
        return ", inside ".join(filter(None, (" of ".join(filter(None, (self.phase, step))), inside)))


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """The tables of one capture, or of a part of it. `run` is the run that left it, if it lies beside one."""

    attribution: Attribution
    run: Run | None
    part: Part | None = None

    @property
    def ranged(self) -> bool:
        """Whether it is of ranges of one name alone."""
        return self.part is not None and self.part.range is not None

    @property
    def has_whole_steps(self) -> bool:
        """Whether no phase and no range was singled out, so that idle time means something."""
        return self.part is None or (self.part.phase is None and not self.ranged)

    @cached_property
    def _kernels(self) -> pl.DataFrame:
        return self.attribution.kernels.select(
            "name",
            "family",
            "module",
            "part",
            "role",
            "duration_ns",
            "kind",
            pl.col("phase").cast(pl.String).fill_null(OUTSIDE).alias("phase"),
        )

    @cached_property
    def phase_names(self) -> list[str]:
        """The phases that any kernel ran in, in the order of a step."""
        present = set(self._kernels["phase"].unique().to_list())
        return [phase for phase in (*PHASES, OUTSIDE) if phase in present]

    @property
    def steps(self) -> int:
        return self.attribution.steps

    @property
    def kernel_count(self) -> int:
        """Kernels (on a CPU: operators) in the capture; whole graphs are not counted."""
        return int((self.attribution.kernels["kind"] != "graph").sum())

    @property
    def busy_ns(self) -> int:
        """Sum of their durations, graphs recorded as a whole included."""
        return int(self.attribution.kernels["duration_ns"].sum())

    @property
    def union_ns(self) -> int:
        """Time during which at least one of them ran, summed over devices."""
        if self.attribution.table.on_cpu:  # an operator's own time lies scattered in its duration: operators' cover
            operators = self.attribution.table.operators
            own = operators if self.part is None else operators[self.attribution.work["operator_row"]]
            merged = union(own, ["process"])
        else:
            merged = union(self.attribution.kernels, ["process", "device"])
        return int((merged["end_ns"] - merged["start_ns"]).sum())

    @property
    def unattributed_ns(self) -> int:
        """Kernel time outside every named range."""
        return int(self.attribution.kernels.filter(~pl.col("ranged"))["duration_ns"].sum())

    @property
    def copies(self) -> tuple[int, int]:
        """Copies and fills: how many, and their summed duration in nanoseconds."""
        rest = self.attribution.work.height - self.attribution.kernels.height
        return rest, self.attribution.busy_ns - self.busy_ns

    @cached_property
    def phases(self) -> tuple[PhaseSummary, ...]:
        """Question (a): each phase's device time beside the unprofiled measurement, and (d) its matrix products."""
        products = self._kernels.filter(pl.col("family") == GEMM)["name"].unique()
        second = [name for name in products.to_list() if decode(name).second_pass]
        is_gemm = pl.col("family") == GEMM
        first_pass = is_gemm & ~pl.col("name").is_in(pl.Series(second, dtype=pl.Categorical()).implode())
        totals = {
            row["phase"]: row
            for row in self._kernels.group_by("phase")
            .agg(
                (pl.col("kind") != "graph").sum().alias("kernels"),
                pl.col("duration_ns").sum().alias("busy"),
                pl.col("duration_ns").filter(is_gemm).sum().alias("gemm"),
                first_pass.sum().alias("products"),
            )
            .iter_rows(named=True)
        }
        return tuple(self._phase(phase, totals[phase]) for phase in self.phase_names)

    def _phase(self, phase: str, total: dict) -> PhaseSummary:
        # What ranges hold of a phase is compared with no figure of the whole phase.
        run = None if self.ranged else self.run
        opened = self.attribution.instances.filter(pl.lit(not self.ranged) & (pl.col("what") == phase))
        sample = run.samples.get(phase) if run else None
        on_cpu = self.attribution.table.on_cpu
        return PhaseSummary(
            phase=phase,
            kernels=total["kernels"] / self.steps,
            busy_ns=total["busy"] / self.steps,
            gemm_ns=total["gemm"] / self.steps,
            range_ns=int((opened["end_ns"] - opened["start_ns"]).sum()) / self.steps if opened.height else None,
            product_kernels=None if on_cpu else total["products"] / self.steps,
            expected_products=_expected_products(run.workload, phase) if run and not on_cpu else None,
            unprofiled_s=sample.median_s if sample and sample.count else None,
        )

    @property
    def gemm_fraction(self) -> float:
        """Share of matrix multiplication in all kernel time."""
        gemm = int(self._kernels.filter(pl.col("family") == GEMM)["duration_ns"].sum())
        return gemm / self.busy_ns if self.busy_ns else 0.0

    @cached_property
    def families(self) -> pl.DataFrame:
        """Per family and phase: calls and busy_ns per step (columns family, phase, calls, busy_ns)."""
        return (
            self._kernels.group_by("family", "phase")
            .agg((pl.len() / self.steps).alias("calls"), (pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .with_columns(pl.col("family").cast(pl.String))
            .sort("busy_ns", "family", "phase", descending=[True, False, False])
        )

    def top_kernels(self, phase: str, top: int = 5, *, without_products: bool = False) -> list[KernelRow]:
        """Questions (b) and (c): the kernels that take longest in a phase, matrix products left out if wanted."""
        mine = self._kernels.filter(pl.col("phase") == phase)
        chosen = mine.filter(pl.col("family") != GEMM) if without_products else mine
        return self._longest(chosen, phase, int(mine["duration_ns"].sum()), top)

    def top_together(self, top: int = 5) -> list[KernelRow]:
        """The kernels that take longest in forward and backward together; none where the capture lacks one of them."""
        if not {"forward", "backward"} <= set(self.phase_names):
            return []
        mine = self._kernels.filter(pl.col("phase").is_in(["forward", "backward"]))
        return self._longest(mine, FORWARD_AND_BACKWARD, int(mine["duration_ns"].sum()), top)

    def softmax_kernels(self, top: int = 5) -> list[KernelRow]:
        """The kernels that softmax is made of in forward; none where attention has no range for it."""
        inside = self._kernels.filter((pl.col("phase") == "forward") & (pl.col("part").cast(pl.String) == SOFTMAX))
        return self._longest(inside, "forward", int(inside["duration_ns"].sum()), top)

    def _longest(self, kernels: pl.DataFrame, phase: str, total: int, top: int) -> list[KernelRow]:
        """By name, the longest first. `total`: the nanoseconds that a share is of."""
        rows = (
            kernels.group_by("name", "family")
            .agg(pl.len().alias("calls"), pl.col("duration_ns").sum().alias("busy_ns"))
            .with_columns(pl.col("name").cast(pl.String))
            .sort(["busy_ns", "name"], descending=[True, False])
            .head(top)
        )
        return [
            KernelRow(
                phase=phase,
                name=row["name"],
                family=row["family"],
                calls=row["calls"] / self.steps,
                busy_ns=row["busy_ns"] / self.steps,
                share=row["busy_ns"] / total if total else 0.0,
            )
            for row in rows.iter_rows(named=True)
        ]

    @cached_property
    def modules(self) -> pl.DataFrame:
        """Per module, those of all layers together (`blocks.*.attention`): `layers`, and busy_ns per step by phase.

        The module is the innermost whose range was open; the rest of a phase is the model itself, module "".
        """
        return (
            self._kernels.with_columns(_LAYERS_TOGETHER.alias("pattern"))
            .group_by("pattern", "phase")
            .agg(
                pl.col("module").n_unique().alias("layers"),
                (pl.col("duration_ns").sum() / self.steps).alias("busy_ns"),
                (pl.col("duration_ns").filter(pl.col("family") == GEMM).sum() / self.steps).alias("gemm_ns"),
            )
            .rename({"pattern": "module"})
            .sort("busy_ns", "module", "phase", descending=[True, False, False])
        )

    @cached_property
    def places(self) -> pl.DataFrame:
        """Per module, named as `modules` has it, and family: busy_ns per step (columns module, family, busy_ns)."""
        return (
            self._kernels.group_by(_LAYERS_TOGETHER.alias("module"), pl.col("family").cast(pl.String))
            .agg((pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .sort("busy_ns", "module", "family", descending=[True, False, False])
        )

    @property
    def has_modules(self) -> bool:
        """Whether any kernel has a module of its own."""
        return bool((self.modules["module"] != ROOT).any())

    @cached_property
    def attention(self) -> tuple[AttentionRow, ...]:
        """Question (e): softmax beside the two products of attention, in forward; empty where no part has a range.

        The scores' range also holds scaling and mask, which stand apart: the product alone is compared.
        """
        inside = self._kernels.filter((pl.col("phase") == "forward") & pl.col("part").is_not_null())
        if not inside.height:
            return ()
        is_gemm = pl.col("family") == GEMM
        part = pl.col("part").cast(pl.String)
        scores, softmax, output = ATTENTION_PARTS
        workload = self.run.workload if self.run else None
        product = attention_product_flops(workload) if workload else None
        chosen = (
            ("scores product (Q K^T)", (part == scores) & is_gemm, product),
            ("scale and mask", (part == scores) & ~is_gemm, None),
            ("softmax", part == softmax, softmax_flops(workload) if workload else None),
            ("output product (P V)", (part == output) & is_gemm, product),
        )
        return tuple(
            AttentionRow(part=name, busy_ns=int(inside.filter(rows)["duration_ns"].sum()) / self.steps, flops=flops)
            for name, rows, flops in chosen
        )

    @cached_property
    def roofline(self) -> Roofline | None:
        """Question (f): operators and families against the device's peaks; None where no operators were recorded.

        Peaks are the run's measured ceilings and its datasheet, or the datasheet of the device that the trace names.
        """
        if not self.attribution.table.operators.height:
            return None
        spec, ceilings = (self.run.device_spec, self.run.ceilings) if self.run else (None, None)
        # Written-out attention computes the full square and masks; a fused kernel leaves the masked half out.
        fused = (self._kernels["family"].cast(pl.String) == "attention (fused)").any()
        return roofline(self.attribution, spec, ceilings, causal="half" if fused else "full")

    @cached_property
    def occupation(self) -> Occupation | None:
        """How much each device was at work, and why it stood idle; None on a CPU and of a phase or a range."""
        return occupation(self.attribution) if self.has_whole_steps else None

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """What communication hides behind computation, by device."""
        return overlap(self.attribution) if self.has_whole_steps else ()

    @cached_property
    def critical_path(self) -> CriticalPath | None:
        """What one step waited for; None on a CPU."""
        if self.part is None:
            return critical_path(self.attribution)
        return critical_path(self.part.whole, step=self.part.step) if self.has_whole_steps else None

    @cached_property
    def roles(self) -> dict[str, float]:
        """Kernel time per step that serves gradient accumulation, recomputation or communication."""
        totals = self._kernels.group_by("role").agg(pl.col("duration_ns").sum())
        found = dict(totals.iter_rows())
        wanted = (GRADIENT_ACCUMULATION, RECOMPUTATION, "communication")
        return {role: found[role] / self.steps for role in wanted if found.get(role)}


def _expected_products(workload: Workload, phase: str) -> int | None:
    """Matrix products of a phase by the model's sizes: each product of forward has two in backward.

    Every micro-batch has them all; checkpointing runs products again in backward.
    """
    if scores_of(workload.attention) == "pieces":
        return None
    forward, again = products_per_forward(workload), recomputed_products(workload)
    counts = {"forward": forward, "backward": 2 * forward + again}
    return counts[phase] * workload.accumulation if phase in counts else None
