"""Runs that differ in one field of their workload, each beside the run that has the field's baseline value.

Every study that compares runs does it here. A study says what differs (a subclass of ComparedRun) and what it asks of
two runs (a subclass of Pair). What must be the same, which of several runs stands for a cell, which runs make a pair
and what is missing are decided once, in `compare_runs`.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, measured_answer, note, warning
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.figures import digits, doubt_mark, median_within_ms, times_within
from stepscope.core.formulas.spelled import parameters_of
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.options import STORED, Option, refuse_beside
from stepscope.core.parts import attention_names
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, STEP
from stepscope.core.run import Run, Settings, settings_from
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.core.samples import INTERVALS, INTERVALS_OF_SETS, Ratio, Samples
from stepscope.core.workloads import DTYPES, PHASES, is_configuration
from stepscope.engine.request import TraceRequest, grid, type_of_device
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.engine.sweep_plan import SweepPlan, order_cells, repeated
from stepscope.engine.workload_options import ManyWorkloads, factory_arguments
from stepscope.questions.question import Cells, Result, read_answer
from stepscope.runs.answer import bar, status_word
from stepscope.runs.metrics import memory_of, samples_of
from stepscope.runs.run_sets import Disagreement, RunSet, disagreeing, disagreement, sets_of

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import TraceDigest  # a module that needs polars


_ALIKE = (FORWARD, BACKWARD, FORWARD_BACKWARD)
"""Parts of a step that are the same whatever follows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRun:
    """A run, and what is kept of its captured step, if it has one."""

    FIELD: ClassVar[str]
    """The field of the workload in which the runs of a comparison differ."""
    BASELINE: ClassVar[str]
    """The value of that field which the others are set beside."""
    PART: ClassVar[str] = STEP
    """The samples that are compared. A run without them was not measured."""

    WITH_BACKWARD: ClassVar[bool] = False
    """Whether runs of inference alone are left out."""

    run: Run
    digest: "TraceDigest | None" = None
    processes: tuple[Run, ...] = ()
    """Where the cell was measured in several processes: the runs of all, of which `run` is the one in the middle."""

    @property
    def relevant(self) -> bool:
        """Whether the study compares runs of this kind."""
        workload = self.run.workload
        return hasattr(workload, self.FIELD) and not (self.WITH_BACKWARD and workload.phase == "forward")

    @property
    def value(self) -> str:
        """The run's value of the field that differs."""
        return getattr(self.run.workload, self.FIELD)

    @property
    def is_base(self) -> bool:
        return self.value == self.BASELINE

    @property
    def group(self) -> tuple[object, ...]:
        """Equal where nothing but the field differs: the rest of the workload, the device, the limit of its memory."""
        return same_but(self.run, **{self.FIELD: self.BASELINE})

    @property
    def name(self) -> str:
        """The cell without the field that differs: `small-b4-s512-train`."""
        return "-".join(self.run.workload.words(self.FIELD))

    @property
    def label(self) -> str:
        """The cell with the field's value, as a sentence names it."""
        return f"{self.name}, {self.value}"

    @property
    def shape(self) -> str:
        """The name without its model: `b4-s512-train`."""
        return "-".join(self.run.workload.words(self.FIELD, "model"))

    @property
    def parameters(self) -> int:
        return parameters_of(self.run.workload) or 0

    @property
    def on_gpu(self) -> bool:
        return self.run.environment is not None and self.run.environment.device_type != "cpu"

    def samples(self, part: str) -> Samples | None:
        """Samples of one part of the step; None where the step has no such part, or the run did not end."""
        samples = samples_of(self.run, part) if self.run.status == "done" else None
        return samples if samples is not None and samples.median_s else None

    @property
    def time_s(self) -> float:
        """The median in seconds of the part that is compared; 0 where it was not measured."""
        samples = self.samples(self.PART)
        return samples.median_s or 0.0 if samples else 0.0

    @property
    def captured(self) -> bool:
        """Whether there is a capture that answers the study's question."""
        return self.digest is not None

    @property
    def why_missing(self) -> str:
        """Why there is no result of this cell."""
        failure = self.run.failure
        return f"ended {self.run.status}" + (f" ({failure.where}): {failure.message}" if failure else "")

    @property
    def errors(self) -> list[str]:
        """Kinds of finding that say the run's figures are wrong."""
        return [finding.kind for finding in self.run.findings if finding.severity == "error"]


