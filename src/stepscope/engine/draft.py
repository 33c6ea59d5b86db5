"""A run that is being measured: what its stages share, and what is known so far."""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stepscope.core import interrupts
from stepscope.core.evidence import Evidence
from stepscope.core.ranks import CollectiveCalls, Correctness
from stepscope.core.run import Run
from stepscope.engine.request import Stage, StepRequest, Tell
from stepscope.engine.run_draft import RunDraft
from stepscope.recording.device import timing_device
from stepscope.recording.nsys import Nsys
from stepscope.recording.step import Step
from stepscope.training.parallel.ranks import Ranks

if TYPE_CHECKING:
    from stepscope.training.own.loading import Loaded


class Draft(RunDraft):
    """The run of a step that is driven, which its stages fill in."""

    def __init__(
        self,
        request: StepRequest,
        device: torch.device,
        directory: Path,
        tell: Tell,
        nsys: Nsys | None,
        *,
        given: "Callable[[], Loaded] | None" = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.request, self.device, self.nsys = request, device, nsys
        self.ranks = ranks or Ranks()
        """The processes that share the step, this one among them."""
        self.given = given
        """What makes the step's model, where no factory does."""
        self.timing = timing_device(device)
        self.made: Step | None = None
        self.correct: Correctness | None = None
        """That ranks which share the step compute what one process does."""
        self.traffic: tuple[CollectiveCalls, ...] | None = None
        """What this rank sends and receives in a step, once it is counted."""
        self.held_before_bytes = 0
        """Bytes that the process had allocated on the device before the step was made."""
        self._display = tell
        run = Run(
            id=directory.name,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tag=request.tag,
            sweep=request.sweep,
            repeat=request.repeat,
            status="unfinished",
            workload=request.workload,
            settings=request.settings,
            evidence=Evidence(process_start=request.process_start),
        )
        super().__init__(run, directory)
        self.saves = self.ranks.is_first

    @property
    def step(self) -> Step:
        """The step, once it is built and until it is released."""
        assert self.made is not None
        return self.made

    @property
    def model(self) -> torch.nn.Module | None:
        return self.made.model if self.made is not None else None

    def begin(self, stage: str, detail: str = "") -> None:
        """Enter a stage. Raises KeyboardInterrupt where a signal was lost before."""
        self.stage = stage
        self.tell(Stage(name=stage, detail=detail))

    def tell(self, stage: Stage) -> None:
        """Report progress to the display. Raises KeyboardInterrupt where a signal was lost before."""
        interrupts.check()
        with contextlib.suppress(OSError):  # a display that is gone, or full, is no concern of the measurement
            self._display(stage)
