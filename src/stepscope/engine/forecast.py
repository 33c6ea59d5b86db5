"""Predicts which cells of a sweep will run out of memory, before the first of them runs."""

from typing import TypeGuard

from stepscope.allocations.prediction.estimate import estimate_quickly
from stepscope.allocations.prediction.fit import Budget, budget_of_memory, budget_of_total, will_fit
from stepscope.allocations.prediction.layouts import memory_of_ranks
from stepscope.core.attention_support import is_predicted
from stepscope.core.layout import layout_of
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload, Workload
from stepscope.engine.sweep_plan import SweepPlan
from stepscope.recording.nvml import smallest_gpu

_FAR_BELOW = 0.6
"""A peak below this share of the memory needs no closer look."""


def memory_of(plan: SweepPlan) -> Budget | None:
    """The Budget of memory for each cell; None on a CPU, and where the memory is not known."""
    if any(device == "cpu" for device in plan.devices):
        return None
    if plan.memory_limit_bytes is not None:
        return budget_of_memory(plan.memory_limit_bytes)
    gpu = smallest_gpu()
    return None if gpu is None else budget_of_total(gpu[1], gpu[0])


def is_foretold(workload: Workload) -> TypeGuard[TextbookWorkload]:
    """Whether it can be said before that this step fits. Of ranks, only what a layout of plans stands for."""
    if not is_predicted(workload):
        return False
    return workload.parallel == NOT_PARALLEL or layout_of(workload) is not None


def cells_that_will_not_fit(plan: SweepPlan, budget: Budget) -> list[TextbookWorkload]:
    """The workloads whose predicted step needs more than the budget, in the order of the plan."""
    return [cell.workload for cell in plan.cells if is_foretold(cell.workload) and not fits(cell.workload, budget)]


def needed_bytes(workload: TextbookWorkload) -> int:
    """The peak of a step that is foretold, in bytes: of one process, or of each rank."""
    layout = layout_of(workload)
    if workload.parallel == NOT_PARALLEL or layout is None:
        return estimate_quickly(workload).peak_bytes
    return memory_of_ranks(workload).needs(layout, exactly=True).peak


def fits(workload: TextbookWorkload, budget: Budget) -> bool:
    """Whether a step that is foretold fits."""
    if workload.parallel != NOT_PARALLEL:
        return needed_bytes(workload) <= budget.usable_bytes
    if workload.phase == "train" and estimate_quickly(workload).peak_bytes < _FAR_BELOW * budget.usable_bytes:
        return True
    return will_fit(workload, budget)
