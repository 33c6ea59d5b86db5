"""The gate's calls: odd in every way that they say, and each of these is needed: a mistake that plain calls hide."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.attention_call import AttentionCell, AttentionShape, Differentiated, Layout, Numbers
from stepscope.core.parts import Attention, TensorDtype
from stepscope.questions.attention_calls import odd_shapes
from stepscope.questions.attention_gate import shapes_of
from stepscope.training.attention import AttentionFunction
from stepscope.training.attention.gate import (
    LONG,
    GivenTensor,
    draw_tensors,
    few_shapes,
    gate_shapes,
    long_shapes,
)
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import CHUNK, for_all_heads, hidden_keys, reference
from tests.conftest import in_the_interpreter_at_length
from tests.training.test_attention_gate import CPU, PLAIN, PROBES, judged, square

pytestmark = pytest.mark.slow

# ---- the calls


def test_the_shapes_have_everything_that_is_odd():
    shapes = gate_shapes()
    assert len(shapes) == 58 == len({str(shape) for shape in shapes}) and set(PROBES) <= set(shapes)
    assert {1, 17, 63, 64, 65, 127, 200} <= {shape.queries for shape in few_shapes()}
    assert {shape.head_dim for shape in few_shapes()} == {16, 24, 40, 64, 80, 128, 256}
    for some in (shapes, few_shapes()):
        assert {layout for shape in some for layout in shape.layouts} == set(get_args(Layout))
        assert {shape.numbers for shape in some} == set(get_args(Numbers))
        assert {shape.differentiated for shape in some} == set(get_args(Differentiated))
        assert {True, False, None} == {shape.scale and shape.scale > 0 for shape in some}
        assert any(len(set(shape.layouts)) == 4 for shape in some)
        assert {shape.causal for shape in some} == {True, False}
        assert any(shape.keys < shape.queries for shape in some) and any(shape.keys > shape.queries for shape in some)
        assert any(shape.key_heads < shape.heads for shape in some) and any(shape.window for shape in some)
        hiding = [s for s in some if s.window is not None and (s.queries if s.causal else s.keys) > s.window]
        assert {s.causal for s in hiding} == {True, False}
        assert any(s.key_heads < s.heads for s in hiding) and any(s.window != 1 for s in hiding)
        assert any(s.causal and s.keys < s.queries for s in some)
        assert any(s.window is not None and s.queries > s.keys + s.window for s in some)  # some see nothing
        for tile in (64, 128):
            assert any(s.queries % tile == 0 and s.keys % tile == 0 and s.keys > tile for s in some)
            assert any(s.queries % tile == 1 and s.keys % tile == 1 and s.queries > tile for s in some)
        assert max(s.queries for s in some) > CHUNK
    for shape in shapes:  # what is exact zero would say nothing: no shape is nothing else
        assert shape.window is None or shape.queries < shape.keys + shape.window or shape.queries > 1


def test_longer_calls_are_judged_where_kernels_change_with_the_length():
    """Which configuration a kernel gets depends on the length: one that is timed at 16384 is judged above 1024 too."""
    assert all(shape.queries > LONG for shape in long_shapes())
    assert {shape.head_dim for shape in long_shapes()} == {64, 128}
    assert {shape.causal for shape in long_shapes()} == {True, False}
    assert any(shape.heads != shape.key_heads for shape in long_shapes())
    assert not set(long_shapes()) & set(shapes_of(True, "cpu"))
    assert set(long_shapes()) < set(shapes_of(False, "cuda"))

    def long_ones(implementation: Attention, length: int) -> int:
        shape = AttentionShape(batch=1, heads=16, key_heads=16, queries=length, keys=length, head_dim=64, causal=True)
        cell = AttentionCell(implementation=implementation, dtype="bf16", shape=shape)
        return [shape.queries > LONG for shape in odd_shapes(cell)].count(True)

    assert long_ones("flash", 16384) == 1
    assert long_ones("flash", 1024) == long_ones("flex", 16384) == 0


@pytest.mark.parametrize("scale", [None, 0.3, -0.2])
def test_scores_are_what_the_shape_says(scale: float | None):
    """Before they are rounded to a dtype: each query's around a number of its own, or up and down by a half."""
    sizes = {"batch": 2, "heads": 4, "key_heads": 2, "head_dim": 64, "keys": 90, "scale": scale}

    def scores(numbers: Numbers) -> Tensor:
        shape = square(40, numbers=numbers, **sizes)
        q, k, _, _ = (given.tensor.double() for given in draw_tensors(shape, "fp32", CPU, 0))
        return q @ k.repeat_interleave(2, dim=1).mT * (1 / 8 if scale is None else scale)

    usual = abs(1 if scale is None else scale * 8)
    offset = scores("offset")
    middle = offset.mean(dim=-1)
    assert bool(((middle.abs() > 95) & (middle.abs() < 305)).all())
    assert 0.4 < float((middle > 0).double().mean()) < 0.6
    assert len(set(middle.round(decimals=3).flatten().tolist())) > 300  # of 320 queries
    assert float(offset.std(dim=-1).mean()) == pytest.approx(usual, rel=0.1)
    slopes: dict[Numbers, float] = {"rising": 0.5, "falling": -0.5}
    for numbers, slope in slopes.items():
        keys = torch.arange(90, dtype=torch.float64)
        across = scores(numbers).mean(dim=(0, 1, 2))
        fitted = ((keys - keys.mean()) * across).sum() / ((keys - keys.mean()) ** 2).sum()
        assert float(fitted) == pytest.approx(slope, abs=0.02)


