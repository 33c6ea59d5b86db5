"""One step under torch.profiler: kernels, busy time, and what profiling costs."""

import re
from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity

from stepscope.core.evidence import KernelTotal, ProfiledStep

KERNEL_NAME_LIMIT = 240
_ATTENTION_OPERATORS = re.compile(r"(aten::)?_scaled_dot_product|stepscope::\w*attention|(aten::)?flex_attention")
"""Matches the start of the names of attention's operators. Our own operators have `attention` in their name."""


def profiler_for(
    device: torch.device, *, gpu: bool = True, record_shapes: bool = False, with_stack: bool = False
) -> torch.profiler.profile:
    """A torch.profiler of the host and this device; of the host alone where `gpu` is False."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda" and gpu:
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, record_shapes=record_shapes, with_stack=with_stack, acc_events=True
    )


def profiled_step(profiler: torch.profiler.profile, device: torch.device, step_s: float) -> ProfiledStep:
    """The ProfiledStep that the profiler recorded; the step took `step_s`.

    On a CPU the `kernels` are operators, by their own time (time in operators they call excluded).
    """
    events = profiler.events() or []
    operators = tuple(sorted({event.name for event in events if _ATTENTION_OPERATORS.match(event.name)}))
    if device.type == "cuda":
        on_device = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        intervals = [(event.time_range.start, event.time_range.end) for event in on_device]
        times = [(event.name, (event.time_range.end - event.time_range.start) * 1e-6) for event in on_device]
    else:
        intervals = [(event.time_range.start, event.time_range.end) for event in events if event.cpu_parent is None]
        times = [(event.name, event.self_cpu_time_total * 1e-6) for event in events]
    return ProfiledStep(
        step_s=step_s,
        kernel_launches=len(times),
        busy_s=union_length(intervals) * 1e-6,
        kernels=_totals(times),
        attention_operators=operators,
    )


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length covered by intervals that may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _totals(times: list[tuple[str, float]]) -> tuple[KernelTotal, ...]:
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name, duration_s in times:
        calls[name] = calls.get(name, 0) + 1
        seconds[name] = seconds.get(name, 0.0) + duration_s
    by_time = sorted(seconds, key=lambda name: -seconds[name])
    return tuple(
        KernelTotal(name=name[:KERNEL_NAME_LIMIT], calls=calls[name], total_s=seconds[name]) for name in by_time
    )
