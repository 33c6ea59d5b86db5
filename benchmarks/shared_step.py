"""Is a shared step as fast as a plain script of it? The same model both ways, in the same processes, in turns.

    torchrun --standalone --nproc-per-node 2 benchmarks/shared_step.py --parallel fsdp2 --model large --json FILE
    python benchmarks/shared_step.py --show FILE...        # a table of what was kept

The plain script is what one writes by hand with PyTorch: `fully_shard` of each block and of the root, or
DistributedDataParallel, autocast, loss.backward(), a fused AdamW. The other side is stepscope's step under its timer,
with every instrument that a run's timed steps have. Both wait for all ranks, and for the device, before and after each
step. A pair is a block of steps of each, in alternating order; a block takes as long as on the slowest rank. The ratio
is the median over the pairs, with its interval.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.model_config import configure
from stepscope.core.parts import PARTS
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.core.units import format_seconds
from stepscope.core.workloads import TextbookWorkload
from stored import bounds_of, measure_or_show, ratios_of

Block = Callable[[int], None]
"""Runs so many steps, each between two barriers."""


class Result(msgspec.Struct, kw_only=True):
    """Seconds a step of each block, on the slowest rank."""

    workload: TextbookWorkload
    environment: str
    ranks: int
    block: int
    plain_s: Samples
    stepscope_s: Samples

    @property
    def ratios(self) -> Samples:
        """Stepscope's step / the plain script's, of each pair."""
        return ratios_of(self.stepscope_s, self.plain_s)


def plain_block(workload: TextbookWorkload, device: Any, ranks: Any) -> Block:
    """A training loop as one writes it by hand."""
    import torch  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    from stepscope.training.training_step import textbook_parts  # noqa: PLC0415

    parts = textbook_parts(workload, device)
    size = workload.batch_size // ranks.ranks
    mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
    batches = [tuple(tensor[mine].contiguous() for tensor in batch) for batch in parts.batches]
    forward: Any = parts.forward
    if workload.parallel == "fsdp2":
        for block in parts.blocks:
            fully_shard(block)
        fully_shard(forward, reshard_after_forward=False)
    else:
        forward = DistributedDataParallel(forward)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-3, fused=True)
    count = 0

    def block(steps: int) -> None:
        nonlocal count
        for _ in range(steps):
            ranks.barrier()
            _synchronize(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=workload.dtype == "bf16"):
                loss = forward(*batches[count % len(batches)])
            loss.backward()
            optimizer.step()
            _synchronize(device)
            count += 1

    return block


def measured_block(workload: TextbookWorkload, device: Any, ranks: Any) -> Block:
    """The step of a run, under the timer of a run."""
    from stepscope.engine.stages import make_step  # noqa: PLC0415
    from stepscope.recording.device import timing_device  # noqa: PLC0415
    from stepscope.recording.timer import measure  # noqa: PLC0415

    step, timed_by = make_step(workload, device, None, ranks)[0], timing_device(device)

    def block(steps: int) -> None:
        settings = Settings(warmup_floor=0, warmup_cap=0, steps_floor=steps, steps_cap=steps, seconds=0)
        measure({"step": step}, device=timed_by, settings=settings, on_progress=lambda _: None, peers=ranks)

    return block


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch  # noqa: PLC0415

        torch.cuda.synchronize(device)


def measured(asked: argparse.Namespace) -> Result:
    """Take part as one of torchrun's ranks. The first returns the result; the others end here."""
    import torch  # noqa: PLC0415

    from stepscope.core.environment import place_in_job  # noqa: PLC0415
    from stepscope.recording.environment import read_environment  # noqa: PLC0415
    from stepscope.training.making import join  # noqa: PLC0415

    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available() if asked.device == "auto" else asked.device == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    place = place_in_job(os.environ)
    ranks = join(place, device)
    fused = dict.fromkeys(PARTS, "fused") if asked.kernels == "fused" else {}
    workload = TextbookWorkload(
        model=configure(asked.model), batch_size=asked.batch_size, seq_len=asked.seq_len, dtype=asked.dtype,
        attention=asked.attention, optimizer="adamw-fused", parallel=asked.parallel, ranks=count, **fused,
    )  # fmt: skip
    blocks = {"plain": plain_block(workload, device, ranks), "stepscope": measured_block(workload, device, ranks)}
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for pair in range(asked.pairs + 2):
        for name in sorted(blocks, reverse=bool(pair % 2)):
            ranks.barrier()
            _synchronize(device)
            begun = time.perf_counter()
            blocks[name](asked.block)
            took = max(ranks.gathered(time.perf_counter() - begun)) / asked.block
            if pair >= 2:
                seconds[name].append(took)
    found = {name: Samples(values_s=tuple(each), clock="perf_counter_ns") for name, each in seconds.items()}
    environment = read_environment(device).described
    first = ranks.rank == 0
    ranks.part()
    if not first:
        sys.exit(0)
    return Result(
        workload=workload, environment=environment, ranks=count, block=asked.block, plain_s=found["plain"],
        stepscope_s=found["stepscope"],
    )  # fmt: skip


def render(result: Result) -> str:
    """The result in words."""
    ratio = result.ratios.median_s or float("nan")
    return "\n".join(
        (
            describe_model(result.workload),
            describe_workload(result.workload),
            result.environment,
            f"{result.ranks} ranks share each step by {result.workload.parallel}",
            f"plain script   {format_seconds(result.plain_s.median_s or 0)} a step",
            f"stepscope      {format_seconds(result.stepscope_s.median_s or 0)} a step",
            f"difference     {(ratio - 1) * 100:+.2f} % [{bounds_of(result.ratios)}]",
            f"from           {result.ratios.count} pairs of {result.block} steps",
        )
    )


def render_table(result: Result) -> str:
    """The result as a Markdown table."""
    heads = ("device", "workload", "strategy", "plain script", "stepscope", "difference", "95 % interval")
    row = (
        result.environment.partition(";")[0],
        cell_name(result.workload),
        f"{result.workload.parallel} x {result.ranks}",
        format_seconds(result.plain_s.median_s or 0),
        format_seconds(result.stepscope_s.median_s or 0),
        f"{((result.ratios.median_s or float('nan')) - 1) * 100:+.2f} %",
        bounds_of(result.ratios),
    )
    rows = (heads, ("---",) * len(heads), row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--parallel", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of all ranks together")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--kernels", choices=("reference", "fused"), default="reference")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--block", type=int, default=5, help="steps in a block")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    asked = parser.parse_args()
    if not asked.show and "RANK" not in os.environ:
        parser.error("torchrun starts the ranks: torchrun --standalone --nproc-per-node 2 benchmarks/shared_step.py")
    measure_or_show(
        asked, Result, measure=measured,
        render=lambda result, console: console.print(render(result), highlight=False, markup=False),
        render_markdown=render_table,
    )  # fmt: skip


if __name__ == "__main__":
    main()
