"""One moment of a history: what was alive then, by category, site and tensor, and what the allocator held beside it."""

import re
from bisect import bisect_right
from dataclasses import dataclass

import polars as pl

from stepscope.allocations.block_layout import BEFORE
from stepscope.allocations.explain import Explained, categories_of
from stepscope.allocations.pools import PoolUse, pools_at
from stepscope.core.errors import InputError
from stepscope.core.memory_notes import MemoryCategory

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")
_MICROSECONDS = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Bytes that the allocator held from the driver. The other five make up the first."""

    reserved_bytes: int
    allocated_bytes: int
    awaiting_free_bytes: int
    """Bytes that their owner freed while another stream still used them."""
    cached_bytes: int
    """Bytes of segments that hold nothing, which torch.cuda.empty_cache() would give back."""
    fragmented_bytes: int
    """Free bytes between live blocks of a segment."""
    private_free_bytes: int
    """Free bytes of private pools, which serve nothing but what is directed to them, and which empty_cache() keeps."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The most that was allocated while a phase ran, what was allocated when it began included."""

    phase: str
    peak_bytes: int
    event: int
    time_us: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was alive after an event."""

    name: str
    """The moment in words: the peak, the peak of backward, at 12 ms, the end."""
    event: int
    time_us: int
    alive: pl.DataFrame
    """Rows of the table of allocations, largest first."""
    categories: dict[MemoryCategory, int]
    reserved: Reserved | None
    """Bytes that the allocator holds beside live memory; None for a history without segments."""
    pools: tuple[PoolUse, ...]
    """Reserved bytes by pool, the ordinary one first; empty where `reserved` is None."""

    @property
    def allocated_bytes(self) -> int:
        return sum(self.categories.values())

    def self_check(self) -> None:
        """Assert that the parts make up the wholes."""
        assert sum(self.categories.values()) == self.alive["block"].sum()
        held = self.reserved
        if held is not None:
            parts = held.awaiting_free_bytes + held.cached_bytes + held.fragmented_bytes + held.private_free_bytes
            assert held.allocated_bytes == self.allocated_bytes <= held.reserved_bytes
            assert held.allocated_bytes + parts == held.reserved_bytes


def moment_at(explained: Explained, at: str | None = None) -> Moment:
    """The Moment of the peak, or the one that `at` names: `12ms`, `12000us`, `1.5s` after the first event, `start`,
    `end`, or a phase for its own peak. Raises InputError for any other text, and for a time outside of the history.
    """
    if at is None or at == "peak":
        return _moment(explained, "the peak", explained.peak_event)
    last = len(explained.snapshot.events) - 1
    if at in {"start", "end"}:
        return _moment(explained, f"the {at}", BEFORE if at == "start" else last)
    of_phase = next((peak for peak in phase_peaks(explained) if peak.phase == at), None)
    if of_phase is not None:
        return _moment(explained, f"the peak of {at}", of_phase.event)
    found = _TIME.fullmatch(at.strip())
    if found is None:
        phases = "".join(f", {name}" for name in dict.fromkeys(span.name for span in explained.phases))
        raise InputError(
            f"cannot tell which moment {at[:40]!r} is: write a time, as in 12ms, or one of start, end{phases}"
        )
    time_us = float(found[1]) * _MICROSECONDS[found[2]]
    if time_us > explained.time_us(last):
        raise InputError(f"{at} is after the history, which ends at {explained.time_us(last) / 1000:g}ms")
    return _moment(
        explained, f"{at.strip()}", explained.snapshot.last_event_until(explained.snapshot.start_us + int(time_us))
    )


def _moment(explained: Explained, name: str, event: int) -> Moment:
    alive = explained.alive(event).sort("block", "address", descending=[True, False])
    pools = pools_at(explained, event)
    moment = Moment(
        name=name,
        event=event,
        time_us=explained.time_us(event),
        alive=alive,
        categories=categories_of(alive),
        reserved=_together(pools),
        pools=pools,
    )
    moment.self_check()
    return moment


def phase_peaks(explained: Explained) -> list[PhasePeak]:
    """The peak of every phase, in the order they began; of a phase that ran several times, the largest."""
    events, allocated = explained.curve["event"].to_list(), explained.curve["allocated"]
    snapshot = explained.snapshot
    peaks: dict[str, PhasePeak] = {}
    for span in explained.phases:
        first = bisect_right(events, snapshot.last_event_until(snapshot.start_us + span.start_us - 1)) - 1
        last = bisect_right(events, snapshot.last_event_until(snapshot.start_us + span.end_us)) - 1
        first, last = max(first, 0), max(last, 0)
        at = first + (allocated[first : last + 1].arg_max() or 0)
        known = peaks.get(span.name)
        if known is None or allocated[at] > known.peak_bytes:
            peaks[span.name] = PhasePeak(
                phase=span.name, peak_bytes=allocated[at], event=events[at], time_us=explained.time_us(events[at])
            )
    return list(peaks.values())


def _together(pools: tuple[PoolUse, ...]) -> Reserved | None:
    """What all pools held; None where that is not known."""
    if not pools:
        return None
    return Reserved(
        reserved_bytes=sum(use.reserved_bytes for use in pools),
        allocated_bytes=sum(use.allocated_bytes for use in pools),
        awaiting_free_bytes=sum(use.awaiting_free_bytes for use in pools),
        cached_bytes=sum(use.cached_bytes for use in pools if not use.private),
        fragmented_bytes=sum(use.fragmented_bytes for use in pools if not use.private),
        private_free_bytes=sum(use.free_bytes for use in pools if use.private),
    )
