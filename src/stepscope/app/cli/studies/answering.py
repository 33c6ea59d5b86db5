"""How a study comes to its answer that measures cells, or looks at one model."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from stepscope.app.cli.output import Presentation, warn
from stepscope.app.cli.questions import Answering
from stepscope.app.verbs.sweep import (
    captured,
    finished_answer,
    is_wanted,
    stored_runs,
    unread,
    wanted_runs,
)
from stepscope.core.answer import Answer
from stepscope.core.options import STORED, Option, refuse_beside
from stepscope.core.run import Run, settings_from
from stepscope.core.workloads import is_configuration
from stepscope.engine.request import TraceRequest, type_of_device
from stepscope.engine.workload_options import ManyWorkloads, factory_arguments

if TYPE_CHECKING:
    from stepscope.engine.request import Cell, SweepPlan
    from stepscope.questions.comparison import ComparedRun, Sizes


@dataclass(frozen=True, kw_only=True)
class AskedSteps:
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
    save: Path | None
    shown: Presentation

    @property
    def given(self) -> dict[str, tuple[Any, ...] | None]:
        """What chooses among the runs of a folder."""
        batch_sizes = None if self.batch_size is None else (self.batch_size,)
        return {"model": self.model, "seq_len": self.seq_len, "batch_size": batch_sizes, "dtype": self.dtype}

    @functools.cached_property
    def device_type(self) -> str:
        """cpu or cuda."""
        return type_of_device(self.device)

    def sizes(self, on_cpu: "Sizes", on_gpu: "Sizes", warmup: int | None = None) -> dict[str, Any]:
        """What is measured and how, as `compared_cells` takes it. A CPU's steps are not profiled."""
        from stepscope.core.model_config import configure

        on_a_cpu = self.device_type == "cpu"
        usual = on_cpu if on_a_cpu else on_gpu
        return {
            "models": [configure(name) for name in self.model or usual.models],
            "seq_lens": self.seq_len or (usual.seq_len,),
            "batch_size": usual.batch_size if self.batch_size is None else self.batch_size,
            "dtypes": self.dtype or usual.dtypes,
            "settings": settings_from(warmup, self.steps, self.seconds, no_profile=on_a_cpu),
        }

    def comparing(self, study: str, cell: "type[ComparedRun]", answer: Callable[..., Answer]) -> "Comparing":
        """The study that the verb of the same name asks for."""
        answering = Answering(study=study, shown=self.shown, save=self.save)
        return Comparing(verb=study, answering=answering, cell=cell, answer=answer, keep_digests=self.keep_digests)

    def plan(self, cells: "tuple[Cell, ...]", trace: TraceRequest) -> "SweepPlan":
        """The plan that measures these cells where it was asked."""
        from stepscope.engine.request import SweepPlan, order_cells, repeated

        if self.repeat > 1:
            cells = order_cells(repeated(cells, self.repeat))
        return SweepPlan(cells=cells, devices=(self.device,), out=str(self.runs), tag=self.tag, trace=trace)


@dataclass(frozen=True, kw_only=True)
class AskedStepsOfAny(AskedSteps):
    """Options of a study that compares steps of the textbook's model, or of one of the user's own."""

    module: str | None
    arg: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether a model of the user's own was named, by a factory or by a config.json."""
        return self.module is not None or any(is_configuration(name) for name in self.model or ())

    def sizes(self, on_cpu: "Sizes", on_gpu: "Sizes", warmup: int | None = None) -> dict[str, Any]:
        """What is measured of the textbook's model and how, as `compared_cells` takes it."""
        factory_arguments(self.module, self.arg)
        return AskedSteps.sizes(self, on_cpu, on_gpu, warmup)

    def own_cells(
        self, on_cpu: "Sizes", on_gpu: "Sizes", warmup: int | None = None, **choices: tuple[str, ...] | None
    ) -> "tuple[Cell, ...]":
        """A cell for each combination of what was said of the user's own model, and of `choices`, of which None is one
        that was not made. Raises InputError for options of the textbook's model."""
        from stepscope.engine.request import Cell, order_cells

        on_a_cpu = self.device_type == "cpu"
        dtypes = self.dtype or (on_cpu if on_a_cpu else on_gpu).dtypes
        said: dict[str, Any] = {**self.given, **choices, "dtype": dtypes, "arg": self.arg}
        if self.module is not None:
            said["module"] = (self.module,)
        workloads = ManyWorkloads({name: values for name, values in said.items() if values is not None}).workloads()
        settings = settings_from(warmup, self.steps, self.seconds, no_profile=on_a_cpu)
        return order_cells([Cell(workload=workload, settings=settings) for workload in workloads])


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """A study that compares runs: those of cells that it measures, or stored ones."""

    verb: str
    answering: Answering
    cell: "type[ComparedRun]"
    """Made of a run and its capture: what is compared."""
    answer: Callable[..., Answer]
    """The answer from these; `unread` is how many captures nothing here can read."""
    keep_digests: bool

    def from_stored(self, places: Sequence[Path], given: Mapping[str, tuple[Any, ...] | None], *read: str) -> None:
        """Answer from folders of runs, of those that have what was given; or show a finished answer. read: options
        that name no field of a workload."""
        refuse_beside("--from", "--keep-digests", *read, *(f"--{field.replace('_', '-')}" for field in given))
        wanted = wanted_runs(given)
        file = finished_answer(tuple(places), wanted)
        if file is not None:
            refuse_beside("--from")
            self.answering.read(file)
        else:
            self.from_runs((run, directory) for run, directory in stored_runs(places) if is_wanted(run, wanted))

    def from_runs(self, found: Iterable[tuple[Run, Path]]) -> int:
        """Answer from these runs, each with its directory. Returns how many captures nothing here can read."""
        made = [self.cell(run=run, digest=captured(run, directory, self.keep_digests)) for run, directory in found]
        lost = unread(cell.run for cell in made)
        self.answering.show(self.answer(made, unread=lost))
        return lost

    def measured(self, plan: "SweepPlan") -> None:
        """Measure the cells and answer; leaves with the sweep's exit code."""
        from stepscope.app.verbs.sweep import measure_and_report
        from stepscope.engine.request import Policy

        def report(found: list[Run]) -> None:
            place = Path(plan.out)
            if self.from_runs((run, place / run.id) for run in found):
                again = f"stepscope study {self.verb} --from {place}"
                warn(f"the captures lie in {place}: `{again}` answers from them where polars is")

        measure_and_report(plan, Policy(), report)
