"""Launches of the FlashAttention kernels: strides or descriptors, grids, buffers.

q, out and the gradients are (B, H, S, D), k and v (B, H', T, D) with H a multiple of H'. The head dimension must be
dense (stride 1); every other stride is honoured.
"""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stepscope.core.parts import has_few_programs
from stepscope.kernels.flash.backward import (
    flash_add_shares,
    flash_bias_gradients,
    flash_finish_keys,
    flash_finish_queries,
    flash_joint_gradients,
    flash_key_gradients,
    flash_query_gradients,
    flash_row_statistics,
)
from stepscope.kernels.flash.configuration import (
    HOPPER_BLOCK_N,
    LARGEST_TILE,
    BackwardConfiguration,
    ForwardConfiguration,
    HopperBackward,
    HopperForward,
    Precision,
    Tiles,
)
from stepscope.kernels.flash.forward import flash_forward
from stepscope.kernels.flash.tiles import PARTS, flash_draw, flash_split_operands, splits
from stepscope.kernels.launching import (
    LOG2E,
    SMALLEST_SCALE,
    Launcher,
    Sharing,
    describable,
    described_strides,
    heads_together,
    interpreted,
    launch,
    tiles_of,
)

if TYPE_CHECKING:
    from types import ModuleType


class Scoring(NamedTuple):
    """What is done to scores beside the scale (`kernels/flash/tiles.py`)."""

    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,) fp32, contiguous, as the slopes."""
    slopes: Tensor | None = None
    bias: Tensor | None = None
    """(H, S + T - 1) by distance, or (1 or B, H, S, T); the last dimension is dense."""
    dropout: float = 0.0
    seeds: Tensor | None = None
    """(2,) int64, of the weights that dropout takes."""

    @property
    def bias_strides(self) -> tuple[int, int, int]:
        """The bias's strides of the batch, the head and the query, in elements."""
        if self.bias is None:
            return 0, 0, 0
        if self.bias.dim() == 2:
            return 0, self.bias.stride(0), -1
        of_batch, of_head, of_query, _ = self.bias.stride()
        return 0 if self.bias.shape[0] == 1 else of_batch, of_head, of_query

    @property
    def dropped(self) -> int:
        """How many of 256 weights dropout takes."""
        return 0 if self.seeds is None else min(max(1, round(self.dropout * 256)), 255)

    @property
    def in_triton(self) -> bool:
        """Whether the kernels in Gluon do not take it."""
        return self.slopes is not None or self.bias is not None or self.seeds is not None

    def factors(self, scale: float) -> tuple[float, float | None, Tensor | None, int]:
        """The factor on a score in base 2, that on a product before its tanh, the seeds, and of 256 weights how many
        dropout takes."""
        if self.softcap is not None:
            return self.softcap * LOG2E.value, scale / self.softcap, self.seeds, self.dropped
        return math.copysign(max(abs(scale) * LOG2E.value, SMALLEST_SCALE), scale), None, self.seeds, self.dropped


PLAIN = Scoring()
_PREPROCESS_ROWS = 64
_SPLIT_ROWS = 32
_DRAWN_QUERIES, _DRAWN_GROUPS = 256, 4
"""The queries, and groups of 32 keys, of a program that draws."""
_ADDED_ROWS = 32
"""The keys of a program that adds up shares."""
_MOST_WORDS = 1 << 24
"""The most words of 32 bits that are drawn before a backward pass: 64 MiB."""
_NUMBERS_TOGETHER = 1 << 22
"""Numbers of an operand of the heads that take turns, where heads do: 8 MiB for each of 16 bits."""
_GLUON_KNOWN = ("3.6.", "3.7.")
"""The releases of Triton that compile the kernels for Hopper. Gluon is experimental and changes between releases."""


@functools.cache
def _hopper() -> "ModuleType | None":
    """The module that launches the kernels in Gluon; None if this Triton cannot compile them."""
    if interpreted() or not triton.__version__.startswith(_GLUON_KNOWN):
        return None
    from stepscope.kernels.hopper import launch as hopper_launch  # noqa: PLC0415  (Gluon: where it is known)

    return hopper_launch


