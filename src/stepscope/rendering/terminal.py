"""An answer for the terminal: lines, tables and findings, in one look."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.core.answer import PROSE, Answer, Line
from stepscope.core.answer import Table as Figures
from stepscope.core.finding import Finding
from stepscope.core.shown_text import middle_cut, printable
from stepscope.rendering.cells import is_figures, row_texts, sentences_of, unit_of, where_of
from stepscope.rendering.layout import OneLine
from stepscope.rendering.renderers.bars import step_by_step

_STYLES = {"": "", "strong": "bold", "good": "bold green", "bad": "bold red", "care": "yellow", "aside": "dim"}
_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WIDEST_PROSE = 100
_LONGEST_SENTENCE = 4000
"""Characters: a finding from a foreign file may be of any length."""


def render_answer(answer: Answer, *, drawn: bool = False) -> RenderableType:
    """What was asked or measured, every table with its sentences, what follows, and which run or file this is.

    drawn: also the measured steps one by one, as sparklines, behind the table of their phases.
    """
    asked = (Line(answer.question, "strong"), Line(where_of(answer)))
    lead = answer.lead or [line for line in asked if line.text]
    parts: list[list[RenderableType]] = [[_line(line) for line in lead]]
    parts += [_part(table) for table in answer.tables]
    if drawn and (lines := step_by_step(answer)):
        parts.insert(min(2, len(parts)), [Text(line) for line in lines])
    parts.append([*_findings(answer), *(Text(printable(aside), style="dim") for aside in answer.asides)])
    parts.append([Text(printable(line)) for line in answer.origin])
    blocks = [part for part in parts if part]
    return Group(*(one for i, part in enumerate(blocks) for one in ([Text()] if i else []) + part))


def make_table(figures: Figures) -> Table:
    """The house's table: a rule below the head, figures to the right, folded and never cut on a narrow screen."""
    table = (OneLine if figures.one_line else Table)(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(figures.columns):
        table.add_column(
            printable(head),
            justify="right" if is_figures(figures, i) else "left",
            no_wrap=i == 0,
            overflow="fold",
            max_width=_WIDEST_PROSE if unit_of(figures, i) == PROSE else None,
        )
    for i, texts in enumerate(row_texts(figures)):
        if i in figures.rules:
            table.add_section()
        table.add_row(*texts, style=_STYLES[figures.tones.get(i, "")])
    return table


def _part(figures: Figures) -> list[RenderableType]:
    title: list[RenderableType] = [Text(printable(figures.title), style="bold")] if figures.title else []
    table: list[RenderableType] = [make_table(figures)] if figures.columns else []
    return [*title, *table, *map(_line, figures.notes)]


def _line(line: Line) -> Text:
    return Text(middle_cut(printable(line.text), _LONGEST_SENTENCE), style=_STYLES[line.tone])


def _findings(answer: Answer) -> list[Text]:
    if answer.checked and answer.findings:
        return [_finding(finding) for finding in answer.findings]
    return [_line(line) for line in sentences_of(answer)]


def _finding(finding: Finding) -> Text:
    """Severity, kind, sentence, remedy."""
    text = Text()
    text.append(printable(f"{finding.severity} {finding.kind}: "), style=_SEVERITY_STYLE[finding.severity])
    text.append(middle_cut(printable(finding.sentence), _LONGEST_SENTENCE))
    if finding.remedy:
        text.append(middle_cut(printable(f" Remedy: {finding.remedy}."), _LONGEST_SENTENCE), style="dim")
    return text
