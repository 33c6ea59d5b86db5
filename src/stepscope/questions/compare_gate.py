"""Whether a comparison passes, as a build asks: something grew too much, nothing did, or what was run cannot decide."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.units import counted, format_bytes, format_rate, format_share, parse_bytes
from stepscope.questions.compare import SideComparison, SidePair
from stepscope.runs.metrics import model_flops, peak_bytes
from stepscope.runs.run_sets import RunSet


@dataclass(frozen=True, kw_only=True)
class Growth:
    """By how much something may grow: by a share of what it was, or by a size."""

    share: float = 0.0
    size: int = 0

    def __str__(self) -> str:
        return format_bytes(self.size) if self.size else format_share(self.share)

    def limit(self, before: float) -> float:
        """The most that it may be, of what it was."""
        return before * (1 + self.share) + self.size


def parse_growth(text: str, option: str) -> Growth:
    """A share of one, written `3%` or `0.03`, or a size with its unit, as in `200MiB`."""
    if re.search("[A-Za-z]", text):
        try:
            return Growth(size=parse_bytes(text))
        except InputError as error:
            raise InputError(f"{option}: {error}") from None
    return Growth(share=parse_share(text, option, or_size=True))


def parse_share(text: str, option: str, *, or_size: bool = False) -> float:
    """A share of one, written `3%` or `0.03`. or_size: a size may be written, too, and an error says so."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 100 or (match and not match[2] and value >= 1):
        size = ", or a size, as in 200MiB" if or_size else ""
        raise InputError(f"cannot read {option} {text!r}: write a share, as in 3% or 0.03{size}")
    return value


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a build does not accept. None and False: whatever it is, it passes."""

    slower: float | None = None
    """The share of its time by which a step may become slower."""
    larger: Growth | None = None
    """By how much a step's peak of memory may grow."""
    flops: bool = False
    """Whether a step's FLOPs may not grow at all."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What was found of the limits, in words: on each pair that exceeds one, and on each that leaves one open."""

    exceeded: tuple[str, ...]
    open: tuple[str, ...]

    def fails(self, *, strict: bool) -> bool:
        """Whether the build fails. strict: what cannot be decided fails, too."""
        return bool(self.exceeded or (strict and self.open))


def judge(comparisons: Sequence[SideComparison], limits: Limits) -> Gate:
    """Hold every pair against the limits. A cell whose runs did not end on one side, or some of them, is not decided: a
    step that fails is neither fast nor small."""
    exceeded: list[str] = []
    undecided: list[str] = []
    for compared in comparisons:
        for pair in compared.pairs:
            lines = [
                *(_slower(compared, pair, limits.slower) if limits.slower is not None else ()),
                *(_larger(pair, limits.larger) if limits.larger is not None else ()),
                *(_more_flops(pair) if limits.flops else ()),
            ]
            exceeded += [line for line, fails in lines if fails]
            undecided += [line for line, fails in lines if not fails]
            if any(pair.lost) and not lines:
                undecided.append(f"{pair.label}: {counted(sum(pair.lost), 'process')} without a result")
        undecided += [f"{cell}: no result" for cell in compared.lost]
        # A cell that was not measured again may have grown; one that is new has nothing to be held against.
        undecided += [
            f"{cell}: not measured again" for cell in compared.alone if cell.endswith(f"({compared.before.name})")
        ]
    return Gate(exceeded=tuple(exceeded), open=tuple(undecided))


def _slower(compared: SideComparison, pair: SidePair, limit: float) -> Iterator[tuple[str, bool]]:
    """Fails where the whole interval of the change lies above the limit. The intervals of several pairs are widened so
    that all hold together."""
    change = pair.change(compared.value, compared.level)
    limit_words = f"{pair.label} by more than {format_share(limit)}"
    if change is None or change.interval is None:
        yield f"{limit_words}: too few processes", False
        return
    low, high = change.interval.low - 1, change.interval.high - 1
    if low > limit:
        made_by = compared.most_in(pair)
        most = f", most of it in {made_by[0]}" if made_by else ""
        by = f"{format_share(change.share)} slower (at least {format_share(low)}){most}"
        yield f"slower than {format_share(limit)} allows: {pair.label} is {by}", True
    elif high > limit:
        apart = ", not measured in turns" if change.may_be_drift else ""
        yield f"{limit_words}: {format_share(low)} to {format_share(high)} slower{apart}", False


def _larger(pair: SidePair, growth: Growth) -> Iterator[tuple[str, bool]]:
    """Fails where every process after needs more than the limit over what each one needed before."""
    before, after = _figures(pair, peak_bytes)
    if not before or not after:
        yield f"{pair.label}: no memory was measured: {_remedy(pair)}", False
    elif min(after) > growth.limit(max(before)):
        change = f"{format_bytes(after[0])} in place of {format_bytes(before[0])}"
        yield f"larger than {growth} allows: {pair.label} needs {change} (+{after[0] / before[0] - 1:.2%})", True
    elif max(after) > growth.limit(min(before)):
        spans = [f"{format_bytes(min(each))} to {format_bytes(max(each))}" for each in (before, after)]
        yield f"{pair.label}: memory of {spans[0]} before and {spans[1]} after", False


def _more_flops(pair: SidePair) -> Iterator[tuple[str, bool]]:
    """Fails where a step has more FLOPs than before. They are counted, not measured."""
    before, after = _figures(pair, model_flops)
    if not before or not after:
        yield f"{pair.label}: its FLOPs were not counted: {_remedy(pair)}", False
    elif min(after) > max(before):
        now, was = format_rate(after[0], "FLOP"), format_rate(before[0], "FLOP")
        yield f"more FLOPs: {pair.label} has {now} a step in place of {was} (+{after[0] / before[0] - 1:.2%})", True
    elif max(after) > min(before):
        yield f"{pair.label}: FLOPs differ between the processes of a side", False


def _remedy(pair: SidePair) -> str:
    """What to do where a run has no memory, or no FLOPs, which are recorded after the times."""
    short = pair.before_side.measured_now or pair.after_side.measured_now
    return "let the script take more steps" if short else "measure it with --record memory"


def _figures(pair: SidePair, of: Callable[[Run], float | None]) -> tuple[list[float], list[float]]:
    """A figure of each measured process before and after."""

    def known(side: RunSet) -> list[float]:
        return [figure for run in side.measured if (figure := of(run))]

    return known(pair.before), known(pair.after)