def same_but(run: Run, **baseline: Any) -> tuple[object, ...]:
    """Equal of runs that are the same experiment on the same device, but for the fields of the workload given here."""
    environment = run.environment
    where = (environment.device_name, environment.memory_limit_bytes) if environment else None
    return (msgspec.structs.replace(run.workload, **baseline).alike, where)


def same_part(run: Run, part: str) -> tuple[object, ...]:
    """Equal of runs in which this part of the step does the same work: forward and backward of training do so whatever
    optimizer follows, and with none, but for one that works under backward."""
    workload = run.workload
    if part not in _ALIKE or workload.sizes is None or workload.phase not in ("train", "forward-backward"):
        return same_but(run)
    if workload.phase == "train" and workload.optimizer == "adamw-under-backward":
        return same_but(run)
    return same_but(run, phase="forward-backward", optimizer="adamw-foreach", clip=None)


C = TypeVar("C", bound=ComparedRun)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair(Generic[C]):
    """A run, and the base that it is set beside."""

    base: C
    other: C

    @property
    def label(self) -> str:
        return self.other.label

    def ratio(self, part: str) -> Ratio | None:
        """How many times as fast this part is, by the medians; None where one has no such part.

        Where both were measured in several processes, it is of their typical times, and so is its interval.
        """
        if self.base.processes and self.other.processes:
            slower = RunSet(runs=self.base.processes).processes(part)
            change = slower.change_from(RunSet(runs=self.other.processes).processes(part))
            return Ratio(value=change.ratio, interval=change.interval) if change is not None else None
        base, other = self.base.samples(part), self.other.samples(part)
        return other.speedup_over(base) if base and other else None

    def won_s(self, part: str) -> float | None:
        """Seconds that a step wins in this part, by the medians; None where one has no such part."""
        base, other = self.base.samples(part), self.other.samples(part)
        return (base.median_s or 0.0) - (other.median_s or 0.0) if base and other else None

    @cached_property
    def speed_up(self) -> Ratio:
        """How many times as fast the part is that the study compares."""
        ratio = self.ratio(self.other.PART)
        assert ratio is not None, "a pair is made of measured runs"
        return ratio

    @property
    def verdict(self) -> str:
        """faster or slower; level where the interval of the speed-up holds 1, untold where there is no interval."""
        if self.speed_up.undecided:
            return "untold" if self.speed_up.interval is None else "level"
        return "slower" if self.speed_up.value < 1 else "faster"

    @property
    def doubted(self) -> bool:
        """Whether the findings of one of its runs doubt it."""
        return bool(doubt_mark(self.base.run, self.other.run))

    def memory_change(self, field: str) -> float | None:
        """By which share of the base's bytes this figure of PhaseMemory is larger; None where one is not known."""
        before, after = memory_of(self.base.run, field), memory_of(self.other.run, field)
        return after / before - 1 if before and after is not None else None


P = TypeVar("P", bound=Pair[Any])


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[C, P]):
    """Every measured run, and the pairs among them. `replaced` counts runs of a cell that has a better or newer one."""

    cells: tuple[C, ...]
    pairs: tuple[P, ...]
    unmeasured: tuple[C, ...]
    replaced: int
    disagreements: tuple[Disagreement, ...] = ()
    """Cells whose left-out runs disagree with the run that is shown."""

    @property
    def intervals(self) -> str:
        """What the intervals are of, for the answer's settings."""
        return INTERVALS_OF_SETS if any(cell.processes for cell in self.cells) else INTERVALS

    @property
    def groups(self) -> list[tuple[C, ...]]:
        """Runs that differ in the field alone; the base is the first of them, if there is one."""
        groups: dict[tuple[object, ...], list[C]] = {}
        for cell in self.cells:
            groups.setdefault(cell.group, []).append(cell)
        return [tuple(sorted(cells, key=lambda cell: not cell.is_base)) for cells in groups.values()]

    @property
    def alone(self) -> tuple[C, ...]:
        """Measured, with nothing to be set beside."""
        paired = {id(cell) for pair in self.pairs for cell in (pair.base, pair.other)}
        return tuple(cell for cell in self.cells if id(cell) not in paired)

    @property
    def lines(self) -> dict[tuple[str, str], list[P]]:
        """The pairs of one value and shape, over the models, by (value, shape)."""
        lines: dict[tuple[str, str], list[P]] = {}
        for pair in self.pairs:
            lines.setdefault((pair.other.value, pair.other.shape), []).append(pair)
        return lines


