"""The command of a question: its answer is made, or read from a file; then shown, written as JSON, drawn."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean
from stepscope.core.answer import Answer, decode_answer
from stepscope.core.environment import require_room_for_torch
from stepscope.core.errors import EXIT_DEVICE_FAILED, EXIT_INTERRUPTED, InputError
from stepscope.core.files import read_named
from stepscope.core.options import Alone, Verb, verb

if TYPE_CHECKING:
    from stepscope.engine.request import Tell


@dataclass(frozen=True, kw_only=True)
class Answering:
    """What becomes of the answer of one study."""

    study: str
    shown: Presentation
    save: Path | None = None

    def run(self, made: "Callable[[Tell], Answer]") -> None:
        """Make the answer, under a display, and show it. One that ended early shows what it has, and ends the command
        with the code of an interrupt, or of a device that failed."""
        with stdout_kept_clean(), progress() as tell:
            found = made(tell)
        self.show(found)
        if any(finding.kind == "interrupted" for finding in found.findings):
            raise typer.Exit(EXIT_INTERRUPTED)
        if any(finding.kind == "ended-early" for finding in found.findings):
            raise typer.Exit(EXIT_DEVICE_FAILED)

    def read(self, path: Path) -> None:
        """Show an answer that --json wrote."""
        found = decode_answer(read_named(path), str(path))
        if found.study != self.study:
            raise InputError(f"{path} is of the study {found.study}: read it with `stepscope study {found.study}`")
        self.show(found)

    def show(self, found: Answer) -> None:
        self.shown.show(found, save=self.save)


def study_verb(
    study: str, *examples: str, plot: bool = True, **defaults: str
) -> Callable[[Callable[..., Answer]], Verb]:
    """A decorator that makes a verb of a function that answers: its options, and those that every study has.

    A parameter `tell` of the function is no option: it is told of progress. plot: whether the answer has curves.
    """
    shared = inspect.signature(_every_study).parameters.values()

    def make(measure: Callable[..., Answer]) -> Verb:
        parameters = inspect.signature(measure).parameters

        @functools.wraps(measure)
        def run(*, from_: Path | None, shown: Presentation, save: Path | None = None, **options: Any) -> None:
            answering = Answering(study=study, shown=shown, save=save)
            if from_ is not None:
                answering.read(from_)
            else:
                require_room_for_torch()
                answering.run(lambda tell: measure(**options, **({"tell": tell} if "tell" in parameters else {})))

        stated = [parameter for parameter in parameters.values() if parameter.name != "tell"]
        stated += [parameter for parameter in shared if plot or parameter.name != "save"]
        run.__signature__ = inspect.Signature(stated)  # type: ignore[attr-defined]
        return verb(f"study {study}", *examples, conflicts=(Alone("--from"),), **defaults)(run)

    return make


def _every_study(*, from_: Path | None, shown: Presentation, save: Path | None) -> None:
    """The options of every study, as the parameters of a verb."""
