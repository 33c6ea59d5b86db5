"""Makes the step on the device, and later releases its memory."""

import gc

import torch

from stepscope.engine.draft import Draft
from stepscope.measure.compilation import reset_compilation
from stepscope.models.attention import chosen_attention
from stepscope.models.training_step import TrainingStep


def build(draft: Draft) -> None:
    """Make the step on the device."""
    workload, device = draft.request.workload, draft.device
    draft.begin("build", workload.model.name)
    if workload.compile != "eager":
        reset_compilation()
    draft.held_before_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    draft.made = TrainingStep(workload, device)
    if workload.attention == "auto":
        draft.set_evidence(attention=chosen_attention(workload, device.type))


def release(draft: Draft) -> None:
    """Release the step's memory: later stages need it, or must not run beside it."""
    draft.made = None
    gc.collect()  # a step and its phases refer to each other
    if draft.device.type == "cuda":
        torch.cuda.empty_cache()
