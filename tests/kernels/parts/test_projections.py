"""Projections as one product: the same results and gradients as apart, however their weights and gradients lie."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from stepscope.core.errors import InputError
from stepscope.core.workloads import TextbookWorkload
from stepscope.kernels.parts import projections
from stepscope.kernels.parts.projections import joint_projections, lie_together
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


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, INPUTS, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


@pytest.mark.parametrize("together", [True, False])
def test_results_and_gradients_are_those_of_products_apart(together: bool):
    x, given = inputs(), weights(together=together)
    found = joint_projections(x, given)
    right = [F.linear(x, weight) for weight in given]
    torch.testing.assert_close(found, tuple(right))
    upstream = [torch.randn_like(each) for each in right]
    leaves = [x, *given]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(right, leaves, upstream)
    )
    assert torch.autograd.gradcheck(lambda x, *weights: joint_projections(x, weights), leaves)


def test_weights_that_lie_together_and_gradients_side_by_side_are_never_copied(monkeypatch: pytest.MonkeyPatch):
    x, given = inputs(), weights(together=True)
    first = given[0].data_ptr()
    monkeypatch.setattr(projections.torch, "cat", None)
    joined = projections._joined(given, torch.float64)
    assert joined.data_ptr() == first and joined.shape == (sum(WIDTHS), INPUTS)
    found = joint_projections(x, given)
    rows = torch.ones(8, sum(WIDTHS), dtype=torch.float64, device=DEVICE)
    torch.autograd.backward(found, [part.view(2, 4, -1) for part in rows.split(list(WIDTHS), dim=1)])
    assert x.grad is not None
    right = torch.stack([weight.detach().sum(0) for weight in given]).sum(0)
    torch.testing.assert_close(x.grad, right.expand(2, 4, -1))


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
