"""Fused attention: which keys its queries see, and the FLOPs and bytes of forward and backward."""

from dataclasses import dataclass
from typing import Literal

from stepscope.core.formulas import CausalConvention, Work, operations
from stepscope.core.formulas.operations import AttentionSizes
from stepscope.core.formulas.operators.calls import Operand, OperatorCall, Unknown

Sight = Literal["causal", "not causal", "masked", "assumed causal", "assumed not causal"]
"""Which keys a query sees. `masked`: those of a mask or bias, whose zeros are not recorded. `assumed`: the record does
not say. Attention of as many queries as keys is then taken for a decoder's, which is causal, and other attention for
not causal."""

_FROM_FIRST, _FROM_LAST = 1, 2
"""Types of causal mask of the memory-efficient kernel; 0 is none."""


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """The places of an operator's arguments: an index each, None where the operator has no such argument.

    `query`: key and value come after it. `heads_at`: the dimension of the heads in (batch, .., .., head_dim). `causal`:
    of the flag; in another overload or release it may stand elsewhere, and the first place that holds a flag counts.
    `mask_type`: of a number in its stead, likewise. `bias`: of a mask or a bias. `window`: of the keys before a query
    that it sees, those after it come next; `one_window`: of both, with the query's own key. `lengths`: of the bounds of
    sequences that lie behind one another; `longest`: of the longest, of queries and then of keys. `elsewhere`: of
    tensors by which keys lie elsewhere, or are fewer, than the shape says. `from_last`: whether the last query sees the
    last key, and not the first the first, where there are more keys than queries. `out`, `sums`: of the output and its
    log-sum-exp; an operator with them is backward's.
    """

    query: int = 0
    heads_at: int = 1
    causal: tuple[int, ...] = ()
    mask_type: tuple[int, ...] = ()
    bias: int | None = None
    window: int | None = None
    one_window: int | None = None
    lengths: int | None = None
    longest: int | None = None
    elsewhere: tuple[int, ...] = ()
    from_last: bool = False
    out: int | None = None
    sums: int | None = None

    def work(self, call: OperatorCall, causal: CausalConvention) -> Work:
        """FLOPs of forward's two products or backward's five, and the fewest bytes.

        Counted `half`, FLOPs are those of the keys that are seen, of a causal square its half; where a mask hides some,
        the whole square, which the kernel computes. Counted `full`, the whole square in any case.
        """
        q, k, v = (call.tensor(self.query + i) for i in range(3))
        sizes = self._sizes(call, q, k, v)
        backward = self.out is not None
        count = operations.attention_backward_flops if backward else operations.attention_flops
        flops = count(sizes, "full")
        if causal == "half":
            flops = flops * self._seen_twice(call, sizes) // (2 * sizes.queries * sizes.keys)
        mask = self._optional(call, self.bias)
        operands = q.bytes + k.bytes + v.bytes
        read = operands + (mask.bytes if mask is not None and mask.shape else 0)
        if self.out is None or self.sums is None:
            # The log-sum-exp of each row, which not every backend writes, is left out: one number beside head_dim.
            return Work(flops=flops, bytes_read=read, bytes_written=q.elements // q.shape[-1] * v.shape[-1] * q.size)
        read += call.tensor(0).bytes + call.tensor(self.out).bytes + call.tensor(self.sums).bytes
        return Work(flops=flops, bytes_read=read, bytes_written=operands)

    def sight(self, call: OperatorCall) -> Sight:
        """Which keys a query sees, as far as the record says. Raises Unknown where the sizes are not known."""
        mask = self._optional(call, self.bias)
        masked = mask is not None and bool(mask.shape)
        causal = self._is_causal(call)
        if causal is not None:
            return "causal" if causal else "masked" if masked else "not causal"
        if masked:
            return "masked"
        sizes = self._sizes(call, *(call.tensor(self.query + i) for i in range(3)))
        return "assumed causal" if sizes.queries == sizes.keys else "assumed not causal"

    def _is_causal(self, call: OperatorCall) -> bool | None:
        if self.mask_type:
            kind = self._mask_type(call)
            return None if kind is None else kind in (_FROM_FIRST, _FROM_LAST)
        return next((found for place in self.causal if (found := call.flag(place)) is not None), None)

    def _mask_type(self, call: OperatorCall) -> int | None:
        return next((found for place in self.mask_type if (found := call.number(place)) is not None), None)

    def _seen_twice(self, call: OperatorCall, sizes: AttentionSizes) -> int:
        """Twice the pairs of a query and a key that it sees: whole, though half of a causal square may be odd."""
        queries, keys = sizes.queries, sizes.keys
        causal = self.sight(call) in ("causal", "assumed causal")
        from_last = self.from_last or self._mask_type(call) == _FROM_LAST
        before, after = self._windows(call)
        if causal:
            after = 0
        if before is not None and before < max(queries, keys) - 1:
            return 2 * _in_band(queries, keys, before, after, keys - queries if from_last else 0)
        if not causal and after is not None and after < max(queries, keys) - 1:
            return 2 * _in_band(queries, keys, max(queries, keys), after, keys - queries if from_last else 0)
        if not causal or (from_last and queries == 1):
            return 2 * queries * keys
        if from_last:
            return 2 * queries * keys - queries**2 if queries <= keys else keys**2
        return queries**2 if queries <= keys else 2 * queries * keys - keys**2

    def _windows(self, call: OperatorCall) -> tuple[int | None, int | None]:
        """The keys before and after a query that it sees; None for all of them, which is recorded as -1 or nothing."""
        if self.one_window is not None:
            keys = call.number(self.one_window)
            return (keys - 1, keys - 1) if keys is not None and keys > 0 else (None, None)
        if self.window is None:
            return None, None
        before, after = call.number(self.window), call.number(self.window + 1)
        return (before if before is not None and before >= 0 else None), (
            after if after is not None and after >= 0 else None
        )

    def _sizes(self, call: OperatorCall, q: Operand, k: Operand, v: Operand) -> AttentionSizes:
        """Keys and values may have fewer heads than queries, and values another width."""
        if any(self._optional(call, place) is not None for place in self.elsewhere):
            raise Unknown
        lengths = self._optional(call, self.lengths)
        if lengths is not None and lengths.elements:
            return self._packed(call, lengths, q, k, v)
        rows_at = 3 - self.heads_at
        shapes = [found.shape for found in (q, k, v)]
        if any(len(shape) != 4 or not found.elements for shape, found in zip(shapes, (q, k, v), strict=True)):
            raise Unknown
        if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise Unknown
        return AttentionSizes(
            batch=q.shape[0], heads=q.shape[self.heads_at], queries=q.shape[rows_at], keys=k.shape[rows_at],
            head_dim=q.shape[3], value_dim=v.shape[3],
        )  # fmt: skip

    def _packed(self, call: OperatorCall, lengths: Operand, q: Operand, k: Operand, v: Operand) -> AttentionSizes:
        """Sizes of sequences in one row, (total, heads, head_dim). Their bounds are values, which are not recorded: one
        sequence alone is known, and several that are as long as the longest."""
        (queries, heads, head_dim), (keys, _, k_dim), (values, _, value_dim) = map(_in_one_row, (q, k, v))
        count = lengths.elements - 1
        if len(lengths.shape) != 1 or count < 1:
            raise Unknown
        longest = (None, None)
        if self.longest is not None:
            longest = call.number(self.longest), call.number(self.longest + 1)
        alone = count == 1 and longest[0] in (None, queries) and longest[1] in (None, keys)
        even = None not in longest and (queries, keys) == (count * (longest[0] or 0), count * (longest[1] or 0))
        if keys != values or head_dim != k_dim or not (alone or even):
            raise Unknown
        return AttentionSizes(
            batch=count, heads=heads, queries=queries // count, keys=keys // count, head_dim=head_dim,
            value_dim=value_dim,
        )  # fmt: skip

    @staticmethod
    def _optional(call: OperatorCall, place: int | None) -> Operand | None:
        return call.optional(place) if place is not None else None


def _in_one_row(found: Operand) -> tuple[int, int, int]:
    """(total, heads, head_dim), before which a batch of one may stand."""
    *batch, total, heads, head_dim = found.shape if len(found.shape) in (3, 4) else (0, 0, 0)
    if batch not in ([], [1]) or not found.elements or not total:
        raise Unknown
    return total, heads, head_dim


def _in_band(queries: int, keys: int, before: int, after: int | None, offset: int) -> int:
    """The pairs in which the key stands from `before` keys before query + offset to `after` after it."""
    reach = max(queries, keys) + abs(offset) if after is None else after
    return _up_to(queries, keys, offset + reach + 1) - _up_to(queries, keys, offset - before)


def _up_to(queries: int, keys: int, start: int) -> int:
    """The sum of max(0, min(i + start, keys)) over the queries i: how many keys lie before each one's limit."""
    return _rising(start + queries, keys) - _rising(start, keys)


def _rising(end: int, most: int) -> int:
    """The sum of min(i, most) over i from 0 to below end."""
    if end <= 0:
        return 0
    rising = min(end, most + 1)
    return rising * (rising - 1) // 2 + (end - rising) * most
