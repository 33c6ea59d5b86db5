"""What does it cost to read two ranks together? One rank alone and both together, in turns, as fresh processes.

    python benchmarks/ranks.py [--size 203MB] [--repeats 5] --json results/cpu/trace/ranks.json
    python benchmarks/ranks.py --show results/cpu/trace/ranks.json

Both ranks are tiled from one capture of the tests (kineto_tiles.py), the second a little shorter than the first.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from trace import CAPTURES, TIMED_PROCESS, Track  # type: ignore[attr-defined]  # the benchmark beside this one

import msgspec
import torch
from rich.console import Console
from rich.markdown import Markdown

from stepscope.core.environment import Environment
from stepscope.core.units import parse_bytes
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

FIRST, SECOND, TOGETHER = "rank 0", "rank 1", "both together"
_SHORTER = 0.98


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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "stepscope-trace-benchmark")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(
        parser.parse_args(),
        Ranks,
        measure=_measure,
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
    busy = max(one.other_cores or 0.0 for some in result.samples.values() for one in some)
    lines = [
        f"{where.device_name}; {versions}; {result.date}; others kept at most {busy:.2f} cores busy",
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
