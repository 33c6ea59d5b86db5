"""Tensors in blocks of few bits: rounding against exact arithmetic, scales by hand, and torchao's own numbers."""

import itertools
import math

import pytest
import torch

from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS, SCALE_RULES, ScaleRule, round_block
from stepscope.training.scaled_products import (
    MULTIPLIED_ON,
    BlockOperand,
    block_product,
    librarys_product,
    round_blocks,
    round_to,
)

FEW_BITS = [name for name, form in FORMATS.items() if form.code_bits <= 8 and form.top != "scale"]


@pytest.mark.parametrize("name", FEW_BITS)
def test_rounding_is_exact_at_every_number_and_every_tie(name: str):
    form = FORMATS[name]
    codes = (form.decode(code) for code in range(2**form.code_bits))
    numbers = sorted({code for code in codes if math.isfinite(code)})
    ties = [(low + high) / 2 for low, high in itertools.pairwise(numbers)]
    at = torch.tensor([*numbers, *ties, 1e30, -math.inf])
    values = torch.cat([at, at.nextafter(torch.tensor(math.inf)), at.nextafter(torch.tensor(-math.inf))])
    expected = torch.tensor([form.round(value, saturates=True) for value in values.tolist()])
    assert torch.equal(round_to(values, form), expected)
    assert round_to(torch.tensor([math.nan]), form).isnan().all()


def test_stochastic_rounding_is_right_on_average_and_one_of_two_neighbours():
    torch.manual_seed(0)
    values = torch.full((20_000,), 2.25)
    rounded = round_to(values, FORMATS["fp4-e2m1"], stochastic=True)
    assert set(rounded.tolist()) == {2.0, 3.0}
    assert abs(float(rounded.mean()) - 2.25) < 0.02
    exact = torch.tensor([0.0, -0.5, 6.0, -6.0, 1.5])
    assert torch.equal(round_to(exact, FORMATS["fp4-e2m1"], stochastic=True), exact)


def test_what_a_format_holds_is_moved_by_no_chance(monkeypatch: pytest.MonkeyPatch):
    """With the largest chance that fp32 has 3 + chance is 4 in fp32: the largest number of e2m1 would become 8."""
    almost_one = 1 - 2.0**-24
    monkeypatch.setattr(torch, "rand_like", lambda values: torch.full_like(values, almost_one))
    for name in FEW_BITS:
        form = FORMATS[name]
        held = torch.tensor([form.decode(code) for code in range(2**form.code_bits)])
        held = held[held.isfinite() & (held.abs() <= form.largest)]
        assert torch.equal(round_to(held, form, stochastic=True), held)
        between = (held[:-1] + held[1:]) / 2
        assert round_to(between, form, stochastic=True).abs().max() <= form.largest


def block(form: str, *values: float, rule: ScaleRule = "floor") -> list[float]:
    return round_blocks(torch.tensor([values]), BLOCK_FORMATS[form], rule=rule)[0].tolist()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_block_by_arithmetic_is_the_tensors_bit_for_bit(name: str):
    """`study formats` rounds by arithmetic, without PyTorch: held equal at all magnitudes that fp32 has."""
    form, draw = BLOCK_FORMATS[name], torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.linspace(-149, 120, 60, dtype=torch.float64)
    normal = torch.randn(60, form.size or 32, dtype=torch.float64, generator=draw)
    worst = [[0.0, -0.0], [1e-7, 1.0], [math.inf, 1.0], [math.nan, 1.0], [-0.0, 2.0**-149]]
    for values in [*(normal * powers[:, None]).float().tolist(), *worst]:
        for rule in SCALE_RULES if form.powers_of_two else SCALE_RULES[:1]:
            ours, theirs = torch.tensor(round_block(values, form, rule)), torch.tensor(block(name, *values, rule=rule))
            assert torch.equal(ours.isnan(), theirs.isnan()), values
            assert torch.equal(ours.nan_to_num().view(torch.int32), theirs.nan_to_num().view(torch.int32)), (
                rule,
                values,
            )


