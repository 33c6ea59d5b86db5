"""Figures derived from a run: rates, utilisation, shares. Each is None where the run does not support it."""

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.core.answer import TEXT, Cell, Table, as_lines, table_of
from stepscope.core.errors import InputError
from stepscope.core.evidence import Communication, RankFigures
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.formulas.transformer import phase_work
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, OPTIMIZER, STEP, TIMED
from stepscope.core.run import Run
from stepscope.core.run_directory import check_is_ours, write_atomically
from stepscope.core.samples import FEWEST_FOR_PERCENTILE, Samples, least_squares
from stepscope.core.strategies import BATCH, OPTIMIZER_STATE, PARAMETERS, PRODUCTS, Activations, known_strategy
from stepscope.core.units import format_bytes, format_seconds
from stepscope.core.workloads import TextbookWorkload, by_sizes

# What the ranks of a run send one another: counted beside the strategy's formula, and how much of it nothing hides.


_STATES = 2
"""What AdamW keeps of each trained parameter, each as large as it."""
_AS_BY_FORMULA = 0.001
"""Differences that are smaller are those of padding and of single numbers."""


def sent_bytes(run: Run) -> float | None:
    """Bytes that a rank sends in a step, in the mean of the ranks; None where nobody counted."""
    return _mean(run, lambda counts: counts.sent_bytes)


def sent_by_formula(run: Run) -> float | None:
    """The same by the formula of the strategy and its options; None where it has none."""
    shared, record = run.shared, known_strategy(run.workload.parallel)
    if shared is None or record is None or (record.moves is None and not record.activations):
        return None
    if record.splits != BATCH and not record.activations:
        return None  # what it sends of the activations is not known
    ranks, sent = len(shared.ranks), 0.0
    if record.moves is not None:
        if shared.whole_parameter_bytes is None or shared.whole_gradient_bytes is None:
            return None
        sent += record.sends(shared.whole_gradient_bytes, shared.whole_parameter_bytes, ranks) or 0.0
    if record.activations:
        activations = by_sizes(run.workload, _activations)
        if activations is None:
            return None
        sent += record.sends_activations(activations, ranks)
    return sent


def _activations(workload: TextbookWorkload) -> Activations:
    """What formulas take of a textbook's step."""
    model, precision = workload.model, PRECISIONS[workload.dtype]
    return Activations(
        tokens=workload.tokens,
        width=model.d_model,
        key_width=model.key_heads * model.head_dim,
        layers=model.layers,
        element_bytes=precision.products,
        residual_bytes=precision.residual,
        tied_bytes=model.vocabulary * model.d_model * precision.weights if model.tied else 0,
    )


def communication_s(run: Run) -> float | None:
    """How long collectives are under way in the profiled step, in the mean of the ranks."""
    return _mean(run, lambda counts: counts.communication_s)


def exposed_s(run: Run) -> float | None:
    """The part of it in which a rank computes nothing, in the mean of the ranks."""
    return _mean(run, lambda counts: counts.exposed_s)


def overlap_share(run: Run) -> float | None:
    """The share of communication that computation hides."""
    whole, exposed = communication_s(run), exposed_s(run)
    return max(0.0, 1 - exposed / whole) if whole and exposed is not None else None


def kept_bytes(run: Run) -> int | None:
    """Parameters and optimizer state of the rank that keeps most between steps; None of a step of one process."""
    ranks = run.shared.ranks if run.shared is not None else ()
    kept = [figures.parameter_bytes + (figures.optimizer_bytes or 0) for figures in ranks]
    return max(kept, default=None)


def kept_by_formula(run: Run) -> float | None:
    """The same, evenly divided, by what the strategy's record says that it shards; None where the optimizer is no
    AdamW, or where a strategy shards a part of the parameters alone."""
    shared, record = run.shared, known_strategy(run.workload.parallel)
    if shared is None or record is None or record.splits == PRODUCTS or record.near > 1:
        return None
    if record.settings.get("norms") == "whole":
        return None
    whole, trained, parts = shared.whole_parameter_bytes, shared.whole_gradient_bytes, len(shared.ranks)
    if whole is None or trained is None or not (getattr(run.workload, "optimizer", None) or "").startswith("adamw"):
        return None
    state = _STATES * trained / (parts if OPTIMIZER_STATE in record.shards else 1)
    return whole / (parts if PARAMETERS in record.shards else 1) + state


