"""How much faster lower precision is, and why: cells, answer and findings."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, note, warning
from stepscope.core.errors import InputError, choose
from stepscope.core.figures import digits, doubting_kinds, gibibytes, milliseconds, percent
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.units import format_bytes, format_seconds, format_share
from stepscope.core.workloads import DTYPES
from stepscope.engine.request import TraceRequest
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.questions import comparison
from stepscope.questions.answers import quoted
from stepscope.questions.comparison import Compared, ComparedRun, Comparison, Pair, Sizes, StepOptions, listed, within
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs.metrics import launch_bound_share, median_s, memory_of

# A step run in several dtypes: how much faster it is than in fp32, and which part of it made the gain.
#
# A step's forward and backward are three parts: kernels of matrix products, all other kernels, and the time in which no
# kernel runs. The first two are sums over the kernels of a captured step, whose durations a profiler leaves alone; the
# third is what remains of the unprofiled median by the device's clock. (Copies and fills that are no kernels are in the
# third. Fused attention multiplies matrices too, and is in the second: `attention (fused)` is a family of its own.)
#
# With shares p, o, i of fp32's time in these parts, each s times as fast in the other dtype, Amdahl's law (1967) gives
# the whole: S = 1 / (p / s_p + o / s_o + i / s_i).


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
    product_share: float
    """p: the share of fp32's time, gaps included, that lies in products."""
    products_speed_up: float | None
    """s_p: how many times as fast the products are."""
    rest_speed_up: float | None
    """s_o: how many times as fast all other kernels are."""
    kernels: float | None
    """How many times as fast all kernels together are: the speed-up of the step if it had no gaps."""
    whole: float | None
    """S: the speed-up of the three parts together; it is the measured one, unless capturing slowed the kernels."""
    by_products_alone: float
    """What S would be if only the products had changed: 1 / (p / s_p + 1 - p)."""
    limit: float | None
    """What products that take no time would give, beside the rest as fp32 has it: 1 / (1 - p)."""
    products_gain_s: float
    """Seconds that a step wins in products; below zero, loses. The three gains add up to the whole."""
    rest_gain_s: float
    between_gain_s: float | None


