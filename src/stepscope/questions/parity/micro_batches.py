"""Why micro-batches do not add up to the batch: the weight that each of their losses should have had.

A loss that is a mean over tokens weighs each token by one over their number. Where the tokens that count are counted in
each micro-batch, and the means averaged, a token in a micro-batch with few of them weighs more than another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.questions.parity.plain import FACTOR, Plain, StepVariant
from stepscope.questions.replays.results import Distance, StepResult, distance
from stepscope.training.own.batches import named_tensors, split

IGNORED = -100
"""The target that PyTorch's cross-entropy leaves out, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Weights of the micro-batches with which the step gives what the plain step gives."""

    counted: str
    """What each micro-batch has another number of; empty where the losses only have to be added up."""
    counts: tuple[int, ...] = ()
    off: Distance
    """How far the step with these weights is from the plain step."""

    @property
    def ratio(self) -> float:
        """How many times as much a token counts in the micro-batch with the fewest as in the one with the most."""
        return max(self.counts) / min(self.counts)


def explain(plain: Plain, variant: StepVariant, found: StepResult) -> Explained | None:
    """The weights with which the variant's loss, and then its gradients, are those of the plain step; None if none."""
    parts = variant.accumulation
    for counted, counts in (("", (1,) * parts), *_counts(plain, parts)):
        whole = 1 if not counted else sum(counts)
        weights = tuple(each / whole for each in counts)
        loss = sum(weight * each for weight, each in zip(weights, found.losses, strict=True))
        if abs(loss - plain.result.loss) > FACTOR * plain.loss * abs(plain.result.loss):
            continue
        off = distance(plain.setting.run(variant, weights), plain.result)
        if plain.agrees(off):
            return Explained(counted=counted, counts=counts if counted else (), off=off)
    return None


def empty_micro_batches(plain: Plain, parts: int) -> list[int]:
    """The micro-batches, by number from 1, in which every target is left out: a mean over them is 0/0."""
    for counted, counts in _counted(plain, parts):
        if not all(counts) and str(IGNORED) in counted:
            return [number for number, count in enumerate(counts, 1) if not count]
    return []


def _counts(plain: Plain, parts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What micro-batches may have different numbers of, and its number in each."""
    for counted, counts in _counted(plain, parts):
        if all(counts) and len(set(counts)) > 1:
            yield counted, counts


def _counted(plain: Plain, parts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    own = plain.setting.step().own
    batch = own.batches[0]
    micro = [dict(named_tensors(each)) for each in split(batch, parts, own.name)]
    for name, whole in named_tensors(batch):
        tensors = [each[name] for each in micro]
        if not whole.dim() or tensors[0].shape == whole.shape:
            continue  # not cut
        label = f"item {name} of the batch" if name.isdigit() else f"`{name}`"
        # A model of language often shifts its targets by one: then the first of each sequence is not looked at.
        for shift, said in ((0, ""), (1, ", but for the first of each sequence")):
            if shift and whole.dim() < 2:
                continue
            seen = [each[:, shift:] if shift else each for each in tensors]
            if not whole.is_floating_point() and bool((whole == IGNORED).any()):
                yield f"targets in {label} that are not {IGNORED}{said}", _number(each != IGNORED for each in seen)
            if not whole.is_floating_point() or _is_mask(whole):
                yield f"numbers in {label} that are not 0{said}", _number(each != 0 for each in seen)


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _number(masks: Iterator[Tensor]) -> tuple[int, ...]:
    return tuple(int(torch.count_nonzero(mask)) for mask in masks)
