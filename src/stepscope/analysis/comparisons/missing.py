"""Cells that have no result, or nothing to be set beside."""

from collections.abc import Iterable

from stepscope.analysis.comparisons.comparison import ComparedRun
from stepscope.core.experiment import Cell, Table


def missing_cells(
    title: str, field: str, unmeasured: Iterable[ComparedRun], more: Iterable[tuple[Cell, ...]] = ()
) -> Table:
    """A row for each cell without a result, and why; and `more` rows."""
    rows = [(cell.name, cell.value, cell.why_missing) for cell in unmeasured]
    return Table(title=title, columns=("cell", field, "why"), rows=(*rows, *more))
