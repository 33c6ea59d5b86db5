"""FlashAttention's backward pass for Hopper, in Gluon: five products, one kernel, dQ summed in global memory.

The mathematics is from `flash/backward.py`, over tiles of keys. A program has one tile of K and V, loops over tiles of
queries, and keeps dK and dV in registers. dQ of a row is a sum over keys, and so over programs. Each program adds its
part to fp32 sums in global memory through the tensor-memory accelerator, in an order that differs between runs. Before
this kernel `flash_row_statistics` zeroes the sums; after it `flash_finish_queries` turns them into dQ.

A producer, one warp with few registers, loads the tiles. Two consumers of four warps multiply, each with 64 of the 128
keys. The exponentials of one run behind the products of the other. When a tile of queries has come, a consumer begins
S^T and dP^T of its keys. Then, while products run, it does

    exponentials                           behind dP^T
    dS^T, also into shared memory          behind dV
    wait for the other consumer's dS^T     behind dV and dK
    dQ, half of the columns each, into shared memory, and from there to the sums

If AHEAD, the consumer begins S^T of the next tile before dQ, so the next exponentials do not wait for it. The sums of
dP^T begin at -delta then, and nothing is subtracted from them. This takes registers, which head_dim 64 has.

With a window or documents (LIMITED) a key is seen by the queries from `lowest` to before `behind`. A program visits the
tiles of queries that any of its keys needs, and compares in all of them.

Barriers are explained in `forward.py`. Tile i of queries, with its dO, logsumexp, delta and dS^T, uses buffer
s = i % STAGES, as its use u = i // STAGES:

    full[s]      1 arrival a phase, by the producer, which also sets the number of bytes to come. Consumers wait for
                 parity u & 1. If AHEAD, one more tile comes than is visited: the first once more.
    ready[s]     1 arrival of each consumer a phase, when its half of dS^T is written. Consumers wait for parity u & 1
                 before they read the other's half.
    empty[s]     1 arrival of each consumer a phase, when its products from the buffer have ended. The producer waits
                 for parity (u & 1) ^ 1 before it loads, and consumers before they write dS^T. At u = 0 both pass the
                 fresh barrier.

Compiling showed three things that keep ptxas from letting products run ahead of one another (warnings C7512 to C7515):

- A branch in the loop. So masked tiles have a separate loop of constant length, and no path leads around it.
- Sums that anything but a product reads in a later iteration than the one that began them.
- More than 240 registers a thread. The way a mask is compared saves registers.
"""

# Gluon's functions look like Python's, but are not.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from stepscope.kernels.hopper.forward import capped, document_of, turn_of

STAGES = 2


@builtin
def _async_add(descriptor, coordinates, tile, _semantic: Any = None):
    """Add a tile in shared memory to global memory. Gluon's compiler has an instruction for this, but no function."""
    where = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, where, tile.handle)


@gluon.jit
def _limits(
    key,
    BOUNDS,
    batch,
    batches,
    queries,
    keys,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):
    """The first query that sees each key, and the one after the last, which is 0 for keys beyond the sequence."""
    lowest = key if CAUSAL else key * 0
    behind = gl.where(key < keys, queries, 0)
    if WINDOW:
        behind = gl.minimum(behind, key + window)
        if not CAUSAL:
            lowest = gl.maximum(lowest, key + (1 - window))
    if DOCUMENTS:
        first, after = document_of(BOUNDS, batch, batches, key, keys)
        lowest = gl.maximum(lowest, first)
        behind = gl.minimum(behind, after)
    return lowest, behind


@gluon.jit
def _tile_of(visit, place, SPREAD: gl.constexpr):
    """The tile of queries of a head's visit: from the first one on or, if SPREAD, from there around to it."""
    _batch, _kv_head, _first_key, begin, tiles, _first_visit, _visits = place
    tile = begin + visit
    if SPREAD:
        tile = gl.where(tile >= tiles, tile - tiles, tile)
    return tile


