"""A simulation of PyTorch's caching allocator: which block a request gets, and what the cache holds of the device.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. A request is rounded to 512 bytes
and takes the smallest cached block that is large enough. What is left of the block is split off, unless it is 1 MiB or
less of a large block: then the request keeps it. Where no block fits, a segment comes from the device: 2 MiB for
requests up to 1 MiB, 20 MiB for those below 10 MiB, else the request rounded up to 2 MiB. Neighbours that are free
merge. Where the device refuses, the segments that hold nothing are given back, and the device is asked once more.
"""

import dataclasses
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Protocol

from stepscope.core.formulas import Summed
from stepscope.core.units import MIB

SMALLEST = 512
SMALL_REQUEST = MIB
"""Requests up to this live in segments of their own kind; a rest of a large block up to this is not split off."""
SMALL_SEGMENT = 2 * MIB
MIDDLE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB
LARGE_ROUNDING = 2 * MIB

NO_BLOCK = -1
"""Stands for the block of a tensor that has none to give back, as one without elements."""


class Allocator(Protocol):
    """An allocator from which storages get their blocks."""

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate a block for `size` bytes; returns the block's number and its actual size in bytes."""
        ...

    def free(self, block: int) -> None: ...


class OutOfMemory(Exception):
    """Raised where the limit does not allow the segment that a request needs."""


def rounded(size: int) -> int:
    """Bytes that a request of this size takes at least."""
    return max(SMALLEST, -(-size // SMALLEST) * SMALLEST)


def segment_size(size: int) -> int:
    """Bytes of the segment that a rounded request asks of the device."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return MIDDLE_SEGMENT
    return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING


def least_rest(small: bool) -> int:
    """The least rest of a block, beyond the request, that becomes a block of its own."""
    return SMALLEST if small else SMALL_REQUEST + 1


class _Block:
    __slots__ = ("address", "after", "before", "free", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small = address, size, small
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """Blocks of one device, with a limit on what the segments may take together (None: no limit)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved = 0
        self.reserved_peak = 0
        self._next_address = 0
        self._blocks: dict[int, _Block] = {}
        # (size, address) of the free blocks, smallest first, for small and large requests.
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])

    def allocate(self, size: int) -> tuple[int, int]:
        """Address and bytes of a block for so many bytes. Raises OutOfMemory."""
        if not size:
            return NO_BLOCK, 0
        size = -(-size // SMALLEST) * SMALLEST  # rounded(size), of which there are a million calls
        small = size <= SMALL_REQUEST
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        block = self._blocks[free.pop(place)[1]] if place < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= least_rest(small):
            # The rest lies behind the block, before the one that was there.
            after, behind = block.after, _Block(block.address + size, rest, small)
            behind.before, behind.after = block, after
            if after is not None:
                after.before = behind
            block.after, block.size = behind, size
            self._blocks[behind.address] = behind
            insort(free, (rest, behind.address))
        block.free = False
        return block.address, block.size

    def free(self, block: int) -> None:
        """Give back the block at this address; it merges with free neighbours."""
        if block == NO_BLOCK:
            return
        blocks = self._blocks
        freed = blocks[block]
        free = self._free[freed.small]
        freed.free = True
        after, before = freed.after, freed.before
        if before is not None and before.free:
            del free[bisect_left(free, (before.size, before.address))]
            after, freed = freed, before
        # Behind a free neighbour the block itself is joined first, which no list has.
        while after is not None and after.free:
            if after.address != block:
                del free[bisect_left(free, (after.size, after.address))]
            del blocks[after.address]
            freed.size += after.size
            freed.after = after = after.after
            if after is not None:
                after.before = freed
        insort(free, (freed.size, freed.address))

    def release_cached(self) -> None:
        """Give back every segment that holds nothing."""
        for block in [b for b in self._blocks.values() if b.free and b.before is None and b.after is None]:
            free = self._free[block.small]
            del free[bisect_left(free, (block.size, block.address))]
            del self._blocks[block.address]
            self.reserved -= block.size

    def begin_private_pool(self) -> None:
        """Give back what holds nothing, and let no later request use what is left of other segments: what CUDA graphs
        capture lies in a pool of its own (CUDACachingAllocator.cpp, `PrivatePool`)."""
        self.release_cached()
        for pieces in self._free:
            for _, address in pieces:
                self._blocks[address].free = False
            pieces.clear()
        self.reserved_peak = self.reserved

    def _segment(self, size: int, small: bool) -> _Block:
        wanted = segment_size(size)
        if self.limit_bytes is not None and self.reserved + wanted > self.limit_bytes:
            self.release_cached()
            if self.reserved + wanted > self.limit_bytes:
                raise OutOfMemory
        block = _Block(self._next_address, wanted, small)
        self._next_address += wanted
        self._blocks[block.address] = block
        self.reserved += wanted
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return block


@dataclasses.dataclass(frozen=True)
class Program:
    """What a step asks of the allocator."""

    events: list[int]
    operators: list[str]
    phases: list[str]
    sizes: list[int]
    """Bytes of each allocation; last what convolutions may take beyond what is counted (`Unseen.convolution_bytes`)."""
    sums: dict[int, Summed]
    """The allocations that hold parts of sums, whose bytes are no polynomial of a size."""

    def runs(self, allocator: Allocator) -> bool:
        """Whether the allocator grants every request."""
        blocks: dict[int, int] = {}
        for event in self.events:
            if event < 0:
                allocator.free(blocks.pop(~event))
                continue
            try:
                blocks[event] = allocator.allocate(self.sizes[event])[0]
            except OutOfMemory:
                return False
        return True

    def is_like(self, other: "Program") -> bool:
        """Whether it asks the same, in other sizes."""
        structure = (self.events, self.operators, self.phases, [*self.sums])
        return structure == (other.events, other.operators, other.phases, [*other.sums])


def scaled(programs: Mapping[int, Program], size: int) -> Program | None:
    """The program of another size: each request is the polynomial through those of the programs. None where they differ
    in more than sizes, or a request would be no number of bytes."""
    known = sorted(programs)
    first = programs[known[0]]
    if not all(first.is_like(programs[each]) for each in known[1:]):
        return None
    shares = [
        math.prod((Fraction(size - other, each - other) for other in known if other != each), start=Fraction(1))
        for each in known
    ]
    common = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * common) for share in shares]

    def through(numbers: Sequence[int]) -> int:
        number, rest = divmod(sum(map(operator.mul, weights, numbers)), common)
        if rest or number < 0:
            raise ArithmeticError
        return number

    sums: dict[int, Summed] = {}
    try:
        for index, summed in first.sums.items():
            alike = [programs[each].sums[index] for each in known]
            shape = tuple(map(through, zip(*(each.shape for each in alike), strict=True)))
            stride = tuple(map(through, zip(*(each.stride for each in alike), strict=True)))
            sums[index] = dataclasses.replace(summed, shape=shape, stride=stride)
        requests = zip(*(programs[each].sizes for each in known), strict=True)
        sizes = [sums[i].nbytes if i in sums else through(each) for i, each in enumerate(requests)]
    except ArithmeticError:
        return None
    return dataclasses.replace(first, sizes=sizes, sums=sums)
