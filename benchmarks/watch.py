"""What does watching a loop cost? The same training loop bare and watched, in one process, interleaved.

    python benchmarks/watch.py [--device cpu|cuda] [--size 100M] [--batch-size 4] [--seq-len 512] [--json FILE]
    python benchmarks/watch.py --show FILE...        # a table of results kept with --json
    python benchmarks/watch.py --live [--steps 2000]  # the steps behind the measured ones
    python benchmarks/watch.py --calls [--device cpu|cuda]

The loop is what people write round a Llama-like model: a DataLoader, forward, loss, backward, AdamW. A pair is a block
of bare steps and a block of watched ones, both timed from outside by the host's clock round a synchronised region, in
alternating order. The overhead is the median of the pairs' ratios, with its interval. The same clock is the stopwatch
that the reported step times are held against. What a watch takes once, to find out what a step is and to read the times
at the end, is timed by itself.

With `--live` the watched block is steps behind the measured ones, while the live figures are written once a second: a
block should last for seconds.

`--size empty` is a loop that computes next to nothing, so that the watch's own cost shows, in seconds a step: on a GPU
such a loop waits for the host all the time, and a larger step hides at least a part of it.

`--calls` takes the loop's own work away, too: a step calls a loader's next, a model, autograd's engine and an
optimizer, all of which return at once. What the watch adds to the fastest of many bursts of such steps is its own cost,
which other processes on the machine hardly change. Times that events give are read after the steps, and are not in it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

import stepscope
from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.core.units import format_count, format_seconds
from stepscope.recording.device import timing_device
from stepscope.recording.environment import read_environment, resolve_device
from stepscope.recording.watch.loop import LoopStep
from stepscope.recording.watch.stopwatch import Stopwatch, TimedSteps, marks_for
from stepscope.recording.watch.watch import Stage, StepCount, Watch
from stored import bounds_of, keep, ratios_of

EMPTY = "empty"
UNTIMED = 2
"""Steps before those that are timed. A watch knows after the second one what a step is."""
SIZES = {"1M": (128, 4, 4), "10M": (320, 6, 5), "100M": (768, 12, 12)}
"""Width, layers and heads of each size; the vocabulary is 16,384, or 2,048 for the small ones."""


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 64 * 64
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_a, self.attention = RMSNorm(width), Attention(width, heads)
        self.norm_b, self.feed_forward = RMSNorm(width), FeedForward(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm_a(x), cos, sin)
        return x + self.feed_forward(self.norm_b(x))


class Llama(nn.Module):
    """A model as Llama is: RMSNorm, rotary positions, SwiGLU, no biases."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(length), 10_000 ** -(torch.arange(half) / half))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Nothing(nn.Module):
    """A model of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, _targets: Tensor) -> Tensor:
        return self.weight * tokens.sum()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Loop:
    """A training loop as people write it; `run` takes so many steps of it."""

    def __init__(self, size: str, device: torch.device, batch_size: int, length: int) -> None:
        vocabulary = 16_384 if size == "100M" else 2048
        torch.manual_seed(0)
        model = Nothing() if size == EMPTY else Llama(*SIZES[size], vocabulary, length)
        self.model: nn.Module = model.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._device = device
        data = torch.utils.data.TensorDataset(torch.randint(vocabulary, (4096, length + 1)))
        self._loader = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
        self._batches = self._endless()

    def _endless(self) -> Iterator[Tensor]:
        while True:
            for (batch,) in self._loader:
                yield batch

    def run(self, steps: int) -> None:
        on_gpu = self._device.type == "cuda"
        for _ in range(steps):
            batch = next(self._batches).to(self._device, non_blocking=True)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu):
                loss = self.model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Cost(msgspec.Struct, kw_only=True):
    """The benchmark's result. Seconds are per step."""

    size: str
    parameters: int
    batch_size: int
    seq_len: int
    environment: str
    steps_in_a_block: int
    bare_s: Samples
    watched_s: Samples
    reported_s: Samples
    """The mean of the step times that the watch reported, for each watched block."""
    live: bool = False
    """Whether the watched steps are those behind the measured ones, with live figures."""
    once_s: Samples | None = None
    """Seconds that each watch took once, beside those of its steps. None in results of before it was timed by itself,
    whose watched steps hold it."""


