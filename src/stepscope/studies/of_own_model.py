"""A study of the user's own module, which runs with the user's rights in a process of its own."""

import importlib
import json
from collections.abc import Mapping
from typing import Any

from stepscope.core.answer import Answer, decode_answer, encode_answer
from stepscope.core.own_arguments import is_configuration
from stepscope.engine.own_code import answer_apart, ask_apart

_FUNCTIONS = {
    "autocast": "stepscope.numerics.autocast.study:study_autocast",
    "underflow": "stepscope.numerics.gradients.underflow:study_underflow",
    "scaling": "stepscope.numerics.gradients.scaling:study_scaling",
    "swallowed": "stepscope.numerics.gradients.swallowed:study_swallowed",
    "normalisation": "stepscope.numerics.normalisation.of_own:study_own_normalisation",
}
"""The place of each study's function."""


def answer_of_own(study: str, named: str, arguments: Mapping[str, Any], **options: Any) -> Answer:
    """What a study answers, with these options, of the module that a factory or a configuration makes of these
    arguments."""
    what = f"--model {named}" if is_configuration(named) else f"--module {named}"
    said = json.dumps({"own": named, "arguments": arguments, **options})
    return decode_answer(ask_apart(__name__, named, _FUNCTIONS[study], said, what=what), what)


def main(_named: str, function: str, said: str) -> str:
    """The answer as JSON, for `answer_of_own`."""
    place, _, name = function.partition(":")
    # PyTorch comes with it: only the child needs that.
    return encode_answer(getattr(importlib.import_module(place), name)(**json.loads(said)))


if __name__ == "__main__":
    answer_apart(main)
