"""Makes the step of a workload on a device, whoever wrote the model, alone or as one of the ranks that share it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stepscope.core.environment import RankPlace
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import Workload, by_sizes
from stepscope.recording.step import Step
from stepscope.training.training_step import Ranks, StepParts, TrainingStep, textbook_parts

if TYPE_CHECKING:
    from stepscope.training.user_module.loading import Loaded

Load = Callable[[], "Loaded"]
"""Gives a user's model that is there already, in place of what a factory would return."""


def join(place: RankPlace | None, device: torch.device) -> Ranks:
    """Meet the other ranks; alone where there is no place among any.

    Raises InputError for a backend that this PyTorch lacks, and StepscopeError where the others do not come.
    """
    if place is None:
        return Ranks()
    from stepscope.training.parallel.collective import Joined  # noqa: PLC0415  (only among ranks)

    return Joined(place, device)


def make_step(
    workload: Workload, device: torch.device, load: Load | None = None, ranks: Ranks | None = None
) -> tuple[Step, Workload]:
    """The step on its device, and its workload with what was found in making it.

    ranks: those that share the step, where its workload says how.
    """
    share = None
    if workload.parallel != NOT_PARALLEL:
        from stepscope.training.parallel.step import shared_by  # noqa: PLC0415  (only where ranks share the step)

        share = shared_by(workload.parallel, ranks or Ranks())
    step = by_sizes(workload, lambda sized: TrainingStep(sized, device, share))
    if step is not None:
        return step, workload
    from stepscope.training.user_module.loading import make_user_step  # noqa: PLC0415  (only for a user's module)

    return make_user_step(workload, device, load, share)


def make_parts(workload: Workload, device: torch.device, load: Load | None = None) -> StepParts:
    """What the step is assembled of, made anew. Raises InputError for a step of the user's own."""
    parts = by_sizes(workload, lambda sized: textbook_parts(sized, device))
    if parts is not None:
        return parts
    from stepscope.training.user_module.loading import user_parts  # noqa: PLC0415  (only for a user's module)

    return user_parts(workload, device, load)
