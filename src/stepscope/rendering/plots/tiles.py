"""Icicles, timelines and heat maps as charts: rectangles over two axes."""

import altair as alt

from stepscope.core.answer import Panel
from stepscope.core.errors import InputError
from stepscope.core.shown_text import middle_cut, printable
from stepscope.rendering.plots.theme import FAINT, INK, PALETTE

_ROW_PX = 26
_WIDTH_PX = 760
_LEAST_LABELLED = 0.07
"""The share of the width from which a part's name is written into it."""
_LONGEST = 40
_MORE = "other"


def draw_icicle(panel: Panel, *, title: str = "", subtitle: str = "") -> alt.LayerChart | alt.FacetChart:
    """The nodes by depth from the top, each as wide as its value; the innermost are coloured by name.

    Raises InputError where there is nothing to draw.
    """
    whole = panel.nodes[0].value if panel.nodes else 0.0
    if whole <= 0:
        raise InputError("there is nothing to plot: no time in any part")
    lefts: list[float] = []
    depths: list[int] = []
    taken: dict[int, float] = {}
    rows: list[dict[str, object]] = []
    totals: dict[str, float] = {}
    for node in panel.nodes:
        if node.level == "family":
            totals[node.name] = totals.get(node.name, 0.0) + node.value
    kinds = sorted(totals, key=lambda name: -totals[name])[: len(PALETTE) - 1]
    for node in panel.nodes:
        left = (lefts[node.parent] if node.parent >= 0 else 0.0) + taken.get(node.parent, 0.0)
        depth = depths[node.parent] + 1 if node.parent >= 0 else 0
        taken[node.parent] = taken.get(node.parent, 0.0) + node.value
        lefts.append(left)
        depths.append(depth)
        kind = (node.name if node.name in kinds else _MORE) if node.level == "family" else "phases and modules"
        name = middle_cut(printable(node.name), _LONGEST) if node.value / whole >= _LEAST_LABELLED else ""
        rows.append({"left": left, "right": left + node.value, "depth": depth, "kind": printable(kind), "name": name,
                     "part": printable(node.name), "below": depth + 0.96})  # fmt: skip
    shades = ["phases and modules", *map(printable, kinds), _MORE]
    colours = ["#D9DBDF", *PALETTE[: len(kinds)], "#ADADAD"]
    base = alt.Chart(alt.Data(values=rows), height=_ROW_PX * (max(depths) + 1), width=_WIDTH_PX)
    x = alt.X("left:Q", title=panel.x_title, scale=alt.Scale(domain=[0, whole], nice=False))
    y = alt.Y("depth:Q", scale=alt.Scale(reverse=True, domain=[0, max(depths) + 1], nice=False), axis=None)
    colour = alt.Color("kind:N", scale=alt.Scale(domain=shades, range=colours), legend=alt.Legend(title=None))
    tiles = base.mark_rect(stroke="white", strokeWidth=0.6).encode(
        x=x, x2="right:Q", y=y, y2="below:Q", color=colour, tooltip=["part:N"]
    )
    words = base.mark_text(align="left", baseline="middle", dx=4, fontSize=10, color="#000000").encode(
        x=x, y=alt.Y("middle:Q", scale=alt.Scale(reverse=True, domain=[0, max(depths) + 1], nice=False), axis=None),
        text="name:N",
    ).transform_calculate(middle="datum.depth + 0.48")  # fmt: skip
    return alt.layer(tiles, words).properties(title=_titled(title, subtitle))


def draw_timeline(panel: Panel, *, title: str = "", subtitle: str = "") -> alt.Chart:
    """The slices of each lane over time. Raises InputError where there is nothing to draw."""
    if not panel.slices:
        raise InputError("there is nothing to plot: nothing ran")
    totals: dict[str, float] = {}
    for one in panel.slices:
        totals[one.kind] = totals.get(one.kind, 0.0) + one.end - one.begin
    kinds = sorted(totals, key=lambda kind: -totals[kind])[: len(PALETTE) - 1]
    rows = [
        {"lane": printable(one.lane), "begin": one.begin, "end": one.end,
         "kind": printable(one.kind) if one.kind in kinds else _MORE}
        for one in panel.slices
    ]  # fmt: skip
    lanes = list(dict.fromkeys(str(row["lane"]) for row in rows))
    domain, ends = [*map(printable, kinds), _MORE], panel.frame.x_ends
    scale = alt.Scale(domain=list(ends), nice=False) if ends else alt.Scale(nice=False)
    return (
        alt.Chart(alt.Data(values=rows), width=_WIDTH_PX, height=alt.Step(_ROW_PX), title=_titled(title, subtitle))
        .mark_bar(height=_ROW_PX - 6)
        .encode(
            x=alt.X("begin:Q", title=panel.x_title, scale=scale), x2="end:Q",
            y=alt.Y("lane:N", sort=lanes, title=None, axis=alt.Axis(labelLimit=220)),
            color=alt.Color("kind:N", scale=alt.Scale(domain=domain, range=[*PALETTE[: len(kinds)], "#ADADAD"]),
                            legend=alt.Legend(title=None, symbolType="square")),
        )
    )  # fmt: skip


def draw_heat(panel: Panel, *, title: str = "", subtitle: str = "") -> alt.LayerChart | alt.FacetChart:
    """A cell for each row and column, darker where the figure is larger, with the figure or why there is none.

    Raises InputError where no cell has a figure.
    """
    known = [point for point in panel.points if not point.missing]
    if not known:
        raise InputError("there is nothing to plot: no figure in any cell")
    rows = [
        {"down": printable(point.line), "across": printable(point.name), "y": None if point.missing else point.y,
         "said": printable(point.missing) if point.missing else f"{point.y:.4g}"}
        for point in panel.points
    ]  # fmt: skip
    across, down = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("across", "down"))
    middle = (max(point.y for point in known) + min(point.y for point in known)) / 2
    base = alt.Chart(alt.Data(values=rows), width=alt.Step(64), height=alt.Step(28)).encode(
        x=alt.X("across:N", sort=across, title=panel.x_title, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("down:N", sort=down, title=panel.frame.line_title or None),
    )
    cells = base.mark_rect(stroke="white").encode(color=alt.Color("y:Q", scale=alt.Scale(scheme="blues"), legend=None))
    dark = alt.condition(f"isValid(datum.y) && datum.y > {middle!r}", alt.value("white"), alt.value(INK))
    words = base.mark_text(fontSize=11).encode(text="said:N", color=dark)
    return alt.layer(cells, words).properties(title=_titled(title or panel.frame.heading, subtitle))


def _titled(title: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(title, subtitle=[subtitle] if subtitle else [], subtitleColor=FAINT)
