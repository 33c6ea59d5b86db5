"""Records the allocations of one more step, where it was asked for."""

import gc

import torch

from stepscope.core import interrupts
from stepscope.core.errors import one_line
from stepscope.core.run_files import MEMORY_FILE
from stepscope.engine.draft import Draft
from stepscope.recording.device import is_out_of_memory
from stepscope.recording.driven import MemoryCapture, capture_memory


def record_memory(draft: Draft) -> None:
    """Record a step. On a CPU, where nothing else counts allocations, the memory figures are this step's."""
    if draft.request.memory is None:
        return
    draft.begin("memory")
    if draft.step.cuda_graphs:
        draft.note("no memory history: tensors of replayed CUDA graphs were allocated when the graphs were made")
        return
    measured = _record(draft).measured
    counted = draft.run.evidence.memory
    if counted is None or counted.allocated_peak is None:
        draft.set_evidence(memory=measured)
    elif counted.allocated_peak != measured.allocated_peak:
        draft.note(
            f"the step whose allocations were recorded peaked at {measured.allocated_peak:,} bytes, "
            f"the observed one at {counted.allocated_peak:,}"
        )


def record_what_filled_the_memory(draft: Draft) -> None:
    """Run the step that ran out of memory once more, recorded, and keep what it has allocated when it fails again. The
    run has ended already, so any error here becomes a note."""
    step = draft.made
    if draft.request.memory is None or step is None or draft.device.type != "cuda" or step.cuda_graphs:
        return
    draft.begin("memory")
    step.loss = None
    step.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        capture = _record(draft, out_of_memory=True)
    except KeyboardInterrupt:
        draft.note(f"no memory history: {interrupts.said()}")
    except Exception as failure:  # the run failed already: what fails here is only said beside it
        draft.note(f"no memory history: {one_line(failure)}")
    else:
        if capture.failure is None:
            draft.note(f"recorded, the step did not run out of memory: {MEMORY_FILE} holds the whole step")


def _record(draft: Draft, out_of_memory: bool = False) -> MemoryCapture:
    asked, environment = draft.request.memory, draft.run.environment
    assert asked is not None
    capture = capture_memory(
        draft.step,
        draft.device,
        draft.directory,
        workload=draft.run.workload,
        device_name=environment.device_name if environment else "",
        stacks=asked.stacks,
        steps=1 if out_of_memory else asked.steps,
        held_before_bytes=draft.held_before_bytes,
        is_out_of_memory=is_out_of_memory if out_of_memory else None,
    )
    draft.keep_files(memory=MEMORY_FILE)
    if asked.steps > 1 and capture.failure is None:
        draft.keep_growth()
    return capture
