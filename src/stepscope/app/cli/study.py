"""`stepscope study NAME`: questions with an answer of their own, which is made, or read from a file, and shown."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from stepscope.app.cli.output import Presentation, progress, stdout_kept_clean
from stepscope.app.cli.verb import Verbs, study_now
from stepscope.core.answer import Answer, decode_answer
from stepscope.core.environment import require_room_for_torch
from stepscope.core.errors import EXIT_DEVICE_FAILED, EXIT_INTERRUPTED, InputError
from stepscope.core.files import read_named
from stepscope.core.options import Alone, Verb, verb
from stepscope.questions.question import Question

if TYPE_CHECKING:
    from stepscope.engine.request import Tell


@dataclass(frozen=True, kw_only=True)
class Answering:
    """What becomes of the answer of one study."""

    study: str
    shown: Presentation
    save: Path | None = None

    def run(self, answer_of: "Callable[[Tell], Answer]") -> None:
        """Make the answer, under a display, and show it. One that ended early shows what it has, and ends the command
        with the code of an interrupt, or of a device that failed."""
        with stdout_kept_clean(), progress() as tell:
            answer = answer_of(tell)
        self.show(answer)
        if any(finding.kind == "interrupted" for finding in answer.findings):
            raise typer.Exit(EXIT_INTERRUPTED)
        if any(finding.kind == "ended-early" for finding in answer.findings):
            raise typer.Exit(EXIT_DEVICE_FAILED)

    def read(self, path: Path) -> None:
        """Show an answer that --json wrote."""
        answer = decode_answer(read_named(path), str(path))
        if answer.study != self.study:
            raise InputError(f"{path} is of the study {answer.study}: read it with `stepscope study {answer.study}`")
        self.show(answer)

    def show(self, answer: Answer) -> None:
        self.shown.show(answer, save=self.save)


def study_verb(
    study: str, *examples: str, plot: bool = True, **defaults: str
) -> Callable[[Callable[..., Answer]], Verb]:
    """A decorator that makes a verb of a function that answers: its options, and those that every study has.

    A parameter `tell` of the function is no option: it is told of progress. plot: whether the answer has curves.
    """
    shared = inspect.signature(_every_study).parameters.values()

    def make(measure: Callable[..., Answer]) -> Verb:
        parameters = inspect.signature(measure).parameters

        @functools.wraps(measure)
        def run(*, from_: Path | None, shown: Presentation, save: Path | None = None, **options: Any) -> None:
            answering = Answering(study=study, shown=shown, save=save)
            if from_ is not None:
                answering.read(from_)
            else:
                require_room_for_torch()
                answering.run(lambda tell: measure(**options, **({"tell": tell} if "tell" in parameters else {})))

        stated = [parameter for parameter in parameters.values() if parameter.name != "tell"]
        stated += [parameter for parameter in shared if plot or parameter.name != "save"]
        run.__signature__ = inspect.Signature(stated)  # type: ignore[attr-defined]
        return verb(f"study {study}", *examples, conflicts=(Alone("--from"),), **defaults)(run)

    return make


def _every_study(*, from_: Path | None, shown: Presentation, save: Path | None) -> None:
    """The options of every study, as the parameters of a verb."""


class _Studies(Verbs):
    """The studies, each a verb."""

    verbs: ClassVar = {
        "warmup": (
            "stepscope.app.cli.studies.steps:warmup",
            "Measure a step after 0, 1, 2 and 5 warm-up steps, each in a fresh process.",
        ),
        "allocator": (
            "stepscope.app.cli.studies.steps:allocator",
            "Measure a step without a setting of the GPU's caching allocator and with it, each in a process of its "
            "own.",
        ),
        "kernels": (
            "stepscope.app.cli.studies.steps:kernels",
            "Kernels by phase, their share, softmax and the rest, over models and sequence lengths.",
        ),
        "compile": (
            "stepscope.app.cli.studies.steps:compiled",
            "What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it "
            "fused.",
        ),
        "formats": (
            "stepscope.questions.formats:QUESTION",
            "Range, precision and largest integer of every floating format, from its bits.",
        ),
        "accumulation": (
            "stepscope.questions.accumulation:QUESTION",
            "Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why.",
        ),
        "normalisation": (
            "stepscope.app.cli.studies.precision:normalisation_study",
            "RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe "
            "way.",
        ),
        "softmax": (
            "stepscope.app.cli.studies.precision:softmax_study",
            "Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow.",
        ),
        "underflow": (
            "stepscope.questions.gradients_question:UNDERFLOW",
            "The exponents of a training step's gradients against each format, without and with a loss scale.",
        ),
        "scaling": (
            "stepscope.questions.gradients_question:SCALING",
            "A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler.",
        ),
        "swallowed": (
            "stepscope.questions.gradients_question:SWALLOWED",
            "Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside "
            "fp32.",
        ),
        "autocast": (
            "stepscope.questions.autocast_question:QUESTION",
            "The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator.",
        ),
        "parity": (
            "stepscope.questions.parity_question:QUESTION",
            "Whether one step gives the same loss and gradients in other micro-batches, compiled, checkpointed, or "
            "with another attention; and which module departs first where it does not. What is asked for is "
            "compared, or all that can be.",
        ),
        "shadow": (
            "stepscope.questions.shadow_question:QUESTION",
            "Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the "
            "error that this makes in the gradients, beside run-to-run noise.",
        ),
        "speed": (
            "stepscope.app.cli.studies.steps:speed",
            "How much faster lower precision is by the model's size, and which part of the step makes the gain.",
        ),
        "quality": (
            "stepscope.app.cli.studies.precision:quality",
            "A small transformer trained on real text in every precision: quality, and the step at which a run "
            "departs.",
        ),
        "attention": (
            "stepscope.app.cli.studies.attention:attention",
            "Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and "
            "head_dim.",
        ),
        "attention-step": (
            "stepscope.app.cli.studies.steps:attention_step",
            "A whole training step with each attention in it: time, memory, and where the difference comes from.",
        ),
        "attention-gate": (
            "stepscope.app.cli.studies.attention:attention_gate",
            "Whether each implementation of attention is right: every dtype and shape, judged by float64.",
        ),
        "collectives": (
            "stepscope.questions.collectives:QUESTION",
            "Time, bandwidth and latency of all-reduce, all-gather, reduce-scatter, all-to-all, broadcast and send, "
            "by size.",
        ),
        "parallel": (
            "stepscope.app.cli.studies.steps:parallel",
            "Strategies that share a step, beside one process and one another: step, communication, memory, scaling.",
        ),
    }

    def verb_at(self, place: str) -> Verb:
        """The verb of a Question, or a verb itself."""
        registered: Any = super().verb_at(place)
        if not isinstance(registered, Question):
            return registered
        make = study_verb(registered.name, *registered.examples, plot=registered.has_curves, **registered.defaults)
        return make(registered.measure)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, study_now(args))


app = typer.Typer(cls=_Studies, help="Studies: one question each.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _studies() -> None:
    pass