@gluon.jit
def _produce(
    Q, K, V, GRADIENT, STATISTICS, buffers, barriers, place, rows, heads, GROUP: gl.constexpr, STAGES: gl.constexpr,
    SPREAD: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tiles, g_tiles, logsumexps, deltas, _ds_tiles, _dq_tiles = buffers
    kv_full, full, _ready, empty = barriers
    batch, kv_head, first_key, _begin, tiles, first_visit, visits = place
    BLOCK_M: gl.constexpr = Q.block_shape[2]
    TILE_BYTES: gl.constexpr = Q.block_type.nbytes + GRADIENT.block_type.nbytes + 2 * STATISTICS.block_type.nbytes
    mbarrier.expect(kv_full, K.block_type.nbytes + V.block_type.nbytes)
    tma.async_copy_global_to_shared(K, [batch, kv_head, first_key, 0], kv_full, k_tile)
    tma.async_copy_global_to_shared(V, [batch, kv_head, first_key, 0], kv_full, v_tile)
    for turn in range(visits + AHEAD):
        visit = first_visit + (gl.where(turn == visits, 0, turn) if AHEAD else turn)
        member = visit // tiles if GROUP > 1 else 0
        head = kv_head * GROUP + member
        row = batch * heads + head
        first_query = _tile_of(visit - member * tiles, place, SPREAD) * BLOCK_M
        slot = turn % STAGES
        mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
        bar = full.index(slot)
        mbarrier.expect(bar, TILE_BYTES)
        tma.async_copy_global_to_shared(Q, [batch, head, first_query, 0], bar, q_tiles.index(slot))
        tma.async_copy_global_to_shared(STATISTICS, [row, first_query], bar, logsumexps.index(slot))
        tma.async_copy_global_to_shared(GRADIENT, [batch, head, first_query, 0], bar, g_tiles.index(slot))
        tma.async_copy_global_to_shared(STATISTICS, [rows + row, first_query], bar, deltas.index(slot))


@gluon.jit
def _begin_scores(k, q_tiles, full, turn, STAGES: gl.constexpr, SCORES: gl.constexpr):
    """Begin S^T of the tile of queries that this turn visits, as soon as it has come."""
    ROWS: gl.constexpr = k.shape[0]
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    q = q_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
    return warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _hide(
    weights,
    key,
    first_query,
    keys,
    lowest,
    behind,
    MASKED: gl.constexpr,
    LIMITED: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
):
    """The weights (keys, queries), with 0 for every query that does not see the key."""
    query = gl.arange(0, weights.shape[1], gl.SliceLayout(0, weights.type.layout))[None, :]
    if LIMITED:
        seen = (query >= (lowest - first_query)[:, None]) & (query < (behind - first_query)[:, None])
        return gl.where(seen, weights, 0.0)
    if MASKED:
        # In this form the difference between a thread's scores is a constant and takes no register.
        weights = gl.where((key - first_query)[:, None] <= query, weights, 0.0)
    if not EVEN_KEYS:
        # Keys beyond the sequence are zeros, but their weights may overflow, and would make dQ NaN.
        weights = gl.where((key < keys)[:, None], weights, 0.0)
    return weights


@gluon.jit
def _visit_queries(
    scores, dk, dv, first, last, k, v, k_columns, SUMS, buffers, barriers, place, keys, lowest, behind, first_row,
    padded, scale_log2, cap, INDEX: gl.constexpr, GROUP: gl.constexpr, MASKED: gl.constexpr, EVEN_KEYS: gl.constexpr,
    STAGES: gl.constexpr, SPREAD: gl.constexpr, SCORES: gl.constexpr, SUM: gl.constexpr, DQ: gl.constexpr,
    AHEAD: gl.constexpr, LIMITED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    _k_tile, _v_tile, q_tiles, g_tiles, logsumexps, deltas, ds_tiles, dq_tiles = buffers
    _kv_full, full, ready, empty = barriers
    _batch, _kv_head, first_key, _begin, tiles, first_visit, _visits = place
    dtype: gl.constexpr = q_tiles.dtype
    ROWS: gl.constexpr = k.shape[0]
    HEAD_DIM: gl.constexpr = k.shape[1]
    BLOCK_M: gl.constexpr = ds_tiles.shape[2]
    DQ_COLUMNS: gl.constexpr = k_columns.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUM, k_width=2)
    dq_tile = dq_tiles.index(INDEX)
    for turn in range(first, last):
        visit = first_visit + turn
        member = visit // tiles if GROUP > 1 else 0
        tile = _tile_of(visit - member * tiles, place, SPREAD)
        slot = turn % STAGES
        parity = (turn // STAGES) & 1
        q = q_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
        gradient = g_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
        nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
        if not AHEAD:
            scores = _begin_scores(k, q_tiles, full, turn, STAGES, SCORES)
        if AHEAD:
            delta = deltas.index(slot).load(SCORES)
            dp = warpgroup_mma(v, gradient.permute((1, 0)), nothing - delta, is_async=True)
        else:
            dp = warpgroup_mma(v, gradient.permute((1, 0)), nothing, use_acc=False, is_async=True)
        logsumexp = logsumexps.index(slot).load(SCORES)
        if not AHEAD:
            scores = warpgroup_mma_wait(1, deps=[scores])
        if CAPPED:
            scores = capped(scores, cap)
        weights = gl.exp2(scores * scale_log2 - logsumexp)
        key = first_key + INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        weights = _hide(weights, key, tile * BLOCK_M, keys, lowest, behind, MASKED, LIMITED, EVEN_KEYS)
        weights_operand = gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)
        if CAPPED:
            weights = weights * (1 - scores * scores)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dv = warpgroup_mma(weights_operand, gradient, dv, is_async=True)
        if not AHEAD:
            dp -= deltas.index(slot).load(SCORES)
        ds = (weights * dp).to(dtype)
        mbarrier.wait(empty.index(slot), parity ^ 1)
        ds_tile = ds_tiles.index(slot)
        ds_tile.slice(INDEX * ROWS, ROWS, dim=0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ready.index(slot))
        ds_operand = gl.convert_layout(ds, OPERAND, assert_trivial=True)
        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
        if AHEAD:
            scores = _begin_scores(k, q_tiles, full, turn + 1, STAGES, SCORES)
        mbarrier.wait(ready.index(slot), parity)
        nothing = gl.zeros([BLOCK_M, DQ_COLUMNS], gl.float32, DQ)
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_columns, nothing, use_acc=False, is_async=True)
        if AHEAD:
            dq, dv, dk, scores = warpgroup_mma_wait(0, deps=[dq, dv, dk, scores])
        else:
            dq, dv, dk = warpgroup_mma_wait(0, deps=[dq, dv, dk])
        mbarrier.arrive(empty.index(slot))
        # The previous tile's dQ has left shared memory.
        tma.store_wait(0)
        dq_tile.store(dq)
        fence_async_shared()
        _async_add(SUMS, [first_row + member * padded + tile * BLOCK_M, INDEX * DQ_COLUMNS], dq_tile)
    return scores, dk, dv