class Reporting:
    """What the Watch of one block tells, and the times that it took."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device, self._steps = device, steps
        self.loop: LoopStep | None = None
        self.stopwatch = Stopwatch(marks_for(device, 0))

    def stages_for(self, loop: LoopStep, first_step: int) -> Sequence[Stage]:
        self.loop = loop
        # The stage begins with the second step, and ends after those that are timed, which reading them would delay.
        end = first_step + UNTIMED + self._steps
        return [TimedSteps(self.stopwatch, Settings(steps_floor=1), between=(first_step, end))]

    def unclear_step(self, reason: str) -> None:
        raise RuntimeError(reason)

    def stage_failed(self, stage: str, error: Exception) -> None:
        raise error

    def loop_gone(self) -> None:
        pass

    def finish(self) -> None:
        pass


def timed(loop: Loop, steps: int, synchronize: Callable[[], None]) -> float:
    """Seconds of so many steps."""
    synchronize()
    start_ns = time.perf_counter_ns()
    loop.run(steps)
    synchronize()
    return (time.perf_counter_ns() - start_ns) * 1e-9


def bare_block(loop: Loop, steps: int, synchronize: Callable[[], None]) -> float:
    """Seconds a step of a block, after as many steps that are not timed as a watched one has."""
    loop.run(UNTIMED)
    return timed(loop, steps, synchronize) / steps


def watched_block(
    loop: Loop, device: torch.device, steps: int, synchronize: Callable[[], None], stopwatch: list[Stopwatch]
) -> tuple[float, float, float]:
    """Seconds a step of a watched block by the stopwatch outside, the mean of those that the watch reports, and seconds
    that it took once."""
    told = Reporting(device, steps)
    if stopwatch:
        told.stopwatch = stopwatch[0]
        told.stopwatch.drop_all_but(0)
        told.stopwatch.break_off()
    stopwatch[:] = [told.stopwatch]
    watch = Watch(told, model=loop.model, optimizer=loop.optimizer)
    watch.start()
    once_s = timed(loop, UNTIMED, synchronize)
    outside_s = timed(loop, steps, synchronize) / steps
    once_s += timed(loop, 1, synchronize)
    watch.stop()
    reported_s = told.stopwatch.samples(0)["step"].values_s[1:-1]
    once_s = max(0.0, once_s - (UNTIMED + 1) * outside_s)  # Where a step is long, its own variation hides it.
    return outside_s, statistics.fmean(reported_s), once_s


def live_block(loop: Loop, steps: int, synchronize: Callable[[], None]) -> float:
    """Seconds a step of a block behind the measured steps of a watch, whose live figures go on."""
    with (
        tempfile.TemporaryDirectory() as runs,
        stepscope.watch(loop.model, loop.optimizer, steps=(2, 3), runs=runs, quiet=True) as watched,
    ):
        while watched.run is None:
            loop.run(1)
        return timed(loop, steps, synchronize) / steps


def compare(
    size: str, device_name: str, *, batch_size: int, length: int, pairs: int, steps: int, live: bool = False
) -> Cost:
    """Time the pairs, after two that warm up."""
    device = resolve_device(device_name)
    synchronize = timing_device(device).synchronize
    loop = Loop(size, device, batch_size, length)
    bare: list[float] = []
    watched: list[float] = []
    reported: list[float] = []
    once: list[float] = []
    stopwatch: list[Stopwatch] = []
    for pair in range(pairs + 2):
        bare_s = 0.0
        if pair % 2:
            bare_s = bare_block(loop, steps, synchronize)
        if live:
            watched_s, reported_s, once_s = live_block(loop, steps, synchronize), 0.0, 0.0
        else:
            watched_s, reported_s, once_s = watched_block(loop, device, steps, synchronize, stopwatch)
        if not pair % 2:
            bare_s = bare_block(loop, steps, synchronize)
        if pair >= 2:
            bare.append(bare_s)
            watched.append(watched_s)
            reported.append(reported_s)
            once.append(once_s)
    clock = "perf_counter_ns"
    return Cost(
        size=size,
        parameters=sum(p.numel() for p in loop.model.parameters()),
        batch_size=batch_size,
        seq_len=length,
        environment=read_environment(device).described,
        steps_in_a_block=steps,
        bare_s=Samples(values_s=tuple(bare), clock=clock),
        watched_s=Samples(values_s=tuple(watched), clock=clock),
        reported_s=Samples(values_s=() if live else tuple(reported), clock=clock),
        once_s=None if live else Samples(values_s=tuple(once), clock=clock),
        live=live,
    )


class Silent(nn.Module):
    """A model that returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self) -> None:
        pass


