"""What reading and starting cost beside the least that any program pays for them: processor time, and peak memory.

    python benchmarks/reading.py [--only KIND...] [--repeats 5] [--size 199MB] [--json FILE]
    python benchmarks/reading.py --before COMMIT [--only nsys start]        # beside an older stepscope
    python benchmarks/reading.py --show FILE...

Each runs as a fresh process of one thread on a file in the page cache, in turn with its peers; the least processor time
of each counts, since what others do on the machine only adds to it. A peer that takes long runs once. Modules are
compiled, as in an installed package. Peers with environments of their own run where `benchmarks/trace.py --peers` has
made them; the others are named with the reason.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from contestants import CONTESTANTS, Contestant, Peers
from kineto_tiles import tile_kineto
from nsys_tiles import tile_nsys
from page import all_runs, run_with_trace
from snapshot_tiles import tile_snapshot
from stepscope.core.environment import Environment
from stepscope.core.errors import StepscopeError
from stepscope.core.units import parse_bytes
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

HERE = Path(__file__).parent
DATA = HERE.parent / "tests" / "data"
NSYS = DATA / "nsys_train.sqlite.gz"
KINETO, KINETO_BYTES = DATA / "kineto_train.json.gz", {"lean": 218_000_000, "with shapes": 10_000_000}
SNAPSHOT, EVENTS = DATA / "snapshot_train.pickle.gz", (1_000_000, 4_580_000)
KERNELS, RUNS, KINDS = 50_000, 100, ("nsys", "kineto", "snapshot", "page", "run", "start")
PICKLE = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
DECODING = """import sys
from pathlib import Path
from stepscope.traces.readers import json_events, kineto
for _ in json_events.read_events(Path(sys.argv[1]), kineto.block_decoder()): pass"""
"""Decodes the events of a Kineto trace as we do, and makes no table of them."""

RUN_TREE = """import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("stepscope", run_name="__main__", alter_sys=True)"""
"""Runs the stepscope of another source tree."""


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """Two commands, after the interpreter, on one file."""

    name: str
    ours: tuple[str, ...]
    peer_name: str
    peer: tuple[str, ...]
    python: str = sys.executable
    """The peer's interpreter."""
    version: str = f"Python {sys.version.partition(' ')[0]}"
    """The peer's version."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One race: the least processor seconds of both, and our least peak."""

    name: str
    ours_s: float
    peer: str
    peer_s: float
    ratio: float
    peak_mib: float
    peer_version: str = ""
    peer_repeats: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark's result."""

    date: str
    environment: Environment
    repeats: int
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()
    """Peers that did not take part, each with the reason."""


def nsys_races(folder: Path, capture: Path, size_bytes: int) -> list[Race]:
    """A tiled export: the screen, all that is known, one table; each beside a sweep of the same rows."""
    file = folder / "nsys.sqlite"
    made = tile_nsys(capture, file, size_bytes, ranges=False)
    what = f"nsys {made.bytes / 1e6:.0f} MB, {made.kernels:,} kernels"
    sweep = (str(HERE / "peers" / "with_sqlite3_sweep.py"), str(file))
    ways = {"screen": (), "--json": ("--json",), "--only phase": ("--only", "phase")}
    return [
        Race(
            name=f"{what}, {way}",
            ours=("-m", "stepscope", "trace", str(file), *options),
            peer_name="sqlite3 sweep",
            peer=sweep,
        )
        for way, options in ways.items()
    ]


def kineto_peers() -> list[Contestant]:
    """Who reads Kineto traces beside us."""
    return [one for one in CONTESTANTS if one.reads == "kineto" and one.runner]