@gluon.jit
def _consume(
    SUMS, DK, DV, PARTS, BOUNDS, dk_strides, dv_strides, buffers, barriers, place, part, sizes, heads, padded, scale,
    scale_log2, cap, INDEX: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr,
    V_IN_REGISTERS: gl.constexpr, STAGES: gl.constexpr, REAL_COLUMNS: gl.constexpr, SPREAD: gl.constexpr,
    SHARED: gl.constexpr, AHEAD: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    k_tile, v_tile, q_tiles, _g_tiles, _logsumexps, _deltas, ds_tiles, _dq_tiles = buffers
    kv_full, full, _ready, _empty = barriers
    batch, kv_head, first_key, _begin, _tiles, _first_visit, visits = place
    batches, queries, keys, window = sizes
    LIMITED: gl.constexpr = WINDOW or DOCUMENTS
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_N: gl.constexpr = ds_tiles.shape[1]
    BLOCK_M: gl.constexpr = ds_tiles.shape[2]
    HEAD_DIM: gl.constexpr = k_tile.shape[3]
    ROWS: gl.constexpr = BLOCK_N // 2
    COLUMNS: gl.constexpr = HEAD_DIM // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUM)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUM)
    first_row = (batch * heads + kv_head * GROUP) * padded
    mbarrier.wait(kv_full, 0)
    k = k_tile.reshape([BLOCK_N, HEAD_DIM])
    k_columns = k.slice(INDEX * COLUMNS, COLUMNS, dim=1)
    k = k.slice(INDEX * ROWS, ROWS, dim=0)
    v = v_tile.reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, dim=0)
    if V_IN_REGISTERS:
        v = v.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
    scores = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
    if AHEAD:
        scores = warpgroup_mma_wait(0, deps=[_begin_scores(k, q_tiles, full, 0, STAGES, SCORES)])
    own_key = first_key + INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    lowest, behind = _limits(own_key, BOUNDS, batch, batches, queries, keys, window, CAUSAL, WINDOW, DOCUMENTS)
    # With grouped heads every tile is compared, since each head has its own masked tiles.
    MASKED_TILES: gl.constexpr = BLOCK_N // BLOCK_M if CAUSAL and GROUP == 1 and not LIMITED else 0
    if MASKED_TILES > 0:
        scores, dk, dv = _visit_queries(
            scores, dk, dv, 0, MASKED_TILES, k, v, k_columns, SUMS, buffers, barriers, place, keys, lowest, behind,
            first_row, padded, scale_log2, cap, INDEX, GROUP, True, EVEN_KEYS, STAGES, SPREAD, SCORES, SUM, DQ, AHEAD,
            False, CAPPED,
        )  # fmt: skip
    scores, dk, dv = _visit_queries(
        scores, dk, dv, MASKED_TILES, visits, k, v, k_columns, SUMS, buffers, barriers, place, keys, lowest, behind,
        first_row, padded, scale_log2, cap, INDEX, GROUP, CAUSAL and GROUP > 1 and not LIMITED, EVEN_KEYS, STAGES,
        SPREAD, SCORES, SUM, DQ, AHEAD, LIMITED, CAPPED,
    )  # fmt: skip
    tma.store_wait(0)
    row = INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUM))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, SUM))[None, :]
    inside = (first_key + row < keys)[:, None]
    if REAL_COLUMNS < HEAD_DIM:
        inside = inside & (column < REAL_COLUMNS)
    if not SHARED or part < 0:
        key = (first_key + row).to(gl.int64)[:, None]
        first_dv = DV + (batch.to(gl.int64) * dv_strides[0] + kv_head.to(gl.int64) * dv_strides[1])
        gl.store(first_dv + key * dv_strides[2] + column, dv.to(dtype), mask=inside)
        first_dk = DK + (batch.to(gl.int64) * dk_strides[0] + kv_head.to(gl.int64) * dk_strides[1])
        gl.store(first_dk + key * dk_strides[2] + column, (dk * scale).to(dtype), mask=inside)
    else:
        places = (part * 2 * BLOCK_N + row)[:, None] * REAL_COLUMNS + column
        gl.store(PARTS + places, dk, mask=inside)
        gl.store(PARTS + places + BLOCK_N * REAL_COLUMNS, dv, mask=inside)


