"""Contexts round steps in which a profiler traces them, and the file that a trace becomes."""

import contextlib
import gzip
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity

from stepscope.core import interrupts
from stepscope.core.evidence import KernelTotal, ProfiledStep
from stepscope.core.profilers import with_texts_escaped
from stepscope.recording import ranges
from stepscope.recording.step import Step

# One step under torch.profiler: kernels, busy time, and what profiling costs.


KERNEL_NAME_LIMIT = 240
_ON_DEVICE, _BY_GLOO = re.compile(r"nccl|rccl"), re.compile(r"gloo:")
"""Matches the start of the names of communication: kernels of a GPU, and what gloo's threads are at."""
_CALLS = re.compile(r"c10d|_c10d|record_param_comms|ProcessGroup")
"""Matches the start of the names of operators that hand over to it, or wait for it."""
_COPIES = re.compile(r"Mem(cpy|set)")
_ATTENTION_OPERATORS = re.compile(r"(aten::)?_scaled_dot_product|stepscope::\w*attention|(aten::)?flex_attention")
"""Matches the start of the names of attention's operators. Our own operators have `attention` in their name."""


def profiler_for(
    device: torch.device,
    *,
    gpu: bool = True,
    record_shapes: bool = False,
    with_stack: bool = False,
    events: bool = True,
) -> torch.profiler.profile:
    """A torch.profiler of the host and this device; of the host alone where `gpu` is False. Without `events` its end
    makes no object of each event: that takes longer than a step."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda" and gpu:
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities, record_shapes=record_shapes, with_stack=with_stack, acc_events=events
    )


def profiled_step(profiler: torch.profiler.profile, device: torch.device, step_s: float) -> ProfiledStep:
    """The ProfiledStep that the profiler recorded; the step took `step_s`.

    On a CPU the `kernels` are operators, by their own time (time in operators they call excluded).
    """
    events = profiler.events() or []
    operators = tuple(sorted({event.name for event in events if _ATTENTION_OPERATORS.match(event.name)}))
    if device.type == "cuda":
        busy = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        times = [(event.name, event.time_range.end - event.time_range.start) for event in busy]
        communicating = [event for event in busy if _ON_DEVICE.match(event.name)]
        computing = [event for event in busy if not _ON_DEVICE.match(event.name) and not _COPIES.match(event.name)]
    else:
        busy = [event for event in events if event.cpu_parent is None]
        times = [(event.name, event.self_cpu_time_total) for event in events]
        communicating = [event for event in events if _BY_GLOO.match(event.name)]
        # A CPU computes in operators that call no others, on threads that are not gloo's.
        of_gloo = {event.thread for event in communicating}
        computing = [
            event
            for event in events
            if event.thread not in of_gloo and not event.cpu_children and not _CALLS.match(event.name)
        ]
    totals: dict[str, list[float]] = {}
    for name, microseconds in times:
        totals.setdefault(name, []).append(microseconds * 1e-6)
    by_time = sorted(totals.items(), key=lambda total: -sum(total[1]))
    profiled = ProfiledStep(
        step_s=step_s,
        kernel_launches=len(times),
        busy_s=covered_length(busy) * 1e-6,
        kernels=tuple(
            KernelTotal(name=name[:KERNEL_NAME_LIMIT], calls=len(calls_s), total_s=sum(calls_s))
            for name, calls_s in by_time
        ),
        attention_operators=operators,
    )
    if not communicating:
        return profiled
    communication, computation = covered_length(communicating), covered_length(computing)
    # Rounding must not make more of the part than of the whole.
    exposed = min(covered_length([*communicating, *computing]) - computation, communication)
    return msgspec.structs.replace(
        profiled, communication_s=communication * 1e-6, exposed_s=exposed * 1e-6, computation_s=computation * 1e-6
    )


def covered_length(events: Iterable[Any]) -> float:
    """The time that events of the profiler cover, which may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


AFTER_CAPTURE_S = 1.0
_QUOTES_OF_A_FIELD = 4
_COMPRESSION = 6  # gzip's own default; Python's 9 takes twice as long for one per cent


@contextlib.contextmanager
def kineto_session(step: Step, device: torch.device, *, stacks: bool = False) -> Iterator[torch.profiler.profile]:
    """A context in which torch.profiler records operators with shapes and sequence numbers, kernels, and the ranges of
    the step, its phases, modules and the parts of attention."""
    profiler = profiler_for(device, record_shapes=True, with_stack=stacks, events=False)
    with ranges.emitted_to(ranges.ProfilerEmitter()), details(step), profiler:
        yield profiler


@contextlib.contextmanager
def capture_range(device: torch.device) -> Iterator[None]:
    """A context that a tool records if it was told to wait for the CUDA profiler's API (nsys: `-c cudaProfilerApi`)."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        # `--capture-range-end=stop-shutdown` sends SIGTERM when the range ends. Elsewhere that is a request to end;
        # here it only says that the tool is done. Without the sleep, the tool loses kernels.
        with interrupts.expected():
            torch.cuda.profiler.stop()
            time.sleep(AFTER_CAPTURE_S)


def details(step: Step) -> contextlib.AbstractContextManager[None]:
    """A context in which ranges inside the model are emitted. A compiled step has phases alone: hooks inside the
    compiled module would make it compile anew, and the traced step would not be the timed one."""
    return ranges.detailed(step.model) if not step.compiled else contextlib.nullcontext()


def export_kineto(profiler: torch.profiler.profile, target: Path) -> None:
    """Write the Chrome trace compressed; the name appears when the file is whole."""
    plain, compressed = (target.with_name(f".{target.name}.{os.getpid()}.{part}") for part in ("json", "tmp"))
    try:
        profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(compressed, "wb", compresslevel=_COMPRESSION) as packed:
            # The profiler writes from C++ and does not say when the disk is full: the file then just ends.
            size = plain.stat().st_size
            source.seek(max(0, size - 64))
            if not source.read().rstrip().endswith(b"}"):
                raise OSError(f"the trace was cut short after {size} bytes: is the disk full?")
            source.seek(0)
            packed.writelines(_portable(line, target.name) for line in source)
        compressed.replace(target)
    finally:
        plain.unlink(missing_ok=True)
        compressed.unlink(missing_ok=True)


def _portable(line: bytes, name: str) -> bytes:
    """A line of the trace as JSON, and without the machine's name or the file's place, so that others may read it.

    The profiler does not escape the quotes in names of ranges and modules.
    """
    if line.count(b'"') > _QUOTES_OF_A_FIELD or b"\\" in line:
        line, _ = with_texts_escaped(line)
    if b'"host_name"' in line or b'"traceName"' in line:
        line = re.sub(rb'"host_name": *"[^"]*"', b'"host_name": ""', line)
        line = re.sub(rb'"traceName": *"[^"]*"', b'"traceName": "' + name.encode() + b'"', line)
    return line
