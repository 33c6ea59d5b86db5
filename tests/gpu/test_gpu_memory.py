"""The history of allocations that a GPU's allocator keeps. Skipped, with the reason, where there is no GPU."""

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.evidence import SEGMENTS_BEFORE_KEY, PhaseMemory
from stepscope.core.run import Run, Settings
from stepscope.core.units import GIB
from stepscope.engine.request import MemoryRequest, StepRequest
from stepscope.engine.step import measure_step
from stepscope.recording.driven import observe_step
from stepscope.recording.memory_history import capture_memory
from stepscope.training.training_step import TrainingStep
from tests.conftest import run_steps, workload
from tests.recording.test_memory_capture import notes_of, phase_of, read, storages

pytestmark = pytest.mark.gpu

QUICK = Settings(warmup_floor=2, warmup_cap=2, steps_floor=2, steps_cap=2, seconds=0, profile=False)
MODES = [
    {},
    {"dtype": "bf16"},
    {"dtype": "fp16", "attention": "sdpa"},
    {"phase": "forward", "dtype": "bf16"},
    {"checkpointing": "every-1"},
    {"checkpointing": "selective", "dtype": "bf16"},
    {"checkpointing": "attention", "dtype": "bf16", "attention": "sdpa"},
    {"checkpointing": "selective-1", "dtype": "bf16", "attention": "sdpa"},
    {"accumulation": 2},
    {"compile": "default", "dtype": "bf16"},
]


@pytest.fixture(autouse=True)
def _clean_gpu() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def recorded(out: Path, limit: int | None = None, **changes: Any) -> tuple[Run, dict[str, Any]]:
    request = StepRequest(
        workload=workload(**{"model": "tiny", "seq_len": 128, "batch_size": 4, **changes}), settings=QUICK,
        device="cuda", out=str(out), memory_limit_bytes=limit, memory=MemoryRequest(),
    )  # fmt: skip
    run, directory = measure_step(request)
    return run, read(directory)


def allocated(memory: PhaseMemory | None) -> PhaseMemory:
    """The figures of tensors alone: what the allocator reserves depends on what ran before."""
    assert memory is not None
    return msgspec.structs.replace(memory, reserved_before=None, reserved_peak=None, outside_allocator=None)


@pytest.mark.parametrize("changes", MODES, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_recording_changes_no_figure(changes: dict[str, Any], out: Path):
    """Peaks of every phase, and what is saved: as in the step that nobody recorded."""
    run, snapshot = recorded(out, **changes)
    assert run.status == "done" and run.artifacts["memory"]
    memory = run.evidence.memory
    assert memory and (memory.outside_allocator or run.finding("gpu-shared"))
    assert allocated(memory) == allocated(notes_of(snapshot).measured)


@pytest.mark.parametrize("changes", MODES, ids=lambda changes: "-".join(map(str, changes.values())) or "plain")
def test_the_replayed_peak_is_the_allocators_to_the_byte(changes: dict[str, Any], out: Path):
    pytest.importorskip("polars", reason="reading needs polars")
    from stepscope.allocations.explain import explain
    from stepscope.allocations.snapshot import read_snapshot

    run, _ = recorded(out, **changes)
    explained = explain(read_snapshot(out / run.id))
    explained.self_check()
    assert run.evidence.memory and explained.peak_bytes == run.evidence.memory.allocated_peak


def test_events_carry_phase_module_and_node(out: Path):
    _, snapshot = recorded(out)
    notes, events = notes_of(snapshot), next(filter(None, snapshot["device_traces"]))
    assert snapshot[SEGMENTS_BEFORE_KEY] and snapshot["segments"]
    allocations = [event for event in events if event["action"] == "alloc"]
    assert {phase_of(event) for event in allocations} == {"forward", "backward", "optimizer"}
    for phase in notes.phases:
        inside = [event["time_us"] for event in events if phase_of(event) == phase.name]
        assert phase.start_us - 50 <= min(inside) and max(inside) <= phase.end_us + 50
    of_softmax = [e for e in allocations if e["user_metadata"] == "backward|blocks.1.attention|softmax"]
    assert any(e["frames"] and e["frames"][0]["name"] == "ExpBackward0" for e in of_softmax)
    files = {frame["filename"] for event in allocations for frame in event["frames"]}
    assert "stepscope/training/attention/written_out.py" in files and not any(name.startswith("/") for name in files)


def test_notes_name_parameters_saved_tensors_and_cast_copies(out: Path):
    _, snapshot = recorded(out, dtype="bf16")
    notes = notes_of(snapshot)
    names = {note.name for note in notes.tensors if note.category == "gradients"}
    assert names == {note.name for note in notes.tensors if note.category == "parameters" and "rotary" not in note.name}
    assert {n.name for n in notes.tensors if n.category == "cast copies"} <= names
    assert notes.measured and notes.measured.saved_for_backward
    sizes = storages(notes.tensors, "saved for backward", "cast copies").values()
    # What the allocator counts is rounded up to 512 bytes a tensor, and holds the loss; a block above 1 MiB may keep a
    # remainder of up to another.
    rounding = 512 * (len(sizes) + 1) + 2**20 * sum(size > 2**20 for size in sizes)
    assert sum(sizes) < notes.measured.saved_for_backward <= sum(sizes) + rounding


def test_what_filled_the_memory_is_kept(out: Path):
    run, snapshot = recorded(out, limit=4 * GIB, model="small", seq_len=1024, batch_size=16)
    assert run.status == "out-of-memory" and run.artifacts["memory"]
    events = next(filter(None, snapshot["device_traces"]))
    assert any(event["action"] == "oom" for event in events)
    live = 0
    for event in events:
        live += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if event["action"] == "oom":
            break
    assert live > 1 * GIB
    assert [span.name for span in notes_of(snapshot).phases] == ["forward"]


def test_graphs_that_are_replayed_have_no_history(out: Path):
    request = StepRequest(
        workload=workload(model="tiny", seq_len=64, compile="reduce-overhead"), settings=QUICK, device="cuda",
        out=str(out), memory=MemoryRequest(),
    )  # fmt: skip
    run, _ = measure_step(request)
    assert "memory" not in run.artifacts and any("no memory history" in note for note in run.evidence.notes)


def test_recording_twice_leaves_nothing_behind(out: Path):
    device = torch.device("cuda", 0)
    step = TrainingStep(workload(model="tiny", seq_len=64), device)
    run_steps(step, 2)
    before = allocated(observe_step(step, device)[1])
    for _ in range(2):
        out.mkdir(exist_ok=True)
        capture_memory(step, device, out, workload=step.workload)
    assert allocated(observe_step(step, device)[1]) == before
    assert not any(module._forward_hooks for module in step.model.modules())
