"""Two thousand damaged captures, a thirteenth without --long: each is read and attributed exactly, or refused."""

import gzip
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import InputError
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.readers import json_events
from tests.captures import (
    CALLS,
    COPIES,
    KERNELS,
    RANGES,
    STRINGS,
    kineto_trace,
    nsys_tables,
    training_steps,
    write_sqlite,
)

pytestmark = pytest.mark.slow

DEADLINE_S = 5
MEMORY_BYTES = 600 << 20

STRANGE: tuple[Any, ...] = (
    None, True, "", "12", "twelve", "NaN", "\ud800", "é" * 40, "\x00\x1b[2J\n", [], {}, [[[]]], {"a": {"b": [1]}}, 0, 1,
    -1, 1.5, -7, 1e300, -1e300, 1e18, 2**31, 2**32 - 1, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63),
    -(2**63) - 1, 10**40, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
STRANGE_CELLS: tuple[Any, ...] = (
    None, 0, -1, 1, 59, 60, 75, 2**31, 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 1.5, 1e300, -1e300, float("inf"), "",
    "12", "twelve", b"\xff\xfe", b"", "\x00", "forward", "x" * 5000,
)  # fmt: skip
SPLICES = (
    b"{", b"}", b"[", b"]", b",", b'"', b"\\", b":", b"}, {", b'"traceEvents": [', b"\x00", b"\xff", b"\\q", b"\\ud800",
    b"NaN", b"1e999", b"1e999999999", b"-", b"9" * 30, b"null", b"[" * 3000, b" " * 3000, b'{"a":' * 2000,
)  # fmt: skip


def damaged(text: bytes, dice: random.Random) -> bytes:
    """The bytes with one to four flips, deletions, doublings, insertions, moves, or an early end."""
    damage = bytearray(text)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(damage) + 1)
        length = dice.choice((1, 1, 2, 16, 200, 4096))
        what = dice.randrange(7)
        if what == 0 and at < len(damage):
            damage[at] ^= 1 << dice.randrange(8)
        elif what == 1:
            del damage[at : at + length]
        elif what == 2:
            damage[at:at] = damage[at : at + length]
        elif what == 3:
            damage[at:at] = dice.choice(SPLICES)
        elif what == 4:
            other = dice.randrange(len(damage) + 1)
            damage[at : at + length] = damage[other : other + length]
        elif what == 5 and at < len(damage):
            damage[at : at + length] = dice.randbytes(length)
        elif what == 6 and dice.random() < 0.3:
            del damage[at:]
    return bytes(damage)


def strange_trace(trace: dict[str, Any], dice: random.Random) -> bytes:
    """The trace with values of wrong types or sizes, and with events lost, doubled or moved."""
    trace = json.loads(json.dumps(trace))
    events = trace["traceEvents"]
    for _ in range(dice.randint(1, 5)):
        event = dice.choice([event for event in events if isinstance(event, dict)])
        place = event["args"] if isinstance(event.get("args"), dict) and dice.random() < 0.4 else event
        what = dice.randrange(8)
        if what < 4 and place:
            place[dice.choice(list(place))] = dice.choice(STRANGE)
        elif what == 4 and place:
            del place[dice.choice(list(place))]
        elif what == 5:
            events.insert(dice.randrange(len(events)), dice.choice(events))
        elif what == 6:
            events.insert(dice.randrange(len(events)), dice.choice(STRANGE))
        else:
            value = dice.choice(STRANGE)
            key = dice.choice(("ts", "dur", "pid", "tid", "name", "cat", "ph"))
            for row in events:
                if isinstance(row, dict) and row.get("cat") == event.get("cat"):
                    row[key] = value
    if dice.random() < 0.1:
        trace[dice.choice(list(trace))] = dice.choice(STRANGE)
    if dice.random() < 0.3:  # clocks that count from 1970 are read in another way
        for row in trace["traceEvents"] if isinstance(trace["traceEvents"], list) else ():
            if isinstance(row, dict) and isinstance(row.get("ts"), float):
                row["ts"] += 1.7e15
    return json.dumps(trace).encode("utf-8", "surrogatepass")


