"""Two captures of a job side by side, rank by rank."""

from collections.abc import Callable, Iterator
from typing import Any

from stepscope.core.answer import Answer, Cell, Line, Table, as_lines, table_of
from stepscope.core.errors import InputError
from stepscope.traces.ranks.job import Job
from stepscope.traces.ranks.rank import Rank

_TIMES: tuple[tuple[str, Callable[[Job, Rank], float]], ...] = (
    ("computation", lambda job, rank: rank.computation_ns / max(1, rank.steps)),
    ("communication", lambda job, rank: rank.communication_ns / max(1, rank.steps)),
    ("exposed", lambda job, rank: rank.exposed_ns / max(1, rank.steps)),
    ("idle", lambda job, rank: rank.idle_ns / max(1, rank.steps)),
    ("waiting", lambda job, rank: job.in_a_step(rank.number)[0]),
    ("stalled", lambda job, rank: job.in_a_step(rank.number)[1]),
)
"""What is compared, in nanoseconds a step."""


def answer_jobs(before: Job, after: Job, old: str, new: str) -> Answer:
    """The answer that sets two captures of a job side by side."""
    return Answer(
        study="trace",
        question=f"What changed from {old} to {new}, rank by rank?",
        device=", ".join(sorted({rank.device for rank in (*before.ranks, *after.ranks) if rank.device})),
        lead=(Line(f"{new} ({len(after.ranks)} ranks) against {old} ({len(before.ranks)} ranks)", "strong"),),
        tables=tuple(_tables(before, after)),
    )


def _pairs(before: Job, after: Job) -> list[tuple[Rank, Rank]]:
    """The ranks that both have. Raises InputError where there are none."""
    earlier = {rank.number: rank for rank in before.ranks}
    found = [(earlier[rank.number], rank) for rank in after.ranks if rank.number in earlier]
    if not found:
        raise InputError("the two captures have no rank in common: nothing can be set side by side")
    return found


def _tables(before: Job, after: Job) -> Iterator[Table]:
    pairs = _pairs(before, after)
    numbers = {rank.number for rank in (*before.ranks, *after.ranks)}
    alone = sorted(numbers - {rank.number for _, rank in pairs})
    missing = f"Ranks {', '.join(map(str, alone))} are in one of the two only." if alone else ""
    for what, of in _TIMES:
        rows: list[tuple[Cell, ...]] = []
        for early, late in pairs:
            then, now = of(before, early), of(after, late)
            rows.append((str(late.number), then, now, now - then, now / then if then else None))
        if any(then or now for _, then, now, *_ in rows):
            yield table_of(
                f"{what} by rank, ms a step", ("before", "ms of ns"), ("after", "ms of ns"), ("change", "ms of ns"),
                ("after / before", ".2f"), rows=rows,
            )  # fmt: skip
    if missing:
        yield Table(title="", columns=(), rows=(), notes=as_lines(missing))


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
