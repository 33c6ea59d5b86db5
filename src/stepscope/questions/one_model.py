"""Questions that look at one model in PyTorch: their options, and their way to the textbook's model or a user's.

What measures is in the file of each question, which needs PyTorch: `_FUNCTIONS` names it. A user's model is looked at
with the user's rights, in a process apart.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from stepscope.core import interrupts
from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.model_config import PRESETS, configure
from stepscope.core.options import MEASURING, MODEL, NUMBERS, TRAINING, WORKLOAD, Option, completed, refuse_beside
from stepscope.core.workloads import is_configuration
from stepscope.engine.request import Stage, Tell
from stepscope.engine.user_code import answer_apart, ask_apart
from stepscope.engine.workload_options import OneWorkload, model_names
from stepscope.questions.question import Question

_FUNCTIONS = {
    "autocast": "stepscope.questions.autocast:study_autocast",
    "underflow": "stepscope.questions.underflow:study_underflow",
    "scaling": "stepscope.questions.scaling:study_scaling",
    "swallowed": "stepscope.questions.swallowed:study_swallowed",
    "normalisation": "stepscope.questions.normalisation:study_own_normalisation",
    "quality": "stepscope.questions.quality:study_own_quality",
    "parity": "stepscope.questions.parity:study_parity",
    "shadow": "stepscope.questions.shadow:study_shadow",
    "shadow in blocks": "stepscope.questions.shadow:study_block_shadow",
}
"""The place of each study's function."""

_KEEPING = ("quality",)
"""Studies that answer from what is done already when they are interrupted."""


def study_apart(study: str, named: str, arguments: Mapping[str, Any], **options: Any) -> Answer:
    """What a study answers, with these options, of the module that a factory or a configuration makes of these
    arguments."""
    what = f"--model {named}" if is_configuration(named) else f"--module {named}"
    written = json.dumps({"factory": named, "arguments": arguments, **options})
    return decode_answer(ask_apart(__name__, named, study, written, what=what, keeps=study in _KEEPING), what)


def study_function(study: str) -> Callable[..., Answer]:
    """The function of a study. PyTorch comes with it."""
    place, _, name = _FUNCTIONS[study].partition(":")
    return getattr(importlib.import_module(place), name)


def main(_named: str, study: str, options: str) -> str:
    """The answer as JSON, for `study_apart`. How far a study is that takes a while, is said on stderr."""
    part = ""

    def tell(name: str, _share: float) -> None:
        nonlocal part
        if name != part:
            part = name
            warn(name)

    answer = study_function(study)
    more = {"tell": tell} if "tell" in inspect.signature(answer).parameters else {}
    return encode_answer(answer(**json.loads(options), **more))


Configuration = Annotated[
    str | None, Option("The config.json of a Hugging Face model, which gets random weights.", MODEL)
]


@dataclass(frozen=True, kw_only=True)
class OneModel:
    """Options that name one model and its batch; None for what the study chooses."""

    model: str | None = None
    module: str | None = None
    arg: tuple[str, ...] = ()
    batch_size: int | None = None
    seq_len: int | None = None
    seed: int = 0

    def answer(self, study: str, tell: Tell, **options: Any) -> Answer:
        """What the study of this name answers. A user's own model runs in another process.

        Raises InputError for options that say nothing of such a model.
        """
        named = {name: getattr(self, name) for name in ("model", "module", "arg", "batch_size", "seq_len")}
        requested = OneWorkload({name: value for name, value in named.items() if value not in (None, ())})
        user_workload = requested.user_workload
        if user_workload is not None:
            return study_apart(study, user_workload.factory, user_workload.arguments, seed=self.seed, **options)
        workload = requested.workload(model="tiny", batch_size=4, seq_len=64)
        options |= {"model": workload.model, "batch_size": workload.batch_size, "seq_len": workload.seq_len}
        return study_function(study)(
            **options, seed=self.seed, tell=lambda name, share: tell(Stage(name=name, fraction=share))
        )


def of_own_model(
    study: str, module: str | None, model: str | None, arg: Sequence[str], *takes: str, batch_size: int | None = None,
    seq_len: int | None = None, **options: Any,
) -> Answer | None:  # fmt: skip
    """The study's answer about a model of the user's own; None where none was named.

    takes: what else it reads. batch_size and seq_len: of a config.json's batch; a factory has arguments of its own.
    """
    named = {"module": module, "model": model, "arg": arg, "batch_size": batch_size, "seq_len": seq_len}
    user_workload = OneWorkload({name: value for name, value in named.items() if value not in (None, ())}).user_workload
    if user_workload is None:
        return None
    refuse_beside("--module" if module else "--model", "--arg", "--batch-size", "--seq-len", *takes)
    return study_apart(study, user_workload.factory, user_workload.arguments, **options)


