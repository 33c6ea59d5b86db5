"""AdamW in one launch against float64: on a GPU, or without one in Triton's interpreter (conftest.py)."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import MOST_NUMBERS, moment_blocks
from stepscope.kernels.adamw import BLOCK, lower_bits, master_of, most_of_quotient
from stepscope.training.one_launch import AdamW8Bit, AdamWOneLaunch, AdamWUnderBackward, moments_beside

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


def held(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The parameter in fp32: its master, or itself."""
    lower = optimizer.state[parameter].get("master_lower")
    return parameter.detach() if lower is None else master_of(parameter, lower)


def is_rounding(parameter: Tensor, master: Tensor) -> bool:
    """Whether each number is its master's rounding to the nearest; from the middle of two, away from zero."""
    towards_zero = (master.view(torch.int32) & -(1 << 16)).view(torch.float32)
    middle = (master.view(torch.int32) & 0xFFFF) == 0x8000
    away = (master.double() * 2 - towards_zero.double()).to(parameter.dtype)
    return torch.equal(parameter, torch.where(middle, away, master.to(parameter.dtype)))


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
        master = held(optimizer, parameter)
        torch.testing.assert_close(master.double(), wanted, rtol=3e-6, atol=3e-7)
        assert parameter.dtype == torch.float32 or is_rounding(parameter, master)
        assert int(optimizer.state[parameter]["step"]) == 4


def test_a_master_that_is_given_is_exact_and_not_the_rounded_weight():
    exact = torch.randn(40, 50, device=DEVICE)
    weight = nn.Parameter(exact.to(torch.bfloat16))
    optimizer = AdamWOneLaunch([weight], lr=0.0, masters={weight: exact})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(held(optimizer, weight), exact)


# The middles of two numbers of bf16 beside even and odd ones, what becomes infinite, zeros, subnormals, NaN.
EDGES = (0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0xFF7F8000, 0x7F800000, 0x80000000,
         0x00008000, 0x00000001, 0x807FFFFF, 0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF)  # fmt: skip


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGES), min_size=1, max_size=20))
def test_a_weight_and_the_lower_bits_beside_it_are_the_master(bits: list[int]):
    master = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32).to(DEVICE)
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    lower = lower_bits(weight, master)
    number = ~master.isnan()
    assert torch.equal(weight.isnan(), ~number) and is_rounding(weight[number], master[number])
    assert torch.equal(master_of(weight, lower)[number].view(torch.int32), master[number].view(torch.int32))
    # A rate of 0 takes both through the kernel, where a NaN stays one.
    parameter = nn.Parameter(torch.empty_like(weight))
    optimizer = AdamWOneLaunch([parameter], lr=0.0, masters={parameter: master})
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(parameter.isnan(), ~number) and torch.equal(parameter[number], weight[number])
    finite = master.isfinite()
    assert torch.equal(held(optimizer, parameter)[finite], master[finite])


def test_a_saved_state_has_masters_in_fp32():
    ours = parameters((torch.bfloat16, torch.float32))
    optimizer = AdamWOneLaunch(ours, **OPTIONS)
    stepped(optimizer, ours, 0, 1)
    saved = optimizer.state_dict()["state"]
    for number, parameter in enumerate(ours):
        assert "master_lower" not in saved[number]
        if parameter.dtype == torch.bfloat16:
            assert torch.equal(saved[number]["master"], held(optimizer, parameter))
            assert optimizer.state[parameter]["master_lower"].dtype == torch.int16


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