class Still(torch.optim.Optimizer):
    """An optimizer that changes nothing."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def cost_of_calls(device: torch.device, *, steps: int = 20, bursts: int = 3000) -> tuple[float, float, float]:
    """Seconds a step of a loop whose calls return at once, those of the fastest burst: bare, watched, and counted when
    the watch is over."""
    model, loader = Silent().to(device), _BaseDataLoaderIter.__new__(_BaseDataLoaderIter)
    optimizer, autograd = Still(model.parameters(), {}), vars(torch.autograd)
    synchronize = timing_device(device).synchronize

    def least_s() -> float:
        least_ns = sys.maxsize
        for _ in range(bursts):
            start_ns = time.perf_counter_ns()
            for _ in range(steps):
                _BaseDataLoaderIter.__next__(loader)
                model()
                autograd["_engine_run_backward"]((), ())
                optimizer.step()
            least_ns = min(least_ns, time.perf_counter_ns() - start_ns)
            synchronize()
        return least_ns * 1e-9 / steps

    with (
        mock.patch.object(_BaseDataLoaderIter, "__next__", lambda _: None),
        mock.patch.object(torch.autograd, "_engine_run_backward", lambda *_: None),
    ):
        bare_s = least_s()
        told = Reporting(device, sys.maxsize)
        told.stopwatch = Stopwatch(marks_for(device, 10 * steps * bursts if device.type == "cuda" else 0))
        watch = Watch(told, model=model, optimizer=optimizer)
        watch.start()
        watched_s = least_s()
        watch.stop()
        assert told.loop is not None
        count = StepCount(watch, told.loop)
        count.go_on()
        counted_s = least_s()
        count.stop()
    return bare_s, watched_s, counted_s


def as_percent(ratios: Samples) -> str:
    """The median of ratios as a deviation from 1, with its interval."""
    return f"{((ratios.median_s or 1.0) - 1) * 100:+.2f} % [{bounds_of(ratios)}]"


def in_microseconds(ratios: Samples, bare_s: float) -> str:
    """What the ratio of the pairs adds to a bare step, with its interval, and as a share of a step of 20 ms."""
    bare_us, interval = bare_s * 1e6, ratios.interval()
    added_us = ((ratios.median_s or 1.0) - 1) * bare_us
    bounds = f" [{(interval.low - 1) * bare_us:+.1f} to {(interval.high - 1) * bare_us:+.1f} us]" if interval else ""
    return f"{added_us:+.1f} us{bounds} a step: {added_us / 20e3 * 100:+.2f} % of one of 20 ms"


def render(result: Cost) -> str:
    """The result in words."""
    name = "live loop" if result.live else "watched loop"
    model = "Nothing" if result.size == EMPTY else "Llama-like"
    bare_s, over_bare = result.bare_s.median_s or 0.0, ratios_of(result.watched_s, result.bare_s)
    lines = (
        f"{model}, {format_count(result.parameters)} parameters, batch {result.batch_size} x {result.seq_len}",
        result.environment,
        f"bare loop     {format_seconds(bare_s)} a step",
        f"{name:<14}{format_seconds(result.watched_s.median_s or 0)} a step",
        f"overhead      {as_percent(over_bare)}, {over_bare.count} pairs of {result.steps_in_a_block} steps",
        f"added         {in_microseconds(over_bare, bare_s)}",
    )
    if result.live:
        return "\n".join(lines) + "\n"
    over_stopwatch = as_percent(ratios_of(result.reported_s, result.watched_s))
    reported = f"reported      {over_stopwatch} beside a stopwatch round the same steps"
    once = (f"once          {format_seconds(result.once_s.median_s or 0)} a watch",) if result.once_s else ()
    return "\n".join((*lines, reported, *once)) + "\n"


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", default="10M", choices=(EMPTY, *SIZES))
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--live", action="store_true", help="the steps behind the measured ones, with live figures")
    parser.add_argument("--calls", action="store_true", help="calls that return at once: the watch's own cost")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    if given.show:
        kept = [msgspec.json.decode(path.read_bytes(), type=Cost) for path in given.show]
        sys.stdout.write("\n".join(map(render, kept)))
        return
    if given.calls:
        device = resolve_device(given.device)
        bare_s, watched_s, counted_s = cost_of_calls(device, bursts=3000 if device.type == "cpu" else 300)
        added = (
            f"{(watched_s - bare_s) * 1e6:.1f} us a step added to {bare_s * 1e6:.1f} us of calls that return at once\n"
            f"{(counted_s - bare_s) * 1e6:.1f} us behind the measured steps"
        )
        sys.stdout.write(f"{read_environment(device).described}\n{added}\n")
        return
    result = compare(
        given.size, given.device,
        batch_size=given.batch_size, length=given.seq_len, pairs=given.pairs, steps=given.steps,
        live=given.live,
    )  # fmt: skip
    sys.stdout.write(render(result))
    keep(result, given.json)


if __name__ == "__main__":
    main()
