"""What changed between two captures, per traced step: by phase and family, kernel, operator and module.

Times are sums of the durations of device work (of CPU operators' own times, in traces of a CPU), copies and fills
included, divided by the number of steps of each capture. A kernel is told by its full name; between profilers, whose
demanglers differ, by one spelling of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import polars as pl

from stepscope.core.answer import Answer, Cell, Line, Table, Tone, as_lines, table_of
from stepscope.core.errors import InputError, name_shown
from stepscope.core.units import format_seconds
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.captures.summary import LAYERS_TOGETHER, NO_MODULE
from stepscope.traces.kernels.families import one_spelling
from stepscope.traces.kernels.names import kernel_labels

NAMED = 3
"""Changes that the summary names, at most."""

NAMED_SHARE = 0.05
"""A change worth naming: its part of all changes together, up and down. Smaller ones are noise beside the first."""


ROWS_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class CaptureComparison:
    """Two captures, `before` and `after`, per step.

    `places` and `kernels` have before_ns, after_ns, difference_ns, before_calls, after_calls, and `share`: the size of
    the difference as a part of all rows' differences, up and down together, so that it means something where they
    cancel; null where nothing differs. `places` is by phase (null outside all phases) and family; `kernels` by name and
    family (that of most of its time), with `change`: "appeared", "disappeared" or "both". `operators` is by the
    operator that launched the work, null outside all; `modules` by module, all layers together. The largest come first.
    """

    before_ns: float
    after_ns: float
    before_steps: int
    after_steps: int
    places: pl.DataFrame
    kernels: pl.DataFrame
    operators: pl.DataFrame
    modules: pl.DataFrame
    on_cpu: bool
    caveats: tuple[str, ...]

    @property
    def difference_ns(self) -> float:
        """Change of the time per step in nanoseconds; below zero where the step became shorter."""
        return self.after_ns - self.before_ns

    @cached_property
    def summary(self) -> str:
        """One sentence with its figures: the step's time before and after, and the largest changes."""
        what = "operator time" if self.on_cpu else "device time"
        relative = f" ({self.difference_ns / self.before_ns * 100:+.1f} %)" if self.before_ns else ""
        relative = " (less than 0.05 %)" if relative in (" (+0.0 %)", " (-0.0 %)") else relative
        went = f"The step's {what} went from {_time(self.before_ns)} to {_time(self.after_ns)}{relative}"
        changes: list[str] = []
        for row in self.places.head(NAMED).iter_rows(named=True):
            if (row["share"] or 0.0) >= NAMED_SHARE:
                where = f"in {row['phase']}" if row["phase"] else "outside the phases"
                sign = "+" if row["difference_ns"] > 0 else "-"
                changes.append(f"{row['family']} {sign}{_time(abs(row['difference_ns']))} {where}")
        return f"{went}: {', '.join(changes)}." if changes else f"{went}, and no family changed."

    def self_check(self) -> None:
        """Raise AssertionError unless each table's rows add up to the totals (but for rounding)."""
        for frame in (self.places, self.kernels, self.operators, self.modules):
            for column, total in (("before_ns", self.before_ns), ("after_ns", self.after_ns)):
                assert abs(float(frame[column].sum()) - total) <= 1e-9 * max(1.0, total), f"{column} does not add up"


def compare_captures(before: Attribution, after: Attribution) -> CaptureComparison:
    """What changed from one capture to the other. Raises InputError where one is of a CPU and the other of a device."""
    if before.work.height and after.work.height and before.table.on_cpu != after.table.on_cpu:
        raise InputError(
            "one capture holds CPU operators only, the other device work: their times cannot be compared; "
            "capture both on the same kind of device"
        )
    one_tongue = before.table.profiler == after.table.profiler
    kernels = _joined(_by_kernel(before, one_tongue), _by_kernel(after, one_tongue), ["key"]).drop("key")
    return CaptureComparison(
        before_ns=before.busy_ns / before.steps,
        after_ns=after.busy_ns / after.steps,
        before_steps=before.steps,
        after_steps=after.steps,
        places=_joined(_by_place(before), _by_place(after), ["phase", "family"]),
        kernels=kernels.with_columns(
            pl.when(pl.col("before_calls") == 0)
            .then(pl.lit("appeared"))
            .when(pl.col("after_calls") == 0)
            .then(pl.lit("disappeared"))
            .otherwise(pl.lit("both"))
            .alias("change")
        ),
        operators=_joined(_by(before, pl.col("operator")), _by(after, pl.col("operator")), ["name"]),
        modules=_joined(_by(before, LAYERS_TOGETHER), _by(after, LAYERS_TOGETHER), ["name"]),
        on_cpu=before.table.on_cpu or after.table.on_cpu,
        caveats=tuple(_caveats(before, after)),
    )


