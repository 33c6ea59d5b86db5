"""Finds the rates that this device really reaches, for the dtype of the step."""

from stepscope.core.device_spec import product_dtype
from stepscope.engine.draft import Draft
from stepscope.engine.request import Stage
from stepscope.recording import ranges
from stepscope.recording.ceilings import ceilings_for, supported_dtypes


def find_ceilings(draft: Draft) -> None:
    """Measure the ceilings, or take those that are stored for this device and build."""
    if draft.ranks.ranks > 1 and draft.device.type == "cpu":
        return  # ranks that share a processor would each measure what the others leave it
    draft.begin("ceiling")
    request = draft.request
    with ranges.silenced():  # these steps are not the model's
        ceilings = ceilings_for(
            draft.device,
            [dtype] if (dtype := product_dtype(request.workload.dtype)) in supported_dtypes(draft.device) else [],
            lambda what: draft.tell(Stage(name="ceiling", detail=what)),
            keep=request.memory_limit_bytes is None,
        )
    draft.set(ceilings=ceilings)
