"""What does measuring cost? The same steps in a bare loop and under `measure()`, in one process, interleaved.

    python benchmarks/overhead.py [--device cpu|cuda] [--model tiny] [--seq-len 128] [--pairs 100] [--json FILE]
    python benchmarks/overhead.py --of sampler --block 50 ...        # of reading a GPU's clocks meanwhile
    python benchmarks/overhead.py --show FILE...        # a table of results kept with --json

A pair is a block of bare steps (prepare, the phases, synchronize) and a block under `measure()`, both timed from
outside by the host's clock, in alternating order. The overhead is the median of the pairs' ratios, with its interval:
a pair's two blocks share whatever the machine does meanwhile. A step of the same phases that do nothing shows the
timer's own cost in time, free of the step's noise.

With `--of sampler` both blocks are measured, and in one of each pair another process reads the GPU's clocks, power and
temperature all the while, as it does while a run measures its steps. It has started before the block begins.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, get_args

import msgspec

from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.model_config import configure
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.core.units import format_seconds
from stepscope.core.workloads import TextbookWorkload
from stepscope.recording.device import Device, timing_device
from stepscope.recording.environment import read_environment, resolve_device
from stepscope.recording.nvml import gpu_sampled
from stepscope.recording.step import Driven, Phase
from stepscope.recording.timer import measure
from stepscope.training.training_step import TrainingStep
from stored import bounds_of, keep, ratios_of

STEPS_IN_A_BLOCK = 5
WHAT = Literal["measuring", "sampler"]


class Overhead(msgspec.Struct, kw_only=True):
    """The benchmark's result. Seconds are per step."""

    workload: TextbookWorkload
    environment: str
    pairs: int
    bare_s: Samples
    measured_s: Samples
    of: WHAT = "measuring"
    block: int = STEPS_IN_A_BLOCK
    """Steps in a block."""
    timer_s: float | None = None
    """What the timer adds to a step whose phases do nothing: median of measured - bare over the pairs. None for the
    sampler."""

    @property
    def ratios(self) -> Samples:
        """Measured / bare of each pair."""
        return ratios_of(self.measured_s, self.bare_s)

    @property
    def overhead(self) -> float:
        """Median of measured / bare - 1 over the pairs."""
        return (self.ratios.median_s or 1.0) - 1

    @property
    def timer(self) -> str:
        """The timer's own cost in a step, and its share of the bare step."""
        if self.timer_s is None:
            return "not measured"
        share = self.timer_s / (self.bare_s.median_s or float("nan"))
        return f"{format_seconds(self.timer_s)}, {share * 100:.2f} %"


class EmptyStep:
    """The phases of a step, with nothing in them."""

    def __init__(self, step: TrainingStep) -> None:
        self.phases = tuple(Phase(name=phase.name, run=lambda: None) for phase in step.phases)

    def prepare(self) -> None:
        pass


def bare_block(step: Driven, device: Device, steps: int) -> None:
    """The loop people write."""
    for _ in range(steps):
        step.prepare()
        for phase in step.phases:
            phase.run()
        device.synchronize()


def measured_block(step: Driven, device: Device, steps: int) -> None:
    """The same steps under stepscope's timer."""
    settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=steps, steps_cap=steps, seconds=0)
    measure({"step": step}, device=device, settings=settings, on_progress=lambda _: None)


Block = Callable[[Driven, Device, int], None]
Meanwhile = Callable[[], AbstractContextManager[object]]


def time_pairs(
    step: Driven, device: Device, pairs: int, blocks: dict[str, tuple[Block, Meanwhile]], steps: int
) -> tuple[Samples, Samples]:
    """Seconds a step of the bare and of the measured blocks, after two warm-up pairs. Each block is timed while its
    context is open."""
    seconds: dict[str, list[float]] = {"bare": [], "measured": []}
    for pair in range(pairs + 2):
        for name in sorted(blocks, reverse=bool(pair % 2)):
            block, meanwhile = blocks[name]
            with meanwhile():
                device.synchronize()
                start_ns = time.perf_counter_ns()
                block(step, device, steps)
                device.synchronize()
                end_ns = time.perf_counter_ns()
            if pair >= 2:
                seconds[name].append((end_ns - start_ns) * 1e-9 / steps)
    bare, measured = (Samples(values_s=tuple(seconds[name]), clock="perf_counter_ns") for name in ("bare", "measured"))
    return bare, measured


def compare(workload: TextbookWorkload, device_name: str, pairs: int, block: int, of: WHAT) -> Overhead:
    """Time the pairs of the real step, then, for what measuring costs, those of an empty one."""
    torch_device = resolve_device(device_name)
    device = timing_device(torch_device)
    step = TrainingStep(workload, torch_device)
    blocks: dict[str, tuple[Block, Meanwhile]] = {
        "bare": (bare_block if of == "measuring" else measured_block, nullcontext),
        "measured": (measured_block, nullcontext if of == "measuring" else lambda: gpu_sampled(torch_device)),
    }
    bare, measured = time_pairs(step, device, pairs, blocks, block)
    timer_s = None
    if of == "measuring":
        empty = time_pairs(EmptyStep(step), device, 200, blocks, block)
        timer_s = statistics.median(more - less for less, more in zip(*(each.values_s for each in empty), strict=True))
    return Overhead(
        workload=workload, environment=read_environment(torch_device).described, pairs=pairs, bare_s=bare,
        measured_s=measured, of=of, block=block, timer_s=timer_s,
    )  # fmt: skip


def render(result: Overhead) -> str:
    """The result in words."""
    bounds = f" [{bounds_of(result.ratios)}]"
    lines = (
        describe_model(result.workload),
        describe_workload(result.workload),
        result.environment,
        f"without        {format_seconds(result.bare_s.median_s or 0)} a step",
        f"with           {format_seconds(result.measured_s.median_s or 0)} a step",
        f"overhead       {result.overhead * 100:+.2f} %{bounds} of {result.of}",
        f"from           {result.pairs} pairs of {result.block} steps",
        f"timer alone    {result.timer}",
    )
    return "\n".join(lines) + "\n"


def render_table(results: list[Overhead]) -> str:
    """Several results as a Markdown table."""
    heads = ("device", "workload", "step", "overhead of", "overhead", "95 % interval, one process", "timer alone")
    rows = [heads, ("---",) * len(heads)]
    for result in sorted(results, key=lambda r: (r.environment, r.bare_s.median_s or 0)):
        rows.append(
            (
                result.environment.partition(";")[0],
                cell_name(result.workload),
                format_seconds(result.bare_s.median_s or 0),
                result.of,
                f"{result.overhead * 100:+.2f} %",
                bounds_of(result.ratios),
                result.timer,
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--block", type=int, default=STEPS_IN_A_BLOCK, help="steps in a block")
    parser.add_argument("--of", choices=get_args(WHAT), default="measuring")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.show:
        kept = [msgspec.json.decode(path.read_bytes(), type=Overhead) for path in arguments.show]
        sys.stdout.write(render_table(kept))
        return
    workload = TextbookWorkload(model=configure(arguments.model), seq_len=arguments.seq_len, dtype=arguments.dtype)
    result = compare(workload, arguments.device, arguments.pairs, arguments.block, arguments.of)
    sys.stdout.write(render(result))
    keep(result, arguments.json)


if __name__ == "__main__":
    main()