def buffers_by_formula(run: Run) -> float:
    """Bytes that the strategy keeps from step to step beside parameters, gradients and the optimizer's state."""
    shared, record = run.shared, known_strategy(run.workload.parallel)
    if shared is None or record is None or not record.fills_buckets:
        return 0.0
    return shared.whole_gradient_bytes or 0


def waits_in_forward(run: Run) -> bool:
    """Whether ranks wait for one another in forward, so that its time is not each rank's own."""
    calls = _of(run.shared.ranks[0]).calls if run.shared is not None else None
    if calls is None:
        record = known_strategy(run.workload.parallel)
        return record is not None and PARAMETERS in record.shards
    return any(call.phase in (FORWARD, FORWARD_BACKWARD) for call in calls)


def compared_ranks(before: Run, after: Run, title: str) -> Table:
    """What ranks send, wait for and keep in two runs; empty where one has no ranks."""
    figures = (
        ("sent by a rank", sent_bytes, format_bytes),
        ("communication", communication_s, format_seconds),
        ("exposed communication", exposed_s, format_seconds),
        ("kept by a rank", kept_bytes, format_bytes),
    )
    compared = [(name, read(before), read(after), shown) for name, read, shown in figures]
    rows: list[tuple[Cell, ...]] = [
        (name, shown(was), shown(now), now / was - 1 if was else None)
        for name, was, now, shown in compared
        if was is not None and now is not None
    ]
    return table_of(title, ("before", TEXT), ("after", TEXT), ("change", "+%"), rows=rows)


def communication_tables(run: Run) -> Iterator[Table]:
    """What each rank communicates in a step, and by which collectives; nothing where nobody counted."""
    shared = run.shared
    counts = [(figures.rank, _of(figures)) for figures in shared.ranks] if shared is not None else []
    if not any(each.sent_bytes is not None for _, each in counts):
        return
    formula = sent_by_formula(run)
    timed = any(each.communication_s is not None for _, each in counts)
    rows: list[tuple[Cell, ...]] = []
    for rank, each in counts:
        sent, hidden = each.sent_bytes, None
        more = round(sent / formula - 1, 4) + 0.0 if formula and sent is not None else None
        if each.communication_s and each.exposed_s is not None:
            hidden = max(0.0, 1 - each.exposed_s / each.communication_s)
        by_formula = (round(formula), more) if formula else ()
        times = (each.communication_s, each.exposed_s, hidden) if timed else ()
        rows.append((rank, sent, each.received_bytes, *by_formula, *times))
    yield table_of(
        "rank", ("sent", "B"), ("received", "B"), *((("by formula", "B"), ("sent more", "+%")) if formula else ()),
        *((("communication", "s"), ("exposed", "s"), ("hidden", "%")) if timed else ()),
        title="communication of a step", rows=rows, notes=as_lines(*_notes(run, formula, timed=timed)),
    )  # fmt: skip
    _, first = counts[0]
    if first.calls:
        yield table_of(
            "phase", ("collective", TEXT), "ranks", "calls", ("messages", "B"), ("sent", "B"),
            title="collectives of rank 0",
            rows=[
                (call.phase, call.kind, call.ranks, call.calls, call.message_bytes, call.sent_bytes)
                for call in first.calls
            ],
        )  # fmt: skip


