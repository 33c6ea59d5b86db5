"""A write-up as a document: Markdown with its plots beside it, or one HTML file. Figures are those of the Answers."""

import html
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.core.answer import Answer, Line, Table
from stepscope.core.errors import InputError, one_line
from stepscope.core.run_directory import write_atomically
from stepscope.core.shown_text import printable
from stepscope.core.units import counted
from stepscope.report.cells import where_of
from stepscope.report.picture import draw_answer
from stepscope.report.plots.save import plot_spec, plot_svg
from stepscope.report.renderers import render
from stepscope.writeup.answered import Answered, WriteUp
from stepscope.writeup.question import Scale

SUFFIXES = (".md", ".html")
MOST_ROWS = 24
"""A longer table is cut, which a line says: a write-up is read."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The file of a write-up, and what lies beside it."""

    file: Path

    def __post_init__(self) -> None:
        if self.file.suffix.lower() not in SUFFIXES:
            raise InputError(f"cannot tell how to write {self.file}: end its name in {' or '.join(SUFFIXES)}")
        if self.file.is_dir() or not self.file.parent.is_dir():
            what = "it is a folder" if self.file.is_dir() else f"there is no folder {self.file.parent}, make it first"
            raise InputError(f"cannot write {self.file}: {what}")

    @property
    def plots(self) -> Path:
        """The folder of the plots."""
        return self.file.with_name(f"{self.file.stem}_files")

    @property
    def store(self) -> Path:
        """The folder of what `--run` measures."""
        return self.file.with_name(f"{self.file.stem}_data")

    def write(self, found: WriteUp, scale: Scale) -> None:
        """Write the document and its plots. Raises InputError where that cannot be."""
        try:
            if self.file.suffix.lower() == ".html":
                write_atomically(as_html(found, scale, self.store).encode(), self.file)
                return
            plots = {one.question.id: svg for one in found.answered if (svg := _plot(one.answer))}
            if self._is_ours():
                shutil.rmtree(self.plots)
            if plots:
                self.plots.mkdir(exist_ok=True)
            for name, svg in plots.items():
                write_atomically(svg.encode(), self.plots / f"{name}.svg")
            images = {name: f"{self.plots.name}/{name}.svg" for name in plots}
            write_atomically(as_markdown(found, scale, self.store, images).encode(), self.file)
        except OSError as error:
            raise InputError(f"cannot write {self.file}: {error.strerror or one_line(error)}") from error

    def _is_ours(self) -> bool:
        """Whether the folder of plots holds plots alone, so that old ones may go."""
        return self.plots.is_dir() and all(file.suffix == ".svg" for file in self.plots.iterdir())


def as_markdown(found: WriteUp, scale: Scale, store: Path, images: dict[str, str]) -> str:
    """The write-up in Markdown. images: the path of each question's plot, by the question's id."""

    def body(one: Answered) -> list[str]:
        if one.answer is None:
            return [*_lacking(one), *(f"```\n{command}\n```" for command in _commands(one, scale, store))]
        image = [f"![{one.question.asks}]({images[one.question.id]})"] if one.question.id in images else []
        where = [f"*{printable(where)}*"] if (where := where_of(one.answer)) else []
        return [*where, render(_shown(one.answer), "markdown").strip(), *image]

    return "\n\n".join(_parts(found, lambda level, text: f"{'#' * level} {text}", lambda text: text, body)) + "\n"


def as_html(found: WriteUp, scale: Scale, store: Path) -> str:
    """The write-up as one HTML file with its plots inside; nothing is loaded from elsewhere."""

    def body(one: Answered) -> list[str]:
        if one.answer is None:
            said = [_paragraph(line) for line in _lacking(one)]
            return said + [f"<pre>{html.escape(command)}</pre>" for command in _commands(one, scale, store)]
        plot = _plot(one.answer)
        figure = f'<figure role="img" aria-label="{html.escape(one.question.asks)}">{plot}</figure>' if plot else ""
        return [_paragraph(where_of(one.answer)), render(_shown(one.answer), "html"), figure]

    parts = _parts(found, lambda level, text: f"<h{level}>{html.escape(text)}</h{level}>", _paragraph, body)
    return _PAGE.format(title=html.escape(found.assignment.title), body="\n".join(parts))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222;
  background: white; }}
.stepscope {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
td, th {{ padding: 2px 10px; }}
figure {{ margin: 1rem 0; overflow-x: auto; }}
pre {{ background: #f2f2f2; padding: 0.6rem; white-space: pre-wrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _parts(
    found: WriteUp, heading: Callable[[int, str], str], paragraph: Callable[[str], str],
    body: Callable[[Answered], list[str]],
) -> list[str]:  # fmt: skip
    devices = ", ".join(map(printable, found.devices))
    answered = f"{found.count} of {counted(len(found.answered), 'question')} answered"
    parts = [
        heading(1, found.assignment.title),
        paragraph(f"{answered}{f', measured on {devices}' if devices else ''}."),
    ]
    if found.faults:
        parts.append(paragraph(f"{counted(len(found.faults), 'run')} could not be read: {printable(found.faults[0])}"))
    for part in found.assignment.parts:
        parts.append(heading(2, part.title))
        for question in part.questions:
            parts += [heading(3, question.asks), *body(found.of(question))]
    return parts


def _lacking(one: Answered) -> list[str]:
    if one.question.measure is None:
        return [f"Not answered: {one.why}."]
    return [f"Not measured{f': {printable(one.why)}' if one.why else ' yet'}. This command measures it:"]


def _commands(one: Answered, scale: Scale, store: Path) -> list[str]:
    return [one.question.measure.command(scale, store)] if one.question.measure is not None else []


def _shown(answer: Answer) -> Answer:
    """The answer without what stands above it in the document, its long tables cut."""
    return msgspec.structs.replace(answer.body(), tables=tuple(map(_cut, answer.tables)))


def _cut(table: Table) -> Table:
    if len(table.rows) <= MOST_ROWS:
        return table
    note = Line(f"The first {MOST_ROWS} of {len(table.rows)} rows.")
    return msgspec.structs.replace(table, rows=table.rows[:MOST_ROWS], notes=(note, *table.notes))


def _plot(answer: Answer | None) -> str:
    if answer is None or not any(panel.points for panel in answer.panels):
        return ""
    try:
        return plot_svg(plot_spec(draw_answer(answer)))
    except InputError:  # more lines than a plot tells apart: the tables say it
        return ""


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>" if text else ""
