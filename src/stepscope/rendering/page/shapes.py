"""Icicles, timelines and heat maps as what the template places: shares of the width, and classes for colours."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.core.answer import Panel
from stepscope.core.units import figure_text
from stepscope.traces.captures.panels import IDLE

HUES = 10
"""Colours that the page has for kinds of work; further kinds share the last, a grey."""
IDLE_HUES = 6
"""Further colours, for the causes of idle time, which come behind them."""
_WHOLE = 1_000
"""Figures from here on are shown without decimals."""
_NARROWEST = 0.4
"""Thousandths of the width: what is narrower is not seen."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A part of an icicle, in shares of the width."""

    name: str
    said: str
    """Its time and its share of the whole, in words."""
    left: float
    width: float
    depth: int
    hue: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of a lane, in thousandths of the width."""

    left: float
    width: float
    hue: int
    said: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A lane of a timeline. All bars of one hue that say nothing of their own are one path."""

    name: str
    bars: tuple[Bar, ...]


def tiles(panel: Panel) -> list[Tile]:
    """The nodes of an icicle, each as wide as its value, children from the left of their parent."""
    nodes = panel.nodes
    whole = nodes[0].value if nodes else 0.0
    if whole <= 0:
        return []
    hues = _hues([(node.name, node.value) for node in nodes if node.level == "family"])
    taken: dict[int, float] = {}
    placed: list[Tile] = []
    for place, node in enumerate(nodes):
        above = placed[node.parent] if node.parent >= 0 else None
        left = (above.left if above else 0.0) + taken.get(node.parent, 0.0)
        width = node.value / whole
        taken[node.parent] = taken.get(node.parent, 0.0) + width
        said = f"{figure_text(node.value * 1e-3, 's')}, {figure_text(width, '%')}"
        hue = hues[node.name] if node.level == "family" else -1
        depth = above.depth + 1 if above else 0
        placed.append(Tile(name=node.name, said=said, left=left, width=width, depth=depth, hue=hue))
        assert place + 1 == len(placed)
    return placed


def lanes(panel: Panel) -> tuple[list[Lane], dict[str, int]]:
    """The lanes of a timeline, in their order, and the hue of each kind, that of the longest first."""
    begin, end = panel.frame.x_ends or (0.0, max((one.end for one in panel.slices), default=1.0))
    span = end - begin or 1.0
    hues = _hues([(one.kind, one.end - one.begin) for one in panel.slices])
    bars: dict[str, list[Bar]] = {}
    for one in panel.slices:
        what = one.name or (f"{one.count} short pieces of work, most of them {one.kind}" if one.count > 1 else one.kind)
        kind = f", {one.kind}" if one.name else ""
        said = f"{what}{kind}: {figure_text((one.end - one.begin) * 1e-3, 's')}"
        bars.setdefault(one.lane, []).append(
            Bar(
                left=round((one.begin - begin) / span * 1000, 3),
                width=round(max((one.end - one.begin) / span * 1000, _NARROWEST), 3), hue=hues[one.kind], said=said,
            )
        )  # fmt: skip
    return [Lane(name=name, bars=tuple(found)) for name, found in bars.items()], hues


def _hues(kinds: Sequence[tuple[str, float]]) -> dict[str, int]:
    """A number for each kind: work, and behind it causes of idle time, the longest first."""
    totals: Counter[str] = Counter()
    for kind, value in kinds:
        totals[kind] += value  # type: ignore[assignment]
    ordered = sorted(totals, key=lambda kind: (-totals[kind], kind))
    work, idle = ([kind for kind in ordered if kind.startswith(IDLE) is wanted] for wanted in (False, True))
    return {
        **{kind: min(place, HUES - 1) for place, kind in enumerate(work)},
        **{kind: HUES + min(place, IDLE_HUES - 1) for place, kind in enumerate(idle)},
    }


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A heat map as a table: its columns, and its rows of a name and cells of text and strength from 0 to 1."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, float | None], ...]], ...]


def heat(panel: Panel) -> Heat:
    """The cells of a heat map. Strength is by rank on the scale of values; a missing cell has none, and its reason."""
    columns = tuple(dict.fromkeys(point.name for point in panel.points))
    lines = tuple(dict.fromkeys(point.line for point in panel.points))
    at = {(point.line, point.name): point for point in panel.points}
    values = [point.y for point in panel.points if not point.missing]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = high - low or 1.0

    def cell(line: str, column: str) -> tuple[str, float | None]:
        point = at.get((line, column))
        if point is None:
            return "", None
        if point.missing:
            return point.missing, None
        return f"{point.y:,.0f}" if abs(point.y) >= _WHOLE else f"{point.y:.4g}", (point.y - low) / span

    rows = tuple((line, tuple(cell(line, column) for column in columns)) for line in lines)
    return Heat(columns=_by_number(columns), rows=tuple((name, _reordered(cells, columns)) for name, cells in rows))


def _by_number(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that are all numbers by their size, and others as they come."""
    return tuple(sorted(names, key=float)) if all(_is_number(name) for name in names) else names


def _reordered(
    cells: tuple[tuple[str, float | None], ...], columns: tuple[str, ...]
) -> tuple[tuple[str, float | None], ...]:
    at = dict(zip(columns, cells, strict=True))
    return tuple(at[name] for name in _by_number(columns))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
