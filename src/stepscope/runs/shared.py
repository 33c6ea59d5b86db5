"""What a run says of the ranks that shared its step: a table with a row each, and how they were taken together."""

from collections.abc import Iterator

from stepscope.core.answer import TEXT, Cell, Table, as_lines, table_of
from stepscope.core.range_names import STEP
from stepscope.core.ranks import Correctness, RankFigures, RanksEvidence
from stepscope.core.run import Run
from stepscope.core.units import counted, format_seconds, format_share
from stepscope.runs.communication import computation_of, waits_in_forward

_BEHIND = 1.05
"""A rank whose own phases take so many times the median of all is named."""


def ranks_table(run: Run) -> Table:
    """A row a rank: its own times, and what it keeps of the model; empty for a step of one process."""
    shared = run.shared
    if shared is None:
        return Table(title="", columns=("rank",), rows=())
    parts = [name for name in run.samples if name not in (STEP, "host")]
    has_peaks = any(_peak(figures) is not None for figures in shared.ranks)
    rows: list[tuple[Cell, ...]] = []
    for figures in shared.ranks:
        medians = [figures.samples[name].median_s if name in figures.samples else None for name in parts]
        peak = (_peak(figures),) if has_peaks else ()
        rows.append((
            figures.rank, figures.host, _median_s(figures, STEP), *medians, figures.parameter_bytes,
            figures.optimizer_bytes, *peak,
        ))  # fmt: skip
    return table_of(
        "rank", ("host", TEXT), ("step", "s"), *((name, "s") for name in parts), ("parameters", "B"),
        ("optimizer state", "B"), *((("peak", "B"),) if has_peaks else ()), rows=rows, title="ranks",
        notes=as_lines(*_about(run, shared)),
    )  # fmt: skip


def _cut_for_the_check(right: Correctness) -> list[str]:
    """What of the step was made smaller before it was held against one process, in words."""
    return [
        *([counted(right.layers, "layer")] if right.layers is not None else []),
        *([counted(right.batch_size, "sequence")] if right.batch_size is not None else []),
        *([f"{right.seq_len:,} tokens a sequence"] if right.seq_len is not None else []),
        *([f"a vocabulary of {right.vocabulary:,}"] if right.vocabulary is not None else []),
    ]


def _about(run: Run, shared: RanksEvidence) -> Iterator[str]:
    hosts = len({figures.host for figures in shared.ranks})
    threads = f", each on {counted(shared.threads, 'CPU thread')}" if shared.threads else ""
    lasts = "from the earliest start to the latest end" if shared.one_host else "as long as its longest rank"
    yield (
        f"{counted(len(shared.ranks), 'rank')} on {counted(hosts, 'host')} share each step by {run.workload.parallel} "
        f"over {shared.backend}{threads}. A step lasts {lasts}; the phases above are those of rank 0."
    )
    if (right := shared.correct) is not None:
        of = f", of {', '.join(cut)}" if (cut := _cut_for_the_check(right)) else ""
        losses = ""
        if right.loss_error is not None and right.loss_spread is not None:
            losses = f", losses under AdamW by {right.loss_error:.2g} ({right.loss_spread:.2g})"
        yield (
            f"Held against one process on the same batch{of}: gradients differ by {right.gradient_error:.2g} (rounding "
            f"makes {right.gradient_spread:.2g}), parameters after {right.steps} steps of SGD by "
            f"{right.update_error:.2g} ({right.update_spread:.2g}){losses}."
        )
    if shared.start_s is not None:
        yield f"They had met {format_seconds(shared.start_s)} after the first was started."
    if waits_in_forward(run):
        alone, what = computation_of(shared), "what it computes in the profiled step, without any wait,"
    else:
        alone = [(figures.rank, time) for figures in shared.ranks if (time := _median_s(figures, "forward"))]
        what = "its forward, in which it waits for nobody,"
    if len(alone) > 1:
        times = sorted(time for _, time in alone)
        middle = times[(len(times) - 1) // 2]
        slowest, time = max(alone, key=lambda one: one[1])
        if time > middle * _BEHIND:
            yield f"Rank {slowest} computes slowest: {what} takes {format_share(time / middle - 1)} longer."


def _median_s(figures: RankFigures, part: str) -> float | None:
    samples = figures.samples.get(part)
    return samples.median_s if samples is not None else None


def _peak(figures: RankFigures) -> int | None:
    return figures.memory.allocated_peak if figures.memory is not None else None
