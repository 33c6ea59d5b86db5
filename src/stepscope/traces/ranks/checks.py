"""Checks of a job's ranks: is one late, and do these captures belong together?"""

from collections.abc import Callable, Iterator

import polars as pl

from stepscope.core.finding import SEVERITIES, Finding, note, warning
from stepscope.core.units import counted, format_count, format_share, in_ms
from stepscope.traces.ranks.job import Excess, Job
from stepscope.traces.ranks.rank import COMPUTATION

_WORTH_A_WORD = 0.01
_MOSTLY = 0.5
_NAMED = 3
"""The most ranks that a sentence names."""

JobCheck = Callable[[Job], Finding | None]


def check_job(job: Job) -> tuple[Finding, ...]:
    """All findings on this job, the most severe first."""
    found = [*_doubts(job), *(finding for check in JOB_CHECKS if (finding := check(job)) is not None)]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))


def _doubts(job: Job) -> Iterator[Finding]:
    """What is to be doubted of the ranks' captures: of each kind the gravest, with the ranks that have it."""
    by_kind: dict[str, list[tuple[Finding, int]]] = {}
    for rank in job.ranks:
        for finding in rank.doubts:
            by_kind.setdefault(finding.kind, []).append((finding, rank.number))
    for found in by_kind.values():
        gravest, number = min(found, key=lambda one: SEVERITIES.index(one[0].severity))
        others = [other for _, other in found if other != number]
        also = f" The like is said of {_ranks(others)}." if others else ""
        yield Finding(
            kind=gravest.kind,
            severity=gravest.severity,
            sentence=f"Rank {number}: {gravest.sentence}{also}",
            remedy=gravest.remedy,
            evidence={"ranks": len(found), "rank": number, **gravest.evidence},
        )


def straggler(job: Job) -> Finding | None:
    """A finding on a rank that comes last to most collectives, and so late that it costs the others time."""
    counts = job.lateness["late"].value_counts(sort=True)
    if len(job.ranks) < 2 or not counts.height:
        return None
    late, steps = counts.row(0)
    latest = job.lateness.filter(pl.col("late") == late)["latest_ns"].median()
    latest_ns = latest if isinstance(latest, float) else 0.0
    meetings = job.matched.arrivals["collective"].n_unique()
    last = job.last_arrivals(late)
    if latest_ns < _WORTH_A_WORD * job.step_ns or steps <= _MOSTLY * job.lateness.height or last < _MOSTLY * meetings:
        return None
    stalled_ns = max(job.in_a_step(rank.number)[1] for rank in job.ranks if rank.number != late)
    excesses = job.excesses(late)
    return warning(
        "straggler",
        f"Rank {late} arrives last at {format_count(last)} of {counted(meetings, 'collective')}, by up to "
        f"{in_ms(latest_ns)} in the median step, {format_share(latest_ns / job.step_ns)} of it; for "
        f"{in_ms(stalled_ns)} of that another rank does nothing but wait."
        f"{_reason(excesses[0], job) if excesses else ''}",
        {
            "rank": late,
            "latest_ns": latest_ns,
            "stalled_ns_a_step": stalled_ns,
            "waited_for_ns": job.waited_for_ns(late),
            "last_arrivals": last,
            "collectives": meetings,
            "excess_ns_a_step": excesses[0].excess_ns / job.steps if excesses else 0.0,
            "excess_in": _place(excesses[0]) if excesses else "",
        },
        remedy="look at that rank alone (--rank), at what its modules compute and what its device waits for; uneven "
        "batches, a slower GPU or host, and work that one rank does alone are the usual reasons",
    )


def _reason(excess: Excess, job: Job) -> str:
    more = f"{in_ms(excess.excess_ns / job.steps)} a step more than the others do"
    if excess.what == COMPUTATION:
        return f" It computes {more}, in {_place(excess)}."
    return f" Its device is idle {more}, in {_place(excess)}."


