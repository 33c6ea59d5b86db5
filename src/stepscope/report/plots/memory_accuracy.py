"""Predicted against measured peaks: one point a cell on the diagonal or off it, and below how far off."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt

from stepscope.core.errors import InputError, printable
from stepscope.core.units import GIB
from stepscope.core.workload import Workload
from stepscope.memory.prediction.accuracy import Accuracy, Comparison
from stepscope.report.plots.axes import log_axis
from stepscope.report.plots.theme import FAINT, INK, PALETTE, SHAPES
from stepscope.work.described import cell_name

WIDTH, HEIGHT, ERROR_HEIGHT = 620, 460, 190
BANDS = (0.02, 0.06)
"""Shares of the measured peak: what the median error is held to, and what the worst is."""

Group = Literal["corrected", "judged"]
"""Whether the prediction was corrected by a cell, or is judged by it. The two are never mixed in one figure."""


@dataclass(frozen=True, kw_only=True)
class AccuracyPoint:
    """A cell whose peak was both predicted and measured."""

    model: str
    """The model, shown by the point's colour."""
    label: str
    """What was run, such as a phase or an implementation, shown by the point's shape; a plot has a handful of them."""
    predicted_bytes: int
    measured_bytes: int
    group: Group = "judged"
    cell: str = ""
    """The cell's whole name, shown where the pointer is."""

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measured peak; above zero if too much was predicted."""
        return self.predicted_bytes / self.measured_bytes - 1


def draw_memory_accuracy(points: Sequence[AccuracyPoint], *, title: str, subtitle: str = "") -> alt.TopLevelMixin:
    """Two panels over one logarithmic axis of measured peaks in GiB. Cells it was corrected by are hollow.

    Without a subtitle, one says how many cells judge, and their median and worst error.
    Raises InputError where there is nothing to draw, or more models or labels than can be told apart.
    """
    points = [point for point in points if point.measured_bytes > 0 and point.predicted_bytes > 0]
    if not points:
        raise InputError("no cell has both a predicted and a measured peak: there is nothing to plot")
    models = list(dict.fromkeys(printable(point.model) for point in points))
    labels = list(dict.fromkeys(printable(point.label) for point in points))
    if len(models) > len(PALETTE) or len(labels) > len(SHAPES):
        raise InputError(
            f"{len(models)} models and {len(labels)} labels are more than a plot can tell apart: "
            f"it has {len(PALETTE)} colours and {len(SHAPES)} shapes"
        )
    data = alt.InlineData(
        values=[
            {
                "model": printable(point.model),
                "label": printable(point.label),
                "group": point.group,
                "cell": printable(point.cell),
                "predicted": point.predicted_bytes / GIB,
                "measured": point.measured_bytes / GIB,
                "error": point.error * 100,
            }
            for point in points
        ]
    )
    ends = [*(point.predicted_bytes / GIB for point in points), *(point.measured_bytes / GIB for point in points)]
    low, high = min(ends) / 1.25, max(ends) * 1.25
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    x = alt.X("measured:Q", scale=scale, title="measured peak (GiB)", axis=log_axis(low, high))
    marks = _marks(models, labels, hollow=any(point.group == "corrected" for point in points))
    upper = alt.layer(
        *_diagonal(low, high, x, scale),
        _points(data, marks).encode(
            x=x, y=alt.Y("predicted:Q", scale=scale, title="predicted peak (GiB)", axis=log_axis(low, high))
        ),
    ).properties(width=WIDTH, height=HEIGHT)
    reach = max(1.25 * max(abs(point.error) for point in points), 1.25 * BANDS[-1]) * 100
    error = alt.Y("error:Q", title="error of the prediction (%)", scale=alt.Scale(domain=[-reach, reach], nice=False))
    lower = alt.layer(*_levels(x, error, low, high), _points(data, marks).encode(x=x, y=error)).properties(
        width=WIDTH, height=ERROR_HEIGHT
    )
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle or summary(points)))
    return alt.vconcat(upper, lower, spacing=26).properties(title=heading)


def draw_accuracy_of(accuracy: Accuracy) -> alt.TopLevelMixin:
    """Stored runs beside their predictions: every run whose peak was measured."""
    points = [_point(comparison, "judged") for comparison in accuracy.comparisons if comparison.measured_peak]
    points += [_point(comparison, "corrected") for comparison in accuracy.apart if comparison.measured_peak]
    return draw_memory_accuracy(points, title="Peak memory, predicted and measured")


def _point(comparison: Comparison, group: Group) -> AccuracyPoint:
    assert comparison.measured_peak is not None
    return AccuracyPoint(
        model=comparison.workload.model.name,
        label=_what_ran(comparison.workload),
        predicted_bytes=comparison.predicted.peak_bytes,
        measured_bytes=comparison.measured_peak,
        group=group,
        cell=cell_name(comparison.workload),
    )


def _what_ran(workload: Workload) -> str:
    """Phase and kind of step, in words few enough for shapes."""
    phase = "inference" if workload.phase == "forward" else "training"
    compiled = ", compiled" if workload.compile != "eager" else ""
    checkpointed = ", checkpointed" if workload.checkpointing != "none" else ""
    return phase + compiled + checkpointed


def summary(points: Sequence[AccuracyPoint]) -> str:
    """How many cells judge the prediction, and their median and worst error; how many it was corrected by."""
    errors = sorted(abs(point.error) for point in points if point.group == "judged")
    apart = len(points) - len(errors)
    found = f"{apart} that it was corrected by, hollow" if apart else ""
    if not errors:
        return found
    n = len(errors)
    median = (errors[(n - 1) // 2] + errors[n // 2]) / 2
    judged = f"{n} cells judge: median error {median:.2%}, worst {errors[-1]:.2%}".replace("%", " %")
    return "; ".join(part for part in (judged, found) if part)


def _marks(models: list[str], labels: list[str], *, hollow: bool) -> dict[str, Any]:
    """How a point looks: colour by model, shape by label, filled where it judges."""
    model_scale = alt.Scale(domain=models, range=list(PALETTE[: len(models)]))
    label_scale = alt.Scale(domain=labels, range=list(SHAPES[: len(labels)]))
    filled = alt.condition("datum.group === 'judged'", alt.value(0.75), alt.value(0.0))
    return {
        "color": alt.Color("model:N", scale=model_scale, legend=alt.Legend(title="model", symbolType="circle")),
        "fill": alt.Fill("model:N", scale=model_scale, legend=None),
        "shape": alt.Shape(
            "label:N", scale=label_scale, legend=alt.Legend(title="what ran") if len(labels) > 1 else None
        ),
        **({"fillOpacity": filled} if hollow else {}),
    }


def _points(data: alt.InlineData, marks: dict[str, Any]) -> alt.Chart:
    tooltip = [
        alt.Tooltip("cell:N"),
        alt.Tooltip("model:N"),
        alt.Tooltip("label:N", title="what ran"),
        alt.Tooltip("predicted:Q", title="predicted (GiB)", format=",.3f"),
        alt.Tooltip("measured:Q", title="measured (GiB)", format=",.3f"),
        alt.Tooltip("error:Q", title="error (%)", format="+.2f"),
    ]
    return (
        alt.Chart(data)
        .mark_point(size=70, strokeWidth=1.4, opacity=1, fillOpacity=0.75)
        .encode(**marks, tooltip=tooltip)
    )


def _diagonal(low: float, high: float, x: alt.X, scale: alt.Scale) -> list[alt.Chart]:
    """Where prediction equals measurement, and the ribbons of the two bounds about it."""
    y = alt.Y("predicted:Q", scale=scale)
    ribbons = [
        alt.Chart(
            alt.InlineData(
                values=[{"measured": at, "predicted": at * (1 - band), "to": at * (1 + band)} for at in (low, high)]
            )
        )
        .mark_area(clip=True, color=FAINT, opacity=0.18)
        .encode(x=x, y=y, y2="to:Q")
        for band in reversed(BANDS)
    ]
    line = alt.Chart(alt.InlineData(values=[{"measured": at, "predicted": at} for at in (low, high)]))
    return [*ribbons, line.mark_line(color=INK, strokeWidth=1).encode(x=x, y=y)]


def _levels(x: alt.X, error: alt.Y, low: float, high: float) -> list[alt.Chart]:
    """The bounds about no error, named at their right ends."""
    ribbons = [
        alt.Chart(
            alt.InlineData(values=[{"measured": at, "error": -100 * band, "to": 100 * band} for at in (low, high)])
        )
        .mark_area(color=FAINT, opacity=0.18)
        .encode(x=x, y=error, y2="to:Q")
        for band in reversed(BANDS)
    ]
    names = alt.Chart(alt.InlineData(values=[{"error": 100 * band, "name": f"±{100 * band:g} %"} for band in BANDS]))
    zero = alt.Chart(alt.InlineData(values=[{"error": 0}]))
    return [
        *ribbons,
        zero.mark_rule(color=INK, strokeWidth=1).encode(y=error),
        names.mark_text(align="left", color=FAINT, x=WIDTH + 6).encode(y=error, text="name:N"),
    ]