def _totals(attribution: Attribution) -> list[pl.Expr]:
    return [
        (pl.col("duration_ns").sum() / attribution.steps).alias("ns"),
        (pl.len() / attribution.steps).alias("calls"),
    ]


def _by_place(attribution: Attribution) -> pl.DataFrame:
    totals = attribution.work.group_by("phase", "family").agg(_totals(attribution))
    return totals.with_columns(pl.col("phase", "family").cast(pl.String))


def _by(attribution: Attribution, name: pl.Expr) -> pl.DataFrame:
    return attribution.work.group_by(name.cast(pl.String).alias("name")).agg(_totals(attribution))


def _by_kernel(attribution: Attribution, as_written: bool) -> pl.DataFrame:
    """Totals by `key`, a kernel's name or its one spelling, with the name and family that have most of its time.

    One name may serve several families: an add, in backward and in the optimizer.
    """
    totals = attribution.work.group_by("name", "family").agg(_totals(attribution))
    names = totals["name"].cast(pl.String)
    keys = names if as_written else pl.Series([one_spelling(name) for name in names.to_list()], dtype=pl.String)
    return (
        totals.with_columns(keys.alias("key"), names, pl.col("family").cast(pl.String))
        .sort("ns", "name", "family", descending=[True, False, False])
        .group_by("key", maintain_order=True)
        .agg(pl.col("name", "family").first(), pl.col("ns", "calls").sum())
    )


