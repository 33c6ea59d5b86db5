"""Sums that a compiled graph hands to the norms beside them: which, the numbers, and the graphs kept on disk."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.kernels import operators
from stepscope.kernels.parts.norm import layer_norm, rms_norm
from stepscope.training.parts.replaced import replace_parts
from tests.kernels.parts.test_parts import DEVICE, normal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
    ),
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Joint:
    """A compiler that runs the pass on the graph of both directions, and PyTorch's own partitioner."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.saved: list[int] = []
        run: Any = lambda module, _: make_boxed_func(module.forward)  # noqa: E731
        self.backend = aot_autograd(fw_compiler=run, partition_fn=self._cut)

    def _cut(self, module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        operators.sums_into_norms(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        forward, backward = min_cut_rematerialization_partition(module, inputs, compiler="inductor", **options)
        self.saved.append(sum(node.op == "placeholder" for node in backward.graph.nodes))
        return forward, backward

    def compile(self, function: Any) -> Any:
        return torch.compile(function, backend=self.backend, fullgraph=True)

    def sums(self) -> tuple[int, int]:
        """How many norms make the sum before them, and how many the one of their gradients."""
        norms = [(str(node.target), node.args) for graph in self.graphs for node in graph.nodes]
        of_norms = [(name, args[1]) for name, args in norms if name.startswith("stepscope.")]
        forward, backward = (
            sum(which in name and given is not None for name, given in of_norms) for which in ("forward", "backward")
        )
        return forward, backward


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    of = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*of)
    upstream = torch.linspace(-1, 1, result.numel(), device=DEVICE, dtype=result.dtype).view(result.shape)
    return [result, *torch.autograd.grad(result, of, upstream)]


M = 8


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, None, weight, 1e-5)[1]


