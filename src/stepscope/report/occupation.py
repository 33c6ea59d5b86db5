"""Why a device stood idle, what communication hides, and what the step waited for, for the terminal."""

import polars as pl
from rich.console import RenderableType
from rich.text import Text

from stepscope.analysis.captures.critical_path import CriticalPath
from stepscope.analysis.captures.occupation import Occupation
from stepscope.analysis.captures.overlap import Overlap
from stepscope.core.errors import printable
from stepscope.core.units import format_count, format_share, ms_text
from stepscope.report.former import make_table

_NAMED_SHARE = 0.005
"""Smaller parts of the critical path are left out of its sentence."""


def render_occupation(
    occupied: Occupation, overlaps: tuple[Overlap, ...], path: CriticalPath | None, steps: int
) -> list[RenderableType]:
    """A table of idle time by cause, and a sentence for each of the others."""
    table = make_table("idle, a step", "gaps", "ms", "largest us", "of the span", right_from=1)
    totals = (
        occupied.by_cause.group_by("cause")
        .agg(pl.col("gaps", "idle_ns").sum(), pl.col("largest_ns").max())
        .sort("idle_ns", descending=True)
    )
    for cause, count, idle_ns, largest_ns in totals.iter_rows():
        table.add_row(
            cause,
            f"{count / steps:.0f}",
            ms_text(idle_ns / steps),
            f"{largest_ns * 1e-3:.1f}",
            format_share(idle_ns / occupied.span_ns) if occupied.span_ns else "",
        )
    parts: list[RenderableType] = [table] if totals.height else []
    for device in occupied.devices:
        parts.append(
            Text(
                printable(
                    f"Device {device.device} had work for {ms_text((device.span_ns - device.idle_ns) / steps)} of "
                    f"{ms_text(device.span_ns / steps)} ms a step under the profiler: "
                    f"idle {format_share(device.idle_share)}."
                )
            )
        )
    parts += [Text(_overlap_words(one, steps)) for one in overlaps if one.communication_ns]
    if path is not None and path.duration_ns:
        parts.append(Text(_path_words(path)))
    return parts


def _overlap_words(one: Overlap, steps: int) -> str:
    return (
        f"Device {one.device} communicates {ms_text(one.communication_ns / steps)} ms a step; "
        f"{format_share(one.hidden_share or 0.0)} of it hides behind computation, "
        f"{ms_text(one.exposed_ns / steps)} ms is exposed."
    )


def _path_words(path: CriticalPath) -> str:
    named = []
    for category, family, _, duration_ns, share in path.by_category.select(
        "category", "family", "segments", "duration_ns", "share"
    ).iter_rows():
        if share >= _NAMED_SHARE:
            what = family if category == "computation" and family else category
            named.append(f"{what} {format_share(share)} ({ms_text(duration_ns)} ms)")
    which = f"step {format_count(path.step)}" if path.step is not None else "the capture"
    return printable(
        f"The critical path of {which} on device {path.device}, {ms_text(path.duration_ns)} ms: {', '.join(named)}."
    )
