"""A small transformer whose backward can be made slower by a known time: does a comparison see it?

stepscope run --module docs/examples/delayed.py:make --against "--arg backward_ms=1" --repeat 5
"""

import time

import torch
from torch import nn


class _Delay(torch.autograd.Function):
    """Returns its input; its backward keeps the processor busy for so many seconds."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        end = time.perf_counter() + ctx.seconds
        while ctx.seconds and time.perf_counter() < end:
            pass
        return gradient, None


class Model(nn.Module):
    def __init__(self, width, layers, backward_ms):
        super().__init__()
        self.embedding = nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 512)
        self.seconds = backward_ms * 1e-3

    def forward(self, tokens, targets):
        x = _Delay.apply(self.blocks(self.embedding(tokens)), self.seconds)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make(backward_ms=0.0, width=64, layers=2, batch_size=4, seq_len=32):
    tokens = torch.randint(512, (batch_size, seq_len + 1))
    return Model(width, layers, backward_ms), (tokens[:, :-1], tokens[:, 1:])