def residual(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Two sums, of which each has a norm, and is read again later; the last one is none of a norm."""
    s = x + norm(x, weight) @ by
    s = s + norm(s, weight) @ by
    return s + norm(s, weight).sin()


def of_layer_norms(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Under autocast, without a bias and with one; the last norm stands behind the sum, as BERT's do."""
    s = x + layer_norm(x, weight, None, 1e-5).bfloat16() @ by.bfloat16()
    s = s + layer_norm(s, weight, 2 * weight, 1e-5) @ by
    return layer_norm(s + s.sin() @ by, weight, weight.sin(), 1e-5)


def no_later_reader(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + x @ by, weight)


def with_alpha(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.add(x, x @ by, alpha=2), weight)


def with_number(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm((x @ by) + 1.0, weight)


def broadcast(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + x[:1] @ by, weight)


def two_norms(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Of one sum, of which one makes it; backward's three gradients are added by both."""
    s = x + x @ by
    return s + norm(s, weight) @ by + norm(s, 2 * weight).sin() @ by


def transposed(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm((x + x @ by).mT.contiguous().mT + (x @ by).mT.contiguous().mT, weight[:4].repeat(2))


def of_what_is_fused(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + (x @ by).sin().view(x.shape), weight)


def weight_made_later(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    s = x + x @ by
    return s + norm(s, 1 + weight) @ by


def weight_made_of_the_sum(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Neither sum can be the norm's: its weight needs the one, and the other the gradient of its weight."""
    s = x + x @ by
    return norm(s, weight * s.square().mean())


def mixed(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """As under autocast: the residual in fp32, and what is added in bf16."""
    s = x + (x.bfloat16() @ by.bfloat16())
    return s + norm(s, weight).square()


def double_and_single(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + (x @ by).double(), weight.double()).float()


def of_itself(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    s = x @ by
    return s + norm(s + s, weight)


@pytest.mark.parametrize(
    ("function", "sums"),
    [
        (residual, (2, 3)),
        (of_layer_norms, (2, 2)),
        (no_later_reader, (1, 0)),
        (with_alpha, (0, 0)),
        (with_number, (0, 0)),
        (broadcast, (0, 0)),
        (two_norms, (1, 2)),
        (transposed, (0, 0)),
        (of_what_is_fused, (0, 0)),
        (weight_made_later, (1, 1)),
        (weight_made_of_the_sum, (0, 0)),
        (mixed, (1, 1)),
        (double_and_single, (0, 0)),
        (of_itself, (1, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_norm_makes_the_sums_that_are_its_own(function: Callable[..., Tensor], sums: tuple[int, int]):
    inputs = [normal(4, 3, M, dtype=torch.float32), normal(M, M, dtype=torch.float32), normal(M, dtype=torch.float32)]
    if function is transposed:
        inputs[0] = normal(4, M, M, dtype=torch.float32)
    joint = Joint()
    found, right = gradients(joint.compile(function), *inputs), gradients(function, *inputs)
    torch.testing.assert_close(found, right, rtol=2e-2 if function in (mixed, of_layer_norms) else 1e-5, atol=1e-5)
    assert joint.sums() == sums
    for value in (node.meta["val"] for graph in joint.graphs for node in graph.nodes if node.op == "call_function"):
        assert all(isinstance(each, Tensor) for each in ((value,) if isinstance(value, Tensor) else value))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_llama_has_no_sum_beside_a_norm(dynamic: bool):
    """The numbers are those of its operators apart, and no more is saved for backward."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, use_cache=False,
        )
    ).to(DEVICE)  # fmt: skip
    replace_parts(model, norm="fused")
    tokens = torch.arange(16, device=DEVICE).view(2, 8)

    def numbers(call: Any) -> list[Tensor]:
        loss = call(input_ids=tokens, labels=tokens).loss
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    if dynamic:
        torch._dynamo.mark_dynamic(tokens, 1)
    apart, joint = Joint(), Joint()
    right = numbers(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "sums_into_norms", lambda _: None)
        torch.testing.assert_close(numbers(apart.compile(model)), right, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    torch.testing.assert_close(numbers(joint.compile(model)), right, rtol=1e-4, atol=1e-6)
    assert (apart.sums(), joint.sums()) == ((0, 0), (4, 4))
    assert joint.saved <= apart.saved


def test_the_output_of_a_checkpoint_is_no_work_of_the_next_one():
    """A norm in the block of the sum makes it, and runs again with it; the next block's is left. PyTorch 2.11 runs no
    operator of an autograd.Function again, and then all are left."""

    def block(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
        s = x + norm(x, weight) @ by
        return s + norm(s, weight) @ by

    def blocks(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(block, x, by, weight, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x

    inputs = [normal(4, 3, M, dtype=torch.float32), normal(M, M, dtype=torch.float32), normal(M, dtype=torch.float32)]
    joint = Joint()
    torch.testing.assert_close(
        gradients(joint.compile(blocks), *inputs), gradients(blocks, *inputs), rtol=1e-5, atol=1e-5
    )
    again = any("rms_norm" in node.name and "recompute" in node.meta for node in joint.graphs[0].nodes)
    assert joint.sums() == (2 if again else 0, 4)
    assert not again or joint.saved == [5]  # x, by, the weight, the first block's output, and the gradient


def test_a_pass_of_the_user_s_runs_first_and_keeps_its_name(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ran: list[torch.fx.Graph] = []

    class Named(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(graph)

        def uuid(self) -> str:
            return "one"

    graph = torch.fx.Graph()
    for before, uuids in ((None, 1), (Named(), 2), ([Named(), Named()], 3), (ran.append, 0)):
        monkeypatch.setattr(config, "joint_custom_pre_pass", before)
        ran.clear()
        for _ in range(2):
            operators.sum_in_norms()
        given: Any = config.joint_custom_pre_pass
        given(graph)
        assert len(ran) == (uuids - 1 if uuids else 1) and len(given.uuid() or ()) == uuids


SCRIPT = """
import functools, sys
sys.path.append({root!r})
import torch
from torch._dynamo.utils import counters
from stepscope.kernels.operators import sum_in_norms
from stepscope.kernels.parts import norm
from stepscope.training.training_step import keep_compiled_functions
from tests.interpreter import quicken

quicken()
keep_compiled_functions()
sum_in_norms()
summed, launch_at = [], norm.launch_at
def counted(*arguments, **options):
    summed.extend(name for name in ("ADDS", "HAS_TOTAL") if options.get(name))
    launch_at(*arguments, **options)
norm.launch_at = counted

def block(x, by, weight):
    s = x + norm.rms_norm(x, None, weight, 1e-5)[1] @ by
    return s + norm.rms_norm(s, None, weight, 1e-5)[1] @ by

x, by, weight = (torch.randn(4, 8), torch.randn(8, 8), torch.ones(8)) if torch.manual_seed(0) else ()
def gradients(function):
    summed.clear()
    of = [each.clone().requires_grad_() for each in (x, by, weight)]
    out = function(*of)
    return [out, *torch.autograd.grad(out.sin().sum(), of)]
torch.testing.assert_close(gradients(torch.compile(block)), gradients(block), rtol=1e-4, atol=1e-4)
gradients(torch.compile(block))
of = counters["aot_autograd"]
print(of["autograd_cache_bypass"], of["autograd_cache_miss"], of["autograd_cache_hit"], sorted(summed))
"""


@pytest.mark.long
def test_a_second_process_finds_the_graph_on_disk(tmp_path: Path):
    """Compiled by Inductor: the same numbers, and both directions' sums by the norms' kernels. A call that is not
    compiled makes nothing that the compiled one must be made anew for."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(root=str(Path(__file__).parents[3]))],
            env=environment, capture_output=True, text=True, check=True, timeout=600,
        ).stdout.split(maxsplit=3)
        for _ in range(2)
    ]  # fmt: skip
    kernels = "['ADDS', 'HAS_TOTAL', 'HAS_TOTAL']\n"
    assert said == [["0", "1", "0", kernels], ["0", "0", "1", kernels]]
