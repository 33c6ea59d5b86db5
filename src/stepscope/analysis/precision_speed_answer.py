"""The answer to "how much faster is lower precision, and why": tables, curves, and sentences from the figures."""

import itertools
from collections.abc import Iterator, Sequence

from stepscope.analysis.metrics import launch_bound_share, median_s
from stepscope.analysis.precision_speed import BASELINE, Amdahl, Pair, SpeedStudy, TimedCell, memory_of
from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.finding import Finding
from stepscope.core.units import GIB, format_bytes, format_seconds, format_share

STUDY = "speed"
QUESTION = "How much faster are forward and backward in lower precision, and which part of them is it?"
TIMES, MEMORY, PARTS, LAW, MISSING = (
    "Forward and backward: medians, with 95 % intervals",
    "Memory of the step, and its change against fp32",
    "Where the time of forward and backward lies, by a captured step",
    "Amdahl's law: fp32's time in parts, and how many times as fast each part is",
    "Not measured",
)
_RISE = 0.001
"""A peak that is higher by less is the same peak: allocators round."""
_NAMED = 4
"""Cells that a sentence names; the others are counted."""


def answer_speed(study: SpeedStudy, *, lacking: Sequence[str] = (), unread: int = 0) -> Experiment:
    """The whole answer. `lacking`: dtypes that the device does not have; `unread`: captures that could not be read.

    Raises InputError where no cell was measured both in fp32 and in another dtype.
    """
    if not study.pairs:
        raise InputError(_nothing_to_compare(study))
    first = study.pairs[0].base.run.environment
    tables = (_times(study), _memory(study), _parts(study), _law(study), _missing(study))
    return Experiment(
        study=STUDY,
        question=QUESTION,
        device=first.device_name if first else "",
        versions=dict(first.versions) if first else {},
        tables=tuple(table for table in tables if table.rows),
        panels=_panels(study),
        findings=(
            *_by_size(study),
            *_slower(study),
            *_forward_peak(study),
            *_bounds(study),
            *_doubts(study, lacking, unread),
        ),
    )


def _nothing_to_compare(study: SpeedStudy) -> str:
    if not study.cells and not study.unmeasured:
        return "no run here (of those asked for) has a backward: measure with `stepscope study speed`"
    if study.unmeasured:
        cell = study.unmeasured[0]
        return f"nothing to compare: {cell.name} in {cell.dtype} {_why(cell)}"
    dtypes = ", ".join(dict.fromkeys(cell.dtype for cell in study.cells))
    return (
        f"nothing to compare: no cell here was measured both in {BASELINE} and in another dtype (there is {dtypes}); "
        "give the folder of the others too, by a second --read"
    )


def _why(cell: TimedCell) -> str:
    failure = cell.run.failure
    if failure is None:
        return f"ended {cell.run.status}"
    return f"ended {cell.run.status} ({failure.where}): {failure.message}"


