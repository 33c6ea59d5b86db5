"""The study of quality: its tables, its sentences, an interrupt, and its verb."""

import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.answer import Answer, decode_answer, encode_answer, note
from stepscope.core.errors import InputError
from stepscope.questions import quality_training
from stepscope.questions.quality import VALIDATION, study_quality
from stepscope.questions.quality_answer import ABOVE, BY_STEP, RUNS, RunJudged, RunsJudged, quality_findings, smoothed
from stepscope.questions.quality_training import (
    LEAST_STEPS,
    SIZES,
    VARIANTS,
    Trained,
    initial_model,
)
from tests.command import Done, stepscope
from tests.questions.quality.small import SMALL, WORDS, trained

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch):
    """Judging on all of the held-out text would take longer than the training here."""
    monkeypatch.setattr(quality_training, "bundled_text", lambda: WORDS)


@pytest.fixture(scope="module")
def found() -> Answer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_training, "bundled_text", lambda: WORDS)
        return study_quality(size=SMALL, device="cpu")


def test_the_study_holds_every_variant_and_says_what_it_left_out(found: Answer):
    names = [row[0] for row in found.table(RUNS).rows]
    assert names[:3] == ["fp32", "fp32, start of seed 1", "fp32, start of seed 2"]
    assert names[3:] == [name for name in VARIANTS if name not in ("fp32", "tf32")]
    not_run = [finding for finding in found.findings if finding.kind == "not-run"]
    assert len(not_run) == 1 and not_run[0].sentence.startswith("tf32 was not run: dtype tf32 needs an NVIDIA GPU")
    assert found.settings["bytes_trained_on"] == len(WORDS.train) and found.settings["text_licence"] == "public domain"
    assert found.settings["parameters"] == sum(p.numel() for p in initial_model(SMALL, 0).parameters())


def test_tables_and_curves_have_the_same_figures(found: Answer):
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


def test_a_study_survives_json(found: Answer):
    assert decode_answer(encode_answer(found).encode(), "here") == found


def test_sentences_agree_with_the_table(found: Answer):
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
    return RunJudged(
        name=name,
        of_starts=start,
        kind="parameters in fp32",
        losses=losses,
        final_loss=validation,
        departs=departs,
        **counts,
    )  # pyright: ignore[reportArgumentType]


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
        final=VALIDATION,
        bar=3.0,
    )
    found = quality_findings(outcomes, note("reference-learned", "It has."), left_out={}, interrupted=None, planned=3)
    sentences = [f.sentence for f in found if f.sentence.startswith("Lost precision is said to cost quality")]
    assert len(sentences) == said
    assert not said or "ends 0.1 below it on held-out text: there fp32 loses 1.5 for 1 in training" in sentences[0]


def test_a_rate_that_breaks_fp32_says_so_and_names_no_departure():
    found = study_quality(size=SMALL, learning_rate=1e30, variants=("bf16",), device="cpu")
    assert any(
        finding.kind == "no-yardstick" and "does not stay finite" in finding.sentence for finding in found.findings
    )
    assert all(row[4] is None for row in found.table(RUNS).rows)
    assert decode_answer(encode_answer(found).encode(), "here").study == "quality"


def test_interrupted_it_keeps_the_runs_that_ended(monkeypatch: pytest.MonkeyPatch):
    real = quality_training.train

    def interrupted_in(variant: Any, *arguments: Any, **options: Any) -> Trained:
        if variant is VARIANTS["bf16"]:
            raise KeyboardInterrupt
        return real(variant, *arguments, **options)

    monkeypatch.setattr(quality_training, "train", interrupted_in)
    found = study_quality(size=SMALL, variants=("fp16-unscaled", "bf16", "bf16-pure"), device="cpu")
    assert [row[0] for row in found.table(RUNS).rows][3:] == ["fp16-unscaled"]
    assert found.findings[0].sentence.startswith("Interrupted in bf16: 4 of 6 runs ended")
    monkeypatch.setattr(quality_training, "train", lambda *_a, **_o: (_ for _ in ()).throw(KeyboardInterrupt))
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


def test_the_verb_reads_and_draws(found: Answer, tmp_path: Path):
    kept, plot = tmp_path / "quality.json", tmp_path / "quality.svg"
    kept.write_text(encode_answer(found))
    done = study("--from", str(kept), "--save", str(plot), "--only", RUNS)
    assert done.returncode == 0, done.stderr
    assert plot.stat().st_size > 1000 and "bf16-pure-kahan" in done.stdout


@pytest.mark.long
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
    assert decode_answer(answer.encode(), "stdout").findings[0].kind == "interrupted"


def test_default_sizes_are_whole():
    for name, size in SIZES.items():
        assert size.model.vocabulary == 256 and size.steps >= LEAST_STEPS, name
