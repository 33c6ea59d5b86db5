"""A capture as an answer: for each question, a table and a sentence with its figures."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from stepscope.core.answer import Answer, Cell, Line, Panel, Point, Table, as_lines, table_of, text
from stepscope.core.doubts import figure
from stepscope.core.finding import Finding
from stepscope.core.range_names import BACKWARD, FORWARD, RECOMPUTATION
from stepscope.core.shown_text import middle_cut, name_shown
from stepscope.core.units import counted, format_count, format_share, ms_text
from stepscope.core.work.described import describe_model, describe_workload
from stepscope.traces.captures.critical_path import CriticalPath
from stepscope.traces.captures.details.tables import View, detail_tables, more_tables
from stepscope.traces.captures.devices import device_names, used_devices
from stepscope.traces.captures.overlap import Overlap
from stepscope.traces.captures.summary import GEMM, OUTSIDE, KernelRow, TraceSummary
from stepscope.traces.captures.unmarked_phases import RANGES
from stepscope.traces.kernels.names.decoding import decode
from stepscope.traces.kernels.names.label import kernel_label, kernel_labels
from stepscope.traces.roofline.answer import roofline_panel, roofline_tables

_MODULES_SHOWN = 12
_KERNELS_DRAWN = 5
"""The number of kernels of each phase in the picture."""

_IN_A_SENTENCE = 64
"""The most characters of a kernel's name in a sentence. The table has the whole name."""

_ON_A_BAR = 44
"""The most characters of a kernel's name beside its bar."""

_OTHERS_NAMED = 4
"""The number of kernels of no known family that a sentence names."""

_MUCH = 0.1
"""The share of the devices' spans from which on copies are said to be one."""

_NAMED_SHARE = 0.005
"""The smallest share of the critical path that its sentence names."""


def answer_trace(summary: TraceSummary, findings: tuple[Finding, ...], source: str, view: View | None = None) -> Answer:
    """The answer of a capture: what ran, the time by phase, family, kernel and module, and the findings.

    `view`: which of the further tables are asked for, and how many rows of them.
    """
    view = view or View()
    run = summary.run
    return Answer(
        study="trace",
        question=f"Where does the time of {source} go?",
        device=", ".join(device_names(summary.attribution)),
        versions=run.environment.versions if run and run.environment else {},
        lead=tuple(_heading(summary, source)),
        tables=tuple(_tables(summary, view)),
        panels=tuple(_panels(summary)),
        findings=findings,
        checked=True,
        asides=(more_tables(),) if summary.attribution.work.height else (),
    )


def _tables(summary: TraceSummary, view: View) -> Iterator[Table]:
    if summary.part is not None and not summary.attribution.work.height:
        yield text("Nothing was launched there.")
        return
    yield _phase_table(summary)
    yield _family_table(summary)
    for phase in summary.phase_names:
        yield _kernel_table(summary, phase)
    if summary.attention and not summary.ranged:
        yield _attention_table(summary)
        if softmax := summary.softmax_kernels():
            yield _kernels(summary, "kernels of softmax, in forward", softmax)
    if summary.has_modules:
        yield _module_table(summary)
    if summary.roofline is not None:
        yield from roofline_tables(summary.roofline)
    if summary.occupation is not None:
        yield _idle_table(summary)
    yield from detail_tables(summary, view)