def given_ones(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given: the study itself has values for the others."""
    return {name: value for name, value in options.items() if value is not None}


def refuse_textbook(model: str | None = None, **sizes: int | None) -> None:
    """Raise InputError for a preset, and for sizes of a batch, where a study has them of a config.json only."""
    if model is not None:
        where = "" if model in PRESETS else f"; `hf download {model} config.json` prints the path of one"
        raise InputError(f"--model {model} is no config.json: this study takes one, or none at all{where}")
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given_ones(sizes))
    if flags:
        raise InputError(f"{flags} belongs to --model CONFIG.json here: leave it out, or name one")


_OF_A_FILE = {"batch_size": "4 of a config.json", "seq_len": "512 of a config.json"}
"""The batch where only a config.json has one, in the words of the help."""

# What vanishes, overflows and rounds away in 16 bits.


Steps = Annotated[int, Option("Training steps of each run.", TRAINING)]


Format = Annotated[
    str,
    Option(
        "The format of the table by kind of module: fp16, bf16, fp8-e5m2, fp8-e4m3 or one of blocks, as mxfp4.",
        NUMBERS,
        complete=completed("fp16", "bf16", "fp8-e5m2", "fp8-e4m3", *BLOCK_FORMATS),
    ),
]


def underflow(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, vocabulary: int | None, batch_size: int | None,
    seq_len: int | None, seed: int, format: Format = "fp16", device: str,
) -> Answer:  # fmt: skip
    """The exponents of a training step's gradients against each format, without and with a loss scale."""
    options: dict[str, Any] = {"seed": seed, "format_name": format, "device": device}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("underflow", module, model, arg, "--seed", "--format", **sizes, **options):
        return answer
    textbook = configure(model or "tiny", vocabulary=vocabulary)
    return study_function("underflow")(model=textbook, **given_ones(sizes), **options)


GrowthInterval = Annotated[int, Option("Steps without an overflow until the scale grows.", TRAINING)]
OverflowAt = Annotated[tuple[int, ...] | None, Option("Steps that are made to overflow, as in 7,8,60.", TRAINING)]


def scaling(
    *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, steps: Steps = 200, growth_interval: GrowthInterval = 20, overflow_at: OverflowAt, seed: int,
    device: str,
) -> Answer:  # fmt: skip
    """A dynamic loss scale over a run that overflows on purpose, step by step beside torch.amp.GradScaler."""
    options: dict[str, Any] = {"steps": steps, "planted": overflow_at, "device": device, "seed": seed}
    options["growth_interval"] = growth_interval
    takes = ("--steps", "--growth-interval", "--overflow-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("scaling", module, model, arg, *takes, **sizes, **options):
        return answer
    refuse_textbook(model, **sizes)
    return study_function("scaling")(**options)


LearningRates = Annotated[tuple[float, ...], Option("Learning rates at which swallowed updates are counted.", TRAINING)]
RemediesAt = Annotated[float, Option("The learning rate at which the remedies are compared.", TRAINING)]


def swallowed(
    *, module: str | None, arg: tuple[str, ...] = (), model: str | None, d_model: int = 64, d_ff: int = 256,
    layers: int = 2, vocabulary: int = 256, batch_size: int | None, seq_len: int | None, seed: int, steps: Steps = 40,
    learning_rate: LearningRates = (1e-5, 1e-4, 1e-3, 1e-2), remedies_at: RemediesAt = 1e-4, device: str,
) -> Answer:  # fmt: skip
    """Updates that bf16 parameters round to nothing; and master weights, stochastic rounding, Kahan beside fp32."""
    rates = {"learning_rates": learning_rate, "remedies_at": remedies_at}
    options: dict[str, Any] = {"steps": steps, **rates, "device": device, "seed": seed}
    takes = ("--steps", "--learning-rate", "--remedies-at", "--seed")
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("swallowed", module, model, arg, *takes, **sizes, **options):
        return answer
    textbook = configure(model or "tiny", d_model=d_model, d_ff=d_ff, layers=layers, vocabulary=vocabulary)
    return study_function("swallowed")(model=textbook, **given_ones(sizes), **options)


UNDERFLOW = Question(
    "underflow",
    underflow,
    examples=("--model small --save underflow.svg", "--from results/h200/precision/underflow.json --only 'by format'"),
    defaults={"model": "tiny", "batch_size": "1", "seq_len": "64"},
)

SCALING = Question(
    "scaling",
    scaling,
    examples=("--steps 100 --overflow-at 7,8,60", "--from results/h200/precision/scaling.json --only findings"),
    defaults=_OF_A_FILE,
)

SWALLOWED = Question(
    "swallowed",
    swallowed,
    examples=("--learning-rate 1e-4,1e-3", "--from results/cpu/precision/swallowed.json --save swallowed.svg"),
    defaults={"model": "tiny", "batch_size": "4", "seq_len": "32"},
)


# What dtype everything has under autocast.


ToyOrModel = Annotated[
    str | None,
    Option(
        "A toy, a preset, or the config.json of a Hugging Face model.",
        MODEL,
        takes=model_names,
        choices=("toy", *PRESETS),
    ),
]
AutocastDtype = Annotated[str, Option("", WORKLOAD, choices=("fp16", "bf16"))]
Rules = Annotated[
    str | None,
    Option(
        "Whose rules autocast goes by; without a GPU, cuda's as PyTorch registers them.",
        MEASURING,
        choices=("cpu", "cuda"),
    ),
]


def autocast(
    *, model: ToyOrModel = None, module: str | None, arg: tuple[str, ...] = (), batch_size: int | None,
    seq_len: int | None, dtype: AutocastDtype = "bf16", device: str, rules: Rules,
) -> Answer:  # fmt: skip
    """The dtype of every parameter, input, output, loss and gradient; what autocast does with each operator."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "rules": rules}
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("autocast", module, model, arg, "--dtype", "--rules", **sizes, **options):
        return answer
    refuse_textbook(**sizes)
    return study_function("autocast")(model or "toy", **options)


AUTOCAST = Question(
    "autocast",
    autocast,
    examples=("--model tiny --dtype fp16 --rules cuda", "--module train.py:make --arg width=64 --only modules"),
    shared=("from_", "shown"),
    defaults={"model": "toy", "rules": "the device's", **_OF_A_FILE},
)


# One batch, run in other ways, against the plain step.


def parity(
    tell: Tell, *, step: OneModel, dtype: str = "fp32", accumulation: tuple[int, ...] | None,
    compile: tuple[str, ...] | None, attention: tuple[str, ...] | None, checkpointing: tuple[str, ...] | None,
    device: str,
) -> Answer:  # fmt: skip
    """Whether one step gives the same loss and gradients in other micro-batches, compiled, checkpointed, or with
    another attention; and which module departs first where it does not. What is asked for is compared, or all that can
    be."""
    return step.answer(
        "parity", tell, dtype=dtype, accumulation=accumulation, compile=compile, attention=attention,
        checkpointing=checkpointing, device=device,
    )  # fmt: skip


PARITY = Question(
    "parity",
    parity,
    examples=(
        "--module train.py:make --accumulation 2,4",
        "--model tiny --attention sdpa,flash-tiled --checkpointing every-1,selective",
    ),
    defaults={
        "accumulation": "2 and 4 where the batch can be cut",
        "checkpointing": "every-1 where there are blocks",
        "attention": "sdpa; of a model of your own sdpa-math, where it calls PyTorch's",
        "compile": "default",
        "model": "tiny",
        "batch_size": "4",
        "seq_len": "64",
    },
)


# One step, with each module alone in 16 bits, or in blocks of fewer.


_TO = ("bf16", "fp16", *BLOCK_FORMATS)

To = Annotated[
    tuple[str, ...],
    Option(
        "The precision that one module at a time gets; or formats of blocks for products of linear layers.",
        WORKLOAD,
        choices=_TO,
    ),
]


def shadow(tell: Tell, *, step: OneModel, to: To = ("bf16",), device: str) -> Answer:
    """Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the error that
    this makes in the gradients, beside run-to-run noise. Of blocks: which format, recipe, product, layer."""
    for name in to:
        choose(name, _TO, "precision")
    if len(to) == 1 and to[0] not in BLOCK_FORMATS:
        return step.answer("shadow", tell, to=to[0], device=device)
    wide = [name for name in to if name not in BLOCK_FORMATS]
    if wide:
        raise InputError(f"--to {','.join(to)}: {wide[0]} is no format of blocks, so it stands alone: ask twice")
    return step.answer("shadow in blocks", tell, to=to, device=device)


SHADOW = Question(
    "shadow",
    shadow,
    examples=("--module train.py:make --arg width=64", "--model tiny --to mxfp8,nvfp4 --save shadow.svg"),
    defaults={"model": "tiny", "batch_size": "4", "seq_len": "64"},
)


if __name__ == "__main__":
    interrupts.install()
    with interrupts.keeping():  # until the answer is written
        answer_apart(main)
