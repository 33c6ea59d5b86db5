"""The look that all plots share: font, colours, and one fixed colour for each category of memory."""

from collections.abc import Iterable
from typing import Any

from stepscope.core.errors import InputError, printable

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""vl-convert bundles Liberation Sans, so text is measured the same on every machine; Arial has the same metrics."""

BLACK, ORANGE, SKY_BLUE, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
"""Eight colours that people of every colour vision tell apart (Okabe and Ito 2008, Color Universal Design)."""

PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY_BLUE, BLACK, YELLOW)
"""For lines and points, the ones that are hard to see on white last."""

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [12, 4], [4, 2, 1, 2], [1, 4], [14, 3, 3, 3])

CATEGORY_COLOURS: dict[str, str] = {
    "parameters": BLUE,
    "frozen quantised weights": "#5D7C99",
    "optimizer state": GREEN,
    "gradients": VERMILLION,
    "inputs": YELLOW,
    "cast copies": PURPLE,
    "saved for backward": ORANGE,
    "temporaries": SKY_BLUE,
    "workspaces": "#8C8C8C",
    "there before": "#ADADAD",
    "rounding": "#CFCFCF",
}
"""One colour for each core.memory_notes.MemoryCategory in every plot. The order is that of stacks from the ground: what
stays longest lies lowest."""

INK = "#222222"
FAINT = "#6B6B6B"
GRID = "#E6E6E6"

CONFIG: dict[str, Any] = {
    "background": "white",
    "font": FONT,
    "padding": 14,
    "view": {"stroke": None},
    "title": {
        "anchor": "start", "frame": "group", "fontSize": 16, "color": INK, "offset": 14,
        "subtitleFontSize": 12, "subtitleColor": FAINT, "subtitlePadding": 5,
    },
    "axis": {
        "labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "titlePadding": 10, "labelColor": INK,
        "titleColor": INK, "domainColor": FAINT, "tickColor": FAINT, "gridColor": GRID,
    },
    "legend": {
        "labelFontSize": 12, "titleFontSize": 12, "titleColor": FAINT, "titleFontWeight": "normal", "labelLimit": 320,
        "labelColor": INK, "symbolSize": 110, "rowPadding": 5, "titlePadding": 7, "offset": 18,
        "layout": {"right": {"anchor": "start", "direction": "vertical", "margin": 18}},
    },
    "text": {"font": FONT, "fontSize": 12, "color": INK},
    "concat": {"spacing": 34},
}  # fmt: skip
"""Vega-Lite's configuration object, for every chart that is saved."""


def told_apart(colours: Iterable[str], shapes: Iterable[str], remedy: str) -> tuple[list[str], list[str]]:
    """What colours and shapes stand for, each once. Raises InputError where there are more than the eye tells apart."""
    by_colour, by_shape = (list(dict.fromkeys(map(printable, names))) for names in (colours, shapes))
    if len(by_colour) > len(PALETTE) or len(by_shape) > len(SHAPES):
        raise InputError(
            f"{len(by_colour)} colours by {len(by_shape)} shapes are more than a plot can tell apart "
            f"({len(PALETTE)} by {len(SHAPES)}): {remedy}"
        )
    return by_colour, by_shape