def amdahl(base: Parts, other: Parts) -> Amdahl:
    """Amdahl's law for the parts of two steps."""

    def speed_up(base_s: float, other_s: float) -> float | None:
        return base_s / other_s if base_s and other_s else None

    gains = [base.products_s - other.products_s, base.rest_s - other.rest_s]
    between_gain_s = None
    if base.between_s is not None and other.between_s is not None:
        between_gain_s = base.between_s - other.between_s
    whole_s = base.total_s - other.total_s
    assert abs(sum(gains) + (between_gain_s or 0.0) - whole_s) <= 1e-9 * (base.total_s + other.total_s)
    return Amdahl(
        base=base,
        other=other,
        product_share=base.products_s / base.total_s,
        products_speed_up=speed_up(base.products_s, other.products_s),
        rest_speed_up=speed_up(base.rest_s, other.rest_s),
        kernels=speed_up(base.kernels_s, other.kernels_s),
        whole=speed_up(base.total_s, other.total_s),
        by_products_alone=base.total_s / (base.total_s - base.products_s + other.products_s),
        limit=speed_up(base.total_s, base.total_s - base.products_s),
        products_gain_s=gains[0],
        rest_gain_s=gains[1],
        between_gain_s=between_gain_s,
    )


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
        known = [phase for phase in phases if phase is not None]
        both = self.samples(self.PART)
        if self.digest is None or len(known) < len(PHASES) or both is None or both.median_s is None:
            return None
        busy_s = sum(phase.busy_ns for phase in known) * 1e-9
        products_s = sum(phase.gemm_ns for phase in known) * 1e-9
        casts = [row.busy_ns for row in self.digest.families if row.family == CASTS and row.phase in PHASES]
        return Parts(
            products_s=products_s,
            rest_s=busy_s - products_s,
            between_s=max(0.0, both.median_s - busy_s) if self.on_gpu else None,
            casts_s=sum(casts) * 1e-9,
            kernels=sum(phase.kernels for phase in known),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeedPair(Pair[TimedCell]):
    """A step in another dtype, and the same in fp32."""

    @cached_property
    def amdahl(self) -> Amdahl | None:
        """Amdahl's law for the two steps; None unless both have a captured step."""
        if self.base.parts is None or self.other.parts is None:
            return None
        return amdahl(self.base.parts, self.other.parts)

    @property
    def peaks_ratio(self) -> float | None:
        """The datasheet's rate of products in this dtype over that in fp32; None for an unknown device."""
        spec = self.other.run.device_spec
        fast = spec.peak_for(self.other.run.workload.dtype) if spec else None
        slow = spec.peak_for(self.base.run.workload.dtype) if spec else None
        return fast / slow if fast and slow else None


SpeedStudy = Comparison[TimedCell, SpeedPair]


def pair_up(cells: Iterable[TimedCell], order: Sequence[str]) -> SpeedStudy:
    """Cells in the order of their size and of `order` (of dtypes), and each dtype beside fp32 of the same cell.

    Runs without a backward say nothing here and are left out.
    """

    def place(cell: TimedCell) -> tuple[object, ...]:
        workload = cell.run.workload
        of_dtype = order.index(cell.value) if cell.value in order else len(order)
        return (workload.seq_len or 0, workload.batch_size or 0, cell.parameters, cell.name, of_dtype, cell.value)

    return comparison.compare_runs(cells, SpeedPair, order=place)


# What follows from a step run in several dtypes: sentences made from its figures.


_FIGURES = (
    ("forward_peak", "forward-peak", "the peak of forward"),
    ("saved_for_backward", "saved", "what is kept for backward"),
)
"""Memory figures in order of preference: field of PhaseMemory, kind of finding, name. The first known one is used."""
_RISE = 0.001
"""A peak that is higher by less is the same peak: allocators round."""


def _by_size(study: SpeedStudy) -> Iterator[Finding]:
    """The speed-up over the models, for each dtype and shape."""
    for (dtype, shape), pairs in study.lines.items():
        ratios = [pair.speed_up for pair in pairs]
        named = [(pair.other.run.workload.name, pair.speed_up.value) for pair in pairs]
        speed_ups = ", ".join(f"{name} {value:.2f}" for name, value in named)
        grows = ""
        if len(pairs) > 1 and all(b.surely_above(a) for a, b in itertools.pairwise(ratios)):
            grows = "; it grows with the model"
        elif any(a.surely_above(b) for a, b in itertools.pairwise(ratios)):
            grows = "; it does not grow with every size"
        yield note(
            "speed-up",
            f"{dtype} against fp32 ({shape}), speed-up of forward and backward: {speed_ups}{grows}.",
            dict(named),
        )


def _slower(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to be faster: where it is not, and what took the gain."""
    for pair in study.pairs:
        if pair.verdict != "slower":
            continue
        yield warning(
            "slower",
            f"Against folk wisdom, {pair.label} is slower than in fp32: {format_seconds(pair.other.time_s)} "
            f"for {format_seconds(pair.base.time_s)}{_lost_where(pair)}.",
            {"speed_up": pair.speed_up.value, **_law_evidence(pair.amdahl)},
        )
    if untold := [pair for pair in study.pairs if pair.verdict == "untold"]:
        which = f"{listed(pair.label for pair in untold)} differ{'s' if len(untold) == 1 else ''}"
        sentence = f"Whether {which} from fp32 cannot be told: {untold[0].speed_up.why_undecided}."
        evidence = {pair.label: pair.speed_up.value for pair in untold}
        yield note("cannot-be-told", sentence, evidence, remedy="measure more steps: --steps 30")
    if level := [pair for pair in study.pairs if pair.verdict == "level"]:
        which = listed(pair.label for pair in level)
        sentence = f"No difference from fp32 is measured for {which}: the interval of the speed-up holds 1."
        yield note("no-difference", sentence, {pair.label: pair.speed_up.value for pair in level})


def _lost_where(pair: SpeedPair) -> str:
    """The end of a sentence: where the time was lost, by the captures, or by the profiled steps without captures."""
    law = pair.amdahl
    if law is None:
        idle, before = launch_bound_share(pair.other.run), launch_bound_share(pair.base.run)
        if idle is None or before is None:
            return ""
        return f". No kernel runs for {format_share(idle)} of its whole step (fp32: {format_share(before)})"
    base, other = law.base, law.other
    words = f". Its kernels take {format_seconds(other.kernels_s)} for {format_seconds(base.kernels_s)}"
    if base.between_s is None or other.between_s is None:
        return words
    words += f", but for {format_seconds(other.between_s)} (fp32: {format_seconds(base.between_s)}) no kernel runs"
    host_s, before_s = median_s(pair.other.run, "host"), median_s(pair.base.run, "host")
    if host_s and before_s:
        words += f". To issue the whole step the host takes {format_seconds(host_s)} (fp32: {format_seconds(before_s)})"
    return f"{words}, with {other.kernels:,.0f} kernels in forward and backward in place of {base.kernels:,.0f}"


def _memory_findings(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to halve memory: where the forward peak rises, and the most it falls.

    Where nobody counted a peak (a CPU), what is kept for backward stands for it.
    """
    for dtype in dict.fromkeys(pair.other.value for pair in study.pairs):
        pairs = [pair for pair in study.pairs if pair.other.value == dtype]
        for field, kind, name in _FIGURES:
            changes = {pair: change for pair in pairs if (change := pair.memory_change(field)) is not None}
            if any(change > _RISE for change in changes.values()):
                yield _rise(changes, field, kind, name)
            if falls := {pair: change for pair, change in changes.items() if change < -_RISE}:
                best = min(falls, key=lambda pair: falls[pair])
                halved = " Nowhere is it halved." if falls[best] > -0.5 else ""
                yield note(
                    f"{kind}-falls",
                    f"{best.other.value} lowers {name} in {len(falls)} of {len(changes)} cells, most in "
                    f"{best.other.name}: {falls[best] * 100:+.1f} %.{halved}",
                    {pair.other.name: change for pair, change in falls.items()},
                )
            if changes:
                break


def _rise(changes: dict[SpeedPair, float], field: str, kind: str, name: str) -> Finding:
    """The cells in which this figure of memory rises, and how much it is where it rises most."""
    rises = {pair: change for pair, change in changes.items() if change > _RISE}
    worst = max(rises, key=lambda pair: rises[pair])
    dtype, memory = worst.other.value, worst.base.run.evidence.memory
    more = (memory_of(worst.other.run, field) or 0) - (memory_of(worst.base.run, field) or 0)
    copies = (
        ": autocast keeps 16-bit copies of the weights that products read, of every parameter it would be "
        f"{format_bytes(memory.parameter_bytes / 2)}"
        if memory and dtype in ("bf16", "fp16")
        else ""
    )
    named = listed([f"{pair.other.name} ({change * 100:+.1f} %)" for pair, change in rises.items()])
    return warning(
        f"{kind}-rises",
        f"Against folk wisdom, {dtype} raises {name} in {len(rises)} of {len(changes)} cells: {named}. In "
        f"{worst.other.name} it is {format_bytes(more)} more{copies}.",
        {pair.other.name: change for pair, change in rises.items()},
    )


def _bounds(study: SpeedStudy) -> Iterator[Finding]:
    """Which part makes the gain and which one bounds it, in each dtype's least and greatest speed-up."""
    for dtype in dict.fromkeys(pair.other.value for pair in study.pairs):
        explained = [pair for pair in study.pairs if pair.other.value == dtype and pair.amdahl is not None]
        ordered = sorted(explained, key=lambda pair: pair.speed_up.value)
        for pair in dict.fromkeys([*ordered[:1], *ordered[-1:]]):
            law = pair.amdahl
            assert law is not None
            yield note("bound", _law_in_words(pair, law), {"speed_up": pair.speed_up.value, **_law_evidence(law)})


def _law_in_words(pair: SpeedPair, law: Amdahl) -> str:
    peaks = f" (the datasheet's peaks: {pair.peaks_ratio:.1f})" if pair.peaks_ratio else ""
    others = f", the other kernels {law.rest_speed_up:.2f} times" if law.rest_speed_up else ""
    products = (
        f"which run {law.products_speed_up:.2f} times as fast{peaks}"
        if law.products_speed_up
        else "which take no time in it"
    )
    gains = [(law.products_gain_s, "in products"), (law.rest_gain_s, "in other kernels")]
    left = [(law.other.products_s, "products"), (law.other.rest_s, "other kernels")]
    if law.between_gain_s is not None and law.other.between_s is not None:
        gains.append((law.between_gain_s, "where no kernel runs"))
        left.append((law.other.between_s, "without a kernel"))
    won = ", ".join(
        f"{'wins' if gain_s >= 0 else 'loses'} {format_seconds(abs(gain_s))} {part}" for gain_s, part in gains
    )
    now = ", ".join(f"{format_share(part_s / law.other.total_s)} {part}" for part_s, part in left)
    limit = f"; were products free, fp32's rest would bound it at {law.limit:.2f}" if law.limit else ""
    return (
        f"{pair.label}, speed-up {pair.speed_up.value:.2f}: {format_share(law.product_share)} of fp32's time is in "
        f"products, {products}{others}. A step {won}. By products alone the speed-up would be "
        f"{law.by_products_alone:.2f}{limit}. What is left in {pair.other.value} is {now}."
    )


def _law_evidence(law: Amdahl | None) -> dict[str, float | int | str | None]:
    names = "product_share products_speed_up rest_speed_up products_gain_s rest_gain_s between_gain_s by_products_alone"
    return {} if law is None else quoted(law, *names.split(), "limit")


def _doubts(study: SpeedStudy, lacking: Sequence[str], unread: int) -> Iterator[Finding]:
    """What is missing, and what makes a comparison doubtful."""
    if any(cell.parts is not None and not cell.on_gpu for cell in study.cells):
        yield note(
            "on-cpu",
            "On a CPU the kernels are operators, and their times those of a captured step, which the profiler slows: "
            "the parts say what the gain is made of, the medians how large it is.",
        )
    if lacking:
        yield note("dtype-lacking", f"Left out: {', '.join(lacking)}, which a CPU does not have.")
    bare = [cell.label for cell in study.cells if cell.parts is None]
    if bare:
        reason = "polars, which reads them, is not installed" if unread else "none lies beside them that can be read"
        yield note(
            "no-capture",
            f"{len(bare)} of {len(study.cells)} runs are shown without a captured step ({reason}): their share of "
            "products is not known.",
        )
    yield from comparison.doubtful_runs(study)
    yield from comparison.unlike_environments(study.pairs)
    captures = [(cell.label, cell.digest) for cell in study.cells if cell.digest]
    fused = [label for label, digest in captures if any(row.family == FUSED for row in digest.families)]
    if fused:
        yield note(
            "fused-attention", f"Attention is one kernel in {listed(fused)}: its products stand with the other kernels."
        )
    yield from comparison.replaced_runs(study)


TIMES, MEMORY, PARTS, LAW, MISSING = (
    "Forward and backward: medians, with 95 % intervals",
    "Memory of the step, and its change against fp32",
    "Where the time of forward and backward lies, by a captured step",
    "Amdahl's law: fp32's time in parts, and how many times as fast each part is",
    "Not measured",
)


def answer_speed(study: SpeedStudy, *, lacking: Sequence[str] = (), unread: int = 0) -> Answer:
    """The whole answer. `lacking`: dtypes that the device does not have; `unread`: captures that could not be read.

    Raises InputError where no cell was measured both in fp32 and in another dtype.
    """
    if not study.pairs:
        measured = f"in {BASELINE} and in another dtype"
        raise InputError(comparison.nothing_to_compare(study, verb="speed", needs="has a backward", measured=measured))
    missing = comparison.missing_cells(MISSING, TimedCell.FIELD, study.unmeasured)
    return comparison.compared_answer(
        study,
        study.pairs[0].base,
        study="speed",
        question="How much faster are forward and backward in lower precision, and which part of them is it?",
        tables=(_times(study), _memory(study), _parts(study), _law(study), missing),
        panels=_panels(study),
        findings=itertools.chain(
            _by_size(study), _slower(study), _memory_findings(study), _bounds(study), _doubts(study, lacking, unread)
        ),
    )


def _times(study: SpeedStudy) -> Table:
    speed_ups = {pair.other: pair.speed_up for pair in study.pairs}
    rows: list[dict[str, Cell]] = [
        {
            "cell": cell.name,
            "dtype": cell.value,
            "forward ms": milliseconds(median_s(cell.run, FORWARD)),
            "backward ms": milliseconds(median_s(cell.run, BACKWARD)),
            **within("both ms", "both", cell.samples(cell.PART)),
            **within("speed-up", "speed-up", speed_ups.get(cell)),
            "findings": ", ".join(doubting_kinds(cell.run)),
        }
        for cell in study.cells
    ]
    return comparison.table_of_rows(TIMES, rows)


def _memory(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    pairs = {pair.other: pair for pair in study.pairs}
    for cell in study.cells:
        row: list[Cell] = []
        for field in ("forward_peak", "saved_for_backward"):
            change = pairs[cell].memory_change(field) if cell in pairs else None
            row += [gibibytes(memory_of(cell.run, field)), percent(change)]
        if row[0] is not None or row[2] is not None:
            rows.append((cell.name, cell.value, *row))
    heads = ("forward peak GiB", "forward peak %", "saved for backward GiB", "saved for backward %")
    return Table(title=MEMORY, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _parts(study: SpeedStudy) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "cell": cell.name,
            "dtype": cell.value,
            "kernels": round(parts.kernels),
            "products ms": milliseconds(parts.products_s),
            "other kernels ms": milliseconds(parts.rest_s),
            "of them copies, casts ms": milliseconds(parts.casts_s),
            "no kernel ms": milliseconds(parts.between_s),
            "products % of kernel time": percent(parts.product_share),
            "no kernel %": percent(parts.between_s / parts.total_s if parts.between_s is not None else None),
        }
        for cell in study.cells
        if (parts := cell.parts) is not None
    ]
    return comparison.table_of_rows(PARTS, rows)


def _law(study: SpeedStudy) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "cell": pair.other.name,
            "dtype": pair.other.value,
            "fp32 in products %": percent(law.product_share),
            "products x": digits(law.products_speed_up),
            "others x": digits(law.rest_speed_up),
            "won in products ms": milliseconds(law.products_gain_s),
            "in others ms": milliseconds(law.rest_gain_s),
            "where no kernel ran ms": milliseconds(law.between_gain_s),
            "kernels x": digits(law.kernels),
            "by the parts x": digits(law.whole),
            "measured x": digits(pair.speed_up.value),
            "limit x": digits(law.limit),
        }
        for pair in study.pairs
        if (law := pair.amdahl) is not None
    ]
    return comparison.table_of_rows(LAW, rows)


