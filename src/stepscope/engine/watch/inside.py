"""Two lines round a loop: `with stepscope.watch(model, optimizer) as watched:`."""

import atexit
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
from torch import nn

from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.run import Run
from stepscope.core.shown_text import warn
from stepscope.core.units import format_seconds
from stepscope.engine.request import MemoryRequest, TraceRequest
from stepscope.engine.watch.request import WatchRequest, checked_steps, settings_between
from stepscope.engine.watch.watched_run import WatchedRun
from stepscope.recording.watch.watch import watching

_RECORDED = ("memory", "kineto")


class Watched:
    """A loop that is watched while the block runs, and what was measured of it.

    Its steps end with the optimizer's steps. Where no optimizer of PyTorch steps, `step()` says so.
    """

    def __init__(self, watched: WatchedRun, *, quiet: bool) -> None:
        self._watched = watched
        self._quiet = quiet
        self._open = False

    @property
    def run(self) -> Run | None:
        """The run, once it was measured; None before that, and if nothing was measured."""
        return self._watched.run

    @property
    def directory(self) -> Path | None:
        """The directory of the run; None if nothing was measured."""
        return self._watched.directory

    @property
    def why_not(self) -> str | None:
        """The reason, in words, why nothing was measured; None if something was."""
        return self._watched.why_not

    def step(self) -> None:
        """Say that a step ends here. From the first call on, no other end counts."""
        self._watched.watch.step()

    def start(self) -> None:
        """Begin to watch, as the `with` block does."""
        if watching():
            self._watched.why_not = "another watch is running in this process"
            self._say(f"nothing is measured here: {self._watched.why_not}")
            return
        self._open = True
        atexit.register(self.end)
        self._watched.start()

    def end(self, error: BaseException | None = None) -> None:
        """End watching, as the end of the `with` block does; the loop may have ended by an exception."""
        if not self._open:
            return
        self._open = False
        atexit.unregister(self.end)
        run = self._watched.end(error)
        if run is None:
            if not self._watched.was_told:
                self._say(f"nothing was measured: {self.why_not}")
        else:
            self._say(f"{self!r}; saved in {self.directory}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(error)

    def __repr__(self) -> str:
        run = self.run
        if run is None:
            return f"nothing measured{f': {self.why_not}' if self.why_not else ''}"
        samples = run.samples.get("step")
        median = samples.median_s if samples is not None else None
        if samples is None or median is None:
            return f"{run.workload.model.name}: {run.status}, no step was timed"
        return f"{run.workload.model.name}: {format_seconds(median)} a step, the median of {samples.count}"

    def _say(self, line: str) -> None:
        if not self._quiet:
            warn(line)


def watch(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: tuple[int, int] | None = None,
    record: Iterable[str] = (),
    memory_steps: int = 1,
    runs: str | Path = "runs",
    tag: str | None = None,
    step_of: str | None = None,
    quiet: bool = False,
) -> Watched:
    """Watch the training loop inside a `with` block, and measure some of its steps.

        with stepscope.watch(model, optimizer) as watched:
            for batch in loader: ...
        print(watched.run.summary)

    steps: the first step that is timed, and the first after it that is not; the loop's first step is 0. If steps is
    left out, 10 to 100 steps are timed, once they are steady.
    record: `kineto` or `memory`, which record some more steps.
    memory_steps: how many steps `memory` records; 3 or more show what grows from step to step.
    model, optimizer: whose steps are measured; if neither is given, the loop itself shows them.
    step_of: the name of the class of either, where a loop has several.
    runs: where the run's directory is made.
    tag: a word to find the run by.
    quiet: say nothing on stderr.

    `watched.run` is None if nothing was measured; `watched.why_not` then says why.

    Raises InputError if the model is no module, the optimizer is no optimizer, or steps begin before the third.
    """
    _check(model, nn.Module, "the model is a {}: give a torch.nn.Module")
    _check(optimizer, torch.optim.Optimizer, "the optimizer is a {}: give one of PyTorch's, or none and call step()")
    asked = tuple(dict.fromkeys([record] if isinstance(record, str) else record))
    for name in asked:
        choose(name, _RECORDED, "record")
    between = checked_steps(*steps) if steps is not None else None
    request = WatchRequest(
        runs=Path(runs).absolute(),
        settings=settings_between(between),
        between=between,
        trace=TraceRequest(tools=cast("tuple[TraceTool, ...]", tuple(name for name in asked if name in TRACE_TOOLS))),
        memory=MemoryRequest(steps=memory_steps) if "memory" in asked else None,
        step_of=step_of,
        tag=tag,
    )
    return Watched(WatchedRun(request, _nothing if quiet else warn, model=model, optimizer=optimizer), quiet=quiet)


def _check(given: object, expected: type, message: str) -> None:
    if given is not None and not isinstance(given, expected):
        raise InputError(message.format(type(given).__name__))


def _nothing(_: str) -> None:
    pass
