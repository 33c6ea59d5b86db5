"""The ranks of a job as an answer: where each one's time goes, who waits for whom, and how fast the collectives are."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import polars as pl

from stepscope.core import answer
from stepscope.core.device_spec import find_device_spec
from stepscope.core.errors import InputError, name_shown
from stepscope.core.units import counted, format_count, format_rate, format_share, in_ms
from stepscope.traces.captures.details import each_step
from stepscope.traces.ranks import COMPUTATION, Excess, Job, Rank
from stepscope.traces.roofline import values_of

_ROWS = 8
"""The most rows of the tables that can be long."""
_APART_NS = 1_000_000
"""Ends of collectives that are further apart than this do not show that clocks are shared."""
_UNEVEN = 0.01
"""The least excess that is shown, as a share of a step."""


def answer_job(job: Job, findings: tuple[answer.Finding, ...], source: str) -> answer.Answer:
    """The answer of several ranks' captures."""
    return answer.Answer(
        study="trace",
        question=f"Where does the time of the ranks in {source} go?",
        device=", ".join(sorted({rank.device for rank in job.ranks if rank.device})),
        lead=tuple(_heading(job, source)),
        tables=tuple(table for table in _tables(job) if table.rows),
        panels=tuple(_panels(job)),
        findings=findings,
        checked=True,
    )


def _heading(job: Job, source: str) -> Iterator[answer.Line]:
    devices = ", ".join(sorted({rank.device for rank in job.ranks if rank.device}))
    of = f" of {job.size}" if job.size != len(job.ranks) else ""
    noun = "ranks" if len(job.ranks) > 1 or of else "rank"
    yield answer.Line(f"{source}: {len(job.ranks)}{of} {noun}{f', {devices}' if devices else ''}", "strong")
    meetings = job.matched.arrivals["collective"].n_unique()
    if meetings:
        how = "process group and sequence number" if job.matched.by_sequence else "kind, step and order"
        compared = [clock for clock in job.matched.clocks if clock.measured_ns is not None]
        ends = [abs(clock.measured_ns or 0) + (clock.residual_ns or 0) for clock in compared]
        clocks = ""
        # What ends so far apart says nothing of clocks.
        if ends and max(ends) <= _APART_NS and not any(clock.offset_ns for clock in compared):
            clocks = f"They end within {in_ms(max(ends))} of each other on all ranks, so their clocks count as one."
        yield answer.Line(f"{counted(meetings, 'collective')} of several ranks, matched by {how}. {clocks}")


def _tables(job: Job) -> Iterator[answer.Table]:
    yield _rank_table(job)
    if len(job.ranks) > 2:
        waits = job.waits.head(_ROWS).filter(pl.col("waiting_ns") > 0)
        who = pl.format("rank {} for rank {}", "rank", "late")
        a_step = each_step(waits, job.steps, "waiting_ns", "stalled_ns")
        heads = ("collectives", "d"), ("ms a step", "ms of ns"), ("stalled", "ms of ns")
        yield answer.table_of("who waits for whom", *heads, rows=waits.select(who, "waits", *a_step).rows())
    yield _collective_table(job)
    yield _uneven_table(job)


def _rank_table(job: Job) -> answer.Table:
    rows: list[tuple[answer.Cell, ...]] = []
    for rank in job.ranks:
        times = (rank.computation_ns, rank.communication_ns, rank.exposed_ns, rank.idle_ns)
        a_step = (time_ns / max(1, rank.steps) for time_ns in times)
        waits = job.in_a_step(rank.number) if rank.collectives.height else (None, None)
        rows.append((str(rank.number), rank.steps, *a_step, *waits, job.last_arrivals(rank.number)))
    return answer.table_of(
        "rank, ms a step", ("steps", "d"), ("computation", "ms of ns"), ("communication", "ms of ns"),
        ("exposed", "ms of ns"), ("idle", "ms of ns"), ("waiting", "ms of ns"), ("stalled", "ms of ns"),
        ("arrives last", "d"),
        rows=rows,
        notes=answer.as_lines(
            "Exposed is communication while the rank computes nothing. Waiting, of the median step, lasts from a "
            "rank's arrival at a collective to the last rank's, and is part of its communication; the rank is stalled "
            "where it computes nothing meanwhile.",
        ),
    )  # fmt: skip


