"""PyTorch's own allocator on a GPU: the replay of its history gives its counters, to the byte, under every setting."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.allocations.at_moment import moment_at
from stepscope.allocations.explain import explain
from stepscope.allocations.plain_pickle import read_plain_pickle
from stepscope.allocations.snapshot import snapshot_from

PROGRAM = """
import pickle, random, sys, torch
chance = random.Random(int(sys.argv[1]))
MIB = 1 << 20
def size():
    return chance.choice([
        chance.randrange(1, 5000), chance.randrange(MIB - 1024, MIB + 1024), chance.randrange(1, 40) * MIB // 2,
        chance.randrange(MIB, 90 * MIB),
    ])
side = torch.cuda.Stream()
live = []
def step(count):
    for _ in range(count):
        what = chance.random()
        if what < 0.52 or not live:
            with torch.cuda.stream(side) if chance.random() < 0.2 else torch.cuda.stream(torch.cuda.default_stream()):
                live.append(torch.empty(size(), dtype=torch.uint8, device="cuda"))
            if chance.random() < 0.2:
                live[-1].record_stream(side)
        elif what < 0.99:
            live.pop(chance.randrange(len(live)))
        else:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
step(400)
torch.cuda.synchronize()
before = torch.cuda.memory._snapshot()["segments"]
torch.cuda.reset_peak_memory_stats()
torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=10**6)
step(1500)
whole = torch.cuda.memory._snapshot()
whole["segments_before"] = before
whole["counted"] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
with open(sys.argv[2], "wb") as file:
    pickle.dump(whole, file)
"""
SETTINGS = ("", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:64")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_replay_is_the_allocator(tmp_path: Path, setting: str, seed: int):
    target = tmp_path / "s.pickle"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(seed), str(target)],
        capture_output=True, text=True, check=False, timeout=250,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    content: Any = read_plain_pickle(target)
    allocated, reserved = content["counted"]
    found = explain(snapshot_from(content, "s"))
    found.self_check()
    assert found.replay.faults == [] and found.replay.start_known
    assert found.peak_bytes == allocated
    assert max(count for _, count in found.replay.reserved) == reserved
    held = moment_at(found, "end").reserved
    assert held is not None and held.reserved_bytes == sum(s.total_size for s in found.snapshot.segments)
    del content["segments_before"]
    worked_out = explain(snapshot_from(content, "s"))
    unsure = sum(allocation.open_ended for allocation in worked_out.replay.allocations)
    assert worked_out.replay.faults == []
    assert 0 <= allocated - worked_out.peak_bytes <= unsure * 2**20
