"""One step under torch.profiler: kernels, busy time, and what profiling costs."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from stepscope.core.evidence import KernelTotal, ProfiledStep

KERNEL_NAME_LIMIT = 240
_ON_DEVICE, _BY_GLOO = re.compile(r"nccl|rccl"), re.compile(r"gloo:")
"""Matches the start of the names of communication: kernels of a GPU, and what gloo's threads are at."""
_CALLS = re.compile(r"c10d|_c10d|record_param_comms|ProcessGroup")
"""Matches the start of the names of operators that hand over to it, or wait for it."""
_COPIES = re.compile(r"Mem(cpy|set)")
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
        **_overlap(events, device),
    )


def _overlap(events: Sequence[Any], device: torch.device) -> dict[str, float]:
    """Seconds of communication, of its exposed part, and of computation; empty where nothing communicates.

    A GPU computes in kernels. A CPU computes in operators that call no others, on threads that are not gloo's.
    """
    computing: list[tuple[float, float]] = []
    communicating: list[tuple[float, float]] = []
    if device.type == "cuda":
        for event in events:
            if event.device_type.name == "CUDA" and not event.is_user_annotation and not _COPIES.match(event.name):
                kind = communicating if _ON_DEVICE.match(event.name) else computing
                kind.append((event.time_range.start, event.time_range.end))
    else:
        others = {event.thread for event in events if _BY_GLOO.match(event.name)}
        for event in events:
            if _BY_GLOO.match(event.name):
                communicating.append((event.time_range.start, event.time_range.end))
            elif event.thread not in others and not event.cpu_children and not _CALLS.match(event.name):
                computing.append((event.time_range.start, event.time_range.end))
    if not communicating:
        return {}
    communication, computation = union_length(communicating), union_length(computing)
    # Rounding must not make more of the part than of the whole.
    exposed = min(union_length([*communicating, *computing]) - computation, communication)
    return {
        "communication_s": communication * 1e-6, "exposed_s": exposed * 1e-6, "computation_s": computation * 1e-6
    }  # fmt: skip


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
