"""AdamW in one launch against float64: on a GPU, or without one in Triton's interpreter (conftest.py)."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import MOST_NUMBERS, moment_blocks
from stepscope.training.one_launch import AdamWOneLaunch, AdamWUnderBackward, moments_beside

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((3, 5), (1,), (2048,), (2049,), (7, 700), (), (0, 4), (64, 64))


def parameters(dtypes: Sequence[torch.dtype], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    given = [nn.Parameter(each.to(DEVICE, dtypes[i % len(dtypes)])) for i, each in enumerate(drawn)]
    turned = torch.randn(6, 9, generator=generator).to(DEVICE, dtypes[0]).T
    return [*given, nn.Parameter(turned)]


def gradients(of: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(each.shape, generator=generator).to(each.device, each.dtype) for each in of]


def in_float64(ours: Sequence[Tensor], steps: int) -> list[Tensor]:
    """The parameters after so many steps of PyTorch's AdamW in float64, of the same gradients."""
    exact = [nn.Parameter(each.detach().double()) for each in ours]
    optimizer = torch.optim.AdamW(exact, **OPTIONS, foreach=False)
    for step in range(steps):
        for parameter, gradient in zip(exact, gradients(ours, step), strict=True):
            parameter.grad = gradient.double()
        optimizer.step()
    return [each.detach() for each in exact]


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """The master in the parameter's dtype. Triton's interpreter cuts off where a GPU rounds."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        master = (master.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return master.to(dtype)


def stepped(optimizer: torch.optim.Optimizer, ours: Sequence[Tensor], *steps: int) -> None:
    for step in steps:
        for parameter, gradient in zip(ours, gradients(ours, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("optimizer_class", [AdamWOneLaunch, AdamWUnderBackward])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32)], ids=len)
def test_masters_are_those_of_float64(optimizer_class: type[AdamWOneLaunch], dtypes: Sequence[torch.dtype]):
    ours = parameters(dtypes)
    exact = in_float64(ours, 4)
    optimizer = optimizer_class(ours, **OPTIONS)
    stepped(optimizer, ours, 0, 1, 2, 3)
    for parameter, wanted in zip(ours, exact, strict=True):
        master = optimizer.state[parameter].get("master", parameter)
        torch.testing.assert_close(master.double(), wanted, rtol=3e-6, atol=3e-7)
        assert torch.equal(parameter, rounded(master, parameter.dtype))
        assert int(optimizer.state[parameter]["step"]) == 4


def test_a_master_that_is_given_is_exact_and_not_the_rounded_weight():
    exact = torch.randn(40, 50, device=DEVICE)
    weight = nn.Parameter(exact.to(torch.bfloat16))
    optimizer = AdamWOneLaunch([weight], lr=0.0, masters={weight: exact})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"], exact)


def test_groups_have_numbers_of_their_own_and_a_rate_may_change():
    ours = parameters((torch.float32,))
    twins = copy.deepcopy(ours)
    groups: list[Any] = [
        {"params": ours[:3], "lr": 1e-1, "weight_decay": 0.0},
        {"params": ours[3:], "betas": (0.5, 0.9)},
    ]
    theirs = [{"params": twins[:3], "lr": 1e-1, "weight_decay": 0.0}, {"params": twins[3:], "betas": (0.5, 0.9)}]
    one, other = AdamWOneLaunch(groups, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS, foreach=False)
    for step in range(3):
        stepped(one, ours, step)
        stepped(other, twins, step)
        for group in (*one.param_groups, *other.param_groups):
            group["lr"] *= 0.5
    for parameter, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=2e-5, atol=1e-6)


def test_a_rate_on_the_device_is_read_there():
    ours = parameters((torch.float32,))
    rate = torch.tensor(0.0, device=DEVICE)
    before = copy.deepcopy(ours)
    optimizer = AdamWOneLaunch(ours, lr=rate)
    stepped(optimizer, ours, 0)
    assert all(torch.equal(one, other) for one, other in zip(ours, before, strict=True))
    rate.fill_(0.1)
    stepped(optimizer, ours, 1)
    assert not any(torch.equal(one, other) for one, other in zip(ours, before, strict=True) if one.numel())


def test_what_has_no_gradient_stays():
    ours = parameters((torch.bfloat16,))
    before = ours[0].detach().clone()
    optimizer = AdamWOneLaunch(ours, **OPTIONS)
    for parameter, gradient in list(zip(ours, gradients(ours, 0), strict=True))[1:]:
        parameter.grad = gradient
    optimizer.step()
    assert torch.equal(ours[0], before) and ours[0] not in optimizer.state
    stepped(optimizer, ours, 1)
    assert not torch.equal(ours[0], before)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=len)
def test_a_state_that_is_saved_goes_on_as_if_it_had_not_been(dtypes: Sequence[torch.dtype]):
    ours = parameters(dtypes)
    optimizer = AdamWOneLaunch(ours, **OPTIONS)
    stepped(optimizer, ours, 0, 1)
    twins = copy.deepcopy(ours)
    resumed = AdamWOneLaunch(twins, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, ours, 2)
    stepped(resumed, twins, 2)
    for parameter, twin in zip(ours, twins, strict=True):
        assert torch.equal(parameter, twin)
        for name in ("exp_avg", "exp_avg_sq", "master", "step"):
            if name in optimizer.state[parameter]:
                assert torch.equal(optimizer.state[parameter][name], resumed.state[twin][name])


def test_wrong_parameters_are_one_line():
    with pytest.raises(InputError, match="takes parameters in fp32 or bf16, and one is"):
        AdamWOneLaunch([nn.Parameter(torch.ones(2, dtype=torch.float16))])
    strided = nn.Parameter(torch.ones(4, 4, device=DEVICE)[:, ::2])
    strided.grad = torch.ones_like(strided)
    with pytest.raises(InputError, match="takes dense parameters"):
        AdamWOneLaunch([strided]).step()


def test_a_step_calls_its_hooks_once():
    """PyTorch wraps `step` of each class of which an optimizer was made, so a step must not call another's."""
    told: list[str] = []
    for optimizer_class in (AdamWOneLaunch, AdamWUnderBackward):
        weight = nn.Parameter(torch.ones(2, device=DEVICE))
        optimizer = optimizer_class([weight], **OPTIONS)
        optimizer.register_step_post_hook(lambda one, *_: told.append(type(one).__name__))

        def closure(weight: nn.Parameter = weight) -> float:
            loss = (weight * weight).sum()
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) == 2.0 and optimizer.state[weight]["step"] == 1
    assert told == ["AdamWOneLaunch", "AdamWUnderBackward"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_updates_under_backward_are_those_after_it():
    """On a stream of their own, of gradients as a real backward makes them, with the last bucket left for `step`."""
    made: list[nn.Sequential] = []
    for optimizer_class in (AdamWOneLaunch, AdamWUnderBackward):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(9))).to(DEVICE, torch.bfloat16)
        optimizer = optimizer_class(model.parameters(), **OPTIONS)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(64, 2048, device=DEVICE, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        made.append(model)
    one, other = made
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_moments_lie_side_by_side_and_apart_from_each_other():
    """In blocks of a bounded size, each laid out as its parameter; one that is larger has a block of its own."""
    ours = [*parameters([torch.float32]), nn.Parameter(torch.ones(20, 30, 4, device=DEVICE).permute(2, 0, 1))]
    made = moments_beside(ours)
    spans: list[tuple[int, int]] = []
    for parameter, moments in zip(ours, made, strict=True):
        for moment in moments:
            assert moment.shape == parameter.shape and moment.stride() == parameter.stride()
            assert moment.dtype == torch.float32 and not moment.any()
            spans.append((moment.data_ptr(), moment.data_ptr() + moment.nbytes))
    assert len({moment.untyped_storage().data_ptr() for moments in made for moment in moments}) == 1
    assert all(start % 16 == 0 for start, _ in spans)
    spans = sorted(span for span in spans if span[0] < span[1])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    sizes = [MOST_NUMBERS // 2, MOST_NUMBERS // 2, 1, 3 * MOST_NUMBERS, 5]
    assert moment_blocks(sizes) == [[0, 1], [2], [3], [4]]
