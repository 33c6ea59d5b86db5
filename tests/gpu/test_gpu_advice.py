"""Advice whose gain only a GPU shows: the diff is applied, and the gain lies within what was foretold."""

import subprocess
from pathlib import Path

import pytest

from tests.command import stepscope
from tests.runs.test_advice import advised, watched

pytestmark = pytest.mark.gpu

TRAIN = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


loader = DataLoader(TensorDataset(torch.randn(1024, 128, 1024)), batch_size=16)
model = nn.Sequential(*[Block(1024) for _ in range(8)]).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
losses = []
for step, (x,) in enumerate(loader):
    x = x.to("cuda")
    y = model(x)
    loss = y.float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    losses.append(loss.item())
    if step == 60:
        break
"""
KINDS = ("products-in-fp32", "products-not-tf32", "optimizer-loops", "host-waits", "batch-not-pinned", "not-compiled")


def test_gains_on_a_gpu_are_those_foretold(tmp_path: Path):
    before_s, _ = watched(tmp_path / "before", TRAIN)
    advice = advised(tmp_path / "before")
    assert {*KINDS} <= {*advice}
    for kind in KINDS:
        diff = stepscope("advise", "last", "--patch", "--kind", kind, cwd=tmp_path / "before").stdout
        after = tmp_path / kind
        after.mkdir()
        (after / "train.py").write_text(TRAIN)
        subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=after, check=True, capture_output=True)
        gain = 1 - watched(after, (after / "train.py").read_text())[0] / before_s
        assert advice[kind]["low"] <= gain <= advice[kind]["high"], (kind, gain, advice[kind])
