"""FlashAttention's forward pass for Hopper, in Gluon: waits are explicit, not left to a compiler.

The mathematics is from `flash/forward.py`. The division of work differs (Shah et al. 2024, FlashAttention-3,
arXiv:2407.08608, sections 3.1 and 3.2). A program has one tile of queries and two kinds of warps:

    producer      one warp with few registers: loads Q once, then the tiles of K and of V, each into a ring of STAGES
                  buffers in shared memory, through the tensor-memory accelerator
    consumers     each of four or eight warps with a part of the tile's rows: products, exponentials, sums

A consumer computes exponentials while its products run. In step i it begins S_i = Q K_i^T, then
O += P_{i-1} V_{i-1}. It waits only for the first of the two, and turns S_i into P_i while the second still runs. With
TURNS, consumers also take turns at the tensor cores: one computes exponentials while the other multiplies.

Barriers (`mbarrier`) are in shared memory. A barrier counts arrivals. When its count is full, a phase is complete.
Phases alternate between parities 0 and 1. A wait for a parity returns when the latest complete phase has it. On a fresh
barrier, a wait for parity 1 returns at once. Tile i of K is in buffer s = i % STAGES, as its use u = i // STAGES. For K
and for V alike:

    full[s]    1 arrival a phase, by the producer, which also sets the number of bytes to come. The phase is complete
               when all bytes have come. Use u of the buffer completes phase u, so consumers wait for parity u & 1.
    empty[s]   1 arrival of each consumer a phase, when its product from the buffer has ended. Use u of the buffer may
               be loaded after the release of use u - 1, which completes phase u - 1. So the producer waits for parity
               (u & 1) ^ 1, and for u = 0 it passes the fresh barrier.
    queries    1 arrival, 1 phase: all of Q has come.
    turn[c]    1 arrival a phase: consumer c may begin products. At its wait w (0, 1, ...), consumer 0 needs phase
               w - 1 (it has the first turn: parity (w & 1) ^ 1); any other needs phase w (parity w & 1). In its turn w,
               consumer c arrives at turn[c + 1], the last consumer at turn[0]. All take the same number of turns.

No wait is ever two phases behind. A consumer releases a buffer only after waiting for it to be full. The producer loads
a buffer only after all have released it. Only the consumer that has had a turn gives it. Every consumer passes every
tile of keys that any row of the program sees, so all counts are equal.

The first tile of keys is always visited separately, with the comparisons that its mask needs, to fill the pipeline. It
is the tile on the diagonal nearest the first row. Without a window and documents all rows see a key of it, so no
maximum is -inf afterwards.

With a window or documents (LIMITED) each row sees the keys from `lowest` to before `behind`, and neither ever falls
from one row to the next. A program visits the tiles from the first row's lowest on: first those on its right end, then
those on its left end, which need comparisons, too, then those between, which every row sees whole.
"""

# Gluon's functions look like Python's, but are not.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def turn_of(program, tiles, batch_heads, together):
    """The head of a program, counted through the batches, and its tile among the `tiles` of that head.

    As many heads as `together` take turns, then the next ones do.
    """
    group = program // (tiles * together)
    first = group * together
    taking = gl.minimum(together, batch_heads - first)
    rest = program - first * tiles
    return first + rest % taking, rest // taking


@gluon.jit
def document_of(BOUNDS, batch, batches, position, length):
    """The first position of the document of each position, and the one after its last; both 0 beyond the sequence."""
    first = BOUNDS + (batch.to(gl.int64) * length + position)
    inside = position < length
    after = first + batches.to(gl.int64) * length
    return gl.load(first, mask=inside, other=0), gl.load(after, mask=inside, other=0)


