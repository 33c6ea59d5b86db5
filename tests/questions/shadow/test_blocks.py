"""Products in blocks of few bits: each operand along the dimension that is summed over, and what a step then loses."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepscope.core.errors import InputError
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.model_config import configure
from stepscope.questions.one_model import OneModel, shadow
from stepscope.questions.shadow import BY_LAYER, BY_PRODUCT, RECIPES, study_block_shadow
from stepscope.questions.swallowed import study_swallowed
from stepscope.questions.underflow import study_underflow
from stepscope.training.scaled_products import (
    PRODUCTS,
    BlockLoss,
    Product,
    Recipe,
    block_products,
    first_and_last,
    round_blocks,
)

SMALL = configure("tiny", d_model=32, d_ff=64, layers=3, heads=2, vocabulary=101)
NVFP4, MXFP4 = BLOCK_FORMATS["nvfp4"], BLOCK_FORMATS["mxfp4"]


def three(recipe: Recipe | None, *, bias: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output of a linear layer, both gradients, and the gradient of the output."""
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 40, bias=bias), torch.randn(2, 36, 48, requires_grad=True)
    with block_products(layer, lambda path: recipe if path == "" else None):
        y = layer(x)
    dy = torch.randn(y.shape)
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad, dy


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_product_has_its_operands_in_blocks_along_what_it_sums_over(product: Product):
    torch.manual_seed(0)
    layer, x = nn.Linear(48, 40, bias=False), torch.randn(2, 36, 48).view(72, 48)
    weight = layer.weight.detach()
    y, dx, dw, dy = three(Recipe(form=NVFP4, products=(product,)))
    of_x, of_w, of_dy = x, weight, dy.view(72, 40)
    expected = {
        "forward": lambda: round_blocks(of_x, NVFP4) @ round_blocks(of_w, NVFP4).t(),
        "input": lambda: round_blocks(of_dy, NVFP4) @ round_blocks(of_w.t(), NVFP4).t(),
        "weight": lambda: round_blocks(of_dy.t(), NVFP4) @ round_blocks(of_x.t(), NVFP4).t(),
    }[product]()
    made: dict[Product, Tensor] = {"forward": y, "input": dx, "weight": dw}
    assert torch.equal(made.pop(product).view(expected.shape), expected)
    plain = three(None)
    for other, result in made.items():
        torch.testing.assert_close(result, plain[PRODUCTS.index(other)])


def test_a_rotation_is_undone_by_its_product_and_spreads_an_outlier():
    exact = three(None, bias=True)[2]
    wide = BLOCK_FORMATS["mxint8"]
    assert (three(Recipe(form=wide, rotate=True), bias=True)[2] - exact).norm() < 0.02 * exact.norm()
    assert not torch.equal(three(Recipe(form=MXFP4, rotate=True))[2], three(Recipe(form=MXFP4))[2])


