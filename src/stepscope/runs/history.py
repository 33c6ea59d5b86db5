"""The history of stored runs: trends, changes of level, forecasts beside what came, and their answer."""

import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stepscope.allocations.prediction.fit import OUTSIDE_BYTES
from stepscope.core.answer import (
    Answer,
    Cell,
    Finding,
    Frame,
    Guide,
    Panel,
    Point,
    Table,
    as_lines,
    note,
    table_of,
    warning,
)
from stepscope.core.environment import COMMITS
from stepscope.core.errors import InputError
from stepscope.core.range_names import STEP
from stepscope.core.run import Run, instant_of
from stepscope.core.run_directory import Forecast, load_run, read_forecasts
from stepscope.core.samples import CONFIDENCE, ranks_of
from stepscope.core.units import counted
from stepscope.core.workloads import Workload, key_without_code
from stepscope.runs.metrics import peak_bytes
from stepscope.runs.run_sets import RunSet, sets_of

# Changes of level in a series of figures, found by binary segmentation.
#
# A series is cut where the figures before and after differ most, by the Mann-Whitney test, and each part is looked at
# again (Scott and Knott 1974; Pettitt 1979 for the test at the place that is worst). It knows ranks alone: no law of
# the noise is assumed, and one slow run is no change. Its p-value is multiplied by the number of places that a cut
# could have been at (Bonferroni), and `level` is divided by the number of series that are looked at together, by the
# caller.
#
# Figures are assumed to be independent but for the level. Where one run's noise resembles the next's, as on a machine
# that is busy for a day, a change of the machine is found as one of the level: it is true, and no commit made it.


FEWEST_BESIDE = 3
"""The fewest figures on each side of a cut."""
_EXACT = 12
"""Up to so many figures on the smaller side the test is exact; above, the normal law is near enough."""
_EXACT_WITH_TIES = 24
"""Up to so many figures the test is exact where some are equal, too."""
_PER_DEVIATION = 0.955
"""The efficiency of the Mann-Whitney test beside Student's for normal noise, 3 / pi (Lehmann 1975)."""
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Cut:
    """A change of level: the place of the first figure after it, and the chance of such a one where nothing changed."""

    place: int
    p_value: float


def changes_of_level(values: Sequence[float], level: float) -> list[Cut]:
    """The changes of level in this series, in their order; `level` is the chance of one where there is
    none. Each part between two changes is a series of its own, with the same chance."""
    cuts: list[Cut] = []
    waiting = [(0, len(values))]
    while waiting:
        begin, end = waiting.pop()
        cut = _worst(values[begin:end])
        if cut is not None and cut.p_value <= level:
            place = begin + cut.place
            cuts.append(Cut(place, cut.p_value))
            waiting += [(begin, place), (place, end)]
    return sorted(cuts, key=lambda cut: cut.place)


def smallest_change(values: Sequence[float], level: float) -> float | None:
    """The change in the middle of this one level, as a share, that would be found in nine of ten; None where none would
    be, however large. `values` are logarithms."""
    count = len(values)
    places, half = count - 2 * FEWEST_BESIDE + 1, count // 2
    if places < 1 or 2 / math.comb(count, half) * places > level:
        return None
    reach = _NORMAL.inv_cdf(1 - level / places / 2) + _NORMAL.inv_cdf(0.9)
    error = statistics.stdev(values) * math.sqrt((1 / half + 1 / (count - half)) / _PER_DEVIATION)
    return math.expm1(reach * error)


def _worst(values: Sequence[float]) -> Cut | None:
    """The place at which the two sides differ most, with its p-value for all places; None where there is no place."""
    count = len(values)
    if count < 2 * FEWEST_BESIDE:
        return None
    ranks, ties = ranks_of(values), sum(t**3 - t for t in Counter(values).values())
    spread = (count + 1 - ties / (count * (count - 1))) / 12
    if spread <= 0:  # all are the same
        return None
    best, place, sum_of_ranks, rank_sum = 0.0, 0, sum(ranks[: FEWEST_BESIDE - 1]), 0.0
    for before in range(FEWEST_BESIDE, count - FEWEST_BESIDE + 1):
        sum_of_ranks += ranks[before - 1]
        away = abs(sum_of_ranks - before * (count + 1) / 2)
        score = away / math.sqrt(before * (count - before) * spread)
        if score > best:
            best, place, rank_sum = score, before, away
    if not place:
        return None
    after = count - place
    if min(place, after) <= _EXACT and not ties:
        p_value = _exact(min(place, after), max(place, after), rank_sum)
    elif ties and count <= _EXACT_WITH_TIES:
        p_value = _exact_with_ties(ranks, min(place, after), rank_sum)
    else:
        p_value = math.erfc(max(0.0, best - 0.5 / math.sqrt(place * after * spread)) / math.sqrt(2))
    return Cut(place, min(1.0, p_value * (count - 2 * FEWEST_BESIDE + 1)))


