"""What does it cost to read two ranks together, or a whole job? As fresh processes.

    python benchmarks/ranks.py [--size 203MB] [--repeats 5] --json results/cpu/trace/ranks.json
    python benchmarks/ranks.py --job 64 --size 100MB --repeats 1 --json results/cpu/trace/job-64.json
    python benchmarks/ranks.py --job 1 --size 2GB --repeats 1 --json results/cpu/trace/one-2gb.json
    python benchmarks/ranks.py --show results/cpu/trace/ranks.json

Two ranks: one alone and both together, in turns, tiled from one capture of the tests (kineto_tiles.py), the second a
little shorter than the first. A job: its ranks are tiled from those of two GPUs, by turns, each with a number of its
own; the peak is that of all processes together, looked at ten times a second.
"""

import argparse
import datetime
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from trace import CAPTURES, TIMED_PROCESS, Track  # type: ignore[attr-defined]  # the benchmark beside this one

import msgspec
import torch
from rich.console import Console
from rich.markdown import Markdown

from kineto_tiles import tile_kineto
from stepscope.core.environment import Environment
from stepscope.core.units import parse_bytes
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

FIRST, SECOND, TOGETHER = "rank 0", "rank 1", "both together"
_SHORTER = 0.98
_PAIR = sorted(
    Path(__file__).parents[1].glob("results/h200-x2/ranks/late-5/*/trace.kineto.json.gz"),
    key=lambda path: path.parent.name.partition("-rank")[2],
)


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of each kind."""

    environment: Environment
    date: str
    megabytes: float
    samples: dict[str, list[Sample]]


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="203MB")
    parser.add_argument("--job", type=int, metavar="RANKS", help="a folder of so many ranks of that size")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-trace-benchmark")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(
        parser.parse_args(),
        Ranks,
        measure=lambda asked: _measure_job(asked) if asked.job else _measure(asked),
        render=lambda result, console: Console.print(console, Markdown(_markdown(result))),
        render_markdown=_markdown,
    )


def _measure(asked: argparse.Namespace) -> Ranks:
    track = Track(asked.cache.resolve(), CAPTURES, "", 600)
    size = parse_bytes(asked.size)
    files = [track.make_input("kineto", bytes_)[0] for bytes_ in (size, round(size * _SHORTER))]
    with tempfile.TemporaryDirectory(dir=asked.cache) as folder:
        ranks = [Path(folder, f"rank{number}.json") for number in range(2)]
        for rank, file in zip(ranks, files, strict=True):
            rank.hardlink_to(file)
        first, second = map(str, ranks)
        kinds = {FIRST: [first], SECOND: [second], TOGETHER: [first, second]}
        samples: dict[str, list[Sample]] = {kind: [] for kind in kinds}
        for _ in range(asked.repeats):
            for kind, given in kinds.items():
                samples[kind].append(_run(given, Path(folder)))
    return Ranks(
        environment=read_environment(torch.device("cpu")),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        megabytes=files[0].stat().st_size / 1e6,
        samples=samples,
    )


def _measure_job(asked: argparse.Namespace) -> Ranks:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_job(folder, asked.job, parse_bytes(asked.size))
        files = sorted(folder.iterdir())
        sizes = [file.stat().st_size / 1e6 for file in files]
        for file in files:  # else the kernel writes them back meanwhile
            with file.open("rb") as written:
                os.fsync(written.fileno())
        given = folder if asked.job > 1 else files[0]
        samples = [_run_all(given) for _ in range(asked.repeats)]
    return Ranks(
        environment=read_environment(torch.device("cpu")),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        megabytes=statistics.mean(sizes),
        samples={f"{asked.job} ranks" if asked.job > 1 else "one": samples},
    )


def _make_job(folder: Path, count: int, size_bytes: int) -> None:
    """Write the captures of so many ranks, from those of two."""
    with tempfile.TemporaryDirectory() as name:
        pair: list[tuple[bytes, bytes]] = []
        for capture in _PAIR[:count]:
            tiled = Path(name, "tiled.json")
            tile_kineto(capture, tiled, size_bytes, drop_arguments=True)
            head, mark, events = tiled.read_bytes().partition(b'"traceEvents"')
            pair.append((head, mark + events))
            tiled.unlink()
        for rank in range(count):
            head, events = pair[rank % 2]
            head = re.sub(rb'"rank": \d+', b'"rank": %d' % rank, head)
            head = re.sub(rb'"world_size": \d+', b'"world_size": %d' % count, head)
            with (folder / f"rank{rank}.json").open("wb") as file:
                file.write(head)
                file.write(events)


def _run_all(given: Path) -> Sample:
    """One run, with the resident memory of all of its processes together. Shared pages count in each."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    peak = 0
    command = [sys.executable, "-m", "stepscope", "trace", str(given), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(0.1)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 1):
        raise ValueError(f"{given}: exit code {process.returncode}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=peak, other_cores=None)


def _resident_bytes(pid: int) -> int:
    """Of a process and all that it started; what ended meanwhile has none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(_resident_bytes, children))


def _run(files: list[str], folder: Path) -> Sample:
    command = [sys.executable, "-I", "-S", str(TIMED_PROCESS), "", str(folder / "output"), str(folder / "errors")]
    command += [sys.executable, "-m", "stepscope", "trace", *files, "--json"]
    timed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    if timed["exit_code"] not in (0, 1):
        raise ValueError((folder / "errors").read_text().strip())
    return msgspec.convert(timed["sample"], Sample)


def _markdown(result: Ranks) -> str:
    where = result.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    wall = {kind: statistics.median(one.wall_s for one in some) for kind, some in result.samples.items()}
    peak = {kind: max(one.peak_bytes for one in some) for kind, some in result.samples.items()}
    head = f"{where.device_name}; {versions}; {result.date}"
    if TOGETHER not in result.samples:
        ((kind, some),) = result.samples.items()
        of = f"{kind} of {result.megabytes:,.0f} MB"
        cpu_s = min(one.cpu_s for one in some)
        return f"{head}\n\n{of}: {cpu_s:.0f} CPU s in {wall[kind]:.0f} s, {peak[kind] / 2**20:,.0f} MiB in all\n"
    busy = max(one.other_cores or 0.0 for some in result.samples.values() for one in some)
    lines = [
        f"{head}; others kept at most {busy:.2f} cores busy",
        "",
        f"| of {result.megabytes:.1f} MB | median | least to most | peak |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, some in result.samples.items():
        times = sorted(one.wall_s for one in some)
        lines.append(
            f"| {kind} | {wall[kind]:.2f} s | {times[0]:.2f} to {times[-1]:.2f} s | {peak[kind] / 1e6:.0f} MB |"
        )
    together, memory = wall[TOGETHER] / (wall[FIRST] + wall[SECOND]), peak[TOGETHER] / peak[FIRST]
    said = f"Together they take {together:.2f} times what both take alone, and {memory:.2f} times the memory of one."
    lines += ["", said]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