def compare_runs(cells: Iterable[C], pair: Callable[..., P], *, order: Callable[[C], Any]) -> Comparison[C, P]:
    """The runs in `order`, and a `pair` of each with the base of its group, if there is one.

    Of several runs of one cell, one with a capture goes before one without, then the newest. Runs of a cell that was
    measured in several processes go together, by the one in the middle.
    """
    by_cell: dict[tuple[object, ...], list[C]] = {}
    relevant = [cell for cell in cells if cell.relevant]
    for cell in sorted(relevant, key=lambda c: (c.time_s > 0, c.captured, c.run.instant, c.run.id)):
        by_cell.setdefault((*cell.group, cell.value), []).append(cell)
    shown: list[C] = []
    disagreements: list[Disagreement | None] = []
    replaced = 0
    for every in by_cell.values():
        cell, repeat = every[-1], every[-1].run.repeat
        together = [other for other in every if repeat and other.run.repeat and other.run.repeat.set == repeat.set]
        if len(together) > 1:
            (processes,) = sets_of(other.run for other in together)
            middle = next(other for other in together if other.run is processes.representative)
            cell = replace(middle, processes=processes.measured)
        shown.append(cell)
        replaced += len(every) - max(1, len(together))
        left_out = [other.run for other in every if other.run not in (cell.processes or (cell.run,))]
        disagreements.append(disagreement(cell.run, left_out, cell.PART))
    ordered = sorted(shown, key=order)
    measured = [cell for cell in ordered if cell.time_s]
    alike: dict[tuple[object, ...], list[Run]] = {}
    for cell in measured:
        alike.setdefault(same_part(cell.run, cell.PART), []).append(cell.run)
    disagreements += [disagreement(runs[0], runs[1:], measured[0].PART) for runs in alike.values()]
    bases = {cell.group: cell for cell in measured if cell.is_base}
    pairs = [pair(base=bases[cell.group], other=cell) for cell in measured if cell.group in bases and not cell.is_base]
    return Comparison(
        cells=tuple(measured),
        pairs=tuple(pairs),
        unmeasured=tuple(cell for cell in ordered if not cell.time_s),
        replaced=replaced,
        disagreements=tuple(one for one in disagreements if one is not None),
    )


# What the answers of all comparisons have: cells without a result, figures over sizes of models, words for nothing.


def compared_answer(comparison: Comparison[Any, Any], base: ComparedRun, **parts: Any) -> Answer:
    """The answer from compared runs, in the environment of `base`. parts: what `measured_answer` takes besides."""
    date = max(cell.run.day for cell in comparison.cells)
    return measured_answer(base.run.environment, date=date, intervals=comparison.intervals, **parts)


def table_of_rows(title: str, rows: Iterable[Mapping[str, Cell]], *, known: bool = False) -> Table:
    """A table from its rows, each a map of heads to cells. known: without columns that hold nothing."""
    maps = list(rows)
    heads = list(dict.fromkeys(head for row in maps for head in row))
    heads = [head for head in heads if not known or any(row.get(head) is not None for row in maps)]
    return Table(title=title, columns=tuple(heads), rows=tuple(tuple(row.get(head) for head in heads) for row in maps))


def within(head: str, low_head: str, of: Samples | Ratio | None) -> dict[str, Cell]:
    """A median in ms, or a ratio, and the ends of its interval under their heads: `low_head from`, `low_head to`."""
    figures = median_within_ms(of) if isinstance(of, Samples) else times_within(of)
    return dict(zip((head, f"{low_head} from".strip(), f"{low_head} to".strip()), figures, strict=True))


def times_as_fast(ratio: Ratio, form: str = ".3g", brackets: str = "()") -> str:
    """How many times as fast, with the interval: `1.23 (1.2 to 1.26) times as fast`."""
    ends = f"{ratio.interval.low:{form}} to {ratio.interval.high:{form}}" if ratio.interval else ""
    within = f" {brackets[0]}{ends}{brackets[1]}" if ends else ""
    return f"{ratio.value:{form}}{within} times as fast"


