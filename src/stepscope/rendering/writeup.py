"""A write-up as a document: Markdown with its plots beside it, or one HTML file. Figures are those of the Answers."""

import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.allocations.prediction.answer import answer_fit
from stepscope.allocations.prediction.estimate import estimate_quickly
from stepscope.allocations.prediction.fit import Budget, fit, will_fit
from stepscope.core.answer import Answer, Cell, Finding, Line, Table, decode_answer, table_of, text
from stepscope.core.attention_call import decode_timings
from stepscope.core.errors import InputError, choose, one_line, printable
from stepscope.core.figures import doubting_kinds
from stepscope.core.files import read_named
from stepscope.core.formulas.spelled import cell_name, parameters_of
from stepscope.core.formulas.transformer import phase_work, step_flops
from stepscope.core.model_config import configure
from stepscope.core.range_names import OPTIMIZER
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, check_is_ours, find_run_files, load_run, write_atomically
from stepscope.core.units import GIB, counted, format_bytes, format_rate, format_share
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.attention_answer import answer_attention
from stepscope.questions.compare import folders_apart, side_named
from stepscope.questions.comparison import listed
from stepscope.rendering.cells import where_of
from stepscope.rendering.pages import GENERATOR, Page, Section
from stepscope.rendering.pages.html import pictures_of, render_page
from stepscope.rendering.picture import Drawer, draw_all, draw_answer
from stepscope.rendering.renderers import render
from stepscope.runs.fields import matches
from stepscope.runs.metrics import Scaling, scaling_of
from stepscope.traces.captures.digest import TraceDigest, digest_beside

# What a write-up is made of: the runs and the stored answers under some places.


Found = tuple[Run, Path]
"""A run, and its directory."""


_MEASURED = ("done", "out-of-memory")
"""How a run ended that is a cell of a table: its figures, or that they do not fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The runs that answer a question, and what was left of those that might have."""

    runs: list[Found]
    left: Mapping[Path, str]
    """Why the runs of other folders are not among them."""
    within: Path

    def beside(self, answer: Answer) -> Answer:
        """The answer, with a line that says which folders it is made of, and which were left."""
        used = Counter(directory.parent for _, directory in self.runs)
        days = sorted({run.day for run, _ in self.runs if run.day})
        when = f" of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
        counts = {folder: f" ({counted(runs, 'run')})" for folder, runs in used.items()}
        return made_of(answer, counts, self.left, self.within, when)


_MOST_NAMED = 6
"""Folders left for one reason that are named."""


def made_of(answer: Answer, used: Mapping[Path, str], left: Mapping[Path, str], within: Path, when: str = "") -> Answer:
    """The answer, with a line on its evidence: the files or folders that it is made of, each with words on it, and why
    others were left. Places are named from the folder `within`."""

    def named(place: Path) -> str:
        return os.path.relpath(place.resolve(), within)

    line = f"From {', '.join(named(place) + words for place, words in used.items())}{when}."
    by_reason: dict[str, list[str]] = {}
    for place, why in left.items():
        if place not in used:
            by_reason.setdefault(why, []).append(named(place))
    reasons = [
        f"{', '.join(names) if len(names) <= _MOST_NAMED else f'{len(names)} others'} ({why})"
        for why, names in by_reason.items()
    ]
    line += f" Left: {'; '.join(reasons)}." if reasons else ""
    return msgspec.structs.replace(answer, asides=(*answer.asides, line))


def _machine(run: Run) -> tuple[object, ...]:
    """What must be equal of runs that one table compares: the device, its memory, and the libraries of kernels."""
    where = run.environment
    if where is None:
        return ()
    return (where.device_name, where.memory_limit_bytes, *map(where.versions.get, _LIBRARIES))


_LIBRARIES = ("torch", "cuda", "hip", "cudnn", "triton")


