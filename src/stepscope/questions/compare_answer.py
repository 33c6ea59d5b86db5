"""Sides of a comparison as an answer: is it faster, by how much, how sure, and which part of the step made it so."""

import re
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.core import answer
from stepscope.core.environment import COMMITS
from stepscope.core.figures import doubting_kinds
from stepscope.core.formulas.spelled import run_command
from stepscope.core.processes import FEWEST_PROCESSES, Change
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE
from stepscope.core.units import counted, format_joules, format_milliseconds, format_share
from stepscope.questions.compare import SideComparison, SidePair
from stepscope.runs.metrics import compared_ranks, joules_per_step, model_flops, peak_bytes, samples_of
from stepscope.runs.run_sets import disagreement

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import TraceDigest

# What to doubt in a comparison of two sides: other workloads, environments, clocks, runs on both sides.


_CLOCKS = 0.02
"""The share by which the clocks of two sides may differ before it is said."""
_WIDENED = 1.1
"""How many times as wide an interval is for what drifts between the sides before it is said."""


def sides_findings(compared: SideComparison) -> Iterator[answer.Finding]:
    """What the sides differ in beside what is compared, and what the runs' own checks found."""
    commits = compared.before.is_commit and compared.after.is_commit
    across = [pair for pair in compared.pairs if pair.across and not (commits and pair.across == ("code",))]
    if across:
        fields = ", ".join(sorted({field for pair in across for field in pair.across}))
        yield answer.note(
            "different-workloads",
            f"{counted(len(across), 'pair')} {'is' if len(across) == 1 else 'are'} of different workloads, as asked: "
            f"they differ in {fields}.",
            {"pairs": len(across)},
        )
    yield from _environments(compared)
    yield from _clocks(compared)
    yield from _lost_processes(compared)
    yield from _not_in_turns(compared)
    yield from _times_unknown(compared)
    settings = [
        pair for pair in compared.pairs if pair.before.representative.settings != pair.after.representative.settings
    ]
    if settings:
        yield answer.note(
            "different-settings",
            f"{settings[0].label} was measured with other settings on the two sides (steps, seconds, warm-up).",
            {"pairs": len(settings)},
        )
    kinds = doubting_kinds(*(run for pair in compared.pairs for side in (pair.before, pair.after) for run in side.runs))
    if kinds:
        yield answer.note(
            "doubted-runs", f"The runs' own checks found: {', '.join(kinds)}. `stepscope show` has the words."
        )


def _environments(compared: SideComparison) -> Iterator[answer.Finding]:
    """What else differs between the sides: versions, device, driver; and commits, which may be what is compared."""
    differing: dict[str, tuple[object, object]] = {}
    for pair in compared.pairs:
        one, other = (side.representative.environment for side in (pair.before, pair.after))
        differing |= one.differences(other) if one and other else {}
    yield from _mixed(compared)
    shared = {run.id for run, _ in compared.before.runs} & {run.id for run, _ in compared.after.runs}
    if shared:
        yield answer.warning(
            "shared-runs",
            f"{counted(len(shared), 'run')} of the two sides {'is' if len(shared) == 1 else 'are'} the same: what they "
            "have in common hides a difference.",
            {"runs": len(shared)},
        )
    codes = {name: differing.pop(name) for name in COMMITS if name in differing}
    commits = codes.get("own_commit") or codes.get("git_commit")
    environments = [(side, run.environment) for side in (compared.before, compared.after) for run, _ in side.runs]
    dirty = dict.fromkeys(side.name for side, where in environments if where is not None and where.code[1])
    if differing:
        words = ", ".join(f"{name} {was} and {now}" for name, (was, now) in differing.items())
        yield answer.warning(
            "different-environments",
            f"The two sides differ in more than what is compared: {words}. The change may come from that.",
            {"fields": len(differing)},
            "measure both sides on one machine, with the same versions",
        )
    if commits is not None:
        state = f"; the tree of {' and '.join(dirty)} had changes that are in no commit" if dirty else ""
        first, second = (str(commit)[:10] if commit else "one that is not known" for commit in commits)
        yield answer.note("different-commits", f"They were measured at the commits {first} and {second}{state}.")