@pytest.mark.parametrize("layout", get_args(Layout))
def test_tensors_lie_in_nothing_else_than_nan(layout: Layout):
    numbers = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    given = GivenTensor.place(numbers, layout, "bf16", CPU)
    strides = {
        "contiguous": (80, 40, 8, 1), "transposed": (80, 8, 16, 1), "strided": (160, 16, 32, 2),
        "one head": (40, 0, 8, 1), "one batch": (0, 40, 8, 1), "one number": (0, 0, 0, 0),
    }  # fmt: skip
    assert given.tensor.shape == numbers.shape and given.tensor.stride() == strides[layout]
    expanded = {"one head": numbers[:, :1], "one batch": numbers[:1], "one number": torch.ones(1)}.get(layout, numbers)
    assert torch.equal(given.tensor, expanded.bfloat16().expand(numbers.shape))
    assert int((~given.memory.isnan()).sum()) == (expanded.numel())
    assert not given.mend()
    given.memory[5] = 1  # before the tensor
    assert given.mend() and bool(given.memory[5].isnan()) and not given.mend()


# ---- what is wrong, and plain calls do not show


Change = Callable[[Tensor], Tensor]


def attention_but_for(
    *, shift: Change | None = None, nothing: float = -math.inf, too_many: int | None = None,
    forgets: Callable[[int, int], bool] = lambda queries, keys: False,
) -> AttentionFunction:  # fmt: skip
    """Attention in fp32, written out. shift: from a row's scores what is subtracted of them, in place of their maximum.
    nothing: the score of a hidden key. too_many: a query that sees the key after it. forgets: of which lengths the last
    key is not seen.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        every = [tensor.float() for tensor in (q, *for_all_heads(q, k, v))]
        scores = every[0] @ every[1].mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        query, key = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])[None, :]
        hidden = torch.zeros_like(query == key)
        if causal or window is not None:
            hidden = hidden_keys(query, key, causal, window)
        if too_many is not None:
            hidden = hidden & ~((query == too_many) & (key == too_many + 1))
        if forgets(q.shape[-2], k.shape[-2]):
            hidden = hidden | (key == k.shape[-2] - 1)
        scores = scores.masked_fill(hidden, nothing)
        finite = torch.where(scores.isinf(), -1e30, scores)
        shifted = finite.detach().amax(dim=-1, keepdim=True) if shift is None else shift(finite.detach())
        exponentials = torch.exp(scores - shifted)
        sums = exponentials.sum(dim=-1, keepdim=True)
        return (exponentials / torch.where(sums == 0, 1, sums) @ every[2]).to(q.dtype)

    return attention


def first_tile(scores: Tensor) -> Tensor:
    """The largest of the first 32 keys that a row sees."""
    seen = (scores > -1e29).cumsum(dim=-1)
    return torch.where((seen > 0) & (seen <= 32), scores, -1e30).amax(dim=-1, keepdim=True)


def last_tile(scores: Tensor) -> Tensor:
    return first_tile(scores.flip(-1))


def without_scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, **_: object) -> Tensor:
    return sdpa(q, k, v, causal=causal, window=window)


def scale_without_sign(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    return sdpa(q, k, v, causal=causal, scale=None if scale is None else abs(scale), window=window)


def values_by_strides_of_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, v.as_strided(v.shape, k.stride()), **options)


class _ByStridesOfOutput(torch.autograd.Function):
    """The identity; its gradient is read as if it lay in memory as the output does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.strides = strides
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].as_strided(gradients[0].shape, ctx.strides).clone(), None


