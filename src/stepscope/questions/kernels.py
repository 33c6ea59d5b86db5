"""Which kernels a step runs, over models and lengths: cells and answer."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, known_columns, measured_answer, note
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.evidence import TRACE_TOOLS, Capture
from stepscope.core.figures import count, digits, doubting_kinds, milliseconds, percent
from stepscope.core.model_config import configure
from stepscope.core.options import OUTPUT, STORED, Option, refuse_beside
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_AND_BACKWARD, OPTIMIZER, PHASES, STEP
from stepscope.core.run import Run, settings_from
from stepscope.core.units import counted, format_seconds, format_share
from stepscope.core.workloads import by_sizes
from stepscope.engine.sweep_plan import SweepPlan
from stepscope.engine.workload_options import Record, Recording, TraceSteps
from stepscope.questions.comparison import ComparedRun, compared_cells, same_but, stored_runs, table_of_rows
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs.answer import status_word
from stepscope.runs.metrics import median_s

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import TraceDigest  # a module that needs polars
    from stepscope.traces.captures.summary import KernelRow

# The cells of the kernel study: a run with what was kept of its captured step, by one profiler or by two.


@dataclass(frozen=True, kw_only=True, eq=False)
class CapturedCell(ComparedRun):
    """A run and the digest of its capture; `other` is that of another profiler's capture of the same cell."""

    FIELD: ClassVar[str] = "phase"
    BASELINE: ClassVar[str] = "forward"

    other: "TraceDigest | None" = None

    @property
    def tables(self) -> "TraceDigest":
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
        size = by_sizes(workload, lambda sized: sized.layers * sized.model.d_model) or self.parameters
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

    def profiled_s(self, part: str) -> float | None:
        """How long a part of the step takes under the profiler. Nsight Systems is no clock of ours: of it the range of
        the phase, as it was open on the host."""
        sample, phase = self.capture.samples.get(part) if self.capture else None, self.tables.phase(part)
        return sample.mean_s if sample else phase.range_ns * _NS if phase and phase.range_ns else None

    def kernel_ns(self, part: str) -> float | None:
        """Kernel time of a phase or of the whole `step`; None where no kernel ran in it."""
        if part == STEP:
            return self.tables.busy_ns / self.tables.steps
        phase = self.tables.phase(part)
        return phase.busy_ns if phase else None

    def family_ns(self, family: str, phase: str = "") -> float:
        """Kernel time of a family, in this phase or in the whole step."""
        rows = (row for row in self.tables.families if row.family == family and phase in ("", row.phase))
        return sum(row.busy_ns for row in rows)

    @property
    def together(self) -> "Sequence[KernelRow]":
        """The longest kernels of forward and backward together, as far as the digest tells."""
        return self.tables.top_together or longest_of_both(self.tables)

    def longest(self, phase: str) -> "KernelRow | None":
        """The kernel that takes longest in a phase, or in forward and backward together."""
        if phase == FORWARD_AND_BACKWARD:
            return next(iter(self.together), None)
        return next((row for row in self.tables.top if row.phase == phase), None)

    def wall_s(self, phase: str) -> float | None:
        """The phase's median time by the timer, without a profiler."""
        return median_s(self.run, phase)


_CUT_AT = 8
"""The kernels of each phase that older digests keep: there may be others where a ranking has so many."""


def longest_of_both(digest: "TraceDigest") -> "list[KernelRow]":
    """What takes longest in forward and backward together, the longest first, by the longest kernels of each.

    It ends where these do not tell: a kernel that is not among the longest of a phase may take as long there as the
    last of these.
    """
    names = (FORWARD, BACKWARD)
    phases = [digest.phase(name) for name in names]
    kept = [{row.name: row for row in digest.top if row.phase == name} for name in names]
    if not all(phases) or not all(kept):
        return []
    unseen = [min(row.busy_ns for row in rows.values()) if len(rows) >= _CUT_AT else 0.0 for rows in kept]
    rows_of = {name: [rows[name] for rows in kept if name in rows] for name in (*kept[0], *kept[1])}
    known = {name: sum(row.busy_ns for row in rows) for name, rows in rows_of.items()}
    at_most = {
        name: known[name] + sum(more for rows, more in zip(kept, unseen, strict=True) if name not in rows)
        for name in known
    }
    ordered = sorted(known, key=lambda name: -known[name])
    ranked: list[KernelRow] = []
    for i, name in enumerate(ordered):
        if max(sum(unseen), *(at_most[other] for other in ordered[i:])) > known[name]:
            break
        ranked.append(
            msgspec.structs.replace(
                rows_of[name][0],
                phase=FORWARD_AND_BACKWARD,
                calls=sum(row.calls for row in rows_of[name]),
                busy_ns=known[name],
                share=known[name] / sum(phase.busy_ns for phase in phases if phase),
            )
        )
    return ranked


