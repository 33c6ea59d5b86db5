"""Checks of a capture for mistakes seen in published traces. Each is a function from a TraceSummary to a Finding."""

from collections.abc import Callable

import polars as pl

from stepscope.core.device_spec import lacks
from stepscope.core.finding import SEVERITIES, Finding, error, note, warning
from stepscope.core.range_names import BACKWARD, STEP
from stepscope.core.shown_text import name_shown
from stepscope.core.units import format_count, format_share, in_ms
from stepscope.traces.captures.damage import (
    clocks_disagree,
    correlation_repeats,
    durations_cut,
    ends_before_begin,
    names_missing,
    profiler_warns,
    ranges_missing,
    texts_mended,
    times_missing,
)
from stepscope.traces.captures.devices import device_names
from stepscope.traces.captures.range_names import phase_of
from stepscope.traces.captures.summary import GEMM, OUTSIDE, TraceSummary
from stepscope.traces.kernels.names.decoding import decode, is_tf32
from stepscope.traces.launches import is_launch
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.table import Profiler, TraceTable

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


def check_trace(summary: TraceSummary) -> tuple[Finding, ...]:
    """All findings on this capture, the most severe first."""
    return _found(TRACE_CHECKS, summary)


def doubts_of(summary: TraceSummary) -> tuple[Finding, ...]:
    """The findings on what this capture lacks, or what in it cannot be true: figures of it are wrong so far."""
    return _found(DOUBTS, summary)


def _found(checks: tuple[TraceCheck, ...], summary: TraceSummary) -> tuple[Finding, ...]:
    found = [finding for check in checks if (finding := check(summary)) is not None]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def incomplete_trace(summary: TraceSummary) -> Finding | None:
    """A finding on launches without kernels: the capture ended early, or buffers were lost."""
    table = summary.attribution.table
    names = table.calls.select("name").unique()
    launching = names.filter(is_launch(pl.col("name").cast(pl.String)))["name"]
    # Copies within the host and empty copies leave no device record, so they say nothing about losses.
    launching = launching.filter(launching.cast(pl.String).str.contains("Launch"))
    begun = pl.col("name").is_in(launching.implode()) & ~_while_capturing(table.calls, ["process", "thread"])
    rows = table.calls.select(begun.alias("launched")).to_series().arg_true()
    if table.on_cpu or not table.work.height:
        return _kernels_missing(len(rows))
    ran = rows.is_in(table.work["launch_row"].implode())
    if not ran.all():  # autograd's thread may launch into the stream that another thread captures
        counts = ran | ~_while_capturing(table.calls, ["process"]).gather(rows)
        ran, rows = ran.filter(counts), rows.filter(counts)
    launches, without = len(ran), int((~ran).sum()) - _untold_kernels(summary, rows.filter(~ran))
    share = without / launches if launches else 0.0
    at_the_edges = not ran.any() or ran[ran.arg_true()[0] : ran.arg_true()[-1]].all()
    if share < _LOST_SHARE or (without <= _FEW and (at_the_edges or share < _BROKEN_SHARE)):
        return None
    return Finding(
        kind="incomplete-trace",
        severity="error" if share >= _BROKEN_SHARE else "warning",
        sentence=(
            f"{format_count(without)} of {format_count(launches)} launches ({format_share(share)}) have no "
            f"kernel in this capture, which holds {format_count(summary.kernel_count)} kernels: it ended early or lost "
            "records, and its totals are too low."
        ),
        remedy=_LOSS_REMEDIES[table.profiler],
        evidence={"launches": launches, "without_kernel": without, "kernels": summary.kernel_count},
    )


def _untold_kernels(summary: TraceSummary, without: pl.Series) -> int:
    """How many kernels may be of the launches (rows of calls) `without` one: those that no id ties to any."""
    no_id = pl.col("correlation").is_null() | (pl.col("correlation") == 0)
    kernels = summary.attribution.kernels.filter(pl.col("launch_row").is_null())
    launches = summary.attribution.table.calls[without].filter(no_id).height
    return min(len(without), max(kernels.filter(no_id).height, min(launches, kernels.height)))


def _kernels_missing(launches: int) -> Finding | None:
    """A finding on a GPU's step of which the profiler saw only the host: operators stand in place of kernels."""
    if not launches:
        return None
    return error(
        "incomplete-trace",
        f"{format_count(launches)} launches on a device and not one kernel in this capture: its figures are "
        "the host's time in operators, not the device's.",
        {"launches": launches, "without_kernel": launches, "kernels": 0},
        remedy="capture with ProfilerActivity.CUDA, under no other profiler, as a user who may read the GPU's "
        "counters, and synchronise before the profiler stops",
    )


