"""Damages captures of every kind and shows them to `stepscope trace`: each is read or refused in one line.

    python -m tests.hostile.captures --cases 8000 --seed 0 --out results/cpu/hostile/captures.json
    python -m tests.hostile.captures --snapshots --cases 2000 --seed 0 --out results/cpu/hostile/snapshots.json

The captures are the repository's own and, where STEPSCOPE_PUBLIC_CAPTURES names their folder, excerpts of those that
others published. The same seed makes the same files of the same captures.
"""

import argparse
import contextlib
import gzip
import json
import os
import pickle
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from stepscope.allocations.plain_pickle import read_plain_pickle
from stepscope.core.evidence import NOTES_KEY, SEGMENTS_BEFORE_KEY
from tests.hostile.inputs import (
    DATA,
    HOSTILE_TEXTS,
    Dice,
    Write,
    campaign,
    closing_line,
    damage_tables,
    damaged_json,
    damaged_snapshots,
    json_of,
    unpacked,
)
from tests.public import VARIABLE
from tests.traces.test_mutations import STRANGE_CELLS, damaged

THROUGH_COMMAND = 40
_EXCERPT_EVENTS = 400
_TYPES = (pl.String, pl.Float32, pl.Int32, pl.UInt64, pl.Boolean, pl.Binary, pl.Categorical)
_OPTIONS: tuple[list[str], ...] = ([], [], ["--json"], ["--style", "csv"], ["--step", "0"], ["--phase", "backward"])
_EXPORTS = (
    "StringIds", "NVTX_EVENTS", "TARGET_INFO_GPU", "META_DATA_CAPTURE", "META_DATA_EXPORT",
    "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
)  # fmt: skip


def public(pattern: str) -> list[Path]:
    """The published captures of such a name; none where the folder is not there."""
    folder = os.environ.get(VARIABLE)
    return sorted(Path(folder).glob(pattern)) if folder else []


# JSON


@cache
def traces() -> list[bytes]:
    """Traces of the repository whole, and of each published one a beginning, a stretch and the end."""
    own = [unpacked(DATA / f"{name}.json.gz") for name in ("idle_item", "idle_streams", "kineto_inference_bf16")]
    return own + [_excerpt(json.loads(unpacked(path))) for path in public("*.json.gz")]


def _excerpt(trace: Any) -> bytes:
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    middle = len(events) // 2
    chosen = events[:100] + events[middle : middle + _EXCERPT_EVENTS] + events[-20:]
    short = chosen if len(events) > len(chosen) else events
    return json_of({**trace, "traceEvents": short} if isinstance(trace, dict) else short)


def _planted_in_json(text: bytes, dice: Dice) -> bytes:
    """The trace with rows that end before they begin, share a correlation id, or have hostile names."""
    trace = json.loads(text)
    events = [
        event for event in (trace["traceEvents"] if isinstance(trace, dict) else trace) if isinstance(event, dict)
    ]
    chosen = dice.sample(events, min(len(events), dice.choice((1, 10, 1000))))
    what, value = dice.randrange(3), dice.choice(HOSTILE_TEXTS)
    for event in chosen:
        arguments = event.get("args")
        if what == 0 and "dur" in event:
            event["dur"] = -dice.randrange(1, 10**6)
        elif what == 1 and isinstance(arguments, dict) and "correlation" in arguments:
            arguments["correlation"] = 7
        elif what == 2:
            event["name"] = value
    return json_of(trace)


def _json(dice: Dice) -> bytes:
    text = dice.choice(traces())
    return _planted_in_json(text, dice) if dice.random() < 0.15 else damaged_json(text, dice)


def kineto_plain() -> Write:
    def write(dice: Dice, folder: Path) -> list[str]:
        (folder / "trace.json").write_bytes(_json(dice))
        return ["trace", str(folder / "trace.json"), *dice.choice(_OPTIONS)]

    return write