def missing_cells(
    title: str, field: str, unmeasured: Iterable[ComparedRun], more: Iterable[tuple[Cell, ...]] = ()
) -> Table:
    """A row for each cell without a result, and why; and `more` rows."""
    rows = [(cell.name, cell.value, cell.why_missing) for cell in unmeasured]
    return Table(title=title, columns=("cell", field, "why"), rows=(*rows, *more))


def nothing_to_compare(study: Comparison[Any, Any], *, verb: str, needs: str, measured: str) -> str:
    """Why there is no pair. `needs`: what a run must be or have; `measured`: in what a cell must be measured."""
    if study.unmeasured:
        cell = study.unmeasured[0]
        return f"nothing to compare: {cell.label} {cell.why_missing}"
    if not study.cells:
        return f"no run here (of those asked for) {needs}: measure with `stepscope study {verb}`"
    there = ", ".join(dict.fromkeys(cell.value for cell in study.cells))
    return (
        f"nothing to compare: no cell here was measured both {measured} (there is {there}); "
        "give the folder of the others too, by a second --from"
    )


def bars_of(study: Comparison[Any, Any], part: str) -> tuple[Panel, ...]:
    """The medians of a part of the step, a bar for each value of the field beside the others of its cell; a cell
    without a result is marked with what became of it."""
    measured = [bar(c.value, c.name, c.samples(part), doubted=bool(doubt_mark(c.run))) for c in study.cells]
    lost = [bar(cell.value, cell.name, None, missing=status_word(cell.run)) for cell in study.unmeasured]
    panel = Panel(x_title="", y_title=f"{part}, ms", points=(*measured, *lost), kind="bars")
    return (panel,) if measured else ()


def over_sizes(
    y_title: str, figures: Iterable[tuple[ComparedRun, float, bool]], *, several_shapes: bool, y_log: bool = False
) -> tuple[Panel, ...]:
    """A panel of figures over the models' sizes, a line for each value of the field; none without figures.

    figures: (run, figure, whether a finding doubts it). With several shapes each is a line of its own.
    """
    points: list[Point] = []
    for cell, y, doubted in figures:
        line = f"{cell.value}, {cell.shape}" if several_shapes else cell.value
        points.append(Point(line=line, x=digits(cell.parameters / 1e6) or 0.0, y=y, doubted=doubted))
    panel = Panel(x_title="million parameters", y_title=y_title, points=tuple(points), x_log=True, y_log=y_log)
    return (panel,) if points else ()


# What to doubt in a comparison, in sentences: the same ones in every study.


_NAMED = 4
"""Cells that a sentence names; the others are counted."""