def _other_machine(run: Run, other: Run) -> str:
    """What of the conditions differs first, in words."""
    ours, theirs = run.environment, other.environment
    if ours is None or theirs is None or ours.device_name != theirs.device_name:
        return "another device"
    if ours.memory_limit_bytes != theirs.memory_limit_bytes:
        limit = theirs.memory_limit_bytes
        return f"{format_bytes(limit)} of the memory" if limit else "the whole memory"
    return "other versions"


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """Runs and answers, and what could not be read."""

    runs: tuple[Found, ...] = ()
    answers: tuple[tuple[Answer, Path], ...] = ()
    faults: tuple[str, ...] = ()
    _digests: dict[tuple[Path, str], TraceDigest | None] = field(default_factory=dict, init=False, repr=False)
    _keys: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _kinds: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    def folders(
        self,
        wanted: Mapping[str, str],
        *,
        widest: bool = False,
        first: Callable[[list[Run]], int] = lambda _: 0,
        keep: Callable[[Run], bool] = lambda _: True,
        vary: tuple[str, ...] = (),
        timed: bool = True,
    ) -> list[Chosen]:
        """The runs whose fields have these values (`fp32,bf16` for either) by folder, the best folder for a question
        first, each with the cells that it lacks and others of the same conditions have.

        A folder of most in `first` comes before others. Then sweeps of the whole device come before those of a part of
        its memory, then the one with most cells that no finding doubts is first, and of equal ones the one with most
        cells. widest: the sweep with most cells is first, those that ran out of memory among them, for questions on
        which these are. vary: the fields of the workload in which cells of other folders may differ from a folder's
        own; without one, no other folder adds to it. timed: whether they must have been measured by equal settings.
        """
        conditions = [(name, tuple(values.split(","))) for name, values in wanted.items()]
        apart: dict[tuple[Path, object], list[Found]] = {}
        for run, directory in self.runs:
            if run.workload.layers and all(matches(run, *condition) for condition in conditions) and keep(run):
                apart.setdefault((directory.parent, _machine(run)), []).append((run, directory))

        def worth(folder: list[Found]) -> tuple[int, int, bool, int, int]:
            runs = [run for run, _ in folder]
            measured, done, undoubted = (
                {self.key_of(run) for run in runs if run.status in statuses and not (sure and doubting_kinds(run))}
                for statuses, sure in ((_MEASURED, False), (("done",), False), (("done",), True))
            )
            whole_device = all(run.environment is None or run.environment.memory_limit_bytes is None for run in runs)
            return first(runs), len(measured) if widest else 0, whole_device, len(undoubted), len(done)

        ordered = sorted(apart.values(), key=worth, reverse=True)
        return [self._with_others(folder, ordered, vary, timed=timed) for folder in ordered]

    def _with_others(
        self, base: list[Found], folders: list[list[Found]], vary: tuple[str, ...], *, timed: bool
    ) -> Chosen:
        """A folder's runs, and of the other folders those of the same conditions whose cells it lacks."""
        chosen = [*base]
        machine, settings = _machine(base[0][0]), {run.settings for run, _ in base}
        kinds = {self._words(run, vary) for run, _ in base}
        cells = {self.key_of(run) for run, _ in base if run.status in _MEASURED}
        left: dict[Path, str] = {}
        for folder in folders:
            if folder is base:
                continue
            why = _other_machine(base[0][0], folder[0][0]) if _machine(folder[0][0]) != machine else ""
            alike = [found for found in folder if self._words(found[0], vary) in kinds]
            equal = [found for found in alike if found[0].settings in settings or not timed]
            added = [
                (run, directory)
                for run, directory in (equal if vary and not why else ())
                if run.status in _MEASURED and self.key_of(run) not in cells
            ]
            if not added:
                last = "no other cells" if equal else "other settings" if alike else "another kind of step"
                left.setdefault(folder[0][1].parent, why or last)
            chosen += added
            cells |= {self.key_of(run) for run, _ in added}
        return Chosen(runs=chosen, left=left, within=self.within)

    def key_of(self, run: Run) -> str:
        """The key of its workload, worked out once: many questions ask."""
        if id(run) not in self._keys:
            self._keys[id(run)] = run.workload.key
        return self._keys[id(run)]

    def _words(self, run: Run, without: tuple[str, ...]) -> tuple[str, ...]:
        """What makes two of its cells comparable, but for these fields; worked out once, too."""
        if (id(run), without) not in self._kinds:
            workload = run.workload
            self._kinds[id(run), without] = (type(workload).__name__, str(workload.seed), *workload.words(*without))
        return self._kinds[id(run), without]

    @cached_property
    def within(self) -> Path:
        """The folder that all runs and answers lie under: they are named from there."""
        places = [directory.parent for _, directory in self.runs] + [file.parent for _, file in self.answers]
        common = Path(os.path.commonpath([place.resolve() for place in places])) if places else Path.cwd()
        return common.parent if common in {place.resolve() for place in places} else common

    def digest(self, run: Run, directory: Path, tool: str) -> TraceDigest | None:
        """What the capture of a run by one tool says, or None; read once, however many questions ask."""
        if (directory, tool) not in self._digests:
            try:
                digest = digest_beside(run, directory, tool, say=lambda _: None) if run.status == "done" else None
            except InputError:
                digest = None
            self._digests[directory, tool] = digest
        return self._digests[directory, tool]


