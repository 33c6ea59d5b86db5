"""Results that show themselves: as HTML in a notebook, as text elsewhere.

The results of the functions in this package have `_repr_html_`. In a notebook, any other Run, Answer or Table is shown
the same way, because `show_in_notebooks` tells IPython how: the records themselves know no renderer.
"""

import sys
from typing import Any

import msgspec

from stepscope.core.answer import Answer, Table
from stepscope.core.run import Run


class _Shows:
    """What shows itself: printed as text, in a notebook as HTML."""

    __slots__ = ()

    def _shown(self) -> tuple[Answer, ...]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(*self._shown())

    def _repr_html_(self) -> str:
        return as_html(*self._shown())


class Shown(_Shows):
    """A result that shows its answer."""

    answer: "ShownAnswer"

    @property
    def answers(self) -> "tuple[ShownAnswer, ...]":
        """What is shown, one below the other."""
        return (self.answer,)

    def _shown(self) -> "tuple[ShownAnswer, ...]":
        return self.answers


class ShownTable(_Shows, Table, frozen=True, kw_only=True):
    """A Table that shows itself."""

    def _shown(self) -> tuple[Answer, ...]:
        return (answer_of(self),)


class ShownAnswer(_Shows, Answer, frozen=True, kw_only=True):
    """An Answer that shows itself, as its tables do: `answer.table("phase")`, `answer.part("memory")`."""

    tables: tuple[ShownTable, ...] = ()

    def table(self, title: str) -> ShownTable:
        """The first table whose title, or whose first column where it has none, contains this, as `--only` takes it.

        Raises InputError with the names of the tables where there is none.
        """
        return self.part(title).tables[0]

    def part(self, only: str) -> "ShownAnswer":
        """The tables whose title contains `only`, or the findings alone for `findings`."""
        return shown_answer(super().part(only))

    def _shown(self) -> tuple[Answer, ...]:
        return (self,)


def shown_answer(answer: Answer) -> ShownAnswer:
    """The answer as a ShownAnswer, with its tables as ShownTables."""
    fields = msgspec.structs.asdict(answer)
    fields["tables"] = tuple(ShownTable(**msgspec.structs.asdict(table)) for table in answer.tables)
    return ShownAnswer(**fields)


def as_text(*answers: Answer) -> str:
    """The answers one below the other, as the command prints them into a pipe."""
    from stepscope.rendering.cells import plain_text

    return "\n".join(map(plain_text, answers)).rstrip("\n")


def as_html(*answers: Answer) -> str:
    """The answers one below the other, as `--style html` writes them."""
    from stepscope.rendering.renderers import render

    return "\n".join(render(answer, "html") for answer in answers)


def answer_of(record: object) -> Answer:
    """The answer that shows a Run, an Answer or a Table."""
    if isinstance(record, Run):
        from stepscope.runs.answer import answer_run

        return answer_run(record)
    if isinstance(record, Table):
        return Answer(study="table", question="", tables=(record,))
    assert isinstance(record, Answer)
    return record


def show_in_notebooks() -> None:
    """Tell IPython, where it runs, how Runs, Answers and Tables are shown."""
    python: Any = sys.modules.get("IPython")
    shell = python.get_ipython() if python is not None else None
    if shell is None:
        return

    def html(result: object) -> str:
        return as_html(answer_of(result))

    def text(result: object, printer: Any, _: bool) -> None:
        printer.text(as_text(answer_of(result)))

    formatters = shell.display_formatter.formatters
    for record in (Run, Answer, Table):
        formatters["text/html"].for_type(record, html)
        formatters["text/plain"].for_type(record, text)


show_in_notebooks()
