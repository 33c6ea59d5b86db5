"""A whole step, with its kernels and its optimizer, trains from the start and over the batches of every other run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.core.parts import PARTS
from stepscope.questions.quality import study_quality
from stepscope.questions.quality_training import Trained, TrainingSize, train_whole_step, whole_steps
from tests.command import stepscope
from tests.questions.quality.small import CPU, SMALL, WORDS, trained

FUSED = dict.fromkeys(PARTS, "fused")


def by_step(size: TrainingSize = SMALL, seed: int = 0, **choices: Any) -> Trained:
    (planned,) = whole_steps([choices], size, CPU, seed)
    assert planned.step is not None
    return train_whole_step(planned.step, size, WORDS, device=CPU, seed=seed)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"accumulation": 2},
        {"attention": "sdpa", "projections": "joint", "optimizer": "adamw-fused"},
        {"checkpointing": "every-1", "optimizer": "adamw-loop"},
        pytest.param({**FUSED, "optimizer": "adamw-one-launch"}, marks=pytest.mark.slow),
        {"compile": "blocks", "optimizer": "adamw-under-backward"},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())) or "plain",
)
@pytest.mark.usefixtures("quickly_compiled")
def test_in_fp32_it_ends_where_the_plain_loop_does(choices: dict[str, Any]):
    """At every step, and so with every learning rate on the way."""
    few = replace(SMALL, steps=3 if choices.get("norm") == "fused" else 6)  # the interpreter takes a second a step
    plain, whole = trained("fp32", few), by_step(few, **choices)
    assert whole.losses == pytest.approx(plain.losses, rel=2e-5)
    assert whole.final_loss == pytest.approx(plain.final_loss, rel=2e-5)
    for own, other in zip(whole.parameters, plain.parameters, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-5)


def test_another_start_and_rate_are_another_training():
    plain = trained("fp32")
    assert by_step(seed=1).losses[0] != plain.losses[0]
    assert by_step(replace(SMALL, learning_rate=1e-3)).losses[-1] > plain.losses[-1]


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_masters_take_the_learning_rates_and_are_judged_by_the_weights_that_forward_uses(optimizer: str):
    """As bf16-pure with masters, but for the vectors, which stay fp32."""
    plain, whole = trained("fp32"), by_step(dtype="bf16-master", optimizer=optimizer)
    assert whole.losses[-1] == pytest.approx(plain.losses[-1], rel=0.02) and whole.losses != plain.losses
    matrices = [parameter for parameter in whole.parameters if parameter.dim() >= 2]
    assert all(torch.equal(each, each.bfloat16().float()) for each in matrices)


def test_fp16_counts_the_steps_that_its_scale_skips():
    found = by_step(replace(SMALL, steps=6), dtype="fp16")
    assert found.skipped_steps is not None and found.skipped_steps >= 0 and len(found.losses) == 6
    assert by_step(replace(SMALL, steps=3)).skipped_steps is None


def test_the_study_names_each_step_and_says_whether_it_departs():
    found = study_quality(
        size=replace(SMALL, steps=40), variants=("fp32",), device="cpu",
        against=[{"attention": "sdpa"}, {"dtype": "bf16-master"}, {"attention": "sdpa"}],
    )  # fmt: skip
    names = [str(row[0]) for row in found.table("Runs").rows]
    assert names[3:] == ["step fp32 sdpa", "step bf16-master"]
    sentences = " ".join(finding.sentence for finding in found.findings)
    assert "step fp32 sdpa does not depart" in sentences and "no step changes the training" in sentences
    assert "step, whole steps" in {panel.x_title for panel in found.panels}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_len": 64}, "--against has --seq-len, which every run of this study shares"),
        ({"layers": 3, "model": "small"}, "--against has --layers, --model"),
        ({"graph": "step"}, "--graph step captures CUDA graphs, which cpu has not"),
        ({"accumulation": 3}, "batch_size 2 cannot be split into 3 equal micro-batches"),
    ],
)
def test_a_step_that_trains_something_else_is_refused(change: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        whole_steps([change], SMALL, CPU, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--against", "fast"), "--against 'fast' is no options: write those of a step"),
        (("--against", "--dtype bf17"), "bf17"),
        (("--against", ""), "--against '' is no options: write those of a step"),
        (("--against", "--compil default"), "); write those of a step, as in"),
        (("--against", "--batch-size 3"), "--against has --batch-size"),
        (("--module", "train.py:make", "--against", "--dtype bf16"), "--against"),
    ],
)
def test_what_cannot_be_read_is_one_line(words: tuple[str, ...], said: str):
    done = stepscope("study", "quality", "--steps", "20", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach", "adamw-one-launch", "adamw-under-backward"])
def test_a_replayed_step_takes_each_learning_rate(optimizer: str):
    """A rate that a graph had captured would stay that of the fourth step."""
    few, device = replace(SMALL, steps=12), torch.device("cuda")
    losses = [
        train_whole_step(planned.step, few, WORDS, device=device, seed=0).losses
        for planned in whole_steps(
            [{"optimizer": optimizer, "graph": graph, "accumulation": 2} for graph in ("none", "step")], few, device, 0
        )
        if planned.step is not None
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
