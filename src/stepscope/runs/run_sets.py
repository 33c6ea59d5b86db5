"""Runs of one experiment, measured in several processes, taken together."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.core.finding import Finding
from stepscope.core.processes import FEWEST_PROCESSES, Change, Processes, change_of_pairs
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE, Samples
from stepscope.runs.metrics import parts_of, samples_of


@dataclass(frozen=True, kw_only=True)
class RunSet:
    """Runs of one experiment, a process each, as they were numbered. A run that was not repeated is alone."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        """The set's name; of a run alone, its id."""
        first = self.runs[0]
        return first.repeat.set if first.repeat else first.id

    @property
    def asked(self) -> int:
        """How many processes were asked for."""
        first = self.runs[0]
        return first.repeat.of if first.repeat else 1

    @property
    def measured(self) -> tuple[Run, ...]:
        """Those whose step was measured to the end."""
        return tuple(run for run in self.runs if run.status == "done" and _median_s(run, STEP))

    @property
    def representative(self) -> Run:
        """The run whose step is in the middle of all; the first, where none was measured."""
        ordered = sorted(self.measured, key=lambda run: (_median_s(run, STEP), run.id))
        return ordered[(len(ordered) - 1) // 2] if ordered else self.runs[0]

    @property
    def parts(self) -> list[str]:
        """The names of the timed parts of the step."""
        return parts_of(self.representative)

    def processes(self, part: str) -> Processes:
        """The medians of this part of the step, a process each, of those that measured it."""
        found = [(median, run.instant) for run in self.measured if (median := _median_s(run, part))]
        known = [instant for _, instant in found if instant]
        usual = statistics.median(known) if known else 0.0  # one that does not say when it began stands amid the others
        begun = tuple(instant or usual for _, instant in found) if known else ()
        return Processes(tuple(median for median, _ in found), begun)

    @property
    def findings(self) -> list[tuple[Finding, int]]:
        """What the runs' own checks found, each kind once as the first run says it, with the number of runs."""
        counts = Counter(kind for run in self.runs for kind in {finding.kind for finding in run.findings})
        first: dict[str, Finding] = {}
        for run in self.runs:
            for finding in run.findings:
                first.setdefault(finding.kind, finding)
        return [(finding, counts[kind]) for kind, finding in first.items()]


def sets_of(runs: Iterable[Run]) -> list[RunSet]:
    """The sets among these runs, and those that were not repeated each as a set of one; in the order of their first.

    Where a process of a set was measured again, the newest counts.
    """
    found: dict[object, dict[object, Run]] = {}
    for run in sorted(runs, key=lambda run: (run.instant, run.id)):
        if run.repeat is None:
            found[run.id, run.created] = {0: run}
        else:
            found.setdefault(run.repeat.set, {})[run.repeat.number] = run
    return [RunSet(runs=tuple(run for _, run in sorted(members.items(), key=_number))) for members in found.values()]


def _number(member: tuple[object, Run]) -> int:
    repeat = member[1].repeat
    return repeat.number if repeat else 0


def _median_s(run: Run, part: str) -> float | None:
    samples = samples_of(run, part)
    return samples.median_s if samples is not None else None


def paired_ratios(before: Run, after: Run, part: str) -> Samples | None:
    """How many times as long each step of `after` took as the step of `before` that ran next to it, where the two were
    measured turn by turn in one process; None where they were not, or one lacks the part."""
    one, other = samples_of(before, part), samples_of(after, part)
    if after.beside != before.id or before.beside != after.id or one is None or other is None:
        return None
    pairs = zip(one.values_s, other.values_s, strict=False)  # stopped between the two, one has a step more
    ratios = tuple(b / a for a, b in pairs if a > 0)
    return Samples(values_s=ratios, clock="ratio") if ratios else None


def change_of(before: RunSet, after: RunSet, part: str = STEP, confidence: float = CONFIDENCE) -> Change | None:
    """How many times as long a part of the step takes after as before.

    Runs that were measured turn by turn are compared pair by pair, a ratio a process; others by their typical times.
    None where one side was not measured.
    """
    by_id = {run.id: run for run in before.measured}
    found = [
        ratios.median_s
        for run in after.measured
        if run.beside in by_id and (ratios := paired_ratios(by_id[run.beside], run, part)) is not None
    ]
    if found and len(found) >= min(FEWEST_PROCESSES, len(before.measured), len(after.measured)):
        return change_of_pairs([ratio for ratio in found if ratio], confidence)
    return after.processes(part).change_from(before.processes(part), confidence)


def in_sets(runs: Sequence[Run]) -> bool:
    """Whether any of these runs is one of several processes."""
    return any(run.repeat is not None for run in runs)