def test_autocast_gives_its_dtype_and_other_layers_stay():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    with block_products(model, lambda path: Recipe(form=MXFP4) if path == "1" else None):
        first = model[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
    assert torch.equal(first, model[0](x))


def test_what_a_checkpoint_runs_again_is_in_blocks_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    x = torch.randn(32, 64)
    gradients: list[list[Tensor | None]] = []
    losses: list[BlockLoss] = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        losses.append(loss := BlockLoss(MXFP4))
        with block_products(model, lambda path, loss=loss: Recipe(form=MXFP4, seen=loss.seen)):
            run(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    assert losses[0].shares == losses[1].shares, "what is run again is not counted again"


def test_first_and_last_layers():
    layers = [f"blocks.{i}.attention.query" for i in range(4)]
    assert first_and_last([*layers, "head"]) == {layers[0], layers[3], "head"}
    assert first_and_last(["0.up", "1.up", "head"]) == {"head"}, "of two layers none would be left over"
    assert first_and_last(["up", "middle", "down"]) == {"up", "down"}
    two = ["0.up", "0.down", "1.up", "1.down"]
    assert first_and_last(two) == {"0.up", "1.down"}, "nothing stands outside of two blocks"


def test_what_a_step_loses_by_recipe_product_and_layer():
    answer = study_block_shadow(to=("mxfp4", "mxfp8"), model=SMALL, seq_len=32, device="cpu")
    recipes = {(row[0], row[1]): row for row in answer.table(RECIPES).rows}
    errors = {key: float(str(row[3])) for key, row in recipes.items()}
    assert errors["mxfp8", "nearest"] < errors["mxfp4", "nearest"] / 2
    assert errors["mxfp4", "first and last layers left"] < errors["mxfp4", "nearest"]
    products = {(row[0], row[1]): float(str(row[2])) for row in answer.table(BY_PRODUCT).rows}
    assert all(0 < each < errors["mxfp4", "nearest"] * 1.5 for each in products.values())
    layers = answer.table(BY_LAYER).rows
    assert {row[1] for row in layers} >= {"head", "blocks.*.feed_forward.down"} and len(layers) == 16
    by_size = [float(str(row[3])) for row in layers if row[0] == "mxfp4"]
    assert by_size == sorted(by_size, reverse=True)
    assert [finding.kind for finding in answer.findings] == ["shadow-blocks", "shadow-blocks"]


EMPTY = "tests.questions.shadow.planted:make_empty"


def test_tensors_without_numbers_lose_nothing():
    answer = study_block_shadow(to=("mxfp4", "fp8-tensor"), factory=EMPTY, device="cpu")
    assert {row[1] for row in answer.table(BY_LAYER).rows} == {"some", "none"}
    assert all(row[0] == "mxfp4" or float(str(row[3])) < 0.2 for row in answer.table(RECIPES).rows)
    found = study_underflow(format_name="nvfp4", factory=EMPTY, device="cpu")
    assert "none" not in {row[0] for row in found.tables[0].rows}
    assert study_swallowed(steps=1, learning_rates=(1e-3,), factory=EMPTY, device="cpu").findings


PLANTED = "tests.questions.shadow.planted"


def test_a_recipe_that_leaves_all_layers_is_none():
    """Both layers of the model are its first and its last."""
    answer = study_block_shadow(to=("mxfp4",), factory=f"{PLANTED}:make_mixed", device="cpu")
    assert {row[1] for row in answer.table(RECIPES).rows} == {
        "nearest", "scales rounded up", "gradients by chance", "rotated",
    }  # fmt: skip
    assert {row[1] for row in answer.table(BY_LAYER).rows} == {"layers.0", "layers.3"}, (
        "of a Sequential, each by itself"
    )


def test_what_no_linear_layer_multiplies_is_said():
    """On 8 rows of 16 numbers the experts multiply each by 4 matrices of 16 x 16, and two layers by one each."""
    answer = study_block_shadow(to=("mxfp4",), factory=f"{PLANTED}:make_mixed", device="cpu")
    left, quiet = answer.findings[1:]
    assert (left.kind, left.severity, left.evidence["linear_share"]) == ("shadow-left", "warning", pytest.approx(2 / 6))
    assert quiet.sentence == "Dropout is off, in `layers.2`."


def test_complex_numbers_are_in_no_blocks():
    with pytest.raises(InputError, match="has no linear layer"):
        study_block_shadow(to=("mxfp4",), factory=f"{PLANTED}:make_complex", device="cpu")


def test_an_unknown_precision_is_told_of_blocks():
    with pytest.raises(InputError, match=r"^unknown precision 'MXFP4': choose one of bf16, fp16, mxfp8"):
        shadow(lambda _stage: None, step=OneModel(), to=("MXFP4",), device="cpu")


def test_gradients_in_a_format_of_blocks_are_a_sentence():
    found = study_underflow(format_name="mxint8", model=SMALL, seq_len=32, device="cpu").findings[-1]
    assert found.sentence.startswith("In mxint8, along their last dimension, of those of parameters ")
    assert found.sentence.endswith("a loss scale saves none of them.")


def test_gradients_inside_of_a_compiled_module_are_seen():
    found = study_underflow(format_name="mxfp4", factory=f"{PLANTED}:make_compiled", device="cpu")
    assert [row[:2] for row in found.tables[0].rows] == [
        (f"_orig_mod.{number}", of) for of in ("parameters", "activations") for number in (0, 2)
    ]


def test_gradients_of_zeros_are_refused():
    with pytest.raises(InputError, match=r"every gradient of the step of .* is zero: give another batch"):
        study_block_shadow(to=("mxfp4",), factory=EMPTY, arguments={"scale": 0.0}, device="cpu")


def test_a_model_without_linear_layers_and_a_mix_of_formats_are_refused():
    with pytest.raises(InputError, match="has no linear layer"):
        study_block_shadow(to=("mxfp4",), factory="tests.questions.shadow.planted:make_two", device="cpu")
    with pytest.raises(InputError, match="bf16 is no format of blocks, so it stands alone"):
        shadow(lambda _stage: None, step=OneModel(), to=("mxfp4", "bf16"), device="cpu")
