"""Whether a comparison is too slow to pass, as a build asks: fails, passes, or cannot be decided with what was run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.core.errors import InputError
from stepscope.core.units import counted, format_share
from stepscope.questions.compare.sides import SideComparison


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What was found of a limit: the words on each pair that is too slow, and on each that leaves it open."""

    limit: float
    slower: tuple[str, ...]
    open: tuple[str, ...]

    def fails(self, *, strict: bool) -> bool:
        """Whether the build fails. strict: what cannot be decided fails, too."""
        return bool(self.slower or (strict and self.open))


def judge(comparisons: Sequence[SideComparison], limit: float) -> Gate:
    """Hold every pair against the limit: it fails where the whole interval of its change lies above.

    The intervals of several pairs are widened so that all hold together. A cell whose runs did not end on one side, or
    some of them, is not decided: a step that fails is not a fast one.
    """
    slower: list[str] = []
    undecided: list[str] = []
    for found in comparisons:
        for pair in found.pairs:
            change = pair.change(found.value, found.level)
            if change is None or change.interval is None:
                undecided.append(f"{pair.label}: too few processes")
            elif change.interval.low > 1 + limit:
                made_by = found.most_in(pair)
                most = f", most of it in {made_by[0]}" if made_by else ""
                slower.append(
                    f"{pair.label} is {format_share(change.share)} slower (at least "
                    f"{format_share(change.interval.low - 1)}){most}"
                )
            elif change.interval.high > 1 + limit:
                apart = ", not measured in turns" if change.may_be_drift else ""
                undecided.append(f"{pair.label}: {format_share(change.interval.low - 1)} to "
                                 f"{format_share(change.interval.high - 1)} slower{apart}")  # fmt: skip
            elif any(pair.lost):
                undecided.append(f"{pair.label}: {counted(sum(pair.lost), 'process')} without a result")
        undecided += [f"{cell}: no result" for cell in found.lost]
        # A cell that was not measured again may have become slower; one that is new has nothing to be slower than.
        undecided += [f"{cell}: not measured again" for cell in found.alone if cell.endswith(f"({found.before.name})")]
    return Gate(limit=limit, slower=tuple(slower), open=tuple(undecided))


def parse_share(text: str, option: str) -> float:
    """A share of one, written `3%` or `0.03`."""
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value < 100 or (found and not found[2] and value >= 1):
        raise InputError(f"cannot read {option} {text!r}: write a share, as in 3% or 0.03")
    return value
