"""What ranks gain that share a step: cells, answer and findings."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, as_lines, measured_answer, note, table_of
from stepscope.core.errors import InputError, choose
from stepscope.core.figures import doubt_mark, doubts_sentence
from stepscope.core.model_config import ModelConfig
from stepscope.core.options import PARALLEL, Option
from stepscope.core.parts import attention_names, choose_name, named_kernels
from stepscope.core.range_names import BACKWARD, FORWARD, GRADIENT_SYNC, OPTIMIZER, STEP
from stepscope.core.run import Settings, settings_from
from stepscope.core.strategies import NOT_PARALLEL, SCALINGS, STRATEGIES, spelled, strategy_named
from stepscope.core.units import counted, format_bytes, format_milliseconds, format_share
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import TraceRequest, grid
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.engine.sweep_plan import order_cells
from stepscope.engine.workload_options import usual_values
from stepscope.questions import comparison
from stepscope.questions.comparison import Compared, ComparedRun, Comparison, Pair, Sizes, StepOptions, same_but
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs import metrics
from stepscope.runs.answer import bar

# Strategies that share a step over ranks, against one process and against one another.
#
# Strong scaling: the same batch on more ranks. Weak scaling: the same batch for each rank. Both are the tokens that a
# device trains on in a second (on a CPU a thread), beside those of one process: the efficiency.


STRONG, WEAK, PHASES, COMMUNICATION, MEMORY, MISSING = (
    "Strong scaling: the same batch",
    "Weak scaling: the same batch for each rank",
    "The step by its phases, the same batch",
    "Communication of a step, the same batch",
    "Memory of a rank",
    "Not measured",
)
_ORDER = {name: place for place, name in enumerate((NOT_PARALLEL, *STRATEGIES))}
_AS_BY_FORMULA = 0.001


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedCell(ComparedRun):
    """A step of one process, or one that ranks share, beside those of the same batch."""

    FIELD = "parallel"
    BASELINE = NOT_PARALLEL
    WITH_BACKWARD = True

    @property
    def relevant(self) -> bool:
        return self.run.workload.sizes is not None and super().relevant

    @property
    def ranks(self) -> int:
        return self.run.workload.ranks

    @property
    def strategy(self) -> str:
        return self.run.workload.parallel

    @property
    def value(self) -> str:
        return f"{self.strategy} x {self.ranks}" if self.ranks > 1 else self.strategy

    @property
    def group(self) -> tuple[object, ...]:
        return same_but(self.run, parallel=NOT_PARALLEL, ranks=1)

    @property
    def batch(self) -> int:
        return self.run.workload.batch_size or 0

    @property
    def computing(self) -> int:
        """How many devices compute; on a CPU, how many threads: there ranks share the cores."""
        shared, where = self.run.shared, self.run.environment
        if self.on_gpu or where is None:
            return self.ranks
        return self.ranks * shared.threads if shared is not None and shared.threads else where.threads or 1

    @property
    def order(self) -> tuple[int, ...]:
        """The place of the cell among others: by model, sizes, ranks and strategy."""
        workload = self.run.workload
        place = _ORDER.get(self.strategy.partition(":")[0], 0)
        return (self.parameters, workload.seq_len or 0, self.batch, self.ranks, place)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeakCell(SharedCell):
    """The same, beside those whose ranks have a batch as large each."""

    @property
    def relevant(self) -> bool:
        return self.batch % (self.ranks * self.run.workload.accumulation) == 0 and super().relevant

    @property
    def group(self) -> tuple[object, ...]:
        return same_but(self.run, parallel=NOT_PARALLEL, ranks=1, batch_size=self.batch // self.ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPair(Pair[SharedCell]):
    """A step that ranks share, and that of one process."""

    @property
    def efficiency(self) -> float:
        """Tokens a second and device, beside those of one process."""
        alone, together = (cell.batch / cell.time_s / cell.computing for cell in (self.base, self.other))
        return together / alone


Scaling = Comparison[Any, SharedPair]


def _scaling_of(cells: Iterable[SharedCell]) -> Scaling:
    """The cells, and each that ranks share beside that of one process."""
    scaling = comparison.compare_runs(cells, SharedPair, order=lambda cell: cell.order)
    return replace(scaling, pairs=tuple(pair for pair in scaling.pairs if pair.other.ranks > 1))


def answer_parallel(cells: Iterable[SharedCell], *, unread: int = 0, refused: Sequence[tuple[str, str]] = ()) -> Answer:
    """The whole answer. Phases, communication and memory are of the same batch; where none are known of that, of the
    same batch for each rank. refused: combinations that cannot be, each with why. Raises InputError where nothing
    pairs."""
    del unread  # no capture is asked
    cells = list(cells)
    strong = _scaling_of(cells)
    weak = _scaling_of(WeakCell(run=cell.run, digest=cell.digest) for cell in cells)
    pairs = [*strong.pairs, *weak.pairs]
    if not pairs:
        needs, measured = "is a training step that ranks share", "by ranks and by one process"
        raise InputError(comparison.nothing_to_compare(strong, verb="parallel", needs=needs, measured=measured))
    runs = [pair.other.run for pair in pairs]
    backends = dict.fromkeys(run.shared.backend for run in runs if run.shared is not None)
    shown, of_batch = (strong, "") if strong.pairs else (weak, " for each rank")
    sent = _communication(strong, COMMUNICATION)  # of replayed steps no collective is known
    more = [(cell, "", why) for cell, why in refused]
    return measured_answer(
        pairs[0].base.run.environment,
        study="parallel",
        question="What do ranks gain that share a step, by which strategy, and what do they pay for it?",
        tables=(
            _scaling(STRONG, strong),
            _scaling(WEAK, weak),
            _phases(shown, f"{PHASES}{of_batch}"),
            sent if sent.rows else _communication(weak, f"{COMMUNICATION} for each rank"),
            _memory(shown),
            comparison.missing_cells(MISSING, SharedCell.FIELD, strong.unmeasured, more),
        ),
        panels=_panels(strong, weak),
        date=max(run.day for run in runs),
        intervals=strong.intervals,
        settings={"backend": ", ".join(backends)} if backends else None,
        findings=_findings(strong, weak, shown),
    )


_HEAD = ("cell", "strategy", "ranks")


def _scaling(title: str, scaling: Scaling) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in scaling.pairs:
        ratio, cell = pair.speed_up, pair.other
        low, high = (ratio.interval.low, ratio.interval.high) if ratio.interval else (None, None)
        gain = (ratio.value, low, high, metrics.tokens_per_s(cell.run), pair.efficiency)
        rows.append((cell.name, cell.strategy, cell.ranks, pair.base.time_s, cell.time_s, *gain))
    return table_of(
        *_HEAD, ("one process", "s"), ("step", "s"), ("times as fast", ".2f"), ("from", ".2f"), ("to", ".2f"),
        ("tokens/s", ",.0f"), ("efficiency", "%"),
        title=title, rows=rows,
        notes=as_lines(
            f"Efficiency: tokens a second and {_unit(scaling)}, beside one process.",
            *filter(None, [doubts_sentence(cell.run for cell in scaling.cells)]),
        ),
    )  # fmt: skip


def _unit(scaling: Scaling) -> str:
    """What computes, of which there are several."""
    return "device" if all(cell.on_gpu for cell in scaling.cells) else "thread"


def _phases(scaling: Scaling, title: str) -> Table:
    parts = (FORWARD, BACKWARD, GRADIENT_SYNC, OPTIMIZER, STEP)
    times = {cell: [metrics.median_s(cell.run, part) for part in parts] for cell in _with_bases(scaling)}
    rows = [(cell.name, cell.strategy, cell.ranks, *figures) for cell, figures in times.items()]
    waits = f"The phases are those of rank 0. In {GRADIENT_SYNC} a rank waits for gradients when backward has ended."
    heads = [(part, "s") for part in parts]
    return table_of(*_HEAD, *heads, title=title, rows=rows, notes=as_lines(waits))


def _with_bases(scaling: Scaling) -> list[SharedCell]:
    """The cells of all pairs, each once, in their order."""
    kept = dict.fromkeys(cell for pair in scaling.pairs for cell in (pair.base, pair.other))
    return sorted(kept, key=lambda cell: cell.order)


def _communication(scaling: Scaling, title: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in (pair.other for pair in scaling.pairs):
        run = cell.run
        sent, formula = metrics.sent_bytes(run), metrics.sent_by_formula(run)
        if sent is None:
            continue
        of_rank = run.shared.ranks[0].communication if run.shared is not None else None
        calls = of_rank.calls if of_rank is not None else None
        times = metrics.communication_s(run), metrics.exposed_s(run), metrics.overlap_share(run)
        more = sent / formula - 1 if formula else None
        count = sum(call.calls for call in calls) if calls is not None else None
        rows.append((cell.name, cell.strategy, cell.ranks, *times, sent, formula, more, count))
    sizes = {"sent by a rank": "B", "by formula": "B", "sent more": "+%"}
    heads = {"communication": "s", "exposed": "s", "hidden": "%", **sizes}
    waits = (
        "Means of the ranks; times are of one step under the profiler. Exposed is what passes while a rank computes "
        "nothing, its waiting for the others with it."
    )
    return table_of(*_HEAD, *heads.items(), "collectives", title=title, rows=rows, notes=as_lines(waits))


def _memory(scaling: Scaling) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in _with_bases(scaling):
        shared = cell.run.shared
        if shared is None:
            continue
        kept = [(figures.parameter_bytes, figures.optimizer_bytes or 0) for figures in shared.ranks]
        memories = [figures.memory for figures in shared.ranks if figures.memory is not None]
        peaks = [memory.allocated_peak for memory in memories if memory.allocated_peak is not None]
        parameters, state = max(kept, key=sum)
        held = (parameters, state, parameters + state, metrics.kept_by_formula(cell.run), max(peaks, default=None))
        rows.append((cell.name, cell.strategy, cell.ranks, *held))
    has_peaks = any(row[-1] is not None for row in rows)
    return table_of(
        *_HEAD, ("parameters", "B"), ("optimizer state", "B"), ("together", "B"), ("by formula", "B"),
        *((("peak", "B"),) if has_peaks else ()),
        title=MEMORY, rows=rows if has_peaks else [row[:-1] for row in rows],
        notes=as_lines("Of the rank that keeps most between steps. By formula: even parts of what a strategy shards."),
    )  # fmt: skip


def _panels(strong: Scaling, weak: Scaling) -> tuple[Panel, ...]:
    """The step of each strategy beside that of one process, for one batch and for a batch for each rank. Where there
    are several, a bar has the name of its one process's cell: with a batch for each rank the cells of more ranks have
    others."""
    points: list[Point] = []
    pairs = [*strong.pairs, *weak.pairs]
    beside = {cell: pair.base for pair in pairs for cell in (pair.base, pair.other)}
    several = len({base.name for base in beside.values()}) > 1
    for words, scaling in (("the same batch", strong), ("the same batch for each rank", weak)):
        for cell in _with_bases(scaling):
            name = f"{beside[cell].name} {cell.value}" if several else cell.value
            points.append(bar(words, name, cell.samples(STEP), doubted=bool(doubt_mark(cell.run))))
    return (Panel(x_title="", y_title="step, ms", points=tuple(points), kind="bars"),) if points else ()


_LESSONS = (
    ("one-message", "ddp-naive", "ddp-flat", "one message in place of many"),
    ("overlap", "ddp-flat", "ddp-overlap", "each gradient sent while backward goes on"),
    ("buckets", "ddp-overlap", "ddp-bucketed", "gradients sent in buckets"),
    ("own-ddp", "ddp-bucketed", "ddp", "PyTorch's own in place of the lesson"),
    ("sharded-optimizer", "ddp-bucketed", "zero1", "the optimizer's state sharded"),
    ("fully-sharded", "ddp-bucketed", "fsdp-textbook", "everything sharded"),
    ("own-fsdp", "fsdp-textbook", "fsdp2", "PyTorch's own in place of the lesson"),
    ("sequence", "tensor", "tensor-sequence", "what lies between the products split too"),
)
"""What the lessons ask, in their order: the kind of finding, from one strategy to the next, and what changes."""

DATA_PARALLEL = ("gradient-sync", "one-message", "overlap", "buckets", "own-ddp", "fastest")
SHARDED = ("sharded-optimizer", "fully-sharded", "own-fsdp")
"""Kinds of findings that answer questions on data parallel, and on sharding."""


def _findings(strong: Scaling, weak: Scaling, shown: Scaling) -> Iterator[Finding]:
    cells = [pair.other for pair in shown.pairs]
    for cell in cells:
        # How long the lessons of data parallel wait for gradients after backward, in the timed steps.
        sync_s = metrics.median_s(cell.run, GRADIENT_SYNC)
        if sync_s and cell.strategy.startswith("ddp-"):
            yield note(
                "gradient-sync",
                f"{cell.label}: after backward, ranks wait {format_milliseconds(sync_s)} ms for gradients, "
                f"{format_share(sync_s / cell.time_s)} of the step.",
                {"seconds": sync_s, "share": sync_s / cell.time_s},
            )
    yield from _lessons(cells)
    yield from _fastest(strong.pairs)
    if weak.pairs:
        best = max(weak.pairs, key=lambda pair: pair.efficiency)
        yield note(
            "weak-scaling",
            f"{best.other.label} scales best where each rank has a batch of its own: {format_share(best.efficiency)} "
            f"of the tokens a second and {_unit(weak)} of one process.",
            {"efficiency": best.efficiency},
        )
    yield from _by_formula(cells)
    yield from comparison.doubtful_runs(shown)
    # One process has all threads of a CPU, and each rank its share: it is no other environment.
    yield from comparison.unlike_environments([SharedPair(base=cells[0], other=cell) for cell in cells[1:]])
    yield from comparison.replaced_runs(shown)


def _lessons(cells: Sequence[SharedCell]) -> Iterator[Finding]:
    """What changes from one strategy to the next, where both were measured with the same ranks and batch."""
    by_place = {(cell.group, cell.ranks, cell.strategy): cell for cell in cells}
    for kind, before, after, words in _LESSONS:
        for (group, ranks, strategy), cell in by_place.items():
            base = by_place.get((group, ranks, before))
            if strategy != after or base is None:
                continue
            ratio = SharedPair(base=base, other=cell).speed_up
            verdict = "cannot be told apart" if ratio.undecided else f"is {comparison.times_as_fast(ratio)}"
            step = f"the step{'s' if ratio.undecided else ''} {verdict}"
            times = f"{format_milliseconds(base.time_s)} to {format_milliseconds(cell.time_s)} ms"
            moves = [f"{step}, {times}"]
            was, now = metrics.exposed_s(base.run), metrics.exposed_s(cell.run)
            if was is not None and now is not None:
                moves.append(f"exposed communication {format_milliseconds(was)} to {format_milliseconds(now)} ms")
            for what, read in (("sent by a rank", metrics.sent_bytes), ("kept by a rank", metrics.kept_bytes)):
                was, now = read(base.run), read(cell.run)
                if was and now is not None and abs(now / was - 1) > _AS_BY_FORMULA:
                    moves.append(f"{what} {format_bytes(was)} to {format_bytes(now)} ({now / was - 1:+.0%})")
            yield note(
                kind,
                f"{cell.name}, {counted(ranks, 'rank')}, from {before} to {after} ({words}): {'; '.join(moves)}.",
                {"speed-up": ratio.value, "step_s": cell.time_s, "before_s": base.time_s},
            )


def _fastest(pairs: Sequence[SharedPair]) -> Iterator[Finding]:
    """The fastest strategy of each batch and number of ranks."""
    groups: dict[tuple[object, ...], list[SharedPair]] = {}
    for pair in pairs:
        groups.setdefault((pair.other.group, pair.other.ranks), []).append(pair)
    for together in (group for group in groups.values() if len(group) > 1):
        best = max(together, key=lambda pair: pair.speed_up.value)
        others = [pair.other for pair in together if pair is not best]
        alike = [cell.strategy for cell in others if SharedPair(base=cell, other=best.other).speed_up.undecided]
        rest = f", not distinguishable from {', '.join(alike)}" if alike else ""
        yield note(
            "fastest",
            f"{best.other.name}, {counted(best.other.ranks, 'rank')}: {best.other.strategy} is the fastest of "
            f"{len(together)} strategies, {best.speed_up.value:.3g} times as fast as one process{rest}.",
            {"speed-up": best.speed_up.value, "efficiency": best.efficiency},
        )


def _by_formula(cells: Sequence[SharedCell]) -> Iterator[Finding]:
    """Whose bytes are those of the formula, and whose are not."""
    known: list[tuple[SharedCell, float]] = []
    for cell in cells:
        sent, formula = metrics.sent_bytes(cell.run), metrics.sent_by_formula(cell.run)
        if sent is not None and formula:
            known.append((cell, sent / formula - 1))
    off = [(cell, share) for cell, share in known if abs(share) >= _AS_BY_FORMULA]
    if known:
        others = ", ".join(f"{cell.value} {share:+.1%}" for cell, share in off)
        yield note(
            "by-formula",
            f"Ranks send what the formula says in {len(known) - len(off)} of {counted(len(known), 'cell')}"
            f"{f'; not: {others}' if others else ''}.",
            {"cells": len(known), "off": len(off)},
        )


def part_of(answer: Answer, kinds: Sequence[str], tables: Sequence[str]) -> Answer:
    """The findings of these kinds and the tables of these titles, with what was not measured."""
    return msgspec.structs.replace(
        answer,
        tables=tuple(table for table in answer.tables if table.title in (*tables, MISSING)),
        findings=tuple(finding for finding in answer.findings if finding.kind in kinds or finding.severity != "note"),
    )


# What do ranks gain that share a step? Cells of each strategy and number of ranks, for strong and for weak scaling.


ON_GPU = Sizes(models=("large",), dtypes=("bf16",), seq_len=512, batch_size=8)
ON_CPU = Sizes(models=("tiny",), dtypes=("fp32",), seq_len=64, batch_size=4)
USUAL = ("ddp-naive", "ddp-flat", "ddp-overlap", "ddp-bucketed", "zero1", "fsdp-textbook", "ddp", "fsdp2")


def parallel_cells(
    *, strategies: Sequence[str], ranks: Sequence[int], models: Sequence[ModelConfig], seq_lens: Sequence[int],
    batch_size: int, dtypes: Sequence[str], settings: Settings, scaling: str = "both", **choices: Any,
) -> tuple[tuple[SweepCell, ...], list[tuple[str, str]]]:  # fmt: skip
    """The step of one process, and that of each strategy and number of ranks with this batch and with one as large for
    each rank; and the combinations that cannot be, with why. One rank is one process.

    scaling: one of SCALINGS. choices: of other fields of each workload.
    """
    choose(scaling, SCALINGS, "scaling")
    for name in strategies:
        strategy_named(name)
    if any(number < 1 for number in ranks) or max(ranks, default=0) < 2:
        raise InputError(f"--ranks {','.join(map(str, ranks))} compares nothing with one process: name 2, or more")
    refused: list[tuple[str, str]] = []
    sizes = {"seq_len": list(seq_lens), "dtype": list(dtypes), **choices}
    alone = grid(model=models, **sizes, batch_size=batch_size)
    workloads: list[TextbookWorkload] = []
    for number, name in itertools.product((number for number in ranks if number > 1), strategies):
        weak = number * batch_size
        for batch in {"strong": (batch_size,), "weak": (weak,)}.get(scaling, (batch_size, weak)):
            try:
                workloads += grid(model=models, **sizes, batch_size=batch, parallel=name, ranks=number)
            except InputError as error:
                refused.append((f"{name} x {number}, batch {batch}", str(error)))
    if not workloads:
        raise InputError(f"nothing to measure beside one process: {refused[0][1] if refused else 'name a strategy'}")
    return order_cells([SweepCell(workload=workload, settings=settings) for workload in [*alone, *workloads]]), refused


Division = Annotated[
    str, Option("Whether ranks share one process's batch, or have one as large each.", PARALLEL, choices=SCALINGS)
]


def compare_strategies(
    *,
    options: StepOptions,
    parallel: tuple[str, ...] | None,
    ranks: tuple[int, ...] | None,
    scaling: Division = "both",
    attention: str | None,
    kernels: str | None,
    graph: str | None,
    optimizer: str | None,
    checkpointing: str | None,
) -> Result | Cells:
    """Strategies that share a step, beside one process and one another: step, communication, memory, scaling.

    The batch is that of all ranks together; it is measured again with as many sequences for each rank. What is chosen
    of the step holds for one process, too: strategies whose step --graph step cannot replay are named, not measured.
    """
    choices = {"attention": attention, "graph": graph, "optimizer": optimizer, "checkpointing": checkpointing}
    chosen: dict[str, Any] = {field: value for field, value in choices.items() if value is not None}
    if attention is not None:
        choose_name(attention, attention_names(), "attention")
    if kernels is not None:
        chosen |= named_kernels(kernels)
    if graph == "step" and not options.from_ and options.device_type != "cuda":
        raise InputError(f"--graph step captures CUDA graphs, which {options.device_type} has not: leave it out")

    refused: list[tuple[str, str]] = []
    answer = functools.partial(answer_parallel, refused=refused)
    compared = Compared(study="parallel", cell=SharedCell, answer=answer, options=options)
    if options.from_:
        wanted = None if parallel is None else ("none", *map(spelled, parallel))
        fields = {**options.fields, "parallel": wanted, "ranks": ranks and (1, *ranks)}
        return compared.stored({**fields, **{field: (value,) for field, value in chosen.items()}}, "--kernels")
    sizes = options.sizes(options.usual(ON_CPU, ON_GPU))
    sizes["settings"] = settings_from(None, options.steps, options.seconds)  # the profile says what nothing hides
    if not ranks:  # every GPU, or two ranks on a CPU
        import torch

        ranks = (2,) if options.device_type == "cpu" else (max(2, torch.cuda.device_count()),)
    cells, impossible = parallel_cells(
        strategies=[name for name in parallel or USUAL if name != NOT_PARALLEL],
        ranks=ranks,
        scaling=scaling,
        **chosen,
        **sizes,
    )
    refused += impossible
    return compared.measured(cells, TraceRequest())


QUESTION = Question(
    "parallel",
    compare_strategies,
    examples=(
        "--model large --parallel ddp-bucketed --ranks 2,4 --graph step --scaling weak",
        "--model tiny --device cpu --save strategies.svg",
    ),
    shared=("save", "shown"),
    defaults={
        **ON_GPU.in_words(ON_CPU),
        "parallel": "the lessons, ddp and fsdp2",
        "ranks": "every GPU, or 2 on a CPU",
        "kernels": "reference",
        **{field: usual_values()[field] for field in ("attention", "graph", "optimizer", "checkpointing")},
    },
)
