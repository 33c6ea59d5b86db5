"""Runs of one experiment taken together: sets of processes, their answer, and where runs do not agree."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from stepscope.core.answer import TEXT, Answer, Cell, Finding, Line, Panel, Point, Table, as_lines, table_of, warning
from stepscope.core.figures import doubting_kinds, figure
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.processes import FEWEST_PROCESSES, SEEN_IN, Change, Processes, change_of_pairs
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE, Interval, Ratio, Samples
from stepscope.core.units import counted, format_joules, format_seconds, format_share
from stepscope.runs.answer import doubts, heading, interval_ms, measured_on, status_sentence, status_word
from stepscope.runs.metrics import joules_per_step, median_s, parts_of, samples_of, while_measured


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
    def requested(self) -> int:
        """How many processes were asked for."""
        first = self.runs[0]
        return first.repeat.of if first.repeat else 1

    @property
    def measured(self) -> tuple[Run, ...]:
        """Those whose step was measured to the end."""
        return tuple(run for run in self.runs if run.status == "done" and median_s(run, STEP))

    @property
    def representative(self) -> Run:
        """The run whose step is in the middle of all; the first, where none was measured."""
        ordered = sorted(self.measured, key=lambda run: (median_s(run, STEP), run.id))
        return ordered[(len(ordered) - 1) // 2] if ordered else self.runs[0]

    @property
    def parts(self) -> list[str]:
        """The names of the timed parts of the step."""
        return parts_of(self.representative)

    def processes(self, part: str) -> Processes:
        """The medians of this part of the step, a process each, of those that measured it."""
        medians = [(median, run.instant) for run in self.measured if (median := median_s(run, part))]
        known = [instant for _, instant in medians if instant]
        usual = statistics.median(known) if known else 0.0  # one that does not say when it began stands amid the others
        begun = tuple(instant or usual for _, instant in medians) if known else ()
        return Processes(tuple(median for median, _ in medians), begun)

    @property
    def findings(self) -> list[tuple[Finding, int]]:
        """What the runs' own checks found, each kind once as the first run says it, with the number of runs."""
        return findings_by_kind(self.runs)

    @property
    def document(self) -> "SetDocument":
        """What `--json` shows of the set."""
        return SetDocument(
            set=self.name,
            asked=self.requested,
            measured=len(self.measured),
            parts={name: PartFigures.of(self.processes(name)) for name in (*self.parts, STEP)},
            joules_per_step=[joules_per_step(run) for run in self.measured],
            runs=self.runs,
        )


class PartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a part of the step over the processes of a set."""

    typical_s: float | None
    low_s: float | None
    high_s: float | None
    deviation: float | None
    medians_s: tuple[float, ...]

    @classmethod
    def of(cls, part: Processes) -> "PartFigures":
        """The figures of these processes."""
        interval = part.interval()
        low, high = (interval.low, interval.high) if interval else (None, None)
        return cls(typical_s=part.typical_s, low_s=low, high_s=high, deviation=part.deviation, medians_s=part.medians_s)


class SetDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A set of runs as `--json` shows it: the statistics over the processes in seconds, and the runs as stored."""

    set: str
    asked: int
    measured: int
    parts: dict[str, PartFigures]
    joules_per_step: list[float | None]
    runs: tuple[Run, ...]


def findings_by_kind(runs: Iterable[Run]) -> list[tuple[Finding, int]]:
    """Each kind of finding once, as the first run says it, with the number of runs that have it."""
    counts: Counter[str] = Counter()
    first: dict[str, Finding] = {}
    for run in runs:
        counts.update({finding.kind for finding in run.findings})
        for finding in run.findings:
            first.setdefault(finding.kind, finding)
    return [(finding, counts[kind]) for kind, finding in first.items()]