def _collective_table(job: Job) -> answer.Table:
    devices = {rank.device for rank in job.ranks}
    spec = find_device_spec(devices.pop()) if len(devices) == 1 else None
    peak = spec.link_bytes_per_s if spec else None
    link = (("of the link", "%"),) if peak else ()
    transfer = (pl.col("transfer_ns") / pl.col("calls")).alias("transfer")
    shown = job.collectives.head(_ROWS)
    shares = [rate / peak if rate else None for rate in shown["bus_bytes_per_s"]] if peak else []
    share = [pl.Series("share", shares, dtype=pl.Float64)] if peak else []
    rows = shown.select(
        "kind", "bytes", "group_size", "calls", transfer, "bus_bytes_per_s", *share, "skew_ns", "largest_skew_ns"
    )
    left = job.collectives[_ROWS:]
    notes = [f"{counted(left.height, 'further size')} with {left['calls'].sum()} calls."] if left.height else []
    return answer.table_of(
        "collective", ("message", "B"), ("ranks", "d"), ("calls", "d"), ("transfer us", "us of ns"),
        ("bus bandwidth", "B/s"), *link, ("skew us", "us of ns"), ("largest skew us", "us of ns"),
        rows=rows.rows(),
        notes=answer.as_lines(
            "A transfer lasts from the last arrival to the last end; skew is from the first arrival to the last. The "
            "bus bandwidth is what each link carries, by the formulas of nccl-tests.",
            *((f"The link's peak is {format_rate(peak, 'B/s')} ({spec.source}).",) if peak and spec else ()),
            *notes,
        ),
    )  # fmt: skip


def _uneven_table(job: Job) -> answer.Table:
    least = _UNEVEN * job.step_ns * job.steps
    uneven = job.times.filter((pl.col("most_ns") - pl.col("mean_ns")) >= least).head(_ROWS)
    rows: list[tuple[answer.Cell, ...]] = [
        (
            _where(row),
            row["mean_ns"] / job.steps,
            row["most_ns"] / job.steps,
            str(row["rank"]),
            row["most_ns"] / row["mean_ns"] if row["mean_ns"] else None,
        )
        for row in uneven.iter_rows(named=True)
    ]
    if len(job.ranks) < 2:
        rows = []
    return answer.table_of(
        "uneven over ranks, ms a step",
        ("mean", "ms of ns"),
        ("most", "ms of ns"),
        "on rank",
        ("most / mean", ".2f"),
        rows=rows,
    )


def _where(row: dict[str, str | None]) -> str:
    """The name of a place: computation in a module, or idle time of a cause."""
    phase = f"{row['phase']}: " if row["phase"] else ""
    if row["what"] == COMPUTATION:
        return phase + {"": "the model itself", "?": "no module known"}.get(row["place"] or "", str(row["place"]))
    return f"{phase}idle, {row['place']}"


def _panels(job: Job) -> Iterator[answer.Panel]:
    """A bar for each rank: its computation, its exposed communication, and its idle time."""
    points: list[answer.Point] = []
    for rank in job.ranks:
        parts = {"computation": rank.computation_ns, "exposed communication": rank.exposed_ns, "idle": rank.idle_ns}
        name = name_shown(f"rank {rank.number}")
        points += [answer.Point(name=name, line=part, y=ns / max(1, rank.steps) * 1e-6) for part, ns in parts.items()]
    yield answer.Panel(x_title="", y_title="ms a step", kind="stack", points=tuple(points))


# A job's ranks as plain data, which `stepscope trace RANK0 RANK1 --json` prints.


def job_as_json(job: Job, findings: tuple[answer.Finding, ...]) -> dict[str, Any]:
    """The ranks, their collectives and who waits for whom. Times are in nanoseconds over the whole capture."""
    clocks = {clock.rank: clock for clock in job.matched.clocks}
    return {
        "ranks": [
            {
                "rank": rank.number,
                **values_of(rank, "source", "device", "steps", "kernels", "busy_ns", "union_ns", "idle_ns"),
                **values_of(rank, "computation_ns", "communication_ns"),
                "exposed_communication_ns": rank.exposed_ns,
                "waiting_ns": job.waiting_ns(rank.number),
                "stalled_ns": job.stalled_ns(rank.number),
                "waited_for_ns": job.waited_for_ns(rank.number),
                "last_arrivals": job.last_arrivals(rank.number),
                "unmatched_collectives": job.matched.unmatched[rank.number],
                "clock_offset_ns": clocks[rank.number].offset_ns,
                "clock_residual_ns": clocks[rank.number].residual_ns,
            }
            for rank in job.ranks
        ],
        "world_size": job.size,
        "collectives": job.collectives.drop("transfer_ns")
        .with_columns(pl.Series("transfer_ns", job.collectives["transfer_ns"] / job.collectives["calls"]))
        .to_dicts(),
        "matched_by": "sequence" if job.matched.by_sequence else "order",
        "waits": job.waits.to_dicts(),
        "uneven": job.times.to_dicts(),
        "findings": [msgspec.to_builtins(finding) for finding in findings],
    }


