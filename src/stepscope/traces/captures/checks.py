"""Checks of a capture for mistakes seen in published traces. Each is a function from a TraceSummary to a Finding."""

import re
from collections.abc import Callable, Iterable
from typing import cast

import polars as pl

from stepscope.core.answer import SEVERITIES, Finding, error, note, warning
from stepscope.core.device_spec import lacks
from stepscope.core.errors import name_shown
from stepscope.core.range_names import BACKWARD, STEP
from stepscope.core.units import counted, format_count, format_seconds, format_share, in_ms
from stepscope.traces.captures.attribution import phase_of, range_kind
from stepscope.traces.captures.occupation import device_names
from stepscope.traces.captures.summary import GEMM, OUTSIDE, TraceSummary
from stepscope.traces.kernels.names import decode, is_tf32
from stepscope.traces.nesting import open_rows, values_of
from stepscope.traces.table import (
    COPIES,
    KIND,
    LAUNCHES,
    WORK,
    Profiler,
    TraceTable,
    are_named,
    fits,
    launches,
    named,
    names_of,
)

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

_FEW = 5
"""The most launches without a kernel that are no sign of loss: at the edges, kernels may fall outside the capture."""
_LOST_SHARE, _BROKEN_SHARE = 0.005, 0.1
_SLOWED = 1.1
_WORTH_A_WORD = 0.01
_MOST = 0.5

_LOSS_REMEDIES: dict[Profiler, str] = {
    "Kineto": "give the profiler a step of warm-up, as in schedule(wait=1, warmup=1, active=3), synchronise before it "
    "stops, and capture fewer steps",
    "Nsight Systems": "bracket the steps with torch.cuda.profiler.start() and stop(), capture with "
    "-c cudaProfilerApi --cuda-flush-interval=100, and let the process live a second longer",
}

TraceCheck = Callable[[TraceSummary], Finding | None]
TRACE_CHECKS: list[TraceCheck] = []
"""All checks, in the order in which findings of one severity stand."""
DOUBTS: list[TraceCheck] = []
"""Checks for what a capture lacks, or what in it cannot be true: figures of it are wrong so far."""


def _check(check: TraceCheck) -> TraceCheck:
    TRACE_CHECKS.append(check)
    return check


def _doubt(check: TraceCheck) -> TraceCheck:
    DOUBTS.append(check)
    return _check(check)


def check_trace(summary: TraceSummary, checks: Iterable[TraceCheck] = TRACE_CHECKS) -> tuple[Finding, ...]:
    """All findings of these checks on this capture, the most severe first."""
    findings = [finding for check in checks if (finding := check(summary)) is not None]
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _damaged(kind: str, sentence: str, evidence: dict[str, int | float], *, remedy: str) -> Finding:
    """A finding that is an error where the share of damaged rows is such that the totals cannot be trusted."""
    return (error if evidence["share"] >= _FALSE_SHARE else warning)(kind, sentence, evidence, remedy)


def _listed(counts: dict[str, int]) -> str:
    """`calls: 2; ranges: 3`."""
    return "; ".join(f"{what}: {format_count(rows)}" for what, rows in counts.items())


