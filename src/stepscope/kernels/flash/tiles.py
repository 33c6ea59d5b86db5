"""Shared parts of the FlashAttention kernels: the tiles that a row or column of the scores visits, and their loads.

Scores are S x T (query positions x key positions). A query i sees a key j if

    causal:            j <= i            (top-left alignment, like PyTorch's `is_causal`)
    window w:          i - j < w, and without causal also j - i < w
    documents:         i and j lie in one document; S = T

Between the product q k^T and the softmax, scores may be changed, with c = scale * log2(e) unless said otherwise:

    cap        x = tanh(cap q k) and c = softcap * log2(e), where cap = scale / softcap; None without a softcap
    SLOPES     (H,) fp32, of ALiBi (Press 2021, arXiv:2108.12409): the score less slope |i - j|; None without
    BIAS       added to the score: the number at bias_batch b + bias_head h + bias_row i + j, or, with a row of -1, at
               S - 1 + j - i of its head (Raffel 2019, arXiv:1910.10683); -inf hides the key; None without
    SINKS      (H,) fp32: a score that every row has besides, whose value is zero (Xiao 2023, arXiv:2309.17453); None
               without

Dropout sets a weight to zero with the probability of `dropped` in 256, and divides the others by that of being kept, so
that a weight's mean is exact. SEEDS, (2,) int64, a seed and an offset of 32 bits, choose which: they are None, and
nothing of it is compiled, without. Eight bits of a weight are drawn by Philox 4x32 of seven rounds, which passes
BigCrush (Salmon 2011, doi:10.1145/2063384.2063405), with the counters (query, 2 (key // 32) + 0 or 1, head
counted through the batches, offset). Where SEEDS is (words,) int32, `flash_draw` has drawn already.

BOUNDS, (2, B, S) int32, has for each position the first one of its document, and the one after its last. It is None,
and nothing of it is compiled, if there are no documents (`kernels/documents.py`).

A visit has up to three loops: masked tiles on either side, and the tiles between, where every pair is visible. Only
masked tiles need comparisons; tiles where nothing is visible are never loaded. The loop that is often empty comes last.
ptxas lets matrix products overlap only if no path around a loop puts constants into their sums (its warning C7515).
"""

import triton
import triton.language as tl

from stepscope.kernels.flash.configuration import LARGEST_TILE
from stepscope.kernels.launching import LOG2E, interpreted, philox

FIRST_COLUMN = tl.constexpr(0)
COMPILED = tl.constexpr(not interpreted())
LONGEST = tl.constexpr(LARGEST_TILE)


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
    mask = key < keys
    if CAUSAL:
        mask = mask & (key <= query)
    if WINDOW:
        mask = mask & (query - key < window)
        if not CAUSAL:
            mask = mask & (key - query < window)
    return mask


@triton.jit
def capped(scores, cap, ACCURATE: tl.constexpr):
    """tanh(scores * cap); cap None: the scores themselves.

    tanh(x) is (1 - e) / (1 + e) of e = exp(-2 |x|), which is off by 2^-25 near zero. ACCURATE takes the series of x up
    to x^9 below 1/4, where what it leaves out is less than fp32's rounding.
    """
    if cap is None:
        return scores
    else:
        x = scores * cap
        e = tl.math.exp2(tl.abs(x) * (-2 * LOG2E))
        large = (1 - e) / (1 + e)
        large = tl.where(x < 0, -large, large)
        if ACCURATE:
            square = x * x
            series = 62.0 / 2835 * square - 17.0 / 315
            series = ((series * square + 2.0 / 15) * square - 1.0 / 3) * square * x + x
            return tl.where(tl.abs(x) < 0.25, series, large)
        else:
            return large


@triton.jit
def first_of_bias(BIAS, batch, head, queries, bias_batch, bias_head, bias_row):
    """A pointer to what is added to the score of a head's first query and first key."""
    return BIAS + (long(batch) * bias_batch + long(head) * bias_head + tl.where(bias_row < 0, queries - 1, 0))


