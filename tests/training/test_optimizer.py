"""AdamW with its state in bf16, against PyTorch's AdamW in fp32."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.training.half_optimizers import AdamWBf16State
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini, run_steps
from tests.cpu_allocations import allocated_bytes


def stepped(
    optimizer: type[AdamWBf16State] | type[torch.optim.AdamW], gradients: list[Tensor], start: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    parameter = nn.Parameter(start.clone())
    made = optimizer([parameter], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        made.step()
    return parameter.detach(), made.state[parameter]


def test_it_is_adamw_within_the_rounding_of_bf16():
    torch.manual_seed(0)
    start = torch.randn(64, 48)
    gradients = [torch.randn(64, 48) * (1 + i % 3) for i in range(20)]
    ours, state = stepped(AdamWBf16State, gradients, start)
    theirs, exact = stepped(torch.optim.AdamW, gradients, start)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    # bf16 keeps 8 bits: an error of up to 1/256 in each rounding to nearest, 1/128 in each at random.
    scale = exact["exp_avg"].abs().max()
    assert (state["exp_avg"].float() - exact["exp_avg"]).abs().max() < scale / 32
    torch.testing.assert_close(state["exp_avg_sq"].float(), exact["exp_avg_sq"], rtol=0.1, atol=0)
    moved, difference = (theirs - start).abs(), (ours - theirs).abs()
    assert difference.mean() < 0.01 * moved.mean()
    assert difference.max() < 0.1 * moved.max()


def test_the_first_step_by_hand():
    """After one step both moments are the gradient's, corrected: the update is lr * sign(g), and lr * decay of p."""
    ours, state = stepped(AdamWBf16State, [torch.tensor([0.5, -2.0])], torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(ours, torch.tensor([1 - 0.001 - 0.01, 1 - 0.001 + 0.01]))
    assert state["step"] == 1


def test_epsilon_is_added_to_the_root_and_not_under_it():
    """A gradient of 1e-6 moves its parameter by 1 / 1.01 of the rate; with 1e-8 under the root by 1 / 100 of it."""
    ours, _ = stepped(AdamWBf16State, [torch.tensor([1e-6])], torch.tensor([0.0]))
    assert float(ours) == pytest.approx(-0.01 / 1.01, rel=1e-4)


def test_the_second_moment_decays_and_grows_without_bias():
    """Rounded to nearest, a change of 0.1 % a step would be lost every time, and the moment stay where it was."""
    torch.manual_seed(0)
    gradients = [torch.ones(4096)] * 50 + [torch.full((4096,), 0.1)] * 1000
    _, state = stepped(AdamWBf16State, gradients, torch.zeros(4096))
    _, exact = stepped(torch.optim.AdamW, gradients, torch.zeros(4096))
    assert state["exp_avg_sq"].float().mean() == pytest.approx(float(exact["exp_avg_sq"].mean()), rel=0.01)
    nearest = exact["exp_avg_sq"][:1].bfloat16()
    assert torch.equal((nearest.float() * 0.999).bfloat16(), nearest)


def test_rounding_keeps_infinity_and_zero():
    _, state = stepped(AdamWBf16State, [torch.tensor([float("inf"), 0.0])], torch.zeros(2))
    assert state["exp_avg_sq"].tolist() == [float("inf"), 0.0]


def test_parameters_without_a_gradient_are_left_alone():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamWBf16State([parameter], lr=1.0)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3)) and not optimizer.state[parameter]
    assert optimizer.step(lambda: 2.5) == 2.5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "bf16-pure"])
def test_training_learns_with_state_in_bf16(dtype: str):
    step = TrainingStep(mini(dtype=dtype, optimizer="adamw-bf16-state"), torch.device("cpu"))
    step.batches = step.batches[:1]
    assert isinstance(step.optimizer, AdamWBf16State)
    step.optimizer.param_groups[0]["lr"] = 1e-3
    first, last = run_steps(step), run_steps(step, 59)
    assert first is not None and last is not None and last < first - 1.0
    state = [value for each in step.optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    assert {tensor.dtype for tensor in state} == {torch.bfloat16}
    assert sum(t.nbytes for t in state) == 2 * 2 * sum(p.numel() for p in step.model.parameters())


def test_temporaries_are_two_of_the_largest_parameter():
    """By the allocator: what a step has at most beyond what it keeps is two fp32 copies of one parameter."""
    size = 1 << 20
    parameters = [nn.Parameter(torch.zeros(size)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(size)
    optimizer = AdamWBf16State(parameters)
    optimizer.step()
    kept, peak = allocated_bytes(optimizer.step)
    assert kept == 0
    assert 2 * 4 * size <= peak < 2.01 * 4 * size
