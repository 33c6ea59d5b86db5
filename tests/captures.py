"""Small captures made by hand: a plausible training step, written as Kineto's JSON and as nsys's tables.

A `Capture` lists what happened, in nanoseconds; the writers spell it as the profilers do.
"""

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.traces.table import CALL_SCHEMA, OPERATOR_SCHEMA, RANGE_SCHEMA, WORK_SCHEMA, TraceTable, assemble

Row = dict[str, Any]

PROCESS, MAIN, AUTOGRAD = 4242, 4242, 4300
GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda>(int)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<PointwiseOpScalarListFunctor<float> >()"


@dataclass
class Capture:
    """What a profiler saw. A row of `launched` is device work; one of `calls` a call on the host."""

    launched: list[Row] = field(default_factory=list)
    calls: list[Row] = field(default_factory=list)
    ranges: list[Row] = field(default_factory=list)
    operators: list[Row] = field(default_factory=list)
    links: list[Row] = field(default_factory=list)

    def range(self, name: str, start: int, end: int, *, thread: int = MAIN, process: int = PROCESS) -> None:
        """A named range of one thread."""
        self.ranges.append({"name": name, "start": start, "end": end, "thread": thread, "process": process})

    def operator(
        self,
        name: str,
        start: int,
        end: int,
        *,
        thread: int = MAIN,
        process: int = PROCESS,
        sequence: int | None = None,
        forward_thread: int | None = None,
    ) -> None:
        """A framework operator."""
        row = {"name": name, "start": start, "end": end, "thread": thread, "process": process}
        self.operators.append(row | {"sequence": sequence, "forward_thread": forward_thread})

    def kernel(
        self,
        at: int,
        duration: int,
        *,
        name: str = GEMM,
        thread: int = MAIN,
        process: int = PROCESS,
        delay: int = 1000,
        call: str | None = "cudaLaunchKernel",
        correlation: int | None = None,
        kind: str = "kernel",
        device: int = 0,
    ) -> None:
        """A kernel launched at that moment, which begins `delay` later; `call` None: no launch was recorded."""
        correlation = len(self.launched) + 1 if correlation is None else correlation
        row = {"name": name, "start": at + delay, "end": at + delay + duration, "process": process}
        self.launched.append(row | {"correlation": correlation, "kind": kind, "device": device, "stream": 7})
        if call:
            row = {"name": call, "start": at, "end": at + 5, "thread": thread, "process": process}
            self.calls.append(row | {"correlation": correlation})

    def busy_ns(self) -> int:
        """The sum of all durations on the device."""
        return sum(row["end"] - row["start"] for row in self.launched)


def training_steps(steps: int = 2, layers: int = 2) -> Capture:
    """Steps of a small model: backward is launched from autograd's thread, every kernel runs well after its launch."""
    made = Capture()
    now, sequence = 1_000_000, 0
    for step in range(steps):
        begin, forward_numbers = now, []
        forward = now = now + 100
        for layer in range(layers):
            start = now
            for part in ("attention", "mlp"):
                inner = now
                made.operator("aten::linear", now + 10, now + 90, sequence=sequence)
                made.operator("aten::addmm", now + 20, now + 80, sequence=sequence)
                made.kernel(now + 30, 400)
                made.operator("aten::exp", now + 100, now + 150, sequence=sequence + 1)
                made.kernel(now + 120, 50, name=ELEMENTWISE)
                forward_numbers += [(sequence, "Addmm", now + 20), (sequence + 1, "Exp", now + 100)]
                sequence += 2
                now += 200
                made.range(f"layers.{layer}.{part}", inner, now - 20)
            made.range(f"layers.{layer}", start, now - 10)
        made.range("forward", forward, now)
        backward = now = now + 10
        for number, name, forward_ns in reversed(forward_numbers):
            tie = {"thread": AUTOGRAD, "sequence": number, "forward_thread": 1}
            made.operator(f"autograd::engine::evaluate_function: {name}Backward0", now + 5, now + 95, **tie)
            made.operator(f"{name}Backward0", now + 10, now + 90, **tie)
            made.operator("aten::mm", now + 20, now + 80, thread=AUTOGRAD)
            made.kernel(now + 30, 300, thread=AUTOGRAD, name=GEMM if name == "Addmm" else ELEMENTWISE)
            made.links.append({"id": number, "from": forward_ns, "to": now + 10})
            now += 100
        made.range("backward", backward, now)
        now += 10
        made.range("optimizer", now, now + 100)
        made.operator("aten::_foreach_add_", now + 20, now + 80)
        made.kernel(now + 40, 70, name=FOREACH, delay=8000)
        now += 110
        made.range(f"ProfilerStep#{step}", begin, now)
        made.kernel(now + 10, 20, name="Memcpy HtoD (Pageable -> Device)", kind="memcpy", call="cudaMemcpyAsync")
        now += 100
    return made


