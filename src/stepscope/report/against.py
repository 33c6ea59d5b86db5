"""What changed between two captures, for the terminal and as plain data."""

from collections import Counter
from typing import Any

import polars as pl
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stepscope.analysis.comparisons.captures import CaptureComparison
from stepscope.analysis.kernels.names.label import kernel_label
from stepscope.core.shown_text import middle_cut, name_shown, printable
from stepscope.core.units import format_milliseconds
from stepscope.report.former import make_table

ROWS_SHOWN = 12
NARROWEST = 24
"""Characters of a kernel's name that stay, however narrow the screen."""


def render_comparison(comparison: CaptureComparison, before: str, after: str) -> RenderableType:
    """The sentence, then a table by phase and family and one by kernel; `before` and `after` name the captures."""
    parts: list[RenderableType] = [
        Text(printable(f"{after} against {before}"), style="bold"),
        Text(printable(comparison.summary)),
        *(Text(printable(f"Take care: {caveat}."), style="yellow") for caveat in comparison.caveats),
        Text(),
        _place_table(comparison),
        Text(),
        _kernel_table(comparison),
    ]
    return Group(*parts)


def as_json(comparison: CaptureComparison) -> dict[str, Any]:
    """Plain data: nanoseconds and calls per step; what there is none of is null."""
    return {
        "before_ns": comparison.before_ns,
        "after_ns": comparison.after_ns,
        "difference_ns": comparison.difference_ns,
        "before_steps": comparison.before_steps,
        "after_steps": comparison.after_steps,
        "summary": comparison.summary,
        "caveats": list(comparison.caveats),
        "places": comparison.places.to_dicts(),
        "kernels": comparison.kernels.to_dicts(),
    }


def _place_table(comparison: CaptureComparison) -> Table:
    table = make_table("family, ms a step", "phase", *_HEADS, right_from=2)
    table.collapse_padding = True
    for row in comparison.places.head(ROWS_SHOWN).iter_rows(named=True):
        table.add_row(row["family"], row["phase"] or "outside", *_figures(row), style=_style(row))
    _add_rest(table, comparison.places[ROWS_SHOWN:], "families", "")
    table.add_section()
    table.add_row("all", "", *_figures(_sums(comparison.places) | {"share": None}), style="bold")
    return table


def _kernel_table(comparison: CaptureComparison) -> Table:
    table = make_table("kernel, ms a step", *_HEADS, right_from=1, fold_first=True)
    table.collapse_padding = True
    table.columns[0].min_width = NARROWEST
    labels = _labels(comparison.kernels.head(ROWS_SHOWN)["name"].to_list())
    for row in comparison.kernels.head(ROWS_SHOWN).iter_rows(named=True):
        mark = {"appeared": "new: ", "disappeared": "gone: "}.get(row["change"], "")
        table.add_row(MiddleCut(mark + labels[row["name"]]), *_figures(row), style=_style(row))
    _add_rest(table, comparison.kernels[ROWS_SHOWN:], "kernels")
    return table


def _labels(names: list[str]) -> dict[str, str]:
    """Each name's short label or, where two names have the same one, the whole of it."""
    labels = {name: name_shown(kernel_label(name)) for name in names}
    shared = Counter(labels.values())
    return {name: label if shared[label] == 1 else name for name, label in labels.items()}


_HEADS = ("before", "after", "change", "share", "calls")


def _add_rest(table: Table, rest: pl.DataFrame, what: str, *cells: str) -> None:
    if rest.height:
        table.add_row(f"{rest.height} more {what}", *cells, *_figures(_sums(rest)), style="dim")


def _sums(frame: pl.DataFrame) -> dict[str, float | None]:
    columns = ["before_ns", "after_ns", "difference_ns", "before_calls", "after_calls"]
    shares = frame["share"].drop_nulls()
    return frame.select(pl.col(columns).sum()).row(0, named=True) | {
        "share": float(shares.sum()) if len(shares) else None
    }


def _figures(row: dict[str, Any]) -> list[str]:
    before, after = f"{row['before_calls']:g}", f"{row['after_calls']:g}"
    return [
        format_milliseconds(row["before_ns"] * 1e-9) if row["before_calls"] else "",
        format_milliseconds(row["after_ns"] * 1e-9) if row["after_calls"] else "",
        f"{'+' if row['difference_ns'] > 0 else ''}{format_milliseconds(row['difference_ns'] * 1e-9)}",
        f"{row['share'] * 100:.0f} %" if row["share"] is not None else "",
        before if before == after else f"{before}→{after}",
    ]


def _style(row: dict[str, Any]) -> str:
    """Dim where nothing to speak of has changed: below 1 us and 1 %."""
    small = abs(row["difference_ns"]) < 1_000 and abs(row["difference_ns"]) < 0.01 * row["before_ns"]
    return "dim" if small else ""


class MiddleCut:
    """Text on one line, cut in its middle where the cell is too narrow: kernels' names differ at both ends."""

    def __init__(self, text: str) -> None:
        self.text = printable(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(middle_cut(self.text, options.max_width), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(NARROWEST, len(self.text)), len(self.text)).with_maximum(options.max_width)