# Checks of a job's ranks: is one late, and do these captures belong together?


_WORTH_A_WORD = 0.01
_MOSTLY = 0.5
_NAMED = 3
"""The most ranks that a sentence names."""

JobCheck = Callable[[Job], answer.Finding | None]


JOB_CHECKS: list[JobCheck] = []
"""All checks, in the order in which findings of one severity stand."""


def _check(check: JobCheck) -> JobCheck:
    JOB_CHECKS.append(check)
    return check


def check_job(job: Job) -> tuple[answer.Finding, ...]:
    """All findings on this job, the most severe first."""
    findings = [*_doubts(job), *(finding for check in JOB_CHECKS if (finding := check(job)) is not None)]
    return tuple(sorted(findings, key=lambda finding: answer.SEVERITIES.index(finding.severity)))


def _doubts(job: Job) -> Iterator[answer.Finding]:
    """What is to be doubted of the ranks' captures: of each kind the gravest, with the ranks that have it."""
    by_kind: dict[str, list[tuple[answer.Finding, int]]] = {}
    for rank in job.ranks:
        for finding in rank.doubts:
            by_kind.setdefault(finding.kind, []).append((finding, rank.number))
    for doubts in by_kind.values():
        gravest, number = min(doubts, key=lambda one: answer.SEVERITIES.index(one[0].severity))
        others = [other for _, other in doubts if other != number]
        also = f" The like is said of {_ranks(others)}." if others else ""
        yield answer.Finding(
            kind=gravest.kind,
            severity=gravest.severity,
            sentence=f"Rank {number}: {gravest.sentence}{also}",
            remedy=gravest.remedy,
            evidence={"ranks": len(doubts), "rank": number, **gravest.evidence},
        )


