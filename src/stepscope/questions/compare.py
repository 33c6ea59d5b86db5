"""The sides of a comparison: which runs a name means, what they measured, and which of them are set side by side."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError, choose, printable
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.processes import Change, standing
from stepscope.core.range_names import FORWARD_BACKWARD, STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import LAST, find_run_files, last_run, load_run
from stepscope.core.samples import CONFIDENCE
from stepscope.core.units import counted
from stepscope.questions.comparison import same_part
from stepscope.runs.answer import status_word
from stepscope.runs.fields import conditions_in, holds_names, in_words, is_field, meeting
from stepscope.runs.metrics import parts_of, samples_of
from stepscope.runs.run_sets import Disagreement, RunSet, change_of, disagreeing, disagreement

_KINDS: dict[str, Callable[[Run, str], bool]] = {
    "run": lambda run, name: name in run.id,
    "set": lambda run, name: run.repeat is not None and name in run.repeat.set,
    "sweep": lambda run, name: run.sweep is not None and run.sweep.startswith(name),
    "tag": lambda run, name: run.tag == name,
    "commit": lambda run, name: re.fullmatch("[0-9a-f]{4,40}", name) is not None and _commit(run).startswith(name),
}
"""What a name that is no path may mean, and whether a run is meant."""
_NAMED = 5
_AS_FOUND = {"structure": "", "inputs": {}}
"""What is found of a user's model when it runs: another dtype changes it."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one name of a comparison means: its runs, each with its directory."""

    name: str
    kind: str
    """path, run, set, sweep, tag or commit; of what was measured now, the commit itself."""
    runs: tuple[tuple[Run, Path], ...]
    faults: tuple[str, ...] = ()
    measured_now: bool = False
    """Whether this comparison has measured it, by a script at a commit."""

    @property
    def is_commit(self) -> bool:
        """Whether other code is what the user asks for."""
        return self.measured_now or self.kind == "commit"

    def directory(self, run: Run) -> Path:
        """Where a run of this side lies."""
        return next(place for one, place in self.runs if one is run)


def side_named(text: str, out: Path) -> Side:
    """The runs that a name means: under a path; else, under `out`, those of a run, a set, a sweep, a tag or a commit.

    `kind:name` says which; `name:field=value` keeps some of the runs. Raises InputError where it means nothing, or
    several things.
    """
    name, conditions = _split(text)
    if conditions and _exists(Path(text)):
        name = text  # a file may be named like a condition
        conditions.clear()
    kind, sign, rest = name.partition(":")
    wanted, name = (kind, rest) if sign and kind in _KINDS else (None, name)
    path = Path(name)
    if wanted is None and name and _exists(path):
        runs, faults = _loaded(path)
        return _kept(Side(name=text, kind="path", runs=tuple(runs), faults=tuple(faults)), conditions)
    runs, faults = _loaded(out) if _exists(out) else ([], [])
    if conditions and any(_is_called(run, text) for run, _ in runs):
        name, wanted = text, None  # and so may a tag
        conditions.clear()
    if wanted is None and name == LAST and (latest := last_run(out)) is not None:
        pairs = ((load_run(latest), latest.parent),)
        return _kept(Side(name=text, kind="run", runs=pairs, faults=tuple(faults)), conditions)
    meant = {
        one: tuple(pair for pair in runs if means(pair[0], name))
        for one, means in _KINDS.items()
        if wanted in (None, one) and name
    }
    meant = {one: pairs for one, pairs in meant.items() if pairs}
    exact = {one: tuple(pair for pair in pairs if _is_called(pair[0], name)) for one, pairs in meant.items()}
    meant = {one: pairs for one, pairs in exact.items() if pairs} or meant
    if set(meant) == {"run", "set"}:  # the directories of a set's processes may be named like the set
        meant.pop("run" if len(meant["run"]) > 1 else "set")
    if not meant:
        kinds = wanted or "run, set, sweep, tag or commit"
        raise InputError(f"{name!r} names no path, and no {kinds} in {out}{_there(runs)}")
    if len(meant) > 1:
        raise InputError(f"{name!r} is a {' and a '.join(meant)} in {out}: write {next(iter(meant))}:{name}, say")
    (kind, pairs), *_ = meant.items()
    if kind == "run" and len(pairs) > 1:
        raise InputError(f"{len(pairs)} runs in {out} match {name!r}: write more of the name")
    return _kept(Side(name=text, kind=kind, runs=pairs, faults=tuple(faults)), conditions)


