"""Plans beside what others published, and beside stored runs: the difference, whatever it is."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepscope.allocations.planning.search import planned, planned_step
from stepscope.allocations.planning.times import LAUNCH_S, Clock, rates_of
from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.answer import PROSE, Answer, Cell, Line, Table, as_lines, table_of
from stepscope.core.attention_support import is_predicted
from stepscope.core.device_spec import DATASHEET, DeviceSpec, Network, find_device_spec, network_for
from stepscope.core.errors import InputError
from stepscope.core.finding import Finding, note
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.formulas.transformer import PlannedModel
from stepscope.core.layout import Layout
from stepscope.core.model_config import configure
from stepscope.core.run import Run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import GIB
from stepscope.core.workloads import TextbookWorkload, by_sizes

# What others published of training over many GPUs: the layout, and the figures that a plan is set beside.


_H100 = DATASHEET["NVIDIA H100 80GB HBM3"]
_H100_96 = msgspec.structs.replace(
    _H100,
    name="H100 96GB HBM2e, 500 W",
    memory_bytes=96 * 10**9,
    peak_bytes_per_s=2.4e12,
    source="torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
)
_HERD = "Grattafiori et al. 2024, table 4"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a publication, and what is known of how it came about."""

    source: str
    model: str
    layout: Layout
    seq_len: int
    batch_size: int
    spec: DeviceSpec
    compile: str = "default"
    attention: str = "flash"
    mfu: float | None = None
    """Share of the device's peak, as published."""
    tokens_per_s: float | None = None
    """Tokens a second of each GPU, as published."""
    peak_gib: float | None = None
    unknown: str = ""
    """What the source does not say, and what stands for it here."""


def _herd(ranks: int, context: int, data: int, batch_of_data: int, mfu: float) -> tuple[Published, ...]:
    """Once for each number of chunks that 126 blocks and 16 ranks allow."""
    length = 131_072 if context > 1 else 8_192
    return tuple(
        Published(
            source=_HERD, model="llama3-405B", seq_len=length, batch_size=batch_of_data * data, spec=_H100, mfu=mfu,
            layout=Layout(
                tensor=8, context=context, pipeline=16, data=data, sharding="zero1-master", shard=data * context,
                chunks=chunks, micro_batch=1, micro_batches=batch_of_data,
            ),
            unknown=f"{ranks:,} GPUs; how many chunks a rank has",
        )
        for chunks in (1, 2, 4, 8)
    )  # fmt: skip


def _titan(data: int, compiled: str, tokens_per_s: float, peak_gib: float) -> Published:
    return Published(
        source=_TITAN, model="llama3-8B", seq_len=8_192, batch_size=2 * data, spec=_H100_96, compile=compiled,
        layout=Layout(data=data, shard=data, sharding="zero3", micro_batch=2, checkpointing="selective"),
        tokens_per_s=tokens_per_s, peak_gib=peak_gib,
        unknown="rates under a limit of 500 W; what its allocator reserved beyond the peak, which is in its figures; "
        "its selective checkpointing runs every second product again",
    )  # fmt: skip


PUBLISHED = (
    *_herd(8_192, 1, 64, 32, 0.43),
    *_herd(16_384, 1, 128, 16, 0.41),
    *_herd(16_384, 16, 8, 16, 0.38),
    _titan(8, "eager", 5_762, 82.4),
    _titan(8, "default", 6_667, 77.0),
    _titan(128, "eager", 5_605, 67.0),
    _titan(128, "default", 6_514, 62.0),
)


NetworkOf = Callable[[DeviceSpec], Network]
"""The network that joins devices of a kind."""


def answer_verification(runs: Sequence[Run], network_of: NetworkOf = network_for) -> Answer:
    """The Answer to how far plans are off. network_of: the network that joined the devices of the runs."""
    measured = [row for run in runs if (row := _measured_row(run, network_of)) is not None]
    public = [_published_row(one) for one in PUBLISHED]
    tables = [_published_table(public)]
    if measured:
        tables.append(_measured_table(measured))
    return Answer(
        study="plan",
        question="How far are plans from what was measured?",
        lead=(
            Line("Plans beside published figures, and beside stored runs", "strong"),
            Line(
                "Every plan assumes the same shares of the datasheet's rates, measured on an H200 (`stepscope plan` "
                "names them)."
            ),
        ),
        tables=tuple(tables),
        findings=tuple(_findings(measured)),
    )


def _published_row(one: Published) -> tuple[Cell, ...]:
    config = configure(one.model)
    workload = TextbookWorkload(
        model=config, batch_size=one.batch_size, seq_len=one.seq_len, dtype="bf16", attention=one.attention,
        compile="eager" if one.compile == "eager" else "default", optimizer="adamw-fused",
    )  # fmt: skip
    model, rates = PlannedModel(config=config), rates_of(one.spec, workload)
    memory = RankMemory(workload, model)
    found = planned(one.layout, memory, Clock(workload, memory, rates, network_for(one.spec)))
    step, ranks = found.time.step_s, one.layout.ranks
    mfu = model.step_flops(workload.tokens, workload.seq_len) / step / ranks / rates.peak_flops_per_s
    tokens = workload.tokens / step / ranks
    published, plan = (one.mfu, mfu) if one.mfu is not None else (one.tokens_per_s, tokens)
    assert published is not None
    peak = found.peak_bytes / GIB
    return (
        f"{one.model}, {ranks:,} GPUs, sequence {one.seq_len:,}, {one.layout.name}, {one.compile}",
        _said(published, is_share=one.mfu is not None),
        _said(plan, is_share=one.mfu is not None),
        plan / published - 1,
        one.peak_gib,
        peak,
        peak / one.peak_gib - 1 if one.peak_gib else None,
    )


def _said(value: float, *, is_share: bool) -> str:
    return f"{value:.1%} MFU" if is_share else f"{value:,.0f} tokens/s"


def _published_table(rows: Iterable[tuple[Cell, ...]]) -> Table:
    unknown = dict.fromkeys((one.source, one.unknown.rpartition("GPUs; ")[2]) for one in PUBLISHED)
    return table_of(
        ("published", PROSE), ("measured", "text"), ("planned", "text"), ("difference", "+%"),
        ("peak, GiB", ".1f"), ("planned, GiB", ".1f"), ("of peak", "+%"),
        title="Published figures", rows=rows,
        notes=as_lines(*(f"{source}. What a plan of it does not know: {what}." for source, what in unknown)),
    )  # fmt: skip


def _measured_row(run: Run, network_of: NetworkOf) -> tuple[Cell, ...] | None:
    """A run beside its plan; None for what no plan is of."""
    workload = run.workload
    environment, step = run.environment, run.samples.get("step")
    spec = find_device_spec(environment.device_name) if environment else None
    if spec is None or step is None or run.status != "done" or workload.phase != "train":
        return None
    measured_s, measured = step.median_s, _measured_peak(run)
    try:
        found = by_sizes(workload, lambda sized: planned_step(sized, spec, network_of(spec)))
        if measured_s is None or found is None:
            return None
        alone = workload.parallel == NOT_PARALLEL
        peak = estimate(workload).peak_bytes if alone and is_predicted(workload) else found.peak_bytes
    except InputError:  # no plan is of such a step
        return None
    plan = found.time.step_s
    return (
        cell_name(workload), measured_s, plan, plan / measured_s - 1, measured, peak if measured else None,
        100 * (peak / measured - 1) if measured else None, _computing_share(run, measured_s),
    )  # fmt: skip


def _computing_share(run: Run, step_s: float) -> float | None:
    """The part of a step in which the device computes, communication left out; None where no step was profiled."""
    profile = run.evidence.profile
    if profile is None:
        return None
    computing_s = profile.busy_s if run.shared is None else profile.computation_s
    return min(1.0, computing_s / step_s) if computing_s is not None else None


def _measured_peak(run: Run) -> int | None:
    """The peak of the rank that needed most, or of the only one."""
    of_ranks = [one.memory for one in run.shared.ranks] if run.shared is not None else []
    peaks = [memory.allocated_peak for memory in (run.evidence.memory, *of_ranks) if memory is not None]
    return max((peak for peak in peaks if peak is not None), default=None)


def _measured_table(rows: list[tuple[Cell, ...]]) -> Table:
    return table_of(
        "run", ("step", "s"), ("planned", "s"), ("difference", "+%"), ("peak", "B"), ("planned peak", "B"),
        ("of peak", "{:+.3f} %"), ("computing", "%"),
        title="Stored runs", rows=sorted(rows, key=lambda row: str(row[0])),
        notes=as_lines(
            "The peak of one GPU is the one that `stepscope fit` predicts, where it does. Computing: the part of the "
            "step in which the device (of ranks, the first one's) computes, by the profiled step."
        ),
    )  # fmt: skip


_BUSY = 0.8
"""The least part of a step in which a device computes that does not wait for its host: `launch-bound` has the same."""


def _waiting_findings(rows: list[tuple[Cell, ...]]) -> Iterable[Finding]:
    """Steps whose devices wait, apart from those that compute: what a host needs, no plan knows."""
    known = [(abs(float(row[3])), row[7]) for row in rows if isinstance(row[3], float) and isinstance(row[7], float)]
    waiting = [off for off, share in known if share < _BUSY]
    busy = [off for off, share in known if share >= _BUSY]
    if waiting and busy:
        yield note(
            "steps-busy",
            f"In {len(busy)} of them the device computes for at least {_BUSY:.0%} of the step: plans of these are off "
            f"by {statistics.median(busy):.1%} in the median, and by {max(busy):.1%} at most.",
            {"median": statistics.median(busy), "worst": max(busy)},
        )
    if waiting:
        yield note(
            "steps-waiting",
            f"In {len(waiting)} the device waits for longer, for its host or for other ranks. A plan counts "
            f"{LAUNCH_S * 1e6:.0f} us for each launch of a step op by op, and some ms for the hooks of sharded "
            "blocks: what a slower host, other hooks and compiled blocks take beyond that is not planned.",
            {"steps": len(waiting), "worst": max(waiting)},
        )


def _findings(rows: list[tuple[Cell, ...]]) -> Iterable[Finding]:
    if not rows:
        return
    steps = [abs(float(row[3])) for row in rows if isinstance(row[3], float)]
    peaks = [abs(float(row[6])) / 100 for row in rows if isinstance(row[6], float)]
    yield note(
        "steps-off",
        f"Of {len(steps)} steps, plans are off by {statistics.median(steps):.1%} in the median, and by "
        f"{max(steps):.1%} at most.",
        {"median": statistics.median(steps), "worst": max(steps)},
    )
    yield from _waiting_findings(rows)
    if peaks:
        yield note(
            "peaks-off",
            f"Of {len(peaks)} peaks of memory, by {statistics.median(peaks):.3%} in the median, and by "
            f"{max(peaks):.2%} at most.",
            {"median": statistics.median(peaks), "worst": max(peaks)},
        )
