"""FlashAttention-2's forward pass in Triton.

A program has one tile of queries Q_i and loops over tiles of keys. With c = scale * log2(e), for each row

    m'  = max(m, max_j(c q k_j))            the running maximum, in base 2
    p_j = 2^(c q k_j - m')                  no exponent above zero
    l'  = l 2^(m - m') + sum_j p_j
    o'  = o 2^(m - m') + sum_j p_j v_j

and at the end out = o / l, logsumexp = (m + log2 l) ln 2. (Dao 2023, arXiv:2307.08691, algorithm 1.) Only one tile of
scores exists at a time, in registers. With log2(e) folded into the scale, each exponential is one multiply-add and one
instruction of the special-function unit. A sink is one more score of a row, whose value is zero: its exponential is
added to l at the end. tiles.py says what else may be done to scores.
"""

import triton
import triton.language as tl

from stepscope.kernels.flash.tiles import (
    as_operand,
    capped,
    chance_kept,
    document_of,
    dropped_words,
    first_of_bias,
    in_document,
    keys_visited,
    load_operand,
    long,
    negated,
    product,
    store_tile,
    transposed,
    turn_of,
    visible,
    with_bias,
    without_dropped,
)
from stepscope.kernels.launching import LOG2E

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _visit_keys(
    output, total, maximum, q, K, V, k_offset, v_offset, batch, batch_head, kv_head, k_stride, v_stride,
    first_query, queries_of_tile, document_first, document_after, begin, end, queries, keys, window, scale_log2, cap,
    SEEDS, dropped, slope, bias, bias_row, unit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    for first_key in tl.range(begin, end, BLOCK_N, warp_specialize=WARP_SPECIALIZE):  # pyright: ignore
        k = load_operand(
            K, k_offset, batch, kv_head, first_key, keys, k_stride,
            BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS or not MASKED, TMA, PRECISION,
        )  # fmt: skip
        scores = capped(product(q, transposed(k, PRECISION), None, PRECISION), cap, not HALF)
        key = first_key + tl.arange(0, BLOCK_N)
        scores = with_bias(scores, queries_of_tile[:, None], key[None, :], queries, keys, slope, bias, bias_row, unit)
        if MASKED:
            mask = visible(queries_of_tile[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
            mask = in_document(mask, key, document_first, document_after)
            scores = tl.where(mask, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
        shift = new_maximum
        if WINDOW or document_first is not None or bias is not None:
            # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.math.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.math.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        output = output * decay[:, None]
        if SEEDS is not None:
            # Drawn before the scores, words and scores take registers at once, which larger tiles do not have.
            words = dropped_words(
                SEEDS, dropped, batch_head, 0, first_query, first_key, queries, keys, BLOCK_M, BLOCK_N, False
            )
            weights = without_dropped(weights, words, SEEDS, first_query, first_key, BLOCK_M, BLOCK_N, False)
        v = load_operand(
            V, v_offset, batch, kv_head, first_key, keys, v_stride,
            BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS or not MASKED, TMA, PRECISION,
        )  # fmt: skip
        output = product(as_operand(weights, v, PRECISION), v, output, PRECISION)
        maximum = new_maximum
    return output, total, maximum


@triton.jit
def _attend_tile(
    tile, Q, K, V, OUT, LOGSUMEXP, BOUNDS, SINKS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    bias_batch, bias_head, bias_row,
    batches, heads, queries, keys, window, together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(queries, BLOCK_M)
    batch_head, row_tile = turn_of(tile, row_tiles, batches * heads, together, ROWS_FIRST)
    if CAUSAL:
        # The last tile of queries visits the most keys. Heavy tiles come first; light ones fill the gaps at the end.
        row_tile = row_tiles - 1 - row_tile
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // GROUP
    first_query = row_tile * BLOCK_M
    batch_long = long(batch)

    q = load_operand(
        Q, batch_long * q_batch + long(head) * q_head, batch, head, first_query, queries, q_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, TMA, PRECISION,
    )  # fmt: skip
    if NEGATE:
        # The running maximum is correct only if the scale is not negative.
        q = negated(q, PRECISION)
    k_offset = batch_long * k_batch + long(kv_head) * k_head
    v_offset = batch_long * v_batch + long(kv_head) * v_head
    query = first_query + tl.arange(0, BLOCK_M)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    slope = None
    bias = None
    unit = LOG2E / scale_log2
    if SLOPES is not None:
        slope = tl.load(SLOPES + head) * unit
    if BIAS is not None:
        bias = first_of_bias(BIAS, batch, head, queries, bias_batch, bias_head, bias_row)
    document_first = None
    document_after = None
    if BOUNDS is not None:
        document_first, document_after = document_of(BOUNDS, batch, batches, query, queries)
    begin, full_begin, full_end, end = keys_visited(
        BOUNDS, batch, batches, first_query, queries, keys, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
    )
    begins = (begin, full_end, full_begin)
    ends = (tl.minimum(full_begin, end), end, full_end)
    # Masked tiles on either side, then those where every pair is visible.
    for side in tl.static_range(3):
        if side == 2 or WINDOW or BOUNDS is not None or (side == 1 and (CAUSAL or not EVEN_KEYS)):
            output, total, maximum = _visit_keys(
                output, total, maximum, q, K, V, k_offset, v_offset, batch, batch_head, kv_head, k_row, v_row,
                first_query, query, document_first, document_after, begins[side], ends[side], queries, keys, window,
                scale_log2, cap, SEEDS, dropped, slope, bias, bias_row, unit,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, side != 2, EVEN_KEYS, PRECISION, TMA,
                WARP_SPECIALIZE and side == 2, OUT.dtype.element_ty.primitive_bitwidth == 16,
            )  # fmt: skip

    if SINKS is not None:
        sink = tl.load(SINKS + head) * LOG2E
        new_maximum = tl.maximum(maximum, sink)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.math.exp2(maximum - shift)
        total = total * decay + tl.math.exp2(sink - shift)
        output = output * decay[:, None]
        maximum = new_maximum
    # A row that saw no key has total 0 and maximum -inf. Its output is zeros, its logsumexp -inf + log2(1) = -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    logsumexp = (maximum + tl.math.log2(divisor)) * LN2
    if SEEDS is not None:
        divisor *= chance_kept(dropped)
    output = output / divisor[:, None]
    store_tile(
        OUT, batch_long * o_batch + long(head) * o_head, output, first_query, queries, o_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES,
    )  # fmt: skip
    tl.store(LOGSUMEXP + long(batch_head) * queries + query, logsumexp, mask=query < queries)


@triton.jit(do_not_specialize=["together"])
def flash_forward(
    Q, K, V, OUT, LOGSUMEXP, BOUNDS, SINKS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    bias_batch, bias_head, bias_row,
    batches, heads, queries, keys, window, together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    NEGATE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
    ROWS_FIRST: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Compute forward: one program per tile of queries of a head or, if PERSISTENT, per multiprocessor.

    LOGSUMEXP is (B, H, S) fp32, contiguous. tiles.py describes BOUNDS, SINKS, SLOPES, BIAS and cap. Strides are in
    elements; the head dimension is dense. With TMA, Q, K and V are tensor descriptors of (B, H, rows, D) with blocks
    (1, 1, BLOCK_M or BLOCK_N, BLOCK_D).
    """
    if PERSISTENT:
        tiles = tl.cdiv(queries, BLOCK_M) * batches * heads
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):  # pyright: ignore[reportGeneralTypeIssues]
            _attend_tile(
                tile, Q, K, V, OUT, LOGSUMEXP, BOUNDS, SINKS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
                q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
                bias_batch, bias_head, bias_row,
                batches, heads, queries, keys, window, together,
                GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, EVEN_QUERIES, EVEN_KEYS,
                NEGATE, PRECISION, TMA, WARP_SPECIALIZE, ROWS_FIRST,
            )  # fmt: skip
    else:
        _attend_tile(
            tl.program_id(0), Q, K, V, OUT, LOGSUMEXP, BOUNDS, SINKS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
            bias_batch, bias_head, bias_row,
            batches, heads, queries, keys, window, together,
            GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, EVEN_QUERIES, EVEN_KEYS,
            NEGATE, PRECISION, TMA, WARP_SPECIALIZE, ROWS_FIRST,
        )  # fmt: skip
