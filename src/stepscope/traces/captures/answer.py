"""A capture as an answer: for each question, a table and a sentence with its figures."""

from collections.abc import Iterable, Iterator
from typing import Any

import polars as pl

from stepscope.core.answer import (
    Answer,
    Cell,
    Finding,
    Frame,
    Line,
    Node,
    Panel,
    Point,
    Slice,
    Table,
    as_lines,
    table_of,
    text,
)
from stepscope.core.errors import middle_cut, name_shown
from stepscope.core.figures import figure
from stepscope.core.formulas.spelled import describe_model, describe_workload
from stepscope.core.range_names import BACKWARD, FORWARD, RECOMPUTATION
from stepscope.core.units import counted, format_count, format_share, ms_text
from stepscope.traces.captures.attribution import RANGES, ROOT, Attribution
from stepscope.traces.captures.details import View, detail_tables, details_as_json, more_tables
from stepscope.traces.captures.digest import TraceDigest
from stepscope.traces.captures.occupation import Occupation, device_names, used_devices
from stepscope.traces.captures.part import range_totals
from stepscope.traces.captures.summary import (
    GEMM,
    LAYERS_TOGETHER,
    NO_MODULE,
    OUTSIDE,
    KernelRow,
    Part,
    TraceSummary,
)
from stepscope.traces.kernels.names import decode, kernel_label, kernel_labels
from stepscope.traces.roofline import roofline_as_json, roofline_panel, roofline_tables, values_of

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

    `view`: which of the further tables are asked for, and how many rows of them. Where it wants one table `alone`,
    the answer has that table and the findings, and nothing else is made.
    """
    view = view or View()
    run = summary.run
    if view.alone:
        return Answer(study="trace", question="", tables=tuple(_tables(summary, view)), findings=findings, checked=True)
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
    if view.wants("phase, a step"):
        yield _phase_table(summary)
    if view.wants("family, ms a step"):
        yield _family_table(summary)
    for phase in summary.phase_names:
        if view.wants(f"top of {phase}"):
            yield _kernel_table(summary, phase)
    softmax = "kernels of softmax, in forward"
    if (view.wants("attention in forward") or view.wants(softmax)) and summary.attention and not summary.ranged:
        yield _attention_table(summary)
        if rows := summary.softmax_kernels():
            yield _kernels(summary, softmax, rows)
    if view.wants("module, ms a step") and summary.has_modules:
        yield _module_table(summary)
    if summary.roofline is not None:
        yield from roofline_tables(summary.roofline)
    if view.wants("idle, a step") and summary.occupation is not None:
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
        part, instances = summary.part.words, summary.part.instances
        if instances is not None:
            part = f"{part}: {counted(instances, 'instance')}"
        if instances:
            each_ns = summary.busy_ns / instances
            part = (
                f"{part} of {summary.kernel_count / instances:.4g} {_noun(summary)}s and {each_ns * 1e-3:.1f} us each"
            )
        yield Line(f"Only {part}.", "strong")
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
        span_ns = summary.occupation.span_ns if summary.occupation is not None else 0
        share = copies_ns / span_ns if span_ns else 0.0
        of_span = f", {format_share(share)} of the span" if share >= _MUCH else ""
        yield Line(f"Beside them {format_count(copies)} copies and fills: {ms_text(copies_ns)} ms{of_span}.")
    if attribution.links_checked:
        yield Line(
            f"{format_count(attribution.links_agree)} of {format_count(attribution.links_checked)} backward operators "
            "lead to the same forward operator by sequence number and by the profiler's arrow."
        )


def _phase_table(summary: TraceSummary) -> Table:
    """The table of phases, for questions (a) and (d)."""
    noun, phases = _noun(summary), summary.phases
    unprofiled_ns = [None if phase.unprofiled_s is None else phase.unprofiled_s * 1e9 for phase in phases]
    run = (summary.run,) if summary.run else ()
    columns: dict[str, tuple[str, list[Cell]]] = {
        "range open ms": ("ms of ns", [phase.range_ns for phase in phases]),
        "first to last kernel ms": ("ms of ns", [phase.span_ns for phase in phases]),
        "unprofiled ms": ("ms of ns", [figure(time_ns, *run) for time_ns in unprofiled_ns]),
        "matrix products": ("g", [phase.product_kernels for phase in phases]),
        "expected": ("g", [phase.expected_products for phase in phases]),
    }
    known = {name: column for name, column in columns.items() if any(value is not None for value in column[1])}
    rows: list[tuple[Cell, ...]] = [
        (phase.phase, phase.kernels, phase.busy_ns, *(values[i] for _, values in known.values()), phase.gemm_fraction)
        for i, phase in enumerate(phases)
    ]
    kernels, busy_ns = (sum(getattr(phase, name) for phase in phases) for name in ("kernels", "busy_ns"))
    rows.append(("all", kernels, busy_ns, *[None] * len(known), summary.gemm_fraction))
    return table_of(
        *phase_heads(noun, *((name, unit) for name, (unit, _) in known.items())),
        rows=rows,
        rules=(len(rows) - 1,),
        tones={len(rows) - 1: "strong"},
        notes=as_lines(*_phase_words(summary)),
    )


def phase_heads(noun: str, *more: tuple[str, str]) -> Iterator[str | tuple[str, str]]:
    """The columns of a table of phases; `more` stand before the last one."""
    yield "phase, a step"
    yield from ((f"{noun}s", "g"), (f"{noun} time ms", "ms of ns"), *more, ("matrix share", "%"))


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
        ways = ", ".join(f"{phase} by {way}" for phase, way in sought.items())
        yield f"No range marks {' or '.join(sought)}. Found instead: {ways}."
    if OUTSIDE in named:
        yield f"{ms_text(named[OUTSIDE].busy_ns)} ms a step ran outside the phases, or no launch of it is known."


def _family_table(summary: TraceSummary) -> Table:
    phases = summary.phase_names
    whole = summary.busy_ns / summary.steps
    cells = {(row["family"], row["phase"]): row["busy_ns"] for row in summary.families.iter_rows(named=True)}
    others = summary.other_kernels(_OTHERS_NAMED + 1)
    named = [
        f"{middle_cut(name_shown(kernel_label(row.name)), _IN_A_SENTENCE)} ({format_share(row.share)})"
        for row in others[:_OTHERS_NAMED]
    ]
    more = ", and more" if len(others) > _OTHERS_NAMED else ""
    return table_of(
        "family, ms a step",
        *((phase, "ms of ns") for phase in phases),
        ("all", "ms of ns"),
        ("share", "%"),
        rows=[
            (family, *(cells.get((family, phase)) for phase in phases), busy_ns, busy_ns / whole if whole else None)
            for family, busy_ns in _family_totals(summary)
        ],
        notes=as_lines(f"Of no known family are {', '.join(named)}{more}.") if named else (),
    )


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
    parts = summary.attention
    known = any(row.flops for row in parts)
    rows: list[tuple[Cell, ...]] = []
    for row in parts:
        rate = row.flops / row.busy_ns * 1e9 if row.flops and row.busy_ns else None
        rows.append((row.part, row.busy_ns, *((row.flops, rate) if known else ())))
    softmax = next(row for row in parts if row.part == "softmax")
    products = [row for row in parts if "product" in row.part]
    product_ns, words = sum(row.busy_ns for row in products), ""
    if softmax.busy_ns and product_ns:
        time_ratio = product_ns / softmax.busy_ns
        words = f"The two products take {time_ratio:.2f} times as long as softmax"
        flops = [row.flops for row in products if row.flops]
        if softmax.flops and len(flops) == len(products):
            flops_ratio = sum(flops) / softmax.flops
            words += (
                f" and do {flops_ratio:.1f} times its FLOPs: a FLOP of softmax costs "
                f"{flops_ratio / time_ratio:.1f} times as much as one of a product"
            )
    heads = (("FLOPs, full square", "FLOP"), ("rate", "FLOP/s")) if known else ()
    notes = as_lines(f"{words}.") if words else ()
    return table_of("attention in forward", ("ms a step", "ms of ns"), *heads, rows=rows, notes=notes)


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
        "module, ms a step",
        ("layers", "d"),
        *((phase, "ms of ns") for phase in phases),
        ("all", "ms of ns"),
        ("matrix share", "%"),
        rows=rows,
        rules=(_MODULES_SHOWN,) if left.height else (),
    )


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
    words += [
        f"Device {one.device} communicates {ms_text(one.communication_ns / steps)} ms a step; "
        f"{format_share(one.hidden_share or 0.0)} of it hides behind computation, "
        f"{ms_text(one.exposed_ns / steps)} ms is exposed."
        for one in summary.overlaps
        if one.communication_ns
    ]
    if (path := summary.critical_path) is not None and path.duration_ns:
        columns = path.by_category.select("category", "family", "duration_ns", "share")
        beside, working = path.beside_host_ns, ""
        if beside >= _NAMED_SHARE * path.duration_ns:
            working = f", in which the device worked for {ms_text(beside)} ms"
        named = [
            f"{family if category == 'computation' and family else category} {format_share(share)} "
            f"({ms_text(duration_ns)} ms{working if category == 'host' else ''})"
            for category, family, duration_ns, share in columns.iter_rows()
            if share >= _NAMED_SHARE
        ]
        which = f"step {format_count(path.step)}" if path.step is not None else "the capture"
        time = f"{ms_text(path.duration_ns)} ms"
        words.append(f"The critical path of {which} on device {path.device}, {time}: {', '.join(named)}.")
    heads = ("idle, a step", ("gaps", ".0f"), ("ms", "ms of ns"), ("largest us", "us of ns"), ("of the span", "%"))
    rows = [
        (cause, gaps / steps, idle_ns / steps, largest_ns, idle_ns / occupied.span_ns if occupied.span_ns else None)
        for cause, gaps, idle_ns, largest_ns in totals.iter_rows()
    ]
    return table_of(*(heads if rows else ()), rows=rows, notes=as_lines(*words))


def _panels(summary: TraceSummary) -> Iterator[Panel]:
    """The pictures of a capture: the longest kernels, the families, and the families against the device's roofs.

    Each kernel has a bar in the colour of its phase, each family a bar of its time by phase.
    """
    kernels = [row for phase in summary.phase_names for row in summary.top_kernels(phase, _KERNELS_DRAWN)]
    # Products of one library differ in the middle, by layout and tile.
    names: dict[str, str] = {}
    for name in dict.fromkeys(row.name for row in kernels):
        label, decoded = name_shown(kernel_label(name)), decode(name)
        tile = "x".join(str(side) for side in decoded.tile if side) if decoded.tile else ""
        variant = " ".join(filter(None, (decoded.transposes, tile)))
        if len(label) > _ON_A_BAR and variant:
            label = f"{middle_cut(label, _ON_A_BAR - len(variant) - 1)} {variant}"
        short = middle_cut(label, _ON_A_BAR)
        count = sum(known.startswith(short) for known in names.values())
        names[name] = f"{short} ({count + 1})" if count else short
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


def _noun(summary: TraceSummary) -> str:
    return "operator" if summary.attribution.table.on_cpu else "kernel"


# A capture's summary as plain data, which `stepscope trace --json` prints. The first six keys are a contract.


def trace_as_json(summary: TraceSummary, findings: tuple[Finding, ...], view: View | None = None) -> dict[str, Any]:
    """The summary of a capture as plain data.

    Totals, `ranges`, `idle` and `overlap` are in nanoseconds over the whole capture. `phases`, `families`, `modules`,
    `attention` and `roles` are per step. `critical_path` is of one step. The tables of `details_as_json`, `operators`
    among them, are over the whole capture. The summary of a part also has `part`, which
    names the part. Its `ranges` are the ranges that launched some of it.
    """
    copies, copies_ns = summary.copies
    attribution, occupied, path = summary.attribution, summary.occupation, summary.critical_path
    return {
        "kernels": summary.kernel_count,
        "busy_ns": summary.busy_ns,
        "union_ns": summary.union_ns,
        "unattributed_ns": summary.unattributed_ns,
        "ranges": {
            totals.name: {
                **values_of(totals, "instances", "kernels", "busy_ns", "gemm_fraction"),
                "top_kernels": [
                    values_of(kernel, "name", "calls", "busy_ns", "family") for kernel in totals.top_kernels or ()
                ],
            }
            for totals in range_totals(attribution, of_a_part=summary.part is not None)
        },
        "findings": [values_of(finding, "kind", "severity", "sentence", "remedy", "evidence") for finding in findings],
        "profiler": attribution.table.profiler,
        "recorder": attribution.table.recorder,
        "devices": {str(index): name for index, name in attribution.table.devices.items()},
        "used_devices": {str(index): name for index, name in used_devices(attribution).items()},
        "steps": summary.steps,
        "gemm_fraction": summary.gemm_fraction,
        "copies": copies,
        "copies_ns": copies_ns,
        "phases": [
            {
                **values_of(phase, "phase", "kernels", "busy_ns", "gemm_fraction", "range_ns", "span_ns", "found_by"),
                "products": phase.product_kernels,
                "expected_products": phase.expected_products,
                "unprofiled_s": phase.unprofiled_s,
                "top_kernels": [
                    values_of(row, "name", "family", "calls", "busy_ns") for row in summary.top_kernels(phase.phase, 10)
                ],
            }
            for phase in summary.phases
        ],
        "families": summary.families.to_dicts(),
        "other_kernels": [values_of(row, "name", "calls", "busy_ns", "share") for row in summary.other_kernels(20)],
        "modules": summary.modules.to_dicts() if summary.has_modules else [],
        "attention": [values_of(row, "part", "busy_ns", "flops") for row in summary.attention],
        "roles": summary.roles,
        "idle": {
            "devices": [values_of(one, "device", "span_ns", "union_ns", "idle_ns") for one in occupied.devices],
            "causes": occupied.by_cause.to_dicts(),
        }
        if occupied
        else None,
        "overlap": [
            values_of(one, "device", "communication_ns", "hidden_ns", "exposed_ns") for one in summary.overlaps
        ],
        "critical_path": {
            **values_of(path, "device", "step", "duration_ns", "beside_host_ns"),
            "parts": path.by_category.to_dicts(),
        }
        if path
        else None,
        "other_events": attribution.table.other,
        "roofline": roofline_as_json(summary.roofline) if summary.roofline else None,
        **details_as_json(summary, view or View()),
        **(part_as_json(summary.part) if summary.part else {}),
    }


def part_as_json(part: Part) -> dict[str, Any]:
    """The part of the capture that the other keys describe. `instances` are the ranges that launched some of it."""
    return {"part": {**values_of(part, "step", "phase", "range", "instances"), **part.places}}


# A capture as an icicle of where its time went, and as a timeline of what ran when.


_SMALLEST_SHARE = 0.0005
"""The smallest share of the whole that an icicle shows: below it a part is no wider than a hair."""
_BUCKETS = 1_500
"""Stretches of a timeline in which short work is drawn together: about the pixels of a wide screen."""
_LONGEST_NAME = 80
IDLE = "idle: "
"""What the kind of a gap begins with; the cause follows."""


def icicle_panel(summary: TraceSummary) -> Panel | None:
    """Kernel time of a step by phase, module and family, each within the one before; None where nothing ran."""
    steps = max(1, summary.steps)
    module = pl.when(pl.col("module").is_null()).then(pl.lit(NO_MODULE)).otherwise(LAYERS_TOGETHER)
    rows = (
        summary.attribution.kernels.group_by(
            pl.col("phase").cast(pl.String).fill_null(OUTSIDE), module.alias("module"), pl.col("family").cast(pl.String)
        )
        .agg(pl.col("duration_ns").sum() / steps / 1e6)
        .sort("duration_ns", "phase", "module", "family", descending=[True, False, False, False])
    )
    noun = "operator" if summary.attribution.table.on_cpu else "kernel"
    if rows["module"].is_in([ROOT, NO_MODULE]).all():  # no module is known: a level of them would say nothing
        plain = (((phase, family), time_ms) for phase, _, family, time_ms in rows.iter_rows())
        return _icicle(plain, noun, "Time by phase and family")
    ways = (((phase, *_modules(path), family), time_ms) for phase, path, family, time_ms in rows.iter_rows())
    return _icicle(ways, noun, "Time by phase, module and family")


def digest_icicles(digest: TraceDigest, noun: str) -> list[Panel]:
    """What the digest of a capture keeps of its time: by phase and family, and by module and family."""
    phases = (((row.phase, row.family), row.busy_ns / 1e6) for row in digest.families)
    places = (((*_modules(row.module), row.family), row.busy_ns / 1e6) for row in digest.places)
    panels = _icicle(phases, noun, "Time by phase and family"), _icicle(places, noun, "Time by module and family", 1)
    return [panel for panel in panels if panel is not None]


def _icicle(ways: Iterable[tuple[tuple[str, ...], float]], noun: str, heading: str, phases: int = 2) -> Panel | None:
    """An icicle of times in milliseconds, each with the way from the outermost part to its own. `phases`: the depth of
    phases; 1 where the ways name none."""
    times: dict[tuple[str, ...], float] = {}
    levels: dict[tuple[str, ...], str] = {}
    for named, time_ms in ways:
        way: tuple[str, ...] = ("a step", *named)
        for depth in range(1, len(way) + 1):
            part = way[:depth]
            times[part] = times.get(part, 0.0) + time_ms
            levels.setdefault(part, {phases: "phase", 1: "all", len(way): "family"}.get(depth, "module"))
    if not times:
        return None
    least = times["a step",] * _SMALLEST_SHARE
    nodes: list[Node] = []
    places: dict[tuple[str, ...], int] = {}

    def order(part: tuple[str, ...]) -> list[tuple[float, str]]:
        """Parents before children, and of those on one level the longest first."""
        return [(-times[part[:depth]], part[depth - 1]) for depth in range(1, len(part) + 1)]

    for part in sorted((part for part, time in times.items() if time >= least), key=order):
        places[part] = len(nodes)
        parent = places.get(part[:-1], -1)
        nodes.append(Node(name_shown(str(part[-1])), times[part], parent, levels[part]))
    note = f"{noun} time of a step in ms, the layers of a model together; parts below {_SMALLEST_SHARE:.2%} left out"
    frame = Frame(heading=heading, note=note)
    return Panel(x_title="ms a step", y_title="", points=(), kind="icicle", nodes=tuple(nodes), frame=frame)


def _modules(path: str) -> list[str]:
    """The modules from the outermost in, a layer's number with the list that it is in."""
    if path in (ROOT, NO_MODULE):
        return [{ROOT: "(the model itself)", NO_MODULE: "(no module known)"}[path]]
    parts: list[str] = []
    for part in path.split("."):
        if part == "*" and parts:
            parts[-1] += ".*"
        else:
            parts.append(part)
    return parts