def _is_called(run: Run, name: str) -> bool:
    """Whether the name is the whole of what a run goes by."""
    return name in (run.id, run.tag, run.sweep, run.repeat.set if run.repeat else None)


def _split(text: str) -> tuple[str, list[str]]:
    """`place:field=value:field=value` in its parts. What follows a colon belongs to the value before it where that may
    hold it, as the options of a strategy do in `parallel=fsdp2:reshard=no`."""
    name, *parts = re.split(r":(?=[A-Za-z_][\w.]*=)", text)
    conditions: list[str] = []
    for part in parts:
        before = re.findall(r"(?:^|,)\s*([A-Za-z_][\w.]*)=", conditions[-1])[-1] if conditions else ""
        if not is_field(part.partition("=")[0]) and (before == "parallel" or holds_names(before)):
            conditions[-1] += f":{part}"
        else:
            conditions.append(part)
    return name, conditions


def _kept(side: Side, conditions: Sequence[str]) -> Side:
    wanted = [condition for text in conditions for condition in conditions_in(text, side.name)]
    kept, _ = meeting([run for run, _ in side.runs], wanted)
    if not kept:
        if side.faults and not side.runs:
            first, *others = side.faults
            more = f" (and {len(others)} more like it)" if others else ""
            raise InputError(f"{side.name}: no run there can be read: {first}{more}")
        raise InputError(f"{side.name}: no run there{f' has {in_words(wanted)}' if wanted else ''}")
    meets = set(map(id, kept))
    return dataclasses.replace(side, runs=tuple(pair for pair in side.runs if id(pair[0]) in meets))


def _loaded(place: Path) -> tuple[list[tuple[Run, Path]], list[str]]:
    runs: list[tuple[Run, Path]] = []
    faults: list[str] = []
    for file in find_run_files(place):
        try:
            runs.append((load_run(file), file.parent))
        except InputError as error:
            faults.append(str(error))
    runs.sort(key=lambda pair: (pair[0].instant, pair[0].id))
    return runs, faults


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _there(runs: Sequence[tuple[Run, Path]]) -> str:
    """What else a name could have been."""
    tags = dict.fromkeys(run.tag for run, _ in runs if run.tag)
    commits = dict.fromkeys(_commit(run)[:10] for run, _ in runs if _commit(run))
    words = [
        f"{counted(len(names), what)} ({', '.join(map(str, list(names)[-_NAMED:]))})"
        for what, names in (("tag", tags), ("commit", commits))
        if names
    ]
    return printable(f": there are {', '.join([counted(len(runs), 'run'), *words])}") if runs else ": there are no runs"


def _commit(run: Run) -> str:
    return (run.environment.code[0] or "") if run.environment else ""