def hopper_takes(q: Tensor, k: Tensor, *others: Tensor, limited: bool) -> bool:
    """Whether a call on these operands runs a kernel in Gluon, if its configuration names one.

    limited: by a window or documents, which those kernels take of self-attention alone.
    """
    module = _hopper()
    if module is None or (limited and q.shape[2] != k.shape[2]):
        return False
    return module.takes(q, k, *others) and describable(q, k, *others)


def in_gluon(
    q: Tensor, k: Tensor, v: Tensor, other: Tensor, configuration: HopperForward | HopperBackward, *, limited: bool,
    plain: bool,
) -> bool:  # fmt: skip
    """Whether a call on these operands runs the kernel in Gluon that the configuration names: the other operand is
    the output, or its gradient.

    limited: as in `hopper_takes`. plain: nothing is hidden, and scores stay as they are.
    """
    if not hopper_takes(q, k, v, other, limited=limited):
        return False
    return not configuration.heads or (plain and _required_hopper().takes_heads(q, k, configuration))


def _described(tensor: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), described_strides(tensor), [1, 1, rows, block_d])


def _options(tiles: Tiles) -> dict[str, int]:
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    if tiles.max_registers is not None:
        options["maxnreg"] = tiles.max_registers
    return options


def _precision(precision: Precision, operand: Tensor) -> str:
    if not interpreted():
        return precision
    if splits(precision):
        return "upcast bf16x6"
    return "upcast" if operand.dtype == torch.bfloat16 else precision


def block_d_of(head_dim: int) -> int:
    """The number of columns of a tile: the smallest power of two, 16 or more, that holds head_dim."""
    return max(16, 1 << (head_dim - 1).bit_length())


