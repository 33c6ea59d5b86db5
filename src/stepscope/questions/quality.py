"""What precision does to training, as a study: one small transformer, real text, one seed, every precision.

Each run has the same parameters at the start and the same batches (`training.py`), so that what differs is the
precision. How much a difference means is told by runs of fp32 that start from the parameters of other seeds, over the
same batches: with other batches too, differences in smoothed losses would be mostly the batches' own
(`answer.py`).
"""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stepscope.core.answer import Answer, Finding, note
from stepscope.core.errors import InputError, choose
from stepscope.core.model_config import ModelConfig
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.answers import computed_answer, threads_for
from stepscope.questions.quality_answer import FinalLoss, RunsJudged, panels_of, quality_findings, tables_of
from stepscope.questions.quality_text import BYTE_VALUES, LICENCE, WORKS, bundled_text
from stepscope.questions.quality_training import (
    REFERENCE,
    VARIANTS,
    PlannedRun,
    Told,
    Trained,
    Trainee,
    TrainingSize,
    Variant,
    adamw,
    check_training,
    judged_runs,
    own_randomness,
    planned_runs,
    rate_at,
    run_in_turn,
    train,
    train_steps,
    train_whole_step,
    whole_steps,
)
from stepscope.questions.steps import elements_of, factory_workload, in_fp32, step_of, trained_parameters
from stepscope.recording.device import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.training.scaled_products import plain_products
from stepscope.training.training_step import check_choices, check_supported
from stepscope.training.user_module.module_step import ModuleStep
from stepscope.training.user_module.user_code import moved, user_errors

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
        check_supported(TextbookWorkload(model=chosen.model, dtype=variant.dtype), on)

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
    tell: Told | None = None,
    *,
    own: str,
    arguments: Mapping[str, Any] | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    variants: Sequence[str] | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Answer:
    """Train a user's module in fp32, from other starts too, and in each variant; say where each departs from fp32.

    own: the factory, or the configuration, of the module; `arguments`: what it is called with. Its steps take its
    batches in turn. learning_rate: the highest of AdamW, for a module without an optimizer of its own. A variant that
    fails is left out, and the answer says why. The other arguments are those of `study_quality`. Raises InputError for
    what cannot be run here, and where the module fails in fp32.
    """
    on = resolve_device(device)
    length, highest = STEPS if steps is None else steps, LEARNING_RATE if learning_rate is None else learning_rate
    check_training(length, highest, seed)
    with own_randomness(on):
        subject = _Subject(own, arguments, on, seed)
        if subject.optimizer is not None and learning_rate is not None:
            raise InputError(
                f"{subject.name} gives an optimizer of its own, {subject.optimizer}, with its own learning rate: leave "
                "out --learning-rate"
            )
        planned, left_out = planned_runs(variants, subject.check, seed)
        training = _Training(subject, length, highest, left_out)
        with threads_for(*subject.elements):
            runs, interrupted = run_in_turn(planned, training.run, length, tell)
    outcomes = judged_runs(
        runs, planned, length, OVER_THE_BATCHES, subject.untrained_loss, same_starts=training.same_starts
    )
    return computed_answer(
        on,
        study="quality",
        question="What does each precision do to the training of this model, and where does a run depart from fp32?",
        settings={
            **subject.workload.named, "parameters": subject.elements[0], "batches": len(subject.batches),
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
            _nothing_held_out(subject),
        ],
    )  # fmt: skip


class _Subject:
    """A user's own module, made anew for each run, with the batches and the start that all runs share."""

    def __init__(self, own: str, arguments: Mapping[str, Any] | None, device: torch.device, seed: int) -> None:
        self.workload = factory_workload(own, arguments, phase="forward-backward", seed=seed)
        self.device = device
        step = self._made(VARIANTS[REFERENCE], seed)
        self.name = step.user_module.name
        self.optimizer = None if step.user_module.optimizer is None else type(step.user_module.optimizer).__name__
        self.batches: Sequence[Any] = [_copied(batch) for batch in step.batches]
        self.elements = elements_of(step)
        with user_errors(f"{self.name} has parameters that cannot be copied"):
            self._start = [tensor.detach().clone() for tensor in _state(step.model)]
        self.untrained_loss = self.judged(step)

    def check(self, name: str, variant: Variant) -> None:
        """Raise InputError for a variant that cannot run here, or of this module."""
        check_choices(msgspec.structs.replace(self.workload, dtype=variant.dtype), self.device)
        if variant.keeping not in (None, "nearest") and self.optimizer is not None:
            raise InputError(
                f"the parameters of {name} are kept by an AdamW of stepscope's, and the factory gives an optimizer of "
                f"its own, {self.optimizer}: leave out {name}"
            )

    def step(self, variant: Variant, start_seed: int) -> ModuleStep:
        """The step of a run, in the variant's dtype, with the shared batches; and with the shared start, unless it has
        the start of another seed."""
        step = self._made(variant, start_seed)
        if start_seed == self.workload.seed:
            with user_errors(f"{self.name} makes another module each time that it is called"), torch.no_grad():
                for tensor, start in zip(_state(step.model), self._start, strict=True):
                    tensor.copy_(start)
        dtype = torch.float32 if variant.keeping is None else torch.bfloat16
        step.batches = [moved(_copied(batch), self.device, dtype, self.name) for batch in self.batches]
        return step

    def starts_here(self, model: nn.Module) -> bool:
        """Whether a module has the parameters of the shared start."""
        found = list(model.parameters())
        return all(torch.equal(one, other) for one, other in zip(found, self._start[: len(found)], strict=True))

    def judged(self, step: ModuleStep) -> float:
        """The mean loss over the shared batches of a module that is trained no more, in fp32 and eval mode."""
        step.model.float().eval()
        plain_products(step.model)
        losses: list[Tensor] = []
        with torch.no_grad(), matmul_precision("fp32"), user_errors(f"{self.name} fails in eval mode, which judges it"):
            for batch in self.batches:
                try:
                    losses.append(step.forward_module(*_copied(batch)).double().reshape(()))
                except InputError as error:
                    raise InputError(f"in eval mode, which judges it, {error}") from error
        return float(torch.stack(losses).mean())

    def _made(self, variant: Variant, seed: int) -> ModuleStep:
        step = step_of(msgspec.structs.replace(self.workload, dtype=variant.dtype, seed=seed), self.device)
        assert isinstance(step, ModuleStep)
        if variant.keeping is None:
            in_fp32(step)
        return step


