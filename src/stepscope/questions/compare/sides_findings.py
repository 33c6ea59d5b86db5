"""What to doubt in a comparison of two sides: other workloads, environments, clocks, runs on both sides."""

import shlex
from collections.abc import Iterator

from stepscope.core.doubts import doubting_kinds
from stepscope.core.environment import COMMITS
from stepscope.core.finding import Finding, note, warning
from stepscope.core.processes import FEWEST_PROCESSES
from stepscope.core.run import Run
from stepscope.core.units import counted
from stepscope.core.work.spelled import run_command
from stepscope.questions.compare.sides import SideComparison, SidePair
from stepscope.runs.disagreement import disagreement

_CLOCKS = 0.02
"""The share by which the clocks of two sides may differ before it is said."""
_WIDENED = 1.1
"""How many times as wide an interval is for what drifts between the sides before it is said."""


def sides_findings(found: SideComparison) -> Iterator[Finding]:
    """What the sides differ in beside what is compared, and what the runs' own checks found."""
    across = [pair for pair in found.pairs if pair.across]
    if across:
        fields = ", ".join(sorted({field for pair in across for field in pair.across}))
        yield note(
            "different-workloads",
            f"{counted(len(across), 'pair')} {'is' if len(across) == 1 else 'are'} of different workloads, as asked: "
            f"they differ in {fields}.",
            {"pairs": len(across)},
        )
    yield from _environments(found)
    yield from _clocks(found)
    yield from _lost_processes(found)
    yield from _not_in_turns(found)
    yield from _times_unknown(found)
    settings = [
        pair for pair in found.pairs if pair.before.representative.settings != pair.after.representative.settings
    ]
    if settings:
        yield note(
            "different-settings",
            f"{settings[0].label} was measured with other settings on the two sides (steps, seconds, warm-up).",
            {"pairs": len(settings)},
        )
    kinds = doubting_kinds(*(run for pair in found.pairs for side in (pair.before, pair.after) for run in side.runs))
    if kinds:
        yield note("doubted-runs", f"The runs' own checks found: {', '.join(kinds)}. `stepscope show` has the words.")


def _environments(found: SideComparison) -> Iterator[Finding]:
    """What else differs between the sides: versions, device, driver; and commits, which may be what is compared."""
    differing: dict[str, tuple[object, object]] = {}
    for pair in found.pairs:
        one, other = (side.representative.environment for side in (pair.before, pair.after))
        differing |= one.differences(other) if one and other else {}
    yield from _mixed(found)
    shared = {run.id for run, _ in found.before.runs} & {run.id for run, _ in found.after.runs}
    if shared:
        yield warning(
            "shared-runs",
            f"{counted(len(shared), 'run')} of the two sides {'is' if len(shared) == 1 else 'are'} the same: what they "
            "have in common hides a difference.",
            {"runs": len(shared)},
        )
    codes = {name: differing.pop(name) for name in COMMITS if name in differing}
    commits = codes.get("own_commit") or codes.get("git_commit")
    dirty = [side.name for side in (found.before, found.after)
             if any(run.environment and run.environment.code[1] for run, _ in side.runs)]  # fmt: skip
    if differing:
        said = ", ".join(f"{name} {was} and {now}" for name, (was, now) in differing.items())
        yield warning(
            "different-environments",
            f"The two sides differ in more than what is compared: {said}. The change may come from that.",
            {"fields": len(differing)}, "measure both sides on one machine, with the same versions",
        )  # fmt: skip
    if commits is not None:
        state = f"; the tree of {' and '.join(dirty)} had changes that are in no commit" if dirty else ""
        first, second = (str(commit)[:10] if commit else "one that is not known" for commit in commits)
        yield note("different-commits", f"They were measured at the commits {first} and {second}{state}.")


def _mixed(found: SideComparison) -> Iterator[Finding]:
    """A side whose own runs come from several commits or environments."""
    befores, afters = [pair.before for pair in found.pairs], [pair.after for pair in found.pairs]
    for side, sets in ((found.before, befores), (found.after, afters)):
        for one in sets:
            environments = [run.environment for run in one.measured if run.environment is not None]
            differing = {name for other in environments[1:] for name in environments[0].differences(other)}
            if differing - {"git_dirty", "own_dirty"}:
                apart = disagreement(one.representative, one.measured, found.value)
                yield warning(
                    "mixed-side",
                    f"The runs of {side.name} are themselves from several environments: they differ in "
                    f"{', '.join(sorted(differing))}.{f' {apart.sentence}' if apart is not None else ''}",
                )
                break