def parts_for(precision: Precision, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Buffers for the parts of split operands, each (B, H, rows, 3 block_d) bf16; none if operands are not split."""
    if not splits(precision):
        return ()
    return tuple(
        torch.empty((*t.shape[:3], PARTS * block_d_of(t.shape[3])), dtype=torch.bfloat16, device=t.device)
        for t in tensors
    )


def _split(first: Tensor, second: Tensor, parts: tuple[Tensor, Tensor], launcher: Launcher) -> None:
    """Split two operands of one shape into their buffers, or one operand if both buffers are the same tensor."""
    batches, heads, rows, head_dim = first.shape
    launcher(
        flash_split_operands, (tiles_of(rows, _SPLIT_ROWS) * batches * heads, 1 if parts[0] is parts[1] else 2),
        first, second, *parts, *first.stride()[:3], *second.stride()[:3],
        heads, rows, head_dim, block_d_of(head_dim), _SPLIT_ROWS,
        num_warps=4,
    )  # fmt: skip


def _together(queries: int, keys: int, columns: int, batch_heads: int) -> int:
    return heads_together(max(queries, keys), columns, batch_heads, numbers=_NUMBERS_TOGETHER)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
    *, causal: bool, scale: float, window: int | None, precision: Precision, configuration: ForwardConfiguration,
    parts: tuple[Tensor, ...] = (), bounds: Tensor | None = None, scoring: Scoring = PLAIN,
    launcher: Launcher = launch,
) -> object:  # fmt: skip
    """Fill `out` and `logsumexp` ((B, H, S) fp32, contiguous). `parts` are the buffers of `parts_for` q, k and v.

    `bounds` are those of documents, (2, B, S) int32, contiguous. The kernel in Gluon takes no slopes, bias
    or dropout.
    """
    hopper = None if scale < 0 or scoring.in_triton else configuration.hopper
    limited = window is not None or bounds is not None
    plain = not (causal or limited) and scoring.softcap is None and scoring.sinks is None
    if hopper is not None and in_gluon(q, k, v, out, hopper, limited=limited, plain=plain):
        return _required_hopper().launch_hopper_forward(
            q,
            k,
            v,
            out,
            logsumexp,
            causal=causal,
            scale=scale,
            window=window,
            bounds=bounds,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
            configuration=hopper,
            launcher=launcher,
        )
    if splits(precision):
        q_parts, k_parts, v_parts = parts or parts_for(precision, q, k, v)
        _split(q, q, (q_parts, q_parts), launcher)
        _split(k, v, (k_parts, v_parts), launcher)
        q, k, v, head_dim = q_parts, k_parts, v_parts, q.shape[3]
    else:
        head_dim = q.shape[3]
    batches, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    tiles = configuration.tiles
    block_d = block_d_of(head_dim)
    tma = configuration.tma and describable(q, k, v)
    programs = tiles_of(queries, tiles.block_m) * batches * heads
    if configuration.persistent and not interpreted():
        programs = min(programs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    return launcher(
        flash_forward, (programs,),
        _described(q, tiles.block_m, block_d) if tma else q,
        _described(k, tiles.block_n, block_d) if tma else k,
        _described(v, tiles.block_n, block_d) if tma else v,
        out, logsumexp, bounds, scoring.sinks, scoring.slopes, scoring.bias, *scoring.factors(abs(scale)),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *scoring.bias_strides,
        batches, heads, queries, keys, window or 0, _together(queries, keys, block_d, batches * heads),
        heads // kv_heads, head_dim, block_d, tiles.block_m, tiles.block_n,
        causal, window is not None, queries % tiles.block_m == 0, keys % tiles.block_n == 0, scale < 0,
        _precision(precision, q), tma,
        configuration.warp_specialize, configuration.rows_first, configuration.persistent,
        **_options(tiles),
    )  # fmt: skip


def statistics_for(q: Tensor, configuration: BackwardConfiguration | None = None) -> Tensor:
    """A buffer for a backward pass's row statistics: (2 B H, S padded to a multiple of every tile of queries) fp32."""
    padding = LARGEST_TILE
    if configuration is not None and configuration.queries is not None:
        padding = max(configuration.keys.block_m, configuration.queries.block_m)
        if configuration.hopper is not None:
            padding = max(padding, HOPPER_BLOCK_N)
    padded = tiles_of(q.shape[2], padding) * padding
    return torch.empty((2 * q.shape[0] * q.shape[1], padded), dtype=torch.float32, device=q.device)


def sums_for(
    configuration: BackwardConfiguration, statistics: Tensor, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor,
    *, causal: bool, limited: bool, in_triton: bool = False,
) -> Tensor | None:  # fmt: skip
    """A buffer for the sums of dQ if the kernel in Gluon takes this pass. With None, the other kernels run.

    The kernel in Gluon sums dQ in an order that differs between runs, so it does not run if PyTorch must be
    deterministic. It takes no slopes, bias or dropout (`in_triton`). It also does not run if a causal mask leaves keys
    that no query sees. It would add their products to another head's sums, and these are zeros only if keys and values
    are finite.
    """
    hopper = configuration.hopper
    if hopper is None or hopper.heads or in_triton or torch.are_deterministic_algorithms_enabled():
        return None
    if causal and k.shape[2] > statistics.shape[1]:
        return None
    if not hopper_takes(q, k, v, gradient, limited=limited):
        return None
    return _required_hopper().sums_for(q, k, statistics, masked=causal or limited, configuration=hopper)


def words_for(
    configuration: BackwardConfiguration, q: Tensor, k: Tensor, seeds: Tensor | None, *, limited: bool
) -> Tensor | None:
    """A buffer for what dropout takes, two bits a weight, if it is drawn before the backward pass.

    limited: by a window or documents, which hide most of it.
    """
    if seeds is None or limited or not configuration.draw_first:
        return None
    rows, columns = (tiles_of(each.shape[2], LARGEST_TILE) * LARGEST_TILE for each in (q, k))
    words = q.shape[0] * q.shape[1] * rows * columns // 16
    return torch.empty(words, dtype=torch.int32, device=q.device) if words <= _MOST_WORDS else None


def _required_hopper() -> "ModuleType":
    module = _hopper()
    assert module is not None  # only calls that this module takes come here
    return module


def block_of_bias(q: Tensor, head_dim: int) -> int:
    """The rows and columns of a tile of the bias's gradient: as many as registers hold beside their operands."""
    return 32 if interpreted() or (q.element_size() == 4 and head_dim > 64) else 64


def distances_for(q: Tensor, k: Tensor) -> Tensor:
    """A buffer for the gradient of each distance of a key from a query, by diagonals of tiles."""
    block = block_of_bias(q, q.shape[3])
    diagonals = tiles_of(q.shape[2], block) + tiles_of(k.shape[2], block) - 1
    return torch.empty((q.shape[1], diagonals, 2, block), dtype=torch.float32, device=q.device)


def by_distance(found: Tensor, queries: int, keys: int) -> Tensor:
    """(H, S + T - 1) fp32 of what `Backward.bias` found of the distances j - i from 1 - S to T - 1."""
    heads, diagonals, _, block = found.shape
    line = found.new_zeros(heads, diagonals + 1, block)
    line[:, :-1] += found[:, :, 0]
    line[:, 1:] += found[:, :, 1]
    first = tiles_of(queries, block) * block - (queries - 1)
    return line.view(heads, -1)[:, first : first + queries + keys - 1]


def shares_for(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """Buffers for dK and dV by head of queries, (B, H, T, D), where heads of keys alone would make few programs."""
    batches, kv_heads, keys, head_dim = k.shape
    if q.shape[1] == kv_heads or not has_few_programs(batches * kv_heads, keys):
        return None
    shape = batches, q.shape[1], keys, head_dim
    return k.new_empty(shape), k.new_empty(shape)


class Backward:
    """One backward pass: its tensors, and a method to launch each kernel that it may need."""

    def __init__(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, statistics: Tensor,
        *, causal: bool, scale: float, window: int | None, precision: Precision, tma: bool, rows_first: bool = True,
        parts: tuple[Tensor, ...] = (), sums: Tensor | None = None, bounds: Tensor | None = None,
        scoring: Scoring = PLAIN, words: Tensor | None = None, shares: tuple[Tensor, Tensor] | None = None,
        launcher: Launcher = launch,
    ) -> None:  # fmt: skip
        """Hold the tensors without a launch.

        The kernels fill dq, dk, dv and the statistics (`statistics_for`); where there are shares (`shares_for`) these
        in place of dk and dv, which `add_shares` fills. `split` fills the parts (`parts_for` q, k, v and the gradient,
        made here if absent). `draw` fills the words (`words_for`). `hopper` fills the sums (`sums_for`).
        """
        self.gradient, self.q, self.k, self.v, self.out, self.logsumexp = gradient, q, k, v, out, logsumexp
        self.dq, self.dk, self.dv = dq, *(shares or (dk, dv))
        self.shares, self._results = shares, (dk, dv)
        self.sums = sums
        self._limits = {"window": window, "bounds": bounds, "softcap": scoring.softcap}
        self._added = (bounds, scoring.slopes, scoring.bias)
        of_scores = (*self._limits.values(), scoring.slopes, scoring.bias, scoring.seeds)
        self._plain = not causal and all(each is None for each in of_scores)
        self.scale = scale / (1 - scoring.dropped / 256)
        *factors, seeds, self._dropped = scoring.factors(scale)
        self._seeds, self._words = seeds, words
        self._scores = (*self._added, self.scale, *factors, seeds if words is None else words, self._dropped)
        self._bias_strides = scoring.bias_strides
        self.rows_first = rows_first
        self.causal = causal
        self.batches, self.heads, self.queries, self.head_dim = q.shape
        self.kv_heads, self.keys = k.shape[1], k.shape[2]
        self._owners, self._shared = self.dk.shape[1], self.dk.shape[1] != k.shape[1]
        self.block_d = block_d_of(self.head_dim)
        self._operands_of = q, k, v, gradient
        if splits(precision):
            self._operands_of = parts or parts_for(precision, q, k, v, gradient)
        self.tma = tma and describable(*self._operands_of)
        self.launch = launcher
        self.statistics = statistics
        self.padded = statistics.shape[1]
        self._inputs = tuple(step for operand in self._operands_of for step in operand.stride()[:3])
        together = _together(self.queries, self.keys, self.block_d, self.batches * self.heads)
        self._sizes = (self.batches, self.kv_heads, self.queries, self.keys, window or 0, self.padded, together)
        self._mask = (causal, window is not None)
        self._loading = (_precision(precision, q), self.tma)

    def split(self) -> None:
        """Split the operands if the precision needs it. Call this before every kernel that reads them."""
        q, k, v, gradient = self._operands_of
        if q is not self.q:
            _split(self.q, self.gradient, (q, gradient), self.launch)
            _split(self.k, self.v, (k, v), self.launch)

    def draw(self) -> None:
        """Draw what dropout takes if there are words for it. Call this before every kernel that reads them."""
        if self._words is None:
            return
        grid = (
            tiles_of(self.queries, _DRAWN_QUERIES) * self.batches * self.heads,
            tiles_of(self.keys, 32 * _DRAWN_GROUPS),
        )
        self.launch(
            flash_draw, grid, self._seeds, self._words, self._dropped, self.batches * self.heads,
            self.queries, self.keys, _DRAWN_QUERIES, _DRAWN_GROUPS, self.causal,
            num_warps=4,
        )  # fmt: skip

    def preprocess(self, logsumexp_gradient: Tensor | None = None, *, sums: Tensor | None = None) -> object:
        """Fill the row statistics for later kernels, and set the sums ((B H padded, D) fp32) to zero.

        The logsumexp's gradient is (B, H, S) fp32, contiguous.
        """
        return self.launch(
            flash_row_statistics, (tiles_of(self.padded, _PREPROCESS_ROWS) * self.batches * self.heads,),
            self.out, self.gradient, self.logsumexp,
            self.logsumexp if logsumexp_gradient is None else logsumexp_gradient, self.statistics,
            self.statistics if sums is None else sums,
            *self.out.stride()[:3], *self.gradient.stride()[:3],
            self.batches, self.heads, self.queries, self.padded,
            self.head_dim, self.block_d, _PREPROCESS_ROWS, logsumexp_gradient is not None, sums is not None,
            num_warps=4,
        )  # fmt: skip

    def over_keys(self, tiles: Tiles, *, accumulated: Tensor | None = None, tma_reduce: bool = False) -> object:
        """Fill dK and dV, and add dQ / scale to `accumulated` ((B, H, S, D) fp32, contiguous, zeros) if it is given."""
        fused = accumulated is not None
        sums = self.dq if accumulated is None else accumulated
        tma_reduce = tma_reduce and fused and self.tma and describable(sums) and not interpreted()
        target = _described(sums, tiles.block_m, self.block_d) if tma_reduce else sums
        return self.launch(
            flash_key_gradients, (tiles_of(self.keys, tiles.block_n) * self.batches * self._owners,),
            *self._operands(tiles), target, self.dk, self.dv, self._statistics(tiles),
            *self._scores, *self._inputs,
            *sums.stride()[:3], *self.dk.stride()[:3], *self.dv.stride()[:3], *self._bias_strides, *self._sizes,
            *self._shape(tiles), *self._mask, *self._even(tiles), *self._loading, self.rows_first, fused, tma_reduce,
            self._shared, **_options(tiles),
        )  # fmt: skip

    def finish(self, sums: Tensor, padded: int) -> object:
        """Fill dQ from its accumulated sums, which have `padded` rows per head."""
        return self.launch(
            flash_finish_queries, (tiles_of(self.queries, _PREPROCESS_ROWS) * self.batches * self.heads,),
            sums, self.dq, self.scale, *self.dq.stride()[:3], self.heads, self.queries, padded,
            self.head_dim, self.block_d, _PREPROCESS_ROWS,
            num_warps=4,
        )  # fmt: skip

    def finish_keys(self, sums: Tensor, sharing: Sharing) -> object:
        """Fill dK and dV of the tiles of keys that several programs share from what these left behind the sums."""
        return self.launch(
            flash_finish_keys, (sharing.shared, 2, HOPPER_BLOCK_N // _PREPROCESS_ROWS),
            sums, self.dk, self.dv, self.scale, *self.dk.stride()[:3], *self.dv.stride()[:3],
            self.kv_heads, self.keys, self.statistics.shape[0] // 2 * self.padded, sharing.whole, sharing.parts,
            self.head_dim, self.block_d, HOPPER_BLOCK_N, _PREPROCESS_ROWS,
            num_warps=4,
        )  # fmt: skip

    def add_shares(self) -> None:
        """Fill dK and dV with the sums of their shares, if there are any, over the query heads of each group."""
        if self.shares is None:
            return
        dk, dv = self._results
        batches, kv_heads, keys, _ = dk.shape
        self.launch(
            flash_add_shares, (tiles_of(keys, _ADDED_ROWS), batches * kv_heads, 2),
            *self.shares, dk, dv, *dk.stride()[:3], *dv.stride()[:3], kv_heads, keys,
            self.heads // kv_heads, self.head_dim, self.block_d, _ADDED_ROWS,
            num_warps=4,
        )  # fmt: skip

    def over_queries(self, tiles: Tiles, *, prepare: bool = False, logsumexp_gradient: Tensor | None = None) -> object:
        """Fill dQ and, with `prepare`, the row statistics, instead of `preprocess`."""
        rows = self.padded if prepare else self.queries
        even_queries, even_keys = self._even(tiles)
        return self.launch(
            flash_query_gradients, (tiles_of(rows, tiles.block_m) * self.batches * self.heads,),
            *self._operands(tiles), self.out, self.logsumexp,
            self.logsumexp if logsumexp_gradient is None else logsumexp_gradient,
            self.dq, self.statistics, *self._scores,
            *self._inputs, *self.out.stride()[:3], *self.dq.stride()[:3], *self._bias_strides, *self._sizes,
            *self._shape(tiles), *self._mask,
            even_queries and rows == self.queries, even_keys, *self._loading,
            self.rows_first, prepare, logsumexp_gradient is not None, None,
            **_options(tiles),
        )  # fmt: skip

    def joint(self, keys: Tiles, queries: Tiles) -> object:
        """Fill dK, dV and dQ in one launch."""
        key_programs = tiles_of(self.keys, keys.block_n) * self.batches * self._owners
        query_programs = tiles_of(self.queries, queries.block_m) * self.batches * self.heads
        return self.launch(
            flash_joint_gradients, (key_programs + query_programs,),
            *self._operands(keys), *self._operands(queries), self.dq, self.dk, self.dv,
            self._statistics(keys), self.statistics, *self._scores, *self._inputs,
            *self.dq.stride()[:3], *self.dk.stride()[:3], *self.dv.stride()[:3], *self._bias_strides, *self._sizes,
            *self._shape(keys), queries.block_m, queries.block_n, *self._mask,
            *self._even(keys), *self._even(queries), *self._loading, self.rows_first,
            self._shared, **_options(keys),
        )  # fmt: skip

    def bias(self, target: Tensor, *, distances: bool) -> object:
        """Fill the gradient of the bias, (1 or B, H, S, T), or of each distance (`distances_for`), once the row
        statistics are there."""
        block = block_of_bias(self.q, self.head_dim)
        tiles = target.shape[1]
        if not distances:
            tiles = tiles_of(self.queries, block) * tiles_of(self.keys, block) * target.shape[0]
        return self.launch(
            flash_bias_gradients, (self.heads * tiles,),
            *self._operands_of, self.statistics, *self._added, target, *self._scores[-4:],
            *self._inputs, *self._bias_strides, *self._sizes[:6],
            self.heads // self.kv_heads, self.head_dim, self.block_d, block, *self._mask, self._loading[0], distances,
            not distances and target.shape[0] > 1,
            num_warps=4 if block == 32 or self.block_d <= 64 else 8, num_stages=1,
        )  # fmt: skip

    def hopper(self, sums: Tensor, configuration: HopperBackward, logsumexp_gradient: Tensor | None = None) -> object:
        """Fill all three gradients with the kernel in Gluon."""
        self.preprocess(logsumexp_gradient, sums=sums)
        compiled = _required_hopper().launch_hopper_gradients(
            self.gradient, self.q, self.k, self.v, self.dk, self.dv, self.statistics, sums,
            causal=self.causal, scale=self.scale, **self._limits, configuration=configuration, launcher=self.launch,
        )  # fmt: skip
        self.finish(sums, self.padded)
        masked = self.causal or self._limits["window"] is not None or self._limits["bounds"] is not None
        sharing = _required_hopper().sharing_of(self.q, self.k, masked=masked, configuration=configuration)
        if sharing.shared:
            self.finish_keys(sums, sharing)
        return compiled

    def takes_heads(self, configuration: HopperBackward | None) -> bool:
        """Whether the kernel in Gluon that takes whole heads makes this pass."""
        if configuration is None or not configuration.heads:
            return False
        return in_gluon(self.q, self.k, self.v, self.gradient, configuration, limited=False, plain=self._plain)

    def of_heads(self, logsumexp_gradient: Tensor | None = None) -> object:
        """Fill all three gradients with the kernel in Gluon that takes whole heads."""
        self.preprocess(logsumexp_gradient)
        return _required_hopper().launch_gradients_of_heads(
            self.gradient, self.q, self.k, self.v, self.dq, self.dk, self.dv, self.statistics,
            scale=self.scale, launcher=self.launch,
        )  # fmt: skip

    def _operands(self, tiles: Tiles) -> tuple[Tensor | TensorDescriptor, ...]:
        if not self.tma:
            return self._operands_of
        q, k, v, gradient = self._operands_of
        return (
            _described(q, tiles.block_m, self.block_d),
            _described(k, tiles.block_n, self.block_d),
            _described(v, tiles.block_n, self.block_d),
            _described(gradient, tiles.block_m, self.block_d),
        )

    def _statistics(self, tiles: Tiles) -> Tensor | TensorDescriptor:
        if not self.tma:
            return self.statistics
        return TensorDescriptor(self.statistics, list(self.statistics.shape), [self.padded, 1], [1, tiles.block_m])

    def _shape(self, tiles: Tiles) -> tuple[int, ...]:
        return self.heads // self.kv_heads, self.head_dim, self.block_d, tiles.block_m, tiles.block_n

    def _even(self, tiles: Tiles) -> tuple[bool, bool]:
        return self.queries % tiles.block_m == 0, self.keys % tiles.block_n == 0


def run_backward(
    backward: Backward, configuration: BackwardConfiguration, logsumexp_gradient: Tensor | None = None
) -> None:
    """Launch the kernels that the configuration names."""
    _run_backward(backward, configuration, logsumexp_gradient)
    backward.add_shares()


def _run_backward(backward: Backward, configuration: BackwardConfiguration, logsumexp_gradient: Tensor | None) -> None:
    if backward.sums is not None and configuration.hopper is not None:
        backward.hopper(backward.sums, configuration.hopper, logsumexp_gradient)
        return
    if backward.takes_heads(configuration.hopper):
        backward.of_heads(logsumexp_gradient)
        return
    backward.split()
    backward.draw()
    queries = configuration.queries
    if configuration.way == "apart":
        assert queries is not None  # as a configuration checks
        backward.over_queries(queries, prepare=True, logsumexp_gradient=logsumexp_gradient)
        backward.over_keys(configuration.keys)
        return
    backward.preprocess(logsumexp_gradient)
    if configuration.way == "joint":
        assert queries is not None
        backward.joint(configuration.keys, queries)
    else:
        accumulated = torch.zeros(backward.q.shape, dtype=torch.float32, device=backward.q.device)
        backward.over_keys(configuration.keys, accumulated=accumulated, tma_reduce=configuration.tma_reduce)
        backward.finish(accumulated, backward.queries)
