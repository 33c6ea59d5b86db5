"""A table of runs as curves: the first numeric field of its rows is the axis, its other labels are the lines."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.core.answer import Frame, Panel, Point
from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE, FEWEST_FOR_PERCENTILE, OF_ONE_PROCESS
from stepscope.runs.fields import VALUES, Scalar
from stepscope.runs.tables import MISSING, TableQuery, build_records

Record = dict[str, Scalar]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The fields that say where in the plot a run stands."""

    x: str
    line: tuple[str, ...]
    style: tuple[str, ...]


def table_panels(runs: Sequence[Run], query: TableQuery) -> tuple[Panel, ...]:
    """A panel a value, a point a cell whose run is done; times carry their interval or deviation as bars.

    Colours are the other fields of the rows, dashes the columns; without other fields, colours are the columns.
    Raises InputError where no field of the rows is a number.
    """
    if query.speedup is not None:
        raise InputError("a plot shows the figures themselves: leave out --speedup, or name the values to plot")
    records = build_records(runs, query)
    done = [record for record in records if record["status"] == "done"]
    x = _axis(query, done or records)
    rest = tuple(name for name in query.rows if name != x)
    place = _Place(x=x, line=rest or query.columns, style=query.columns if rest else ())
    points = {name: [p for r in done if (p := _point(r, name, query, place)) is not None] for name in query.values}
    shown = {r["run"] for r in done if any(_figure(r, name, query)[0] is not None for name in query.values)}
    frame = Frame(
        heading=f"{', '.join(query.values)} by {x}",
        note=_note(points.values(), query, [record for record in records if record["run"] not in shown]),
        line_title=" ".join(place.line),
        style_title=" ".join(place.style),
    )
    return tuple(
        Panel(x_title=x, y_title=f"{name} ({unit})" if (unit := VALUES[name].unit) else name, points=tuple(found),
              frame=frame)
        for name, found in points.items()
    )  # fmt: skip


def _axis(query: TableQuery, records: Sequence[Record]) -> str:
    """The first field of the rows that is a number in every cell; one that varies, where there is such a one."""
    numeric = [name for name in query.rows if all(isinstance(r[name], (int, float)) for r in records)]
    if not numeric:
        raise InputError(
            f"a plot needs a number to go by, and of --rows {','.join(query.rows)} none is one: add seq_len, for one"
        )
    return next((name for name in numeric if len({record[name] for record in records}) > 1), numeric[0])


def _point(record: Record, name: str, query: TableQuery, place: _Place) -> Point | None:
    middle, low, high = _figure(record, name, query)
    at = _number(record[place.x])
    if middle is None or at is None:
        return None
    scale = VALUES[name].scale
    return Point(
        x=at,
        y=middle * scale,
        line=_label(record, place.line),
        style=_label(record, place.style),
        low=None if low is None else low * scale,
        high=None if high is None else high * scale,
        doubted=bool(record["findings"]),
    )


def _figure(record: Record, name: str, query: TableQuery) -> tuple[float | None, float | None, float | None]:
    """The figure and the ends of its bar, as stored."""
    if VALUES[name].samples is None:
        return _number(record[name]), None, None
    if query.statistic in FEWEST_FOR_PERCENTILE:
        return _number(record[f"{name}_{query.statistic}_s"]), None, None
    if query.statistic != "mean-std":
        low, high = _number(record[f"{name}_low_s"]), _number(record[f"{name}_high_s"])
        return _number(record[f"{name}_median_s"]), low, high
    mean, deviation = _number(record[f"{name}_mean_s"]), _number(record[f"{name}_stdev_s"])
    if mean is None or deviation is None:
        return mean, None, None
    return mean, mean - deviation, mean + deviation


def _number(value: Scalar) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _label(record: Record, names: Sequence[str]) -> str:
    return " ".join(MISSING if record[name] is None else str(record[name]) for name in names)


def _note(drawn: Iterable[Sequence[Point]], query: TableQuery, left_out: Sequence[Record]) -> str:
    """What points and bars are, and what is not shown."""
    points = [point for figures in drawn for point in figures]
    parts = []
    if any(VALUES[name].samples for name in query.values):
        bars = any(point.low is not None for point in points)
        if query.statistic in FEWEST_FOR_PERCENTILE:
            parts.append(f"{query.statistic} of the steps {OF_ONE_PROCESS}")
        elif query.statistic == "mean-std":
            parts.append("means" + (" ± standard deviation" if bars else ""))
        else:
            parts.append("medians" + (f" with {CONFIDENCE * 100:.0f} % intervals {OF_ONE_PROCESS}" if bars else ""))
            if any(point.low is None for point in points):
                parts.append("no bar: too few effective samples for an interval")
    if left_out:
        statuses = Counter("no such figure" if r["status"] == "done" else str(r["status"]) for r in left_out)
        parts.append("not shown: " + ", ".join(f"{n} {status}" for status, n in sorted(statuses.items())))
    return "; ".join(parts)
