"""One module at a time in 16 bits: errors against numbers rounded by hand, and planted modules in their places."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.core.model_config import configure
from stepscope.questions.shadow import LAYERS, RANKING, study_shadow
from tests.questions.shadow import planted
from tests.questions.verbs import answered, refused

pytestmark = pytest.mark.slow

SMALL = configure("tiny", d_model=32, d_ff=64, layers=2, heads=2, vocabulary=101)
HERE = "tests.questions.shadow.planted"


def asked(factory: str = "make", to: str = "bf16", **arguments: str) -> Answer:
    return study_shadow(factory=f"{HERE}:{factory}", arguments=arguments, to=to, device="cpu")


def rows(answer: Answer, title: str = RANKING) -> dict[str, dict[str, Any]]:
    table = answer.table(title)
    columns = [*table.columns[:6], "worst off by", table.columns[7]]
    return {str(row[0]): dict(zip(columns, row, strict=True)) for row in table.rows}


def sentence(answer: Answer, kind: str) -> str:
    (found,) = [finding for finding in answer.findings if finding.kind == kind]
    return found.sentence


@pytest.mark.parametrize("to", ["bf16", "fp16"])
def test_errors_are_those_of_numbers_rounded_by_hand(to: str):
    """y = second * (first * x), summed: the gradients are second * x and first * x."""
    model, batch, _ = planted.make_two()
    x, first, second = (each.detach().flatten().tolist() for each in (batch, model.first.weight, model.second.weight))
    low = FORMATS[to].round
    given = [b * c for b, c in zip(second, x, strict=True)] + [a * c for a, c in zip(first, x, strict=True)]

    # What `first` gets back is rounded, and so is its gradient; what it gives on is rounded, too.
    by_first = [low(low(b) * low(c)) for b, c in zip(second, x, strict=True)]
    by_first += [low(low(a) * low(c)) for a, c in zip(first, x, strict=True)]
    # `second` gives back its rounded weight; its own gradient is its rounded input.
    by_second = [low(b) * c for b, c in zip(second, x, strict=True)]
    by_second += [low(a * c) for a, c in zip(first, x, strict=True)]

    found = rows(asked("make_two", to))
    for name, changed in (("first", by_first), ("second", by_second)):
        off = [one - other for one, other in zip(changed, given, strict=True)]
        assert found[name]["gradients off by"] == pytest.approx(math.hypot(*off) / math.hypot(*given), rel=2e-3)
        halves = [(off[:8], given[:8], "first.weight"), (off[8:], given[8:], "second.weight")]
        worst, which = max((math.hypot(*o) / math.hypot(*g), name) for o, g, name in halves)
        assert found[name]["worst off by"] == pytest.approx(worst, rel=2e-3)
        assert found[name]["worst parameter"] == which


@pytest.mark.parametrize("kind", ["sharp", "cancel"])
def test_a_module_that_is_sensitive_by_construction_is_first(kind: str):
    answer = asked(middle=kind)
    first, second = list(rows(answer).values())[:2]
    assert first["module"] == "middle" and first["verdict"] == "above noise"
    assert first["gradients off by"] > 5 * second["gradients off by"]
    assert sentence(answer, "shadow").startswith("`middle` is the most sensitive to its precision: alone in bf16 it")
    assert answer.panels[0].points[0].name == "middle"


def test_what_a_checkpoint_runs_again_is_as_without():
    """The module inside computes as given, and its input is raised for it, in backward too."""
    found = [
        study_shadow(factory=f"{HERE}:make_again", arguments={"again": again}, device="cpu") for again in (False, True)
    ]
    assert rows(found[0]) == rows(found[1]) and rows(found[0])["the model itself"]["verdict"] == "above noise"
    assert found[0].findings == found[1].findings


def test_a_module_that_changes_nothing_is_within_noise():
    answer = asked(first="double")
    last = rows(answer)["first"]
    assert (last["gradients off by"], last["verdict"]) == (0.0, "within noise")
    assert sentence(answer, "shadow-noise").endswith("are the gradients with `first` alone in bf16.")
    assert rows(answer)["in"]["verdict"] == "above noise"


def test_a_step_that_does_not_repeat_itself_has_noise_that_small_errors_are_lost_in():
    answer = asked(last="forgetful")
    assert answer.findings[0].evidence["noise"] > 1e-3  # type: ignore[operator]
    assert {row["verdict"] for row in rows(answer).values()} == {"within noise"}


def test_a_module_round_others_leaves_them_their_precision():
    planted.Seen.dtypes.clear()
    answer = asked(middle="residual")
    assert rows(answer)["middle"]["class"] == "Residual, between its modules"
    narrow = planted.Seen.dtypes.count(torch.bfloat16)
    assert narrow == 2, "alone, and with all at once"
    assert len(planted.Seen.dtypes) > 6
    assert rows(answer)["middle"]["gradients off by"] > 0 < rows(answer)["middle.inner"]["gradients off by"]


def test_a_module_alone_and_all_at_once_is_the_module_cast():
    """All parts of a linear layer and its loss in bf16 are the layer and the loss in bf16, as PyTorch casts them."""
    model, batch, loss = planted.make()
    wide = _gradients(model, loss(model(batch)))
    low = model.bfloat16()
    narrow = _gradients(low, loss(low(batch.bfloat16())))
    assert rows(asked())["all at once"]["gradients off by"] == pytest.approx(
        float((narrow - wide).norm() / wide.norm()), rel=1e-3
    )


def test_parameters_that_a_module_takes_from_one_that_never_runs_and_buffers_are_cast():
    for answer in (asked("make_encoder"), asked(middle="norm")):
        assert {row["verdict"] for row in rows(answer).values()} == {"above noise"}
        assert not [finding for finding in answer.findings if finding.kind == "shadow-refused"]


def test_a_module_that_refuses_16_bits_is_told_and_the_others_go_on():
    answer = asked(middle="wide")
    assert rows(answer)["middle"]["verdict"] == "does not run"
    assert rows(answer)["in"]["verdict"] == "above noise"
    assert "`middle` does not run in bf16" in sentence(answer, "shadow-refused")
    assert "TypeError: only fp32" in sentence(answer, "shadow-refused")


def test_what_overflows_in_fp16_is_first():
    answer = asked(to="fp16", middle="large")
    assert next(iter(rows(answer).values()))["verdict"] == "not finite"
    assert "`middle`" in sentence(answer, "shadow-not-finite")
    assert "makes them not finite" in answer.findings[0].sentence


def test_dropout_is_off_and_random_numbers_of_forwards_own_are_told():
    assert sentence(asked(middle="dropout"), "shadow-dropout").startswith("Dropout is off, in `middle`")
    assert "draws random numbers of its own" in sentence(asked(middle="draws"), "shadow-dropout")


def test_layers_of_one_kind_are_one_row_and_the_first_of_all_is_shown_layer_by_layer():
    answer = asked("make_layers")
    assert list(rows(answer)) == ["*.* (Cancel)", "*.* (Linear)", "the loss", "all at once"]
    assert rows(answer)["*.* (Cancel)"]["modules"] == 3
    layers = rows(answer, LAYERS)
    assert list(layers) == ["0.1", "1.1", "2.1"]
    assert max(layers, key=lambda name: layers[name]["gradients off by"]) == "1.1"
    assert "`1.1` moves the gradients farthest" in sentence(answer, "shadow-layers")


def test_the_textbooks_model_has_a_row_for_each_kind_of_module():
    found = rows(study_shadow(model=SMALL, seq_len=16, batch_size=1, device="cpu"))
    assert {"embedding", "blocks.*", "blocks.*.attention", "rotary", "norm", "head", "the loss"} <= set(found)
    assert found["blocks.*.attention"]["class"] == "CausalSelfAttention, between its modules"
    assert all(0 < row["gradients off by"] < 0.1 for row in found.values())


def test_what_is_narrow_already_has_nothing_to_change():
    with pytest.raises(InputError, match="is wider than bf16: there is no precision to change"):
        asked("make_half")


def test_the_verb_and_its_plot(tmp_path: Path):
    said = ("--module", f"{Path(planted.__file__)}:make", "--arg", "middle=cancel", "--device", "cpu")
    answer = answered("shadow", *said, plot=tmp_path / "shadow.svg")
    assert next(iter(rows(answer))) == "middle"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--to", "fp8"), "unknown precision 'fp8'"), (("--arg", "width=8"), "--arg belongs to --module")],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], said: str):
    assert said in refused("shadow", *arguments, "--device", "cpu")


def _gradients(module: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])