def _joined(before: pl.DataFrame, after: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Both sides in one frame, with zeros where one lacks the row, the largest difference first.

    Labels beside `by` are those after, or before where there is none after.
    """
    both = before.join(after, on=by, how="full", coalesce=True, nulls_equal=True, suffix="_after")
    labels = [name for name in before.columns if name not in {*by, "ns", "calls"}]
    sizes = pl.col("difference_ns").abs()
    return (
        both.select(
            *by,
            *(pl.coalesce(f"{label}_after", label).alias(label) for label in labels),
            pl.col("ns").fill_null(0.0).alias("before_ns"),
            pl.col("ns_after").fill_null(0.0).alias("after_ns"),
            pl.col("calls").fill_null(0.0).alias("before_calls"),
            pl.col("calls_after").fill_null(0.0).alias("after_calls"),
        )
        .with_columns((pl.col("after_ns") - pl.col("before_ns")).alias("difference_ns"))
        .with_columns(pl.when(sizes.sum() > 0).then(sizes / sizes.sum()).alias("share"))
        .sort(sizes, *by, descending=[True, *[False] * len(by)])
    )


def _caveats(before: Attribution, after: Attribution) -> Iterator[str]:
    """What sets the captures apart beside the program, in sentences."""
    one, other = before.table, after.table
    if one.profiler != other.profiler:
        yield f"the captures were made by {one.profiler} and {other.profiler}, whose own cost differs"
    names = [sorted(set(table.devices.values())) for table in (one, other)]
    if all(names) and names[0] != names[1]:
        yield f"the captures are of different devices: {', '.join(names[0])}, and {', '.join(names[1])}"
    numbers = [table.work["device"].n_unique() for table in (one, other)]
    if numbers[0] != numbers[1] and all(numbers):
        yield f"device time is summed over {numbers[0]} devices before and {numbers[1]} after"
    for when, attribution in (("before", before), ("after", after)):
        if attribution.work.height and not attribution.instances.height:
            yield f"no step or phase is marked in the capture {when}: all of it counts as one step"


def _time(nanoseconds: float) -> str:
    return format_seconds(nanoseconds * 1e-9)


def answer_captures(comparison: CaptureComparison, before: str, after: str, part: str = "") -> Answer:
    """The sentence, a table by phase and family, and one by kernel.

    `before` and `after` name the captures, `part` the part of them that is compared.
    """
    cautions = [Line(f"Take care: {caveat}.", "care") for caveat in comparison.caveats]
    compared = f"{after} against {before}{f', only {part}' if part else ''}"
    return Answer(
        study="trace",
        question=f"What changed from {before} to {after}?",
        lead=(Line(compared, "strong"), *as_lines(comparison.summary), *cautions),
        tables=(
            _place_table(comparison),
            _kernel_table(comparison),
            *_named_tables("operator", comparison.operators),
            *_named_tables("module", comparison.modules),
        ),
    )


def comparison_as_json(comparison: CaptureComparison) -> dict[str, Any]:
    """Plain data: nanoseconds and calls per step; what there is none of is null."""
    figures = ("before_ns", "after_ns", "difference_ns", "before_steps", "after_steps", "summary")
    return {
        **{name: getattr(comparison, name) for name in figures},
        "caveats": list(comparison.caveats),
        "places": comparison.places.to_dicts(),
        "kernels": comparison.kernels.to_dicts(),
        "operators": comparison.operators.to_dicts(),
        "modules": comparison.modules.to_dicts(),
    }


_FIGURES = (
    ("before", "ms of s"),
    ("after", "ms of s"),
    ("change", "+ms of s"),
    ("share", "%"),
    ("calls before", "g"),
    ("calls after", "g"),
)


def _place_table(comparison: CaptureComparison) -> Table:
    shown, rest = comparison.places.head(ROWS_SHOWN), comparison.places[ROWS_SHOWN:]
    rows = [(row["family"], row["phase"] or "outside", *_figures(row)) for row in shown.iter_rows(named=True)]
    rows += [(f"{rest.height} more families", None, *_figures(_sums(rest)))] if rest.height else []
    total = ("all", None, *_figures(_sums(comparison.places) | {"share": None}))
    tones = {**_tones(shown, rest), len(rows): "strong"}
    return table_of("family, ms a step", "phase", *_FIGURES, rows=[*rows, total], rules=(len(rows),), tones=tones)


def _kernel_table(comparison: CaptureComparison) -> Table:
    shown, rest = comparison.kernels.head(ROWS_SHOWN), comparison.kernels[ROWS_SHOWN:]
    labels = kernel_labels(shown["name"].to_list())
    words = {"appeared": "new", "disappeared": "gone"}
    rows = [(labels[row["name"]], words.get(row["change"]), *_figures(row)) for row in shown.iter_rows(named=True)]
    rows += [(f"{rest.height} more kernels", None, *_figures(_sums(rest)))] if rest.height else []
    return table_of("kernel, ms a step", "status", *_FIGURES, rows=rows, tones=_tones(shown, rest))


def _named_tables(what: str, frame: pl.DataFrame) -> Iterator[Table]:
    """The table by operator or module; none where the captures name none."""
    if not frame["name"].is_in([NO_MODULE, ROOT]).fill_null(True).not_().any():
        return
    outside = {"operator": "(in no operator)", "module": "(no module known)"}[what]
    labels = {None: outside, NO_MODULE: outside, ROOT: "(the model itself)"}
    shown, rest = frame.head(ROWS_SHOWN), frame[ROWS_SHOWN:]
    rows = [(labels.get(row["name"]) or name_shown(row["name"]), *_figures(row)) for row in shown.iter_rows(named=True)]
    rows += [(f"{rest.height} more {what}s", *_figures(_sums(rest)))] if rest.height else []
    yield table_of(f"{what}, ms a step", *_FIGURES, rows=rows, tones=_tones(shown, rest))


def _sums(frame: pl.DataFrame) -> dict[str, float | None]:
    columns = ["before_ns", "after_ns", "difference_ns", "before_calls", "after_calls"]
    shares = frame["share"].drop_nulls()
    return frame.select(pl.col(columns).sum()).row(0, named=True) | {
        "share": float(shares.sum()) if len(shares) else None
    }


def _figures(row: dict[str, Any]) -> tuple[Cell, ...]:
    """Seconds before and after, their change, its share, and the calls."""
    return (
        row["before_ns"] * 1e-9 if row["before_calls"] else None,
        row["after_ns"] * 1e-9 if row["after_calls"] else None,
        row["difference_ns"] * 1e-9,
        row["share"],
        row["before_calls"] or None,
        row["after_calls"] or None,
    )


def _tones(shown: pl.DataFrame, rest: pl.DataFrame) -> dict[int, Tone]:
    """Quiet are rows that changed by less than 1 us and 1 %, and the row of all that is not shown."""
    size = pl.col("difference_ns").abs()
    small = shown.select((size < 1_000) & (size < 0.01 * pl.col("before_ns"))).to_series().arg_true().to_list()
    return dict.fromkeys([*small, *([shown.height] if rest.height else [])], "aside")
