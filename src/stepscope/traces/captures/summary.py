"""The summary of a capture: phases, families, kernels, modules, and softmax's cost beside attention's products.

Times are summed kernel times per traced step, without copies and fills. Shares are of that kernel time.
"""

from dataclasses import dataclass
from functools import cached_property

import msgspec
import polars as pl

from stepscope.core.attentions import scores_of
from stepscope.core.errors import name_shown
from stepscope.core.formulas.attention import attention_product_flops, softmax_flops
from stepscope.core.formulas.transformer import products_per_forward, recomputed_products
from stepscope.core.range_names import (
    ATTENTION_PARTS,
    BACKWARD,
    FORWARD,
    GRADIENT_ACCUMULATION,
    PHASES,
    RECOMPUTATION,
    SOFTMAX,
)
from stepscope.core.run import Run
from stepscope.core.units import Window, ms_text
from stepscope.core.workloads import TextbookWorkload, by_sizes
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.captures.critical_path import CriticalPath, critical_path
from stepscope.traces.captures.occupation import Occupation, Overlap, occupation, overlap
from stepscope.traces.kernels.families import is_generated
from stepscope.traces.kernels.names import decode
from stepscope.traces.nesting import union
from stepscope.traces.roofline.roofline import Roofline, roofline

GEMM = "matrix multiplication"
OUTSIDE = "outside"
"""The phase of work launched outside the three phases, or by no recorded call."""
FORWARD_AND_BACKWARD = "forward + backward"
"""The name of both phases taken as one."""


NO_MODULE = "?"
"""The module of work of which none is known."""


def layers_together(column: str) -> pl.Expr:
    """The names of modules with the number of a layer as `*`; "?" for null."""
    return pl.col(column).cast(pl.String).fill_null(NO_MODULE).str.replace_all(r"(^|\.)\d+(\.|$)", "${1}*${2}")


LAYERS_TOGETHER = layers_together("module")


class PhaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the step. Times and counts are per step.

    `kernels` does not count graphs recorded as a whole. `range_ns` is the time that the phase's range was open on the
    host; None outside. `product_kernels` counts matrix products, without the second passes of split products; None on a
    CPU, whose operators call one another. `expected_products` follows from the model's sizes, if a run has them.
    `unprofiled_s` is the phase's median without a profiler, by the device's clock. `found_by` is how the phase of most
    of this time was found (unmarked_phases.FOUND_BY); None outside, and in older digests.
    """

    phase: str
    kernels: float
    busy_ns: float
    gemm_ns: float
    range_ns: float | None
    product_kernels: float | None
    expected_products: int | None
    unprofiled_s: float | None
    found_by: str | None = None

    @property
    def gemm_fraction(self) -> float:
        return self.gemm_ns / self.busy_ns if self.busy_ns else 0.0


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel within one phase, or within forward and backward together, per step.

    `share` is the share of the kernel time of all such rows: of the phase, of both phases, or of softmax.
    """

    phase: str
    name: str
    family: str
    calls: float
    busy_ns: float
    share: float


class AttentionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One part of attention in forward, per step: its time and its FLOPs. FLOPs are None if no run has the sizes."""

    part: str
    busy_ns: float
    flops: int | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """The limits of a summary: work launched in this step, in this phase, inside ranges of this name, in this module or
    one inside it, on this device and this stream, or that started between these nanoseconds from the first event.

    `instances`: the ranges that launched some of this work, if a range is named. `whole`: the whole capture.
    """

    step: int | None
    phase: str | None
    range: str | None
    instances: int | None
    whole: Attribution
    module: str | None = None
    device: int | None = None
    stream: int | None = None
    between: Window | None = None

    @property
    def places(self) -> dict[str, str | int | Window]:
        """The limits that are no step, phase or range, by their names."""
        named = {
            "module": self.module,
            "device": self.device,
            "stream": self.stream,
            "between_ns": self.between,
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def words(self) -> str:
        """The part in words: `forward of step 1, inside range softmax`."""
        step = f"step {self.step}" if self.step is not None else ""
        inside = f"range {name_shown(self.range)}" if self.range is not None else ""
        launched = ", inside ".join(filter(None, (" of ".join(filter(None, (self.phase, step))), inside)))
        places = [f"{what} {name_shown(str(value))}" for what, value in self.places.items() if what != "between_ns"]
        times = [f"from {ms_text(self.between.begin_ns)} to {ms_text(self.between.end_ns)} ms"] if self.between else []
        return ", ".join(filter(None, (launched, *places, *times)))


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """The tables of one capture, or of a part of it. `run` is the run that made the capture, if it is beside one."""

    attribution: Attribution
    run: Run | None
    part: Part | None = None

    @property
    def ranged(self) -> bool:
        """Whether the summary covers only ranges of one name."""
        return self.part is not None and self.part.range is not None

    @property
    def has_whole_steps(self) -> bool:
        """Whether the summary has all phases and ranges, so that idle time has a meaning."""
        return self.part is None or (self.part.phase is None and not self.ranged and not self.part.places)

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
            "found_by",
            pl.col("phase").cast(pl.String).fill_null(OUTSIDE).alias("phase"),
        )

    @cached_property
    def phase_names(self) -> list[str]:
        """The phases in which some kernel ran, in the order of a step."""
        present = set(self._kernels["phase"].unique().to_list())
        return [phase for phase in (*PHASES, OUTSIDE) if phase in present]

    @property
    def steps(self) -> int:
        return self.attribution.steps

    @property
    def kernel_count(self) -> int:
        """The number of kernels (on a CPU: operators) in the capture, without whole graphs."""
        return int((self.attribution.kernels["kind"] != "graph").sum())

    @property
    def busy_ns(self) -> int:
        """The sum of the durations of all kernels and of graphs recorded as a whole."""
        return int(self.attribution.kernels["duration_ns"].sum())

    @property
    def union_ns(self) -> int:
        """The time during which at least one kernel or graph ran, summed over devices."""
        if self.attribution.table.on_cpu:  # an operator's own time is scattered over its duration, which counts here
            operators = self.attribution.table.operators
            own = operators if self.part is None else operators[self.attribution.work["operator_row"]]
            merged = union(own, ["process"])
        else:
            merged = union(self.attribution.kernels, ["process", "device"])
        return int((merged["end_ns"] - merged["start_ns"]).sum())

    @property
    def unattributed_ns(self) -> int:
        """The kernel time outside all named ranges."""
        return int(self.attribution.kernels.filter(~pl.col("ranged"))["duration_ns"].sum())

    @property
    def copies(self) -> tuple[int, int]:
        """The number of copies and fills, and their summed duration in nanoseconds."""
        rest = self.attribution.work.height - self.attribution.kernels.height
        return rest, self.attribution.busy_ns - self.busy_ns

    @cached_property
    def phases(self) -> tuple[PhaseSummary, ...]:
        """Each phase's device time beside the unprofiled time (question (a)) and its matrix products (question (d))."""
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
        ways = self._kernels.group_by("phase", "found_by").agg(pl.col("duration_ns").sum()).sort("duration_ns")
        found_by = dict(ways.select("phase", "found_by").iter_rows())  # of a phase, the longest comes last
        return tuple(self._phase(phase, totals[phase], found_by[phase]) for phase in self.phase_names)

    def _phase(self, phase: str, total: dict, found_by: str | None) -> PhaseSummary:
        # Ranges hold only a part of a phase, so they are not compared with figures of the whole phase.
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
            expected_products=(
                by_sizes(run.workload, lambda sized: _expected_products(sized, phase)) if run and not on_cpu else None
            ),
            unprofiled_s=sample.median_s if sample and sample.count else None,
            found_by=found_by,
        )

    @property
    def gemm_fraction(self) -> float:
        """The share of matrix multiplication in all kernel time."""
        gemm = int(self._kernels.filter(pl.col("family") == GEMM)["duration_ns"].sum())
        return gemm / self.busy_ns if self.busy_ns else 0.0

    @cached_property
    def families(self) -> pl.DataFrame:
        """Calls and busy_ns per step, by family and phase (columns family, phase, calls, busy_ns)."""
        return self._by_family(self._kernels)

    @cached_property
    def generated(self) -> pl.DataFrame:
        """The part of `families` whose kernels a compiler generated, with the same columns."""
        names = [name for name in self._kernels["name"].unique().to_list() if is_generated(name)]
        named = pl.col("name").is_in(pl.Series(names, dtype=pl.Categorical()).implode())
        return self._by_family(self._kernels.filter(named))

    def _by_family(self, kernels: pl.DataFrame) -> pl.DataFrame:
        return (
            kernels.group_by("family", "phase")
            .agg((pl.len() / self.steps).alias("calls"), (pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .with_columns(pl.col("family").cast(pl.String))
            .sort("busy_ns", "family", "phase", descending=[True, False, False])
        )

    def top_kernels(self, phase: str, top: int = 5, *, without_products: bool = False) -> list[KernelRow]:
        """The longest kernels of a phase (question (b)), optionally without matrix products (question (c))."""
        mine = self._kernels.filter(pl.col("phase") == phase)
        chosen = mine.filter(pl.col("family") != GEMM) if without_products else mine
        return self._longest(chosen, phase, int(mine["duration_ns"].sum()), top)

    def top_together(self, top: int = 5) -> list[KernelRow]:
        """The longest kernels of forward and backward together; none if the capture lacks one of the two."""
        if not {FORWARD, BACKWARD} <= set(self.phase_names):
            return []
        mine = self._kernels.filter(pl.col("phase").is_in([FORWARD, BACKWARD]))
        return self._longest(mine, FORWARD_AND_BACKWARD, int(mine["duration_ns"].sum()), top)

    def other_kernels(self, top: int = 5) -> list[KernelRow]:
        """The longest kernels of no known family; their shares are of all kernel time. A whole graph is not one."""
        mine = self._kernels.filter((pl.col("family") == "other") & (pl.col("kind") != "graph"))
        return self._longest(mine, "all", self.busy_ns, top)

    def softmax_kernels(self, top: int = 5) -> list[KernelRow]:
        """The kernels of softmax in forward; none if attention has no range for softmax."""
        inside = self._kernels.filter((pl.col("phase") == FORWARD) & (pl.col("part").cast(pl.String) == SOFTMAX))
        return self._longest(inside, FORWARD, int(inside["duration_ns"].sum()), top)

    def _longest(self, kernels: pl.DataFrame, phase: str, total: int, top: int) -> list[KernelRow]:
        """The longest kernels by name, the longest first. `total`: the nanoseconds of a share of 1."""
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
        """The number of `layers` and busy_ns per step by phase, for each module (`blocks.*.attention` for all layers).

        The module is the innermost whose range was open. The rest of a phase belongs to the model itself, module "".
        """
        return (
            self._kernels.with_columns(LAYERS_TOGETHER.alias("pattern"))
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
        """Kernel time per step by module, named as in `modules`, and family (columns module, family, busy_ns)."""
        return (
            self._kernels.group_by(LAYERS_TOGETHER.alias("module"), pl.col("family").cast(pl.String))
            .agg((pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .sort("busy_ns", "module", "family", descending=[True, False, False])
        )

    @property
    def has_modules(self) -> bool:
        """Whether any kernel has a module other than the model itself."""
        return bool((self.modules["module"] != ROOT).any())

    @cached_property
    def attention(self) -> tuple[AttentionRow, ...]:
        """Softmax beside the two products of attention in forward (question (e)); empty if no part has a range.

        The scores' range also holds scaling and mask. These are separate rows, so that only the product is compared.
        """
        inside = self._kernels.filter((pl.col("phase") == FORWARD) & pl.col("part").is_not_null())
        if not inside.height:
            return ()
        is_gemm = pl.col("family") == GEMM
        part = pl.col("part").cast(pl.String)
        scores, softmax, output = ATTENTION_PARTS
        workload = self.run.workload if self.run else None
        product = by_sizes(workload, attention_product_flops) if workload else None
        chosen = (
            ("scores product (Q K^T)", (part == scores) & is_gemm, product),
            ("scale and mask", (part == scores) & ~is_gemm, None),
            ("softmax", part == softmax, by_sizes(workload, softmax_flops) if workload else None),
            ("output product (P V)", (part == output) & is_gemm, product),
        )
        return tuple(
            AttentionRow(part=name, busy_ns=int(inside.filter(rows)["duration_ns"].sum()) / self.steps, flops=flops)
            for name, rows, flops in chosen
        )

    @cached_property
    def roofline(self) -> Roofline | None:
        """Operators and families against the device's peaks (question (f)); None if no operators were recorded.

        Peaks are the run's measured ceilings and its datasheet, or the datasheet of the device that the trace names.
        """
        if not self.attribution.table.operators.height:
            return None
        spec, ceilings = (self.run.device_spec, self.run.ceilings) if self.run else (None, None)
        # Written-out attention computes the full square and masks it. A fused kernel skips the masked half.
        fused = (self._kernels["family"].cast(pl.String) == "attention (fused)").any()
        return roofline(self.attribution, spec, ceilings, causal="half" if fused else "full")

    @cached_property
    def occupation(self) -> Occupation | None:
        """The occupation of each device; None on a CPU, and for a phase or a range."""
        return occupation(self.attribution) if self.has_whole_steps else None

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The communication that hides behind computation, by device."""
        return overlap(self.attribution) if self.has_whole_steps else ()

    @cached_property
    def critical_path(self) -> CriticalPath | None:
        """The critical path of one step; None on a CPU."""
        if self.part is None:
            return critical_path(self.attribution)
        return critical_path(self.part.whole, step=self.part.step) if self.has_whole_steps else None

    @cached_property
    def roles(self) -> dict[str, float]:
        """Kernel time per step for gradient accumulation, recomputation and communication."""
        totals = self._kernels.group_by("role").agg(pl.col("duration_ns").sum())
        found = dict(totals.iter_rows())
        wanted = (GRADIENT_ACCUMULATION, RECOMPUTATION, "communication")
        return {role: found[role] / self.steps for role in wanted if found.get(role)}


def _expected_products(workload: TextbookWorkload, phase: str) -> int | None:
    """The number of matrix products of a phase by the model's sizes. Each product of forward has two in backward.

    Each micro-batch runs all of them. Checkpointing runs products again in backward.
    """
    if scores_of(workload.attention) == "pieces":
        return None
    forward, again = products_per_forward(workload), recomputed_products(workload)
    counts = {FORWARD: forward, BACKWARD: 2 * forward + again}
    return counts[phase] * workload.accumulation if phase in counts else None
