"""Snapshots that stepscope took of training steps on an H200 (tests/data/README.md), explained."""

from pathlib import Path

import polars as pl
import pytest

from stepscope.allocations.answer import memory_document, saved_by_block
from stepscope.allocations.at_moment import moment_at
from stepscope.allocations.explain import Explained, explain
from stepscope.allocations.prediction.estimate import estimate, kept_by_block
from stepscope.allocations.snapshot import read_snapshot
from stepscope.core.evidence import TensorNote
from stepscope.core.units import MIB
from stepscope.core.workloads import TextbookWorkload

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=["snapshot_train", "snapshot_train_bf16"])
def explained(request: pytest.FixtureRequest) -> Explained:
    return explain(read_snapshot(DATA / f"{request.param}.pickle.gz", device=None))


def test_the_peak_is_the_allocators_own_to_the_byte(explained: Explained):
    notes = explained.snapshot.notes
    assert notes is not None and notes.measured is not None
    explained.self_check()
    assert explained.peak_bytes == notes.measured.allocated_peak
    fields = memory_document(explained, moment_at(explained, None))
    assert fields["peak_bytes"] == notes.measured.allocated_peak
    categories = fields["categories"]
    assert isinstance(categories, dict) and sum(categories.values()) == explained.peak_bytes


def test_each_phase_peaks_where_the_counters_say(explained: Explained):
    notes = explained.snapshot.notes
    assert notes is not None and notes.measured is not None
    for phase, measured in (
        ("forward", notes.measured.forward_peak),
        ("backward", notes.measured.backward_peak),
        ("optimizer", notes.measured.optimizer_peak),
    ):
        moment = moment_at(explained, phase)
        assert moment.allocated_bytes == measured, phase


def test_categories_are_what_the_notes_name(explained: Explained):
    """Parameters, state and gradients by size, from the notes themselves; no gradient is alive in forward."""
    notes = explained.snapshot.notes
    assert notes is not None
    forward = memory_document(explained, moment_at(explained, "forward"))["categories"]
    assert isinstance(forward, dict)
    assert forward["parameters"] == _bytes(notes.tensors, "parameters")
    assert forward["optimizer state"] == _bytes(notes.tensors, "optimizer state", on_device=explained)
    assert forward.get("gradients", 0) == 0


def test_a_block_keeps_what_the_symbolic_model_says(explained: Explained):
    """What the GPU kept for backward of each block, beside the prediction tensor by tensor."""
    notes = explained.snapshot.notes
    assert notes is not None and isinstance(notes.workload, TextbookWorkload)
    kept = [tensor for tensor in kept_by_block(notes.workload) if not tensor.cast_copy]
    expected = sum(tensor.total_bytes for tensor in kept)
    blocks = [block for block in saved_by_block(explained) if block.block.startswith("blocks.")]
    assert len(blocks) == notes.workload.model.layers
    # The input of the first block is the embedding's output; every later block's is the sum that the one before made.
    stream = notes.workload.tokens * notes.workload.model.d_model * 4
    for block in blocks:
        assert abs(block.saved_bytes - expected) <= stream, block


def test_the_prediction_is_the_measurement(explained: Explained):
    notes = explained.snapshot.notes
    assert notes is not None and isinstance(notes.workload, TextbookWorkload)
    assert estimate(notes.workload).peak_bytes == pytest.approx(explained.peak_bytes, rel=0.01)


def _bytes(notes: tuple[TensorNote, ...], category: str, on_device: Explained | None = None) -> int:
    """Of the storages noted, each once; with a snapshot, of those that are on its device."""
    sizes = {note.address: note.bytes for note in notes if note.category == category}
    if on_device is not None:
        known = set(on_device.allocations.filter(pl.col("category") == category)["address"])
        sizes = {address: size for address, size in sizes.items() if address in known}
    return sum(sizes.values())


def test_what_a_step_kept_until_memory_ran_out_is_no_workspace():
    """A forward that never ended: what it made and did not free, it had saved."""
    (recorded,) = (Path(__file__).parents[2] / "results/h200/memory-recorded").glob("*small-b16*")
    found = explain(read_snapshot(recorded, device=None))
    categories = moment_at(found, None).categories
    assert sum(categories.values()) == found.peak_bytes
    assert categories["workspaces"] == 64 * MIB and categories["saved for backward"] > 0.85 * found.peak_bytes
