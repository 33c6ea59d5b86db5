"""What does a sweep's cell cost beyond its own work? The same cells, forked and each a Python of its own, in turn.

    python benchmarks/sweep.py [--cells 8] [--rounds 3] [--device cpu|cuda] [--json FILE]
    python benchmarks/sweep.py --cells 500 --rounds 1 --on auto     # forked here, and forked on a node of a Ray cluster
    python benchmarks/sweep.py --show FILE...        # a table of results kept with --json

A cell's own work is what measuring it takes in this process, once it has measured it before: nothing is imported and
nothing is met for the first time. A sweep's wall clock, less the own work of its cells, over their number, is what a
cell costs beyond. For forked cells that holds their share of the server's start; the cost of one cell more, without it,
is known from sweeps of two cells and of all.

With --on the cells are the smallest there are, so that what the way to a node costs stands out. The cluster should have
one node, this machine: then both sweeps measure one cell at a time, with the same processes.
"""

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from stepscope.core.evidence import ProcessStart
from stepscope.core.model_config import configure
from stepscope.core.run import Settings
from stepscope.core.units import counted
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.engine.sweep import run_sweep
from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan
from stepscope.recording.device import HostLoad
from stepscope.recording.environment import read_environment, resolve_device
from stored import measure_or_show

SETTINGS = Settings(warmup_floor=3, warmup_cap=3, steps_floor=10, steps_cap=10, seconds=0)
SMALLEST = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0, profile=False)
FOR_WARMTH = 8
"""Cells after which a process meets nothing for the first time."""
FEWEST = 2
"""Cells of the short sweep: the fewest that are forked."""


class Sweeps(msgspec.Struct, kw_only=True):
    """Sweeps of one kind of start, round by round."""

    start: ProcessStart
    on: str | None = None
    """The Ray cluster that measured; None: this machine did."""
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


def smallest(count: int) -> list[TextbookWorkload]:
    """So many small workloads, none of them twice."""
    model = configure("tiny", d_model=16, d_ff=16, layers=1, heads=1, vocabulary=101)
    return [TextbookWorkload(model=model, batch_size=1 + i // 50, seq_len=8 + i % 50) for i in range(count)]


def workloads(count: int) -> list[TextbookWorkload]:
    """The tiny model, narrow, at so many lengths: cells whose own work is short."""
    model = configure("tiny", d_model=64, d_ff=128, layers=2, heads=2, vocabulary=1000)
    return [TextbookWorkload(model=model, batch_size=2, seq_len=16 + 2 * i) for i in range(count)]


def sweep_s(kind: Sweeps, cells: Sequence[Cell], device: str) -> tuple[float, float]:
    """Wall and processor seconds of a sweep."""
    with tempfile.TemporaryDirectory() as out:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        plan = SweepPlan(cells=tuple(cells), devices=(device,), out=out)
        runs = run_sweep(plan, Policy(start=kind.start, on=kind.on))
        wall_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = {run.evidence.process_start for run in runs if run.status == "done"}
    if len(runs) != len(cells) or started != {kind.start}:
        raise ValueError(f"not every cell was measured as a process by {kind.start}: {started}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def own_s(cells: Sequence[Cell], device: str) -> tuple[float, float]:
    """Wall and processor seconds of the same measurements in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as out:
        for cell in cells:
            measure_step(StepRequest(workload=cell.workload, settings=cell.settings, device=device, out=out))
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(arguments: argparse.Namespace) -> Result:
    """Measure in rounds, each kind of start once in each."""
    if arguments.cells <= FEWEST:
        raise ValueError(f"--cells {arguments.cells}: more than {FEWEST}, or what one cell more costs cannot be told")
    device = str(resolve_device(arguments.device))
    if arguments.on is None:
        cells = [Cell(workload=workload, settings=SETTINGS) for workload in workloads(arguments.cells)]
        sweeps = [Sweeps(start=start) for start in get_args(ProcessStart)]
    else:
        cells = [Cell(workload=workload, settings=SMALLEST) for workload in smallest(arguments.cells)]
        sweeps = [Sweeps(start="fork"), Sweeps(start="fork", on=arguments.on)]
    own_s(cells[:FOR_WARMTH], device)
    environment = read_environment(resolve_device(device))
    result = Result(
        environment=environment.described, cores=environment.cpu_cores, cells=len(cells), settings=cells[0].settings,
        own_s=[], own_cpu_s=[], other_cores=[], sweeps=sweeps,
    )  # fmt: skip
    for _ in range(arguments.rounds):
        load = HostLoad()
        for kind in sweeps:
            wall_s, cpu_s = sweep_s(kind, cells, device)
            kind.wall_s.append(wall_s)
            kind.cpu_s.append(cpu_s)
            kind.short_s.append(sweep_s(kind, cells[:FEWEST], device)[0])
        wall_s, cpu_s = own_s(cells, device)
        result.own_s.append(wall_s)
        result.own_cpu_s.append(cpu_s)
        reading = load.read()
        result.other_cores.append(reading.other_cores if reading is not None else None)
    return result


HEADS = ("start", "sweep", "a cell's own work", "a cell beyond it", "one cell more, beyond it", "processor, beyond it")


def rows(result: Result) -> list[tuple[str, ...]]:
    """A row for each kind of start."""
    own = statistics.median(result.own_s) / result.cells
    digits = 3 if any(sweeps.on for sweeps in result.sweeps) else 2
    return [
        (
            f"{sweeps.start}, on a node of Ray" if sweeps.on else sweeps.start,
            f"{statistics.median(sweeps.wall_s):.1f} s",
            f"{own:.{digits}f} s",
            f"{result.beyond_s(sweeps):.{digits}f} s",
            f"{result.one_more_s(sweeps):.{digits}f} s",
            "" if sweeps.on else f"{result.cpu_beyond_s(sweeps):.{digits}f} s",  # Ray's processes are no children
        )
        for sweeps in result.sweeps
    ]


def told(result: Result) -> str:
    """The conditions, in a line."""
    others = [cores for cores in result.other_cores if cores is not None]
    busy = f"; cells and others kept up to {max(others):.2f} cores busy" if others else ""
    return (
        f"{result.cells} cells, {result.cores} cores, median of {counted(len(result.own_s), 'round')}{busy}. "
        f"{result.environment}"
    )


def render_markdown(result: Result) -> str:
    """The result as a Markdown table."""
    lines = [HEADS, ("---",) * len(HEADS), *rows(result)]
    return f"{told(result)}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", metavar="ray://HOST|auto", help="also on a node of this Ray cluster")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