def busiest_families(cells: list[CapturedCell]) -> list[str]:
    """The six families that take most time over all cells."""
    families = sorted({row.family for cell in cells for row in cell.tables.families})
    return sorted(families, key=lambda family: -sum(cell.family_ns(family) for cell in cells))[:6]


MISSING = "Not measured"
_LONGEST = 3
"""Kernels that are shown of each ranking."""
_RANKED = 14
"""Kernels that are shown of forward and backward together."""
_MUCH = 0.02
"""The share of a phase from which a family's growth is told."""
_FILLED = 0.75
"""The share of a phase's time that kernels fill, below which the host sets that time."""
_NS = 1e-9


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The table of one question, the sentence that its figures allow, and its curves."""

    table: Table
    findings: tuple[Finding, ...] = ()
    panels: tuple[Panel, ...] = ()


def answer_kernels(cells: Iterable[CapturedCell], letters: str = "", unmeasured: Sequence[Run] = ()) -> Answer:
    """The questions of these letters, or all. `unmeasured`: runs that ended before they had a capture."""
    ordered = sorted(cells, key=lambda cell: cell.order)
    parts = [make(letter, ordered) for letter, make in TABLES.items() if not letters or letter in letters]
    shown = [part for part in parts if part.table.rows]
    # A cell that ran out of memory is a row of every table, and a cell of those by model and length.
    out = [CapturedCell(run=run) for run in unmeasured if run.status == "out-of-memory"]
    both = sorted((*ordered, *out), key=lambda cell: cell.order)
    tables: list[Table] = []
    for part in shown:
        by_length = BY_LENGTH.get(part.table.title[1:2])
        grid = by_length(part.table.title[:3], both) if by_length else None
        lost = [(one.cell, status_word(one.run), *(None,) * (len(part.table.columns) - 2)) for one in out]
        tables += [grid] if grid is not None else []
        tables.append(msgspec.structs.replace(part.table, rows=(*part.table.rows, *lost)))
    missing = tuple(("-".join(run.workload.words()), ComparedRun(run=run).why_missing) for run in unmeasured)
    # What the captures' own findings say to take care with, each with its cell.
    doubts: list[Finding] = []
    for cell in ordered:
        for finding in (finding for finding in cell.tables.findings if finding.severity != "note"):
            remedy = f" Remedy: {finding.remedy}." if finding.remedy else ""
            sentence = f"{cell.cell}: {finding.severity} {finding.kind}: {finding.sentence}{remedy}"
            doubts.append(msgspec.structs.replace(finding, sentence=sentence))
    return measured_answer(
        next((cell.run.environment for cell in ordered), None),
        study="kernels",
        question="Which kernels does a training step run, and where does their time go?",
        date=max(cell.run.day for cell in ordered),
        tables=(*tables, Table(title=MISSING, columns=("cell", "why"), rows=missing)),
        panels=[panel for part in shown for panel in part.panels],
        findings=[*(finding for part in shown for finding in part.findings), *doubts],
    )


def _times(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[dict[str, Cell]] = []
    slowed: list[tuple[float, str]] = []
    added: list[tuple[float, float, str]] = []
    for cell in cells:
        traced = cell.capture.samples if cell.capture else {}
        doubts = ", ".join(doubting_kinds(cell.run))
        for name in (*PHASES, STEP):
            kernels_ns = cell.kernel_ns(name)
            if kernels_ns is None:
                continue
            sample, plain_s, phase = traced.get(name), median_s(cell.run, name), cell.tables.phase(name)
            rows.append(
                {
                    "cell": cell.cell,
                    "phase": name,
                    "kernels ms": milliseconds(kernels_ns * _NS),
                    "first to last kernel ms": milliseconds(phase.span_ns * _NS) if phase and phase.span_ns else None,
                    "profiled ms": milliseconds(cell.profiled_s(name)),
                    "± ms": milliseconds(sample.stdev_s) if sample else None,
                    "unprofiled ms": milliseconds(plain_s),
                    "slowed, times": digits(cell.slowed) if name == STEP else None,
                    "findings": doubts,
                }
            )
        if cell.slowed:
            slowed.append((cell.slowed, cell.cell))
            kernels = sum(phase.kernels for phase in cell.tables.phases)
            plain_s = median_s(cell.run, STEP)
            if kernels and plain_s:
                added.append(((cell.slowed - 1) * plain_s / kernels, plain_s / kernels, cell.cell))
    title = f"({letter}) Device time by phase, beside the measurements with and without the profiler"
    table = table_of_rows(title, rows, known=True)
    part = _with_range(table, slowed, "profiler-slows", "Under the profiler a step takes", "without it")
    if len(added) > 1:
        part = replace(part, findings=(*part.findings, _price_of_profiling(added)))
    return part


def _forward_by_length(letter: str, cells: list[CapturedCell]) -> Table | None:
    """Forward under the profiler, a row for each model, a column for each length; OOM where it did not fit."""
    lengths = sorted({cell.run.workload.seq_len for cell in cells if cell.run.workload.seq_len})
    times: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        name = "-".join(cell.run.workload.words("seq_len"))
        shown = milliseconds(cell.profiled_s(FORWARD)) if cell.digest else status_word(cell.run)
        times.setdefault(name, {})[cell.run.workload.seq_len or 0] = shown
    if len(times) < 2 or len(lengths) < 2:
        return None
    rows = tuple((name, *(by_length.get(length) for length in lengths)) for name, by_length in times.items())
    columns = ("model", *(f"{length:,} tokens" for length in lengths))
    return Table(title=f"{letter} Forward under the profiler by sequence length, ms", columns=columns, rows=rows)


def _longest_by_length(letter: str, cells: list[CapturedCell]) -> Table | None:
    """The kernel that takes longest and its share, of forward alone and of both phases of training."""
    heads = {"forward": (FORWARD,), "train": (FORWARD, BACKWARD)}
    found: dict[tuple[str, int], dict[tuple[str, str], Cell]] = {}
    for cell in cells:
        workload = cell.run.workload
        of_cell = found.setdefault(("-".join(workload.words("phase", "seq_len")), workload.seq_len or 0), {})
        for name in heads.get(workload.phase, ()):
            row = cell.longest(name) if cell.digest else None
            figure = f"{_kernel(row)[0]} ({format_share(row.share)})" if row else status_word(cell.run)
            of_cell[workload.phase, name] = figure if row or not cell.digest else None
    wanted = [(phase, name) for phase, names in heads.items() for name in names]
    rows = tuple((*key, *map(of_cell.get, wanted)) for key, of_cell in found.items() if of_cell)
    columns = ("model", "tokens", "inference: forward", "training: forward", "training: backward")
    title = f"{letter} The kernel that takes longest by model and sequence length, with its share of the phase"
    return known_columns(title, columns, rows) if len(rows) > 1 else None


def _price_of_profiling(added: list[tuple[float, float, str]]) -> Finding:
    """Why small models are slowed most. added: seconds that the profiler adds to a kernel, and that a kernel has of the
    step without it, by cell."""
    prices = sorted(seconds for seconds, _, _ in added)
    middle = statistics.median(prices)
    ends = [pick(added, key=lambda one: one[1]) for pick in (min, max)]
    (short, long), (slowed, less) = ends, [1 + price / plain for price, plain, _ in ends]
    sentence = (
        f"The profiler adds {format_seconds(prices[0])} to {format_seconds(prices[-1])} to each kernel, "
        f"{format_seconds(middle)} in the middle of these cells. A step that has {format_seconds(short[1])} to a "
        f"kernel ({short[2]}) is slowed {slowed:.2f} times, one that has {format_seconds(long[1])} ({long[2]}) "
        f"{less:.2f} times{': small models, whose kernels are short, differ most' if slowed > less else ''}."
    )
    return note("price-of-profiling", sentence, {"seconds a kernel": middle})


def _with_range(table: Table, ratios: list[tuple[float, str]], kind: str, what: str, base: str) -> _Part:
    """The table, and from the least to the greatest ratio, each with its cell, how many times as long something takes
    as something else."""
    if not ratios:
        return _Part(table=table)
    (least, shortest), (most, longest) = min(ratios), max(ratios)
    several = f"{what} {least:.2f} ({shortest}) to {most:.2f} times ({longest}) as long as {base}."
    sentence = several if len(ratios) > 1 else f"{what} {most:.2f} times as long as {base} ({longest})."
    return _Part(table=table, findings=(note(kind, sentence, {"least": least, "most": most}),))


def _longest(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[tuple[Cell, ...]] = []
    counted = right = 0
    for cell in cells:
        for name in (*PHASES, FORWARD_AND_BACKWARD):
            row, phase = cell.longest(name), cell.tables.phase(name)
            if row is None or (name == FORWARD_AND_BACKWARD and not cell.trains):
                continue
            expected = phase.expected_products if phase else None
            if phase and expected is not None:
                counted += 1
                right += phase.product_kernels == expected
            rows.append((cell.cell, name, *_kernel(row), count(phase.product_kernels) if phase else None, expected))
    heads = ("cell", "phase", "kernel", "calls a step", "ms a step", "share %", "matrix products", "expected")
    table = known_columns(f"({letter}) The kernel that takes longest in each phase", heads, rows)
    if not counted:
        return _Part(table=table)
    sentence = (
        f"In {right} of {counted} phases the matrix products are as many as the model has: in forward, a layer has "
        "query, key, value, output, gate, up and down, and the two of attention unless they are fused; one more is "
        "the head's. Backward has two for each."
    )
    return _Part(table=table, findings=(note("product-counts", sentence, {"phases": counted, "as expected": right}),))


def _kernel(row: "KernelRow") -> tuple[Cell, ...]:
    """Name, calls, milliseconds and percent."""
    from stepscope.traces.kernels.names import kernel_label

    return (kernel_label(row.name), count(row.calls), milliseconds(row.busy_ns * _NS), percent(row.share))


def _together(letter: str, cells: list[CapturedCell]) -> _Part:
    """Forward and backward as one: where the time of training goes, without the optimizer."""
    training = [cell for cell in cells if cell.trains]
    ranked = [(cell, i, row) for cell in training for i, row in enumerate(cell.together[:_RANKED], 1)]
    rows = tuple((cell.cell, i, *_kernel(row)) for cell, i, row in ranked)
    columns = ("cell", "rank", "kernel", "calls a step", "ms a step", "share %")
    title = f"({letter}) The kernels of forward and backward together, as far as the captures rank them"
    part = _Part(table=Table(title=title, columns=columns, rows=rows))
    unranked = [cell.cell for cell in training if not cell.together]
    if not unranked or not rows:
        return part
    sentence = (
        f"Of {', '.join(unranked)} only the longest kernels of each phase were kept, which do not tell what takes "
        "longest in both together: measured anew, they do."
    )
    return replace(part, findings=(note("not-ranked", sentence, {"cells": len(unranked)}),))


def _without_products(letter: str, cells: list[CapturedCell]) -> _Part:
    from stepscope.traces.kernels.families import what_it_does

    rows: list[tuple[Cell, ...]] = []
    for cell in cells:
        longest = [row for row in cell.tables.top_without_products if row.phase == FORWARD][:_LONGEST]
        for i, row in enumerate(longest, 1):
            name, *figures = _kernel(row)
            does = what_it_does(row.name).partition(";")[0] or None
            rows.append((cell.cell, i, name, row.family, does, *figures))
    columns = ("cell", "rank", "kernel", "family", "which", "calls a step", "ms a step", "share %")
    title = f"({letter}) The longest kernels of forward that are no matrix product"
    return _Part(table=known_columns(title, columns, rows), findings=_growth(cells))


def _growth(cells: list[CapturedCell]) -> tuple[Finding, ...]:
    """How forward's families grow from the shortest sequence to the longest, in a sentence."""
    by_rest: dict[tuple[object, ...], list[CapturedCell]] = {}
    for cell in cells:
        if cell.run.workload.seq_len and cell.tables.phase(FORWARD):
            by_rest.setdefault(same_but(cell.run, seq_len=1), []).append(cell)
    lengths = [sorted(same, key=lambda cell: cell.run.workload.seq_len or 0) for same in by_rest.values()]
    pairs = [(same[0], same[-1]) for same in lengths]
    spans = Counter((short.run.workload.seq_len or 0, long.run.workload.seq_len or 0) for short, long in pairs)
    span = max(((short, long) for short, long in spans if short < long), key=lambda each: spans[each], default=None)
    if span is None:
        return ()
    longer = span[1] / span[0]
    grown: dict[str, list[float]] = {}
    alike = [pair for pair in pairs if tuple(one.run.workload.seq_len for one in pair) == span]
    for short, long in alike:
        shown = sorted({row.family for row in long.tables.families if row.phase == FORWARD})
        for family in shown:
            few, many = (one.family_ns(family, FORWARD) for one in (short, long))
            forward = long.tables.phase(FORWARD)
            if few and forward and many > _MUCH * forward.busy_ns:
                grown.setdefault(family, []).append(many / few)
    if not grown:
        return ()
    middle = {family: statistics.median(ratios) for family, ratios in grown.items()}
    said = [
        f"{min(grown[family]):.3g} to {max(grown[family]):.3g} times as long in {family}"
        if len(grown[family]) > 1
        else f"{middle[family]:.3g} times as long in {family}"
        for family in sorted(middle, key=lambda family: -middle[family])
    ]
    faster = [family for family, ratio in middle.items() if ratio > 1.5 * longer]
    why = (
        f" What grows faster than the {longer:.3g} times as many tokens works on the scores of attention, which are "
        "sequence x sequence numbers."
        if faster
        else f" None grows much faster than the tokens do, {longer:.3g} times."
    )
    sentence = (
        f"From {span[0]:,} to {span[1]:,} tokens a sequence, over {counted(len(alike), 'pair')} of cells, forward "
        f"takes {', '.join(said)}.{why}"
    )
    return (note("grows-with-length", sentence, {**middle, "longer": longer}),)


def _fractions(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[tuple[Cell, ...]] = []
    inference = {cell.group: cell for cell in cells if not cell.trains}
    training = [cell for cell in cells if cell.trains]
    falls = 0
    for cell in training:
        alone = inference.get(cell.group)
        phases = [cell.tables.phase(name) for name in (FORWARD, BACKWARD)]
        falls += phases[0] is not None and cell.tables.gemm_fraction < phases[0].gemm_fraction
        shares = (percent(each.gemm_fraction) if each else None for each in (alone and alone.tables, *phases))
        rows.append((cell.cell, *shares, percent(cell.tables.gemm_fraction)))
    shown = {cell.group for cell in training}
    rows += [
        (cell.cell, percent(cell.tables.gemm_fraction), None, None, None) for cell in cells if cell.group not in shown
    ]
    columns = ("cell", "inference %", "training: forward %", "backward %", "whole step %")
    table = Table(
        title=f"({letter}) The share of matrix multiplication in kernel time", columns=columns, rows=tuple(rows)
    )
    panels = _over_lengths("share of matrix multiplication, %", cells, lambda cell: percent(cell.tables.gemm_fraction))
    if not training:
        return _Part(table=table, panels=panels)
    optimizers = [phase for cell in training if (phase := cell.tables.phase(OPTIMIZER))]
    no_products = bool(optimizers) and not any(phase.gemm_ns for phase in optimizers)
    why = ": the optimizer multiplies no matrices" if falls and no_products else ""
    sentence = (
        f"Over a whole training step the share is lower than in forward alone in {falls} of {len(training)} cells{why}."
    )
    finding = note("product-share-falls", sentence, {"cells": len(training), "lower": falls})
    return _Part(table=table, findings=(finding, *_trends(cells)), panels=panels)


def _trends(cells: list[CapturedCell]) -> tuple[Finding, ...]:
    """How the share of products goes with the model's size and with the sequence's length."""
    findings: list[Finding] = []
    for what, field in (("model's size", "model"), ("sequence's length", "seq_len")):
        by_rest: dict[str, list[CapturedCell]] = {}
        for cell in cells:
            by_rest.setdefault("-".join(cell.run.workload.words(field)), []).append(cell)
        steps = [
            (a.tables.gemm_fraction, b.tables.gemm_fraction)
            for same in by_rest.values()
            for a, b in itertools.pairwise(same)
            if getattr(a.run.workload, field, None) != getattr(b.run.workload, field, None)
        ]
        if not steps:
            continue
        rises = sum(after > before for before, after in steps)
        least, most = (change(after - before for before, after in steps) for change in (min, max))
        sentence = (
            f"With the {what} the share of products rises in {rises} of {counted(len(steps), 'step')} from one cell to "
            f"the next, all else equal: by {least * 100:+.1f} to {most * 100:+.1f} points."
        )
        kind = f"product-share-by-{field.replace('_', '-')}"
        findings.append(note(kind, sentence, {"steps": len(steps), "rises": rises}))
    return tuple(findings)


def _over_lengths(
    y_title: str, cells: list[CapturedCell], figure: Callable[[CapturedCell], float | None]
) -> tuple[Panel, ...]:
    """A panel of one figure over the sequence length, a line for each cell that differs in more; none without two."""
    points: list[Point] = []
    for cell in cells:
        y, seq_len, line = figure(cell), cell.run.workload.seq_len, "-".join(cell.run.workload.words("seq_len"))
        if y is not None and seq_len:
            points.append(Point(line=line, x=seq_len, y=y, doubted=bool(doubting_kinds(cell.run))))
    panel = Panel(x_title="sequence length", y_title=y_title, points=tuple(points), x_log=True)
    return (panel,) if len({point.x for point in points}) > 1 else ()


def _softmax(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[dict[str, Cell]] = []
    costs: dict[int, float] = {}
    for i, cell in enumerate(cells):
        if len(cell.tables.attention) != 4:
            continue
        scores, scaling, softmax, output = cell.tables.attention
        products_ns = scores.busy_ns + output.busy_ns
        products = scores.flops + output.flops if scores.flops and output.flops else None
        time_ratio = products_ns / softmax.busy_ns if softmax.busy_ns and products_ns else None
        flop_ratio = products / softmax.flops if products and softmax.flops else None
        if flop_ratio and time_ratio:
            costs[i] = flop_ratio / time_ratio
        layers = cell.run.workload.layers
        rows.append(
            {
                "cell": cell.cell,
                "Q K^T ms": milliseconds(scores.busy_ns * _NS),
                "scale, mask ms": milliseconds(scaling.busy_ns * _NS),
                "softmax ms": milliseconds(softmax.busy_ns * _NS),
                "P V ms": milliseconds(output.busy_ns * _NS),
                **{
                    f"{name} of a layer µs": digits(part.busy_ns * 1e-3 / layers) if layers else None
                    for name, part in (("Q K^T", scores), ("softmax", softmax), ("P V", output))
                },
                "products GFLOP": digits(products / 1e9) if products else None,
                "softmax GFLOP": digits(softmax.flops / 1e9) if softmax.flops else None,
                "time ratio": digits(time_ratio),
                "FLOP ratio": digits(flop_ratio),
                "ratio of ratios": digits(costs.get(i)),
            }
        )
    title = f"({letter}) Softmax beside the two products of attention, in forward: both products over softmax"
    table = table_of_rows(title, rows, known=True)
    if not costs:
        return _Part(table=table)
    least, most = min(costs.values()), max(costs.values())
    times = f"{least:.0f} to {most:.0f} times" if f"{least:.0f}" != f"{most:.0f}" else f"{most:.0f} times"
    sentence = (
        "Time ratio and FLOP ratio: both products over softmax. Softmax is five operations an element of the scores "
        "(the row's largest, its subtraction, exp, the row's sum, the division), each product two for each number of a "
        f"head. A FLOP of softmax costs {times} as much as one of a product."
    )
    costs_of = {id(cells[i]): cost for i, cost in costs.items()}
    panels = _over_lengths(
        "cost of a FLOP of softmax, in FLOPs of a product", cells, lambda cell: digits(costs_of.get(id(cell)))
    )
    finding = note("softmax-costs", sentence, {"least": least, "most": most})
    return _Part(table=table, findings=(finding,), panels=panels)


def _softmax_kernels(letter: str, cells: list[CapturedCell]) -> _Part:
    rows = [(cell.cell, *_kernel(row)) for cell in cells for row in cell.tables.softmax_kernels]
    columns = ("cell", "kernel", "calls a step", "ms a step", "share of softmax %")
    title = f"({letter}) The kernels that softmax is made of, in forward"
    return _Part(table=Table(title=title, columns=columns, rows=tuple(rows)))


def _families(letter: str, cells: list[CapturedCell]) -> _Part:
    busiest = busiest_families(cells)
    rows: list[tuple[Cell, ...]] = []
    ratios: list[tuple[float, str]] = []
    by_timer: list[tuple[float, CapturedCell]] = []
    twice = True
    for cell in cells:
        forward, backward = cell.tables.phase(FORWARD), cell.tables.phase(BACKWARD)
        if forward and backward:
            products = forward.product_kernels
            twice &= products is not None and backward.product_kernels == 2 * products
        ratio = backward.busy_ns / forward.busy_ns if forward and backward and forward.busy_ns else None
        if ratio:
            ratios.append((ratio, cell.cell))
        times = cell.wall_s(FORWARD), cell.wall_s(BACKWARD)
        timed = times[1] / times[0] if times[0] and times[1] else None
        if timed:
            by_timer.append((timed, cell))
        shown = [cell.family_ns(family) for family in busiest]
        rest = (cell.kernel_ns(STEP) or 0.0) - sum(shown)
        of_families = (milliseconds(ns * _NS) if ns else None for ns in shown)
        rows.append((cell.cell, digits(ratio), digits(timed), *of_families, milliseconds(max(rest, 0.0) * _NS)))
    title = f"({letter}) Backward against forward, and where the device's time goes"
    heads = ("backward / forward, kernels", "backward / forward, timer", *(f"{family} ms" for family in busiest))
    table = known_columns(title, ("cell", *heads, "other ms"), rows)
    base = "forward, for twice the matrix products" if twice else "forward"
    part = _with_range(table, ratios, "backward-forward", "In kernel time backward takes", base)
    return replace(part, findings=(*part.findings, *_by_the_timer(by_timer)))


def _by_the_timer(ratios: list[tuple[float, CapturedCell]]) -> tuple[Finding, ...]:
    """Backward over forward by the timer, and why it is nearer one in small models."""
    if not ratios:
        return ()
    (least, small), (most, large) = (pick(ratios, key=lambda each: each[0]) for pick in (min, max))
    wide = f"{least:.2f} ({small.cell}) to {most:.2f} times ({large.cell})" if len(ratios) > 1 else f"{most:.2f} times"
    sentence = f"By the timer backward takes {wide} as long as forward."
    phases = [(small.tables.phase(name), small.wall_s(name)) for name in (FORWARD, BACKWARD)]
    filled = [phase.busy_ns * _NS / wall for phase, wall in phases if phase and wall]
    if len(filled) == 2 and min(filled) < _FILLED:
        launches = [f"{phase.kernels:,.0f}" for phase, _ in phases if phase]
        sentence += (
            f" In {small.cell} kernels fill {format_share(filled[0])} of forward and {format_share(filled[1])} of "
            f"backward: the host sets the time there, by how long it takes to issue {launches[0]} and {launches[1]} "
            "kernels, and not the device, whose backward has twice the products."
        )
    return (note("backward-forward-by-the-timer", sentence, {"least": least, "most": most}),)


def _shares(letter: str, cells: list[CapturedCell]) -> _Part:
    """Each family's share of a phase."""
    busiest = busiest_families(cells)
    rows: list[tuple[Cell, ...]] = []
    for cell in cells:
        for phase in (phase for name in PHASES if (phase := cell.tables.phase(name)) and phase.busy_ns):
            shares = [cell.family_ns(family, phase.phase) / phase.busy_ns for family in busiest]
            shown = (percent(share) if share else None for share in shares)
            rows.append((cell.cell, phase.phase, *shown, percent(max(0.0, 1 - sum(shares)))))
    columns = ("cell", "phase", *(f"{family} %" for family in busiest), "other %")
    return _Part(table=known_columns(f"({letter}) Each family's share of a phase's kernel time", columns, rows))


def _roofs(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[tuple[Cell, ...]] = []
    verdicts: dict[str, dict[str, int]] = {}
    busiest = busiest_families(cells)
    for cell in cells:
        roofs = {roof.family: roof for roof in cell.tables.roofs if roof.over_bound is not None}
        if not any(family in roofs for family in busiest):
            continue
        words = {name: (roof.verdict or "mixed").removesuffix("-bound") for name, roof in roofs.items()}
        bounds = [f"{roofs[name].over_bound:.2f} {words[name]}" if name in roofs else None for name in busiest]
        rows.append((cell.cell, *bounds))
        for family in (family for family in busiest if family in roofs):
            verdict = roofs[family].verdict or "mixed"
            counts = verdicts.setdefault(family, {})
            counts[verdict] = counts.get(verdict, 0) + 1
    findings = [
        note(
            "family-bound",
            f"{family[0].upper()}{family[1:]} is "
            + ", ".join(f"{verdict} in {count}" for verdict, count in sorted(counts.items(), key=lambda item: -item[1]))
            + f" of {sum(counts.values())} cells.",
            {**counts},
        )
        for family, counts in verdicts.items()
    ]
    title = f"({letter}) Kernel families against the device's peaks: time over the bound, and what bounds it"
    return _Part(table=known_columns(title, ("cell, times the bound", *busiest), rows), findings=tuple(findings))


def _tools(letter: str, cells: list[CapturedCell]) -> _Part:
    rows: list[dict[str, Cell]] = []
    times, points = [], []
    for cell in cells:
        for phase in cell.tables.phases if cell.other else ():
            twin = cell.other.phase(phase.phase) if cell.other else None
            if twin is None or not phase.busy_ns:
                continue
            times.append(twin.busy_ns / phase.busy_ns - 1)
            points.append((twin.gemm_fraction - phase.gemm_fraction) * 100)
            rows.append(
                {
                    "cell": cell.cell,
                    "phase": phase.phase,
                    "kernels": count(phase.kernels),
                    "other kernels": count(twin.kernels),
                    "ms": milliseconds(phase.busy_ns * _NS),
                    "other ms": milliseconds(twin.busy_ns * _NS),
                    "differ %": round(times[-1] * 100, 2),
                    "matrix share %": percent(phase.gemm_fraction),
                    "other matrix share %": percent(twin.gemm_fraction),
                    "points": round(points[-1], 2),
                }
            )
    first = cells[0].tables.profiler if cells else ""
    table = table_of_rows(f"({letter}) The same cell by the other profiler", rows)
    if not times:
        return _Part(table=table)
    apart, share = max(map(abs, times)) * 100, max(map(abs, points))
    sentence = (
        f"{first} and the other profiler saw different steps of different processes. Kernel time by phase differs "
        f"by at most {apart:.2f} %, the share of matrix multiplication by {share:.2f} points."
    )
    return _Part(table=table, findings=(note("profilers-agree", sentence, {"time %": apart, "points": share}),))


TABLES: dict[str, Callable[[str, list[CapturedCell]], _Part]] = {
    "a": _times,
    "b": _longest,
    "j": _together,
    "c": _without_products,
    "d": _fractions,
    "e": _softmax,
    "i": _softmax_kernels,
    "f": _families,
    "k": _shares,
    "h": _roofs,
    "g": _tools,
}
"""How each question is answered, by its letter."""

BY_LENGTH: dict[str, Callable[[str, list[CapturedCell]], Table | None]] = {
    "a": _forward_by_length,
    "b": _longest_by_length,
}
"""What makes a question's table of model by sequence length, by the letter of the question."""


Tool = Annotated[str, Option("Whose captures to read.", choices=TRACE_TOOLS)]
_FINDINGS = "findings"
"""What --only names beside letters: the sentences without a table."""
From = Annotated[Path | None, Option("A folder of runs measured before: nothing is measured.", STORED, metavar="DIR")]
Only = Annotated[
    tuple[str, ...], Option("Only these tables, by their letters, as in d or b,e, or findings (default: all).", OUTPUT)
]


def capture_kernels(
    *,
    model: tuple[str, ...] = ("tiny",),
    seq_len: tuple[int, ...] = (64, 128),
    batch_size: int = 4,
    dtype: tuple[str, ...] = ("fp32",),
    phase: tuple[str, ...] = ("forward", "train"),
    attention: str = "reference",
    compile: str = "eager",
    device: str,
    warmup: int | None,
    steps: int | None,
    seconds: float = 2.0,
    record: Record = (),
    trace_steps: TraceSteps = 2,
    keep_digests: bool,
    tool: Tool = "kineto",
    runs: Path,
    from_: From,
    where: tuple[str, ...] = (),
    tag: str | None,
    only: Only = (),
) -> Result | Cells:
    """Kernels by phase, their share, softmax and the rest, over models and sequence lengths."""
    choose(tool, TRACE_TOOLS, "tool")
    for letter in only:
        choose(letter, [*TABLES, _FINDINGS], "question")

    def answer(runs: Sequence[tuple[Run, Path]]) -> Result:
        return _of_captures(runs, tool, keep_digests, only)

    if from_ is not None:
        refuse_beside("--from", "--where", "--tool", "--keep-digests")
        return answer(_stored(from_, where))
    recording = Recording(record=record or (tool,), trace_steps=trace_steps)
    plan = SweepPlan(
        cells=compared_cells(
            models=[configure(name) for name in model], seq_lens=seq_len, batch_size=batch_size, dtypes=dtype,
            settings=settings_from(warmup, steps, seconds), phase=phase, attention=[attention], compile=[compile],
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=recording.trace,
        memory=recording.memory,
    )  # fmt: skip
    return Cells(plan=plan, answer=lambda measured: answer([(run, runs / run.id) for run in measured]))


def _of_captures(runs: Sequence[tuple[Run, Path]], tool: str, keep: bool, only: Sequence[str]) -> Result:
    """The answer from the captures of these runs, each with its directory; with --json what every capture says."""
    from stepscope.traces.captures.digest import digest_beside

    cells: list[CapturedCell] = []
    for run, directory in runs:
        try:
            digests = {name: digest_beside(run, directory, name, say=warn, keep=keep) for name in TRACE_TOOLS}
        except InputError as error:
            warn(f"left out: {error}")
            continue
        if wanted := digests.pop(tool):
            cells.append(CapturedCell(run=run, digest=wanted, other=next(iter(digests.values()))))
    if not cells:
        models = ", ".join(dict.fromkeys(run.workload.name for run, _ in runs))
        of = f" (of {models})" if models else ""
        raise InputError(f"no run here{of} holds a capture: measure with --record kineto")
    captured = {cell.run.id for cell in cells}
    ended = [run for run, _ in runs if run.id not in captured and run.status != "done"]
    letters = "".join(one for one in only if one != _FINDINGS)
    answer = answer_kernels(cells, letters, ended)
    if only and not letters:
        answer = msgspec.structs.replace(answer, tables=(), panels=())

    def document() -> str:
        lines = ({"run": cell.run.id, "workload": cell.run.workload, "trace": cell.digest} for cell in cells)
        return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)

    return Result(answer=answer.body() if only else answer, document=document)


def _stored(place: Path, where: Sequence[str]) -> list[tuple[Run, Path]]:
    """The runs in a folder that meet the conditions, each with its directory."""
    from stepscope.runs.fields import conditions_in, meeting

    conditions = [condition for text in where for condition in conditions_in(text)]
    runs = list(stored_runs([place]))
    kept, nowhere = meeting([run for run, _ in runs], conditions)
    if runs and not kept:
        there = ", ".join(dict.fromkeys(run.workload.name for run, _ in runs))
        raise InputError(f"no run in {place} meets --where {' '.join(where)}: there are runs of {there}")
    for sentence in nowhere:
        warn(sentence)
    wanted = set(map(id, kept))
    return [pair for pair in runs if id(pair[0]) in wanted]


QUESTION = Question(
    "kernels",
    capture_kernels,
    examples=("--model small --seq-len 128,512", "--from results/h200/kernels --where model=large --only d,h"),
    shared=("save", "style", "brief", "json"),
)
