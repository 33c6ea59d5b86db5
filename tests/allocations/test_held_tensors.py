"""What an optimizer and quantised modules hold where PyTorch's own keep nothing, in recorded steps and by itself."""

import copy
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from stepscope.allocations.explain import categories_of, explain
from stepscope.allocations.snapshot import snapshot_from
from stepscope.core.evidence import NOTES_KEY
from stepscope.recording.held_tensors import model_tensors, optimizer_tensors, plain_parts
from stepscope.recording.memory_history import Releases
from tests.allocations.recorded_steps import record

FLOAT, HALF = 4, 2
WEIGHT, BIAS = 64 * 32, 32


class OwnMomentum(torch.optim.Optimizer):
    """Momentum in an attribute, a second state nested in a list of `state`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.momentum: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for i, parameter in enumerate(self.param_groups[0]["params"]):
            if i not in self.momentum:
                self.momentum[i] = torch.zeros_like(parameter)
                self.state[parameter]["moments"] = [{"second": torch.zeros_like(parameter)}]
            self.momentum[i].add_(parameter.grad)
            self.state[parameter]["moments"][0]["second"].addcmul_(parameter.grad, parameter.grad)
            parameter.add_(self.momentum[i], alpha=-0.1)


class Slotted:
    """The momentum of a parameter, in an object without a dict."""

    __slots__ = ("momentum",)

    def __init__(self, parameter: Tensor) -> None:
        self.momentum = torch.zeros_like(parameter)


class Plain(torch.optim.Optimizer):
    """A descent whose subclasses keep one tensor of each parameter's size, each in another place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.keep(model)

    def keep(self, model: nn.Module) -> None:
        """What a subclass keeps from the start."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter)
            parameter.add_(parameter.grad, alpha=-0.1)

    def update(self, parameter: Tensor) -> None:
        """What a subclass keeps of a step."""


class InGroups(Plain):
    def keep(self, model: nn.Module) -> None:
        group = self.param_groups[0]
        group["momenta"] = [torch.zeros_like(parameter) for parameter in group["params"]]


class InObjects(Plain):
    def keep(self, model: nn.Module) -> None:
        self.slots = {name: Slotted(parameter) for name, parameter in model.named_parameters()}


class OnParameters(Plain):
    def update(self, parameter: Tensor) -> None:
        if not hasattr(parameter, "momentum"):
            vars(parameter)["momentum"] = torch.zeros_like(parameter)


class FarInside(Plain):
    def update(self, parameter: Tensor) -> None:
        if not self.state[parameter]:
            self.state[parameter]["shampoo"] = {"factors": [{"left": ({"moments": [torch.zeros_like(parameter)]},)}]}


class Averaged(Plain):
    """Beside an average of the weights, its model is in an attribute, as well as who trains it."""

    def keep(self, model: nn.Module) -> None:
        self.average, self.model = copy.deepcopy(model).requires_grad_(False), model
        self.trainer = SimpleNamespace(model=model, batches=[torch.zeros(3, 5)])


class Wrapped(Plain):
    """As in Lookahead or SAM: an optimizer of PyTorch's, in an attribute, does the work."""

    def keep(self, model: nn.Module) -> None:
        self.inner = torch.optim.SGD(self.param_groups, momentum=0.9)

    def update(self, parameter: Tensor) -> None:
        if parameter is self.param_groups[0]["params"][0]:
            self.inner.step()


class MadeAnew(Plain):
    """What it keeps is another tensor after each step."""

    def update(self, parameter: Tensor) -> None:
        self.state[parameter]["last"] = parameter.detach().clone()


class Replaced(Plain):
    """Gives each parameter new memory."""

    def update(self, parameter: Tensor) -> None:
        parameter.data = parameter.data.clone()


