"""`stepscope compare`: is it faster, by how much, how sure, and which part of the step made it so."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, check_picture, draw, warn
from stepscope.app.cli.sweep import captured
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, InputError, choose
from stepscope.core.files import json_document
from stepscope.core.options import Argument, Needs, Option, verb
from stepscope.core.units import counted, format_share

if TYPE_CHECKING:
    from stepscope.questions.compare import SidePair
    from stepscope.traces.captures.digest import TraceDigest


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
def compare(
    sides: Annotated[
        list[str],
        Argument(
            help="A path, a part of a run's name, `last`, a set, a sweep, a tag or a commit. The first is the base.",
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
    check_picture(save)
    from stepscope.questions.compare import comparable_fields, compare_all, side_named
    from stepscope.questions.compare_answer import answer_comparison, comparison_as_json, judge, parse_share, pictured

    limit = parse_share(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if len(sides) < 2:
        raise InputError(f"{sides[0]!r} is one side: name what it is compared with, too")
    base, *others = [side_named(name, runs) for name in sides]
    for fault in (fault for side in (base, *others) for fault in side.faults):
        warn(f"left out: {fault}")
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
    if limit is None:
        return EXIT_DONE
    gate = judge(found, limit)
    for line in gate.slower:
        warn(f"slower than {format_share(limit)} allows: {line}")
    if gate.open:
        named = "; ".join(gate.open[:3]) + (f"; and {len(gate.open) - 3} more" if len(gate.open) > 3 else "")
        warn(f"{counted(len(gate.open), 'pair')} cannot be decided at {format_share(limit)} with what was run: {named}")
    return EXIT_CHECK_FAILED if gate.fails(strict=strict) else EXIT_DONE
