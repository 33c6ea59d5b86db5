"""FlashAttention-2's backward pass in Triton.

From dO, with c = scale * log2(e) and the forward's logsumexp L (in base 2 here), tile by tile

    P  = 2^(c Q K^T - L)          delta = rowsum(dO * O)
    dV = P^T dO
    dP = dO V^T                   dS = P * (dP - delta)
    dK = scale dS^T Q             dQ = scale dS K

With a softcap the weights are of c tanh(cap Q K^T), and dS has the factor 1 - tanh^2. A sink's gradient is minus the
sum of its own weight times delta over the rows. What is added to a score has the gradient dS. With dropout, which keeps
a weight with the chance r, and M(X) = X where it does, else 0, so that delta holds as it is,

    dV = M(P)^T dO / r            dS = P * (M(dP) - r delta) / r        where `scale` of dK and dQ has the last 1 / r

(Dao 2023, arXiv:2307.08691, algorithm 2.) There are three ways to sum:

    apart   a kernel over tiles of queries makes dQ and writes delta, then a kernel over tiles of keys makes dK and dV.
            Both compute scores and dP, so there are 7 matrix products instead of 5. Each sum has one owner, so there
            are no atomics, and results repeat bit for bit.
    joint   both kernels of `apart` in one launch, so that their ends overlap.
    fused   one kernel over tiles of keys, 5 products. Atomics sum dQ in fp32, in an order that differs between runs.

The kernel over keys computes the transposed S^T = K Q^T and dP^T = V dO^T. The weights are then in the layout in which
the next product reads its left operand from registers.
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
    head_and_row,
    in_document,
    is_split,
    joined,
    keys_visited,
    load_operand,
    load_tile,
    long,
    product,
    queries_visiting,
    store_tile,
    transposed,
    turn_of,
    visible,
    with_bias,
    without_dropped,
    words_again,
)
from stepscope.kernels.launching import LOG2E


@triton.jit
def row_statistics(
    OUT, LOGSUMEXP, LOGSUMEXP_GRADIENT, STATISTICS, gradient, o_offset, o_row, batch_head, first, queries, padded, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    HAS_LOGSUMEXP_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The logsumexp in base 2 and delta of one tile's rows; also writes both to STATISTICS (2, rows, padded) fp32.

    Rows that saw no key, and rows between `queries` and `padded`, get the logsumexp +inf. Their weights are then zero
    without a mask.
    """
    out = load_tile(OUT, o_offset, 0, 0, first, queries, o_row, BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, False)
    delta = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
    query = first + tl.arange(0, BLOCK_M)
    offset = long(batch_head) * queries + query
    logsumexp = tl.load(LOGSUMEXP + offset, mask=query < queries, other=float("-inf"))
    if HAS_LOGSUMEXP_GRADIENT:
        # The logsumexp's derivative by the scores is P, so its gradient is added to dP - delta in the bracket of dS.
        delta -= tl.load(LOGSUMEXP_GRADIENT + offset, mask=query < queries, other=0.0)
    base_2 = tl.where(logsumexp == float("-inf"), float("inf"), logsumexp * LOG2E)
    row = STATISTICS + long(batch_head) * padded + query
    tl.store(row, base_2, mask=query < padded)
    tl.store(row + long(rows) * padded, delta, mask=query < padded)
    return base_2, delta


