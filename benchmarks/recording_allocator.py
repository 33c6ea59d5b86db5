"""PyTorch's caching allocator in small, which writes its history as PyTorch does: snapshots without a GPU.

Written for being read beside c10/cuda/CUDACachingAllocator.cpp: blocks in lists, every search a scan. Tests compare the
replay of a snapshot (stepscope.allocations.replay) with what this allocator itself knows.
"""

import bisect
from dataclasses import dataclass, field, replace
from typing import Any

MIB = 1 << 20
_BASE = 0x7F00_0000_0000
_EXPANSE = 1 << 36
"""Address space of an expandable segment."""


@dataclass(eq=False, kw_only=True)
class Block:
    """A piece of a segment. state: inactive, active_allocated, active_awaiting_free, or unmapped."""

    address: int
    size: int
    stream: int
    small: bool
    segment: "list[Block]"
    pool: tuple[int, int] = (0, 0)
    state: str = "inactive"
    requested: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def kind(self) -> tuple[bool, int, tuple[int, int]]:
        """What a request must share with the block to be given it."""
        return self.small, self.stream, self.pool


@dataclass(kw_only=True)
class RecordingAllocator:
    """Blocks of one device and the events on them, while `recording`."""

    expandable: bool = False
    max_split_size: int = -1
    roundup: dict[str, int] = field(default_factory=dict)
    tells_pools: bool = False
    """Whether events say their pool, as those of newer versions do."""
    recording: bool = True
    time_us: int = 1_700_000_000_000_000
    about: dict[str, Any] = field(default_factory=dict)
    """What every event carries besides: frames, user_metadata."""
    events: list[dict[str, Any]] = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    """As torch.cuda.max_memory_allocated, since the start of the recording."""
    reserved: int = 0

    def __post_init__(self) -> None:
        self._segments: list[list[Block]] = []
        self._free: dict[tuple[bool, int, tuple[int, int]], list[tuple[int, int]]] = {}
        self._at: dict[int, Block] = {}
        self._next = _BASE

    def start(self) -> list[dict[str, Any]]:
        """Begin the history here; the segments as they are."""
        self.recording, self.events, self.peak = True, [], self.allocated
        return self.segments()

    def malloc(self, size: int, stream: int = 0, pool: tuple[int, int] = (0, 0)) -> int:
        """Address of a block for a request, by best fit."""
        need = self._rounded(size)
        small = need <= MIB
        block = self._best_fit(need, (small, stream, pool)) or self._more(need, (small, stream, pool))
        rest = block.size - need
        splits = rest >= 512 if small or self.expandable else rest > MIB and not 0 < self.max_split_size <= need
        if splits:
            behind = replace(block, address=block.address + need, size=rest)
            block.segment.insert(block.segment.index(block) + 1, behind)
            block.size = need
            self._keep_free(behind)
        block.state, block.requested = "active_allocated", size
        self._at[block.address] = block
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self._record("alloc", block.address, size, stream, pool)
        return block.address

    def free(self, address: int, *, in_use_elsewhere: bool = False) -> None:
        """Give a block back; one that another stream uses stays until `complete`."""
        block = self._at[address]
        assert block.state == "active_allocated"
        block.state = "active_awaiting_free"
        self.allocated -= block.size
        self._record("free_requested", address, block.requested, block.stream, block.pool)
        if not in_use_elsewhere:
            self.complete(address)

    def complete(self, address: int) -> None:
        """The other stream is done with a block."""
        block = self._at.pop(address)
        assert block.state == "active_awaiting_free"
        self._record("free_completed", address, block.requested, block.stream, block.pool)
        block.state, block.requested = "inactive", 0
        index = block.segment.index(block)
        for beside in (index + 1, index - 1):
            if 0 <= beside < len(block.segment) and block.segment[beside].state == "inactive":
                other = block.segment.pop(beside)
                self._forget_free(other)
                block.address, block.size = min(block.address, other.address), block.size + other.size
        self._keep_free(block)

    def empty_cache(self, done: tuple[int, int] = (0, 0)) -> None:
        """Give back every segment that holds nothing, and every free page of an expandable one: of the ordinary pool,
        and of a private one whose graph is gone."""
        for segment in [segment for segment in self._segments if segment[0].pool in ((0, 0), done)]:
            for block in [b for b in segment if b.state == "inactive"]:
                page = 2 * MIB if block.small else 20 * MIB
                start, end = block.address, block.end
                if self.expandable:
                    origin = segment[0].address
                    start = origin + -(-(start - origin) // page) * page
                    end = origin + (end - origin) // page * page
                elif len(segment) > 1:
                    continue
                if start < end:
                    self._unmap(segment, block, start, end)
            if not self.expandable and not segment:
                self._segments.remove(segment)

    def segments(self) -> list[dict[str, Any]]:
        """The segments in PyTorch's form."""
        told = []
        for segment in self._segments:
            runs: list[list[Block]] = [[]]
            for block in segment:
                if block.state == "unmapped":
                    runs.append([])
                else:
                    runs[-1].append(block)
            told += [self._told(run) for run in runs if run]
        return told

    def snapshot(self, **more: Any) -> dict[str, Any]:
        """The history and the segments now, as torch.cuda.memory._snapshot()."""
        return {
            "segments": self.segments(),
            "device_traces": [self.events],
            "allocator_settings": {
                "max_split_size": self.max_split_size,
                "expandable_segments": self.expandable,
                "roundup_power2_divisions": self.roundup,
            },
            "external_annotations": [],
            **more,
        }

    def _told(self, run: list[Block]) -> dict[str, Any]:
        return {
            "device": 0,
            "address": run[0].address,
            "total_size": sum(block.size for block in run),
            "allocated_size": sum(block.size for block in run if block.state == "active_allocated"),
            "active_size": sum(block.size for block in run if block.state != "inactive"),
            "requested_size": sum(block.requested for block in run),
            "stream": run[0].stream,
            "frames": [],
            "segment_type": "small" if run[0].small else "large",
            "segment_pool_id": run[0].pool,
            "is_expandable": self.expandable,
            "blocks": [
                {"address": b.address, "size": b.size, "requested_size": b.requested, "state": b.state, "frames": []}
                for b in run
            ],
        }

    def _rounded(self, size: int) -> int:
        if size < 512:
            return 512
        power = 1
        while power * 2 <= size:
            power *= 2
        divisions = self.roundup.get(str(max(1, min(power // MIB, 32768))), 0)
        if divisions > 1 and size > 512 * divisions and size != power:
            step = power // divisions
            return (size + step - 1) // step * step if step else 2 * power
        return (size + 511) // 512 * 512

    def _best_fit(self, need: int, kind: tuple[bool, int, tuple[int, int]]) -> Block | None:
        free = self._free.setdefault(kind, [])
        place = bisect.bisect_left(free, (need, 0))
        if place == len(free):
            return None
        size, address = free[place]
        limit = self.max_split_size if self.max_split_size > 0 else 1 << 62
        if (need < limit <= size) or (need >= limit and size >= need + 20 * MIB):
            return None
        free.pop(place)
        return self._at.pop(address)

    def _more(self, need: int, kind: tuple[bool, int, tuple[int, int]]) -> Block:
        """Memory from the driver: a segment, or pages behind the last of an expandable one."""
        if self.expandable:
            return self._map(need, kind)
        small, stream, pool = kind
        size = 2 * MIB if small else 20 * MIB if need < 10 * MIB else -(-need // (2 * MIB)) * 2 * MIB
        segment: list[Block] = []
        block = Block(address=self._next, size=size, stream=stream, small=small, segment=segment, pool=pool)
        segment.append(block)
        self._segments.append(segment)
        self._next += size  # next to the one before, which blocks must not merge with
        self.reserved += size
        self._record("segment_alloc", block.address, size, stream, pool)
        return block

    def _map(self, need: int, kind: tuple[bool, int, tuple[int, int]]) -> Block:
        small, stream, pool = kind
        page = 2 * MIB if small else 20 * MIB
        segment = next((s for s in self._segments if s[0].kind == kind), None)
        if segment is None:
            segment = []
            start = -(-self._next // _EXPANSE) * _EXPANSE
            hole = Block(address=start, size=_EXPANSE, stream=stream, small=small, segment=segment, pool=pool)
            hole.state = "unmapped"
            segment.append(hole)
            self._next = start + _EXPANSE
            self._segments.append(segment)
        for i, hole in enumerate(segment):
            if hole.state != "unmapped":
                continue
            before = segment[i - 1] if i and segment[i - 1].state == "inactive" else None
            missing = -(-(need - (before.size if before else 0)) // page) * page
            if missing > hole.size:
                continue
            mapped = replace(hole, size=missing, state="inactive")
            hole.address, hole.size = hole.address + missing, hole.size - missing
            segment.insert(i, mapped)
            if not hole.size:
                segment.remove(hole)
            self.reserved += missing
            self._record("segment_map", mapped.address, missing, stream, pool)
            return self._joined(segment, i)
        raise MemoryError

    def _joined(self, segment: list[Block], i: int) -> Block:
        """A block that was just mapped, with free neighbours."""
        block = segment[i]
        for beside in (i + 1, i - 1):
            if 0 <= beside < len(segment) and segment[beside].state == "inactive":
                other = segment.pop(beside)
                self._forget_free(other)
                block.address, block.size = min(block.address, other.address), block.size + other.size
        return block

    def _unmap(self, segment: list[Block], block: Block, start: int, end: int) -> None:
        self._forget_free(block)
        index = segment.index(block)
        segment.pop(index)
        pieces = ((block.address, start, "inactive"), (start, end, "unmapped"), (end, block.end, "inactive"))
        for left, right, state in pieces:
            if left == right or (state == "unmapped" and not self.expandable):
                continue
            piece = replace(block, address=left, size=right - left, state=state)
            segment.insert(index, piece)
            index += 1
            if state == "inactive":
                self._keep_free(piece)
        self.reserved -= end - start
        action = "segment_unmap" if self.expandable else "segment_free"
        self._record(action, start, end - start, block.stream, block.pool)

    def _keep_free(self, block: Block) -> None:
        self._at[block.address] = block
        bisect.insort(self._free.setdefault(block.kind, []), (block.size, block.address))

    def _forget_free(self, block: Block) -> None:
        self._free[block.kind].remove((block.size, block.address))
        del self._at[block.address]

    def _record(self, action: str, address: int, size: int, stream: int, pool: tuple[int, int]) -> None:
        if self.recording:
            self.events.append(
                {
                    "action": action, "addr": address, "size": size, "stream": stream, "time_us": self.time_us,
                    "compile_context": "N/A", "user_metadata": "", "frames": [], **self.about,
                    **({"pool_id": pool} if self.tells_pools else {}),
                }
            )  # fmt: skip
