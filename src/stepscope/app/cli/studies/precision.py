"""The studies of precision: softmax, norms, gradients, autocast, parity, shadow and quality."""

from functools import partial
from typing import Annotated, Any

from stepscope.app.cli.compare import options_in
from stepscope.app.cli.questions import study_verb
from stepscope.app.cli.studies.answering import OneModel, given_ones, of_own_model, refuse_preset, refuse_sizes
from stepscope.core import interrupts
from stepscope.core.answer import Answer
from stepscope.core.model_config import PRESETS, configure
from stepscope.core.options import (
    MEASURING,
    MODEL,
    NUMBERS,
    TRAINING,
    WORKLOAD,
    Numbers,
    Option,
    completed,
    finite_numbers,
    positive_integers,
    positive_number,
)
from stepscope.engine.request import Stage, Tell

Configuration = Annotated[
    str | None, Option("The config.json of a Hugging Face model, which gets random weights.", MODEL)
]
Steps = Annotated[int, Option("Training steps of each run.", TRAINING)]
TrainingSteps = Annotated[int | None, Option("Training steps of each run.", TRAINING)]


Widths = Annotated[
    Numbers | None,
    Option(
        "Numbers in a row, as in 256,4096.", NUMBERS, takes=partial(positive_integers, option="--widths", limit=65_536)
    ),
]
Epsilon = Annotated[
    float | None,
    Option(
        "The number that is added under the root; 1e-5 if left out.",
        NUMBERS,
        takes=partial(positive_number, option="--epsilon"),
    ),
]


