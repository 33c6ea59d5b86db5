"""Counts the operators that a step really calls, by phase, for the checks of what ran against what was asked."""

import bisect
from collections import Counter

import torch
from torch.profiler import record_function

from stepscope.core.evidence import StepOperators
from stepscope.recording import ranges
from stepscope.recording.profile import profiler_for
from stepscope.recording.step import Recorder

_RANGE = "stepscope operators of "
_ENGINE = "autograd::engine::"
"""How events of autograd's engine itself begin; the operator that it evaluates has an event of its own."""


class OperatorCounts(Recorder):
    """Counts what the host calls in the next step, under torch.profiler."""

    def __init__(self, device: torch.device) -> None:
        # Not for its events: a process whose first profile leaves the GPU out may see none of it in later ones. Where a
        # tool watches the process there is no later one, since CUDA lets one profiler in at a time.
        self.profiler = profiler_for(device, gpu=not ranges.watched())
        """The context in which to run the step."""

    def phase_begins(self, name: str) -> None:
        self._phase = record_function(f"{_RANGE}{name}")
        self._phase.__enter__()

    def phase_ends(self, name: str) -> None:
        self._phase.__exit__(None, None, None)

    def phase_failed(self, name: str) -> None:
        self.phase_ends(name)

    def counted(self) -> StepOperators:
        """Number of calls of each operator, by phase."""
        events = [event for event in self.profiler.events() or [] if event.device_type.name == "CPU"]
        # On a GPU autograd calls its operators on a thread of its own, so time decides which phase they belong to.
        begun = [event for event in events if event.name.startswith(_RANGE)]
        phases = sorted((event.time_range.start, event.name.removeprefix(_RANGE)) for event in begun)
        starts = [start for start, _ in phases]
        calls: dict[str, Counter[str]] = {name: Counter() for _, name in phases}
        for event in events:
            if event.name.startswith((_RANGE, _ENGINE)):
                continue
            before = bisect.bisect_right(starts, event.time_range.start)
            if before:
                calls[phases[before - 1][1]][event.name] += 1
        return StepOperators(calls={phase: dict(sorted(counted.items())) for phase, counted in calls.items()})
