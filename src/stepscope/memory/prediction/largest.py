"""The largest batch, and the longest sequence, that fits."""

from collections.abc import Callable

import msgspec

from stepscope.core.workload import Workload
from stepscope.memory.prediction.fit import Budget, will_fit, will_surely_fit

SEQUENCE_STEP = 64
"""Sequences are tried in multiples of this."""

_MOST = 2**20


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """What fits of one model: 0 where not even the smallest does."""

    workload: Workload
    """The sizes that stay: the batch at this sequence length, the sequence at this batch size."""
    batch_size: int
    seq_len: int


def largest_that_fits(workload: Workload, budget: Budget) -> Largest:
    """The largest batch at the workload's sequence length, and the longest sequence at its batch size."""
    micro = workload.accumulation

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
    low, high = 0, 1
    while high < _MOST and will_surely_fit(sized(high), budget):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if will_surely_fit(sized(middle), budget) else (low, middle)
    # The quick prediction is the stricter one: some more may fit.
    while low < _MOST and will_fit(sized(low + 1), budget):
        low += 1
    while low > 0 and not will_fit(sized(low), budget):
        low -= 1
    return low
