"""Projections as one product, and patches: the same results and gradients as apart, however they lie in memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from stepscope.core.errors import InputError
from stepscope.core.workloads import TextbookWorkload
from stepscope.kernels.parts import projections
from stepscope.kernels.parts.projections import (
    join_projections,
    joint_projections,
    lie_together,
    patch_products,
    projections_found,
)
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini, run_steps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS, INPUTS = (6, 3, 5), 7


def weights(*, together: bool, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [
        nn.Parameter(torch.randn(width, INPUTS, generator=generator, dtype=torch.float64).to(DEVICE, dtype))
        for width in WIDTHS
    ]
    if together:
        lie_together(made)
    return made


def biases(*, together: bool) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.randn(width, dtype=torch.float64, device=DEVICE)) for width in WIDTHS]
    if together:
        lie_together(made)
    return made


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, INPUTS, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_results_and_gradients_are_those_of_products_apart(together: bool, biased: bool):
    x, given, added = inputs(), weights(together=together), biases(together=together) if biased else []
    found = joint_projections(x, given, added)
    right = [F.linear(x, *layer) for layer in zip(given, *([added] if biased else []), strict=True)]
    torch.testing.assert_close(found, tuple(right))
    upstream = [torch.randn_like(each) for each in right]
    leaves = [x, *given, *added]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(right, leaves, upstream)
    )
    assert torch.autograd.gradcheck(lambda x, *rest: joint_projections(x, rest[:3], rest[3:]), leaves)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_biases_are_one_sum_of_the_joined_rows(compiled: bool):
    """In the dtype of each, also where these differ and where rows are of 16 bits."""

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    made: list[str] = []
    x, given, added = inputs(torch.bfloat16), weights(together=True, dtype=torch.bfloat16), biases(together=False)
    added = [
        nn.Parameter(bias.detach().to(dtype))
        for bias, dtype in zip(added, (torch.bfloat16,) * 2 + (torch.float32,), strict=True)
    ]
    upstream = [torch.randn(2, 4, width, device=DEVICE, dtype=torch.bfloat16) for width in WIDTHS]

    def products(*leaves: Tensor) -> tuple[Tensor, ...]:
        return joint_projections(leaves[0], leaves[1:4], leaves[4:])

    run = torch.compile(products, fullgraph=True, backend="aot_eager") if compiled else products
    found = run(x, *given, *added)
    with Recorded():
        gradients = torch.autograd.grad(found, added, upstream)
    assert [each.dtype for each in gradients] == [bias.dtype for bias in added]
    for gradient, of_part in zip(gradients, upstream, strict=True):
        torch.testing.assert_close(gradient.double(), of_part.double().sum((0, 1)), rtol=1e-2, atol=1e-2)
    assert not any("aten.sum" in each for each in made), "none beside the operator"
    assert made.count("stepscope.joint_projections_backward.default") == 1


@pytest.mark.parametrize(
    ("rows", "width", "columns", "dtype"),
    [
        (0, 5, 5, torch.float32),
        (1, 1, 1, torch.float32),
        (256, 33, 40, torch.bfloat16),
        (257, 200, 200, torch.float64),
        (1100, 130, 260, torch.float16),
        (40000, 8, 8, torch.bfloat16),
    ],
)
def test_rows_are_added_up_in_one_launch_or_two(rows: int, width: int, columns: int, dtype: torch.dtype):
    """The rows have others' columns between them; the sums are as exact as their dtype, and the same bits twice."""
    pytest.importorskip("triton")
    from stepscope.kernels.parts.norm import fill_sums

    generator = torch.Generator().manual_seed(4)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(DEVICE, dtype)[:, :width]
    wide = torch.promote_types(dtype, torch.float32)
    found, again = (torch.full((width,), float("nan"), dtype=wide, device=DEVICE) for _ in range(2))
    fill_sums(x, found)
    fill_sums(x, again)
    assert torch.equal(found, again)
    exact = x.double().sum(0)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-12 if dtype == torch.float64 else 3e-4)