@gluon.jit(
    do_not_specialize=[
        "batches",
        "kv_heads",
        "queries",
        "keys",
        "window",
        "rows",
        "padded",
        "together",
        "whole",
        "parts",
    ]
)
def hopper_gradients(
    Q, K, V, GRADIENT, STATISTICS, SUMS, DK, DV, PARTS, BOUNDS,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    batches, kv_heads, queries, keys, window, rows, padded, together, whole, parts, scale, scale_log2, cap,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, V_IN_REGISTERS: gl.constexpr,
    STAGES: gl.constexpr, REAL_COLUMNS: gl.constexpr, SPREAD: gl.constexpr, SHARED: gl.constexpr,
    AHEAD: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV, and add dQ / scale to SUMS: one program per tile of keys.

    Q, K, V and GRADIENT are descriptors of (B, H, rows, D) with blocks (1, 1, BLOCK_M or BLOCK_N, C); STATISTICS of
    (2 B H, padded) fp32 with blocks (1, BLOCK_M): the logsumexp in base 2, then delta; SUMS of (B H padded, D) fp32
    with blocks (BLOCK_M, C / 2). DK and DV have a dense head dimension. A consumer's four warps have 64 of 128 keys.
    C, the columns of a tile, may be more than D, which is REAL_COLUMNS: descriptors load zeros beyond D, and add
    nothing there.

    If SHARED, the tiles of keys after the first `whole` ones have `parts` programs each, with a part of the queries.
    They leave dK / scale and dV, (2, BLOCK_N, D) fp32 a program, in PARTS, behind the sums. `hopper_forward` says what
    BOUNDS and cap are. With a window or documents there is neither SPREAD nor SHARED.
    """
    BLOCK_M: gl.constexpr = Q.block_shape[2]
    BLOCK_N: gl.constexpr = K.block_shape[2]
    dtype: gl.constexpr = Q.dtype
    key_tiles = gl.cdiv(keys, BLOCK_N)
    # Under a causal mask the first keys are seen by the most queries, so the heavy tiles already come first.
    program = gl.program_id(0)
    part = 0
    if SHARED:
        part = program - whole
        program = gl.where(part < 0, program, whole + part // parts)
    batch_head, key_tile = turn_of(program, key_tiles, batches * kv_heads, together)
    first_key = key_tile * BLOCK_N
    batch = batch_head // kv_heads
    kv_head = batch_head % kv_heads
    begin = 0
    tiles = gl.cdiv(queries, BLOCK_M)
    if WINDOW or DOCUMENTS:
        last_key = gl.minimum(first_key + BLOCK_N, keys) - 1
        lowest, _behind = _limits(first_key, BOUNDS, batch, batches, queries, keys, window, CAUSAL, WINDOW, DOCUMENTS)
        _lowest, behind = _limits(last_key, BOUNDS, batch, batches, queries, keys, window, CAUSAL, WINDOW, DOCUMENTS)
        # Wrong bounds, which nobody reads on a GPU, must leave a tile to wait for, and one of this head.
        begin = gl.minimum(lowest // BLOCK_M, gl.cdiv(queries, BLOCK_M) - 1)
        tiles = gl.maximum(gl.cdiv(behind, BLOCK_M) - begin, 1)
    elif CAUSAL:
        # The first BLOCK_N / BLOCK_M tiles are masked and always visited. Beyond the sequence they are zeros without
        # weight. Statistics and sums are padded, so these tiles have their own rows there.
        begin = first_key // BLOCK_M
        tiles = gl.maximum(tiles - begin, BLOCK_N // BLOCK_M)
    elif SPREAD:
        begin = key_tile % tiles
    first_visit = 0
    visits = tiles * GROUP
    if SHARED:
        PARTS += rows.to(gl.int64) * padded * REAL_COLUMNS
        of_tile = part % parts
        first_visit = gl.where(part < 0, 0, of_tile * visits // parts)
        visits = gl.where(part < 0, visits, (of_tile + 1) * visits // parts - first_visit)

    k_tile = gl.allocate_shared_memory(dtype, K.block_type.shape, K.layout)
    v_tile = gl.allocate_shared_memory(dtype, V.block_type.shape, V.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + Q.block_type.shape, Q.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [STAGES] + GRADIENT.block_type.shape, GRADIENT.layout)
    logsumexps = gl.allocate_shared_memory(gl.float32, [STAGES] + STATISTICS.block_type.shape, STATISTICS.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES] + STATISTICS.block_type.shape, STATISTICS.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], DS)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2] + SUMS.block_type.shape, SUMS.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(ready.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()

    buffers = (k_tile, v_tile, q_tiles, g_tiles, logsumexps, deltas, ds_tiles, dq_tiles)
    barriers = (kv_full, full, ready, empty)
    place = (batch, kv_head, first_key, begin, tiles, first_visit, visits)
    heads = kv_heads * GROUP
    dk_strides = (dk_batch, dk_head, dk_row)
    dv_strides = (dv_batch, dv_head, dv_row)
    sizes = (batches, queries, keys, window)
    gl.warp_specialize(
        [
            (_consume, (SUMS, DK, DV, PARTS, BOUNDS, dk_strides, dv_strides, buffers, barriers, place, part, sizes,
                        heads, padded, scale, scale_log2, cap, 0, GROUP, CAUSAL, EVEN_KEYS, V_IN_REGISTERS, STAGES,
                        REAL_COLUMNS, SPREAD, SHARED, AHEAD, WINDOW, DOCUMENTS, CAPPED)),
            (_consume, (SUMS, DK, DV, PARTS, BOUNDS, dk_strides, dv_strides, buffers, barriers, place, part, sizes,
                        heads, padded, scale, scale_log2, cap, 1, GROUP, CAUSAL, EVEN_KEYS, V_IN_REGISTERS, STAGES,
                        REAL_COLUMNS, SPREAD, SHARED, AHEAD, WINDOW, DOCUMENTS, CAPPED)),
            (_produce, (Q, K, V, GRADIENT, STATISTICS, buffers, barriers, place, rows, heads,
                        GROUP, STAGES, SPREAD, AHEAD)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- short sequences without a mask: programs take whole heads, one after another
#
# A program has all keys of a head, tile after tile, and passes its queries for each. So dQ needs no other program: its
# sums are in shared memory, each consumer's half of the columns its own. They repeat bit for bit.
#
# Turns are counted through all tiles of keys and all heads. Barriers are those above, and:
#
#     k_full, k_empty    of two buffers for K, which take turns: dQ reads K to the end of a tile of keys
#     v_full, v_empty    of one buffer for V, which consumers empty into registers before the first of its turns


@gluon.jit
def _load_rows(Q, GRADIENT, STATISTICS, buffers, full, empty, turn, batch, head, row, rows, tile, STAGES: gl.constexpr):
    q_tiles, g_tiles, logsumexps, deltas, _k_tiles, _v_tile, _ds_tiles, _dq_tiles = buffers
    BLOCK_M: gl.constexpr = Q.block_shape[2]
    TILE_BYTES: gl.constexpr = Q.block_type.nbytes + GRADIENT.block_type.nbytes + 2 * STATISTICS.block_type.nbytes
    slot = turn % STAGES
    first_query = tile * BLOCK_M
    mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
    bar = full.index(slot)
    mbarrier.expect(bar, TILE_BYTES)
    tma.async_copy_global_to_shared(Q, [batch, head, first_query, 0], bar, q_tiles.index(slot))
    tma.async_copy_global_to_shared(STATISTICS, [row, first_query], bar, logsumexps.index(slot))
    tma.async_copy_global_to_shared(GRADIENT, [batch, head, first_query, 0], bar, g_tiles.index(slot))
    tma.async_copy_global_to_shared(STATISTICS, [rows + row, first_query], bar, deltas.index(slot))


@gluon.jit
def _produce_heads(Q, K, V, GRADIENT, STATISTICS, buffers, barriers, sizes, STAGES: gl.constexpr):
    k_tiles = buffers[4]
    v_tile = buffers[5]
    k_full, k_empty, v_full, v_empty, full, empty, _ready = barriers
    batches, heads, queries, keys = sizes
    BLOCK_M: gl.constexpr = Q.block_shape[2]
    BLOCK_N: gl.constexpr = K.block_shape[2]
    rows = batches * heads
    tiles = gl.cdiv(queries, BLOCK_M)
    key_tiles = gl.cdiv(keys, BLOCK_N)
    number = 0
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        batch = row // heads
        head = row % heads
        for key_tile in range(key_tiles):
            where = [batch, head, key_tile * BLOCK_N, 0]
            buffer = number % 2
            mbarrier.wait(k_empty.index(buffer), ((number // 2) & 1) ^ 1)
            mbarrier.expect(k_full.index(buffer), K.block_type.nbytes)
            tma.async_copy_global_to_shared(K, where, k_full.index(buffer), k_tiles.index(buffer))
            mbarrier.wait(v_empty, (number & 1) ^ 1)
            mbarrier.expect(v_full, V.block_type.nbytes)
            tma.async_copy_global_to_shared(V, where, v_full, v_tile)
            for tile in range(tiles):
                _load_rows(
                    Q, GRADIENT, STATISTICS, buffers, full, empty, number * tiles + tile, batch, head, row, rows, tile,
                    STAGES,
                )  # fmt: skip
            number += 1
    # Consumers begin the scores of one tile more than there is.
    row = gl.program_id(0)
    _load_rows(
        Q, GRADIENT, STATISTICS, buffers, full, empty, number * tiles, row // heads, row % heads, row, rows, 0, STAGES
    )


@gluon.jit
def _begin_scores_of_heads(
    buffers, barriers, turn, tiles, numbers,
    INDEX: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Begin S^T of the tile of queries that this turn visits, as soon as it and its keys have come."""
    q_tiles = buffers[0]
    k_tiles = buffers[4]
    k_full = barriers[0]
    full = barriers[4]
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    slot = turn % STAGES
    number = gl.minimum(turn // tiles, numbers - 1)
    mbarrier.wait(k_full.index(number % 2), (number // 2) & 1)
    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
    q = q_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
    k = k_tiles.index(number % 2).reshape([2 * ROWS, HEAD_DIM]).slice(INDEX * ROWS, ROWS, dim=0)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
    return warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _consume_heads(
    DQ, DK, DV, dq_strides, dk_strides, dv_strides, buffers, barriers, sizes, scale, scale_log2,
    INDEX: gl.constexpr, TILES: gl.constexpr, EVEN_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tiles, g_tiles, logsumexps, deltas, k_tiles, v_tile, ds_tiles, dq_tiles = buffers
    _k_full, k_empty, v_full, v_empty, _full, empty, ready = barriers
    batches, heads, queries, keys = sizes
    dtype: gl.constexpr = q_tiles.dtype
    BLOCK_M: gl.constexpr = q_tiles.shape[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    ROWS: gl.constexpr = BLOCK_N // 2
    COLUMNS: gl.constexpr = HEAD_DIM // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUM, k_width=2)
    rows = batches * heads
    tiles = gl.cdiv(queries, BLOCK_M)
    key_tiles = gl.cdiv(keys, BLOCK_N)
    program = gl.program_id(0)
    numbers = gl.cdiv(rows - program, gl.num_programs(0)) * key_tiles
    # Whole rows of what is stored, 16 bytes a thread.
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STORED_PART: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row_of_keys = INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED))
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))[None, :]
    row_of_part = gl.arange(0, BLOCK_M, gl.SliceLayout(1, STORED_PART))
    column_of_part = INDEX * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, STORED_PART))[None, :]
    scores = warpgroup_mma_wait(
        0, deps=[_begin_scores_of_heads(buffers, barriers, 0, tiles, numbers, INDEX, ROWS, STAGES, SCORES)]
    )
    for number in range(numbers):
        key_tile = number % key_tiles
        batch_head = program + number // key_tiles * gl.num_programs(0)
        batch = (batch_head // heads).to(gl.int64)
        head = (batch_head % heads).to(gl.int64)
        k_columns = k_tiles.index(number % 2).reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * COLUMNS, COLUMNS, dim=1)
        mbarrier.wait(v_full, number & 1)
        v = v_tile.reshape([BLOCK_N, HEAD_DIM]).slice(INDEX * ROWS, ROWS, dim=0)
        v = v.load(gl.DotOperandLayout(operand_index=0, parent=SCORES, k_width=2))
        mbarrier.arrive(v_empty)
        dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUM)
        dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUM)
        for tile in range(tiles):
            turn = number * tiles + tile
            slot = turn % STAGES
            parity = (turn // STAGES) & 1
            q = q_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
            gradient = g_tiles.index(slot).reshape([BLOCK_M, HEAD_DIM])
            nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, SCORES)
            delta = deltas.index(slot).load(SCORES)
            dp = warpgroup_mma(v, gradient.permute((1, 0)), nothing - delta, is_async=True)
            logsumexp = logsumexps.index(slot).load(SCORES)
            weights = gl.exp2(scores * scale_log2 - logsumexp)
            if not EVEN_KEYS:
                # Keys beyond the sequence are zeros, but their weights may overflow, and would make dQ NaN.
                key = key_tile * BLOCK_N + INDEX * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
                weights = gl.where((key < keys)[:, None], weights, 0.0)
            weights_operand = gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)
            dp = warpgroup_mma_wait(0, deps=[dp])
            dv = warpgroup_mma(weights_operand, gradient, dv, is_async=True)
            ds = (weights * dp).to(dtype)
            mbarrier.wait(empty.index(slot), parity ^ 1)
            ds_tile = ds_tiles.index(slot)
            ds_tile.slice(INDEX * ROWS, ROWS, dim=0).store(ds)
            fence_async_shared()
            mbarrier.arrive(ready.index(slot))
            ds_operand = gl.convert_layout(ds, OPERAND, assert_trivial=True)
            dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
            scores = _begin_scores_of_heads(buffers, barriers, turn + 1, tiles, numbers, INDEX, ROWS, STAGES, SCORES)
            dq_tile = dq_tiles.index(INDEX * TILES + tile)
            before = dq_tile.load(PART)
            mbarrier.wait(ready.index(slot), parity)
            dq = warpgroup_mma(ds_tile.permute((1, 0)), k_columns, before, use_acc=key_tile > 0, is_async=True)
            dq, dv, dk, scores = warpgroup_mma_wait(0, deps=[dq, dv, dk, scores])
            mbarrier.arrive(empty.index(slot))
            dq_tile.store(dq)
        mbarrier.arrive(k_empty.index(number % 2))
        key = key_tile * BLOCK_N + row_of_keys
        inside = (key < keys)[:, None]
        key = key.to(gl.int64)[:, None]
        first_dv = DV + (batch * dv_strides[0] + head * dv_strides[1])
        gl.store(first_dv + key * dv_strides[2] + column, gl.convert_layout(dv.to(dtype), STORED), mask=inside)
        first_dk = DK + (batch * dk_strides[0] + head * dk_strides[1])
        gl.store(
            first_dk + key * dk_strides[2] + column, gl.convert_layout((dk * scale).to(dtype), STORED), mask=inside
        )
        for tile in range(gl.where(key_tile == key_tiles - 1, 0, tiles), tiles):
            query = tile * BLOCK_M + row_of_part
            dq = dq_tiles.index(INDEX * TILES + tile).load(STORED_PART)
            first_dq = DQ + (batch * dq_strides[0] + head * dq_strides[1])
            places = first_dq + query.to(gl.int64)[:, None] * dq_strides[2] + column_of_part
            gl.store(places, (dq * scale).to(dtype), mask=(query < queries)[:, None])