def _notes(run: Run, formula: float | None, *, timed: bool) -> Iterator[str]:
    """What ranks send and keep beside the formulas, and what the times hold."""
    sent = sent_bytes(run)
    if formula and sent is not None:
        difference = sent / formula - 1
        why, record = "", known_strategy(run.workload.parallel)
        if getattr(run.workload, "accumulation", 1) > 1:
            why = ": it is that of one micro-batch"
        elif difference < 0 and record is not None and PARAMETERS in record.shards:
            why = ": what is not let go after forward is not gathered again"
        says = f"{abs(difference):.1%} {'more' if difference > 0 else 'less'} than the formula says{why}"
        if abs(difference) < _AS_BY_FORMULA:
            says = f"as the formula of {run.workload.parallel} says"
        yield f"In the mean a rank sends {format_bytes(sent)} a step, {says}."
    kept, of_formula = kept_bytes(run), kept_by_formula(run)
    if kept is not None and of_formula:
        off = kept / of_formula - 1
        beside = f"; even parts would be {format_bytes(of_formula)} ({off:+.1%})" if abs(off) >= _AS_BY_FORMULA else ""
        yield f"A rank keeps up to {format_bytes(kept)} of parameters and optimizer state between steps{beside}."
    if buffers := buffers_by_formula(run):
        yield f"Its buckets hold {format_bytes(buffers)} besides: a copy of each gradient."
    if timed:
        yield (
            "Times are of one step under the profiler. Communication holds the waiting for other ranks; what is "
            "exposed passes while the rank computes nothing."
        )


def _of(figures: RankFigures) -> Communication:
    return figures.communication or Communication()


def _mean(run: Run, read: Callable[[Communication], float | None]) -> float | None:
    ranks = run.shared.ranks if run.shared is not None else ()
    values = [value for figures in ranks if (value := read(_of(figures))) is not None]
    return statistics.fmean(values) if values else None


WHILE_MEASURED = ("sm_clock_mhz", "power_w", "temperature_c")
"""The quantities of GpuSamples."""


def samples_of(run: Run, name: str) -> Samples | None:
    """Samples by name; `forward-backward` is the sum of the two phases, step by step, where both are of the same."""
    if name == FORWARD_BACKWARD and name not in run.samples:
        forward, backward = run.samples.get(FORWARD), run.samples.get(BACKWARD)
        return forward.plus(backward) if forward and backward and forward.adds_to(backward) else None
    return run.samples.get(name)


def parts_of(run: Run) -> list[str]:
    """The names of the timed parts of the run's step: those that stepscope knows in their order, then a user's own."""
    known = [name for name in TIMED if name in run.samples]
    if FORWARD not in known and FORWARD_BACKWARD in run.samples:  # they take turns, as in a pipeline
        known = [FORWARD_BACKWARD, *known]
    return known + [name for name in run.samples if name not in (*TIMED, STEP, "host", FORWARD_BACKWARD)]


def memory_of(run: Run, field: str) -> int | None:
    """A figure of PhaseMemory, None where nobody counted."""
    return getattr(run.evidence.memory, field) if run.evidence.memory else None


def median_s(run: Run, name: str) -> float | None:
    """Median of the named samples."""
    samples = samples_of(run, name)
    return samples.median_s if samples else None


def tokens_per_s(run: Run) -> float | None:
    """Tokens of one step over the step's median time; None where its batch holds no tokens."""
    return _per_s(run, _tokens(run))


def _tokens(run: Run) -> int | None:
    """Tokens of one step: those that a watched loop's forwards took, where they differ in length."""
    loop = run.evidence.loop
    return loop.tokens if loop is not None and loop.tokens is not None else run.workload.tokens


def samples_per_s(run: Run) -> float | None:
    """Samples of one step over the step's median time; None where its batch is not known."""
    return _per_s(run, run.workload.batch_size)


def _per_s(run: Run, of_a_step: int | None) -> float | None:
    """So many of a step over its median time. Where steps run different numbers of forwards, those of all over the time
    of all."""
    loop, samples = run.evidence.loop, run.samples.get(STEP)
    if samples is None or not samples.median_s or not of_a_step:
        return None
    if loop is None or loop.forwards_mean is None or not loop.forwards:
        return of_a_step / samples.median_s
    return _of_a_step(run, of_a_step) / (samples.mean_s or samples.median_s)


def _of_a_step(run: Run, value: int) -> float:
    """So many of the step that was looked at, in the mean of steps that may run different numbers of forwards."""
    loop = run.evidence.loop
    if loop is None or loop.forwards_mean is None or not loop.forwards:
        return value
    return value * loop.forwards_mean / loop.forwards


def at_pace(run: Run, step_s: float) -> tuple[float | None, float | None, float | None]:
    """Samples a second, tokens a second, and MFU by the datasheet, where a step takes this long."""
    samples, tokens, flops, peak = run.workload.batch_size, _tokens(run), model_flops(run), peak_flops_per_s(run)
    return (
        _of_a_step(run, samples) / step_s if samples else None,
        _of_a_step(run, tokens) / step_s if tokens else None,
        flops / step_s / peak if flops and peak else None,
    )


def model_flops(run: Run) -> int | None:
    """Model FLOPs of one step, by the convention stored with the run's work."""
    return sum(work.flops for work in run.work.values()) or None


def model_flops_per_s(run: Run) -> float | None:
    """Model FLOPs of a step over its median time."""
    step_s, flops = median_s(run, STEP), model_flops(run)
    return flops / step_s if step_s and flops else None


def mfu_datasheet(run: Run) -> float | None:
    """Model FLOPs utilisation against the datasheet's dense peak for the dtype of the matrix products."""
    rate, peak = model_flops_per_s(run), peak_flops_per_s(run)
    return rate / peak if rate and peak else None


def peak_flops_per_s(run: Run) -> float | None:
    """The datasheet's dense peak for the dtype of the matrix products, of all devices that share the step."""
    peak = run.device_spec.peak_for(run.workload.dtype) if run.device_spec else None
    return peak * devices(run) if peak else None


def mfu_measured(run: Run) -> float | None:
    """Model FLOPs utilisation against the best matrix product measured on this device."""
    rate = model_flops_per_s(run)
    ceiling = run.ceilings.matmul_for(run.workload.dtype) if run.ceilings else None
    return rate / (ceiling.rate * devices(run)) if rate and ceiling and ceiling.rate > 0 else None


def devices(run: Run) -> int:
    """How many devices like this one share the step: ranks on a CPU share that CPU."""
    return run.workload.ranks if on_gpu(run) else 1


def host_share(run: Run) -> float | None:
    """Time the host needs to issue a step's work, over the step. Near 1, the host never gets ahead of the device."""
    host_s, step_s = median_s(run, "host"), median_s(run, STEP)
    return host_s / step_s if host_s and step_s and on_gpu(run) else None


def launch_bound_share(run: Run) -> float | None:
    """Share of the step in which the device had no kernel to run: 1 - busy / step.

    Busy is the union of kernel times in the profiled step (kernels themselves do not slow down under the profiler),
    the step is the unprofiled median.
    """
    step_s = median_s(run, STEP)
    if not step_s or run.evidence.profile is None or not on_gpu(run):
        return None
    return max(0.0, 1 - run.evidence.profile.busy_s / step_s)


def profiler_slowdown(run: Run) -> float | None:
    """Profiled step over the unprofiled median."""
    step_s = median_s(run, STEP)
    return run.evidence.profile.step_s / step_s if step_s and run.evidence.profile else None


def peak_bytes(run: Run) -> int | None:
    """The most bytes that a step had allocated at once; None where that was not measured."""
    return run.evidence.memory.allocated_peak if run.evidence.memory else None


def joules_per_step(run: Run) -> float | None:
    """Energy of one step; None where no counter was read, or where its steps took turns with another run's."""
    energy = run.evidence.energy
    return None if energy is None or run.beside is not None else energy.energy_j / energy.steps


def joules_per_token(run: Run) -> float | None:
    """Energy of one step over its tokens; None also where its batch holds no tokens."""
    joules, tokens = joules_per_step(run), _tokens(run)
    return joules / tokens if joules is not None and tokens else None


def while_measured(run: Run, quantity: str) -> float | None:
    """The median of a quantity of GpuSamples while the measured steps ran; None where nobody read it."""
    during = run.environment.during if run.environment else None
    extent = getattr(during, quantity) if during else None
    return extent.median if extent else None


