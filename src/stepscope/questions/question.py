"""A question as a record: from it come `stepscope study NAME`, its help, `--json`, `--from`, `--save` and the page.

How to write one. Its file in `questions/` ends with `QUESTION = Question("name", measure, examples=(...))`. `measure`
is a function that returns the Answer. Its docstring is the help, and its keyword parameters are the options: one that
other verbs have, too (`device`, `seed`, `seq_len`, `steps`), is named only, and one of the question's own states its
help: `value: Annotated[str | None, Option("...", NUMBERS)] = None` (`core/options.py`). A parameter `tell`
is no option: it is called with a Stage. Import PyTorch, and whatever imports PyTorch, inside of functions, since the
command line reads the file for `--help` and for `--from`. One line in `app/cli/study.py` registers it:
`"name": ("stepscope.questions.name:QUESTION", "The first paragraph of measure's docstring."),`. `formats.py` is an
example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stepscope.core.answer import Answer


@dataclass(frozen=True)
class Question:
    """What `stepscope study NAME` asks, and how it is answered."""

    name: str
    measure: Callable[..., Answer]
    """The answer, from the options, which its signature states. Its docstring is the help."""
    examples: tuple[str, str]
    """Two command lines, which the help shows."""
    has_curves: bool = True
    """Whether the answer has panels, so that --save draws it."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """What an option is when it is left out, in words, where that is no constant of the signature."""
