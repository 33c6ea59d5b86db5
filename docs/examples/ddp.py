"""A transformer trained by DistributedDataParallel, whose last rank can be made late by a known time.

torchrun --nproc-per-node 2 docs/examples/ddp.py --late 5
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Spin(nn.Module):
    """Keeps the device busy for so many milliseconds, and returns its input."""

    def __init__(self, milliseconds):
        super().__init__()
        self.seconds = milliseconds * 1e-3
        self.cycles = round(milliseconds * cycles_a_millisecond()) if torch.cuda.is_available() else 0

    def forward(self, x):
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        elif self.seconds:
            time.sleep(self.seconds)
        return x


def cycles_a_millisecond(cycles=100_000_000):
    """The GPU's clock cycles in a millisecond, by its own events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)


class Block(nn.Module):
    def __init__(self, width, heads, late):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.spin = Spin(late)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return self.spin(x + self.mlp(self.norm2(x)))


class Model(nn.Module):
    def __init__(self, width, layers, late, vocabulary=4096):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # The rank that is late is so in its third block.
        self.blocks = nn.ModuleList(Block(width, 8, late if layer == 2 else 0) for layer in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--late", type=float, default=0, help="milliseconds a step that the last rank is late")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    late = given.late if rank == ranks - 1 else 0
    model = DistributedDataParallel(Model(given.width, given.layers, late).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(4096, (given.batch, given.length + 1), device=device)
    for _ in range(given.steps):
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank} of {ranks}: loss {loss.item():.3f}, late by {late:g} ms a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
