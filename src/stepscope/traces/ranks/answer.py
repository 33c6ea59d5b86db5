"""The ranks of a job as an answer: where each one's time goes, who waits for whom, and how fast the collectives are."""

from collections.abc import Iterator

import polars as pl

from stepscope.core.answer import Answer, Cell, Line, Panel, Point, Table, as_lines, table_of
from stepscope.core.device_spec import find_device_spec
from stepscope.core.finding import Finding
from stepscope.core.shown_text import name_shown
from stepscope.core.units import counted, format_rate, in_ms
from stepscope.traces.ranks.job import Job
from stepscope.traces.ranks.rank import COMPUTATION

_ROWS = 8
"""The most rows of the tables that can be long."""
_APART_NS = 1_000_000
"""Ends of collectives that are further apart than this do not show that clocks are shared."""
_UNEVEN = 0.01
"""The least excess that is shown, as a share of a step."""


def answer_job(job: Job, findings: tuple[Finding, ...], source: str) -> Answer:
    """The answer of several ranks' captures."""
    return Answer(
        study="trace",
        question=f"Where does the time of the ranks in {source} go?",
        device=", ".join(sorted({rank.device for rank in job.ranks if rank.device})),
        lead=tuple(_heading(job, source)),
        tables=tuple(table for table in _tables(job) if table.rows),
        panels=tuple(_panels(job)),
        findings=findings,
        checked=True,
    )


def _heading(job: Job, source: str) -> Iterator[Line]:
    devices = ", ".join(sorted({rank.device for rank in job.ranks if rank.device}))
    of = f" of {job.size}" if job.size != len(job.ranks) else ""
    noun = "ranks" if len(job.ranks) > 1 or of else "rank"
    yield Line(f"{source}: {len(job.ranks)}{of} {noun}{f', {devices}' if devices else ''}", "strong")
    meetings = job.matched.arrivals["collective"].n_unique()
    if meetings:
        how = "process group and sequence number" if job.matched.by_sequence else "kind, step and order"
        yield Line(f"{counted(meetings, 'collective')} of several ranks, matched by {how}. {_clocks(job)}")


def _clocks(job: Job) -> str:
    compared = [clock for clock in job.matched.clocks if clock.measured_ns is not None]
    if not compared or any(clock.offset_ns for clock in compared):
        return ""
    farthest = max(abs(clock.measured_ns or 0) + (clock.residual_ns or 0) for clock in compared)
    if farthest > _APART_NS:  # what ends so far apart says nothing of clocks
        return ""
    return f"They end within {in_ms(farthest)} of each other on all ranks, so their clocks count as one."


def _tables(job: Job) -> Iterator[Table]:
    yield _rank_table(job)
    if len(job.ranks) > 2:
        yield _wait_table(job)
    yield _collective_table(job)
    yield _uneven_table(job)


def _rank_table(job: Job) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rank in job.ranks:
        times = (rank.computation_ns, rank.communication_ns, rank.exposed_ns, rank.idle_ns)
        a_step = (time_ns / max(1, rank.steps) for time_ns in times)
        waits = job.in_a_step(rank.number) if rank.collectives.height else (None, None)
        rows.append((str(rank.number), rank.steps, *a_step, *waits, job.last_arrivals(rank.number)))
    return table_of(
        "rank, ms a step", ("steps", "d"), ("computation", "ms of ns"), ("communication", "ms of ns"),
        ("exposed", "ms of ns"), ("idle", "ms of ns"), ("waiting", "ms of ns"), ("stalled", "ms of ns"),
        ("arrives last", "d"),
        rows=rows,
        notes=as_lines(
            "Exposed is communication while the rank computes nothing. Waiting, of the median step, lasts from a "
            "rank's arrival at a collective to the last rank's, and is part of its communication; the rank is stalled "
            "where it computes nothing meanwhile.",
        ),
    )  # fmt: skip


