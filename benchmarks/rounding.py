"""How long does it take to round 64 M numbers of fp32 to MXFP4 and back? stepscope, torchao, and a plain copy.

    python benchmarks/rounding.py [--runs 5] [--threads 2] [--device cuda] [--json FILE]
    python benchmarks/rounding.py --show FILE...       # tables of results kept with --json

All run in one process, in turns: eagerly, and stepscope compiled, too, which gives the same bits and compiles in the
round that does not count. On a CPU what counts is processor time, the least of the runs: threads that wait for each
other count, too. On a GPU it is the device's own time, a median of calls in each run. torchao runs where it is
installed.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.run import Settings
from stepscope.recording.environment import read_environment, resolve_device
from stepscope.recording.leads import median_call_s
from stepscope.training.scaled_products import round_blocks
from stored import measure_or_show

NUMBERS = 64 * 2**20
ROW = 4096


class Row(msgspec.Struct, kw_only=True):
    """The runs of one way."""

    way: str
    cpu_s: list[float]
    wall_s: list[float]
    device_s: list[float] = []
    """Of the GPU, where it is one; the others are then empty."""


class Result(msgspec.Struct, kw_only=True):
    """All ways, on one machine."""

    environment: str
    versions: dict[str, str]
    threads: int
    rows: list[Row]


def _ways(device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    form = BLOCK_FORMATS["mxfp4"]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "a copy": torch.clone,
        "stepscope": lambda values: round_blocks(values, form),
        "stepscope, compiled": torch.compile(lambda values: round_blocks(values, form), dynamic=False),
    }
    part = torch.randn(64, ROW)
    compiled = torch.compile(ways["stepscope"], dynamic=False)(part.to(device)).cpu()
    if not torch.equal(ways["stepscope"](part), compiled):
        raise SystemExit("compiled, blocks round to other bits")
    if importlib.util.find_spec("torchao") is not None:
        mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
        kind = torch.float4_e2m1fn_x2
        ways["torchao"] = lambda values: mx.MXTensor.to_mx(values, kind, 32).dequantize(torch.float32)
    return ways


def measure(arguments: argparse.Namespace) -> Result:
    """Each round runs every way once, after one round that does not count."""
    torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    values = torch.randn(NUMBERS // ROW, ROW, device=device, generator=torch.Generator(device).manual_seed(0))
    ways = _ways(device)
    calls = Settings(warmup_floor=1, warmup_cap=3, warmup_seconds=0.1, steps_floor=5, steps_cap=50, seconds=0.2)
    rows = {way: Row(way=way, cpu_s=[], wall_s=[]) for way in ways}
    for counts in range(arguments.runs + 1):
        for way, rounded in ways.items():
            if device.type == "cuda":
                device_s = median_call_s(lambda rounded=rounded: rounded(values), device, calls)
                rows[way].device_s += [device_s] if counts else []
                continue
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            rounded(values)
            if counts:
                rows[way].cpu_s.append(time.process_time() - cpu_s)
                rows[way].wall_s.append(time.perf_counter() - wall_s)
    known = [name for name in ("torch", "torchao") if importlib.util.find_spec(name)]
    versions = {name: importlib.metadata.version(name) for name in known}
    environment = read_environment(device).described
    return Result(environment=environment, versions=versions, threads=arguments.threads, rows=[*rows.values()])


def render_markdown(result: Result) -> str:
    """The result as a Markdown table."""
    on_gpu = any(row.device_s for row in result.rows)
    heads = ("way", "device", "a copy's rate", "runs") if on_gpu else ("way", "processor", "elapsed", "runs")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * 4]
    for row in result.rows:
        if on_gpu:
            least, copy = min(row.device_s), min(result.rows[0].device_s)
            lines.append(f"| {row.way} | {least * 1e3:.3f} ms | {copy / least:.2f} | {len(row.device_s)} |")
        else:
            lines.append(f"| {row.way} | {min(row.cpu_s):.2f} s | {min(row.wall_s):.2f} s | {len(row.cpu_s)} |")
    parts = [
        f"{NUMBERS // 2**20} Mi numbers, {f'{result.threads} threads, ' * (not on_gpu)}the least of the runs. "
        f"{result.environment}",
        *(f"{name} {version}" for name, version in result.versions.items() if name != "torch"),
    ]
    return ", ".join(parts) + "\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