def kineto_packed() -> Write:
    def write(dice: Dice, folder: Path) -> list[str]:
        file = folder / "trace.json.gz"
        data = gzip.compress(_json(dice) if dice.random() < 0.5 else dice.choice(traces()), 1)
        file.write_bytes(damaged(data, dice) if dice.random() < 0.6 else data)
        return ["trace", str(file), *dice.choice(_OPTIONS)]

    return write


# Exports of Nsight Systems


@cache
def exports() -> list[bytes]:
    """SQLite exports: the repository's, thrice as often as each published one."""
    return [unpacked(DATA / "nsys_train.sqlite.gz")] * 3 + [unpacked(path) for path in public("*.sqlite.gz")]


def _plant_in_tables(connection: sqlite3.Connection, dice: Dice) -> None:
    """Rows that end before they begin or share a correlation id, strings that are gone, hostile names."""
    some = f"rowid % {dice.choice((1, 7, 500))} = 0"
    kernels = "CUPTI_ACTIVITY_KIND_KERNEL"
    planted = dice.choice(
        (
            f'UPDATE {kernels} SET "end" = start - 5 WHERE {some}',
            f'UPDATE NVTX_EVENTS SET "end" = start - 5 WHERE {some}',
            f"UPDATE {kernels} SET correlationId = 7 WHERE {some}",
            f"UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = 7 WHERE {some}",
            f"DELETE FROM StringIds WHERE {some}",
            "DROP TABLE StringIds",
            "DROP TABLE NVTX_EVENTS",
        )
    )
    connection.execute(planted)
    if dice.random() < 0.3:
        with contextlib.suppress(sqlite3.Error):
            connection.execute(f"UPDATE StringIds SET value = ? WHERE {some}", (dice.choice(HOSTILE_TEXTS),))


def _damaged_export(file: Path, dice: Dice) -> None:
    whole = dice.choice(exports())
    if dice.random() < 0.3:
        file.write_bytes(damaged(whole, dice))
        return
    file.write_bytes(whole)
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        (_plant_in_tables if dice.random() < 0.3 else damage_tables)(connection, dice)


def nsys_sqlite() -> Write:
    def write(dice: Dice, folder: Path) -> list[str]:
        file = folder / "trace.sqlite"
        _damaged_export(file, dice)
        if dice.random() < 0.2:
            packed = gzip.compress(file.read_bytes(), 1)
            file.unlink()
            file = folder / "trace.sqlite.gz"
            file.write_bytes(damaged(packed, dice) if dice.random() < 0.5 else packed)
        return ["trace", str(file), *dice.choice(_OPTIONS)]

    return write