@dataclass(frozen=True, kw_only=True)
class SidePair:
    """One experiment on two sides. A side's runs of it are its processes."""

    before: RunSet
    after: RunSet
    before_side: Side
    after_side: Side
    across: tuple[str, ...] = ()
    """The fields in which the two workloads differ."""
    lost: tuple[int, int] = (0, 0)
    """Processes of each side that were begun and did not end."""

    @property
    def label(self) -> str:
        """The cell, and how the sides differ in it."""
        first, second = self.before.representative.workload, self.after.representative.workload
        if not self.across:
            return cell_name(second)
        common = "-".join(first.words(*self.across))
        return f"{common}: {self.step_to}"

    @property
    def step_to(self) -> str:
        """How the second workload differs from the first, as in `fp32 to tf32`; empty where it does not."""
        first, second = _fields(self.before.representative), _fields(self.after.representative)
        changes: list[str] = []
        for field in self.across:
            was, now = first.get(field), second.get(field)
            if field == "model":
                names = self.before.representative.workload.model.name, self.after.representative.workload.model.name
                was, now = names if names[0] != names[1] else (was, now)
            words = "code differs" if field == "code" else f"other {field}"
            changes.append(f"{was} to {now}" if _is_plain(was) and _is_plain(now) else words)
        return ", ".join(changes)

    def change(self, part: str = STEP, confidence: float = CONFIDENCE) -> Change | None:
        """How many times as long a part of the step takes after as before."""
        return change_of(self.before, self.after, part, confidence)

    @cached_property
    def buckets(self) -> list[tuple[str, float, float]]:
        """The parts of the step and what lies in none of them, in seconds before and after: both add up to the step."""
        parts = [*dict.fromkeys((*self.before.parts, *self.after.parts))]
        sets = self.before, self.after
        times = {part: [one.processes(part).typical_s or 0.0 for one in sets] for part in parts}
        rows = [(part, was, now) for part, (was, now) in times.items()]
        before, after = self.steps_s
        rest = before - sum(row[1] for row in rows), after - sum(row[2] for row in rows)
        return [*rows, ("in no phase", *rest)]

    @property
    def steps_s(self) -> tuple[float, float]:
        """The typical step before and after."""
        return self.before.processes(STEP).typical_s or 0.0, self.after.processes(STEP).typical_s or 0.0

    @property
    def most_in(self) -> tuple[str, float] | None:
        """The part of the step that made most of its change, and the seconds that it changed by."""
        before, after = self.steps_s
        sign = 1 if after >= before else -1
        name, was, now = max(self.buckets, key=lambda row: sign * (row[2] - row[1]))
        return (name, now - was) if sign * (now - was) > 0 else None


@dataclass(frozen=True, kw_only=True)
class SideComparison:
    """Two sides, what is set side by side of them, and what is on one of them alone."""

    before: Side
    after: Side
    pairs: tuple[SidePair, ...]
    alone: tuple[str, ...]
    """Cells that one side has alone, each with the side's name."""
    value: str = STEP
    """The part of the step that is compared."""
    lost: tuple[str, ...] = ()
    """Cells that one side measured and the other did not end, each with what became of it there."""
    elsewhere: tuple[float | None, ...] = ()
    """The p-values of the pairs with other sides that are asked at the same time."""

    def most_in(self, pair: SidePair) -> tuple[str, float] | None:
        """The part that made most of the change, where it is the whole step that is compared."""
        return pair.most_in if self.value == STEP else None

    @cached_property
    def changes(self) -> list[Change | None]:
        return [pair.change(self.value) for pair in self.pairs]

    @cached_property
    def stands(self) -> list[bool]:
        """Which differences stand when all are asked at once."""
        return standing((*self.p_values, *self.elsewhere))[: len(self.pairs)]

    @property
    def p_values(self) -> tuple[float | None, ...]:
        return tuple(change.p_value if change else None for change in self.changes)

    @property
    def asked(self) -> int:
        """How many comparisons are asked at once."""
        return len(self.pairs) + len(self.elsewhere)

    @property
    def level(self) -> float:
        """The confidence of each interval with which all of them hold together (Bonferroni)."""
        return 1 - (1 - CONFIDENCE) / max(1, self.asked)


def compare_all(
    base: Side, others: Sequence[Side], across: Sequence[str] = (), value: str = STEP
) -> list[SideComparison]:
    """Compare the base with each of the others. What stands holds for all of them at once."""
    parts = {STEP, *(name for side in (base, *others) for run, _ in side.runs for name in parts_of(run))}
    choose(value, sorted(parts), "part of the step")
    comparisons = [compare_sides(base, other, across, value) for other in others]
    if len(comparisons) == 1:
        return comparisons
    return [
        dataclasses.replace(
            one, elsewhere=tuple(p for other in comparisons if other is not one for p in other.p_values)
        )
        for one in comparisons
    ]


