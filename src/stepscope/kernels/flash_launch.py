"""Launching the FlashAttention kernels: strides or descriptors, grids, buffers.

q, out and the gradients are (B, H, S, D), k and v (B, H', T, D) with H a multiple of H'. The head dimension must be
dense (stride 1); every other stride is honoured.
"""

import math

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.kernels.flash_backward import (
    finish_queries_kernel,
    joint_kernel,
    key_gradients_kernel,
    preprocess_kernel,
    query_gradients_kernel,
)
from stepscope.kernels.flash_configuration import BackwardConfiguration, ForwardConfiguration, Precision, Tiles
from stepscope.kernels.flash_forward import forward_kernel

LOG2E = 1.4426950408889634
_PADDING = 256
"""Row statistics are padded to a multiple of this, the largest tile of queries."""
_PREPROCESS_ROWS = 64


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def describable(*tensors: Tensor) -> bool:
    """Whether the tensor-memory accelerator can address these: 16-byte steps, nothing broadcast."""
    for tensor in tensors:
        if tensor.data_ptr() % 16 or tensor.numel() == 0:
            return False
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size > 1 and (stride == 0 or stride * tensor.element_size() % 16):
                return False
    return True


def _described(tensor: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    # The stride of a dimension of one element may be anything, and descriptors check it.
    step = 16 // tensor.element_size()
    strides = [stride if size > 1 else step for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, block_d])


def _options(tiles: Tiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    return options


def _precision(precision: Precision, operand: Tensor) -> str:
    return "upcast" if operand.dtype == torch.bfloat16 and interpreted() else precision


def block_d_of(head_dim: int) -> int:
    """The tile's columns: the power of two from 16 up that holds head_dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    precision: Precision,
    configuration: ForwardConfiguration,
) -> None:
    """Fill `out` and `logsumexp` ((B, H, S) fp32, contiguous)."""
    batches, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    tiles = configuration.tiles
    block_d = block_d_of(head_dim)
    tma = configuration.tma and describable(q, k, v)
    programs = triton.cdiv(queries, tiles.block_m) * batches * heads
    if configuration.persistent and not interpreted():
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    forward_kernel[(programs,)](
        _described(q, tiles.block_m, block_d) if tma else q,
        _described(k, tiles.block_n, block_d) if tma else k,
        _described(v, tiles.block_n, block_d) if tma else v,
        out,
        logsumexp,
        # Not zero, which would make NaN of a hidden score, -inf; this small it changes nothing.
        max(abs(scale) * LOG2E, 2.0**-100),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        batches,
        heads,
        queries,
        keys,
        window or 0,
        heads // kv_heads,
        head_dim,
        block_d,
        tiles.block_m,
        tiles.block_n,
        causal,
        window is not None,
        queries % tiles.block_m == 0,
        keys % tiles.block_n == 0,
        scale < 0,
        _precision(precision, q),
        tma,
        configuration.warp_specialize,
        configuration.rows_first,
        configuration.persistent,
        **_options(tiles),
    )


def launch_backward(
    gradient: Tensor,
    logsumexp_gradient: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None,
    precision: Precision,
    configuration: BackwardConfiguration,
) -> None:
    """Fill dq, dk and dv. The gradient of the logsumexp, where there is one, is (B, H, S) fp32, contiguous."""
    batches, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    block_d = block_d_of(head_dim)
    group = heads // kv_heads
    padded = triton.cdiv(queries, _PADDING) * _PADDING
    statistics = torch.empty((2 * batches * heads, padded), dtype=torch.float32, device=q.device)
    preprocess_kernel[(triton.cdiv(padded, _PREPROCESS_ROWS), batches * heads)](
        out,
        gradient,
        logsumexp,
        logsumexp if logsumexp_gradient is None else logsumexp_gradient,
        statistics,
        *out.stride()[:3],
        *gradient.stride()[:3],
        batches,
        heads,
        queries,
        padded,
        head_dim,
        block_d,
        _PREPROCESS_ROWS,
        logsumexp_gradient is not None,
        num_warps=4,
    )
    tma = configuration.tma and describable(q, k, v, gradient)
    inputs = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *gradient.stride()[:3])
    sizes = (batches, kv_heads, queries, keys, window or 0, padded)
    scales = (scale, scale * LOG2E)

    def operands(tiles: Tiles) -> tuple[Tensor | TensorDescriptor, ...]:
        if not tma:
            return q, k, v, gradient
        return (
            _described(q, tiles.block_m, block_d),
            _described(k, tiles.block_n, block_d),
            _described(v, tiles.block_n, block_d),
            _described(gradient, tiles.block_m, block_d),
        )

    def fixed(tiles: Tiles) -> tuple[object, ...]:
        even = (queries % tiles.block_m == 0, keys % tiles.block_n == 0)
        return group, head_dim, block_d, tiles.block_m, tiles.block_n, causal, window is not None, *even, _precision(precision, q), tma

    over_keys = configuration.keys
    described_statistics = (
        TensorDescriptor(statistics, list(statistics.shape), [padded, 1], [1, over_keys.block_m]) if tma else statistics
    )
    key_programs = triton.cdiv(keys, over_keys.block_n) * batches * kv_heads
    if configuration.way == "joint":
        over_queries = _required(configuration)
        even2 = (queries % over_queries.block_m == 0, keys % over_queries.block_n == 0)
        first = fixed(over_keys)
        joint_kernel[(key_programs + triton.cdiv(queries, over_queries.block_m) * batches * heads,)](
            *operands(over_keys), *operands(over_queries), dq, dk, dv, described_statistics, statistics, *scales,
            *inputs, *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], *sizes,
            *first[:5], over_queries.block_m, over_queries.block_n, *first[5:9], *even2, first[9], tma,
            **_options(over_keys),
        )  # fmt: skip
        return
    fused = configuration.way == "fused"
    target, accumulated = dq, dq
    tma_reduce = fused and tma and configuration.tma_reduce and head_dim % 4 == 0 and not interpreted()
    if fused:
        accumulated = torch.zeros((batches, heads, queries, head_dim), dtype=torch.float32, device=q.device)
        target = _described(accumulated, over_keys.block_m, block_d) if tma_reduce else accumulated
    key_gradients_kernel[(key_programs,)](
        *operands(over_keys), target, dk, dv, described_statistics, *scales,
        *inputs, *accumulated.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], *sizes,
        *fixed(over_keys), fused, tma_reduce,
        **_options(over_keys),
    )  # fmt: skip
    if fused:
        finish_queries_kernel[(triton.cdiv(queries, _PREPROCESS_ROWS), batches * heads)](
            accumulated, dq, scale, *dq.stride()[:3], heads, queries, head_dim, block_d, _PREPROCESS_ROWS, num_warps=4
        )  # fmt: skip
        return
    over_queries = _required(configuration)
    query_gradients_kernel[(triton.cdiv(queries, over_queries.block_m) * batches * heads,)](
        *operands(over_queries), dq, statistics, *scales, *inputs, *dq.stride()[:3], *sizes, *fixed(over_queries),
        **_options(over_queries),
    )  # fmt: skip


def _required(configuration: BackwardConfiguration) -> Tiles:
    if configuration.queries is None:
        raise ValueError(f"{configuration.way} needs tiles for the kernel over queries: {configuration}")
    return configuration.queries


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1 / math.sqrt(head_dim)
