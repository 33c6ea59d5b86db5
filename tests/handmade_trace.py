"""Traces written down by hand, a row a tuple, for tests that compute the answer beside them."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.table import (
    CALL_SCHEMA,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    WORK_SCHEMA,
    TraceTable,
    operators_as_work,
    with_details,
    with_launches,
)

PROCESS, MAIN, AUTOGRAD = 1, 11, 12

GEMM = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def work(
    start_ns: int,
    end_ns: int,
    *,
    launch: int | None = None,
    name: str = GEMM,
    stream: int = 7,
    device: int = 0,
    thread: int = MAIN,
    call: str = "cudaLaunchKernel",
    call_ns: int = 1_000,
    kind: str = "kernel",
    process: int = PROCESS,
) -> dict[str, Any]:
    """A row of device work, with the moment its launch was called (None: no launch was recorded)."""
    return locals()


def traced(
    rows: Sequence[dict[str, Any]],
    *,
    ranges: Sequence[tuple[str, int, int] | tuple[str, int, int, int]] = (),
    calls: Sequence[tuple[str, int, int] | tuple[str, int, int, int]] = (),
    operators: Sequence[tuple[str, int, int]] = (),
    devices: dict[int, str] | None = None,
) -> Attribution:
    """The attribution of these rows; ranges, calls and operators are (name, start_ns, end_ns), then a thread."""
    launches = [
        (row["launch"], row["call_ns"], row["process"], row["thread"], row["call"], number, None)
        for number, row in enumerate(rows, 1)
        if row["launch"] is not None
    ]
    others = [
        (start, end - start, PROCESS, *(thread or [MAIN]), name, None, None) for name, start, end, *thread in calls
    ]
    table_calls = pl.DataFrame([*launches, *others], schema=CALL_SCHEMA, orient="row")
    recorded = pl.DataFrame(
        [
            (
                row["start_ns"], row["end_ns"] - row["start_ns"], row["device"], row["stream"], row["kind"],
                row["name"], row["process"], number, None, None,
            )
            for number, row in enumerate(rows, 1)
        ],
        schema=WORK_SCHEMA,
        orient="row",
    )  # fmt: skip
    table = TraceTable(
        profiler="Kineto",
        work=with_details(with_launches(recorded, table_calls)),
        calls=table_calls,
        ranges=pl.DataFrame(
            [(start, end - start, PROCESS, *(thread or [MAIN]), name, True) for name, start, end, *thread in ranges],
            schema=RANGE_SCHEMA,
            orient="row",
        ),
        operators=pl.DataFrame(
            [(start, end - start, PROCESS, MAIN, name, *[None] * 6) for name, start, end in operators],
            schema=OPERATOR_SCHEMA,
            orient="row",
        ),
        devices=devices or {},
    )
    return attribute(table)


def of_a_cpu(*operators: tuple[Any, ...]) -> Attribution:
    """A trace of a CPU: operators alone, each (start, end, process, thread, name); the work is theirs."""
    rows = [(*operator, *[None] * (len(OPERATOR_SCHEMA) - len(operator))) for operator in operators]
    frame = pl.DataFrame(rows, schema=OPERATOR_SCHEMA, orient="row")
    return attribute(
        TraceTable(
            profiler="Kineto",
            work=with_details(operators_as_work(frame)),
            calls=CALL_SCHEMA.to_frame(),
            ranges=RANGE_SCHEMA.to_frame(),
            operators=frame,
        )
    )