def summarise(run: Run) -> dict[str, float | None]:
    """The figures that readers of the JSON look for first; seconds, bytes, per second, shares of one."""
    summary: dict[str, float | None] = {}
    for name in (STEP, *parts_of(run), "host"):
        samples = run.samples.get(name)
        if samples is None or not samples.count:
            continue
        interval = samples.interval()
        summary[f"{name}_median_s"] = samples.median_s
        summary[f"{name}_low_s"] = interval.low if interval else None
        summary[f"{name}_high_s"] = interval.high if interval else None
        summary[f"{name}_effective_samples"] = samples.effective_count
        summary[f"{name}_mean_s"] = samples.mean_s
        summary[f"{name}_stdev_s"] = samples.stdev_s
        summary |= {f"{name}_{percentile}_s": samples.percentile_s(percentile) for percentile in FEWEST_FOR_PERCENTILE}
    figures = {
        "tokens_per_s": tokens_per_s(run),
        "samples_per_s": samples_per_s(run),
        "model_flops": model_flops(run),
        "model_flops_per_s": model_flops_per_s(run),
        "mfu_datasheet": mfu_datasheet(run),
        "mfu_measured": mfu_measured(run),
        "host_share": host_share(run),
        "launch_bound_share": launch_bound_share(run),
        "profiler_slowdown": profiler_slowdown(run),
        "peak_bytes": peak_bytes(run),
        "joules_per_step": joules_per_step(run),
        "joules_per_token": joules_per_token(run),
        **{quantity: while_measured(run, quantity) for quantity in WHILE_MEASURED},
    }
    if run.shared is not None:
        figures |= {
            "sent_bytes": sent_bytes(run),
            "sent_bytes_by_formula": sent_by_formula(run),
            "communication_s": communication_s(run),
            "exposed_communication_s": exposed_s(run),
            "overlap_share": overlap_share(run),
            "kept_bytes": kept_bytes(run),
            "kept_bytes_by_formula": kept_by_formula(run),
        }
    return {**summary, **figures}


def on_gpu(run: Run) -> bool:
    """Whether the run's device is a GPU; false where it did not come to look for one."""
    return run.environment is not None and run.environment.device_type != "cpu"


# A run's figures as an OpenMetrics file, which Prometheus' older text format reads, too: node_exporter takes only that.
# It refuses unknown types and samples with a time, so every figure is a gauge, the time of the run included.


GAUGES = {
    "tokens_per_s": ("tokens_per_second", "", "Tokens of a step over its median time."),
    "samples_per_s": ("samples_per_second", "", "Samples of a step over its median time."),
    "model_flops": ("model_flops", "", "Model FLOPs of a step."),
    "model_flops_per_s": ("model_flops_per_second", "", "Model FLOPs of a step over its median time."),
    "mfu_datasheet": ("mfu_datasheet_ratio", "ratio", "Model FLOPs utilisation beside the datasheet's peak."),
    "mfu_measured": ("mfu_measured_ratio", "ratio", "Model FLOPs utilisation beside the best product measured here."),
    "host_share": ("host_ratio", "ratio", "Time that the host needs to issue a step, over the step."),
    "launch_bound_share": ("launch_bound_ratio", "ratio", "Share of a step in which the device had no kernel to run."),
    "profiler_slowdown": ("profiled_step_ratio", "ratio", "A step under the profiler over the median step."),
    "peak_bytes": ("peak_bytes", "bytes", "The most memory that a step had allocated at once."),
    "joules_per_step": ("energy_of_step_joules", "joules", "Energy of a step."),
    "joules_per_token": ("energy_of_token_joules", "joules", "Energy of a step over its tokens."),
    "sm_clock_mhz": ("sm_clock_megahertz", "megahertz", "The clock of the multiprocessors while steps were timed."),
    "power_w": ("power_watts", "watts", "Power of the GPU while steps were timed."),
    "temperature_c": ("temperature_celsius", "celsius", "Temperature of the GPU while steps were timed."),
    "sent_bytes": ("sent_bytes", "bytes", "Bytes that a rank sends in a step."),
    "sent_bytes_by_formula": ("sent_by_formula_bytes", "bytes", "Bytes that a rank sends in a step, by formula."),
    "communication_s": ("communication_seconds", "seconds", "Time in which a rank communicates in a step."),
    "exposed_communication_s": (
        "exposed_communication_seconds",
        "seconds",
        "Communication while a rank computes nothing.",
    ),
    "overlap_share": ("overlap_ratio", "ratio", "Share of communication that computation hides."),
    "kept_bytes": ("kept_bytes", "bytes", "Parameters and optimizer state that a rank keeps between steps."),
    "kept_bytes_by_formula": ("kept_by_formula_bytes", "bytes", "The same by formula."),
}
"""By the names of a summary: the gauge's name, its unit and its help. A help never changes from run to run: a collector
of several files demands it."""


