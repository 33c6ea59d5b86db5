"""What can be chosen about the FlashAttention kernels, and what is chosen where nothing was measured."""

from typing import Literal

import msgspec

Way = Literal["apart", "joint", "fused"]
Precision = Literal["ieee", "tf32", "tf32x3"]


class Tiles(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel's tile of scores and how it is compiled."""

    block_m: int
    """Queries of a tile, a power of two, 16 or more."""
    block_n: int
    """Keys of a tile, likewise."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline: tiles in flight."""
    max_registers: int | None = None
    """A cap on registers of a thread, where one more block on a multiprocessor is worth the spills."""

    def __str__(self) -> str:
        cap = "" if self.max_registers is None else f" r{self.max_registers}"
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{cap}"


class ForwardConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The forward kernel."""

    tiles: Tiles
    tma: bool = True
    """Load through tensor descriptors where strides and the device allow it."""
    warp_specialize: bool = False
    persistent: bool = False
    rows_first: bool = True
    """Tiles of one head after another, so that its keys stay in L2; otherwise the heads take turns."""

    def __str__(self) -> str:
        flags = [name for name, on in (("tma", self.tma), ("ws", self.warp_specialize), ("persistent", self.persistent),
                                       ("heads-first", not self.rows_first)) if on]  # fmt: skip
        return " ".join([str(self.tiles), *flags])


class BackwardConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The backward kernels."""

    way: Way = "apart"
    keys: Tiles
    """The kernel over tiles of keys."""
    queries: Tiles | None = None
    """The kernel over tiles of queries; not where it is `fused`. A `joint` launch takes num_warps and num_stages of
    `keys`."""
    tma: bool = True
    tma_reduce: bool = False
    """`fused`: add dQ up through the tensor-memory accelerator and not with atomic instructions."""

    @property
    def deterministic(self) -> bool:
        """Whether two runs agree bit for bit: every sum in one program, in one order."""
        return self.way != "fused"

    def __str__(self) -> str:
        parts = [self.way, f"keys {self.keys}"]
        if self.queries is not None:
            parts.append(f"queries {self.queries}")
        parts += [name for name, on in (("tma", self.tma), ("tma-reduce", self.tma_reduce)) if on]
        return " ".join(parts)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice depends on."""

    capability: tuple[int, int]
    """Of the device; (0, 0) in Triton's interpreter."""
    head_dim: int
    bytes_per_element: int
    causal: bool
    log2_queries: int


def tiles(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Tiles:
    """Tiles written short."""
    return Tiles(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def default_forward(problem: Problem) -> ForwardConfiguration:
    """A forward configuration that compiles without spilling registers; untuned until measured."""
    hopper = problem.capability[0] == 9
    if problem.capability == (0, 0):
        chosen = tiles(32, 16, 4, 1)
    elif problem.bytes_per_element == 4:
        chosen = _by_head_dim(problem, tiles(64, 32, 4, 2), tiles(32, 32, 4, 2), tiles(32, 16, 4, 1))
    elif hopper:
        chosen = _by_head_dim(problem, tiles(128, 64, 4, 3), tiles(128, 128, 8, 2), tiles(128, 64, 8, 2))
    else:
        chosen = _by_head_dim(problem, tiles(128, 64, 4, 3), tiles(128, 32, 4, 3), tiles(64, 32, 4, 2))
    return ForwardConfiguration(tiles=chosen, tma=problem.capability >= (9, 0))


def default_backward(problem: Problem) -> BackwardConfiguration:
    """A backward configuration that compiles without spilling registers; untuned until measured."""
    hopper = problem.capability[0] == 9
    if problem.capability == (0, 0):
        keys, queries = tiles(16, 32, 4, 1), tiles(32, 16, 4, 1)
    elif problem.bytes_per_element == 4:
        keys = _by_head_dim(problem, tiles(32, 64, 8, 1), tiles(32, 32, 8, 1), tiles(16, 32, 8, 1))
        queries = _by_head_dim(problem, tiles(64, 32, 8, 1), tiles(32, 32, 8, 1), tiles(32, 16, 8, 1))
    elif hopper:
        keys = _by_head_dim(problem, tiles(64, 128, 8, 2), tiles(64, 128, 8, 2), tiles(32, 64, 8, 2))
        queries = _by_head_dim(problem, tiles(128, 64, 4, 2), tiles(128, 64, 8, 2), tiles(64, 32, 8, 2))
    else:
        keys = _by_head_dim(problem, tiles(32, 128, 4, 3), tiles(32, 64, 4, 2), tiles(32, 32, 4, 1))
        queries = _by_head_dim(problem, tiles(128, 32, 4, 3), tiles(64, 32, 4, 2), tiles(32, 32, 4, 1))
    return BackwardConfiguration(keys=keys, queries=queries, tma=problem.capability >= (9, 0))


def _by_head_dim(problem: Problem, up_to_64: Tiles, up_to_128: Tiles, larger: Tiles) -> Tiles:
    if problem.head_dim <= 64:
        return up_to_64
    return up_to_128 if problem.head_dim <= 128 else larger
