"""Gradients and updates in 16 bits: the options of the questions on what vanishes, overflows and rounds away."""

from typing import Annotated, Any

from stepscope.core.answer import Answer
from stepscope.core.model_config import configure
from stepscope.core.options import NUMBERS, TRAINING, Option, completed
from stepscope.questions.one_model import Configuration, given_ones, of_own_model, refuse_preset, refuse_sizes
from stepscope.questions.question import Question

Steps = Annotated[int, Option("Training steps of each run.", TRAINING)]


Format = Annotated[
    str,
    Option(
        "The format of the table by kind of module: fp16, bf16, fp8-e5m2 or fp8-e4m3.",
        NUMBERS,
        complete=completed("fp16", "bf16", "fp8-e5m2", "fp8-e4m3"),
    ),
]


def underflow(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, vocabulary: int | None, batch_size: int | None,
    seq_len: int | None, seed: int, format: Format = "fp16", device: str,
) -> Answer:  # fmt: skip
    """The exponents of a training step's gradients against each format, without and with a loss scale."""
    options: dict[str, Any] = {"seed": seed, "format_name": format, "device": device}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("underflow", module, model, arg, "--seed", "--format", **sizes, **options):
        return found
    from stepscope.questions.underflow import study_underflow

    named = configure(model or "tiny", vocabulary=vocabulary)
    return study_underflow(model=named, **given_ones(sizes), **options)


GrowthInterval = Annotated[int, Option("Steps without an overflow until the scale grows.", TRAINING)]
OverflowAt = Annotated[tuple[int, ...] | None, Option("Steps that are made to overflow, as in 7,8,60.", TRAINING)]


def scaling(
    *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, steps: Steps = 200, growth_interval: GrowthInterval = 20, overflow_at: OverflowAt, seed: int,
    device: str,
) -> Answer:  # fmt: skip
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    options: dict[str, Any] = {
        "steps": steps,
        "growth_interval": growth_interval,
        "planted": overflow_at,
        "device": device,
        "seed": seed,
    }
    takes = ("--steps", "--growth-interval", "--overflow-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("scaling", module, model, arg, *takes, **sizes, **options):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    from stepscope.questions.scaling import study_scaling

    return study_scaling(**options)


LearningRates = Annotated[tuple[float, ...], Option("Learning rates at which swallowed updates are counted.", TRAINING)]
RemediesAt = Annotated[float, Option("The learning rate at which the remedies are compared.", TRAINING)]


def swallowed(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, d_model: int = 64, d_ff: int = 256,
    layers: int = 2, vocabulary: int = 256, batch_size: int | None, seq_len: int | None, seed: int, steps: Steps = 40,
    learning_rate: LearningRates = (1e-5, 1e-4, 1e-3, 1e-2), remedies_at: RemediesAt = 1e-4, device: str,
) -> Answer:  # fmt: skip
    """Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside fp32."""
    options: dict[str, Any] = {
        "steps": steps,
        "learning_rates": learning_rate,
        "remedies_at": remedies_at,
        "device": device,
        "seed": seed,
    }
    takes = ("--steps", "--learning-rate", "--remedies-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("swallowed", module, model, arg, *takes, **sizes, **options):
        return found
    from stepscope.questions.swallowed import study_swallowed

    named = configure(model or "tiny", d_model=d_model, d_ff=d_ff, layers=layers, vocabulary=vocabulary)
    return study_swallowed(model=named, **given_ones(sizes), **options)


UNDERFLOW = Question(
    "underflow",
    underflow,
    examples=(
        "stepscope study underflow --model small --save underflow.svg",
        "stepscope study underflow --from results/h200/precision/underflow.json --only 'by format'",
    ),
    defaults={
        "model": "tiny",
        "batch_size": "1",
        "seq_len": "64",
    },
)

SCALING = Question(
    "scaling",
    scaling,
    examples=(
        "stepscope study scaling --steps 100 --overflow-at 7,8,60",
        "stepscope study scaling --from results/h200/precision/scaling.json --only findings",
    ),
    defaults={
        "batch_size": "4 of a config.json",
        "seq_len": "512 of a config.json",
    },
)

SWALLOWED = Question(
    "swallowed",
    swallowed,
    examples=(
        "stepscope study swallowed --learning-rate 1e-4,1e-3",
        "stepscope study swallowed --from results/cpu/precision/swallowed.json --save swallowed.svg",
    ),
    defaults={
        "model": "tiny",
        "batch_size": "4",
        "seq_len": "32",
    },
)