def open_metrics(*runs: Run) -> str:
    """The figures of these runs as OpenMetrics. Where there are several, each figure names its run."""
    gauges: dict[str, tuple[str, str, list[_Sample]]] = {}
    for run in runs:
        for name, unit, what, samples in _gauges(run, {"run": run.id} if len(runs) > 1 else {}):
            gauges.setdefault(name, (unit, what, []))[2].extend(samples)
    lines = [line for name, gauge in gauges.items() for line in _gauge(name, *gauge)]
    return "\n".join([*lines, "# EOF", ""])


_Sample = tuple[dict[str, str], float | None]


def _gauges(run: Run, own: dict[str, str]) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    """The gauges of a run: name, unit, help, and the samples, which have these labels too."""
    device = run.environment.device_name if run.environment is not None else ""
    versions = run.environment.versions if run.environment is not None else {}
    of_all = {"workload": cell_name(run.workload), "device": device, **own}
    named = {"run": run.id, "status": run.status, "tag": run.tag or "", "stepscope": versions.get("stepscope", "")}
    yield "run_info", "", "The run that was measured.", [({**of_all, **named}, 1.0)]
    yield "run_begun_seconds", "seconds", "When it began, in seconds since 1970.", [(of_all, run.instant)]
    times: list[_Sample] = []
    summary = summarise(run)
    for part in (STEP, *parts_of(run), "host"):
        for stat in ("median", "low", "high", "mean", "stdev", *FEWEST_FOR_PERCENTILE):
            times.append(({**of_all, "part": part, "stat": stat}, summary.get(f"{part}_{stat}_s")))
    yield "part_seconds", "seconds", "Time of a step and of its parts; low to high is the interval.", times
    for name, (gauge, unit, what) in GAUGES.items():
        yield gauge, unit, what, [(of_all, summary.get(name))]
    counts: list[_Sample] = [
        ({**of_all, "severity": each}, float(sum(finding.severity == each for finding in run.findings)))
        for each in ("error", "warning", "note")
    ]
    yield "findings", "", "Findings of the run's checks.", counts


def _gauge(name: str, unit: str, what: str, samples: Sequence[_Sample]) -> list[str]:
    """The lines of a gauge; none where no sample of it is known."""
    known = [(labels, value) for labels, value in samples if value is not None and math.isfinite(value)]
    if not known:
        return []
    name = f"stepscope_{name}"
    head = [f"# HELP {name} {what}", f"# TYPE {name} gauge", *([f"# UNIT {name} {unit}"] if unit else [])]
    return [*head, *(f"{name}{{{_labels(labels)}}} {float(value)!r}" for labels, value in known)]


def _labels(labels: dict[str, str]) -> str:
    escapes = {"\\": "\\\\", "\n": "\\n", '"': '\\"'}
    return ",".join(f'{name}="{"".join(escapes.get(each, each) for each in text)}"' for name, text in labels.items())


def check_metrics_file(file: Path) -> None:
    """Raise InputError where no figures can be written to this file, or where it is somebody else's."""
    if file.is_dir() or not file.parent.is_dir():
        why = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}, make it first"
        raise InputError(f"--metrics {file} cannot be written: {why}")
    check_is_ours(file, "# HELP stepscope_")


