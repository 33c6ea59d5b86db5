"""What precision does to training, as a study: one small transformer, real text, one seed, every precision.

Each run has the same parameters at the start and the same batches (`training.py`), so that what differs is the
precision. How much a difference means is told by runs of fp32 that start from the parameters of other seeds, over the
same batches: with other batches too, differences in smoothed losses would be mostly the batches' own
(`departure.py`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepscope.core.answer import Answer
from stepscope.core.errors import choose
from stepscope.core.finding import Finding
from stepscope.core.model_config import ModelConfig
from stepscope.core.workload import Workload
from stepscope.questions.answers import computed_answer
from stepscope.questions.quality.answer import panels_of, tables_of
from stepscope.questions.quality.bundled_text import BYTE_VALUES, LICENCE, WORKS, bundled_text
from stepscope.questions.quality.findings import FinalLoss, RunsJudged, quality_findings
from stepscope.questions.quality.runs import PlannedRun, Told, check_training, judged_runs, planned_runs, run_in_turn
from stepscope.questions.quality.training import REFERENCE, Trained, TrainingSize, Variant, train
from stepscope.questions.quality.whole_step import train_whole_step, whole_steps
from stepscope.questions.setting import threads_for
from stepscope.recording.device import resolve_device
from stepscope.training.training_step import check_supported

SIZES: dict[str, TrainingSize] = {
    # fp16 products are slow on a CPU without instructions for them (five times fp32's step): two runs of ten have them.
    "cpu": TrainingSize(
        model=ModelConfig(name="quality-cpu", d_model=64, d_ff=128, layers=2, heads=2, vocabulary=BYTE_VALUES),
        batch_size=8, seq_len=32, steps=600, learning_rate=3e-3,
    ),
    "gpu": TrainingSize(
        model=ModelConfig(name="quality-gpu", d_model=384, d_ff=1024, layers=6, heads=6, vocabulary=BYTE_VALUES),
        batch_size=16, seq_len=256, steps=1000, learning_rate=1e-3,
    ),
}  # fmt: skip
VALIDATION = FinalLoss(
    column="validation loss", where="in validation", evidence="validation", unit="nats", axis="nats a byte",
    decimals=4, held_out=True,
)  # fmt: skip
_BYTES_ALIKE = math.log(BYTE_VALUES)


def study_quality(
    tell: Told | None = None,
    *,
    size: str | TrainingSize | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    variants: tuple[str, ...] | None = None,
    against: Sequence[Mapping[str, Any]] = (),
    device: str = "auto",
    seed: int = 0,
) -> Answer:
    """Train in fp32, from other starts too, in each variant and by each whole step; say where each departs from fp32.

    tell: called with the run's name and the share of the study that is done. size: a name of SIZES, or a size of one's
    own; None takes the device's. variants: names of VARIANTS, all if None; fp32 always runs. against: of each whole
    step the fields of a Workload in which it differs from the plain one in fp32. Interrupted after the first run, the
    study is of the runs that ended, and says so. Raises InputError for what cannot be run here.
    """
    on = resolve_device(device)
    chosen = _size(size, on, steps, learning_rate)
    check_training(chosen.steps, chosen.learning_rate, seed)

    def check(_name: str, variant: Variant) -> None:
        check_supported(Workload(model=chosen.model, dtype=variant.dtype), on)

    planned, left_out = planned_runs(variants, check, seed)
    planned += whole_steps(against, chosen, on, seed)
    text = bundled_text()

    def trained(each: PlannedRun, told: Callable[[int], None]) -> Trained:
        if each.step is not None:
            return train_whole_step(each.step, chosen, text, device=on, seed=seed, tell_step=told)
        return train(each.variant, chosen, text, device=on, seed=seed, start_seed=each.start_seed, tell_step=told)

    with _threads(chosen, on):
        runs, interrupted = run_in_turn(planned, trained, chosen.steps, tell)
    outcomes = judged_runs(runs, planned, chosen.steps, VALIDATION, text.unigram_loss)
    parameters = sum(parameter.numel() for parameter in runs[REFERENCE].parameters)
    return computed_answer(
        on,
        study="quality",
        question="What does each precision do to training, and where does a run depart from fp32?",
        settings={
            "model": chosen.model.name, **chosen.model.sizes, "parameters": parameters,
            "batch_size": chosen.batch_size, "seq_len": chosen.seq_len, "steps": chosen.steps,
            "learning_rate": chosen.learning_rate, "seed": seed,
            "text": "; ".join(WORKS.values()), "text_licence": LICENCE,
            "bytes_trained_on": len(text.train), "bytes_held_out": len(text.held_out),
        },
        tables=tables_of(outcomes),
        panels=panels_of(outcomes),
        findings=quality_findings(
            outcomes, _learned(outcomes), left_out=left_out, interrupted=interrupted, planned=len(planned)
        ),
    )  # fmt: skip


def _size(
    size: str | TrainingSize | None, device: torch.device, steps: int | None, learning_rate: float | None
) -> TrainingSize:
    if not isinstance(size, TrainingSize):
        size = SIZES[choose(size or ("gpu" if device.type == "cuda" else "cpu"), tuple(SIZES), "model size")]
    return dataclasses.replace(
        size,
        steps=size.steps if steps is None else steps,
        learning_rate=size.learning_rate if learning_rate is None else learning_rate,
    )


def _threads(size: TrainingSize, device: torch.device) -> contextlib.AbstractContextManager[None]:
    model = size.model
    parameters = model.layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
    tokens = size.batch_size * size.seq_len
    return threads_for(parameters, tokens) if device.type == "cpu" else contextlib.nullcontext()


def _learned(outcomes: RunsJudged) -> Finding:
    reference, unigram, learned = outcomes.reference, outcomes.bar, outcomes.learned
    judged = "so it has learned more than how often each byte occurs"
    if not learned:
        judged = "so it has not even learned how often each byte occurs, and its curves say little"
    if not math.isfinite(reference.final_loss):
        judged = "so it has learned nothing, and there is nothing to compare with"
    return Finding(
        kind="reference-learned",
        severity="note" if learned else "warning",
        sentence=f"fp32 ends at {reference.final_loss:.4g} nats a byte on held-out text, where equal chances for "
        f"all bytes give {_BYTES_ALIKE:.4g} and their frequencies {unigram:.4g}: {judged}.",
        remedy="" if learned else "train longer (--steps), or at another learning rate (--learning-rate)",
        evidence={"validation_loss": reference.final_loss, "unigram_loss": unigram},
    )
