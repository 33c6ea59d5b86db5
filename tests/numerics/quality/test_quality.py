"""Training in every precision: against a loop by hand, the rule of departure on curves by hand, and as a study."""

import dataclasses
import math
import random
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment, decode_experiment, encode_experiment
from stepscope.core.model_config import ModelConfig
from stepscope.numerics.quality import study as quality
from stepscope.numerics.quality.bundled_text import WORKS, BundledText, bundled_text
from stepscope.numerics.quality.departure import departure, not_finite_from, smoothed, starts_apart
from stepscope.numerics.quality.findings import RunJudged, RunsJudged, quality_findings
from stepscope.numerics.quality.study import ABOVE, BY_STEP, RUNS, SIZES, study_quality
from stepscope.numerics.quality.training import (
    VARIANTS,
    Trained,
    TrainingSize,
    batches,
    initial_model,
    rate_at,
    train,
)
from tests.command import Done, stepscope

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SMALL = TrainingSize(
    model=ModelConfig(name="small", d_model=16, d_ff=32, layers=1, heads=2, vocabulary=256),
    batch_size=2, seq_len=16, steps=20, learning_rate=1e-2,
)  # fmt: skip
WORDS = BundledText(train=b"the quick brown fox jumps over the lazy dog. " * 40, held_out=b"a lazy dog, a fox. " * 20)


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch):
    """Judging on all of the held-out text would take longer than the training here."""
    monkeypatch.setattr(quality, "bundled_text", lambda: WORDS)


def trained(name: str, size: TrainingSize = SMALL, **options: Any) -> Trained:
    return train(VARIANTS[name], size, WORDS, device=CPU, seed=0, **options)


# ---- the text


def test_the_text_is_there_and_is_what_its_note_says():
    text = bundled_text()
    assert (len(text.train), len(text.held_out)) == (544_800, 60_532)
    assert text.train.lstrip().startswith(b"ALICE'S ADVENTURES IN WONDERLAND")
    assert b"Of Man's first disobedience" in text.train
    assert text.held_out.endswith(b"Through Eden took their solitary way.\n")
    assert max(text.train + text.held_out) < 128
    note = files("stepscope.numerics.quality").joinpath("text", "README.md").read_text()
    assert "148,476" in note and "456,856" in note and "public domain" in note and all(name in note for name in WORKS)


def test_the_text_goes_with_the_package():
    """Its files are package data: an installation that is not editable has them too."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["stepscope.numerics.quality"] == ["text/*"]


def test_a_unigram_by_hand():
    text = BundledText(train=b"aab", held_out=b"abc")
    total = 3 + 256
    assert text.unigram_loss == pytest.approx(-(math.log(3 / total) + math.log(2 / total) + math.log(1 / total)) / 3)


# ---- the training


def test_fp32_is_the_loop_that_anyone_would_write():
    model, data = initial_model(SMALL, 0), batches(SMALL, WORDS.train, CPU, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(1, SMALL.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, SMALL.steps, SMALL.learning_rate)
        tokens, targets = data.at(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = trained("fp32")
    assert run.losses == losses
    assert all(torch.equal(a, b) for a, b in zip(run.parameters, model.parameters(), strict=True))
    with torch.no_grad():
        held_out = torch.tensor(list(WORDS.held_out))
        sequences = held_out[: len(held_out) // 17 * 17].view(-1, 17)
        logits = model(sequences[:, :-1])
        by_hand = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()).item()
    assert run.validation_loss == pytest.approx(by_hand, rel=1e-5)
    assert run.losses[-1] < run.losses[0] - 1


def test_tokens_and_targets_are_neighbours_in_the_text():
    tokens, targets = batches(SMALL, WORDS.train, CPU, 3).at(SMALL.steps)
    assert tokens.shape == targets.shape == (2, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])
    for row in tokens:
        assert bytes(row.tolist()) in WORDS.train


def test_every_variant_begins_with_the_same_parameters_and_batches():
    """So its first loss is fp32's, up to the format it is computed in."""
    first = trained("fp32").losses[0]
    seen = set()
    for name in VARIANTS:
        if name in ("fp32", "tf32"):
            continue
        run = trained(name)
        assert run.losses[0] == pytest.approx(first, rel=2e-2), name
        assert len(run.losses) == SMALL.steps and tuple(run.losses) not in seen
        seen.add(tuple(run.losses))
    other_start = trained("fp32", start_seed=1)
    assert other_start.losses[0] != first
    assert initial_model(SMALL, 1).head.weight.equal(initial_model(SMALL, 1).head.weight)


