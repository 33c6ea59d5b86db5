"""A question as a record: from it come `stepscope study NAME`, its help, `--json`, `--from`, `--save` and the page.

How to write one. Its file in `questions/` ends with `QUESTION = Question("name", measure, examples=(...))`. `measure`
is a function that returns the Answer. Its docstring is the help, and its keyword parameters are the options: one that
other verbs have, too (`device`, `seed`, `seq_len`, `steps`), is named only, and one of the question's own states its
help: `value: Annotated[str | None, Option("...", NUMBERS)] = None` (`core/options.py`). A parameter `tell`
is no option: it is called with a Stage. Import PyTorch, and whatever imports PyTorch, inside of functions, since the
command line reads the file for `--help` and for `--from`. One line in `app/cli/study.py` registers it:
`"name": ("stepscope.questions.name:QUESTION", "The first paragraph of measure's docstring."),`. `formats.py` is an
example.

Where steps of several workloads are compared, `measure` returns Cells: a sweep measures them, and their runs are the
answer. Its options are StepOptions, and Compared makes the Cells (`comparison.py`). `speed.py` is an example.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.core.answer import Answer, decode_answer
from stepscope.core.errors import InputError
from stepscope.core.files import read_named

if TYPE_CHECKING:
    from stepscope.core.run import Run
    from stepscope.engine.sweep_plan import SweepPlan


@dataclass(frozen=True, kw_only=True)
class Result:
    """An answer, and what the command line makes of it besides."""

    answer: Answer
    document: Callable[[], str] | None = None
    """What --json writes in place of the answer."""
    hint: str = ""
    """A line for stderr, after the answer."""
    fault: str = ""
    """Why the command fails all the same, after the answer."""
    exit_code: int = 0


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Cells that a sweep measures, and the answer from their runs."""

    plan: "SweepPlan"
    answer: Callable[[list["Run"]], Result]
    around: tuple[AbstractContextManager[None], ...] = (nullcontext(),)
    """The cells are measured once in each of these contexts, anew where there are several."""
    lists_runs: bool = False
    """Whether --json writes a line for each run in place of the answer."""


@dataclass(frozen=True)
class Question:
    """What `stepscope study NAME` asks, and how it is answered."""

    name: str
    measure: Callable[..., Answer | Result | Cells]
    """The answer, from the options, which its signature states. Its docstring is the help."""
    examples: tuple[str, str]
    """What follows `stepscope study NAME` in two command lines, which the help shows."""
    shared: tuple[str, ...] = ("from_", "shown", "save")
    """The options that it has as others do: what the command line itself reads an answer by, shows it and draws it."""
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    """What an option is when it is left out, in words, where that is no constant of the signature."""
    titles: Callable[[], Sequence[str]] | None = None
    """The titles of its tables, where --only is to be refused before anything is measured."""


def read_answer(path: Path, study: str) -> Answer:
    """The answer that --json of this study wrote."""
    answer = decode_answer(read_named(path), str(path))
    if answer.study != study:
        raise InputError(f"{path} is of the study {answer.study}: read it with `stepscope study {answer.study}`")
    return answer
