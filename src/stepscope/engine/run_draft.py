"""A run that is being measured and the files beside it, whatever measures it."""

import contextlib
from pathlib import Path

import msgspec
import torch

from stepscope.core import interrupts
from stepscope.core.errors import StepscopeError, named_line, one_line
from stepscope.core.evidence import Evidence
from stepscope.core.run import Failure, Run, Status
from stepscope.core.run_directory import save_run
from stepscope.core.run_files import FAILURE_FILE
from stepscope.engine.device_failure import failing_module, portable_traceback
from stepscope.engine.growth import growth_in
from stepscope.recording.device import is_out_of_memory


class RunDraft:
    """A run that is being measured, and its directory. `run` holds what is known so far, and remains if it fails."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.saves = True
        """Whether this process writes the run: of the ranks that share a step, the first does."""
        self.stage = "start"
        """The name of the stage that is under way, for displays and failures."""

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, where it is known."""
        return None

    def set(self, **changes: object) -> None:
        """Replace fields of the run."""
        self.run = msgspec.structs.replace(self.run, **changes)

    def set_evidence(self, **changes: object) -> None:
        """Replace fields of the run's evidence."""
        evidence: Evidence = msgspec.structs.replace(self.run.evidence, **changes)
        self.set(evidence=evidence)

    def note(self, note: str) -> None:
        """Add a note to the evidence."""
        self.set_evidence(notes=(*self.run.evidence.notes, note))

    def keep_growth(self) -> None:
        """Keep what the recorded steps left behind, as their snapshot tells it."""
        growth, why_not = growth_in(self.directory)
        if why_not is not None:
            self.note(why_not)
        self.set_evidence(growth=growth)

    def keep_files(self, **files: str) -> None:
        """List files beside run.json, by kind."""
        self.set(artifacts={**self.run.artifacts, **files})

    def save(self, *, rescue: bool = True) -> None:
        """Write the run, if it is this process's to write, as `save_run` does."""
        if self.saves:
            save_run(self.run, self.directory, rescue=rescue)

    def save_meanwhile(self) -> None:
        """Write what is known so far. If the disk refuses, the save at the end reports it and finds another place."""
        with contextlib.suppress(StepscopeError):
            self.save(rescue=False)

    def fail(self, error: BaseException, during: str, phase: str | None = None) -> None:
        """End the run with the exception that the device or a library raised; its traceback goes to a file."""
        status: Status = "out-of-memory" if is_out_of_memory(error) else "failed"
        with contextlib.suppress(OSError):  # the failure is in run.json too; only its traceback found no room
            (self.directory / FAILURE_FILE).write_text(portable_traceback(error))
            self.keep_files(failure=FAILURE_FILE)
        module = failing_module(self.model, error.__traceback__) if self.model is not None else None
        message = one_line(error) if status == "out-of-memory" else named_line(error)
        self.set(status=status, failure=Failure(message=message, during=during, phase=phase, module=module))

    def interrupt(self) -> None:
        """End the run as Ctrl-C asks. Once the times are whole the run stays done; the failure says what is missing."""
        if self.run.status == "unfinished":
            failure = Failure(message=interrupts.said(), during=self.stage)
            self.set(status="interrupted", failure=failure)
        elif self.run.status == "done" and self.run.failure is None:
            failure = Failure(message=f"{interrupts.said()}, after the timed steps", during=self.stage)
            self.set(failure=failure)
