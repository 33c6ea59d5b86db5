"""Runs of one experiment that do not agree: by how much, and in which conditions they were measured.

Wherever one of several runs of an experiment is shown, those that are left out are held against it: two answers to one
question, each with a narrow interval, must not stand in two places without a word.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stepscope.core.doubts import doubting_kinds
from stepscope.core.finding import Finding, warning
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.samples import Ratio
from stepscope.core.units import counted, format_seconds
from stepscope.core.work.described import cell_name
from stepscope.runs.metrics import samples_of, while_measured

_WORTH = 1.05
"""How many times as long a step takes before runs of it are said to disagree: processes differ by a few percent, which
no interval of one process knows of."""
_NAMES = {"git_commit": "stepscope's commit", "git_dirty": "uncommitted changes", "own_commit": "the code's commit"}
_ISSUED = 0.1
"""The share by which the host's own time for a step differs before it is said."""
_READINGS = (("sm_clock_mhz", "the GPU's clock", "MHz", 0.02), ("power_w", "its power", "W", 0.1))
"""Quantities that were read while the steps ran, and the share by which they differ before it is said."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Two runs of one experiment, of which a part of the step takes longer in one than the intervals of both allow."""

    shown: Run
    other: Run
    part: str
    ratio: Ratio
    """How many times as long the part takes in the other run."""

    @property
    def size(self) -> float:
        """How far apart the two are, whichever is longer: a logarithm."""
        return abs(math.log(self.ratio.value))

    @property
    def sentence(self) -> str:
        """Both figures, the names of both runs, and what else differs between them."""
        shown_s, other_s = (_median_s(run, self.part) for run in (self.shown, self.other))
        apart = [*conditions_apart(self.shown, self.other)]
        what = f"They differ in {'; '.join(apart)}." if apart else "Nothing else that they hold differs."
        return (
            f"Two runs of {cell_name(self.shown.workload)} disagree beyond their intervals: {self.part} takes "
            f"{format_seconds(shown_s)} in {self.shown.id}, and {format_seconds(other_s)} in {self.other.id}, "
            f"{self.ratio.value:.2f} times as long. {what}"
        )


def disagreement(shown: Run, others: Iterable[Run], part: str = STEP) -> Disagreement | None:
    """The run among the others that disagrees most with the one that is shown; None where none does."""
    base = samples_of(shown, part) if shown.status == "done" else None
    found = [
        Disagreement(shown=shown, other=other, part=part, ratio=ratio)
        for other in others
        if other.status == "done" and base is not None and (samples := samples_of(other, part)) is not None
        if (ratio := base.speedup_over(samples)) is not None and not ratio.undecided
        if not 1 / _WORTH <= ratio.value <= _WORTH
    ]
    return max(found, key=lambda one: one.size, default=None)


def disagreeing(found: Iterable[Disagreement | None]) -> Iterator[Finding]:
    """The largest of these disagreements as a finding that counts the others; nothing where there is none."""
    known = [one for one in found if one is not None]
    if not known:
        return
    worst, cells = max(known, key=lambda one: one.size), len({one.shown.workload.key for one in known})
    more = f" {counted(cells - 1, 'more cell')} {'does' if cells == 2 else 'do'} so, too." if cells > 1 else ""
    yield warning(
        "runs-disagree", f"{worst.sentence}{more}",
        {"cells": cells, "times": worst.ratio.value, "shown": worst.shown.id, "other": worst.other.id},
        "name one folder, or the runs of one condition; and measure again what is to be compared, in turns",
    )  # fmt: skip


def conditions_apart(one: Run, other: Run) -> Iterator[str]:
    """What two runs of one experiment differ in that may move its time, the first run's before the other's."""
    if one.workload.phase != other.workload.phase:
        yield f"what a step is ({one.workload.phase} and {other.workload.phase})"
    yield from _environments_apart(one, other)
    for quantity, name, unit, share in _READINGS:
        first, second = while_measured(one, quantity), while_measured(other, quantity)
        if first and second and abs(second / first - 1) > share:
            yield f"{name} ({first:.0f} {unit} and {second:.0f} {unit})"
    issued = [_median_s(run, "host") for run in (one, other)]
    if all(issued) and abs(issued[1] / issued[0] - 1) > _ISSUED:
        yield f"the time in which the host issues the step ({' and '.join(map(format_seconds, issued))})"
    settings = [
        f"{name.replace('_', ' ')} {getattr(one.settings, name)} and {getattr(other.settings, name)}"
        for name in one.settings.__struct_fields__
        if getattr(one.settings, name) != getattr(other.settings, name)
    ]
    if settings:
        yield f"settings ({', '.join(settings)})"
    for what, (first, second) in {
        "how the process began": (one.evidence.process_start, other.evidence.process_start),
        "whether steps took turns": tuple("with another" if run.beside else "alone" for run in (one, other)),
        "what their own checks found": tuple(", ".join(doubting_kinds(run)) or "nothing" for run in (one, other)),
        "the day": (one.day, other.day),
    }.items():
        if first != second and first is not None and second is not None:
            yield f"{what} ({first}, and {second})"


def _environments_apart(one: Run, other: Run) -> Iterator[str]:
    """What the two machines differ in, and their loads."""
    where, there = one.environment, other.environment
    if where is None or there is None:
        return
    for field, (was, now) in where.differences(there).items():
        yield f"{_NAMES.get(field, field.replace('_', ' '))} ({_value(was)} and {_value(now)})"
    busy = [reading.host.other_cores if reading.host else None for reading in (where, there)]
    if busy[0] is not None and busy[1] is not None and abs(busy[0] - busy[1]) >= 1:
        yield f"cores that others kept busy ({busy[0]:.1f} and {busy[1]:.1f})"
    limits = [reading.before.power_limit_w if reading.before else None for reading in (where, there)]
    if limits[0] != limits[1] and None not in limits:
        yield f"the power limit ({limits[0]:.0f} W and {limits[1]:.0f} W)"


def _value(value: object) -> str:
    """A condition as it is shown: of a commit its first ten letters."""
    text = "unknown" if value is None else str(value)
    return text[:10] if len(text) == 40 else text


def _median_s(run: Run, part: str) -> float:
    samples = samples_of(run, part)
    return (samples.median_s if samples is not None else None) or 0.0
