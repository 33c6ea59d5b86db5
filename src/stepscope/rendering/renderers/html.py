"""An answer as a piece of HTML: paragraphs and tables that need no style sheet, for a notebook or a page."""

import html

from stepscope.core.answer import Answer, Line, Table, Tone
from stepscope.core.errors import printable
from stepscope.rendering.cells import is_figures, row_texts, sentences_of, where_of

_STYLES: dict[Tone, str] = {
    "": "",
    "strong": "font-weight:bold",
    "good": "color:#2e8b57;font-weight:bold",
    "bad": "color:#c0392b;font-weight:bold",
    "care": "color:#b7791f",
    "aside": "opacity:0.7",
}
"""Colours that are read on white and on black."""
_LONGEST_SENTENCE = 4000
"""Characters: a finding from a foreign file may be of any length."""


def render(answer: Answer) -> str:
    """A `div` of paragraphs and tables. All text is escaped, and in ASCII, so that no page's encoding matters."""
    heading = (Line(answer.question, "strong"), Line(where_of(answer)))
    lead = answer.lead or [line for line in heading if line.text]
    parts = [_paragraph(line.text, line.tone) for line in lead]
    for table in answer.tables:
        parts += [_paragraph(table.title, "strong")] if table.title else []
        parts += [_table(table)] if table.columns else []
        parts += [_paragraph(line.text, line.tone) for line in table.notes]
    parts += [_paragraph(line.text, line.tone) for line in sentences_of(answer)]
    parts += [_paragraph(aside, "aside") for aside in answer.asides]
    parts += [_paragraph(line, "") for line in answer.origin]
    return "\n".join(['<div class="stepscope">', *parts, "</div>"]) + "\n"


def _paragraph(text: str, tone: Tone) -> str:
    return f"<p{_style('margin:0.3em 0', _STYLES[tone])}>{_text(printable(text, _LONGEST_SENTENCE))}</p>"


def _table(table: Table) -> str:
    aligned = ["text-align:right" if is_figures(table, i) else "text-align:left" for i in range(len(table.columns))]
    heads = "".join(
        f"<th{_style(side)}>{_text(printable(head))}</th>" for head, side in zip(table.columns, aligned, strict=True)
    )
    lines = ["<table>", f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    for i, row in enumerate(row_texts(table)):
        of_row = ("border-top:1px solid" if i in table.rules else "", _STYLES[table.tones.get(i, "")])
        cells = (f"<td{_style(side, *of_row)}>{_text(text)}</td>" for side, text in zip(aligned, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def _style(*declarations: str) -> str:
    joined = ";".join(declaration for declaration in declarations if declaration)
    return f' style="{joined}"' if joined else ""


def _text(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()