def _heading(summary: TraceSummary, source: str) -> Iterator[Line]:
    attribution, table = summary.attribution, summary.attribution.table
    devices = ", ".join(f"{name or 'unnamed device'} ({index})" for index, name in used_devices(attribution).items())
    recorder = f" ({table.recorder})" if table.recorder else ""
    rank = f", rank {table.rank} of {table.ranks}" if table.rank is not None else ""
    yield Line(f"{source}: {table.profiler}{recorder}{rank}{f', {devices}' if devices else ''}", "strong")
    if summary.run:
        yield from as_lines(describe_model(summary.run.workload), describe_workload(summary.run.workload))
    if summary.part is not None:
        yield Line(f"Only {summary.part.words}{_of_instances(summary)}.", "strong")
    what = "operators (by their own time)" if table.on_cpu else "kernels"
    running = f", {ms_text(summary.union_ns)} ms with at least one running" if not table.on_cpu else ""
    covered = 1 - summary.unattributed_ns / summary.busy_ns if summary.busy_ns else 1.0
    yield Line(
        f"{format_count(summary.kernel_count)} {what} in {counted(summary.steps, 'step')}: "
        f"{ms_text(summary.busy_ns)} ms{running}; {format_share(covered)} of it attributed, "
        f"{ms_text(summary.unattributed_ns)} ms unattributed."
    )
    copies, copies_ns = summary.copies
    if copies:
        yield Line(f"Beside them {format_count(copies)} copies and fills: {ms_text(copies_ns)} ms{_of_span(summary)}.")
    if attribution.links_checked:
        yield Line(
            f"{format_count(attribution.links_agree)} of {format_count(attribution.links_checked)} backward operators "
            "lead to the same forward operator by sequence number and by the profiler's arrow."
        )


def _of_span(summary: TraceSummary) -> str:
    """The share of copies and fills in the devices' spans, where it is much."""
    span_ns = summary.occupation.span_ns if summary.occupation is not None else 0
    share = summary.copies[1] / span_ns if span_ns else 0.0
    return f", {format_share(share)} of the span" if share >= _MUCH else ""


def _of_instances(summary: TraceSummary) -> str:
    """The number of ranges in which the part was launched, and the mean content of one range."""
    assert summary.part is not None
    if summary.part.instances is None:
        return ""
    instances = summary.part.instances
    each = f" of {summary.kernel_count / instances:.4g} {_noun(summary)}s and" if instances else ""
    mean = f"{each} {summary.busy_ns / instances * 1e-3:.1f} us each" if instances else ""
    return f": {counted(instances, 'instance')}{mean}"


def _phase_table(summary: TraceSummary) -> Table:
    """The table of phases, for questions (a) and (d)."""
    noun = _noun(summary)
    known = {
        "range open ms": any(phase.range_ns is not None for phase in summary.phases),
        "unprofiled ms": any(phase.unprofiled_s is not None for phase in summary.phases),
        "matrix products": any(phase.product_kernels is not None for phase in summary.phases),
        "expected": any(phase.expected_products is not None for phase in summary.phases),
    }
    units = {"range open ms": "ms of ns", "unprofiled ms": "ms of ns", "matrix products": "g", "expected": "g"}
    rows: list[tuple[Cell, ...]] = []
    for phase in summary.phases:
        unprofiled_ns = phase.unprofiled_s * 1e9 if phase.unprofiled_s is not None else None
        more: dict[str, Cell] = {
            "range open ms": phase.range_ns,
            "unprofiled ms": figure(unprofiled_ns, summary.run) if summary.run else unprofiled_ns,
            "matrix products": phase.product_kernels,
            "expected": phase.expected_products,
        }
        chosen = (more[name] for name, is_known in known.items() if is_known)
        rows.append((phase.phase, phase.kernels, phase.busy_ns, *chosen, phase.gemm_fraction))
    kernels = sum(phase.kernels for phase in summary.phases)
    busy_ns = sum(phase.busy_ns for phase in summary.phases)
    rows.append(("all", kernels, busy_ns, *[None] * sum(known.values()), summary.gemm_fraction))
    return table_of(
        "phase, a step", (f"{noun}s", "g"), (f"{noun} time ms", "ms of ns"),
        *((name, units[name]) for name, is_known in known.items() if is_known), ("matrix share", "%"),
        rows=rows, rules=(len(rows) - 1,), tones={len(rows) - 1: "strong"}, notes=as_lines(*_phase_words(summary)),
    )  # fmt: skip