def compare_sides(before: Side, after: Side, across: Sequence[str] = (), value: str = STEP) -> SideComparison:
    """Pair the runs of two sides by what they measured: cells whose workloads agree, but for the fields of `across`,
    and for their own code where the sides are two commits.

    Raises InputError where the sides share nothing, and says in which fields they differ.
    """
    first, second = _cells(before, value), _cells(after, value)
    for side, cells in ((before, first), (after, second)):
        if not cells:
            raise InputError(f"{side.name}: none of its {counted(len(side.runs), 'run')} measured {value} to the end")
    if before.is_commit and after.is_commit:
        across = (*across, "code")
    unended = _unended(before), _unended(after)

    def paired(one: RunSet, other: RunSet, differ: tuple[str, ...] = ()) -> SidePair:
        lost = _lost_of(one, unended[0]), _lost_of(other, unended[1])
        return SidePair(before=one, after=other, before_side=before, after_side=after, across=differ, lost=lost)

    pairs: list[SidePair] = []
    left, right = dict(first), dict(second)
    for key in [key for key in first if key in second]:
        pairs.append(paired(left.pop(key), right.pop(key)))
    if across:
        groups: dict[str, list[RunSet]] = {}
        for cell in right.values():
            groups.setdefault(_key(cell.representative, across), []).append(cell)
        used: set[int] = set()
        for key, cell in list(left.items()):
            for other in groups.get(_key(cell.representative, across), []):
                differ = tuple(sorted(_differing(cell.representative, other.representative)))
                pairs.append(paired(cell, other, differ))
                used.add(id(other))
                left.pop(key, None)
        right = {key: cell for key, cell in right.items() if id(cell) not in used}
    if not pairs:
        raise InputError(_nothing_shared(before, after, list(first.values()), list(second.values())))
    lost = {**_lost(unended[1], after, left, across), **_lost(unended[0], before, right, across)}
    alone = [
        f"{cell_name(cell.representative.workload)} ({side.name})"
        for side, cells in ((before, left), (after, right))
        for key, cell in cells.items()
        if key not in lost
    ]
    return SideComparison(
        before=before, after=after, pairs=tuple(pairs), alone=tuple(alone), value=value, lost=tuple(lost.values())
    )


def _unended(side: Side) -> list[Run]:
    """The side's runs that did not end, but for those whose process was measured again."""
    again = {(run.repeat.set, run.repeat.number) for run, _ in side.runs if run.repeat and run.status == "done"}
    return [
        run
        for run, _ in side.runs
        if run.status != "done" and not (run.repeat and (run.repeat.set, run.repeat.number) in again)
    ]


def _lost(unended: Sequence[Run], side: Side, elsewhere: Mapping[str, RunSet], across: Sequence[str]) -> dict[str, str]:
    """Of the cells that the other side measured, those whose runs on this side did not end, and how they ended."""
    ended: dict[str, list[Run]] = {}
    for run in unended:
        ended.setdefault(_key(run, (*across, "device")), []).append(run)
    lost: dict[str, str] = {}
    for key, cell in elsewhere.items():
        same = ended.get(_key(cell.representative, (*across, "device")), [])
        run = next((run for run in same if "device" in across or _may_be_on(cell, run)), None)
        if run is not None:
            lost[key] = f"{cell_name(run.workload)} ({status_word(run)} in {side.name})"
    return lost


def _lost_of(cell: RunSet, unended: Sequence[Run]) -> int:
    """The processes of a cell that were begun and did not end."""
    key = _key(cell.representative, ("device",))
    return sum(_key(run, ("device",)) == key and _may_be_on(cell, run) for run in unended)