@_doubt
def incomplete_trace(summary: TraceSummary) -> Finding | None:
    """A finding on launches without kernels: the capture ended early, or buffers were lost."""
    table = summary.attribution.table
    # Copies within the host and empty copies leave no device record, so they say nothing about losses.
    begun = are_named(table.calls, LAUNCHES, ("Launch", None)) & ~_while_capturing(table.calls, ["process", "thread"])
    rows = begun.arg_true()
    if table.on_cpu or not table.work.height:
        if not len(rows):
            return None
        return error(  # of a GPU's step the profiler saw only the host: operators stand in place of kernels
            "incomplete-trace",
            f"{format_count(len(rows))} launches on a device and not one kernel in this capture: its figures are "
            "the host's time in operators, not the device's.",
            {"launches": len(rows), "without_kernel": len(rows), "kernels": 0},
            remedy="capture with ProfilerActivity.CUDA, under no other profiler, as a user who may read the GPU's "
            "counters, and synchronise before the profiler stops",
        )
    ran = _have_work(table).gather(rows)
    if not ran.all():  # autograd's thread may launch into the stream that another thread captures
        counts = ran | ~_while_capturing(table.calls, ["process"]).gather(rows)
        ran, rows = ran.filter(counts), rows.filter(counts)
    # Kernels that no id ties to any launch may be of the launches without one.
    no_id = pl.col("correlation").is_null() | (pl.col("correlation") == 0)
    untied = summary.attribution.kernels.filter(pl.col("launch_row").is_null())
    alone = rows.filter(~ran)
    of_calls = table.calls[alone].filter(no_id).height if len(alone) else 0
    may_be = max(untied.filter(no_id).height, min(of_calls, untied.height))
    total, without = len(ran), len(alone) - min(len(alone), may_be)
    share = _share(without, total)
    at_the_edges = not ran.any() or ran[ran.arg_true()[0] : ran.arg_true()[-1]].all()
    if share < _LOST_SHARE or (without <= _FEW and (at_the_edges or share < _BROKEN_SHARE)):
        return None
    return (error if share >= _BROKEN_SHARE else warning)(
        "incomplete-trace",
        f"{format_count(without)} of {format_count(total)} launches ({format_share(share)}) have no "
        f"kernel in this capture, which holds {format_count(summary.kernel_count)} kernels: it ended early or lost "
        "records, and its totals are too low.",
        {"launches": total, "without_kernel": without, "kernels": summary.kernel_count},
        remedy=_LOSS_REMEDIES[table.profiler],
    )


def _have_work(table: TraceTable) -> pl.Series:
    """Whether each call has put some work on a device."""
    launched = pl.Series([False]).new_from_index(0, table.calls.height)
    launched.scatter(table.work["launch_row"].drop_nulls(), values=True)
    return launched


def _while_capturing(calls: pl.DataFrame, by: list[str]) -> pl.Series:
    """Whether each call was made while its thread (or process, `by`) captured a stream into a graph."""
    begin = named(calls, "StreamBeginCapture").select(*by, "start_ns")
    end = named(calls, "StreamEndCapture").select(*by, end_ns="start_ns")
    if not begin.height and not end.height:
        return pl.Series([False]).new_from_index(0, calls.height)
    earliest = begin.group_by(by).agg(pl.col("start_ns").min())
    cut_off = end.group_by(by).agg(pl.col("end_ns").min()).join(earliest, on=by, how="left")
    cut_off = cut_off.filter((pl.col("end_ns") < pl.col("start_ns")).fill_null(True))  # it began before the capture
    begin = pl.concat([begin, cut_off.select(*by, start_ns=pl.lit(calls["start_ns"].min(), pl.Int64))])
    spans = begin.sort("start_ns").join_asof(
        end.sort("end_ns"), left_on="start_ns", right_on="end_ns", by=by, strategy="forward", check_sortedness=False
    )
    last = calls["start_ns"].max()
    spans = spans.with_columns((pl.col("end_ns").fill_null(pl.lit(last)) - pl.col("start_ns")).alias("duration_ns"))
    return open_rows(spans, calls.select(by), calls["start_ns"]).is_not_null()


@_doubt
def names_missing(summary: TraceSummary) -> Finding | None:
    """A finding on rows whose name cannot be looked up. Family and phase go by names."""
    table = summary.attribution.table
    if not (counts := table.damage.nameless):
        return None
    return _damaged(
        "names-missing",
        f"Names are missing from this export, whose table StringIds lacks them ({_listed(counts)}): numbers stand in "
        "their place, and families, launches and phases that go by names cannot be told.",
        {**counts, "share": _share(counts.get(WORK, 0), table.work.height)},
        remedy="export the report again with `nsys export`",
    )


@_doubt
def ends_before_begin(summary: TraceSummary) -> Finding | None:
    """A finding on rows whose end lies before their begin. They count as 0 ns."""
    table = summary.attribution.table
    counts = table.damage.backwards
    if not counts:
        return None
    share = _share(counts.get(WORK, 0), table.work.height)
    effect = (
        f"{format_share(share)} of what ran on the device has no length, and times are too low"
        if WORK in counts
        else "what was launched in such a range has no place in it"
    )
    return _damaged(
        "ends-before-begin",
        f"Rows that end before they begin count as 0 ns ({_listed(counts)}): {effect}.",
        {**counts, "share": share},
        remedy="capture or export it again: the file is damaged, or the profiler lost the end of what ran last",
    )


