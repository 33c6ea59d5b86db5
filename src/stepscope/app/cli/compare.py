"""`stepscope compare`: is it faster, by how much, how sure, and which part of the step made it so."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.app.cli import completion
from stepscope.app.cli.captured_runs import captured
from stepscope.app.cli.output import check_picture, draw, warn
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.document import json_document
from stepscope.core.errors import EXIT_CHECK_FAILED, InputError, choose
from stepscope.core.units import counted, format_share

if TYPE_CHECKING:
    from stepscope.questions.compare.sides import Side, SideComparison, SidePair
    from stepscope.traces.captures.digest import TraceDigest


@verb(
    "compare",
    "stepscope compare runs/before runs/after",
    "stepscope compare results/h200/plain results/h200/tf32 --across dtype",
)
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            help="A path, a part of a run's name, `last`, a set, a sweep, a tag or a commit. The first is the base.",
            metavar="BASE OTHER...",
            autocompletion=completion.run_names,
        ),
    ],
    *,
    across: tuple[str, ...] = (),
    value: str = "step",
    fail_if_slower: str | None,
    strict: bool,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Compare runs, sets, sweeps, tags or commits: what changed, by how much, and how sure that is."""
    check_picture(save)
    from stepscope.questions.compare.sides import comparable_fields, compare_all, side_named
    from stepscope.questions.compare.sides_answer import answer_comparison, comparison_as_json, pictured
    from stepscope.questions.compare.slower_gate import parse_share

    limit = parse_share(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if strict and limit is None:
        raise InputError("--strict belongs to --fail-if-slower: say which change is too much, or leave it out")
    if len(sides) < 2:
        raise InputError(f"{sides[0]!r} is one side: name what it is compared with, too")
    base, *others = [side_named(name, runs) for name in sides]
    for side in (base, *others):
        _say_faults(side)
    for field in across:
        choose(field, sorted(comparable_fields((base, *others))), "across")
    found = compare_all(base, others, across, value)

    def digests(pair: "SidePair") -> "tuple[TraceDigest | None, TraceDigest | None]":
        before, after = pair.before.representative, pair.after.representative
        return (
            captured(before, pair.before_side.directory(before), keep=False),
            captured(after, pair.after_side.directory(after), keep=False),
        )

    answers = [answer_comparison(one, digests) for one in found]

    def document() -> str:
        documents = [comparison_as_json(one, digests) for one in found]
        return json_document(documents[0] if len(documents) == 1 else documents)

    shown.show(*answers, document=document)
    draw(pictured(answers), save)
    if limit is not None:
        _gate(found, limit, strict=strict)


def _say_faults(side: "Side") -> None:
    for fault in side.faults:
        warn(f"left out: {fault}")


def _gate(found: "list[SideComparison]", limit: float, *, strict: bool) -> None:
    from stepscope.questions.compare.slower_gate import judge

    gate = judge(found, limit)
    for line in gate.slower:
        warn(f"slower than {format_share(limit)} allows: {line}")
    if gate.open:
        named = "; ".join(gate.open[:3]) + (f"; and {len(gate.open) - 3} more" if len(gate.open) > 3 else "")
        warn(f"{counted(len(gate.open), 'pair')} cannot be decided at {format_share(limit)} with what was run: {named}")
    if gate.fails(strict=strict):
        raise typer.Exit(EXIT_CHECK_FAILED)