def _lost_processes(found: SideComparison) -> Iterator[Finding]:
    """Processes that did not end: those that did may be the fast ones."""
    for place, side in enumerate((found.before, found.after)):
        lost = [(pair, pair.lost[place]) for pair in found.pairs if pair.lost[place]]
        if not lost:
            continue
        pair, count = max(lost, key=lambda one: one[1])
        ended = len((pair.before, pair.after)[place].measured)
        where = f" ({pair.label})" if len(found.pairs) > 1 else ""
        yield warning(
            "lost-processes",
            f"{count} of {counted(count + ended, 'process')} of {side.name}{where} did not end with a result: what is "
            "compared are those that did.",
            {"lost": sum(count for _, count in lost), "pairs": len(lost)}, "measure them again: the same command",
        )  # fmt: skip


def _not_in_turns(found: SideComparison) -> Iterator[Finding]:
    """Sides that were measured one after the other, so that what drifts meanwhile is between them."""
    apart = [(change, pair) for change, pair in zip(found.changes, found.pairs, strict=True)
             if change is not None and change.widened >= _WIDENED]  # fmt: skip
    if not apart:
        return
    untold = [(change, pair) for change, pair in apart if change.may_be_drift]
    change, pair = max(untold or apart, key=lambda one: one[0].widened)
    where = f"{pair.label}: the" if len(found.pairs) > 1 else "The"
    wider = (
        f"{where} sides were not measured in turns, so the interval is {change.widened:.1f} times as wide as that "
        "of processes that do not drift"
    )
    evidence = {"pairs": len(apart), "untold": len(untold), "widened": change.widened}
    if not untold:
        yield note("not-in-turns", f"{wider}.", evidence)
        return
    yield warning(
        "not-in-turns",
        f"{wider}: what seems to be a change may be drift.",
        evidence,
        f"measure in turns: {_turns(pair)}",
    )


def _times_unknown(found: SideComparison) -> Iterator[Finding]:
    """Sides that seem to differ, where it is not known when the processes of one began."""
    decided = [pair for change, pair in zip(found.changes, found.pairs, strict=True)
               if change is not None and change.decided and not change.paired]  # fmt: skip
    timeless = dict.fromkeys(
        side.name for pair in decided for side, runs in ((found.before, pair.before), (found.after, pair.after))
        if not runs.processes(found.value).begun_s
    )  # fmt: skip
    if timeless:
        yield warning(
            "times-unknown",
            f"The runs of {' and '.join(timeless)} do not say when they began, so it is not known whether the sides "
            "took turns: what seems to be a change may be drift.",
            {"sides": len(timeless)}, "measure both sides in turns, as `stepscope run --against` does",
        )  # fmt: skip


def _turns(pair: SidePair) -> str:
    """The command that measures both sides of a pair in turns, as far as options say it."""
    before, after = pair.before.representative, pair.after.representative
    often = max(FEWEST_PROCESSES, len(pair.before.measured), len(pair.after.measured))
    command = run_command(before.workload, before.settings)
    if command is not None and pair.across and "code" not in pair.across and "device" not in pair.across:
        place = pair.after_side.directory(after)
        return f"`{command} --against {shlex.quote(str(place))} --repeat {often}`"
    return (
        f"`{command or 'stepscope watch ...'}` with --runs before, then with --runs after as the other side needs it, "
        f"{often} times over"
    )


def _clocks(found: SideComparison) -> Iterator[Finding]:
    for pair in found.pairs:
        one, other = (_clock_mhz(side.representative) for side in (pair.before, pair.after))
        if one and other and abs(other / one - 1) > _CLOCKS:
            yield warning(
                "different-clocks",
                f"{pair.label}: the GPU ran at {one:.0f} MHz before and at {other:.0f} MHz after; a step that it "
                f"bounds changes by up to {abs(other / one - 1) * 100:.1f} % with that alone.",
                {"before_mhz": one, "after_mhz": other}, "measure the sides turn by turn: run --against",
            )  # fmt: skip
            return


def _clock_mhz(run: Run) -> float | None:
    """The GPU's clock while the steps ran, or after them."""
    where = run.environment
    if where is None:
        return None
    if where.during is not None and where.during.sm_clock_mhz is not None:
        return where.during.sm_clock_mhz.median
    return where.after.sm_clock_mhz if where.after is not None else None