def _mixed(compared: SideComparison) -> Iterator[answer.Finding]:
    """A side whose own runs come from several commits or environments."""
    befores, afters = [pair.before for pair in compared.pairs], [pair.after for pair in compared.pairs]
    for side, sets in ((compared.before, befores), (compared.after, afters)):
        for one in sets:
            environments = [run.environment for run in one.measured if run.environment is not None]
            differing = {name for other in environments[1:] for name in environments[0].differences(other)}
            if differing - {"git_dirty", "own_dirty"}:
                apart = disagreement(one.representative, one.measured, compared.value)
                yield answer.warning(
                    "mixed-side",
                    f"The runs of {side.name} are themselves from several environments: they differ in "
                    f"{', '.join(sorted(differing))}.{f' {apart.sentence}' if apart is not None else ''}",
                )
                break


def _lost_processes(compared: SideComparison) -> Iterator[answer.Finding]:
    """Processes that did not end: those that did may be the fast ones."""
    for place, side in enumerate((compared.before, compared.after)):
        lost = [(pair, pair.lost[place]) for pair in compared.pairs if pair.lost[place]]
        if not lost:
            continue
        pair, count = max(lost, key=lambda one: one[1])
        ended = len((pair.before, pair.after)[place].measured)
        where = f" ({pair.label})" if len(compared.pairs) > 1 else ""
        yield answer.warning(
            "lost-processes",
            f"{count} of {counted(count + ended, 'process')} of {side.name}{where} did not end with a result: what is "
            "compared are those that did.",
            {"lost": sum(count for _, count in lost), "pairs": len(lost)},
            "measure them again: the same command",
        )


def _not_in_turns(compared: SideComparison) -> Iterator[answer.Finding]:
    """Sides that were measured one after the other, so that what drifts meanwhile is between them."""
    both = [(change, pair) for change, pair in zip(compared.changes, compared.pairs, strict=True) if change is not None]
    apart = [(change, pair) for change, pair in both if change.widened >= _WIDENED]
    if not apart:
        return
    untold = [(change, pair) for change, pair in apart if change.may_be_drift]
    change, pair = max(untold or apart, key=lambda one: one[0].widened)
    where = f"{pair.label}: the" if len(compared.pairs) > 1 else "The"
    wider = (
        f"{where} sides were not measured in turns, so the interval is {change.widened:.1f} times as wide as that "
        "of processes that do not drift"
    )
    evidence = {"pairs": len(apart), "untold": len(untold), "widened": change.widened}
    if not untold:
        yield answer.note("not-in-turns", f"{wider}.", evidence)
        return
    yield answer.warning(
        "not-in-turns",
        f"{wider}: what seems to be a change may be drift.",
        evidence,
        f"measure in turns: {_turns(pair)}",
    )


def _times_unknown(compared: SideComparison) -> Iterator[answer.Finding]:
    """Sides that seem to differ, where it is not known when the processes of one began."""
    timeless: dict[str, None] = {}
    for change, pair in zip(compared.changes, compared.pairs, strict=True):
        if change is None or not change.decided or change.paired:
            continue
        for side, runs in ((compared.before, pair.before), (compared.after, pair.after)):
            if not runs.processes(compared.value).begun_s:
                timeless[side.name] = None
    if timeless:
        yield answer.warning(
            "times-unknown",
            f"The runs of {' and '.join(timeless)} do not say when they began, so it is not known whether the sides "
            "took turns: what seems to be a change may be drift.",
            {"sides": len(timeless)},
            "measure both sides in turns, as `stepscope run --against` does",
        )


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


def _clocks(compared: SideComparison) -> Iterator[answer.Finding]:
    for pair in compared.pairs:
        one, other = (_clock_mhz(side.representative) for side in (pair.before, pair.after))
        if one and other and abs(other / one - 1) > _CLOCKS:
            yield answer.warning(
                "different-clocks",
                f"{pair.label}: the GPU ran at {one:.0f} MHz before and at {other:.0f} MHz after; a step that it "
                f"bounds changes by up to {abs(other / one - 1) * 100:.1f} % with that alone.",
                {"before_mhz": one, "after_mhz": other},
                "measure the sides turn by turn: run --against",
            )
            return


