"""Gradients of query, key and value that a compiled graph takes as rows where they lie: which ones, and the numbers."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from torch._inductor import config

from stepscope.kernels import operators
from stepscope.kernels.flash.attention import flash_attention
from stepscope.training.attention import implementation
from stepscope.training.attention.pytorch import swap_attention
from tests.conftest import at_length
from tests.kernels.parts.test_parts import DEVICE, normal
from tests.kernels.parts.test_sums_in_norms import Joint, gradients, same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
    ),
]

HEADS, D = 2, 16
M = HEADS * D


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attend(*columns: Tensor) -> Tensor:
    """Attention of columns (B, S, H D) or (B, S, H, D)."""
    q, k, v = (each.unflatten(2, (-1, D)) if each.dim() == 3 else each for each in columns)
    out = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
    return out.transpose(1, 2).flatten(2)


def split(y: Tensor) -> Tensor:
    """As in GPT-2."""
    return attend(*y.split(M, dim=2))


def stacked(y: Tensor) -> Tensor:
    """As in timm's ViT: autograd stacks the gradients, and turns dimensions behind that."""
    q, k, v = y.unflatten(2, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)
    return flash_attention(q, k, v, causal=False).transpose(1, 2).flatten(2)


def stacked_inside(y: Tensor) -> Tensor:
    return attend(*y.unflatten(2, (3, HEADS, D)).unbind(2))


def fewer_heads(y: Tensor) -> Tensor:
    return attend(*y.split([4 * D, D, D], dim=2))


def of_two_layers(y: Tensor) -> Tensor:
    return split(y) + stacked(y.sin())


def values_second(y: Tensor) -> Tensor:
    q, v, k = y.split(M, dim=2)
    return attend(q, k, v)


def stacked_backwards(y: Tensor) -> Tensor:
    v, k, q = y.unflatten(2, (3, HEADS, D)).permute(2, 0, 3, 1, 4).unbind(0)
    return flash_attention(q, k, v, causal=False).transpose(1, 2).flatten(2)


def of_each_head(y: Tensor) -> Tensor:
    """As in GPT-NeoX, where the three columns of a head lie side by side."""
    return attend(*y.unflatten(2, (HEADS, 3 * D)).chunk(3, dim=-1))


def beside_a_gate(y: Tensor) -> Tensor:
    *columns, gate = y.split(M // 2, dim=2)[2:]
    return attend(*columns) * gate.sin()


def read_twice(y: Tensor) -> Tensor:
    q, k, v = y.split(M, dim=2)
    return attend(q, k, v) + attend(v, q, k)


class Noted(torch.autograd.Function):
    """One tensor as it is; the gradient of another is the sum of its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, other: Tensor) -> Tensor:
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].sum()


def gradient_read_twice(y: Tensor) -> Tensor:
    q, k, v = y.split(M, dim=2)
    return attend(Noted.apply(q, y.sum()), k, v)  # pyright: ignore[reportArgumentType]


def gradients_by_rows(function: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> tuple[int, int]:
    """Concatenations of a graph as it is and behind the pass, if the numbers of both are the same bits."""
    found, cats = [], []
    for apart in (True, False):
        torch._dynamo.reset()
        joint = Joint(apart=apart, change=operators.columns_as_rows)
        compiled = torch.compile(function, backend=joint.backend, fullgraph=True, dynamic=dynamic)
        found.append(gradients(compiled, *inputs))
        (graph,) = joint.graphs
        cats.append(len(graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)))
        assert all(node.users or node.op != "call_function" for node in graph.nodes)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[0], gradients(function, *inputs), rtol=1e-5, atol=1e-5)
    return cats[0], cats[1]


@pytest.mark.parametrize(
    ("attention", "cats"),
    [
        (split, (1, 0)),
        (stacked, (1, 0)),
        (stacked_inside, (1, 0)),
        (fewer_heads, (1, 0)),
        (of_two_layers, (2, 0)),
        (values_second, (1, 1)),
        (stacked_backwards, (1, 1)),
        (of_each_head, (1, 1)),
        (beside_a_gate, (1, 1)),
        (read_twice, (1, 1)),
        (gradient_read_twice, (1, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_layer_takes_its_gradient_as_attention_leaves_it(attention: Callable[[Tensor], Tensor], cats: Any):
    """Where it has the order of the layer's columns, and nobody else reads it."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return attention(x @ weight)

    inputs = normal(2, 8, 4, dtype=torch.float32), normal(4, 3 * M, dtype=torch.float32)
    assert gradients_by_rows(function, *inputs) == cats


@pytest.mark.parametrize("attention", [split, *at_length(stacked)])
def test_lengths_may_be_unknown(attention: Callable[[Tensor], Tensor]):
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return attention(x @ weight)

    inputs = normal(2, 8, 4, dtype=torch.float32), normal(4, 3 * M, dtype=torch.float32)
    assert gradients_by_rows(function, *inputs, dynamic=True) == (1, 0)


def test_the_rows_may_be_a_result_of_the_graph():
    assert gradients_by_rows(split, normal(2, 8, 3 * M, dtype=torch.float32)) == (1, 0)


def test_no_gradient_of_a_gpt2_is_put_together():
    """By the passes that a compiled step has."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_embd=M, n_layer=2, n_head=HEADS, n_positions=8, use_cache=False)
    ).to(DEVICE)
    swap_attention(model.eval(), "flash", implementation("flash"))
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    found, cats = [], []
    for apart in (True, False):
        torch._dynamo.reset()
        with config.patch(joint_custom_pre_pass=None):
            operators.use_graph_passes()
            joint = Joint(apart=apart, change=config.joint_custom_pre_pass)
        loss = torch.compile(model, backend=joint.backend)(input_ids=tokens, labels=tokens).loss
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
        targets = [node.target for graph in joint.graphs for node in graph.nodes]
        cats.append(targets.count(torch.ops.aten.cat.default))
    same(found[1], found[0])
    assert cats == [2, 0]
