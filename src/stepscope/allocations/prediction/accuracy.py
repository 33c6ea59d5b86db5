"""Compares the predicted with the measured memory of stored runs."""

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from stepscope.allocations.prediction.estimate import MemoryEstimate, estimate
from stepscope.allocations.prediction.fit import budget_of_memory, budget_of_total, will_fit
from stepscope.core.answer import Frame, Guide, Panel, Point
from stepscope.core.attention_support import is_predicted
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.run import Run
from stepscope.core.units import GIB
from stepscope.core.workloads import TextbookWorkload


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run beside its prediction."""

    run_id: str
    workload: TextbookWorkload
    predicted: MemoryEstimate
    measured_peak: int | None
    """Measured peak bytes; None where the run ended before its peak."""
    measured_reserved: int | None
    ran: bool
    foretold: bool | None
    """Whether it was predicted to fit into the memory it had; None where that is not known."""

    @property
    def error(self) -> float | None:
        """Predicted over measured peak, less one."""
        return self.predicted.peak_bytes / self.measured_peak - 1 if self.measured_peak else None

    @property
    def wrongly_said_to_fit(self) -> bool:
        return self.foretold is True and not self.ran


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """All comparisons of predicted with measured memory, and their errors."""

    comparisons: tuple[Comparison, ...]
    apart: tuple[Comparison, ...] = ()
    """Runs that were used to correct the symbolic model: shown, and never counted."""

    @property
    def errors(self) -> list[float]:
        return [abs(c.error) for c in self.comparisons if c.error is not None]

    @property
    def median_error(self) -> float | None:
        return statistics.median(self.errors) if self.errors else None

    @property
    def worst(self) -> Comparison | None:
        judged = [c for c in self.comparisons if c.error is not None]
        return max(judged, key=lambda c: abs(c.error or 0.0), default=None)

    @property
    def verdicts(self) -> int:
        """Runs whose memory is known, so that a verdict could be right or wrong."""
        return sum(c.foretold is not None for c in self.comparisons)

    @property
    def right(self) -> int:
        return sum(c.foretold == c.ran for c in self.comparisons if c.foretold is not None)

    @property
    def wrongly_said_to_fit(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if c.wrongly_said_to_fit)


def compare(runs: Sequence[Run], apart: Sequence[Run] = ()) -> Accuracy:
    """Every run on a GPU that finished its steps or ran out of memory, beside its prediction."""
    return Accuracy(comparisons=tuple(_compared(runs)), apart=tuple(_compared(apart)))


def _compared(runs: Sequence[Run]) -> Iterator[Comparison]:
    for run in runs:
        workload, memory, environment = run.workload, run.evidence.memory, run.environment
        peak = memory.allocated_peak if memory else None
        ended = run.status == "out-of-memory" or (run.status == "done" and peak is not None)
        if not is_predicted(workload) or environment is None or environment.device_type != "cuda" or not ended:
            continue
        budget = None
        if environment.memory_limit_bytes:
            budget = budget_of_memory(environment.memory_limit_bytes)
        elif environment.memory_bytes:
            budget = budget_of_total(environment.memory_bytes, environment.device_name)
        predicted = estimate(workload)
        yield Comparison(
            run_id=run.id,
            workload=workload,
            predicted=predicted,
            measured_peak=peak,
            measured_reserved=memory.reserved_peak if memory else None,
            ran=run.status == "done",
            foretold=will_fit(workload, budget, predicted) if budget is not None else None,
        )


# Predicted against measured peaks as points: on the diagonal or off it, and below how far off.


BANDS = (0.02, 0.06)
"""Shares of the measured peak: what the median error is held to, and what the worst is."""
_WIDER = 1.25
"""The axes go so much beyond the points."""


def accuracy_panels(accuracy: Accuracy) -> tuple[Panel, ...]:
    """Every run whose peak was measured; those that the prediction was corrected by stand apart."""
    judged = [each for each in accuracy.comparisons if each.measured_peak]
    apart = [each for each in accuracy.apart if each.measured_peak]
    both = [(each, False) for each in judged] + [(each, True) for each in apart]
    if not both:
        return ()
    peaks = [size / GIB for each, _ in both for size in (each.predicted.peak_bytes, each.measured_peak) if size]
    ends = (min(peaks) / _WIDER, max(peaks) * _WIDER)
    reach = 100 * _WIDER * max(BANDS[-1], *(abs(each.error or 0.0) for each, _ in both))
    frame = Frame(
        heading="Peak memory, predicted and measured",
        note=_counted(accuracy, len(apart)),
        line_title="model",
        style_title="what ran",
        x_ends=ends,
    )
    about_diagonal = [
        Guide(x=ends, y=tuple(at * (1 - band) for at in ends), to=tuple(at * (1 + band) for at in ends))
        for band in reversed(BANDS)
    ]
    about_zero = [
        Guide(x=ends, y=(-100 * band,) * 2, to=(100 * band,) * 2, name=f"±{100 * band:g} %") for band in reversed(BANDS)
    ]
    with_ends = msgspec.structs.replace(frame, y_ends=ends, guides=(*about_diagonal, Guide(x=ends, y=ends)))
    upper = Panel(
        x_title="measured peak (GiB)",
        y_title="predicted peak (GiB)",
        kind="points",
        x_log=True,
        y_log=True,
        points=tuple(_point(each, each.predicted.peak_bytes / GIB, apart=hollow) for each, hollow in both),
        frame=with_ends,
    )
    lower = msgspec.structs.replace(
        upper,
        y_title="error of the prediction (%)",
        y_log=False,
        points=tuple(_point(each, 100 * (each.error or 0.0), apart=hollow) for each, hollow in both),
        frame=msgspec.structs.replace(frame, y_ends=(-reach, reach), guides=(*about_zero, Guide(y=(0.0,)))),
    )
    return upper, lower


def _point(each: Comparison, y: float, *, apart: bool) -> Point:
    return Point(
        x=(each.measured_peak or 0) / GIB,
        y=y,
        line=each.workload.model.name,
        style=_what_ran(each.workload),
        name=cell_name(each.workload),
        apart=apart,
    )


def _what_ran(workload: TextbookWorkload) -> str:
    """Phase and kind of step, in words few enough for shapes."""
    phase = "inference" if workload.phase == "forward" else "training"
    compiled = ", compiled" if workload.compile != "eager" else ""
    checkpointed = ", checkpointed" if workload.checkpointing != "none" else ""
    return phase + compiled + checkpointed


def _counted(accuracy: Accuracy, apart: int) -> str:
    """How many cells judge the prediction, and their median and worst error; how many it was corrected by."""
    corrected = f"{apart} that it was corrected by, hollow" if apart else ""
    worst, median = accuracy.worst, accuracy.median_error
    if worst is None or worst.error is None or median is None:
        return corrected
    judged = f"{len(accuracy.errors)} cells judge: median error {median:.2%}, worst {abs(worst.error):.2%}"
    return "; ".join(part for part in (judged.replace("%", " %"), corrected) if part)