def test_weights_that_lie_together_and_gradients_side_by_side_are_never_copied(monkeypatch: pytest.MonkeyPatch):
    x, given, added = inputs(), weights(together=True), biases(together=True)
    first = given[0].data_ptr()
    monkeypatch.setattr(projections.torch, "cat", None)
    joined = projections._joined(given, torch.float64)
    assert joined.data_ptr() == first and joined.shape == (sum(WIDTHS), INPUTS)
    found = joint_projections(x, given, added)
    rows = torch.ones(8, sum(WIDTHS), dtype=torch.float64, device=DEVICE)
    torch.autograd.backward(found, [part.view(2, 4, -1) for part in rows.split(list(WIDTHS), dim=1)])
    assert x.grad is not None
    right = torch.stack([weight.detach().sum(0) for weight in given]).sum(0)
    torch.testing.assert_close(x.grad, right.expand(2, 4, -1))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_a_fused_rotation_are_not_copied_either(compiled: bool, monkeypatch: pytest.MonkeyPatch):
    """The rotation writes gradients of queries and keys where the projections read them; the value's are put beside."""
    pytest.importorskip("triton")
    from stepscope.kernels.parts.rope import rotated

    widths = (3 * 4, 4, 4)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    cos, sin = normal(5, 4), normal(5, 4)
    leaves = [each.requires_grad_() for each in (normal(2, 5, 7), *(normal(width, 7) for width in widths))]
    copied: list[int] = []

    def beside(gradients: Any) -> Tensor:
        before = gradients[0].data_ptr()
        rows = of_gradients(gradients)
        copied.append(sum(each.shape[1] for each in gradients) if rows.data_ptr() != before else widths[2])
        return rows

    of_gradients = projections._beside
    monkeypatch.setattr(projections, "_beside", beside)

    def attend(function: Any, x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in function(x, weights))
        q, k = rotated(q, k, cos, sin)
        return (q * k.exp() * v.sin()).square().sum()

    def apart(x: Tensor, weights: Any) -> list[Tensor]:
        return [F.linear(x, weight) for weight in weights]

    joint = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    found = torch.autograd.grad(joint(joint_projections, *leaves), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(attend(apart, *leaves), leaves))
    assert copied == [widths[2]]
    # Rows of the same layout whose other columns somebody else has are left alone.
    rows, value = normal(10, sum(widths)), normal(10, 4)
    kept = rows.clone()
    whole = projections._beside([*rows.split(list(widths), 1)[:2], value])
    assert torch.equal(rows, kept) and torch.equal(whole[:, -4:], value) and copied[-1] != widths[2]


def test_a_compiler_is_not_given_the_copy_of_gradients_to_fuse():
    seen: list[str] = []

    def recorded(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def turned(x: Tensor, *weights: Tensor) -> Tensor:
        first, *others = (part.sin().sum() for part in joint_projections(x, weights))
        return sum(others, start=first)

    x, given = inputs(), weights(together=True)
    leaves = [x, *given]
    compiled = torch.compile(turned, backend=aot_autograd(fw_compiler=recorded, bw_compiler=recorded))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x, *given), leaves), torch.autograd.grad(turned(x, *given), leaves)
    )
    assert "stepscope.joint_projections_backward.default" in seen
    assert "aten.cat.default" not in seen


def test_parameters_stay_themselves_and_their_gradients_are_of_their_dtype():
    given = weights(together=False, dtype=torch.float32)
    before = [weight.detach().clone() for weight in given]
    lie_together(given)
    assert all(torch.equal(weight, old) for weight, old in zip(given, before, strict=True))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = joint_projections(inputs(torch.float32), given)
    assert {each.dtype for each in found} == {torch.bfloat16}
    torch.stack([each.float().sum() for each in found]).sum().backward()
    assert [weight.grad.dtype for weight in given if weight.grad is not None] == [torch.float32] * 3


def test_a_counter_sees_every_product():
    def flops(function: Any) -> int:
        counter = FlopCounterMode(display=False)
        with counter:
            torch.stack([each.sum() for each in function()]).sum().backward()
        return counter.get_total_flops()

    x, given = inputs(), weights(together=True)
    joint = flops(lambda: joint_projections(x, given))
    assert joint == flops(lambda: [F.linear(x, weight) for weight in given]) == 3 * 2 * 8 * INPUTS * sum(WIDTHS)


def test_what_is_no_projection_of_the_input_is_named():
    with pytest.raises(InputError, match=r"projections joint takes x \(..., M\) and weights .* not \(2, 4, 7\)"):
        joint_projections(inputs(), [nn.Parameter(torch.zeros(3, 6, dtype=torch.float64, device=DEVICE))])


@pytest.mark.parametrize(
    ("dtype", "bound", "choices"),
    [
        ("fp32", 2e-6, {}),
        ("bf16-master", 2e-2, {"checkpointing": "selective"}),
        ("bf16", 2e-2, {"kv_heads": 1, "checkpointing": "every-1"}),
        ("fp32", 2e-6, {"compile": "default", "layers": 1}),
    ],
)
@pytest.mark.usefixtures("quickly_compiled")
def test_a_step_has_the_gradients_of_projections_apart(dtype: str, bound: float, choices: dict[str, Any]):
    def gradients(workload: TextbookWorkload) -> tuple[float, Tensor]:
        step = TrainingStep(workload, DEVICE)
        loss = run_steps(step)
        assert loss is not None
        return loss, torch.cat([p.grad.double().flatten() for p in step.model.parameters() if p.grad is not None])

    common = {"phase": "forward-backward", "dtype": dtype}
    joint = gradients(mini(**common, projections="joint", **choices))
    apart = gradients(mini(**common, **{**choices, "compile": "eager"}))
    assert joint[0] == pytest.approx(apart[0], rel=bound)
    assert float((joint[1] - apart[1]).norm()) <= bound * float(apart[1].norm())


def test_what_does_not_go_with_joint_projections_is_said_in_one_line():
    with pytest.raises(InputError, match="projections joint does not go with --parallel ddp"):
        mini(projections="joint", parallel="ddp", ranks=2)
    with pytest.raises(InputError, match="projections joint does not go with dtype fp8: choose --projections apart"):
        mini(projections="joint", dtype="fp8")


