"""The process that nsys watches: it warms up the cell's steps without ranges, then runs them with every range.

Started by `engine/nsys_trace.py` as `python -m stepscope.engine.nsys_cell`. nsys may end it when the capture ends:
what it measured is written before.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.core.errors import one_line
from stepscope.core.samples import Samples
from stepscope.engine.cell import die_with_parent
from stepscope.engine.nsys_trace import WatchedAnswer, WatchedRequest
from stepscope.engine.request import StepRequest


def main() -> int:
    """Answer the request on stdin. Exit code 0 when the steps were traced."""
    line = sys.stdin.readline()
    die_with_parent()
    asked = msgspec.json.decode(line, type=WatchedRequest)
    answer = Path(asked.answer)
    try:
        _trace(asked.request, lambda samples: _write(answer, WatchedAnswer(samples=samples)))
    except Exception as error:
        _write(answer, WatchedAnswer(error=one_line(error)))
        raise
    return 0


def _trace(request: StepRequest, keep: Callable[[dict[str, Samples]], None]) -> None:
    from stepscope.engine.stages import make_step  # noqa: PLC0415  (torch, after the lifeline)
    from stepscope.recording import ranges  # noqa: PLC0415
    from stepscope.recording.capture import capture_range  # noqa: PLC0415
    from stepscope.recording.device import (  # noqa: PLC0415
        limit_memory,
        resolve_device,
        timing_device,
    )
    from stepscope.recording.driven import trace_nvtx  # noqa: PLC0415
    from stepscope.recording.precision import matmul_precision  # noqa: PLC0415
    from stepscope.recording.timer import timed_steps  # noqa: PLC0415

    if not ranges.current_emitters():
        raise RuntimeError("no NVTX ranges can be emitted: this PyTorch has none, and nvtx finds no tool that listens")
    device = resolve_device(request.device)
    limit_memory(device, request.memory_limit_bytes)
    timing = timing_device(device)
    with matmul_precision(request.workload.dtype):
        step, _ = make_step(request.workload, device)
        with ranges.silenced():
            timed_steps(step, timing, max(request.settings.warmup_floor, 1))
        with capture_range(device):
            keep(trace_nvtx(step, device, timing, request.trace.steps))


def _write(target: Path, answer: WatchedAnswer) -> None:
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(target)


if __name__ == "__main__":
    sys.exit(main())