def sets_of(runs: Iterable[Run]) -> list[RunSet]:
    """The sets among these runs, and those that were not repeated each as a set of one; in the order of their first.

    Where a process of a set was measured again, the newest counts.
    """
    sets: dict[object, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: (run.instant, run.id)):
        if run.repeat is None:
            sets[run.id, run.created] = {0: run}
        else:
            sets.setdefault(run.repeat.set, {})[run.repeat.number] = run
    return [RunSet(runs=tuple(members[number] for number in sorted(members))) for members in sets.values()]


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
    ratios_s = [
        ratios.median_s
        for run in after.measured
        if run.beside in by_id and (ratios := paired_ratios(by_id[run.beside], run, part)) is not None
    ]
    if ratios_s and len(ratios_s) >= min(FEWEST_PROCESSES, len(before.measured), len(after.measured)):
        return change_of_pairs([ratio for ratio in ratios_s if ratio], confidence)
    return after.processes(part).change_from(before.processes(part), confidence)


# A step that was measured in several processes, as an answer: its typical time, and how far processes differ.


def answer_set(run_set: RunSet, folder: str | None = None) -> Answer:
    """The step by its parts over all processes, and the processes themselves."""
    shown = run_set.representative
    figures = {name: PartFigures.of(run_set.processes(name)) for name in (*run_set.parts, STEP)}
    timed = {name: part for name, part in figures.items() if part.typical_s is not None}
    points = tuple(
        Point(
            line="typical",
            name=name,
            y=(part.typical_s or 0.0) * 1e3,
            low=None if part.low_s is None else part.low_s * 1e3,
            high=None if part.high_s is None else part.high_s * 1e3,
        )
        for name, part in timed.items()
    )
    rows: list[tuple[Cell, ...]] = []
    typical = run_set.processes(STEP).typical_s
    for run in run_set.runs:
        median = median_s(run, STEP) if run in run_set.measured else None
        rows.append((
            run.repeat.number if run.repeat else 1, run.id.partition("-")[0], status_word(run), figure(median, run),
            median / typical - 1 if median and typical else None, doubts(run),
        ))  # fmt: skip
    processes = table_of(
        "process", "run", "status", ("step", "s"), ("from typical", "+%"), "findings", rows=rows, title="processes",
        tones={i: "bad" for i, run in enumerate(run_set.runs) if run.status != "done"},
    )  # fmt: skip
    return Answer(
        study="run",
        question=f"What does a step of {cell_name(shown.workload)} take?",
        **measured_on(shown),
        lead=heading(shown),
        tables=(*([_parts_table(run_set, timed)] if run_set.measured else []), processes),
        panels=(Panel(x_title="", y_title="typical, ms", points=points, kind="bars"),) if points else (),
        findings=tuple(
            finding
            if count == len(run_set.runs)
            else msgspec.structs.replace(
                finding, sentence=f"{finding.sentence} (In {count} of {len(run_set.runs)} processes.)"
            )
            for finding, count in run_set.findings
        ),
        checked=bool(run_set.measured),
        origin=(f"Set {run_set.name}", *([f"Runs in {folder}"] if folder else [])),
    )


def _parts_table(run_set: RunSet, timed: Mapping[str, PartFigures]) -> Table:
    """A row a part of the step, with how far processes differ; how many there are, and what their intervals say."""
    whole = timed[STEP].typical_s if STEP in timed else None
    rows: list[tuple[Cell, ...]] = [
        (
            name, part.typical_s, interval_ms(run_set.processes(name).interval()), part.deviation, min(part.medians_s),
            max(part.medians_s), part.typical_s / whole if whole and part.typical_s else None,
        )
        for name, part in timed.items()
    ]  # fmt: skip
    lost = [Line(f"{run.id}: {status_sentence(run)}", "bad") for run in run_set.runs if run.status != "done"]
    count, step = len(run_set.measured), run_set.processes(STEP)
    steps = [run.samples[STEP].count for run in run_set.measured]
    each = f"{steps[0]}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    missing = f" of {run_set.requested} asked for" if count < run_set.requested else ""
    notes = [f"{counted(count, 'process')}{missing}, each started afresh and measured over {each} steps."]
    joules = [one for run in run_set.measured if (one := joules_per_step(run)) is not None]
    if joules:
        spread = f" ({format_joules(min(joules))} to {format_joules(max(joules))})" if len(joules) > 1 else ""
        mean = format_joules(statistics.fmean(joules))
        notes.append(f"{mean} a step, the mean of {counted(len(joules), 'process')}{spread}.")
    if step.interval() is None:
        notes.append(
            f"No interval: {counted(count, 'process')} {'does' if count == 1 else 'do'} not tell how much processes "
            f"differ. Repeat at least {FEWEST_PROCESSES} times: --repeat {FEWEST_PROCESSES}."
        )
    else:
        within = [
            interval.half_width / (run.samples[STEP].median_s or 1.0)
            for run in run_set.measured
            if (interval := run.samples[STEP].interval())
        ]
        beside = f"; the steps of one process tell its median to ± {format_share(max(within))}" if within else ""
        notes.append(
            "The typical time is the geometric mean of the processes' medians, and its interval carries what differs "
            f"between processes: ± {format_share(step.deviation or 0.0)} in the step{beside}."
        )
    return table_of(
        "phase", ("typical", "s"), (f"{CONFIDENCE * 100:.0f} % interval", TEXT), ("between processes ±", "%"),
        ("fastest", "s"), ("slowest", "s"), ("share", "%"), rows=rows, tones={len(rows) - 1: "strong"},
        notes=(*lost, *as_lines(*notes)),
    )  # fmt: skip