def test_a_run_is_the_same_again_whatever_ran_before():
    one = trained("bf16-pure-stochastic")
    torch.rand(7)
    before = torch.get_rng_state()
    assert trained("bf16-pure-stochastic").losses == one.losses
    assert torch.equal(torch.get_rng_state(), before)


def test_master_weights_are_an_fp32_training_seen_through_bf16():
    """By hand: fp32 parameters take AdamW's update; forward and backward have their rounding."""
    model = initial_model(SMALL, 0).to(torch.bfloat16)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer, data = torch.optim.AdamW(masters), batches(SMALL, WORDS.train, CPU, 0)
    losses = []
    for step in range(1, SMALL.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_at(step, SMALL.steps, SMALL.learning_rate)
        tokens, targets = data.at(step)
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    run = trained("bf16-pure-master")
    # PyTorch's AdamW decays before it adds, ours in one sum: they round differently in the last place of fp32.
    assert run.losses == pytest.approx(losses, abs=2e-2)
    assert run.losses[:3] == pytest.approx(losses[:3], abs=1e-3)
    assert all(torch.equal(parameter, parameter.bfloat16().float()) for parameter in run.parameters)


def test_zeros_and_swallowed_updates_are_counted():
    slow = dataclasses.replace(SMALL, learning_rate=1e-3)
    share = trained("bf16-pure", slow).swallowed
    assert share is not None and share > 0.5
    assert trained("bf16-pure-master", slow).swallowed == pytest.approx(0, abs=0.01)
    assert trained("fp32").swallowed is None
    # Every byte that a batch lacks has a row of zeros in the embedding's gradient; elsewhere zeros are rare in fp32.
    zeros = trained("fp32").zero_gradients
    assert zeros is not None and zeros < 1e-3


def test_fp16_scales_its_loss_and_without_a_scale_nothing_is_skipped():
    assert trained("fp16").skipped_steps is not None
    assert trained("fp16-unscaled").skipped_steps is None


def test_a_run_that_is_lost_is_stopped():
    lost = trained("fp16-unscaled", dataclasses.replace(SMALL, steps=400, learning_rate=1e6))
    begun = not_finite_from(lost.losses)
    assert begun is not None and len(lost.losses) < 400 and math.isnan(lost.validation_loss)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [rate_at(step, 100, 1.0) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert max(rates) == rates[9] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)


# ---- the rule of departure


def test_smoothing_by_hand():
    assert smoothed([4.0, 2.0, 0.0, 6.0], 2) == [4, 3, 1, 3]
    assert smoothed([4.0, math.nan, 2.0], 2) == [4, 4, 2]
    lost = smoothed([4.0, math.inf, math.nan], 2)
    assert lost[:2] == [4, 4] and math.isnan(lost[2])


def test_starts_apart_by_hand():
    runs = [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0], [0.0, -3.0, 0.0, 0.0]]
    assert starts_apart(runs, 0) == [1, 3, 0, 2]
    assert starts_apart(runs, 1) == [3, 3, 3, 2]


REFERENCE = [3.0] * 100
APART = [0.1] * 100


def departs(losses: list[float], window: int = 1) -> int | None:
    return departure(losses, REFERENCE, APART, window=window, reach=10)


def test_curves_that_depart_and_curves_that_do_not():
    assert departs([3.05] * 100) is None
    assert departs([3.0] * 40 + [3.2] * 60) == 41
    assert departs([3.0] * 40 + [2.8] * 60) == 41  # below is a difference too
    assert departs([3.2] * 100) == 1
    assert departs([3.2] * 30 + [3.0] * 70) is None  # it came back
    assert departs([3.2] * 30 + [3.0] * 10 + [3.2] * 60) == 41
    assert departs([3.0] * 90 + [3.2] * 10) == 91
    assert departs([3.0] * 91 + [3.2] * 9) is None  # too late to tell whether it stays
    assert departs([3.0] * 40 + [3.15] * 60, window=4) == 43  # with three of the four beyond, their mean is


