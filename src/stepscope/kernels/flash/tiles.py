"""Shared parts of the FlashAttention kernels: the tiles that a row or column of the scores visits, and their loads.

Scores are S x T (query positions x key positions). A query i sees a key j if

    causal:            j <= i            (top-left alignment, like PyTorch's `is_causal`)
    window w:          i - j < w, and without causal also j - i < w
    documents:         i and j lie in one document; S = T

BOUNDS, (2, B, S) int32, has for each position the first one of its document, and the one after its last. It is None,
and nothing of it is compiled, if there are no documents (`kernels/documents.py`).

A visit has up to three loops: masked tiles on either side, and the tiles between, where every pair is visible. Only
masked tiles need comparisons; tiles where nothing is visible are never loaded. The loop that is often empty comes last.
ptxas lets matrix products overlap only if no path around a loop puts constants into their sums (its warning C7515).
"""

import triton
import triton.language as tl

FIRST_COLUMN = tl.constexpr(0)


@triton.jit
def long(number):
    """A 64-bit scalar. Triton makes arguments equal to 1 constants; its interpreter makes loop counters ints."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def head_and_row(program, rows, BLOCK_ROWS: tl.constexpr):
    """The index of a program's head, counted through the batches, and its first row. A program has one tile of a head.

    The grid's first dimension counts both, since there may be more than 65535 heads. The first dimension may be
    2^31 - 1 long, the others only 65535.
    """
    tiles = tl.cdiv(rows, BLOCK_ROWS)
    return program // tiles, program % tiles * BLOCK_ROWS


@triton.jit
def turn_of(program, tiles, batch_heads, together, ROWS_FIRST: tl.constexpr):
    """The head of a program, counted through the batches, and its tile among the `tiles` of that head.

    With ROWS_FIRST the tiles of one head follow one another, so that what they share stays in L2. Without it as many
    heads as `together` take turns, then the next ones do: under a causal mask their heavy tiles come before the light
    ones of any.
    """
    if ROWS_FIRST:
        return program // tiles, program % tiles
    else:
        first = program // (tiles * together) * together
        taking = tl.minimum(together, batch_heads - first)
        rest = program - first * tiles
        return first + rest % taking, rest // taking


@triton.jit
def load_tile(
    source, offset, batch, head, first, limit, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    COLUMN: tl.constexpr = FIRST_COLUMN,
):  # fmt: skip
    """The rows [first, first + ROWS) of one head, (ROWS, BLOCK_D), zero beyond `limit` and HEAD_DIM.

    source: a pointer (offset in elements to the head's first row), or, with TMA, a (B, H, rows, D) tensor descriptor.
    COLUMN: the column of a row at which the head dimension starts.
    """
    if TMA:
        return source.load([batch, head, first, COLUMN]).reshape(ROWS, BLOCK_D)
    else:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK_D)
        # 64 bits once per tile: a head of many long rows may exceed 2^31 elements, but the tile itself does not.
        start = source + (offset + long(first) * stride + COLUMN)
        pointers = start + row[:, None] * stride + column[None, :]
        if EVEN and HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        elif EVEN:
            return tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=(first + row < limit)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(first + row < limit)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    target, offset, tile, first, limit, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store a tile through a pointer, as the inverse of `load_tile`, in the target's dtype."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    pointers = target + (offset + long(first) * stride) + row[:, None] * stride + column[None, :]
    value = tile.to(target.dtype.element_ty)
    if EVEN and HEAD_DIM == BLOCK_D:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(first + row < limit)[:, None] & (column < HEAD_DIM)[None, :])


@triton.jit
def visible(query, key, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """True where a query sees a key; query and key broadcast against each other."""
    seen = key < keys
    if CAUSAL:
        seen = seen & (key <= query)
    if WINDOW:
        seen = seen & (query - key < window)
        if not CAUSAL:
            seen = seen & (key - query < window)
    return seen


@triton.jit
def document_of(BOUNDS, batch, batches, position, length):
    """The first position of the document of each position, and the one after its last; both 0 beyond the sequence."""
    first = BOUNDS + long(batch) * length + position
    inside = position < length
    return tl.load(first, mask=inside, other=0), tl.load(first + long(batches) * length, mask=inside, other=0)


@triton.jit
def in_document(seen, column, first, after):
    """`seen`, but False where a column's position is outside the row's document [first, after); first None: `seen`.

    Documents are symmetric: rows may be queries and columns keys, or the reverse.
    """
    if first is None:
        return seen
    else:
        return seen & (column[None, :] >= first[:, None]) & (column[None, :] < after[:, None])


@triton.jit
def keys_visited(
    BOUNDS, batch, batches, first_query, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys that one tile of queries visits: (begin, full_begin, full_end, end), all but `end` multiples of BLOCK_N.

    Visit [begin, full_begin) masked, [full_begin, full_end) unmasked, [full_end, end) masked. Without WINDOW and BOUNDS
    the first range is empty, and begin = 0.
    """
    last_query = tl.minimum(first_query + BLOCK_M, queries) - 1
    begin = 0
    full_begin = 0
    end = keys
    full_end = keys
    if CAUSAL:
        end = tl.minimum(keys, last_query + 1)
        full_end = tl.minimum(keys, first_query + 1)
    if WINDOW:
        begin = tl.maximum(0, first_query - window + 1) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(0, last_query - window + 1), BLOCK_N) * BLOCK_N
        if not CAUSAL:
            end = tl.minimum(keys, last_query + window)
            full_end = tl.minimum(keys, first_query + window)
    if BOUNDS is not None:
        # Bounds of the tile's first query, which may lie beyond the sequence, and of its last.
        start = tl.minimum(first_query, queries - 1)
        first, first_after = document_of(BOUNDS, batch, batches, start, queries)  # pyright: ignore
        last_first, after = document_of(BOUNDS, batch, batches, last_query, queries)  # pyright: ignore
        begin = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
        full_begin = tl.maximum(full_begin, tl.cdiv(last_first, BLOCK_N) * BLOCK_N)
        if not CAUSAL:
            end = tl.minimum(end, after)
            full_end = tl.minimum(full_end, first_after)
    if WINDOW or BOUNDS is not None:
        full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
    full_end = full_end // BLOCK_N * BLOCK_N
    if WINDOW or BOUNDS is not None:
        full_end = tl.maximum(full_begin, full_end)
    return begin, full_begin, full_end, end


