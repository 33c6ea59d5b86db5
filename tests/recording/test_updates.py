"""The count of an optimizer's updates: known where it is kept, and never made up."""

import pytest
import torch
from torch import nn

from stepscope.recording.updates import applied_updates, most_updates, read_updates
from stepscope.training.half_optimizers import AdamWBf16State


def pair() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], count: int) -> None:
    for _ in range(count):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_without_a_count_has_no_known_updates(momentum: float):
    parameters = pair()
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    assert applied_updates(optimizer) is None
    steps(optimizer, parameters, 3)
    assert applied_updates(optimizer) is None
    assert read_updates(optimizer, None, steps=3, before=0) is None


@pytest.mark.parametrize("state", [torch.ones(3), object(), [torch.ones(3)], "no mapping at all"])
def test_the_state_of_an_optimizer_of_ones_own_is_left_alone(state: object):
    parameters = pair()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    vars(optimizer)["state"] = [state] if isinstance(state, str) else dict.fromkeys(parameters, state)
    assert applied_updates(optimizer) is most_updates(optimizer) is None
    assert read_updates(optimizer, None, steps=3, before=0) is None


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamWBf16State, torch.optim.RAdam])
def test_a_parameter_without_a_gradient_hides_no_updates_of_the_others(make: type[torch.optim.Optimizer]):
    parameters = pair()
    optimizer = make(parameters)  # type: ignore[call-arg]
    assert applied_updates(optimizer) == 0
    steps(optimizer, parameters[:1], 3)
    assert applied_updates(optimizer) == 3
    steps(optimizer, parameters, 1)
    assert applied_updates(optimizer) == 1, "the fewest of those that had any"


def test_without_an_optimizer_nothing_is_counted():
    assert applied_updates(None) is None