def test_a_loss_that_is_lost_departs_however_late():
    assert departs([3.0] * 99 + [math.nan]) == 100
    assert departs([3.0] * 50 + [math.nan] * 50, window=5) == 51
    assert departs([3.0] * 50 + [math.inf] * 10, window=5) == 51  # stopped early
    assert departs([3.0] * 20 + [3.2] * 40 + [math.nan] * 40) == 21
    assert departs([3.0] * 50 + [math.nan] + [3.0] * 49, window=5) is None  # a step that was skipped
    assert not_finite_from([1.0, math.nan, 1.0]) is None and not_finite_from([math.nan]) == 1


def test_runs_like_the_starts_seldom_depart():
    """Random walks of one kind: a fourth departs from the first of three less often than every other time."""
    generator = random.Random(0)

    def walk() -> list[float]:
        position, walked = 0.0, []
        for _ in range(100):
            position = 0.95 * position + generator.gauss(0, 1)
            walked.append(position)
        return walked

    found = 0
    for _ in range(200):
        starts = [smoothed(walk(), 5) for _ in range(3)]
        found += departure(walk(), starts[0], starts_apart(starts, 10), window=5, reach=10) is not None
    assert found < 30


# ---- the study


@pytest.fixture(scope="module")
def found() -> Experiment:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "bundled_text", lambda: WORDS)
        return study_quality(size=SMALL, device="cpu")


def test_the_study_holds_every_variant_and_says_what_it_left_out(found: Experiment):
    names = [row[0] for row in found.table(RUNS).rows]
    assert names[:3] == ["fp32", "fp32, start of seed 1", "fp32, start of seed 2"]
    assert names[3:] == [name for name in VARIANTS if name not in ("fp32", "tf32")]
    not_run = [finding for finding in found.findings if finding.kind == "not-run"]
    assert len(not_run) == 1 and not_run[0].sentence.startswith("tf32 was not run: dtype tf32 needs an NVIDIA GPU")
    assert found.settings["bytes_trained_on"] == len(WORDS.train) and found.settings["text_licence"] == "public domain"
    assert found.settings["parameters"] == sum(p.numel() for p in initial_model(SMALL, 0).parameters())


def test_tables_and_curves_have_the_same_figures(found: Experiment):
    run = trained("bf16")
    by_step = {row[0]: row for row in found.table(BY_STEP).rows}
    above = {row[0]: row for row in found.table(ABOVE).rows}
    last = smoothed(run.losses, 1)[-1]
    assert by_step["bf16"][-1] == pytest.approx(last, abs=1e-4)
    assert above["bf16"][-1] == pytest.approx(last - trained("fp32").losses[-1], abs=1e-4)
    curves, differences = found.panels[0], found.panels[1]
    points = {point.x: point.y for point in curves.points if point.line == "bf16"}
    assert list(points) == sorted(points) and points[20.0] == last
    assert {p.line for p in differences.points} == {p.line for p in curves.points} - {"fp32"}
    assert {"bf16-pure", "bf16-pure-kahan"} <= {point.line for point in found.panels[2].points}


def test_a_study_survives_json(found: Experiment):
    assert decode_experiment(encode_experiment(found).encode(), "here") == found


def test_sentences_agree_with_the_table(found: Experiment):
    told = {finding.evidence["run"]: finding for finding in found.findings if "departs" in finding.evidence}
    for name, *_, departs_at, _skipped, _zeros, _lost in found.table(RUNS).rows[3:]:
        finding = told[str(name)]
        if departs_at == "no":
            assert finding.kind == "run-beside-fp32" and "does not depart" in finding.sentence
        else:
            assert finding.evidence["departs"] == departs_at and str(departs_at) in finding.sentence


