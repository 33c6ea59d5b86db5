"""Tables that are still made by hand."""

from rich import box
from rich.table import Table


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
