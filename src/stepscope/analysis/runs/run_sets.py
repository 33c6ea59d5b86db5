"""Runs of one experiment, measured in several processes, taken together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stepscope.analysis.runs.metrics import parts_of, samples_of
from stepscope.core.finding import Finding
from stepscope.core.processes import Processes
from stepscope.core.range_names import STEP
from stepscope.core.run import Run


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
        return Processes(tuple(median for run in self.measured if (median := _median_s(run, part))))

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
    for run in sorted(runs, key=lambda run: (run.created, run.id)):
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


def in_sets(runs: Sequence[Run]) -> bool:
    """Whether any of these runs is one of several processes."""
    return any(run.repeat is not None for run in runs)