@gluon.jit
def _limits(row, BOUNDS, sizes, batch, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr):
    """The first key that each row sees, and the one after the last."""
    batches, _heads, queries, keys, window = sizes
    lowest = row * 0
    behind = lowest + keys
    if CAUSAL:
        behind = gl.minimum(behind, row + 1)
    if WINDOW:
        lowest = gl.maximum(lowest, row + (1 - window))
        if not CAUSAL:
            behind = gl.minimum(behind, row + window)
    if DOCUMENTS:
        first, after = document_of(BOUNDS, batch, batches, row, queries)
        lowest = gl.maximum(lowest, first)
        behind = gl.minimum(behind, after)
    return lowest, behind


@gluon.jit
def visits_of(first_tile, left_end, masked_begin, tiles):
    """The tile behind the last one, and how many turns compare: of one tile or more, and of no more than are visited.

    Whatever the bounds of documents say, producer and consumers count alike: with wrong ones, which nobody reads on a
    GPU, they would wait for one another for ever.
    """
    tiles = max(tiles, first_tile + 1)
    masked_end = tiles - masked_begin + max(0, min(left_end, masked_begin) - first_tile)
    return tiles, max(1, min(masked_end, tiles - first_tile))


@gluon.jit
def capped(scores, cap):
    """tanh(scores * cap / (2 log2(e)))."""
    return 1 - 2 / (1 + gl.exp2(scores * cap))


@gluon.jit
def _visit(turn, place):
    """The index of the tile of keys to visit in this turn: from the masked tiles on the right around to those left."""
    _batch, _head, _first_query, first_tile, masked_begin, tiles, _masked_end = place
    tile = turn + masked_begin
    return gl.where(tile >= tiles, tile - tiles + first_tile, tile)


@gluon.jit
def _produce(
    Q, K, V, buffers, barriers, place, kv_head,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles = buffers
    q_full, k_full, k_empty, v_full, v_empty, _turns = barriers
    batch, head, first_query, first_tile, _masked_begin, tiles, _masked_end = place
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    mbarrier.expect(q_full, CONSUMERS * ROWS * HEAD_DIM * 2)
    for c in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(Q, [batch, head, first_query + c * ROWS, 0], q_full, q_tiles.index(c))
    for i in range(tiles - first_tile):
        buffer = i % STAGES
        parity = (i // STAGES) & 1
        first_key = _visit(i, place) * BLOCK_N
        mbarrier.wait(k_empty.index(buffer), parity ^ 1)
        mbarrier.expect(k_full.index(buffer), TILE_BYTES)
        tma.async_copy_global_to_shared(K, [batch, kv_head, first_key, 0], k_full.index(buffer), k_tiles.index(buffer))
        mbarrier.wait(v_empty.index(buffer), parity ^ 1)
        mbarrier.expect(v_full.index(buffer), TILE_BYTES)
        tma.async_copy_global_to_shared(V, [batch, kv_head, first_key, 0], v_full.index(buffer), v_tiles.index(buffer))


@gluon.jit
def _hide(scores, first_row, first_key, keys, lowest, behind, CAUSAL: gl.constexpr, LIMITED: gl.constexpr):
    """The scores, with -inf for every key that a row does not see."""
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK_N: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if LIMITED:
        seen = (column[None, :] >= (lowest - first_key)[:, None]) & (column[None, :] < (behind - first_key)[:, None])
        return gl.where(seen, scores, float("-inf"))
    # One comparison per element is enough: a row sees the columns before some column.
    behind = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, LAYOUT)) + (keys - first_key)
    if CAUSAL:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) + first_row
        behind = gl.minimum(behind, row + (1 - first_key))
    return gl.where(column[None, :] < behind[:, None], scores, float("-inf"))


