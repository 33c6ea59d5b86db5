"""Kernels as one writes them: a softmax in Triton, a flash attention with a fault, and a function for the compiler.

stepscope bench kernels.py:softmax --against torch.softmax --arg dim=-1 --shape Nx1024 --size N=1024,8192
stepscope bench kernels.py:flash --against torch.nn.functional.scaled_dot_product_attention --shape 2x8x512x64*3
stepscope bench kernels.py:gelu --against torch.nn.functional.gelu --arg approximate=tanh --shape 4096x4096
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax_rows(out, x, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(x + row * width + columns, mask=inside, other=-float("inf")).to(tl.float32)
    exponentials = tl.exp(numbers - tl.max(numbers, axis=0))
    tl.store(out + row * width + columns, exponentials / tl.sum(exponentials, axis=0), mask=inside)


@triton.jit
def _softmax_gradients(out, y, gradient, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(y + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, numbers * (upstream - tl.sum(numbers * upstream, axis=0)), mask=inside)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        _softmax_rows[(x.numel() // width,)](out, x, width, BLOCK=triton.next_power_of_2(width))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        out = torch.empty_like(y)
        width = y.shape[-1]
        _softmax_gradients[(y.numel() // width,)](out, y, gradient, width, BLOCK=triton.next_power_of_2(width))
        return out


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, a row to a program."""
    return _Softmax.apply(x)


@triton.jit
def _flash_rows(  # noqa: PLR0917  (Triton's functions take tensors and constants one by one)
    out, q, k, v, length, scale, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    first, head = tl.program_id(0) * ROWS, tl.program_id(1) * length * HEAD_DIM
    rows, width = first + tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    queries = tl.load(q + head + rows[:, None] * HEAD_DIM + width[None, :], mask=rows[:, None] < length, other=0.0)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total, summed = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for begin in range(0, length, KEYS):
        columns = begin + tl.arange(0, KEYS)
        inside = columns[:, None] < length
        keys = tl.load(k + head + columns[:, None] * HEAD_DIM + width[None, :], mask=inside, other=0.0)
        values = tl.load(v + head + columns[:, None] * HEAD_DIM + width[None, :], mask=inside, other=0.0)
        # The fault: keys behind the last one have the score 0, and not minus infinity.
        scores = tl.dot(queries, tl.trans(keys)).to(tl.float32) * scale
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(largest - higher)
        total = total * shrunk + tl.sum(weights, axis=1)
        summed = summed * shrunk[:, None] + tl.dot(weights.to(values.dtype), values).to(tl.float32)
        largest = higher
    tl.store(
        out + head + rows[:, None] * HEAD_DIM + width[None, :], summed / total[:, None], mask=rows[:, None] < length
    )


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, length, head_dim = q.shape
        out = torch.empty_like(q)
        grid = (triton.cdiv(length, 64), batch * heads)
        _flash_rows[grid](out, q, k, v, length, head_dim**-0.5, HEAD_DIM=head_dim, ROWS=64, KEYS=64)
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(out, (q, k, v), gradients[0])


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of every query to every key; wrong where 64 does not divide the number of keys."""
    return _Flash.apply(q, k, v)


@torch.compile
def gelu(x: Tensor) -> Tensor:
    """GELU by tanh, for the compiler to fuse."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
