"""What do verbs that list many runs take? Copies of stored runs, with other times, dates, tags and commits.

    python benchmarks/many_runs.py [--runs 5000,10000] [--json FILE]
    python benchmarks/many_runs.py --show FILE...        # a table of results kept with --json

Each command is a process of its own, with its output in a pipe: once where there is no index yet, then three times with
one. The seconds are those that its processor worked, from the prompt to the prompt: other programs do not change them.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.run_directory import INDEX_FILE, RUN_FILE
from stored import keep

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "ls --json", "ls", "table --rows model,seq_len --columns dtype,tag --stat median-interval", "history",
)  # fmt: skip


class Listing(msgspec.Struct, kw_only=True):
    """What one command took, in seconds of its processor."""

    command: str
    runs: int
    first_s: float
    """Where there was no index."""
    again_s: float
    """The median of three with one."""


class ManyRuns(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    processor: str
    index_bytes: dict[int, int]
    listings: list[Listing]


def make(folder: Path, count: int) -> None:
    """Write so many run directories, made of this project's stored runs."""
    chance = random.Random(0)
    stored = [json.loads(file.read_bytes()) for file in sorted((ROOT / "results/h200/plain").glob(f"*/{RUN_FILE}"))]
    moment = datetime(2026, 1, 1)
    for i in range(count):
        run: dict[str, Any] = dict(stored[i % len(stored)])
        moment += timedelta(minutes=13)
        factor = chance.gauss(1, 0.01) * (1.05 if i > count // 2 else 1)
        run["id"] = f"{moment:%Y%m%dT%H%M%S}.000-{run['id'].partition('-')[2]}"
        run["created"] = f"{moment.isoformat(timespec='milliseconds')}+00:00"
        run["tag"] = f"batch{i % 3}"
        run["samples"] = {
            name: {**samples, "values_s": [value * factor for value in samples["values_s"]]}
            for name, samples in run["samples"].items()
        }
        commit = hashlib.sha1(str(i // 50).encode(), usedforsecurity=False).hexdigest()
        run["environment"] = run["environment"] and {**run["environment"], "git_commit": commit}
        (folder / run["id"]).mkdir()
        (folder / run["id"] / RUN_FILE).write_text(json.dumps(run, indent=1))


def processor_s(folder: Path, command: str) -> float:
    """Seconds that the processor worked for this command."""
    verb, *options = command.split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", verb, str(folder), *options], capture_output=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr.decode())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(counts: list[int]) -> ManyRuns:
    """What each command takes for each number of runs."""
    result = ManyRuns(processor=f"{os.cpu_count()} cores, {os.uname().machine}", index_bytes={}, listings=[])
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder, count)
            for command in COMMANDS:
                (folder / INDEX_FILE).unlink(missing_ok=True)
                first = processor_s(folder, command)
                again = statistics.median(processor_s(folder, command) for _ in range(3))
                result.listings.append(Listing(command=command, runs=count, first_s=first, again_s=again))
            result.index_bytes[count] = (folder / INDEX_FILE).stat().st_size
    return result


def table(results: list[ManyRuns]) -> str:
    """The results in Markdown."""
    lines = ["| runs | command | without an index | with it |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {one.runs:,} | `{one.command}` | {one.first_s:.2f} s | {one.again_s:.2f} s |"
        for result in results
        for one in result.listings
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", default="5000,10000")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.show:
        print(table([msgspec.json.decode(file.read_bytes(), type=ManyRuns) for file in asked.show]))
        return
    result = measured([int(count) for count in asked.runs.split(",")])
    keep(result, asked.json)
    print(table([result]))


if __name__ == "__main__":
    main()