def made(name: str, *, last: float, validation: float, departs: int | None = None, start: bool = False) -> RunJudged:
    counts = dict.fromkeys(("not_finite_from", "skipped_steps", "zero_gradients", "swallowed"))
    losses = [3.0, last]
    return RunJudged(name=name, of_starts=start, losses=losses, validation_loss=validation, departs=departs, **counts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("last", "validation", "departs", "said"),
    [
        (1.2, 1.4, 2, True),
        (1.2, 1.4, None, False),  # it does not depart
        (0.9, 1.4, 2, False),  # it departs by fitting the training text better
        (1.2, 1.48, 2, False),  # another start changes as much
        (1.2, 1.6, 2, False),  # it is worse
    ],
)
def test_worse_in_training_and_better_on_other_text_is_said(
    last: float, validation: float, departs: int | None, said: bool
):
    outcomes = RunsJudged(
        reference=made("fp32", last=1.0, validation=1.5),
        others=(
            made("fp32, start of seed 1", last=1.01, validation=1.52, start=True),
            made("bf16-pure", last=last, validation=validation, departs=departs),
        ),
        apart=[0.0, 0.05],
        steps=2,
        window=1,
        reach=0,
        seed=0,
        unigram_loss=3.0,
    )
    found = quality_findings(outcomes, left_out={}, interrupted=None, planned=3)
    sentences = [f.sentence for f in found if f.sentence.startswith("Lost precision is said to cost quality")]
    assert len(sentences) == said
    assert not said or "ends 0.1 below it on held-out text: there fp32 loses 1.5 for 1 in training" in sentences[0]


def test_a_rate_that_breaks_fp32_says_so_and_names_no_departure():
    found = study_quality(size=SMALL, learning_rate=1e30, variants=("bf16",), device="cpu")
    assert any(
        finding.kind == "no-yardstick" and "does not stay finite" in finding.sentence for finding in found.findings
    )
    assert all(row[4] is None for row in found.table(RUNS).rows)
    assert decode_experiment(encode_experiment(found).encode(), "here").study == "quality"


def test_interrupted_it_keeps_the_runs_that_ended(monkeypatch: pytest.MonkeyPatch):
    real = quality.train

    def interrupted_in(variant: Any, *arguments: Any, **options: Any) -> Trained:
        if variant is VARIANTS["bf16"]:
            raise KeyboardInterrupt
        return real(variant, *arguments, **options)

    monkeypatch.setattr(quality, "train", interrupted_in)
    found = study_quality(size=SMALL, variants=("fp16-unscaled", "bf16", "bf16-pure"), device="cpu")
    assert [row[0] for row in found.table(RUNS).rows][3:] == ["fp16-unscaled"]
    assert found.findings[0].sentence.startswith("Interrupted in bf16: 4 of 6 runs ended")
    monkeypatch.setattr(quality, "train", lambda *_a, **_o: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        study_quality(size=SMALL, device="cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variants": ("fp32", "int4")}, "unknown variant 'int4': choose one of fp32, tf32"),
        ({"variants": ()}, "no variant"),
        ({"variants": ("tf32",)}, "tf32 needs an NVIDIA GPU"),
        ({"steps": 5}, "steps is 5"),
        ({"learning_rate": math.nan}, "learning rate nan"),
        ({"learning_rate": -1.0}, "learning rate -1.0"),
        ({"size": "huge"}, "unknown model size 'huge': choose one of cpu, gpu"),
        ({"seed": -1}, "seed is -1"),
        ({"device": "tpu"}, "unknown device"),
    ],
)
def test_questions_that_cannot_be_answered(options: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        study_quality(**{"device": "cpu", **options})


def study(*arguments: object) -> Done:
    return stepscope("study", "quality", "--device", "cpu", *arguments)


def test_the_verb_reads_and_draws(found: Experiment, tmp_path: Path):
    kept, plot = tmp_path / "quality.json", tmp_path / "quality.svg"
    kept.write_text(encode_experiment(found))
    done = study("--from", str(kept), "--save", str(plot), "--only", RUNS)
    assert done.returncode == 0, done.stderr
    assert plot.stat().st_size > 1000 and "bf16-pure-kahan" in done.stdout


def test_ctrl_c_leaves_an_answer():
    """On the real text: after the first run has ended, and before the last can."""
    command = [sys.executable, "-m", "stepscope", "study", "quality", "--device", "cpu", "--steps", "20", "--json"]
    with subprocess.Popen(
        [*command, "--variants", "fp16,fp16-unscaled"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if "fp16 (4 of 5)" in line:
                process.send_signal(signal.SIGINT)
                break
        answer, _ = process.stdout.read(), process.wait(60)
    assert process.returncode == 130
    assert decode_experiment(answer.encode(), "stdout").findings[0].kind == "interrupted"


def test_default_sizes_are_whole():
    for name, size in SIZES.items():
        assert size.model.vocabulary == 256 and size.steps >= quality.LEAST_STEPS, name
