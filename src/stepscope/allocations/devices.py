"""What each device of a snapshot held, beside the one that is open."""

from dataclasses import dataclass

from stepscope.allocations.explain import Explained
from stepscope.allocations.replay import Replay, replay
from stepscope.allocations.snapshot import Snapshot
from stepscope.core.answer import Table, table_of


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What a device held. Its peaks are None where it has no history."""

    device: int
    events: int
    peak_bytes: int | None
    reserved_peak_bytes: int | None
    allocated_bytes: int
    """What was allocated when the history ended."""
    reserved_bytes: int
    """What was reserved then."""


def devices_of(explained: Explained) -> list[DeviceUse]:
    """What every device of the snapshot held, by its index."""
    found = [_use(explained.snapshot, explained.replay)]
    found += [_use(other, replay(other) if other.events else None) for other in explained.snapshot.others]
    return sorted(found, key=lambda use: use.device)


def _use(snapshot: Snapshot, replayed: Replay | None) -> DeviceUse:
    segments = snapshot.segments
    ends = [block.size for segment in segments for block in segment.blocks if block.is_active]
    return DeviceUse(
        device=snapshot.device,
        events=len(snapshot.events),
        peak_bytes=replayed and replayed.peak_bytes,
        reserved_peak_bytes=replayed and max(held for _, held in replayed.reserved),
        allocated_bytes=sum(ends),
        reserved_bytes=sum(segment.total_size for segment in segments),
    )


def device_table(explained: Explained) -> list[Table]:
    """The devices of a snapshot of several; none for one."""
    if not explained.snapshot.others:
        return []
    table = table_of(
        "device", ("peak allocated", "B"), ("peak reserved", "B"), ("allocated at the end", "B"),
        ("reserved at the end", "B"), ("events", ","),
        rows=[
            (f"{use.device}{' (this one)' if use.device == explained.snapshot.device else ''}", use.peak_bytes,
             use.reserved_peak_bytes, use.allocated_bytes, use.reserved_bytes, use.events)
            for use in devices_of(explained)
        ],
    )  # fmt: skip
    return [table]