@_doubt
def times_missing(summary: TraceSummary) -> Finding | None:
    """A finding on device work whose start or duration was not recorded, and on host rows left out for that."""
    table = summary.attribution.table
    damage, durations, recorded = table.damage, table.work["duration_ns"], table.work.height
    no_start = damage.untimed.get(WORK, 0)
    coarse = bool((durations % _TICK_NS == 0).all())  # in whole microseconds
    none = durations == 0
    if coarse and not no_start:  # copies and fills of a few bytes take less than what such a clock counts
        none &= ~table.work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
    no_length = 0 if table.on_cpu else max(0, int(none.sum()) - damage.backwards.get(WORK, 0))
    untimed = damage.untimed | damage.endless
    hosts = {what: damage.untimed.get(what, 0) + damage.endless.get(what, 0) for what in untimed if what != WORK}
    too_low = "device time is too low by theirs, and rates are too high"
    at_launch = "they stand at their launch, so idle time and the critical path near them are uncertain"
    of = f"of {format_count(recorded)} {WORK}"
    words: list[str] = []
    if no_start and no_start == no_length:
        words.append(
            f"{format_count(no_start)} {of} have neither start nor duration (both 0, or of no clock: the profiler "
            f"could not collect their times): {too_low}; {at_launch}"
        )
    elif no_start:
        words.append(
            f"{format_count(no_start)} {of} have no start (0, or of no clock: it was not recorded): {at_launch}"
        )
    if no_length and no_length != no_start:
        why = "their end was not recorded" + (", or they took less than a microsecond" if coarse else "")
        words.append(f"{format_count(no_length)} {of} have a duration of 0 ({why}): {too_low}")
    if hosts:
        words.append(f"rows whose times no clock can say are left out, or count as 0 ns ({_listed(hosts)})")
    if not words:
        return None
    share = _share(max(no_start, no_length), recorded)
    sentence = "; ".join(words)
    return _damaged(
        "times-missing",
        f"{sentence[0].upper()}{sentence[1:]}.",
        {"no_start": no_start, "no_duration": no_length, "rows": recorded, **hosts, "share": share},
        remedy="capture fewer steps at once, and synchronise before the profiler stops; where it stays, a newer driver",
    )


@_doubt
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


@_doubt
def clocks_disagree(summary: TraceSummary) -> Finding | None:
    """A finding on device work that begins before the call that launched it, or all of it long after."""
    table = summary.attribution.table
    known = pl.col("launch_row").is_not_null() & (pl.col("duration_ns") > 0)
    delay = table.work.select((pl.col("start_ns") - pl.col("launch_ns")).filter(known)).to_series()
    if table.on_cpu or not len(delay):
        return None
    early, rows = delay.filter(delay < -_TICK_NS), format_count(len(delay))
    least = cast("int", delay.min())
    evidence: dict[str, int] = {"rows": len(delay), "of": len(delay), "least_ns": least}
    if early.len():
        evidence = {"rows": early.len(), "of": len(delay), "most_ns": -least, "of_all_ns": -int(early.sum())}
        differ = (
            f"{format_count(early.len())} of {rows} {WORK} begin before the call that launched them, by up to "
            f"{format_seconds(-least * 1e-9)}: the clocks of device and host disagree"
        )
    elif least >= _LATEST_NS:
        differ = (
            f"All {rows} {WORK} begin {format_seconds(least * 1e-9)} or more after the call that launched them: the "
            "device's clock has another origin or unit than the host's"
        )
    else:
        return None
    return warning(
        "clocks-disagree",
        f"{differ}, so causes of idle time, the critical path, the queue and delays of launches are wrong. Times of "
        "kernels, families and phases hold: they go by the device's clock alone and by launches.",
        evidence,
        remedy="capture again with a newer profiler and driver; where it stays, read the times of kernels, and take "
        "idle time from an unprofiled run",
    )


