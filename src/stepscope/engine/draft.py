"""A run that is being measured: what its stages share, and what is known so far."""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from stepscope.core import interrupts
from stepscope.core.errors import InputError, StepscopeError, named_line, one_line, without_install_places
from stepscope.core.evidence import Capture, CollectiveCalls, Correctness, Evidence
from stepscope.core.run import Failure, Run, Status
from stepscope.core.run_directory import FAILURE_FILE, save_run
from stepscope.engine.request import Stage, StepRequest, Tell, begun_run
from stepscope.recording.device import is_out_of_memory, timing_device
from stepscope.recording.step import Step
from stepscope.recording.timer import TimeLimit
from stepscope.training.training_step import Ranks

if TYPE_CHECKING:
    from stepscope.engine.nsys_trace import Nsys
    from stepscope.training.user_module.loading import Loaded


class RunDraft:
    """A run that is being measured, and its directory. `run` holds what is known so far, and remains if it fails."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run, self.directory = run, directory
        self.saves = True
        """Whether this process writes the run: of the ranks that share a step, the first does."""
        self._stage, self._since_s = "start", time.monotonic()
        self.stages_s: dict[str, float] = {}
        """Seconds in each stage that is over."""

    @property
    def stage(self) -> str:
        """The name of the stage that is under way, for displays and failures."""
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        now_s = time.monotonic()
        self.stages_s[self._stage] = self.stages_s.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s

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
        """Keep the MemoryGrowth of the snapshot of the recorded steps, or note why it is not known."""
        try:
            from stepscope.allocations.answer import growth_of  # noqa: PLC0415
            from stepscope.allocations.explain import explain  # noqa: PLC0415  (polars, which a bare machine lacks)
            from stepscope.allocations.snapshot import read_snapshot  # noqa: PLC0415

            self.set_evidence(growth=growth_of(explain(read_snapshot(self.directory))))
        except ModuleNotFoundError as error:
            self.note(f"no judgement on what grows: stepscope memory tells it where {error.name} is installed")
        except InputError as error:
            self.note(f"no judgement on what grows: {one_line(error)}")

    def keep_capture(self, capture: Capture, **files: str) -> None:
        """Add a capture to the evidence, and list its files beside run.json, by kind."""
        self.set_evidence(captures=(*self.run.evidence.captures, capture))
        self.keep_files(**files)

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
        # Files are named from their package on, so that a run directory can be shown to others.
        portable = without_install_places("".join(traceback.format_exception(error)))
        with contextlib.suppress(OSError):  # the failure is in run.json too; only its traceback found no room
            (self.directory / FAILURE_FILE).write_text(portable)
            self.keep_files(failure=FAILURE_FILE)
        # The innermost module whose forward was running.
        paths: dict[int, str] = {}
        if self.model is not None:
            modules = cast("Iterable[tuple[str, torch.nn.Module]]", self.model.named_modules())  # it has no type
            paths = {id(module): path for path, module in modules if path}
        running = [paths.get(id(frame.f_locals.get("self"))) for frame, _ in traceback.walk_tb(error.__traceback__)]
        failing = next((path for path in reversed(running) if path is not None), None)
        message = one_line(error) if status == "out-of-memory" else named_line(error)
        self.set(status=status, failure=Failure(message=message, during=during, phase=phase, module=failing))

    def interrupt(self) -> None:
        """End the run as Ctrl-C asks. Once the times are whole the run stays done; the failure says what is missing."""
        if self.run.status == "unfinished":
            self.set(status="interrupted", failure=Failure(message=interrupts.interruption(), during=self.stage))
        elif self.run.status == "done" and self.run.failure is None:
            self.set(failure=Failure(message=f"{interrupts.interruption()}, after the timed steps", during=self.stage))


class Draft(RunDraft):
    """The run of a step that is driven, which its stages fill in."""

    def __init__(
        self,
        request: StepRequest,
        device: torch.device,
        directory: Path,
        tell: Tell,
        nsys: "Nsys | None",
        *,
        load: "Callable[[], Loaded] | None" = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.request, self.device, self.nsys = request, device, nsys
        self.ranks = ranks or Ranks()
        """The processes that share the step, this one among them."""
        self.load = load
        """What makes the step's model, where no factory does."""
        self.timing = timing_device(device)
        self.limit = TimeLimit(request.settings.seconds) if request.in_seconds else None
        """The time that the whole run may take; None where it may take what it needs."""
        self.built: Step | None = None
        self.correct: Correctness | None = None
        """That ranks which share the step compute what one process does."""
        self.traffic: tuple[CollectiveCalls, ...] | None = None
        """What this rank sends and receives in a step, once it is counted."""
        self.held_before_bytes = 0
        """Bytes that the process had allocated on the device before the step was made."""
        self._display = tell
        run = msgspec.structs.replace(
            begun_run(request, directory, "unfinished"), evidence=Evidence(process_start=request.process_start)
        )
        super().__init__(run, directory)
        self.saves = self.ranks.rank == 0

    @property
    def step(self) -> Step:
        """The step, once it is built and until it is released."""
        assert self.built is not None
        return self.built

    @property
    def model(self) -> torch.nn.Module | None:
        return self.built.model if self.built is not None else None

    def begin(self, stage: str, detail: str = "") -> None:
        """Enter a stage. Raises KeyboardInterrupt where a signal was lost before."""
        self.stage = stage
        self.tell(Stage(name=stage, detail=detail))

    def tell(self, stage: Stage) -> None:
        """Report progress to the display. Raises KeyboardInterrupt where a signal was lost before."""
        interrupts.check()
        with contextlib.suppress(OSError):  # a display that is gone, or full, is no concern of the measurement
            self._display(stage)
