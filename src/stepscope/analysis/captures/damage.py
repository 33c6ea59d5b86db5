"""Checks of a capture for rows that cannot be as they stand, and for what it was recorded without."""

import polars as pl

from stepscope.analysis.captures.summary import TraceSummary
from stepscope.core.finding import Finding, warning
from stepscope.core.units import format_count, format_share, in_ms
from stepscope.trace.launches import is_launch
from stepscope.trace.table import WORK

_FALSE_SHARE = 0.01
"""The share of damaged rows from which on the totals cannot be trusted."""
_ONE_KERNEL = r"^(cudaLaunch|cuLaunch|hip\w*Launch)\w*Kernel"
_MANY_KERNELS = r"Graph|MultiDevice"
"""One launch of a graph, or of a kernel on several devices, is many kernels. In 50,000 rows of 20 published captures no
other launch is more than one. Copies and fills may be split, so they are not looked at."""


def ends_before_begin(summary: TraceSummary) -> Finding | None:
    """A finding on rows whose end lies before their begin. They count as 0 ns."""
    counts = summary.attribution.table.damage.backwards
    if not counts:
        return None
    work, recorded = counts.get(WORK, 0), summary.attribution.table.work.height
    share = work / recorded if recorded else 0.0
    effect = (
        f"{format_share(share)} of what ran on the device has no length, and times are too low"
        if work
        else "what was launched in such a range has no place in it"
    )
    return Finding(
        kind="ends-before-begin",
        severity="error" if share >= _FALSE_SHARE else "warning",
        sentence=f"Rows that end before they begin count as 0 ns ({_listed(counts)}): {effect}.",
        remedy="capture or export it again: the file is damaged, or the profiler lost the end of what ran last",
        evidence={**counts, "share": share},
    )


def names_missing(summary: TraceSummary) -> Finding | None:
    """A finding on rows whose name cannot be looked up. Family and phase go by names."""
    counts = summary.attribution.table.damage.nameless
    if not counts:
        return None
    work, recorded = counts.get(WORK, 0), summary.attribution.table.work.height
    share = work / recorded if recorded else 0.0
    return Finding(
        kind="names-missing",
        severity="error" if share >= _FALSE_SHARE else "warning",
        sentence=(
            f"Names are missing from this export, whose table StringIds lacks them ({_listed(counts)}): numbers "
            "stand in their place, and families, launches and phases that go by names cannot be told."
        ),
        remedy="export the report again with `nsys export`",
        evidence={**counts, "share": share},
    )


def correlation_repeats(summary: TraceSummary) -> Finding | None:
    """A finding on kernels that share a correlation id although each launch is of one kernel."""
    table = summary.attribution.table
    if table.on_cpu:
        return None
    kernels = summary.attribution.kernels.filter(
        (pl.col("kind") == "kernel") & pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    ).select("process", "correlation", "duration_ns", "launch_row")
    shared = kernels.filter(pl.struct("process", "correlation").is_duplicated())
    if not shared.height:
        return None
    call = table.calls["name"].gather(shared["launch_row"]).cast(pl.String).alias("call")
    one = pl.col("call").str.contains(_ONE_KERNEL) & ~pl.col("call").str.contains(_MANY_KERNELS)
    wrong = shared.with_columns(call).filter(is_launch(pl.col("call")) & one)
    if not wrong.height:
        return None
    ids = wrong.select("process", "correlation").n_unique()
    wrong_ns, share = int(wrong["duration_ns"].sum()), wrong.height / kernels.height
    return Finding(
        kind="correlation-repeats",
        severity="error" if share >= _FALSE_SHARE else "warning",
        sentence=(
            f"{format_count(wrong.height)} kernels ({in_ms(wrong_ns)}) share {format_count(ids)} correlation ids, "
            "though each id is of one launch of one kernel: which launch a kernel is of cannot be told, so its phase "
            "and module may be those of another."
        ),
        remedy="capture or export it again; of several ranks, keep a file for each",
        evidence={"kernels": wrong.height, "ids": ids, "busy_ns": wrong_ns, "share": share},
    )


def ranges_missing(summary: TraceSummary) -> Finding | None:
    """A finding on a capture by Nsight Systems without a range that names a step, phase or module."""
    attribution = summary.attribution
    table = attribution.table
    if table.profiler != "Nsight Systems":
        return None
    told = attribution.work.select(pl.col("step", "phase", "module").count())
    if any(told.row(0)):
        return None
    if table.ranges.height:
        holds = f"None of the {format_count(table.ranges.height)} NVTX ranges in this capture names a step, phase or"
    elif table.operators.height:
        holds = "The NVTX ranges in this capture are all of PyTorch's operators, and none names a step, phase or"
    else:
        holds = "This capture holds no NVTX ranges, which name a step, phase or"
    return warning(
        "ranges-missing",
        f"{holds} module: kernels and families are told for the whole capture, and not where in the step they ran.",
        {"ranges": table.ranges.height, "operators": table.operators.height},
        remedy="capture with `nsys profile --trace=cuda,nvtx` and name the phases with torch.cuda.nvtx.range",
    )


def _listed(counts: dict[str, int]) -> str:
    """`calls: 2; ranges: 3`."""
    return "; ".join(f"{what}: {format_count(rows)}" for what, rows in counts.items())
