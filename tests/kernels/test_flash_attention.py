"""The FlashAttention kernels against float64: on a GPU, or without one in Triton's interpreter (conftest.py)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.core.errors import InputError
from stepscope.kernels.flash import attention as flash
from stepscope.kernels.flash import launch as flash_launch
from stepscope.kernels.flash import tuning_cache
from stepscope.kernels.flash.attention import FlashAttention, flash_attention
from stepscope.kernels.flash.configuration import (
    LARGEST_TILE,
    BackwardConfiguration,
    ForwardConfiguration,
    Precision,
    Problem,
    Tiles,
    Way,
    default_backward,
    default_forward,
    tiles,
)
from stepscope.kernels.parts import projections
from tests.conftest import in_the_interpreter_at_length

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOOR = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""An error that is no error: a few roundings of numbers of size 1 to 4. Where a query sees one key alone, dP - delta is
the difference of two equal sums, and exactly zero only if both were summed in one order."""


@pytest.fixture(autouse=True)
def _interpreter_with_new_numpy(monkeypatch: pytest.MonkeyPatch):
    """Triton 3.6's interpreter makes ints of arrays of one element, which numpy 2.4 refuses; 3.7's no longer does."""
    if DEVICE == "cpu":
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def inputs(
    *,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (q_shape, k_shape or q_shape, k_shape or q_shape, q_shape)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def written_out(
    tensors: list[Tensor], dtype: torch.dtype, *, causal: bool, window: int | None = None, scale: float | None = None
) -> dict[str, Tensor]:
    """Attention as its definition says, in dtype: out, logsumexp and the three gradients."""
    q, k, v, gradient = (t.detach().to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    query = torch.arange(q.shape[2], device=DEVICE)[:, None]
    key = torch.arange(k.shape[2], device=DEVICE)[None, :]
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (query - key < window) if causal else ((query - key).abs() < window)
    scores = scores.masked_fill(~seen, float("-inf"))
    logsumexp = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - logsumexp.masked_fill(~seen.any(-1), 0)[..., None])
    out = weights @ v.repeat_interleave(group, 1)
    out.backward(gradient)
    return {"out": out.detach(), "logsumexp": logsumexp.detach()} | {
        name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True) if leaf.grad is not None
    }


def ours(tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """The operator, forward and backward."""
    *leaves, gradient = tensors
    leaves = [t.detach().requires_grad_() for t in leaves]
    scale = options.pop("scale", None)
    scale = leaves[0].shape[-1] ** -0.5 if scale is None else scale
    out, logsumexp = torch.ops.stepscope.flash_attention_forward(
        *leaves, options["causal"], scale, options.get("window")
    )
    out.backward(gradient)
    return {"out": out.detach(), "logsumexp": logsumexp.detach()} | {
        name: leaf.grad for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True) if leaf.grad is not None
    }


def assert_as_good_as_written_out(tensors: list[Tensor], **options: Any) -> None:
    """No further from float64 than twice what attention written out in the same dtype is, and finite where it is."""
    dtype = tensors[0].dtype
    truth = written_out(tensors, torch.float64, **options)
    same_dtype = written_out(tensors, dtype, **options)
    for name, got in ours(tensors, **options).items():
        expected = truth[name]
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite), name
        error = (got.double() - expected)[finite].abs().max().item()
        allowed = 2 * (same_dtype[name].double() - expected)[finite].abs().max().item() + FLOOR[dtype]
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


