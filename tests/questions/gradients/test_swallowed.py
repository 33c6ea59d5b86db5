"""Updates that bf16 swallows: by hand, by every way of keeping the rest, and as a study."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.core.model_config import configure
from stepscope.questions.swallowed import IN_FORMATS, Tally, half_unit, held_in, layer_of, study_swallowed
from stepscope.training.half_optimizers import KEEPINGS, AdamWBf16Parameters, Keeping
from tests.questions.verbs import answered

SMALL = configure("tiny", d_model=32, d_ff=64, layers=1, heads=2, vocabulary=101)


def stepped(keeping: Keeping, start: Tensor, gradients: list[Tensor], **options: float) -> tuple[Tensor, Tensor]:
    """The parameter as forward sees it, and as the optimizer holds it, after AdamW on these gradients."""
    parameter = nn.Parameter(start.bfloat16())
    optimizer = AdamWBf16Parameters([parameter], keeping=keeping, **options)  # pyright: ignore[reportArgumentType]
    for gradient in gradients:
        parameter.grad = gradient.bfloat16()
        optimizer.step()
    assert parameter.dtype == torch.bfloat16
    return parameter.detach().float(), optimizer.held(parameter)


def exact(start: Tensor, gradients: list[Tensor], **options: float) -> Tensor:
    parameter = nn.Parameter(start.bfloat16().double())
    optimizer = torch.optim.AdamW([parameter], **options)  # pyright: ignore[reportArgumentType]
    for gradient in gradients:
        parameter.grad = gradient.bfloat16().double()
        optimizer.step()
    return parameter.detach()


def test_one_swallows_what_is_below_half_a_unit():
    """Above 1 bf16 goes in steps of 2**-7, below it of 2**-8: 0.003 is less than half of the first, not of the second.

    With a constant gradient an update of AdamW is the learning rate, so ten of them should come to 0.03.
    """
    up, down = torch.tensor([-1.0]), torch.tensor([1.0])
    one, rate = torch.ones(1), {"lr": 3e-3, "weight_decay": 0.0}
    assert stepped("nearest", one, [up] * 10, **rate)[0].item() == 1.0
    assert stepped("nearest", one, [down] * 10, **rate)[0].item() == 1 - 10 * 2.0**-8
    for keeping in ("kahan", "master"):
        used, held = stepped(keeping, one, [up] * 10, **rate)
        assert held.item() == pytest.approx(1.03, abs=1e-4)
        assert used.item() == 1 + 4 * 2.0**-7


@pytest.mark.parametrize("keeping", KEEPINGS)
def test_it_is_adamw_within_the_rounding_of_what_it_keeps(keeping: Keeping):
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 48), [torch.randn(64, 48) for _ in range(20)]
    options = {"lr": 1e-2, "weight_decay": 0.1}
    _, held = stepped(keeping, start, gradients, **options)
    reference = exact(start, gradients, **options)
    away, way = (held - reference).norm(), (reference - start.bfloat16()).norm()
    limit = {"master": 1e-5, "kahan": 2e-3, "stochastic": 0.3, "nearest": 0.3}[keeping]
    assert away < limit * way


def test_stochastic_rounding_is_right_on_average():
    start = torch.ones(4096)
    rate = {"lr": 1e-4, "weight_decay": 0.0}
    torch.manual_seed(0)
    used, _ = stepped("stochastic", start, [-start] * 40, **rate)
    assert used.mean().item() == pytest.approx(1.004, abs=4e-4)
    nearest, _ = stepped("nearest", start, [-start] * 40, **rate)
    assert torch.equal(nearest, start)


def test_only_bf16_parameters_and_known_ways():
    with pytest.raises(InputError, match="convert the model"):
        AdamWBf16Parameters([nn.Parameter(torch.ones(2))])
    with pytest.raises(InputError, match="unknown keeping"):
        AdamWBf16Parameters([nn.Parameter(torch.ones(2).bfloat16())], keeping="hope")  # pyright: ignore[reportArgumentType]


def test_parameters_without_a_gradient_are_left_alone():
    parameter = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamWBf16Parameters([parameter], keeping="kahan")
    assert optimizer.step(lambda: 2.5) == 2.5
    assert torch.equal(optimizer.held(parameter), torch.ones(3)) and not optimizer.state[parameter]


def test_a_tally_by_hand():
    tally = Tally()
    tally.add(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 4.0, 0.0]))
    assert (tally.wanted, tally.swallowed, tally.share) == (2, 1, 0.5)
    assert tally.norm_share == pytest.approx(3 / 5)
    assert tally.progress == pytest.approx(16 / 25)
    assert Tally().share == 0.0


@settings(deadline=None)
@given(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100))
def test_half_a_unit_is_what_the_format_says(value: float):
    assert half_unit(torch.tensor([value])).item() == FORMATS["bf16"].spacing(value) / 2


def test_layers():
    names = ("embedding.weight", "blocks.0.attention.query.weight", "blocks.1.feed_forward_norm.weight", "head.weight")
    assert [layer_of(name) for name in names] == [
        "embedding", "blocks.0.attention", "blocks.1.feed_forward_norm", "head",
    ]  # fmt: skip


def test_the_study_swallows_less_at_a_higher_rate_and_remedies_come_nearer():
    found = study_swallowed(model=SMALL, steps=15, learning_rates=(1e-5, 1e-3), seq_len=16, device="cpu")
    shares = {row[0]: row[1:] for row in found.table("Updates that round to nothing, %, to nearest").rows}
    assert all(low >= high for low, high in shares.values())  # pyright: ignore[reportOperatorIssue]
    # Every norm weight is 1 at first, and no update of 1e-5 moves it.
    assert shares["norm"][0] == shares["blocks.0.attention_norm"][0] == 100.0
    rows = {row[0]: row for row in found.table("The same training at lr 0.0001").rows}
    distance = {name: float(row[5]) for name, row in rows.items()}  # pyright: ignore[reportArgumentType]
    assert distance["fp32"] == 0
    for remedy in ("bf16, fp32 master", "bf16, Kahan"):
        assert distance[remedy] < 0.1 * distance["bf16, to nearest"]
    # Rounding at random may end far away, but what it does is right on average: the loss goes where fp32's goes.
    along, more = ({name: row[i] for name, row in rows.items()} for i in (7, 4))
    assert along["bf16, stochastic"] == pytest.approx(100, abs=5)
    assert abs(more["bf16, stochastic"]) < 0.5 * abs(more["bf16, to nearest"])  # pyright: ignore[reportArgumentType]


def test_a_study_is_the_same_again():
    one, other = (
        study_swallowed(model=SMALL, steps=2, learning_rates=(1e-4,), seq_len=16, device="cpu") for _ in range(2)
    )
    assert one == other
    by_format = {row[0]: row[1:] for row in one.tables[-1].rows}
    assert list(by_format) == list(IN_FORMATS)
    assert by_format["bf16"][0] < by_format["fp8-e4m3"][0] == by_format["fp8-e4m3fnuz"][0]  # pyright: ignore


def test_bytes_a_parameter_are_those_of_the_tensors():
    found = study_swallowed(model=SMALL, steps=1, learning_rates=(1e-4,), seq_len=16, device="cpu")
    said = {row[0]: row[1] for row in found.table("The same training at lr 0.0001").rows}
    names: dict[Keeping, str] = {
        "master": "bf16, fp32 master", "kahan": "bf16, Kahan", "stochastic": "bf16, stochastic",
        "nearest": "bf16, to nearest",
    }  # fmt: skip
    for keeping, name in names.items():
        parameter = nn.Parameter(torch.ones(8).bfloat16())
        parameter.grad = torch.ones_like(parameter)
        optimizer = AdamWBf16Parameters([parameter], keeping=keeping)
        optimizer.step()
        state = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
        assert said[name] == (parameter.nbytes + sum(tensor.nbytes for tensor in state)) / 8


def test_formats_hold_parameters_and_swallow_by_hand():
    """Beside 4 a block of mxfp4 has steps of 0.5: 0.2 more of 1 is nothing, 0.3 is a step."""
    held = held_in(torch.tensor([4.0, 1.0, 1.0]), "mxfp4")
    assert held.tolist() == [4, 1, 1]
    assert held_in(held + torch.tensor([0.0, 0.2, 0.3]), "mxfp4").tolist() == [4, 1, 1.5]
    # The step that the largest number makes is one of all of its block: by 8 they are twice as long.
    assert held_in(held + torch.tensor([4.0, 0.0, 0.5]), "mxfp4").tolist() == [8, 1, 2]
    assert held_in(torch.tensor([300.0]), "fp8-e4m3fnuz").item() == 240
    assert held_in(torch.tensor(1.01), "bf16").item() == 1.0078125
    assert held_in(torch.ones(3, 2, 2), "nvfp4-square").tolist() == torch.ones(3, 2, 2).tolist()


def test_the_verb(tmp_path: Path):
    asked = ("--steps", "3", "--d-model", "32", "--layers", "1", "--device", "cpu", "--learning-rate", "1e-3")
    found = answered("swallowed", *asked, plot=tmp_path / "swallowed.svg")
    assert {"updates-swallowed", "updates-kept"} <= {f.kind for f in found.findings}


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0}, {"learning_rates": (float("nan"),)}, {"learning_rates": ()}, {"device": "tpu"}, {"batch_size": 0},
    ],
)  # fmt: skip
def test_questions_that_cannot_be_answered(options: dict[str, Any]):
    with pytest.raises(InputError):
        study_swallowed(model=SMALL, **options)
