"""The same step in several dtypes: how much faster than in fp32, and which part of it made the gain.

A step's forward and backward are three parts: kernels of matrix products, all other kernels, and the time in which no
kernel runs. The first two are sums over the kernels of a captured step, whose durations a profiler leaves alone; the
third is what remains of the unprofiled median by the device's clock. (Copies and fills that are no kernels are in the
third. Fused attention multiplies matrices too, and is in the second: `attention (fused)` is a family of its own.)

With shares p, o, i of fp32's time in these parts, each s times as fast in the other dtype, Amdahl's law (1967) gives
the whole: S = 1 / (p / s_p + o / s_o + i / s_i).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope.analysis.metrics import memory_change, samples_of
from stepscope.core.run import Run
from stepscope.core.samples import Ratio, Samples
from stepscope.work.transformer import parameter_count

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest

BASELINE = "fp32"
PHASES = ("forward", "backward")
CASTS = "copy/cast"
FUSED = "attention (fused)"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Forward and backward of one step, in seconds.

    `casts_s` is a part of `rest_s`. `between_s` is None on a CPU, where the host itself does the work, and its capture
    slows it down: shares and speed-ups are then those of the operators' time.
    """

    products_s: float
    rest_s: float
    between_s: float | None
    casts_s: float = 0.0
    kernels: float = 0.0

    @property
    def kernels_s(self) -> float:
        return self.products_s + self.rest_s

    @property
    def total_s(self) -> float:
        return self.kernels_s + (self.between_s or 0.0)

    @property
    def product_share(self) -> float:
        """Of the kernels' time."""
        return self.products_s / self.kernels_s if self.kernels_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Amdahl:
    """fp32's step beside another's, part by part. A speed-up is None where a part takes no time in either."""

    base: Parts
    other: Parts

    @property
    def product_share(self) -> float:
        """p: the share of fp32's time, gaps included, that lies in products."""
        return self.base.products_s / self.base.total_s

    @property
    def products(self) -> float | None:
        """s_p: how many times as fast the products are."""
        return _speed_up(self.base.products_s, self.other.products_s)

    @property
    def rest(self) -> float | None:
        """s_o: how many times as fast all other kernels are."""
        return _speed_up(self.base.rest_s, self.other.rest_s)

    @property
    def kernels(self) -> float | None:
        """Of all kernels: the speed-up if they ran without a gap."""
        return _speed_up(self.base.kernels_s, self.other.kernels_s)

    @property
    def whole(self) -> float | None:
        """S: of the three parts together. The measured speed-up, unless kernels took longer captured than timed."""
        return _speed_up(self.base.total_s, self.other.total_s)

    @property
    def by_products_alone(self) -> float:
        """What it would be if nothing but the products had changed: 1 / (p / s_p + 1 - p)."""
        return self.base.total_s / (self.base.total_s - self.base.products_s + self.other.products_s)

    @property
    def limit(self) -> float | None:
        """What products that take no time would give, beside the rest as fp32 has it: 1 / (1 - p)."""
        return _speed_up(self.base.total_s, self.base.total_s - self.base.products_s)

    @property
    def products_gain_s(self) -> float:
        """Seconds that a step wins in products; below zero, loses. The three gains add up to the whole."""
        return self.base.products_s - self.other.products_s

    @property
    def rest_gain_s(self) -> float:
        return self.base.rest_s - self.other.rest_s

    @property
    def between_gain_s(self) -> float | None:
        if self.base.between_s is None or self.other.between_s is None:
            return None
        return self.base.between_s - self.other.between_s

    def self_check(self) -> None:
        """Raise AssertionError unless gains add up to the difference of the steps."""
        gains = self.products_gain_s + self.rest_gain_s + (self.between_gain_s or 0.0)
        whole = self.base.total_s - self.other.total_s
        assert abs(gains - whole) <= 1e-9 * (self.base.total_s + self.other.total_s), "gains do not add up"


def _speed_up(base_s: float, other_s: float) -> float | None:
    return base_s / other_s if base_s and other_s else None


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedCell:
    """A run, and what is kept of its captured step, if it has one."""

    run: Run
    digest: "TraceDigest | None" = None

    @property
    def dtype(self) -> str:
        return self.run.workload.dtype

    @property
    def name(self) -> str:
        """The cell without its dtype: `small-b4-s512-train`."""
        return self.run.workload.key.rpartition("-")[0].replace(f"-{self.dtype}-", "-", 1)

    @property
    def shape(self) -> str:
        """The name without its model: `b4-s512-train`."""
        return self.name.removeprefix(f"{self.run.workload.model.name}-")

    @property
    def parameters(self) -> int:
        return parameter_count(self.run.workload.model)

    @property
    def group(self) -> tuple[object, ...]:
        """Equal where nothing but the dtype differs, and the device is the same."""
        fields = {field: value for field, value in self.run.workload.identity.items() if field != "dtype"}
        environment = self.run.environment
        where = (environment.device_name, environment.memory_limit_bytes) if environment else None
        return (repr(fields), where)

    @property
    def both(self) -> Samples | None:
        """Forward and backward together, step by step; None where the run did not end, or has not both."""
        samples = samples_of(self.run, "forward-backward") if self.run.status == "done" else None
        return samples if samples is not None and samples.median_s else None

    @property
    def on_gpu(self) -> bool:
        return self.run.environment is not None and self.run.environment.device_type != "cpu"

    @cached_property
    def parts(self) -> Parts | None:
        """None without a capture that holds both phases."""
        phases = [self.digest.phase(name) for name in PHASES] if self.digest else []
        found = [phase for phase in phases if phase is not None]
        timed_s = self.both.median_s if self.both else None
        if self.digest is None or len(found) < len(PHASES) or timed_s is None:
            return None
        busy_s = sum(phase.busy_ns for phase in found) * 1e-9
        products_s = sum(phase.gemm_ns for phase in found) * 1e-9
        casts = [row.busy_ns for row in self.digest.families if row.family == CASTS and row.phase in PHASES]
        return Parts(
            products_s=products_s,
            rest_s=busy_s - products_s,
            between_s=max(0.0, timed_s - busy_s) if self.on_gpu else None,
            casts_s=sum(casts) * 1e-9,
            kernels=sum(phase.kernels for phase in found),
        )

    @property
    def fused_attention(self) -> bool:
        return self.digest is not None and any(row.family == FUSED for row in self.digest.families)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A cell in another dtype, and the same in fp32."""

    base: TimedCell
    other: TimedCell

    @property
    def label(self) -> str:
        return f"{self.other.name} in {self.other.dtype}"

    @cached_property
    def speed_up(self) -> Ratio:
        """Of forward and backward together, by the medians."""
        base, other = self.base.both, self.other.both
        ratio = other.speedup_over(base) if base and other else None
        assert ratio is not None, "a pair is made of cells with both phases"
        return ratio

    @property
    def slower(self) -> bool:
        """Slower than fp32, and not by chance as far as the samples tell."""
        return not self.speed_up.undecided and self.speed_up.value < 1

    @property
    def undecided(self) -> bool:
        """Whether the samples do not tell which is faster."""
        return self.speed_up.undecided

    @cached_property
    def amdahl(self) -> Amdahl | None:
        """None unless both have a captured step."""
        if self.base.parts is None or self.other.parts is None:
            return None
        found = Amdahl(base=self.base.parts, other=self.other.parts)
        found.self_check()
        return found

    @property
    def peaks_ratio(self) -> float | None:
        """The datasheet's rate of products in this dtype over that in fp32; None for an unknown device."""
        spec = self.other.run.device_spec
        fast = spec.peak_for(self.other.run.workload.dtype) if spec else None
        slow = spec.peak_for(self.base.run.workload.dtype) if spec else None
        return fast / slow if fast and slow else None

    def memory_change(self, field: str) -> float | None:
        """By which share of fp32's bytes this figure of PhaseMemory is larger; None where one of them is not known."""
        return memory_change(self.base.run, self.other.run, field)


@dataclass(frozen=True, kw_only=True)
class SpeedStudy:
    """Every cell, and the pairs among them. `replaced` counts runs of a cell that has a better or a newer one."""

    cells: tuple[TimedCell, ...]
    pairs: tuple[Pair, ...]
    unmeasured: tuple[TimedCell, ...]
    replaced: int

    def pair_of(self, cell: TimedCell) -> Pair | None:
        """The pair in which this cell is set beside fp32."""
        return next((pair for pair in self.pairs if pair.other is cell), None)


def pair_up(found: Iterable[TimedCell], order: Sequence[str]) -> SpeedStudy:
    """Cells in the order of their size and of `order` (of dtypes), and each dtype beside fp32 of the same cell.

    Runs without a backward say nothing here and are left out. Of several runs of one cell, one with a capture goes
    before one without, then the newest.
    """
    best: dict[tuple[object, ...], TimedCell] = {}
    replaced = 0
    asked = [cell for cell in found if cell.run.workload.phase != "forward"]
    for cell in sorted(asked, key=lambda c: (c.both is not None, c.parts is not None, c.run.created, c.run.id)):
        key = (*cell.group, cell.dtype)
        replaced += key in best
        best[key] = cell
    cells = sorted(best.values(), key=lambda c: _order(c, order))
    measured = [cell for cell in cells if cell.both is not None]
    bases = {cell.group: cell for cell in measured if cell.dtype == BASELINE}
    pairs = [
        Pair(base=bases[cell.group], other=cell)
        for cell in measured
        if cell.dtype != BASELINE and cell.group in bases
    ]  # fmt: skip
    return SpeedStudy(
        cells=tuple(measured),
        pairs=tuple(pairs),
        unmeasured=tuple(cell for cell in cells if cell.both is None),
        replaced=replaced,
    )


def _order(cell: TimedCell, order: Sequence[str]) -> tuple[object, ...]:
    workload = cell.run.workload
    place = order.index(cell.dtype) if cell.dtype in order else len(order)
    return (workload.seq_len, workload.batch_size, cell.parameters, cell.name, place, cell.dtype)
