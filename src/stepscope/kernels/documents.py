"""Documents of unequal length that lie one after another along the rows of a batch: packed sequences.

    cu_seqlens   (documents + 1,) int32: document i has the tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1, counted
                 through the batch row by row. It begins at 0, never decreases, and ends at B S. Two equal numbers are
                 a document without tokens, so that batches of fewer documents can have one shape.
    bounds       (2, B, S) int32: for each position of a row the first position of its document, and the one after its
                 last. The end of a row ends a document. This is what attention reads.

Bounds are computed on the device, without a read by the host, so a CUDA graph can capture it.
"""

import itertools

import torch
from torch import Tensor

from stepscope.core.errors import InputError


def document_bounds(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """The bounds (2, B, S) of the documents of a batch.

    Raises an InputError for a wrong dtype or shape. Values are checked on a CPU alone: to read them on a GPU would wait
    for it, and `check_cu_seqlens` does that. Wrong values make wrong bounds, but none outside a row.
    """
    _check_kind(cu_seqlens)
    if _readable(cu_seqlens):
        check_cu_seqlens(cu_seqlens, batch * length)
    token = torch.arange(batch * length, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    row = token // length * length
    bounds = torch.stack([cu_seqlens[document] - row, cu_seqlens[document + 1] - row])
    return bounds.clamp(0, length).view(2, batch, length)


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Raise an InputError of one line unless these are the documents of so many tokens. On a GPU this waits for it."""
    _check_kind(cu_seqlens)
    borders: list[int] = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != tokens:
        raise InputError(
            f"cu_seqlens goes from {borders[0]} to {borders[-1]}, and the batch has {tokens} tokens: "
            f"begin with 0 and end with {tokens}"
        )
    for border, following in itertools.pairwise(borders):
        if following < border:
            raise InputError(f"cu_seqlens decreases from {border} to {following}: give the borders in their order")


def check_bounds(bounds: Tensor, q: Tensor, k: Tensor) -> None:
    """Raise an InputError of one line for bounds that are not those of these queries and keys, by shape and kind."""
    if q.shape[2] != k.shape[2]:
        raise InputError(
            f"documents are of self-attention: {q.shape[2]} queries and {k.shape[2]} keys; give as many keys as queries"
        )
    if bounds.device != q.device:
        raise InputError(f"cu_seqlens lies on {bounds.device}, and the queries on {q.device}: move it there")
    if bounds.dtype != torch.int32 or bounds.shape != (2, q.shape[0], q.shape[2]):
        raise InputError(
            f"bounds of documents are int32 {(2, q.shape[0], q.shape[2])}, not "
            f"{_kind(bounds)}: give what document_bounds returns"
        )


def _check_kind(cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise InputError(
            f"cu_seqlens is int32 of shape (documents + 1,), not {_kind(cu_seqlens)}: "
            "give the borders of one document or more"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _readable(tensor: Tensor) -> bool:
    """Whether the host can read the values now: no GPU, compiler, fake tensor or transformation is in the way."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )
