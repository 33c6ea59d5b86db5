"""What does `stepscope trace` make of captures that others published? Beside it, the truth by a plain reading.

    python benchmarks/published.py FOLDER --json results/cpu/published.json
    python benchmarks/published.py --show results/cpu/published.json

Each capture is read by a fresh process. The truth is computed here from the raw file, with the standard library alone:
how many kernels there are, how long they take together, and how much of that was launched inside backward (by ranges
that say so on any thread, or else by autograd's nodes on the launching thread).
"""

import argparse
import datetime
import gzip
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.markdown import Markdown

from stepscope.core.environment import Environment
from stepscope.recording.environment import read_environment
from stored import Sample, measure_or_show

TIMED_PROCESS = Path(__file__).with_name("timed_process.py")
_KERNELS = ("kernel", "concurrent_kernel")
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "runtime", "driver")
_NODE = "autograd::engine::evaluate_function"
_MARKED = re.compile(r"\W*backward\W*", re.IGNORECASE)


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What a plain reading of the raw file counts."""

    kernels: int
    busy_ms: float
    backward_ms: float | None
    """None where neither ranges nor autograd's nodes tell it."""
    backward_by: str


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """One published capture: what stepscope says, and the truth."""

    file: str
    megabytes: float
    """Uncompressed."""
    kernels: int
    busy_ms: float
    steps: int
    phases: dict[str, tuple[float, str]]
    """Milliseconds of kernels in each phase over the whole capture, and how it was found."""
    other_share: float
    sample: Sample
    truth: Truth


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """All captures of a folder."""

    environment: Environment
    date: str
    captures: list[Capture]


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--json", type=Path, help="keep the result in this file")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="print tables of results kept before")
    asked = parser.parse_args()
    if asked.folder is None and not asked.show:
        parser.error("name the folder that holds the captures, or results to --show")
    measure_or_show(
        asked,
        Published,
        measure=_measure,
        render=lambda result, console: console.print(Markdown(_markdown(result))),
        render_markdown=_markdown,
    )


def _measure(asked: argparse.Namespace) -> Published:
    files = sorted(path for path in asked.folder.iterdir() if path.name.endswith((".json.gz", ".sqlite.gz")))
    if not files:
        raise ValueError(f"no captures (*.json.gz, *.sqlite.gz) in {asked.folder}")
    captures: list[Capture] = []
    for path in files:
        sys.stderr.write(f"{path.name}\n")
        captures.append(_capture(path))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Published(environment=read_environment(torch.device("cpu")), date=date, captures=captures)


def _capture(path: Path) -> Capture:
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        command = [sys.executable, "-I", "-S", str(TIMED_PROCESS), "", str(output), str(errors)]
        command += [sys.executable, "-m", "stepscope", "trace", str(path), "--json"]
        timed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        if timed["exit_code"] not in (0, 1):
            raise ValueError(f"{path.name}: {errors.read_text().strip()}")
        said = json.loads(output.read_bytes())
    raw = gzip.decompress(path.read_bytes())
    steps = said["steps"]
    other = sum(row["busy_ns"] for row in said["families"] if row["family"] == "other")
    total = sum(row["busy_ns"] for row in said["families"])
    return Capture(
        file=path.name,
        megabytes=len(raw) / 1e6,
        kernels=said["kernels"],
        busy_ms=said["busy_ns"] / 1e6,
        steps=steps,
        phases={
            row["phase"]: (row["busy_ns"] * steps / 1e6, row["found_by"] or "") for row in said["phases"]
        },
        other_share=other / total if total else 0.0,
        sample=msgspec.convert(timed["sample"], Sample),
        truth=_of_export(raw) if path.name.endswith(".sqlite.gz") else _of_trace(json.loads(raw)),
    )  # fmt: skip


def _of_export(raw: bytes) -> Truth:
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        file.write(raw)
        file.flush()
        rows = sqlite3.connect(file.name).execute("SELECT count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL")
        kernels, busy_ns = rows.fetchone()
    return Truth(kernels=kernels, busy_ms=busy_ns / 1e6, backward_ms=None, backward_by="")


def _of_trace(trace: Any) -> Truth:
    events: list[dict[str, Any]] = trace["traceEvents"] if isinstance(trace, dict) else trace
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if str(event.get("cat")).lower() in _KERNELS]
    calls = {
        event["args"]["correlation"]: event
        for event in complete
        if str(event.get("cat")).lower() in _CALLS and "correlation" in event.get("args", {})
    }
    marked = [event for event in complete if event.get("cat") == "user_annotation" and _MARKED.fullmatch(event["name"])]
    nodes = [event for event in complete if str(event.get("name")).startswith(_NODE)]
    spans: dict[Any, list[tuple[float, float]]] = {}
    for event in marked or nodes:
        spans.setdefault(None if marked else event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for some in spans.values():
        some.sort()
    inside = 0.0
    for event in kernels:
        call = calls.get(event["args"].get("correlation"))
        some = spans.get(None if marked else call["tid"], []) if call else []
        at = bisect_right(some, (call["ts"], float("inf"))) - 1 if call else -1
        inside += event["dur"] if call and at >= 0 and call["ts"] < some[at][1] else 0.0
    return Truth(
        kernels=len(kernels),
        busy_ms=sum(event["dur"] for event in kernels) / 1e3,
        backward_ms=inside / 1e3 if spans else None,
        backward_by="ranges" if marked else "autograd's nodes" if nodes else "",
    )


def _markdown(result: Published) -> str:
    where = result.environment
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    head = (
        "file",
        "MB",
        "kernels",
        "truth",
        "busy ms",
        "truth",
        "backward ms",
        "found by",
        "truth",
        "other",
        "s",
        "peak",
    )
    lines = [f"{where.device_name}; {versions}; {result.date}", "", f"| {' | '.join(head)} |"]
    lines.append(f"|{'|'.join([' --- '] + [' ---: '] * (len(head) - 1))}|")
    for one in result.captures:
        backward, found_by = one.phases.get("backward", (None, ""))
        cells = (
            one.file.partition(".")[0], f"{one.megabytes:.1f}", f"{one.kernels:,}", f"{one.truth.kernels:,}",
            f"{one.busy_ms:.3f}", f"{one.truth.busy_ms:.3f}",
            "" if backward is None else f"{backward:.3f}", found_by,
            "" if one.truth.backward_ms is None else f"{one.truth.backward_ms:.3f}",
            f"{one.other_share * 100:.1f} %", f"{one.sample.wall_s:.2f}", f"{one.sample.peak_bytes / 1e6:.0f} MB",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
