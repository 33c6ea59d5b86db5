"""A capture for the terminal: the questions one asks of it, each a table and a sentence with its figures."""

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.analysis.captures.critical_path import critical_path
from stepscope.analysis.captures.occupation import occupation
from stepscope.analysis.captures.overlap import overlap
from stepscope.analysis.captures.summary import GEMM, OUTSIDE, AttentionRow, KernelRow, TraceSummary
from stepscope.analysis.kernels.families import FAMILIES
from stepscope.analysis.kernels.names.label import kernel_label
from stepscope.analysis.runs.doubts import marked
from stepscope.core.errors import printable
from stepscope.core.finding import Finding
from stepscope.core.range_names import RECOMPUTATION
from stepscope.core.shown_text import middle_cut, name_shown
from stepscope.core.units import format_count, format_rate, format_share, ms_text, ms_text_of_s
from stepscope.report.former import make_table, render_finding
from stepscope.report.occupation import render_occupation
from stepscope.report.roofline import render_roofline
from stepscope.work.described import describe_model, describe_workload

_MODULES_SHOWN = 12
_OPERATORS_SHOWN = 12

_IN_A_SENTENCE = 64
"""Characters of a kernel's name in a sentence; the table beside it has the whole."""


def render_trace(summary: TraceSummary, findings: tuple[Finding, ...], source: str) -> RenderableType:
    """What ran, where the time went by phase, family, kernel and module, and what to doubt."""
    parts: list[RenderableType] = [*_heading(summary, source), Text(), _phase_table(summary), *_phase_words(summary)]
    parts += [Text(), _family_table(summary)]
    for phase in summary.phase_names:
        parts += [Text(), *_kernel_tables(summary, phase)]
    if summary.attention:
        parts += [Text(), _attention_table(summary.attention), *_attention_words(summary)]
    if summary.has_modules:
        parts += [Text(), _module_table(summary)]
    if summary.roofline is not None:
        parts += [Text(), render_roofline(summary.roofline, _OPERATORS_SHOWN)]
    occupied = occupation(summary.attribution)
    if occupied is not None:
        path = critical_path(summary.attribution)
        parts += [Text(), *render_occupation(occupied, overlap(summary.attribution), path, summary.steps)]
    parts += [Text(), *(render_finding(finding) for finding in findings)]
    if not findings:
        parts.append(Text("No finding: every check passed.", style="green"))
    return Group(*parts)


def _heading(summary: TraceSummary, source: str) -> list[Text]:
    table = summary.attribution.table
    devices = ", ".join(f"{name} ({index})" for index, name in sorted(table.devices.items()))
    recorder = f" ({table.recorder})" if table.recorder else ""
    lines = [Text(printable(f"{source}: {table.profiler}{recorder}{f', {devices}' if devices else ''}"), style="bold")]
    if summary.run:
        lines += [Text(describe_model(summary.run.workload)), Text(describe_workload(summary.run.workload))]
    what = "operators (by their own time)" if table.on_cpu else "kernels"
    idle = f", {ms_text(summary.union_ns)} ms with at least one running" if not table.on_cpu else ""
    covered = 1 - summary.unattributed_ns / summary.busy_ns if summary.busy_ns else 1.0
    counted = f"{format_count(summary.kernel_count)} {what} in {_count(summary.steps, 'step')}"
    lines.append(
        Text(
            f"{counted}: {ms_text(summary.busy_ns)} ms{idle}; {format_share(covered)} of it attributed, "
            f"{ms_text(summary.unattributed_ns)} ms unattributed."
        )
    )
    copies, copies_ns = summary.copies
    if copies:
        lines.append(Text(f"Beside them {format_count(copies)} copies and fills: {ms_text(copies_ns)} ms."))
    if summary.attribution.links_checked:
        lines.append(
            Text(
                f"{format_count(summary.attribution.links_agree)} of {format_count(summary.attribution.links_checked)} "
                "backward operators lead to the same forward operator by sequence number and by the profiler's arrow."
            )
        )
    return lines


def _phase_table(summary: TraceSummary) -> Table:
    """(a) and (d)."""
    products = any(phase.product_kernels is not None for phase in summary.phases)
    unprofiled = any(phase.unprofiled_s is not None for phase in summary.phases)
    noun = _noun(summary)
    heads = ["phase, a step", f"{noun}s", f"{noun} time ms", "range open ms"]
    heads += ["unprofiled ms"] if unprofiled else []
    heads += ["matrix products"] if products else []
    table = make_table(*heads, "matrix share", right_from=1)
    for phase in summary.phases:
        cells = [phase.phase, f"{phase.kernels:g}", ms_text(phase.busy_ns), ms_text(phase.range_ns)]
        own = ms_text_of_s(phase.unprofiled_s)
        cells += [marked(own, summary.run)] if unprofiled else []
        expected = f" of {phase.expected_products}" if phase.expected_products is not None else ""
        cells += [f"{phase.product_kernels:g}{expected}" if phase.product_kernels is not None else ""] * products
        table.add_row(*cells, format_share(phase.gemm_fraction))
    total = [
        "all",
        f"{sum(phase.kernels for phase in summary.phases):g}",
        ms_text(sum(phase.busy_ns for phase in summary.phases)),
        "",
    ]
    total += [""] * (unprofiled + products)
    table.add_section()
    table.add_row(*total, format_share(summary.gemm_fraction), style="bold")
    return table