class OwnMasters(torch.optim.Optimizer):
    """fp32 weights that stand for a model's 16-bit ones, as its only group."""

    def __init__(self, parameters: Any) -> None:
        self.low = list(parameters)
        super().__init__([parameter.detach().float().clone() for parameter in self.low], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for low, high in zip(self.low, self.param_groups[0]["params"], strict=True):
            low.copy_(high.add_(low.grad.float(), alpha=-0.1))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for low in self.low:
            low.grad = None


class FourBits(nn.Module):
    """A linear map whose weights lie two in a byte, as bitsandbytes keeps them: their scales are in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WEIGHT // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(BIAS), requires_grad=False)
        scales = SimpleNamespace(absmax=torch.ones(64), state2=SimpleNamespace(code=torch.ones(256)))
        vars(self.weight)["quant_state"] = scales
        self.register_buffer("mask", torch.ones(3, dtype=torch.uint8))

    def forward(self, values: Tensor) -> Tensor:
        codes = torch.cat([self.weight & 15, self.weight >> 4]).view(BIAS, -1)
        return nn.functional.linear(values, codes.float() - 8, self.bias)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = FourBits(), nn.Linear(64, BIAS, bias=False)
        self.register_buffer("positions", torch.ones(5, dtype=torch.uint8))

    def forward(self, values: Tensor) -> Tensor:
        return self.base(values) + self.adapter(values)


def at_the_end(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **choices: Any) -> dict[str, int]:
    values = torch.randn(2, 64, dtype=next(model.parameters()).dtype if isinstance(model, nn.Linear) else torch.float32)
    snapshot = record(folder, model, optimizer, values, lambda model, values: model(values).square().mean(), **choices)
    found = explain(snapshot_from(snapshot, "s"))
    found.self_check()
    assert found.noted
    return {str(name): size for name, size in categories_of(found.alive(len(found.snapshot.events) - 1)).items()}


def test_state_in_attributes_and_in_lists(tmp_path: Path):
    model = nn.Linear(64, BIAS)
    held = at_the_end(tmp_path, model, OwnMomentum(model.parameters()))
    assert held["optimizer state"] == 2 * held["parameters"] == 2 * FLOAT * (WEIGHT + BIAS)
    assert held["workspaces"] == held["temporaries"] == 0


@pytest.mark.parametrize("kind", [InGroups, InObjects, OnParameters, FarInside, Averaged, Wrapped, MadeAnew])
def test_state_wherever_it_is(kind: type[Plain], tmp_path: Path):
    model = nn.Linear(64, BIAS)
    held = at_the_end(tmp_path, model, kind(model))
    assert held["optimizer state"] == held["parameters"] == FLOAT * (WEIGHT + BIAS)
    assert held["inputs"] == FLOAT * 2 * 64 and held["gradients"] == held["workspaces"] == held["temporaries"] == 0


def test_parameters_that_the_step_replaces_stay_parameters(tmp_path: Path):
    model = nn.Linear(64, BIAS)
    held = at_the_end(tmp_path, model, Replaced(model), steps=1, several=False)
    assert held["parameters"] == FLOAT * (WEIGHT + BIAS) and held["optimizer state"] == 0


def test_gradients_of_before_the_recording_end_where_they_are_dropped(tmp_path: Path):
    """The profiler does not tell it, since it did not see them made."""
    model = nn.Linear(64, BIAS)
    held = at_the_end(tmp_path, model, Plain(model), zeroed_between=True)
    assert held["gradients"] == held["parameters"] == FLOAT * (WEIGHT + BIAS)


def test_the_peak_of_a_phase_that_begins_below_what_was_there_before(tmp_path: Path):
    """Gradients are dropped between the steps: forward begins with the parameters and the batch."""
    model = nn.Linear(64, BIAS)
    given = record(tmp_path, model, Plain(model), torch.randn(2, 64), lambda model, values: model(values).sum(),
                   zeroed_between=True)  # fmt: skip
    measured, size = given[NOTES_KEY]["measured"], FLOAT * (WEIGHT + BIAS)
    assert measured["after_parameters"] == 2 * size + FLOAT * 2 * 64
    assert size < measured["forward_peak"] < 1.5 * size


@pytest.mark.parametrize("several", [True, False])
def test_when_storages_are_released(several: bool):
    """A view keeps its storage; what `data` is set to takes its place at once. Nothing stays on the tensors."""
    weight, dropped, kept = nn.Parameter(torch.ones(300)), torch.ones(400), torch.ones(500)
    addresses = [tensor.data_ptr() for tensor in (weight, dropped, kept)]
    releases = Releases([weight, dropped, kept, kept[:3], torch.empty(0)])
    view = kept[1:]
    del kept
    if several:
        releases.look()
    del dropped
    weight.data = torch.zeros(300)
    begun = time.time_ns()
    releases.close()
    assert releases.time_ns.keys() == set(addresses[:2])
    assert releases.time_ns[addresses[1]] < begun <= releases.time_ns[addresses[0]]
    assert weakref.getweakrefcount(weight) == 0
    assert view.sum() == 499


def test_a_state_that_is_no_dict():
    model = nn.Linear(2, 3)
    optimizer, state = Plain(model), torch.zeros(7)
    vars(optimizer)["state"] = [state]
    assert [tensor is state for _, tensor in optimizer_tensors(optimizer, model, {})] == [True]


def test_state_that_the_recorded_step_makes(tmp_path: Path):
    model = nn.Linear(64, BIAS)
    held = at_the_end(tmp_path, model, OwnMomentum(model.parameters()), warm=0, steps=1)
    assert held["optimizer state"] == 2 * FLOAT * (WEIGHT + BIAS) and held["workspaces"] == 0


def test_master_weights_are_state(tmp_path: Path):
    model = nn.Linear(64, BIAS).bfloat16()
    held = at_the_end(tmp_path, model, OwnMasters(model.parameters()))
    assert (held["parameters"], held["optimizer state"]) == (HALF * (WEIGHT + BIAS), FLOAT * (WEIGHT + BIAS))


def test_the_weights_of_another_model_are_no_state():
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()])
    names = {id(parameter): name for name, parameter in first.named_parameters()}
    assert list(optimizer_tensors(optimizer, first, names)) == []


def test_a_frozen_quantised_base(tmp_path: Path):
    """Its codes, their scales and what its module needs for them; the bias, the adapter and a mask are parameters."""
    model = Adapted()
    held = at_the_end(tmp_path, model, torch.optim.AdamW(model.adapter.parameters()))
    assert held["frozen quantised weights"] == WEIGHT // 2 + FLOAT * (64 + 256) + 3
    assert held["parameters"] == FLOAT * (WEIGHT + BIAS) + 5
    assert held["optimizer state"] == 2 * FLOAT * WEIGHT + FLOAT  # a count of steps beside


def test_weights_of_8_bits_in_a_buffer():
    """As in weight-only quantisation by hand; a mask of bytes is none, and a weight that is trained neither."""
    model = nn.Linear(64, BIAS, bias=False)
    base = nn.Module()
    base.register_buffer("weight", torch.zeros(BIAS, 64, dtype=torch.int8))
    base.register_buffer("scales", torch.ones(BIAS))
    masked = nn.Module()
    masked.register_buffer("weight_mask", torch.ones(7, dtype=torch.uint8))
    model.add_module("base", base)
    model.add_module("masked", masked)
    found = [name for category, name, _ in model_tensors(model) if category == "frozen quantised weights"]
    assert found == ["base.weight", "base.scales"]


def test_no_other_run_has_that_category(tmp_path: Path):
    model = nn.Linear(64, BIAS)
    assert "frozen quantised weights" not in at_the_end(tmp_path, model, torch.optim.SGD(model.parameters()))


class Packed(Tensor):
    """A tensor made of others, as torchao's are: its own storage has a size and no memory."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> "Packed":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "Packed":
        return Packed(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        (packed,) = args
        return return_and_correct_aliasing(func, args, kwargs or {}, Packed(packed.codes, packed.scale))


def test_a_weight_made_of_other_tensors():
    model = nn.Linear(4, 8, bias=False)
    codes, scale = torch.zeros(8, 4, dtype=torch.int8), torch.ones(8)
    model.weight = nn.Parameter(Packed(codes, scale), requires_grad=False)
    ((category, name, tensor),) = model_tensors(model)
    assert (category, name) == ("frozen quantised weights", "weight")
    assert {part.untyped_storage().data_ptr() for part in plain_parts(tensor)} == {codes.data_ptr(), scale.data_ptr()}
