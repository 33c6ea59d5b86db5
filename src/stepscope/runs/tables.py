"""Tables of any set of runs: rows and columns by the fields of the workload, any figure in the cells.

A cell never mixes experiments: runs that would share a cell but differ in some other field are an error that names
the field. Of several runs of one experiment the newest stands, and a note says so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stepscope.core.answer import TEXT, Answer, Frame, Panel, Point, Table, as_lines
from stepscope.core.errors import InputError, choose, printable
from stepscope.core.figures import doubting_kinds, doubts_sentence, marked
from stepscope.core.run import REPEATED, Run
from stepscope.core.samples import CONFIDENCE, FEWEST_FOR_PERCENTILE, OF_ONE_PROCESS, Samples
from stepscope.core.units import counted
from stepscope.runs.answer import status_word
from stepscope.runs.fields import (
    IDENTIFYING,
    MISSING,
    VALUES,
    Condition,
    Scalar,
    Value,
    argument_fields,
    check_arguments,
    field_named,
    field_text,
    in_words,
    meeting,
)
from stepscope.runs.run_sets import Disagreement, disagreeing, disagreement, sets_of

Statistic = Literal["median", "median-interval", "mean-std", "p95", "p99"]
STATISTICS: tuple[str, ...] = get_args(Statistic)


@dataclass(frozen=True, kw_only=True)
class TableQuery:
    """What to show. `where` keeps runs whose field has one of the values (compared as text)."""

    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    values: tuple[str, ...] = ("step",)
    statistic: Statistic = "median"
    speedup: str | None = None
    """A label of the columns: the others also show how many times faster they are."""
    where: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.rows, *self.columns, *(field for field, _ in self.where)):
            field_named(name)
        for name in self.values:
            choose(name, list(VALUES), "value")
        choose(self.statistic, STATISTICS, "statistic")
        for names, option in ((self.rows, "--rows"), (self.columns, "--columns"), (self.values, "--value")):
            if len(set(names)) < len(names):
                raise InputError(f"{option} names something twice: {', '.join(names)}")
        if not self.rows:
            raise InputError("a table needs rows: --rows model,seq_len for one")
        if not self.values:
            raise InputError("a table needs a value: --value step for one")
        if self.speedup is not None and not self.columns:
            raise InputError("--speedup compares columns: name them with --columns")
        twice = set(self.rows) & set(self.columns)
        if twice:
            raise InputError(f"{', '.join(sorted(twice))} cannot be both in --rows and in --columns")


def select_runs(runs: Sequence[Run], query: TableQuery) -> tuple[list[Run], list[str]]:
    """A run for each cell, in the order of the fields, and notes. Raises InputError if a cell would mix experiments."""
    kept, notes = meeting(runs, query.where)
    if not kept:
        raise InputError(f"no runs to show{f' with {in_words(query.where)}' if runs and query.where else ''}")
    axes = (*query.rows, *query.columns)
    check_arguments(kept, axes)
    cells: dict[tuple[Scalar, ...], list[Run]] = {}
    for run in kept:
        cells.setdefault(_labels(run, axes), []).append(run)
    chosen: list[Run] = []
    older = sets = 0
    apart: list[Disagreement | None] = []
    for labels, candidates in cells.items():
        finished = [run for run in candidates if run.status not in REPEATED] or candidates
        for field in (*IDENTIFYING, *argument_fields(finished)):
            # A run that ended before it could look round knows no device: it contradicts none.
            values = {field_named(field).read(run) for run in finished if run.environment is not None}
            texts = [field_text(value) for value in sorted(values, key=field_named(field).rank)]
            if len(texts) > 1:
                cell = " ".join(field_text(label) for label in labels)
                raise InputError(
                    f"{len(finished)} different runs share the cell '{cell}': they differ in {field} "
                    f"({', '.join(texts)}); add {field} to --rows or --columns, or choose with --where "
                    f"{field}={texts[0]}"
                )
        newest = sets_of(finished)[-1]
        chosen.append(newest.representative)
        shown = set(map(id, newest.runs))
        left_out = [run for run in finished if id(run) not in shown]
        apart += [disagreement(newest.representative, left_out, name) for name in query.values if VALUES[name].samples]
        older += len(finished) - len(newest.runs)
        sets += len(newest.runs) > 1
    chosen.sort(key=lambda run: _ranks(run, axes))
    notes += [f"{older} older run{'s' if older > 1 else ''} of the same cells left out."] if older else []
    if sets:
        which = "Every cell is" if sets == len(chosen) else f"{counted(sets, 'cell')} {'is' if sets == 1 else 'are'}"
        notes.append(
            f"{which} of several processes: the one in the middle by its step is shown; `stepscope compare` takes all."
        )
    return chosen, [*notes, *(finding.sentence for finding in disagreeing(apart))]


def build_table(runs: Sequence[Run], query: TableQuery) -> Table:
    """The pivot of the runs as text, in the units that the heads name.

    A figure of a run that its own findings doubt is marked: * for a warning, ! for an error, and the notes say why.
    """
    chosen, notes = select_runs(runs, query)
    at = {(_labels(run, query.rows), _label(run, query.columns)): run for run in chosen}
    rows = list(dict.fromkeys(row for row, _ in at))
    by_rank = sorted(chosen, key=lambda run: _ranks(run, query.columns))
    labels = list(dict.fromkeys(_label(run, query.columns) for run in by_rank))
    if query.speedup is not None and query.speedup not in labels:
        raise InputError(f"--speedup {query.speedup} is no column: choose one of {'; '.join(labels)}")
    heads = [*query.rows]
    for label in labels:
        heads += [_head(label, name, query) for name in query.values]
        for name in _compared(label, query):
            value_name = f"{name} " if len(query.values) > 1 else ""
            heads.append(f"{label} {value_name}speed-up over {query.speedup}")
    lines = []
    for row in rows:
        line = [field_text(value) for value in row]
        base = at.get((row, query.speedup or ""))
        for label in labels:
            run = at.get((row, label))
            line += [_figure(run, name, query.statistic) for name in query.values]
            line += [_speedup(run, base, name) for name in _compared(label, query)]
        lines.append(tuple(line))
    notes += _about_samples(chosen, query)
    doubts = doubts_sentence(chosen)
    notes += [doubts] if doubts else []
    labels_end = len(query.rows)
    return Table(
        title="",
        columns=tuple(heads),
        rows=tuple(lines),
        notes=as_lines(*notes),
        units=tuple("" if i < labels_end else TEXT for i in range(len(heads))),
    )


def answer_table(runs: Sequence[Run], query: TableQuery, *, bare: bool) -> Answer:
    """The pivot of the runs; or, for programs, one row a run with bare figures as they are stored."""
    if not bare:
        return Answer(study="table", question="", tables=(build_table(runs, query),))
    records = build_records(runs, query)
    columns = tuple(dict.fromkeys(name for record in records for name in record))
    rows = tuple(tuple(map(record.get, columns)) for record in records)
    return Answer(study="table", question="", tables=(Table(title="", columns=columns, rows=rows),))


def build_records(runs: Sequence[Run], query: TableQuery) -> list[dict[str, Scalar]]:
    """One record a run, figures as stored (seconds, bytes, shares): for CSV and JSON lines."""
    chosen, _ = select_runs(runs, query)
    records: list[dict[str, Scalar]] = []
    for run in chosen:
        record: dict[str, Scalar] = {"run": run.id, "status": run.status}
        record |= {name: field_named(name).read(run) for name in (*query.rows, *query.columns)}
        for name in query.values:
            value = VALUES[name]
            if value.samples is None:
                record[name] = value.number(run) if value.number else None
            else:
                record |= {f"{name}_{key}": figure for key, figure in _statistics(value.samples(run)).items()}
        record["findings"] = " ".join(doubting_kinds(run))
        records.append(record)
    return records


def _labels(run: Run, names: tuple[str, ...]) -> tuple[Scalar, ...]:
    return tuple(field_named(name).read(run) for name in names)


def _ranks(run: Run, names: tuple[str, ...]) -> tuple[tuple[int, float, str], ...]:
    """What cells are sorted by."""
    fields = [field_named(name) for name in names]
    return tuple(field.rank(field.read(run)) for field in fields)


def _compared(label: str, query: TableQuery) -> list[str]:
    """The values of this column that are compared with the baseline's."""
    if query.speedup is None or label == query.speedup:
        return []
    return [name for name in query.values if VALUES[name].samples is not None]