@triton.jit
def queries_visiting(
    BOUNDS, batch, batches, first_key, queries, keys, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The queries that one tile of keys visits: (begin, full_begin, full_end, end), as in `keys_visited`.

    Queries beyond the sequence need no mask: their logsumexp is read as infinite, so their weights are zero. So without
    WINDOW and BOUNDS, full_end = end.
    """
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    begin = 0
    full_begin = 0
    end = queries
    full_end = queries
    if not CAUSAL and not WINDOW and BOUNDS is None:
        # No path leads around this loop. The module's docstring says why.
        tl.assume(queries > 0)
    if CAUSAL:
        begin = first_key // BLOCK_M * BLOCK_M
        full_begin = tl.cdiv(last_key, BLOCK_M) * BLOCK_M
    if WINDOW:
        if not CAUSAL:
            begin = tl.maximum(0, first_key - window + 1) // BLOCK_M * BLOCK_M
            full_begin = tl.cdiv(tl.maximum(0, last_key - window + 1), BLOCK_M) * BLOCK_M
        end = tl.minimum(queries, last_key + window)
        if first_key + window < queries:
            full_end = (first_key + window) // BLOCK_M * BLOCK_M
    if BOUNDS is not None:
        first, first_after = document_of(BOUNDS, batch, batches, first_key, keys)  # pyright: ignore
        last_first, after = document_of(BOUNDS, batch, batches, last_key, keys)  # pyright: ignore
        if not CAUSAL:
            begin = tl.maximum(begin, first // BLOCK_M * BLOCK_M)
            full_begin = tl.maximum(full_begin, tl.cdiv(last_first, BLOCK_M) * BLOCK_M)
        end = tl.minimum(end, after)
        full_end = tl.minimum(full_end, first_after // BLOCK_M * BLOCK_M)
    full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_M) * BLOCK_M)
    full_end = tl.maximum(full_begin, full_end)
    return begin, full_begin, full_end, end