def _place(excess: Excess) -> str:
    if excess.what == COMPUTATION:
        module = excess.place or "the model itself"
        return f"{excess.phase} of {module}" if excess.phase else module
    return f"{excess.phase}: {excess.place}" if excess.phase else str(excess.place)


def ranks_absent(job: Job) -> Finding | None:
    """A note where not all ranks of the job are here."""
    missing = job.size - len(job.ranks)
    if missing <= 0:
        return None
    return note(
        "ranks-absent",
        f"{len(job.ranks)} of the job's {job.size} ranks are here: a rank is said to wait for the last of these, so "
        "that it may have waited longer, for a rank that is not here.",
        {"ranks": len(job.ranks), "of": job.size},
        remedy="give the captures of all ranks",
    )


def steps_differ(job: Job) -> Finding | None:
    """A finding on captures of different steps, or of which one was cut short."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank in job.ranks:
        by_steps.setdefault(rank.step_numbers or tuple(range(rank.steps)), []).append(rank.number)
    if len(by_steps) == 1:
        return None
    said = [f"{_ranks(numbers)} {'has' if len(numbers) == 1 else 'have'} {_steps(steps)}"
            for steps, numbers in by_steps.items()]  # fmt: skip
    return warning(
        "steps-differ",
        f"The captures are not of the same steps: {'; '.join(said)}. Collectives are compared where both sides have "
        "them; figures a step are of each rank's own steps.",
        {"kinds": len(by_steps)},
        remedy="capture the same steps on every rank, and let each capture end before the process does",
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NAMED]))
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}{', ...' if len(numbers) > _NAMED else ''}"


def _steps(steps: tuple[int, ...]) -> str:
    if not steps:
        return "none"
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def collectives_alone(job: Job) -> Finding | None:
    """A finding on collectives that no other rank has: another job's capture, or one with lost events."""
    total = sum(rank.collectives.height for rank in job.ranks)
    alone = sum(job.matched.unmatched.values())
    if len(job.ranks) < 2 or not total or alone <= _WORTH_A_WORD * total:
        return None
    sentence = (
        f"{format_count(alone)} of {counted(total, 'collective')} have no counterpart on another rank that is here"
    )
    if alone == total:
        return warning(
            "collectives-alone",
            f"{sentence}, so nothing says who waits for whom: are these captures of one job, and of the same steps?",
            {"alone": alone, "collectives": total},
            remedy="give captures of one job that were taken together",
        )
    return note(
        "collectives-alone",
        f"{sentence}: their peers are not here, or the capture lost them. Waiting is counted at the others.",
        {"alone": alone, "collectives": total},
    )


def clocks_apart(job: Job) -> Finding | None:
    """A finding on clocks that differ, or that nothing compares."""
    moved = [clock for clock in job.matched.clocks if clock.offset_ns]
    if moved:
        far = max(moved, key=lambda clock: abs(clock.offset_ns))
        return note(
            "clocks-moved",
            f"The clocks of {counted(len(moved), 'rank')} differ from that of rank {job.ranks[0].number}, by up to "
            f"{in_ms(abs(far.offset_ns))}. They are set by the ends of {counted(far.compared, 'collective')}, which "
            f"then agree within {in_ms(far.residual_ns or 0)} in the median.",
            {"moved": len(moved), "offset_ns": far.offset_ns, "residual_ns": far.residual_ns or 0},
        )
    first, *others = job.ranks
    unknown = [clock.rank for clock in job.matched.clocks if clock.measured_ns is None and clock.rank != first.number]
    strangers = [
        rank.number
        for rank in others
        if rank.number in unknown and (rank.start_ns > first.end_ns or rank.end_ns < first.start_ns)
    ]
    if not strangers:
        return None
    return warning(
        "clocks-unknown",
        f"The times of {_ranks(strangers)} do not overlap with those of rank {first.number}, and no collective that "
        "both have says how far their clocks are apart.",
        {"ranks": len(strangers)},
        remedy="capture the same steps on every rank",
    )


JOB_CHECKS: tuple[JobCheck, ...] = (straggler, steps_differ, collectives_alone, clocks_apart, ranks_absent)
