"""Recorded steps with the truth beside them: CPU histories with notes, replayed on the allocator of a GPU in small."""

import bisect
import copy
import gc
import gzip
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.recording_allocator import RecordingAllocator

from stepscope.core.memory_notes import NOTES_KEY
from stepscope.core.run_files import MEMORY_FILE
from stepscope.measure.memory_history import MemoryRecorder
from stepscope.measure.step import drive
from stepscope.models.own.own_step import DrivenStep
from tests.conftest import mini

CPU = torch.device("cpu")
_NODE = "autograd::engine::evaluate_function"


def record(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor], *, warm: int = 2, steps: int = 2, set_to_none: bool = True,
    micro_batches: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The snapshot of steps on a CPU, as a GPU's allocator would have written it, with notes."""
    held: dict[str, Any] = {}

    def forward() -> None:
        held["loss"] = step.loss = loss_of(model, batch)

    def backward() -> None:
        held.pop("loss").backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    phases = [("forward", forward), ("backward", backward)] * micro_batches + [("optimizer", update)]
    given = SimpleNamespace(phases=phases, model=model, optimizer=optimizer, batches=[batch])
    step = DrivenStep(given, "the step", CPU)
    for _ in range(warm):
        drive(step)
    gc.collect()
    recorder = MemoryRecorder(step, CPU, several=True)
    with recorder.running():
        for _ in range(steps):
            drive(step, recorder)
        recorder.steps_over()
    recorder.save(folder, workload=mini())
    with gzip.open(folder / MEMORY_FILE) as file:
        return as_on_a_gpu(pickle.load(file))


def as_on_a_gpu(snapshot: dict[str, Any]) -> dict[str, Any]:
    """The history replayed on a caching allocator. What lived before it is what was noted before the first event.

    Backward runs on a thread of its own there, without Python.
    """
    (events,) = snapshot["device_traces"]
    notes = snapshot[NOTES_KEY]
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    allocator = RecordingAllocator(recording=False, time_us=events[0]["time_us"] - 1)
    first = events[0]["time_us"]
    for note in notes["tensors"]:
        if note["at_us"] < first and not places[note["address"]]:
            places[note["address"]].append((0, allocator.malloc(note["bytes"])))
    live = {address: found[-1][1] for address, found in places.items() if found}
    before = allocator.start()
    for event in events:
        frames = event["frames"]
        node = next((i for i, frame in enumerate(frames) if frame["name"].startswith(_NODE)), None)
        frames = frames if node is None else frames[: node + 1]
        allocator.time_us = event["time_us"]
        allocator.about = {"frames": frames, "user_metadata": event["user_metadata"]}
        if event["action"] == "alloc":
            live[event["addr"]] = allocator.malloc(event["size"])
            places[event["addr"]].append((event["time_us"], live[event["addr"]]))
        elif event["action"] == "free_requested":
            allocator.free(live.pop(event["addr"]))
    told = copy.deepcopy(notes)
    kept = []
    for note in told["tensors"]:
        at = bisect.bisect_right(places[note["address"]], (note["at_us"], 1 << 62)) - 1
        if at >= 0:
            kept.append({**note, "address": places[note["address"]][at][1]})
    told["tensors"], told["kept"] = kept, ()
    return allocator.snapshot(segments_before=before, **{NOTES_KEY: told})


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