def test_a_scale_by_each_rule_by_hand():
    """The largest is 7: floor takes 2^0 and cuts it to 6, the next power of two makes it 8 of 2 x 4."""
    assert block("mxfp4", 7, 0.2, 0.6) == [6, 0, 0.5]
    assert block("mxfp4", 7, 0.2, 0.6, rule="up") == [8, 0, 1]
    assert block("mxfp4", 7, 0.2, 0.6, rule="even") == [8, 0, 1]
    assert block("mxfp4", 7, 0.2, 0.6, rule="square") == [6, 0, 0.5], "squares of 1.05, and of 1.2 by up"
    assert block("mxfp4", 7.5, 0.2, 0.6, rule="square") == [8, 0, 1]
    assert block("mxfp4", 6, 1, rule="up") == [6, 1], "it fits: nothing is rounded up"
    assert block("mxint8", 1.99, -1.99) == [127 / 64, -127 / 64]
    # The largest, 12, makes the tensor's scale 12 / 2688, and that of its block 448 of it.
    assert block("nvfp4", 12, 1, 3, -5) == pytest.approx([12, 1, 3, -4], rel=1e-6)
    assert block("fp8-row", 448, 1, 0.001, -17) == [448, 1, 0.001953125, -16]
    assert block("int4-block", -7, 2.4, 0.4) == [-7, 2, 0]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_blocks_make_of_the_worst(name: str):
    form = BLOCK_FORMATS[name]
    zeros = round_blocks(torch.zeros(3, 40), form)
    assert torch.equal(zeros, torch.zeros(3, 40))
    assert round_blocks(torch.empty(0, 32), form).shape == (0, 32)
    for number in (math.nan, math.inf):
        assert round_blocks(torch.tensor([[1.0, number, 2.0]]), form).isnan().all()
    subnormal = torch.full((1, 33), 1e-41)
    assert round_blocks(subnormal, form).isfinite().all()
    # A block that the row does not fill is as good as one of its own.
    values = torch.randn(4, 70, generator=torch.Generator().manual_seed(0))
    whole = round_blocks(values, form)
    assert whole.shape == values.shape
    if form.size and not form.tensor_scale:
        assert torch.equal(whole[:, form.size :], round_blocks(values[:, form.size :], form)) or form.size > 70


def test_the_standard_scales_a_subnormal_largest_by_its_least_power():
    """2^-127 is the least scale of e8m0: 2^-128 is half of it, a number of e2m1."""
    assert block("mxfp4", 2.0**-128, -(2.0**-126)) == [2.0**-128, -(2.0**-126)]
    assert block("mxfp4", 2.0**-130) == [0]


@pytest.mark.parametrize("name", [name for name, form in BLOCK_FORMATS.items() if not form.tensor_scale])
def test_a_loss_scale_changes_no_number_of_a_block(name: str):
    """A power of two moves the block's scale by itself: `study scaling` has nothing to say of these formats."""
    values = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * 1e-6
    assert torch.equal(
        round_blocks(values * 2.0**16, BLOCK_FORMATS[name]), round_blocks(values, BLOCK_FORMATS[name]) * 2.0**16
    )


def test_squares_of_a_weight_are_the_same_turned():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    for name in ("nvfp4-square", "fp8-block"):
        form = BLOCK_FORMATS[name]
        turned = round_blocks(weight.t(), form, weight=True).t()
        assert torch.equal(round_blocks(weight, form, weight=True), turned)
    form = BLOCK_FORMATS["nvfp4"]
    assert not torch.equal(round_blocks(weight, form), round_blocks(weight.t(), form).t())


def test_many_blocks_at_once_are_each_as_alone():
    values = torch.randn(700, 513, generator=torch.Generator().manual_seed(0))
    for form in (BLOCK_FORMATS["mxfp4"], BLOCK_FORMATS["fp8-block"]):
        rows = torch.cat([round_blocks(part, form, weight=True) for part in values.split(128)])
        assert torch.equal(round_blocks(values, form, weight=True), rows)


