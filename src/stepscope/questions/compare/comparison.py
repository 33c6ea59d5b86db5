"""Runs that differ in one field of their workload, each beside the run that has the field's baseline value.

Every study that compares runs does it here. A study says what differs (a subclass of ComparedRun) and what it asks of
two runs (a subclass of Pair). What must be the same, which of several runs stands for a cell, which runs make a pair
and what is missing are decided once, in `compare`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from stepscope.core.doubts import doubt_mark
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, STEP
from stepscope.core.run import Run
from stepscope.core.samples import INTERVALS, INTERVALS_OF_SETS, Ratio, Samples
from stepscope.core.work.described import parameters_of
from stepscope.core.workload import Workload
from stepscope.runs.disagreement import Disagreement, disagreement
from stepscope.runs.metrics import memory_of, samples_of
from stepscope.runs.run_sets import RunSet, sets_of

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
    def asked(self) -> bool:
        """Whether the study asks about runs of this kind."""
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
    def model(self) -> str:
        return self.run.workload.name

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
        found = samples_of(self.run, part) if self.run.status == "done" else None
        return found if found is not None and found.median_s else None

    @property
    def measured(self) -> bool:
        return self.samples(self.PART) is not None

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
    workload = msgspec.structs.replace(run.workload, **baseline)
    if isinstance(workload, Workload):
        return (workload, where)
    # A user's model is described by what was found when it ran: another dtype changes its structure and its inputs.
    model = msgspec.structs.replace(workload.model, structure="", inputs={})
    return (msgspec.json.encode(msgspec.structs.replace(workload, model=model), order="sorted"), where)


def same_part(run: Run, part: str) -> tuple[object, ...]:
    """Equal of runs in which this part of the step does the same work: forward and backward of training do so whatever
    optimizer follows, and with none, but for one that works under backward."""
    workload = run.textbook
    if part not in _ALIKE or workload is None or workload.phase not in ("train", "forward-backward"):
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
            return _over_processes(self.base.processes, self.other.processes, part)
        base, other = self.base.samples(part), self.other.samples(part)
        return other.speedup_over(base) if base and other else None

    def won_s(self, part: str) -> float | None:
        """Seconds that a step wins in this part, by the medians; None where one has no such part."""
        base, other = self.base.samples(part), self.other.samples(part)
        return (base.median_s or 0.0) - (other.median_s or 0.0) if base and other else None

    @cached_property
    def speed_up(self) -> Ratio:
        """How many times as fast the part is that the study compares."""
        found = self.ratio(self.other.PART)
        assert found is not None, "a pair is made of measured runs"
        return found

    @property
    def slower(self) -> bool:
        """Whether it is slower than the base, and not by chance as far as the samples tell."""
        return not self.speed_up.undecided and self.speed_up.value < 1

    @property
    def untold(self) -> bool:
        """Whether the samples do not tell which is faster, for want of an interval."""
        return self.speed_up.undecided and self.speed_up.interval is None

    @property
    def level(self) -> bool:
        """Whether the interval of the speed-up holds 1."""
        return self.speed_up.undecided and self.speed_up.interval is not None

    @property
    def doubted(self) -> bool:
        """Whether the findings of one of its runs doubt it."""
        return bool(doubt_mark(self.base.run, self.other.run))

    def memory_change(self, field: str) -> float | None:
        """By which share of the base's bytes this figure of PhaseMemory is larger; None where one is not known."""
        before, after = memory_of(self.base.run, field), memory_of(self.other.run, field)
        return after / before - 1 if before and after is not None else None


def _over_processes(base: tuple[Run, ...], other: tuple[Run, ...], part: str) -> Ratio | None:
    slower = RunSet(runs=base).processes(part).change_from(RunSet(runs=other).processes(part))
    return Ratio(value=slower.ratio, interval=slower.interval) if slower is not None else None


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
        found: dict[tuple[object, ...], list[C]] = {}
        for cell in self.cells:
            found.setdefault(cell.group, []).append(cell)
        return [tuple(sorted(cells, key=lambda cell: not cell.is_base)) for cells in found.values()]

    @property
    def alone(self) -> tuple[C, ...]:
        """Measured, with nothing to be set beside."""
        paired = {id(cell) for pair in self.pairs for cell in (pair.base, pair.other)}
        return tuple(cell for cell in self.cells if id(cell) not in paired)

    def pair_of(self, cell: C) -> P | None:
        """The pair in which this run is set beside its base."""
        return next((pair for pair in self.pairs if pair.other is cell), None)

    @property
    def lines(self) -> dict[tuple[str, str], list[P]]:
        """The pairs of one value and shape, over the models, by (value, shape)."""
        found: dict[tuple[str, str], list[P]] = {}
        for pair in self.pairs:
            found.setdefault((pair.other.value, pair.other.shape), []).append(pair)
        return found


def compare_runs(found: Iterable[C], pair: Callable[..., P], *, order: Callable[[C], Any]) -> Comparison[C, P]:
    """The runs in `order`, and a `pair` of each with the base of its group, if there is one.

    Of several runs of one cell, one with a capture goes before one without, then the newest. Runs of a cell that was
    measured in several processes go together, by the one in the middle.
    """
    best: dict[tuple[object, ...], C] = {}
    every: dict[tuple[object, ...], list[Run]] = {}
    replaced = 0
    asked = [cell for cell in found if cell.asked]
    for cell in sorted(asked, key=lambda c: (c.measured, c.captured, c.run.instant, c.run.id)):
        key = (*cell.group, cell.value)
        replaced += key in best
        best[key] = cell
        every.setdefault(key, []).append(cell.run)
    sets: dict[tuple[object, ...], list[C]] = {}
    for cell in asked:
        if cell.run.repeat is not None:
            sets.setdefault((*cell.group, cell.value, cell.run.repeat.set), []).append(cell)
    for key, cell in best.items():
        together = sets.get((*key, cell.run.repeat.set), []) if cell.run.repeat is not None else []
        if len(together) > 1:
            (found_set,) = sets_of(other.run for other in together)
            middle = next(other for other in together if other.run is found_set.representative)
            best[key] = replace(middle, processes=found_set.measured)
            replaced -= len(together) - 1
    cells = sorted(best.values(), key=order)
    measured = [cell for cell in cells if cell.measured]
    alike: dict[tuple[object, ...], list[Run]] = {}
    for cell in measured:
        alike.setdefault(same_part(cell.run, cell.PART), []).append(cell.run)
    disagreements = [
        *(disagreement(cell.run, [run for run in every[key] if run not in (cell.processes or (cell.run,))], cell.PART)
          for key, cell in best.items() if len(every[key]) > 1),
        *(disagreement(runs[0], runs[1:], measured[0].PART) for runs in alike.values() if len(runs) > 1),
    ]  # fmt: skip
    bases = {cell.group: cell for cell in measured if cell.is_base}
    pairs = [pair(base=bases[cell.group], other=cell) for cell in measured if cell.group in bases and not cell.is_base]
    return Comparison(
        cells=tuple(measured),
        pairs=tuple(pairs),
        unmeasured=tuple(cell for cell in cells if not cell.measured),
        replaced=replaced,
        disagreements=tuple(one for one in disagreements if one is not None),
    )