SMALL = tiles(16, 16, 4, 1)
WAYS: dict[str, tuple[ForwardConfiguration, Way, bool]] = {
    "pointers": (ForwardConfiguration(tiles=tiles(32, 16, 4, 1), tma=False), "apart", False),
    "descriptors": (ForwardConfiguration(tiles=tiles(32, 16, 4, 1), rows_first=False), "apart", True),
    "joint": (
        ForwardConfiguration(tiles=tiles(16, 32, 4, 1), tma=False, persistent=True, rows_first=False), "joint", True,
    ),
    "fused": (ForwardConfiguration(tiles=SMALL, tma=False), "fused", False),
}  # fmt: skip
"""Backward has the order of forward's tiles. By descriptors it draws what dropout takes in a kernel of its own."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest):
    forward, name, tma = WAYS[request.param]
    backward = BackwardConfiguration(
        way=name, keys=tiles(16, 32, 4, 1), queries=tiles(32, 16, 4, 1), tma=tma, rows_first=forward.rows_first,
        draw_first=tma,
    )  # fmt: skip
    with tuning_cache.forced(forward=forward, backward=backward):
        yield request.param


@pytest.mark.parametrize("causal", [True, *in_the_interpreter_at_length(False)])
@pytest.mark.parametrize(
    "sizes",  # queries, keys, head_dim, query heads of a key head, window
    [(1, 1, 16, 1, None), (45, 19, 24, 2, None), (45, 33, 16, 1, 7), (33, 50, 16, 1, 40),
     *in_the_interpreter_at_length(
         ((37, 37, 16, 1, None),), ((64, 64, 16, 1, None),), ((19, 45, 40, 1, None),), ((60, 40, 16, 2, 1),))],
)  # fmt: skip
def test_every_way_is_as_good_as_attention_written_out(
    way: str, sizes: tuple[int, int, int, int, int | None], causal: bool
):
    queries, keys, head_dim, group, window = sizes
    tensors = inputs(q_shape=(1, 2, queries, head_dim), k_shape=(1, 2 // group, keys, head_dim))
    assert_as_good_as_written_out(tensors, causal=causal, window=window)


@pytest.mark.parametrize(
    ("sizes", "options"),  # queries, keys, head_dim, query heads of a key head
    [((33, 50, 16, 1), {"causal": False, "window": 7}),
     *in_the_interpreter_at_length(
         ((45, 19, 24, 2), {"causal": True}), ((37, 37, 16, 1), {"causal": True}), ((19, 45, 40, 1), {"causal": False}),
         ((37, 37, 16, 1), {"causal": True, "scale": -0.7}))],
)  # fmt: skip
def test_six_products_of_bf16_are_as_good_as_fp32(way: str, sizes: tuple[int, int, int, int], options: dict[str, Any]):
    queries, keys, head_dim, group = sizes
    tensors = inputs(q_shape=(1, 2, queries, head_dim), k_shape=(1, 2 // group, keys, head_dim))
    with tuning_cache.forced(precision="bf16x6"):
        assert_as_good_as_written_out(tensors, **options)


@pytest.mark.parametrize("few", [True, False])
def test_gradients_of_keys_that_several_heads_read(way: str, few: bool, monkeypatch: pytest.MonkeyPatch):
    """By programs of each head of queries, whose shares are added up, and by programs of a head of keys."""
    monkeypatch.setattr(flash_launch, "has_few_programs", lambda *_: few)
    tensors = inputs(q_shape=(2, 6, 37, 16), k_shape=(2, 2, 41, 16))
    assert (flash_launch.shares_for(tensors[0], tensors[1]) is None) != few
    assert_as_good_as_written_out(tensors, causal=True)


def test_heads_of_keys_of_many_short_sequences_are_not_few():
    """A launch of shares for each could be one of more programs along an axis than CUDA takes."""
    q, k = (torch.empty(32_768, heads, 64, 16, device="meta") for heads in (4, 2))
    assert flash_launch.shares_for(q, k) is None
    assert flash_launch.shares_for(q[:60], k[:60]) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1000, 4096])
def test_gradients_of_few_heads_of_keys_on_a_gpu(length: int):
    """By the kernels in Triton, and by those for Hopper, which get keys for each head of queries."""
    tensors = inputs(q_shape=(1, 8, length, 64), k_shape=(1, 2, length, 64), dtype=torch.bfloat16)
    assert flash_launch.shares_for(tensors[0], tensors[1]) is not None
    assert_as_good_as_written_out(tensors, causal=True)


def columns_of_rows(tensors: list[Tensor]) -> list[Tensor]:
    """q, k and v as the columns of one product's rows."""
    rows = torch.cat([t.transpose(1, 2).flatten(2) for t in tensors], -1)
    heads = rows.unflatten(-1, (-1, tensors[0].shape[3])).transpose(1, 2)
    return [t.detach().requires_grad_() for t in heads.split([t.shape[1] for t in tensors], 1)]