@cache
def frames() -> list[dict[str, pl.DataFrame]]:
    """The tables of each distinct export, as a parquetdir holds them."""
    found: list[dict[str, pl.DataFrame]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, export in enumerate(dict.fromkeys(exports())):
            path = Path(folder, f"{number}.sqlite")
            path.write_bytes(export)
            with contextlib.closing(sqlite3.connect(path)) as connection:
                present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
                found.append({name: _frame(connection, name) for name in _EXPORTS if name in present})
    return found


def _frame(connection: sqlite3.Connection, table: str) -> pl.DataFrame:
    cursor = connection.execute(f'SELECT * FROM "{table}"')
    names = [column[0] for column in cursor.description]
    columns = list(zip(*cursor.fetchall(), strict=True)) or [()] * len(names)
    kinds = {str: pl.String, bytes: pl.Binary, float: pl.Float64}
    types = [kinds.get(next((type(cell) for cell in cells if cell is not None), int), pl.Int64) for cells in columns]
    return pl.DataFrame(
        [
            pl.Series(name, list(cells), dtype=kind, strict=False)
            for name, cells, kind in zip(names, columns, types, strict=True)
        ]
    )


def _changed_frame(frame: pl.DataFrame, dice: Dice) -> pl.DataFrame:
    column, kind = dice.choice(frame.columns), dice.choice(_TYPES)
    cell, number = dice.choice(STRANGE_CELLS), dice.choice((-(2**63), 2**63 - 1, -1, 0, 7, None))
    some = pl.int_range(pl.len()) % dice.randint(1, 50) == 0
    swapped = {"start": "end", "end": "start"} if {"start", "end"} <= set(frame.columns) else {}
    numbers = pl.when(some).then(pl.lit(number, pl.Int64)).otherwise(pl.col(column).cast(pl.Int64, strict=False))
    changes: tuple[Callable[[], pl.DataFrame], ...] = (
        lambda: frame.drop(column),
        frame.clear,
        lambda: frame.with_columns(pl.col(column).cast(pl.String, strict=False).cast(kind, strict=False)),
        lambda: frame.with_columns(pl.Series(column, [cell] * frame.height, strict=False)),
        lambda: frame.rename(swapped),
        lambda: frame.with_columns(pl.lit([[1], [2]]).alias(column)),
        lambda: frame.with_columns(numbers.alias(column)),
    )
    with contextlib.suppress(pl.exceptions.PolarsError):  # a cast that is not: then the table stays
        return dice.choice(changes)()
    return frame


def parquetdir() -> Write:
    def write(dice: Dice, folder: Path) -> list[str]:
        tables = dict(dice.choice(frames()))
        for _ in range(dice.randint(1, 3)):
            name = dice.choice(list(tables))
            if dice.random() < 0.15 and len(tables) > 1:
                del tables[name]
            elif tables[name].columns:
                tables[name] = _changed_frame(tables[name], dice)
        place = folder / "report_pqtdir"
        place.mkdir()
        for name, frame in tables.items():
            frame.write_parquet(place / f"{name}.parquet", compression="lz4")
        files = sorted(place.iterdir())
        if dice.random() < 0.3:
            file = dice.choice(files)
            file.write_bytes(damaged(file.read_bytes(), dice))
        elif dice.random() < 0.05:
            (place / "StringIds.parquet").write_bytes(dice.choice(files).read_bytes())
        return ["trace", str(place), *dice.choice(_OPTIONS)]

    return write


KINDS: dict[str, Callable[[], Write]] = {
    "kineto json": kineto_plain,
    "kineto json.gz": kineto_packed,
    "nsys sqlite": nsys_sqlite,
    "nsys parquetdir": parquetdir,
}


# Snapshots of memory


def foreign_snapshots() -> Write:
    """Histories without notes: the repository's own stripped of them, and published ones."""
    contents: list[Any] = [
        read_plain_pickle(path) for path in [DATA / "snapshot_train.pickle.gz", *public("*memory*.pickle.gz")]
    ]
    bare = [
        {key: value for key, value in one.items() if key not in {NOTES_KEY, SEGMENTS_BEFORE_KEY}} for one in contents
    ]
    return damaged_snapshots([pickle.dumps(one, protocol=4) for one in bare])


SNAPSHOTS: dict[str, Callable[[], Write]] = {"foreign snapshots": foreign_snapshots}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 where no case shows a fault, 1 where one does."""
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=400, help="Of all kinds together, which take turns.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="Processes that read, one beside the other.")
    parser.add_argument("--snapshots", action="store_true", help="Snapshots of memory without notes, not traces.")
    parser.add_argument("--out", type=Path, help="Keep the result in this file.")
    given = parser.parse_args(argv)
    result = campaign(
        given.cases, given.seed, lambda line: print(line, file=sys.stderr, flush=True),
        kinds=SNAPSHOTS if given.snapshots else KINDS, commanded_each=THROUGH_COMMAND, jobs=given.jobs,
    )  # fmt: skip
    patterns = ("*memory*.pickle.gz",) if given.snapshots else ("*.json.gz", "*.sqlite.gz")
    result |= {
        "campaign": "snapshots" if given.snapshots else "captures",
        "published": sum(len(public(pattern)) for pattern in patterns),
    }
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(closing_line(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
