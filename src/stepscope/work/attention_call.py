"""Work and saved bytes of one call of attention, by formula.

B batch, H heads of queries, G heads of keys, S queries, T keys, D head_dim, e bytes of a number.
"""

from dataclasses import dataclass

from stepscope.core.attention_timing import BYTES, AttentionCell
from stepscope.core.attention_verdict import AttentionShape
from stepscope.core.workload import Attention
from stepscope.work.operations import AttentionSizes, attention_backward_flops, attention_flops

BACKWARD_OVER_FORWARD = 2.5
"""Of fused attention, which makes the scores once more: five products where forward has two."""
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
    """The two products (Dao 2023, FlashAttention-2, section 4.1); causal, half."""
    return attention_flops(_sizes(shape), "half" if shape.causal else "full")


def backward_flops(shape: AttentionShape) -> int:
    """The five products of fused backward; causal, half."""
    return attention_backward_flops(_sizes(shape), "half" if shape.causal else "full")


@dataclass(frozen=True, kw_only=True)
class SavedOnPaper:
    """What autograd keeps for backward beside q, k and v, the output too where it keeps it."""

    bytes: int
    terms: str


_FUSED: tuple[Attention, ...] = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "flash", "flash-tiled")
_BLOCK_OF_ROWS = 32
"""To a multiple of which the memory-efficient kernel fills its rows' logsumexp (kAlignLSE)."""
_EIGHT = 8
"""To a multiple of which PyTorch's FlashAttention fills head_dim."""


def saved_on_paper(cell: AttentionCell, device_type: str) -> SavedOnPaper | None:
    """By formula; None where there is none: compiled, what is saved is the compiler's choice.

    reference, unsafe: exp of the scores, and their quotient by its row's sum, each B H S T; the sums, B H S; the mask,
    S T bytes. (Forward's scores are not saved: exp's derivative is its result, and the maximum is detached.)
    chunked: nothing, each chunk is made again. Fused: the output, B H S D, and the logsumexp in fp32, B H S.
    """
    shape, e = cell.shape, BYTES[cell.dtype]
    if cell.compile != "none" or shape.window is not None:
        return None
    rows = shape.batch * shape.heads * shape.queries
    scores = rows * shape.keys
    repeated = 0
    if shape.key_heads != shape.heads:
        repeated = 2 * shape.batch * shape.heads * shape.keys * shape.head_dim * e
    name = cell.implementation
    more = " + 2 B H T D e" if repeated else ""
    if name in ("reference", "unsafe"):
        mask = shape.queries * shape.keys if shape.causal else 0
        terms = "2 B H S T e + B H S e" + (" + S T" if mask else "") + more
        return SavedOnPaper(bytes=2 * scores * e + rows * e + mask + repeated, terms=terms)
    if name == "chunked":
        return SavedOnPaper(bytes=0, terms="0")
    if name in _FUSED:
        return _fused(cell, device_type, rows, repeated)
    return None


def _fused(cell: AttentionCell, device_type: str, rows: int, repeated: int) -> SavedOnPaper | None:
    shape, e, name = cell.shape, BYTES[cell.dtype], cell.implementation
    grouped = repeated > 0
    if name == "flash-tiled":
        wide = max(e, 4)
        terms = "B H S D e + B H S max(4, e)" + (" + 2 B H T D e" if grouped else "")
        return SavedOnPaper(bytes=rows * shape.head_dim * e + rows * wide + repeated, terms=terms)
    if name == "sdpa-efficient":
        filled = shape.batch * shape.heads * _up(shape.queries, _BLOCK_OF_ROWS)
        terms = "B H S D e + 4 B H S, S filled to 32" + (" + 2 B H T D e" if grouped else "")
        return SavedOnPaper(bytes=rows * shape.head_dim * e + 4 * filled + repeated, terms=terms)
    if (
        name == "sdpa-flash"
        and (shape.head_dim % _EIGHT or device_type == "cpu")
        and (grouped or (device_type != "cpu" and shape.head_dim % _EIGHT))
    ):
        return None  # copies of q, k and v, filled or repeated, as the release has it
    return SavedOnPaper(bytes=rows * shape.head_dim * e + 4 * rows, terms="B H S D e + 4 B H S")


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
