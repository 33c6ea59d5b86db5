"""A step run in several dtypes: how much faster it is than in fp32, and which part of it made the gain.

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

from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.questions.compare.comparison import ComparedRun, Comparison, Pair, compare_runs

PHASES = (FORWARD, BACKWARD)
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
        """Share of the kernels' time that lies in matrix products."""
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
        """How many times as fast all kernels together are: the speed-up of the step if it had no gaps."""
        return _speed_up(self.base.kernels_s, self.other.kernels_s)

    @property
    def whole(self) -> float | None:
        """S: the speed-up of the three parts together; it is the measured one, unless capturing slowed the kernels."""
        return _speed_up(self.base.total_s, self.other.total_s)

    @property
    def by_products_alone(self) -> float:
        """What S would be if only the products had changed: 1 / (p / s_p + 1 - p)."""
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
class TimedCell(ComparedRun):
    """Forward and backward of a step in one dtype."""

    FIELD = "dtype"
    BASELINE = "fp32"
    PART = "forward-backward"
    WITH_BACKWARD = True

    @property
    def label(self) -> str:
        return f"{self.name} in {self.value}"

    @property
    def captured(self) -> bool:
        return self.parts is not None

    @cached_property
    def parts(self) -> Parts | None:
        """The parts of forward and backward; None without a capture that holds both phases."""
        phases = [self.digest.phase(name) for name in PHASES] if self.digest else []
        found = [phase for phase in phases if phase is not None]
        both = self.samples(self.PART)
        if self.digest is None or len(found) < len(PHASES) or both is None or both.median_s is None:
            return None
        busy_s = sum(phase.busy_ns for phase in found) * 1e-9
        products_s = sum(phase.gemm_ns for phase in found) * 1e-9
        casts = [row.busy_ns for row in self.digest.families if row.family == CASTS and row.phase in PHASES]
        return Parts(
            products_s=products_s,
            rest_s=busy_s - products_s,
            between_s=max(0.0, both.median_s - busy_s) if self.on_gpu else None,
            casts_s=sum(casts) * 1e-9,
            kernels=sum(phase.kernels for phase in found),
        )

    @property
    def fused_attention(self) -> bool:
        return self.digest is not None and any(row.family == FUSED for row in self.digest.families)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeedPair(Pair[TimedCell]):
    """A step in another dtype, and the same in fp32."""

    @cached_property
    def amdahl(self) -> Amdahl | None:
        """Amdahl's law for the two steps; None unless both have a captured step."""
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


SpeedStudy = Comparison[TimedCell, SpeedPair]


def pair_up(found: Iterable[TimedCell], order: Sequence[str]) -> SpeedStudy:
    """Cells in the order of their size and of `order` (of dtypes), and each dtype beside fp32 of the same cell.

    Runs without a backward say nothing here and are left out.
    """
    return compare_runs(found, SpeedPair, order=lambda cell: _order(cell, order))


def _order(cell: TimedCell, order: Sequence[str]) -> tuple[object, ...]:
    workload = cell.run.workload
    place = order.index(cell.value) if cell.value in order else len(order)
    return (workload.seq_len or 0, workload.batch_size or 0, cell.parameters, cell.name, place, cell.value)