def write_metrics(runs: Sequence[Run], file: Path) -> None:
    """Write the runs' figures as OpenMetrics, whole or not at all. Raises InputError where that cannot be done, and
    where the file is somebody else's."""
    check_metrics_file(file)
    try:
        write_atomically(open_metrics(*runs).encode(), file)
    except OSError as error:
        raise InputError(f"--metrics {file} cannot be written: {error.strerror or error}") from error


# Times of cells that were not measured, scaled from cells that were.


def _terms(workload: TextbookWorkload, phase: str) -> tuple[float, ...]:
    """What the time of a phase grows with: FLOPs of products, elements of activations, and of scores, since kernels of
    products wait for arithmetic and the others for memory; the optimizer's with its bytes alone."""
    work = phase_work(workload, "full")[phase]
    if not work.flops:
        return (float((work.bytes_read or 0) + (work.bytes_written or 0)),)
    model = workload.model
    scores = workload.batch_size * model.heads * workload.seq_len**2 * model.layers
    return float(work.flops), float(workload.tokens * model.d_model * model.layers), float(scores)


@dataclass(frozen=True)
class Scaling:
    """The times of a phase of measured cells, and what they say of cells that were not measured: a roofline, whose
    products run no faster than the device's measured ceiling. What a cell takes beyond grows with its terms."""

    cells: tuple[tuple[TextbookWorkload, float], ...]
    """Each measured cell, and its median in seconds."""
    phase: str
    ceiling: float | None = None
    """The measured rate of matrix products in FLOP/s; None where it is not known, and for the optimizer."""

    def seconds(self, workload: TextbookWorkload, without: TextbookWorkload | None = None) -> float | None:
        """The time of a cell: its FLOPs at the ceiling, and seconds for each of its terms, none below zero, with which
        the measured cells but for one are met best, by the squares of their relative errors. None without any."""
        rows = [
            ([term / seconds for term in _terms(cell, self.phase)], 1 - self._least(cell) / seconds)
            for cell, seconds in self.cells
            if cell != without
        ]
        if not rows:
            return None
        return self._least(workload) + sum(map(operator.mul, least_squares(rows), _terms(workload, self.phase)))

    @property
    def errors(self) -> list[float]:
        """Each measured cell's relative error where it is predicted from the others; empty where there are none."""
        predicted = [(self.seconds(cell, cell), seconds) for cell, seconds in self.cells]
        return [abs(guess / seconds - 1) for guess, seconds in predicted if guess is not None]

    @property
    def is_useful(self) -> bool:
        """Whether it meets measured cells within their own size, in the middle; where that is not known, it may."""
        return not (errors := self.errors) or statistics.median(errors) <= 1

    def _least(self, workload: TextbookWorkload) -> float:
        return _terms(workload, self.phase)[0] / self.ceiling if self.ceiling else 0.0


def scaling_of(runs: Iterable[Run], device: str, like: TextbookWorkload, phase: str) -> Scaling:
    """The measured times of this phase of plain steps with a dtype, on this device; of several runs of a cell the
    last."""
    cells: dict[TextbookWorkload, float] = {}
    ceiling: float | None = None
    for run in sorted(runs, key=lambda run: run.instant):
        workload, where = run.workload, run.environment
        if run.status != "done" or workload.sizes is None or where is None or where.device_name != device:
            continue
        plain = msgspec.structs.replace(
            like, model=workload.model, batch_size=workload.batch_size, seq_len=workload.seq_len, phase=workload.phase,
            optimizer="adamw-foreach",
        )  # fmt: skip
        samples = samples_of(run, phase)
        if workload == plain and samples is not None and samples.median_s:
            known = run.ceilings.matmul_for(like.dtype) if run.ceilings is not None and phase != OPTIMIZER else None
            ceiling = max(filter(None, (ceiling, known and known.rate)), default=None)
            cells[msgspec.structs.replace(workload, phase="train", optimizer="adamw-foreach")] = samples.median_s
    return Scaling(tuple(cells.items()), phase, ceiling)
