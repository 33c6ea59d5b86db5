"""The events by which a cell's process reports to its sweep."""

import msgspec


class CellEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of a cell's report to its sweep."""

    stage: str | None = None
    detail: str = ""
    directory: str | None = None
    """Sent once, when the run's directory has been made."""
    finished: bool = False
    """Sent last: the run lies in its directory."""
    error: str | None = None
    """The request cannot be measured as given."""
    error_for_all: bool = False
    """The error does not depend on the cell: no other cell can be measured either."""
    log_matters: bool = False
    """Whether the cell wrote to stderr a measurement that found no other place."""
