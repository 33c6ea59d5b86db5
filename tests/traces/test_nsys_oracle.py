"""Exports made by dice, read twice: by the reader, and row by row in plain Python as a person would."""

import random
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.core.answer import Answer
from stepscope.traces import table as joins
from stepscope.traces.captures.answer import answer_trace
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.readers import nsys, nsys_tables
from stepscope.traces.table import TraceTable
from tests.captures import CALLS, KERNELS, RANGES, STRINGS, Row, Tables, global_pid, global_tid, nvtx, write_sqlite

PHASES = ("forward", "backward", "optimizer")
NAMES = ["gemm", "", "softmax", "cudaLaunchKernel_v7000", "cuLaunchKernel", "cudaMemsetAsync_v3020", "é" * 9]


def made_by_dice(seed: int) -> Tables:
    """Two processes of two threads and three streams: each launch is inside a phase or between two, some are lost,
    some names are, and ids have gaps. A name is longer than a small page, and rows of one sort differ in size."""
    dice = random.Random(seed)
    ids = sorted(dice.sample(range(-3, 40), len(NAMES))) if seed % 2 else list(range(len(NAMES)))
    missing = 77
    tables: Tables = {STRINGS: [{"id": one, "value": name} for one, name in zip(ids, NAMES, strict=True)]}
    rows: dict[str, list[Row]] = {KERNELS: [], CALLS: [], RANGES: []}
    for process in (1, 2):
        now, free, correlation = 1_000 * process, [0, 0, 0], dice.choice((1, 5_000, 2**45))
        for phase in (phase for _ in range(3) for phase in PHASES):
            begin = now
            for _ in range(dice.randrange(9)):
                now += dice.randint(10, 500)
                correlation += dice.choice((1, 1, 1, 4))
                thread, stream = dice.choice((7, 8)), dice.randrange(3)
                start = max(free[stream], now + dice.randint(20, 900))
                free[stream] = start + dice.choice((0, 3, 40, 5_000))
                called = {"start": now, "end": now + dice.choice((9, 9, -4))}
                rows[CALLS].append(
                    {**called, "globalTid": global_tid(process, thread), "correlationId": correlation}
                    | {"nameId": dice.choice((ids[3], ids[4], missing))}
                )
                if dice.random() < 0.1:
                    rows[CALLS].pop()
                rows[KERNELS].append(
                    {"start": start, "end": free[stream], "deviceId": dice.choice((0, None)), "streamId": stream}
                    | {"correlationId": dice.choice((correlation, correlation, None)), "globalPid": global_pid(process)}
                    | {"graphNodeId": None, "demangledName": dice.choice((*ids[:3], ids[6], missing, None))}
                    | {"shortName": dice.choice((ids[0], missing))}
                )
            now += 600
            rows[RANGES].append(nvtx(phase, begin, now, process, 7))
            now += dice.choice((0, 50))
    rows[RANGES] += [nvtx(name, 1, 2, 3, 7) for name in ("", "é" * 40, *("x" * 600,) * (seed % 2))]
    for row in (row for some in rows.values() for row in some):  # columns that nobody asks for, behind the others
        row |= {f"other{n}": dice.choice((None, 0, 1, 300, 2**40, "x" * dice.randrange(150))) for n in range(12)}
    for some in rows.values():
        dice.shuffle(some)
    return tables | {table: some for table, some in rows.items() if some}


def plainly(path: Path) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], list[tuple[Any, ...]], Counter[str]]:
    """Kernels with their launches, calls, ranges, and the kernels' time by the phase open at their launch in their
    process."""
    with sqlite3.connect(path) as db:
        strings = dict(db.execute(f"SELECT id, value FROM {STRINGS}"))
        calls = [
            (start, max(0, end - start), thread >> 24 << 24, thread, strings.get(name, f"string {name}"), correlation)
            for start, end, thread, name, correlation in db.execute(
                f"SELECT start, end, globalTid, nameId, correlationId FROM {CALLS}"
            )
        ]
        ranges = list(db.execute(f"SELECT text, start, end, globalTid >> 24 << 24 FROM {RANGES}"))
        launches = {(process, correlation): (start, thread) for start, _, process, thread, _, correlation in calls}
        work, phases = [], Counter[str]()
        for start, end, device, stream, correlation, process, demangled, short in db.execute(
            f"SELECT start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName FROM {KERNELS}"
        ):
            none = "" if demangled is None else f"string {demangled}"
            name = strings.get(demangled) or strings.get(short) or strings.get(demangled, none)
            launch = launches.get((process, correlation), (None, None))
            place = (-1 if device is None else device, stream, name, process, correlation)
            work.append((start, end - start, *place, *launch))
            opened = [
                text
                for text, begin, until, owner in ranges
                if launch[0] is not None and owner == process and begin <= launch[0] < until
            ]
            phases[opened[0] if opened else "outside"] += end - start
    return work, calls, ranges, phases


def _read(path: Path, whole: bool) -> tuple[TraceTable, Counter[str], Answer]:
    attribution = attribute(read_trace(path, launch_sizes=whole))
    attribution.self_check()
    phases = Counter[str]()
    for phase, duration in attribution.work.select("phase", "duration_ns").rows():
        phases[phase or "outside"] += duration
    summary = TraceSummary(attribution=attribution, run=None)
    answer = answer_trace(summary, check_trace(summary), "report")
    return attribution.table, phases, answer


@pytest.mark.parametrize("seed", range(12))
def test_every_row_and_phase_as_a_plain_reader_has_them(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sqlite(made_by_dice(seed), tmp_path / "report.sqlite")
    if seed % 3:  # tables of many pages, of which some hold what SQLite itself has to read
        with sqlite3.connect(path, isolation_level=None) as db:
            db.executescript("PRAGMA page_size = 512; VACUUM")
        db.close()
        monkeypatch.setattr(nsys_tables, "_PAGES", 2)
        monkeypatch.setattr(nsys_tables, "BATCH_ROWS", 5)
        monkeypatch.setattr(nsys_tables, "_STRETCH", 7)
    if seed % 2:  # calls are many
        monkeypatch.setattr(joins, "_MANY", 0)
        monkeypatch.setattr(joins, "_AT_ONCE", 7)
    if seed % 4 == 3:  # SQLite reads all
        monkeypatch.setattr(nsys_tables, "_DEEPEST", 0)
    work, calls, ranges, by_phase = plainly(path)
    columns = ("start_ns", "duration_ns", "device", "stream", "name", "process", "correlation", "launch_ns")
    answers: list[Answer] = []
    monkeypatch.setattr(nsys, "_MANY", (0, 1 << 20)[seed % 2])  # work is held narrow, too, or not
    for whole in (True, False):  # as frames, and held narrow
        table, phases, answer = _read(path, whole)
        answers.append(answer)
        assert table.work.select(*columns, "launch_thread").rows() == work
        said = table.calls.select("start_ns", "duration_ns", "process", "thread", "name", "correlation")
        assert said.rows() == calls
        ended = table.ranges.select(
            "name", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"), process="process"
        )
        assert ended.rows() == ranges
        assert +phases == +by_phase
    assert answers[0] == answers[1]