def gather(names: Iterable[str], out: Path) -> Material:
    """The material under paths, or of what a name means among the runs of `out`: a sweep, a tag, a set, a run.

    Raises InputError where a name means nothing, or where there is neither a run nor an answer.
    """
    runs: dict[Path, Found] = {}
    answers: dict[Path, Answer] = {}
    faults: list[str] = []
    requested = list(names)
    for name in requested:
        place = Path(name)
        if not place.exists():
            side = side_named(name, out)
            runs.update((directory.resolve(), (run, directory)) for run, directory in side.runs)
            faults += side.faults
            continue
        files = [place] if place.is_file() and place.name != RUN_FILE else []
        if not files:
            for file in find_run_files(place):
                try:
                    runs[file.parent.resolve()] = (load_run(file), file.parent)
                except InputError as error:
                    faults.append(str(error))
            files = sorted(file for file in place.rglob("*.json") if not (file.parent / RUN_FILE).exists())
        for file in files:
            try:
                if (answer := _answer_in(file)) is not None:
                    answers[file] = answer
                elif file == place:
                    raise InputError(f"{file} is neither a run nor an answer that --json wrote")
            except InputError as error:
                if file == place:
                    raise
                faults.append(str(error))
    if not runs and not answers:
        reason = f": {faults[0]}" if faults else ": name a folder of runs, a sweep, or answers that --json wrote"
        raise InputError(f"no run and no answer in {', '.join(requested)}{reason}")
    stored = tuple((answer, file) for file, answer in answers.items())
    return Material(runs=tuple(runs.values()), answers=stored, faults=tuple(faults))


def _answer_in(file: Path) -> Answer | None:
    """The answer in a file; None where it is another document. Raises InputError where it is damaged."""
    data = read_named(file)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError(f"{file} is neither a run nor an answer that --json wrote, or was cut short") from None
    if not isinstance(document, dict):
        return None
    if document.get("kind") == "attention-timings":  # pyright: ignore[reportUnknownMemberType]
        timings = decode_timings(data, str(file))
        return msgspec.structs.replace(answer_attention(timings), date=timings.created[:10])
    return decode_answer(data, str(file)) if {"study", "question", "version"} <= document.keys() else None


# A question of an assignment: what it asks, which Answer answers it, and the command that measures what is missing.


Source = Callable[[Material], Answer | None]
"""Finds the Answer in what was measured; None where the material does not hold it."""

Scale = Literal["auto", "full", "small"]
SCALES: tuple[Scale, ...] = ("auto", "full", "small")

