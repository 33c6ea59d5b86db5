"""`stepscope study shadow`: one step, with each module alone in 16 bits."""

from stepscope.app.cli.studies.answering import study_verb
from stepscope.app.cli.studies.one_model import OneModel
from stepscope.core.answer import Answer
from stepscope.engine.request import Tell


@study_verb(
    "shadow",
    "stepscope study shadow --module train.py:make --arg width=64",
    "stepscope study shadow --model tiny --to fp16 --save shadow.svg",
    model="tiny",
    batch_size="4",
    seq_len="64",
)
def shadow(tell: Tell, *, asked: OneModel, to: str, device: str) -> Answer:
    """Which module's precision matters: the step again with one module at a time in 16 bits, ranked by the error that
    this makes in the gradients, beside run-to-run noise."""
    return asked.answer("shadow", tell, to=to, device=device)
