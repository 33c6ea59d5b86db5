"""Measures one step of a workload on this machine, in stages, and saves the run."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from stepscope.core import interrupts
from stepscope.core.errors import DeviceError, GateFailure, InputError, StepscopeError, named_line
from stepscope.core.run import Repeat, Run
from stepscope.core.run_directory import RANK_FOLDER, create_run_directory
from stepscope.engine.draft import Draft
from stepscope.engine.request import StepRequest, Tell
from stepscope.engine.stages import (
    bring_the_ranks_together,
    build,
    check_the_ranks,
    count_traffic,
    count_work,
    find_ceilings,
    look_round,
    measure_energy,
    observe,
    record_memory,
    record_what_filled_the_memory,
    release,
    time_in_turns,
    time_steps,
    trace_by_kineto,
    trace_by_nsys,
    trace_for_the_watching_tool,
    wait_for_its_turn,
)
from stepscope.recording import ranges
from stepscope.recording.device import is_out_of_memory, let_go, limit_memory
from stepscope.recording.environment import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.recording.timer import StepFailed
from stepscope.runs.checks import check_run
from stepscope.runs.metrics import summarise
from stepscope.training.making import join
from stepscope.training.training_step import Ranks, check_supported

if TYPE_CHECKING:
    from stepscope.training.user_module.loading import Loaded

StageFunction = Callable[[Draft], None]
Applies = Callable[[Draft], object]
"""Tells whether a run has a stage, by the truth of what it returns."""

UNTIL_TIMED: tuple[StageFunction, ...] = (look_round, check_the_ranks, build, wait_for_its_turn, time_steps)
"""The stages until the steps are timed. A failure in one becomes the run's status and ends the run. Where memory ran
out in a step, one more step records what filled it."""

AFTER_THE_TIMES: tuple[tuple[StageFunction, Applies | None, str], ...] = (
    (measure_energy, lambda draft: draft.ranks.ranks == 1, "no energy"),
    (observe, None, "{stage} failed after the timed steps"),
    (count_traffic, lambda draft: draft.ranks.backend, "the bytes that ranks send are not known"),
    (trace_by_kineto, lambda draft: "kineto" in draft.request.trace.tools, "no trace"),
    (trace_for_the_watching_tool, lambda _: ranges.watched(), "no trace"),
    (record_memory, lambda draft: draft.request.memory, "no memory history"),
    (count_work, lambda draft: not draft.run.work, "the FLOPs of the step are not known"),
    (release, None, "the step's memory could not be released"),
    (trace_by_nsys, lambda draft: draft.nsys, "no trace"),
    (bring_the_ranks_together, lambda draft: draft.ranks.backend, "what the other ranks recorded is not known"),
    (find_ceilings, None, "no measured ceiling"),
)
"""The stages after the steps are timed, each with the runs that have it (None: all), and the beginning of the note
that a failure in it becomes; the next stage follows all the same. A trace that fails is evidence too. The ceilings come
last: the step met a process as cold as its warm-up setting says, and its memory is free again."""


def measure_step(
    request: StepRequest,
    tell: Tell = lambda _: None,
    began: Callable[[Path], None] = lambda _: None,
    load: "Callable[[], Loaded] | None" = None,
) -> tuple[Run, Path]:
    """Measure one workload and save its run; returns the run and its directory, which `began` is told at once.

    load: what gives a model of the user's own, where it is no factory that the workload names.
    A workload that the device cannot run as asked, or a place that cannot be written, raises InputError before
    anything is measured. A failure of the device is no exception: it is the run's status, with where it happened.
    """
    device = resolve_device(request.device, request.place)
    check_supported(request.workload, device)
    limit_memory(device, request.memory_limit_bytes)
    nsys = None
    if "nsys" in request.trace.tools:
        from stepscope.engine.nsys_trace import nsys_for  # noqa: PLC0415  (other runs do without)

        nsys = nsys_for(device.type)
    ranks = join(request.place, device)
    with interrupts.held():
        directory = directory_of(request, ranks)
        began(directory)
        draft = Draft(request, device, directory, tell, nsys, load=load, ranks=ranks)
        try:
            with matmul_precision(request.workload.dtype), interrupts.keeping():
                if until_failed((functools.partial(stage, draft) for stage in UNTIL_TIMED), lambda _: draft):
                    run_after_the_times(draft)
        except KeyboardInterrupt:
            draft.interrupt()
        except (InputError, GateFailure):
            shutil.rmtree(directory, ignore_errors=True)  # nothing was measured, so nothing is left behind
            raise
        run = finished(draft)
        draft.built = None
        if run.status == "done":
            ranks.part()
    return run, directory


def directory_of(request: StepRequest, ranks: Ranks) -> Path:
    """The run's directory; for a rank that does not write the run, a folder in it for what it alone recorded.

    Raises InputError, the same on all ranks, where one cannot write there, or is asked for another step.
    """
    with _the_same_refusal(ranks):
        directory = create_run_directory(Path(request.out), request.workload) if ranks.rank == 0 else None
    options = msgspec.json.encode((request.workload, request.settings, request.trace, request.memory))
    directory, wanted = ranks.broadcast((directory, options))
    folder = directory if ranks.rank == 0 else directory / RANK_FOLDER.format(rank=ranks.rank)
    try:
        with _the_same_refusal(ranks):
            if options != wanted:
                raise InputError(f"rank {ranks.rank} is asked for another step than rank 0: give all the same options")
            try:
                folder.mkdir(parents=True, exist_ok=True)  # on another host, too
            except OSError as error:
                raise InputError(f"rank {ranks.rank} cannot write to {folder}: {error.strerror or error}") from error
    except InputError:
        if ranks.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return folder


@contextlib.contextmanager
def _the_same_refusal(ranks: Ranks) -> Generator[None]:
    """A context that raises on every rank what the first of them raises that raises an InputError here."""
    mine: InputError | None = None
    try:
        yield
    except InputError as error:
        mine = error
    refusal = next((one for one in ranks.gathered(str(mine) if mine is not None else None) if one is not None), None)
    if refusal is not None:
        raise InputError(refusal) from mine


def finished(draft: Draft) -> Run:
    """The run with its figures and findings, saved."""
    if draft.run.status == "interrupted":
        draft.save_meanwhile()  # whoever interrupted it may not wait for the statistics
    draft.stage = "end"
    draft.set_evidence(stages_s={stage: round(seconds, 3) for stage, seconds in draft.stages_s.items()})
    run = msgspec.structs.replace(draft.run, summary=summarise(draft.run))
    run = msgspec.structs.replace(run, findings=check_run(run))
    draft.run = run
    draft.save()
    return run


def run_after_the_times(draft: Draft, *only: StageFunction) -> None:
    """Run the stages that the run has, or `only` these; a failure becomes a note, since it must not cost the times."""
    for stage, applies, failed in AFTER_THE_TIMES:
        if (not only or stage in only) and (applies is None or applies(draft)):
            try:
                stage(draft)
            except (Exception, SystemExit) as error:  # whatever a library raises, and sys.exit of a user's own code
                draft.note(f"{failed.format(stage=draft.stage)}: {named_line(error)}")


def until_failed(stages: Iterable[Callable[[], None]], whose: Callable[[StepFailed | None], Draft]) -> bool:
    """Run stages until the steps are timed; returns whether none failed. A failure becomes the run's status.

    whose: the draft that a failure is of; it is asked without a failure of a step for any other.
    """
    try:
        for stage in stages:
            stage()
    except StepFailed as failure:
        draft = whose(failure)
        interrupts.check()  # a library may have replaced Ctrl-C's exception by its own
        cause = failure.__cause__ or failure
        if isinstance(cause, StepscopeError):
            raise cause from None  # a mistake in the user's own step, which has its own words
        if isinstance(cause, SystemExit):
            cause = StepscopeError(f"the step called sys.exit({cause.code!r}), which ends it")
        draft.fail(cause, failure.stage, failure.phase)
        if is_out_of_memory(cause):
            let_go(failure)
            record_what_filled_the_memory(draft)
        return False
    except StepscopeError as error:
        cause = error.__cause__
        if not isinstance(error, DeviceError) or cause is None or not is_out_of_memory(cause):
            raise
        draft = whose(None)
        draft.fail(cause, draft.stage)  # in a user's own code, before a step: a result like that of ours
        return False
    except Exception as error:  # whatever the device or a library raises becomes the run's status
        interrupts.check()
        draft = whose(None)
        draft.fail(error, draft.stage)
        return False
    return True


# Measures the steps of two workloads turn by turn in one process, and saves a run of each.
#
# What drifts while they run (clocks, temperature, other processes) meets both alike, and so do the process's place in
# memory and its libraries: the ratio of neighbouring steps says more than two runs apart. What is not of one step alone
# is not kept: peaks of memory, since both models lie in it, and energy.


_NO_MEMORY = "memory: the models of both steps lie in it; a run of each alone tells it"


def measure_in_turns(
    request: StepRequest, tell: Tell = lambda _: None, began: Callable[[Path], None] = lambda _: None
) -> tuple[Run, Path]:
    """Measure the request's workload and the one that it is against; returns the first's run and its directory.

    Raises InputError for what the device cannot run as asked, and for a second model whose code changes settings of
    the whole process. A failure of the device is the status of the run that it happened in.
    """
    assert request.against is not None
    device, repeat = resolve_device(request.device), request.repeat
    # Where the two are repeated, the second's set is its own.
    other = Repeat(set=f"{repeat.set}-against", number=repeat.number, of=repeat.of) if repeat else None
    alone = msgspec.structs.replace(request, against=None)
    requests = alone, msgspec.structs.replace(alone, workload=request.against, repeat=other)
    for one in requests:
        check_supported(one.workload, device)
    limit_memory(device, request.memory_limit_bytes)
    with interrupts.held():
        first, second = drafts = [
            Draft(one, device, create_run_directory(Path(one.out), one.workload), tell, None) for one in requests
        ]
        first.set(beside=second.run.id)
        second.set(beside=first.run.id)
        began(first.directory)
        try:
            with matmul_precision(request.workload.dtype), interrupts.keeping():
                _go_through_both(first, second)
        except KeyboardInterrupt:
            for draft in drafts:
                draft.interrupt()
        except (InputError, GateFailure):
            for draft in drafts:
                shutil.rmtree(draft.directory, ignore_errors=True)
            raise
        finished(second)
        return finished(first), first.directory


def _go_through_both(first: Draft, second: Draft) -> None:
    if not _both_measured(first, second):
        return
    drafts = (first, second)
    for draft in drafts:
        run_after_the_times(draft, observe, trace_by_kineto, count_work)
        if draft.run.evidence.memory is not None:
            draft.set_evidence(memory=None)
        draft.note(_NO_MEMORY)
    for draft in drafts:
        run_after_the_times(draft, release)
    for draft in drafts:
        run_after_the_times(draft, find_ceilings)


def _both_measured(first: Draft, second: Draft) -> bool:
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
            after = _settings_of_the_process()
            changed = [name for name, value in after.items() if draft is drafts[1] and value != before[name]]
            if changed:
                raise InputError(
                    f"making the second model changed {', '.join(changed)}, which the first one's steps would run "
                    "under too: measure each with `run --repeat 5`, and compare the two sets"
                )
        first.begin("warm-up")
        time_in_turns(*drafts)

    def whose(failure: StepFailed | None) -> Draft:
        at[0] = drafts[int(failure.subject)] if failure is not None else at[0]
        return at[0]

    if until_failed([until_timed], whose):
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
