"""Recorded steps with the truth beside them: CPU histories with notes, replayed on the allocator of a GPU in small."""

import gc
import gzip
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.recording_allocator import RecordingAllocator

from stepscope.core.evidence import NOTES_KEY
from stepscope.core.run_directory import MEMORY_FILE
from stepscope.recording.memory_history import MemoryRecorder
from stepscope.recording.step import drive
from stepscope.training.user_module.module_step import UserStep
from tests.conftest import mini

CPU = torch.device("cpu")
_NODE = "autograd::engine::evaluate_function"


def record(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor], *, warm: int = 2, steps: int = 2, set_to_none: bool = True,
    micro_batches: int = 1, begin: str = "", zeroed_between: bool = False,
    several: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The snapshot of steps on a CPU, as a GPU's allocator would have written it, with notes.

    begin: the phase with whose first run the history begins; empty for the first step. zeroed_between: gradients stay
    until the next step begins. several: whether what steps leave is looked for.
    """

    def forward() -> None:
        given.loss = loss_of(model, batch)

    def backward() -> None:
        given.loss.backward()
        given.loss = None

    def update() -> None:
        optimizer.step()
        if not zeroed_between:
            optimizer.zero_grad(set_to_none=set_to_none)

    phases = [("forward", forward), ("backward", backward)] * micro_batches + [("optimizer", update)]
    given = SimpleNamespace(phases=phases, model=model, optimizer=optimizer, batches=[batch], loss=None)
    step = UserStep(given, "the step", CPU)
    for _ in range(warm):
        if zeroed_between:
            optimizer.zero_grad(set_to_none=set_to_none)
        drive(step)
    gc.collect()
    recorder = MemoryRecorder(step, CPU, several=several)
    with recorder.running():
        for _ in range(steps):
            if zeroed_between:
                optimizer.zero_grad(set_to_none=set_to_none)
            drive(step, recorder)
        recorder.steps_over()
    recorder.save(folder, workload=mini())
    with gzip.open(folder / MEMORY_FILE) as file:
        return as_on_a_gpu(pickle.load(file), begin)


@dataclass(kw_only=True)
class _Life:
    """A stay of memory at an address of the CPU, and where the GPU's allocator put it."""

    from_us: int
    address: int
    in_history: bool = True
    """Whether it lived when the history began, or came later."""


def as_on_a_gpu(snapshot: dict[str, Any], begin: str = "") -> dict[str, Any]:
    """The history replayed on a caching allocator. What lived before it is what was noted before the first event.

    Backward runs on a thread of its own there, without Python.
    """
    (events,) = snapshot["device_traces"]
    notes = snapshot[NOTES_KEY]
    first = events[0]["time_us"]
    begin_us = next((phase["start_us"] for phase in notes["phases"] if phase["name"] == begin), first)
    lives: dict[int, list[_Life]] = defaultdict(list)
    live: dict[int, _Life] = {}
    allocator = RecordingAllocator(recording=False, time_us=first - 1)

    def malloc(address: int, size: int, from_us: int) -> None:
        live[address] = _Life(from_us=from_us, address=allocator.malloc(size))
        lives[address].append(live[address])

    for note in notes["tensors"]:
        if note["at_us"] < first and note["address"] not in live:
            malloc(note["address"], note["bytes"], 0)
    before = allocator.start() if begin_us <= first else None
    for event in events:
        if before is None and event["time_us"] >= begin_us:
            before = allocator.start()
        frames = event["frames"]
        node = next((i for i, frame in enumerate(frames) if frame["name"].startswith(_NODE)), None)
        allocator.time_us = event["time_us"]
        allocator.about = {
            "frames": frames if node is None else frames[: node + 1], "user_metadata": event["user_metadata"],
        }  # fmt: skip
        if event["action"] == "alloc":
            malloc(event["addr"], event["size"], event["time_us"])
        elif event["action"] == "free_requested":
            freed = live.pop(event["addr"])
            freed.in_history = before is not None
            allocator.free(freed.address)
    told = []
    for note in notes["tensors"]:
        of_note = [life for life in lives[note["address"]] if life.from_us <= note["at_us"]]
        if of_note and of_note[-1].in_history:
            told.append({**note, "address": of_note[-1].address})
    return allocator.snapshot(segments_before=before, **{NOTES_KEY: {**notes, "tensors": told, "kept": ()}})


def without_notes(snapshot: dict[str, Any], stacks: str = "all") -> dict[str, Any]:
    """The snapshot as PyTorch alone writes it. stacks: all, python, or none."""
    keep: dict[str, Callable[[dict[str, Any]], bool]] = {
        "all": lambda frame: True, "python": lambda frame: bool(frame["filename"]), "none": lambda frame: False,
    }  # fmt: skip
    known: dict[int, Sequence[Any]] = {}

    def frames(event: dict[str, Any]) -> Sequence[Any]:
        given = event["frames"]
        if id(given) not in known:
            known[id(given)] = [frame for frame in given if keep[stacks](frame)]
        return known[id(given)]

    events = [
        {**event, "frames": frames(event) if "frames" in event else [], "user_metadata": ""}
        for event in snapshot["device_traces"][0]
    ]
    segments = [
        {**segment, "blocks": [{**block, "frames": []} for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    left_out = {NOTES_KEY, "segments_before"}
    return {
        **{key: value for key, value in snapshot.items() if key not in left_out},
        "device_traces": [events], "segments": segments,
    }  # fmt: skip
