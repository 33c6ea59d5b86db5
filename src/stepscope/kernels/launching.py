"""Helpers for every kernel launch: the launcher, the number of tiles, what a descriptor can address, and what dropouts
keep."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._ops import OpOverload
from triton import knobs

from stepscope.core.errors import InputError
from stepscope.kernels.operators import HERE, OF_RESULTS, PASSES, define

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


# ---- what dropouts keep
#
# PyTorch's compiler draws each number of a dropout by ten rounds of Philox, of whose four words it takes one: most of
# the time of a kernel that moves few bytes. What all dropouts of a graph keep is drawn here by one kernel, eight
# numbers of each Philox, and read as a byte a number, by backward, too:
#
#     kept = rand(shape) > p                                 kept = kept_numbers(seed, count, p)[place:].view(shape)
#
# The seed is a number of the graph, which its compiler draws with all other seeds at once: so a checkpoint around the
# graph, which restores the generator, draws the same again from another graph of the same code.

_LEAST_RATE, _CHANCES = 2.0**-8, 2**16
"""The least share of numbers that `kept_numbers` drops or keeps, and the chances that it tells apart."""
_LEAST_DRAWN = 2**20
"""Numbers of a rate that are worth a launch: of fewer, as where a layer is left out for a sample, the compiler's own
draw of some hundred instructions each takes less."""
_ALIGNED = 16

DRAWN = tl.constexpr(8192)
"""Numbers that a program of `draw_kept` draws: eight of each Philox, and of each thread some 64."""


@triton.jit
def draw_kept(SEED, KEPT, dropped):
    """Draw for each number whether a dropout keeps it, a byte of 1 or 0, four of them in an int32 of KEPT: of 65,536
    chances `dropped` drop it."""
    THREADS: tl.constexpr = 128  # pyright: ignore[reportAssignmentType]
    seed = tl.load(SEED)
    nothing = tl.zeros([THREADS], tl.int32)
    for turn in tl.static_range(DRAWN // (8 * THREADS)):  # pyright: ignore[reportGeneralTypeIssues]
        first = tl.program_id(0) * (DRAWN // 8) + turn * THREADS
        one, two, three, four = philox(seed, first + tl.arange(0, THREADS), nothing, nothing, nothing)
        words = KEPT + 2 * first.to(tl.int64) + tl.arange(0, THREADS)
        tl.store(words, _kept_of(one, dropped) | (_kept_of(two, dropped) << 16))
        tl.store(words + THREADS, _kept_of(three, dropped) | (_kept_of(four, dropped) << 16))


@triton.jit
def _kept_of(word, dropped):
    """Two bytes: what each half of a random word decides."""
    low = ((word & 0xFFFF).to(tl.int32) >= dropped).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= dropped).to(tl.int32)
    return low | (high << 8)


@triton.jit
def philox(seed, a, b, c, d):
    """Four words, uint32, of seven rounds of Philox 4x32. Triton's own multiplies once for each half of a product."""
    a, b, c, d = a.to(tl.uint32), b.to(tl.uint32), c.to(tl.uint32), d.to(tl.uint32)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):  # pyright: ignore[reportGeneralTypeIssues]
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low
        c = (first >> 32).to(tl.uint32) ^ d ^ high
        b = second.to(tl.uint32)
        d = first.to(tl.uint32)
        low += 0x9E3779B9
        high += 0xBB67AE85
    return a, b, c, d


def kept_numbers(seed: Tensor, count: int, rate: float) -> Tensor:
    """So many bools (count,) of a seed (1,), int64: False with the probability `rate`, to the nearest 65,536th."""
    programs = tiles_of(count, DRAWN.value)
    kept = torch.empty(programs * DRAWN.value // 4, dtype=torch.int32, device=seed.device)
    if programs:
        launch_at(kept, draw_kept, (programs,), seed, kept, round(rate * _CHANCES), num_warps=4)
    return kept.view(torch.bool)[:count]


define(
    "kept_numbers(Tensor seed, int count, float rate) -> Tensor",
    kept_numbers,
    lambda seed, count, rate: seed.new_empty(count, dtype=torch.bool),
)


def draws_together(graph: torch.fx.Graph) -> None:
    """Draw what the dropouts of a graph on a GPU keep by one kernel for each of their rates, where the graph has
    another operator of ours. What a checkpoint draws stays, since it draws it twice."""
    from torch._inductor import config  # noqa: PLC0415

    ours = any(isinstance(node.target, OpOverload) and node.target.namespace == "stepscope" for node in graph.nodes)
    if not ours or config.fallback_random:
        return
    devices = {"cuda", "cpu"} if interpreted() else {"cuda"}
    alike: dict[tuple[float, torch.device], list[torch.fx.Node]] = {}
    for node in graph.nodes:
        rate = _rate_of(node)
        if rate is not None and node.meta["val"].device.type in devices:
            alike.setdefault((rate, node.meta["val"].device), []).append(node)
    for (rate, device), compared in alike.items():
        if sum(node.meta["val"].numel() for node in compared) >= _LEAST_DRAWN:
            _draw(graph, rate, device, compared)


def _rate_of(node: torch.fx.Node) -> float | None:
    """The rate of the dropout whose kept numbers a node tells; None where it tells none, or is left to the compiler."""
    drawn, rate = node.args if node.target is torch.ops.aten.gt.Scalar else (None, None)
    if (
        not isinstance(rate, float)
        or not isinstance(drawn, torch.fx.Node)
        or drawn.target is not torch.ops.aten.rand.default
    ):
        return None
    taken = _LEAST_RATE <= rate <= 1 - _LEAST_RATE and len(drawn.users) == 1
    fixed = all(isinstance(size, int) for size in node.meta["val"].shape)
    return rate if taken and fixed and node.meta.get("recompute") is None else None


def _draw(graph: torch.fx.Graph, rate: float, device: torch.device, compared: Sequence[torch.fx.Node]) -> None:
    """Draw what these comparisons tell before the first of them. Each takes a part that begins where loads are wide."""
    counts = [node.meta["val"].numel() for node in compared]
    *places, count = itertools.accumulate((-(-each // _ALIGNED) * _ALIGNED for each in counts), initial=0)
    first = compared[0].all_input_nodes[0]
    with graph.inserting_before(first):
        of_seed = {"dtype": torch.int64, "device": device, "pin_memory": False}
        seed = graph.call_function(torch.ops.aten.randint.low, (0, 2**63 - 1, [1]), of_seed)
        drawn = graph.call_function(torch.ops.stepscope.kept_numbers.default, (seed, count, rate))
    for node, size, dtype in ((seed, 1, torch.int64), (drawn, count, torch.bool)):
        node.meta = {key: value for key, value in first.meta.items() if key not in OF_RESULTS}
        node.meta["val"] = compared[0].meta["val"].new_empty(size, dtype=dtype)
    for node, place, own in zip(compared, places, counts, strict=True):
        value, random = node.meta["val"], node.all_input_nodes[0]
        with graph.inserting_before(node):
            part = graph.call_function(torch.ops.aten.slice.Tensor, (drawn, 0, place, place + own))
            kept = graph.call_function(torch.ops.aten.view.default, (part, [*value.shape]))
        part.meta, kept.meta = {**node.meta, "val": value.new_empty(own)}, dict(node.meta)
        part.meta.pop("tensor_meta", None)
        node.replace_all_uses_with(kept)
        graph.erase_node(node)
        graph.erase_node(random)


PASSES.append(draws_together)
