"""Checks of a capture for rows that cannot be as they stand, and for what it was recorded without."""

import re
from collections.abc import Iterator

import polars as pl

from stepscope.core.finding import Finding, note, warning
from stepscope.core.units import counted, format_count, format_seconds, format_share, in_ms
from stepscope.traces.captures.range_names import range_kind
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.launches import is_launch
from stepscope.traces.table import COPIES, KIND, WORK

_FALSE_SHARE = 0.01
"""The share of damaged rows from which on the totals cannot be trusted."""
_TICK_NS = 1_000
"""Work may seem to begin so much before its launch where both clocks count microseconds."""
_LATEST_NS = 10_000_000_000
"""No work waits so long for the device where all of it does."""
_REMARKS_QUOTED = 3
_OF_THE_CPU = re.compile(
    r"(?!.*\b(?:CUDA|NVTX|GPU|lost|dropped)\b).*(?:\bCPU\b|backtrace|context switch)", re.IGNORECASE
)
"""Remarks on the sampling of CPUs and their threads, which most containers forbid, and of which no figure here is."""
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


def times_missing(summary: TraceSummary) -> Finding | None:
    """A finding on device work whose start or duration was not recorded, and on host rows left out for that."""
    table = summary.attribution.table
    damage, durations = table.damage, table.work["duration_ns"]
    recorded = table.work.height
    no_start = damage.untimed.get(WORK, 0)
    coarse = bool((durations % _TICK_NS == 0).all())
    none = durations == 0
    if coarse and not no_start:  # copies and fills of a few bytes take less than what such a clock counts
        none &= ~table.work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
    no_length = 0 if table.on_cpu else max(0, int(none.sum()) - damage.backwards.get(WORK, 0))
    hosts = {
        what: damage.untimed.get(what, 0) + damage.endless.get(what, 0) for what in damage.untimed | damage.endless
    }
    hosts.pop(WORK, None)
    said = list(_times_words(recorded, no_start, no_length, coarse=coarse))
    if hosts:
        said.append(f"rows whose times no clock can say are left out, or count as 0 ns ({_listed(hosts)})")
    if not said:
        return None
    share = max(no_start, no_length) / recorded if recorded else 0.0
    return Finding(
        kind="times-missing",
        severity="error" if share >= _FALSE_SHARE else "warning",
        sentence="; ".join(said)[0].upper() + "; ".join(said)[1:] + ".",
        remedy="capture fewer steps at once, and synchronise before the profiler stops; where it stays, a newer driver",
        evidence={"no_start": no_start, "no_duration": no_length, "rows": recorded, **hosts, "share": share},
    )


def _times_words(recorded: int, no_start: int, no_length: int, *, coarse: bool) -> Iterator[str]:
    """What a start and a duration of 0 mean, and what they do to the figures. `coarse`: in whole microseconds."""
    too_low = "device time is too low by theirs, and rates are too high"
    at_launch = "they stand at their launch, so idle time and the critical path near them are uncertain"
    of = f"of {format_count(recorded)} {WORK}"
    if no_start and no_start == no_length:
        yield (
            f"{format_count(no_start)} {of} have neither start nor duration (both 0, or of no clock: the profiler "
            f"could not collect their times): {too_low}; {at_launch}"
        )
        return
    if no_start:
        yield f"{format_count(no_start)} {of} have no start (0, or of no clock: it was not recorded): {at_launch}"
    if no_length:
        why = "their end was not recorded" + (", or they took less than a microsecond" if coarse else "")
        yield f"{format_count(no_length)} {of} have a duration of 0 ({why}): {too_low}"


def durations_cut(summary: TraceSummary) -> Finding | None:
    """A finding on work that outlasted later work of its stream, and was cut where the next begins."""
    damage, table = summary.attribution.table.damage, summary.attribution.table
    if not damage.overlong:
        return None
    shown = int(table.work["duration_ns"].sum())
    return warning(
        "durations-cut",
        f"{counted(damage.overlong, 'kernel')} of {format_count(table.work.height)} on one stream lasted past the end "
        f"of kernels launched later, which cannot be: each is cut where the next one begins. All work lasts "
        f"{in_ms(shown)} so, and {in_ms(shown + damage.cut_ns)} as recorded.",
        {"kernels": damage.overlong, "cut_ns": damage.cut_ns, "recorded_ns": shown + damage.cut_ns},
        remedy="capture again: the profiler wrote a wrong end; the time of the kernels that are cut is an upper bound",
    )


