"""How fast is a trace read? stepscope and its peers on the same large files, as fresh processes on the same cores.

    python benchmarks/trace.py --peers                         # first make the peers' virtual environments
    python benchmarks/trace.py [--reads kineto|nsys] [--repeats 5] [--sizes 55.6MB 203MB] [--json FILE]
    python benchmarks/trace.py --scaling [--json FILE]         # stepscope alone at three sizes up to 1 GB
    python benchmarks/trace.py --show FILE...                  # tables of results kept with --json

The large files are a real capture tiled (kineto_tiles.py, nsys_tiles.py), kept in --cache. A run starts as a fresh
process on a fresh copy of its file that is already on disk and in the page cache; after it the copy is compared with
the original. The contestants take turns. Each first reads the untiled capture, untimed: who fails that is left out.
"""

import argparse
import datetime
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Column, Table

from contestants import CONTESTANTS, ENVIRONMENTS, Contestant, Peers, last_line
from kineto_tiles import KinetoTiles, tile_kineto
from nsys_tiles import NsysTiles, tile_nsys
from stepscope.core.environment import Environment
from stepscope.core.units import parse_bytes
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

DATA = Path(__file__).parent.parent / "tests" / "data"
CAPTURES = {"kineto": DATA / "kineto_train.json.gz", "nsys": DATA / "nsys_train.sqlite.gz"}
FILE_NAMES = {"kineto": "worker.pt.trace.json", "nsys": "trace.sqlite"}
SIZES = {"kineto": ("55.6MB", "203MB"), "nsys": ("201MB",)}
SCALING_SIZES = ("250MB", "500MB", "1GB")
LEAN_FROM_BYTES = 100_000_000
"""Kineto files from this size on go without shapes, as traces of a million events usually do."""
TIMED_PROCESS = Path(__file__).with_name("timed_process.py")
TILING = [Path(__file__).with_name(name) for name in ("kineto_tiles.py", "nsys_tiles.py")]


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was read."""

    reads: str
    capture: str
    shapes: bool
    tiles: KinetoTiles | NsysTiles


class Result(msgspec.Struct, kw_only=True):
    """One contestant on one file."""

    contestant: str
    version: str
    computes: str
    input_changed: str = ""
    """What the contestant did to its copy of the file, or left beside it."""
    printed: str = ""
    """The end of what it printed, as evidence of what it read."""
    failure: str = ""
    samples: list[Sample] = []

    @property
    def wall_s(self) -> float:
        return statistics.median(sample.wall_s for sample in self.samples)

    @property
    def peak_bytes(self) -> float:
        return statistics.median(sample.peak_bytes for sample in self.samples)


class Race(msgspec.Struct, kw_only=True):
    """All contestants on one file."""

    input: Input
    results: list[Result]


class Report(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    date: str
    environment: Environment
    cores: str
    repeats: int
    races: list[Race]


class Track:
    """Where files are made and contestants run."""

    def __init__(self, cache: Path, captures: dict[str, Path], cores: str, timeout_s: float) -> None:
        self.cache = cache
        self.captures = captures
        self.cores = cores
        self.timeout_s = timeout_s
        self.peers = Peers(cache / "peers")

    def make_input(self, reads: str, size_bytes: int) -> tuple[Path, Input]:
        """The tiled file of this size, made unless it is there."""
        capture, lean = self.captures[reads], reads == "kineto" and size_bytes >= LEAN_FROM_BYTES
        variant = "lean" if lean else "full"
        content = hashlib.sha256(b"".join(path.read_bytes() for path in (capture, *TILING))).hexdigest()[:10]
        folder = self.cache / f"{reads}-{variant}-{size_bytes // 10**6}MB-{content}"
        file, note = folder / FILE_NAMES[reads], folder / "input.json"
        if not note.exists():
            folder.mkdir(exist_ok=True)
            make = tile_kineto(capture, file, size_bytes, drop_arguments=lean) if reads == "kineto" else None
            tiles = make or tile_nsys(capture, file, size_bytes)
            made = Input(reads=reads, capture=capture.name, shapes=not lean, tiles=tiles)
            note.write_bytes(msgspec.json.encode(made))
        return file, msgspec.json.decode(note.read_bytes(), type=Input)

    def run(self, contestant: Contestant, file: Path, result: Result) -> Sample | None:
        """One fresh process. Without a sample the result says why."""
        with tempfile.TemporaryDirectory(dir=self.cache, prefix="run-") as name:
            folder = Path(name)
            place = folder / "input"
            place.mkdir()
            copy = place / file.name
            shutil.copyfile(file, copy)
            with copy.open("rb") as written:  # else the kernel writes it back while the contestant runs
                os.fsync(written.fileno())
            output, errors = folder / "output", folder / "errors"
            wrapper = [sys.executable, "-I", "-S", str(TIMED_PROCESS), self.cores, str(output), str(errors)]
            process = subprocess.Popen(
                [*wrapper, *self.peers.command(contestant, copy)],
                stdout=subprocess.PIPE,
                cwd=folder,
                env=self.peers.variables(contestant),
                start_new_session=True,
            )
            try:
                answer, _ = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                result.failure = f"longer than {self.timeout_s:.0f} s"
                return None
            if process.returncode:
                result.failure = last_line(errors.read_text(errors="replace") if errors.exists() else "")
                return None
            told = json.loads(answer)
            if told["exit_code"]:
                result.failure = last_line(errors.read_text(errors="replace"))
                return None
            result.printed = output.read_text(errors="replace")[-300:].replace(f"{place}/", "")
            result.input_changed = changes(file, copy)
            return msgspec.convert(told["sample"], type=Sample)

    def race(self, file: Path, read: Input, names: list[str] | None, repeats: int) -> Race:
        """The contestants in turn, `repeats` times, each beginning once as the first of a turn."""
        trial, _ = self.make_input(read.reads, 1)
        field, results = [], []
        for contestant in CONTESTANTS:
            if contestant.reads != read.reads or (names and contestant.name not in names):
                continue
            result = Result(contestant=contestant.name, version="", computes=contestant.computes)
            results.append(result)
            result.failure = self.peers.missing(contestant) or ""
            if result.failure:
                continue
            result.version = self.peers.version(contestant)
            if self.run(contestant, trial, result):
                field.append((contestant, result))
        for turn in range(repeats):
            for i in range(len(field)):
                contestant, result = field[(i + turn) % len(field)]
                sys.stderr.write(f"turn {turn + 1} of {repeats}: {contestant.name}\n")
                if not result.failure and (sample := self.run(contestant, file, result)):
                    result.samples = [*result.samples, sample]
        return Race(input=read, results=results)


def changes(original: Path, copy: Path) -> str:
    """What became of the copy of a file and of the folder it lay in."""
    beside = len([path for path in copy.parent.rglob("*") if path.is_file() and path != copy])
    said = []
    if not copy.exists():
        said.append("removed")
    elif digest(original) != digest(copy):
        said.append("rewritten")
    if beside:
        said.append(f"{beside} {'file' if beside == 1 else 'files'} beside it")
    return ", ".join(said) or "no"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def exponent(sizes: list[float], values: list[float]) -> float | None:
    """The p of the power law value = c * size**p nearest in logarithms: 1 is linear."""
    if len(set(sizes)) < 2:
        return None
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values]).slope


def describe_input(read: Input) -> str:
    """The file in words."""
    tiles = read.tiles
    size = f"{tiles.bytes / 1e6:.1f} MB"
    if isinstance(tiles, KinetoTiles):
        shapes = "" if read.shapes else ", without shapes"
        return f"Kineto, {size}, {tiles.events:,} events, {tiles.kernels:,} kernels{shapes}"
    return f"nsys SQLite, {size}, {tiles.kernels:,} kernels, {tiles.ranges:,} ranges"


HEADS = ("reader", "version", "median", "least to most", "against stepscope", "peak", "input changed")


def rows_of(race: Race) -> list[tuple[str, ...]]:
    """A row for each contestant that was timed, fastest first."""
    own = next((r.wall_s for r in race.results if r.contestant == "stepscope" and r.samples), None)
    rows = []
    for result in sorted((r for r in race.results if r.samples), key=lambda r: r.wall_s):
        walls = [sample.wall_s for sample in result.samples]
        rows.append(
            (
                result.contestant,
                result.version,
                f"{result.wall_s:.2f} s",
                f"{min(walls):.2f} to {max(walls):.2f} s",
                f"{result.wall_s / own:.1f} x" if own else "",
                f"{result.peak_bytes / 1e6:.0f} MB",
                result.input_changed,
            )
        )
    return rows


def notes_of(race: Race) -> list[str]:
    """What each contestant computes, and why some have no figure, or fewer runs than the rest."""
    return [
        f"{result.contestant}: {result.computes}{f' ({result.failure})' if result.failure else ''}"
        for result in race.results
    ]


def scaling_lines(races: list[Race]) -> list[str]:
    """The fitted exponents of stepscope's time and memory, for each kind of file."""
    lines = []
    for reads in SIZES:
        points = [
            (race.input.tiles.bytes, result.wall_s, result.peak_bytes)
            for race in races
            for result in race.results
            if race.input.reads == reads and result.contestant == "stepscope" and result.samples
        ]
        sizes, walls, peaks = ([float(point[i]) for point in points] for i in range(3))
        time_grows, memory_grows = exponent(sizes, walls), exponent(sizes, peaks)
        if time_grows is not None and memory_grows is not None:
            lines.append(f"{reads}: time grows as bytes^{time_grows:.2f}, peak memory as bytes^{memory_grows:.2f}")
    return lines


