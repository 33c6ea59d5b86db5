"""Helpers for every kernel launch: the launcher, the number of tiles, and what a descriptor can address."""

import functools
from typing import Any, Protocol

import triton.language as tl
from torch import Tensor
from triton import knobs

from stepscope.kernels.operators import HERE

LOG2E = tl.constexpr(1.4426950408889634)

SMALLEST_SCALE = 2.0**-100
"""The smallest scale that a kernel gets. Zero times a hidden score, -inf, is NaN; this scale changes no result."""


ALIGNMENT_BYTES = 16
"""An alignment in bytes. Triton compiles a separate variant for addresses that are a multiple of this."""


class Launcher(Protocol):
    """A function that runs a kernel; returns what Triton compiled, or None in its interpreter."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> Any: ...


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: int) -> object:
    """Launch a kernel without recording it, unless somebody watches."""
    compiled = kernel[grid](*arguments, **options)
    if HERE.watcher is not None:
        HERE.watcher(compiled, grid, arguments)
    return compiled


def launches_watched() -> bool:
    """Whether somebody watches launches by a hook of Triton's, which only Triton's own launcher calls."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # A chain of hooks may be empty.
    return any(hook is not None and bool(getattr(hook, "calls", True)) for hook in hooks)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors."""
    return bool(knobs.runtime.interpret)


def tiles_of(length: int, block: int) -> int:
    """The number of tiles of `block` rows that cover a length."""
    return -(-length // block)


def heads_together(rows: int, columns: int, batch_heads: int, *, numbers: int) -> int:
    """How many heads take turns with their tiles, where heads do: groups as even as can be.

    An operand of a group, of so many rows and columns a head, has no more than these numbers, if that is one head or
    more. So what a group reads stays in L2, and the last group, whose light tiles end the launch, is as large as any.
    """
    groups = tiles_of(batch_heads, max(1, numbers // (rows * columns)))
    return tiles_of(batch_heads, groups)


def describable(*tensors: Tensor) -> bool:
    """Whether the tensor-memory accelerator can address these tensors: strides in 16-byte multiples, no broadcast."""
    for tensor in tensors:
        if tensor.data_ptr() % 16 or not _has_describable_layout(tensor.shape, tensor.stride(), tensor.element_size()):
            return False
    return True


@functools.lru_cache(maxsize=4096)  # every eager backward pass asks this of four tensors
def _has_describable_layout(shape: tuple[int, ...], strides: tuple[int, ...], element_size: int) -> bool:
    if 0 in shape:
        return False
    return not any(
        size > 1 and (stride == 0 or stride * element_size % 16)
        for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    )


def described_strides(tensor: Tensor) -> list[int]:
    """Strides that a descriptor accepts. It checks all of them, so a dimension of size 1 gets a stride of 16 bytes."""
    step = 16 // tensor.element_size()
    strides = [stride if size > 1 else step for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False)]
    return [*strides, 1]
