"""A chart to a file, by the file's suffix: SVG, PNG, HTML or JSON. No browser, no network, nothing of the machine.

The same chart gives the same bytes, so that plots kept with results change only when their figures do.
"""

import html
import re
from pathlib import Path
from typing import Any

import altair as alt
import msgspec
import vl_convert

from stepscope.core.errors import InputError, one_line
from stepscope.core.run_directory import write_atomically
from stepscope.rendering.plots.theme import CONFIG

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


def check_target(path: Path) -> None:
    """Raises InputError unless plots are written under such a suffix and the folder is there: before work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"cannot tell how to write the plot {path}: end its name in one of {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write the plot {path}: there is no folder {path.parent}, make it first")


def is_interactive(path: Path) -> bool:
    """Whether whoever opens this file can point at things and zoom."""
    return path.suffix.lower() == ".html"


def save_plot(chart: alt.TopLevelMixin, path: Path) -> None:
    """Write the chart in the form that the suffix names. Raises InputError where it cannot be written."""
    check_target(path)
    data = _WRITERS[path.suffix.lower()](plot_spec(chart))
    try:
        write_atomically(data, path)
    except OSError as error:
        raise InputError(f"cannot write the plot {path}: {error.strerror or one_line(error)}") from error


def plot_spec(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart as Vega-Lite in the house's look."""
    # Altair would hold every part of the chart against Vega-Lite's schema, which takes longer than to draw it.
    return {**chart.to_dict(validate=False), "config": CONFIG}


def plot_svg(spec: dict[str, Any]) -> str:
    """The picture as text. Vega numbers clip paths through the life of the process; here each picture begins at 0."""
    svg = vl_convert.vegalite_to_svg(spec, allowed_base_urls=[])
    numbers: dict[str, str] = {}
    for name in re.findall(r'\bid="((?:clip|gradient_)\d+)"', svg):
        numbers.setdefault(name, f"{name.rstrip('0123456789')}{len(numbers)}")
    return re.sub(r'(\bid="|url\(#)((?:clip|gradient_)\d+)(?=["\)])', lambda m: m[1] + numbers.get(m[2], m[2]), svg)


def get_ready() -> None:
    """Start what draws plots, which takes half a second: worth a thread while something else is read."""
    plot_svg(plot_spec(alt.Chart(alt.Data(values=[{"x": 0}])).mark_point().encode(x="x:Q")))


def _html(spec: dict[str, Any]) -> bytes:
    # Names of runs may hold anything: "</script>" in one must not end the script that it is written in.
    text = msgspec.json.encode(spec).decode().replace("<", "\\u003c")
    title = spec.get("title", "")
    page = _PAGE.format(
        title=html.escape(str(title["text"] if isinstance(title, dict) else title)),
        library=vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"),
        spec=text,
        options=msgspec.json.encode(_OPTIONS).decode(),
    )
    return page.encode()


_WRITERS = {
    ".svg": lambda spec: plot_svg(spec).encode(),
    ".png": lambda spec: vl_convert.vegalite_to_png(spec, scale=PNG_SCALE, allowed_base_urls=[]),
    ".html": _html,
    ".json": lambda spec: msgspec.json.format(msgspec.json.encode(spec), indent=1) + b"\n",
}