def _exact(few: int, many: int, away: float) -> float:
    """The two-sided chance that the rank sum of `few` among all is so far from its mean, where all orders are alike."""
    counts = _counts(few, many)
    reach = math.floor(few * many / 2 - away + 1e-9)
    return min(1.0, 2 * sum(counts[: reach + 1]) / math.comb(few + many, few))


@functools.cache
def _counts(few: int, many: int) -> list[int]:
    """How many orders give each value of Mann and Whitney's U: the coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (few * many)
    for i in range(1, few + 1):
        for u in range(len(counts) - 1, many + i - 1, -1):
            counts[u] -= counts[u - many - i]
        for u in range(i, len(counts)):
            counts[u] += counts[u - i]
    return counts


def _exact_with_ties(ranks: Sequence[float], few: int, away: float) -> float:
    """The same chance where some figures are equal: over all choices of `few` of these ranks, counted by their sum."""
    doubled = [round(2 * rank) for rank in ranks]  # the mean of equal ranks may end in a half
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(few))]
    for rank in doubled:
        for chosen in range(few, 0, -1):
            for total, count in ways[chosen - 1].items():
                ways[chosen][total + rank] = ways[chosen].get(total + rank, 0) + count
    mean = few * (len(ranks) + 1)
    far = sum(count for total, count in ways[few].items() if abs(total - mean) >= 2 * away - 1e-9)
    return far / math.comb(len(ranks), few)


# Stored runs as trends: one for each workload on a device, with the changes of level and the commits round them.


_OF_COMMITS = (*COMMITS, "stepscope")
"""What differs between environments because the code does."""


@dataclass(frozen=True)
class Moment:
    """A point of a trend: a run, or the runs of one set."""

    runs: RunSet
    step_s: float

    @property
    def run(self) -> Run:
        """The run that stands for them."""
        return self.runs.representative

    @property
    def code(self) -> tuple[str | None, bool | None]:
        """The commit it ran at, and whether files had been changed since."""
        return self.run.environment.code if self.run.environment else (None, None)

    @property
    def commit(self) -> str:
        """The commit it ran at, with a + where files had been changed since; empty where nobody knows."""
        commit, dirty = self.code
        return f"{commit[:10]}{'+' if dirty else ''}" if commit else ""


class TrendPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a trend as `--json` shows it."""

    run: str
    created: str
    commit: str | None
    dirty: bool | None
    step_s: float
    processes: int


class TrendChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level as `--json` shows it: the runs on both sides of it, and the typical step before and after."""

    before: str
    after: str
    commits: tuple[str | None, str | None]
    before_s: float
    after_s: float
    change: float
    p_value: float
    environment: tuple[str, ...]


class TrendDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A trend as `--json` shows it: its points and changes, in seconds and shares."""

    workload: str
    device: str
    unmeasured: int
    detectable: float | None
    points: list[TrendPoint]
    changes: list[TrendChange]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Trends as `--json` shows them."""

    version: int = 1
    trends: list[TrendDocument]


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """The typical step before and after, and the points on both sides of the change."""

    before: Moment
    after: Moment
    before_s: float
    after_s: float
    p_value: float
    place: int

    @property
    def share(self) -> float:
        """The change as a share: 0.03 is 3 % slower."""
        return self.after_s / self.before_s - 1

    @property
    def environment(self) -> tuple[str, ...]:
        """What else changed at the same time, as `torch 2.12 -> 2.13`."""
        one, other = self.before.run.environment, self.after.run.environment
        if one is None or other is None:
            return ()
        differing = one.differences(other).items()
        return tuple(f"{name} {a} -> {b}" for name, (a, b) in differing if name not in _OF_COMMITS)


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The runs of one workload on one device, oldest first, and the changes of their level."""

    key: str
    workload: Workload
    device: str
    moments: list[Moment]
    unmeasured: int
    """Runs without a measured step."""
    changes: list[LevelChange] = field(default_factory=list[LevelChange])
    detectable: float | None = None
    """The change in the middle of the newest level, as a share, that would be found in nine of ten; None: none."""

    @property
    def document(self) -> TrendDocument:
        """What `--json` shows of it."""
        changes = [
            TrendChange(
                before=change.before.run.id, after=change.after.run.id,
                commits=(change.before.code[0], change.after.code[0]), before_s=change.before_s,
                after_s=change.after_s, change=change.share, p_value=change.p_value, environment=change.environment,
            )
            for change in self.changes
        ]  # fmt: skip
        return TrendDocument(
            workload=self.key,
            device=self.device,
            unmeasured=self.unmeasured,
            detectable=self.detectable,
            points=[
                TrendPoint(
                    run=one.run.id,
                    created=one.run.created,
                    commit=one.code[0],
                    dirty=one.code[1],
                    step_s=one.step_s,
                    processes=len(one.runs.measured),
                )
                for one in self.moments
            ],
            changes=changes,
        )


