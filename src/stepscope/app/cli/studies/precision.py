"""Studies of precision: softmax, norms and quality."""

from functools import partial
from typing import Annotated, Any

from stepscope.app.cli.questions import study_verb
from stepscope.app.verbs.run import options_in
from stepscope.core import interrupts
from stepscope.core.answer import Answer
from stepscope.core.options import (
    MODEL,
    NUMBERS,
    TRAINING,
    Numbers,
    Option,
    completed,
    finite_numbers,
    positive_integers,
    positive_number,
)
from stepscope.engine.request import Stage, Tell
from stepscope.questions.one_model import given_ones, of_own_model, refuse_preset, refuse_sizes

Configuration = Annotated[
    str | None, Option("The config.json of a Hugging Face model, which gets random weights.", MODEL)
]
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
    from stepscope.questions.quality import study_quality

    with interrupts.keeping():
        return study_quality(
            lambda name, share: tell(Stage(name=name, fraction=share)), size=model_size, against=changes, **options
        )