def timeline_panel(ranks: Iterable[tuple[str, Attribution, Occupation | None, int]]) -> Panel | None:
    """What ran when, a lane for each stream of each rank, and one for the time without work by its cause.

    `ranks`: a rank's name (empty for one alone), what it did, when its devices were idle, and what its clock is ahead
    in nanoseconds. Each shows its first step. Work shorter than a hair is drawn together. None on a CPU, whose
    operators call one another.
    """
    shown: list[tuple[str, pl.DataFrame, Occupation | None, int]] = []
    for name, attribution, occupation, offset_ns in ranks:
        if attribution.table.on_cpu:
            continue
        work = attribution.work.filter(pl.col("duration_ns") > 0)
        first = work["step"].drop_nulls().min()
        of_step = work.filter(pl.col("step") == first) if isinstance(first, int) else work  # all, where none is known
        if of_step.height:
            shown.append((name, of_step.sort("device", "stream", "start_ns"), occupation, offset_ns))
    if not shown:
        return None
    begin_ns = min(int(work["start_ns"].min()) - offset for _, work, _, offset in shown)  # type: ignore[arg-type]
    end_ns = max(_end_ns(work) - offset for _, work, _, offset in shown)
    bucket_ns = max(1, (end_ns - begin_ns) // _BUCKETS)
    slices: list[Slice] = []
    for name, work, occupation, offset in shown:
        several = work["device"].n_unique() > 1
        for (device, stream), of_stream in work.group_by("device", "stream", maintain_order=True):
            of_device = f"device {device}, " if several else ""
            lane = ", ".join(part for part in (name, f"{of_device}stream {stream}") if part)
            slices += _work(of_stream, lane, begin_ns + offset, bucket_ns)
        if occupation is not None:
            ends = (int(work["start_ns"].min()), _end_ns(work))  # type: ignore[arg-type]
            slices += _idle(occupation, f"{name}, idle" if name else "idle", begin_ns + offset, ends, bucket_ns)
    note = f"one step; work shorter than {bucket_ns / 1e3:.3g} us is drawn together"
    return Panel(
        x_title="ms",
        y_title="",
        points=(),
        kind="timeline",
        slices=tuple(slices),
        frame=Frame(heading="What ran when", note=note, x_ends=(0.0, (end_ns - begin_ns) / 1e6)),
    )


def _end_ns(work: pl.DataFrame) -> int:
    return int(work.select((pl.col("start_ns") + pl.col("duration_ns")).max()).item())


def _work(work: pl.DataFrame, lane: str, begin_ns: int, bucket_ns: int) -> Iterator[Slice]:
    """The work of a stream: what is long by its name, what is short by the family of most of it."""
    long = work.filter(pl.col("duration_ns") >= bucket_ns)
    labels = kernel_labels(long["name"].cast(pl.String).unique().to_list())
    for start, duration, family, name in long.select(
        "start_ns", "duration_ns", pl.col("family").cast(pl.String), pl.col("name").cast(pl.String)
    ).iter_rows():
        begin = (start - begin_ns) / 1e6
        label = middle_cut(name_shown(labels[name]), _LONGEST_NAME)
        yield Slice(lane, begin, begin + duration / 1e6, family, label)
    bucket = ((pl.col("start_ns") - begin_ns) // bucket_ns).alias("bucket")
    short = (
        work.filter(pl.col("duration_ns") < bucket_ns)
        .group_by(bucket, pl.col("family").cast(pl.String))
        .agg(pl.col("duration_ns").sum(), pl.len().alias("count"))
        .sort("bucket", "duration_ns", "family", descending=[False, True, False])
        .group_by("bucket", maintain_order=True)
        .agg(pl.col("family").first(), pl.col("duration_ns").sum(), pl.col("count").sum())
    )
    for place, family, busy_ns, count in short.iter_rows():
        begin = place * bucket_ns / 1e6
        yield Slice(lane, begin, begin + min(busy_ns, bucket_ns) / 1e6, family, "", count)


def _idle(occupation: Occupation, lane: str, begin_ns: int, ends: tuple[int, int], bucket_ns: int) -> Iterator[Slice]:
    """The gaps that are wide enough to be seen."""
    gaps = occupation.gaps.filter(
        (pl.col("duration_ns") >= bucket_ns) & pl.col("start_ns").is_between(*ends, closed="left")
    )
    for start, duration, cause, wait in gaps.select(
        "start_ns", "duration_ns", pl.col("cause").cast(pl.String), pl.col("wait").cast(pl.String)
    ).iter_rows():
        begin = (start - begin_ns) / 1e6
        yield Slice(lane, begin, begin + duration / 1e6, f"{IDLE}{cause}", name_shown(str(wait)) if wait else "")