def _clock_mhz(run: Run) -> float | None:
    """The GPU's clock while the steps ran, or after them."""
    where = run.environment
    if where is None:
        return None
    if where.during is not None and where.during.sm_clock_mhz is not None:
        return where.during.sm_clock_mhz.median
    return where.after.sm_clock_mhz if where.after is not None else None


DETAILED = 3
"""Pairs whose buckets are shown, those that changed most. `--json` holds those of all."""
_ROWS = 10
_MEMORY = (
    ("before the step", "after_parameters"),
    ("forward peak", "forward_peak"),
    ("saved for backward", "saved_for_backward"),
    ("backward peak", "backward_peak"),
    ("peak of forward and backward that take turns", "turns_peak"),
    ("optimizer peak", "optimizer_peak"),
    ("reserved", "reserved_peak"),
)

_BEFORE_ALL = ("different-workloads", "different-environments", "different-clocks", "mixed-side", "shared-runs")
"""Findings that say what the two sides differ in beside what is compared: they stand before the verdict."""

COMPARISON_VERSION = 1
"""The form of `comparison_as_json`. It grows with a field that changes what another means."""

DigestOf = Callable[[SidePair], "tuple[TraceDigest | None, TraceDigest | None]"]
"""What the captures of a pair say, before and after."""


def answer_comparison(compared: SideComparison, digests: DigestOf) -> answer.Answer:
    """The Answer on two sides: a row for each pair, where the largest changes lie, and what to doubt."""
    shares = [abs(change.share) if change else 0.0 for change in compared.changes]
    order = sorted(range(len(compared.pairs)), key=lambda i: -shares[i])[:DETAILED]
    detailed = [compared.pairs[i] for i in sorted(order)]
    tables = [_verdicts(compared)]
    several, names = len(compared.pairs) > 1, dict(zip(map(id, compared.pairs), short_names(compared), strict=True))
    for pair in detailed:
        tables += _details(pair, digests, f" of {names[id(pair)]}" if several else "")
    first, findings = compared.pairs[0].after.representative.environment, tuple(sides_findings(compared))
    return answer.Answer(
        study="compare",
        question=f"Is {compared.after.name} faster than {compared.before.name}?",
        device=first.device_name if first else "",
        lead=_lead(compared),
        date=max(run.day for pair in compared.pairs for run in pair.after.runs),
        tables=tuple(table for table in tables if table.rows),
        panels=_panel(compared),
        findings=tuple(finding for finding in findings if finding.kind not in _BEFORE_ALL),
        checked=any(finding.kind not in _BEFORE_ALL for finding in findings),
    )


def _lead(compared: SideComparison) -> tuple[answer.Line, ...]:
    names = f"{compared.after.name} ({compared.after.kind}) against {compared.before.name} ({compared.before.kind})"
    verdict = answer.Line(conclusion(compared), _tone(compared, 0) if len(compared.pairs) == 1 else "strong")
    apart = [finding for finding in sides_findings(compared) if finding.kind in _BEFORE_ALL]
    cautions = [answer.Line(f"Take care: {finding.sentence}", "care") for finding in apart]
    return (answer.Line(names, "strong"), *cautions, verdict)


def conclusion(compared: SideComparison) -> str:
    """The verdict on one pair, or on all of them together, in a sentence or two."""
    return f"{compared.pairs[0].label}: {sentence(compared, 0)}" if len(compared.pairs) == 1 else _together(compared)