def _phase_words(summary: TraceSummary) -> Iterator[str]:
    named = {phase.phase: phase for phase in summary.phases}
    if FORWARD in named:
        forward, backward = named[FORWARD], named.get(BACKWARD)
        largest = _family_totals(summary)[0][0]
        of_both, ratio = "", ""
        if backward is not None:
            times = backward.busy_ns / forward.busy_ns if forward.busy_ns else 0.0
            in_backward, in_all = _share_of(summary, largest, BACKWARD), _share_of(summary, largest)
            of_both = f", {format_share(in_backward)} in backward, {format_share(in_all)} in all"
            ratio = f"; backward takes {times:.2f} times forward"
        products = f" Matrix multiplication is {format_share(summary.gemm_fraction)}." if largest != GEMM else ""
        yield (
            f"{largest[0].upper()}{largest[1:]} is {format_share(_share_of(summary, largest, FORWARD))} of "
            f"{_noun(summary)} time in forward{of_both}{ratio}.{products}"
        )
    for role, busy_ns in summary.roles.items():
        does = {RECOMPUTATION: "recomputes what forward did not keep"}.get(role, f"is {role}")
        yield f"{ms_text(busy_ns)} ms a step {does}."
    sought = {phase.phase: phase.found_by for phase in summary.phases if phase.found_by not in (None, RANGES)}
    if sought:
        told = ", ".join(f"{phase} by {way}" for phase, way in sought.items())
        yield f"No range marks {' or '.join(sought)}. Found instead: {told}."
    if OUTSIDE in named:
        yield f"{ms_text(named[OUTSIDE].busy_ns)} ms a step ran outside the phases, or no launch of it is known."


def _family_table(summary: TraceSummary) -> Table:
    phases = summary.phase_names
    whole = summary.busy_ns / summary.steps
    cells = {(row["family"], row["phase"]): row["busy_ns"] for row in summary.families.iter_rows(named=True)}
    return table_of(
        "family, ms a step", *((phase, "ms of ns") for phase in phases), ("all", "ms of ns"), ("share", "%"),
        rows=[
            (family, *(cells.get((family, phase)) for phase in phases), busy_ns, busy_ns / whole if whole else None)
            for family, busy_ns in _family_totals(summary)
        ],
        notes=as_lines(*_other_words(summary)),
    )  # fmt: skip


def _other_words(summary: TraceSummary) -> Iterator[str]:
    """The kernels of no known family, by name: what the family other hides."""
    rows = summary.other_kernels(_OTHERS_NAMED + 1)
    named = [
        f"{middle_cut(name_shown(kernel_label(row.name)), _IN_A_SENTENCE)} ({format_share(row.share)})"
        for row in rows[:_OTHERS_NAMED]
    ]
    if named:
        more = ", and more" if len(rows) > _OTHERS_NAMED else ""
        yield f"Of no known family are {', '.join(named)}{more}."


def _share_of(summary: TraceSummary, family: str, phase: str | None = None) -> float:
    """The share of a family in the kernel time of a phase, or of all."""
    rows = summary.families if phase is None else summary.families.filter(pl.col("phase") == phase)
    whole = float(rows["busy_ns"].sum())
    return float(rows.filter(pl.col("family") == family)["busy_ns"].sum()) / whole if whole else 0.0


def _family_totals(summary: TraceSummary) -> list[tuple[str, float]]:
    """Each family with its time per step, the longest first."""
    totals = summary.families.group_by("family").agg(pl.col("busy_ns").sum())
    return totals.sort("busy_ns", "family", descending=[True, False]).rows()


def _kernel_table(summary: TraceSummary, phase: str) -> Table:
    """The table of a phase's kernels, for questions (b) and (c)."""
    top = summary.top_kernels(phase)
    rest = [row for row in summary.top_kernels(phase, without_products=True) if row not in top]
    rest = rest if any(row.family == GEMM for row in top) else []
    first = top[0]
    labels = kernel_labels(row.name for row in (*top, *rest))
    label, share = middle_cut(labels[first.name], _IN_A_SENTENCE), format_share(first.share)
    calls = "1 call" if first.calls == 1 else f"{first.calls:g} calls"
    where = "outside the phases" if phase == OUTSIDE else f"in {phase}"
    sentence = f"{label} takes the most time {where}: {share}, in {calls} a step."
    rules = (len(top),) if rest else ()
    return _kernels(summary, f"top of {phase}", [*top, *rest], rules=rules, notes=as_lines(sentence))


