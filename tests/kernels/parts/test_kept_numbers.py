"""What the dropouts of a compiled graph keep, drawn by one kernel: shares, gradients, and what is left alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.kernels import launching, operators
from stepscope.kernels.flash.attention import flash_attention
from stepscope.kernels.parts.norm import rms_norm
from tests.kernels.parts import test_sums_in_norms
from tests.kernels.parts.test_parts import DEVICE

pytestmark = test_sums_in_norms.pytestmark


@pytest.fixture(autouse=True)
def _compiled_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few numbers are drawn together, too: as many as the interpreter draws in little time."""
    monkeypatch.setattr(launching, "_LEAST_DRAWN", 1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def kept_of(seed: int, count: int, rate: float) -> Tensor:
    return launching.kept_numbers(torch.tensor([seed], device=DEVICE), count, rate)


@pytest.mark.parametrize("rate", [2.0**-8, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_rate_says(rate: float) -> None:
    kept = kept_of(0, 40_001, rate)
    assert kept.shape == (40_001,) and kept.dtype == torch.bool
    assert abs(kept.double().mean() - (1 - rate)) < 5 * (rate * (1 - rate) / len(kept)) ** 0.5
    assert kept_of(0, 40_001, rate).equal(kept) and not kept_of(1, 40_001, rate).equal(kept)


def test_of_no_numbers_none_is_drawn() -> None:
    assert kept_of(0, 0, 0.5).shape == (0,)


def test_neighbours_are_kept_independently() -> None:
    drawn = kept_of(0, 65_536, 0.25).double()
    for apart in (1, 2, 8, 1024, 2048, 8192):
        both = (drawn[apart:] * drawn[:-apart]).mean()
        assert abs(both - 0.75**2) < 5 * (0.5625 * 0.4375 / len(drawn)) ** 0.5, apart


def _dropped_twice(x: Tensor, weight: Tensor) -> Tensor:
    out = rms_norm(F.dropout(x, 0.25), None, weight, 1e-5)[1]
    return F.dropout(out, 0.5) + F.dropout(x, 0.5)


def _graphs(function: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> tuple[list[str], Tensor]:
    """The targets of the joint graphs behind the pass, and the result."""
    targets: list[str] = []

    def run(graph: torch.fx.Graph) -> None:
        launching.draws_together(graph)
        graph.lint()
        targets.extend(str(node.target) for node in graph.nodes)

    with config.patch(joint_custom_pre_pass=run, fx_graph_cache=False):
        out = torch.compile(function, fullgraph=True, **options)(*tensors)
        out.sum().backward()
    return targets, out


def test_backward_drops_what_forward_drops() -> None:
    torch.manual_seed(0)
    x = (torch.rand(96, 33, device=DEVICE) + 1).requires_grad_()
    weight = torch.ones(33, device=DEVICE)

    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25) * rms_norm(x.detach(), None, weight, 1e-5)[1]

    targets, out = _graphs(function, x)
    assert targets.count("stepscope.kept_numbers.default") == 1 and "aten.rand.default" not in targets
    assert x.grad is not None
    assert torch.equal(out == 0, x.grad == 0) and 0.2 < (out == 0).double().mean() < 0.3
    normed = rms_norm(x.detach(), None, weight, 1e-5)[1]
    kept = out != 0
    torch.testing.assert_close(x.grad[kept], normed[kept] / 0.75)
    torch.testing.assert_close(out[kept], (x * normed)[kept] / 0.75)


def test_each_rate_has_one_draw_and_each_dropout_numbers_of_its_own() -> None:
    torch.manual_seed(0)
    x = (torch.rand(64, 32, device=DEVICE) + 1).requires_grad_()
    targets, _ = _graphs(_dropped_twice, x, torch.ones(32, device=DEVICE))
    assert targets.count("stepscope.kept_numbers.default") == 2 and "aten.rand.default" not in targets


def _beside_attention(x: Tensor) -> tuple[Tensor, Tensor]:
    """A product of x and numbers that dropouts decide, and attention with one of its own."""
    q = torch.zeros(2, 2, 16, 16, device=DEVICE)
    attended = flash_attention(q, q, x.view(q.shape).sin(), causal=False, dropout=0.5)
    return F.dropout(x, 0.5) + 2 * F.dropout(x, 0.25) + 8 * x * (torch.rand_like(x) < 0.5), attended


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_graph_draws_the_same_again(reentrant: bool) -> None:
    """Reentrant, the first graph is one without gradients, whose calls a compiler puts in another order."""
    torch.manual_seed(0)
    x = (torch.rand(64, 16, device=DEVICE) + 1).requires_grad_()
    with config.patch(joint_custom_pre_pass=launching.draws_together, fx_graph_cache=False):
        compiled = torch.compile(_beside_attention, fullgraph=True)
        out, _ = checkpoint(compiled, x, use_reentrant=reentrant)  # pyright: ignore[reportGeneralTypeIssues]
        out.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(out, x * x.grad)


def _two_attentions(v: Tensor) -> Tensor:
    """Attention to all keys alike, of which each call drops others: linear in v."""
    q = torch.zeros(1, 2, 16, 16, device=DEVICE)
    return flash_attention(q, q, v, causal=False, dropout=0.5) + 3 * flash_attention(q, q, v, causal=False, dropout=0.5)


@pytest.mark.parametrize("way", [None, True, False])
def test_the_seeds_of_all_attention_are_drawn_at_once(way: bool | None) -> None:
    """Each attention has its own, and backward and a checkpoint, reentrant or not, have forward's."""
    torch.manual_seed(0)
    v = torch.ones(1, 2, 16, 16, device=DEVICE, requires_grad=True)
    draws: list[Any] = []

    def run(graph: torch.fx.Graph) -> None:
        operators.seeds_together(graph)
        graph.lint()
        draws.extend((*node.args[:2], tuple(node.args[2])) for node in graph.nodes if "randint" in str(node.target))

    with config.patch(joint_custom_pre_pass=run, fx_graph_cache=False):
        compiled: Any = torch.compile(_two_attentions, fullgraph=True)
        out = compiled(v) if way is None else checkpoint(compiled, v, use_reentrant=way)
        out.sum().backward()
    assert v.grad is not None
    torch.testing.assert_close((v.grad * v).sum(), out.sum())
    assert set(draws) == {(0, operators.SEEDS_END, (4,))}
    # Rows keep so many of their 16 keys: the sum of both calls' is no multiple of four as it would be of equal masks.
    kept = out[..., 0] * 16 / 2
    assert (kept.round() % 4 != 0).any() and torch.allclose(kept, kept.round(), atol=1e-3)


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(x, 0.25) * weight


def _seldom(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(rms_norm(x, None, weight, 1e-5)[1], 0.001)


def _checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    run: Any = checkpoint(lambda x: F.dropout(rms_norm(x, None, weight, 1e-5)[1].sin(), 0.25), x, use_reentrant=False)
    return run


@pytest.mark.parametrize("function", [_plain, _seldom, _checkpointed])
def test_the_compiler_draws_what_is_not_ours(function: Callable[..., Tensor]) -> None:
    x = torch.rand(64, 32, device=DEVICE, requires_grad=True)
    targets, _ = _graphs(function, x, torch.ones(32, device=DEVICE))
    assert "stepscope.kept_numbers.default" not in targets


def test_the_compiler_draws_where_shapes_change_or_it_draws_as_eager_does() -> None:
    x = torch.rand(64, 32, device=DEVICE, requires_grad=True)
    weight = torch.ones(32, device=DEVICE)
    targets, _ = _graphs(_dropped_twice, x, weight, dynamic=True)
    assert "aten.rand.default" in targets
    torch._dynamo.reset()
    with config.patch(fallback_random=True):
        targets, _ = _graphs(_dropped_twice, x, weight)
    assert "stepscope.kept_numbers.default" not in targets


def test_few_numbers_are_left_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.rand(64, 32, device=DEVICE, requires_grad=True)
    targets, _ = _graphs(_dropped_twice, x, torch.ones(32, device=DEVICE))
    assert "stepscope.kept_numbers.default" not in targets
