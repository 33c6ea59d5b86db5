"""The studies of precision on a user's own module: hand-made modules, and the textbook given as one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.questions.normalisation import study_own_normalisation
from stepscope.questions.parity import study_parity
from stepscope.questions.scaling import study_scaling
from stepscope.questions.shadow import study_shadow
from stepscope.questions.swallowed import study_swallowed
from stepscope.questions.underflow import gradients_of
from tests.questions.verbs import answered, refused

OWN = """
import torch
import torch.nn.functional as F
from torch import nn
from stepscope.core.model_config import ModelConfig
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.training_step import ForwardLoss, TrainingStep

def textbook():
    model = ModelConfig(name="small", d_model=16, d_ff=32, layers=1, heads=2, vocabulary=32)
    step = TrainingStep(TextbookWorkload(model=model, batch_size=2, seq_len=8), torch.device("cpu"))
    return step.forward_module, list(step.batches)

def linear(dropout=0.0):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))
    return model, (torch.randn(32, 8), torch.randint(4, (32,))), F.cross_entropy

def mixed():
    first = nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 8)})
    class Both(nn.Sequential):
        def forward(self, x):
            return self[1](self[0]["up"](self[0]["norm"](x)))
    return Both(first, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))), torch.randn(4, 8), lambda y: y.square().sum()

class Normed(nn.Module):
    def __init__(self, value, width):
        super().__init__()
        self.value, self.width = value, width
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, 1)
    def forward(self, x):
        return self.head(self.norm(x)).mean()

def normed(value, width=8):
    return Normed(value, width), torch.tensor([[value, -value]]).repeat(2, width // 2)

def no_number(times="loss"):
    model = nn.Linear(4, 1)
    if times == "loss":
        return model, torch.ones(2, 4), lambda out: out.sum() * float("nan")
    return model, torch.ones(2, 4), lambda out: (out * 0).sqrt().sum()  # The slope of the root at 0 is infinite.

def untrained():
    return nn.Linear(4, 1).requires_grad_(False), torch.ones(2, 4), lambda out: out.sum()

def frozen():
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)  # which decay does not move, either
    return model, torch.zeros(2, 4), lambda out: (out * 0).sum()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return str(path)


def test_the_textbook_given_as_a_module_swallows_the_same_updates(own: str):
    """Its layers have other names; what all of them swallow, and where each remedy ends, is the same to the digit."""
    model = ModelConfig(name="small", d_model=16, d_ff=32, layers=1, heads=2, vocabulary=32)
    asked: dict[str, Any] = {"steps": 4, "learning_rates": (1e-4,), "device": "cpu"}
    by_name = study_swallowed(model=model, batch_size=2, seq_len=8, **asked)
    as_module = study_swallowed(factory=f"{own}:textbook", **asked)
    title = "Updates that round to nothing, %, to nearest"
    assert as_module.table(title).rows[-1] == by_name.table(title).rows[-1]
    remedies = "The same training at lr 0.0001"
    assert as_module.table(remedies).rows == by_name.table(remedies).rows
    assert {row[0] for row in as_module.table(title).rows} >= {"model.embedding", "model.blocks.0.attention.query"}


def test_modules_of_several_classes_in_a_sequential_keep_their_paths(own: str):
    asked: dict[str, Any] = {"steps": 1, "learning_rates": (1e-4,), "device": "cpu"}
    rows = study_swallowed(factory=f"{own}:mixed", **asked).table("Medians in the last step").rows
    assert [row[0] for row in rows] == ["0.norm", "0.up", "*.*"]


def test_a_module_whose_gradients_are_all_zero_has_nothing_to_swallow(own: str):
    with pytest.raises(InputError, match="no parameter moves in fp32"):
        study_swallowed(factory=f"{own}:frozen", steps=2, learning_rates=(1e-4,), device="cpu")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_planted_overflow_of_ones_own_is_skipped_by_both_scalers(own: str, dropout: float):
    found = study_scaling(
        factory=f"{own}:linear", arguments={"dropout": dropout}, steps=30, growth_interval=10, device="cpu"
    )
    rows = found.table("Steps at which something happened").rows
    assert {row[0] for row in rows if row[1] == "planted overflow, skipped"} == {7, 8}
    assert found.findings[-1].evidence["different"] == 0 and found.findings[-1].severity == "note"


def test_a_norm_breaks_in_fp16_where_the_square_of_what_it_reads_does(own: str):
    """255.875^2 = 65,472 is a number of fp16, and 256^2 is not. Every row is x and -x, so the output is 1 and -1."""
    fits, breaks = (study_own_normalisation(factory=f"{own}:normed", arguments={"value": v}) for v in (255.875, 256.0))
    title = "Error of the output in fp16, without weights"
    (fitting,), (broken,) = fits.table(title).rows, breaks.table(title).rows
    assert fitting[0] == broken[0] == "norm"
    assert isinstance(fitting[2], float) and fitting[2] < 1e-3 and broken[2] == "zero"
    assert isinstance(broken[3], float) and broken[3] < 1e-3, "upcasting mends it"
    assert [f.kind for f in breaks.findings] == ["norm-breaks", "norm-error"]
    (read,) = fits.table("What the norms read in a step").rows
    assert read[1:6] == ("RMSNorm", 1, 8, 1e-5, pytest.approx(255.875, rel=2e-3))
    assert all(figure == pytest.approx(256, rel=2e-3) for figure in read[6:])


@pytest.mark.parametrize("study", [study_parity, study_shadow])
def test_what_is_not_finite_and_what_cannot_be_trained_are_named(own: str, study: Callable[..., Answer]):
    with pytest.raises(InputError, match=r"^the loss of .* is not finite"):
        study(factory=f"{own}:no_number", device="cpu")
    with pytest.raises(InputError, match=r"^the gradient of \S*(weight|bias) of .* is not finite"):
        study(factory=f"{own}:no_number", arguments={"times": "gradient"}, device="cpu")
    with pytest.raises(InputError, match="give it some, or measure forward alone with stepscope run --phase forward"):
        study(factory=f"{own}:untrained", device="cpu")


def test_a_loss_that_is_not_finite_has_no_gradients_to_look_at(own: str):
    step = FactoryWorkload(factory=f"{own}:no_number", model=UserModel(name=""), phase="forward-backward")
    with pytest.raises(InputError, match=r"^the loss of this step is nan, which is not finite: give it another batch"):
        gradients_of(step, torch.device("cpu"))
    with pytest.raises(InputError, match=r"^the loss of this step is nan, which is not finite: give another batch"):
        study_scaling(factory=f"{own}:no_number", steps=1, planted=(), device="cpu")
    with pytest.raises(InputError, match=r"^the loss of this step is nan, which is not finite: give another batch"):
        study_swallowed(factory=f"{own}:no_number", steps=1, learning_rates=(1e-3,), device="cpu")


def test_a_model_without_norms_is_refused(own: str):
    with pytest.raises(InputError, match="runs no RMSNorm and no LayerNorm"):
        study_own_normalisation(factory=f"{own}:linear")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "asked"),
    [
        pytest.param(
            "scaling",
            ("--module", "{own}:linear", "--arg", "dropout=0.5", "--steps", "9", "--device", "cpu"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "swallowed",
            ("--module", "{own}:linear", "--steps", "2", "--learning-rate", "1e-3", "--device", "cpu"),
            marks=pytest.mark.long,
        ),
        ("normalisation", ("--module", "{own}:normed", "--arg", "value=300.0", "--device", "cpu")),
    ],
    ids=["scaling", "swallowed", "normalisation"],
)
def test_the_verbs(own: str, study: str, asked: tuple[str, ...], tmp_path: Path):
    found = answered(study, *(word.format(own=own) for word in asked), plot=tmp_path / "plot.svg")
    assert str(found.settings["model"]).startswith(own)


@pytest.mark.parametrize(
    ("study", "asked", "said"),
    [
        ("swallowed", ("--module", "own.py:make", "--d-model", "8"), "--d-model says nothing with --module"),
        ("scaling", ("--arg", "width=8"), "--arg belongs to --module, or --model CONFIG.json"),
        ("normalisation", ("--module", "own.py:make", "--widths", "8"), "--widths says nothing with --module"),
        ("normalisation", ("--model", "tiny"), "--model tiny is no config.json"),
        ("scaling", ("--model", "tiny"), "--model tiny is no config.json"),
    ],
    ids=["sizes", "arg alone", "widths", "a preset", "scaling a preset"],
)
def test_what_a_study_cannot_ask_is_one_line(study: str, asked: tuple[str, ...], said: str):
    assert said in refused(study, *asked)
