"""The answer to "what does each attention cost": tables by sequence and implementation, curves, and what follows."""

from collections.abc import Callable

from stepscope.core.answer import Answer, Cell, Panel, Point, Table, known_columns, measured_answer
from stepscope.core.attention_timing import AttentionTiming, AttentionTimings
from stepscope.core.errors import InputError
from stepscope.core.figures import (
    digits,
    gibibytes,
    mebibytes,
    median_ms,
    median_within_ms,
    milliseconds,
    percent,
    tera,
)
from stepscope.core.units import MIB
from stepscope.core.work.attention_call import forward_flops
from stepscope.questions.attention.findings import attention_findings
from stepscope.questions.attention.study import AttentionStudy, Curve, arrange, both_s, flops_per_s

STUDY = "attention"
QUESTION = "What does each attention cost as the sequence grows: time, memory, and the share of the device it reaches?"
BOTH, FORWARD, BACKWARD, HELD, PEAK, RATES, SLOPES, SAVED, CELLS, COMPILED, COMPILED_SEEDS, MISSING = (
    "Forward and backward, ms",
    "Forward, ms",
    "Backward, ms",
    "Memory before backward, MiB",
    "Peak memory, MiB",
    "TFLOP/s of forward and backward",
    "Powers of the sequence, fitted over the longest",
    "Saved for backward: by formula, and measured",
    "Every cell",
    "Eager beside compiled",
    "Eager beside compiled: the seeds' table",
    "Without a time",
)
TITLES = (
    BOTH, FORWARD, BACKWARD, HELD, PEAK, RATES, SLOPES, SAVED, CELLS, COMPILED, COMPILED_SEEDS, MISSING
)  # fmt: skip
"""Titles of all tables that an answer may have."""
PHASES = ("forward", "backward")
_NOTHING = ("not supported", "not reached", "interrupted")
_MOST_LINES = 8
"""The most lines that a plot can tell apart."""
_WORDS = {"out of memory": "OOM", "wrong": "WRONG"}


def answer_attention(timings: AttentionTimings) -> Answer:
    """The whole answer. Raises InputError where not one cell was asked for."""
    if not timings.timings:
        raise InputError("no call of attention was measured: give it more time")
    study = arrange(timings)
    by_sequence = (
        ()
        if study.mixed
        else (
            _compiled(study),
            _by_sequence(study, BOTH, lambda row: median_ms(row.both)),
            _by_sequence(study, FORWARD, lambda row: median_ms(row.forward)),
            _by_sequence(study, BACKWARD, lambda row: median_ms(row.backward)),
            _by_sequence(study, HELD, lambda row: mebibytes(row.memory.before_backward_bytes) if row.memory else None),
            _by_sequence(study, PEAK, lambda row: mebibytes(row.memory.peak_bytes) if row.memory else None),
            _by_sequence(study, RATES, lambda row: tera(flops_per_s(row))),
            _slopes(study),
        )
    )
    tables = (*by_sequence, _saved(study), _cells(study), _missing(study))
    return measured_answer(
        timings.environment,
        study=STUDY,
        question=QUESTION,
        settings=_settings(study),
        tables=tables,
        panels=() if study.mixed else _panels(study),
        findings=attention_findings(study),
    )


def _settings(study: AttentionStudy) -> dict[str, Cell]:
    timings = study.timings
    shape = timings.timings[0].cell.shape
    settings: dict[str, Cell] = {}
    if not study.mixed:
        settings |= {"batch": shape.batch, "heads": shape.heads}
        if shape.key_heads != shape.heads:
            settings["key and value heads"] = shape.key_heads
        settings["mask"] = "causal" if shape.causal else "full"
    settings["seconds a cell"] = timings.seconds
    hidden = timings.launches == "hidden"
    settings["L2 cache"] = "overwritten before each pass" if hidden else "as the pass before left it"
    if timings.environment.l2_bytes:
        settings["L2 MiB"] = digits(timings.environment.l2_bytes / MIB)
    settings["launches"] = timings.launches
    settings["data"] = "random"
    return settings