def strange_sqlite(tables: dict[str, list[dict[str, Any]]], dice: random.Random, path: Path) -> None:
    """The export with cells of wrong types or sizes, and rows, columns and tables lost."""
    tables = {table: [dict(row) for row in rows] for table, rows in tables.items()}
    for _ in range(dice.randint(1, 5)):
        table = dice.choice((KERNELS, CALLS, RANGES, RANGES, COPIES, STRINGS, dice.choice(list(tables))))
        rows = tables.get(table)
        if not rows:
            continue
        column = dice.choice(list(rows[0]))
        what = dice.randrange(8)
        if what < 4 and (table, column) != (STRINGS, "id"):
            dice.choice(rows)[column] = dice.choice(STRANGE_CELLS)
        elif what == 4 and (table, column) != (STRINGS, "id"):
            value = dice.choice(STRANGE_CELLS)
            for row in rows:
                row[column] = value
        elif what == 5 and len(rows[0]) > 1:
            for row in rows:
                row.pop(column)
        elif what == 6:
            rows.pop(dice.randrange(len(rows)))
        elif what == 7 and dice.random() < 0.3:
            tables.pop(table)
    write_sqlite({table: rows for table, rows in tables.items() if rows}, path)


def outcome(path: Path) -> str:
    """Whether the capture was read or refused; whatever else happens is a failure."""
    began = time.monotonic()
    try:
        attribution = attribute(read_trace(path))
        attribution.self_check()
        assert attribution.rows["calls"].sum() == attribution.work.height
        assert attribution.busy_ns >= 0
        result = "read"
    except InputError as error:
        assert "\n" not in str(error), "an error is one line"
        assert len(str(error)) < 1000, "an error is one line"
        result = "refused"
    assert time.monotonic() - began < DEADLINE_S
    return result


def peak_bytes() -> int:
    """Peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


Write = Callable[[random.Random, Path], Path]


def _writers(folder: Path) -> Iterator[tuple[str, int, Write]]:
    """Ways to damage a capture, and how many of each."""
    capture = training_steps(steps=2, layers=2)
    trace, tables = kineto_trace(capture), nsys_tables(capture)
    text = json.dumps(trace, indent=1).encode()
    packed = gzip.compress(text, 1)
    whole = write_sqlite(tables, folder / "whole.sqlite").read_bytes()

    def to(name: str, make: Callable[[random.Random], bytes]) -> Write:
        def write(dice: random.Random, folder: Path) -> Path:
            path = folder / name
            path.write_bytes(make(dice))
            return path

        return write

    def cells(dice: random.Random, folder: Path) -> Path:
        path = folder / "cells.sqlite"
        path.unlink(missing_ok=True)
        strange_sqlite(tables, dice, path)
        return path

    yield "json bytes", 500, to("trace.json", lambda dice: damaged(text, dice))
    yield "json values", 600, to("trace.json", lambda dice: strange_trace(trace, dice))
    yield "gzip bytes", 100, to("trace.json.gz", lambda dice: damaged(packed, dice))
    yield "sqlite bytes", 300, to("trace.sqlite", lambda dice: damaged(whole, dice))
    yield "sqlite cells", 500, cells


@pytest.mark.parametrize("which", ["json bytes", "json values", "gzip bytes", "sqlite bytes", "sqlite cells"])
def test_damaged_captures_are_read_or_refused(
    which: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _, all_of_them, write = next(writer for writer in _writers(tmp_path) if writer[0] == which)
    count = round(all_of_them * (share if share == 1 else share / 2))
    before = peak_bytes()
    outcomes = {"read": 0, "refused": 0}
    for seed in range(count):
        path = write(random.Random(f"{which} {seed}"), tmp_path)
        if which.endswith("bytes"):  # in many blocks, or in one as small captures are
            monkeypatch.setattr(json_events, "BLOCK_BYTES", 8 << 20 if seed % 2 else 3000)
        try:
            outcomes[outcome(path)] += 1
        except BaseException as error:
            raise AssertionError(f"{which} {seed}: {type(error).__name__}: {error}") from error
    # A strange value costs its own row alone; of broken bytes some make no file of the format.
    assert outcomes["refused"] > count * 0.05 or not which.endswith("bytes")
    assert outcomes["read"] > count * 0.05 or which == "gzip bytes"
    assert peak_bytes() - before < MEMORY_BYTES