def trends_of(runs: Iterable[Run]) -> list[Trend]:
    """A trend for each workload and device, in the order of their first runs.

    Runs whose steps took turns with another's, and those with a fixed warm-up, are trends of their own. The level of
    all tests together is that of one: each trend gets its part.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    keys: dict[int, tuple[Workload, str]] = {}
    for run in runs:
        known = keys.get(id(run.workload))
        if known is None:
            known = keys[id(run.workload)] = (run.workload, key_without_code(run.workload))
        where = run.environment
        if where is None and run.status != "done":
            continue
        settings = run.settings
        device = (where.device_name, where.memory_limit_bytes, where.threads, where.allocator) if where else ()
        group = (known[1], device, settings.warmup_floor, settings.warmup_cap, run.beside is not None)
        groups.setdefault(group, []).append(run)
    trends: list[Trend] = []
    for (key, *_), members in groups.items():
        sets = sets_of(members)
        trends.append(
            Trend(
                key=str(key),
                workload=members[-1].workload,
                device=next((run.environment.device_name for run in members if run.environment), ""),
                moments=[Moment(one, typical) for one in sets if (typical := one.processes(STEP).typical_s)],
                unmeasured=sum(len(one.runs) - len(one.measured) for one in sets),
            )
        )
    tested = max(1, sum(len(trend.moments) > 1 for trend in trends))
    return [_with_changes(trend, (1 - CONFIDENCE) / tested) for trend in trends if trend.moments or trend.unmeasured]


def _with_changes(trend: Trend, level: float) -> Trend:
    moments = trend.moments
    logarithms = [math.log(moment.step_s) for moment in moments]
    cuts = changes_of_level(logarithms, level)
    ends = [0, *(cut.place for cut in cuts), len(moments)]
    typical = [
        statistics.median(one.step_s for one in moments[a:b]) if b > a else 0.0 for a, b in itertools.pairwise(ends)
    ]
    changes = [
        LevelChange(
            before=moments[cut.place - 1],
            after=moments[cut.place],
            before_s=typical[i],
            after_s=typical[i + 1],
            p_value=cut.p_value,
            place=cut.place,
        )
        for i, cut in enumerate(cuts)
    ]
    return dataclasses.replace(trend, changes=changes, detectable=smallest_change(logarithms[ends[-2] :], level))


_HOW = (
    "A change of level is a place at which the medians before and after differ by the Mann-Whitney test at 5 % over "
    f"all places of all trends together, with {FEWEST_BESIDE} or more on each side; runs of one set count once."
)


def answer_history(trends: Sequence[Trend]) -> Answer:
    """The Answer with a row for each trend, and one for each change."""
    rows: list[tuple[Cell, ...]] = []
    for trend in trends:
        moments, changes = trend.moments, trend.changes
        days = (moments[0].run.day, moments[-1].run.day) if moments else (None, None)
        since = (changes[-1].after_s / changes[0].before_s - 1) * 100 if changes else None
        rows.append((
            trend.key, trend.device, sum(len(one.runs.runs) for one in moments) or trend.unmeasured, *days,
            moments[-1].step_s if moments else None, since, len(changes),
            trend.detectable * 100 if trend.detectable is not None else None,
        ))  # fmt: skip
    table = table_of(
        "workload", "device", ("runs", ",d"), "first", "last", ("step", "s"), ("since the start", "{:+.1f} %"),
        ("changes", ",d"), ("could be found", "{:.1f} %"),
        title="trends", rows=rows, notes=as_lines(_HOW, *_not_measured(trends)),
    )  # fmt: skip
    return Answer(
        study="history",
        question="How did the step's time change?",
        tables=(table, *_changes(trends)),
        findings=tuple(_finding(trend, change) for trend in trends for change in trend.changes),
    )


def answer_trend(trend: Trend) -> Answer:
    """The Answer with every run of one trend, and its panel."""
    begins = {change.place for change in trend.changes}
    rows: list[tuple[Cell, ...]] = [
        (
            one.run.created[:16].replace("T", " "),
            one.commit or None,
            one.step_s,
            len(one.runs.measured),
            one.run.tag,
            "new level" if i in begins else None,
        )
        for i, one in enumerate(trend.moments)
    ]
    points = counted(len(trend.moments), "point")
    could_be_found = f"{points}: too few in the newest level to find a change in it, however large."
    if trend.detectable is not None:
        share = f"{trend.detectable * 100:.1f} %"
        could_be_found = f"In the middle of the newest level a change of {share} would be found in nine of ten."
    table = table_of(
        "run", "commit", ("step", "s"), ("processes", ",d"), "tag", "level", title="runs", rows=rows,
        notes=as_lines(could_be_found, *_not_measured([trend])),
    )  # fmt: skip
    return Answer(
        study="history",
        question=f"How did the step's time of {trend.key} change?",
        device=trend.device,
        tables=(table, *_changes([trend])),
        panels=_panel(trend),
        findings=tuple(_finding(trend, change) for change in trend.changes),
    )


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


# Forecasts beside what was measured afterwards: how far off they were, and which verdicts came true.


MOST_LOADED = 300
"""The most runs that are read to say how far forecasts were off, the newest."""

_SAME_BUDGET = 0.01
"""The share by which the memory of a run may differ from that of a verdict which is judged by it."""


@dataclass(frozen=True, kw_only=True)
class JudgedForecast:
    """A forecast, and the first run of its workload that was measured after it was made."""

    forecast: Forecast
    run: Run | None

    @property
    def measured(self) -> int | None:
        """What the run measured of the quantity; None where it ended before."""
        return peak_bytes(self.run) if self.run is not None and self.run.status == "done" else None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        value, measured = self.forecast.value, self.measured
        return value / measured - 1 if value is not None and measured else None

    @property
    def came_true(self) -> bool | None:
        """Whether the verdict was right; None where there is none, or the run had other memory than it is about."""
        run, fits, budget = self.run, self.forecast.fits, self.forecast.budget_bytes
        if run is None or fits is None or budget is None or run.status not in ("done", "out-of-memory"):
            return None
        if (where := run.environment) is None:
            return None
        # What PyTorch's allocator might take in this run.
        had = where.memory_limit_bytes
        if had is None:
            had = where.memory_bytes - OUTSIDE_BYTES if where.memory_bytes else None
        if had is None or abs(had / budget - 1) > _SAME_BUDGET:
            return None
        return fits == (run.status == "done")


class RanForecast(Forecast, frozen=True, kw_only=True):
    """A forecast as `--json` shows it, with what its run measured."""

    run: str | None
    measured: int | None
    error: float | None
    came_true: bool | None


class Forecasts(msgspec.Struct, frozen=True, kw_only=True):
    """Forecasts as `--json` shows them: each with its run, and the errors as shares."""

    forecasts: list[RanForecast]
    judged: int
    median_error: float | None
    least_error: float | None
    largest_error: float | None

    @classmethod
    def of(cls, judged: Sequence[JudgedForecast]) -> "Forecasts":
        """The document of these."""
        errors = _errors(judged)
        return cls(
            forecasts=[
                RanForecast(
                    **msgspec.structs.asdict(one.forecast),
                    run=one.run.id if one.run else None,
                    measured=one.measured,
                    error=one.error,
                    came_true=one.came_true,
                )
                for one in judged
            ],
            judged=len(errors),
            median_error=statistics.median(errors) if errors else None,
            least_error=min(errors, default=None),
            largest_error=max(errors, default=None),
        )


def _errors(judged: Sequence[JudgedForecast]) -> list[float]:
    """The errors of forecasts that were measured since and are no bounds, the smallest first."""
    return sorted(one.error for one in judged if one.error is not None and not one.forecast.is_bound)


def judge(forecasts: Iterable[Forecast], runs: Iterable[Run]) -> list[JudgedForecast]:
    """Each forecast with what was measured after it, of its workload on its type of device."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.instant, run.id)):
        if run.environment is not None:
            by_key.setdefault((run.workload.key, run.environment.device_type), []).append(run)
    return [
        JudgedForecast(
            forecast=forecast,
            run=next(
                (
                    run
                    for run in by_key.get((forecast.workload, forecast.device_type), [])
                    if run.instant > instant_of(forecast.made) and run.status in ("done", "out-of-memory")
                ),
                None,
            ),
        )
        for forecast in forecasts
    ]