@gluon.jit
def _share(weights):
    """Sums over the columns of one thread, (rows, 4). Four threads share a row, and their sums are added at the end."""
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(gl.reshape(weights, [ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def _soften(scores, maximum, total, scale_log2, LIMITED: gl.constexpr):
    """The weights of a tile of scores: (weights, decay of the earlier sums, maximum, total)."""
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale_log2)
    shift = new_maximum
    if LIMITED:
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
        shift = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    decay = gl.exp2(maximum - shift)
    share = _share(weights)
    total = total * gl.convert_layout(decay, gl.SliceLayout(1, share.type.layout), assert_trivial=True)[:, None] + share
    return weights, decay, new_maximum, total


@gluon.jit
def _as_operand(weights, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights as the left operand of the product with V, in half of their present registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    return gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)


@gluon.jit
def _step(
    i, output, weights, maximum, total, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    first_row, place, keys, lowest, behind, scale_log2, cap,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, LIMITED: gl.constexpr, CAPPED: gl.constexpr, TURNS: gl.constexpr,
    LATE: gl.constexpr, SCORES: gl.constexpr, OUTPUT: gl.constexpr,
):  # fmt: skip
    """The scores and weights of place i, and the output of place i - 1 from the given weights.

    The given weights are the product's operand or, if LATE, fp32, and are rounded while the product for the scores
    runs.
    """
    ROWS: gl.constexpr = q.shape[0]
    HEAD_DIM: gl.constexpr = q.shape[1]
    buffer = i % STAGES
    before = (i - 1) % STAGES
    mbarrier.wait(k_full.index(buffer), (i // STAGES) & 1)
    if TURNS:
        # This is turn i - 1 of this consumer. The module's docstring explains the parities.
        mbarrier.wait(turns.index(INDEX), ((i - 1) & 1) ^ (1 if INDEX == 0 else 0))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_tiles.index(buffer).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0])
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
    if LATE:
        weights = _as_operand(weights, v_tiles.dtype, OUTPUT)
    output = warpgroup_mma(weights, v, output, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((INDEX + 1) % CONSUMERS))
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(buffer))
    if CAPPED:
        scores = capped(scores, cap)
    if MASKED:
        scores = _hide(scores, first_row, _visit(i, place) * BLOCK_N, keys, lowest, behind, CAUSAL, LIMITED)
    next_weights, decay, maximum, total = _soften(scores, maximum, total, scale_log2, LIMITED)
    # Wait here for tile i of V, which the next step needs. ptxas moves the wait for the product ahead of everything
    # that does not need it, exponentials too, unless a loop is between them, as in a barrier. This needs a second
    # buffer, since the buffer that the product still reads is released below.
    mbarrier.wait(v_full.index(buffer), (i // STAGES) & 1)
    output, weights = warpgroup_mma_wait(0, deps=[output, weights])
    mbarrier.arrive(v_empty.index(before))
    decay = gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
    output = output * decay[:, None]
    if not LATE:
        next_weights = _as_operand(next_weights, v_tiles.dtype, OUTPUT)
    return output, next_weights, maximum, total


@gluon.jit
def _consume(
    OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    FIRST_MASKED: gl.constexpr, MORE_MASKED: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr,
    CAPPED: gl.constexpr, HAS_SINKS: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles = buffers
    q_full, k_full, k_empty, v_full, v_empty, turns = barriers
    batch, head, first_query, first_tile, _masked_begin, tiles, masked_end = place
    _batches, heads, queries, keys, _window = sizes
    LIMITED: gl.constexpr = WINDOW or DOCUMENTS
    ROWS: gl.constexpr = q_tiles.shape[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    WARPS: gl.constexpr = ROWS // 16
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])

    first_row = first_query + INDEX * ROWS
    q_tile = q_tiles.index(INDEX)
    q = q_tile.reshape([ROWS, HEAD_DIM])
    maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = _share(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
    output = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    lowest, behind = _limits(row, BOUNDS, sizes, batch, CAUSAL, WINDOW, DOCUMENTS)
    visits = tiles - first_tile

    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    k = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0])
    scores = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(0))
    if CAPPED:
        scores = capped(scores, cap)
    if FIRST_MASKED:
        scores = _hide(scores, first_row, _visit(0, place) * BLOCK_N, keys, lowest, behind, CAUSAL, LIMITED)
    weights, _decay, maximum, total = _soften(scores, maximum, total, scale_log2, LIMITED)
    if not LATE:
        weights = _as_operand(weights, v_tiles.dtype, OUTPUT)
    mbarrier.wait(v_full.index(0), 0)
    begin = 1
    if MORE_MASKED:
        for i in range(1, masked_end):
            output, weights, maximum, total = _step(
                i, output, weights, maximum, total, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
                first_row, place, keys, lowest, behind, scale_log2, cap,
                INDEX, CONSUMERS, BLOCK_N, STAGES, CAUSAL, True, LIMITED, CAPPED, TURNS, LATE, SCORES, OUTPUT,
            )  # fmt: skip
        begin = masked_end
    for i in range(begin, visits):
        output, weights, maximum, total = _step(
            i, output, weights, maximum, total, q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
            first_row, place, keys, lowest, behind, scale_log2, cap,
            INDEX, CONSUMERS, BLOCK_N, STAGES, CAUSAL, False, LIMITED, CAPPED, TURNS, LATE, SCORES, OUTPUT,
        )  # fmt: skip
    last = visits - 1
    v = v_tiles.index(last % STAGES).reshape([BLOCK_N, HEAD_DIM])
    if LATE:
        weights = _as_operand(weights, v_tiles.dtype, OUTPUT)
    output = warpgroup_mma(weights, v, output, is_async=True)
    output, weights = warpgroup_mma_wait(0, deps=[output, weights])

    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES), assert_trivial=True)
    decay = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, SCORES))
    if HAS_SINKS:
        sink = gl.load(SINKS + head) * LOG2E
        with_sink = gl.maximum(maximum, sink)
        decay = gl.exp2(maximum - with_sink)
        total = total * decay + gl.exp2(sink - with_sink)
        maximum = with_sink
    logsumexp = (maximum + gl.log2(total)) * LN2
    gl.store(LOGSUMEXP + (batch * heads + head).to(gl.int64) * queries + row, logsumexp, mask=row < queries)
    divisor = gl.convert_layout(total / decay if HAS_SINKS else total, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
    # All products with the queries have ended, so the queries' buffer is free.
    q.store((output / divisor[:, None]).to(q_tiles.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(OUT, [batch, head, first_row, 0], q_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batches", "heads", "queries", "keys", "window", "together"])
def hopper_forward(
    Q, K, V, OUT, LOGSUMEXP, BOUNDS, SINKS, scale_log2, cap, batches, heads, queries, keys, window, together,
    GROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN_KEYS: gl.constexpr, WINDOW: gl.constexpr, DOCUMENTS: gl.constexpr, CAPPED: gl.constexpr,
    HAS_SINKS: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute forward: one program per tile of queries of one head. Its consumers share the rows of the tile.

    Q, K, V and OUT are tensor descriptors of (B, H, rows, D) with blocks (1, 1, rows of a consumer or BLOCK_N, C);
    LOGSUMEXP is (B, H, S) fp32, contiguous. C, the columns of a tile, may be more than D: descriptors load zeros beyond
    it, and store nothing there. `flash/tiles.py` describes BOUNDS, SINKS and the softcap, of which `cap` is
    2 log2(e) scale / softcap here. Those that a call does not have are never read. With a window or documents there
    are as many keys as queries.
    """
    gl.static_assert(CONSUMERS <= 3)
    ROWS: gl.constexpr = Q.block_shape[2]
    HEAD_DIM: gl.constexpr = Q.block_shape[3]
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    row_tiles = gl.cdiv(queries, BLOCK_M)
    batch_head, row_tile = turn_of(gl.program_id(0), row_tiles, batches * heads, together)
    if CAUSAL:
        # The last tile of queries visits the most keys. Heavy tiles come first; light ones fill the gaps at the end.
        row_tile = row_tiles - 1 - row_tile
    batch = batch_head // heads
    head = batch_head % heads
    first_query = row_tile * BLOCK_M
    end = keys
    full_end = keys
    if CAUSAL:
        end = gl.minimum(keys, gl.minimum(first_query + BLOCK_M, queries))
        full_end = gl.minimum(keys, first_query + 1)
    first_tile = first_query * 0
    left_end = first_tile
    sizes = (batches, heads, queries, keys, window)
    if WINDOW or DOCUMENTS:
        last_query = gl.minimum(first_query + BLOCK_M, queries) - 1
        lowest, full_end = _limits(first_query, BOUNDS, sizes, batch, CAUSAL, WINDOW, DOCUMENTS)
        last_lowest, end = _limits(last_query, BOUNDS, sizes, batch, CAUSAL, WINDOW, DOCUMENTS)
        first_tile = lowest // BLOCK_N
        left_end = gl.cdiv(last_lowest, BLOCK_N)
    tiles = gl.cdiv(end, BLOCK_N)
    masked_begin = full_end // BLOCK_N
    tiles, masked_end = visits_of(first_tile, left_end, masked_begin, tiles)

    q_tiles = gl.allocate_shared_memory(Q.dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, BLOCK_N, HEAD_DIM], V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(c), count=1)
    fence_async_shared()

    # One tile of keys holds the whole diagonal of a tile of queries if tiles of queries may begin where it begins.
    MORE_MASKED: gl.constexpr = WINDOW or DOCUMENTS or (CAUSAL and BLOCK_N % BLOCK_M != 0)
    FIRST_MASKED: gl.constexpr = WINDOW or DOCUMENTS or CAUSAL or not EVEN_KEYS
    WARPS: gl.constexpr = ROWS // 16
    buffers = (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, k_full, k_empty, v_full, v_empty, turns)
    place = (batch, head, first_query, first_tile, masked_begin, tiles, masked_end)
    kv_head = head // GROUP
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 0,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_produce, (Q, K, V, buffers, barriers, place, kv_head, CONSUMERS, ROWS, BLOCK_N, STAGES)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 0,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 1,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_produce, (Q, K, V, buffers, barriers, place, kv_head, CONSUMERS, ROWS, BLOCK_N, STAGES)),
            ],
            [WARPS, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 0,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 1,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_consume, (OUT, LOGSUMEXP, BOUNDS, SINKS, buffers, barriers, place, sizes, scale_log2, cap, 2,
                            CONSUMERS, BLOCK_N, STAGES, CAUSAL, FIRST_MASKED, MORE_MASKED, WINDOW, DOCUMENTS, CAPPED,
                            HAS_SINKS, TURNS, LATE)),
                (_produce, (Q, K, V, buffers, barriers, place, kv_head, CONSUMERS, ROWS, BLOCK_N, STAGES)),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# ---- short sequences without a mask: programs take whole heads, one after another
#
# A program above has one tile of queries, and its first loads and its last stores have nothing to hide behind. Here
# there are as many programs as multiprocessors. Shared memory holds all tiles of a head's K and V while consumers pass
# its queries, 64 at a time, and the producer loads the next head's tiles as the last consumer lets go of this one's.
#
# Tiles of queries are dealt to consumers in turn, through all heads of a program: the n-th goes to consumer
# n % CONSUMERS, in buffer n % (2 CONSUMERS), where its output follows it. A head has a tile for each consumer at least.
# A consumer begins the first scores of its next tile before it ends this one. Tiles of keys take STAGES buffers in
# turn. `empty` has 1 arrival of each consumer a phase, with its last tile of queries of the head.


@gluon.jit
def _load_queries(Q, q_tiles, q_full, q_empty, place, batch, head, row_tile, SLOTS: gl.constexpr):
    ROWS: gl.constexpr = Q.block_shape[2]
    slot = place % SLOTS
    mbarrier.wait(q_empty.index(slot), ((place // SLOTS) & 1) ^ 1)
    mbarrier.expect(q_full.index(slot), Q.block_type.nbytes)
    tma.async_copy_global_to_shared(Q, [batch, head, row_tile * ROWS, 0], q_full.index(slot), q_tiles.index(slot))


@gluon.jit
def _produce_heads(
    Q, K, V, buffers, barriers, sizes, GROUP: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr
):
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, v_full, empty = barriers
    batches, heads, queries, keys = sizes
    ROWS: gl.constexpr = Q.block_shape[2]
    BLOCK_N: gl.constexpr = K.block_shape[2]
    SLOTS: gl.constexpr = 2 * CONSUMERS
    row_tiles = gl.cdiv(queries, ROWS)
    key_tiles = gl.cdiv(keys, BLOCK_N)
    dealt = 0
    loaded = 0
    for batch_head in range(gl.program_id(0), batches * heads, gl.num_programs(0)):
        batch = batch_head // heads
        head = batch_head % heads
        at_once = gl.minimum(row_tiles, CONSUMERS)
        for n in range(at_once):
            _load_queries(Q, q_tiles, q_full, q_empty, dealt + n, batch, head, n, SLOTS)
        for visit in range(key_tiles):
            slot = (loaded + visit) % STAGES
            tile = gl.where(visit == 0, key_tiles, visit) - 1
            mbarrier.wait(empty.index(slot), (((loaded + visit) // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            where = [batch, head // GROUP, tile * BLOCK_N, 0]
            tma.async_copy_global_to_shared(K, where, k_full.index(slot), k_tiles.index(slot))
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            tma.async_copy_global_to_shared(V, where, v_full.index(slot), v_tiles.index(slot))
        for n in range(at_once, row_tiles):
            _load_queries(Q, q_tiles, q_full, q_empty, dealt + n, batch, head, n, SLOTS)
        dealt += row_tiles
        loaded += key_tiles


@gluon.jit
def _begin_scores(
    q_tiles, k_tiles, q_full, k_full, place, use,
    SLOTS: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Begin the scores of a tile of queries and the tile of keys of this use, as soon as both have come."""
    ROWS: gl.constexpr = q_tiles.shape[3]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    HEAD_DIM: gl.constexpr = k_tiles.shape[4]
    mbarrier.wait(q_full.index(place % SLOTS), (place // SLOTS) & 1)
    mbarrier.wait(k_full.index(use % STAGES), (use // STAGES) & 1)
    q = q_tiles.index(place % SLOTS).reshape([ROWS, HEAD_DIM])
    k = k_tiles.index(use % STAGES).reshape([BLOCK_N, HEAD_DIM]).permute([1, 0])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _consume_heads(
    OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
    INDEX: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, EVEN_KEYS: gl.constexpr,
):  # fmt: skip
    q_tiles, k_tiles, v_tiles = buffers
    q_full, q_empty, k_full, v_full, empty = barriers
    batches, heads, queries, keys = sizes
    ROWS: gl.constexpr = q_tiles.shape[3]
    HEAD_DIM: gl.constexpr = q_tiles.shape[4]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    SLOTS: gl.constexpr = 2 * CONSUMERS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = q_tiles.dtype
    row_tiles = gl.cdiv(queries, ROWS)
    key_tiles = gl.cdiv(keys, BLOCK_N)
    places = gl.cdiv(batches * heads - gl.program_id(0), gl.num_programs(0)) * row_tiles
    scores = _begin_scores(q_tiles, k_tiles, q_full, k_full, INDEX, 0, SLOTS, STAGES, SCORES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for place in range(INDEX, places, CONSUMERS):
        number = place // row_tiles
        batch_head = gl.program_id(0) + number * gl.num_programs(0)
        first_row = (place - number * row_tiles) * ROWS
        loaded = number * key_tiles
        # The last tile of all is begun once more, and nobody reads its scores.
        following = gl.where(place + CONSUMERS < places, place + CONSUMERS, place)
        last = (place + CONSUMERS) // row_tiles > number
        maximum = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = _share(gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES))
        output = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUTPUT)
        if not EVEN_KEYS:
            # The last tile is visited first: the loop compares nothing.
            column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES)) + (key_tiles - 1) * BLOCK_N
            scores = gl.where((column < keys)[None, :], scores, float("-inf"))
        weights, _decay, maximum, total = _soften(scores, maximum, total, scale_log2, False)
        weights = _as_operand(weights, dtype, OUTPUT)
        # Meanwhile the output before has left its buffer.
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index((place + CONSUMERS) % SLOTS), pred=place >= CONSUMERS)
        mbarrier.wait(v_full.index(loaded % STAGES), (loaded // STAGES) & 1)
        for use in range(loaded + 1, loaded + key_tiles):
            before = (use - 1) % STAGES
            scores = _begin_scores(q_tiles, k_tiles, q_full, k_full, place, use, SLOTS, STAGES, SCORES)
            v = v_tiles.index(before).reshape([BLOCK_N, HEAD_DIM])
            output = warpgroup_mma(weights, v, output, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            next_weights, decay, maximum, total = _soften(scores, maximum, total, scale_log2, False)
            # `_step` says why this wait is here.
            mbarrier.wait(v_full.index(use % STAGES), (use // STAGES) & 1)
            output, weights = warpgroup_mma_wait(0, deps=[output, weights])
            mbarrier.arrive(empty.index(before), pred=last)
            output = output * gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT), assert_trivial=True)[:, None]
            weights = _as_operand(next_weights, dtype, OUTPUT)
        end = (loaded + key_tiles - 1) % STAGES
        v = v_tiles.index(end).reshape([BLOCK_N, HEAD_DIM])
        output = warpgroup_mma(weights, v, output, is_async=True)
        use = following // row_tiles * key_tiles
        scores = _begin_scores(q_tiles, k_tiles, q_full, k_full, following, use, SLOTS, STAGES, SCORES)
        output, weights = warpgroup_mma_wait(1, deps=[output, weights])
        mbarrier.arrive(empty.index(end), pred=last)
        total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES), assert_trivial=True)
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        logsumexp = (maximum + gl.log2(total)) * LN2
        gl.store(LOGSUMEXP + batch_head.to(gl.int64) * queries + row, logsumexp, mask=row < queries)
        share = 1 / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
        q_tile = q_tiles.index(place % SLOTS)
        q_tile.reshape([ROWS, HEAD_DIM]).store((output * share[:, None]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(OUT, [batch_head // heads, batch_head % heads, first_row, 0], q_tile)
        scores = warpgroup_mma_wait(0, deps=[scores])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batches", "heads", "queries", "keys"])
def hopper_forward_of_heads(
    Q, K, V, OUT, LOGSUMEXP, scale_log2, batches, heads, queries, keys,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, EVEN_KEYS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute forward without a mask. Programs take heads one after another.

    STAGES buffers hold all tiles of keys of a head at least, and a head has CONSUMERS tiles of queries at least.
    Arguments are those of `hopper_forward`.
    """
    gl.static_assert(CONSUMERS >= 3)
    SLOTS: gl.constexpr = 2 * CONSUMERS
    q_tiles = gl.allocate_shared_memory(Q.dtype, [SLOTS] + Q.block_type.shape, Q.layout)
    k_tiles = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(q_empty.index(slot), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    buffers = (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, q_empty, k_full, v_full, empty)
    sizes = (batches, heads, queries, keys)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    0, CONSUMERS, STAGES, EVEN_KEYS)),
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    1, CONSUMERS, STAGES, EVEN_KEYS)),
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    2, CONSUMERS, STAGES, EVEN_KEYS)),
                (_produce_heads, (Q, K, V, buffers, barriers, sizes, GROUP, CONSUMERS, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    0, CONSUMERS, STAGES, EVEN_KEYS)),
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    1, CONSUMERS, STAGES, EVEN_KEYS)),
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    2, CONSUMERS, STAGES, EVEN_KEYS)),
                (_consume_heads, (OUT, LOGSUMEXP, buffers, barriers, sizes, scale_log2,
                                    3, CONSUMERS, STAGES, EVEN_KEYS)),
                (_produce_heads, (Q, K, V, buffers, barriers, sizes, GROUP, CONSUMERS, STAGES)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
