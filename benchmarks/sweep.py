"""What does a sweep's cell cost beyond its own work? The same cells, forked and each a Python of its own, in turn.

    python benchmarks/sweep.py [--cells 8] [--rounds 3] [--device cpu|cuda] [--json FILE]
    python benchmarks/sweep.py --show FILE...        # a table of results kept with --json

A cell's own work is what measuring it takes in this process, once it has measured it before: nothing is imported and
nothing is met for the first time. A sweep's wall clock, less the own work of its cells, over their number, is what a
cell costs beyond. For forked cells that holds their share of the server's start; the cost of one cell more, without it,
is known from sweeps of two cells and of all.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from stepscope.core.evidence import ProcessStart
from stepscope.core.model_config import configure
from stepscope.core.run import Settings
from stepscope.core.workload import Workload
from stepscope.engine.plan import Cell, Policy, SweepPlan
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.engine.sweep import run_sweep
from stepscope.measure.device import resolve_device
from stepscope.measure.environment import HostLoad, read_environment
from stored import measure_or_show

SETTINGS = Settings(warmup_floor=3, warmup_cap=3, steps_floor=10, steps_cap=10, seconds=0)
FEWEST = 2
"""Cells of the short sweep: the fewest that are forked."""


class Sweeps(msgspec.Struct, kw_only=True):
    """Sweeps of one kind of start, round by round."""

    start: ProcessStart
    wall_s: list[float] = []
    short_s: list[float] = []
    """The wall clock of sweeps of two cells."""
    cpu_s: list[float] = []
    """Processor seconds of all the processes of the long sweeps together."""


class Result(msgspec.Struct, kw_only=True):
    """The benchmark's result."""

    environment: str
    cores: int
    cells: int
    settings: Settings
    own_s: list[float]
    """The own work of the cells together, round by round."""
    own_cpu_s: list[float]
    other_cores: list[float | None]
    """Cores that all processes but the benchmark's own kept busy in each round: its cells, and others."""
    sweeps: list[Sweeps]

    def beyond_s(self, sweeps: Sweeps) -> float:
        """Wall seconds of a cell beyond its own work."""
        return (statistics.median(sweeps.wall_s) - statistics.median(self.own_s)) / self.cells

    def one_more_s(self, sweeps: Sweeps) -> float:
        """Wall seconds that one cell more costs beyond its own work, from the long sweeps and the short ones."""
        longer = statistics.median(sweeps.wall_s) - statistics.median(sweeps.short_s)
        return longer / (self.cells - FEWEST) - statistics.median(self.own_s) / self.cells

    def cpu_beyond_s(self, sweeps: Sweeps) -> float:
        """Processor seconds of a cell beyond its own work."""
        return (statistics.median(sweeps.cpu_s) - statistics.median(self.own_cpu_s)) / self.cells


def workloads(count: int) -> list[Workload]:
    """The tiny model, narrow, at so many lengths: cells whose own work is short."""
    model = configure("tiny", d_model=64, d_ff=128, layers=2, heads=2, vocabulary=1000)
    return [Workload(model=model, batch_size=2, seq_len=16 + 2 * i) for i in range(count)]


def sweep_s(start: ProcessStart, count: int, device: str) -> tuple[float, float]:
    """Wall and processor seconds of a sweep."""
    cells = tuple(Cell(workload=workload, settings=SETTINGS) for workload in workloads(count))
    with tempfile.TemporaryDirectory() as out:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        runs = run_sweep(SweepPlan(cells=cells, devices=(device,), out=out), Policy(start=start))
        wall_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = {run.evidence.process_start for run in runs if run.status == "done"}
    if len(runs) != count or started != {start}:
        raise ValueError(f"not every cell was measured as a process by {start}: {started}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def own_s(count: int, device: str) -> tuple[float, float]:
    """Wall and processor seconds of the same measurements in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        for workload in workloads(count):
            measure_step(StepRequest(workload=workload, settings=SETTINGS, device=device, out=out))
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(arguments: argparse.Namespace) -> Result:
    """Measure in rounds, each kind of start once in each."""
    if arguments.cells <= FEWEST:
        raise ValueError(f"--cells {arguments.cells}: more than {FEWEST}, or what one cell more costs cannot be told")
    device = str(resolve_device(arguments.device))
    own_s(arguments.cells, device)
    sweeps = [Sweeps(start=start) for start in get_args(ProcessStart)]
    environment = read_environment(resolve_device(device))
    result = Result(
        environment=environment.described, cores=environment.cpu_cores, cells=arguments.cells, settings=SETTINGS,
        own_s=[], own_cpu_s=[], other_cores=[], sweeps=sweeps,
    )  # fmt: skip
    for _ in range(arguments.rounds):
        load = HostLoad()
        for kind in sweeps:
            wall_s, cpu_s = sweep_s(kind.start, arguments.cells, device)
            kind.wall_s.append(wall_s)
            kind.cpu_s.append(cpu_s)
            kind.short_s.append(sweep_s(kind.start, FEWEST, device)[0])
        wall_s, cpu_s = own_s(arguments.cells, device)
        result.own_s.append(wall_s)
        result.own_cpu_s.append(cpu_s)
        reading = load.read()
        result.other_cores.append(reading.other_cores if reading is not None else None)
    return result


HEADS = ("start", "sweep", "a cell's own work", "a cell beyond it", "one cell more, beyond it", "processor, beyond it")


def rows(result: Result) -> list[tuple[str, ...]]:
    """A row for each kind of start."""
    own = statistics.median(result.own_s) / result.cells
    return [
        (
            sweeps.start,
            f"{statistics.median(sweeps.wall_s):.1f} s",
            f"{own:.2f} s",
            f"{result.beyond_s(sweeps):.2f} s",
            f"{result.one_more_s(sweeps):.2f} s",
            f"{result.cpu_beyond_s(sweeps):.2f} s",
        )
        for sweeps in result.sweeps
    ]


def told(result: Result) -> str:
    """The conditions, in a line."""
    others = [cores for cores in result.other_cores if cores is not None]
    busy = f"; cells and others kept up to {max(others):.2f} cores busy" if others else ""
    return (
        f"{result.cells} cells, {result.cores} cores, median of {len(result.own_s)} rounds{busy}. {result.environment}"
    )


def render(result: Result, console: Console) -> None:
    """The result in a terminal."""
    console.print(render_markdown(result), soft_wrap=True, markup=False, highlight=False)


def render_markdown(result: Result) -> str:
    """The result as a Markdown table."""
    lines = [HEADS, ("---",) * len(HEADS), *rows(result)]
    return f"{told(result)}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render=render, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
