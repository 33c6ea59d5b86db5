"""How fast is a memory snapshot explained? stepscope and PyTorch's own tool on the same long history.

    python benchmarks/snapshot.py CAPTURE [--events 500000] [--repeats 5] [--cores 0,1] [--json FILE]
    python benchmarks/snapshot.py --show FILE...          # tables of results kept with --json

CAPTURE is a snapshot of one training step; its step is repeated (snapshot_tiles.py) up to so many events. Everyone
runs as a fresh process on the same file, which is in the page cache, in turn. PyTorch's `_memory_viz` leaves the
computing to a page in a browser (trace_plot) or lists the events (trace); unpickling alone is the floor of both.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from contestants import last_line
from snapshot_tiles import SnapshotTiles, tile_snapshot
from stepscope.core.environment import Environment
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

TIMED_PROCESS = Path(__file__).with_name("timed_process.py")
_FLOOR = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"


class Contestant(msgspec.Struct, frozen=True, kw_only=True):
    """One way from a snapshot to an answer."""

    name: str
    computes: str
    command: tuple[str, ...]
    """After the interpreter; FILE and OUTPUT stand for the snapshot and for what is written."""


CONTESTANTS = (
    Contestant(
        name="stepscope memory",
        computes="everything that --json says: blocks, peak, categories, sites, tensors",
        command=("-m", "stepscope", "memory", "FILE", "--json"),
    ),
    Contestant(
        name="_memory_viz trace_plot",
        computes="a page that holds the pickle; a browser computes",
        command=("-m", "torch.cuda._memory_viz", "trace_plot", "FILE", "-o", "OUTPUT"),
    ),
    Contestant(
        name="_memory_viz trace",
        computes="the events, listed as text",
        command=("-m", "torch.cuda._memory_viz", "trace", "FILE"),
    ),
    Contestant(name="pickle.load", computes="floor: the objects, unchecked", command=("-c", _FLOOR, "FILE")),
)


class Result(msgspec.Struct, kw_only=True):
    """One contestant on the file."""

    contestant: str
    computes: str
    written_bytes: int = 0
    """What it printed and wrote."""
    failure: str = ""
    samples: list[Sample] = []


class Report(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    date: str
    environment: Environment
    cores: str
    repeats: int
    capture: str
    tiles: SnapshotTiles
    results: list[Result]


def run(contestant: Contestant, file: Path, cores: str, timeout_s: float, result: Result) -> Sample | None:
    """One fresh process. Without a sample the result says why."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        printed, errors, written = folder / "printed", folder / "errors", folder / "output.html"
        places = {"FILE": str(file), "OUTPUT": str(written)}
        command = [sys.executable, *(places.get(part, part) for part in contestant.command)]
        wrapper = [sys.executable, "-I", "-S", str(TIMED_PROCESS), cores, str(printed), str(errors)]
        try:
            done = subprocess.run(
                [*wrapper, *command], capture_output=True, text=True, check=False, timeout=timeout_s, cwd=folder
            )
        except subprocess.TimeoutExpired:
            result.failure = f"longer than {timeout_s:.0f} s"
            return None
        told = json.loads(done.stdout) if not done.returncode else {"exit_code": done.returncode}
        if told["exit_code"]:
            result.failure = last_line(errors.read_text(errors="replace") if errors.exists() else done.stderr)
            return None
        result.written_bytes = sum(path.stat().st_size for path in (printed, written) if path.exists())
        return msgspec.convert(told["sample"], type=Sample)


def race(file: Path, cores: str, repeats: int, timeout_s: float) -> list[Result]:
    """Everyone in turn, each once the first of a turn."""
    results = [Result(contestant=one.name, computes=one.computes) for one in CONTESTANTS]
    for turn in range(repeats):
        for i in range(len(CONTESTANTS)):
            at = (i + turn) % len(CONTESTANTS)
            if results[at].failure:
                continue
            sys.stderr.write(f"turn {turn + 1} of {repeats}: {CONTESTANTS[at].name}\n")
            if sample := run(CONTESTANTS[at], file, cores, timeout_s, results[at]):
                results[at].samples = [*results[at].samples, sample]
    return results


HEADS = ("reader", "median", "least to most", "peak", "written", "computes")


def rows_of(report: Report) -> list[tuple[str, ...]]:
    """A row for each contestant, fastest first; those that failed say why."""
    timed = sorted((r for r in report.results if r.samples), key=lambda r: min(s.wall_s for s in r.samples))
    rows = []
    for result in timed:
        walls = [sample.wall_s for sample in result.samples]
        peak = statistics.median(sample.peak_bytes for sample in result.samples)
        rows.append(
            (
                result.contestant,
                f"{statistics.median(walls):.2f} s",
                f"{min(walls):.2f} to {max(walls):.2f} s",
                f"{peak / 1e6:.0f} MB",
                f"{result.written_bytes / 1e6:.2f} MB",
                result.computes,
            )
        )
    return rows + [(r.contestant, "", "", "", "", r.failure) for r in report.results if r.failure]


def heading(report: Report) -> list[str]:
    """What was read, where and when."""
    tiles = report.tiles
    others = [s.other_cores for r in report.results for s in r.samples if s.other_cores is not None]
    disturbed = f"; others kept at most {max(others):.2f} cores busy during a run" if others else ""
    return [
        report.environment.described,
        f"{report.date}, cores {report.cores or 'all'}, {report.repeats} runs each{disturbed}",
        f"{tiles.bytes / 1e6:.1f} MB, {tiles.events:,} events, {tiles.allocations:,} allocations, {tiles.frames:,} "
        f"frames on their stacks ({tiles.steps} steps of {report.capture})",
    ]


def render(report: Report, console: Console) -> None:
    """The report as a table for a person."""
    for line in heading(report):
        console.print(line, highlight=False)
    table = Table(*HEADS)
    for row in rows_of(report):
        table.add_row(*row)
    console.print(table)


def render_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [line for said in heading(report) for line in (said, "")]
    lines += ["| " + " | ".join(row) + " |" for row in (HEADS, ("---",) * len(HEADS), *rows_of(report))]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, nargs="?")
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", default="", help="processor cores to run on, as 0,1; all without it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds allowed to one run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.capture is None and not arguments.show:
        parser.error("which snapshot? give CAPTURE")
    return arguments


def measure_all(arguments: argparse.Namespace) -> Report:
    """Make the file and race on it."""
    with tempfile.TemporaryDirectory(prefix="stepscope-snapshot-") as folder:
        file = Path(folder, "snapshot.pickle")
        tiles = tile_snapshot(arguments.capture, file, arguments.events)
        with file.open("rb") as written:  # else the kernel writes it back while someone runs
            os.fsync(written.fileno())
        return Report(
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            environment=read_environment(torch.device("cpu")),
            cores=arguments.cores,
            repeats=arguments.repeats,
            capture=arguments.capture.name,
            tiles=tiles,
            results=race(file, arguments.cores, arguments.repeats, arguments.timeout),
        )


def main() -> None:
    """Measure, or show what was measured."""
    measure_or_show(parse_arguments(), Report, measure=measure_all, render=render, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
