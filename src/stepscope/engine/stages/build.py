"""Makes the step on the device, and later releases its memory."""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stepscope.core.model_file import unmet
from stepscope.core.own_workload import DrivenWorkload
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workload import Workload
from stepscope.engine.draft import Draft
from stepscope.recording.compilation import reset_compilation
from stepscope.recording.step import Step
from stepscope.training.attention import chosen_attention
from stepscope.training.parallel.ranks import Ranks
from stepscope.training.training_step import TrainingStep

if TYPE_CHECKING:
    from stepscope.training.own.loading import Loaded


def build(draft: Draft) -> None:
    """Make the step on the device."""
    workload, device = draft.request.workload, draft.device
    draft.begin("build", workload.name)
    if workload.compile != "eager":
        reset_compilation()
    draft.held_before_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    draft.made, found = make_step(workload, device, draft.given, draft.ranks)
    draft.set(workload=found)
    if isinstance(workload, Workload) and workload.attention == "auto":
        draft.set_evidence(attention=chosen_attention(workload, device.type))
    # A step of a user's module alone has any of these.
    draft.set_evidence(parts=getattr(draft.made, "found", ()), unmet=unmet(workload))


def make_step(
    workload: DrivenWorkload,
    device: torch.device,
    given: "Callable[[], Loaded] | None" = None,
    ranks: Ranks | None = None,
) -> tuple[Step, DrivenWorkload]:
    """The step on its device, and its workload with what was found in making it.

    given: a model of the user's own that is there already, in place of what a factory would give. ranks: those that
    share the step, where its workload says how.
    """
    share = None
    if workload.parallel != NOT_PARALLEL:
        from stepscope.training.parallel.step import shared_by  # noqa: PLC0415  (only where ranks share the step)

        share = shared_by(workload.parallel, ranks or Ranks())
    if isinstance(workload, Workload):
        return TrainingStep(workload, device, share), workload
    from stepscope.training.own.loading import make_own_step  # noqa: PLC0415  (only where a model is the user's own)

    return make_own_step(workload, device, given, share)


def release(draft: Draft) -> None:
    """Release the step's memory: later stages need it, or must not run beside it."""
    draft.made = None
    gc.collect()  # a step and its phases refer to each other
    if draft.device.type == "cuda":
        torch.cuda.empty_cache()