# Runs of one experiment that do not agree: by how much, and in which conditions they were measured.
#
# Wherever one of several runs of an experiment is shown, those that are left out are held against it: two answers to
# one question, each with a narrow interval, must not stand in two places without a word.


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
        shown_s, other_s = (median_s(run, self.part) or 0.0 for run in (self.shown, self.other))
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
    disagreements = [
        Disagreement(shown=shown, other=other, part=part, ratio=ratio)
        for other in others
        if other.status == "done" and base is not None and (samples := samples_of(other, part)) is not None
        if (ratio := base.speedup_over(samples)) is not None and not ratio.undecided
        if not 1 / _WORTH <= ratio.value <= _WORTH
    ]
    return max(disagreements, key=lambda one: one.size, default=None)


def disagreeing(disagreements: Iterable[Disagreement | None]) -> Iterator[Finding]:
    """The largest of these disagreements as a finding that counts the others; nothing where there is none."""
    known = [one for one in disagreements if one is not None]
    if not known:
        return
    worst, cells = max(known, key=lambda one: one.size), len({one.shown.workload.key for one in known})
    more = f" {counted(cells - 1, 'more cell')} {'does' if cells == 2 else 'do'} so, too." if cells > 1 else ""
    yield warning(
        "runs-disagree",
        f"{worst.sentence}{more}",
        {"cells": cells, "times": worst.ratio.value, "shown": worst.shown.id, "other": worst.other.id},
        "name one folder, or the runs of one condition; and measure again what is to be compared, in turns",
    )


def conditions_apart(one: Run, other: Run) -> Iterator[str]:
    """What two runs of one experiment differ in that may move its time, the first run's before the other's."""
    if one.workload.phase != other.workload.phase:
        yield f"what a step is ({one.workload.phase} and {other.workload.phase})"
    if (where := one.environment) is not None and (there := other.environment) is not None:
        for field, values in where.differences(there).items():
            texts = ["unknown" if value is None else str(value) for value in values]
            first, second = (text[:10] if len(text) == 40 else text for text in texts)  # of a commit ten letters
            yield f"{_NAMES.get(field, field.replace('_', ' '))} ({first} and {second})"
        busy = [reading.host.other_cores if reading.host else None for reading in (where, there)]
        if busy[0] is not None and busy[1] is not None and abs(busy[0] - busy[1]) >= 1:
            yield f"cores that others kept busy ({busy[0]:.1f} and {busy[1]:.1f})"
        limits = [reading.before.power_limit_w if reading.before else None for reading in (where, there)]
        if limits[0] != limits[1] and None not in limits:
            yield f"the power limit ({limits[0]:.0f} W and {limits[1]:.0f} W)"
    for quantity, name, unit, share in _READINGS:
        was, now = while_measured(one, quantity), while_measured(other, quantity)
        if was and now and abs(now / was - 1) > share:
            yield f"{name} ({was:.0f} {unit} and {now:.0f} {unit})"
    issued = [median_s(run, "host") or 0.0 for run in (one, other)]
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


