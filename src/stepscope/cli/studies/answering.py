"""How a study's verb comes to its answer: run, measured in cells, or read; then shown, written as JSON, drawn."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stepscope.cli.captured_runs import captured, finished_answer, is_wanted, stored_runs, unread, wanted_runs
from stepscope.cli.output import check_picture, draw, progress, stdout_kept_clean, warn
from stepscope.cli.presentation import Presentation
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer, decode_answer
from stepscope.core.bounded_file import read_named
from stepscope.core.errors import EXIT_INTERRUPTED, InputError
from stepscope.core.run import Run
from stepscope.engine.request import Tell

if TYPE_CHECKING:
    from stepscope.analysis.captures.digest import TraceDigest
    from stepscope.engine.plan import SweepPlan

_Decorator = Callable[[Callable[..., Answer]], Callable[..., None]]


@dataclass(frozen=True, kw_only=True)
class Answering:
    """What becomes of the answer of one study."""

    study: str
    shown: Presentation
    save: Path | None = None

    def __post_init__(self) -> None:
        check_picture(self.save)

    def run(self, made: Callable[[Tell], Answer]) -> None:
        """Make the answer, under a display, and show it. One that was interrupted shows what it has, and ends the
        command with the code of an interrupt."""
        with stdout_kept_clean(), progress() as tell:
            found = made(tell)
        self.show(found)
        if any(finding.kind == "interrupted" for finding in found.findings):
            raise typer.Exit(EXIT_INTERRUPTED)

    def read(self, path: Path) -> None:
        """Show an answer that --json wrote."""
        found = decode_answer(read_named(path), str(path))
        if found.study != self.study:
            raise InputError(f"{path} is of the study {found.study}: read it with `stepscope study {found.study}`")
        self.show(found)

    def show(self, found: Answer) -> None:
        self.shown.show(found)  # first: what was measured is not lost where nothing can be drawn
        draw(found, self.save)


@dataclass(frozen=True, kw_only=True)
class Comparing:
    """A study that compares runs: those of cells that it measures, or stored ones."""

    verb: str
    answering: Answering
    cell: Callable[[Run, "TraceDigest | None"], Any]
    """Makes of a run and its capture what is compared."""
    answer: Callable[[list[Any], int], Answer]
    """The answer from these; the number is that of captures that nothing here can read."""
    keep_digests: bool

    def from_stored(self, places: Sequence[Path], given: Mapping[str, tuple[Any, ...] | None]) -> None:
        """Answer from folders of runs, of those that have what was given; or show a finished answer."""
        wanted = wanted_runs(given)
        file = finished_answer(tuple(places), wanted)
        if file is not None:
            self.answering.read(file)
        else:
            self.from_runs((run, directory) for run, directory in stored_runs(places) if is_wanted(run, wanted))

    def from_runs(self, found: Iterable[tuple[Run, Path]]) -> int:
        """Answer from these runs, each with its directory. Returns how many captures nothing here can read."""
        made = [self.cell(run, captured(run, directory, self.keep_digests)) for run, directory in found]
        lost = unread(cell.run for cell in made)
        self.answering.show(self.answer(made, lost))
        return lost

    def measured(self, plan: "SweepPlan") -> None:
        """Measure the cells and answer; leaves with the sweep's exit code."""
        from stepscope.cli.sweep import measure_and_report
        from stepscope.engine.plan import Policy

        def report(found: list[Run]) -> None:
            place = Path(plan.out)
            if self.from_runs((run, place / run.id) for run in found):
                again = f"stepscope study {self.verb} --from {place}"
                warn(f"the captures lie in {place}: `{again}` answers from them where polars is")

        measure_and_report(plan, Policy(), report)


def study_verb(study: str, *examples: str, plot: bool = True, **usual: str) -> _Decorator:
    """A decorator that makes a verb of a function that answers: its options, and those that every study has.

    A parameter `tell` of the function is no option: it is told of progress. plot: whether the answer has curves.
    """
    shared = inspect.signature(_every_study).parameters.values()

    def make(run: Callable[..., Answer]) -> Callable[..., None]:
        parameters = inspect.signature(run).parameters

        @functools.wraps(run)
        def made(*, from_: Path | None, shown: Presentation, save: Path | None = None, **asked: Any) -> None:
            answering = Answering(study=study, shown=shown, save=save)
            if from_ is not None:
                answering.read(from_)
            else:
                answering.run(lambda tell: run(**asked, **({"tell": tell} if "tell" in parameters else {})))

        own = [parameter for parameter in parameters.values() if parameter.name != "tell"]
        own += [parameter for parameter in shared if plot or parameter.name != "save"]
        made.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return verb(f"study {study}", *examples, **usual)(made)

    return make


def _every_study(*, from_: Path | None, shown: Presentation, save: Path | None) -> None:
    """The options of every study, as the parameters of a verb."""
