"""The history of stored runs as an Answer: a row for each trend, and the changes of level that were found."""

from collections.abc import Sequence
from typing import Any

from stepscope.core.answer import Answer, Cell, Frame, Guide, Panel, Point, Table, as_lines, table_of
from stepscope.core.finding import Finding, note, warning
from stepscope.core.units import counted
from stepscope.runs.history.levels import FEWEST_BESIDE
from stepscope.runs.history.trends import LevelChange, Moment, Trend

_HOW = (
    "A change of level is a place at which the medians before and after differ by the Mann-Whitney test at 5 % over "
    f"all places of all trends together, with {FEWEST_BESIDE} or more on each side; runs of one set count once."
)


def answer_history(trends: Sequence[Trend]) -> Answer:
    """The Answer with a row for each trend, and one for each change."""
    rows: list[tuple[Cell, ...]] = [_row(trend) for trend in trends]
    table = table_of(
        "workload", "device", ("runs", ",d"), "first", "last", ("step", "s"), ("since the start", "{:+.1f} %"),
        ("changes", ",d"), ("could be found", "{:.1f} %"),
        title="trends", rows=rows, notes=as_lines(_HOW, *_not_measured(trends)),
    )  # fmt: skip
    return Answer(
        study="history", question="How did the step's time change?", tables=(table, *_changes(trends)),
        findings=tuple(_finding(trend, change) for trend in trends for change in trend.changes),
    )  # fmt: skip


def answer_trend(trend: Trend) -> Answer:
    """The Answer with every run of one trend, and its panel."""
    begins = {change.place for change in trend.changes}
    rows: list[tuple[Cell, ...]] = [
        (
            one.run.created[:16].replace("T", " "), one.commit or None, one.step_s, len(one.runs.measured),
            one.run.tag, "new level" if i in begins else None,
        )
        for i, one in enumerate(trend.moments)
    ]  # fmt: skip
    table = table_of(
        "run",
        "commit",
        ("step", "s"),
        ("processes", ",d"),
        "tag",
        "level",
        title="runs",
        rows=rows,
        notes=as_lines(*_could_be_found(trend), *_not_measured([trend])),
    )
    return Answer(
        study="history", question=f"How did the step's time of {trend.key} change?", device=trend.device,
        tables=(table, *_changes([trend])), panels=_panel(trend),
        findings=tuple(_finding(trend, change) for change in trend.changes),
    )  # fmt: skip


def history_as_json(trends: Sequence[Trend]) -> dict[str, Any]:
    """Plain data: every trend with its points and changes; seconds and shares."""
    return {"version": 1, "trends": [_trend_as_json(trend) for trend in trends]}


def _trend_as_json(trend: Trend) -> dict[str, Any]:
    return {
        "workload": trend.key, "device": trend.device, "unmeasured": trend.unmeasured,
        "detectable": trend.detectable,
        "points": [
            {
                "run": one.run.id, "created": one.run.created, "commit": _commit(one),
                "dirty": one.run.environment.code[1] if one.run.environment else None, "step_s": one.step_s,
                "processes": len(one.runs.measured),
            }
            for one in trend.moments
        ],
        "changes": [
            {
                "before": change.before.run.id, "after": change.after.run.id,
                "commits": [_commit(change.before), _commit(change.after)], "before_s": change.before_s,
                "after_s": change.after_s, "change": change.share, "p_value": change.p_value,
                "environment": list(change.environment),
            }
            for change in trend.changes
        ],
    }  # fmt: skip


def _commit(moment: Moment) -> str | None:
    return moment.run.environment.code[0] if moment.run.environment else None


def _row(trend: Trend) -> tuple[Cell, ...]:
    moments = trend.moments
    runs = sum(len(one.runs.runs) for one in moments) or trend.unmeasured
    first = trend.changes[0].before_s if trend.changes else None
    last = trend.changes[-1].after_s if trend.changes else None
    return (
        trend.key, trend.device, runs,
        moments[0].run.day if moments else None, moments[-1].run.day if moments else None,
        moments[-1].step_s if moments else None, (last / first - 1) * 100 if first and last else None,
        len(trend.changes), trend.detectable * 100 if trend.detectable is not None else None,
    )  # fmt: skip


def _changes(trends: Sequence[Trend]) -> tuple[Table, ...]:
    rows: list[tuple[Cell, ...]] = [
        (
            change.after.run.day, trend.key, change.before.commit or None, change.after.commit or None,
            change.before_s, change.after_s, change.share * 100, change.p_value, "; ".join(change.environment) or None,
        )
        for trend in trends
        for change in trend.changes
    ]  # fmt: skip
    if not rows:
        return ()
    return (
        table_of(
            "day", "workload", "last before", "first after", ("from", "s"), ("to", "s"), ("change", "{:+.1f} %"),
            ("p", ".1g"), "environment", title="changes of level", rows=rows,
            notes=as_lines("A + behind a commit: files had been changed since."),
        ),
    )  # fmt: skip


def _finding(trend: Trend, change: LevelChange) -> Finding:
    slower = change.share > 0
    commits = f" between {change.before.commit} and {change.after.commit}" if change.before.commit else ""
    also = f"; {', '.join(change.environment)} changed at the same time" if change.environment else ""
    sentence = (
        f"{trend.key} became {abs(change.share) * 100:.1f} % {'slower' if slower else 'faster'} by "
        f"{change.after.run.day}{commits} (p {change.p_value:.1g}){also}."
    )
    evidence = {"before_s": change.before_s, "after_s": change.after_s, "p_value": change.p_value}
    remedy = "measure both commits in one session, by --repeat 5, to be sure that the code did it" if slower else ""
    return (warning if slower else note)("level-change", sentence, evidence, remedy)


def _could_be_found(trend: Trend) -> list[str]:
    points = counted(len(trend.moments), "point")
    if trend.detectable is None:
        return [f"{points}: too few in the newest level to find a change in it, however large."]
    share = f"{trend.detectable * 100:.1f} %"
    return [f"In the middle of the newest level a change of {share} would be found in nine of ten."]


def _not_measured(trends: Sequence[Trend]) -> list[str]:
    missing = sum(trend.unmeasured for trend in trends)
    return [f"{counted(missing, 'run')} without a measured step left out."] if missing else []


def _panel(trend: Trend) -> tuple[Panel, ...]:
    """The medians in the order of the runs, and the levels."""
    moments = trend.moments
    if not moments:
        return ()
    points = tuple(Point(line="step", x=i + 1, y=one.step_s * 1e3) for i, one in enumerate(moments))
    ends = [0, *(change.place for change in trend.changes), len(moments)]
    levels = [change.before_s for change in trend.changes] + [change.after_s for change in trend.changes[-1:]]
    guides = tuple(
        Guide(x=(a + 1, b), y=(level * 1e3, level * 1e3), name="level" if not i else "")
        for i, (a, b, level) in enumerate(zip(ends, ends[1:], levels, strict=False))
    )
    note_ = f"medians of runs, oldest first, {moments[0].run.day} to {moments[-1].run.day}"
    frame = Frame(heading=f"{trend.key} on {trend.device}", note=note_, guides=guides)
    return (Panel(x_title="run", y_title="step, ms", points=points, x_log=False, y_log=False, frame=frame),)
