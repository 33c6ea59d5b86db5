"""Knows what of PyTorch's profiler the script itself uses, beside which a profiler of ours must not run.

PyTorch has one profiler a thread. Who starts a second one ends the first, and keeps nothing of it. A range that begins
under a profiler and ends after it writes into memory that the profiler has freed.
"""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction

from stepscope.recording.ranges import OwnRange
from stepscope.recording.watch.phases import Undo, replace

_AHEAD = 32
"""Steps of a script's profiler, by its schedule, in which it must do nothing for ours to begin."""
_SCHEDULE = torch.profiler.schedule(wait=1, warmup=1, active=1).__code__
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"

Range = torch.profiler.record_function


class ScriptProfilers:
    """The script's open ranges and its profilers, from `start` to `stop`."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, weakref.ref[Range]]] = {}
        """The ranges that are open: the thread and the range, by its id."""
        self._profilers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The script's profilers between start and stop."""
        self._ours = False
        self._give_way: Callable[[], None] | None = None
        """Ends what of ours is running, since the script starts its own."""
        self.when_closed: Callable[[], None] | None = None
        """A call that waits until no range is open on its thread."""
        self._undo: list[Undo] = []

    def start(self) -> None:
        kineto = torch.profiler.profile
        self._undo += [
            replace(Range, "__enter__", self._noting_enter),
            replace(Range, "__exit__", self._noting_exit),
            replace(kineto, "start", self._noting_start),
            replace(kineto, "stop", self._noting_stop),
            *(replace(autograd_profiler, name, self._giving_way) for name in ("_prepare_profiler", "_enable_profiler")),
            replace(torch.cuda.memory, "_record_memory_history", self._giving_way),
        ]

    def stop(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._ranges.clear()
        self.when_closed = self._give_way = None

    def open_range(self) -> str | None:
        """The name of the script's outermost range that is open on this thread."""
        here = get_ident()
        known = (each() for thread, each in list(self._ranges.values()) if thread == here)
        return next((each.name for each in known if each is not None and not isinstance(each, OwnRange)), None)

    def profiling(self) -> str | None:
        """Why no profiler of ours may begin now; None if one may."""
        if autograd_profiler._is_profiler_enabled or any(map(_will_record, list(self._profilers))):
            return "the script's own profiler is on: leave it out to record"
        name = self.open_range()
        return (
            f"the script's range {name!r} is open where its steps end: close it once a step"
            if name is not None
            else None
        )

    def recording_memory(self) -> str | None:
        """Why no history of allocations on a GPU may begin now; None if one may."""
        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        return "the script records the history of allocations itself" if enabled is not None and enabled() else None

    @contextlib.contextmanager
    def ours(self, give_way: Callable[[], None] | None) -> Iterator[None]:
        """A context in which a profiler of ours starts or stops. From then on `give_way` is called if the script starts
        its own; None when ours has stopped."""
        quiet = _LOG_LEVEL not in os.environ
        if quiet:
            os.environ[_LOG_LEVEL] = _SILENT  # PyTorch says on stderr that a profiler starts
        outside, self._ours = self._ours, True
        if give_way is None:
            self._end_ranges()
        try:
            yield
        finally:
            self._ours, self._give_way = outside, give_way
            if quiet:
                os.environ.pop(_LOG_LEVEL, None)

    def _end_ranges(self) -> None:
        """End the open ranges for the profiler. What the script does at their end has then no effect."""
        here = get_ident()
        for thread, reference in reversed(list(self._ranges.values())):
            known = reference()
            record = getattr(known, "record", None)
            if thread == here and record is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    torch.ops.profiler._record_function_exit._RecordFunction(record)

    def _noting_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(of: Range) -> Any:
            entered, key = original(of), id(of)
            self._ranges[key] = (get_ident(), weakref.ref(of, lambda _: self._ranges.pop(key, None)))
            return entered

        return enter

    def _noting_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(of: Range, *error: Any) -> Any:
            self._ranges.pop(id(of), None)
            left = original(of, *error)
            if self.when_closed is not None and self.open_range() is None:
                waiting, self.when_closed = self.when_closed, None
                waiting()
            return left

        return leave

    def _noting_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(of: Any) -> Any:
            if not self._ours:
                self._profilers.add(of)
            return original(of)

        return start

    def _noting_stop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stop(of: Any) -> Any:
            try:
                return original(of)
            finally:
                self._profilers.discard(of)

        return stop

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._ours and self._give_way is not None:
                give_way, self._give_way = self._give_way, None
                with self.ours(None):
                    give_way()
            return original(*args, **kwargs)

        return call


def _will_record(profiler: Any) -> bool:
    """Whether a profiler of the script records, or may do so within the next steps. One by PyTorch's own schedule may
    be idle, or at its end."""
    if getattr(profiler.schedule, "__code__", None) is not _SCHEDULE:
        return True
    ahead = range(profiler.step_num, profiler.step_num + _AHEAD)
    return any(profiler.schedule(step) is not ProfilerAction.NONE for step in ahead)
