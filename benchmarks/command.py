"""Where does the time of `stepscope run` go, from the prompt to the prompt? The command itself, stage by stage.

    python benchmarks/command.py [--runs 5] [--json FILE]
    python benchmarks/command.py --show FILE...        # a table of results kept with --json

A stage begins when the command names it on stderr. Before the first it is Python's start and imports; after the last,
the statistics, what is shown, and the process' end. The first command on a machine measures the device's ceilings, and
later ones find them stored: both are timed, each with a cache of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from stepscope.recording.device import HostLoad
from stepscope.recording.environment import read_environment, resolve_device
from stored import measure_or_show

COMMAND = ("stepscope", "run", "--model", "tiny", "--seconds", "1", "--device", "cpu")
IMPORTS = "imports"


class Timed(msgspec.Struct, kw_only=True):
    """One command."""

    wall_s: float
    cpu_s: float
    stages_s: dict[str, float]
    other_cores: float | None
    """Cores that other processes kept busy meanwhile."""


class Result(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    command: str
    environment: str
    cores: int
    first: list[Timed]
    """Commands that measured the ceilings."""
    later: list[Timed]
    """Commands that found them stored."""


def timed(caches: str, runs: str) -> Timed:
    """Run the command once."""
    load, before, began = HostLoad(), os.times(), time.perf_counter()
    marks = [(IMPORTS, began)]
    with subprocess.Popen(
        (sys.executable, "-m", *COMMAND, "--runs", runs), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": caches, "KINETO_LOG_LEVEL": "99"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("stepscope: "):
                marks.append((line.split()[1], time.perf_counter()))
        if process.wait() not in (0, 1):
            raise ValueError(f"the command ended with code {process.returncode}")
    ended, after, reading = time.perf_counter(), os.times(), load.read()
    ends = [*(at for _, at in marks[1:]), ended]
    return Timed(
        wall_s=ended - began,
        cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
        stages_s={name: end - at for (name, at), end in zip(marks, ends, strict=True)},
        other_cores=_less_ours(reading.other_cores, before, after, ended - began) if reading else None,
    )


def _less_ours(other_cores: float | None, before: os.times_result, after: os.times_result, wall_s: float) -> float:
    """What others kept busy, without the command, which is another process too."""
    ours = after.children_user + after.children_system - before.children_user - before.children_system
    return max(0.0, (other_cores or 0.0) - ours / wall_s)


def measure(arguments: argparse.Namespace) -> Result:
    """Each round is a command with an empty cache, and one with that cache again."""
    environment = read_environment(resolve_device("cpu"))
    result = Result(
        command=" ".join(COMMAND), environment=environment.described, cores=environment.cpu_cores, first=[], later=[]
    )
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as runs:
            result.first.append(timed(caches, runs))
            result.later.append(timed(caches, runs))
    return result


def render_markdown(result: Result) -> str:
    """The result as a Markdown table."""
    told = f"`{result.command}`, {len(result.first)} times of each, {result.cores} cores. {result.environment}"
    columns: dict[str, Timed] = {}
    for name, kind in (("first", result.first), ("later", result.later)):
        by_time = sorted(kind, key=lambda each: each.wall_s)
        columns |= {f"{name}, fastest": by_time[0], f"{name}, slowest": by_time[-1]}
    stages = list(dict.fromkeys(stage for each in columns.values() for stage in each.stages_s))
    rows = [("stage", *columns), ("---",) * (len(columns) + 1)]
    for stage in stages:
        rows.append((stage, *(_seconds(each.stages_s.get(stage)) for each in columns.values())))
    rows.append(("all", *(_seconds(each.wall_s) for each in columns.values())))
    rows.append(("processor", *(_seconds(each.cpu_s) for each in columns.values())))
    rows.append(("cores kept busy by others", *(_cores(each.other_cores) for each in columns.values())))
    return f"{told}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"


def _cores(cores: float | None) -> str:
    return "" if cores is None else f"{cores:.2f}"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
