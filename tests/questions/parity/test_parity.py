"""A step run in several ways: correct models agree; planted mistakes are found, named and explained with figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stepscope.core.answer import Answer, Cell, Finding
from stepscope.core.errors import InputError
from stepscope.core.model_config import configure
from stepscope.questions.parity import ROUNDING, VARIANTS, study_parity
from stepscope.questions.parity_plain import FACTOR
from tests.questions.parity.planted import LENGTH, make
from tests.questions.verbs import answered, refused

pytestmark = pytest.mark.slow

OWN = "tests.questions.parity.planted:make"
LEFT_OUT = (5, 4, 1, 0)
"""Targets of each sample that are left out, of 8: 3, 4, 7 and 8 count, 22 in all."""


def asked(ways: dict[str, Any] | None = None, own: str = OWN, **arguments: Any) -> Answer:
    return study_parity(factory=own, arguments=arguments, device="cpu", **(ways or {"accumulation": (2,)}))


def rows(answer: Answer) -> dict[str, dict[str, Any]]:
    table = answer.table(VARIANTS)
    return {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def number(cell: Cell) -> float:
    assert isinstance(cell, float)
    return cell


def found(answer: Answer, kind: str) -> list[Finding]:
    return [finding for finding in answer.findings if finding.kind == kind]


EVERY_WAY = {"accumulation": (2, 4), "attention": ("sdpa-math",), "checkpointing": ("every-1", "selective")}


def test_a_correct_model_agrees_in_every_way():
    answer = asked(EVERY_WAY)
    assert {name: row["verdict"] for name, row in rows(answer).items()} == dict.fromkeys(
        ("accumulation 2", "accumulation 4", "attention sdpa-math", "checkpointing every-1", "checkpointing selective"),
        "agrees",
    )
    headline = answer.findings[0]
    assert headline.severity == "note"
    assert headline.sentence.startswith("All 5 ways to run this step give what the plain step gives, within rounding.")
    assert rows(answer)["checkpointing every-1"]["gradients off by"] == 0.0, "the same operators on the same numbers"
    assert 0 < rows(answer)["accumulation 2"]["gradients off by"] < 1e-6


def test_the_textbooks_model_agrees_in_every_way():
    model = configure("tiny", d_model=32, d_ff=64, layers=2, heads=2, vocabulary=101)
    ways = {"accumulation": (4,), "attention": ("sdpa", "flash-tiled"), "checkpointing": ("every-2", "selective")}
    for dtype in ("fp32", "bf16"):
        answer = study_parity(model=model, seq_len=16, dtype=dtype, device="cpu", **ways)
        assert {row["verdict"] for row in rows(answer).values()} == {"agrees"}, dtype
        assert len(rows(answer)) == 5


def test_rounding_is_measured_against_float64_and_by_moved_weights():
    answer = asked()
    moved = {str(row[0]): row[1:] for row in answer.table(ROUNDING).rows}
    assert moved["the step again"] == (0.0, 0.0)
    largest = max(number(row[1]) for name, row in moved.items() if not name.startswith("8 times"))
    assert moved["8 times the largest is still the same"][1] == pytest.approx(FACTOR * largest, rel=1e-3)
    assert 1e-8 < number(moved["in float64"][1]) < 1e-6

    module, (tokens, target), loss = _made()
    narrow = _gradients(module, loss(module(tokens), target))
    wide = module.double()
    exact = _gradients(wide, loss(wide(tokens), target))
    assert moved["in float64"][1] == pytest.approx(float((narrow - exact).norm() / narrow.norm()), rel=1e-2)


def test_a_module_that_cannot_be_double_is_measured_by_its_moved_weights():
    answer = asked(fault="fp32 alone")
    assert rows(answer)["accumulation 2"]["verdict"] == "agrees"
    (rounding,) = found(answer, "parity-rounding")
    assert "float64 cannot say it" in rounding.sentence and "TypeError: only fp32" in rounding.sentence
    assert rounding.evidence["gradients"] > 1e-8  # type: ignore[operator]


def test_a_mean_over_the_tokens_of_each_micro_batch_is_explained_with_its_figures():
    answer = asked({"accumulation": (2, 4)}, ignored=LEFT_OUT)
    assert {row["verdict"] for row in rows(answer).values()} == {"departs"}
    assert {row["departs first"] for row in rows(answer).values()} == {"the loss"}
    two, four = found(answer, "loss-normalisation")
    assert "the micro-batches have 7 and 15 of the 22 targets in item 1 of the batch that are not -100" in two.sentence
    assert "3, 4, 7 and 8 of the 22 targets" in four.sentence
    assert (two.evidence["tokens"], two.evidence["fewest"], two.evidence["most"]) == (22, 7, 15)
    assert two.evidence["ratio"] == pytest.approx(15 / 7) and two.evidence["factor"] == pytest.approx(22 / 14)
    assert four.evidence["factor"] == pytest.approx(22 / (4 * 3))
    assert two.evidence["gradients_off_when_weighed"] < 1e-6  # type: ignore[operator]
    assert "divide the sum" in two.remedy
    assert answer.findings[0].severity == "warning"

    # The loop is written out here: the mean of two means beside the mean over all.
    module, (tokens, target), loss = _made(ignored=LEFT_OUT)
    whole = _gradients(module, loss(module(tokens), target))
    halves = [loss(module(tokens[half]), target[half]) for half in (slice(0, 2), slice(2, 4))]
    off = (_gradients(module, sum(halves) / 2) - whole).norm() / whole.norm()  # type: ignore[arg-type]
    assert rows(answer)["accumulation 2"]["gradients off by"] == pytest.approx(float(off), rel=1e-3)
    assert float(off) > 0.1


def test_targets_shifted_by_one_are_counted_as_the_loss_counts_them():
    answer = asked({"accumulation": (2,)}, own="tests.questions.parity.test_parity:make_shifted")
    (explained,) = found(answer, "loss-normalisation")
    assert explained.evidence["tokens"] == 22 - 4 and explained.evidence["fewest"] == 7 - 2
    assert "`labels` that are not -100, but for the first of each sequence" in explained.sentence


def test_a_sum_over_the_tokens_of_the_whole_batch_is_right():
    answer = asked({"accumulation": (2, 4)}, ignored=LEFT_OUT, tokens=22)
    assert {row["verdict"] for row in rows(answer).values()} == {"agrees, losses added"}
    module, (tokens, target), loss = _made(ignored=LEFT_OUT, tokens=22)
    assert rows(answer)["accumulation 4"]["loss"] == pytest.approx(loss(module(tokens), target).item(), rel=1e-3)
    assert answer.findings[0].severity == "note" and not found(answer, "loss-normalisation")
    assert "added up, and not when they are averaged" in found(answer, "summed-loss")[0].sentence


def test_a_micro_batch_without_targets_is_named():
    answer = asked({"accumulation": (4,)}, ignored=(0, LENGTH, 2, 0))
    (explained,) = found(answer, "loss-normalisation")
    assert "no target counts in micro-batch 2: a mean over none is 0/0" in explained.sentence


@pytest.mark.parametrize(
    ("planted", "first", "said"),
    [
        ({"norm": "over the batch"}, "`norm`", "`norm` is the first module to depart: its output is off by "),
        ({"norm": "batch"}, "`norm`", "It is BatchNorm in training mode, whose mean and variance are those of the"),
        (
            {"fault": "between modules"}, "what goes into `drop`",
            "it is made by the code of the whole model itself, outside of its modules. The last that agrees is the "
            "output of `norm`.",
        ),
        (
            {"fault": "backward"}, "the gradient of `norm`",
            "in backward the gradient of `norm`'s output is the first to depart, by 50 %, where rounding",
        ),
    ],
)  # fmt: skip
def test_the_first_to_depart_is_named(planted: dict[str, Any], first: str, said: str):
    answer = asked(**planted)
    (row,) = rows(answer).values()
    assert (row["verdict"], row["departs first"]) == ("departs", first)
    (why,) = found(answer, "first-departure")
    assert said in why.sentence, why.sentence
    assert planted.get("fault") != "backward" or "agrees is the gradient of the output of `middle`." in why.sentence
    assert why.evidence["off"] > 1e4 * why.evidence["rounding"]  # type: ignore[operator]


def test_dropout_is_off_where_micro_batches_would_draw_it_anew_and_only_there():
    answer = asked({"accumulation": (2,), "checkpointing": ("every-1",)}, drop=0.1)
    assert {row["verdict"] for row in rows(answer).values()} == {"agrees"}
    both = rows(answer)
    assert both["accumulation 2"]["loss"] != both["checkpointing every-1"]["loss"]
    (drawn,) = found(answer, "random-forward")
    assert "in dropout (`drop`)" in drawn.sentence and "both without dropout" in drawn.sentence


def test_random_numbers_that_cannot_be_turned_off_leave_the_question_open():
    answer = asked({"accumulation": (2,), "checkpointing": ("every-1",)}, fault="functional dropout")
    assert [row["verdict"] for row in rows(answer).values()] == ["draws anew", "agrees"]
    (drawn,) = found(answer, "random-forward")
    assert drawn.severity == "warning" and "cannot be told" in drawn.sentence and drawn.remedy
    assert answer.findings[0].sentence.startswith("The one way to run this step gives")


@pytest.mark.long
@pytest.mark.slow
def test_compiled_by_inductor_a_layer_agrees_and_a_fault_in_compiled_code_is_named():
    own, ways = "tests.questions.parity.planted:make_linear", {"compile": ("default",)}
    assert rows(asked(ways, own))["compile default"]["verdict"] == "agrees"
    answer = asked(ways, own, fault="compiled")
    assert rows(answer)["compile default"]["verdict"] == "departs"
    (why,) = found(answer, "first-departure")
    assert "the whole model is the first module to depart: its output is off by 1 %" in why.sentence


def test_the_verb_and_its_plot(tmp_path: Path):
    file = Path(__file__).with_name("planted.py")
    said = ("--module", f"{file}:make", "--arg", f"ignored={json.dumps(LEFT_OUT)}", "--accumulation", "2,4")
    answer = answered("parity", *said, "--device", "cpu", plot=tmp_path / "parity.svg")
    assert [row["departs first"] for row in rows(answer).values()] == ["the loss", "the loss"]
    assert answer.settings["model"] == f"{file}:make"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--accumulation", "1"), "--accumulation 1 is the plain step itself"),
        (("--accumulation", "3"), "the batch of tiny has 4 samples, which cannot be split into 3 equal"),
        (("--compile", "eager"), "unknown compile mode 'eager'"),
        (("--checkpointing", "none"), "--checkpointing none is the plain step itself"),
        (("--dtype", "fp12"), "unknown dtype 'fp12'"),
        (("--module", f"{Path(__file__).with_name('planted.py')}:make", "--seq-len", "8"), "has no parameter 'seq"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], said: str):
    assert said in refused("parity", *arguments, "--device", "cpu")


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ({"attention": ("flash",)}, "unknown attention of a model of your own 'flash'"),
        ({"attention": ("sdpa-math",)}, "its step runs no fused scaled_dot_product_attention"),
        ({"checkpointing": ("every-1",)}, "it has no blocks"),
        ({"accumulation": (8,)}, "has 4 samples, which cannot be split into 8"),
    ],
)
def test_a_way_that_a_model_cannot_run_is_refused(ways: dict[str, Any], said: str):
    with pytest.raises(InputError) as refusal:
        asked(ways, "tests.questions.parity.planted:make_linear")
    assert said in str(refusal.value)


def make_shifted() -> Any:
    """A model whose loss, inside of forward, holds each output against the next token, as models of language do."""
    from torch import Tensor, nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(ignored=LEFT_OUT)[0]

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.inner(input_ids)[:, :-1].flatten(0, 1)
            return {"loss": F.cross_entropy(logits, labels[:, 1:].flatten())}

    tokens, target = make(ignored=LEFT_OUT)[1]
    return WithLoss(), {"input_ids": tokens, "labels": target}


def _made(**arguments: Any) -> Any:
    torch.manual_seed(0)
    return make(**arguments)


def _gradients(module: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])
