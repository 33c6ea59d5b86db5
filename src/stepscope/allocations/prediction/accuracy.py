"""Compares the predicted with the measured memory of stored runs."""

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from stepscope.allocations.prediction.estimate import MemoryEstimate, estimate
from stepscope.allocations.prediction.fit import budget_of_memory, budget_of_total, will_fit
from stepscope.core.attention_support import is_predicted
from stepscope.core.run import Run
from stepscope.core.workload import Workload


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run beside its prediction."""

    run_id: str
    workload: Workload
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
    return Accuracy(
        comparisons=tuple(_compared(runs)),
        apart=tuple(_compared(apart)),
    )


def _compared(runs: Sequence[Run]) -> Iterator[Comparison]:
    for run in runs:
        if is_predicted(run.workload) and _has_a_peak(run):
            yield _compare(run, run.workload)


def _has_a_peak(run: Run) -> bool:
    on_gpu = run.environment is not None and run.environment.device_type == "cuda"
    measured = run.evidence.memory is not None and run.evidence.memory.allocated_peak is not None
    return on_gpu and (run.status == "out-of-memory" or (run.status == "done" and measured))


def _compare(run: Run, workload: Workload) -> Comparison:
    memory, environment = run.evidence.memory, run.environment
    budget = None
    if environment is not None and environment.memory_limit_bytes:
        budget = budget_of_memory(environment.memory_limit_bytes)
    elif environment is not None and environment.memory_bytes:
        budget = budget_of_total(environment.memory_bytes, environment.device_name)
    predicted = estimate(workload)
    return Comparison(
        run_id=run.id,
        workload=workload,
        predicted=predicted,
        measured_peak=memory.allocated_peak if memory else None,
        measured_reserved=memory.reserved_peak if memory else None,
        ran=run.status == "done",
        foretold=will_fit(workload, budget, predicted) if budget is not None else None,
    )
