"""Configurations of the FlashAttention kernels, and the defaults for calls that were never tuned."""

import functools
from typing import Literal

import msgspec

HOPPER_BLOCK_N = 128
"""Keys per tile of the backward kernel. Row statistics and sums are padded to a multiple of this, since under a causal
mask the kernel visits all queries at the positions of the tile's keys."""


def hopper_columns(head_dim: int) -> int | None:
    """The number of columns of the kernels' tiles: 64 or 128; None for head dimensions that they do not take.

    Between 64 and 128 the tensor-memory accelerator fills the columns beyond head_dim with zeros, which add nothing to
    a product, and writes none of them. It wants rows of whole 16 bytes, which are 8 numbers.
    """
    if head_dim not in range(64, 129, 8):
        return None
    return 64 if head_dim == 64 else 128


def _flags(**chosen: bool) -> list[str]:
    """The names of what is chosen, as a configuration shows them."""
    return [name.replace("_", "-") for name, on in chosen.items() if on]


def _check_registers(most: int | None) -> None:
    """Raise ValueError for a cap on a thread's registers that no GPU takes."""
    if most is not None and not 24 <= most <= 255:
        raise ValueError(f"a thread has 24 to 255 registers, not {most}")


class HopperForward(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the forward kernel in Gluon: consumers of four warps, 64 queries each."""

    consumers: int = 2
    """The number of consumers, 1 to 3. Each has 64 queries of the tile."""
    block_n: int = 128
    """The number of keys of a tile: a power of two from 16 to 256."""
    stages: int = 2
    """The number of buffers for K, and of buffers for V: two or more."""
    turns: bool = False
    """Whether consumers take turns at the tensor cores."""
    late: bool = False
    """Whether weights are rounded while the next scores are computed. This takes registers."""
    max_registers: int | None = None
    """Registers per thread at launch; None for no cap. With a low cap several programs share a multiprocessor."""
    heads: bool = False
    """Whether programs take whole heads: of head_dim 64, without a mask, up to as many keys as `stages` buffers hold.
    There are three or four consumers then."""

    def __post_init__(self) -> None:
        """Check the values, which may come from a file."""
        least, most = (3, 4) if self.heads else (1, 3)
        if not least <= self.consumers <= most:
            raise ValueError(f"a tile of queries has {least} to {most} consumers, not {self.consumers}")
        if not 16 <= self.block_n <= 256 or self.block_n & (self.block_n - 1) or not 2 <= self.stages <= 10:
            raise ValueError(
                f"tiles have a power of two of 16 to 256 keys, in 2 to 10 stages, not {self.block_n} and {self.stages}"
            )
        _check_registers(self.max_registers)

    def __str__(self) -> str:
        flags = _flags(turns=self.turns, late=self.late, heads=self.heads)
        cap = [] if self.max_registers is None else [f"r{self.max_registers}"]
        return " ".join([f"hopper {self.consumers}x64x{self.block_n} s{self.stages}", *cap, *flags])


class HopperBackward(msgspec.Struct, frozen=True, kw_only=True):
    """The backward kernel's configuration in Gluon: tiles of 64 queries by 128 keys, two consumers of four warps."""

    v_in_registers: bool = False
    """Whether V stays in registers too, not only in shared memory. There is room for it at head_dim 64."""
    spread: bool = False
    """Whether, without a causal mask, each program begins at another tile of queries. Otherwise all programs of a head
    add to the same rows of dQ at the same time. Under a causal mask the diagonal spreads them."""
    share: bool = False
    """Whether, without a causal mask, several programs share each of the tiles of keys that do not fill the GPU."""

    ahead: bool = False
    """Whether the scores of the next tile of queries begin before dQ of this one. head_dim 64 has registers for it."""
    heads: bool = False
    """Whether programs take whole heads: of head_dim 64, without a mask, up to 512 queries, with as many heads of keys.
    Nothing else is chosen then, and dQ is summed in a fixed order."""

    def __str__(self) -> str:
        flags = _flags(
            v_in_registers=self.v_in_registers, spread=self.spread, share=self.share, ahead=self.ahead, heads=self.heads
        )
        return " ".join([f"hopper 64x{HOPPER_BLOCK_N}", *flags])


Way = Literal["apart", "joint", "fused"]
Precision = Literal["ieee", "tf32", "tf32x3", "bf16x6"]
"""How fp32 is multiplied: exactly, in TF32, as three products of TF32, or as six of bf16 (`tiles.py`)."""

LARGEST_TILE = 256
"""The most rows of a tile. Row statistics are padded to a multiple of this."""


class Tiles(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one kernel's tile of scores, and how the kernel is compiled."""

    block_m: int
    """The number of queries of a tile, a power of two, 16 or more."""
    block_n: int
    """The number of keys of a tile, a power of two, 16 or more."""
    num_warps: int
    num_stages: int
    """The depth of the software pipeline: the number of tiles in flight."""
    max_registers: int | None = None
    """The most registers of a thread. A cap is worth its spills if one more block then fits on a multiprocessor."""

    def __post_init__(self) -> None:
        """Check the values, which may come from a file."""
        for block in (self.block_m, self.block_n):
            if not 16 <= block <= LARGEST_TILE or block & (block - 1):
                raise ValueError(f"a tile has a power of two of 16 to {LARGEST_TILE} rows, not {block}")
        if self.num_warps not in {1, 2, 4, 8, 16} or not 1 <= self.num_stages <= 8:
            raise ValueError(f"a tile has 1 to 16 warps and 1 to 8 stages, not {self.num_warps} and {self.num_stages}")
        _check_registers(self.max_registers)

    def __str__(self) -> str:
        cap = "" if self.max_registers is None else f" r{self.max_registers}"
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{cap}"


class ForwardConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of the forward kernel: how it cuts, loads and orders its tiles."""

    tiles: Tiles
    tma: bool = True
    """Whether tiles are loaded through tensor descriptors if strides and the device allow it."""
    warp_specialize: bool = False
    persistent: bool = False
    rows_first: bool = True
    """Whether the tiles of one head follow one another, so that its keys stay in L2. Otherwise the heads take turns."""
    hopper: HopperForward | None = None
    """The kernel in Gluon, for calls that it takes. Other calls use the other fields."""

    def __str__(self) -> str:
        if self.hopper is not None:
            return str(self.hopper)
        flags = _flags(
            tma=self.tma, ws=self.warp_specialize, persistent=self.persistent, heads_first=not self.rows_first
        )
        return " ".join([str(self.tiles), *flags])


class BackwardConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of backward: which kernels run, and their tiles."""

    way: Way = "apart"
    keys: Tiles
    """The tile of the kernel over keys."""
    queries: Tiles | None = None
    """The tile of the kernel over queries, which a `fused` backward does not run. A `joint` launch uses num_warps and
    num_stages of `keys`."""
    tma: bool = True
    rows_first: bool = True
    """As in the forward configuration. The kernel in Gluon has its own order."""
    draw_first: bool = False
    """Whether a kernel of its own draws what dropout takes, once for all kernels of the pass, unless a window or
    documents hide most of it, or it takes much memory."""
    tma_reduce: bool = False
    """Whether a `fused` backward sums dQ through the tensor-memory accelerator instead of atomic instructions."""
    hopper: HopperBackward | None = None
    """The kernel in Gluon, for calls that it takes, unless PyTorch must be deterministic. Other calls use the other
    fields."""

    def __post_init__(self) -> None:
        if self.way != "fused" and self.queries is None:
            raise ValueError(f"{self.way} needs tiles for the kernel over queries")

    @property
    def deterministic(self) -> bool:
        """Whether two runs agree bit for bit, since one program computes each sum in a fixed order."""
        return self.way != "fused" and (self.hopper is None or self.hopper.heads)

    def __str__(self) -> str:
        if self.hopper is not None:
            return str(self.hopper)
        parts = [self.way, f"keys {self.keys}"]
        if self.queries is not None:
            parts.append(f"queries {self.queries}")
        parts += _flags(
            tma=self.tma, tma_reduce=self.tma_reduce, heads_first=not self.rows_first, draw_first=self.draw_first
        )
        return " ".join(parts)


@functools.cache
def uncapped(configuration: BackwardConfiguration) -> BackwardConfiguration:
    """A configuration chosen without dropout for a call with it, which takes more registers than a cap leaves."""
    chosen = {"keys": configuration.keys, "queries": configuration.queries}
    free = {name: tiles and msgspec.structs.replace(tiles, max_registers=None) for name, tiles in chosen.items()}
    return msgspec.structs.replace(configuration, **free)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A class of calls that share one configuration."""

    capability: tuple[int, int]
    """The device's compute capability, (major, minor); (0, 0) in Triton's interpreter."""
    head_dim: int
    bytes_per_element: int
    causal: bool
    log2_queries: int
    """The base-2 logarithm of the number of queries, rounded up."""
    precision: Precision = "ieee"
    """How fp32 is multiplied; half precisions are always "ieee"."""

    def __str__(self) -> str:
        major, minor = self.capability
        dtype = f"fp32 {self.precision}" if self.bytes_per_element == 4 else "16 bits"
        mask = "causal" if self.causal else "full"
        return f"sm_{major}{minor} head_dim {self.head_dim} {dtype} {mask} up to {2**self.log2_queries} queries"


def tiles(block_m: int, block_n: int, num_warps: int, num_stages: int, max_registers: int | None = None) -> Tiles:
    """Tiles from positional arguments, for the tables in this file."""
    return Tiles(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, max_registers=max_registers
    )


def default_forward(problem: Problem, *, dropout: bool = False) -> ForwardConfiguration:
    """What is taken where nothing was tuned. dropout: with it, and nothing else that is done to scores."""
    if dropout and problem.causal and _dropout_on_hopper(problem):
        # Loads by descriptors leave registers for the words that are drawn, so that four blocks share a multiprocessor.
        return ForwardConfiguration(tiles=tiles(64, 64, 4, 2, 128), rows_first=not _in_turns(problem))
    if problem.capability[0] == 9 and problem.head_dim <= 128:
        return _hopper_forward(problem)
    if problem.capability == (0, 0):
        chosen = tiles(32, 16, 4, 1)
    elif problem.bytes_per_element == 4:
        chosen = _by_head_dim(problem, tiles(64, 32, 4, 2), tiles(32, 32, 4, 2), tiles(32, 16, 4, 1))
    elif problem.capability[0] == 9:
        chosen = tiles(128, 64, 8, 2)
    else:
        chosen = _by_head_dim(problem, tiles(128, 64, 4, 3), tiles(128, 32, 4, 3), tiles(64, 32, 4, 2))
    return ForwardConfiguration(tiles=chosen, tma=_described(problem))


def default_backward(problem: Problem, *, dropout: bool = False) -> BackwardConfiguration:
    """What is taken where nothing was tuned, as in `default_forward`."""
    if dropout and _dropout_on_hopper(problem):
        # A third stage takes registers, and gains without a mask alone, where words are drawn before.
        stages = 2 if problem.causal or problem.log2_queries > _MIDDLE_LOG2 else 3
        keys, queries = tiles(64, 64, 4, stages, 168), tiles(64, 64, 4, 2, 128)
        return BackwardConfiguration(keys=keys, queries=queries, rows_first=not _in_turns(problem), draw_first=True)
    if problem.capability[0] == 9 and problem.head_dim <= 128:
        return _hopper_backward(problem)
    if problem.capability == (0, 0):
        keys, queries = tiles(16, 32, 4, 1), tiles(32, 16, 4, 1)
    elif problem.bytes_per_element == 4:
        keys = _by_head_dim(problem, tiles(32, 64, 8, 1), tiles(32, 32, 8, 1), tiles(16, 32, 8, 1))
        queries = _by_head_dim(problem, tiles(64, 32, 8, 1), tiles(32, 32, 8, 1), tiles(32, 16, 8, 1))
    elif problem.capability[0] == 9:
        keys, queries = tiles(32, 64, 8, 2), tiles(64, 32, 8, 2)
    else:
        keys = _by_head_dim(problem, tiles(32, 128, 4, 3), tiles(32, 64, 4, 2), tiles(32, 32, 4, 1))
        queries = _by_head_dim(problem, tiles(128, 32, 4, 3), tiles(64, 32, 4, 2), tiles(32, 32, 4, 1))
    return BackwardConfiguration(keys=keys, queries=queries, tma=_described(problem))


def _dropout_on_hopper(problem: Problem) -> bool:
    """Whether the kernels with dropout have tiles of their own: where they were measured."""
    return problem.capability[0] == 9 and problem.head_dim <= 64 and problem.bytes_per_element == 2


def _described(problem: Problem) -> bool:
    # Compiled for sm_90, exact fp32 products spill far more registers with descriptors than with pointers.
    return problem.capability >= (9, 0) and problem.bytes_per_element == 2


# The defaults on Hopper up to head_dim 128 are the fastest of results/h200/attention/flash-experiments.json, kernel by
# kernel, and of flash-experiments-fourth.json and trials by hand for the order of tiles and up to 2048
# queries. They were measured in bf16 at 512 to 2048, 8192 and 16384 positions, and in fp32 at 4096.

_SHORT_LOG2 = 10
"""The base-2 logarithm of the most queries for which backward is faster in Triton than in Gluon; twice as many under a
causal mask at head_dim 64."""
_MIDDLE_LOG2 = 11
"""The base-2 logarithm of the most queries for which heads take turns in the kernels in Triton, under a causal mask and
at head_dim 64; half as many beyond."""
_FORWARD_LOG2 = {(64, True): 11, (64, False): 10, (128, True): 10, (128, False): 9}
"""The base-2 logarithm of the most queries for which forward is faster in Triton than in Gluon, by the columns of a
tile and whether it is causal."""
_LONG_LOG2 = 13
_OF_HEADS_LOG2 = 8
"""The base-2 logarithm of the most queries for which four consumers are faster with whole heads, beyond it three."""


def _hopper_forward(problem: Problem) -> ForwardConfiguration:
    if problem.bytes_per_element == 4:
        if problem.precision == "ieee":
            chosen = _by_head_dim(problem, tiles(64, 32, 4, 2), tiles(32, 32, 4, 2))
            return ForwardConfiguration(tiles=chosen, tma=False)
        if problem.precision == "bf16x6":
            return ForwardConfiguration(tiles=tiles(64, 64, 4, 1), rows_first=False)
        return ForwardConfiguration(tiles=_by_head_dim(problem, tiles(128, 64, 8, 3), tiles(128, 64, 8, 2)))
    columns, in_turns = hopper_columns(problem.head_dim), _in_turns(problem)
    in_gluon = columns is not None and problem.log2_queries > _FORWARD_LOG2[columns, problem.causal]
    if problem.head_dim > 64:
        long = problem.causal and problem.log2_queries >= _LONG_LOG2
        return ForwardConfiguration(
            tiles=tiles(64, 64, 4, 3) if long else tiles(64, 128, 4, 1),
            rows_first=not in_turns,
            hopper=HopperForward(turns=True, late=True) if in_gluon else None,
        )
    if in_turns:
        return ForwardConfiguration(tiles=tiles(64, 64, 4, 3), tma=False, rows_first=False)
    hopper = HopperForward(consumers=1, late=True, max_registers=128) if problem.causal else HopperForward(consumers=3)
    if not in_gluon:
        four = problem.log2_queries <= _OF_HEADS_LOG2
        whole = HopperForward(
            consumers=4 if four else 3, block_n=64 if four else 128, stages=10 if four else 5, heads=True
        )
        hopper = None if problem.causal or columns is None else whole
    return ForwardConfiguration(tiles=tiles(64, 128, 4, 2), hopper=hopper)


def _in_turns(problem: Problem) -> bool:
    return problem.causal and problem.log2_queries <= (_MIDDLE_LOG2 if problem.head_dim <= 64 else _SHORT_LOG2)


def _hopper_backward(problem: Problem) -> BackwardConfiguration:
    if problem.bytes_per_element == 4:
        if problem.precision == "ieee":
            keys = _by_head_dim(problem, tiles(32, 64, 8, 1), tiles(32, 32, 8, 1))
            queries = _by_head_dim(problem, tiles(64, 32, 8, 1), tiles(32, 32, 8, 1))
            return BackwardConfiguration(keys=keys, queries=queries, tma=False)
        if problem.precision == "bf16x6":
            return BackwardConfiguration(way="joint", keys=tiles(32, 64, 4, 2), queries=tiles(64, 32, 4, 2))
        keys = _by_head_dim(problem, tiles(64, 128, 8, 2), tiles(32, 32, 4, 2))
        queries = _by_head_dim(problem, tiles(128, 64, 8, 2), tiles(32, 32, 4, 2))
        return BackwardConfiguration(way="joint", keys=keys, queries=queries, tma=False)
    short, in_turns, full = problem.log2_queries <= _SHORT_LOG2, _in_turns(problem), not problem.causal
    columns = hopper_columns(problem.head_dim)
    in_gluon = not short and columns is not None
    if problem.head_dim > 64:
        keys = tiles(64, 64, 4, 2) if problem.causal or short else tiles(64, 128, 8, 3)
        hopper = HopperBackward(spread=full, share=full) if in_gluon else None
        return BackwardConfiguration(keys=keys, queries=tiles(64, 64, 4, 2), rows_first=not in_turns, hopper=hopper)
    # Where positions are hidden, the kernel over keys takes 170 registers without its cap. Then two blocks of 4 warps
    # share a multiprocessor's 65536. With 168, three do.
    if short or in_turns:
        return BackwardConfiguration(
            way="joint" if in_turns else "apart",
            keys=tiles(64, 64, 4, 3, 168),
            queries=tiles(64, 64, 4, 3),
            rows_first=not in_turns,
            hopper=HopperBackward(heads=True) if columns is not None and full else None,
        )
    keys = tiles(64, 64, 4, 2, 168) if problem.causal else tiles(64, 64, 4, 3)
    hopper = HopperBackward(v_in_registers=True, spread=full, share=full, ahead=True) if in_gluon else None
    return BackwardConfiguration(keys=keys, queries=tiles(128, 64, 8, 3), hopper=hopper)


def _by_head_dim(problem: Problem, up_to_64: Tiles, up_to_128: Tiles, larger: Tiles | None = None) -> Tiles:
    if problem.head_dim <= 64:
        return up_to_64
    return up_to_128 if problem.head_dim <= 128 or larger is None else larger