@triton.jit
def with_bias(scores, query, key, queries, keys, slope, bias, bias_row, unit):
    """Scores less the slope for each position between a query and a key, and with a head's bias; neither where None.

    query and key broadcast against each other. unit: what one of bias is in a product of a query and a key.
    """
    if slope is not None:
        scores = scores - slope * tl.abs(query - key).to(tl.float32)
    if bias is not None:
        # 64 bits for each row: offsets in a tile took more registers.
        numbers = bias + query.to(tl.int64) * bias_row + key
        scores += tl.load(numbers, mask=(query < queries) & (key < keys), other=0.0).to(tl.float32) * unit
    return scores


@triton.jit
def without_dropped(
    tile, words, SEEDS, first_query, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """A tile in fp32, (QUERIES, KEYS), or (KEYS, QUERIES) if TRANSPOSED, with zeros where dropout takes the weight.

    words: those of `dropped_words`.
    """
    if TRANSPOSED and SEEDS.dtype.element_ty == tl.int32:
        return _without_dropped(tile, words, first_query, KEYS, QUERIES, False)
    else:
        return _without_dropped(tile, words, first_key, QUERIES, KEYS, TRANSPOSED)


@triton.jit
def _without_dropped(tile, words, first_key, QUERIES: tl.constexpr, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr):
    GROUPS: tl.constexpr = (KEYS + 31) // 32
    LENGTH: tl.constexpr = KEYS // GROUPS
    place = tl.arange(0, LENGTH)
    if LENGTH < 32:
        place += first_key % 32
    if TRANSPOSED:
        words = words[:, None, :].broadcast_to(GROUPS, LENGTH, QUERIES).reshape(KEYS, QUERIES)
        place = place[None, :, None].broadcast_to(GROUPS, LENGTH, QUERIES).reshape(KEYS, QUERIES)
    else:
        words = words[:, :, None].broadcast_to(QUERIES, GROUPS, LENGTH).reshape(QUERIES, KEYS)
        place = place[None, None, :].broadcast_to(QUERIES, GROUPS, LENGTH).reshape(QUERIES, KEYS)
        # A thread's keys in a tile of scores agree in these two bits of their places. Without them a weight's bit is
        # the same in every thread, and one instruction tests two of a word, not one.
        words = words >> (place & 6)
        place = place & 25
    if COMPILED:
        # Written as `tl.where`, all tests of a tile come before its selections, and their results spill.
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.eq.s32 p, t, 0; selp.f32 $0, $1, 0f00000000, p; }",
            "=f,f,r,r",
            [tile, words, 1 << place],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.where((words & (1 << place)) == 0, tile, 0.0)


@triton.jit
def words_again(words, dropped):
    """`words`, unchanged, which the compiler takes for others: else it keeps what each bit was from one test to the
    next, in registers that no kernel has."""
    return words ^ (dropped >> 8)


@triton.jit
def chance_kept(dropped):
    """The probability that dropout keeps a weight."""
    return (256 - dropped) / 256


