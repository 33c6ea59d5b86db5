"""One step, with each module alone in 16 bits: the options of the question."""

from typing import Annotated

from stepscope.core.answer import Answer
from stepscope.core.options import WORKLOAD, Option
from stepscope.engine.request import Tell
from stepscope.questions.one_model import OneModel
from stepscope.questions.question import Question

To = Annotated[str, Option("The precision that one module at a time gets.", WORKLOAD, choices=("bf16", "fp16"))]


def shadow(tell: Tell, *, asked: OneModel, to: To = "bf16", device: str) -> Answer:
    """Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the error that
    this makes in the gradients, beside run-to-run noise."""
    return asked.answer("shadow", tell, to=to, device=device)


QUESTION = Question(
    "shadow",
    shadow,
    examples=(
        "stepscope study shadow --module train.py:make --arg width=64",
        "stepscope study shadow --model tiny --to fp16 --save shadow.svg",
    ),
    defaults={
        "model": "tiny",
        "batch_size": "4",
        "seq_len": "64",
    },
)
