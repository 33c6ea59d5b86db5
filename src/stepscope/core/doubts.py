"""The mark on a figure that its run's own findings doubt. Whatever shows a figure of a stored run, shows this mark."""

from collections import Counter
from collections.abc import Iterable

from stepscope.core.answer import Cell, Doubted
from stepscope.core.finding import Severity, worst
from stepscope.core.run import Run

MARKS: dict[Severity, str] = {"error": "!", "warning": "*"}


def doubt_mark(*runs: Run | None) -> str:
    """`!` where an error doubts one of the runs that a figure was made of, `*` for a warning, else nothing."""
    given = [run for run in runs if run is not None]
    severity = worst(finding for run in given for finding in run.findings)
    if severity is not None and severity in MARKS:
        return MARKS[severity]
    return MARKS["warning"] if any(run.status == "interrupted" for run in given) else ""


def marked(figure: str, *runs: Run | None) -> str:
    """The figure with the mark of the runs that it was made of; nothing stays nothing."""
    mark = doubt_mark(*runs)
    return f"{figure} {mark}" if figure and mark else figure


def figure(value: float | str | None, *runs: Run) -> Cell:
    """A figure as it stands in a cell, with the mark of the runs that it was made of; nothing stays nothing."""
    mark = doubt_mark(*runs)
    return Doubted(value, mark) if mark and value is not None else value


def doubting_kinds(*runs: Run) -> tuple[str, ...]:
    """The kinds of finding that say to take care with these runs, each once, in their order."""
    return tuple(dict.fromkeys(f.kind for run in runs for f in run.findings if f.severity in MARKS))


def doubts_sentence(runs: Iterable[Run]) -> str | None:
    """What the marks on figures of these runs mean, and how often; None where there is none."""
    runs = list(runs)
    kinds = Counter(f"{MARKS[f.severity]} {f.kind}" for run in runs for f in run.findings if f.severity in MARKS)
    interrupted = sum(run.status == "interrupted" for run in runs)
    if interrupted:
        kinds[f"{MARKS['warning']} interrupted"] = interrupted
    if not kinds:
        return None
    return f"Doubted by their own findings: {', '.join(f'{kind} ({n})' for kind, n in sorted(kinds.items()))}."
