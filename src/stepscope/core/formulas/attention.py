"""Work and saved bytes of one call of attention, by formula.

B batch, H heads of queries, G heads of keys, S queries, T keys, D head_dim, e bytes of a number.
"""

from dataclasses import dataclass

from stepscope.core.attention_timing import BYTES, AttentionCell, AttentionShape
from stepscope.core.attentions import ATTENTIONS
from stepscope.core.formulas.operations import SOFTMAX_FLOPS, AttentionSizes, attention_backward_flops, attention_flops
from stepscope.core.workloads import TextbookWorkload

CONVENTION = (
    "4 B H S T D FLOPs forward and 2.5 times as many backward, half of it where causal, whatever an implementation "
    "does: written-out attention makes the whole square, and four products backward"
)


def _sizes(shape: AttentionShape) -> AttentionSizes:
    return AttentionSizes(
        batch=shape.batch, heads=shape.heads, queries=shape.queries, keys=shape.keys, head_dim=shape.head_dim,
        value_dim=shape.head_dim,
    )  # fmt: skip


def forward_flops(shape: AttentionShape) -> int:
    """FLOPs of forward's two products (Dao 2023, FlashAttention-2, section 4.1); half as many where causal."""
    return attention_flops(_sizes(shape), "half" if shape.causal else "full")


def backward_flops(shape: AttentionShape) -> int:
    """FLOPs of the five matrix products of fused backward; half as many where causal."""
    return attention_backward_flops(_sizes(shape), "half" if shape.causal else "full")


@dataclass(frozen=True, kw_only=True)
class SavedByFormula:
    """Bytes that autograd keeps for backward besides q, k and v, with the output where it keeps that."""

    bytes: int
    terms: str


_BLOCK_OF_ROWS = 32
"""PyTorch's memory-efficient kernel pads the rows of the logsumexp to a multiple of this (kAlignLSE)."""
_EIGHT = 8
"""PyTorch's FlashAttention pads head_dim to a multiple of this."""


def saved_by_formula(cell: AttentionCell, device_type: str) -> SavedByFormula | None:  # noqa: PLR0911  (one for each)
    """Saved bytes by the formula that the attention's record names (`memory`). None where there is no formula, where
    the call is compiled (the compiler chooses), and where PyTorch chooses the backend on a GPU.

    scores    exp of the scores and their quotient by its row's sum, each B H S T; the sums, B H S; the mask, S T bytes.
              Not the scores: exp's derivative is its result, and the maximum is detached.
    nothing   each chunk is made again
    math      scaled q and k, the softmax's result; in 16 bits all of it in fp32, and v too
              (aten/src/ATen/native/transformers/attention.cpp)
    others    the output, B H S D, and the logsumexp, B H S in fp32

    Keys and values of fewer heads are repeated first, and kept so, by all but the fused ones.
    """
    shape, e = cell.shape, BYTES[cell.dtype]
    if cell.compile != "none" or shape.window is not None:
        return None
    heads = shape.batch * shape.heads
    rows, grouped = heads * shape.queries, shape.key_heads != shape.heads
    repeated, repeats = (2 * heads * shape.keys * shape.head_dim * e, " + 2 B H T D e") if grouped else (0, "")
    fused, logsumexp = rows * shape.head_dim * e, 4 * rows
    match ATTENTIONS[cell.implementation].memory:
        case None:
            return None
        case "scores":
            mask = shape.queries * shape.keys if shape.causal else 0
            terms = "2 B H S T e + B H S e" + (" + S T" if mask else "") + repeats
            return SavedByFormula(bytes=2 * rows * shape.keys * e + rows * e + mask + repeated, terms=terms)
        case "nothing":
            return SavedByFormula(bytes=0, terms="0")
        case "math":
            return _math(cell, rows, grouped)
        case "tiled":
            wide = rows * (max(e, 4) - 4)
            terms = f"B H S D e + {max(e, 4)} B H S" + repeats
            return SavedByFormula(bytes=fused + logsumexp + wide + repeated, terms=terms)
        case "efficient":
            filled = 4 * heads * -(-shape.queries // _BLOCK_OF_ROWS) * _BLOCK_OF_ROWS
            terms = "B H S D e + 4 B H S, S filled to 32" + repeats
            return SavedByFormula(bytes=fused + filled + repeated, terms=terms)
        case "chosen" if device_type != "cpu":
            return None
        case "flash" | "cudnn" if device_type != "cpu" and (grouped or shape.head_dim % _EIGHT):
            return None  # copies of q, k and v, filled or repeated, as the release has it
        case _:
            wide = rows * (max(e, 4) - 4)
            return SavedByFormula(bytes=fused + logsumexp + wide, terms=f"B H S D e + {max(e, 4)} B H S")


def _math(cell: AttentionCell, rows: int, grouped: bool) -> SavedByFormula:
    shape, e = cell.shape, BYTES[cell.dtype]
    wide = max(e, 4)
    keys = shape.batch * shape.heads * shape.keys * shape.head_dim
    own_values = grouped or wide != e
    size = (rows * shape.head_dim + keys + rows * shape.keys + (keys if own_values else 0)) * wide
    terms = f"{wide} B H (S T + S D + {'2 ' if own_values else ''}T D)"
    return SavedByFormula(bytes=size, terms=terms)


# FLOPs of the parts of attention in one forward pass of the whole model, as written-out attention computes them.
#
# With B = batch_size, H = heads, S = seq_len, D = head_dim, L = layers; the full square, since written-out causal
# attention computes all of it and masks.


def attention_product_flops(workload: TextbookWorkload) -> int:
    """FLOPs of Q K^T, or of P V: 2 B H S S D in each of L layers."""
    return 2 * _scores(workload) * workload.model.head_dim


def softmax_flops(workload: TextbookWorkload) -> int:
    """FLOPs of softmax over the scores: 5 B H S S in each of L layers."""
    return SOFTMAX_FLOPS * _scores(workload)


def _scores(workload: TextbookWorkload) -> int:
    return workload.batch_size * workload.model.heads * workload.seq_len**2 * workload.model.layers