# Two steps beside one another, as an answer: how many times as long the second takes, by the parts of the step.


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Two steps beside one another: the change of each part, and the runs of both sides as they are stored."""

    sets: tuple[str, str]
    changes: dict[str, Change | None]
    runs: tuple[tuple[Run, ...], tuple[Run, ...]]


def compare_sets(before: RunSet, after: RunSet) -> Against:
    """How many times as long each part of the step takes after as before."""
    parts = (*dict.fromkeys((*before.parts, *after.parts)), STEP)
    changes = {part: change_of(before, after, part) for part in parts}
    return Against(sets=(before.name, after.name), changes=changes, runs=(before.runs, after.runs))


def answer_against(before: RunSet, after: RunSet, folder: str | None = None) -> Answer:
    """The second step against the first: the verdict, and the ratio of each part with its interval."""
    first, second = before.representative, after.representative
    changes = compare_sets(before, after).changes
    change = changes[STEP]
    rows: list[tuple[Cell, ...]] = [
        (
            part,
            before.processes(part).typical_s,
            after.processes(part).typical_s,
            of.ratio if of else None,
            interval_text(of.interval) if of else "",
        )
        for part, of in changes.items()
    ]
    notes: list[str] = []
    if change is not None:
        count = counted(change.processes[1], "process")
        if not change.paired:
            notes.append(
                f"{counted(change.processes[0], 'process')} against {count}, by turns: settings that hold for a whole "
                "process differ, so each step had processes of its own."
            )
        else:
            notes.append(
                f"{count}, in each of which the two steps took turns; the ratio is that of neighbouring steps."
            )
        if change.paired and change.interval is None:
            pairs = ((b, a) for b in before.measured for a in after.measured if a.beside == b.id)
            within = [ratios.interval() for b, a in pairs if (ratios := paired_ratios(b, a, STEP)) is not None]
            notes += [f"Within the process: {interval_text(one)}." for one in within[:1] if one is not None]
    table = table_of(
        "phase", ("first", "s"), ("second", "s"), ("second over first", "{:.3f} x"),
        (f"{CONFIDENCE * 100:.0f} % interval", TEXT), rows=rows, tones={len(rows) - 1: "strong"},
        notes=as_lines(*notes),
    )  # fmt: skip
    findings = [finding for side in (before, after) for finding, _ in side.findings if finding.severity != "note"]
    return Answer(
        study="run",
        question=f"How does {cell_name(second.workload)} compare with {cell_name(first.workload)}?",
        **measured_on(first),
        lead=(
            *(Line(f"First: {line.text}", line.tone) for line in heading(first)[:2]),
            *(Line(f"Second: {line.text}", line.tone) for line in heading(second)[:2]),
            *heading(first)[2:],
            Line(verdict(change), "strong"),
        ),
        tables=(table,),
        findings=tuple({finding.kind: finding for finding in findings}.values()),
        checked=bool(before.measured and after.measured),
        origin=(f"Sets {before.name} and {after.name}", *([f"Runs in {folder}"] if folder else [])),
    )


def verdict(change: Change | None) -> str:
    """Whether the second step is slower or faster, by how much, and how sure that is."""
    if change is None:
        return "One of the two was not measured: there is nothing to compare."
    if change.interval is None:
        return (
            f"The second takes {change.ratio:.3f} times as long in {counted(change.processes[0], 'process')}: no "
            f"verdict, since processes differ; --repeat {FEWEST_PROCESSES} or more tells by how much."
        )
    low, high = change.interval.low - 1, change.interval.high - 1
    if change.decided:
        word = "slower" if change.share > 0 else "faster"
        within = f"interval {low * 100:+.1f} to {high * 100:+.1f} %"
        return f"The second is {format_share(abs(change.share))} {word} ({within})."
    detectable = f", and one above {format_share(change.detectable)} would have been" if change.detectable else ""
    often = f" (in {SEEN_IN * 10:.0f} of 10 such comparisons)" if detectable else ""
    return f"No difference seen{detectable}{often}."


def interval_text(interval: Interval | None) -> str:
    """An interval of a ratio in words; empty for none."""
    return f"{interval.low:.3f} to {interval.high:.3f}" if interval else ""
