"""What dtype everything has under autocast: the options of the question."""

from typing import Annotated, Any

from stepscope.core.answer import Answer
from stepscope.core.model_config import PRESETS
from stepscope.core.options import MEASURING, MODEL, WORKLOAD, Option
from stepscope.questions.one_model import of_own_model, refuse_sizes
from stepscope.questions.question import Question

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
    from stepscope.questions.autocast import study_autocast

    return study_autocast(model or "toy", **options)


QUESTION = Question(
    "autocast",
    autocast,
    examples=(
        "stepscope study autocast --model tiny --dtype fp16 --rules cuda",
        "stepscope study autocast --module train.py:make --arg width=64 --only modules",
    ),
    shared=("from_", "shown"),
    defaults={
        "model": "toy",
        "rules": "the device's",
        "batch_size": "4 of a config.json",
        "seq_len": "512 of a config.json",
    },
)
