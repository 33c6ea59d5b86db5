"""Tables of any set of runs: rows and columns by the fields of the workload, any figure in the cells.

A cell never mixes experiments: runs that would share a cell but differ in some other field are an error that names
the field. Of several runs of one experiment the newest stands, and a note says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import polars as pl

from stepscope.core.errors import InputError, choose
from stepscope.core.run import REPEATED, Run
from stepscope.core.samples import Samples
from stepscope.report.fields import FIELDS, IDENTIFYING, VALUES, Scalar, Value

Statistic = Literal["median", "median-interval", "mean-std"]
STATISTICS: tuple[str, ...] = get_args(Statistic)

_STATUS_TEXT = {"out-of-memory": "OOM"}
MISSING = "-"


@dataclass(frozen=True, kw_only=True)
class TableQuery:
    """What to show. `where` keeps runs whose field has one of the values (compared as text)."""

    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()
    values: tuple[str, ...] = ("step",)
    statistic: Statistic = "median"
    speedup: str | None = None
    """A label of the columns: the others also show how many times faster they are."""
    where: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.rows, *self.columns, *(field for field, _ in self.where)):
            choose(name, list(FIELDS), "field")
        for name in self.values:
            choose(name, list(VALUES), "value")
        choose(self.statistic, STATISTICS, "statistic")
        if not self.rows:
            raise InputError("a table needs rows: --rows model,seq_len for one")
        if not self.values:
            raise InputError("a table needs a value: --value step for one")
        if self.speedup is not None and not self.columns:
            raise InputError("--speedup compares columns: name them with --columns")
        twice = set(self.rows) & set(self.columns)
        if twice:
            raise InputError(f"{', '.join(sorted(twice))} cannot be both in --rows and in --columns")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Text in rows and columns, and notes below."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int
    """How many leading columns hold labels; the rest hold figures."""
    notes: tuple[str, ...] = ()


def select_runs(runs: Sequence[Run], query: TableQuery) -> tuple[list[Run], list[str]]:
    """One run a cell, in the order of the fields. Raises InputError where a cell would mix experiments."""
    kept = [run for run in runs if all(str(FIELDS[f].read(run)) in wanted for f, wanted in query.where)]
    if not kept:
        raise InputError("no runs to show" + (" are left by --where" if runs else ""))
    axes = (*query.rows, *query.columns)
    cells: dict[tuple[Scalar, ...], list[Run]] = {}
    for run in kept:
        cells.setdefault(tuple(FIELDS[name].read(run) for name in axes), []).append(run)
    chosen: list[Run] = []
    older = 0
    for labels, candidates in cells.items():
        finished = [run for run in candidates if run.status not in REPEATED] or candidates
        _refuse_mixture(labels, finished)
        newest = max(finished, key=lambda run: run.created)
        older += len(finished) - 1
        chosen.append(newest)
    chosen.sort(key=lambda run: tuple(FIELDS[name].rank(FIELDS[name].read(run)) for name in axes))
    notes = [f"{older} older runs of the same cells are left out."] if older else []
    return chosen, notes


def build_table(runs: Sequence[Run], query: TableQuery) -> Table:
    """The pivot of the runs as text, in the units that the heads name."""
    chosen, notes = select_runs(runs, query)
    labels = list(dict.fromkeys(_label(run, query.columns) for run in chosen))
    labels.sort(key=lambda label: _column_rank(label, chosen, query.columns))
    if query.speedup is not None and query.speedup not in labels:
        raise InputError(f"--speedup {query.speedup} is no column: choose one of {', '.join(labels)}")
    frame = pl.DataFrame(
        {
            "position": _row_positions(chosen, query.rows),
            **{name: [_text(FIELDS[name].read(run)) for run in chosen] for name in query.rows},
            "label": [_label(run, query.columns) for run in chosen],
            "run": list(range(len(chosen))),
        }
    )
    grid = frame.pivot(on="label", index=["position", *query.rows], values="run").sort("position")
    heads = [*query.rows]
    for label in labels:
        heads += [_head(label, name, query) for name in query.values]
        if query.speedup is not None and label != query.speedup:
            heads += [_speedup_head(label, name, query) for name in query.values]
    rows = []
    for line in grid.iter_rows(named=True):
        cells = [line[name] for name in query.rows]
        base = _run_at(chosen, line.get(query.speedup)) if query.speedup else None
        for label in labels:
            run = _run_at(chosen, line.get(label))
            cells += [_figure(run, name, query.statistic) for name in query.values]
            if query.speedup is not None and label != query.speedup:
                cells += [_speedup(run, base, name) for name in query.values]
        rows.append(tuple(cells))
    return Table(heads=tuple(heads), rows=tuple(rows), text_columns=len(query.rows), notes=tuple(notes))


def build_frame(runs: Sequence[Run], query: TableQuery) -> pl.DataFrame:
    """One line a run, figures as stored (seconds, bytes, shares): for CSV and JSON lines."""
    chosen, _ = select_runs(runs, query)
    axes = (*query.rows, *query.columns)
    columns: dict[str, list[Scalar]] = {
        "run": [run.id for run in chosen],
        "status": [run.status for run in chosen],
        **{name: [FIELDS[name].read(run) for run in chosen] for name in axes if name != "status"},
    }
    for name in query.values:
        value = VALUES[name]
        if value.samples is None:
            columns[name] = [value.number(run) if value.number else None for run in chosen]
            continue
        statistics = [_statistics(value.samples(run)) for run in chosen]
        for statistic in ("median_s", "low_s", "high_s", "mean_s", "stdev_s", "samples"):
            columns[f"{name}_{statistic}"] = [s.get(statistic) for s in statistics]
    return pl.DataFrame(columns, strict=False)


def _refuse_mixture(labels: tuple[Scalar, ...], candidates: list[Run]) -> None:
    for name in IDENTIFYING:
        found = sorted({_text(FIELDS[name].read(run)) for run in candidates})
        if len(found) > 1:
            cell = " ".join(_text(label) for label in labels)
            raise InputError(
                f"{len(candidates)} different runs share the cell '{cell}': they differ in {name} "
                f"({', '.join(found)}); add {name} to --rows or --columns, or choose with --where {name}={found[0]}"
            )


def _row_positions(runs: list[Run], rows: tuple[str, ...]) -> list[int]:
    seen: dict[tuple[Scalar, ...], int] = {}
    return [seen.setdefault(tuple(FIELDS[n].read(run) for n in rows), len(seen)) for run in runs]


def _label(run: Run, columns: tuple[str, ...]) -> str:
    return " ".join(_text(FIELDS[name].read(run)) for name in columns)


def _column_rank(label: str, runs: list[Run], columns: tuple[str, ...]) -> tuple[tuple[int, float, str], ...]:
    run = next(run for run in runs if _label(run, columns) == label)
    return tuple(FIELDS[name].rank(FIELDS[name].read(run)) for name in columns)


def _text(value: Scalar) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and value >= 100_000 else str(value)


def _head(label: str, value_name: str, query: TableQuery) -> str:
    unit = VALUES[value_name].unit
    name = value_name if len(query.values) > 1 or not label else ""
    return " ".join(part for part in (label, name, f"({unit})" if unit else "") if part)


def _speedup_head(label: str, value_name: str, query: TableQuery) -> str:
    name = f"{value_name} " if len(query.values) > 1 else ""
    return f"{label} {name}speed-up over {query.speedup}"


def _run_at(runs: list[Run], position: int | None) -> Run | None:
    return None if position is None else runs[position]


def _figure(run: Run | None, value_name: str, statistic: Statistic) -> str:
    if run is None:
        return MISSING
    if run.status != "done" and not (run.status == "interrupted" and run.samples):
        return _STATUS_TEXT.get(run.status, run.status)
    value = VALUES[value_name]
    if value.samples is None:
        number = value.number(run) if value.number else None
        return MISSING if number is None else f"{number * value.scale:,.{value.digits}f}"
    samples = value.samples(run)
    return MISSING if samples is None else _sampled(samples, value, statistic)


def _sampled(samples: Samples, value: Value, statistic: Statistic) -> str:
    def number(seconds: float) -> str:
        return f"{seconds * value.scale:.{value.digits}f}"

    if samples.median_s is None or samples.mean_s is None:
        return MISSING
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
    return f"{ratio.value:.2f}x" + (f" ± {ratio.interval.half_width:.2g}" if ratio.interval else "")


def _statistics(samples: Samples | None) -> dict[str, float | int | None]:
    if samples is None:
        return {}
    interval = samples.interval()
    return {
        "median_s": samples.median_s,
        "low_s": interval.low if interval else None,
        "high_s": interval.high if interval else None,
        "mean_s": samples.mean_s,
        "stdev_s": samples.stdev_s,
        "samples": samples.count,
    }
