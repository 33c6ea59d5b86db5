"""What every launch of a kernel needs: who launches it, how many tiles, and what a descriptor can address."""

from typing import Any, Protocol

import triton.language as tl
from torch import Tensor
from triton import knobs

LOG2E = tl.constexpr(1.4426950408889634)

SMALLEST_SCALE = 2.0**-100
"""Not zero, which would make NaN of a hidden score, -inf; this small it changes nothing."""


class Launcher(Protocol):
    """What runs a kernel and returns what Triton compiled, None in its interpreter."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> Any: ...


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: int) -> object:
    """Run a kernel the plain way."""
    return kernel[grid](*arguments, **options)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def tiles_of(length: int, block: int) -> int:
    """How many tiles of so many rows cover a length."""
    return -(-length // block)


def describable(*tensors: Tensor) -> bool:
    """Whether the tensor-memory accelerator can address these: 16-byte steps, nothing broadcast."""
    for tensor in tensors:
        if tensor.data_ptr() % 16 or tensor.numel() == 0:
            return False
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size > 1 and (stride == 0 or stride * tensor.element_size() % 16):
                return False
    return True


def described_strides(tensor: Tensor) -> list[int]:
    """Strides that a descriptor accepts: it checks them all, so a dimension of size 1 gets one of 16 bytes."""
    step = 16 // tensor.element_size()
    strides = [stride if size > 1 else step for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)]
    return [*strides, 1]
