"""Launches of the kernels for Hopper: the calls that they take, descriptors, grids."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from stepscope.kernels import launching
from stepscope.kernels.flash.configuration import HOPPER_BLOCK_N, HopperBackward, HopperForward, hopper_columns
from stepscope.kernels.hopper.backward import STAGES, hopper_gradients, hopper_gradients_of_heads
from stepscope.kernels.hopper.forward import hopper_forward, hopper_forward_of_heads

BLOCK_M = 64
"""Queries per tile of the backward kernel."""
BLOCK_N = HOPPER_BLOCK_N
"""Keys per tile of the backward kernel, which two consumers share."""
_BACKWARD_REGISTERS = 168
"""Registers per thread at launch: 65536 over three warp groups. Consumers then get most of the producer's registers."""
_PRODUCER_REGISTERS = 24
_MOST_TILES = 4
"""Tiles of queries of a head whose sums of dQ are in shared memory: 64 KiB at head_dim 64."""
_LEAST_BUSY = 0.9
"""The least share of the multiprocessors' time that whole heads must take."""
_NUMBERS_TOGETHER = 1 << 21
"""Numbers of an operand of the heads that take turns: 4 MiB for each of 16 bits, and 8 MiB for the sums of dQ."""
_WORKER_REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
"""Registers per thread of each forward consumer except the first, by number of consumers. The first gets the rest of
65536: 240, or 168 if there are three consumers, or 120 if there are four."""


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels take these operands, which must be describable (`launching.describable`)."""
    q = tensors[0]
    return (
        q.device.type == "cuda"
        and q.element_size() == 2
        and hopper_columns(q.shape[-1]) is not None
        and _is_hopper(q.device)
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _described(tensor: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, _columns(tensor)]
    layout = _swizzled(block, gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(tensor, list(tensor.shape), launching.described_strides(tensor), block, layout)


def _columns(tensor: Tensor) -> int:
    columns = hopper_columns(tensor.shape[-1])
    assert columns is not None  # only calls that the kernels take come here
    return columns


def _swizzled(block: list[int], dtype: gl.dtype) -> gl.NVMMASharedLayout:
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    assert isinstance(layout, gl.NVMMASharedLayout)  # it is a constexpr only inside a kernel
    return layout


def _cap(scale: float, softcap: float | None) -> float:
    return 0.0 if softcap is None else 2 * launching.LOG2E.value * scale / softcap


def _together(rows: int, tensor: Tensor, batch_heads: int, causal: bool) -> int:
    """How many heads take turns with their tiles.

    Under a causal mask tiles differ in work. If the heavy ones of many heads come first, the light ones fill the gaps
    at the end. Without a mask the tiles of one head follow one another. docs/results/flash-ideas.md has the times.
    """
    return launching.heads_together(rows, _columns(tensor), batch_heads, numbers=_NUMBERS_TOGETHER) if causal else 1


def launch_hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    *, causal: bool, scale: float, configuration: HopperForward, launcher: launching.Launcher,
    window: int | None = None, bounds: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> object:  # fmt: skip
    """Fill `out` (B, H, S, D) and `logsumexp` ((B, H, S) fp32, contiguous). No negative scale."""
    if configuration.heads:
        return _launch_forward_of_heads(
            q, k, v, out, logsumexp, scale=scale, configuration=configuration, launcher=launcher
        )
    batches, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    chosen = configuration
    return launcher(
        hopper_forward, (launching.tiles_of(queries, 64 * chosen.consumers) * batches * heads,),
        _described(q, 64), _described(k, chosen.block_n), _described(v, chosen.block_n), _described(out, 64),
        logsumexp, logsumexp if bounds is None else bounds, logsumexp if sinks is None else sinks,
        max((softcap or scale) * launching.LOG2E.value, launching.SMALLEST_SCALE), _cap(scale, softcap),
        batches, heads, queries, keys, window or 0, _together(keys, k, batches * heads, causal),
        heads // kv_heads, chosen.block_n, chosen.stages, chosen.consumers,
        causal, causal or keys % chosen.block_n == 0,
        window is not None, bounds is not None, softcap is not None, sinks is not None,
        chosen.turns and chosen.consumers > 1, chosen.late,
        _WORKER_REGISTERS[chosen.consumers], _PRODUCER_REGISTERS,
        num_warps=4, **({} if chosen.max_registers is None else {"maxnreg": chosen.max_registers}),
    )  # fmt: skip


def takes_heads(q: Tensor, k: Tensor, configuration: HopperForward | HopperBackward) -> bool:
    """Whether the kernel of whole heads takes a call without a mask that the others take.

    Not if too many multiprocessors had no head in the last round, nor if a consumer of forward had no queries.
    """
    heads, multiprocessors = q.shape[0] * q.shape[1], _multiprocessors(q.device)
    if heads < _LEAST_BUSY * launching.tiles_of(heads, multiprocessors) * multiprocessors or q.shape[3] != 64:
        return False
    if isinstance(configuration, HopperForward):
        busy = launching.tiles_of(q.shape[2], 64) >= configuration.consumers
        return busy and k.shape[2] <= configuration.stages * configuration.block_n
    return q.shape[2] <= BLOCK_M * _MOST_TILES and q.shape[1] == k.shape[1]


def _launch_forward_of_heads(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    *, scale: float, configuration: HopperForward, launcher: launching.Launcher,
) -> object:  # fmt: skip
    batches, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    chosen = configuration
    return launcher(
        hopper_forward_of_heads, (min(batches * heads, _multiprocessors(q.device)),),
        _described(q, 64), _described(k, chosen.block_n), _described(v, chosen.block_n), _described(out, 64),
        logsumexp, max(scale * launching.LOG2E.value, launching.SMALLEST_SCALE), batches, heads, queries, keys,
        heads // kv_heads, chosen.stages, chosen.consumers, keys % chosen.block_n == 0,
        _WORKER_REGISTERS[chosen.consumers], _PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def sharing_of(q: Tensor, k: Tensor, *, masked: bool, configuration: HopperBackward) -> launching.Sharing:
    """How the programs of a backward pass share tiles of keys: only without a mask, with which tiles differ."""
    tiles = launching.tiles_of(k.shape[2], BLOCK_N) * k.shape[0] * k.shape[1]
    if masked or not configuration.share:
        return launching.Sharing(tiles, 0, 1)
    return launching.shared_tiles(
        tiles, launching.tiles_of(q.shape[2], BLOCK_M) * (q.shape[1] // k.shape[1]), _multiprocessors(q.device)
    )


def sums_for(q: Tensor, k: Tensor, statistics: Tensor, *, masked: bool, configuration: HopperBackward) -> Tensor:
    """A buffer for the sums of dQ, (B H padded, D) fp32 with as many rows as the statistics have.

    After them it has what programs leave of shared tiles of keys: (2, BLOCK_N, D) of each.
    """
    rows, padded = statistics.shape
    sharing = sharing_of(q, k, masked=masked, configuration=configuration)
    more = sharing.shared * sharing.parts * 2 * BLOCK_N
    return torch.empty((rows // 2 * padded + more, q.shape[3]), dtype=torch.float32, device=q.device)


def launch_hopper_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, statistics: Tensor, sums: Tensor,
    *, causal: bool, scale: float, configuration: HopperBackward, launcher: launching.Launcher,
    window: int | None = None, bounds: Tensor | None = None, softcap: float | None = None,
) -> object:  # fmt: skip
    """Fill dk and dv, and add dQ / scale to the sums. The statistics are padded to a multiple of BLOCK_N."""
    masked = causal or window is not None or bounds is not None
    sharing = sharing_of(q, k, masked=masked, configuration=configuration)
    batches, heads, queries, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows, padded = batches * heads, statistics.shape[1]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    half = [BLOCK_M, _columns(q) // 2]
    return launcher(
        hopper_gradients, (sharing.programs,),
        _described(q, BLOCK_M), _described(k, BLOCK_N), _described(v, BLOCK_N), _described(gradient, BLOCK_M),
        TensorDescriptor(statistics, list(statistics.shape), [padded, 1], [1, BLOCK_M], flat),
        TensorDescriptor(sums, list(sums.shape), [head_dim, 1], half, _swizzled(half, gl.float32)),
        dk, dv, sums, sums if bounds is None else bounds, *dk.stride()[:3], *dv.stride()[:3],
        batches, kv_heads, queries, keys, window or 0, rows, padded, _together(queries, q, batches * kv_heads, causal),
        sharing.whole, sharing.parts,
        scale, (softcap or scale) * launching.LOG2E.value, _cap(scale, softcap), heads // kv_heads,
        causal, keys % BLOCK_N == 0, configuration.v_in_registers, STAGES, head_dim,
        configuration.spread and not masked, sharing.shared > 0, configuration.ahead,
        window is not None, bounds is not None, softcap is not None,
        num_warps=4, maxnreg=_BACKWARD_REGISTERS,
    )  # fmt: skip


def launch_gradients_of_heads(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, statistics: Tensor,
    *, scale: float, launcher: launching.Launcher,
) -> object:  # fmt: skip
    """Fill dq, dk and dv, without a mask, of a call that `takes_heads`."""
    batches, heads, queries, _ = q.shape
    keys, padded = k.shape[2], statistics.shape[1]
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return launcher(
        hopper_gradients_of_heads, (min(batches * heads, _multiprocessors(q.device)),),
        _described(q, BLOCK_M), _described(k, BLOCK_N), _described(v, BLOCK_N), _described(gradient, BLOCK_M),
        TensorDescriptor(statistics, list(statistics.shape), [padded, 1], [1, BLOCK_M], flat), dq, dk, dv,
        *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3], batches, heads, queries, keys,
        scale, scale * launching.LOG2E.value, _MOST_TILES, keys % BLOCK_N == 0, STAGES,
        num_warps=4, maxnreg=_BACKWARD_REGISTERS,
    )  # fmt: skip