def _wait_table(job: Job) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (f"rank {row['rank']} for rank {row['late']}", row["waits"], row["waiting_ns"] / job.steps,
         row["stalled_ns"] / job.steps)
        for row in job.waits.head(_ROWS).iter_rows(named=True)
        if row["waiting_ns"]
    ]  # fmt: skip
    return table_of(
        "who waits for whom", ("collectives", "d"), ("ms a step", "ms of ns"), ("stalled", "ms of ns"), rows=rows
    )


def _collective_table(job: Job) -> Table:
    devices = {rank.device for rank in job.ranks}
    spec = find_device_spec(devices.pop()) if len(devices) == 1 else None
    peak = spec.link_bytes_per_s if spec else None
    link = (("of the link", "%"),) if peak else ()
    rows: list[tuple[Cell, ...]] = [
        (row["kind"], row["bytes"], row["group_size"], row["calls"], row["transfer_ns"] / row["calls"],
         row["bus_bytes_per_s"],
         *((row["bus_bytes_per_s"] / peak if row["bus_bytes_per_s"] else None,) if peak else ()),
         row["skew_ns"], row["largest_skew_ns"])
        for row in job.collectives.head(_ROWS).iter_rows(named=True)
    ]  # fmt: skip
    left = job.collectives[_ROWS:]
    notes = [f"{counted(left.height, 'further size')} with {left['calls'].sum()} calls."] if left.height else []
    return table_of(
        "collective", ("message", "B"), ("ranks", "d"), ("calls", "d"), ("transfer us", "us of ns"),
        ("bus bandwidth", "B/s"), *link, ("skew us", "us of ns"), ("largest skew us", "us of ns"),
        rows=rows,
        notes=as_lines(
            "A transfer lasts from the last arrival to the last end; skew is from the first arrival to the last. The "
            "bus bandwidth is what each link carries, by the formulas of nccl-tests.",
            *((f"The link's peak is {format_rate(peak, 'B/s')} ({spec.source}).",) if peak and spec else ()),
            *notes,
        ),
    )  # fmt: skip


def _uneven_table(job: Job) -> Table:
    least = _UNEVEN * job.step_ns * job.steps
    uneven = job.times.filter((pl.col("most_ns") - pl.col("mean_ns")) >= least).head(_ROWS)
    rows: list[tuple[Cell, ...]] = [
        (_where(row), row["mean_ns"] / job.steps, row["most_ns"] / job.steps, str(row["rank"]),
         row["most_ns"] / row["mean_ns"] if row["mean_ns"] else None)
        for row in uneven.iter_rows(named=True)
    ]  # fmt: skip
    if len(job.ranks) < 2:
        rows = []
    return table_of(
        "uneven over ranks, ms a step", ("mean", "ms of ns"), ("most", "ms of ns"), "on rank", ("most / mean", ".2f"),
        rows=rows,
    )  # fmt: skip


def _where(row: dict[str, str | None]) -> str:
    """The name of a place: computation in a module, or idle time of a cause."""
    phase = f"{row['phase']}: " if row["phase"] else ""
    if row["what"] == COMPUTATION:
        return phase + {"": "the model itself", "?": "no module known"}.get(row["place"] or "", str(row["place"]))
    return f"{phase}idle, {row['place']}"


def _panels(job: Job) -> Iterator[Panel]:
    """A bar for each rank: its computation, its exposed communication, and its idle time."""
    parts = (
        ("computation", lambda rank: rank.computation_ns),
        ("exposed communication", lambda rank: rank.exposed_ns),
        ("idle", lambda rank: rank.idle_ns),
    )
    points = tuple(
        Point(name=name_shown(f"rank {rank.number}"), line=part, y=of(rank) / max(1, rank.steps) * 1e-6)
        for rank in job.ranks
        for part, of in parts
    )
    yield Panel(x_title="", y_title="ms a step", kind="stack", points=points)