def gradient_by_strides_of_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = _ByStridesOfOutput.apply(sdpa(q, k, v, **options), q.stride())
    assert isinstance(out, Tensor)
    return out


def gradients_only_with_that_of_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, v, **options) if q.requires_grad or not k.requires_grad else sdpa(q, k, v, **options).detach()


def gradients_only_with_those_of_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, v, **options) if k.requires_grad or not q.requires_grad else sdpa(q, k, v, **options).detach()


def second_chunk_lost(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, v, **options) * (torch.arange(q.shape[-2])[:, None] < 256)


def third_batch_lost(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(q, k, v, **options) * (torch.arange(q.shape[0])[:, None, None, None] < 2)


HIDDEN: dict[str, AttentionFunction] = {
    "no scale": without_scale,
    "the scale's sign": scale_without_sign,
    "no maximum": attention_but_for(shift=lambda scores: torch.zeros_like(scores[..., :1])),
    "a maximum of zero or more": attention_but_for(shift=lambda scores: scores.amax(dim=-1, keepdim=True).clamp(min=0)),
    "one maximum for all rows": attention_but_for(shift=lambda scores: scores.amax(dim=(-1, -2), keepdim=True)),
    "the first tile's maximum": attention_but_for(shift=first_tile),
    "the last tile's maximum": attention_but_for(shift=last_tile),
    "weights for who sees nothing": attention_but_for(nothing=-1e9),
    "the last key forgotten": attention_but_for(forgets=lambda queries, keys: keys > 100 and queries > 100),
    "whole tiles of 128": attention_but_for(forgets=lambda queries, keys: keys % 128 == 0),
    "no whole tile of 128": attention_but_for(forgets=lambda queries, keys: keys % 128 == 1 and keys > 1),
    "a key after the diagonal at a tile's end": attention_but_for(too_many=127),
    "the values' strides": values_by_strides_of_keys,
    "the gradient's strides": gradient_by_strides_of_queries,
    "gradients of keys and values alone": gradients_only_with_that_of_queries,
    "the gradient of queries alone": gradients_only_with_those_of_keys,
    "queries from 256 on": second_chunk_lost,
    "batches from the third on": third_batch_lost,
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("dtype", ["bf16", *in_the_interpreter_at_length("fp32", "fp16")])
def test_a_mistake_that_plain_calls_hide_is_refused(name: str, dtype: TensorDtype):
    """Each passes on scores of the size 1, the usual scale, tensors laid out alike and all three gradients."""
    assert judged(HIDDEN[name], *PLAIN, dtype=dtype).passed
    assert not judged(HIDDEN[name], *PROBES, dtype=dtype).passed


def test_attention_with_nothing_planted_passes():
    for dtype in ("fp32", "bf16", "fp16"):
        judged(attention_but_for(), *few_shapes(), dtype=dtype).require()


def test_reading_and_writing_beside_the_tensors_is_seen():
    """One row more than there is, though with no weight: NaN times zero is NaN."""

    def reads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        rows = v.as_strided((*v.shape[:2], v.shape[2] + 1, v.shape[3]), v.stride())
        weights = F.pad(reference(q, k, torch.eye(k.shape[2]).expand(*k.shape[:3], -1), causal=causal), (0, 1))
        return weights @ rows

    def writes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: object) -> Tensor:
        with torch.no_grad():
            v.detach().as_strided((1,), (1,), v.storage_offset() + v.numel()).fill_(0)
        return sdpa(q, k, v, causal=causal)

    assert "out is not finite" in judged(reads, square(33), dtype="fp32").failures[0].sentence
    assert "it writes to v" in judged(writes, square(33), dtype="fp32").failures[0].sentence