@_check
def straggler(job: Job) -> answer.Finding | None:
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
    excesses, reason = job.excesses(late), ""
    if excesses:
        does = "It computes" if excesses[0].what == COMPUTATION else "Its device is idle"
        more = f"{in_ms(excesses[0].excess_ns / job.steps)} a step more than the others do"
        reason = f" {does} {more}, in {_place(excesses[0])}."
    return answer.warning(
        "straggler",
        f"Rank {late} arrives last at {format_count(last)} of {counted(meetings, 'collective')}, by up to "
        f"{in_ms(latest_ns)} in the median step, {format_share(latest_ns / job.step_ns)} of it; for "
        f"{in_ms(stalled_ns)} of that another rank does nothing but wait."
        f"{reason}",
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


def _place(excess: Excess) -> str:
    if excess.what == COMPUTATION:
        module = excess.place or "the model itself"
        return f"{excess.phase} of {module}" if excess.phase else module
    return f"{excess.phase}: {excess.place}" if excess.phase else str(excess.place)


@_check
def steps_differ(job: Job) -> answer.Finding | None:
    """A finding on captures of different steps, or of which one was cut short."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank in job.ranks:
        by_steps.setdefault(rank.step_numbers or tuple(range(rank.steps)), []).append(rank.number)
    if len(by_steps) == 1:
        return None
    counts = [
        f"{_ranks(numbers)} {'has' if len(numbers) == 1 else 'have'} {_steps(steps)}"
        for steps, numbers in by_steps.items()
    ]
    return answer.warning(
        "steps-differ",
        f"The captures are not of the same steps: {'; '.join(counts)}. Collectives are compared where both sides have "
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


@_check
def collectives_alone(job: Job) -> answer.Finding | None:
    """A finding on collectives that no other rank has: another job's capture, or one with lost events."""
    total = sum(rank.collectives.height for rank in job.ranks)
    alone = sum(job.matched.unmatched.values())
    if len(job.ranks) < 2 or not total or alone <= _WORTH_A_WORD * total:
        return None
    sentence = (
        f"{format_count(alone)} of {counted(total, 'collective')} have no counterpart on another rank that is here"
    )
    if alone == total:
        return answer.warning(
            "collectives-alone",
            f"{sentence}, so nothing says who waits for whom: are these captures of one job, and of the same steps?",
            {"alone": alone, "collectives": total},
            remedy="give captures of one job that were taken together",
        )
    return answer.note(
        "collectives-alone",
        f"{sentence}: their peers are not here, or the capture lost them. Waiting is counted at the others.",
        {"alone": alone, "collectives": total},
    )


@_check
def clocks_apart(job: Job) -> answer.Finding | None:
    """A finding on clocks that differ, or that nothing compares."""
    moved = [clock for clock in job.matched.clocks if clock.offset_ns]
    if moved:
        far = max(moved, key=lambda clock: abs(clock.offset_ns))
        return answer.note(
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
    return answer.warning(
        "clocks-unknown",
        f"The times of {_ranks(strangers)} do not overlap with those of rank {first.number}, and no collective that "
        "both have says how far their clocks are apart.",
        {"ranks": len(strangers)},
        remedy="capture the same steps on every rank",
    )


@_check
def ranks_absent(job: Job) -> answer.Finding | None:
    """A note where not all ranks of the job are here."""
    missing = job.size - len(job.ranks)
    if missing <= 0:
        return None
    return answer.note(
        "ranks-absent",
        f"{len(job.ranks)} of the job's {job.size} ranks are here: a rank is said to wait for the last of these, so "
        "that it may have waited longer, for a rank that is not here.",
        {"ranks": len(job.ranks), "of": job.size},
        remedy="give the captures of all ranks",
    )


# Two captures of a job side by side, rank by rank.


_TIMES: tuple[tuple[str, Callable[[Job, Rank], float]], ...] = (
    ("computation", lambda job, rank: rank.computation_ns / max(1, rank.steps)),
    ("communication", lambda job, rank: rank.communication_ns / max(1, rank.steps)),
    ("exposed", lambda job, rank: rank.exposed_ns / max(1, rank.steps)),
    ("idle", lambda job, rank: rank.idle_ns / max(1, rank.steps)),
    ("waiting", lambda job, rank: job.in_a_step(rank.number)[0]),
    ("stalled", lambda job, rank: job.in_a_step(rank.number)[1]),
)
"""What is compared, in nanoseconds a step."""


def _pairs(before: Job, after: Job) -> list[tuple[Rank, Rank]]:
    """The ranks that both have. Raises InputError where there are none."""
    earlier = {rank.number: rank for rank in before.ranks}
    pairs = [(earlier[rank.number], rank) for rank in after.ranks if rank.number in earlier]
    if not pairs:
        raise InputError("the two captures have no rank in common: nothing can be set side by side")
    return pairs


def answer_jobs(before: Job, after: Job, old: str, new: str) -> answer.Answer:
    """The answer that sets two captures of a job side by side."""
    pairs = _pairs(before, after)
    tables: list[answer.Table] = []
    for what, of in _TIMES:
        rows: list[tuple[answer.Cell, ...]] = []
        for early, late in pairs:
            then, now = of(before, early), of(after, late)
            rows.append((str(late.number), then, now, now - then, now / then if then else None))
        if any(then or now for _, then, now, *_ in rows):
            heads = ("before", "ms of ns"), ("after", "ms of ns"), ("change", "ms of ns"), ("after / before", ".2f")
            tables.append(answer.table_of(f"{what} by rank, ms a step", *heads, rows=rows))
    numbers = {rank.number for rank in (*before.ranks, *after.ranks)}
    alone = sorted(numbers - {rank.number for _, rank in pairs})
    if alone:
        missing = f"Ranks {', '.join(map(str, alone))} are in one of the two only."
        tables.append(answer.Table(title="", columns=(), rows=(), notes=answer.as_lines(missing)))
    return answer.Answer(
        study="trace",
        question=f"What changed from {old} to {new}, rank by rank?",
        device=", ".join(sorted({rank.device for rank in (*before.ranks, *after.ranks) if rank.device})),
        lead=(answer.Line(f"{new} ({len(after.ranks)} ranks) against {old} ({len(before.ranks)} ranks)", "strong"),),
        tables=tuple(tables),
    )


def jobs_as_json(before: Job, after: Job) -> dict[str, Any]:
    """The comparison as plain data: nanoseconds a step of each rank that both have."""
    return {
        "ranks": [
            {
                "rank": late.number,
                "before": {what: of(before, early) for what, of in _TIMES},
                "after": {what: of(after, late) for what, of in _TIMES},
            }
            for early, late in _pairs(before, after)
        ]
    }
