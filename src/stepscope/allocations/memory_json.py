"""A snapshot's moment as plain data: what `stepscope memory --json` prints. The first five keys are a contract."""

from typing import Any

import msgspec
import polars as pl

from stepscope.allocations.at_moment import Moment, phase_peaks
from stepscope.allocations.blocks import saved_by_block
from stepscope.allocations.devices import devices_of
from stepscope.allocations.evidence import certainty_of
from stepscope.allocations.explain import Explained
from stepscope.allocations.fragmentation import new_segments, pieces_between
from stepscope.allocations.growth import growth_of
from stepscope.allocations.left_behind import growth_finding
from stepscope.allocations.pools import pool_finding
from stepscope.core.evidence import MemoryGrowth
from stepscope.core.finding import Finding

LARGEST = 20
SITES = 20


def memory_as_json(explained: Explained, moment: Moment) -> dict[str, Any]:
    """The moment as a dict. `peak_bytes` is what was allocated then: at the peak, unless --at named another moment.

    Times are microseconds after the first event, which happened at `start_time_us`. `allocations` is how many the
    history made; `alive` how many there were at the moment. `certainty` is there without notes of stepscope: by
    category the bytes asked for, by what the category is known (evidence.CERTAINTIES).
    """
    table, snapshot = explained.allocations, explained.snapshot
    growth = growth_of(explained)
    certainty = certainty_of(moment.alive)
    return {
        "peak_bytes": moment.allocated_bytes,
        "peak_time_us": moment.time_us,
        "allocations": table["alloc_event"].count(),
        "largest": largest(explained, moment.alive, LARGEST),
        "categories": moment.categories,
        "moment": moment.name,
        "alive": moment.alive.height,
        "reserved": None if moment.reserved is None else msgspec.to_builtins(moment.reserved),
        "pools": [msgspec.to_builtins(use) for use in moment.pools],
        "reserved_peak_bytes": max(reserved for _, reserved in explained.replay.reserved),
        "free_pieces": _pieces(explained, moment),
        "new_segments": [new._asdict() for new in new_segments(explained)],
        "growth": None if growth is None else {**msgspec.to_builtins(growth), "bytes_a_step": growth.bytes_a_step},
        "findings": [msgspec.to_builtins(finding) for finding in memory_findings(explained, growth)],
        "phases": [msgspec.to_builtins(peak) for peak in phase_peaks(explained)],
        "sites": sites(moment.alive).head(SITES).to_dicts(),
        "saved_by_block": [msgspec.to_builtins(block) for block in saved_by_block(explained)],
        "exact": explained.exact_at(moment.event),
        "unsure_blocks": explained.unsure_at(moment.event),
        "by_notes": explained.noted,
        **({} if certainty is None else {"certainty": certainty}),
        "notes": list(explained.notes),
        "measured": msgspec.to_builtins(explained.measured),
        "device": snapshot.device,
        "devices": [msgspec.to_builtins(use) for use in devices_of(explained)],
        "start_time_us": snapshot.start_us,
        "events": len(snapshot.events),
    }


def memory_findings(explained: Explained, growth: MemoryGrowth | None) -> tuple[Finding, ...]:
    """What a snapshot shows beyond its figures: memory that grows, and pools that hold what nobody else can use."""
    found = (growth and growth_finding(growth), pool_finding(explained))
    return tuple(finding for finding in found if finding)


def _pieces(explained: Explained, moment: Moment) -> dict[str, int]:
    """How many pieces of free memory lie between live blocks, and the longest."""
    pieces = pieces_between(explained, moment.event)
    return {"count": len(pieces), "longest_bytes": max(pieces, default=0)}


def largest(explained: Explained, alive: pl.DataFrame, count: int) -> list[dict[str, Any]]:
    """The largest blocks alive, each with the line it comes from, its stack, and the tensor it was."""
    return [
        {
            "bytes": row["block"],
            "site": row["site"],
            "frames": list(explained.stacks.frames(row["stack"])),
            "requested_bytes": row["requested"],
            "category": row["category"],
            **({"certainty": row["sure"]} if "sure" in row else {}),
            "tensor": tensor_of(row),
            "phase": row["phase"],
            "module": row["module"],
            "part": row["part"],
            "alloc_us": row["alloc_us"],
            "free_us": row["free_us"],
        }
        for row in alive.head(count).iter_rows(named=True)
    ]


def tensor_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The known fields of the tensor in an allocation."""
    if not row["name"] and row["shape"] is None:
        return None
    shape = None if row["shape"] is None else list(row["shape"])
    return {"name": row["name"], "shape": shape, "dtype": row["dtype"], "operator": row["operator"]}


def sites(alive: pl.DataFrame) -> pl.DataFrame:
    """Lines of code by what they hold: `site`, `bytes`, `allocations`, `category` (the largest of the site's)."""
    by_category = alive.group_by("site", "category").agg(bytes=pl.col("block").sum(), allocations=pl.len())
    return (
        by_category.sort("bytes", "category", descending=[True, False])
        .group_by("site", maintain_order=True)
        .agg(pl.col("bytes").sum(), pl.col("allocations").sum(), pl.col("category").first())
        .sort("bytes", "site", descending=[True, False])
    )
