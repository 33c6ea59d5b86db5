"""What one block keeps for backward, tensor by tensor, each with its shape and the arithmetic of its size."""

import math
from collections.abc import Iterator

import msgspec

from stepscope.allocations.prediction.estimate import symbolic_model
from stepscope.allocations.prediction.symbolic_tensors import Ledger, Node, Parameter, Storage, Tape
from stepscope.core.memory_notes import CATEGORIES
from stepscope.core.workloads import TextbookWorkload

_CAST = CATEGORIES.index("cast copies")


class KeptTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one size that the same operators of a block keep."""

    operators: tuple[str, ...]
    """The operators that keep it for their backward, as autograd names them."""
    dimensions: tuple[str, ...]
    """`batch_size`, `seq_len`, `d_model`...: their product is the number of elements."""
    sizes: tuple[int, ...]
    itemsize: int
    count: int = 1
    cast_copy: bool
    """Whether it is autocast's copy of a weight."""

    @property
    def bytes_each(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @property
    def total_bytes(self) -> int:
        return self.count * self.bytes_each


def kept_by_block(workload: TextbookWorkload) -> tuple[KeptTensor, ...]:
    """Everything that a block keeps, the largest first; its input is counted with it, its output with the next.

    For a workload that checkpoints, this is what a block keeps while backward runs it again.
    """
    model = symbolic_model(workload, "cuda")
    tape = Tape(Ledger(), recording=True)
    x = model.embedding(tape)
    out = model.block(tape, x, model.blocks[0])
    operators: dict[int, list[str]] = {}
    storages: dict[int, Storage] = {}
    for node in _nodes(out.node):
        for storage in node.saved:
            storages[id(storage)] = storage
            operators.setdefault(id(storage), []).insert(0, node.operator)
    counts: dict[KeptTensor, int] = {}
    for key, storage in storages.items():
        tensor = _described(workload, storage, tuple(dict.fromkeys(operators[key])))
        counts[tensor] = counts.get(tensor, 0) + 1
    kept = [msgspec.structs.replace(tensor, count=count) for tensor, count in counts.items()]
    return tuple(sorted(kept, key=lambda tensor: (-tensor.total_bytes, tensor.operators)))


def _nodes(root: Node | Parameter | None) -> Iterator[Node]:
    """The nodes below, the last made first."""
    seen: dict[int, Node] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node.number not in seen:
            seen[node.number] = node
            waiting += node.inputs
    for number in sorted(seen, reverse=True):
        yield seen[number]


def _described(workload: TextbookWorkload, storage: Storage, operators: tuple[str, ...]) -> KeptTensor:
    """The storage with the first natural shape whose product is its size."""
    is_weight = storage.category == _CAST
    config, batch, length = workload.model, workload.micro_batch_size, workload.seq_len
    size = {
        "batch_size": batch, "seq_len": length, "d_model": config.d_model, "d_ff": config.d_ff,
        "heads": config.heads, "head_dim": config.head_dim, "key_width": config.key_width,
    }  # fmt: skip
    shapes = _WEIGHTS if is_weight else _ACTIVATIONS
    if _OF_SCORES & set(operators):  # sizes of other shapes may be equal
        shapes = sorted(shapes, key=lambda shape: shape[0].count("seq_len") < 2)
    wide = workload.dtype in ("fp32", "tf32")
    for dimensions, itemsizes in shapes:
        for itemsize in itemsizes:
            if wide and itemsize == 2:
                continue  # nothing there is of 16 bits
            if math.prod(size[name] for name in dimensions) * itemsize == storage.bytes:
                return KeptTensor(
                    operators=operators,
                    dimensions=dimensions,
                    sizes=tuple(size[name] for name in dimensions),
                    itemsize=itemsize,
                    cast_copy=is_weight,
                )
    return KeptTensor(
        operators=operators, dimensions=("bytes",), sizes=(storage.bytes,), itemsize=1, cast_copy=is_weight
    )


_OF_SCORES = {"Bmm", "Softmax", "SafeSoftmax"}
"""Operators that keep scores of attention, a figure for each query and key."""

_Shapes = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
_WEIGHTS: _Shapes = ((("d_model", "d_model"), (2,)), (("d_model", "d_ff"), (2,)), (("key_width", "d_model"), (2,)))
_ACTIVATIONS: _Shapes = (
    (("batch_size", "seq_len", "d_model"), (4, 2)),
    (("batch_size", "seq_len", "key_width"), (4, 2)),
    (("batch_size", "seq_len", "d_ff"), (4, 2)),
    (("batch_size", "heads", "seq_len", "seq_len"), (4, 2)),
    (("batch_size", "heads", "seq_len"), (4, 2)),
    (("batch_size", "seq_len"), (4,)),
    (("seq_len", "seq_len"), (1,)),
    (("seq_len", "head_dim"), (4, 2)),
)
