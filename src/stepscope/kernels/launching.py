"""Helpers for every kernel launch: the launcher, the number of tiles, and what a descriptor can address."""

import functools
from typing import Any, NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from stepscope.core.errors import InputError
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


def check_place(name: str, tensor: Tensor) -> None:
    """Raise an InputError, one line, for a tensor where no kernel runs."""
    if tensor.device.type == "cpu" and not interpreted():
        raise InputError(
            f"{name} runs on an NVIDIA GPU, and these tensors lie on cpu: move them, choose the reference, or set "
            "TRITON_INTERPRET=1 before Triton is imported, which runs its kernels in Python"
        )


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


# ---- fused parts


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


# ---- programs that share tiles of keys in a backward pass, so that fewer multiprocessors are idle at its end

_MOST_PARTS = 8
"""The most programs that share a tile of keys: what they leave takes memory."""
_VISITS_TO_BEGIN = 3
"""What a program's beginning and end take of its time, in visits of tiles of queries."""
_VISITS_TO_ADD = 6
"""What it takes to add parts up, a launch of its own, in visits of tiles of queries."""


class Sharing(NamedTuple):
    """How programs share the tiles of keys of a backward pass."""

    whole: int
    """The first tiles, which have a program each."""
    shared: int
    """The tiles after them, which have several."""
    parts: int
    """The programs of each of these, with a part of the queries each."""

    @property
    def programs(self) -> int:
        """The number of programs."""
        return self.whole + self.shared * self.parts


def shared_tiles(tiles: int, visits: int, multiprocessors: int) -> Sharing:
    """The sharing of so many tiles of keys, each with so many visits of tiles of queries, that ends first.

    A multiprocessor has one program at a time. Without a mask all take equally long, so they run in rounds, and in the
    last round multiprocessors that have none wait for the whole of one. Parts of programs wait for less.
    """
    last = tiles % multiprocessors
    least, best = visits + _VISITS_TO_BEGIN, 1
    for parts in range(2, min(_MOST_PARTS, visits) + 1):
        rounds = tiles_of(last * parts, multiprocessors)
        needed = rounds * (tiles_of(visits, parts) + _VISITS_TO_BEGIN) + _VISITS_TO_ADD
        if last and needed < least:
            least, best = needed, parts
    return Sharing(tiles - last, last, best) if best > 1 else Sharing(tiles, 0, 1)