def _times(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        pair = study.pair_of(cell)
        interval = cell.both.interval() if cell.both else None
        of_ratio = pair.speed_up.interval if pair else None
        rows.append(
            (
                cell.name,
                cell.dtype,
                *(_ms(median_s(cell.run, phase)) for phase in ("forward", "backward", "forward-backward")),
                _ms(interval.low) if interval else None,
                _ms(interval.high) if interval else None,
                _digits(pair.speed_up.value) if pair else None,
                _digits(of_ratio.low) if of_ratio else None,
                _digits(of_ratio.high) if of_ratio else None,
                ", ".join(finding.kind for finding in cell.run.findings if finding.severity != "note"),
            )
        )
    heads = (
        "forward ms", "backward ms", "both ms", "both from", "both to", "speed-up", "speed-up from", "speed-up to",
        "findings",
    )  # fmt: skip
    return Table(title=TIMES, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _memory(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        pair = study.pair_of(cell)
        row: list[Cell] = []
        for field in ("forward_peak", "saved_for_backward"):
            held = memory_of(cell.run, field)
            change = pair.memory_change(field) if pair else None
            row += [_digits(held / GIB) if held is not None else None, _percent(change)]
        if row[0] is not None or row[2] is not None:
            rows.append((cell.name, cell.dtype, *row))
    heads = ("forward peak GiB", "forward peak %", "saved for backward GiB", "saved for backward %")
    return Table(title=MEMORY, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _parts(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        parts = cell.parts
        if parts is None:
            continue
        rows.append(
            (
                cell.name,
                cell.dtype,
                round(parts.kernels),
                _ms(parts.products_s),
                _ms(parts.rest_s),
                _ms(parts.casts_s),
                _ms(parts.between_s),
                _percent(parts.product_share),
                _percent(parts.between_s / parts.total_s if parts.between_s is not None else None),
            )
        )
    heads = (
        "kernels", "products ms", "other kernels ms", "of them copies, casts ms", "no kernel ms",
        "products % of kernel time", "no kernel %",
    )  # fmt: skip
    return Table(title=PARTS, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _law(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        law = pair.amdahl
        if law is None:
            continue
        rows.append(
            (
                pair.other.name,
                pair.other.dtype,
                _percent(law.product_share),
                _digits(law.products),
                _digits(law.rest),
                _ms(law.products_gain_s),
                _ms(law.rest_gain_s),
                _ms(law.between_gain_s),
                _digits(law.kernels),
                _digits(law.whole),
                _digits(pair.speed_up.value),
                _digits(law.limit),
            )
        )
    heads = (
        "fp32 in products %", "products x", "others x", "won in products ms", "in others ms", "where no kernel ran ms",
        "kernels x", "by the parts x", "measured x", "limit x",
    )  # fmt: skip
    return Table(title=LAW, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _missing(study: SpeedStudy) -> Table:
    rows = tuple((cell.name, cell.dtype, _why(cell)) for cell in study.unmeasured)
    return Table(title=MISSING, columns=("cell", "dtype", "why"), rows=rows)


def _panels(study: SpeedStudy) -> tuple[Panel, ...]:
    many = len({cell.shape for cell in study.cells}) > 1
    speed_ups = tuple(
        Point(line=_line(pair.other, many), x=pair.other.parameters, y=pair.speed_up.value) for pair in study.pairs
    )
    shares = tuple(
        Point(line=_line(cell, many), x=cell.parameters, y=cell.parts.product_share * 100)
        for cell in study.cells
        if cell.parts is not None
    )
    panels = [("speed-up of forward and backward over fp32", speed_ups), ("products, % of kernel time", shares)]
    return tuple(
        Panel(x_title="parameters", y_title=title, points=points, x_log=True, y_log=False)
        for title, points in panels
        if points
    )


def _line(cell: TimedCell, many: bool) -> str:
    return f"{cell.dtype}, {cell.shape}" if many else cell.dtype


def _by_size(study: SpeedStudy) -> Iterator[Finding]:
    """The speed-up over the models, for each dtype and shape."""
    lines: dict[tuple[str, str], list[Pair]] = {}
    for pair in study.pairs:
        lines.setdefault((pair.other.dtype, pair.other.shape), []).append(pair)
    for (dtype, shape), pairs in lines.items():
        ratios = [pair.speed_up.value for pair in pairs]
        listed = ", ".join(f"{pair.other.run.workload.model.name} {pair.speed_up.value:.2f}" for pair in pairs)
        grows = ""
        if len(pairs) > 1:
            rising = all(a < b for a, b in itertools.pairwise(ratios))
            grows = "; it grows with the model" if rising else "; it does not grow with every size"
        yield Finding(
            kind="speed-up",
            severity="note",
            sentence=f"{dtype} against fp32 ({shape}), speed-up of forward and backward: {listed}{grows}.",
            evidence={pair.other.run.workload.model.name: pair.speed_up.value for pair in pairs},
        )


def _slower(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to be faster: where it is not, and what took the gain."""
    for pair in study.pairs:
        if not pair.slower:
            continue
        base, other = pair.base.both, pair.other.both
        assert base and other and base.median_s and other.median_s  # a pair has both
        yield Finding(
            kind="slower",
            severity="warning",
            sentence=f"Against folk wisdom, {pair.label} is slower than in fp32: {format_seconds(other.median_s)} "
            f"for {format_seconds(base.median_s)}{_lost_where(pair)}.",
            evidence={"speed_up": pair.speed_up.value, **_law_evidence(pair.amdahl)},
        )
    undecided = [pair for pair in study.pairs if pair.undecided]
    if undecided:
        yield Finding(
            kind="no-difference",
            severity="note",
            sentence=f"No difference from fp32 is measured for {_listed([pair.label for pair in undecided])}: the "
            "interval of the speed-up holds 1.",
            evidence={pair.label: pair.speed_up.value for pair in undecided},
        )


def _lost_where(pair: Pair) -> str:
    """From the captures, or from the profiled steps where there are none."""
    law = pair.amdahl
    if law is None:
        idle, before = launch_bound_share(pair.other.run), launch_bound_share(pair.base.run)
        if idle is None or before is None:
            return ""
        return f". No kernel runs for {format_share(idle)} of its whole step (fp32: {format_share(before)})"
    base, other = law.base, law.other
    said = f". Its kernels take {format_seconds(other.kernels_s)} for {format_seconds(base.kernels_s)}"
    if base.between_s is None or other.between_s is None:
        return said
    said += f", but for {format_seconds(other.between_s)} (fp32: {format_seconds(base.between_s)}) no kernel runs"
    host_s, before_s = median_s(pair.other.run, "host"), median_s(pair.base.run, "host")
    if host_s and before_s:
        said += f". To issue the whole step the host takes {format_seconds(host_s)} (fp32: {format_seconds(before_s)})"
    return f"{said}, with {other.kernels:,.0f} kernels in forward and backward in place of {base.kernels:,.0f}"


def _forward_peak(study: SpeedStudy) -> Iterator[Finding]:
    """Lower precision is said to halve memory: where the forward peak rises, and the most it falls."""
    for dtype in dict.fromkeys(pair.other.dtype for pair in study.pairs):
        changes = {
            pair: change
            for pair in study.pairs
            if pair.other.dtype == dtype and (change := pair.memory_change("forward_peak")) is not None
        }
        rises = {pair: change for pair, change in changes.items() if change > _RISE}
        if rises:
            worst = max(rises, key=lambda pair: rises[pair])
            more = (memory_of(worst.other.run, "forward_peak") or 0) - (memory_of(worst.base.run, "forward_peak") or 0)
            named = _listed([f"{pair.other.name} ({change * 100:+.1f} %)" for pair, change in rises.items()])
            memory = worst.base.run.evidence.memory
            copies = (
                ": autocast keeps 16-bit copies of the weights that products read, of every parameter it would be "
                f"{format_bytes(memory.parameter_bytes / 2)}"
                if memory and dtype in ("bf16", "fp16")
                else ""
            )
            yield Finding(
                kind="forward-peak-rises",
                severity="warning",
                sentence=f"Against folk wisdom, {dtype} raises the peak of forward in {len(rises)} of {len(changes)} "
                f"cells: {named}. In {worst.other.name} it is {format_bytes(more)} more{copies}.",
                evidence={pair.other.name: change for pair, change in rises.items()},
            )
        falls = {pair: change for pair, change in changes.items() if change < -_RISE}
        if falls:
            best = min(falls, key=lambda pair: falls[pair])
            saved = best.memory_change("saved_for_backward")
            told = f" (what is kept for backward: {saved * 100:+.1f} %)" if saved is not None else ""
            halved = " Nowhere is it halved." if falls[best] > -0.5 else ""
            yield Finding(
                kind="forward-peak-falls",
                severity="note",
                sentence=f"{dtype} lowers the peak of forward in {len(falls)} of {len(changes)} cells, most in "
                f"{best.other.name}: {falls[best] * 100:+.1f} %{told}.{halved}",
                evidence={pair.other.name: change for pair, change in falls.items()},
            )


def _bounds(study: SpeedStudy) -> Iterator[Finding]:
    """Which part makes the gain and which one bounds it, in each dtype's least and greatest speed-up."""
    for dtype in dict.fromkeys(pair.other.dtype for pair in study.pairs):
        explained = [pair for pair in study.pairs if pair.other.dtype == dtype and pair.amdahl is not None]
        ordered = sorted(explained, key=lambda pair: pair.speed_up.value)
        for pair in dict.fromkeys([*ordered[:1], *ordered[-1:]]):
            law = pair.amdahl
            assert law is not None
            yield Finding(
                kind="bound",
                severity="note",
                sentence=_law_in_words(pair, law),
                evidence={"speed_up": pair.speed_up.value, **_law_evidence(law)},
            )


def _law_in_words(pair: Pair, law: Amdahl) -> str:
    peaks = f" (the datasheet's peaks: {pair.peaks_ratio:.1f})" if pair.peaks_ratio else ""
    others = f", the other kernels {law.rest:.2f} times" if law.rest else ""
    products = f"which run {law.products:.2f} times as fast{peaks}" if law.products else "which take no time in it"
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
        f"{law.by_products_alone:.2f}{limit}. What is left in {pair.other.dtype} is {now}."
    )


def _law_evidence(law: Amdahl | None) -> dict[str, float | int | str | None]:
    if law is None:
        return {}
    return {
        "product_share": law.product_share,
        "products_speed_up": law.products,
        "rest_speed_up": law.rest,
        "products_gain_s": law.products_gain_s,
        "rest_gain_s": law.rest_gain_s,
        "between_gain_s": law.between_gain_s,
        "by_products_alone": law.by_products_alone,
        "limit": law.limit,
    }


def _doubts(study: SpeedStudy, lacking: Sequence[str], unread: int) -> Iterator[Finding]:
    """What is missing, and what makes a comparison doubtful."""
    if lacking:
        yield _doubt("dtype-lacking", f"Left out: {', '.join(lacking)}, which a CPU does not have.", "note")
    bare = [f"{cell.name} in {cell.dtype}" for cell in study.cells if cell.parts is None]
    if bare:
        reason = "polars, which reads them, is not installed" if unread else "none lies beside them that can be read"
        yield _doubt(
            "no-capture",
            f"{len(bare)} of {len(study.cells)} runs are shown without a captured step ({reason}): their share of "
            "products is not known.",
            "note",
        )
    wrong = [
        f"{cell.name} in {cell.dtype} ({finding.kind})"
        for cell in study.cells
        for finding in cell.run.findings
        if finding.severity == "error"
    ]
    if wrong:
        yield _doubt("doubtful-run", f"A check found these wrong: {_listed(wrong)}.", "warning")
    yield from _unlike(study)
    fused = [f"{cell.name} in {cell.dtype}" for cell in study.cells if cell.fused_attention]
    if fused:
        yield _doubt(
            "fused-attention",
            f"Attention is one kernel in {_listed(fused)}: its products stand with the other kernels.",
            "note",
        )
    if study.replaced:
        yield _doubt(
            "several-runs",
            f"{study.replaced} more runs of these cells were left out: one with a capture goes before one without, "
            "then the newest.",
            "note",
        )


def _unlike(study: SpeedStudy) -> Iterator[Finding]:
    for pair in study.pairs:
        base, other = pair.base.run.environment, pair.other.run.environment
        found = base.differences(other) if base and other else {}
        # The commit and the folder's state change with every result that is kept.
        moving = {field: values for field, values in found.items() if not field.startswith("git_")}
        if moving:
            field, (first, second) = next(iter(moving.items()))
            yield _doubt(
                "different-environments",
                f"{pair.label} and fp32 were measured in different environments: {field} {second} and {first}.",
                "warning",
            )
            return


def _doubt(kind: str, sentence: str, severity: str) -> Finding:
    return Finding(kind=kind, severity="warning" if severity == "warning" else "note", sentence=sentence)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _digits(seconds * 1e3)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100, 1)


def _digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")