def _about_samples(runs: Sequence[Run], query: TableQuery) -> Iterator[str]:
    """Why percentiles are missing, what the intervals are of, and how many figures have none."""
    sampled = [VALUES[name].samples for name in query.values]
    shown = [samples for read in sampled if read for run in runs if (samples := read(run)) and samples.count]
    fewest = FEWEST_FOR_PERCENTILE.get(query.statistic)
    if fewest is not None:
        if without := sum(samples.count < fewest for samples in shown):
            yield f"{without} of {len(shown)} have no {query.statistic}: it needs {fewest} samples."
        if query.speedup is not None:
            yield "Speed-ups are of medians."
    if not shown or (query.statistic != "median-interval" and query.speedup is None):
        return
    which = "Intervals" if query.statistic == "median-interval" else "The ± of a speed-up"
    yield f"{which}: {CONFIDENCE * 100:.0f} %, {OF_ONE_PROCESS} each; other processes may differ by more."
    if without := sum(samples.why_no_interval is not None for samples in shown):
        yield (
            f"How exact {without} of {len(shown)} medians are cannot be told: their samples are too few, or too much "
            "like their neighbours, for an interval."
        )


def _label(run: Run, columns: tuple[str, ...]) -> str:
    return " ".join(MISSING if value is None else printable(str(value)) for value in _labels(run, columns))