_ACCELERATORS = {"mtia": "MTIA", "hpu": "HPU", "xpu": "XPU", "npu": "NPU", "tpu": "TPU", "glow": "Glow"}
"""Devices that are no GPU, by the first word of their events' category."""


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


def _while_capturing(calls: pl.DataFrame, by: list[str]) -> pl.Series:
    """Whether each call was made while its thread (or process, `by`) captured a stream into a graph."""
    begin = _named(calls, "StreamBeginCapture").select(*by, "start_ns")
    end = _named(calls, "StreamEndCapture").select(*by, end_ns="start_ns")
    if not begin.height and not end.height:
        return pl.Series([False]).new_from_index(0, calls.height)
    earliest = begin.group_by(by).agg(pl.col("start_ns").min())
    cut_off = end.group_by(by).agg(pl.col("end_ns").min()).join(earliest, on=by, how="left")
    cut_off = cut_off.filter((pl.col("end_ns") < pl.col("start_ns")).fill_null(True))  # it began before the capture
    begin = pl.concat([begin, cut_off.select(*by, start_ns=pl.lit(calls["start_ns"].min(), pl.Int64))])
    spans = begin.sort("start_ns").join_asof(
        end.sort("end_ns"),
        left_on="start_ns",
        right_on="end_ns",
        by=by,
        strategy="forward",
        check_sortedness=False,
    )
    last = calls["start_ns"].max()
    spans = spans.with_columns((pl.col("end_ns").fill_null(pl.lit(last)) - pl.col("start_ns")).alias("duration_ns"))
    track = numbered(pl.concat([spans.select(by), calls.select(by)]), by)
    nest = Nest(spans.with_columns(track.head(spans.height).alias("track")), "track")
    return nest.innermost(track.tail(calls.height), calls["start_ns"]).is_not_null()


def _named(calls: pl.DataFrame, word: str) -> pl.DataFrame:
    """Process, thread and start of the calls whose name contains a word. Each distinct name is tested once."""
    names = calls["name"].unique()
    chosen = names.filter(names.cast(pl.String).str.contains(word, literal=True))
    return calls.lazy().filter(pl.col("name").is_in(chosen.implode())).select("process", "thread", "start_ns").collect()


def launches_unknown(summary: TraceSummary) -> Finding | None:
    """A finding on kernels without a launch record. They are shown as unattributed, never dropped."""
    kernels = summary.attribution.kernels
    unknown = kernels.filter(pl.col("launch_ns").is_null())
    if not unknown.height:
        return None
    lost_ns = int(unknown["duration_ns"].sum())
    share = lost_ns / summary.busy_ns if summary.busy_ns else 0.0
    return Finding(
        kind="launches-unknown",
        severity="warning" if share >= _WORTH_A_WORD else "note",
        sentence=(
            f"{format_count(unknown.height)} kernels ({in_ms(lost_ns)}, {format_share(share)} of kernel time) have no "
            "launch record, so no phase or module can be told; they are counted as unattributed."
        ),
        remedy="start the capture before the first launch that matters, and trace the CUDA runtime as well as kernels",
        evidence={"kernels": unknown.height, "busy_ns": lost_ns, "share": share},
    )


def phases_span_threads(summary: TraceSummary) -> Finding | None:
    """A finding on kernels launched from another thread than their range's, as autograd does in backward."""
    attribution = summary.attribution
    table = attribution.table
    backward = attribution.kernels.filter(pl.col("phase") == BACKWARD)
    if not backward.height or table.on_cpu:
        return None
    named = _phase_ranges(summary)
    if not named:  # autograd's nodes told this backward, and they are on the threads that launch
        return None
    owners = table.ranges.filter(pl.col("name").cast(pl.String).is_in(named)).select(
        "process", pl.col("thread").alias("launch_thread")
    )
    own = backward.join(owners.unique(), on=["process", "launch_thread"], how="semi")
    total, by_thread = int(backward["duration_ns"].sum()), int(own["duration_ns"].sum())
    if total - by_thread < _WORTH_A_WORD * total:
        return None
    return note(
        "phases-span-threads",
        f"Backward launched {in_ms(total)} of kernels, of which only {in_ms(by_thread)} from the thread whose "
        "range says backward: autograd launches from a thread of its own. They are attributed by time, on any "
        "thread of the process; a tool that goes by thread would lose them.",
        {"backward_ns": total, "same_thread_ns": by_thread},
    )


def _phase_ranges(summary: TraceSummary) -> list[str]:
    names = summary.attribution.table.ranges["name"].unique().to_list()
    return [name for name in names if phase_of(name) == BACKWARD]


