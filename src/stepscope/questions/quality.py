"""What precision does to training, as a study: one small transformer, real text, one seed, every precision.

Each run has the same parameters at the start and the same batches (`quality_training.py`), so that what differs is the
precision. How much a difference means is told by runs of fp32 that start from the parameters of other seeds, over the
same batches: with other batches too, differences in smoothed losses would be mostly the batches' own
(`quality_answer.py`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from stepscope.core import interrupts
from stepscope.core.answer import Answer, Finding, note
from stepscope.core.errors import InputError, choose
from stepscope.core.options import MODEL, TRAINING, Option, completed
from stepscope.engine.request import Stage, Tell
from stepscope.questions.answers import computed_answer, threads_for
from stepscope.questions.one_model import Configuration, of_own_model, refuse_textbook
from stepscope.questions.quality_answer import FinalLoss, RunsJudged, panels_of, quality_findings, tables_of
from stepscope.questions.question import Question

if TYPE_CHECKING:
    import torch

    from stepscope.questions.quality_training import PlannedRun, Subject, Told, Trained, TrainingSize, Variant

VALIDATION = FinalLoss(
    column="validation loss", where="in validation", evidence="validation", unit="nats", axis="nats a byte",
    decimals=4, held_out=True,
)  # fmt: skip
_BYTES_ALIKE = math.log(256)


def study_quality(
    tell: "Told | None" = None,
    *,
    size: "str | TrainingSize | None" = None,
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
    from stepscope.core.workloads import TextbookWorkload
    from stepscope.questions import quality_training
    from stepscope.recording.environment import resolve_device
    from stepscope.training.training_step import check_supported

    on = resolve_device(device)
    chosen = _size(size, on, steps, learning_rate)
    quality_training.check_training(chosen.steps, chosen.learning_rate, seed)

    def check(_name: str, variant: "Variant") -> None:
        check_supported(TextbookWorkload(model=chosen.model, dtype=variant.dtype), on)

    planned, left_out = quality_training.planned_runs(variants, check, seed)
    planned += quality_training.whole_steps(against, chosen, on, seed)
    text = quality_training.bundled_text()

    def trained(each: "PlannedRun", tell_step: Callable[[int], None]) -> "Trained":
        if each.step is not None:
            return quality_training.train_whole_step(each.step, chosen, text, device=on, seed=seed, tell_step=tell_step)
        return quality_training.train(
            each.variant, chosen, text, device=on, seed=seed, start_seed=each.start_seed, tell_step=tell_step
        )

    with _threads(chosen, on):
        runs, interrupted = quality_training.run_in_turn(planned, trained, chosen.steps, tell)
    outcomes = quality_training.judged_runs(runs, planned, chosen.steps, VALIDATION, text.unigram_loss)
    parameters = sum(parameter.numel() for parameter in runs[quality_training.REFERENCE].parameters)
    return computed_answer(
        on,
        study="quality",
        question="What does each precision do to training, and where does a run depart from fp32?",
        settings={
            "model": chosen.model.name, **chosen.model.sizes, "parameters": parameters,
            "batch_size": chosen.batch_size, "seq_len": chosen.seq_len, "steps": chosen.steps,
            "learning_rate": chosen.learning_rate, "seed": seed,
            "text": "; ".join(quality_training.WORKS.values()), "text_licence": quality_training.LICENCE,
            "bytes_trained_on": len(text.train), "bytes_held_out": len(text.held_out),
        },
        tables=tables_of(outcomes),
        panels=panels_of(outcomes),
        findings=quality_findings(
            outcomes, _learned(outcomes), left_out=left_out, interrupted=interrupted, planned=len(planned)
        ),
    )  # fmt: skip


def _size(
    size: "str | TrainingSize | None", device: "torch.device", steps: int | None, learning_rate: float | None
) -> "TrainingSize":
    from stepscope.questions.quality_training import SIZES, TrainingSize

    if not isinstance(size, TrainingSize):
        size = SIZES[choose(size or ("gpu" if device.type == "cuda" else "cpu"), tuple(SIZES), "model size")]
    return dataclasses.replace(
        size,
        steps=size.steps if steps is None else steps,
        learning_rate=size.learning_rate if learning_rate is None else learning_rate,
    )


def _threads(size: "TrainingSize", device: "torch.device") -> contextlib.AbstractContextManager[None]:
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


# What precision does to the training of a user's own module: the same study, on the batches that its factory gives.
#
# The factory is called anew for each run. Its parameters are then those of the first call, and so are its batches: both
# may come from random numbers that no seed decides. Only the runs of fp32 from other starts keep the parameters that
# the factory makes with another seed. Nothing is held out of the batches, so a run is judged by the loss over them.


STEPS = 100
LEARNING_RATE = 1e-3
"""Both where nothing else is asked for. The rate is that of AdamW, which trains a module without an optimizer."""

OVER_THE_BATCHES = FinalLoss(
    column="loss over the batches afterwards", where="over the batches afterwards", evidence="batches", unit="",
    axis="", decimals=None, held_out=False,
)  # fmt: skip


def study_own_quality(
    tell: "Told | None" = None,
    *,
    factory: str,
    arguments: Mapping[str, Any] | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    variants: Sequence[str] | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Answer:
    """Train a user's module in fp32, from other starts too, and in each variant; say where each departs from fp32.

    factory: that, or the configuration, of the module; `arguments`: what it is called with. Its steps take its
    batches in turn. learning_rate: the highest of AdamW, for a module without an optimizer of its own. A variant that
    fails is left out, and the answer says why. The other arguments are those of `study_quality`. Raises InputError for
    what cannot be run here, and where the module fails in fp32.
    """
    from stepscope.questions import quality_training
    from stepscope.recording.environment import resolve_device

    on = resolve_device(device)
    length, highest = STEPS if steps is None else steps, LEARNING_RATE if learning_rate is None else learning_rate
    quality_training.check_training(length, highest, seed)
    with quality_training.own_randomness(on):
        subject = quality_training.Subject(factory, arguments, on, seed)
        if subject.optimizer is not None and learning_rate is not None:
            raise InputError(
                f"{subject.name} gives an optimizer of its own, {subject.optimizer}, with its own learning rate: leave "
                "out --learning-rate"
            )
        planned, left_out = quality_training.planned_runs(variants, subject.check, seed)
        training = quality_training.OwnTraining(subject, length, highest, left_out)
        with threads_for(*subject.elements):
            runs, interrupted = quality_training.run_in_turn(planned, training.run, length, tell)
    outcomes = quality_training.judged_runs(
        runs, planned, length, OVER_THE_BATCHES, subject.untrained_loss, same_starts=training.same_starts
    )
    count = len(subject.batches)
    batches = "the one batch that each run trains on" if count == 1 else f"the {count} batches that each run trains on"
    return computed_answer(
        on,
        study="quality",
        question="What does each precision do to the training of this model, and where does a run depart from fp32?",
        settings={
            **subject.workload.named, "parameters": subject.elements[0], "batches": count,
            "steps": length, "seed": seed, "optimizer": subject.optimizer or "AdamW",
            "learning_rate": highest if subject.optimizer is None else "the factory's",
            "judged_by": "mean loss over the batches it was trained on, in fp32 and eval mode; nothing is held out",
        },
        tables=tables_of(outcomes),
        panels=panels_of(outcomes),
        findings=[
            *quality_findings(
                outcomes, _own_learned(outcomes, subject), left_out=left_out, interrupted=interrupted,
                planned=len(planned)
            ),
            note(
                "nothing-held-out",
                f"The loss afterwards is the mean over {batches}, in fp32 and in eval mode. It says how well a run "
                "fits them; nothing is held out, so it says nothing of other data.",
                {"batches": count},
            ),
        ],
    )  # fmt: skip


def _own_learned(outcomes: RunsJudged, subject: "Subject") -> Finding:
    final_loss, before, learned = outcomes.reference.final_loss, outcomes.bar, outcomes.learned
    judged = "so it has learned" if learned else "so it has not learned, and its curves say little"
    if not math.isfinite(final_loss):
        judged = "so it has learned nothing, and there is nothing to compare with"
    other_rate = ", or at another learning rate (--learning-rate)" if subject.optimizer is None else ""
    return Finding(
        kind="reference-learned",
        severity="note" if learned else "warning",
        sentence=f"fp32 ends at a loss of {final_loss:.4g} over the batches, where it began at {before:.4g}: {judged}.",
        remedy="" if learned else f"train longer (--steps){other_rate}",
        evidence={"batches_loss": final_loss, "loss_before": before},
    )


TrainingSteps = Annotated[int | None, Option("Training steps of each run.", TRAINING)]
ModelSize = Annotated[
    str | None,
    Option("What is trained: cpu or gpu; the device's if left out.", MODEL, complete=completed("cpu", "gpu")),
]
LearningRate = Annotated[float | None, Option("The highest learning rate, reached after the warm-up.", TRAINING)]
Variants = Annotated[
    tuple[str, ...] | None,
    Option("Run only these variants beside fp32, as in bf16,bf16-pure; or formats of blocks, as mxfp4.", TRAINING),
]
Against = Annotated[
    tuple[str, ...],
    Option(
        'Also train by the whole step of these options of `run`, as in "--kernels fused --dtype bf16-master".',
        TRAINING,
        metavar="OPTIONS",
        repeated=True,
    ),
]


def quality(
    tell: Tell, options_in: Callable[[str], Mapping[str, Any]], *, module: str | None, arg: tuple[str, ...] = (),
    model: Configuration, batch_size: int | None, seq_len: int | None, model_size: ModelSize, seed: int,
    steps: TrainingSteps, learning_rate: LearningRate, variants: Variants, against: Against = (), device: str,
) -> Answer:  # fmt: skip
    """A small transformer trained on real text in every precision: quality, and the step at which a run departs.

    With --module or --model CONFIG.json: that model, trained on its own batches, by its own optimizer or by AdamW. With
    --against: by whole steps of these options, too, with their kernels, compiler, optimizer and graphs.
    """
    options: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "variants": variants, "seed": seed}
    read = [f"--{name.replace('_', '-')}" for name in options]
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("quality", module, model, arg, *read, **sizes, **options, device=device):
        return answer
    refuse_textbook(model, **sizes)
    changes = [options_in(text) for text in against]
    with interrupts.keeping():
        return study_quality(
            lambda name, share: tell(Stage(name=name, fraction=share)),
            size=model_size,
            against=changes,
            **options,
            device=device,
        )


QUESTION = Question(
    "quality",
    quality,
    examples=(
        "--module train.py:make --save curves.svg",
        '--variants bf16 --against "--dtype bf16-master --kernels fused"',
    ),
    defaults={"batch_size": "4 of a config.json", "seq_len": "512 of a config.json"},
)
