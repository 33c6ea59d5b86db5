"""The options of `study parity`: one batch, run in other ways, against the plain step."""

from stepscope.core.answer import Answer
from stepscope.engine.request import Tell
from stepscope.questions.one_model import OneModel
from stepscope.questions.question import Question


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


QUESTION = Question(
    "parity",
    parity,
    examples=(
        "stepscope study parity --module train.py:make --accumulation 2,4",
        "stepscope study parity --model tiny --attention sdpa,flash-tiled --checkpointing every-1,selective",
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
