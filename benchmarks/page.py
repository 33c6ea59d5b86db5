"""How long does a page take to write and to open? A run with a large trace, a sweep of many cells, an index of runs.

    python benchmarks/page.py [--kernels 50000] [--cells 500] [--runs 5000] [--rounds 3] [--json FILE]
    python benchmarks/page.py --show FILE...        # a table of results kept with --json
    python benchmarks/page.py --pictures docs       # the pictures of docs/report.md, and nothing is timed

The trace is a small one written many times over (benchmarks/kineto_tiles.py), and the sweep copies of one stored run
with other sizes and times. The runs of the index are those of benchmarks/many_runs.py, listed once before. Each page is
written by a process of its own, from the prompt to the prompt: the seconds that pass, and those that its processor
works, which other programs change little. It is opened in a Chromium, until the first frame after loading is drawn.
"""

import argparse
import gzip
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from playwright.sync_api import ViewportSize, sync_playwright

import many_runs
from kineto_tiles import tile_kineto
from stepscope.core.run_directory import KINETO_FILE, RUN_FILE
from stepscope.recording.environment import read_environment
from stored import keep

ROOT = Path(__file__).parents[1]
LOOP = next((ROOT / "results" / "h200" / "loops").glob("*LlamaForCausalLM*"))
CELL = next((ROOT / "results" / "h200" / "plain").glob("*small*fp32*")) / RUN_FILE
_PAINTED = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(
    () => done(performance.now()))))"""


class Timed(msgspec.Struct, kw_only=True):
    """One page."""

    what: str
    written_s: list[float]
    processor_s: list[float]
    opened_s: list[float]
    bytes: int


class Result(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    environment: str
    browser: str
    pages: list[Timed]


def run_with_trace(folder: Path, kernels: int) -> Path:
    """A run directory whose trace holds at least so many kernels."""
    run, plain = folder / "run", folder / "trace.json"
    run.mkdir()
    shutil.copy(LOOP / RUN_FILE, run)
    one = tile_kineto(LOOP / KINETO_FILE, plain, 1)
    made = tile_kineto(LOOP / KINETO_FILE, plain, math.ceil(kernels / one.kernels) * one.bytes)
    if made.kernels < kernels:
        raise ValueError(f"{made.kernels} kernels, and {kernels} were wanted")
    (run / KINETO_FILE).write_bytes(gzip.compress(plain.read_bytes(), 1))
    return run


def sweep(folder: Path, cells: int) -> Path:
    """So many runs that differ in length, batch and dtype."""
    document = json.loads(CELL.read_bytes())
    place = folder / "sweep"
    for number in range(cells):
        made = json.loads(json.dumps(document))
        made["workload"]["seq_len"] = 64 * (1 + number % 25)
        made["workload"]["batch_size"] = 1 + number // 25
        made["id"] = f"20260101T{number:06}.000-cell{number}"
        for samples in made["samples"].values():
            samples["values_s"] = [value * (1 + number / cells) for value in samples["values_s"]]
        (place / made["id"]).mkdir(parents=True)
        (place / made["id"] / RUN_FILE).write_text(json.dumps(made))
    return place


def all_runs(folder: Path, count: int) -> Path:
    """So many runs, listed once."""
    place = folder / "runs"
    place.mkdir()
    many_runs.make(place, count)
    subprocess.run([sys.executable, "-m", "stepscope", "ls", str(place)], check=True, capture_output=True)
    return place


def timed(what: str, source: Path, out: Path, rounds: int, browser: Any, *options: str) -> Timed:
    """Write the page of a source, and open it."""
    command = [sys.executable, "-m", "stepscope", "report", str(source), "-o", str(out), *options]
    written, worked, opened = [], [], []
    for _ in range(rounds):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        written.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        worked.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        page = browser.new_page()
        page.goto(out.as_uri(), wait_until="load")
        opened.append(page.evaluate(_PAINTED) / 1e3)
        page.close()
    return Timed(what=what, written_s=written, processor_s=worked, opened_s=opened, bytes=out.stat().st_size)


_COMPARED = """() => { for (const box of [...document.querySelectorAll("#all tbody input")].slice(0, 2)) box.click();
    document.getElementById("compare").click(); }"""


def picture(arguments: argparse.Namespace) -> None:
    """Write the pictures of the documents into a folder: a run, a sweep on a phone, and the index."""
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        pictures: tuple[tuple[str, Path, tuple[int, int], Literal["light", "dark"], str], ...] = (
            ("report-run", LOOP, (1200, 1300), "light", ""),
            ("report-phone", Path("results/h200/plain"), (390, 844), "dark", ""),
            ("report-index", all_runs(folder, arguments.runs), (1200, 1120), "light", _COMPARED),
        )
        for out, source, size, scheme, action in pictures:
            html = folder / f"{out}.html"
            command = [sys.executable, "-m", "stepscope", "report", "runs" if action else str(source), "-o", str(html)]
            subprocess.run(command, check=True, capture_output=True, cwd=folder if action else ROOT)
            viewport: ViewportSize = {"width": size[0], "height": size[1]}
            page = browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
            page.goto(html.as_uri())
            if action:
                page.evaluate(action)
            page.screenshot(path=arguments.pictures / f"{out}.png")
            page.close()


def measure(arguments: argparse.Namespace) -> Result:
    """Make the run and the sweep, and time their pages."""
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        rounds = arguments.rounds
        return Result(
            environment=read_environment(torch.device("cpu")).described,
            browser=f"Chromium {browser.version}",
            pages=[
                timed(f"a run with a trace of {arguments.kernels:,} kernels", run_with_trace(folder, arguments.kernels),
                      folder / "run.html", rounds, browser),
                timed(f"a sweep of {arguments.cells:,} cells", sweep(folder, arguments.cells), folder / "sweep.html",
                      rounds, browser),
                timed(f"the index of {arguments.runs:,} runs", all_runs(folder, arguments.runs), folder / "index.html",
                      rounds, browser, "--runs", str(folder / "runs")),
                timed("a run", next((ROOT / "results" / "cpu" / "first").glob("**/run.json")), folder / "small.html",
                      rounds, browser),
            ],
        )  # fmt: skip


def render(result: Result) -> str:
    """The result as a Markdown table."""
    lines = ["| page | written | processor | opened | size |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {page.what} | {statistics.median(page.written_s):.2f} s | {statistics.median(page.processor_s):.2f} s | "
        f"{statistics.median(page.opened_s):.2f} s | {page.bytes / 1e3:,.0f} kB |"
        for page in result.pages
    ]
    return f"{result.environment}; {result.browser}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=50_000)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.show:
        for path in arguments.show:
            sys.stdout.write(render(msgspec.json.decode(path.read_bytes(), type=Result)))
        return
    if arguments.pictures:
        picture(arguments)
        return
    result = measure(arguments)
    sys.stdout.write(render(result))
    keep(result, arguments.json)


if __name__ == "__main__":
    main()
