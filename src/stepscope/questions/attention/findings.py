"""What follows from timings of attention, in sentences made of the figures."""

from collections.abc import Iterator, Sequence
from itertools import chain

from stepscope.core.attention_timing import AttentionTiming
from stepscope.core.finding import Finding, error, note, warning
from stepscope.core.units import format_bytes, format_rate, format_share
from stepscope.core.work.attention_call import CONVENTION
from stepscope.questions.attention.study import BASELINE, AttentionStudy, Contest, Curve, both_s, flops_per_s

CLOSE = 0.02
"""A formula that is off by less says the same as the allocator, which rounds to blocks."""


def attention_findings(study: AttentionStudy) -> Iterator[Finding]:
    """The gate first, since without it no figure means anything."""
    yield from chain(_gate(study), _interpreted(study))
    if not study.mixed:
        yield from chain(_memory_runs_out(study), _contests(study), _compiled(study), _powers(study))
    yield from chain(_formula(study), _best(study), _shown(study), _unfinished(study))


def _gate(study: AttentionStudy) -> Iterator[Finding]:
    rows = [row for curve in study.curves for row in curve.rows]
    right = [row for row in rows if both_s(row) is not None]
    wrong = [row for row in rows if row.outcome == "wrong"]
    if right:
        least = min(row.checked for row in right)
        lines = dict.fromkeys(row.cell.line for row in right)
        yield note(
            "gate",
            f"Before it was timed, each of {len(lines)} implementations was right beside float64 attention "
            f"in its dtype and head_dim, output and gradients, on {least} call{'s' if least > 1 else ''} or more.",
            {"implementations": len(lines), "calls": least},
        )
    for line in dict.fromkeys(row.cell.line for row in wrong):
        of_line = [row for row in wrong if row.cell.line == line]
        yield error(
            "refused",
            f"No time of {line} is shown in {_cells(len(of_line))}: {of_line[0].reason}.",
            {"cells": len(of_line)},
        )


def _interpreted(study: AttentionStudy) -> Iterator[Finding]:
    names = study.timings.interpreted
    if names:
        yield warning(
            "interpreted",
            f"Triton's interpreter ran {', '.join(names)} on this CPU, in Python: whether it is right is the "
            "kernel's, its times are not.",
            {"implementations": len(names)},
        )


def _memory_runs_out(study: AttentionStudy) -> Iterator[Finding]:
    """For each line the shortest sequence that did not fit, and the longest that did with the same head_dim."""
    for dtype, line, curves in _by_line(study):
        fell = [(at, curve) for curve in curves if (at := curve.out_of_memory_at) is not None]
        if not fell:
            continue
        shortest, first = min(fell, key=lambda each: (each[0], each[1].head_dim))
        held = ""
        last = max(
            (row for row in first.measured if row.memory is not None and row.cell.shape.queries < shortest),
            key=lambda row: row.cell.shape.queries,
            default=None,
        )
        if last is not None and last.memory is not None:
            held = f"; at {last.cell.shape.queries:,} it still fits, with " + (
                f"{format_bytes(last.memory.before_backward_bytes)} held before backward (no allocator counts the peak)"
                if last.memory.peak_bytes is None
                else f"{format_bytes(last.memory.peak_bytes)} at its peak"
            )
        memory = study.timings.environment.memory_bytes
        of = f" of {format_bytes(memory)}" if memory else ""
        where = f"{dtype}, head_dim {first.head_dim}" if len(curves) > 1 else dtype
        yield note(
            "out of memory",
            f"{line} runs out of memory{of} at sequence {shortest:,} ({where}){held}.",
            {"sequence": shortest, "memory": memory},
        )