class _Training:
    """Runs of a subject, and what was learned of them on the way."""

    def __init__(self, subject: _Subject, steps: int, learning_rate: float, left_out: dict[str, str]) -> None:
        self._subject, self._steps, self._learning_rate, self._left_out = subject, steps, learning_rate, left_out
        self.same_starts = False
        """Whether the factory makes the same parameters with another seed."""

    def run(self, planned: PlannedRun, told: Callable[[int], None]) -> Trained | None:
        """Train and judge; None for a run that fails or has no start of its own. Raises InputError where fp32 fails."""
        gc.collect()  # A step and its phases refer to each other, and the run before may still hold its memory.
        try:
            step = self._subject.step(planned.variant, planned.start_seed)
            if planned.of_starts and self._subject.starts_here(step.model):
                self.same_starts = True
                return None
            return self._trained(step, planned.variant, told)
        except InputError as error:
            if planned.name == REFERENCE:
                raise
            self._left_out[planned.name] = str(error)
            return None

    def _trained(self, step: ModuleStep, variant: Variant, told: Callable[[int], None]) -> Trained:
        subject = self._subject
        # So that dropout, and rounding at random, are the same whatever ran before.
        torch.manual_seed(subject.workload.seed)
        with matmul_precision(variant.dtype), user_errors(f"{subject.name} fails in training"):
            trained = train_steps(self._trainee(step, variant), self._steps, variant.scaled, told)
        trained.final_loss = subject.judged(step)
        return trained

    def _trainee(self, step: ModuleStep, variant: Variant) -> Trainee:
        def loss(_: int) -> Tensor:
            step.prepare()
            step.phases[0].run()
            assert step.loss is not None
            return step.loss.float().reshape(())  # A loss scale would overflow in a loss of fp16.

        parameters = trained_parameters(step.model).values()
        embeddings = {
            id(parameter)
            for module in step.model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in module.parameters()
        }
        own = step.user_module.optimizer
        return Trainee(
            loss=loss,
            optimizer=own or adamw(list(parameters), variant, step.device),
            rate=None if own else lambda number: rate_at(number, self._steps, self._learning_rate),
            counted=[parameter for parameter in parameters if id(parameter) not in embeddings],
        )


def _state(model: nn.Module) -> list[Tensor]:
    """The tensors of a module that a start is made of: its parameters, then its buffers."""
    return [*model.parameters(), *model.buffers()]


def _copied(batch: Any) -> Any:
    """A copy of a batch, so that a module that writes into its inputs changes no batch of another run."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)


def _own_learned(outcomes: RunsJudged, subject: _Subject) -> Finding:
    found, before, learned = outcomes.reference.final_loss, outcomes.bar, outcomes.learned
    judged = "so it has learned" if learned else "so it has not learned, and its curves say little"
    if not math.isfinite(found):
        judged = "so it has learned nothing, and there is nothing to compare with"
    other_rate = ", or at another learning rate (--learning-rate)" if subject.optimizer is None else ""
    return Finding(
        kind="reference-learned",
        severity="note" if learned else "warning",
        sentence=f"fp32 ends at a loss of {found:.4g} over the batches, where it began at {before:.4g}: {judged}.",
        remedy="" if learned else f"train longer (--steps){other_rate}",
        evidence={"batches_loss": found, "loss_before": before},
    )


def _nothing_held_out(subject: _Subject) -> Finding:
    count = len(subject.batches)
    batches = "the one batch that each run trains on" if count == 1 else f"the {count} batches that each run trains on"
    return note(
        "nothing-held-out",
        f"The loss afterwards is the mean over {batches}, in fp32 and in eval mode. It says how well a run fits them; "
        "nothing is held out, so it says nothing of other data.",
        {"batches": count},
    )
