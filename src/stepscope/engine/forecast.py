"""Predicts which cells of a sweep will run out of memory, before the first of them runs."""

from stepscope.core.attention_support import is_predicted
from stepscope.core.workload import Workload
from stepscope.engine.plan import SweepPlan
from stepscope.measure.nvml import smallest_gpu
from stepscope.memory.prediction.estimate import estimate_quickly
from stepscope.memory.prediction.fit import Budget, budget_of_memory, budget_of_total, will_fit

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


def cells_that_will_not_fit(plan: SweepPlan, budget: Budget) -> list[Workload]:
    """The workloads whose predicted step needs more than the budget, in the order of the plan."""
    return [cell.workload for cell in plan.cells if is_predicted(cell.workload) and not _fits(cell.workload, budget)]


def _fits(workload: Workload, budget: Budget) -> bool:
    if workload.phase == "train" and estimate_quickly(workload).peak_bytes < _FAR_BELOW * budget.usable_bytes:
        return True
    return will_fit(workload, budget)
