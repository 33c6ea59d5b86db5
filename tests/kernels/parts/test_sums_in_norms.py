"""Sums and casts that a compiled graph hands to the norms beside them: which, the numbers, and the graphs kept on disk.

The casts are to fp16: Triton's interpreter rounds to it as PyTorch does, and cuts bf16 off.
"""

import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor import lowering
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from stepscope.kernels import operators
from stepscope.kernels.parts import norm as norms
from stepscope.kernels.parts.mlp import biased_gelu
from stepscope.kernels.parts.norm import layer_norm, places_of, rms_norm, shares_together, sums_of_shares
from stepscope.training.parts.replaced import replace_parts
from tests.conftest import at_length
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
    """A compiler that runs a pass on the graph of both directions, or leaves it, and PyTorch's own partitioner."""

    def __init__(self, *, apart: bool = False, change: Any = operators.sums_into_norms) -> None:
        self.apart, self.change = apart, change
        self.graphs: list[torch.fx.Graph] = []
        self.saved: list[int] = []
        run: Any = lambda module, _: make_boxed_func(module.forward)  # noqa: E731
        table = select_decomp_table()
        self.backend = aot_autograd(fw_compiler=run, partition_fn=self._cut, decompositions=table)

    def _cut(self, module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if not self.apart:
            self.change(module.graph)
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
        of_norms = [(name, args[1]) for name, args in norms if name.startswith("stepscope.") and "_norm_" in name]
        forward, backward = (
            sum(which in name and given is not None for name, given in of_norms) for which in ("forward", "backward")
        )
        return forward, backward

    def casts(self) -> int:
        """How many casts to 16 bits and back read what a norm wrote, or wrote what one reads, if behind views."""
        passing = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default)

        def beside(nodes: Iterable[torch.fx.Node], way: str) -> bool:
            return any(
                "_norm_" in str(node.target)
                or (node.target in (*passing, operator.getitem) and beside(getattr(node, way), way))
                for node in nodes
            )

        casts = [
            node for graph in self.graphs for node in graph.nodes
            if node.target in (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
        ]  # fmt: skip
        return sum(beside(cast.all_input_nodes, "all_input_nodes") or beside(cast.users, "users") for cast in casts)


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    of = [each.detach().clone().requires_grad_() for each in inputs]
    torch.manual_seed(0)  # dropout's
    result = function(*of)
    upstream = torch.linspace(-1, 1, result.numel(), device=DEVICE, dtype=result.dtype).view(result.shape)
    return [result, *torch.autograd.grad(result, of, upstream)]


def same(found: list[Tensor], known: list[Tensor]) -> None:
    """Bit for bit; a GPU's compiler may round a product and a sum behind it once, where one kernel makes both, and a
    number that is then cast to 16 bits may round to the next one."""
    tolerance = 0 if DEVICE.type == "cpu" else 1e-2
    torch.testing.assert_close(found, known, rtol=tolerance, atol=tolerance)


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
    s = x + layer_norm(x, weight, None, 1e-5).half() @ by.half()
    s = s + layer_norm(s, weight, 2 * weight, 1e-5) @ by
    return layer_norm(s + s.sin() @ by, weight, weight.sin(), 1e-5)


def of_biased_layers(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Layers with a bias before sums; the gradient of the first is a norm's and that of the stream behind it."""
    s = x + F.linear(layer_norm(x, weight, 2 * weight, 1e-5), by, weight)
    s = s + F.linear(layer_norm(s, weight, weight.sin(), 1e-5), by, weight.cos())
    return layer_norm(s, weight, weight.sin(), 1e-5)


def no_later_reader(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + x @ by, weight)


def with_alpha(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(torch.add(x, x @ by, alpha=2), weight)


def with_number(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm((x @ by) + 1.0, weight)


def broadcast(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + x[:1] @ by, weight)


def two_norms(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Two norms take one sum: the first makes it, and both add to its three gradients in backward."""
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
    """As under autocast: the residual in fp32, and what is added in 16 bits."""
    s = x + (x.half() @ by.half())
    return s + norm(s, weight).square()


def double_and_single(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + (x @ by).double(), weight.double()).float()


def of_itself(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    s = x @ by
    return s + norm(s + s, weight)


def of_casts(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm's backward writes the branch's gradient, too; the last norm is read in fp32."""
    s = x + norm(x, weight).half() @ by.half()
    s = s + norm(s, weight).half() @ by.half()
    return s + norm(s, weight).sin()


def behind_views(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return (norm(x, weight).view(-1, M).view(-1, M).half() @ by.half()).view(x.shape)


def of_two_readers(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Both in fp16, one of them behind a view; their gradients are added in fp32."""
    y = norm(x, weight)
    return y.half() @ by.half() + (y.view(-1, M).half() @ by.half()).view(x.shape)


def of_two_dtypes(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    y = norm(x, weight)
    return y.half() @ by.half() + y.bfloat16() @ by.bfloat16()


def of_a_reader_in_fp32(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    y = norm(x, weight)
    return y + y.half() @ by.half()


def narrow_inputs(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """A norm takes x in 16 bits, and is computed and differentiated in fp32."""
    return norm((x.half() @ by.half()).float(), weight).square()


def a_narrow_term(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    return norm(x + (x.half() @ by.half()).float(), weight)


def two_narrow_terms(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """What they would add has fp32: they are left, but for the gradient that both cast."""
    y = x.half() @ by.half()
    return norm(y.float() + (y @ by.half()).float(), weight)


def of_doubles(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Rounded twice: by the norm, and by the cast."""
    return rms_norm(x.double(), None, weight.double(), 1e-5, torch.float32)[1].half() @ by.half()


def branch_given(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """Its backward writes two gradients as it is."""
    s, y = rms_norm(x, x.half() @ by.half(), weight, 1e-5, torch.float32)
    return s + y.half() @ by.half()


def narrow_branch_given(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """One of two is read in 16 bits, and the sum stays in fp32."""
    y = x.half() @ by.half()
    s, y = rms_norm(y.float(), (y @ by.half()).float(), weight, 1e-5)
    return s + y.square()


def of_no_dropout(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """A dropout of p = 0 leaves a copy."""
    s = torch.nn.functional.dropout(x.half() @ by.half(), 0.0) + x
    return s + norm(s, weight).square()


def of_dropout(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    s = torch.nn.functional.dropout(x.half() @ by.half(), 0.5) + x
    return s + norm(s, weight).square()


@pytest.mark.parametrize(
    ("function", "sums", "casts"),
    [
        (residual, (2, 3), (0, 0)),
        (of_layer_norms, (2, 2), (2, 1)),
        (no_later_reader, (1, 0), (0, 0)),
        (with_alpha, (0, 0), (0, 0)),
        (with_number, (0, 0), (0, 0)),
        (broadcast, (0, 0), (0, 0)),
        (two_norms, (1, 2), (0, 0)),
        (transposed, (0, 0), (0, 0)),
        (of_what_is_fused, (0, 0), (0, 0)),
        (weight_made_later, (1, 1), (0, 0)),
        (weight_made_of_the_sum, (0, 0), (0, 0)),
        (mixed, (1, 1), (0, 0)),
        (double_and_single, (0, 0), (6, 6)),
        (of_itself, (1, 0), (0, 0)),
        (of_casts, (2, 3), (4, 0)),
        (behind_views, (0, 0), (2, 0)),
        (of_two_readers, (0, 0), (2, 0)),
        (of_two_dtypes, (0, 0), (2, 2)),
        (of_a_reader_in_fp32, (0, 0), (1, 1)),
        (narrow_inputs, (0, 0), (2, 0)),
        (a_narrow_term, (1, 0), (1, 0)),
        (two_narrow_terms, (0, 0), (2, 0)),
        (of_doubles, (0, 0), (6, 6)),
        (branch_given, (1, 1), (2, 0)),
        (narrow_branch_given, (1, 1), (4, 3)),
        (of_no_dropout, (1, 1), (0, 0)),
        (of_dropout, (0, 1), (0, 0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_norm_makes_the_sums_and_casts_that_are_its_own(
    function: Callable[..., Tensor], sums: tuple[int, int], casts: tuple[int, int]
):
    """casts: those beside norms, in a graph that is left as it is and in one that is not."""
    inputs = [normal(4, 3, M, dtype=torch.float32), normal(M, M, dtype=torch.float32), normal(M, dtype=torch.float32)]
    if function is transposed:
        inputs[0] = normal(4, M, M, dtype=torch.float32)
    apart, joint = Joint(apart=True), Joint()
    known = gradients(apart.compile(function), *inputs)
    torch._dynamo.reset()
    found = gradients(joint.compile(function), *inputs)
    same(found, known)
    if function is not of_dropout:
        rtol = 2e-2 if "half" in function.__code__.co_names else 1e-5
        atol = 1e-5 if DEVICE.type == "cpu" else rtol
        torch.testing.assert_close(found, gradients(function, *inputs), rtol=rtol, atol=atol)
    assert (joint.sums(), (apart.casts(), joint.casts())) == (sums, casts)
    for value in (node.meta["val"] for graph in joint.graphs for node in graph.nodes if node.op == "call_function"):
        assert all(isinstance(each, Tensor) for each in ((value,) if isinstance(value, Tensor) else value))


def llama() -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[Any, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    images = torch.linspace(-1, 1, 2 * 3 * 8 * 8, device=DEVICE).view(2, 3, 8, 8)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.arange(2, device=DEVICE),
    }


@pytest.mark.parametrize("dynamic", [False, *at_length(True)])
def test_a_llama_has_no_sum_beside_a_norm(dynamic: bool):
    """The numbers are those of its operators apart, and no more is saved for backward."""
    torch.manual_seed(0)
    model, inputs = llama()
    replace_parts(model.to(DEVICE), norm="fused")

    def numbers(call: Any) -> list[Tensor]:
        loss = call(**inputs).loss
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    if dynamic:
        torch._dynamo.mark_dynamic(inputs["input_ids"], 1)
    apart, joint = Joint(apart=True), Joint()
    right = numbers(model)
    torch.testing.assert_close(numbers(apart.compile(model)), right, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()
    torch.testing.assert_close(numbers(joint.compile(model)), right, rtol=1e-4, atol=1e-6)
    assert (apart.sums(), joint.sums()) == ((0, 0), (4, 4))
    assert joint.saved <= apart.saved


@pytest.mark.parametrize(("made", "sums", "casts"), [(vit, (4, 4), (9, 4)), *at_length((llama, (4, 4), (11, 0)))])
def test_a_model_under_autocast_has_the_same_numbers_without_the_casts(
    made: Callable[[], tuple[Any, dict[str, Tensor]]], sums: tuple[int, int], casts: tuple[int, int]
):
    """Bit for bit, and no more is saved. LayerNorm's gradient is cast for the branch, as its backward writes one."""
    torch.manual_seed(0)
    model, inputs = made()
    replace_parts(model.to(DEVICE), norm="fused", mlp="fused", projections="joint")

    def numbers(joint: Joint) -> list[Tensor]:
        torch._dynamo.reset()
        with torch.autocast(DEVICE.type, torch.float16):
            loss = joint.compile(model)(**inputs).loss
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    apart, joint = Joint(apart=True), Joint()
    same(numbers(joint), numbers(apart))
    assert (joint.sums(), (apart.casts(), joint.casts())) == (sums, casts)
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


def test_a_cast_behind_a_checkpoint_is_no_work_of_its_norm():
    """The norm runs again for its own block's backward; what is read behind that is kept as it was."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return norm(x.sin(), weight)

    def function(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
        y = checkpoint(block, x, weight, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y.half() @ by.half()

    inputs = [normal(4, 3, M, dtype=torch.float32), normal(M, M, dtype=torch.float32), normal(M, dtype=torch.float32)]
    apart, joint = Joint(apart=True), Joint()
    known = gradients(apart.compile(function), *inputs)
    torch._dynamo.reset()
    same(gradients(joint.compile(function), *inputs), known)
    again = any("rms_norm" in node.name and "recompute" in node.meta for node in joint.graphs[0].nodes)
    assert (apart.casts(), joint.casts()) == (2, int(again)) and joint.saved == apart.saved


def test_a_pass_of_the_user_s_runs_first_and_keeps_its_name():
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    ran: list[torch.fx.Graph] = []

    class Named(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            ran.append(graph)

        def uuid(self) -> str:
            return "one"

    graph = torch.fx.Graph()
    graph.output(())
    for before, uuids in ((None, 1), (Named(), 2), ([Named(), Named()], 3), (ran.append, 0)):
        ran.clear()
        with config.patch(joint_custom_pre_pass=before):
            for _ in range(2):
                operators.use_graph_passes()
            given: Any = config.joint_custom_pre_pass
            given(graph)
        assert len(ran) == (uuids - 1 if uuids else 1) and len(given.uuid() or ()) == uuids


def test_the_compiler_knows_our_operators_before_it_meets_them() -> None:
    """One that it meets unknown it spells out, in PyTorch 2.11 with all that its arguments were made of."""
    target = torch.ops.stepscope.sums_of_shares.default
    lowering.lowerings.pop(target, None)
    graph = torch.fx.Graph()
    graph.output(())
    with inductor.patch(joint_custom_pre_pass=None):
        operators.use_graph_passes()
        passes: Any = inductor.joint_custom_pre_pass
        passes(graph)
    assert target in lowering.lowerings


SCRIPT = """
import functools, sys
sys.path.append({root!r})
import torch
from torch._dynamo.utils import counters
from stepscope.kernels.operators import use_graph_passes
from stepscope.kernels.parts import norm
from stepscope.training.training_step import keep_compiled_functions
from tests.interpreter import quicken

quicken()
keep_compiled_functions()
use_graph_passes()
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


@pytest.mark.parametrize("shape", [(6, M), (2, 5, M)])
def test_layer_norms_add_up_the_gradients_of_the_biases_before_them(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE) for size in (shape, (M, M), (M,))]
    apart, joint = Joint(apart=True), Joint()
    known = gradients(apart.compile(of_biased_layers), *inputs)
    torch._dynamo.reset()
    found = gradients(joint.compile(of_biased_layers), *inputs)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)  # the rows are added in another order

    def summed(graphs: list[torch.fx.Graph]) -> tuple[int, int]:
        targets = [(str(node.target), node.args) for graph in graphs for node in graph.nodes]
        of_rows = sum("layer_norm_backward" in name and args[9:] == (True,) for name, args in targets)
        return of_rows, sum("aten.sum" in name for name, _ in targets)

    assert summed(apart.graphs) == (0, 2) and summed(joint.graphs) == (2, 0)


def before_a_coarse_norm(x: Tensor, by: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """A stream and a bias in fp32 before a norm whose weight has 16 bits."""
    return layer_norm(x + F.linear(x, by, bias), weight, weight.sin(), 1e-5)


def test_a_bias_gets_no_coarser_gradient_than_its_own_dtype() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE) for size in ((6, M), (M, M), (M,))]
    inputs.append(torch.rand(M, device=DEVICE).half() + 1)
    known = gradients(Joint(apart=True).compile(before_a_coarse_norm), *inputs)
    torch._dynamo.reset()
    found = gradients(Joint().compile(before_a_coarse_norm), *inputs)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)


# Sums of two gradients of a norm's output.


def of_post_norms(x: Tensor, by: Tensor, *weights: Tensor) -> Tensor:
    """As BERT's: the stream is a norm's output. The second norm adds up the gradient of the first layer's bias, too,
    and both leave shares."""
    for weight, its_bias, bias in (weights[:3], weights[3:]):
        x = layer_norm(x, weight, its_bias, 1e-5)
        x = x + F.linear(x, by, bias)
    return x


def of_post_norms_without_bias(x: Tensor, by: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Two norms, each with a gradient in fp16 and one in fp32, which come in either order."""
    y = layer_norm(x, first, None, 1e-5).view(-1, M)
    y = layer_norm(y @ by + (y.half() @ by.half()), last, None, 1e-5)
    return y + (y.half() @ by.half())


def of_dropped_layers(x: Tensor, by: Tensor, first: Tensor, last: Tensor) -> Tensor:
    for weight in (first, last):
        x = layer_norm(x, weight, None, 1e-5)
        x = x + F.dropout(x @ by, 0.5)
    return x


def of_a_sum_read_twice(x: Tensor, by: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """It is the gradient of a bias behind the norm, too."""
    y = layer_norm(x, weight, None, 1e-5) + bias
    return y + y @ by


def of_a_sum_read_for_both(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """It is the norm's gradient, and that which is added to the one of the norm's input."""
    y = x @ by
    y = y + layer_norm(y, weight, None, 1e-5)
    return y + y @ by


def of_what_is_made_for_the_sum(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    y = layer_norm(x, weight, None, 1e-5)
    return y.sin() + y @ by


def of_parts_of_rows(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    y = layer_norm(x, weight, None, 1e-5).view(-1, M // 2)
    return y + y @ by[: M // 2, : M // 2]


def of_columns(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """One of both gradients lies in columns."""
    y = layer_norm(x, weight, None, 1e-5).view(-1, M)
    return y + (by @ y.mT.contiguous()).mT


HALF = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16


@pytest.mark.parametrize(
    ("function", "dtype", "given"),
    [
        (of_post_norms, torch.float32, [(True, True), (False, True)]),
        (of_post_norms, HALF, [(True, True), (False, True)]),
        (of_post_norms, torch.float64, []),
        (of_post_norms_without_bias, torch.float32, [(False, True)] * 2),
        (of_dropped_layers, HALF, [(False, True)] * 2),
        (of_a_sum_read_twice, torch.float32, []),
        (of_a_sum_read_for_both, torch.float32, []),
        (of_what_is_made_for_the_sum, torch.float32, []),
        (of_parts_of_rows, torch.float32, []),
        (of_columns, torch.float32, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_layer_norms_add_the_two_gradients_of_their_outputs(
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    given: list[tuple[bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit as a sum of its own adds them. given: whether each norm that adds them adds up rows of dx, too, and
    whether it leaves shares."""
    torch.manual_seed(0)
    sizes = (2, 3, M), (M, M), *[(M,)] * (6 if function is of_post_norms else function.__code__.co_argcount - 2)
    inputs = [torch.randn(*size, device=DEVICE, dtype=dtype) for size in sizes]

    def numbers() -> tuple[list[Tensor], list[tuple[Any, ...]], int]:
        """The gradients, the options of norms that add two, and how many sums are beside them."""
        nodes: list[tuple[str, tuple[Any, ...]]] = []

        def change(graph: torch.fx.Graph) -> None:
            _both_passes(graph)
            nodes.extend((str(node.target), node.args) for node in graph.nodes)

        torch._dynamo.reset()
        found = gradients(Joint(change=change).compile(function), *inputs)
        of_norms = [args[8:] for name, args in nodes if "layer_norm_backward" in name]
        adding = [options[1:] for options in of_norms if options and options[0] is not None]
        return found, adding, sum(name == "aten.add.Tensor" for name, _ in nodes)

    found, of_norms, left = numbers()
    monkeypatch.setattr(operators, "_sum_before_backward", lambda norm: None)
    known, none, every = numbers()
    assert (of_norms, none, left) == (given, [], every - len(given))
    assert all(map(torch.equal, found, known))


# Sums of a whole backward in one launch.


@pytest.mark.parametrize(
    ("rows", "widths", "dtypes"),
    [
        ((1, 300, 129, 7), (40, 8, 130, 1), (torch.float32, torch.float32)),
        ((2,) * 130, (4,) * 130, (torch.float32, torch.float16)),
        ((5, 12), (16, 33), (torch.float64, torch.float64)),
    ],
)
def test_shares_of_several_sums_are_added_up_in_one_launch(
    rows: tuple[int, ...], widths: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Each is the sum that one launch for it makes, at a place where loads are wide, and the same bits twice."""
    torch.manual_seed(0)
    shares = [torch.randn(size, device=DEVICE, dtype=dtypes[0]) for size in zip(rows, widths, strict=True)]
    (found, narrow), places = sums_of_shares(shares, dtypes[1]), places_of(widths)
    assert len(narrow) == (len(found) if dtypes[0] != dtypes[1] else 0)
    found = narrow if len(narrow) else found
    for share, place in zip(shares, places, strict=False):
        known = torch.empty(share.shape[1], dtype=dtypes[1], device=DEVICE)
        norms._fill_sums(share, known, len(share), *norms._LAST)
        assert place % 32 == 0
        tolerance = 1e-12 if dtypes[1] == torch.float64 else 1e-3 if dtypes[1] == torch.float16 else 1e-5
        torch.testing.assert_close(found[place : place + len(known)], known, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(known, share.sum(0).to(dtypes[1]), rtol=1e-3, atol=1e-5)
    assert len(found) == places[-1]
    again = sums_of_shares(shares, dtypes[1])[len(narrow) > 0]
    assert all(
        torch.equal(found[place : place + width], again[place : place + width])
        for place, width in zip(places, widths, strict=False)
    )
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.stepscope.sums_of_shares, (shares, dtypes[1]), test_utils=tests)


def of_many_sums(x: Tensor, by: Tensor, *weights: Tensor) -> Tensor:
    """Norms and a GELU with weights of their own, one whose weight another's is made of, and two with one weight."""
    first, its_bias, second, of_layer, made, shared = weights
    s = x + layer_norm(x, first, its_bias, 1e-5) @ by
    s = s + biased_gelu(s @ by, of_layer)
    s = rms_norm(s, None, second, 1e-5)[1] + rms_norm(s.sin(), None, made.exp(), 1e-5)[1]
    return rms_norm(s, None, shared, 1e-5)[1] + rms_norm(s.cos(), None, shared, 1e-5)[1]


def _shares_in(graph: torch.fx.Graph) -> tuple[list[int], int]:
    """How many tensors each launch adds up, and how many operators leave shares."""
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    launches = [len(call.args[0]) for call in calls if "sums_of_shares" in str(call.target)]
    options = [(call.target._schema.arguments[-1].name, len(call.target._schema.arguments), call) for call in calls]
    return launches, sum(name == "apart" and len(call.args) == count for name, count, call in options)


@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_that_only_the_optimizer_reads_are_added_up_together(dynamic: bool) -> None:
    """A norm adds up its weight's gradient by itself if the graph makes the weight, or if another norm has it, too. All
    norms do so if a shape is unknown."""
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE) for size in ((6, M), (M, M), *[(M,)] * 6)]
    apart, joint = Joint(apart=True), Joint(change=shares_together)
    known = gradients(apart.compile(of_many_sums), *inputs)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
        found = gradients(joint.compile(of_many_sums), *inputs)
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-5)
    assert _shares_in(apart.graphs[0]) == ([], 0)
    assert _shares_in(joint.graphs[0]) == (([], 0) if dynamic else ([3], 3))


def _both_passes(graph: torch.fx.Graph) -> None:
    operators.sums_into_norms(graph)
    shares_together(graph)


def _by_both_passes(function: Any, inputs: list[Tensor], tolerance: float) -> tuple[list[Tensor], torch.fx.Graph]:
    """Its result and gradients behind the passes of norms and of shares, held against those without, and the graph."""
    apart, joint = Joint(apart=True), Joint(change=_both_passes)
    known = gradients(apart.compile(function), *inputs)
    torch._dynamo.reset()
    found = gradients(joint.compile(function), *inputs)
    torch.testing.assert_close(found, known, rtol=tolerance, atol=tolerance / 2)
    return found, joint.graphs[0]


def of_a_stream(x: Tensor, by: Tensor, *weights: Tensor) -> Tensor:
    """Two layers; the norm of the second adds up the gradient of the first one's bias beside those of its own."""
    for bias, first, second in (weights[:3], weights[3:]):
        x = x + F.linear(layer_norm(x, first, second, 1e-5), by, bias)
    return x @ by


@pytest.mark.parametrize(("shape", "added"), [((2, 3, M), 2), ((2, 160, M), 3), ((257, M), 3)])
def test_what_norms_add_up_of_biases_is_left_with_their_own(shape: tuple[int, ...], added: int) -> None:
    """The second layer leaves shares of its bias's gradient, which no norm adds up, where it has many rows."""
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE) for size in (shape, (M, M), *[(M,)] * 6)]
    _, graph = _by_both_passes(of_a_stream, inputs, 1e-4)
    assert _shares_in(graph) == ([added], 2)


class _Biased(torch.autograd.Function):
    """x + bias, whose gradient is made in fp32 and cast, as autocast on a GPU makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].sum([0], keepdim=True, dtype=torch.float32).view(-1).half()


def of_16_bits(x: Tensor, by: Tensor, *weights: Tensor) -> Tensor:
    """Weights and biases in 16 bits beside one in fp32, with all of which fp32 is computed."""
    first, its_bias, bias, second, other, last = weights
    x = x + _Biased.apply(layer_norm(x, first.float(), its_bias.float(), 1e-5) @ by, bias)
    x = x + layer_norm(x, second, other, 1e-5).sin()
    return _Biased.apply(x, last) @ by


@pytest.mark.parametrize(("rows", "added"), [(6, 2), (320, 3)])
def test_sums_that_are_cast_are_rounded_by_the_launch(rows: int, added: int) -> None:
    """The first bias is added up by the second norm; the last one's rows leave shares where they are many."""
    torch.manual_seed(0)
    inputs = [torch.randn(*size, device=DEVICE) for size in ((rows, M), (M, M), *[(M,)] * 6)]
    inputs[2:] = [each if place in (3, 4) else each.half() for place, each in enumerate(inputs[2:])]
    found, graph = _by_both_passes(of_16_bits, inputs, 2e-3)
    assert [each.dtype for each in found[1:]] == [each.dtype for each in inputs]
    assert _shares_in(graph) == ([added], 2)
    casts = [node for node in graph.nodes if node.target is torch.ops.prims.convert_element_type.default]
    halves = [cast for cast in casts if cast.meta["val"].dtype == torch.float16]
    assert len(halves) == (0 if added == 3 else 1)  # of the last bias


def test_what_forward_returns_is_no_sum_of_backward() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(257, M, device=DEVICE), torch.randn(M, device=DEVICE, requires_grad=True)
    joint = Joint(change=shares_together)
    normed, total = joint.compile(lambda x, weight: (norm(x, weight), (x @ x.T @ x).sum(0)))(x, weight)
    normed.sum().backward()
    torch.testing.assert_close(total, (x @ x.T @ x).sum(0), rtol=1e-4, atol=1e-2)
    assert weight.grad is not None and _shares_in(joint.graphs[0]) == ([], 0)


class _Summed(torch.autograd.Function):
    """x + bias, whose gradient is added up in its own dtype, whatever x has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.dtype = bias.dtype
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].sum(0, dtype=ctx.dtype)


@pytest.mark.parametrize("wide", [False, True])
def test_sums_of_other_dtypes_have_no_launch_together(wide: bool) -> None:
    """A norm of fp32 beside rows of fp64, and the other way round."""
    torch.manual_seed(0)
    dtypes = (torch.float64, torch.float32) if wide else (torch.float32, torch.float64)
    sizes = [((300, M), 0), ((300, M), 1), ((M, M), 1), ((M,), 0), ((M,), 0), ((M,), 0)]
    inputs = [torch.randn(*size, device=DEVICE, dtype=dtypes[which]) for size, which in sizes]

    def function(x: Tensor, z: Tensor, by: Tensor, *weights: Tensor) -> Tensor:
        first, second, bias = weights
        x = rms_norm(rms_norm(x, None, first, 1e-5)[1], None, second, 1e-5)[1]
        return x.double() * (_Summed.apply(z @ by, bias) @ by).double()

    joint = Joint(change=shares_together)
    found = gradients(joint.compile(function), *inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(found, gradients(function, *inputs), rtol=1e-4, atol=1e-4)
    assert _shares_in(joint.graphs[0]) == ([2], 2)


def test_a_sum_is_rounded_to_its_own_dtype_first() -> None:
    """That of an fp16 weight, to which a bf16 one was added."""
    torch.manual_seed(0)
    x, first, second = (torch.randn(*size, device=DEVICE) for size in ((6, M), (M,), (M,)))
    inputs = [x, first.half(), second.bfloat16(), torch.randn(M, device=DEVICE)]

    def function(x: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
        return norm(norm(x, first + second.half()), last).square()

    joint = Joint(change=shares_together)
    found = gradients(joint.compile(function), *inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(found[2], gradients(function, *inputs)[2], rtol=2e-3, atol=1e-4)
    assert _shares_in(joint.graphs[0]) == ([2], 2) and not torch.equal(found[2], found[2].bfloat16().half())


def test_rows_that_none_are_leave_no_shares() -> None:
    inputs = [torch.ones(*size, device=DEVICE) for size in ((0, M), (M, M), *[(M,)] * 6)]
    joint = Joint(change=shares_together)
    found = gradients(joint.compile(of_many_sums), *inputs)
    assert _shares_in(joint.graphs[0]) == ([], 0) and not any(of.any() for of in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_leave_shares_of_what_they_would_add_up(dtype: torch.dtype) -> None:
    """Their rows' sums are the gradients, and a compiler is told their shapes."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 3, 5, M, device=DEVICE, dtype=dtype)[0:1].squeeze(0), torch.randn(3, 5, M, device=DEVICE)
    dy, weight, bias = dy.to(dtype), *torch.randn(2, M, device=DEVICE, dtype=dtype)
    roots, ops = torch.rand(3, 5, device=DEVICE, dtype=dtype), torch.ops.stepscope
    for operator_, *arguments in (
        (ops.rms_norm_backward, dy, None, x, weight, roots, dtype, None),
        (ops.layer_norm_backward, dy, dy, x, weight, roots - 1, roots, dtype, True, dy, True),
        (ops.biased_gelu_backward, dy, x, bias, True, True),
    ):
        *known, sums = operator_(*arguments)
        *found, shares = operator_(*arguments, apart=True)
        assert shares.dim() == 2 and all(map(torch.equal, found, known))
        torch.testing.assert_close(shares.sum(0), sums)
        torch.library.opcheck(operator_, (*arguments, True), test_utils=("test_schema", "test_faketensor"))