def _head(label: str, value_name: str, query: TableQuery) -> str:
    value = VALUES[value_name]
    name = value_name if len(query.values) > 1 or not label else ""
    percentile = query.statistic if value.samples and query.statistic in FEWEST_FOR_PERCENTILE else ""
    return " ".join(part for part in (label, name, percentile, f"({value.unit})" if value.unit else "") if part)


def _figure(run: Run | None, value_name: str, statistic: Statistic) -> str:
    if run is None:
        return MISSING
    if run.status != "done" and not (run.status == "interrupted" and run.samples):
        return status_word(run)
    value = VALUES[value_name]
    if value.samples is None:
        number = value.number(run) if value.number else None
        said = f"{(number or 0) * value.scale:,.{value.digits}f}"
        return MISSING if number is None else marked(said, run, of_memory=value.unit in ("MiB", "GiB"))
    samples = value.samples(run)
    return MISSING if samples is None else marked(_sampled(samples, value, statistic), run)


def _sampled(samples: Samples, value: Value, statistic: Statistic) -> str:
    def number(seconds: float) -> str:
        return f"{seconds * value.scale:.{value.digits}f}"

    if samples.median_s is None or samples.mean_s is None:
        return MISSING
    if statistic in FEWEST_FOR_PERCENTILE:
        percentile = samples.percentile_s(statistic)
        return MISSING if percentile is None else number(percentile)
    if statistic == "mean-std":
        deviation = f" ± {number(samples.stdev_s)}" if samples.stdev_s is not None else ""
        return f"{number(samples.mean_s)}{deviation}"
    interval = samples.interval() if statistic == "median-interval" else None
    bounds = f" [{number(interval.low)}, {number(interval.high)}]" if interval else ""
    return f"{number(samples.median_s)}{bounds}"


def _speedup(run: Run | None, base: Run | None, value_name: str) -> str:
    value = VALUES[value_name]
    if run is None or base is None or value.samples is None:
        return MISSING
    samples, base_samples = value.samples(run), value.samples(base)
    ratio = samples.speedup_over(base_samples) if samples and base_samples else None
    if ratio is None:
        return MISSING
    if ratio.interval is None:
        return marked(f"{ratio.value:.2f}x", run, base)
    # Below a hundredth it would claim more than processes repeat.
    half_width = ratio.interval.half_width
    return marked(f"{ratio.value:.2f}x ± {f'{half_width:.2f}' if half_width >= 0.01 else '<0.01'}", run, base)


def _statistics(samples: Samples | None) -> dict[str, float | int | None]:
    interval = samples.interval() if samples else None
    return {
        "median_s": samples.median_s if samples else None,
        "low_s": interval.low if interval else None,
        "high_s": interval.high if interval else None,
        "mean_s": samples.mean_s if samples else None,
        "stdev_s": samples.stdev_s if samples else None,
        "p95_s": samples.percentile_s("p95") if samples else None,
        "p99_s": samples.percentile_s("p99") if samples else None,
        "samples": samples.count if samples else None,
        "effective_samples": samples.effective_count if samples else None,
    }


# A table of runs as curves: the first numeric field of its rows is the axis, its other labels are the lines.


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
    shown = {r["run"] for r in done if any(_panel_figure(r, name, query)[0] is not None for name in query.values)}
    frame = Frame(
        heading=f"{', '.join(query.values)} by {x}",
        note=_note(points.values(), query, [record for record in records if record["run"] not in shown]),
        line_title=" ".join(place.line),
        style_title=" ".join(place.style),
    )
    return tuple(
        Panel(
            x_title=x,
            y_title=f"{name} ({unit})" if (unit := VALUES[name].unit) else name,
            points=tuple(places),
            frame=frame,
        )
        for name, places in points.items()
    )


def _axis(query: TableQuery, records: Sequence[Record]) -> str:
    """The first field of the rows that is a number in every cell; one that varies, where there is such a one."""
    numeric = [name for name in query.rows if all(isinstance(r[name], (int, float)) for r in records)]
    if not numeric:
        raise InputError(
            f"a plot needs a number to go by, and of --rows {','.join(query.rows)} none is one: add seq_len, for one"
        )
    return next((name for name in numeric if len({record[name] for record in records}) > 1), numeric[0])


def _point(record: Record, name: str, query: TableQuery, place: _Place) -> Point | None:
    middle, low, high = _panel_figure(record, name, query)
    at = _number(record[place.x])
    if middle is None or at is None:
        return None
    scale = VALUES[name].scale
    return Point(
        x=at,
        y=middle * scale,
        line=_panel_label(record, place.line),
        style=_panel_label(record, place.style),
        low=None if low is None else low * scale,
        high=None if high is None else high * scale,
        doubted=bool(record["findings"]),
    )


def _panel_figure(record: Record, name: str, query: TableQuery) -> tuple[float | None, float | None, float | None]:
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


def _panel_label(record: Record, names: Sequence[str]) -> str:
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