def _kernels(summary: TraceSummary, head: str, rows: list[KernelRow], **more: Any) -> Table:
    """A table of kernels with calls and times per step and, for ranges of one name, per instance."""
    instances = summary.part.instances if summary.part else None
    each = summary.steps / instances if instances else None
    heads = (("calls an instance", ".4g"), ("us an instance", "us of ns")) if each else ()
    labels = kernel_labels(row.name for row in rows)
    return table_of(
        head, "family", ("calls", "g"), ("ms a step", "ms of ns"), ("share", "%"), *heads,
        rows=[
            (
                labels[row.name], row.family, row.calls, row.busy_ns, row.share,
                *((row.calls * each, row.busy_ns * each) if each else ()),
            )
            for row in rows
        ],
        **more,
    )  # fmt: skip


def _attention_table(summary: TraceSummary) -> Table:
    """The table of attention's parts, for question (e)."""
    rows = summary.attention
    known = any(row.flops for row in rows)
    heads = (("FLOPs, full square", "FLOP"), ("rate", "FLOP/s")) if known else ()
    return table_of(
        "attention in forward", ("ms a step", "ms of ns"), *heads,
        rows=[
            (
                row.part,
                row.busy_ns,
                *((row.flops, row.flops / row.busy_ns * 1e9 if row.flops and row.busy_ns else None) if known else ()),
            )
            for row in rows
        ],
        notes=as_lines(*_attention_words(summary)),
    )  # fmt: skip


def _attention_words(summary: TraceSummary) -> Iterator[str]:
    softmax = next(row for row in summary.attention if row.part == "softmax")
    products = [row for row in summary.attention if "product" in row.part]
    product_ns = sum(row.busy_ns for row in products)
    if not softmax.busy_ns or not product_ns:
        return
    time_ratio = product_ns / softmax.busy_ns
    words = f"The two products take {time_ratio:.2f} times as long as softmax"
    flops = [row.flops for row in products if row.flops]
    if softmax.flops and len(flops) == len(products):
        flops_ratio = sum(flops) / softmax.flops
        words += (
            f" and do {flops_ratio:.1f} times its FLOPs: a FLOP of softmax costs "
            f"{flops_ratio / time_ratio:.1f} times as much as one of a product"
        )
    yield f"{words}."


def _module_table(summary: TraceSummary) -> Table:
    phases = [phase for phase in summary.phase_names if phase != OUTSIDE]
    totals = (
        summary.modules.group_by("module")
        .agg(pl.col("layers").max(), pl.col("busy_ns", "gemm_ns").sum())
        .sort("busy_ns", "module", descending=[True, False])
    )
    cells = {(row["module"], row["phase"]): row["busy_ns"] for row in summary.modules.iter_rows(named=True)}
    rows: list[tuple[Cell, ...]] = [
        (
            {"": "(the model itself)", "?": "(no module known)"}.get(module, module),
            layers,
            *(cells.get((module, phase)) for phase in phases),
            busy_ns,
            gemm_ns / busy_ns if busy_ns else None,
        )
        for module, layers, busy_ns, gemm_ns in totals.head(_MODULES_SHOWN).iter_rows()
    ]
    left = totals[_MODULES_SHOWN:]
    if left.height:
        rows.append((f"{left.height} more", None, *[None] * len(phases), float(left["busy_ns"].sum()), None))
    return table_of(
        "module, ms a step", ("layers", "d"), *((phase, "ms of ns") for phase in phases), ("all", "ms of ns"),
        ("matrix share", "%"), rows=rows, rules=(_MODULES_SHOWN,) if left.height else (),
    )  # fmt: skip