@gluon.jit(do_not_specialize=["batches", "heads", "queries", "keys"])
def hopper_gradients_of_heads(
    Q, K, V, GRADIENT, STATISTICS, DQ, DK, DV,
    dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    batches, heads, queries, keys, scale, scale_log2,
    TILES: gl.constexpr, EVEN_KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV without a mask, of as many heads of keys as of queries. Programs take whole heads.

    TILES tiles of 64 queries of a head at most: the sums of dQ are in shared memory, 16 KiB each at head_dim 64.
    Arguments are those of `hopper_gradients`.
    """
    dtype: gl.constexpr = Q.dtype
    BLOCK_M: gl.constexpr = Q.block_shape[2]
    HEAD_DIM: gl.constexpr = Q.block_shape[3]
    BLOCK_N: gl.constexpr = K.block_shape[2]
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + Q.block_type.shape, Q.layout)
    g_tiles = gl.allocate_shared_memory(dtype, [STAGES] + GRADIENT.block_type.shape, GRADIENT.layout)
    logsumexps = gl.allocate_shared_memory(gl.float32, [STAGES] + STATISTICS.block_type.shape, STATISTICS.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES] + STATISTICS.block_type.shape, STATISTICS.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2] + K.block_type.shape, K.layout)
    v_tile = gl.allocate_shared_memory(dtype, V.block_type.shape, V.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    ds_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_M], DS)
    SUMS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM // 2], gl.float32)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2 * TILES, BLOCK_M, HEAD_DIM // 2], SUMS)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(k_full.index(buffer), count=1)
        mbarrier.init(k_empty.index(buffer), count=2)
    mbarrier.init(v_full, count=1)
    mbarrier.init(v_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
        mbarrier.init(ready.index(slot), count=2)
    fence_async_shared()

    buffers = (q_tiles, g_tiles, logsumexps, deltas, k_tiles, v_tile, ds_tiles, dq_tiles)
    barriers = (k_full, k_empty, v_full, v_empty, full, empty, ready)
    sizes = (batches, heads, queries, keys)
    dq_strides = (dq_batch, dq_head, dq_row)
    dk_strides = (dk_batch, dk_head, dk_row)
    dv_strides = (dv_batch, dv_head, dv_row)
    gl.warp_specialize(
        [
            (_consume_heads, (DQ, DK, DV, dq_strides, dk_strides, dv_strides, buffers, barriers, sizes, scale,
                                 scale_log2, 0, TILES, EVEN_KEYS, STAGES)),
            (_consume_heads, (DQ, DK, DV, dq_strides, dk_strides, dv_strides, buffers, barriers, sizes, scale,
                                 scale_log2, 1, TILES, EVEN_KEYS, STAGES)),
            (_produce_heads, (Q, K, V, GRADIENT, STATISTICS, buffers, barriers, sizes, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