def _by_sequence(study: AttentionStudy, title: str, figure: Callable[[AttentionTiming], float | None]) -> Table:
    """A row for each dtype, head_dim and sequence, a column for each implementation; without those of which there is
    no more to say than "not supported" or "not reached", which is said once, in the last table.
    """
    lines = [line for line in dict.fromkeys(curve.line for curve in study.curves) if _came_to_something(study, line)]
    rows: list[tuple[Cell, ...]] = []
    for dtype, head_dim, curves in _groups(study):
        for length in sorted({row.cell.shape.queries for curve in curves for row in curve.rows}):
            found: list[Cell] = []
            for line in lines:
                curve = next((c for c in curves if c.line == line), None)
                row = next((r for r in curve.rows if r.cell.shape.queries == length), None) if curve else None
                found.append(_figure_or_word(row, figure))
            if any(cell is not None and cell not in _NOTHING for cell in found):
                rows.append((dtype, head_dim, length, *found))
    # A figure that nobody has is no table: a CPU counts no peak.
    if not any(isinstance(cell, float) for row in rows for cell in row[3:]):
        rows = []
    return Table(title=title, columns=("dtype", "head_dim", "seq", *lines), rows=tuple(rows))


def _came_to_something(study: AttentionStudy, line: str) -> bool:
    return any(row.outcome not in _NOTHING for curve in study.curves if curve.line == line for row in curve.rows)


def _figure_or_word(row: AttentionTiming | None, figure: Callable[[AttentionTiming], float | None]) -> Cell:
    if row is None:
        return None
    return figure(row) if both_s(row) is not None else _WORDS.get(row.outcome, row.outcome)


def _groups(study: AttentionStudy) -> list[tuple[str, int, list[Curve]]]:
    groups: dict[tuple[str, int], list[Curve]] = {}
    for curve in study.curves:
        groups.setdefault((curve.dtype, curve.head_dim), []).append(curve)
    return [(dtype, head_dim, curves) for (dtype, head_dim), curves in groups.items()]


def _compiled(study: AttentionStudy) -> Table:
    """The table of eager beside compiled calls; with the preset `seeds`, head_dim is d_model, as there is one head."""
    rows: list[tuple[Cell, ...]] = []
    for eager in study.curves:
        compiled = study.same(eager, f"{eager.line}, compiled")
        if compiled is None:
            continue
        for row in eager.rows:
            length = row.cell.shape.queries
            other = next((r for r in compiled.rows if r.cell.shape.queries == length), None)
            pair = (row, other)
            if all(r is None or r.outcome in _NOTHING for r in pair):
                continue
            times = [_figure_or_word(r, lambda r, p=p: median_ms(getattr(r, p))) for r in pair for p in PHASES]
            held = [gibibytes(r.memory.before_backward_bytes) if r and r.memory else None for r in pair]
            ratio = other.both.speedup_over(row.both) if other and other.both and row.both else None
            rows.append(
                (
                    eager.line,
                    eager.dtype,
                    length,
                    eager.head_dim,
                    *times,
                    digits(ratio.value) if ratio else None,
                    *held,
                )
            )  # fmt: skip
    heads = (
        "eager forward ms", "eager backward ms", "compiled forward ms", "compiled backward ms", "speed-up",
        "eager GiB before backward", "compiled GiB",
    )  # fmt: skip
    theirs = study.timings.preset == "seeds" and all(row.cell.shape.heads == 1 for row in study.timings.timings)
    columns = ("implementation", "dtype", "seq_len", "d_model" if theirs else "head_dim", *heads)
    return Table(title=COMPILED_SEEDS if theirs else COMPILED, columns=columns, rows=tuple(rows))