@triton.jit
def flash_row_statistics(
    OUT, GRADIENT, LOGSUMEXP, LOGSUMEXP_GRADIENT, STATISTICS, SUMS,
    o_batch, o_head, o_row, g_batch, g_head, g_row, batches, heads, queries, padded,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LOGSUMEXP_GRADIENT: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Fill STATISTICS (2, B * H, padded) fp32: the logsumexp in base 2, and delta. One program per tile of a head.

    If there are SUMS of dQ, (B * H * padded, D) fp32, they are set to zero.
    """
    batch_head, first = head_and_row(tl.program_id(0), padded, BLOCK_M)  # pyright: ignore[reportGeneralTypeIssues]
    batch = long(batch_head // heads)
    head = batch_head % heads
    gradient = load_tile(
        GRADIENT, batch * g_batch + long(head) * g_head, 0, 0, first, queries, g_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, False, False,
    )  # fmt: skip
    row_statistics(
        OUT, LOGSUMEXP, LOGSUMEXP_GRADIENT, STATISTICS, gradient, batch * o_batch + long(head) * o_head, o_row,
        batch_head, first, queries, padded, batches * heads, HEAD_DIM, BLOCK_D, BLOCK_M, False, HAS_LOGSUMEXP_GRADIENT,
    )  # fmt: skip
    if HAS_SUMS:
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        store_tile(
            SUMS, long(batch_head) * padded * HEAD_DIM, zeros, first, padded, HEAD_DIM,
            BLOCK_M, HEAD_DIM, BLOCK_D, False,
        )  # fmt: skip


@triton.jit
def _load_statistic(STATISTICS, row, first_query, padded, BLOCK_M: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        return STATISTICS.load([row, first_query]).reshape(BLOCK_M)
    else:
        return tl.load(STATISTICS + long(row) * padded + first_query + tl.arange(0, BLOCK_M))


@triton.jit
def _visit_queries(
    dk, dv, k, v, Q, GRADIENT, DQ, STATISTICS, statistics_row, q_offset, g_offset, dq_offset, batch, head,
    q_row, g_row, dq_row, first_key, key, document_first, document_after, begin, end, queries, keys, window, padded,
    rows, scale_log2, cap, SEEDS, dropped, slope, bias, bias_row, unit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, FUSED: tl.constexpr, TMA_REDUCE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    for first_query in tl.range(begin, end, BLOCK_M):  # pyright: ignore[reportGeneralTypeIssues]
        query = first_query + tl.arange(0, BLOCK_M)
        q = load_operand(
            Q, q_offset, batch, head, first_query, queries, q_row,
            BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, TMA, PRECISION,
        )  # fmt: skip
        if SEEDS is not None:
            words = dropped_words(
                SEEDS, dropped, statistics_row, rows, first_query, first_key, queries, keys, BLOCK_M, BLOCK_N, True
            )
        capped_transposed = capped(product(k, transposed(q, PRECISION), None, PRECISION), cap, not HALF)
        scores_transposed = with_bias(
            capped_transposed, query[None, :], key[:, None], queries, keys, slope, bias, bias_row, unit
        )
        logsumexp = _load_statistic(STATISTICS, statistics_row, first_query, padded, BLOCK_M, TMA)
        weights_transposed = tl.math.exp2(scores_transposed * scale_log2 - logsumexp[None, :])
        if MASKED:
            mask = visible(query[None, :], key[:, None], keys, window, CAUSAL, WINDOW)
            mask = in_document(mask, query, document_first, document_after)
            weights_transposed = tl.where(mask, weights_transposed, 0.0)
        gradient = load_operand(
            GRADIENT, g_offset, batch, head, first_query, queries, g_row,
            BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, TMA, PRECISION,
        )  # fmt: skip
        used_transposed = weights_transposed
        if SEEDS is not None:
            used_transposed = without_dropped(
                weights_transposed, words, SEEDS, first_query, first_key, BLOCK_M, BLOCK_N, True
            )
        dv = product(as_operand(used_transposed, gradient, PRECISION), gradient, dv, PRECISION)
        dp_transposed = product(v, transposed(gradient, PRECISION), None, PRECISION)
        delta = _load_statistic(STATISTICS, statistics_row + rows, first_query, padded, BLOCK_M, TMA)
        if SEEDS is not None:
            delta *= chance_kept(dropped)
            # Testing each bit twice takes fewer registers than two tiles of weights, those used and all.
            words = words_again(words, dropped)
            dp_transposed = without_dropped(dp_transposed, words, SEEDS, first_query, first_key, BLOCK_M, BLOCK_N, True)
        ds_transposed = weights_transposed * (dp_transposed - delta[None, :])
        if cap is not None:
            ds_transposed = ds_transposed * (1 - capped_transposed * capped_transposed)
        ds_transposed = as_operand(ds_transposed, q, PRECISION)
        dk = product(ds_transposed, q, dk, PRECISION)
        if FUSED:
            dq = product(transposed(ds_transposed, PRECISION), k, None, PRECISION)
            if TMA_REDUCE:
                DQ.atomic_add([batch, head, first_query, 0], dq.reshape(1, 1, BLOCK_M, BLOCK_D))
            else:
                column = tl.arange(0, BLOCK_D)
                pointers = DQ + (dq_offset + long(first_query) * dq_row)
                pointers = pointers + tl.arange(0, BLOCK_M)[:, None] * dq_row + column[None, :]
                inside = (query < queries)[:, None] & (column < HEAD_DIM)[None, :]
                tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["together"])
def flash_key_gradients(
    Q, K, V, GRADIENT, DQ, DK, DV, STATISTICS, BOUNDS, SLOPES, BIAS, scale, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    bias_batch, bias_head, bias_row, batches, kv_heads, queries, keys, window, padded, together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, ROWS_FIRST: tl.constexpr, FUSED: tl.constexpr,
    TMA_REDUCE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV: one program per tile of keys, which visits the query heads of its group in order.

    SHARED: each query head has programs of its own, and DK and DV its shares. FUSED also adds dQ / scale to DQ (fp32,
    initially zero) by atomics, through a pointer or, with TMA_REDUCE, a descriptor.
    """
    # Under a causal mask the first keys are seen by the most queries, so the heavy tiles already come first.
    program = tl.program_id(0)
    key_tiles = tl.cdiv(keys, BLOCK_N)
    VISITED: tl.constexpr = 1 if SHARED else GROUP
    owners = kv_heads * (GROUP // VISITED)
    batch_head, key_tile = turn_of(program, key_tiles, batches * owners, together, ROWS_FIRST)
    batch = batch_head // owners
    owner = batch_head % owners
    kv_head = owner // (GROUP // VISITED)
    batch_long = long(batch)
    rows = batches * kv_heads * GROUP
    first_key = key_tile * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)

    k = load_operand(
        K, batch_long * k_batch + long(kv_head) * k_head, batch, kv_head, first_key, keys, k_row,
        BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS, TMA, PRECISION,
    )  # fmt: skip
    v = load_operand(
        V, batch_long * v_batch + long(kv_head) * v_head, batch, kv_head, first_key, keys, v_row,
        BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS, TMA, PRECISION,
    )  # fmt: skip
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    document_first = None
    document_after = None
    if BOUNDS is not None:
        document_first, document_after = document_of(BOUNDS, batch, batches, key, keys)
    begin, full_begin, full_end, end = queries_visiting(
        BOUNDS, batch, batches, first_key, queries, keys, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
    )
    if FUSED and not EVEN_KEYS and first_key + BLOCK_N > keys:
        # If the weights of keys beyond the sequence overflow, dQ would get 0 * inf.
        full_begin = tl.cdiv(end, BLOCK_M) * BLOCK_M
        full_end = full_begin

    for member in range(VISITED):
        head = owner * VISITED + member
        q_offset = batch_long * q_batch + long(head) * q_head
        g_offset = batch_long * g_batch + long(head) * g_head
        dq_offset = batch_long * dq_batch + long(head) * dq_head
        statistics_row = batch * kv_heads * GROUP + head
        slope = None
        bias = None
        unit = LOG2E / scale_log2
        if SLOPES is not None:
            slope = tl.load(SLOPES + head) * unit
        if BIAS is not None:
            bias = first_of_bias(BIAS, batch, head, queries, bias_batch, bias_head, bias_row)
        # Masked tiles before those where every pair is visible, these, and masked tiles behind them.
        begins = (begin, full_begin, full_end)
        ends = (tl.minimum(full_begin, end), full_end, end)
        for side in tl.static_range(3):
            if side == 1 or WINDOW or BOUNDS is not None or (side == 0 and (CAUSAL or (FUSED and not EVEN_KEYS))):
                dk, dv = _visit_queries(
                    dk, dv, k, v, Q, GRADIENT, DQ, STATISTICS, statistics_row, q_offset, g_offset, dq_offset, batch,
                    head, q_row, g_row, dq_row, first_key, key, document_first, document_after, begins[side],
                    ends[side], queries, keys, window, padded, rows, scale_log2, cap, SEEDS, dropped,
                    slope, bias, bias_row, unit,
                    HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, side != 1, EVEN_QUERIES, PRECISION, TMA, FUSED,
                    TMA_REDUCE, DK.dtype.element_ty.primitive_bitwidth == 16,
                )  # fmt: skip
    if SEEDS is not None:
        dv *= 1 / chance_kept(dropped)
    store_tile(
        DV, batch_long * dv_batch + long(owner) * dv_head, dv, first_key, keys, dv_row,
        BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS,
    )  # fmt: skip
    store_tile(
        DK, batch_long * dk_batch + long(owner) * dk_head, dk * scale, first_key, keys, dk_row,
        BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS,
    )  # fmt: skip


@triton.jit
def _visit_keys(
    dq, q, gradient, logsumexp, delta, K, V, k_offset, v_offset, batch, batch_head, kv_head, k_row, v_row,
    first_query, query, document_first, document_after, begin, end, queries, keys, window, scale_log2, cap,
    SEEDS, dropped, slope, bias, bias_row, unit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    if SEEDS is not None:
        delta *= chance_kept(dropped)
    for first_key in tl.range(begin, end, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        k = load_operand(
            K, k_offset, batch, kv_head, first_key, keys, k_row,
            BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS or not MASKED, TMA, PRECISION,
        )  # fmt: skip
        key = first_key + tl.arange(0, BLOCK_N)
        if SEEDS is not None:
            words = dropped_words(
                SEEDS, dropped, batch_head, 0, first_query, first_key, queries, keys, BLOCK_M, BLOCK_N, False
            )
        scores_capped = capped(product(q, transposed(k, PRECISION), None, PRECISION), cap, not HALF)
        scores = with_bias(scores_capped, query[:, None], key[None, :], queries, keys, slope, bias, bias_row, unit)
        weights = tl.math.exp2(scores * scale_log2 - logsumexp[:, None])
        if MASKED:
            mask = visible(query[:, None], key[None, :], keys, window, CAUSAL, WINDOW)
            mask = in_document(mask, key, document_first, document_after)
            weights = tl.where(mask, weights, 0.0)
        v = load_operand(
            V, v_offset, batch, kv_head, first_key, keys, v_row,
            BLOCK_N, HEAD_DIM, BLOCK_D, EVEN_KEYS or not MASKED, TMA, PRECISION,
        )  # fmt: skip
        dp = product(gradient, transposed(v, PRECISION), None, PRECISION)
        if SEEDS is not None:
            dp = without_dropped(dp, words, SEEDS, first_query, first_key, BLOCK_M, BLOCK_N, False)
        ds = weights * (dp - delta[:, None])
        if cap is not None:
            ds = ds * (1 - scores_capped * scores_capped)
        ds = as_operand(ds, k, PRECISION)
        dq = product(ds, k, dq, PRECISION)
    return dq


@triton.jit(do_not_specialize=["together"])
def flash_query_gradients(
    Q, K, V, GRADIENT, OUT, LOGSUMEXP, LOGSUMEXP_GRADIENT, DQ, STATISTICS, BOUNDS, SLOPES, BIAS,
    scale, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    o_batch, o_head, o_row, dq_batch, dq_head, dq_row,
    bias_batch, bias_head, bias_row, batches, kv_heads, queries, keys, window, padded, together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, ROWS_FIRST: tl.constexpr, PREPARE: tl.constexpr,
    HAS_LOGSUMEXP_GRADIENT: tl.constexpr, others,
):  # fmt: skip
    """Compute dQ: one program per tile of queries. PREPARE also writes STATISTICS for `flash_key_gradients`.

    others: how many programs of another kernel come first in a joint launch; None in one of its own.
    """
    program = tl.program_id(0)
    if others is not None:
        program -= others
    # With PREPARE, the statistics of the rows between the sequence's end and `padded` are written too.
    row_tiles = tl.cdiv(padded if PREPARE else queries, BLOCK_M)
    heads = kv_heads * GROUP
    batch_head, row_tile = turn_of(program, row_tiles, batches * heads, together, ROWS_FIRST)
    if CAUSAL:
        row_tile = row_tiles - 1 - row_tile
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // GROUP
    batch_long = long(batch)
    first_query = row_tile * BLOCK_M
    query = first_query + tl.arange(0, BLOCK_M)

    q = load_operand(
        Q, batch_long * q_batch + long(head) * q_head, batch, head, first_query, queries, q_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, TMA, PRECISION,
    )  # fmt: skip
    gradient = load_operand(
        GRADIENT, batch_long * g_batch + long(head) * g_head, batch, head, first_query, queries, g_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES, TMA, PRECISION,
    )  # fmt: skip
    if PREPARE:
        logsumexp, delta = row_statistics(
            OUT, LOGSUMEXP, LOGSUMEXP_GRADIENT, STATISTICS, joined(gradient, PRECISION),
            batch_long * o_batch + long(head) * o_head, o_row, batch_head, first_query, queries, padded,
            batches * heads, HEAD_DIM, BLOCK_D, BLOCK_M, EVEN_QUERIES, HAS_LOGSUMEXP_GRADIENT,
        )  # fmt: skip
    else:
        statistics = STATISTICS + long(batch_head) * padded + query
        logsumexp = tl.load(statistics)
        delta = tl.load(statistics + long(batches) * heads * padded)
    k_offset = batch_long * k_batch + long(kv_head) * k_head
    v_offset = batch_long * v_batch + long(kv_head) * v_head
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
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
            dq = _visit_keys(
                dq, q, gradient, logsumexp, delta, K, V, k_offset, v_offset, batch, batch_head, kv_head, k_row, v_row,
                first_query, query, document_first, document_after, begins[side], ends[side], queries, keys, window,
                scale_log2, cap, SEEDS, dropped, slope, bias, bias_row, unit,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, side != 2, EVEN_KEYS, PRECISION, TMA,
                DQ.dtype.element_ty.primitive_bitwidth == 16,
            )  # fmt: skip
    store_tile(
        DQ, batch_long * dq_batch + long(head) * dq_head, dq * scale, first_query, queries, dq_row,
        BLOCK_M, HEAD_DIM, BLOCK_D, EVEN_QUERIES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["together"])
def flash_joint_gradients(
    Q, K, V, GRADIENT, Q2, K2, V2, GRADIENT2, DQ, DK, DV, STATISTICS, STATISTICS2, BOUNDS, SLOPES, BIAS,
    scale, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    bias_batch, bias_head, bias_row, batches, kv_heads, queries, keys, window, padded, together,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M2: tl.constexpr, BLOCK_N2: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr,
    EVEN_QUERIES2: tl.constexpr, EVEN_KEYS2: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    ROWS_FIRST: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute dK, dV and dQ in one launch; programs over keys come first.

    Q2 to GRADIENT2 are descriptors of the tiles that programs over queries load. STATISTICS2 is a pointer.
    """
    key_programs = tl.cdiv(keys, BLOCK_N) * batches * kv_heads * (GROUP if SHARED else 1)
    if tl.program_id(0) < key_programs:
        flash_key_gradients(
            Q, K, V, GRADIENT, DQ, DK, DV, STATISTICS, BOUNDS, SLOPES, BIAS, scale, scale_log2, cap, SEEDS, dropped,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
            dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
            bias_batch, bias_head, bias_row,
            batches, kv_heads, queries, keys, window, padded, together, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
            CAUSAL, WINDOW, EVEN_QUERIES, EVEN_KEYS, PRECISION, TMA, ROWS_FIRST, False, False, SHARED,
        )  # fmt: skip
    else:
        flash_query_gradients(
            Q2, K2, V2, GRADIENT2, DQ, STATISTICS2, STATISTICS2, DQ, STATISTICS2, BOUNDS, SLOPES, BIAS,
            scale, scale_log2, cap, SEEDS, dropped,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
            0, 0, 0, dq_batch, dq_head, dq_row, bias_batch, bias_head, bias_row,
            batches, kv_heads, queries, keys, window, padded, together,
            GROUP, HEAD_DIM, BLOCK_D, BLOCK_M2, BLOCK_N2, CAUSAL, WINDOW, EVEN_QUERIES2, EVEN_KEYS2, PRECISION, TMA,
            ROWS_FIRST, False, False, key_programs,
        )  # fmt: skip


@triton.jit
def _score_gradients(
    Q, K, V, GRADIENT, STATISTICS, BOUNDS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    bias_batch, bias_head, bias_row, batch, head, first_query, first_key,
    batches, heads, queries, keys, window, padded,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dS of one tile, (BLOCK, BLOCK), zero where a query does not see a key."""
    batch_long = long(batch)
    kv_head = head // GROUP
    query = first_query + tl.arange(0, BLOCK)
    key = first_key + tl.arange(0, BLOCK)
    mask = visible(query[:, None], key[None, :], keys, window, CAUSAL, WINDOW) & (query < queries)[:, None]
    if BOUNDS is not None:
        document_first, document_after = document_of(BOUNDS, batch, batches, query, queries)
        mask = in_document(mask, key, document_first, document_after)
    q = load_operand(
        Q, batch_long * q_batch + long(head) * q_head, batch, head, first_query, queries, q_row,
        BLOCK, HEAD_DIM, BLOCK_D, False, False, PRECISION,
    )  # fmt: skip
    k = load_operand(
        K, batch_long * k_batch + long(kv_head) * k_head, batch, kv_head, first_key, keys, k_row,
        BLOCK, HEAD_DIM, BLOCK_D, False, False, PRECISION,
    )  # fmt: skip
    # Split operands are of 16 bits, too, and need the accurate tanh.
    accurate: tl.constexpr = is_split(PRECISION) or Q.dtype.element_ty.primitive_bitwidth != 16
    scores = capped(product(q, transposed(k, PRECISION), None, PRECISION), cap, accurate)
    slope = None
    bias = None
    unit = LOG2E / scale_log2
    if SLOPES is not None:
        slope = tl.load(SLOPES + head) * unit
    if BIAS is not None:
        bias = first_of_bias(BIAS, batch, head, queries, bias_batch, bias_head, bias_row)
    scores = with_bias(scores, query[:, None], key[None, :], queries, keys, slope, bias, bias_row, unit)
    statistics = STATISTICS + long(batch * heads + head) * padded + query
    logsumexp = tl.load(statistics, mask=query < queries, other=float("inf"))
    delta = tl.load(statistics + long(batches) * heads * padded, mask=query < queries, other=0.0)
    weights = tl.where(mask, tl.math.exp2(scores * scale_log2 - logsumexp[:, None]), 0.0)
    v = load_operand(
        V, batch_long * v_batch + long(kv_head) * v_head, batch, kv_head, first_key, keys, v_row,
        BLOCK, HEAD_DIM, BLOCK_D, False, False, PRECISION,
    )  # fmt: skip
    gradient = load_operand(
        GRADIENT, batch_long * g_batch + long(head) * g_head, batch, head, first_query, queries, g_row,
        BLOCK, HEAD_DIM, BLOCK_D, False, False, PRECISION,
    )  # fmt: skip
    dp = product(gradient, transposed(v, PRECISION), None, PRECISION)
    if SEEDS is not None:
        words = dropped_words(
            SEEDS, dropped, batch * heads + head, 0, first_query, first_key, queries, keys, BLOCK, BLOCK, False
        )
        dp = without_dropped(dp, words, SEEDS, first_query, first_key, BLOCK, BLOCK, False)
        dp *= 1 / chance_kept(dropped)
    return weights * (dp - delta[:, None])


@triton.jit
def flash_bias_gradients(
    Q, K, V, GRADIENT, STATISTICS, BOUNDS, SLOPES, BIAS, TARGET, scale_log2, cap, SEEDS, dropped,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    bias_batch, bias_head, bias_row, batches, kv_heads, queries, keys, window, padded,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, DISTANCES: tl.constexpr,
    OF_BATCHES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of what is added to scores: sums of dS, in a fixed order.

    A program has one tile of a head, (BLOCK, BLOCK), and sums it over the batches, unless each has its own
    (OF_BATCHES): TARGET is (1 or B, H, S, T). With DISTANCES it sums all tiles on one diagonal of tiles, then its own
    diagonals: TARGET is fp32 (H, diagonals of tiles, 2, BLOCK), of j - i - BLOCK * (tile of keys - tile of queries)
    from -BLOCK to BLOCK - 1.
    """
    row_tiles = tl.cdiv(queries, BLOCK)
    key_tiles = tl.cdiv(keys, BLOCK)
    heads = kv_heads * GROUP
    place = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    first_batch = 0
    diagonals = row_tiles + key_tiles - 1
    diagonal = 0
    if DISTANCES:
        # The longest diagonals come first, and those above the main one, which a causal mask hides, last.
        head = program % heads
        diagonal = program // heads
        diagonal = tl.where(diagonal < row_tiles, row_tiles - 1 - diagonal, diagonal)
        row_tile = tl.maximum(0, row_tiles - 1 - diagonal)
        key_tile = row_tile + diagonal - (row_tiles - 1)
        length = tl.minimum(row_tiles - row_tile, key_tiles - key_tile)
        count = length * batches
    else:
        key_tile = program % key_tiles
        row_tile = program // key_tiles % row_tiles
        first_batch = program // (key_tiles * row_tiles) // heads
        head = program // (key_tiles * row_tiles) % heads
        length = 1
        count = 1 if OF_BATCHES else batches
    # The least and the largest distance of a key from a query in the tile.
    least = (key_tile - row_tile) * BLOCK - (BLOCK - 1)
    most = least + 2 * (BLOCK - 1)
    if CAUSAL:
        count = tl.where(least > 0, 0, count)
    if WINDOW:
        count = tl.where(-most >= window, 0, count)
        if not CAUSAL:
            count = tl.where(least >= window, 0, count)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for turn in range(count):
        batch = first_batch + turn // length
        total += _score_gradients(
            Q, K, V, GRADIENT, STATISTICS, BOUNDS, SLOPES, BIAS, scale_log2, cap, SEEDS, dropped,
            q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
            bias_batch, bias_head, bias_row, batch, head, (row_tile + turn % length) * BLOCK,
            (key_tile + turn % length) * BLOCK, batches, heads, queries, keys, window, padded,
            GROUP, HEAD_DIM, BLOCK_D, BLOCK, CAUSAL, WINDOW, PRECISION,
        )  # fmt: skip
    if DISTANCES:
        # Row a of the tile, turned left by a, has the distances 0, 1, ..., then those below zero, -BLOCK + ... up.
        turned = (place[:, None] + place[None, :]) % BLOCK
        ahead = (place[:, None] + place[None, :]) < BLOCK
        total = tl.gather(total, turned, 1)
        target = TARGET + (long(head) * diagonals + diagonal) * (2 * BLOCK) + place
        tl.store(target, tl.sum(tl.where(ahead, 0.0, total), 0))
        tl.store(target + BLOCK, tl.sum(tl.where(ahead, total, 0.0), 0))
    else:
        target = TARGET + long(program // (key_tiles * row_tiles)) * queries * keys
        target = target + (long(row_tile * BLOCK) * keys + key_tile * BLOCK) + place[:, None] * keys + place[None, :]
        inside = (row_tile * BLOCK + place < queries)[:, None] & (key_tile * BLOCK + place < keys)[None, :]
        tl.store(target, total.to(TARGET.dtype.element_ty), mask=inside)


# ---- the ends of a backward pass whose kernels sum in global memory: sums in fp32 become gradients in their own dtype


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


@triton.jit(do_not_specialize=["keys", "kv_heads"])
def flash_add_shares(
    OF_DK, OF_DV, DK, DV, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, kv_heads, keys,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Add up what the query heads of a group left of dK (axis 2 is 0) and dV (1): shares (B, H, T, D), contiguous.
    Axis 0: BLOCK_ROWS keys each; axis 1: a head of keys."""
    first = tl.program_id(0) * BLOCK_ROWS
    batch_head = tl.program_id(1)
    if tl.program_id(2) == 0:
        _add_shares(
            OF_DK, DK, dk_batch, dk_head, dk_row, batch_head, first, kv_heads, keys,
            GROUP, HEAD_DIM, BLOCK_D, BLOCK_ROWS,
        )  # fmt: skip
    else:
        _add_shares(
            OF_DV, DV, dv_batch, dv_head, dv_row, batch_head, first, kv_heads, keys,
            GROUP, HEAD_DIM, BLOCK_D, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit
def _add_shares(
    SHARES, TARGET, batch_step, head_step, row_step, batch_head, first, kv_heads, keys,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for member in range(GROUP):
        place = (long(batch_head) * GROUP + member) * keys * HEAD_DIM
        share = load_tile(SHARES, place, 0, 0, first, keys, HEAD_DIM, BLOCK_ROWS, HEAD_DIM, BLOCK_D, False, False)
        total += share.to(tl.float32)
    place = long(batch_head // kv_heads) * batch_step + long(batch_head % kv_heads) * head_step
    store_tile(TARGET, place, total, first, keys, row_step, BLOCK_ROWS, HEAD_DIM, BLOCK_D, False)
