"""Figures for the cells of a table, in the unit that the column's head names. A figure that is not known stays None."""

from collections import Counter
from collections.abc import Iterable
from functools import partial

from stepscope.core.answer import Cell, Doubted, Severity
from stepscope.core.run import Run
from stepscope.core.samples import Ratio, Samples
from stepscope.core.units import GIB, MIB

Figure = float | None


def digits(value: float | None, times: float = 1, over: float = 1) -> Figure:
    """A figure to four significant digits, in a unit of which it has so many times as many, or as few."""
    return None if value is None else float(f"{value * times / over:.4g}")


milliseconds = partial(digits, times=1e3)
mebibytes, gibibytes, tera = partial(digits, over=MIB), partial(digits, over=GIB), partial(digits, over=1e12)


def count(value: float | None) -> Figure:
    """A count: whole numbers exactly, a mean of counts to four significant digits."""
    return int(value) if value is not None and float(value).is_integer() else digits(value)


def percent(share: float | None) -> Figure:
    """A share of one in percent, to a tenth."""
    return None if share is None else round(share * 100, 1)


def median_ms(samples: Samples | None) -> Figure:
    return milliseconds(samples.median_s) if samples else None


def median_within_ms(samples: Samples | None) -> tuple[Figure, Figure, Figure]:
    """A median and the ends of its interval."""
    interval = samples.interval() if samples else None
    low, high = (interval.low, interval.high) if interval else (None, None)
    return (median_ms(samples), milliseconds(low), milliseconds(high))


def times_within(ratio: Ratio | None) -> tuple[Figure, Figure, Figure]:
    """A ratio and the ends of its interval."""
    interval = ratio.interval if ratio else None
    low, high = (interval.low, interval.high) if interval else (None, None)
    return (digits(ratio.value if ratio else None), digits(low), digits(high))


# The mark on a figure that its run's own findings doubt. Whatever shows a figure of a stored run, shows this mark.


MARKS: dict[Severity, str] = {"error": "!", "warning": "*"}


_OF_TIMES = ("gpu-shared", "host-busy")
"""Kinds of finding that doubt times alone: others on the machine change no byte that the step allocates."""


def doubt_mark(*runs: Run | None, of_memory: bool = False) -> str:
    """`!` where an error doubts one of the runs that a figure was made of, `*` for a warning, else nothing. of_memory:
    whether the figure is one of memory."""
    care = False
    for run in runs:
        if run is None:
            continue
        care = care or run.status == "interrupted"
        for finding in run.findings:
            if finding.severity in MARKS and not (of_memory and finding.kind in _OF_TIMES):
                if finding.severity == "error":
                    return MARKS["error"]
                care = True
    return MARKS["warning"] if care else ""


def marked(figure: str, *runs: Run | None, of_memory: bool = False) -> str:
    """The figure with the mark of the runs that it was made of; nothing stays nothing."""
    mark = doubt_mark(*runs, of_memory=of_memory)
    return f"{figure} {mark}" if figure and mark else figure


def figure(value: float | str | None, *runs: Run, of_memory: bool = False) -> Cell:
    """A figure as it stands in a cell, with the mark of the runs that it was made of; nothing stays nothing."""
    mark = doubt_mark(*runs, of_memory=of_memory)
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
