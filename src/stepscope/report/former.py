"""Tables that are still made by hand."""

from rich import box
from rich.table import Table
from rich.text import Text

from stepscope.core.finding import Finding
from stepscope.core.shown_text import middle_cut, printable

_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_LONGEST_SENTENCE = 4000


def render_finding(finding: Finding) -> Text:
    """Severity, sentence, remedy."""
    text = Text()
    text.append(printable(f"{finding.severity} {finding.kind}: "), style=_SEVERITY_STYLE[finding.severity])
    text.append(middle_cut(printable(finding.sentence), _LONGEST_SENTENCE))
    if finding.remedy:
        text.append(middle_cut(printable(f" Remedy: {finding.remedy}."), _LONGEST_SENTENCE), style="dim")
    return text


def make_table(*heads: str, right_from: int = 99, fold_first: bool = False) -> Table:
    """The house's table: a rule below the head, figures to the right from column `right_from` on.

    On a narrow screen figures are folded, never cut to look like other figures; the first column, the label, stays
    whole unless `fold_first`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(
            head,
            justify="right" if i >= right_from else "left",
            no_wrap=i == 0 and not fold_first,
            overflow="fold",
            min_width=12 if i == 0 and fold_first else None,
        )
    return table