def _contests(study: AttentionStudy) -> Iterator[Finding]:
    """How many times as fast as written out, at the longest sequence that both have; and where the order changes."""
    contests = [contest for contest in study.contests() if not contest.other.line.endswith("compiled")]
    for dtype, line in dict.fromkeys((contest.other.dtype, contest.other.line) for contest in contests):
        of_line = [c for c in contests if (c.other.dtype, c.other.line) == (dtype, line)]
        longest = max(max(contest.ratios) for contest in of_line)
        at = {c.other.head_dim: c.ratios[longest] for c in of_line if longest in c.ratios}
        low, high = min(at, key=lambda d: at[d].value), max(at, key=lambda d: at[d].value)
        interval = at[low].interval
        if low == high:
            bounds = f" ({interval.low:.3g} to {interval.high:.3g})" if interval else ""
            factor = f"{at[low].value:.3g}{bounds} times as fast as {BASELINE}"
        else:
            factor = (
                f"{at[low].value:.3g} (head_dim {low}) to {at[high].value:.3g} ({high}) times as fast as {BASELINE}"
            )
        # As fast, by their intervals: another head_dim may differ.
        alike = [d for d, ratio in at.items() if ratio.undecided]
        which = f" with head_dim {', '.join(map(str, alike))}" if 0 < len(alike) < len(at) else ""
        doubt = f", which is not distinguishable from as fast{which}" if alike else ""
        kind = "faster" if at[low].value > 1 else "slower"
        yield note(
            "not distinguishable" if len(alike) == len(at) else kind,
            f"{line} is {factor} at sequence {longest:,} ({dtype}){doubt}{_crossing(of_line)}.",
            {"sequence": longest, "least": at[low].value, "most": at[high].value},
        )


def _crossing(contests: Sequence[Contest]) -> str:
    crossings = {contest.other.head_dim: contest.crossover for contest in contests}
    parts = [
        f"slower up to {crossing[0]:,} and faster from {crossing[1]:,} on"
        + (f" with head_dim {head_dim}" if len(crossings) > 1 else "")
        for head_dim, crossing in crossings.items()
        if crossing
    ]
    return f"; it is {', '.join(parts)}" if parts else ""


def _compiled(study: AttentionStudy) -> Iterator[Finding]:
    """Compiled beside eager of the same implementation, at the longest sequence of both."""
    contests = []
    for curve in study.curves:
        compiled = study.same(curve, f"{curve.line}, compiled")
        if compiled is not None and Contest(base=curve, other=compiled).ratios:
            contests.append(Contest(base=curve, other=compiled))
    for dtype, line in dict.fromkeys((c.base.dtype, c.base.line) for c in contests):
        of_line = [c for c in contests if (c.base.dtype, c.base.line) == (dtype, line)]
        longest = max(max(c.ratios) for c in of_line)
        values = [c.ratios[longest].value for c in of_line if longest in c.ratios]
        held = [
            row.memory.before_backward_bytes / base.memory.before_backward_bytes
            for c in of_line
            if (row := c.other.at(longest)) and (base := c.base.at(longest)) and row.memory and base.memory
        ]
        memory = f", holding {_span(held)} times the memory before backward" if held else ""
        yield note(
            "compiled",
            f"Compiled, {line} is {_span(values)} times as fast at sequence {longest:,} ({dtype}){memory}.",
            {"sequence": longest, "least": min(values), "most": max(values)},
        )


def _powers(study: AttentionStudy) -> Iterator[Finding]:
    """One sentence for each dtype: how memory and time grow."""
    for dtype in dict.fromkeys(curve.dtype for curve in study.curves):
        for what, figure in (("Memory before backward", "before backward"), ("Time", "time")):
            parts: list[str] = []
            evidence: dict[str, float | int | str | None] = {}
            for of_dtype, line, curves in _by_line(study):
                powers = [slope.power for curve in curves if (slope := curve.slopes[figure])]
                if of_dtype == dtype and powers:
                    parts.append(f"{_span(powers)} ({line})")
                    evidence[line] = round(sum(powers) / len(powers), 3)
            if parts:
                yield note(
                    "grows",
                    f"{what} grows with the sequence to the power {', '.join(parts)} in {dtype}, fitted over "
                    "the longest sequences of each.",
                    evidence,
                )


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


