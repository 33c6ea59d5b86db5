"""Shapes by size: the tensor that an allocation must have been, where only one of the model's has its bytes."""

from dataclasses import dataclass

from stepscope.core.precisions import PRECISIONS
from stepscope.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Natural:
    """A tensor that a step of this workload makes."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        count = self.itemsize
        for size in self.shape:
            count *= size
        return count


def natural_tensors(workload: Workload) -> list[Natural]:
    """The shapes of a step: B sequences of a micro-batch, S positions, M model, F feed-forward, H heads, V words.

    (B, H, S, M/H) is left out, since it has the elements of (B, S, M): the same bytes seen by head.
    """
    model = workload.model
    batch, seq = max(1, workload.batch_size // workload.accumulation), workload.seq_len
    width, hidden, heads, words = model.d_model, model.d_ff, model.heads, model.vocabulary
    floats = [
        (batch, seq, width), (batch, seq, hidden), (batch, heads, seq, seq), (batch, seq, words), (batch, seq, 1),
        (batch, heads, seq, 1), (width, width), (hidden, width), (words, width), (seq, model.head_dim // 2),
        (batch, seq, model.key_width), (model.key_width, width),
    ]  # fmt: skip
    itemsizes = (4, 2) if PRECISIONS[workload.dtype].products == 2 else (4,)
    found = [Natural(shape=shape, itemsize=itemsize) for shape in floats for itemsize in itemsizes]
    found += [Natural(shape=(batch, seq), itemsize=8), Natural(shape=(seq, seq), itemsize=1)]
    return found


def shapes_by_size(workload: Workload) -> dict[int, tuple[int, ...]]:
    """The shape of each size in bytes that only one natural tensor has."""
    by_size: dict[int, set[tuple[int, ...]]] = {}
    for tensor in natural_tensors(workload):
        by_size.setdefault(tensor.bytes, set()).add(tensor.shape)
    return {size: next(iter(shapes)) for size, shapes in by_size.items() if len(shapes) == 1}
