"""Reads what recorded steps left behind from the snapshot that was just written."""

from pathlib import Path

from stepscope.core.errors import InputError, one_line
from stepscope.core.evidence import MemoryGrowth


def growth_in(directory: Path) -> tuple[MemoryGrowth | None, str | None]:
    """The MemoryGrowth of a run's snapshot, or a note that says why it is not known."""
    try:
        from stepscope.allocations.explain import explain  # noqa: PLC0415  (polars, which a bare machine lacks)
        from stepscope.allocations.growth import growth_of  # noqa: PLC0415
        from stepscope.allocations.snapshot import read_snapshot  # noqa: PLC0415
    except ModuleNotFoundError as error:
        return None, f"no judgement on what grows: stepscope memory tells it where {error.name} is installed"
    try:
        return growth_of(explain(read_snapshot(directory))), None
    except InputError as error:
        return None, f"no judgement on what grows: {one_line(error)}"