def test_torchao_has_the_same_numbers():
    """All of MX by three rules; NVFP4 where torchao does not raise a block's scale to 2^-6, as the paper does not."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 1024, generator=generator) * (3 * torch.randn(64, 1024, generator=generator)).exp()
    modes = {"floor": "FLOOR", "even": "EVEN", "up": "RCEIL"}
    elements = {
        "mxfp8": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2, "mxfp6": "fp6_e2m3", "mxfp6-e3m2": "fp6_e3m2",
        "mxfp4": torch.float4_e2m1fn_x2,
    }  # fmt: skip
    for name, element in elements.items():
        for rule in SCALE_RULES[:3]:
            theirs = mx.MXTensor.to_mx(values, element, 32, mx.ScaleCalculationMode[modes[rule]])
            assert torch.equal(round_blocks(values, BLOCK_FORMATS[name], rule=rule), theirs.dequantize(torch.float32))
    scale = nvfp4.per_tensor_amax_to_scale(values.abs().max())
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale).dequantize(torch.float32)
    ours = round_blocks(values, BLOCK_FORMATS["nvfp4"])
    fine = values.view(64, -1, 16).abs().amax(-1, keepdim=True).expand(-1, -1, 16).reshape(64, 1024) / 6 / scale > 2**-6
    assert torch.equal(ours[fine], theirs[fine]) and not torch.equal(ours, theirs)


@pytest.mark.parametrize("name", MULTIPLIED_ON)
def test_operands_by_torchs_casts_are_the_simulations(name: str):
    form, draw = BLOCK_FORMATS[name], torch.Generator().manual_seed(0)
    values = torch.randn(256, 512, generator=draw)
    values[:, ::57] *= 100
    values[3], values[5] = 0, values[5] * 1e-6
    for weight in (False, True):
        operand = BlockOperand.of(values, form, weight=weight)
        assert torch.equal(operand.numbers(), round_blocks(values, form, weight=weight))
    product = block_product(BlockOperand.of(values, form), operand)()
    exact = values.double() @ values.double().t()
    assert 0 < float((product - exact).norm() / exact.norm()) < 2.0**-3


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-row"])
def test_pytorchs_own_product_is_the_simulations(name: str):
    """On a CPU it takes these two. Sums in another order move few results, by one number of bf16."""
    form, draw = BLOCK_FORMATS[name], torch.Generator().manual_seed(0)
    a, b = (BlockOperand.of(torch.randn(rows, 64, generator=draw), form, weight=rows < 48) for rows in (48, 32))
    theirs, ours = librarys_product(a, b)(), block_product(a, b)()
    assert theirs.shape == (48, 32) and theirs.dtype == torch.bfloat16
    assert (theirs.float() - ours.float()).norm() < 2.0**-8 * ours.float().norm()


def test_scales_lie_as_the_product_takes_them():
    """The documentation of cuBLAS, 3.1.4.3: in a tile of 128 x 4 scales, that of row r and column c is at
    16 (r mod 32) + 4 (r // 32) + c."""
    values = torch.randn(200, 7 * 32, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(200)[
        :, None
    ].sub(90)
    operand = BlockOperand.of(values, BLOCK_FORMATS["mxfp8"])
    laid, scales = operand.laid_out(left=True).view(torch.uint8), operand.scales.view(torch.uint8)
    assert laid.shape == (2 * 2 * 512,)
    for row, column in ((0, 0), (1, 0), (33, 2), (127, 6), (128, 0), (199, 5)):
        tile, r = 2 * (row // 128) + column // 4, row % 128
        assert laid[512 * tile + 16 * (r % 32) + 4 * (r // 32) + column % 4] == scales[row, column]
    block = BlockOperand.of(values[:, :128], BLOCK_FORMATS["fp8-block"])
    assert block.laid_out(left=True).stride()[0] == 1, "scales of a column of blocks lie together"