@triton.jit
def dropped_words(
    SEEDS, dropped, batch_head, batch_heads, first_query, first_key, queries, keys,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """What dropout takes of a tile: a word for each query and group of 32 keys, (QUERIES, groups).

    TRANSPOSED: words of `flash_draw` are for each key and group of queries, (KEYS, groups); others are transposed.
    """
    query = first_query + tl.arange(0, QUERIES)
    group = tl.arange(0, (KEYS + 31) // 32)
    if SEEDS.dtype.element_ty == tl.int32:
        if TRANSPOSED:
            words = SEEDS + _words_of(batch_heads, queries, keys)
            return _load_words(words, batch_head, first_key, first_query, keys, queries, KEYS, QUERIES)
        else:
            return _load_words(SEEDS, batch_head, first_query, first_key, queries, keys, QUERIES, KEYS)
    elif TRANSPOSED:
        taken = _words(SEEDS, dropped, batch_head, query[None, :], first_key // 32, group[:, None])
        # It moves nothing. Without it Triton lets each thread draw the words of all its weights, as others do, too.
        return tl.gather(taken, query[None, :] * 0 + group[:, None], 0)
    else:
        taken = _words(SEEDS, dropped, batch_head, query[:, None], first_key // 32, group[None, :])
        return tl.gather(taken, query[:, None] * 0 + group[None, :], 1)


@triton.jit
def _words_of(heads, rows, columns):
    """How many words so many heads have: a row is padded, and so is each of its groups of columns."""
    return long(heads) * (tl.cdiv(rows, LONGEST) * LONGEST) * (tl.cdiv(columns, LONGEST) * (LONGEST // 32))


@triton.jit
def _load_words(WORDS, batch_head, first_row, first_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A word for each row and group of 32 columns, (ROWS, groups). In memory words of a group lie side by side."""
    row = tl.arange(0, ROWS)[:, None]
    group = tl.arange(0, (COLUMNS + 31) // 32)[None, :]
    padded = tl.cdiv(rows, LONGEST) * LONGEST
    first = WORDS + _words_of(batch_head, rows, columns) + long(first_column // 32) * padded + first_row
    pointers = first + (group * padded + row)
    if COMPILED:
        # Triton takes a load to a layout of its own, and through shared memory from there; it moves no arithmetic.
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.load(pointers)


@triton.jit
def _words(SEEDS, dropped, batch_head, query, first_group, group):
    """A word for each query and group of 32 keys, int32: a bit is 1 where dropout takes the key's weight.

    Eight random words hold a number of each key, its lowest bit in the first. From there up, `taken` says whether what
    the bits so far make up reaches 256 - dropped: the majority of the bit, that of dropped, and what was said before.
    """
    zeros = query * 0 + group * 0
    offset = zeros + tl.load(SEEDS + 1).to(tl.int32)
    taken = zeros
    for half in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
        counter = zeros + 2 * (first_group + group) + half
        drawn = philox(tl.load(SEEDS), zeros + query, counter, zeros + batch_head, offset)
        for place in tl.static_range(4):
            word = drawn[place].to(tl.int32, bitcast=True)
            digit = ((zeros + dropped) << (31 - 4 * half - place)) >> 31
            taken = (word & taken) | (digit & (word | taken))
    return taken


@triton.jit
def flash_draw(
    SEEDS, WORDS, dropped, batch_heads, queries, keys,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Draw what dropout takes, for backward's kernels, into WORDS, int32: of queries, then of keys (`_load_words`).

    One program per QUERIES queries of a head and GROUPS groups of 32 keys. What a causal mask hides stays undrawn.
    """
    padded = tl.cdiv(queries, LONGEST) * LONGEST
    padded_keys = tl.cdiv(keys, LONGEST) * LONGEST
    batch_head, first_query = head_and_row(tl.program_id(0), queries, QUERIES)  # pyright: ignore
    first_group = tl.program_id(1) * GROUPS
    if not CAUSAL or first_group * 32 < first_query + QUERIES:
        query = tl.arange(0, QUERIES)
        group = tl.arange(0, GROUPS)
        words = _words(SEEDS, dropped, batch_head, first_query + query[None, :], first_group, group[:, None])
        first = WORDS + _words_of(batch_head, queries, keys) + long(first_group) * padded + first_query
        tl.store(first + (group[:, None] * padded + query[None, :]), words)
        words = words.reshape(GROUPS, QUERIES // 32, 32)
        words = _turned(words, 16, 0x0000FFFF)
        words = _turned(words, 8, 0x00FF00FF)
        words = _turned(words, 4, 0x0F0F0F0F)
        words = _turned(words, 2, 0x33333333)
        words = _turned(words, 1, 0x55555555)
        first = WORDS + _words_of(batch_heads, queries, keys) + _words_of(batch_head, keys, queries)
        first += long(first_query // 32) * padded_keys + first_group * 32
        query_group = tl.arange(0, QUERIES // 32)[None, :, None]
        key = group[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
        tl.store(first + (query_group * padded_keys + key), words)


@triton.jit
def _turned(words, STEP: tl.constexpr, LOW: tl.constexpr):
    """A step of the transposition of 32 words of 32 bits along the last axis: words STEP apart swap the bits off the
    diagonal, of which LOW has the lower ones."""
    place = tl.arange(0, 32)[None, None, :]
    upper = (place & STEP) == 0
    other = tl.gather(words, (place ^ STEP).broadcast_to(words.shape), 2).to(tl.uint32, bitcast=True)
    turn = tl.where(upper, STEP, 32 - STEP).to(tl.uint32)
    other = (other << turn) | (other >> (32 - turn))
    own = tl.where(upper, LOW, LOW << STEP).to(tl.uint32)
    return ((words.to(tl.uint32, bitcast=True) & own) | (other & (own ^ 0xFFFFFFFF))).to(tl.int32, bitcast=True)


@triton.jit
def document_of(BOUNDS, batch, batches, position, length):
    """The first position of the document of each position, and the one after its last; both 0 beyond the sequence."""
    first = BOUNDS + long(batch) * length + position
    inside = position < length
    return tl.load(first, mask=inside, other=0), tl.load(first + long(batches) * length, mask=inside, other=0)


@triton.jit
def in_document(mask, column, first, after):
    """`mask`, but False where a column's position is outside the row's document [first, after); first None: `mask`.

    Documents are symmetric: rows may be queries and columns keys, or the reverse.
    """
    if first is None:
        return mask
    else:
        return mask & (column[None, :] >= first[:, None]) & (column[None, :] < after[:, None])


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


# Matrix products, and the form of their operands.
#
# An operand is a tile. In the precision "bf16x6" it is three tiles of bf16 whose sum is a tile of fp32,
#
#     x = high + middle + low        high = bf16(x), middle = bf16(x - high), low = bf16(x - high - middle),
#
# with 8 bits each, together fp32's 24. A product is six products of bf16 (Henry, Tang, Heinecke 2019,
# arXiv:1904.06376); the products left out are 2^-24 of the largest. `flash_split_operands` splits operands from memory
# before the loops: a row has high, middle and low side by side, (B, H, rows, 3 BLOCK_D), with zeros beyond the head
# dimension. Compared with three products of TF32 ("tf32x3", which Triton splits in every iteration), operands have half
# the width, and the tensor cores read them transposed at no cost. A number that is infinite, or above 3.39e38, makes
# its results NaN.


PARTS = 3
"""The number of parts of a split operand."""


def splits(precision: str) -> bool:
    """Whether this precision splits an operand into parts. Kernels call `is_split`, which costs the host more."""
    return "bf16x6" in precision


is_split = triton.constexpr_function(splits)


@triton.constexpr_function
def _is_upcast(precision):
    return precision.startswith("upcast")


@triton.jit
def _split(tile):
    high = tile.to(tl.bfloat16)
    rest = tile - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def _dot(left, right, accumulator, PRECISION: tl.constexpr):
    if _is_upcast(PRECISION):
        return tl.dot(left.to(tl.float32), right.to(tl.float32), accumulator, input_precision="ieee")
    elif is_split(PRECISION):
        return tl.dot(left, right, accumulator)
    else:
        return tl.dot(left, right, accumulator, input_precision=PRECISION)


@triton.jit
def product(left, right, accumulator, PRECISION: tl.constexpr):
    """left @ right + accumulator in fp32.

    PRECISION is Triton's input_precision, or "bf16x6". "upcast", alone or as a prefix, is for Triton's interpreter,
    which treats the bits of bf16 as integers. Products of bf16 are exact in fp32.
    """
    if is_split(PRECISION):
        # Small products come first, and the tile's sum is separate from the accumulator, since tensor cores truncate
        # sums and do not round. Summed in place, the errors of dK and dV on an H200 were 6 and 21 times the efficient
        # kernel's, not 0.5 and 1.
        total = _dot(left[1], right[1], None, PRECISION)
        total = _dot(left[2], right[0], total, PRECISION)
        total = _dot(left[0], right[2], total, PRECISION)
        total = _dot(left[1], right[0], total, PRECISION)
        total = _dot(left[0], right[1], total, PRECISION)
        total = _dot(left[0], right[0], total, PRECISION)
        if accumulator is None:
            return total
        else:
            return accumulator + total
    else:
        return _dot(left, right, accumulator, PRECISION)


@triton.jit
def load_operand(
    source, offset, batch, head, first, limit, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load a tile as an operand, with all its parts if it is split."""
    if is_split(PRECISION):
        high = load_tile(source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA)
        middle = load_tile(
            source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA, BLOCK_D
        )
        low = load_tile(
            source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA, 2 * BLOCK_D
        )
        return high, middle, low
    else:
        return load_tile(source, offset, batch, head, first, limit, stride, ROWS, HEAD_DIM, BLOCK_D, EVEN, TMA)


@triton.jit
def as_operand(tile, other, PRECISION: tl.constexpr):
    """A tile of fp32 as an operand of the precision, or of the dtype of `other`."""
    if is_split(PRECISION):
        return _split(tile)
    else:
        return tile.to(other.dtype)


@triton.jit
def joined(operand, PRECISION: tl.constexpr):
    """The tile whose parts make up an operand."""
    if is_split(PRECISION):
        return operand[0].to(tl.float32) + (operand[1].to(tl.float32) + operand[2].to(tl.float32))
    else:
        return operand


@triton.jit
def transposed(operand, PRECISION: tl.constexpr):
    """An operand's transpose."""
    if is_split(PRECISION):
        return tl.trans(operand[0]), tl.trans(operand[1]), tl.trans(operand[2])
    else:
        return tl.trans(operand)


@triton.jit
def _negated(tile):
    # Negated in fp32, since Triton's interpreter treats the bits of bf16 as integers. Nothing is rounded.
    return (-tile.to(tl.float32)).to(tile.dtype)


@triton.jit
def negated(operand, PRECISION: tl.constexpr):
    """An operand times -1."""
    if is_split(PRECISION):
        return _negated(operand[0]), _negated(operand[1]), _negated(operand[2])
    else:
        return _negated(operand)


@triton.jit
def flash_split_operands(
    FIRST, SECOND, FIRST_PARTS, SECOND_PARTS,
    first_batch, first_head, first_row, second_batch, second_head, second_row, heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Split (B, H, rows, D) fp32 into (B, H, rows, 3 BLOCK_D) bf16, contiguous; program_id(1) chooses one of two."""
    batch_head, first = head_and_row(tl.program_id(0), rows, BLOCK_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
    batch = long(batch_head // heads)
    head = batch_head % heads
    if tl.program_id(1) == 0:
        source = FIRST + (batch * first_batch + long(head) * first_head)
        stride = first_row
        parts = FIRST_PARTS
    else:
        source = SECOND + (batch * second_batch + long(head) * second_head)
        stride = second_row
        parts = SECOND_PARTS
    tile = load_tile(source, 0, 0, 0, first, rows, stride, BLOCK_ROWS, HEAD_DIM, BLOCK_D, False, False)
    high, middle, low = _split(tile)
    row = first + tl.arange(0, BLOCK_ROWS)
    pointers = parts + (long(batch_head) * rows + first) * (3 * BLOCK_D)
    pointers = pointers + tl.arange(0, BLOCK_ROWS)[:, None] * (3 * BLOCK_D) + tl.arange(0, BLOCK_D)[None, :]
    inside = (row < rows)[:, None]
    tl.store(pointers, high, mask=inside)
    tl.store(pointers + BLOCK_D, middle, mask=inside)
    tl.store(pointers + 2 * BLOCK_D, low, mask=inside)
