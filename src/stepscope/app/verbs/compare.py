"""`compare`: is it faster, by how much, how sure, and which part of the step made it so. Needs no PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, draw
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, InputError, choose, warn
from stepscope.core.files import json_document
from stepscope.core.options import Argument, Needs, Option, verb
from stepscope.core.processes import Change
from stepscope.core.range_names import STEP
from stepscope.core.units import counted, format_share

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
    fields = [name.strip() for name in across.split(",")] if isinstance(across, str) else across
    compared, *_ = _compared((str(base), str(other)), [name for name in fields if name], value, Path(runs))
    from stepscope.questions.compare_answer import answer_comparison

    return Compared(compared, shown_answer(answer_comparison(compared, _digests)))


def _compared(names: Sequence[str], across: Sequence[str], value: str, runs: Path) -> "list[SideComparison]":
    """The first of these sides compared with each of the others."""
    from stepscope.questions.compare import comparable_fields, compare_all, side_named

    base, *others = sides = [side_named(name, runs) for name in names]
    for fault in (fault for side in sides for fault in side.faults):
        warn(f"left out: {fault}")
    for field in across:
        choose(field, sorted(comparable_fields(sides)), "across")
    return compare_all(base, others, across, value)


def _digests(pair: "SidePair") -> "tuple[TraceDigest | None, TraceDigest | None]":
    """What the captures of both sides say; None where there is none, or polars is not installed."""
    from stepscope.questions.comparison import captured

    before, after = pair.before.representative, pair.after.representative
    return (
        captured(before, pair.before_side.directory(before), keep=False),
        captured(after, pair.after_side.directory(after), keep=False),
    )


Value = Annotated[str, Option("The part of the step that is compared, as in forward.")]
FailIfSlower = Annotated[
    str | None,
    Option("Leave with code 1 where something surely became slower by more than this, as in 3%.", metavar="SHARE"),
]
Strict = Annotated[bool, Option("With --fail-if-slower: what cannot be decided fails, too.")]


@verb(
    "compare",
    "stepscope compare runs/before runs/after",
    "stepscope compare results/h200/plain results/h200/tf32 --across dtype",
    conflicts=(Needs("--strict", "--fail-if-slower", "say which change is too much, or leave it out"),),
)
def command(
    sides: Annotated[
        list[str],
        Argument(
            "A path, a part of a run's name, `last`, a set, a sweep, a tag or a commit. The first is the base.",
            metavar="BASE OTHER...",
            names_a_run=True,
        ),
    ],
    *,
    across: tuple[str, ...] = (),
    value: Value = "step",
    fail_if_slower: FailIfSlower,
    strict: Strict = False,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Compare runs, sets, sweeps, tags or commits: what changed, by how much, and how sure that is."""
    from stepscope.questions.compare_answer import answer_comparison, comparison_as_json, judge, parse_share, pictured

    limit = parse_share(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if len(sides) < 2:
        raise InputError(f"{sides[0]!r} is one side: name what it is compared with, too")
    compared = _compared(sides, across, value, runs)
    answers = [answer_comparison(one, _digests) for one in compared]

    def document() -> str:
        documents = [comparison_as_json(one, _digests) for one in compared]
        return json_document(documents[0] if len(documents) == 1 else documents)

    shown.show(*answers, document=document)
    if save is not None:
        draw(pictured(answers), save)
    if limit is None:
        return EXIT_DONE
    gate = judge(compared, limit)
    for line in gate.slower:
        warn(f"slower than {format_share(limit)} allows: {line}")
    if gate.open:
        named = "; ".join(gate.open[:3]) + (f"; and {len(gate.open) - 3} more" if len(gate.open) > 3 else "")
        warn(f"{counted(len(gate.open), 'pair')} cannot be decided at {format_share(limit)} with what was run: {named}")
    return EXIT_CHECK_FAILED if gate.fails(strict=strict) else EXIT_DONE