def _idle_table(summary: TraceSummary) -> Table:
    """The table of idle time by cause. Its sentences are on occupation, hidden communication and the critical path."""
    occupied, steps = summary.occupation, summary.steps
    assert occupied is not None
    totals = (
        occupied.by_cause.group_by("cause")
        .agg(pl.col("gaps", "idle_ns").sum(), pl.col("largest_ns").max())
        .sort("idle_ns", descending=True)
    )
    words = [
        f"Device {device.device} had work for {ms_text((device.span_ns - device.idle_ns) / steps)} of "
        f"{ms_text(device.span_ns / steps)} ms a step under the profiler: idle {format_share(device.idle_share)}."
        for device in occupied.devices
    ]
    words += [_overlap_words(one, steps) for one in summary.overlaps if one.communication_ns]
    if (path := summary.critical_path) is not None and path.duration_ns:
        words.append(_path_words(path))
    heads = ("idle, a step", ("gaps", ".0f"), ("ms", "ms of ns"), ("largest us", "us of ns"), ("of the span", "%"))
    rows = [
        (cause, gaps / steps, idle_ns / steps, largest_ns, idle_ns / occupied.span_ns if occupied.span_ns else None)
        for cause, gaps, idle_ns, largest_ns in totals.iter_rows()
    ]
    return table_of(*(heads if rows else ()), rows=rows, notes=as_lines(*words))


def _overlap_words(one: Overlap, steps: int) -> str:
    return (
        f"Device {one.device} communicates {ms_text(one.communication_ns / steps)} ms a step; "
        f"{format_share(one.hidden_share or 0.0)} of it hides behind computation, "
        f"{ms_text(one.exposed_ns / steps)} ms is exposed."
    )


def _path_words(path: CriticalPath) -> str:
    columns = path.by_category.select("category", "family", "duration_ns", "share")
    beside = path.beside_host_ns
    working = (
        f", in which the device worked for {ms_text(beside)} ms" if beside >= _NAMED_SHARE * path.duration_ns else ""
    )
    named = [
        f"{family if category == 'computation' and family else category} {format_share(share)} "
        f"({ms_text(duration_ns)} ms{working if category == 'host' else ''})"
        for category, family, duration_ns, share in columns.iter_rows()
        if share >= _NAMED_SHARE
    ]
    which = f"step {format_count(path.step)}" if path.step is not None else "the capture"
    return f"The critical path of {which} on device {path.device}, {ms_text(path.duration_ns)} ms: {', '.join(named)}."


def _panels(summary: TraceSummary) -> Iterator[Panel]:
    """The pictures of a capture: the longest kernels, the families, and the families against the device's roofs.

    Each kernel has a bar in the colour of its phase, each family a bar of its time by phase.
    """
    kernels = [row for phase in summary.phase_names for row in summary.top_kernels(phase, _KERNELS_DRAWN)]
    names = _bar_names(kernels)
    bars = tuple(Point(name=names[row.name], line=row.phase, y=row.busy_ns * 1e-6) for row in kernels)
    if bars:
        yield Panel(x_title="", y_title="ms a step, the longest kernels", kind="bars", points=bars)
    times = {(row["family"], row["phase"]): row["busy_ns"] for row in summary.families.iter_rows(named=True)}
    stack = tuple(
        Point(name=family, line=phase, y=times[family, phase] * 1e-6)
        for family, _ in _family_totals(summary)
        for phase in summary.phase_names
        if (family, phase) in times
    )
    if stack:
        yield Panel(x_title="", y_title="ms a step, by family", kind="stack", points=stack)
    if summary.roofline is not None and (roofs := roofline_panel(summary.roofline)) is not None:
        yield roofs


def _bar_names(kernels: list[KernelRow]) -> dict[str, str]:
    """A distinct short name for each kernel. Products of one library differ in the middle, by layout and tile."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(row.name for row in kernels):
        label, decoded = name_shown(kernel_label(name)), decode(name)
        tile = "x".join(str(side) for side in decoded.tile if side) if decoded.tile else ""
        said = " ".join(filter(None, (decoded.transposes, tile)))
        if len(label) > _ON_A_BAR and said:
            label = f"{middle_cut(label, _ON_A_BAR - len(said) - 1)} {said}"
        short = middle_cut(label, _ON_A_BAR)
        count = sum(known.startswith(short) for known in names.values())
        names[name] = f"{short} ({count + 1})" if count else short
    return names


def _noun(summary: TraceSummary) -> str:
    return "operator" if summary.attribution.table.on_cpu else "kernel"
