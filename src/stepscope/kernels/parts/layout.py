"""Numbers that every fused part needs for a launch: its precision inside, its warps, its device."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from stepscope.kernels.launching import launch


def wide(dtype: torch.dtype) -> Any:
    """The dtype in which a kernel computes, as Triton names it: fp32, and fp64 for fp64."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def launch_at(x: Tensor, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel where x lies: Triton takes the current device, which need not be that one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            launch(kernel, grid, *arguments, **options)
    else:
        launch(kernel, grid, *arguments, **options)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def warps_for(block: int) -> int:
    """Warps for a row of this many numbers: each thread has some 8 of them."""
    return max(1, min(32, block // 256))