@_doubt
def correlation_repeats(summary: TraceSummary) -> Finding | None:
    """A finding on kernels that share a correlation id although each launch is of one kernel."""
    table = summary.attribution.table
    if table.on_cpu:
        return None
    kernels = summary.attribution.kernels.select("kind", "process", "correlation", "duration_ns", "launch_row")
    kernels = kernels.filter(
        (pl.col("kind") == "kernel") & pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    )
    ids = kernels["correlation"].sort()
    if not (ids == ids.shift(1)).any():  # nor in any process
        return None
    shared = kernels.filter(pl.struct("process", "correlation").is_duplicated())
    if not shared.height:
        return None
    call = table.calls["name"].gather(shared["launch_row"])
    wrong = shared.filter(launches(call) & fits(call, _ONE_KERNEL, _MANY_KERNELS))
    if not wrong.height:
        return None
    ids = wrong.select("process", "correlation").n_unique()
    wrong_ns = int(wrong["duration_ns"].sum())
    return _damaged(
        "correlation-repeats",
        f"{format_count(wrong.height)} kernels ({in_ms(wrong_ns)}) share {format_count(ids)} correlation ids, though "
        "each id is of one launch of one kernel: which launch a kernel is of cannot be told, so its phase and module "
        "may be those of another.",
        {"kernels": wrong.height, "ids": ids, "busy_ns": wrong_ns, "share": wrong.height / kernels.height},
        remedy="capture or export it again; of several ranks, keep a file for each",
    )


@_check
def profiler_warns(summary: TraceSummary) -> Finding | None:
    """A finding on what the profiler itself warns of in its capture: a note, if it is of what no figure here is of."""
    table = summary.attribution.table
    if not table.remarks:
        return None
    ours = [remark for remark in table.remarks if not _OF_THE_CPU.match(remark)]
    remarks = [*ours, *(remark for remark in table.remarks if remark not in ours)]
    quoted = " ".join(f'"{remark}"' for remark in remarks[:_REMARKS_QUOTED])
    more = len(remarks) - _REMARKS_QUOTED
    sentence = f"{table.profiler} itself warns: {quoted}{f' and {more} more' if more > 0 else ''}"
    return (warning if ours else note)("profiler-warns", sentence, {"remarks": len(remarks)})


@_check
def ranges_missing(summary: TraceSummary) -> Finding | None:
    """A finding on a capture by Nsight Systems without a range that names a step, phase or module."""
    attribution = summary.attribution
    table = attribution.table
    if table.profiler != "Nsight Systems":
        return None
    if any(attribution.work.select(pl.col(name).count() for name in ("step", "phase", "module")).row(0)):
        return None
    modules = sum(range_kind(str(name)) != "aside" for name in table.ranges["name"].to_list())
    how = "" if "nvtx" in table.traced else "capture with `nsys profile --trace=cuda,nvtx` and "
    remedy = f"{how}name the phases with torch.cuda.nvtx.range"
    if modules:
        ranges = counted(modules, "NVTX range")
        holds = f"No launch that is known lies in the {ranges} of this capture with a step, phase or"
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


_ACCELERATORS = {"mtia": "MTIA", "hpu": "HPU", "xpu": "XPU", "npu": "NPU", "tpu": "TPU", "glow": "Glow"}
"""Devices that are no GPU, by the first word of their events' category."""


@_check
def accelerator_unread(summary: TraceSummary) -> Finding | None:
    """A finding on events of an accelerator whose format is not known: its time is in no figure."""
    table = summary.attribution.table
    counts = {name: count for name, count in table.other.items() if name.lower().partition("_")[0] in _ACCELERATORS}
    if not counts:
        return None
    maker = _ACCELERATORS[next(iter(counts)).lower().partition("_")[0]]
    named = ", ".join(f"{name} ({index})" for index, name in sorted(table.devices.items()) if name)
    listed = " and ".join(f"{format_count(count)} of {name_shown(name)}" for name, count in sorted(counts.items()))
    figures = "the host's time in operators" if table.on_cpu else "those of other devices"
    return warning(
        "accelerator-unread",
        f"The device is an accelerator ({maker}{f': {name_shown(named)}' if named else ''}) whose events stepscope "
        f"counts and does not read: {listed}. The figures are {figures}, not this device's.",
        {**counts},
        remedy="read the device's own time in its vendor's tools",
    )


