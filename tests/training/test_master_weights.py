"""Weights in bf16 that an optimizer writes from masters in fp32: what is kept, what is learned, what goes on."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import master_bytes, state_bytes
from stepscope.training.half_optimizers import OnMasters, halve
from stepscope.training.training_step import AssembledStep, TrainingStep, textbook_parts
from tests.conftest import mini, run_steps
from tests.kernels.test_adamw import DEVICE

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
OPTIMIZERS = ("adamw-foreach", "adamw-fused", "adamw-loop")


def test_weights_and_their_biases_are_halved_norms_are_not_and_a_tied_one_has_one_master():
    one, other = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
    other.weight = one.weight
    before = one.weight.detach().clone()
    model = nn.ModuleDict({"a": one, "b": other, "norm": nn.LayerNorm(3)})
    masters = halve(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {
        "a.weight": torch.bfloat16, "a.bias": torch.bfloat16, "norm.weight": torch.float32, "norm.bias": torch.float32,
    }  # fmt: skip
    assert [*map(id, masters)] == [id(one.weight), id(one.bias)]
    assert torch.equal(masters[one.weight], before) and torch.equal(other.weight, before.bfloat16())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_updates_masters_and_the_weights_are_their_rounding(optimizer: str):
    """The masters take the updates that PyTorch's optimizer makes of these gradients in fp32."""
    step = TrainingStep(mini(dtype="bf16-master", optimizer=optimizer), CPU)
    assert isinstance(step.optimizer, OnMasters)
    run_steps(step, 2)
    step.prepare()
    for phase in step.phases[:-1]:
        phase.run()
    masters, wanted = [], []
    for parameter in step.model.parameters():
        state = step.optimizer.state[parameter]
        master = state.get("master", parameter)
        plain = nn.Parameter(master.detach().clone())
        exact = torch.optim.AdamW([plain], lr=1e-4, foreach=False)
        exact.state[plain] = {name: state[name].clone() for name in ("step", "exp_avg", "exp_avg_sq")}
        assert parameter.grad is not None
        plain.grad = parameter.grad.float()
        exact.step()
        masters.append((parameter, master))
        wanted.append(plain.detach())
    step.phases[-1].run()
    for (parameter, master), exact in zip(masters, wanted, strict=True):
        torch.testing.assert_close(master.detach(), exact, rtol=1e-6, atol=1e-8)
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("optimizer", ["adamw-foreach", "adamw-one-launch"])
def test_it_learns_as_autocast_does(optimizer: str):
    losses: dict[str, float] = {}
    for dtype in ("bf16", "bf16-master"):
        chosen = "adamw-foreach" if dtype == "bf16" else optimizer
        step = TrainingStep(mini(dtype=dtype, optimizer=chosen, seq_len=8), torch.device(DEVICE))
        step.batches = step.batches[:1]
        assert step.optimizer is not None
        for group in step.optimizer.param_groups + getattr(step.optimizer, "inner", step.optimizer).param_groups:
            group["lr"] = 1e-3
        losses[dtype] = run_steps(step, 12) or 0.0
    assert losses["bf16-master"] == pytest.approx(losses["bf16"], rel=0.02)


def test_what_is_kept_by_dtype():
    step = TrainingStep(mini(dtype="bf16-master", optimizer="adamw-fused"), CPU)
    run_steps(step)
    assert step.optimizer is not None
    for name, parameter in step.model.named_parameters():
        norm = "norm" in name
        assert parameter.dtype == (torch.float32 if norm else torch.bfloat16)
        state = {
            key: value.dtype for key, value in step.optimizer.state[parameter].items() if isinstance(value, Tensor)
        }
        assert set(state.values()) == {torch.float32} and ("master" in state) is not norm


@pytest.mark.parametrize(("optimizer", "moment"), [("adamw-one-launch", 4), ("adamw-8bit", 1)])
def test_one_launch_keeps_2_bytes_of_a_master_and_gives_the_rest_back(optimizer: str, moment: int):
    workload = mini(dtype="bf16-master", optimizer=optimizer)
    assert (master_bytes(workload), state_bytes(workload)) == (2, 2 * moment + 2)
    given = textbook_parts(workload, torch.device(DEVICE))
    of_masters = [weakref.ref(master) for master in given.masters.values()]
    step = AssembledStep(given, workload, torch.device(DEVICE))
    del given
    assert len(of_masters) > 4 and not any(of() is not None for of in of_masters)
    assert step.optimizer is not None
    run_steps(step)
    for parameter in step.model.parameters():
        state = step.optimizer.state[parameter]
        assert state["exp_avg"].element_size() == moment
        assert ("master_lower" in state) is (parameter.dtype == torch.bfloat16)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_that_is_saved_goes_on_as_if_it_had_not_been(optimizer: str):
    one, other = (TrainingStep(mini(dtype="bf16-master", optimizer=optimizer), CPU) for _ in range(2))
    run_steps(one, 3)
    run_steps(other, 1)
    assert one.optimizer is not None and other.optimizer is not None
    saved = copy.deepcopy((one.model.state_dict(), one.optimizer.state_dict()))
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.batches = [*one.batches[3:], *one.batches[:3]]
    other._next_batch = 0
    assert run_steps(one, 2) == run_steps(other, 2)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"dtype": "bf16-master", "optimizer": "adamw-bf16-state"}, "keeps no master weights"),
        ({"dtype": "bf16-pure", "optimizer": "adamw-one-launch"}, "choose dtype bf16-master"),
        ({"dtype": "fp16", "optimizer": "adamw-under-backward"}, "takes no scaled gradients"),
        ({"graph": "step", "compile": "reduce-overhead"}, "captures CUDA graphs of its own"),
        ({"graph": "step", "optimizer": "adamw-bf16-state"}, "counts its updates on the host"),
        ({"graph": "whole"}, "graph 'whole'"),
        ({"dtype": "bf16-master", "parallel": "ddp", "ranks": 2}, "say --dtype bf16 --parallel fsdp2:compute=bf16"),
        ({"dtype": "fp8", "parallel": "fsdp2", "ranks": 2}, "say --dtype fp8 --parallel fsdp2:compute=bf16"),
        ({"optimizer": "adamw-under-backward", "parallel": "ddp", "ranks": 2}, "a step that one process runs"),
    ],
)
def test_choices_that_exclude_each_other_are_one_line(choices: dict[str, object], says: str):
    with pytest.raises(InputError, match=says) as caught:
        mini(batch_size=4, **choices)
    assert "\n" not in str(caught.value)
