"""Searches the largest batch, and the longest sequence, that fits."""

import math
from collections.abc import Callable

import msgspec

from stepscope.allocations.prediction.fit import Budget, will_fit, will_surely_fit
from stepscope.core.precisions import multiple_of_rows
from stepscope.core.workload import Workload

SEQUENCE_STEP = 64
"""Sequences are tried in multiples of this."""

_MOST = 2**20


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sizes of one model that fit; 0 where not even the smallest does."""

    workload: Workload
    """The sizes that stay fixed: the sequence length of the largest batch, the batch size of the longest sequence."""
    batch_size: int
    seq_len: int


def largest_that_fits(workload: Workload, budget: Budget) -> Largest:
    """The largest batch at the workload's sequence length, and the longest sequence at its batch size."""
    multiple = multiple_of_rows(workload.dtype)
    micro = workload.accumulation * multiple // math.gcd(multiple, workload.seq_len)
    """The batch grows by so much at a time."""

    def with_batch(n: int) -> Workload:
        return msgspec.structs.replace(workload, batch_size=n * micro)

    def with_length(n: int) -> Workload:
        return msgspec.structs.replace(workload, seq_len=n * SEQUENCE_STEP)

    return Largest(
        workload=workload,
        batch_size=_largest(with_batch, budget) * micro,
        seq_len=_largest(with_length, budget) * SEQUENCE_STEP,
    )


def _largest(sized: Callable[[int], Workload], budget: Budget) -> int:
    """The largest n whose workload fits: found with the quick prediction, and moved by the whole one."""
    found = _climb(0, lambda n: will_surely_fit(sized(n), budget))
    # Near the limit the cache may be cut up for one size and not for a larger one, so no step down is a long one.
    stride = max(1, found // 256)
    while found > 0 and not will_fit(sized(found), budget):
        found = max(0, found - stride)
    return _climb(found, lambda n: will_fit(sized(n), budget))


def _climb(low: int, fits: Callable[[int], bool]) -> int:
    """The last n from `low` on that fits, in strides that double and then halve; `low` itself is not asked."""
    stride = 1
    while low + stride <= _MOST and fits(low + stride):
        low, stride = low + stride, 2 * stride
    while stride > 1:
        stride //= 2
        if low + stride <= _MOST and fits(low + stride):
            low += stride
    return low
