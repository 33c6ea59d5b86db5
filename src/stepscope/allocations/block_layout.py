"""The rules by which PyTorch's caching allocator cuts and merges blocks: those of c10/cuda/CUDACachingAllocator.cpp.

- A request is rounded up to 512 bytes, or as `roundup_power2_divisions` says (round_size).
- Up to 1 MiB it belongs to the small pool, else to the large one (get_pool).
- It takes the start of a free block. The rest becomes a free block if it has 512 bytes (small pool, and with
  expandable segments) or more than 1 MiB (large pool, requests under max_split_size); else the block is given whole
  (should_split).
- A freed block merges with free neighbours of its segment (free_block).

What holds under the default settings is stated once, where it is predicted (prediction/caching_allocator.py).
"""

from dataclasses import dataclass

from stepscope.allocations.prediction.caching_allocator import SMALL_REQUEST, SMALLEST, rest_is_split_off
from stepscope.allocations.prediction.caching_allocator import rounded as rounded_by_default
from stepscope.allocations.snapshot import ORDINARY, PoolId, Segment, Settings

BEFORE = -1
"""Index of an event that precedes the history."""


@dataclass(kw_only=True, slots=True)
class Allocation:
    """One allocation and the block it got. Events are indices into the history."""

    address: int
    requested: int
    block: int
    """Bytes of the block: what counts as allocated."""
    alloc: int = BEFORE
    free: int | None = None
    """The event at which its owner gave it back (free_requested); None if never. Before the history for a block that
    still awaited another stream when it began."""
    completed: int | None = None
    """The event at which the allocator could use it again."""
    stream: int = 0
    pool: PoolId = ORDINARY
    open_ended: bool = False
    """Whether the block's end is unknown: it counts as long as its request, and may have been up to 1 MiB longer."""


class Contradiction(Exception):
    """An event that cannot happen in the layout at hand."""


def rounded(size: int, settings: Settings) -> int:
    """Bytes that a request is rounded up to (round_size, roundup_power2_next_division)."""
    if size >= SMALLEST and settings.roundup_power2_divisions:
        divisions = _divisions(size, settings.roundup_power2_divisions)
        if divisions > 1 and size > SMALLEST * divisions and size & (size - 1):
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step if step else 1 << size.bit_length()
    return rounded_by_default(size)


def _divisions(size: int, by_mib: dict[str, int]) -> int:
    """Divisions of the power of two below a size. There is one number for each power from 1 MiB to 32 GiB."""
    power = min(max(size.bit_length() - 1 - 20, 0), 15)
    return by_mib.get(str(1 << power), 0)


class Layout:
    """Blocks by address. Free blocks are known by both ends, so that neighbours are found without a search."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.always_splits = settings.expandable_segments
        self.split_below = settings.max_split_size if settings.max_split_size > 0 else 1 << 63
        self.simple_rounding = not any(divisions > 1 for divisions in settings.roundup_power2_divisions.values())
        self.free_from: dict[int, int] = {}
        """Start of each free block -> its end."""
        self.free_to: dict[int, int] = {}
        self.walls: dict[int, int] = {}
        """Addresses at which segments of the driver meet the rest: no block spans them."""

    def add_free(self, start: int, end: int) -> None:
        """Free a block, which merges with free neighbours."""
        if end not in self.walls and end in self.free_from:
            after = self.free_from.pop(end)
            if self.free_to.pop(after, None) is None:
                raise Contradiction(f"the free memory at {end:#x} came from the driver twice")
            end = after
        if start not in self.walls and start in self.free_to:
            before = self.free_to.pop(start)
            if self.free_from.pop(before, None) is None:
                raise Contradiction(f"the free memory before {start:#x} came from the driver twice")
            start = before
        self.free_from[start] = end
        self.free_to[end] = start

    def take(self, address: int, size: int) -> int:
        """Bytes of the block that a request gets at an address. Raises Contradiction where no free block starts."""
        end = self.free_from.get(address)
        if end is None:
            raise Contradiction(f"nothing free starts at {address:#x}")
        need = rounded_by_default(size) if self.simple_rounding else rounded(size, self.settings)
        rest = end - address - need
        if rest < 0:
            raise Contradiction(f"{need} bytes are taken at {address:#x} where {end - address} are free")
        del self.free_from[address]
        small = self.always_splits or need <= SMALL_REQUEST
        if not rest_is_split_off(rest, small) or not (small or need < self.split_below):
            if self.free_to.pop(end, None) is None:
                raise Contradiction(f"the free memory at {address:#x} came from the driver twice")
            return end - address
        self.free_from[address + need] = end
        self.free_to[end] = address + need
        return need

    def give(self, start: int, end: int, expandable: bool) -> None:
        """Add memory from the driver. Pages of an expandable segment continue what lies before and after them."""
        if not expandable:
            for wall in (start, end):
                self.walls[wall] = self.walls.get(wall, 0) + 1
        self.add_free(start, end)

    def drop(self, start: int, end: int, expandable: bool) -> None:
        """Return free memory to the driver: a whole segment, or pages out of a free block."""
        found = self.free_block_round(start)
        if found is None or found[1] < end:
            raise Contradiction(f"{end - start} bytes go back to the driver at {start:#x} that are not free")
        free_start, free_end = found
        if not expandable and not (found == (start, end) and start in self.walls and end in self.walls):
            raise Contradiction(f"a segment goes back to the driver at {start:#x} that never came from it")
        del self.free_from[free_start]
        if self.free_to.pop(free_end, None) is None:
            raise Contradiction(f"the free memory at {free_start:#x} came from the driver twice")
        for left, right in ((free_start, start), (end, free_end)):
            if left < right:
                self.free_from[left], self.free_to[right] = right, left
        if not expandable:
            for wall in (start, end):
                self.walls[wall] -= 1
                if not self.walls[wall]:
                    del self.walls[wall]

    def free_block_round(self, address: int) -> tuple[int, int] | None:
        """The free block that holds an address. A search, for events that are rare."""
        if address in self.free_from:
            return address, self.free_from[address]
        return next(((start, end) for start, end in self.free_from.items() if start < address < end), None)

    def fill(self, segments: list[Segment], allocations: list[Allocation]) -> None:
        """Lay out segments, free wherever no allocation lies. Raises Contradiction for one outside of them."""
        blocks = sorted((a.address, a.address + a.block) for a in allocations)
        at = 0
        for segment in segments:
            here = segment.address
            if not segment.is_expandable:
                for wall in (here, segment.end):
                    self.walls[wall] = self.walls.get(wall, 0) + 1
            while at < len(blocks) and blocks[at][0] < segment.end:
                start, end = blocks[at]
                if start < here or end > segment.end:
                    raise Contradiction(f"the block at {start:#x} lies across others")
                if here < start:
                    self.free_from[here], self.free_to[start] = start, here
                here = end
                at += 1
            if here < segment.end:
                self.free_from[here], self.free_to[segment.end] = segment.end, here
        if at < len(blocks):
            raise Contradiction(f"the block at {blocks[at][0]:#x} lies outside of every segment")
