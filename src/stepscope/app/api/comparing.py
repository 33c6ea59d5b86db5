"""`stepscope.compare`: what changed between stored runs, by how much, and how sure that is. Needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.app.api.shown import Shown, ShownAnswer, shown
from stepscope.core.errors import InputError, warn
from stepscope.core.processes import Change
from stepscope.core.range_names import STEP

if TYPE_CHECKING:
    from stepscope.questions.compare import SideComparison, SidePair
    from stepscope.traces.captures.digest import TraceDigest


@dataclass(frozen=True, repr=False)
class Compared(Shown):
    """Two sides of a comparison, pair by pair."""

    comparison: "SideComparison"
    """The pairs: each with its runs, `change()` of any part of the step, and `buckets` that add up to the step."""
    answer: ShownAnswer
    """The verdicts, and where the change lies."""

    @property
    def changes(self) -> "dict[str, Change | None]":
        """By cell: how many times as long the second side takes, and its interval."""
        found = zip(self.comparison.pairs, self.comparison.changes, strict=True)
        return {pair.label: change for pair, change in found}

    @property
    def slower(self) -> list[str]:
        """The cells that became slower, as far as all comparisons together tell."""
        return self._decided(above=True)

    @property
    def faster(self) -> list[str]:
        """The cells that became faster, as far as all comparisons together tell."""
        return self._decided(above=False)

    def _decided(self, *, above: bool) -> list[str]:
        stands = zip(self.changes.items(), self.comparison.stands, strict=True)
        return [label for (label, change), stand in stands if stand and change and (change.ratio > 1) == above]


def compare(
    base: str | Path,
    other: str | Path,
    *,
    across: str | Sequence[str] = (),
    value: str = STEP,
    runs: str | Path = "runs",
) -> Compared:
    """Compare two sides: is the second faster, by how much, how sure, and which part of the step made it so.

        found = stepscope.compare("runs/before", "runs/after")
        found                              # in a notebook: verdicts, and where the change lies
        found.changes                      # by cell: ratio, interval, processes

    base, other: a path, a part of a run's name, `last`, a set, a sweep, a tag or a commit, as `stepscope compare` takes
    them.
    across: fields in which the workloads may differ, as in "dtype".
    value: the part of the step that is compared.
    runs: the folder in which names are looked up.

    Ratios are after over before: above 1 the second side is slower. With fewer than five processes a side
    there is a ratio, and no verdict.

    Raises InputError where a name means nothing, and where the sides have nothing in common.
    """
    from stepscope.questions.compare import compare_all, side_named
    from stepscope.questions.compare_answer import answer_comparison

    sides = [side_named(str(name), Path(runs)) for name in (base, other)]
    for fault in (fault for side in sides for fault in side.faults):
        warn(f"left out: {fault}")
    fields = [name.strip() for name in across.split(",")] if isinstance(across, str) else across
    found, *_ = compare_all(sides[0], sides[1:], [name for name in fields if name], value)
    return Compared(found, shown(answer_comparison(found, _digests)))


def _digests(pair: "SidePair") -> "tuple[TraceDigest | None, TraceDigest | None]":
    """What the captures of both sides say; None where there is none, or polars is not installed."""
    try:
        from stepscope.traces.captures.digest import digest_beside
    except ModuleNotFoundError:
        return None, None
    found: list[TraceDigest | None] = []
    for side, named in ((pair.before, pair.before_side), (pair.after, pair.after_side)):
        run = side.representative
        try:
            found.append(digest_beside(run, named.directory(run), "kineto", say=warn))
        except InputError as error:
            warn(f"its capture is left out: {error}")
            found.append(None)
    return found[0], found[1]
