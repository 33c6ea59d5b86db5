"""Makes a TraceTable of what a reader found."""

import polars as pl

from stepscope.trace.launches import operators_as_work, with_launches
from stepscope.trace.table import (
    CALL_SCHEMA,
    LINK_SCHEMA,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    WORK_SCHEMA,
    Profiler,
    TraceTable,
    empty,
)


def assemble(
    *,
    profiler: Profiler,
    work: pl.DataFrame,
    calls: pl.DataFrame,
    ranges: pl.DataFrame,
    operators: pl.DataFrame | None = None,
    links: pl.DataFrame | None = None,
    devices: dict[int, str] | None = None,
    other: dict[str, int] | None = None,
    recorder: str | None = None,
    lost: int = 0,
) -> TraceTable:
    """Check the schemas and join the launches; in a trace without device work its operators stand in."""
    operators = empty(OPERATOR_SCHEMA) if operators is None else operators
    links = empty(LINK_SCHEMA) if links is None else links
    for frame, schema in (
        (work, WORK_SCHEMA),
        (calls, CALL_SCHEMA),
        (ranges, RANGE_SCHEMA),
        (operators, OPERATOR_SCHEMA),
        (links, LINK_SCHEMA),
    ):
        assert frame.schema == schema, f"{frame.schema} is not {schema}"
    work = with_launches(work, calls) if work.height else operators_as_work(operators)
    return TraceTable(
        profiler=profiler,
        work=work,
        calls=calls,
        ranges=ranges,
        operators=operators,
        links=links,
        devices=devices or {},
        other=other or {},
        recorder=recorder,
        lost=lost,
    )