def _may_be_on(cell: RunSet, run: Run) -> bool:
    """Whether a run that did not end was of this cell: it may have ended before its device was known."""
    return run.environment is None or _fields(run)["device"] == _fields(cell.representative)["device"]


def _cells(side: Side, value: str) -> dict[str, RunSet]:
    """The side's runs by what they measured: runs of one workload on one device are its processes."""
    by_key: dict[str, dict[object, Run]] = {}
    for run, _ in side.runs:
        samples = samples_of(run, value) if run.status == "done" else None
        if samples is not None and samples.median_s:
            process = (run.repeat.set, run.repeat.number) if run.repeat else run.id
            by_key.setdefault(_key(run), {})[process] = run  # one that was measured again counts once, as it is now
    return {key: RunSet(runs=tuple(runs.values())) for key, runs in by_key.items()}


def _key(run: Run, across: Sequence[str] = ()) -> str:
    """Equal of runs of one experiment on one kind of device, but for these fields of the workload."""
    fields = {name: value for name, value in _fields(run).items() if name not in across}
    return msgspec.json.encode(fields, order="sorted").decode()


def _fields(run: Run) -> dict[str, object]:
    """What makes the experiment of a run: the fields of its workload, and the device."""
    workload = run.workload
    fields = dict(msgspec.to_builtins(workload))
    model = dict(fields.pop("model"))
    model = {name: value for name, value in model.items() if name not in _AS_FOUND}
    fields["code"] = str(model.pop("source", "")), str(fields.pop("code", ""))
    name, where = model.pop("name"), run.environment
    place = (where.device_name, where.memory_limit_bytes) if where else None
    return {**fields, "model": (name, sorted(model.items())), "device": place}


def _is_plain(value: object) -> bool:
    """Whether a field's value says something to a reader."""
    return isinstance(value, (str, int, float, bool)) and len(str(value)) < 40


def _differing(one: Run, other: Run) -> set[str]:
    first, second = _fields(one), _fields(other)
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


def folders_apart(found: Iterable[tuple[Run, Path]]) -> tuple[str, ...]:
    """Where runs of one step disagree that lie in several folders, in sentences."""
    cells: dict[tuple[object, ...], dict[Path, Run]] = {}
    for run, directory in found:
        if run.workload.layers and run.status == "done":
            for part in (STEP, FORWARD_BACKWARD):
                cells.setdefault((part, same_part(run, part)), {})[directory.parent] = run
    apart: list[Disagreement | None] = []
    for (part, _), by_folder in cells.items():
        newest, *others = sorted(by_folder.values(), key=lambda run: run.instant, reverse=True)
        apart.append(disagreement(newest, others, str(part)))
    return tuple(finding.sentence for finding in disagreeing(apart))


def comparable_fields(compared: Iterable[Side]) -> set[str]:
    """The fields in which workloads of these sides may differ."""
    return {name for side in compared for run, _ in side.runs for name in _fields(run)}


def _nothing_shared(before: Side, after: Side, first: Sequence[RunSet], second: Sequence[RunSet]) -> str:
    """What keeps the two sides apart, by the two cells that differ least."""
    nearest = min(
        ((_differing(one.representative, other.representative), one, other) for one in first for other in second),
        key=lambda entry: len(entry[0]),
    )
    differ, one, other = sorted(nearest[0]), nearest[1].representative, nearest[2].representative
    if differ == ["device"]:
        devices = [run.environment.device_name if run.environment else "no device" for run in (one, other)]
        return (
            f"{before.name} and {after.name} were measured on {devices[0]} and {devices[1]}: to compare them all the "
            "same, say --across device"
        )
    names = [cell_name(run.workload) for run in (one, other)]
    what = (
        f"different workloads, {names[0]} and {names[1]}"
        if names[0] != names[1]
        else f"{names[0]}, whose {' and '.join(differ)} {'differ' if len(differ) > 1 else 'differs'}"
    )
    return (
        f"{before.name} and {after.name} measured {what}: to compare them all the same, say --across {','.join(differ)}"
    )
