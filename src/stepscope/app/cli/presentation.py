"""What becomes of an answer: which part of it is printed, and in which form."""

from collections.abc import Callable
from dataclasses import dataclass

from stepscope.app.cli.output import emit, present
from stepscope.core.answer import Answer, encode_answer
from stepscope.core.errors import InputError, choose
from stepscope.core.shown_text import warn
from stepscope.rendering.renderers import BARE, STYLES


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """What --only, --style, --brief and --json say."""

    only: str | None = None
    style: str = "terminal"
    json: bool = False
    brief: bool = False

    def __post_init__(self) -> None:
        choose(self.style, STYLES, "style")
        if self.brief and self.style != "terminal":
            raise InputError(f"--brief and --style {self.style} are two forms of one answer: ask for one")
        if self.json and self.only is not None:
            raise InputError("--json writes the whole answer: leave out --only")
        if self.style in BARE and (self.only or "").casefold() == "findings":
            raise InputError(f"--style {self.style} writes tables, findings are sentences: ask for markdown")
        if self.json and self.style != "terminal":
            raise InputError(f"--json and --style {self.style} are two forms of one answer: ask for one")

    def show(self, *answers: Answer, document: Callable[[], str] | None = None) -> None:
        """Print the answers one below the other; for --json the document instead, or that of the first answer."""
        if self.brief:
            from stepscope.rendering.brief import brief_document, brief_text

            parts = answers if self.only is None else tuple(one.part(self.only) for one in answers)
            emit(brief_document(parts[0]) if self.json else "\n".join(map(brief_text, parts)))
        elif self.json:
            emit(document() if document is not None else encode_answer(answers[0]))
        else:
            present(*answers, style=self.style, only=self.only)

    def name_the_page(self, what: object) -> None:
        """Say how the same is seen as a page, where the answer is read by somebody."""
        if not self.json and self.style == "terminal":
            warn(f"as a page: stepscope report {what}")
