"""Runs a study of a user's module, with the user's rights, in a process apart."""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from stepscope.core import interrupts
from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.errors import warn
from stepscope.core.workloads import is_configuration
from stepscope.engine.user_code import answer_apart, ask_apart

_FUNCTIONS = {
    "autocast": "stepscope.questions.autocast:study_autocast",
    "underflow": "stepscope.questions.underflow:study_underflow",
    "scaling": "stepscope.questions.scaling:study_scaling",
    "swallowed": "stepscope.questions.swallowed:study_swallowed",
    "normalisation": "stepscope.questions.normalisation:study_own_normalisation",
    "quality": "stepscope.questions.quality:study_own_quality",
    "parity": "stepscope.questions.parity:study_parity",
    "shadow": "stepscope.questions.shadow:study_shadow",
}
"""The place of each study's function."""

_KEEPING = ("quality",)
"""Studies that answer from what is done already when they are interrupted."""


def study_apart(study: str, named: str, arguments: Mapping[str, Any], **options: Any) -> Answer:
    """What a study answers, with these options, of the module that a factory or a configuration makes of these
    arguments."""
    what = f"--model {named}" if is_configuration(named) else f"--module {named}"
    said = json.dumps({"own": named, "arguments": arguments, **options})
    return decode_answer(ask_apart(__name__, named, study, said, what=what, keeps=study in _KEEPING), what)


def study_function(study: str) -> Callable[..., Answer]:
    """The function of a study. PyTorch comes with it."""
    place, _, name = _FUNCTIONS[study].partition(":")
    return getattr(importlib.import_module(place), name)


def main(_named: str, study: str, said: str) -> str:
    """The answer as JSON, for `study_apart`."""
    answer = study_function(study)
    told = {"tell": _teller()} if "tell" in inspect.signature(answer).parameters else {}
    return encode_answer(answer(**json.loads(said), **told))


def _teller() -> Callable[[str, float], None]:
    """A function that says on stderr how far a study is that takes a while, each part of it once."""
    said: list[str] = []

    def tell(name: str, _share: float) -> None:
        if name not in said[-1:]:
            said.append(name)
            warn(name)

    return tell


if __name__ == "__main__":
    interrupts.install()
    with interrupts.keeping():  # until the answer is written
        answer_apart(main)