def listed(labels: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(labels)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def doubtful_runs(study: Comparison[Any, Any]) -> Iterator[Finding]:
    """Runs whose own checks found their figures wrong."""
    wrong = [f"{cell.label} ({kind})" for cell in study.cells for kind in cell.errors]
    if wrong:
        yield warning("doubtful-run", f"A check found these wrong: {listed(wrong)}.")


def unlike_environments(pairs: Sequence[Pair[Any]]) -> Iterator[Finding]:
    """A pair that was measured in different environments: the first alone, the others differ in the same as a rule."""
    for pair in pairs:
        base, other = pair.base.run.environment, pair.other.run.environment
        differing = base.differences(other) if base and other else {}
        # The commit and the folder's state change with every result that is kept.
        moving = {field: values for field, values in differing.items() if not field.startswith("git_")}
        if moving:
            field, (first, second) = next(iter(moving.items()))
            yield warning(
                "different-environments",
                f"{pair.label} and {pair.base.value} were measured in different environments: {field} {second} and "
                f"{first}.",
            )
            return


def replaced_runs(study: Comparison[Any, Any]) -> Iterator[Finding]:
    """How many runs of a cell were left out for a better or newer one, and whether they say otherwise."""
    if study.replaced:
        yield note(
            "several-runs",
            f"{study.replaced} more runs of these cells were left out: one with a capture goes before one without, "
            "then the newest.",
        )
    yield from disagreeing(study.disagreements)


# What a study of runs measures: its usual sizes, and its cells.


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured where the user says nothing."""

    models: tuple[str, ...]
    seq_len: int
    batch_size: int
    dtypes: tuple[str, ...]

    def in_words(self, on_cpu: "Sizes") -> dict[str, str]:
        """The options' defaults as the help states them: these, and those `on_cpu` where they differ."""
        both = (
            (",".join(sizes.models), str(sizes.seq_len), str(sizes.batch_size), ",".join(sizes.dtypes))
            for sizes in (self, on_cpu)
        )
        words = [here if here == cpu else f"{here}; {cpu} on a CPU" for here, cpu in zip(*both, strict=True)]
        return dict(zip(("model", "seq_len", "batch_size", "dtype"), words, strict=True))


def compared_cells(
    *,
    models: Sequence[ModelConfig],
    settings: Settings,
    batch_size: int,
    seq_lens: Sequence[int],
    dtypes: Sequence[str],
    **choices: Sequence[str | None],
) -> tuple[SweepCell, ...]:
    """A cell for each combination, small models first. `choices`: of other fields of the workload."""
    fields = {"seq_len": seq_lens, "batch_size": (batch_size,), "dtype": dtypes, **choices}
    workloads = grid(model=models, **{field: list(values) for field, values in fields.items()})
    return order_cells([SweepCell(workload=workload, settings=settings) for workload in workloads])


# Runs, and what their captures say: measured just now, or found in folders.


@cache
def reads_captures() -> bool:
    """Whether polars is here: a machine that only measures has none."""
    try:
        importlib.import_module("stepscope.traces.captures.digest")
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        return False
    return True


def captured(run: Run, directory: Path, keep: bool) -> "TraceDigest | None":
    """What the run's capture says; None where polars is not installed, or the capture cannot be read, which is said."""
    if run.status != "done" or not reads_captures():
        return None
    from stepscope.traces.captures.digest import digest_beside

    try:
        return digest_beside(run, directory, "kineto", say=warn, keep=keep)
    except InputError as error:
        warn(f"its capture is left out: {error}")
        return None


def cells_of(kind: type[C], runs: Iterable[tuple[Run, Path]], keep: bool) -> tuple[list[C], int]:
    """What is compared of these runs, each with its directory; and how many of their captures nothing here can read.

    keep: whether what a capture says is written there.
    """
    cells = [kind(run=run, digest=captured(run, directory, keep)) for run, directory in runs]
    return cells, 0 if reads_captures() else sum("kineto" in cell.run.artifacts for cell in cells)


def stored_runs(places: Iterable[Path]) -> Iterator[tuple[Run, Path]]:
    """Every run under these folders, once, with its own folder. One that cannot be read is left out, which is said.

    Raises InputError for what is no folder.
    """
    files: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise InputError(f"no runs at {place}: it is no folder")
        files.update(dict.fromkeys(file.resolve() for file in find_run_files(place)))
    for file in files:
        try:
            yield load_run(file), file.parent
        except InputError as error:
            warn(f"left out: {error}")


def finished_answer(places: Sequence[Path], wanted: Iterable[str] = ()) -> Path | None:
    """The one file among stored results, an answer that is finished; None where they are folders of runs.

    wanted: fields that choose among the runs of a folder."""
    if len(places) != 1 or not places[0].is_file():
        return None
    if flags := ", ".join(f"--{field.replace('_', '-')}" for field in wanted):
        raise InputError(f"{places[0]} is a finished answer: {flags} would choose among the runs of a folder")
    return places[0]


# The options of a question that compares steps, and its way from them to its answer.


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a study that compares steps; None for what the study chooses."""

    model: tuple[str, ...] | None
    seq_len: tuple[int, ...] | None
    batch_size: int | None
    dtype: tuple[str, ...] | None
    device: str
    steps: int | None
    seconds: float = 1.0
    repeat: int
    keep_digests: bool
    runs: Path
    from_: Annotated[
        tuple[Path, ...],
        Option("A folder of runs, or an answer that --json wrote: nothing is measured.", STORED, metavar="PLACE"),
    ] = ()
    tag: str | None
    memory: int | None

    @property
    def fields(self) -> dict[str, tuple[Any, ...] | None]:
        """The fields by which runs of a folder are chosen."""
        batch_sizes = None if self.batch_size is None else (self.batch_size,)
        return {"model": self.model, "seq_len": self.seq_len, "batch_size": batch_sizes, "dtype": self.dtype}

    @cached_property
    def device_type(self) -> str:
        """cpu or cuda."""
        return type_of_device(self.device)

    def usual(self, on_cpu: Sizes, on_gpu: Sizes) -> Sizes:
        """What is measured on this device where the user says nothing."""
        return on_cpu if self.device_type == "cpu" else on_gpu

    def settings(self, warmup: int | None = None) -> Settings:
        """How a step is measured. A CPU's steps are not profiled."""
        return settings_from(warmup, self.steps, self.seconds, no_profile=self.device_type == "cpu")

    def sizes(self, usual: Sizes, warmup: int | None = None) -> dict[str, Any]:
        """What is measured of the textbook's model and how, as `compared_cells` takes it."""
        return {
            "models": [configure(name) for name in self.model or usual.models],
            "seq_lens": self.seq_len or (usual.seq_len,),
            "batch_size": usual.batch_size if self.batch_size is None else self.batch_size,
            "dtypes": self.dtype or usual.dtypes,
            "settings": self.settings(warmup),
        }

    def names_user_model(self, module: str | None) -> bool:
        """Whether a user's model is named, by a factory or by a config.json."""
        return module is not None or any(is_configuration(name) for name in self.model or ())

    def user_cells(
        self, module: str | None, arg: tuple[str, ...], warmup: int | None, **choices: tuple[str, ...] | None
    ) -> tuple[SweepCell, ...]:
        """A cell for each combination of the options of the user's model, and of `choices`, of which None is one that
        was not made. Empty where no such model is named. Raises InputError for options of the textbook's model."""
        if not self.names_user_model(module):
            factory_arguments(None, arg)
            return ()
        options: dict[str, Any] = {**self.fields, **choices, "arg": arg, "module": module and (module,)}
        workloads = ManyWorkloads({name: each for name, each in options.items() if each is not None}).workloads()
        return order_cells([SweepCell(workload=workload, settings=self.settings(warmup)) for workload in workloads])


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a question makes of the runs that it compares: of stored ones, or of those of the cells that it measures."""

    study: str
    cell: type[ComparedRun]
    """Made of a run and its capture: what is compared."""
    answer: Callable[..., Answer]
    """The answer from these; `unread` is how many captures nothing here can read."""
    options: StepOptions

    def stored(self, fields: Mapping[str, tuple[Any, ...] | None], *read: str) -> Result:
        """The answer from folders of runs, of those that have these values in their workload's fields; or a finished
        answer. read: options that name no field of a workload."""
        places = self.options.from_
        refuse_beside("--from", "--keep-digests", *read, *(f"--{field.replace('_', '-')}" for field in fields))
        choices = {"dtype": DTYPES, "phase": PHASES, "attention": attention_names()}
        wanted = {field: values for field, values in fields.items() if values is not None}
        for field, values in wanted.items():
            for value in values if field in choices else ():
                choose(value, choices[field], field)
        if file := finished_answer(places, wanted):
            refuse_beside("--from")
            return Result(answer=read_answer(file, self.study))

        attributes = {("name" if field == "model" else field): values for field, values in wanted.items()}
        return self.of_runs(
            (run, directory)
            for run, directory in stored_runs(places)
            if all(getattr(run.workload, name, None) in values for name, values in attributes.items())
        )

    def of_runs(self, runs: Iterable[tuple[Run, Path]], again: str = "") -> Result:
        """The answer from these runs, each with its directory. again: where they are read again if a capture cannot be
        read here."""
        cells, lost = cells_of(self.cell, runs, self.options.keep_digests)
        hint = f"the captures lie in {self.options.runs}: `{again}` answers from them where polars is"
        return Result(answer=self.answer(cells, unread=lost), hint=hint if lost and again else "")

    def measured(
        self, cells: tuple[SweepCell, ...], trace: TraceRequest, *around: contextlib.AbstractContextManager[None]
    ) -> Cells:
        """These cells, and the answer from their runs. around: the context in which they are measured."""
        options = self.options
        if options.repeat > 1:
            cells = order_cells(repeated(cells, options.repeat))
        plan = SweepPlan(
            cells=cells, devices=(options.device,), out=str(options.runs), tag=options.tag, trace=trace,
            memory_limit_bytes=options.memory,
        )  # fmt: skip
        again = f"stepscope study {self.study} --from {options.runs}"
        return Cells(
            plan=plan,
            answer=lambda runs: self.of_runs(((run, options.runs / run.id) for run in runs), again),
            around=around or (contextlib.nullcontext(),),
        )


# Environment variables for the processes that a study starts.


@contextlib.contextmanager
def child_environment(wanted: Mapping[str, str]) -> Generator[None]:
    """Processes that start in here have these variables; afterwards they are what they were."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
