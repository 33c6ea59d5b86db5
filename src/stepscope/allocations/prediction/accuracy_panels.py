"""Predicted against measured peaks as points: on the diagonal or off it, and below how far off."""

from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.accuracy import Accuracy, Comparison
from stepscope.core.answer import Frame, Guide, Panel, Point
from stepscope.core.units import GIB
from stepscope.core.work.described import cell_name
from stepscope.core.workload import Workload

BANDS = (0.02, 0.06)
"""Shares of the measured peak: what the median error is held to, and what the worst is."""
_WIDER = 1.25
"""The axes go so much beyond the points."""


def accuracy_panels(accuracy: Accuracy) -> tuple[Panel, ...]:
    """Every run whose peak was measured; those that the prediction was corrected by stand apart."""
    judged = [each for each in accuracy.comparisons if each.measured_peak]
    apart = [each for each in accuracy.apart if each.measured_peak]
    both = [(each, False) for each in judged] + [(each, True) for each in apart]
    if not both:
        return ()
    peaks = [size / GIB for each, _ in both for size in (each.predicted.peak_bytes, each.measured_peak) if size]
    ends = (min(peaks) / _WIDER, max(peaks) * _WIDER)
    reach = 100 * _WIDER * max(BANDS[-1], *(abs(each.error or 0.0) for each, _ in both))
    frame = Frame(
        heading="Peak memory, predicted and measured",
        note=_counted(accuracy, len(apart)),
        line_title="model",
        style_title="what ran",
        x_ends=ends,
    )
    x_title = "measured peak (GiB)"
    upper = Panel(
        x_title=x_title, y_title="predicted peak (GiB)", kind="points", x_log=True, y_log=True,
        points=tuple(_point(each, each.predicted.peak_bytes / GIB, apart=hollow) for each, hollow in both),
        frame=_with(frame, ends, (*_ribbons_about_the_diagonal(ends), Guide(x=ends, y=ends))),
    )  # fmt: skip
    lower = Panel(
        x_title=x_title, y_title="error of the prediction (%)", kind="points", x_log=True, y_log=False,
        points=tuple(_point(each, 100 * (each.error or 0.0), apart=hollow) for each, hollow in both),
        frame=_with(frame, (-reach, reach), (*_ribbons_about_zero(ends), Guide(y=(0.0,)))),
    )  # fmt: skip
    return upper, lower


def _with(frame: Frame, y_ends: tuple[float, float], guides: Sequence[Guide]) -> Frame:
    return msgspec.structs.replace(frame, y_ends=y_ends, guides=tuple(guides))


def _ribbons_about_the_diagonal(ends: tuple[float, float]) -> list[Guide]:
    return [
        Guide(x=ends, y=tuple(at * (1 - band) for at in ends), to=tuple(at * (1 + band) for at in ends))
        for band in reversed(BANDS)
    ]


def _ribbons_about_zero(ends: tuple[float, float]) -> list[Guide]:
    return [
        Guide(x=ends, y=(-100 * band,) * 2, to=(100 * band,) * 2, name=f"±{100 * band:g} %") for band in reversed(BANDS)
    ]


def _point(each: Comparison, y: float, *, apart: bool) -> Point:
    return Point(
        x=(each.measured_peak or 0) / GIB, y=y, line=each.workload.model.name, style=_what_ran(each.workload),
        name=cell_name(each.workload), apart=apart,
    )  # fmt: skip


def _what_ran(workload: Workload) -> str:
    """Phase and kind of step, in words few enough for shapes."""
    phase = "inference" if workload.phase == "forward" else "training"
    compiled = ", compiled" if workload.compile != "eager" else ""
    checkpointed = ", checkpointed" if workload.checkpointing != "none" else ""
    return phase + compiled + checkpointed


def _counted(accuracy: Accuracy, apart: int) -> str:
    """How many cells judge the prediction, and their median and worst error; how many it was corrected by."""
    corrected = f"{apart} that it was corrected by, hollow" if apart else ""
    worst, median = accuracy.worst, accuracy.median_error
    if worst is None or worst.error is None or median is None:
        return corrected
    judged = f"{len(accuracy.errors)} cells judge: median error {median:.2%}, worst {abs(worst.error):.2%}"
    return "; ".join(part for part in (judged.replace("%", " %"), corrected) if part)