_AXES = ("model", "seq_len", "dtype", "phase", "attention", "compile", "checkpointing")
"""Options of which each value makes other cells."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What decides which cells are measured on a machine."""

    name: str
    on_gpu: bool
    memory: Budget
    """What a process may allocate: of what is free, and not of all that there is."""
    flops_per_s: float
    """The rate of a short forward pass: the plan estimates times by it before any cell is measured."""
    gpus: int = 0
    capability: tuple[int, int] | None = None
    memory_limit_bytes: int | None = None
    """The limit that the user set, which each command gets."""
    too_long: tuple[str, ...] = ()
    """What its plan left out for time: of each cell the measure's name and the cell's."""
    small: tuple[str, ...] = ()
    """Names of measures of which the small command alone has ended."""
    minutes: float = 0.0
    """For how many minutes cells were chosen that have all been measured."""

    @property
    def has_bf16(self) -> bool:
        """Whether products of bf16 are there: a GPU has them from Ampere on."""
        return not self.on_gpu or self.capability is None or self.capability >= (8, 0)

    def takes(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words of a command with what this GPU has in place of what it has not: before Ampere fp16 for bf16, and
        PyTorch's attention for ours in Triton."""
        if self.has_bf16:
            return tuple(words)
        other = {"bf16": "fp16", "flash": "sdpa"}
        return tuple(",".join(dict.fromkeys(other.get(each, each) for each in word.split(","))) for word in words)


@dataclass(frozen=True)
class Group:
    """Cells that one command measures: a cell of a sweep, or those that a study compares."""

    chosen: Mapping[str, str]
    """The options that tell it from the measure's other groups."""
    cells: tuple[TextbookWorkload, ...]

    def fits(self, memory: Budget) -> bool:
        """Whether every cell is predicted to fit."""
        return all(will_fit(cell, memory) for cell in self.cells)


@dataclass(frozen=True)
class Measure:
    """A command that measures what questions lack. Several questions may name one: it runs once."""

    name: str
    """The name of the folder or file that the command leaves in the store."""
    cost: int
    """Its place in the order of measuring: the cheapest first."""
    full: str
    """The words after `stepscope`, at the sizes that the question asks about."""
    small: str
    """The same with models that a CPU measures in a minute."""
    leaves: Literal["runs", "answer"] = "runs"
    implied: str = ""
    """Options that the cells of the full command have without being asked: a study measures all of their values."""
    together: tuple[str, ...] = ()
    """Options whose values a study compares, so that it measures all of them or none."""
    takes_s: float = 5
    """Seconds on a GPU: of an answer the whole, of runs what each cell takes beside its start and its steps."""
    small_s: float = 10
    """Seconds of the small command on two cores."""
    takes_memory: bool = True
    """Whether the command has --memory."""
    gpus: int = 0
    """GPUs that the full command needs; with fewer the small one runs."""
    of_memory: bool = False
    """Whether it is measured for the memory that a GPU counts, and a CPU does not."""

    def words(self, scale: Scale) -> tuple[str, ...]:
        """The words after `stepscope`, but for where the result goes."""
        return tuple(shlex.split(self.small if scale == "small" else self.full))

    def groups(self, words: Sequence[str]) -> list[Group]:
        """The cells of a command like the full one, in groups that are measured or left out as one, small ones first;
        none where what it measures is no step."""
        said = _options_of(words)
        options = {**_options_of(shlex.split(self.implied)), **said}
        if self.leaves == "answer" or "model" not in options:
            return []
        axes = [axis for axis in _AXES if axis in options]
        apart = [axis for axis in axes if axis in said and axis not in self.together]
        groups: dict[tuple[str, ...], list[TextbookWorkload]] = {}
        for values in itertools.product(*(options[axis] for axis in axes)):
            fields: dict[str, Any] = dict(zip(axes, values, strict=True))
            key = tuple(fields[axis] for axis in apart)
            fields |= {name: int(options[name][0]) for name in ("batch_size",) if name in options}
            fields |= {name: int(fields[name]) for name in ("seq_len",) if name in fields}
            groups.setdefault(key, []).append(TextbookWorkload(**{**fields, "model": configure(fields["model"])}))
        made = [Group(dict(zip(apart, key, strict=True)), tuple(cells)) for key, cells in groups.items()]
        return sorted(made, key=lambda group: sum(map(step_flops, group.cells)))

    def commands(self, words: Sequence[str], groups: Iterable[Group]) -> list[tuple[str, ...]]:
        """The words of the fewest commands that measure these groups and no others, small models first; of a study one
        for each group, so that the same group is the same command whatever else is measured."""
        boxes = [{axis: (value,) for axis, value in group.chosen.items()} for group in groups]
        for axis in (
            ("checkpointing", "seq_len", "phase", "dtype", "model") if not (self.together or self.implied) else ()
        ):
            merged: dict[tuple[Any, ...], dict[str, tuple[str, ...]]] = {}
            for box in boxes:
                key = tuple((name, values) for name, values in box.items() if name != axis)
                values = (*merged.get(key, {}).get(axis, ()), *box.get(axis, ()))
                merged[key] = {**box, **({axis: tuple(dict.fromkeys(values))} if axis in box else {})}
            boxes = list(merged.values())
        commands: list[tuple[str, ...]] = []
        for box in boxes:
            flags = {f"--{axis.replace('_', '-')}": ",".join(values) for axis, values in box.items()}
            commands.append(tuple(flags.get(before, word) for before, word in itertools.pairwise(("", *words))))
        return commands

    def place(self, store: Path) -> Path:
        """What it leaves in a store: a folder of runs, or an answer."""
        return store / (self.name if self.leaves == "runs" else f"{self.name}.json")

    def mark(self, store: Path) -> Path:
        """A file that is there while the command runs: one that is left says that it was interrupted."""
        return store / f"{self.name}.unfinished"

    def command(self, words: Sequence[str], store: Path) -> str:
        """The whole command, as a user copies it."""
        place = shlex.quote(str(self.place(store)))
        if self.leaves == "runs":
            return shlex.join(("stepscope", *words, "--runs")) + f" {place}"
        make = "" if store == Path() else f"mkdir -p {shlex.quote(str(store))} && "
        return f"{make}{shlex.join(('stepscope', *words, '--json'))} > {place}"


def _options_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of the options among the words of a command."""
    pairs = itertools.pairwise((*words, "--"))
    return {
        flag.removeprefix("--").replace("-", "_"): tuple(value.split(","))
        for flag, value in pairs
        if flag.startswith("--") and not value.startswith("--")
    }


@dataclass(frozen=True)
class Question:
    """One question: what measures it, and where its Answer comes from."""

    id: str
    asks: str
    measure: Measure
    source: Source
    predicts: Literal["", "times", "memory", "out"] = ""
    """What is predicted of the cells that it asks for and that were not measured: times and peaks, peaks, or why the
    smallest that does not fit runs out of memory; empty: another question says it."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """All questions, in the order in which they are asked."""

    title: str
    parts: Mapping[str, tuple[Question, ...]]
    """The questions on each subject."""

    @property
    def questions(self) -> tuple[Question, ...]:
        """Those of all parts."""
        return tuple(question for questions in self.parts.values() for question in questions)


ASSIGNMENTS = ("cs336-2025", "cs336-2026", "cs336")
"""The names of assignments: editions of CS336's, of which the last is another name of the first."""


def assignment_named(name: str) -> Assignment:
    """The assignment of this name. Raises InputError, with the names, for another."""
    choose(name, ASSIGNMENTS, "assignment")
    cs336 = importlib.import_module("stepscope.rendering.cs336")
    return cs336.OF_2026 if name == "cs336-2026" else cs336.ASSIGNMENT


# What is predicted of cells that a question asks for and that this machine does not measure.


def predicted_cells(question: Question, runs: Sequence[Run], machine: Machine) -> tuple[Table, ...]:
    """A table of the cells that a question asks for and that no run measured, with what is predicted of each; none
    where all were measured. For a question that predicts nothing, a sentence that names them."""
    measure = question.measure
    recorded = _options_of(measure.words("full")).get("record", ())
    ended = {
        run.workload
        for run in runs
        if run.workload.sizes is not None
        and (run.status == "out-of-memory" or (run.status == "done" and run.artifacts.keys() >= {*recorded}))
    }
    asked = [cell for group in measure.groups(machine.takes(measure.words("full"))) for cell in group.cells]
    lacking = sorted(
        (cell for cell in asked if cell not in ended), key=lambda cell: (parameters_of(cell), cell.seq_len)
    )
    if not lacking or question.predicts == "out":
        return _why_out(lacking, machine)  # none where nothing is lacking
    if not question.predicts:
        cells = f"{len(lacking)} of the {counted(len(asked), 'cell')} asked for ({listed(map(cell_name, lacking))})"
        end = " What smaller models say stands above." if len(lacking) == len(asked) else ""
        return (text(f"Not measured here: {cells}.{end}"),)
    phases = () if question.predicts == "memory" else tuple(phase_work(lacking[-1], "full"))
    kinds = [(cell, phase) for cell in {cell.dtype: cell for cell in lacking}.values() for phase in phases]
    scalings = {(cell.dtype, phase): scaling_of(runs, machine.name, cell, phase) for cell, phase in kinds}
    timed = {phase for (_, phase), scaling in scalings.items() if scaling.cells and scaling.is_useful}
    phases = tuple(phase for phase in phases if phase in timed)
    rows: list[tuple[Cell, ...]] = []
    for cell in lacking:
        peak = estimate_quickly(cell).peak_bytes
        scaled = {phase: scalings[cell.dtype, phase] for phase in phases if phase in phase_work(cell)}
        useful = {phase: scaling.seconds(cell) for phase, scaling in scaled.items() if scaling.is_useful}
        times = [float(f"{useful[phase]:.2g}") if useful.get(phase) else None for phase in phases]
        margin = " and a margin" if peak <= machine.memory.usable_bytes else ""
        why = f"needs {format_bytes(peak)}{margin}, there are {format_bytes(machine.memory.usable_bytes)}"
        if measure.of_memory and not machine.on_gpu:
            why = "a CPU counts no peak"
        elif will_fit(cell, machine.memory):
            why = "left out for time" if f"{measure.name} {cell_name(cell)}" in machine.too_long else "not measured yet"
        rows.append((cell_name(cell), peak / GIB, *times, why))
    columns = (("cell", ""), ("peak GiB", ".2f"), *((phase, "s") for phase in phases), ("why", ""))
    notes = [Line("Predicted; nothing in this table was measured.", "strong")]
    notes.append(Line("Peaks: PyTorch's allocator on a GPU, played through over the step's tensors (stepscope fit)."))
    notes += [Line(_said_of(scaling, dtype, lacking)) for (dtype, _), scaling in scalings.items() if scaling.cells]
    never = [f"{phase} in {dtype}" for (dtype, phase), scaling in scalings.items() if not scaling.cells]
    notes += [Line(f"Times of {', '.join(never)}: none was measured here, so none is scaled.")] if never else []
    notes += [Line(f"Memory here: {machine.memory.said}.")] if machine.on_gpu else []
    return (table_of(*columns, title="Asked for and not measured here: predicted", rows=rows, notes=tuple(notes)),)


def _why_out(lacking: Sequence[TextbookWorkload], machine: Machine) -> tuple[Table, ...]:
    """The arithmetic of the smallest of these cells that does not fit; none where all do."""
    large = [cell for cell in lacking if not will_fit(cell, machine.memory)]
    if not large:
        return ()
    cell = min(large, key=lambda cell: estimate_quickly(cell).peak_bytes)
    first, *others = (table for table in answer_fit(fit(cell, machine.memory)).tables if table.rows)
    said = f"Predicted by arithmetic for {cell_name(cell)}, the smallest that does not fit; it was not measured."
    return msgspec.structs.replace(first, notes=(Line(said, "strong"), *first.notes)), *others


def _said_of(scaling: Scaling, dtype: str, lacking: Sequence[TextbookWorkload]) -> str:
    """From which cells the times of a phase are scaled, how far, and how well the same scaling meets those."""
    small, large = (edge(scaling.cells, key=lambda each: step_flops(each[0]))[0] for edge in (min, max))
    # A phase may have been measured without the others: its cell is no training step.
    names = " to ".join(dict.fromkeys(cell_name(cell).removesuffix("-train") for cell in (small, large)))
    terms = "its bytes" if scaling.phase == OPTIMIZER else "FLOPs, activations and scores"
    terms += f" (products at most at the measured {format_rate(scaling.ceiling, 'FLOP/s')})" if scaling.ceiling else ""
    measured = counted(len(scaling.cells), "measured cell")
    said = f"Times of {scaling.phase} in {dtype}: by {terms} from {measured} ({names})"
    reach = max(map(step_flops, lacking)) / step_flops(large)
    if reach > _FAR and scaling.phase != OPTIMIZER:
        said += f", up to {reach:.0f} times the FLOPs of the largest"
    if not (errors := scaling.errors):
        return f"{said}; too few to say how far off that is."
    middle, most = format_share(statistics.median(errors)), format_share(max(errors))
    said += f"; predicted so from the others, each of these is off by {middle} in the middle, {most} at most"
    return f"{said}." if scaling.is_useful else f"{said}: too far for a prediction, so none is shown."


_FAR = 2
"""Beyond so many times what was measured, a sentence says how far a prediction reaches."""


# The questions of an assignment, each with its Answer or with the reason why there is none.


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A question, and what the material says."""

    question: Question
    answer: Answer | None = None
    measured: bool = True
    """Whether some of the answer was measured; predictions alone leave the question to be measured."""
    why: str = ""
    """Why there is no answer, where that is more than missing data."""

    @cached_property
    def no_plot(self) -> str:
        """Why figures that a plot would show are in tables alone, as where they have too many lines."""
        try:
            if self.answer is not None and self.is_drawn:
                draw_answer(self.answer)
        except InputError as error:
            return str(error).partition(": ")[0]  # the remedy is one of the command line
        return ""

    @property
    def is_drawn(self) -> bool:
        """Whether its answer has a plot."""
        return self.answer is not None and any(panel.points for panel in self.answer.panels)


@dataclass(frozen=True, kw_only=True)
class WriteUp:
    """The whole write-up."""

    assignment: Assignment
    answered: tuple[Answered, ...]
    faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    """Where folders of the material disagree, in sentences."""
    others: tuple[str, ...] = ()
    """The models of the runs, where no question asks for any of them."""
    machine: Machine | None = None
    """The machine for which cells were chosen; None where all that is asked for is measured."""

    @property
    def count(self) -> int:
        """How many questions have their answer."""
        return sum(one.answer is not None for one in self.answered)

    @property
    def sentence(self) -> str:
        """How many questions are answered, and on which devices that was measured."""
        devices = [one.answer.device.rpartition("casts on ")[2] for one in self.answered if one.answer is not None]
        by_device = Counter(printable(device).replace(", limited", " limited") for device in devices if device)
        where = ", ".join(f"{device} ({counted(count, 'question')})" for device, count in by_device.most_common())
        measured = f"; measured on {where}" if where else ""
        alone = sum(not one.measured and one.answer is not None for one in self.answered)
        predicted = f", {alone} of them by prediction alone" if alone else ""
        of = f" The runs here are of {listed(self.others)}; no question asks for such a model." if self.others else ""
        return f"{self.count} of {counted(len(self.answered), 'question')} answered{predicted}{measured}.{of}"

    @property
    def unread(self) -> str:
        """How many files could not be read, and the first of them; empty where all were."""
        return f"{counted(len(self.faults), 'file')} could not be read: {self.faults[0]}" if self.faults else ""

    def missing(self, store: Path, again: Set[str] = frozenset()) -> tuple[Measure, ...]:
        """What is to be measured, the cheapest first, each once: for questions without an answer, what was interrupted
        in this store, and measures of these names."""
        measures = [(one, one.question.measure) for one in self.answered]
        wanted = {
            measure.name: measure
            for one, measure in measures
            if one.answer is None or not one.measured or measure.mark(store).exists() or measure.name in again
        }
        return tuple(sorted(wanted.values(), key=lambda measure: measure.cost))

    def of(self, question: Question) -> Answered:
        """This question with its answer."""
        return next(one for one in self.answered if one.question is question)


def write_up(
    assignment: Assignment,
    material: Material,
    machine: Machine | None = None,
    begun: Callable[[Answered], None] = lambda _: None,
) -> WriteUp:
    """Each question answered from the material. machine: what the cells that were not measured are predicted for; None
    leaves them out. begun: called with each as soon as it is."""
    answered, said = list[Answered](), list[Table]()
    runs = [run for run, _ in material.runs]
    asked = [_options_of(one.measure.words(scale)).get("model", ()) for one in assignment.questions for scale in SCALES]
    others = tuple(sorted({run.workload.name for run in runs}))
    others = () if {*itertools.chain(*asked)}.intersection(others) else others
    for question in assignment.questions:
        why, answer = "", None
        try:
            answer = question.source(material)
        except InputError as error:
            why = str(error)
        if others and not why and (models := _options_of(question.measure.words("full")).get("model")):
            why = f"no run here is of {', '.join(models)}"
        if answer is not None and not any(table.rows for table in answer.tables):
            answer = None
        measured = answer is not None
        more = predicted_cells(question, runs, machine) if machine is not None else ()
        if not question.predicts:  # questions on the same cells say so once
            more, said = tuple(table for table in more if table not in said), [*said, *more]
        if answer is not None and question.predicts != "out":
            answer = msgspec.structs.replace(answer, tables=(*answer.tables, *more))
        elif answer is None and any(table.rows for table in more):
            answer = Answer(study="writeup", question="", tables=more)
        answered.append(Answered(question=question, answer=answer, measured=measured, why=why))
        begun(answered[-1])
    return WriteUp(
        assignment=assignment,
        answered=tuple(answered),
        faults=material.faults,
        doubts=folders_apart(material.runs),
        others=others,
        machine=machine,
    )


Draw = Callable[[Sequence[Answer]], list[str]]

SUFFIXES = (".md", ".html")
MACHINE_FILE = "machine.json"
"""In a store: the machine for which its cells were chosen."""
MARK = "<!-- written by stepscope writeup -->"
"""The first line of a Markdown document of ours: a file without it is not overwritten."""
MOST_ALIKE = 6
"""Findings of one kind that are written out: a study of many cells has one for each."""
MOST_ROWS = 24
"""A longer table is in a file of its own, too, as CSV: it is read by a program."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The file of a write-up, and what lies beside it."""

    file: Path

    def __post_init__(self) -> None:
        if self.file.suffix.lower() not in SUFFIXES:
            raise InputError(f"cannot tell how to write {self.file}: end its name in {' or '.join(SUFFIXES)}")
        if self.file.is_dir() or not self.file.parent.is_dir():
            what = "it is a folder" if self.file.is_dir() else f"there is no folder {self.file.parent}, make it first"
            raise InputError(f"cannot write {self.file}: {what}")
        for folder in (self.plots, self.store):
            if folder.exists() and not folder.is_dir():
                raise InputError(f"cannot write {self.file}: {folder} beside it is a file; choose another name with -o")
        check_is_ours(self.file, GENERATOR if self.file.suffix.lower() == ".html" else MARK)

    @property
    def plots(self) -> Path:
        """The folder of the plots."""
        return self.file.with_name(f"{self.file.stem}_files")

    @property
    def store(self) -> Path:
        """The folder of what `--run` measures."""
        return self.file.with_name(f"{self.file.stem}_data")

    @property
    def machine(self) -> Machine | None:
        """The machine for which cells were chosen; None where they were not, or the file is damaged."""
        try:
            return msgspec.json.decode((self.store / MACHINE_FILE).read_bytes(), type=Machine)
        except (OSError, msgspec.MsgspecError):
            return None

    def remember(self, machine: Machine) -> None:
        """Keep for which machine cells are chosen, so that a later write-up predicts the others, too."""
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            write_atomically(msgspec.json.encode(machine), self.store / MACHINE_FILE)
        except OSError as error:
            raise InputError(f"cannot write {self.store}: {error.strerror or one_line(error)}") from error

    @property
    def is_page(self) -> bool:
        """Whether it is one HTML file, with its plots inside."""
        return self.file.suffix.lower() == ".html"

    def ask(self, one: Answered, drawer: Drawer) -> None:
        """Have the plot of a question drawn that `write` will want."""
        if one.is_drawn and one.answer is not None:
            for wanted in _pictures(one.answer) if self.is_page else (_drawn(one.answer),):
                drawer.ask(wanted)

    def write(self, write_up: WriteUp, scale: Scale, draw: Draw = draw_all) -> None:
        """Write the document and its plots. draw: what makes an SVG of each of several answers, where it is not this
        process. Raises InputError where it cannot be written."""
        try:
            drawn = () if self.is_page else tuple(one for one in write_up.answered if one.is_drawn and not one.no_plot)
            pictures = draw([_drawn(one.answer) for one in drawn if one.answer is not None])
            plots = {f"{one.question.id}.svg": svg for one, svg in zip(drawn, pictures, strict=True)}
            beside = plots | _long_tables(write_up)
            # A folder that holds plots and tables alone is ours, so that old ones may go.
            if self.plots.is_dir() and all(file.suffix in (".svg", ".csv") for file in self.plots.iterdir()):
                shutil.rmtree(self.plots)
            if beside:
                self.plots.mkdir(exist_ok=True)
            for name, text in beside.items():
                write_atomically(text.encode(), self.plots / name)
            paths = {name: f"{self.plots.name}/{name}" for name in beside}
            document = (
                render_page(as_page(write_up, scale, self.store, paths), draw)
                if self.is_page
                else as_markdown(write_up, scale, self.store, paths)
            )
            write_atomically(document.encode(), self.file)
        except OSError as error:
            raise InputError(f"cannot write {self.file}: {error.strerror or one_line(error)}") from error


def _drawn(answer: Answer) -> Answer:
    """What a plot is drawn of: all but tables and findings."""
    return msgspec.structs.replace(answer, tables=(), findings=(), asides=())


def _pictures(answer: Answer) -> list[Answer]:
    """What a page's plots of an answer are drawn of."""
    return pictures_of(Page(title="", kind="", sentence="", sections=(Section(title="", answer=answer),)))


_APART = "Disagreeing folders"


def as_markdown(write_up: WriteUp, scale: Scale, store: Path, paths: dict[str, str]) -> str:
    """The write-up in Markdown. paths: of each file beside it, its path from the document, by its name."""
    parts = [MARK, f"# {write_up.assignment.title}", write_up.sentence, *filter(None, [printable(write_up.unread)])]
    for title, questions in write_up.assignment.parts.items():
        parts.append(f"## {title}")
        for question in questions:
            one = write_up.of(question)
            parts.append(f"### {question.asks}")
            if one.answer is None:
                parts += [_lacking(one), f"```\n{question.measure.command(question.measure.words(scale), store)}\n```"]
                continue
            where = where_of(one.answer)
            parts += [f"*{printable(where)}*"] if where else []
            parts.append(render(_shown(one.answer, one.no_plot), "markdown").strip())
            if path := paths.get(f"{question.id}.svg"):
                parts.append(f"![{question.asks}]({_linked(path)})")
            tables = [f"[{Path(path).name}]({_linked(path)})" for path in _tables_of(question, paths)]
            parts += [f"As CSV: {', '.join(tables)}"] if tables else []
    parts += [f"## {_APART}", *map(printable, write_up.doubts)] if write_up.doubts else []
    return "\n\n".join(parts) + "\n"


def _linked(path: str) -> str:
    return f"<{path}>" if re.search(r"[\s()]", path) else path  # a space ends a bare path in a link


def _tables_of(question: Question, paths: dict[str, str]) -> list[str]:
    """The paths of a question's long tables."""
    return [path for name, path in paths.items() if re.fullmatch(rf"{re.escape(question.id)}-\d+\.csv", name)]


def as_page(write_up: WriteUp, scale: Scale, store: Path, paths: dict[str, str]) -> Page:
    """The write-up as a page: a section for each question. paths: as for `as_markdown`."""

    def section(part: str, one: Answered) -> Section:
        if one.answer is None:
            lacking = Answer(study="writeup", question="", tables=(text(_lacking(one)),))
            command = one.question.measure.command(one.question.measure.words(scale), store)
            return Section(title=one.question.asks, answer=lacking, part=part, commands=(command,))
        shown = _shown(one.answer, one.no_plot)
        if tables := _tables_of(one.question, paths):
            shown = msgspec.structs.replace(shown, asides=(*shown.asides, f"As CSV: {', '.join(tables)}."))
        where = msgspec.structs.replace(
            shown,
            device=one.answer.device,
            date=one.answer.date,
            versions=one.answer.versions,
            settings=one.answer.settings,
            panels=one.answer.panels,
        )
        return Section(title=one.question.asks, answer=where, part=part)

    apart = Answer(study="writeup", question="", tables=tuple(map(text, write_up.doubts)))
    return Page(
        title=write_up.assignment.title,
        kind="write-up",
        sentence=" ".join((write_up.sentence, *([write_up.unread] if write_up.faults else []))),
        sections=(
            *(
                section(title, write_up.of(question))
                for title, questions in write_up.assignment.parts.items()
                for question in questions
            ),
            *((Section(title=_APART, answer=apart, part=_APART),) if write_up.doubts else ()),
        ),
    )


def _lacking(one: Answered) -> str:
    return f"Not measured{f': {printable(one.why)}' if one.why else ' yet'}. This command measures it:"


def _shown(answer: Answer, why: str) -> Answer:
    """The answer without what stands above it in the document. why: why it has no plot."""
    asides = (*answer.asides, f"No plot: {why}.") if why else answer.asides
    findings, more = _without_repeats(answer.findings)
    return msgspec.structs.replace(answer.body(), findings=findings, asides=(*more, *asides))


def _without_repeats(findings: tuple[Finding, ...]) -> tuple[tuple[Finding, ...], list[str]]:
    """The first findings of each kind, and a sentence on the others."""
    counts: Counter[str] = Counter()
    kept: list[Finding] = []
    for finding in findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= MOST_ALIKE:
            kept.append(finding)
    more = [
        f"{counted(count - MOST_ALIKE, 'further finding')} of the kind {kind!r} for other cells: the tables have them."
        for kind, count in counts.items()
        if count > MOST_ALIKE
    ]
    return tuple(kept), more


def _long_tables(write_up: WriteUp) -> dict[str, str]:
    """The long tables as CSV, by the names of their files."""
    return {
        f"{one.question.id}-{i}.csv": render(Answer(study="writeup", question="", tables=(table,)), "csv")
        for one in write_up.answered
        if one.answer is not None
        for i, table in enumerate(one.answer.tables, 1)
        if len(table.rows) > MOST_ROWS
    }
