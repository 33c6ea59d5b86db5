"""Search, check the losses, confirm: `tune` goes this way, and what it has when it is interrupted is its answer."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.own_workload import DrivenWorkload
from stepscope.core.study_results import Tried, Tuned
from stepscope.questions.tuning.curves import curves, departs_at, why_not_compared
from stepscope.questions.tuning.racing import Racing
from stepscope.questions.tuning.search import Search, changed, lighter_ways, with_most_blocks

NUMERIC = ("dtype", "optimizer")
"""Fields that compute something else on purpose, where a change has a dtype: what writes its weights goes with it. They
are taken back where the losses depart."""


def tune(
    asked: DrivenWorkload, racing: Racing, *, device: str, on_gpu: bool, kept: frozenset[str] = frozenset(),
    memory_limit_bytes: int | None = None, tell: Callable[[str], None] = lambda _: None,
) -> Tuned:  # fmt: skip
    """Find the fastest step that trains as the one asked for does, at the same batch.

    kept: fields of the workload that stay as they are. tell: is given what is tried, in words. Interrupted, it returns
    what it found. Raises InputError for a step that is no training step, or that nothing makes fit.
    """
    if asked.phase != "train":
        raise InputError(f"tune makes a training step faster, and --phase {asked.phase} asks for another: leave it out")
    try:
        baseline = one_that_fits(asked, racing, kept)
    except KeyboardInterrupt:
        return Tuned(asked=asked, baseline=asked, best=asked, interrupted=True, seconds=racing.seconds)
    search = Search(baseline=baseline, on_gpu=on_gpu, kept=kept | racing.fixed)
    found = Tuned(asked=asked, baseline=baseline, best=baseline)
    try:
        search.run(racing, tell)
        found = search.so_far(asked)
        while found.best != baseline:
            tell("losses of both steps")
            found = _with_losses(found, racing, device, memory_limit_bytes)
            if found.departs_at is None:
                break
            found = without_numeric_changes(found)
        if found.best != baseline:
            tell("both steps in processes of their own")
            found = _confirmed(found, racing)
    except KeyboardInterrupt:
        known = found if found.tried else search.so_far(asked)
        found = msgspec.structs.replace(known, interrupted=True)
    where = racing.where
    return msgspec.structs.replace(
        found, seconds=racing.seconds, budget_s=racing.budget_s, needed_s=racing.needed_s,
        folder=racing.out, doubt=racing.doubt, own_optimizer=racing.own_optimizer,
        device=where.device_name if where is not None else "", versions=where.versions if where is not None else {},
    )  # fmt: skip


def one_that_fits(
    asked: DrivenWorkload, racing: Racing, kept: frozenset[str] = frozenset()
) -> DrivenWorkload:  # fmt: skip
    """The step, or the one that computes least again of those that fit and run. kept: fields that stay as they are."""
    why = racing.fits(asked) or racing.runs_alone(asked)
    if why is None:
        return asked
    for change in lighter_ways(asked):
        if any(name in kept and getattr(asked, name) != value for name, value in change.items()):
            continue
        try:
            other = changed(asked, change)
            if other != asked and racing.fits(other) is None and racing.runs_alone(other) is None:
                return _with_most_blocks(other, racing) if "checkpointing" not in kept else other
        except InputError:  # the step has nothing that this checkpointing keeps, or cannot be split so
            continue
    raise InputError(f"the step does not fit, however it is split or computed again: {why}; choose a smaller batch")


def _with_most_blocks(step: DrivenWorkload, racing: Racing) -> DrivenWorkload:
    """The step with more blocks that keep their products, where that fits and runs."""
    more = with_most_blocks(step, lambda other: racing.fits(other) is None)
    return more if more != step and racing.runs_alone(more) is None else step


def _with_losses(found: Tuned, racing: Racing, device: str, memory_limit_bytes: int | None) -> Tuned:
    try:
        losses = curves(
            found.baseline, found.best, device, memory_limit_bytes, out=Path(racing.out), fresh=racing.fresh
        )  # fmt: skip
    except StepscopeError as error:
        return msgspec.structs.replace(found, curves=(), why_no_losses=str(error))
    return msgspec.structs.replace(
        found, curves=losses, departs_at=departs_at(losses), why_no_losses=why_not_compared(losses)
    )


def without_numeric_changes(found: Tuned) -> Tuned:
    """The search with what it took less the changes that compute something else; without any, the baseline is best."""
    taken = [tried for tried in found.tried if tried.verdict == "taken"]
    numeric = [tried for tried in taken if "dtype" in tried.change]
    why = f"losses depart from the baseline's at step {found.departs_at}"
    best, tried = found.baseline, list[Tried]()
    for one in found.tried:
        if one.verdict != "taken":
            tried.append(one)
            continue
        stays = {name: value for name, value in one.change.items() if name not in NUMERIC} if one in numeric else {}
        if numeric and one not in numeric:
            stays = one.change
        wrong = {name: value for name, value in one.change.items() if name not in stays}
        if wrong:
            tried.append(msgspec.structs.replace(one, change=wrong, verdict="not right", why=why))
        if stays:
            # What was raced together was not timed apart.
            alone = Tried(round=one.round, change=stays, verdict="taken", why="raced with what was taken back")
            tried.append(one if not wrong else alone)
            with contextlib.suppress(InputError):  # it was for what is taken back
                best = changed(best, stays)
    return msgspec.structs.replace(
        found, best=best, tried=tuple(tried), curves=(), departs_at=None, why_no_losses=""
    )  # fmt: skip


def _confirmed(found: Tuned, racing: Racing) -> Tuned:
    before, after, change = racing.confirm(found.baseline, found.best)
    memory = [side.representative.evidence.memory for side in (before, after)]
    return msgspec.structs.replace(
        found, confirmed=change,
        baseline_s=before.processes("step").typical_s, best_s=after.processes("step").typical_s,
        baseline_peak_bytes=memory[0].allocated_peak if memory[0] else None,
        best_peak_bytes=memory[1].allocated_peak if memory[1] else None,
        confirmed_by=tuple(run.id for side in (before, after) for run in side.runs),
    )  # fmt: skip