def kineto_races(folder: Path, peers: Peers) -> list[Race]:
    """Tiled traces, a large one without shapes and a small one; each beside every peer that is installed."""
    races: list[Race] = []
    there = [peer for peer in kineto_peers() if not peers.missing(peer)]
    for kind, size in KINETO_BYTES.items():
        file = folder / str(size) / "worker.pt.trace.json"  # HTA reads its whole folder, TensorBoard files of this name
        file.parent.mkdir()
        made = tile_kineto(KINETO, file, size, drop_arguments=kind == "lean")
        name = f"Kineto {made.bytes / 1e6:.0f} MB, {made.events:,} events"
        ours = ("-m", "stepscope", "trace", str(file), "--json")
        for peer in there:
            python, *rest = peers.command(peer, file)
            version = peers.version(peer)
            races.append(
                Race(name=name, ours=ours, peer_name=peer.name, peer=tuple(rest), python=python, version=version)
            )
        decoding = ("-c", DECODING, str(file))
        races.append(Race(name=name, ours=ours, peer_name="its decoding alone", peer=decoding, version=""))
    return races


def snapshot_races(folder: Path) -> list[Race]:
    """Tiled histories, each beside the reading of the pickle alone."""
    races: list[Race] = []
    for events in EVENTS:
        file = folder / f"{events}.pickle"
        made = tile_snapshot(SNAPSHOT, file, events)
        name = f"snapshot {made.bytes / 1e6:.0f} MB, {made.events:,} events"
        ours = ("-m", "stepscope", "memory", str(file), "--json")
        races.append(Race(name=name, ours=ours, peer_name="pickle.load", peer=("-c", PICKLE, str(file))))
    return races


def page_races(folder: Path) -> list[Race]:
    """A run's page with a large trace, beside what is said of the trace alone."""
    run, out = str(run_with_trace(folder, KERNELS)), str(folder / "run.html")
    ours = ("-m", "stepscope", "report", run, "-o", out)
    peer = ("-m", "stepscope", "trace", run, "--json")
    return [Race(name=f"a page, {KERNELS:,} kernels", ours=ours, peer_name="trace --json", peer=peer)]


def run_races(folder: Path) -> list[Race]:
    """A short run, beside the steps that it took."""
    runs = str(folder / "runs")
    wanted = ("--model", "tiny", "--seconds", "1", "--device", "cpu")
    loop = (str(HERE / "peers" / "with_torch_loop.py"), runs)
    ours = ("-m", "stepscope", "run", *wanted, "--runs", runs)
    return [Race(name=f"run {' '.join(wanted[:4])}", ours=ours, peer_name="torch, AdamW, its steps", peer=loop)]


def start_races(folder: Path) -> list[Race]:
    """Help, and a list of runs that was made once before, beside the interpreter alone."""
    runs = all_runs(folder, RUNS)
    helps = [(verb, verb.split()) for verb in ("--help", "run --help", "study --help")]
    return [
        Race(name=name, ours=("-m", "stepscope", *verb), peer_name="python", peer=("-c", ""))
        for name, verb in [*helps, (f"ls, {RUNS} runs", ["ls", str(runs)])]
    ]


def beside_older(races: list[Race], commit: str, folder: Path) -> list[Race]:
    """Our commands beside the same ones of the stepscope of this commit, whose files are written to this folder."""
    archive = subprocess.run(("git", "-C", str(HERE.parent), "archive", commit, "src"), capture_output=True, check=True)
    subprocess.run(("tar", "-x", "-C", str(folder)), input=archive.stdout, check=True)
    ours = {race.ours: race for race in races}.values()
    return [
        Race(
            name=race.name,
            ours=race.ours,
            peer_name=f"stepscope of {commit}",
            peer=("-c", RUN_TREE, str(folder / "src"), *race.ours[2:]),
            version="",
        )
        for race in ours
    ]


def sample_of(command: tuple[str, ...], python: str = sys.executable) -> Sample:
    """One fresh process. Raises StepscopeError where it fails."""
    with tempfile.TemporaryDirectory() as name:
        errors = Path(name, "errors")
        wrapper = [sys.executable, "-I", "-S", str(HERE / "timed_process.py"), "", str(Path(name, "printed"))]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        one_thread.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(
            [*wrapper, str(errors), python, *command], capture_output=True, check=True, env=one_thread
        )
        told = json.loads(done.stdout)
        ours = "stepscope" in command or RUN_TREE in command
        if told["exit_code"] not in (0, 1 if ours else 0):  # 1: ours, with findings
            raise StepscopeError(f"{' '.join(command)}: {errors.read_text(errors='replace').strip()}")
    return msgspec.convert(told["sample"], type=Sample)


