"""Gradients of a step clipped by their global norm: by which optimizer, in which precision, when, and how it waits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.training.optimizer import clip_gradients, global_norm
from stepscope.training.training_step import AssembledStep, TrainingStep
from stepscope.training.user_module.loading import make_user_step
from tests.conftest import at_length, mini, run_steps

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def norm_of(gradients: list[Tensor]) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients))


def until_the_update(step: AssembledStep) -> list[Tensor]:
    """Run all but the last phase; the gradients as they are then, without their scale."""
    step.prepare()
    for phase in step.phases[:-1]:
        phase.run()
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    return [p.grad.double() / scale for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "choices",
    [
        {"optimizer": "adamw-foreach"},
        {"optimizer": "adamw-foreach", "accumulation": 2},
        {"optimizer": "adamw-fused", "dtype": "fp16"},
        {"optimizer": "adamw-loop", "dtype": "bf16-pure"},
        {"optimizer": "adamw-fused", "dtype": "bf16-master"},
        {"optimizer": "adamw-one-launch", "dtype": "bf16-master"},
        {"optimizer": "adamw-under-backward"},
        {"optimizer": "adamw-under-backward", "dtype": "bf16-master", "accumulation": 2},
        *at_length({"optimizer": "adamw-bf16-state"}, {"optimizer": "adamw-fused", "dtype": "bf16"}),
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
@pytest.mark.parametrize("share", [0.1, 10.0])
def test_the_update_takes_clipped_gradients(choices: dict[str, Any], share: float):
    """By the first moment, a tenth of the gradient that the first update took."""
    plain = until_the_update(TrainingStep(mini(**choices), DEVICE))
    bound = share * norm_of(plain)
    step = TrainingStep(mini(**choices, clip=bound), DEVICE)
    found = until_the_update(step)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    step.phases[-1].run()
    assert step.gradient_norm is not None
    assert float(step.gradient_norm) == pytest.approx(norm_of(plain), rel=1e-5)
    assert step.optimizer is not None
    coefficient, coarse = min(1.0, bound / (norm_of(plain) + 1e-6)), choices.get("dtype") == "bf16-pure"
    coarse = coarse or choices["optimizer"] == "adamw-bf16-state"
    for parameter, gradient in zip(step.model.parameters(), found, strict=True):
        moment = step.optimizer.state[parameter]["exp_avg"].double()
        torch.testing.assert_close(moment, 0.1 * coefficient * gradient, rtol=1e-2 if coarse else 1e-5, atol=1e-12)


def test_a_step_without_it_measures_no_norm():
    step = TrainingStep(mini(), DEVICE)
    run_steps(step)
    assert step.gradient_norm is None


def test_an_overflow_is_still_skipped():
    step = TrainingStep(mini(dtype="fp16", clip=1.0), DEVICE)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    until_the_update(step)
    first = next(step.model.parameters()).grad
    assert first is not None
    first.view(-1)[0] = math.inf
    scale = step.scaler.get_scale()
    step.phases[-1].run()
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert step.scaler.get_scale() == scale / 2


@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_it_is_pytorchs_where_gradients_are_fp32(max_norm: float):
    def made() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (), (0, 2), (700,))]
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return [*parameters, nn.Parameter(torch.ones(3))]

    ours, theirs = made(), made()
    assert torch.equal(clip_gradients(ours, max_norm), torch.nn.utils.clip_grad_norm_(theirs, max_norm, foreach=True))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_the_norm_of_16_bits_is_not_rounded_to_them():
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1.0)
    assert float(global_norm(parameters)) == pytest.approx(math.sqrt(3000), rel=1e-6)
    assert float(global_norm([nn.Parameter(torch.ones(2))])) == 0.0


class Reads(TorchDispatchMode):
    """Counts what makes the host wait: a number that it reads, a size that it must know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero,
                                   torch.ops.aten.nonzero, torch.ops.aten.equal):  # fmt: skip
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing():
    parameters = [nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Reads() as reads:
        norm = clip_gradients(parameters, 1.0)
    assert not reads.found
    with reads:
        float(norm)
    assert reads.found == ["aten._local_scalar_dense.default"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-one-launch", "adamw-under-backward"])
@pytest.mark.parametrize("dtype", ["bf16", "bf16-master"])
def test_the_update_on_a_gpu_waits_for_nothing(optimizer: str, dtype: str):
    step = TrainingStep(mini(optimizer=optimizer, dtype=dtype, clip=0.1), torch.device("cuda"))
    run_steps(step, 3)
    until_the_update(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.phases[-1].run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.gradient_norm is not None and float(step.gradient_norm) > 0


OWN = """
import torch
from torch import nn

def make(rate=1.0):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, torch.ones(4, 3), lambda out: 100 * out.square().mean(), torch.optim.SGD(net.parameters(), rate)
"""


def test_an_optimizer_of_ones_own_takes_clipped_gradients(tmp_path: Any):
    (tmp_path / "own.py").write_text(OWN)
    workload = FactoryWorkload(factory=f"{tmp_path / 'own.py'}:make", model=UserModel(name=""), clip=0.5)
    step, found = make_user_step(workload, DEVICE)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    for phase in step.phases:
        phase.run()
    moved = [(b - a).detach() for a, b in zip(before, step.model.parameters(), strict=True)]
    assert norm_of(moved) == pytest.approx(0.5, rel=1e-5)  # at a rate of 1, the update is the gradient
    assert found.clip == 0.5 and found.by_factory == ("optimizer",)
