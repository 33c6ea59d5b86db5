"""The device a step runs on, as far as timing needs it: marks in its stream of work, and waiting for it; and how
busy its host is."""

import os
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from stepscope.core.environment import HostReading
from stepscope.core.errors import DeviceError, InputError, message_of, one_line
from stepscope.core.units import format_bytes

_PROC_STAT = Path("/proc/stat")


class Clock(Protocol):
    """A monotonic clock in integer nanoseconds, injected so that the timing logic is tested exactly."""

    name: str

    def now_ns(self) -> int: ...


class HostClock:
    """time.perf_counter_ns: monotonic, and the finest the system has."""

    name = "perf_counter_ns"
    now_ns = staticmethod(time.perf_counter_ns)


Mark = Any
"""A point in the device's stream of work; only the device that made it can read it."""


class Device(Protocol):
    """What `measure()` asks of a device."""

    clock_name: str
    """Name of the clock that times the marks; stored with every sample."""

    def synchronize(self) -> None:
        """Return when all work given to the device so far is finished."""
        ...

    def mark(self) -> Mark:
        """Put a mark at this point of the stream of work, without waiting for the device to reach it."""
        ...

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        """Seconds of device time between two marks: after the next `synchronize`, until the next mark after that."""
        ...


class HostDevice:
    """A CPU as the device: work is done when its call returns, so a mark reads the host's clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or HostClock()
        self.clock_name = self._clock.name

    def synchronize(self) -> None:
        pass

    def mark(self) -> Mark:
        return self._clock.now_ns()

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return (end - start) * 1e-9


class CudaDevice:
    """A GPU as the device: a mark is an event that the GPU itself times (resolution about 0.5 us).

    Marks go to the stream that is current when the device is made.
    """

    clock_name = "cuda events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)  # kept: asking for it costs more than recording an event
        # Events are used again step by step: making and destroying them costs the host time too.
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
        self._used = 0

    def mark(self) -> Mark:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._stream)
        return event

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) * 1e-3


def timing_device(device: torch.device) -> Device:
    """The Device that times a torch device. A GPU becomes the current one, so that marks land on its stream."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return CudaDevice(device)
    return HostDevice()


class HostLoad:
    """Measures how busy the host is between construction and `read()`; known only on Linux."""

    def __init__(self) -> None:
        self._start = self._now()

    def read(self) -> HostReading | None:
        end = self._now()
        if self._start is None or end is None:
            return None
        wall_s, own_s, busy_s = (b - a for a, b in zip(self._start, end, strict=True))
        if wall_s < 0.1:
            return None  # /proc/stat counts in ticks of 10 ms, and tells nothing of a shorter time
        return HostReading(own_cores=own_s / wall_s, other_cores=max(0.0, busy_s - own_s) / wall_s)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            fields = _PROC_STAT.read_text().splitlines()[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
        ticks = os.sysconf("SC_CLK_TCK")
        busy_s = (user + nice + system + irq + softirq + steal) / ticks
        times = os.times()
        return time.monotonic(), times.user + times.system, busy_s


def limit_memory(device: torch.device, limit_bytes: int | None) -> None:
    """Limit how much of the GPU's memory this process may allocate."""
    if limit_bytes is None:
        return
    if device.type != "cuda":
        raise InputError("--memory stands for a smaller GPU; it does not apply to a CPU")
    total = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes > total:
        raise InputError(f"--memory {format_bytes(limit_bytes)} is more than the GPU has ({format_bytes(total)})")
    try:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total, device)
    except RuntimeError as error:
        raise DeviceError(f"cannot limit the GPU's memory: {one_line(error)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception is some allocator's way of saying that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = message_of(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of the error and its causes, whose frames hold the tensors of the step that failed."""
    waiting: list[BaseException | None] = [error]
    while waiting:
        known = waiting.pop()
        if known is not None and known.__traceback__ is not None:
            known.__traceback__ = None
            waiting += [known.__cause__, known.__context__]


def host_memory() -> tuple[int | None, int | None]:
    """Bytes of memory that this process has resident, and bytes that it may still take, by the host and by its group's
    limit; None where the system does not tell."""
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return None, None
    try:  # the group's own limit, as a container and a scheduler set it
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        left += [max(0, int(limit) - int(used))] if limit != "max" else []
    except (OSError, ValueError):
        pass
    return resident, min(left, default=None)
