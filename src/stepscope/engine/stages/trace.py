"""Takes traces of some more steps. A trace that fails is evidence too: its capture says why."""

from collections.abc import Callable

import torch

from stepscope.core.errors import InputError, one_line
from stepscope.core.evidence import Capture
from stepscope.core.run_files import KINETO_FILE
from stepscope.engine.draft import Draft
from stepscope.engine.nsys_trace import NO_NVTX, trace_under_nsys
from stepscope.recording import ranges
from stepscope.recording.capture import capture_range
from stepscope.recording.driven import capture_kineto, trace_nvtx


def trace_by_kineto(draft: Draft) -> None:
    """Trace with torch.profiler, where it was asked for."""
    asked = draft.request.trace
    if "kineto" not in asked.tools:
        return

    def take() -> Capture:
        return capture_kineto(
            draft.step, draft.device, draft.timing, draft.directory, steps=asked.steps, stacks=asked.stacks,
            peers=draft.ranks,
        )  # fmt: skip

    _take(draft, "kineto", str(torch.__version__), take, kineto=KINETO_FILE)


def trace_for_the_watching_tool(draft: Draft) -> None:
    """Run steps with every range, where the user started a tool that watches this process and keeps what it records."""
    if not ranges.watched():
        return

    def take() -> Capture:
        if not ranges.current_emitters():
            raise InputError(NO_NVTX)
        with capture_range(draft.device):
            samples = trace_nvtx(draft.step, draft.device, draft.timing, draft.request.trace.steps, draft.ranks)
        return Capture(tool="nvtx", tool_version="", samples=samples)

    _take(draft, "nvtx", "", take)


def trace_by_nsys(draft: Draft) -> None:
    """Run the cell again under Nsight Systems, where it was asked for. The step is released by then."""
    if draft.nsys is not None:
        draft.begin("trace nsys")
        cuda = draft.device.type == "cuda"
        _keep(draft, *trace_under_nsys(draft.request, draft.nsys, draft.directory, cuda=cuda))


def _take(draft: Draft, tool: str, version: str, take: Callable[[], Capture], **files: str) -> None:
    draft.begin(f"trace {tool}")
    try:
        capture = take()
    except Exception as error:  # whatever the profiler raises is said in the capture; the times are kept
        capture, files = Capture(tool=tool, tool_version=version, failure=one_line(error)), {}
    _keep(draft, capture, files)


def _keep(draft: Draft, capture: Capture, files: dict[str, str]) -> None:
    draft.set_evidence(captures=(*draft.run.evidence.captures, capture))
    draft.keep_files(**files)