@pytest.mark.parametrize("kv_heads", [2, *in_the_interpreter_at_length(1)])
def test_gradients_lie_side_by_side_where_q_k_and_v_do(way: str, kv_heads: int):
    """Calls alone, operators and many gradients at once give what tensors apart give."""
    q, k, v, gradient = inputs(q_shape=(2, 2, 20, 16), k_shape=(2, kv_heads, 20, 16))
    leaves = columns_of_rows([q, k, v])
    right = ours([q, k, v, gradient], causal=True)
    for attend in (
        lambda *t: flash_attention(*t, causal=True), lambda *t: FlashAttention.apply(*t, True),
        lambda *t: torch.ops.stepscope.flash_attention_forward(*t, True, 0.25, None)[0],
    ):  # fmt: skip
        found = torch.autograd.grad(attend(*leaves), leaves, gradient)
        place = found[0].data_ptr()
        for got, leaf, name in zip(found, leaves, ("dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(got, right[name], rtol=1e-4, atol=1e-5)
            steps = [step for step, size in zip(got.stride(), got.shape, strict=True) if size > 1]
            assert steps == [step for step, size in zip(leaf.stride(), got.shape, strict=True) if size > 1]
            assert got.data_ptr() == place
            place += 4 * got.shape[1] * got.shape[3]
    many = torch.stack([gradient, 2 * gradient])
    out, _ = torch.ops.stepscope.flash_attention_forward(*leaves, True, 0.25, None)
    found = torch.autograd.grad(out, leaves, many, is_grads_batched=True)
    for got, name in zip(found, ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(got, torch.stack([right[name], 2 * right[name]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kv_heads", "compiled"),
    [
        (3, ""), (1, ""), (1, "aot_eager"), (1, "inductor"),
        *in_the_interpreter_at_length((3, "aot_eager"), (3, "inductor")),
    ],
)  # fmt: skip
def test_gradients_of_joint_projections_are_not_copied(kv_heads: int, compiled: str, monkeypatch: pytest.MonkeyPatch):
    """Unless anything comes between, here the sine of queries: then all are."""
    x, *weights = (
        torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(DEVICE).requires_grad_()
        for shape in ((2, 9, 10), (3 * 16, 10), (kv_heads * 16, 10), (kv_heads * 16, 10))
    )
    copied: list[bool] = []

    def beside(gradients: Any) -> Tensor:
        before = gradients[0].data_ptr()
        rows = of_gradients(gradients)
        copied.append(rows.data_ptr() != before)
        return rows

    of_gradients = projections._beside
    monkeypatch.setattr(projections, "_beside", beside)

    def attend(function: Any, turns: bool, *leaves: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 16)).transpose(1, 2) for each in function(leaves[0], leaves[1:]))
        return flash_attention(q.sin() if turns else q, k, v, causal=False).square().sum()

    def apart(x: Tensor, weights: Any) -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    run = torch.compile(attend, fullgraph=True, backend=compiled) if compiled else attend
    for turns in (False, True):
        leaves = [x, *weights]
        found = torch.autograd.grad(run(projections.joint_projections, turns, *leaves), leaves)
        right = torch.autograd.grad(attend(apart, turns, *leaves), leaves)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    assert copied == [False, True]


@pytest.mark.parametrize("head_dim", [16, 24])
def test_the_parts_of_an_operand_sum_to_it(head_dim: int):
    """Bit for bit, over 60 binades: three of bf16's 8 bits hold fp32's 24. By rows, with zeros beyond the head."""
    values = inputs(q_shape=(2, 3, 37, head_dim))[0] * torch.logspace(-9, 9, 37, device=DEVICE)[:, None]
    strided = values.transpose(1, 2).contiguous().transpose(1, 2)
    first, second = flash_launch.parts_for("bf16x6", values, values)
    flash_launch._split(strided, -values, (first, second), flash_launch.launch)
    block_d = flash_launch.block_d_of(head_dim)
    assert first.shape == (2, 3, 37, 3 * block_d)
    for parts, whole in ((first, values), (second, -values)):
        high, middle, low = parts.float().split(block_d, dim=-1)
        assert torch.equal((high + (middle + low))[..., :head_dim], whole)
        assert (parts.view(2, 3, 37, 3, block_d)[..., head_dim:] == 0).all()
        # Triton's interpreter cuts off where a GPU rounds.
        assert ((high[..., :head_dim] - whole).abs() <= whole.abs() / 2**7).all()


def test_heads_may_be_more_than_32_bits_apart():
    """Pages that nothing touches take no memory."""
    apart = 2**30 + 16
    storage = torch.empty(2 * apart + 64, dtype=torch.float16, device=DEVICE)
    strided = storage.as_strided((1, 3, 4, 16), (3 * apart, apart, 16, 1))
    strided.copy_(inputs(q_shape=(1, 3, 4, 16))[0])
    (parts,) = flash_launch.parts_for("bf16x6", strided)
    flash_launch._split(strided, strided, (parts, parts), flash_launch.launch)
    assert torch.equal(parts.float().unflatten(-1, (3, 16)).sum(-2), strided.float())
    few = [strided, *(t.half() for t in inputs(q_shape=(1, 3, 4, 16))[1:])]
    for tensors in (few, few[::-1], [few[1], few[0], few[0], few[2]]):
        expected = ours([t.contiguous() for t in tensors], causal=True)
        for name, got in ours(tensors, causal=True).items():
            assert torch.equal(got, expected[name]), name


def test_split_operands_may_be_one_tensor_and_strided():
    """Self-attention of one tensor, and heads next to each other in memory."""
    one = inputs(q_shape=(1, 2, 40, 16))[0].transpose(1, 2).contiguous().transpose(1, 2)
    with tuning_cache.forced(precision="bf16x6"):
        assert_as_good_as_written_out([one, one, one, one], causal=True)


@pytest.mark.parametrize("way", ["apart", "joint", "fused"])
@pytest.mark.parametrize("precision", ["ieee", "bf16x6"])
def test_no_grid_is_larger_than_devices_allow(way: Way, precision: Precision):
    """Many short sequences: CUDA has 2^31 - 1 blocks in a grid's first dimension, 65535 in the others."""
    grids = []
    q = torch.zeros(70_000, 1, 1, 16, device=DEVICE)
    forward, backward = (torch.zeros(70_000, 1, 1, device=DEVICE) for _ in range(2))
    options: dict[str, Any] = {"causal": True, "scale": 1.0, "window": None, "precision": precision}

    def launcher(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> None:
        grids.append((kernel.__name__, *grid))

    plain = ForwardConfiguration(tiles=SMALL, tma=False)
    flash_launch.launch_forward(q, q, q, q, forward, configuration=plain, launcher=launcher, **options)
    configuration = BackwardConfiguration(way=way, keys=SMALL, queries=SMALL, tma=False)
    statistics = flash_launch.statistics_for(q, configuration)
    tensors = (q, q, q, q, q, backward, q, q, q, statistics)
    flash_launch.run_backward(
        flash_launch.Backward(*tensors, tma=False, launcher=launcher, **options), configuration, backward
    )
    assert len(grids) >= 3 and all(max(rest, default=1) <= 65535 for _, _, *rest in grids), grids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precisions(dtype: torch.dtype, causal: bool):
    assert_as_good_as_written_out(inputs(q_shape=(1, 2, 40, 32), dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale: float, dtype: torch.dtype):
    assert_as_good_as_written_out(inputs(q_shape=(1, 1, 37, 16), dtype=dtype), causal=True, scale=scale)


def test_scores_far_from_zero_neither_overflow_nor_vanish():
    tensors = inputs(q_shape=(1, 1, 40, 16))
    tensors[0] *= 100
    tensors[1] *= 100
    truth = written_out(tensors, torch.float64, causal=False)
    got = ours(tensors, causal=False)
    # Scores near 1e4 carry an absolute error of 1e-3 in fp32, and so do the weights, relatively.
    torch.testing.assert_close(got["out"].double(), truth["out"], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(got["logsumexp"].double(), truth["logsumexp"], rtol=1e-6, atol=0)


def test_rows_that_see_nothing_are_zero_and_pass_no_gradient():
    """With a window of 4, queries from 13 on see none of 10 keys."""
    got = ours(inputs(q_shape=(1, 1, 40, 16), k_shape=(1, 1, 10, 16)), causal=True, window=4)
    assert (got["out"][:, :, 13:] == 0).all() and (got["dq"][:, :, 13:] == 0).all()
    assert (got["logsumexp"][:, :, 13:] == float("-inf")).all()
    assert (got["out"][:, :, 12] != 0).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [20, 50])
def test_a_window_wider_than_the_sequence_is_none(causal: bool, queries: int):
    """As wide as integers go: the kernels add it to positions."""
    tensors = inputs(q_shape=(1, 1, queries, 16), k_shape=(1, 1, 37, 16))
    for widest in (queries if causal else max(queries, 37), 2**31 - 1, 2**63 - 1):
        assert_as_good_as_written_out(tensors, causal=causal, window=widest)
    assert_as_good_as_written_out(tensors, causal=causal, window=(queries if causal else max(queries, 37)) - 1)


def test_strides_are_honoured():
    """Heads next to each other in memory, as a projection leaves them; and a head dimension that is not dense."""
    contiguous = inputs(q_shape=(2, 2, 19, 16))
    expected = ours(contiguous, causal=True)
    by_position = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in contiguous]
    sliced = [torch.stack([t, t], dim=-1)[..., 0] for t in contiguous]
    for strided in (by_position, sliced):
        assert not strided[0].is_contiguous()
        for name, got in ours(strided, causal=True).items():
            assert torch.equal(got, expected[name]), name
    out = flash_attention(*by_position[:3], causal=True)
    assert out.stride() == by_position[0].stride(), "the model's reshape after attention copies nothing"


def test_an_expanded_gradient_is_taken():
    q, k, v, _ = (t.requires_grad_() for t in inputs(q_shape=(1, 2, 20, 16)))
    flash_attention(q, k, v, causal=True).sum().backward()
    ones = [*(t.detach() for t in (q, k, v)), torch.ones_like(q)]
    torch.testing.assert_close(q.grad, written_out(ones, torch.float64, causal=True)["dq"].float())


@pytest.mark.parametrize(
    "attend", [lambda *t: flash_attention(*t, causal=True), lambda *t: FlashAttention.apply(*t, True)]
)
def test_what_is_saved_may_come_back_laid_out_otherwise(attend: Any):
    *leaves, gradient = (t.requires_grad_() for t in inputs(q_shape=(1, 2, 20, 16)))
    expected = torch.autograd.grad(attend(*leaves), leaves, gradient)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.transpose(-1, -2).contiguous()

    with torch.autograd.graph.saved_tensors_hooks(turned, lambda kept: kept.transpose(-1, -2)):
        out = attend(*leaves)
    for got, true in zip(torch.autograd.grad(out, leaves, gradient), expected, strict=True):
        assert torch.equal(got, true)


def test_every_output_is_written(monkeypatch: pytest.MonkeyPatch):
    """The operators allocate without filling; whatever was there before must not show."""

    def poisoned(*size: Any, like: Tensor | None = None, **options: Any) -> Tensor:
        made = real_empty(*size, **options) if like is None else real_empty_like(like, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    real_empty, real_empty_like = torch.empty, torch.empty_like
    tensors = inputs(q_shape=(1, 2, 37, 24), k_shape=(1, 1, 50, 24))
    expected = ours(tensors, causal=True)
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: poisoned(like=like, **options))
    for name, got in ours(tensors, causal=True).items():
        assert torch.equal(got, expected[name]), name


@pytest.mark.parametrize("name", ["pointers", "joint"])
def test_two_runs_agree_bit_for_bit(name: str):
    forward, way_name, tma = WAYS[name]
    backward = BackwardConfiguration(way=way_name, keys=SMALL, queries=SMALL, tma=tma)
    assert backward.deterministic
    tensors = inputs(q_shape=(1, 2, 40, 16), k_shape=(1, 1, 40, 16))
    with tuning_cache.forced(forward=forward, backward=backward):
        first, second = ours(tensors, causal=True), ours(tensors, causal=True)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_the_function_takes_any_leading_dimensions_and_saves_the_logsumexp():
    for shape in ((9, 16), (2, 9, 16), (2, 1, 2, 9, 16)):
        q, k, v, gradient = inputs(q_shape=shape)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = FlashAttention.apply(q, k, v, True)
        saved = [t for t in out.grad_fn.saved_tensors if t.shape == shape[:-1]]
        assert len(saved) == 1
        flat = [t.reshape(1, -1, 9, 16) for t in (q, k, v, gradient)]
        truth = written_out(flat, torch.float64, causal=True)
        torch.testing.assert_close(saved[0].flatten(), truth["logsumexp"].float().flatten())
        out.backward(gradient)
        for got, name in ((out, "out"), (q.grad, "dq"), (k.grad, "dk"), (v.grad, "dv")):
            assert got is not None
            torch.testing.assert_close(got.flatten(), truth[name].float().flatten(), rtol=1e-4, atol=1e-5)


def test_the_logsumexp_has_a_gradient():
    q, k, v, _ = inputs(q_shape=(1, 1, 20, 16))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.ops.stepscope.flash_attention_forward(*leaves, True, 0.25, None)[1].sum().backward()
    got = q.grad
    exact = q.detach().double().requires_grad_()
    scores = exact @ k.detach().double().transpose(-1, -2) * 0.25
    hidden = torch.ones(20, 20, dtype=torch.bool, device=DEVICE).triu(1)
    torch.logsumexp(scores.masked_fill(hidden, float("-inf")), -1).sum().backward()
    assert got is not None and exact.grad is not None
    torch.testing.assert_close(got.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_the_operators_keep_the_rules_of_torch_library():
    q, k, v, gradient = inputs(q_shape=(1, 2, 6, 16), k_shape=(1, 1, 5, 16))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.stepscope.flash_attention_forward.default, (*leaves, True, 0.25, None))
    detached = [t.detach() for t in leaves]
    out, logsumexp = torch.ops.stepscope.flash_attention_forward(*detached, True, 0.25, None)
    torch.library.opcheck(
        torch.ops.stepscope.flash_attention_backward.default,
        (gradient, None, *detached, out, logsumexp, True, 0.25, None),
    )
    columns = columns_of_rows([q, q, q])
    torch.library.opcheck(torch.ops.stepscope.flash_attention_forward.default, (*columns, True, 0.25, None))
    saved = [t.detach() for t in columns]
    out, logsumexp = torch.ops.stepscope.flash_attention_forward(*saved, True, 0.25, None)
    torch.library.opcheck(
        torch.ops.stepscope.flash_attention_backward.default,
        (gradient, None, *saved, out, logsumexp, True, 0.25, None),
        {"width": 3 * 2 * 16},
    )


def test_compile_breaks_no_graph():
    q, k, v, _ = inputs(q_shape=(1, 2, 20, 16))
    compiled = torch.compile(lambda q, k, v: flash_attention(q * 2, k, v, causal=True), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), flash_attention(q * 2, k, v, causal=True))


def test_fake_tensors_and_the_flop_counter_see_it():
    """4 B H S T D forward and 10 backward: two products, then five."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, k, v = (
            torch.empty(2, 4, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        out = flash_attention(q, k, v, causal=True)
        assert out.shape == q.shape and out.dtype == q.dtype
        out.sum().backward()
    assert counter.get_total_flops() == 14 * 2 * 4 * 128 * 128 * 64


@pytest.mark.parametrize("attend", [lambda *t: flash_attention(*t, causal=True), FlashAttention.apply])
def test_tensors_without_data_have_a_result_without_data(attend: Any):
    q, k, v = (torch.empty(2, 20, heads, 16, device="meta").transpose(1, 2).requires_grad_() for heads in (4, 2, 2))
    out = attend(q, k, v)
    assert out.is_meta and out.shape == q.shape and out.stride() == q.stride()
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and k.grad.is_meta and k.grad.shape == k.shape


def test_a_call_repeated_on_other_tensors_is_no_other_call():
    """Launches are recorded: whether tensors were one and the same, or lay askew in memory, must not be."""
    one, other, third, gradient = inputs(q_shape=(1, 2, 32, 16), dtype=torch.float16, seed=1)
    askew = [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (one, other, third, gradient)]
    for tensors in ([one, one, one, one], [one, other, third, gradient], [other, one, one, third], askew):
        assert_as_good_as_written_out(tensors, causal=True)
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        flash_attention(leaves[0], leaves[1], leaves[2], causal=True).backward(tensors[3])
        expected = ours(tensors, causal=True)
        for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
            assert leaf.grad is not None and torch.equal(leaf.grad, expected[name]), name


def test_an_eager_call_is_seen_by_who_counts_and_profiles():
    q, k, v, gradient = (t.requires_grad_() for t in inputs(q_shape=(1, 2, 32, 16)))
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, causal=True).backward(gradient)
    assert counter.get_total_flops() == 14 * 2 * 32 * 32 * 16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flash_attention(q, k, v, causal=True).backward(gradient)
    names = {event.key for event in profile.key_averages()}
    assert {"stepscope::flash_attention_forward", "stepscope::flash_attention_backward"} <= names


def test_a_second_derivative_is_refused_and_not_zero():
    q, k, v, _ = (t.requires_grad_() for t in inputs(q_shape=(1, 1, 20, 16)))
    (dq,) = torch.autograd.grad(flash_attention(q, k, v, causal=True).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "options", "says"),
    [
        ((2, 2, 8, 16), (2, 3, 8, 16), {}, "heads of k must divide"),
        ((2, 2, 8, 16), (2, 2, 8, 32), {}, "agree in batch and head_dim"),
        ((2, 2, 8, 512), (2, 2, 8, 512), {}, "1 to 256, not 512"),
        ((2, 2, 0, 16), (2, 2, 8, 16), {}, "empty sequence"),
        ((2, 8, 16), (2, 8, 16), {}, r"takes q \(B, H, S, D\)"),
        ((2, 2, 8, 16), (2, 2, 8, 16), {"window": 0}, "window of 1 or more"),
        ((2, 2, 8, 16), (2, 2, 8, 16), {"window": 2.5}, "window of 1 or more whole positions, not 2.5"),
        ((2, 2, 8, 16), (2, 2, 8, 16), {"dtype": torch.float64}, "fp32, fp16 or bf16"),
    ],
)
def test_wrong_input_is_one_clear_error(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], options: dict[str, Any], says: str
):
    dtype = options.pop("dtype", torch.float32)
    q, k = torch.zeros(q_shape, dtype=dtype, device=DEVICE), torch.zeros(k_shape, dtype=dtype, device=DEVICE)
    with pytest.raises(InputError, match=says) as failure:
        flash_attention(q, k, k, causal=False, **options)
    assert "\n" not in str(failure.value) and "flash" in str(failure.value)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("bytes_per_element", [2, 4])
def test_defaults_are_tiles_that_triton_takes(capability: tuple[int, int], bytes_per_element: int):
    for head_dim in (1, 16, 64, 80, 128, 192, 256):
        problem = Problem(
            capability=capability, head_dim=head_dim, bytes_per_element=bytes_per_element, causal=True, log2_queries=12
        )
        backward = default_backward(problem)
        chosen: list[Tiles | None] = [default_forward(problem).tiles, backward.keys, backward.queries]
        for each in chosen:
            assert each is not None
            for block in (each.block_m, each.block_n):
                assert 16 <= block <= LARGEST_TILE and block & (block - 1) == 0
        assert backward.way != "fused", "but for the kernels for Hopper, defaults repeat themselves bit for bit"
        assert backward.deterministic == (backward.hopper is None)
        assert problem.capability >= (9, 0) or not backward.tma
    assert flash.MAX_HEAD_DIM == 256


def test_the_kernels_are_known_as_attention_by_their_names():
    """As a trace has them: the names of the functions."""
    from stepscope.traces.kernels.families import classify

    kernels = {
        name for name, value in vars(flash_launch).items() if hasattr(value, "fn") and hasattr(value, "arg_names")
    }
    assert len(kernels) == 11
    assert {classify(name) for name in kernels} == {"attention (fused)"}


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((4, 8, 16), (2, 8, 16)), ((2, 3, 2, 8, 16), (3, 2, 2, 8, 16)), ((1, 2, 8, 16), (2, 8, 16))],
)
def test_the_function_pairs_no_leading_dimensions_that_differ(queries: tuple[int, ...], keys: tuple[int, ...]):
    """Batches are no grouped heads: in four dimensions alone it is said which the heads are."""
    with pytest.raises(InputError, match=r"attention flash takes .* of the same leading dimensions"):
        FlashAttention.apply(torch.zeros(queries), torch.zeros(keys), torch.zeros(keys))


def test_without_a_gpu_and_without_the_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash_launch, "interpreted", lambda: False)
    q = torch.zeros(1, 2, 8, 16, requires_grad=True)
    for call in (lambda: flash_attention(q, q, q, causal=True), lambda: FlashAttention.apply(q, q, q)):
        with pytest.raises(InputError, match=r"NVIDIA GPU.*lie on cpu.*choose another attention"):
            call()