def judged_in(folder: Path) -> tuple[list[JudgedForecast], list[str]]:
    """The forecasts that a folder of runs keeps, each with its run, and a line on what could not be read.

    Only runs of workloads that were foretold are read: their directories are named by the workload's key.
    """
    forecasts, faults = read_forecasts(folder)
    keys = {forecast.workload for forecast in forecasts}
    names: list[str] = []
    if keys:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.partition("-")[2] in keys)
    runs: list[Run] = []
    for name in names[-MOST_LOADED:]:
        try:
            runs.append(load_run(folder / name))
        except InputError as error:
            faults.append(str(error))
    return judge(forecasts, runs), faults


def error_bars(judged: Sequence[JudgedForecast]) -> str:
    """How far the forecasts of peaks were off, in a sentence; empty where none was measured since."""
    errors = _errors(judged)
    if not errors:
        return ""
    if len(errors) == 1:
        return f"1 forecast of a peak kept here was measured since: off by {errors[0] * 100:+.2f} %."
    return (
        f"{len(errors)} forecasts of a peak kept here were measured since: off by {errors[0] * 100:+.2f} % to "
        f"{errors[-1] * 100:+.2f} %, {statistics.median(errors) * 100:+.2f} % in the middle."
    )


def answer_predictions(judged: Sequence[JudgedForecast]) -> Answer:
    """The Answer with every forecast beside what was measured, the newest last."""
    rows: list[tuple[Cell, ...]] = []
    for one in judged:
        verdict = ""
        if one.forecast.fits is not None:
            fits = "fits" if one.forecast.fits else "does not fit"
            verdict = {None: f"{fits} (not tried)", True: fits, False: f"{fits}, wrongly"}[one.came_true]
        rows.append((
            one.forecast.made[:16].replace("T", " "), one.forecast.by, one.forecast.workload, one.forecast.value,
            one.measured or ("OOM" if one.run and one.run.status == "out-of-memory" else None),
            one.error * 100 if one.error is not None else None, verdict,
            one.run.id.partition("-")[0] if one.run else None,
        ))  # fmt: skip
    verdicts = [one.came_true for one in judged if one.came_true is not None]
    waiting = sum(one.run is None for one in judged)
    notes = [error_bars(judged)]
    if verdicts:
        notes.append(f"{sum(verdicts)} of {counted(len(verdicts), 'verdict')} came true.")
    if waiting:
        notes.append(f"{waiting} of {counted(len(judged), 'forecast')}: nothing was measured of it since.")
    table = table_of(
        "made", "by", "workload", ("predicted", "B"), ("measured", "B"), ("error", "{:+.2f} %"), "verdict", "run",
        rows=rows, notes=as_lines(*(note for note in notes if note)),
    )  # fmt: skip
    return Answer(study="history", question="How good were the forecasts?", tables=(table,))