@study_verb(
    "normalisation",
    "stepscope study normalisation --scales 0.1,10,300 --widths 256,4096",
    "stepscope study normalisation --from results/cpu/precision/normalisation.json --save normalisation.svg",
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def normalisation_study(
    *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, scales: Numbers | None, widths: Widths, epsilon: Epsilon, device: str = "cpu",
) -> Answer:  # fmt: skip
    """RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe way.

    With --module or --model CONFIG.json: on what the norms of that model read in a step.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("normalisation", module, model, arg, **sizes, device=device):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    from stepscope.questions.normalisation import study_normalisation

    given = {"scales": scales, "widths": widths, "epsilon": epsilon}
    return study_normalisation(device=device, **given_ones(given))


Row = Annotated[
    Numbers | None,
    Option(
        "What does each softmax make of these numbers? As in 10,11.5,89.",
        NUMBERS,
        takes=partial(finite_numbers, option="--row"),
    ),
]


@study_verb(
    "softmax",
    "stepscope study softmax --row 10,11.5,89",
    "stepscope study softmax --from results/cpu/precision/softmax.json --only 'exp in each format'",
)
def softmax_study(*, row: Row, scales: Numbers | None, device: str = "cpu") -> Answer:
    """Softmax, naive, safe and online, and attention's scores: where each overflows as its inputs grow."""
    from stepscope.questions.softmax import study_softmax

    return study_softmax(row=row, device=device, **given_ones({"scales": scales}))


# `stepscope study autocast`: what dtype everything has under autocast.


Model = Annotated[
    str | None,
    Option("A toy, a preset, or the config.json of a Hugging Face model.", MODEL, choices=("toy", *PRESETS)),
]
Dtype = Annotated[str, Option("", WORKLOAD, choices=("fp16", "bf16"))]
Rules = Annotated[
    str | None,
    Option(
        "Whose rules autocast goes by; without a GPU, cuda's as PyTorch registers them.",
        MEASURING,
        choices=("cpu", "cuda"),
    ),
]


@study_verb(
    "autocast",
    "stepscope study autocast --model tiny --dtype fp16 --rules cuda",
    "stepscope study autocast --module train.py:make --arg width=64 --only modules",
    plot=False,
    model="toy",
    rules="the device's",
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def autocast(
    *, model: Model = None, module: str | None, arg: tuple[str, ...] = (), batch_size: int | None,
    seq_len: int | None, dtype: Dtype = "bf16", device: str, rules: Rules,
) -> Answer:  # fmt: skip
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "rules": rules}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("autocast", module, model, arg, "--dtype", "--rules", **sizes, **options):
        return found
    refuse_sizes(**sizes)
    from stepscope.questions.autocast.study import study_autocast

    return study_autocast(model or "toy", **options)


# `stepscope study underflow`, `scaling` and `swallowed`: gradients and updates in 16 bits.


Format = Annotated[
    str,
    Option(
        "The format of the table by kind of module: fp16, bf16, fp8-e5m2 or fp8-e4m3.",
        NUMBERS,
        complete=completed("fp16", "bf16", "fp8-e5m2", "fp8-e4m3"),
    ),
]


@study_verb(
    "underflow",
    "stepscope study underflow --model small --save underflow.svg",
    "stepscope study underflow --from results/h200/precision/underflow.json --only 'by format'",
    model="tiny",
    batch_size="1",
    seq_len="64",
)
def underflow(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, vocabulary: int | None, batch_size: int | None,
    seq_len: int | None, seed: int, format: Format = "fp16", device: str,
) -> Answer:  # fmt: skip
    """The exponents of a training step's gradients against each format, without and with a loss scale."""
    options: dict[str, Any] = {"seed": seed, "format_name": format, "device": device}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("underflow", module, model, arg, "--seed", "--format", **sizes, **options):
        return found
    from stepscope.questions.gradients.underflow import study_underflow

    named = configure(model or "tiny", vocabulary=vocabulary)
    return study_underflow(model=named, **given_ones(sizes), **options)


GrowthInterval = Annotated[int, Option("Steps without an overflow until the scale grows.", TRAINING)]
OverflowAt = Annotated[tuple[int, ...] | None, Option("Steps that are made to overflow, as in 7,8,60.", TRAINING)]


@study_verb(
    "scaling",
    "stepscope study scaling --steps 100 --overflow-at 7,8,60",
    "stepscope study scaling --from results/h200/precision/scaling.json --only findings",
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def scaling(
    *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, steps: Steps = 200, growth_interval: GrowthInterval = 20, overflow_at: OverflowAt, seed: int,
    device: str,
) -> Answer:  # fmt: skip
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    options: dict[str, Any] = {
        "steps": steps, "growth_interval": growth_interval, "planted": overflow_at, "device": device, "seed": seed,
    }  # fmt: skip
    takes = ("--steps", "--growth-interval", "--overflow-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("scaling", module, model, arg, *takes, **sizes, **options):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    from stepscope.questions.gradients.scaling import study_scaling

    return study_scaling(**options)


LearningRates = Annotated[tuple[float, ...], Option("Learning rates at which swallowed updates are counted.", TRAINING)]
RemediesAt = Annotated[float, Option("The learning rate at which the remedies are compared.", TRAINING)]


@study_verb(
    "swallowed",
    "stepscope study swallowed --learning-rate 1e-4,1e-3",
    "stepscope study swallowed --from results/cpu/precision/swallowed.json --save swallowed.svg",
    model="tiny",
    batch_size="4",
    seq_len="32",
)
def swallowed(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, d_model: int = 64, d_ff: int = 256,
    layers: int = 2, vocabulary: int = 256, batch_size: int | None, seq_len: int | None, seed: int, steps: Steps = 40,
    learning_rate: LearningRates = (1e-5, 1e-4, 1e-3, 1e-2), remedies_at: RemediesAt = 1e-4, device: str,
) -> Answer:  # fmt: skip
    """Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside fp32."""
    options: dict[str, Any] = {
        "steps": steps, "learning_rates": learning_rate, "remedies_at": remedies_at, "device": device, "seed": seed,
    }  # fmt: skip
    takes = ("--steps", "--learning-rate", "--remedies-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("swallowed", module, model, arg, *takes, **sizes, **options):
        return found
    from stepscope.questions.gradients.swallowed import study_swallowed

    named = configure(model or "tiny", d_model=d_model, d_ff=d_ff, layers=layers, vocabulary=vocabulary)
    return study_swallowed(model=named, **given_ones(sizes), **options)


# `stepscope study parity`: the same batch, run in other ways, against the plain step.


@study_verb(
    "parity",
    "stepscope study parity --module train.py:make --accumulation 2,4",
    "stepscope study parity --model tiny --attention sdpa,flash-tiled --checkpointing every-1,selective",
    accumulation="2 and 4 where the batch can be cut", checkpointing="every-1 where there are blocks",
    attention="sdpa; of a model of your own sdpa-math, where it calls PyTorch's", compile="default",
    model="tiny", batch_size="4", seq_len="64",
)  # fmt: skip
def parity(
    tell: Tell, *, asked: OneModel, dtype: str = "fp32", accumulation: tuple[int, ...] | None,
    compile: tuple[str, ...] | None, attention: tuple[str, ...] | None, checkpointing: tuple[str, ...] | None,
    device: str,
) -> Answer:  # fmt: skip
    """Whether one step gives the same loss and gradients in other micro-batches, compiled, checkpointed, or with
    another attention; and which module departs first where it does not. What is asked for is compared, or all that can
    be."""
    return asked.answer(
        "parity", tell, dtype=dtype, accumulation=accumulation, compile=compile, attention=attention,
        checkpointing=checkpointing, device=device,
    )  # fmt: skip


# `stepscope study quality`: the same training in every precision.


ModelSize = Annotated[
    str | None,
    Option("What is trained: cpu or gpu; the device's if left out.", MODEL, complete=completed("cpu", "gpu")),
]
LearningRate = Annotated[float | None, Option("The highest learning rate, reached after the warm-up.", TRAINING)]
Variants = Annotated[
    tuple[str, ...] | None,
    Option("Run only these variants beside fp32, as in bf16,fp16-unscaled,bf16-pure.", TRAINING),
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


@study_verb(
    "quality",
    "stepscope study quality --module train.py:make --save curves.svg",
    'stepscope study quality --variants bf16 --against "--dtype bf16-master --kernels fused"',
    batch_size="4 of a config.json",
    seq_len="512 of a config.json",
)
def quality(
    tell: Tell, *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, model_size: ModelSize, seed: int, steps: TrainingSteps, learning_rate: LearningRate,
    variants: Variants, against: Against = (), device: str,
) -> Answer:  # fmt: skip
    """A small transformer trained on real text in every precision: quality, and the step at which a run departs.

    With --module or --model CONFIG.json: that model, trained on its own batches, by its own optimizer or by AdamW. With
    --against: by whole steps of these options, too, with their kernels, compiler, optimizer and graphs.
    """
    asked = {"steps": steps, "learning_rate": learning_rate, "variants": variants, "seed": seed}
    read = [f"--{name.replace('_', '-')}" for name in asked]
    options: dict[str, Any] = {**asked, "device": device}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if found := of_own_model("quality", module, model, arg, *read, **sizes, **options):
        return found
    refuse_preset(model)
    refuse_sizes(**sizes)
    changes = [options_in(text) for text in against]
    from stepscope.questions.quality.study import study_quality

    with interrupts.keeping():
        return study_quality(
            lambda name, share: tell(Stage(name=name, fraction=share)), size=model_size, against=changes, **options
        )


# `stepscope study shadow`: one step, with each module alone in 16 bits.


To = Annotated[str, Option("The precision that one module at a time gets.", WORKLOAD, choices=("bf16", "fp16"))]


@study_verb(
    "shadow",
    "stepscope study shadow --module train.py:make --arg width=64",
    "stepscope study shadow --model tiny --to fp16 --save shadow.svg",
    model="tiny",
    batch_size="4",
    seq_len="64",
)
def shadow(tell: Tell, *, asked: OneModel, to: To = "bf16", device: str) -> Answer:
    """Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the error that
    this makes in the gradients, beside run-to-run noise."""
    return asked.answer("shadow", tell, to=to, device=device)
