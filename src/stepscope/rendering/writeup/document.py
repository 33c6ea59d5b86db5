"""A write-up as a document: Markdown with its plots beside it, or one HTML file. Figures are those of the Answers."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.core.answer import Answer, Line, Table, text
from stepscope.core.errors import InputError, one_line
from stepscope.core.finding import Finding
from stepscope.core.page import GENERATOR, Page, Section
from stepscope.core.run_directory import check_is_ours, write_atomically
from stepscope.core.shown_text import printable
from stepscope.core.units import counted
from stepscope.rendering.cells import where_of
from stepscope.rendering.page.render import render_page
from stepscope.rendering.picture import draw_answer
from stepscope.rendering.plots.save import plot_spec, plot_svg
from stepscope.rendering.renderers import render
from stepscope.rendering.writeup.answered import Answered, WriteUp
from stepscope.rendering.writeup.question import Scale

SUFFIXES = (".md", ".html")
MARK = "<!-- written by stepscope writeup -->"
"""The first line of a Markdown document of ours: a file without it is not overwritten."""
MOST_ALIKE = 6
"""Findings of one kind that are written out: a study of many cells has one for each."""
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
        check_is_ours(self.file, GENERATOR if self.file.suffix.lower() == ".html" else MARK)

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
                write_atomically(render_page(as_page(found, scale, self.store)).encode(), self.file)
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
        image = [f"![{one.question.asks}]({_link(images[one.question.id])})"] if one.question.id in images else []
        where = [f"*{printable(where)}*"] if (where := where_of(one.answer)) else []
        return [*where, render(_shown(one.answer), "markdown").strip(), *image]

    parts = _parts(found, lambda level, text: f"{'#' * level} {text}", lambda text: text, body)
    return "\n\n".join([MARK, *parts]) + "\n"


def _link(path: str) -> str:
    """A path as the target of a link in Markdown, where a space ends a bare one."""
    return f"<{path}>" if re.search(r"[\s()]", path) else path


def as_page(found: WriteUp, scale: Scale, store: Path) -> Page:
    """The write-up as a page: a section for each question."""

    def section(part: str, one: Answered) -> Section:
        if one.answer is None:
            lacking = Answer(study="writeup", question="", tables=(text(*_lacking(one)),))
            commands = tuple(_commands(one, scale, store))
            return Section(title=one.question.asks, answer=lacking, part=part, commands=commands)
        where = msgspec.structs.replace(
            _shown(one.answer, cut=False), device=one.answer.device, date=one.answer.date, versions=one.answer.versions,
            settings=one.answer.settings, panels=one.answer.panels,
        )  # fmt: skip
        return Section(title=one.question.asks, answer=where, part=part)

    devices = ", ".join(map(printable, found.devices))
    faults = f" {counted(len(found.faults), 'run')} could not be read: {found.faults[0]}" if found.faults else ""
    return Page(
        title=found.assignment.title,
        kind="write-up",
        sentence=f"{found.count} of {counted(len(found.answered), 'question')} answered"
        f"{f', measured on {devices}' if devices else ''}.{faults}{''.join(f' {doubt}' for doubt in found.doubts)}",
        sections=tuple(
            section(part.title, found.of(question)) for part in found.assignment.parts for question in part.questions
        ),
    )


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
    parts += map(paragraph, map(printable, found.doubts))
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


def _shown(answer: Answer, *, cut: bool = True) -> Answer:
    """The answer without what stands above it in the document, its long tables cut where they cannot be scrolled."""
    why = _why_undrawn(answer)
    asides = (*answer.asides, f"No plot: {why}.") if why else answer.asides
    findings, more = _without_repeats(answer.findings)
    tables = tuple(map(_cut, answer.tables)) if cut else answer.tables
    return msgspec.structs.replace(answer.body(), tables=tables, findings=findings, asides=(*more, *asides))


def _without_repeats(findings: tuple[Finding, ...]) -> tuple[tuple[Finding, ...], list[str]]:
    """The first findings of each kind, and a sentence on the others."""
    seen: Counter[str] = Counter()
    kept: list[Finding] = []
    for finding in findings:
        seen[finding.kind] += 1
        if seen[finding.kind] <= MOST_ALIKE:
            kept.append(finding)
    more = [
        f"{counted(count - MOST_ALIKE, 'further finding')} of the kind {kind!r} for other cells: the tables have them."
        for kind, count in seen.items()
        if count > MOST_ALIKE
    ]
    return tuple(kept), more


def _cut(table: Table) -> Table:
    if len(table.rows) <= MOST_ROWS:
        return table
    rows = f"The first {MOST_ROWS} of {len(table.rows)} rows."
    note = Line(f"{rows} Written as HTML (-o NAME.html), this document has them all.")
    return msgspec.structs.replace(table, rows=table.rows[:MOST_ROWS], notes=(note, *table.notes))


def _plot(answer: Answer | None) -> str:
    """The plot of an answer; empty where it has none."""
    if answer is None or not _has_points(answer) or _why_undrawn(answer):
        return ""
    return plot_svg(plot_spec(draw_answer(answer)))


def _has_points(answer: Answer) -> bool:
    return any(panel.points for panel in answer.panels)


def _why_undrawn(answer: Answer) -> str:
    """Why figures that a plot would show are in tables alone, as where they have too many lines; else empty."""
    try:
        if _has_points(answer):
            draw_answer(answer)
    except InputError as error:
        return str(error).partition(": ")[0]  # the remedy is one of the command line
    return ""
