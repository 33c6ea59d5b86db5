"""`compare`: is it faster, by how much, how sure, and which part of the step made it so. Needs no PyTorch."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, draw, progress
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError, choose, warn
from stepscope.core.files import json_document
from stepscope.core.options import GIVEN, MEASURING, Argument, Option, verb
from stepscope.core.processes import FEWEST_PROCESSES, Change
from stepscope.core.range_names import STEP
from stepscope.core.units import counted
from stepscope.engine.request import Tell

if TYPE_CHECKING:
    from stepscope.questions.compare import Side, SideComparison, SidePair
    from stepscope.traces.captures.digest import TraceDigest

PROCESSES = 6
"""Processes of each commit, where nothing else is asked: one more than a verdict needs."""


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
        pairs = zip(self.comparison.pairs, self.comparison.changes, strict=True)
        return {pair.label: change for pair, change in pairs}

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
    script: str | Sequence[str] = (),
    processes: int = PROCESSES,
    share: Sequence[str | Path] = (),
) -> Compared:
    """Compare two sides: is the second faster, by how much, how sure, and which part of the step made it so.

        found = stepscope.compare("runs/before", "runs/after")
        found                              # in a notebook: verdicts, and where the change lies
        found.changes                      # by cell: ratio, interval, processes
        stepscope.compare("main", "HEAD", script="train.py --steps 50")    # measured now, at both commits

    base, other: a path, a part of a run's name, `last`, a set, a sweep, a tag or a commit, as `stepscope compare` takes
    them. With a script, commits; "." is the folder as it is.
    across: fields in which the workloads may differ, as in "dtype".
    value: the part of the step that is compared.
    runs: the folder in which names are looked up, and below which measured runs are stored.
    script: a training script with its arguments, which is measured at both commits, in processes that take turns.
    processes: of each side.
    share: paths that git does not track and each commit needs, such as data.

    Ratios are after over before: above 1 the second side is slower. With fewer than five processes a side
    there is a ratio, and no verdict.

    Raises InputError where a name means nothing, and where the sides have nothing in common.
    """
    fields = [name.strip() for name in across.split(",")] if isinstance(across, str) else across
    names = str(base), str(other)
    words = shlex.split(script) if isinstance(script, str) else script
    if words:
        places = [Path(path) for path in share]
        commits, interrupted = _measured(names, words, Path(runs), processes, places, lambda _: None)
        if interrupted:
            raise KeyboardInterrupt
        compared, *_ = _compared_commits(commits, value)
    else:
        compared, *_ = _compared(names, [name for name in fields if name], value, Path(runs))
    from stepscope.questions.compare_answer import answer_comparison

    return Compared(compared, shown_answer(answer_comparison(compared, _digests)))


def _compared(names: Sequence[str], across: Sequence[str], value: str, runs: Path) -> "list[SideComparison]":
    """The first of these sides compared with each of the others."""
    from stepscope.questions.compare import comparable_fields, compare_all, side_named

    base, *others = compared = [side_named(name, runs) for name in names]
    for fault in (fault for side in compared for fault in side.faults):
        warn(f"left out: {fault}")
    for field in across:
        choose(field, sorted(comparable_fields(compared)), "across")
    return compare_all(base, others, across, value)


def _digests(pair: "SidePair") -> "tuple[TraceDigest | None, TraceDigest | None]":
    """What the captures of both sides say; None where there is none, or polars is not installed."""
    from stepscope.questions.comparison import captured

    before, after = pair.before.representative, pair.after.representative
    return (
        captured(before, pair.before_side.directory(before), keep=False),
        captured(after, pair.after_side.directory(after), keep=False),
    )


def _measured(
    names: Sequence[str], words: Sequence[str], runs: Path, processes: int, share: Sequence[Path], tell: Tell
) -> "tuple[list[Side], bool]":
    """Each commit as a side, with the runs that were measured there now; and whether that was interrupted."""
    from stepscope.engine.commits import Repository, checkouts, measure_in_turns
    from stepscope.questions.compare import Side

    if processes < 1:
        raise InputError(f"--processes is {processes}: measure at least one of each side")
    verb, *rest = words[1:] if Path(words[0]).name == "stepscope" else ("watch", "--record", "memory", "--", *words)
    if verb not in ("watch", "run"):
        raise InputError(f"stepscope {verb} stores no run of a step: compare measures scripts, stepscope watch and run")
    repository = Repository.here()
    with checkouts(repository, names, share) as commits:
        turns = measure_in_turns(repository, commits, [verb, *rest], out=runs, processes=processes, tell=tell)
    folders = " ".join(shlex.quote(str(runs / side.folder)) for side in commits if turns.runs[side.name])
    if not all(turns.runs.values()):
        if folders:
            warn(f"the runs of one side are kept: {folders}")
        raise KeyboardInterrupt
    warn(f"its runs are kept: stepscope compare {folders} --across code")
    measured = [
        Side(name=side.name, kind=side.commit[:10], runs=tuple(turns.runs[side.name]), measured_now=True)
        for side in commits
    ]
    return measured, turns.interrupted


def _compared_commits(commits: "Sequence[Side]", value: str) -> "list[SideComparison]":
    """The first commit compared with each of the others: what a script does there is one workload, whatever it is."""
    from stepscope.questions.compare import comparable_fields, compare_all

    return compare_all(commits[0], commits[1:], sorted(comparable_fields(commits)), value)


Value = Annotated[str, Option("The part of the step that is compared, as in forward.")]
FailIfSlower = Annotated[
    str | None,
    Option("Leave with code 1 where something surely became slower by more than this, as in 3%.", metavar="SHARE"),
]
FailIfLarger = Annotated[
    str | None,
    Option(
        "Leave with code 1 where the peak of memory grew by more than this share, as in 1%, or size, as in 200MiB.",
        metavar="SHARE|SIZE",
    ),
]
FailIfFlopsGrow = Annotated[bool, Option("Leave with code 1 where a step has more FLOPs than before.")]
Strict = Annotated[bool, Option("With a limit (--fail-if-...): what cannot be decided fails, too.")]
Processes = Annotated[
    int, Option(f"Processes of each commit; {FEWEST_PROCESSES} are the fewest for a verdict.", MEASURING, least=1)
]
Share = Annotated[
    tuple[Path, ...], Option("A path that git does not track and each commit needs, such as data.", MEASURING)
]


@verb(
    "compare",
    "stepscope compare results/h200/plain results/h200/tf32 --across dtype",
    "stepscope compare main HEAD --fail-if-slower 5% --fail-if-larger 1% -- python train.py",
)
def command(
    sides: Annotated[
        list[str],
        Argument(
            "A path, a part of a run's name, `last`, a set, a sweep, a tag or a commit. The first is the base. With a "
            "script behind --, commits (`.` is the folder as it is), at which it is measured now.",
            metavar="BASE OTHER... [-- SCRIPT]",
            names_a_run=True,
        ),
    ],
    *,
    across: tuple[str, ...] = (),
    value: Value = "step",
    fail_if_slower: FailIfSlower,
    fail_if_larger: FailIfLarger,
    fail_if_flops_grow: FailIfFlopsGrow = False,
    strict: Strict = False,
    processes: Processes = PROCESSES,
    share: Share = (),
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Compare runs, sets, sweeps, tags or commits: what changed, by how much, and how sure that is."""
    from stepscope.questions.compare_answer import answer_comparison, comparison_as_json, pictured
    from stepscope.questions.compare_gate import Limits, judge, parse_growth, parse_share

    limits = Limits(
        slower=parse_share(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None,
        larger=parse_growth(fail_if_larger, "--fail-if-larger") if fail_if_larger is not None else None,
        flops=fail_if_flops_grow,
    )
    if strict and limits == Limits():
        raise InputError(
            "--strict belongs to a limit, as --fail-if-slower: say which change is too much, or leave it out"
        )
    end = sides.index("--") if "--" in sides else len(sides)
    names, words = sides[:end], sides[end + 1 :]
    interrupted = False
    if "--" in sides and not (names and words):
        missing = "script behind" if names else "commit before"
        raise InputError(f"there is no {missing} --: write stepscope compare main HEAD -- python train.py")
    now = "is for what is measured now: name a script behind --"
    unread = {"--across": "says nothing with a script, whose commits may differ in anything: leave it out"}
    for flag, why in (unread if words else {"--processes": now, "--share": now}).items():
        if flag in GIVEN.get():
            raise InputError(f"{flag} {why}")
    if words:
        names = [*names, "."] if len(names) == 1 else names
        with progress() as tell:
            measured, interrupted = _measured(names, words, runs, processes, share, tell)
        compared = _compared_commits(measured, value)
    else:
        if len(names) < 2:
            raise InputError(f"{names[0]!r} is one side: name what it is compared with, too")
        compared = _compared(names, across, value, runs)
    answers = [answer_comparison(one, _digests) for one in compared]

    def document() -> str:
        documents = [comparison_as_json(one, _digests) for one in compared]
        return json_document(documents[0] if len(documents) == 1 else documents)

    shown.show(*answers, document=document)
    if save is not None:
        draw(pictured(answers), save)
    if interrupted:
        return EXIT_INTERRUPTED
    if limits == Limits():
        return EXIT_DONE
    gate = judge(compared, limits)
    for line in gate.exceeded:
        warn(line)
    if gate.open:
        named = "; ".join(gate.open[:3]) + (f"; and {len(gate.open) - 3} more" if len(gate.open) > 3 else "")
        warn(f"{counted(len(gate.open), 'limit')} cannot be decided with what was run: {named}")
    return EXIT_CHECK_FAILED if gate.fails(strict=strict) else EXIT_DONE
