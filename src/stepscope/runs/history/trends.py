"""Stored runs as trends: one for each workload on a device, with the changes of level and the commits round them."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from stepscope.core.environment import COMMITS
from stepscope.core.model_config import ModelConfig
from stepscope.core.own_workload import AnyWorkload, OwnWorkload, WatchedWorkload
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE
from stepscope.runs.history.levels import changes_of_level, smallest_change
from stepscope.runs.run_sets import RunSet, sets_of

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
    def commit(self) -> str:
        """The commit it ran at, with a + where files had been changed since; empty where nobody knows."""
        commit, dirty = self.run.environment.code if self.run.environment else (None, None)
        return f"{commit[:10]}{'+' if dirty else ''}" if commit else ""


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
    workload: AnyWorkload
    device: str
    moments: list[Moment]
    unmeasured: int
    """Runs without a measured step."""
    changes: list[LevelChange] = field(default_factory=list[LevelChange])
    detectable: float | None = None
    """The change in the middle of the newest level, as a share, that would be found in nine of ten; None: none."""


def trends_of(runs: Iterable[Run]) -> list[Trend]:
    """A trend for each workload and device, in the order of their first runs.

    Runs whose steps took turns with another's, and those with a fixed warm-up, are trends of their own. The level of
    all tests together is that of one: each trend gets its part.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    keys: dict[int, tuple[AnyWorkload, str]] = {}
    for run in runs:
        known = keys.get(id(run.workload))
        if known is None:
            known = keys[id(run.workload)] = (run.workload, _key(run.workload))
        where = run.environment
        if where is None and run.status != "done":
            continue
        settings = run.settings
        device = (where.device_name, where.memory_limit_bytes, where.threads, where.allocator) if where else ()
        group = (known[1], device, settings.warmup_floor, settings.warmup_cap, run.beside is not None)
        groups.setdefault(group, []).append(run)
    trends = [_trend(str(group[0]), found) for group, found in groups.items()]
    tested = max(1, sum(len(trend.moments) > 1 for trend in trends))
    return [_with_changes(trend, (1 - CONFIDENCE) / tested) for trend in trends if trend.moments or trend.unmeasured]


def _key(workload: AnyWorkload) -> str:
    """The workload's key, without digests of code: that of later commits differs, and that is the question here."""
    if isinstance(workload, OwnWorkload):
        return msgspec.structs.replace(workload, code="").key
    if isinstance(workload, WatchedWorkload) and not isinstance(workload.model, ModelConfig):
        return msgspec.structs.replace(workload, model=msgspec.structs.replace(workload.model, source="")).key
    return workload.key


def _trend(key: str, runs: Sequence[Run]) -> Trend:
    moments: list[Moment] = []
    unmeasured = 0
    for found in sets_of(runs):
        typical = found.processes(STEP).typical_s
        if typical:
            moments.append(Moment(found, typical))
        unmeasured += len(found.runs) - len(found.measured)
    where = next((run.environment for run in runs if run.environment), None)
    return Trend(
        key=key, workload=runs[-1].workload, device=where.device_name if where else "", moments=moments,
        unmeasured=unmeasured,
    )  # fmt: skip


def _with_changes(trend: Trend, level: float) -> Trend:
    moments = trend.moments
    logarithms = [math.log(moment.step_s) for moment in moments]
    cuts = changes_of_level(logarithms, level)
    ends = [0, *(cut.place for cut in cuts), len(moments)]
    typical = [statistics.median(one.step_s for one in moments[a:b]) if b > a else 0.0 for a, b in _pairs(ends)]
    changes = [
        LevelChange(
            before=moments[cut.place - 1], after=moments[cut.place], before_s=typical[i], after_s=typical[i + 1],
            p_value=cut.p_value, place=cut.place,
        )
        for i, cut in enumerate(cuts)
    ]  # fmt: skip
    newest = logarithms[ends[-2] :]
    return Trend(
        key=trend.key, workload=trend.workload, device=trend.device, moments=moments, unmeasured=trend.unmeasured,
        changes=changes, detectable=smallest_change(newest, level),
    )  # fmt: skip


def _pairs(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(ends))
