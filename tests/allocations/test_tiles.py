"""The long histories that benchmarks/snapshot.py makes: a step repeated by the allocator's rules."""

import importlib
import pickle
from collections import Counter
from pathlib import Path

import pytest

from stepscope.allocations.explain import explain
from stepscope.allocations.snapshot import read_snapshot
from tests.handmade_snapshot import handmade

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("notes", [True, False])
def test_a_tiled_history_is_the_allocators_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: bool):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tile_snapshot = importlib.import_module("snapshot_tiles").tile_snapshot
    small = handmade().write(tmp_path / "small.pickle", notes=notes)
    target = tmp_path / "large.pickle"
    tiles = tile_snapshot(small, target, 500)
    found = explain(read_snapshot(target))
    found.self_check()
    assert found.exact_at(found.peak_event) and found.peak_bytes == tiles.peak_bytes
    assert len(found.snapshot.events) == tiles.events >= 500
    assert found.allocations["alloc_event"].count() == tiles.allocations == 7 * tiles.steps
    by_step = Counter(row for row in found.allocations.drop_nulls("alloc_event").select("requested", "site").rows())
    assert set(by_step.values()) <= {tiles.steps, 2 * tiles.steps}


def test_frames_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tile_snapshot = importlib.import_module("snapshot_tiles").tile_snapshot
    target = tmp_path / "large.pickle"
    tiles = tile_snapshot(handmade().write(tmp_path / "small.pickle"), target, 500)
    trace = pickle.loads(target.read_bytes())["device_traces"][0]
    frames = [frame for event in trace for frame in event["frames"]]
    assert len(frames) == tiles.frames and len({id(frame) for frame in frames}) < 10
