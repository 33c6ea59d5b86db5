"""A training step made by hand on an allocator that writes histories: every byte, category and moment is known."""

import pickle
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.recording_allocator import MIB, RecordingAllocator

from stepscope.core.evidence import MemoryCategory, MemoryNotes, PhaseMemory, PhaseSpan, TensorNote
from stepscope.core.workloads import TextbookWorkload
from tests.conftest import mini

START_US = 1_700_000_000_000_000
USER = {"name": "forward", "filename": "/home/me/model.py", "line": 12}
MODULE = {"name": "_call_impl", "filename": "/env/lib/python3.12/site-packages/torch/nn/modules/module.py", "line": 9}
SCRIPT = {"name": "<module>", "filename": "/home/me/train.py", "line": 40}
OPTIMIZER = {"name": "adamw", "filename": "/env/lib/python3.12/site-packages/torch/optim/adamw.py", "line": 700}
ZERO_GRAD = {"name": "zero_grad", "filename": "/env/lib/python3.12/site-packages/torch/optim/optimizer.py", "line": 1}
AUTOCAST = {"name": "__exit__", "filename": "/env/lib/python3.12/site-packages/torch/amp/autocast_mode.py", "line": 3}
NODE = {"name": "MulBackward0", "filename": "", "line": 0}
ENGINE = {"name": "torch::autograd::Engine::evaluate_function(...)", "filename": "??", "line": 0}


class HandmadeStep:
    """Two blocks of one linear layer each, MiB sized tensors. Times are microseconds after the start."""

    def __init__(self, *, layers: int = 2, workload: TextbookWorkload | None = None) -> None:
        self.allocator = RecordingAllocator(recording=False, time_us=START_US)
        self.notes: list[TensorNote] = []
        self.spans: list[PhaseSpan] = []
        self.workload = workload
        self.names = [f"blocks.{i}" for i in range(layers)]
        self.weights: dict[str, int] = {}
        self.states: list[int] = []
        for name in self.names:
            self.weights[name] = self._tensor(2 * MIB, "parameters", f"{name}.weight", (MIB // 2,))
            self.states += [
                self._tensor(2 * MIB, "optimizer state", f"{name}.weight.{key}", (MIB // 2,))
                for key in ("exp_avg", "exp_avg_sq")
            ]
        self.tokens = self._tensor(4096, "inputs", "batch 0 tokens", (512,), "int64")
        self.layout = self.allocator.start()

    def at(self, time_us: int, ranges: str = "", *frames: dict[str, Any]) -> None:
        """What follows happens then, in these ranges, on this stack."""
        self.allocator.time_us = START_US + time_us
        self.allocator.about = {"user_metadata": ranges, "frames": list(frames)}

    def _tensor(
        self, size: int, category: MemoryCategory, name: str, shape: tuple[int, ...], dtype: str = "float32"
    ) -> int:
        address = self.allocator.malloc(size)
        self.note(address, bytes=size, category=category, name=name, shape=shape, dtype=dtype)
        return address

    def note(self, address: int, **about: Any) -> None:
        """Note what is at an address now."""
        self.notes.append(
            TensorNote(address=address, at_us=self.allocator.time_us, **{"dtype": "float32", "name": "", **about})
        )

    def run(self) -> "HandmadeStep":
        """forward 0-100 us, backward 200-300, optimizer 400-500."""
        allocator = self.allocator
        saved: list[int] = []
        tick = 20 // len(self.names)
        for i, name in enumerate(self.names):
            self.at(10 + 4 * tick * i, f"forward|{name}", USER, MODULE, SCRIPT)
            scratch = allocator.malloc(3 * MIB)
            self.at(10 + tick + 4 * tick * i, f"forward|{name}|softmax", USER, MODULE, SCRIPT)
            saved.append(allocator.malloc(5 * MIB - 100))
            self.note(
                saved[-1], bytes=5 * MIB - 100, category="saved for backward", name="result", shape=(5, 7),
                operator="Exp", module=name,
            )  # fmt: skip
            self.at(10 + 2 * tick + 4 * tick * i, f"forward|{name}", USER, SCRIPT)
            allocator.free(scratch)
        gradients = []
        for i, name in enumerate(reversed(self.names)):
            self.at(210 + 2 * tick * i, f"backward|{name}", NODE)
            gradients.append(allocator.malloc(2 * MIB))
            allocator.free(saved.pop())
            self.note(gradients[-1], bytes=2 * MIB, category="gradients", name=f"{name}.weight", shape=(MIB // 2,))
        self.at(410, "optimizer", OPTIMIZER, SCRIPT)
        scratch = allocator.malloc(700)
        self.at(420, "optimizer", OPTIMIZER, SCRIPT)
        allocator.free(scratch)
        self.at(430, "optimizer", ZERO_GRAD, SCRIPT)
        for address in gradients:
            allocator.free(address)
        ends = ((0, 100), (200, 300), (400, 500))
        self.spans = [
            PhaseSpan(name=name, start_us=START_US + start, end_us=START_US + end)
            for name, (start, end) in zip(("forward", "backward", "optimizer"), ends, strict=True)
        ]
        return self

    def content(self, *, notes: bool = True, before: bool = True, annotations: bool = True) -> dict[str, Any]:
        """The snapshot, with or without what stepscope adds and what the profiler does."""
        whole = self.allocator.snapshot()
        if before:
            whole["segments_before"] = self.layout
        if annotations:
            whole["external_annotations"] = [
                {"stage": stage, "name": span.name, "device": 0, "time_us": time_us}
                for span in self.spans
                for stage, time_us in (("START", span.start_us), ("END", span.end_us))
            ]
        if notes:
            told = MemoryNotes(
                workload=self.workload, device_name="a GPU", phases=tuple(self.spans), tensors=tuple(self.notes),
                measured=PhaseMemory(parameter_bytes=4 * MIB, forward_peak=self.allocator.peak),
            )  # fmt: skip
            whole["stepscope"] = msgspec.to_builtins(told)
        else:
            for event in whole["device_traces"][0]:
                event["user_metadata"] = ""
        return whole

    def write(self, path: Path, **choices: bool) -> Path:
        path.write_bytes(pickle.dumps(self.content(**choices)))
        return path


def handmade(**changes: Any) -> HandmadeStep:
    """The step of the tests, run."""
    return HandmadeStep(**{"workload": mini(), **changes}).run()