def _span(powers: Sequence[float]) -> str:
    low, high = f"{min(powers):.2f}", f"{max(powers):.2f}"
    return low if low == high else f"{low} to {high}"


def _formula(study: AttentionStudy) -> Iterator[Finding]:
    off: list[tuple[float, AttentionTiming]] = []
    for curve in study.curves:
        for row in curve.rows:
            formula = study.saved_by_formula(row)
            if row.memory is not None and formula is not None:
                difference = abs(row.memory.saved_bytes - formula.bytes)
                off.append((difference / formula.bytes if formula.bytes else float(difference > 0), row))
    if not off:
        return
    close = sum(share < CLOSE for share, _ in off)
    worst, row = max(off, key=lambda entry: entry[0])
    most = f"; {row.cell} is furthest off, by {format_share(worst)}" if worst >= CLOSE else ""
    exact = sum(share == 0 for share, _ in off)
    yield note(
        "saved bytes",
        f"What autograd saves is what the formula says, to {format_share(CLOSE)}, in {close} of {len(off)} "
        f"cells, in {exact} of them to the byte{most}.",
        {"cells": len(off), "close": close, "exact": exact, "worst": worst},
    )


def _best(study: AttentionStudy) -> Iterator[Finding]:
    """For each dtype who reaches most of the device."""
    for dtype in dict.fromkeys(curve.dtype for curve in study.curves):
        rows = [row for curve in study.curves if curve.dtype == dtype for row in curve.measured]
        best = max(rows, key=lambda row: flops_per_s(row) or 0.0, default=None)
        rate = flops_per_s(best) if best else None
        if best is None or rate is None:
            continue
        share = study.share(best)
        of = f", {format_share(share)} of the best matrix product measured here" if share is not None else ""
        yield note(
            "rate",
            f"The highest rate in {dtype} is {format_rate(rate, 'FLOP/s')}, of {best.cell.line} at sequence "
            f"{best.cell.shape.queries:,} with head_dim {best.cell.shape.head_dim}{of}.",
            {"rate": rate, "share": share},
        )
    if any(curve.measured for curve in study.curves):
        yield note("convention", f"FLOPs are counted as {CONVENTION}.")


def _shown(study: AttentionStudy) -> Iterator[Finding]:
    """Launches that show where they should not."""
    if study.timings.launches != "hidden":
        return
    rows = [row for curve in study.curves for row in curve.measured if row.launches == "shown"]
    if rows:
        yield warning(
            "launches",
            f"In {_cells(len(rows))} the host was slower than the lead it was given, so that launches may be "
            f"in the times: {rows[0].cell} first.",
            {"cells": len(rows)},
        )


def _unfinished(study: AttentionStudy) -> Iterator[Finding]:
    rows = [row for curve in study.curves for row in curve.rows if row.outcome in ("not reached", "interrupted")]
    if rows:
        yield warning(
            "unfinished",
            f"Of {sum(len(curve.rows) for curve in study.curves)} cells {len(rows)} had not been measured at "
            f"the end: {rows[0].cell} first.",
            {"cells": len(rows)},
        )
    failed = [row for curve in study.curves for row in curve.rows if row.outcome == "failed"]
    if failed:
        yield error(
            "failed",
            f"In {_cells(len(failed))} it failed: {failed[0].cell} {failed[0].reason}.",
            {"cells": len(failed)},
        )


def _by_line(study: AttentionStudy) -> list[tuple[str, str, list[Curve]]]:
    """Curves of one dtype and implementation, over head_dims."""
    found: dict[tuple[str, str], list[Curve]] = {}
    for curve in study.curves:
        found.setdefault((curve.dtype, curve.line), []).append(curve)
    return [(dtype, line, curves) for (dtype, line), curves in found.items()]