def clocks_disagree(summary: TraceSummary) -> Finding | None:
    """A finding on device work that begins before the call that launched it, or all of it long after."""
    table = summary.attribution.table
    known = table.work.filter(pl.col("launch_row").is_not_null() & (pl.col("duration_ns") > 0))
    delay = known["start_ns"] - known["launch_ns"]
    if table.on_cpu or not known.height:
        return None
    early, late = delay.filter(delay < -_TICK_NS), delay.min()
    causes = "so causes of idle time, the critical path, the queue and delays of launches are wrong"
    holds = "Times of kernels, families and phases hold: they go by the device's clock alone and by launches."
    remedy = (
        "capture again with a newer profiler and driver; where it stays, read the times of kernels, and take idle time "
        "from an unprofiled run"
    )
    if early.len():
        most = -_integer(early.min())
        return warning(
            "clocks-disagree",
            f"{format_count(early.len())} of {format_count(known.height)} {WORK} begin before the call that launched "
            f"them, by up to {format_seconds(most * 1e-9)}: the clocks of device and host disagree, {causes}. {holds}",
            {"rows": early.len(), "of": known.height, "most_ns": most, "of_all_ns": -_integer(early.sum())},
            remedy=remedy,
        )
    if _integer(late) < _LATEST_NS:
        return None
    return warning(
        "clocks-disagree",
        f"All {format_count(known.height)} {WORK} begin {format_seconds(_integer(late) * 1e-9)} or more after the call "
        f"that launched them: the device's clock has another origin or unit than the host's, {causes}. {holds}",
        {"rows": known.height, "of": known.height, "least_ns": _integer(late)},
        remedy=remedy,
    )


def texts_mended(summary: TraceSummary) -> Finding | None:
    """A note on texts that the profiler wrote as no JSON, and that were mended at reading."""
    mended = summary.attribution.table.damage.mended
    if not mended:
        return None
    return note(
        "texts-mended",
        f"The profiler wrote texts that are no JSON, which other tools refuse ({_listed(mended)}). They were mended in "
        "reading; times and ids are as recorded.",
        {**mended},
        remedy="name ranges and modules without double quotes, backslashes and line breaks",
    )


def profiler_warns(summary: TraceSummary) -> Finding | None:
    """A finding on what the profiler itself warns of in its capture: a note, if it is of what no figure here is of."""
    table = summary.attribution.table
    if not table.remarks:
        return None
    ours = [remark for remark in table.remarks if not _OF_THE_CPU.match(remark)]
    remarks = [*ours, *(remark for remark in table.remarks if remark not in ours)]
    told = " ".join(f'"{remark}"' for remark in remarks[:_REMARKS_QUOTED])
    more = len(remarks) - _REMARKS_QUOTED
    return Finding(
        kind="profiler-warns",
        severity="warning" if ours else "note",
        sentence=f"{table.profiler} itself warns: {told}{f' and {more} more' if more > 0 else ''}",
        evidence={"remarks": len(remarks)},
    )


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


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
    named = sum(range_kind(str(name)) != "aside" for name in table.ranges["name"].to_list())
    how = "" if "nvtx" in table.traced else "capture with `nsys profile --trace=cuda,nvtx` and "
    remedy = f"{how}name the phases with torch.cuda.nvtx.range"
    if named:
        holds = (
            f"No launch that is known lies in the {counted(named, 'NVTX range')} of this capture with a step, phase or"
        )
        remedy = "capture the launches, too (`nsys profile --trace=cuda,nvtx`), of the whole step"
    elif table.ranges.height:
        holds = f"None of the {format_count(table.ranges.height)} NVTX ranges in this capture names a step, phase or"
    elif table.operators.height:
        holds = "The NVTX ranges in this capture are all of PyTorch's operators, and none names a step, phase or"
    else:
        holds = "This capture holds no NVTX ranges, which name a step, phase or"
    return warning(
        "ranges-missing",
        f"{holds} module: kernels and families are told for the whole capture, and not where in the step they ran.",
        {"ranges": table.ranges.height, "operators": table.operators.height},
        remedy=remedy,
    )


def _listed(counts: dict[str, int]) -> str:
    """`calls: 2; ranges: 3`."""
    return "; ".join(f"{what}: {format_count(rows)}" for what, rows in counts.items())