def _together(compared: SideComparison) -> str:
    """How many of the pairs became faster or slower, and the geometric mean of their ratios."""
    stands = [(change, stand) for change, stand in zip(compared.changes, compared.stands, strict=True) if change]
    slower = sum(stand and change.ratio > 1 for change, stand in stands)
    faster = sum(stand and change.ratio < 1 for change, stand in stands)
    untold = sum(change.interval is None for change, _ in stands)
    no_verdict = f"without a verdict, since a side has fewer than {FEWEST_PROCESSES} processes"
    drift = sum(change.may_be_drift and not stand for change, stand in stands)
    same = len(stands) - slower - faster - untold - drift
    no_turns = "that cannot be told, since the sides were not measured in turns"
    unseen = "without a difference that was seen"
    words = [(slower, "slower"), (faster, "faster"), (same, unseen), (drift, no_turns), (untold, no_verdict)]
    verdicts = ", ".join(f"{count} {word}" for count, word in words if count)
    return f"Of {counted(len(compared.pairs), 'pair')}: {verdicts}.{''.join(_means(compared))}"


def _means(compared: SideComparison) -> Iterator[str]:
    """The geometric mean of the ratios over the cells that were changed in the same way, where there are several."""
    groups: dict[str, list[float]] = {}
    for pair, change in zip(compared.pairs, compared.changes, strict=True):
        if change is not None:
            groups.setdefault(pair.step_to, []).append(change.ratio)
    for what, ratios in groups.items():
        if len(ratios) > 1:
            mean = statistics.geometric_mean(ratios)
            named = f" from {what}" if what else ""
            yield f" The geometric mean of {len(ratios)} ratios{named} is {mean:.3f} ({_signed(mean - 1)})."


def sentence(compared: SideComparison, place: int) -> str:
    """The verdict on one pair, in a sentence."""
    change, pair = compared.changes[place], compared.pairs[place]
    what = "the step" if compared.value == STEP else compared.value
    if change is None:
        return f"{what} was not measured on both sides."
    before, after = (counted(count, "process") for count in change.processes)
    turns = f"{before} in which both took turns" if change.paired else f"{before} against {after}"
    if change.interval is None:
        return (
            f"{what} takes {change.ratio:.3f} times as long ({_signed(change.share)}), by {turns}"
            f"{_of_steps(compared, pair)}: no verdict, since processes differ; {FEWEST_PROCESSES} a side "
            f"({'--processes' if compared.after.measured_now else '--repeat'} {FEWEST_PROCESSES}) tell by how much."
        )
    within = f"{_signed(change.interval.low - 1)} to {_signed(change.interval.high - 1)}"
    if compared.stands[place]:
        made_by = compared.most_in(pair)
        most = f", most of it in {made_by[0]} ({_ms(made_by[1])})" if made_by else ""
        word = "slower" if change.ratio > 1 else "faster"
        return f"{what} is {format_share(abs(change.share))} {word} ({within}; {turns}){most}."
    if change.may_be_drift:
        return (
            f"it cannot be told whether {what} changed: it takes {change.ratio:.3f} times as long ({within}; {turns}), "
            "but the sides were not measured in turns, so drift may be all that differs."
        )
    would = f", and one above {format_share(change.detectable)} would have been" if change.detectable else ""
    return f"no difference seen in {what}{would} ({within}; {turns})."


def _of_steps(compared: SideComparison, pair: SidePair) -> str:
    """What the steps of one process a side say; nothing of more processes, or where they are too few."""
    before, after = ([samples_of(run, compared.value) for run in side.measured] for side in (pair.before, pair.after))
    if len(before) != 1 or len(after) != 1 or before[0] is None or after[0] is None:
        return ""
    ratio = before[0].speedup_over(after[0])
    if ratio is None or ratio.interval is None:
        return ""
    return f" (their steps say {_signed(ratio.interval.low - 1)} to {_signed(ratio.interval.high - 1)})"


def _signed(share: float) -> str:
    return f"{share * 100:+.1f} %"


