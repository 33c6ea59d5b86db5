"""The operators that a step really calls, by phase: what it is checked with against what was asked."""

import bisect
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, record_function

from stepscope.core.evidence import StepOperators
from stepscope.measure import ranges
from stepscope.measure.device import Device
from stepscope.measure.timer import Subject

_RANGE = "stepscope operators of "
_ENGINE = "autograd::engine::"
"""What autograd's engine calls its own doing: the operator that it evaluates has a name of its own."""


def step_operators(step: Subject, device: torch.device, timing: Device) -> StepOperators:
    """Run one step under torch.profiler, and count what the host called."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda" and not ranges.watched():
        # Not for its events: a process whose first profile leaves the GPU out may see none of it in later ones. Where a
        # tool watches the process there is no later one, since CUDA lets one profiler in at a time.
        activities.append(ProfilerActivity.CUDA)
    step.prepare()
    timing.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for phase in step.phases:
            with record_function(f"{_RANGE}{phase.name}"):
                phase.run()
    timing.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type.name == "CPU"]
    # Autograd calls its operators on a thread of its own on a GPU: they belong to a phase by time.
    phases = sorted(
        (event.time_range.start, event.name.removeprefix(_RANGE)) for event in events if event.name.startswith(_RANGE)
    )
    starts = [start for start, _ in phases]
    calls: dict[str, Counter[str]] = {name: Counter() for _, name in phases}
    for event in events:
        if event.name.startswith((_RANGE, _ENGINE)):
            continue
        before = bisect.bisect_right(starts, event.time_range.start)
        if before:
            calls[phases[before - 1][1]][event.name] += 1
    return StepOperators(calls={phase: dict(sorted(counted.items())) for phase, counted in calls.items()})