def _slopes(study: AttentionStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for curve in study.curves:
        slopes = curve.slopes
        some = next((slope for slope in slopes.values() if slope), None)
        if some is not None:
            powers = [round(slope.power, 2) if slope else None for slope in slopes.values()]
            rows.append((curve.dtype, curve.head_dim, curve.line, *powers, ", ".join(f"{s:,}" for s in some.sequences)))
    heads = ("dtype", "head_dim", "implementation", "time", "memory before backward", "peak memory", "over sequences")
    return known_columns(SLOPES, heads, rows)


def _saved(study: AttentionStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for curve in study.curves:
        for row in curve.rows:
            if row.memory is None:
                continue
            formula = study.saved_by_formula(row)
            measured = row.memory.saved_bytes
            off = (measured / formula.bytes - 1) * 100 if formula and formula.bytes else None
            rows.append(
                (
                    curve.dtype, curve.head_dim, row.cell.shape.queries, curve.line,
                    formula.terms if formula else "", mebibytes(formula.bytes) if formula else None,
                    mebibytes(measured),
                    round(off, 2) if off is not None else None,
                )
            )  # fmt: skip
    heads = ("dtype", "head_dim", "seq", "implementation", "formula", "by formula MiB", "measured MiB", "off %")
    return Table(title=SAVED, columns=heads, rows=tuple(rows))


def _cells(study: AttentionStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    l2_bytes = study.timings.environment.l2_bytes
    for curve in study.curves:
        for row in curve.measured:
            forward, both, shape = row.forward, row.both, row.cell.shape
            forward_s = forward.median_s if forward else None
            share = study.share(row)
            rows.append(
                (
                    str(shape), curve.dtype, curve.line, both.count if both else None, row.checked,
                    *median_within_ms(forward), *median_within_ms(row.backward), *median_within_ms(both),
                    tera(forward_flops(shape) / forward_s if forward_s else None), tera(flops_per_s(row)),
                    percent(share),
                    digits(row.cell.working_set_bytes / l2_bytes) if l2_bytes else None,
                    row.launches,
                )
            )  # fmt: skip
    heads = (
        "batch, heads, seq, head_dim", "dtype", "implementation", "passes", "gate's calls",
        "forward ms", "forward from", "forward to", "backward ms", "backward from", "backward to",
        "both ms", "both from", "both to",
        "TFLOP/s forward", "TFLOP/s both", "of the ceiling %", "working set / L2", "launches",
    )  # fmt: skip
    return known_columns(CELLS, heads, rows)


def _missing(study: AttentionStudy) -> Table:
    """Cells of one reason together."""
    found: dict[tuple[str, str, str], list[AttentionTiming]] = {}
    for curve in study.curves:
        for row in curve.rows:
            if both_s(row) is None:
                found.setdefault((curve.line, row.outcome, row.reason), []).append(row)
    rows = tuple(
        (line, outcome, len(cells), ", ".join(dict.fromkeys(_where(cell) for cell in cells)), reason)
        for (line, outcome, reason), cells in found.items()
    )
    return Table(title=MISSING, columns=("implementation", "what", "cells", "where", "why"), rows=rows)


def _where(row: AttentionTiming) -> str:
    return f"{row.cell.dtype} d{row.cell.shape.head_dim} s{row.cell.shape.queries}"


def _panels(study: AttentionStudy) -> tuple[Panel, ...]:
    """Time and memory over the sequence, for each dtype and head_dim; a line's name carries its powers."""
    panels: list[Panel] = []
    for dtype, head_dim, curves in _groups(study):
        sets = _told_apart([curve for curve in curves if curve.measured])
        for i, together in enumerate(sets):
            part = f", {i + 1} of {len(sets)}" if len(sets) > 1 else ""
            times: list[Point] = []
            bytes_: list[Point] = []
            for curve in together:
                line = _line(curve)
                for row in curve.measured:
                    x, seconds = float(row.cell.shape.queries), both_s(row)
                    if seconds is not None:
                        times.append(Point(line=line, x=x, y=milliseconds(seconds) or 0.0))
                    if row.memory is not None:
                        bytes_.append(Point(line=line, x=x, y=mebibytes(row.memory.before_backward_bytes) or 0.0))
            x_title = f"sequence length ({dtype}, head_dim {head_dim}{part})"
            panels += [
                Panel(x_title=x_title, y_title=title, points=tuple(points), x_log=True, y_log=True)
                for title, points in (("forward and backward, ms", times), ("memory before backward, MiB", bytes_))
                if points
            ]
    return tuple(panels)


def _told_apart(curves: list[Curve]) -> list[list[Curve]]:
    """All in one panel, or, where these are too many, eager ones apart from compiled ones, and each cut to so many."""
    if len(curves) <= _MOST_LINES:
        return [curves]
    eager = [curve for curve in curves if not curve.line.endswith("compiled")]
    compiled = [curve for curve in curves if curve.line.endswith("compiled")]
    return [
        kind[first : first + _MOST_LINES] for kind in (eager, compiled) for first in range(0, len(kind), _MOST_LINES)
    ]


def _line(curve: Curve) -> str:
    slopes = curve.slopes
    powers = [
        f"{what} S^{slope.power:.1f}"
        for what, slope in (("time", slopes["time"]), ("memory", slopes["before backward"]))
        if slope
    ]
    return f"{curve.line}: {', '.join(powers)}" if powers else curve.line
