"""FlashAttention-2 tile by tile: its derivative, its logsumexp, what it keeps, what it visits."""

import itertools
import math

import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.kernels.flash.tiled import KEY_TILE, QUERY_TILE, FlashAttentionTiled, Sight, flash_tiled
from stepscope.training.attention.written_out import reference
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini, run_steps


def numbers(*sizes: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (66, 66), (65, 3), (3, 65)])
def test_backward_is_the_derivative_of_forward(queries: int, keys: int, causal: bool):
    """By finite differences in float64, where tiles are crossed too."""
    q, k, v = numbers(1, queries, 2, seed=1), numbers(1, keys, 2, seed=2), numbers(1, keys, 2, seed=3)
    assert torch.autograd.gradcheck(lambda *t: FlashAttentionTiled.apply(*t, causal), (q, k, v), fast_mode=queries > 5)


@pytest.mark.parametrize("window", [1, 3, 70])
def test_and_so_it_is_with_a_window_grouped_heads_and_a_scale(window: int):
    q, k, v = numbers(1, 4, 70, 3, seed=1), numbers(1, 2, 66, 3, seed=2), numbers(1, 2, 66, 3, seed=3)
    for causal in (True, False):
        assert torch.autograd.gradcheck(
            lambda *t, causal=causal: flash_tiled(*t, causal=causal, scale=0.3, window=window),
            (q, k, v),
            fast_mode=True,
        )


def test_it_refuses_a_second_derivative_instead_of_a_wrong_one():
    q, k, v = (numbers(1, 4, 2, seed=i) for i in range(3))
    (gradient,) = torch.autograd.grad(FlashAttentionTiled.apply(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_it_takes_any_leading_dimensions_and_saves_five_tensors(leading: tuple[int, ...]):
    q, k, v = (numbers(*leading, 70, 8, seed=i) for i in range(3))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = FlashAttentionTiled.apply(q, k, v, True)
    assert isinstance(out, torch.Tensor)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -math.inf)
    assert torch.allclose(out, scores.softmax(-1) @ v, atol=1e-12)
    (logsumexp,) = (t for t in saved if t.shape == (*leading, 70))
    assert torch.allclose(logsumexp, scores.logsumexp(-1), atol=1e-12)
    assert len(saved) == 5
    numbers_kept = sum(tensor.numel() for tensor in saved)
    assert numbers_kept == (4 * 8 + 1) * 70 * math.prod(leading)  # and nothing of the size 70 x 70


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype: torch.dtype):
    """4096 equal weights: summed in bf16 they would stop growing at 256, in fp16 at 2048."""
    q, k = torch.zeros(1, 1, 16, dtype=dtype), torch.zeros(1, 4096, 16, dtype=dtype)
    v = torch.ones(1, 4096, 16, dtype=dtype)
    assert torch.equal(FlashAttentionTiled.apply(q, k, v), torch.ones(1, 1, 16, dtype=dtype))


def test_autocast_does_not_take_its_sums_to_16_bits():
    q, k, v = (numbers(2, 3, 90, 16, dtype=torch.float32, seed=i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_tiled(q, k, v, causal=True)
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))  # as autocast makes them; the sums are in fp32 all the same
    assert out.dtype == torch.bfloat16 and torch.equal(out, flash_tiled(q, k, v, causal=True))
    exact = reference(q.double(), k.double(), v.double(), causal=True)
    assert float((out - exact).detach().norm() / exact.detach().norm()) < 2**-8


def test_scores_beyond_the_range_of_exp():
    q = torch.full((1, 2, 4), 400.0)
    k = torch.tensor([400.0, -400.0])[None, :, None].expand(1, 2, 4)
    v = torch.tensor([1.0, 2.0])[None, :, None].expand(1, 2, 4)
    out = FlashAttentionTiled.apply(q, k, v)
    assert torch.equal(out, torch.ones(1, 2, 4))


def test_rows_without_a_key_are_zeros_and_have_no_gradient():
    q, k, v = numbers(1, 1, 9, 4, seed=1), numbers(1, 1, 3, 4, seed=2), numbers(1, 1, 3, 4, seed=3)
    out = flash_tiled(q, k, v, causal=True, window=2)  # query 4 would see keys 3 and 4; there are 0, 1, 2
    assert bool((out[:, :, 4:] == 0).all()) and bool((out[:, :, :4] != 0).all())
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][:, :, 4:] == 0).all())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 64, 65, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 64), (200, 200), (130, 300), (300, 130)])
def test_the_tiles_visited_are_those_in_which_anything_is_seen(
    queries: int, keys: int, window: int | None, causal: bool
):
    """And those that are not masked are those in which all is."""
    sight = Sight(queries=queries, keys=keys, causal=causal, window=window)
    query, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (query - key).abs() < window
    visited: set[tuple[int, int]] = set()
    for rows in sight.query_tiles():
        for columns in sight.key_tiles(rows):
            visited.add((rows.start, columns.start))
            tile = seen[rows, columns]
            assert sight.sees_all(rows, columns) == bool(tile.all())
            assert torch.equal(sight.hidden(rows, columns, torch.device("cpu")), ~tile)
    corners = itertools.product(range(0, queries, QUERY_TILE), range(0, keys, KEY_TILE))
    assert visited == {(i, j) for i, j in corners if seen[i : i + QUERY_TILE, j : j + KEY_TILE].any()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_trains_the_model_as_the_reference_does(dtype: str):
    losses = [
        run_steps(TrainingStep(mini(attention=attention, dtype=dtype, seq_len=80), torch.device("cpu")), 3)
        for attention in ("reference", "flash-tiled")
    ]
    assert losses[0] is not None
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if dtype == "fp32" else 2e-3)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (((3, 2, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8)), "the same leading dimensions"),
        (((4, 4, 8), (1, 4, 8), (1, 4, 8)), "the same leading dimensions"),
        (((4, 8), (4, 16), (4, 16)), "k, v"),
        (((4, 8), (4, 8), (3, 8)), "k, v"),
        (((8,), (8,), (8,)), "k, v"),
        (((4, 8), (0, 8), (0, 8)), "empty sequence"),
        (((4, 0), (4, 0), (4, 0)), "empty sequence or head"),
    ],
)
def test_what_the_loops_would_broadcast_or_stumble_over_is_refused(sizes: tuple[tuple[int, ...], ...], says: str):
    with pytest.raises(InputError, match=f"attention flash-tiled .*{says}"):
        FlashAttentionTiled.apply(*(torch.zeros(size) for size in sizes))


def test_several_dtypes_or_whole_numbers_are_refused():
    q = torch.zeros(4, 8)
    for others in ((q.half(), q.half()), (q, q.double())):
        with pytest.raises(InputError, match="one floating dtype on one device"):
            FlashAttentionTiled.apply(q, *others)
    with pytest.raises(InputError, match="one floating dtype"):
        FlashAttentionTiled.apply(*(torch.zeros(4, 8, dtype=torch.int64) for _ in range(3)))
    with pytest.raises(InputError, match="a window of 1 or more, not 0"):
        FlashAttentionTiled.apply(q, q, q, False, None, 0)
