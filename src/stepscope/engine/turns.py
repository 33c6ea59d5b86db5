"""Measures the steps of two workloads turn by turn in one process, and saves a run of each.

What drifts while they run (clocks, temperature, other processes) meets both alike, and so do the process's place in
memory and its libraries: the ratio of neighbouring steps says more than two runs apart. What is not of one step alone
is not kept: peaks of memory, since both models lie in it, and energy.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from stepscope.core import interrupts
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.run import Repeat, Run
from stepscope.core.run_directory import create_run_directory
from stepscope.engine.draft import Draft
from stepscope.engine.request import StepRequest, Tell
from stepscope.engine.stages import (
    build,
    count_work,
    find_ceilings,
    look_round,
    observe,
    release,
    time_in_turns,
    trace_by_kineto,
)
from stepscope.engine.step import finished, run_after_the_times, until_failed
from stepscope.recording.device import limit_memory, resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.recording.timer import StepFailed
from stepscope.training.training_step import check_supported

_NO_MEMORY = "memory: the models of both steps lie in it; a run of each alone tells it"


def measure_in_turns(
    request: StepRequest, tell: Tell = lambda _: None, began: Callable[[Path], None] = lambda _: None
) -> tuple[Run, Path]:
    """Measure the request's workload and the one that it is against; returns the first's run and its directory.

    Raises InputError for what the device cannot run as asked, and for a second model whose code changes settings of
    the whole process. A failure of the device is the status of the run that it happened in.
    """
    device = resolve_device(request.device)
    requests = _each_alone(request)
    for one in requests:
        check_supported(one.workload, device)
    limit_memory(device, request.memory_limit_bytes)
    with interrupts.held():
        drafts: list[Draft] = []
        for one in requests:
            drafts.append(Draft(one, device, create_run_directory(Path(one.out), one.workload), tell, None))
        first, second = drafts
        first.set(beside=second.run.id)
        second.set(beside=first.run.id)
        began(first.directory)
        try:
            with matmul_precision(request.workload.dtype):
                _go_through_the_stages(first, second)
        except InputError:
            for draft in drafts:
                shutil.rmtree(draft.directory, ignore_errors=True)
            raise
        finished(second)
        return finished(first), first.directory


def _each_alone(request: StepRequest) -> tuple[StepRequest, StepRequest]:
    """The requests of the two sides; where they are repeated, the second's set is its own."""
    assert request.against is not None
    repeat = request.repeat
    other = Repeat(set=f"{repeat.set}-against", number=repeat.number, of=repeat.of) if repeat else None
    first = msgspec.structs.replace(request, against=None)
    return first, msgspec.structs.replace(first, workload=request.against, repeat=other)


def _go_through_the_stages(first: Draft, second: Draft) -> None:
    drafts = (first, second)
    try:
        with interrupts.keeping():
            if not _measured(first, second):
                return
            for draft in drafts:
                for stage, failed in (
                    (observe, "{stage} failed after the timed steps"),
                    (trace_by_kineto, "no trace"),
                    (count_work, "the FLOPs of the step are not known"),
                ):
                    run_after_the_times(stage, draft, failed)
                if draft.run.evidence.memory is not None:
                    draft.set_evidence(memory=None)
                draft.note(_NO_MEMORY)
            for draft in drafts:
                run_after_the_times(release, draft, "the step's memory could not be released")
            for draft in drafts:
                run_after_the_times(find_ceilings, draft, "no measured ceiling")
    except KeyboardInterrupt:
        for draft in drafts:
            draft.interrupt()


def _measured(first: Draft, second: Draft) -> bool:
    """Build both steps and time them; returns whether neither failed. The other's run then says so."""
    # What is built and warmed up second finds other memory than what was first. Over several processes that must not
    # favour one side, so they swap places in every other one.
    repeat = first.request.repeat
    drafts = (first, second) if repeat is None or repeat.number % 2 else (second, first)
    at = [first]

    def until_timed() -> None:
        for draft in drafts:
            look_round(draft)
        for draft in drafts:
            at[0] = draft
            before = _settings_of_the_process()
            build(draft)
            if draft is drafts[1]:
                _refuse_changes(before, _settings_of_the_process())
        first.begin("warm-up")
        time_in_turns(*drafts)

    def whose(failure: StepFailed | None) -> Draft:
        at[0] = drafts[int(failure.subject)] if failure is not None else at[0]
        return at[0]

    if until_failed(until_timed, whose):
        return True
    failed = at[0]
    for draft in drafts:
        if draft is not failed:
            reason = StepscopeError(f"the step beside it ended {failed.run.status}")
            draft.fail(reason, failed.run.failure.during if failed.run.failure else draft.stage)
    return False


def _settings_of_the_process() -> dict[str, object]:
    """What a model's own code may set for all of the process, and steps run under."""
    return {
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


def _refuse_changes(before: dict[str, object], after: dict[str, object]) -> None:
    changed = [name for name, value in after.items() if value != before[name]]
    if changed:
        raise InputError(
            f"making the second model changed {', '.join(changed)}, which the first one's steps would run under too: "
            "measure each with `run --repeat 5`, and compare the two sets"
        )