def microseconds(time_ns: int) -> float | int:
    """As Kineto writes times; exact for clocks that count from the machine's start."""
    return time_ns / 1000


def kineto_events(capture: Capture) -> list[Row]:
    """The capture as Kineto's events, new spelling."""
    events: list[Row] = [
        {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 0.0, "args": {"name": "python"}}
    ]
    events += [
        _complete("cpu_op", row, row["process"], row["thread"], {"External id": 1, **_operator_arguments(row)})
        for row in capture.operators
    ]
    events += [_complete("user_annotation", row, row["process"], row["thread"], {}) for row in capture.ranges]
    events += [
        _complete("cuda_runtime", row, row["process"], row["thread"], {"correlation": row["correlation"]})
        for row in capture.calls
    ]
    for row in capture.launched:
        category = row["kind"] if row["kind"] == "kernel" else f"gpu_{row['kind']}"
        arguments = {"device": row["device"], "stream": row["stream"], "correlation": row["correlation"]}
        events.append(_complete(category, row, row["device"], row["stream"], arguments))
    for link in capture.links:
        shared = {"cat": "fwdbwd", "name": "fwdbwd", "id": link["id"], "pid": PROCESS}
        events.append({"ph": "s", **shared, "tid": MAIN, "ts": microseconds(link["from"])})
        events.append({"ph": "f", "bp": "e", **shared, "tid": AUTOGRAD, "ts": microseconds(link["to"])})
    return events


def _complete(category: str, row: Row, process: int, thread: int, arguments: Row) -> Row:
    times = {"ts": microseconds(row["start"]), "dur": microseconds(row["end"] - row["start"])}
    return {"ph": "X", "cat": category, "name": row["name"], "pid": process, "tid": thread, **times, "args": arguments}


def _operator_arguments(row: Row) -> Row:
    said = {"Sequence number": row["sequence"], "Fwd thread id": row["forward_thread"]}
    given = {name: value for name, value in said.items() if value is not None}
    return {**given, "Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}


def kineto_trace(capture: Capture) -> Row:
    """The whole trace, as an object to dump."""
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "displayTimeUnit": "ms",
        "traceEvents": kineto_events(capture),
        "traceName": "trace.json",
    }


def write_kineto(capture: Capture, path: Path) -> Path:
    """Write it, gzip-compressed where the name ends so."""
    text = json.dumps(kineto_trace(capture), indent=1).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


STRINGS = "StringIds"
KERNELS, COPIES, FILLS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
GRAPHS, CALLS, RANGES = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
GPUS = "TARGET_INFO_GPU"

Tables = dict[str, list[Row]]


def global_pid(process: int) -> int:
    """nsys's number of a process: its lowest 24 bits are free for the thread."""
    return (1 << 48) + (process << 24)


def global_tid(process: int, thread: int) -> int:
    """nsys's number of a thread."""
    return global_pid(process) + thread


