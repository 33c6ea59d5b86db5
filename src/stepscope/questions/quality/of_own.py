"""What precision does to the training of a user's own module: the same study, on the batches that its factory gives.

The factory is called anew for each run. Its parameters are then those of the first call, and so are its batches: both
may come from random numbers that no seed decides. Only the runs of fp32 from other starts keep the parameters that the
factory makes with another seed. Nothing is held out of the batches, so a run is judged by the loss over them.
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.finding import Finding, note
from stepscope.questions.answers import computed_answer
from stepscope.questions.quality.answer import panels_of, tables_of
from stepscope.questions.quality.findings import FinalLoss, RunsJudged, quality_findings
from stepscope.questions.quality.runs import PlannedRun, Told, check_training, judged_runs, planned_runs, run_in_turn
from stepscope.questions.quality.training import (
    REFERENCE,
    VARIANTS,
    Trained,
    Trainee,
    Variant,
    adamw,
    own_randomness,
    rate_at,
    train_steps,
)
from stepscope.questions.setting import threads_for
from stepscope.questions.steps import elements_of, in_fp32, own_workload, settings_of, step_of, trained_parameters
from stepscope.recording.device import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.training.own.batches import moved
from stepscope.training.own.own_step import OwnStep
from stepscope.training.own.user_code import said_of
from stepscope.training.scaled_products import plain_products
from stepscope.training.training_step import check_choices

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
            **settings_of(subject.workload), "parameters": subject.elements[0], "batches": len(subject.batches),
            "steps": length, "seed": seed, "optimizer": subject.optimizer or "AdamW",
            "learning_rate": highest if subject.optimizer is None else "the factory's",
            "judged_by": "mean loss over the batches it was trained on, in fp32 and eval mode; nothing is held out",
        },
        tables=tables_of(outcomes),
        panels=panels_of(outcomes),
        findings=[
            *quality_findings(
                outcomes, _learned(outcomes, subject), left_out=left_out, interrupted=interrupted, planned=len(planned)
            ),
            _nothing_held_out(subject),
        ],
    )  # fmt: skip


class _Subject:
    """A user's own module, made anew for each run, with the batches and the start that all runs share."""

    def __init__(self, own: str, arguments: Mapping[str, Any] | None, device: torch.device, seed: int) -> None:
        self.workload = own_workload(own, arguments, phase="forward-backward", seed=seed)
        self.device = device
        step = self._made(VARIANTS[REFERENCE], seed)
        self.name = step.own.name
        self.optimizer = None if step.own.optimizer is None else type(step.own.optimizer).__name__
        self.batches: Sequence[Any] = [_copied(batch) for batch in step.batches]
        self.elements = elements_of(step)
        with said_of(f"{self.name} has parameters that cannot be copied"):
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

    def step(self, variant: Variant, start_seed: int) -> OwnStep:
        """The step of a run, in the variant's dtype, with the shared batches; and with the shared start, unless it has
        the start of another seed."""
        step = self._made(variant, start_seed)
        if start_seed == self.workload.seed:
            with said_of(f"{self.name} makes another module each time that it is called"), torch.no_grad():
                for tensor, start in zip(_state(step.model), self._start, strict=True):
                    tensor.copy_(start)
        dtype = torch.float32 if variant.keeping is None else torch.bfloat16
        step.batches = [moved(_copied(batch), self.device, dtype, self.name) for batch in self.batches]
        return step

    def starts_here(self, model: nn.Module) -> bool:
        """Whether a module has the parameters of the shared start."""
        found = list(model.parameters())
        return all(torch.equal(one, other) for one, other in zip(found, self._start[: len(found)], strict=True))

    def judged(self, step: OwnStep) -> float:
        """The mean loss over the shared batches of a module that is trained no more, in fp32 and eval mode."""
        step.model.float().eval()
        plain_products(step.model)
        losses: list[Tensor] = []
        with torch.no_grad(), matmul_precision("fp32"), said_of(f"{self.name} fails in eval mode, which judges it"):
            for batch in self.batches:
                try:
                    losses.append(step.forward_module(*_copied(batch)).double().reshape(()))
                except InputError as error:
                    raise InputError(f"in eval mode, which judges it, {error}") from error
        return float(torch.stack(losses).mean())

    def _made(self, variant: Variant, seed: int) -> OwnStep:
        step = step_of(msgspec.structs.replace(self.workload, dtype=variant.dtype, seed=seed), self.device)
        assert isinstance(step, OwnStep)
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

    def _trained(self, step: OwnStep, variant: Variant, told: Callable[[int], None]) -> Trained:
        subject = self._subject
        # So that dropout, and rounding at random, are the same whatever ran before.
        torch.manual_seed(subject.workload.seed)
        with matmul_precision(variant.dtype), said_of(f"{subject.name} fails in training"):
            trained = train_steps(self._trainee(step, variant), self._steps, variant.scaled, told)
        trained.final_loss = subject.judged(step)
        return trained

    def _trainee(self, step: OwnStep, variant: Variant) -> Trainee:
        def loss(_: int) -> Tensor:
            step.prepare()
            step.phases[0].run()
            assert step.loss is not None
            return step.loss.float().reshape(())  # A loss scale would overflow in a loss of fp16.

        parameters = trained_parameters(step.model).values()
        embeddings = {
            id(parameter)
            for module in step.model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            for parameter in module.parameters()
        }  # fmt: skip
        own = step.own.optimizer
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


def _learned(outcomes: RunsJudged, subject: _Subject) -> Finding:
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