_LONG_S = 10
"""A peer that takes more runs once."""


def rows_of(races: list[Race], repeats: int) -> list[Row]:
    """One command of ours in turn with each of its peers."""
    first, peers = races[0], [list[float]() for _ in races]
    sys.stderr.write(f"{first.name}\n")
    ours: list[Sample] = []
    for _ in range(repeats):
        ours.append(sample_of(first.ours))
        for race, taken in zip(races, peers, strict=True):
            if not taken or taken[0] < _LONG_S:
                taken.append(sample_of(race.peer, race.python).cpu_s)
    least = min(sample.cpu_s for sample in ours)
    return [
        Row(
            name=race.name,
            ours_s=least,
            peer=race.peer_name,
            peer_s=min(taken),
            ratio=least / min(taken),
            peak_mib=min(sample.peak_bytes for sample in ours) / 2**20,
            peer_version=race.version,
            peer_repeats=len(taken),
        )
        for race, taken in zip(races, peers, strict=True)
    ]


def measure_all(arguments: argparse.Namespace) -> Report:
    """All races."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {
            "nsys": lambda: nsys_races(folder, arguments.nsys, parse_bytes(arguments.size)),
            "kineto": lambda: kineto_races(folder, Peers(arguments.peers)),
            "snapshot": lambda: snapshot_races(folder),
            "page": lambda: page_races(folder),
            "run": lambda: run_races(folder),
            "start": lambda: start_races(folder),
        }
        races = [race for kind in arguments.only or kinds for race in kinds[kind]()]
        if arguments.before:
            races = beside_older(races, arguments.before, folder)
        together = [list(group) for _, group in groupby(races, key=lambda race: race.ours)]
        rows = tuple(row for group in together for row in rows_of(group, arguments.repeats))
        peers = kineto_peers() if "kineto" in (arguments.only or kinds) else []
        missing = {peer.name: Peers(arguments.peers).missing(peer) for peer in peers}
    return Report(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        environment=read_environment(torch.device("cpu")),
        repeats=arguments.repeats,
        rows=rows,
        left_out=tuple(f"{name}: {reason}" for name, reason in missing.items() if reason),
    )


HEADS = ("what", "ours", "peer", "its", "ratio", "peak")


def cells(report: Report) -> list[tuple[str, ...]]:
    """The rows as texts."""
    return [
        (
            row.name,
            f"{row.ours_s:.2f} s",
            f"{row.peer} {row.peer_version.removeprefix('Python ')}".strip(),
            f"{row.peer_s:.2f} s",
            f"{row.ratio:.2f}",
            f"{row.peak_mib:.0f} MiB",
        )
        for row in report.rows
    ]


def render(report: Report, console: Console) -> None:
    """The report as a table for a person."""
    table = Table(
        *HEADS, title=f"{report.environment.described}; {report.date}; least of {report.repeats}, CPU seconds"
    )
    for row in cells(report):
        table.add_row(*row)
    console.print(table)
    for line in report.left_out:
        console.print(line)


def render_markdown(report: Report) -> str:
    """The report as Markdown."""
    head = f"{report.environment.described}; {report.date}; least of {report.repeats}, CPU seconds"
    rows = (HEADS, ("---",) * len(HEADS), *cells(report))
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in rows), *report.left_out]) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nsys", type=Path, default=NSYS, metavar="CAPTURE", help="an export that is tiled")
    parser.add_argument("--size", default="199MB", help="bytes of the tiled export")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="only these kinds")
    parser.add_argument(
        "--peers", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-trace-benchmark" / "peers"
    )
    parser.add_argument("--before", metavar="COMMIT", help="beside the stepscope of this commit, in place of peers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, or show what was measured."""
    measure_or_show(parse_arguments(), Report, measure=measure_all, render=render, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