def _panels(study: SpeedStudy) -> tuple[Panel, ...]:
    several = len({cell.shape for cell in study.cells}) > 1
    speed_ups = [(pair.other, pair.speed_up.value, pair.doubted) for pair in study.pairs]
    shares = [(cell, cell.parts.product_share * 100, False) for cell in study.cells if cell.parts is not None]
    return (
        *comparison.over_sizes("speed-up of forward and backward over fp32", speed_ups, several_shapes=several),
        *comparison.over_sizes("products, % of kernel time", shares, several_shapes=several),
    )


# How much faster is a step in TF32 or bf16, and why? Forward and backward of some models in each dtype.


BASELINE = TimedCell.BASELINE


COMPARED = (BASELINE, "tf32", "bf16")
ON_GPU = Sizes(models=("small", "medium", "large", "xl", "2.7B"), seq_len=512, batch_size=4, dtypes=COMPARED)
ON_CPU = Sizes(models=("tiny", "small"), seq_len=32, batch_size=1, dtypes=COMPARED)
"""A minute on two cores. TF32 is named to be told that a CPU has none."""


def dtypes_here(dtypes: Sequence[str], device_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes that the device has, and those that it lacks: TF32 is a mode of NVIDIA's Tensor Cores.

    Raises InputError where nothing is left to compare. (A GPU before Ampere refuses TF32 itself, cell by cell.)
    """
    for dtype in dtypes:
        choose(dtype, DTYPES, "dtype")
    if BASELINE not in dtypes:
        raise InputError(f"--dtype {','.join(dtypes)} lacks {BASELINE}, which the others are compared with: add it")
    lacking = tuple(dtype for dtype in dtypes if device_type == "cpu" and dtype == "tf32")
    here = tuple(dtype for dtype in dtypes if dtype not in lacking)
    if len(here) < 2:
        left = f" ({', '.join(lacking)}: not on a CPU)" if lacking else ""
        raise InputError(f"nothing to compare {BASELINE} with{left}: name another dtype, as in --dtype fp32,bf16")
    return here, lacking


def speed_cells(**sizes: Any) -> tuple[SweepCell, ...]:
    """A cell for each of the sizes, as `compared_cells` takes them. No optimizer: it is the same in each dtype."""
    return comparison.compared_cells(phase=["forward-backward"], optimizer=[None], **sizes)


def compare_dtypes(
    *, options: StepOptions, module: str | None, arg: tuple[str, ...] = (), warmup: int | None
) -> Result | Cells:
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    lacking: tuple[str, ...] = ()
    compared = Compared(
        study="speed",
        cell=TimedCell,
        answer=lambda cells, unread: answer_speed(
            pair_up(cells, options.dtype or DTYPES), lacking=lacking, unread=unread
        ),
        options=options,
    )
    if options.from_:
        return compared.stored(options.fields)
    usual = options.usual(ON_CPU, ON_GPU)
    here, lacking = dtypes_here(options.dtype or usual.dtypes, options.device_type)
    cells = options.user_cells(module, arg, warmup, dtype=here, phase=("forward-backward",))
    if not cells:
        cells = speed_cells(**{**options.sizes(usual, warmup), "dtypes": here})
    return compared.measured(cells, TraceRequest(tools=("kineto",), steps=1))


QUESTION = Question(
    "speed",
    compare_dtypes,
    examples=("--model small,medium --dtype fp32,bf16", "--from results/h200/precision-speed --only amdahl"),
    shared=("save", "shown"),
    defaults={**ON_GPU.in_words(ON_CPU), "model": "small to 2.7B; tiny,small on a CPU"},
)
