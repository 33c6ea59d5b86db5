"""A run that is being measured: what its stages share, and what is known so far."""

import contextlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch

from stepscope.core import interrupts
from stepscope.core.errors import StepscopeError, one_line
from stepscope.core.evidence import Evidence
from stepscope.core.run import Failure, Run, Status
from stepscope.core.run_directory import save_run
from stepscope.core.run_files import FAILURE_FILE
from stepscope.engine.device_failure import failing_module, is_out_of_memory, portable_traceback
from stepscope.engine.request import Stage, StepRequest, Tell
from stepscope.measure.device import timing_device
from stepscope.measure.nsys import Nsys
from stepscope.models.training_step import TrainingStep


class Draft:
    """A run that its stages fill in. `run` holds what is known so far, and is what remains if a stage fails."""

    def __init__(
        self, request: StepRequest, device: torch.device, directory: Path, tell: Tell, nsys: Nsys | None
    ) -> None:
        self.request, self.device, self.directory, self.nsys = request, device, directory, nsys
        self.timing = timing_device(device)
        self.stage = "start"
        """The name of the stage that is under way, for displays and failures."""
        self.made: TrainingStep | None = None
        self.held_before_bytes = 0
        """Bytes that the process had allocated on the device before the step was made."""
        self._display = tell
        self.run = Run(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tag=request.tag,
            sweep=request.sweep,
            status="unfinished",
            workload=request.workload,
            settings=request.settings,
        )

    @property
    def step(self) -> TrainingStep:
        """The step, once it is built and until it is released."""
        assert self.made is not None
        return self.made

    def begin(self, stage: str, detail: str = "") -> None:
        """Enter a stage. Raises KeyboardInterrupt where a signal was lost before."""
        self.stage = stage
        self.tell(Stage(name=stage, detail=detail))

    def tell(self, stage: Stage) -> None:
        """Report progress to the display. Raises KeyboardInterrupt where a signal was lost before."""
        interrupts.check()
        with contextlib.suppress(OSError):  # a display that is gone, or full, is no concern of the measurement
            self._display(stage)

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

    def keep_files(self, **files: str) -> None:
        """List files beside run.json, by kind."""
        self.set(artifacts={**self.run.artifacts, **files})

    def save_meanwhile(self) -> None:
        """Write what is known so far. If the disk refuses, the save at the end reports it and finds another place."""
        with contextlib.suppress(StepscopeError):
            save_run(self.run, self.directory, rescue=False)

    def fail(self, error: BaseException, during: str, phase: str | None = None) -> None:
        """End the run with the exception that the device or a library raised; its traceback goes to a file."""
        status: Status = "out-of-memory" if is_out_of_memory(error) else "failed"
        with contextlib.suppress(OSError):  # the failure is in run.json too; only its traceback found no room
            (self.directory / FAILURE_FILE).write_text(portable_traceback(error))
            self.keep_files(failure=FAILURE_FILE)
        module = failing_module(self.made.model, error.__traceback__) if self.made is not None else None
        self.set(status=status, failure=Failure(message=one_line(error), during=during, phase=phase, module=module))

    def interrupt(self) -> None:
        """End the run as Ctrl-C asks. Once the times are whole the run stays done; the failure says what is missing."""
        if self.run.status == "unfinished":
            failure = Failure(message="interrupted by the user", during=self.stage)
            self.set(status="interrupted", failure=failure)
        elif self.run.status == "done" and self.run.failure is None:
            failure = Failure(message="interrupted by the user, after the timed steps", during=self.stage)
            self.set(failure=failure)
