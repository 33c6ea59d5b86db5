"""The look that all plots share, and how a chart becomes a file."""

import html
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import InputError, one_line, printable
from stepscope.core.run_directory import write_atomically
from stepscope.rendering.cells import COLOURS

Spec = dict[str, Any]
"""A part of a chart in the words of Vega-Lite: https://vega.github.io/vega-lite/docs."""

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
"""One colour for each core.evidence.MemoryCategory in every plot. The order is that of stacks from the ground: what
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


def colours_of(names: Iterable[str]) -> list[str]:
    """A colour for each of at most as many names as the palette has: the thing's own, else the palette's next."""
    names = list(names)
    known = [COLOURS.get(name) for name in names]
    free = itertools.cycle(colour for colour in PALETTE if colour not in known)
    return [colour or next(free) for colour in known]


def told_apart(colours: Iterable[str], shapes: Iterable[str], remedy: str) -> tuple[list[str], list[str]]:
    """What colours and shapes stand for, each once. Raises InputError where there are more than the eye tells apart."""
    by_colour, by_shape = (list(dict.fromkeys(map(printable, names))) for names in (colours, shapes))
    if len(by_colour) > len(PALETTE) or len(by_shape) > len(SHAPES):
        raise InputError(
            f"{len(by_colour)} colours by {len(by_shape)} shapes are more than a plot can tell apart "
            f"({len(PALETTE)} by {len(SHAPES)}): {remedy}"
        )
    return by_colour, by_shape


# A chart to a file, by the file's suffix: SVG, PNG, HTML or JSON. No browser, no network, nothing of the machine.
#
# One chart always gives equal bytes, so that plots kept with results change only when their figures do.

SUFFIXES = (".svg", ".png", ".html", ".json")
PNG_SCALE = 2
"""Pixels of the image for one of the chart."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 0; background: white; }} #plot {{ padding: 8px; }}</style>
<script>{library}</script>
</head>
<body>
<div id="plot"></div>
<script>
vegaEmbed("#plot", {spec}, {options});
</script>
</body>
</html>
"""
_OPTIONS = {"renderer": "canvas", "actions": {"export": True, "source": False, "compiled": False, "editor": False}}
"""The menu saves the picture. The online editor is left out: a page that is opened offline has no use for it."""


_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"


def check_target(path: Path) -> None:
    """Raises InputError unless plots are written under such a suffix, the folder is there, and so is what draws them:
    before work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot tell how to write the plot {path}: end its name in one of {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write the plot {path}: there is no folder {path.parent}, make it first")
    _vl_convert()


def save_plot(chart: Spec, path: Path) -> None:
    """Write the chart in the form that the suffix names. Raises InputError where it cannot be written."""
    check_target(path)
    data = _WRITERS[path.suffix.lower()](plot_spec(chart))
    try:
        write_atomically(data, path)
    except OSError as error:
        raise InputError(f"cannot write the plot {path}: {error.strerror or one_line(error)}") from error


def plot_spec(chart: Spec) -> Spec:
    """The chart as a whole document of Vega-Lite, in the house's look. Rows that several layers show are in it once."""
    datasets: dict[str, Any] = {}
    names: dict[int, str] = {}

    def named(part: Any) -> Any:
        if isinstance(part, list):
            return [named(one) for one in part]
        if not isinstance(part, dict):
            return part
        data = part.get("data")
        whole = {key: named(value) for key, value in part.items() if key != "data"}
        if data is not None:
            name = names.setdefault(id(data["values"]), f"data-{len(names)}")
            datasets[name] = data["values"]
            whole["data"] = {"name": name, **{key: value for key, value in data.items() if key != "values"}}
        return whole

    return {"$schema": _SCHEMA, **named(chart), "datasets": datasets, "config": CONFIG}


def plot_svg(spec: Spec) -> str:
    """The picture as text. Vega numbers clip paths through the life of the process; here each picture begins at 0."""
    svg = _vl_convert().vegalite_to_svg(spec, allowed_base_urls=[])
    numbers: dict[str, str] = {}
    for name in re.findall(r'\bid="((?:clip|gradient_)\d+)"', svg):
        numbers.setdefault(name, f"{name.rstrip('0123456789')}{len(numbers)}")
    return re.sub(r'(\bid="|url\(#)((?:clip|gradient_)\d+)(?=["\)])', lambda m: m[1] + numbers.get(m[2], m[2]), svg)


def _vl_convert() -> Any:
    """Vega, and the engine that runs it, which take half a second to start: only files of plots need them.

    Raises InputError where they are not installed: a machine that only measures may lack them.
    """
    try:
        import vl_convert  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"cannot plot without {error.name}: pip install vl-convert-python") from error
    return vl_convert


def _html(spec: Spec) -> bytes:
    # Names of runs may hold anything: "</script>" in one must not end the script that it is written in.
    text = msgspec.json.encode(spec).decode().replace("<", "\\u003c")
    title = spec.get("title", "")
    page = _PAGE.format(
        title=html.escape(str(title["text"] if isinstance(title, dict) else title)),
        library=_vl_convert().javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        spec=text,
        options=msgspec.json.encode(_OPTIONS).decode(),
    )
    return page.encode()


_WRITERS = {
    ".svg": lambda spec: plot_svg(spec).encode(),
    ".png": lambda spec: _vl_convert().vegalite_to_png(spec, scale=PNG_SCALE, allowed_base_urls=[]),
    ".html": _html,
    ".json": lambda spec: msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n",
}