@_check
def launches_unknown(summary: TraceSummary) -> Finding | None:
    """A finding on kernels without a launch record. They are shown as unattributed, never dropped."""
    kernels = summary.attribution.kernels
    unknown = kernels.filter(pl.col("launch_ns").is_null())
    if not unknown.height:
        return None
    lost_ns = int(unknown["duration_ns"].sum())
    share = _share(lost_ns, summary.busy_ns)
    return (warning if share >= _WORTH_A_WORD else note)(
        "launches-unknown",
        f"{format_count(unknown.height)} kernels ({in_ms(lost_ns)}, {format_share(share)} of kernel time) have no "
        "launch record, so no phase or module can be told; they are counted as unattributed.",
        {"kernels": unknown.height, "busy_ns": lost_ns, "share": share},
        remedy="start the capture before the first launch that matters, and trace the CUDA runtime as well as kernels",
    )


@_check
def graphs_unseen(summary: TraceSummary) -> Finding | None:
    """A finding on CUDA graphs that were recorded as a whole, without their kernels, or launched but not recorded."""
    table = summary.attribution.table
    rows = are_named(table.calls, (r"^(cuda|cu|hip)GraphLaunch", None)).arg_true()
    unrecorded = len(rows) - int(_have_work(table).gather(rows).sum()) if len(rows) else 0
    if unrecorded:
        return error(
            "graphs-unseen",
            f"{format_count(unrecorded)} launches of CUDA graphs left nothing in this capture, neither kernels nor "
            "the graph as a whole: the device time of the graphs is missing from every figure.",
            {"graph_launches": unrecorded, "busy_ns": 0},
            remedy="capture with --cuda-graph-trace=node",
        )
    graphs = summary.attribution.kernels.filter(pl.col("kind") == "graph")
    if not graphs.height:
        return None
    total = int(graphs["duration_ns"].sum())
    return warning(
        "graphs-unseen",
        f"{format_count(graphs.height)} launches of CUDA graphs are recorded as a whole: {in_ms(total)} of device "
        "time whose kernels are not in this capture, so they count as family other.",
        {"graph_launches": graphs.height, "busy_ns": total},
        remedy="capture with --cuda-graph-trace=node",
    )


@_check
def outside_steps(summary: TraceSummary) -> Finding | None:
    """A finding on phases between the marked steps, such as an evaluation. Per-step figures include them."""
    steps = summary.attribution.instances.filter(pl.col("what") == STEP).height
    kernels = summary.attribution.kernels
    outside = kernels.filter(pl.col("step").is_null() & pl.col("phase").is_not_null())
    outside_ns = int(outside["duration_ns"].sum())
    if not steps or outside_ns <= _WORTH_A_WORD * summary.busy_ns:
        return None
    return warning(
        "outside-steps",
        f"{in_ms(outside_ns)} of {in_ms(summary.busy_ns)} of kernels ran in a phase and in none of the {steps} "
        "marked steps (an evaluation between them, say); figures per step divide them among the steps all the same.",
        {"outside_ns": outside_ns, "kernels": outside.height, "steps": steps},
        remedy="capture the steps alone, or name the ranges of what lies between them otherwise than a step's phases",
    )