class Strings:
    """Texts by their ids."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids) + 1)

    def rows(self) -> list[Row]:
        return [{"id": number, "value": text} for text, number in self.ids.items()]


def nsys_tables(capture: Capture) -> Tables:
    """The capture as nsys's tables; of the operators nothing is kept, since nsys sees none."""
    strings = Strings()
    tables: Tables = {STRINGS: []}
    for row in capture.launched:
        shared = {
            "start": row["start"],
            "end": row["end"],
            "deviceId": row["device"],
            "streamId": row["stream"],
            "correlationId": row["correlation"],
            "globalPid": global_pid(row["process"]),
        }
        if row["kind"] == "kernel":
            names = {"demangledName": strings[row["name"]], "shortName": strings[row["name"][:20]]}
            tables.setdefault(KERNELS, []).append({**shared, **names, "graphNodeId": None})
        else:
            table = COPIES if row["kind"] == "memcpy" else FILLS
            tables.setdefault(table, []).append({**shared, "copyKind": 1})
    for row in capture.calls:
        tables.setdefault(CALLS, []).append(
            {
                "start": row["start"],
                "end": row["end"],
                "globalTid": global_tid(row["process"], row["thread"]),
                "correlationId": row["correlation"],
                "nameId": strings[row["name"] + "_v7000"],
            }
        )
    for row in capture.ranges:
        tables.setdefault(RANGES, []).append(nvtx(row["name"], row["start"], row["end"], row["process"], row["thread"]))
    tables[GPUS] = [{"id": 0, "cuDevice": 0, "name": "NVIDIA H200"}]
    tables[STRINGS] = strings.rows()
    return tables


def nvtx(
    name: str | bytes | None,
    start: int,
    end: int | None,
    process: int = PROCESS,
    thread: int = MAIN,
    *,
    kind: int = 59,
    text_id: int | None = None,
) -> Row:
    """A row of NVTX_EVENTS."""
    times = {"start": start, "end": end, "eventType": kind}
    return {**times, "globalTid": global_tid(process, thread), "text": name, "textId": text_id}


_TEXTS = ("value", "name", "text")


def write_sqlite(tables: Tables, path: Path) -> Path:
    """Write the tables as nsys's export does; the columns are those of each table's first row."""
    with sqlite3.connect(path) as connection:
        for table, rows in tables.items():
            columns = list(rows[0])
            keyed = "INTEGER NOT NULL PRIMARY KEY" if table == STRINGS else "INTEGER"
            types = [keyed if name == "id" else "TEXT" if name in _TEXTS else "INTEGER" for name in columns]
            declared = ", ".join(f'"{name}" {kind}' for name, kind in zip(columns, types, strict=True))
            connection.execute(f'CREATE TABLE "{table}" ({declared})')
            holes = ", ".join("?" for _ in columns)
            values = [tuple(row[name] for name in columns) for row in rows]
            connection.executemany(f'INSERT INTO "{table}" VALUES ({holes})', values)
    connection.close()
    return path


def write_parquetdir(tables: Tables, folder: Path) -> Path:
    """Write the tables as `nsys export --type parquetdir` does: a file for each."""
    folder.mkdir()
    for table, rows in tables.items():
        schema = {name: pl.String if name in _TEXTS else pl.Int64 for name in rows[0]}
        pl.DataFrame(rows, schema=schema).write_parquet(folder / f"{table}.parquet")
    return folder


def trace_table(capture: Capture) -> TraceTable:
    """The capture as its reader would give it, without a file."""
    work = [
        (
            row["start"], row["end"] - row["start"], row["device"], row["stream"], row["kind"], row["name"],
            row["process"], row["correlation"], None, None,
        )
        for row in capture.launched
    ]  # fmt: skip

    def placed(row: Row) -> tuple[int, int, int, int, str]:
        return row["start"], row["end"] - row["start"], row["process"], row["thread"], row["name"]

    calls = [(*placed(row), row["correlation"], None) for row in capture.calls]
    ranges = [(*placed(row), True) for row in capture.ranges]
    operators = [
        (*placed(row), None, row["sequence"], row["forward_thread"], None, None, None) for row in capture.operators
    ]
    table = TraceTable(
        profiler="Kineto",
        work=pl.DataFrame(work, schema=WORK_SCHEMA, orient="row"),
        calls=pl.DataFrame(calls, schema=CALL_SCHEMA, orient="row"),
        ranges=pl.DataFrame(ranges, schema=RANGE_SCHEMA, orient="row"),
        operators=pl.DataFrame(operators, schema=OPERATOR_SCHEMA, orient="row"),
    )
    return assemble(table, Path("a capture"))
