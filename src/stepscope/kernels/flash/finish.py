"""The ends of a backward pass whose kernels sum in global memory: sums in fp32 become gradients in their own dtype."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from stepscope.kernels.flash.tiles import head_and_row, load_tile, long, store_tile


@triton.jit
def flash_finish_queries(
    SUMS, DQ, scale, dq_batch, dq_head, dq_row, heads, queries, padded,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute dQ from its sums: SUMS (B * H * padded, D) fp32 times scale, in the gradient's dtype."""
    batch_head, first = head_and_row(tl.program_id(0), queries, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    batch = long(batch_head // heads)
    head = batch_head % heads
    tile = load_tile(
        SUMS, long(batch_head) * padded * HEAD_DIM, 0, 0, first, queries, HEAD_DIM,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, False,
    )  # fmt: skip
    store_tile(
        DQ, batch * dq_batch + long(head) * dq_head, tile * scale, first, queries, dq_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["keys", "rows", "whole", "parts"])
def flash_finish_keys(
    SUMS, DK, DV, scale, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, kv_heads, keys, rows, whole, parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Compute dK (axis 1 is 0) and dV (1) of the tiles of keys that several programs share, in a fixed order.

    SUMS, fp32, has `rows` rows of HEAD_DIM numbers of something else, then (2, BLOCK_N, HEAD_DIM), dK / scale and dV,
    of each of the `parts` programs of each tile after the first `whole` ones. Axis 2: BLOCK_ROWS rows of a tile each.
    """
    shared = tl.program_id(0)
    which = tl.program_id(1)
    tiles = tl.cdiv(keys, BLOCK_N)
    batch_head = (whole + shared) // tiles
    batch = long(batch_head // kv_heads)
    head = long(batch_head % kv_heads)
    first_key = (whole + shared) % tiles * BLOCK_N
    row = tl.program_id(2) * BLOCK_ROWS
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for part in range(parts):
        place = long(rows) + ((long(shared) * parts + part) * 2 + which) * BLOCK_N
        total += load_tile(
            SUMS, place * HEAD_DIM, 0, 0, row, keys - first_key, HEAD_DIM,
            BLOCK_ROWS, HEAD_DIM, BLOCK_D, False, False,
        )  # fmt: skip
    if which == 0:
        store_tile(
            DK, batch * dk_batch + head * dk_head, total * scale, first_key + row, keys, dk_row,
            BLOCK_ROWS, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
    else:
        store_tile(
            DV, batch * dv_batch + head * dv_head, total, first_key + row, keys, dv_row,
            BLOCK_ROWS, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip
