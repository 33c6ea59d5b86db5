"""The study of quality on a user's own module, against a loop by hand, and where no variant can be told apart."""

import math
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.errors import InputError
from stepscope.questions.quality import study_own_quality
from stepscope.questions.quality_answer import RUNS
from stepscope.questions.quality_training import rate_at
from tests.questions.verbs import refused

OWN = """
import time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn

def batches():
    drawn = torch.Generator().manual_seed(7)
    return [(torch.randn(8, 6, generator=drawn), torch.arange(8) % 3) for _ in range(3)]

def make(seed=None, sgd=False):
    if seed is not None:
        torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3))
    made = model, batches(), F.cross_entropy
    return (*made, torch.optim.SGD(model.parameters(), lr=0.1)) if sgd else made

def restless():  # other parameters and other batches in each call of any process, whatever the seed
    with Path(__file__).with_suffix(".calls").open("a") as calls:
        calls.write("-")
        call = calls.tell()
    model = nn.Linear(6, 1)
    nn.init.constant_(model.weight, 10.0 * call)
    return model, torch.full((4, 6), 3.0 + call), lambda output: output.square().mean()

class Mixed(nn.Linear):
    def forward(self, x):
        return super().forward(x.float()).square().mean()  # which parameters in bf16 cannot take

def mixed():
    return Mixed(6, 1), torch.ones(4, 6)

class Far(nn.Linear):
    def forward(self, x):
        return (3000 * super().forward(x)).square().mean()  # beyond fp16, which ends at 65,504

def far():
    return Far(6, 1), torch.ones(4, 6)

class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x).square().mean()

def slow():
    return Slow(6, 1), torch.ones(4, 6)

def wrong():
    return nn.Linear(6, 1), torch.ones(4, 5), lambda output: output.sum()

def lossless(factor):  # a loss that is 0 or NaN whatever the model does
    return nn.Linear(6, 1), torch.ones(4, 6), lambda output: output.mean() * float(factor)

class OnlyInTraining(nn.Linear):
    def forward(self, x):
        return super().forward(x).sum() if self.training else "a prediction"

def only_in_training():
    return OnlyInTraining(6, 1), torch.ones(4, 6)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return str(path)


def studied(own: str, *variants: str, **asked: Any) -> Answer:
    return study_own_quality(factory=own, steps=20, variants=variants or None, device="cpu", **asked)


def rows(found: Answer) -> dict[Any, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in found.table(RUNS).rows}


def kinds(found: Answer) -> list[str]:
    return [finding.kind for finding in found.findings]


@pytest.mark.parametrize("sgd", [False, True])
def test_fp32_is_the_loop_that_anyone_would_write(own: str, sgd: bool):
    """AdamW with its rates, or the factory's own SGD with its own, over the factory's batches in turn."""
    found = studied(f"{own}:make", "bf16", arguments={"sgd": sgd})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    drawn = torch.Generator().manual_seed(7)
    batches = [(torch.randn(8, 6, generator=drawn), torch.arange(8) % 3) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if sgd else torch.optim.AdamW(model.parameters())
    for step in range(1, 21):
        if not sgd:
            optimizer.param_groups[0]["lr"] = rate_at(step, 20, 1e-3)
        inputs, targets = batches[(step - 1) % 3]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    afterwards = sum(F.cross_entropy(model(inputs), targets).item() for inputs, targets in batches) / 3
    assert rows(found)["fp32"][1] == pytest.approx(afterwards, rel=1e-3)
    assert list(rows(found)) == ["fp32", "fp32, start of seed 1", "fp32, start of seed 2", "bf16"]
    assert {"starts-apart", "run-beside-fp32", "nothing-held-out"} <= set(kinds(found))
    assert found.settings["optimizer"] == ("SGD" if sgd else "AdamW")
    assert decode_answer(encode_answer(found).encode(), "here") == found


def test_every_run_has_the_first_calls_parameters_and_batches(own: str):
    found = studied(f"{own}:restless", "bf16", "bf16-pure-master")
    reference, *others = (rows(found)[name][1] for name in ("fp32", "bf16", "bf16-pure-master"))
    assert others == pytest.approx([reference] * 2, rel=0.02)
    assert rows(found)["fp32, start of seed 1"][1] != pytest.approx(reference, rel=0.02)


def test_parameters_that_no_seed_decides_tell_no_departure(own: str):
    found = studied(f"{own}:make", "bf16", arguments={"seed": 3})
    assert list(rows(found)) == ["fp32", "bf16"] and rows(found)["bf16"][3] is None
    assert {"no-yardstick", "run-beside-fp32"} <= set(kinds(found))
    (sentence,) = (finding.sentence for finding in found.findings if finding.kind == "no-yardstick")
    assert "the same parameters whatever PyTorch's seed is" in sentence


def test_what_cannot_run_is_left_out_and_said(own: str):
    of_sgd = studied(f"{own}:make", arguments={"sgd": True})
    assert [name for name in rows(of_sgd) if "pure" in name] == ["bf16-pure"]
    mixed = studied(f"{own}:mixed", "bf16", "bf16-pure")
    assert list(rows(mixed))[3:] == ["bf16"]
    (said,) = (finding.sentence for finding in mixed.findings if finding.kind == "not-run")
    assert said.startswith("bf16-pure was not run: --module") and "must have the same dtype" in said


def test_a_loss_beyond_fp16_departs_from_the_first_step_on(own: str):
    found = studied(f"{own}:far", "fp16-unscaled")
    (lost,) = (finding for finding in found.findings if finding.kind == "run-lost")
    assert lost.evidence["departs"] == 1 and math.isnan(rows(found)["fp16-unscaled"][1])


def test_losses_that_do_not_differ_are_said_to_be_level(own: str):
    found = studied(f"{own}:lossless", "bf16", arguments={"factor": 0})
    (said,) = (finding.sentence for finding in found.findings if finding.kind == "run-beside-fp32")
    assert "ends level with fp32 in training" in said and "(no more than what starts change)" in said


def test_a_loss_that_is_lost_before_any_update_is_not_the_learning_rates_doing(own: str):
    found = studied(f"{own}:lossless", "bf16", arguments={"factor": "nan"})
    (remedy,) = (finding.remedy for finding in found.findings if finding.kind == "no-yardstick")
    assert remedy.startswith("mend the loss or the batch")


@pytest.mark.parametrize(
    ("factory", "asked", "said"),
    [
        ("make", {"variants": ("bf16-pure-kahan",), "arguments": {"sgd": True}}, "kept by an AdamW of stepscope's"),
        ("make", {"learning_rate": 1e-2, "arguments": {"sgd": True}}, "gives an optimizer of its own, SGD, with its"),
        ("make", {"variants": ("tf32",)}, "tf32 needs an NVIDIA GPU"),
        ("make", {"steps": 5}, "steps is 5"),
        ("wrong", {}, "fails in eval mode, which judges it: RuntimeError: mat1 and mat2"),
        ("only_in_training", {}, "in eval mode, which judges it, .* has no loss: forward returned str"),
    ],
)
def test_questions_that_cannot_be_answered(own: str, factory: str, asked: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        study_own_quality(factory=f"{own}:{factory}", device="cpu", **asked)


@pytest.mark.slow
def test_the_verb_refuses_in_one_line_and_keeps_what_ended(own: str):
    assert "--model-size says nothing with --module" in refused("quality", "--module", "a.py:b", "--model-size", "cpu")
    asked = ("--module", f"{own}:slow", "--variants", "bf16", "--steps", "50", "--device", "cpu", "--json")
    command = [sys.executable, "-m", "stepscope", "study", "quality", *asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if "(2 of 4)" in line:
                process.send_signal(signal.SIGINT)  # to the command alone, which asks its child
                break
        answer, _ = process.stdout.read(), process.wait(60)
    assert process.returncode == 130
    found = decode_answer(answer.encode(), "stdout")
    assert found.findings[0].kind == "interrupted" and list(rows(found)) == ["fp32"]
