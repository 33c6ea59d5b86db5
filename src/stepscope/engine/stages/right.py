"""Holds ranks that share a step against one process, before anything is timed."""

import dataclasses

import msgspec

from stepscope.core.checkpointing import OFFLOAD, of_fewer_layers, offload_of, selective_of
from stepscope.core.own_workload import OwnWorkload
from stepscope.core.ranks import Correctness
from stepscope.core.strategies import NOT_PARALLEL, stages_of, strategy_named
from stepscope.core.workload import Workload
from stepscope.engine.draft import Draft
from stepscope.engine.stages.build import release

_LAYERS = 2
"""Layers of the textbook's model that are checked: one block's way of being spread is every block's."""
_VOCABULARY, _SEQUENCE = 32_768, 4096
"""The largest vocabulary and the longest sequence of what is checked. Both change how long the check takes, and nothing
in how a matrix or a batch is spread."""
_SAMPLES = 2
"""Sequences of each rank and micro-batch that are checked. One process runs the whole batch, some fifty times, while
all ranks wait for it: of 24 sequences for each of 8 ranks, longer than what is measured. With two, each rank adds up
over samples, and one process has several ways to split the batch."""


def check_the_ranks(draft: Draft) -> None:
    """Raise an error, which ends the run, where the ranks compute something else than one process does."""
    workload = draft.request.workload
    if workload.parallel == NOT_PARALLEL or workload.phase == "forward":
        return
    draft.begin("check ranks")
    draft.correct = found = _check(draft, workload)
    release(draft)
    if not found.passed:
        raise RuntimeError(said_of(found, workload.parallel))


def _check(draft: Draft, workload: Workload | OwnWorkload) -> Correctness:
    from stepscope.training.parallel.correctness import check_ranks  # noqa: PLC0415
    from stepscope.training.training_step import StepParts, textbook_parts  # noqa: PLC0415  (only where ranks share a step)

    device = draft.device
    if isinstance(workload, OwnWorkload):
        from stepscope.training.own.loading import own_parts  # noqa: PLC0415

        def make_own() -> StepParts:
            return dataclasses.replace(own_parts(workload, device, draft.given), optimizer=None)

        return check_ranks(workload.parallel, make_own, workload, device, draft.ranks)
    stages = stages_of(workload.parallel, workload.ranks)
    layers = min(max(_LAYERS, stages), workload.model.layers)
    vocabulary = min(workload.model.vocabulary, _VOCABULARY)
    both_chunks = 2 * workload.ranks  # where ranks share a sequence, each takes two chunks
    seq_len = min(workload.seq_len, _SEQUENCE // both_chunks * both_chunks)
    micro_batches = strategy_named(workload.parallel).micro_batches(workload.ranks, workload.accumulation)
    batch_size = min(workload.batch_size, _SAMPLES * workload.ranks * micro_batches)
    small = msgspec.structs.replace(
        workload, model=msgspec.structs.replace(workload.model, layers=layers, vocabulary=vocabulary),
        batch_size=batch_size, seq_len=seq_len, compile="eager",
        checkpointing=_of_fewer_layers(workload, layers),
    )  # fmt: skip
    found = check_ranks(workload.parallel, lambda: textbook_parts(small, device), small, device, draft.ranks)
    return msgspec.structs.replace(
        found,
        layers=layers if layers < workload.model.layers else None,
        vocabulary=vocabulary if vocabulary < workload.model.vocabulary else None,
        seq_len=seq_len if seq_len < workload.seq_len else None,
        batch_size=batch_size if batch_size < workload.batch_size else None,
    )


def _of_fewer_layers(workload: Workload, layers: int) -> str:
    """The checkpointing of a model of so few layers that has blocks of every kind that the whole model has."""
    checkpointing, last = workload.checkpointing, selective_of(workload.checkpointing)
    offloaded = offload_of(checkpointing)
    if last is not None:
        return f"selective-{min(last, layers - 1)}"
    if offloaded is not None and offloaded < workload.model.layers:
        return f"{OFFLOAD}-{min(offloaded, layers - 1)}"
    return of_fewer_layers(checkpointing, layers)


def said_of(found: Correctness, name: str) -> str:
    """What the ranks compute wrongly, in a line."""
    wrong, allowed, what = found.gradient_error, found.gradient_allowed, "the gradients of the first step"
    if wrong <= allowed:
        wrong, allowed = found.update_error, found.update_allowed
        what = f"what {found.steps} steps of SGD make of the parameters"
    if wrong <= allowed and found.loss_error is not None and found.loss_allowed is not None:
        wrong, allowed = found.loss_error, found.loss_allowed
        what = f"the losses of {found.steps} steps of AdamW"
    return (
        f"ranks that share a step by {name} compute something else than one process: {what} differ by {wrong:.2g}, "
        f"where rounding makes up to {allowed:.2g}, most in {found.worst}; nothing was timed"
    )