@_check
def outside_phases(summary: TraceSummary) -> Finding | None:
    """A finding on a capture most of whose kernel time lies in no phase: an inference, or a loop without ranges."""
    launched = pl.col("launch_ns").is_not_null()  # `launches_unknown` says what the others lack
    outside = summary.attribution.kernels.filter(pl.col("phase").is_null() & launched)
    outside_ns = int(outside["duration_ns"].sum())
    share = _share(outside_ns, summary.busy_ns)
    if share <= _MOST or ranges_missing(summary) is not None:
        return None
    known = [phase.phase for phase in summary.phases if phase.phase != OUTSIDE]
    phases = f"only {' and '.join(known)} could be told" if known else "no phase could be told"
    return warning(
        "outside-phases",
        f"{in_ms(outside_ns)} of {in_ms(summary.busy_ns)} of kernels ({format_share(share)}) lie outside forward, "
        f"backward and optimizer: {phases}, neither by ranges nor by autograd's operators.",
        {"outside_ns": outside_ns, "busy_ns": summary.busy_ns, "share": share},
        remedy='put torch.profiler.record_function("forward") around the forward, and so for the other phases, or '
        "capture the loop with `stepscope watch --record kineto`; for inference read the families and kernels alone",
    )


@_check
def products_by_unit(summary: TraceSummary) -> Finding | None:
    """A finding on the units that ran fp32 products: CUDA cores instead of Tensor Cores, or TF32 instead of fp32."""
    convolution = pl.col("family") == "convolution"
    products = (
        summary.attribution.totals.filter((pl.col("family") == GEMM) | convolution)
        .group_by("name")
        .agg(pl.col("duration_ns").sum())
        .with_columns(pl.col("name").cast(pl.String))
    )
    total = int(products["duration_ns"].sum())
    if not total or summary.attribution.table.on_cpu:
        return None
    decoded = [(decode(name), duration) for name, duration in products.iter_rows()]
    tf32 = sum(duration for kernel, duration in decoded if is_tf32(kernel))
    cuda_core = sum(
        duration for kernel, duration in decoded if kernel.unit == "cuda core" and kernel.input_dtype == "fp32"
    )
    dtype = summary.run.workload.dtype if summary.run else None
    if tf32 > _WORTH_A_WORD * total and dtype != "tf32":
        return (error if dtype == "fp32" else warning)(
            "tf32-products",
            f"{in_ms(tf32)} of {in_ms(total)} in matrix products ran as TF32 (10 bits of mantissa), by the "
            f"kernels' names{': the run says fp32' if dtype == 'fp32' else ': do not call these numbers fp32'}.",
            {"tf32_ns": tf32, "products_ns": total},
            remedy='torch.set_float32_matmul_precision("highest") gives true fp32, and for convolutions '
            "torch.backends.cudnn.allow_tf32 = False",
        )
    devices = device_names(summary.attribution)
    if cuda_core > _WORTH_A_WORD * total:
        return note(
            "products-on-cuda-cores",
            f"{in_ms(cuda_core)} of {in_ms(total)} in matrix products ({format_share(cuda_core / total)}) ran as "
            "true fp32 on CUDA cores: the Tensor Cores took no part in them.",
            {"cuda_core_ns": cuda_core, "products_ns": total},
            remedy=f"fp16 autocast with a GradScaler: {devices[0]} multiplies neither bf16 nor TF32 on Tensor Cores"
            if any(lacks(device, "bf16") for device in devices)  # Volta and Turing
            else "bf16 autocast, or TF32 where its precision is enough",
        )
    return None


@_check
def products_miscounted(summary: TraceSummary) -> Finding | None:
    """A finding on more or fewer matrix products than the model has: another model, or a lost kernel."""
    for phase in summary.phases:
        expected = phase.expected_products
        if expected is None or phase.product_kernels == expected:
            continue
        if summary.run and summary.run.workload.compile != "eager":
            continue  # a compiler may fuse or split products
        return warning(
            "products-miscounted",
            f"{phase.phase} launched {phase.product_kernels:g} matrix products a step where the model has {expected}.",
            {"phase": phase.phase, "products": phase.product_kernels, "expected": expected},
            remedy="see the kernels of that phase: a product may run as several kernels, or the capture be incomplete",
        )
    return None


@_check
def arrows_disagree(summary: TraceSummary) -> Finding | None:
    """A finding on backward operators for which sequence number and the profiler's arrow give different forwards."""
    checked, agree = summary.attribution.links_checked, summary.attribution.links_agree
    if not checked or agree >= (1 - _WORTH_A_WORD) * checked:
        return None
    return warning(
        "arrows-disagree",
        f"For {format_count(checked - agree)} of {format_count(checked)} backward operators the sequence number "
        "leads to another forward operator than the profiler's own arrow: modules of backward are uncertain.",
        {"checked": checked, "agree": agree},
    )