def _phase_words(summary: TraceSummary) -> list[Text]:
    named = {phase.phase: phase for phase in summary.phases}
    noun = _noun(summary)
    words = []
    if "forward" in named and "backward" in named:
        forward, backward = named["forward"], named["backward"]
        ratio = backward.busy_ns / forward.busy_ns if forward.busy_ns else 0.0
        words.append(
            f"Matrix multiplication is {format_share(forward.gemm_fraction)} of {noun} time in forward, "
            f"{format_share(backward.gemm_fraction)} in backward, {format_share(summary.gemm_fraction)} in all; "
            f"backward takes {ratio:.2f} times forward."
        )
    elif "forward" in named:
        words.append(
            f"Matrix multiplication is {format_share(named['forward'].gemm_fraction)} of {noun} time in forward."
        )
    for role, busy_ns in summary.roles.items():
        does = {RECOMPUTATION: "recomputes what forward did not keep"}.get(role, f"is {role}")
        words.append(f"{ms_text(busy_ns)} ms a step {does}.")
    if OUTSIDE in named:
        words.append(
            f"{ms_text(named[OUTSIDE].busy_ns)} ms a step ran outside the phases, or no launch of it is known."
        )
    return [Text(line) for line in words]


def _family_table(summary: TraceSummary) -> Table:
    phases = summary.phase_names
    table = make_table("family, ms a step", *phases, "all", "share", right_from=1)
    totals = summary.families.group_by("family").agg(pl.col("busy_ns").sum())
    totals = totals.sort("busy_ns", "family", descending=[True, False])
    cells = {(row["family"], row["phase"]): row["busy_ns"] for row in summary.families.iter_rows(named=True)}
    whole = summary.busy_ns / summary.steps
    for family, busy_ns in totals.iter_rows():
        assert family in FAMILIES
        table.add_row(
            family,
            *(ms_text(cells[family, phase]) if (family, phase) in cells else "" for phase in phases),
            ms_text(busy_ns),
            format_share(busy_ns / whole) if whole else "",
        )
    return table


def _kernel_tables(summary: TraceSummary, phase: str) -> list[RenderableType]:
    """(b) and (c)."""
    top = summary.top_kernels(phase)
    rest = [row for row in summary.top_kernels(phase, without_products=True) if row not in top]
    table = make_table(f"top of {phase}", "family", "calls", "ms a step", "share", right_from=2)
    for row in top:
        _add_kernel(table, row)
    if rest and any(row.family == GEMM for row in top):
        table.add_section()
        for row in rest:
            _add_kernel(table, row)
    first = top[0]
    label, share = middle_cut(name_shown(kernel_label(first.name)), _IN_A_SENTENCE), format_share(first.share)
    sentence = f"{label} takes the most time in {phase}: {share}, in {first.calls:g} calls a step."
    return [table, Text(sentence)]


def _add_kernel(table: Table, row: KernelRow) -> None:
    table.add_row(
        name_shown(kernel_label(row.name)), row.family, f"{row.calls:g}", ms_text(row.busy_ns), format_share(row.share)
    )


def _attention_table(rows: tuple[AttentionRow, ...]) -> Table:
    """(e)."""
    counted = any(row.flops for row in rows)
    heads = ["attention in forward", "ms a step", *(("FLOPs, full square", "rate") if counted else ())]
    table = make_table(*heads, right_from=1)
    for row in rows:
        cells = [row.part, ms_text(row.busy_ns)]
        if counted:
            cells += [format_rate(row.flops, "FLOP") if row.flops else ""]
            cells += [format_rate(row.flops / row.busy_ns * 1e9, "FLOP/s") if row.flops and row.busy_ns else ""]
        table.add_row(*cells)
    return table


def _attention_words(summary: TraceSummary) -> list[Text]:
    named = {row.part: row for row in summary.attention}
    softmax = named["softmax"]
    products = [row for row in summary.attention if "product" in row.part]
    product_ns = sum(row.busy_ns for row in products)
    if not softmax.busy_ns or not product_ns:
        return []
    time_ratio = product_ns / softmax.busy_ns
    words = f"The two products take {time_ratio:.2f} times as long as softmax"
    flops = [row.flops for row in products]
    if softmax.flops and all(flops):
        flops_ratio = sum(count or 0 for count in flops) / softmax.flops
        words += (
            f" and do {flops_ratio:.1f} times its FLOPs: a FLOP of softmax costs "
            f"{flops_ratio / time_ratio:.1f} times as much as one of a product"
        )
    return [Text(words + ".")]


def _module_table(summary: TraceSummary) -> Table:
    phases = [phase for phase in summary.phase_names if phase != OUTSIDE]
    table = make_table("module, ms a step", "layers", *phases, "all", "matrix share", right_from=1)
    totals = (
        summary.modules.group_by("module")
        .agg(pl.col("layers").max(), pl.col("busy_ns", "gemm_ns").sum())
        .sort("busy_ns", "module", descending=[True, False])
    )
    cells = {(row["module"], row["phase"]): row["busy_ns"] for row in summary.modules.iter_rows(named=True)}
    for module, layers, busy_ns, gemm_ns in totals.head(_MODULES_SHOWN).iter_rows():
        table.add_row(
            {"": "(the model itself)", "?": "(no module known)"}.get(module, name_shown(module)),
            str(layers),
            *(ms_text(cells[module, phase]) if (module, phase) in cells else "" for phase in phases),
            ms_text(busy_ns),
            format_share(gemm_ns / busy_ns) if busy_ns else "",
        )
    left = totals.tail(max(0, totals.height - _MODULES_SHOWN))
    if left.height:
        table.add_section()
        table.add_row(f"{left.height} more", "", *("" for _ in phases), ms_text(int(left["busy_ns"].sum())), "")
    return table


def _noun(summary: TraceSummary) -> str:
    return "operator" if summary.attribution.table.on_cpu else "kernel"


def _count(count: int, noun: str) -> str:
    return f"{format_count(count)} {noun}{'s' if count != 1 else ''}"