def _ms(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{format_milliseconds(seconds)} ms"


def _tone(compared: SideComparison, place: int) -> answer.Tone:
    change = compared.changes[place]
    if change is None or not compared.stands[place]:
        return "strong"
    return "bad" if change.ratio > 1 else "good"


def _verdicts(compared: SideComparison) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    for pair, change, stands in zip(compared.pairs, compared.changes, compared.stands, strict=True):
        before, after = pair.before.processes(compared.value), pair.after.processes(compared.value)
        interval = change.interval if change else None
        most = compared.most_in(pair) if change and (stands or interval is None) else None
        counts = change.processes if change else (before.count, after.count)
        rows.append((
            pair.label, before.typical_s, after.typical_s, change.share if change else None,
            f"{_signed(interval.low - 1)} to {_signed(interval.high - 1)}" if interval else "",
            f"{counts[0]} / {counts[1]}", verdict(change, stands), f"{most[0]} ({_ms(most[1])})" if most else "",
        ))  # fmt: skip
    tones = {i: tone for i in range(len(rows)) if (tone := _tone(compared, i)) != "strong"}
    notes = [
        f"Typical times over the processes of each side, and their ratio with its {CONFIDENCE * 100:.0f} % interval.",
        *_unseen(compared),
        *([f"On one side alone: {', '.join(compared.alone)}."] if compared.alone else []),
        *([f"Not measured to the end on one side: {', '.join(compared.lost)}."] if compared.lost else []),
    ]
    if compared.asked > 1:
        notes.append("A verdict stands where it holds for all pairs asked at once (Holm).")
    if len(compared.pairs) > DETAILED:
        notes.append(f"Where the step changed is shown for the {DETAILED} pairs that changed most.")
    return answer.table_of(
        f"{compared.value} of", ("before", "s"), ("after", "s"), ("change", "+%"), ("interval", answer.TEXT),
        ("processes", answer.TEXT), "verdict", "most of it in", rows=rows, tones=tones, notes=answer.as_lines(*notes),
    )  # fmt: skip


def verdict(change: Change | None, stands: bool) -> str:
    """The verdict in a word or two."""
    if change is None:
        return "not measured"
    if change.interval is None:
        return f"none, fewer than {FEWEST_PROCESSES}"
    if not stands:
        return "cannot be told" if change.may_be_drift else "no difference seen"
    return "slower" if change.ratio > 1 else "faster"


def _unseen(compared: SideComparison) -> Iterator[str]:
    """Which changes would have been seen where none was."""
    limits = [
        change.detectable
        for change, stands in zip(compared.changes, compared.stands, strict=True)
        if change and verdict(change, stands) == "no difference seen" and change.detectable
    ]
    if limits:
        upto = format_share(max(limits))
        least = f"{format_share(min(limits))} to {upto}" if min(limits) < max(limits) else upto
        yield f"Where no difference was seen, one above {least} would have been, in nine of ten such comparisons."


def _details(pair: SidePair, digests: DigestOf, of: str) -> list[answer.Table]:
    steps = pair.steps_s
    tables = [_bucket_table(f"where the step{of} changed", pair.buckets, steps)]
    before, after = digests(pair)
    if before is not None and after is not None:
        tables.append(_bucket_table(f"captured work{of}", work_buckets(before, after, _device_steps(pair)), None))
        tables.append(_bucket_table(f"modules{of}", module_buckets(before, after), None))
    ranks = compared_ranks(pair.before.representative, pair.after.representative, f"ranks{of}")
    tables += [_memory(pair, of), _work(pair, of), ranks, _energy(pair, of)]
    return tables


def work_buckets(
    before: "TraceDigest", after: "TraceDigest", steps_s: tuple[float, float] | None = None
) -> list[tuple[str, float, float]]:
    """Device work by family and phase, in seconds a step.

    steps_s: what the step takes before and after, where a device beside the host does the work. Then the time that it
    stood idle is there too, less what ran at the same time as other work, so that all together are the step.
    """
    rows: dict[str, list[float]] = {}
    for side, digest in enumerate((before, after)):
        for row in digest.families:
            rows.setdefault(f"{row.family}, {row.phase}", [0.0, 0.0])[side] += row.busy_ns * 1e-9
    ordered = sorted(rows.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    attributed = [sum(values[side] for values in rows.values()) for side in (0, 1)]
    busy = [digest.busy_ns * 1e-9 / digest.steps for digest in (before, after)]
    rest = [whole - part for whole, part in zip(busy, attributed, strict=True)]
    buckets = [*((name, was, now) for name, (was, now) in ordered), ("in no phase", rest[0], rest[1])]
    if steps_s is None:
        return buckets
    union = [digest.union_ns * 1e-9 / digest.steps for digest in (before, after)]
    idle = [step - once for step, once in zip(steps_s, union, strict=True)]
    twice = [once - all_ for once, all_ in zip(union, busy, strict=True)]
    more = [("device idle", idle[0], idle[1]), ("at the same time as other work", twice[0], twice[1])]
    return [*more[: 2 if any(twice) else 1], *buckets]


def _device_steps(pair: SidePair) -> tuple[float, float] | None:
    """What the step takes, where a device does its work; None on a CPU, whose operators the host runs itself."""
    devices = [side.representative.environment for side in (pair.before, pair.after)]
    return pair.steps_s if all(one is not None and one.device_type != "cpu" for one in devices) else None


def module_buckets(before: "TraceDigest", after: "TraceDigest") -> list[tuple[str, float, float]]:
    """Device work by module, all layers together, in seconds a step; empty where no work has a module."""
    if not before.places or not after.places:
        return []
    rows: dict[str, list[float]] = {}
    for side, digest in enumerate((before, after)):
        for row in digest.places:
            rows.setdefault(row.module, [0.0, 0.0])[side] += row.busy_ns * 1e-9
    ordered = sorted(rows.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    busy = [digest.busy_ns * 1e-9 / digest.steps for digest in (before, after)]
    rest = [busy[side] - sum(values[side] for values in rows.values()) for side in (0, 1)]
    return [*((name, was, now) for name, (was, now) in ordered), ("in no module", rest[0], rest[1])]


def _bucket_table(
    head: str, buckets: Sequence[tuple[str, float, float]], whole: tuple[float, float] | None
) -> answer.Table:
    total = whole or (sum(row[1] for row in buckets), sum(row[2] for row in buckets))
    difference = total[1] - total[0]
    shown, rest = list(buckets[:_ROWS]), buckets[_ROWS:]
    if rest:
        shown.append((f"{len(rest)} more", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    rows: list[tuple[answer.Cell, ...]] = [
        # To the picosecond: what a difference leaves of nothing is nothing.
        (name, *(round(seconds, 12) + 0.0 for seconds in (was, now, now - was)), _part(now - was, difference))
        for name, was, now in shown
    ]
    if not rows:
        return answer.Table(title="", columns=(head,), rows=())
    rows.append(("together", *total, difference, None))
    heads = (("before ms", "ms of s"), ("after ms", "ms of s"), ("change ms", "+ms of s"), ("of the change", "%"))
    return answer.table_of(head, *heads, rows=rows, rules=(len(rows) - 1,))


def _part(change: float, whole: float) -> float | None:
    """The share of the whole change, without the sign of a zero."""
    share = change / whole if whole else None
    return 0.0 if share is not None and abs(share) < 5e-4 else share


def _memory(pair: SidePair, of: str) -> answer.Table:
    before, after = pair.before.representative, pair.after.representative
    rows: list[tuple[answer.Cell, ...]] = []
    for name, field in _MEMORY:
        was, now = (getattr(run.evidence.memory, field, None) for run in (before, after))
        if was is not None and now is not None:
            rows.append((name, was, now, now / was - 1 if was else None))
    return answer.table_of(f"memory{of}", ("before", "B"), ("after", "B"), ("change", "+%"), rows=rows)


def _work(pair: SidePair, of: str) -> answer.Table:
    """The FLOPs of each phase, where they differ."""
    works = [side.representative.work for side in (pair.before, pair.after)]
    phases = dict.fromkeys(phase for work in works for phase in work)
    counts = {phase: [work[phase].flops if phase in work else 0 for work in works] for phase in phases}
    rows = [(phase, was, now, now / was - 1 if was else None) for phase, (was, now) in counts.items() if was or now]
    if not all(works) or all(was == now for _, was, now, _ in rows):
        rows = []
    return answer.table_of(f"FLOPs{of}", ("before", "FLOP"), ("after", "FLOP"), ("change", "+%"), rows=rows)


def _energy(pair: SidePair, of: str) -> answer.Table:
    """The energy of a step, the mean over the processes; empty where one side has none."""
    sets = [[joules_per_step(run) for run in side.measured] for side in (pair.before, pair.after)]
    before, after = ([joules for joules in each if joules is not None] for each in sets)
    if not before or not after:
        return answer.Table(title="", columns=(f"energy{of}",), rows=())
    was, now = statistics.fmean(before), statistics.fmean(after)
    row = ("a step, of the whole device", format_joules(was), format_joules(now), now / was - 1 if was else None)
    return answer.table_of(f"energy{of}", ("before", answer.TEXT), ("after", answer.TEXT), ("change", "+%"), rows=[row])


def short_names(compared: SideComparison) -> list[str]:
    """The labels of the pairs without what all have in common, each once: a plot cuts a long name, and a title is one
    line."""
    parts = [re.split(r"[:,] ", pair.label) for pair in compared.pairs]
    common = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set[str]()
    rests = [", ".join(part for part in label if part not in common) for label in parts]
    names = [rest or pair.label for rest, pair in zip(rests, compared.pairs, strict=True)]
    counts: Counter[str] = Counter()
    for place, name in enumerate(names):
        counts[name] += 1
        names[place] = f"{name} ({counts[name]})" if counts[name] > 1 else name
    return names


def _panel(compared: SideComparison) -> tuple[answer.Panel, ...]:
    """A bar for each pair: the change in percent, with its interval."""
    points: list[answer.Point] = []
    for name, change in zip(short_names(compared), compared.changes, strict=True):
        if change is not None:
            low, high = (
                ((change.interval.low - 1) * 100, (change.interval.high - 1) * 100) if change.interval else (None, None)
            )
            points.append(answer.Point(line="change", name=name, y=change.share * 100, low=low, high=high))
    frame = answer.Frame(
        guides=(answer.Guide(y=(0.0,)),), note="bars without an interval have fewer than five processes a side"
    )
    return (
        (answer.Panel(x_title="", y_title="change, %", points=tuple(points), kind="bars", frame=frame),)
        if points
        else ()
    )


def pictured(answers: Sequence[answer.Answer]) -> answer.Answer:
    """One answer whose picture holds the bars of all these comparisons, each named by its question."""
    if len(answers) == 1:
        return answers[0]
    points = [
        msgspec.structs.replace(point, line=one.question)
        for one in answers
        for panel in one.panels
        for point in panel.points
    ]
    panels = tuple(msgspec.structs.replace(panel, points=tuple(points)) for panel in answers[0].panels[:1])
    return msgspec.structs.replace(answers[0], panels=panels)


def comparison_as_json(compared: SideComparison, digests: DigestOf) -> Mapping[str, Any]:
    """Plain data: each pair with its change, buckets in seconds before and after, and the findings."""
    pairs: list[dict[str, Any]] = []
    for pair, change, stands in zip(compared.pairs, compared.changes, compared.stands, strict=True):
        before, after = digests(pair)
        captured = (before, after) if before is not None and after is not None else None
        pairs.append({
            "cell": pair.label, "across": pair.across, "change": msgspec.to_builtins(change), "stands": stands,
            "verdict": verdict(change, stands), "buckets": pair.buckets,
            "work": work_buckets(*captured, _device_steps(pair)) if captured else [],
            "modules": module_buckets(*captured) if captured else [],
            "parts": {
                name: msgspec.to_builtins(pair.change(name))
                for name in dict.fromkeys((*pair.before.parts, *pair.after.parts, STEP))
            },
            "memory_bytes": [peak_bytes(side.representative) for side in (pair.before, pair.after)],
            "flops": [model_flops(side.representative) for side in (pair.before, pair.after)],
            "runs": [[run.id for run in side.runs] for side in (pair.before, pair.after)],
        })  # fmt: skip
    return {
        "version": COMPARISON_VERSION,
        "before": compared.before.name,
        "after": compared.after.name,
        "value": compared.value,
        "pairs": pairs,
        "alone": compared.alone,
        "lost": compared.lost,
        "findings": msgspec.to_builtins(tuple(sides_findings(compared))),
    }