def disturbance(report: Report) -> str:
    """The most that others kept busy during any timed run."""
    samples = [sample for race in report.races for result in race.results for sample in result.samples]
    seen = [sample.other_cores for sample in samples if sample.other_cores is not None]
    return f"; others kept at most {max(seen):.2f} cores busy during a run" if seen else ""


def render(report: Report, console: Console) -> None:
    """The report as tables for a person."""
    console.print(report.environment.described)
    console.print(f"{report.date}, cores {report.cores or 'all'}, {report.repeats} runs each{disturbance(report)}")
    for race in report.races:
        table = Table(
            Column(HEADS[0], no_wrap=True), *HEADS[1:], title=describe_input(race.input), title_justify="left"
        )
        for row in rows_of(race):
            table.add_row(*row)
        console.print(table if table.rows else f"{table.title}: nobody was timed")
        for note in notes_of(race):
            console.print(f"  {note}", markup=False, highlight=False)
    for line in scaling_lines(report.races):
        console.print(line)


def render_markdown(report: Report) -> str:
    """The report as Markdown."""
    lines = [report.environment.described, ""]
    lines += [f"{report.date}, cores {report.cores or 'all'}, {report.repeats} runs each{disturbance(report)}", ""]
    for race in report.races:
        lines += [f"**{describe_input(race.input)}**", ""]
        lines += ["| " + " | ".join(row) + " |" for row in (HEADS, ("---",) * len(HEADS), *rows_of(race))] + [""]
        lines += [f"- {note}" for note in notes_of(race)] + [""]
    return "\n".join([*lines, *scaling_lines(report.races)]).rstrip() + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", choices=tuple(SIZES), help="only files of this kind")
    parser.add_argument("--kineto", type=Path, default=CAPTURES["kineto"], metavar="CAPTURE")
    parser.add_argument("--nsys", type=Path, default=CAPTURES["nsys"], metavar="CAPTURE")
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help="bytes aimed at: 50MB 1GB")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these contestants")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", default="", help="processor cores to run on, as 0,1; all without it")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds allowed to one run")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-trace-benchmark")
    peers = parser.add_argument("--peers", nargs="*", choices=tuple(ENVIRONMENTS), metavar="ENVIRONMENT")
    peers.help = f"first make the peers' virtual environments anew, or only these of {', '.join(ENVIRONMENTS)}"
    parser.add_argument("--scaling", action="store_true", help="stepscope alone at three sizes up to 1 GB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> Report:
    """The races that the arguments ask for."""
    captures = {"kineto": arguments.kineto, "nsys": arguments.nsys}
    track = Track(arguments.cache.resolve(), captures, arguments.cores, arguments.timeout)
    for name in () if arguments.peers is None else arguments.peers or ENVIRONMENTS:
        sys.stderr.write(f"installing {name}\n")
        track.peers.install(name)
    names = ["stepscope"] if arguments.scaling else arguments.only
    races = []
    for reads in [arguments.reads] if arguments.reads else list(SIZES):
        for size in arguments.sizes or (SCALING_SIZES if arguments.scaling else SIZES[reads]):
            file, read = track.make_input(reads, parse_bytes(size))
            races.append(track.race(file, read, names, arguments.repeats))
    return Report(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        environment=read_environment(torch.device("cpu")),
        cores=arguments.cores,
        repeats=arguments.repeats,
        races=races,
    )


def main() -> None:
    """Measure, or show what was measured."""
    measure_or_show(parse_arguments(), Report, measure=measure_all, render=render, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
