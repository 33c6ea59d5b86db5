"""The host's clock, injected so that the timing logic is tested exactly."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in integer nanoseconds."""

    name: str

    def now_ns(self) -> int: ...


class HostClock:
    """time.perf_counter_ns: monotonic, and the finest the system has."""

    name = "perf_counter_ns"

    def now_ns(self) -> int:
        return time.perf_counter_ns()
