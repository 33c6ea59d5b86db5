"""What the CPU allocator gave while something ran, by the profiler's own events."""

from collections.abc import Callable
from operator import methodcaller

from torch.profiler import ProfilerActivity, profile


def allocated_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that `run` left allocated beyond what there was before, and the most that it had so at any time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    raw = profiler.profiler
    assert raw is not None and raw.kineto_results is not None
    changes = [event for event in raw.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += methodcaller("nbytes")(event)  # PyTorch's type stubs do not know it
        peak = max(peak, live)
    return live, peak