@pytest.mark.parametrize("kind", [AdamWOneLaunch, AdamW8Bit])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=len)
def test_a_state_that_is_saved_goes_on_as_if_it_had_not_been(dtypes: Sequence[torch.dtype], kind: type[AdamWOneLaunch]):
    ours = parameters(dtypes)
    optimizer = kind(ours, **OPTIONS)
    stepped(optimizer, ours, 0, 1)
    twins = copy.deepcopy(ours)
    resumed = kind(twins, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(optimizer, ours, 2)
    stepped(resumed, twins, 2)
    for parameter, twin in zip(ours, twins, strict=True):
        assert torch.equal(parameter, twin)
        for name, kept in optimizer.state[parameter].items():
            assert torch.equal(kept, resumed.state[twin][name]) and kept.dtype == resumed.state[twin][name].dtype
    other = AdamW8Bit if kind is AdamWOneLaunch else AdamWOneLaunch
    with pytest.raises(InputError, match="load it into the optimizer that saved it"):
        other(twins, **OPTIONS).load_state_dict(optimizer.state_dict())


def in_numbers(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What 8 bits stand for, by arithmetic that shares nothing with the kernel: 1.mantissa times a power of two, less
    what code 0 is."""
    largest, code = (127, codes.long() & 127) if signed else (255, codes.long())
    eighths = 8 * 127 - largest + code
    value = (1 + eighths % 8 / 8) * 2.0 ** (eighths // 8 - 127).double()
    value = value - value.new_tensor(1.125 * 2.0 ** (-16 if signed else -32))
    value = torch.where(codes > 127, -value, value) if signed else value
    return value * scales.repeat_interleave(BLOCK.value)[: len(codes)]


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Tensor]:
    state = optimizer.state[parameter]
    return (
        in_numbers(state["exp_avg"], state["exp_avg_scale"], signed=True),
        in_numbers(state["exp_avg_sq"], state["exp_avg_sq_scale"], signed=False),
    )


def test_moments_of_8_bits_are_a_code_beside_the_number_and_right_in_the_mean():
    """Of gradients over 2^16, with both signs, zeros and a last block that is not full: each moment is off by less than
    the distance of two codes, 1/8; over many equal numbers, and over steps that move v by a thousandth, by nothing."""
    size = 5 * BLOCK.value + 37
    sizes = torch.logspace(0, -13, size, base=2.0, device=DEVICE)
    gradient = sizes * torch.tensor([1.0, -1.0, 1.0], device=DEVICE).repeat(size)[:size]
    gradient[::17] = 0.0
    weight = nn.Parameter(torch.zeros(size, device=DEVICE))
    optimizer = AdamW8Bit([weight], **OPTIONS)
    weight.grad = gradient
    optimizer.step()
    average, square = moments_of(optimizer, weight)
    torch.testing.assert_close(average, 0.1 * gradient.double(), rtol=0.126, atol=0.1 * 2.0**-18)
    torch.testing.assert_close(square, 0.001 * gradient.double() ** 2, rtol=0.126, atol=0.001 * 2.0**-34)
    assert square.min() > 0
    equal = nn.Parameter(torch.zeros(16 * BLOCK.value, device=DEVICE))
    optimizer = AdamW8Bit([equal], **OPTIONS)
    for step in range(12):
        equal.grad = torch.full_like(equal, 0.3 if step == 0 else 0.28)
        equal.grad[:: BLOCK.value] = 1.0  # the largest of each block, so that the others are no largest
        optimizer.step()
    exact = [sum(rest * beta ** (11 - i) * g for i, g in enumerate(each)) for beta, rest, each in (
        (0.9, 0.1, [0.3] + [0.28] * 11), (0.999, 0.001, [0.09] + [0.28**2] * 11),
    )]  # fmt: skip
    for found, wanted in zip(moments_of(optimizer, equal), exact, strict=True):
        small = found.view(-1, BLOCK.value)[:, 1:]
        assert small.mean().item() == pytest.approx(wanted, rel=4e-3) and small.std() > 0.01 * wanted


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_moments_of_8_bits_move_no_parameter_further_than_adamw_could(betas: tuple[float, float]):
    """Gradients of 2^-40 to 1 in each block, over 6 steps of changing sizes: no step is longer than the bound that
    holds of exact moments, however coarse the codes; and what is next to nothing in its block moves less, not more."""
    generator = torch.Generator().manual_seed(0)
    spread = 2.0 ** -(40 * torch.rand(8 * BLOCK.value, generator=generator)).to(DEVICE)
    ours = [nn.Parameter(torch.zeros_like(spread)) for _ in range(2)]
    options: Any = {"lr": 1.0, "betas": betas, "eps": 0.0, "weight_decay": 0.0}
    coarse, exact = AdamW8Bit([ours[0]], **options), AdamWOneLaunch([ours[1]], **options)
    moved = torch.zeros_like(spread), torch.zeros_like(spread)
    for step in range(1, 7):
        gradient = spread * torch.randn(len(spread), generator=generator).to(DEVICE)
        for parameter, optimizer, sums in zip(ours, (coarse, exact), moved, strict=True):
            before = parameter.detach().clone()
            parameter.grad = gradient
            optimizer.step()
            change = (parameter.detach() - before).abs()
            most = most_of_quotient(*betas) * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
            assert change.max() <= most * 1.0001
            sums.add_(change)
    tiny, usual = spread < 2.0**-22, spread > 2.0**-10
    assert moved[0][tiny].mean() < moved[1][tiny].mean()
    assert moved[0][usual].mean().item() == pytest.approx(moved[1][usual].mean().item(), rel=0.1)


def test_masters_beside_moments_of_8_bits_follow_those_of_float64():
    ours = parameters((torch.bfloat16, torch.float32))
    before, exact = [each.detach().double() for each in ours], in_float64(ours, 3)
    optimizer = AdamW8Bit(ours, **OPTIONS)
    stepped(optimizer, ours, *range(3))
    for parameter, old, wanted in zip(ours, before, exact, strict=True):
        master = held(optimizer, parameter).double()
        off, moved = (master - wanted).norm(), (wanted - old).norm()
        assert off <= 0.12 * moved and optimizer.state[parameter]["exp_avg"].dtype == torch.uint8


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
    for optimizer_class in (AdamWOneLaunch, AdamW8Bit, AdamWUnderBackward):
        weight = nn.Parameter(torch.ones(2, device=DEVICE))
        optimizer = optimizer_class([weight], **OPTIONS)
        optimizer.register_step_post_hook(lambda one, *_: told.append(type(one).__name__))

        def closure(weight: nn.Parameter = weight) -> float:
            loss = (weight * weight).sum()
            loss.backward()
            return loss.item()

        assert optimizer.step(closure) == 2.0 and optimizer.state[weight]["step"] == 1
    assert told == ["AdamWOneLaunch", "AdamW8Bit", "AdamWUnderBackward"]


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


# ---- what happens to an optimizer from outside


def apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True) if a.numel())


@pytest.mark.parametrize("optimizer_class", [AdamWOneLaunch, AdamW8Bit])
def test_a_weight_that_is_set_to_zero_by_hand_is_a_number_after_the_next_update(optimizer_class: Any):
    ours = parameters((torch.bfloat16,))
    optimizer = optimizer_class(ours, **OPTIONS)
    stepped(optimizer, ours, 0, 1)
    with torch.no_grad():
        for parameter in ours:
            parameter.copy_(torch.where(parameter > 0, 0.0, -0.0))
    assert all(held(optimizer, each).abs().lt(1e-38).all() for each in ours)
    stepped(optimizer, ours, 2)
    assert all(each.isfinite().all() and each.abs().lt(0.02).all() for each in ours)


def test_the_numbers_of_a_group_may_change_from_step_to_step():
    ours = parameters((torch.float32,))
    twins = copy.deepcopy(ours)
    optimizers = AdamWOneLaunch(ours, **OPTIONS), torch.optim.AdamW(twins, **OPTIONS)
    for number, optimizer in zip((ours, twins), optimizers, strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=8)
        for step in range(6):
            if step == 3:
                optimizer.param_groups[0].update(weight_decay=0.9, eps=1e-2)
            stepped(optimizer, number, step)
            schedule.step()
    assert apart(ours, twins) < 1e-6


@pytest.mark.parametrize("optimizer_class", [AdamWOneLaunch, AdamWUnderBackward, AdamW8Bit])
def test_a_copy_of_model_and_optimizer_goes_on_alike(optimizer_class: Any):
    ours = parameters((torch.bfloat16, torch.float32))
    masters = {each: each.detach().float() * 1.001 for each in ours if each.dtype == torch.bfloat16}
    optimizer = optimizer_class(ours, **OPTIONS, max_norm=1.0, masters=masters)
    for steps in ((), (0, 1)):  # before the first, and after
        stepped(optimizer, ours, *steps)
        twins, other = copy.deepcopy((ours, optimizer))
        for parameters_of, each in ((ours, optimizer), (twins, other)):
            stepped(each, parameters_of, 2, 3)
        assert apart([held(optimizer, each) for each in ours], [held(other, each) for each in twins]) == 0


def test_a_parameter_whose_storage_or_order_is_another_one_is_still_updated():
    ours = parameters((torch.bfloat16, torch.float32))
    twins = copy.deepcopy(ours)
    optimizers = AdamWOneLaunch(ours, **OPTIONS), AdamWOneLaunch(twins, **OPTIONS)
    stepped(optimizers[0], ours, 0, 1)
    stepped(optimizers[1], twins, 0, 1)
    for twin in twins:
        twin.data = twin.data.t().contiguous().t() if twin.dim() == 2 else twin.data.clone()
    stepped(optimizers[0], ours, 2)
    stepped(optimizers[1], twins, 2)
    assert apart(ours, twins) == 0
    resumed = AdamWOneLaunch(twins, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    stepped(optimizers[0], ours, 3)
    stepped(resumed, twins, 3)
    assert apart(ours, twins) == 0


@pytest.mark.parametrize("optimizer_class", [AdamWOneLaunch, AdamW8Bit])
def test_states_of_other_parameters_and_what_it_does_not_take_are_refused_in_one_line(optimizer_class: Any):
    small, turned, large = (nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in ((3, 4), (4, 3), (9, 4)))
    optimizer = optimizer_class([small])
    stepped(optimizer, [small], 0)
    with pytest.raises(InputError, match=r"of a parameter \[3, 4\] .* here it is \[9, 4\]"):
        optimizer_class([large]).load_state_dict(optimizer.state_dict())
    if optimizer_class is AdamW8Bit:
        with pytest.raises(InputError, match=r"of strides \(4, 1\), and here .* of strides \(1, 3\)"):
            optimizer_class([nn.Parameter(turned.detach().t())]).load_state_dict(optimizer.state_dict())
    with pytest.raises(InputError, match=r"takes parameters in fp32 or bf16, and one is torch\.float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, device=DEVICE, dtype=torch.float16))]})
    assert len(optimizer.param_groups) == 1
    small.grad = torch.zeros_like(small).to_sparse()
    with pytest.raises(InputError, match="takes dense gradients, and one is sparse"):
        optimizer.step()