CONVOLUTIONS = {1: (nn.Conv1d, F.conv1d), 2: (nn.Conv2d, F.conv2d), 3: (nn.Conv3d, F.conv3d)}
"""By the number of axes: the module, and its function."""


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((2, 3, 8, 8), (4, 4)),
        ((2, 3, 7, 11), (3, 4)),
        ((3, 6, 4), (2, 4)),
        ((2, 3, 9), (4,)),
        ((1, 2, 4, 5, 6), (2, 1, 3)),
    ],
)
def test_patches_as_rows_have_the_results_and_gradients_of_a_convolution(
    shape: tuple[int, ...], kernel: tuple[int, ...], biased: bool
):
    """Also where kernels do not divide sizes, and of one picture without a batch."""
    generator = torch.Generator().manual_seed(3)
    shapes = (shape, (5, shape[-len(kernel) - 1], *kernel), (5,))[: 3 if biased else 2]
    leaves = [
        torch.randn(each, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_() for each in shapes
    ]
    found, right = patch_products(*leaves), CONVOLUTIONS[len(kernel)][1](*leaves, stride=kernel)
    torch.testing.assert_close(found, right)
    upstream = torch.randn_like(right)
    pairs = (torch.autograd.grad(each, leaves, upstream) for each in (found, right))
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("autocast", [False, True])
def test_patches_round_no_more_than_the_convolution_does(autocast: bool):
    """In fp32 and under autocast to bf16, beside float64: values, and the gradients of picture, weight and bias."""
    leaves = [torch.randn(each, device=DEVICE).requires_grad_() for each in ((4, 3, 32, 32), (24, 3, 8, 8), (24,))]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]

    def of(function: Any, leaves: list[Tensor], **more: Any) -> list[Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast and leaves is not exact):
            out = function(*leaves, **more)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    right = of(F.conv2d, exact, stride=8)
    ours, theirs = (
        [
            float((one.detach().double() - other.detach()).norm() / other.detach().norm())
            for one, other in zip(found, right, strict=True)
        ]
        for found in (of(patch_products, leaves), of(F.conv2d, leaves, stride=8))
    )
    least = 1e-2 if autocast else 1e-6
    assert all(our <= max(2 * their, least) for our, their in zip(ours, theirs, strict=True)), (ours, theirs)


class _OfOwn(nn.Conv2d): ...


def _with(change: Any) -> nn.Module:
    layer = nn.Conv2d(2, 4, 2, 2)
    change(layer)
    return layer


LEFT_CONVOLUTIONS = {
    "its stride is not its kernel": lambda: nn.Conv2d(2, 4, 3, 2),
    "it has padding": lambda: nn.Conv2d(2, 4, 2, 2, padding=1),
    "it has a dilation": lambda: nn.Conv2d(2, 4, 2, 2, dilation=2),
    "it has groups": lambda: nn.Conv2d(2, 4, 2, 2, groups=2),
    "it is a _OfOwn": lambda: _OfOwn(2, 4, 2, 2),
    "it is a ParametrizedConv2d": lambda: _with(nn.utils.parametrizations.weight_norm),
    "one has hooks": lambda: _with(lambda layer: layer.register_forward_hook(lambda *_: None)),
    "one has a patched forward": lambda: _with(lambda layer: setattr(layer, "forward", layer.forward)),
}


@pytest.mark.parametrize("why", LEFT_CONVOLUTIONS)
def test_other_convolutions_are_left_with_the_reason(why: str):
    model = nn.Sequential(LEFT_CONVOLUTIONS[why](), nn.Conv2d(4, 4, 1))
    with pytest.raises(InputError, match=f"projections joint replaces nothing in Sequential: Sequential: {why}; leave"):
        join_projections(model)
    model.append(nn.Conv2d(4, 6, (2, 3), (2, 3), padding="valid"))
    undo = join_projections(model)
    assert [str(each) for each in projections_found(model)] == [
        f"projections joint: 1 Sequential left, {why}",
        "projections joint: 1 Sequential replaced",
    ]
    undo()
    assert type(model[2]) is nn.Conv2d


def test_a_model_of_patches_keeps_its_parameters_and_its_own_errors():
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(32, 2))
    shared = nn.Conv2d(3, 8, 4, 4)
    with pytest.raises(InputError, match="a weight is shared"):
        join_projections(nn.ModuleDict({"one": shared, "other": shared}))
    keys, x = [*model.state_dict()], torch.randn(2, 3, 9, 8)
    right = model(x)
    undo = join_projections(model)
    torch.testing.assert_close(model(x), right)
    assert [*model.state_dict()] == keys
    for shape, said in (((2, 4, 8, 8), "to have 3 channels"), ((2, 3, 3, 8), "Kernel size can't be greater")):
        with pytest.raises(RuntimeError, match=said):
            model(torch.randn(shape))
    undo()
    torch.testing.assert_close(model(x), right)