@_check
def phases_span_threads(summary: TraceSummary) -> Finding | None:
    """A finding on kernels launched from another thread than their range's, as autograd does in backward."""
    attribution = summary.attribution
    table = attribution.table
    thread = ["process", "launch_thread"]
    slices = attribution.kernels.select("phase", *thread, "duration_ns").iter_slices(1 << 18)
    chosen = (some.filter(pl.col("phase") == BACKWARD) for some in slices)
    sums = [some.group_by(thread).agg(pl.col("duration_ns").sum()) for some in chosen if some.height]
    if not sums or table.on_cpu:
        return None
    backward = pl.concat(sums)
    marking = [name for name in names_of(table.ranges).to_list() if phase_of(name) == BACKWARD]
    if not marking:  # autograd's nodes told this backward, and they are on the threads that launch
        return None
    owners = table.ranges.filter(pl.col("name").is_in(pl.Series(marking, dtype=pl.Categorical()).implode())).select(
        "process", pl.col("thread").alias("launch_thread")
    )
    covered = backward.join(owners.unique(), on=["process", "launch_thread"], how="semi")
    total, by_thread = int(backward["duration_ns"].sum()), int(covered["duration_ns"].sum())
    if total - by_thread < _WORTH_A_WORD * total:
        return None
    return note(
        "phases-span-threads",
        f"Backward launched {in_ms(total)} of kernels, of which only {in_ms(by_thread)} from the thread whose "
        "range says backward: autograd launches from a thread of its own. They are attributed by time, on any "
        "thread of the process; a tool that goes by thread would lose them.",
        {"backward_ns": total, "same_thread_ns": by_thread},
    )


@_check
def correlation_shared(summary: TraceSummary) -> Finding | None:
    """A finding on processes that use the same correlation ids. A join by id alone would count kernels repeatedly."""
    table = summary.attribution.table
    if table.on_cpu or values_of(table.calls, "process").n_unique() < 2:
        return None
    calls = table.calls.filter(pl.col("correlation").is_not_null()).select("process", "correlation").unique()
    owners = calls.group_by("correlation").len("owners")
    kernels = summary.attribution.kernels.select("correlation", "duration_ns").join(owners, on="correlation")
    shared = kernels.filter(pl.col("owners") > 1)
    if not shared.height:
        return None
    by_id = int((kernels["duration_ns"] * kernels["owners"]).sum())
    return note(
        "correlation-shared",
        f"{calls['process'].n_unique()} processes use the same correlation ids for {format_count(shared.height)} "
        f"kernels: joined by the id alone, {in_ms(by_id)} would be attributed of {in_ms(summary.busy_ns)}. "
        "The key here is (process, correlation id).",
        {"kernels": shared.height, "by_id_ns": by_id, "busy_ns": summary.busy_ns},
    )


@_check
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


@_check
def profiler_slows(summary: TraceSummary) -> Finding | None:
    """A finding on a traced step much longer than the unprofiled one. Its shares are valid, its times are not."""
    steps = summary.attribution.instances.filter(pl.col("what") == STEP)
    sample = summary.run.samples.get(STEP) if summary.run else None
    unprofiled_s = sample.median_s if sample and sample.count else None
    if not unprofiled_s or not steps.height:
        return None
    lengths = sorted((steps["end_ns"] - steps["start_ns"]).to_list())
    traced_s = lengths[len(lengths) // 2] * 1e-9
    ratio = traced_s / unprofiled_s
    if ratio < _SLOWED:
        return None
    return note(
        "profiler-slows",
        f"The traced step takes {traced_s * 1e3:.2f} ms, {ratio:.2f} times the unprofiled "
        f"{unprofiled_s * 1e3:.2f} ms: the profiler costs the host time. Device times of single kernels "
        "hold; idle time between them, and the step's length, are the profiler's too.",
        {"traced_s": traced_s, "unprofiled_s": unprofiled_s, "ratio": ratio},
        remedy="quote step times from the unprofiled measurement",
    )
