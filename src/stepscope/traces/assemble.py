"""Makes a TraceTable of a reader's frames."""

from pathlib import Path

import polars as pl

from stepscope.core.errors import InputError
from stepscope.traces.counters import COUNTER_SCHEMA
from stepscope.traces.impossible import at_their_launch, cut_at_the_next, without_impossible_times
from stepscope.traces.launches import operators_as_work, with_launches
from stepscope.traces.table import (
    CALL_SCHEMA,
    CALLS,
    COLLECTIVE_SCHEMA,
    COPIES,
    DETAIL_SCHEMA,
    KIND,
    LINK_SCHEMA,
    OPERATOR_SCHEMA,
    OPERATORS,
    RANGE_SCHEMA,
    RANGES,
    WORK_SCHEMA,
    Damage,
    Profiler,
    TraceTable,
    empty,
    with_details,
)

LARGEST_NS = 2**62
"""Since 1970 the clock says less until 2116. Within it sums and differences of times fit their 64 bits."""


def assemble(
    *,
    path: Path,
    profiler: Profiler,
    work: pl.DataFrame,
    calls: pl.DataFrame,
    ranges: pl.DataFrame,
    operators: pl.DataFrame | None = None,
    links: pl.DataFrame | None = None,
    arrows: pl.DataFrame | None = None,
    devices: dict[int, str] | None = None,
    other: dict[str, int] | None = None,
    recorder: str | None = None,
    lost: int = 0,
    threads: dict[tuple[int, int], str] | None = None,
    collectives: pl.DataFrame | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    damage: Damage | None = None,
    counters: pl.DataFrame | None = None,
    remarks: tuple[str, ...] = (),
    traced: frozenset[str] = frozenset(),
) -> TraceTable:
    """Check the schemas, join the launches, put right times that cannot be; without device work operators stand in.

    `arrows` lead from calls to their work, as LINK_SCHEMA, where the rows themselves do not say it.

    Raises InputError, naming `path`, where no row has a time, or durations add up to more than a clock can say.
    """
    operators = empty(OPERATOR_SCHEMA) if operators is None else operators
    links = empty(LINK_SCHEMA) if links is None else links
    collectives = empty(COLLECTIVE_SCHEMA) if collectives is None else collectives
    counters = empty(COUNTER_SCHEMA) if counters is None else counters
    damage = damage or Damage()
    told = {name: dtype for name, dtype in DETAIL_SCHEMA.items() if name in work.columns}
    for frame, schema in (
        (work, pl.Schema({**WORK_SCHEMA, **told})),
        (calls, CALL_SCHEMA),
        (ranges, RANGE_SCHEMA),
        (operators, OPERATOR_SCHEMA),
        (links, LINK_SCHEMA),
        (collectives, COLLECTIVE_SCHEMA),
        (counters, COUNTER_SCHEMA),
    ):
        assert frame.schema == schema, f"{frame.schema} is not {schema}"
    if (work.height or operators.height) and not any(frame["start_ns"].count() for frame in (work, calls, operators)):
        raise InputError(f"{path}: none of its events has a time that can be read: this capture is damaged")
    work, hosts = without_impossible_times(
        work,
        {CALLS: calls, OPERATORS: operators, RANGES: ranges, "arrows": links, "collectives": collectives}
        | {"counters": counters},
        damage,
    )
    calls, operators, ranges, links, collectives, counters = hosts.values()
    for frame in (work, calls, ranges, operators):
        if frame["duration_ns"].cast(pl.Float64).sum() >= LARGEST_NS:
            raise InputError(f"{path}: durations add up to more than any clock can say: this capture is damaged")
    copies = work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
    if not copies.is_sorted():
        work = work[copies.arg_sort()]  # stable: the order is the file's but for that
    if work.height:
        work, damage = cut_at_the_next(with_launches(work, calls, arrows=arrows, operators=operators), calls, damage)
        work = at_their_launch(work, damage)
    else:
        work = operators_as_work(operators)
    return TraceTable(
        profiler=profiler,
        work=with_details(work),
        calls=calls,
        ranges=ranges,
        operators=operators,
        links=links,
        devices=devices or {},
        other=other or {},
        recorder=recorder,
        lost=lost,
        threads=threads or {},
        collectives=collectives,
        rank=rank,
        ranks=ranks,
        damage=damage,
        counters=counters,
        remarks=remarks,
        traced=traced,
    )