def correlation_shared(summary: TraceSummary) -> Finding | None:
    """A finding on processes that use the same correlation ids. A join by id alone would count kernels repeatedly."""
    table = summary.attribution.table
    if table.on_cpu or table.calls["process"].n_unique() < 2:
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


def graphs_unseen(summary: TraceSummary) -> Finding | None:
    """A finding on CUDA graphs that were recorded as a whole, without their kernels, or launched but not recorded."""
    unrecorded = _graphs_without_work(summary.attribution.table)
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


def _graphs_without_work(table: TraceTable) -> int:
    names = table.calls["name"].unique()
    launching = names.filter(names.cast(pl.String).str.contains(r"^(cuda|cu|hip)GraphLaunch"))
    rows = table.calls.select(pl.col("name").is_in(launching.implode())).to_series().arg_true()
    return len(rows) - int(rows.is_in(table.work["launch_row"].implode()).sum())


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


def outside_phases(summary: TraceSummary) -> Finding | None:
    """A finding on a capture most of whose kernel time lies in no phase: an inference, or a loop without ranges."""
    launched = pl.col("launch_ns").is_not_null()  # `launches_unknown` says what the others lack
    outside = summary.attribution.kernels.filter(pl.col("phase").is_null() & launched)
    outside_ns = int(outside["duration_ns"].sum())
    share = outside_ns / summary.busy_ns if summary.busy_ns else 0.0
    if share <= _MOST or ranges_missing(summary) is not None:
        return None
    known = [phase.phase for phase in summary.phases if phase.phase != OUTSIDE]
    told = f"only {' and '.join(known)} could be told" if known else "no phase could be told"
    return warning(
        "outside-phases",
        f"{in_ms(outside_ns)} of {in_ms(summary.busy_ns)} of kernels ({format_share(share)}) lie outside forward, "
        f"backward and optimizer: {told}, neither by ranges nor by autograd's operators.",
        {"outside_ns": outside_ns, "busy_ns": summary.busy_ns, "share": share},
        remedy='put torch.profiler.record_function("forward") around the forward, and so for the other phases, or '
        "capture the loop with `stepscope watch --record kineto`; for inference read the families and kernels alone",
    )


def products_by_unit(summary: TraceSummary) -> Finding | None:
    """A finding on the units that ran fp32 products: CUDA cores instead of Tensor Cores, or TF32 instead of fp32."""
    convolution = pl.col("family") == "convolution"
    products = (
        summary.attribution.kernels.filter((pl.col("family") == GEMM) | convolution)
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
    said = summary.run.workload.dtype if summary.run else None
    if tf32 > _WORTH_A_WORD * total and said != "tf32":
        return Finding(
            kind="tf32-products",
            severity="error" if said == "fp32" else "warning",
            sentence=(
                f"{in_ms(tf32)} of {in_ms(total)} in matrix products ran as TF32 (10 bits of mantissa), by the "
                f"kernels' names{': the run says fp32' if said == 'fp32' else ': do not call these numbers fp32'}."
            ),
            remedy='torch.set_float32_matmul_precision("highest") gives true fp32, and for convolutions '
            "torch.backends.cudnn.allow_tf32 = False",
            evidence={"tf32_ns": tf32, "products_ns": total},
        )
    if cuda_core > _WORTH_A_WORD * total:
        return note(
            "products-on-cuda-cores",
            f"{in_ms(cuda_core)} of {in_ms(total)} in matrix products ({format_share(cuda_core / total)}) ran as "
            "true fp32 on CUDA cores: the Tensor Cores took no part in them.",
            {"cuda_core_ns": cuda_core, "products_ns": total},
            remedy=_onto_tensor_cores(device_names(summary.attribution)),
        )
    return None


def _onto_tensor_cores(devices: tuple[str, ...]) -> str:
    """How fp32 products come onto the Tensor Cores of these devices: Volta's and Turing's multiply fp16 alone."""
    if any(lacks(device, "bf16") for device in devices):
        return f"fp16 autocast with a GradScaler: {devices[0]} multiplies neither bf16 nor TF32 on Tensor Cores"
    return "bf16 autocast, or TF32 where its precision is enough"


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


DOUBTS: tuple[TraceCheck, ...] = (
    incomplete_trace,
    names_missing,
    ends_before_begin,
    times_missing,
    durations_cut,
    clocks_disagree,
    correlation_repeats,
)
TRACE_CHECKS: tuple[TraceCheck, ...] = (
    *DOUBTS,
    profiler_warns,
    ranges_missing,
    accelerator_unread,
    launches_unknown,
    graphs_unseen,
    outside_steps,
    outside_phases,
    products_by_unit,
    products_miscounted,
    arrows_disagree,
    phases_span_threads,
    correlation_shared,
    texts_mended,
    profiler_slows,
)
