"""The history of allocations that the caching allocator of a GPU keeps itself."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import SEGMENTS_BEFORE_KEY
from stepscope.recording import ranges
from stepscope.recording.memory_frames import Frame, StackTable, joined_ranges
from stepscope.recording.observe import PhasePeaks
from stepscope.recording.step import Step
from stepscope.recording.tensor_notes import TensorNotes

MOST_EVENTS = 2_000_000
"""Events that a history may hold; each takes a few KB of host memory, and a step of 32 blocks has about 20,000."""
_NODE = re.compile(r"Backward\d*$")
"""Matches the name of a node of backward, as autograd writes it."""


class AllocatorRecording:
    """A recording by the caching allocator of a GPU, which keeps the history itself."""

    def __init__(self, step: Step, device: torch.device, stacks: str, held_before_bytes: int) -> None:
        self._step, self._device, self._stacks, self._held = step, device, stacks, held_before_bytes
        tellable = hasattr(torch._C, "_cuda_setMemoryMetadata") and not step.compiled
        self.emitters: tuple[ranges.Emitter, ...] = (MetadataEmitter(_set_metadata),) if tellable else ()
        self.node_emitters = self.emitters
        self._before: list[dict[str, Any]] = []
        self._after: dict[str, Any] = {}
        self._measured: PhaseMemory | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[PhasePeaks]:
        peaks = PhasePeaks(self._step, self._device, self._held)
        self._before = _snapshot(self._device)["segments"]
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks=self._stacks, max_entries=MOST_EVENTS, clear_history=True
        )
        try:
            yield peaks
            self._measured = peaks.memory()
            self._after = _snapshot(self._device)
        finally:
            torch.cuda.memory._record_memory_history(None)

    def snapshot(self, notes: TensorNotes) -> tuple[dict[str, Any], PhaseMemory]:
        assert self._measured is not None
        stacks = StackTable()
        index = self._device.index
        traces = [
            [_portable_event(event, stacks) for event in trace] if i == index else []
            for i, trace in enumerate(self._after["device_traces"])
        ]
        whole = {
            **self._after,
            "segments": _portable_segments(self._after["segments"], index, stacks),
            "device_traces": traces,
            SEGMENTS_BEFORE_KEY: _portable_segments(self._before, index, stacks),
        }
        return whole, self._measured


class MetadataEmitter:
    """An emitter that puts the open ranges on every event of the allocator: `forward|blocks.3.attention|softmax`.

    Each thread has a text of its own for its events. Backward runs on a thread of autograd, inside the ranges that are
    open on the thread that waits for it; its own ranges stand behind those.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._main = threading.get_ident()
        self._open: list[str] = []
        self._elsewhere = threading.local()

    def push(self, name: str) -> None:
        self._stack().append(name)
        self._tell(self._text())

    def pop(self) -> None:
        self._stack().pop()
        self._tell(self._text())

    def _stack(self) -> list[str]:
        if threading.get_ident() == self._main:
            return self._open
        if not hasattr(self._elsewhere, "stack"):
            self._elsewhere.stack = []
        return self._elsewhere.stack

    def _text(self) -> str:
        stack = self._stack()
        return joined_ranges(stack if stack is self._open else [*self._open, *stack])


def _of(frames: Iterable[Mapping[str, Any]]) -> Iterator[Frame]:
    return ((frame["name"], frame["filename"], frame["line"]) for frame in frames)


def _portable_event(event: dict[str, Any], stacks: StackTable) -> dict[str, Any]:
    """The event with its stack portable. A node of backward among its ranges becomes its innermost frame: the thread
    that runs backward has no stack of Python's."""
    parts = event.get("user_metadata", "").split("|")
    nodes = [(part, "", 0) for part in parts[-1:] if _NODE.search(part)]
    changed = {**event, "frames": stacks.stack([*nodes, *_of(event.get("frames", ()))])}
    if "user_metadata" in event:
        changed["user_metadata"] = "|".join(part for part in parts if not _NODE.search(part))
    return changed


def _portable_segments(segments: list[dict[str, Any]], index: int | None, stacks: StackTable) -> list[dict[str, Any]]:
    def portable(owner: dict[str, Any]) -> dict[str, Any]:
        return {**owner, "frames": stacks.stack(_of(owner["frames"]))} if "frames" in owner else owner

    return [
        {**portable(segment), "blocks": [portable(block) for block in segment["blocks"]]}
        for segment in segments
        if segment.get("device", index) == index
    ]


def _snapshot(device: torch.device) -> dict[str, Any]:
    return dict(torch.cuda.memory._snapshot(device))


def _set_metadata(text: str) -> None:
    torch._C._cuda_setMemoryMetadata(text)
