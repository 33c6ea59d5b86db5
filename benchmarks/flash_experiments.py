"""Which configuration of the FlashAttention kernels is fastest? Each checked, then timed, beside PyTorch's.

    python benchmarks/flash_experiments.py [--seconds 240] [--json FILE] [--only forward keys ...] [--shapes 0 1 ...]

Kernels are compiled ahead by a pool of processes. One process owns the GPU and is started again when a configuration
kills or hangs it. Every configuration is first compared with float64 attention on a shorter sequence and with PyTorch's
flash attention on the shape itself: a wrong one gets no time. Times are medians of `triton.testing.do_bench` (CUDA
events; the L2 cache is overwritten before each call). The list is worked through breadth first, and the budget of
seconds is kept: what is not reached is named.
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, ClassVar

Shape = tuple[int, int, int, int, bool, str]
"""batch, heads, sequence, head_dim, causal, dtype."""
SHAPES: list[Shape] = [
    (1, 16, 16384, 64, True, "bfloat16"),
    (1, 16, 16384, 128, True, "bfloat16"),
    (2, 16, 8192, 128, False, "bfloat16"),
    (4, 12, 1024, 64, True, "bfloat16"),
    (2, 16, 8192, 64, False, "bfloat16"),
    (4, 16, 2048, 128, True, "bfloat16"),
    (8, 1, 4096, 64, True, "float32"),
    (8, 1, 4096, 128, True, "float32"),
]
KINDS = ("forward", "keys", "queries", "fused", "joint")
RESERVE_S = 35
"""Kept for the whole passes of the best."""
TASK_PATIENCE_S = 40
"""A task that answers nothing for so long has hung: its process is killed."""

Tile = tuple[int, int, int, int]
"""block_m, block_n, num_warps, num_stages."""


def forward_list(head_dim: int, causal: bool) -> list[dict[str, Any]]:
    """Forward configurations, most promising first."""
    tiles: list[Tile] = (
        [(128, 128, 8, 2), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3),
         (64, 128, 4, 3), (64, 64, 4, 2), (128, 64, 4, 2), (128, 32, 4, 3), (192, 64, 4, 2), (256, 64, 8, 3)]
        if head_dim <= 64 else
        [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (64, 128, 4, 2),
         (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 3)]
    )  # fmt: skip
    tiles = [tile for tile in tiles if tile[0] != 192]
    found = [{"tile": tile, "tma": True} for tile in tiles]
    found[1:1] = [
        {"tile": tiles[0], "tma": True, "rows_first": False},
        {"tile": tiles[0], "tma": True, "persistent": True},
        {"tile": tiles[0], "tma": False},
        {"tile": tiles[1], "tma": False},
    ]
    if not causal:
        found.insert(1, {"tile": (128, 128, 4, 2), "tma": True, "warp_specialize": True})
        found.insert(2, {"tile": (128, 64, 4, 3), "tma": True, "warp_specialize": True})
        found.insert(3, {"tile": (64, 128, 4, 2), "tma": True, "warp_specialize": True})
    return found


def keys_list(head_dim: int) -> list[dict[str, Any]]:
    """Configurations of the kernel over keys."""
    tiles: list[Tile] = (
        [(64, 128, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 3),
         (32, 128, 4, 2), (32, 64, 4, 3), (128, 64, 4, 2)]
        if head_dim <= 64 else
        [(64, 128, 8, 2), (64, 64, 4, 1), (64, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 2),
         (32, 64, 4, 2), (64, 128, 8, 1), (128, 64, 8, 2)]
    )  # fmt: skip
    return [{"tile": tile, "tma": True} for tile in tiles] + [{"tile": tiles[0], "tma": False}]


def queries_list(head_dim: int) -> list[dict[str, Any]]:
    """Configurations of the kernel over queries."""
    tiles: list[Tile] = (
        [(128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3),
         (128, 64, 8, 3), (128, 32, 4, 3), (256, 64, 8, 2)]
        if head_dim <= 64 else
        [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 3),
         (64, 64, 4, 1), (128, 128, 8, 1)]
    )  # fmt: skip
    return [{"tile": tile, "tma": True} for tile in tiles] + [{"tile": tiles[0], "tma": False}]


def fused_list(head_dim: int) -> list[dict[str, Any]]:
    """Configurations of the kernel over keys that also adds dQ up."""
    tiles: list[Tile] = (
        [(64, 128, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2)]
        if head_dim <= 64 else
        [(64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 8, 2)]
    )  # fmt: skip
    return [{"tile": tile, "tma": True, "tma_reduce": reduce} for tile in tiles for reduce in (True, False)]


def rivals(dtype: str) -> tuple[str, ...]:
    """PyTorch's own; the first is what results are compared with."""
    return ("sdpa-efficient",) if dtype == "float32" else ("sdpa-flash", "sdpa-cudnn")


def fp32_lists(head_dim: int) -> dict[str, list[dict[str, Any]]]:
    """For fp32: on the tensor cores as three products of TF32 each, or exactly, without them."""
    cores: list[Tile] = [(64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (32, 32, 4, 2)]
    exact: list[Tile] = [(32, 32, 4, 1), (64, 32, 8, 1), (32, 64, 8, 1)]
    both = [{"tile": t, "tma": tma, "precision": "tf32x3"} for t in cores for tma in (False, True)]
    both[1:1] = [{"tile": t, "tma": False, "precision": "ieee"} for t in exact]
    swapped = [{**c, "tile": (c["tile"][1], c["tile"][0], *c["tile"][2:])} for c in both]
    return {"forward": both if head_dim <= 64 else both[4:] + both[:4], "keys": swapped, "queries": both, "fused": []}


def tasks_for(shapes: list[int], kinds: list[str]) -> list[dict[str, Any]]:
    """Breadth first: the first configuration of every kind and shape before the second of any."""
    ranked = []
    for place, shape in enumerate(shapes):
        _, _, _, head_dim, causal, dtype = SHAPES[shape]
        lists = {
            "forward": forward_list(head_dim, causal),
            "keys": keys_list(head_dim),
            "queries": queries_list(head_dim),
            "fused": fused_list(head_dim),
        }
        if dtype == "float32":
            lists = fp32_lists(head_dim)
        ranked += [(-1, place, {"shape": shape, "kind": name}) for name in (*rivals(dtype), "preprocess")]
        for kind, configurations in lists.items():
            if kind in kinds:
                ranked += [
                    (rank, place, {"shape": shape, "kind": kind, **configuration})
                    for rank, configuration in enumerate(configurations)
                ]
    return [task for _, _, task in sorted(ranked, key=lambda entry: entry[:2])]


def label(task: dict[str, Any]) -> str:
    """One task, short."""
    if "tile" not in task:
        return str(task["kind"])
    block_m, block_n, warps, stages = task["tile"]
    flags = [name for name in ("tma", "warp_specialize", "persistent", "tma_reduce") if task.get(name)]
    flags += [task["precision"]] if "precision" in task else []
    flags += ["heads-first"] if task.get("rows_first") is False else []
    second = " + {}x{} w{} s{}".format(*task["tile2"]) if "tile2" in task else ""
    return f"{task['kind']} {block_m}x{block_n} w{warps} s{stages}{second} {' '.join(flags)}"


def device_type() -> str:
    """The GPU; without one, Triton's interpreter on a CPU: for trying this script out."""
    import torch  # noqa: PLC0415

    return "cuda" if torch.cuda.is_available() else "cpu"


def median_ms(run: Any, warmup_ms: int, repeat_ms: int) -> float:
    """Of `do_bench`; without a GPU one call by the host's clock."""
    if device_type() == "cuda":
        from triton.testing import do_bench  # noqa: PLC0415

        return do_bench(run, warmup=warmup_ms, rep=repeat_ms, return_mode="median")
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e3


class Bench:
    """The tensors of one shape, and the kernels on them. The processes that compile leave the tensors empty: they must
    not disturb the GPU."""

    FILLS: ClassVar = {"forward": ("out",), "keys": ("dk", "dv"), "queries": ("dq",), "fused": ("dq", "dk", "dv"),
                       "joint": ("dq", "dk", "dv"), "preprocess": ()}  # fmt: skip

    def __init__(self, shape: Shape, *, empty: bool = False) -> None:
        import torch  # noqa: PLC0415

        self.torch = torch
        batch, heads, sequence, head_dim, self.causal, dtype_name = shape
        self.rival = rivals(dtype_name)[0]
        dtype, device = getattr(torch, dtype_name), device_type()
        size = (batch, heads, sequence, head_dim)
        torch.manual_seed(0)
        self.q, self.k, self.v, self.gradient = (
            torch.empty(size, device=device, dtype=dtype) if empty else torch.randn(size, device=device).to(dtype)
            for _ in range(4)
        )
        self.scale = head_dim**-0.5
        self.out = torch.empty_like(self.q)
        self.logsumexp = torch.empty(self.q.shape[:3], dtype=torch.float32, device=device)
        self.dq, self.dk, self.dv = (torch.empty_like(self.q) for _ in range(3))
        self.truth: dict[str, Any] | None = None
        self.allowed: dict[str, float] = {}

    def runner(self, task: dict[str, Any]) -> Any:  # noqa: PLR0911
        """A function that runs the task's kernel once."""
        from stepscope.kernels.flash_configuration import ForwardConfiguration, tiles  # noqa: PLC0415
        from stepscope.kernels.flash_launch import Backward, launch_forward  # noqa: PLC0415

        kind = task["kind"]
        if kind.startswith("sdpa"):
            return self.sdpa(kind)[0]
        if kind == "forward":
            configuration = ForwardConfiguration(
                tiles=tiles(*task["tile"]), tma=task["tma"], warp_specialize=task.get("warp_specialize", False),
                persistent=task.get("persistent", False), rows_first=task.get("rows_first", True),
            )  # fmt: skip
            return lambda: launch_forward(
                self.q, self.k, self.v, self.out, self.logsumexp, causal=self.causal, scale=self.scale, window=None,
                precision=task.get("precision", "ieee"), configuration=configuration,
            )  # fmt: skip
        backward = Backward(
            self.gradient, self.q, self.k, self.v, self.out, self.logsumexp, self.dq, self.dk, self.dv,
            causal=self.causal, scale=self.scale, window=None, precision=task.get("precision", "ieee"),
            tma=task.get("tma", True),
        )  # fmt: skip
        if kind == "preprocess":
            return backward.preprocess
        backward.preprocess()
        if kind == "keys":
            return lambda: backward.over_keys(tiles(*task["tile"]))
        if kind == "queries":
            return lambda: backward.over_queries(tiles(*task["tile"]))
        if kind == "joint":
            return lambda: backward.joint(tiles(*task["tile"]), tiles(*task["tile2"]))

        def fused() -> object:
            accumulated = backward.accumulator()
            compiled = backward.over_keys(tiles(*task["tile"]), accumulated=accumulated, tma_reduce=task["tma_reduce"])
            backward.finish(accumulated)
            return compiled

        return fused

    def synchronize(self) -> None:
        if self.q.is_cuda:
            self.torch.cuda.synchronize()

    def sdpa(self, kind: str) -> tuple[Any, Any]:
        """Forward, and forward and backward, of PyTorch's."""
        from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

        backend = {
            "sdpa-flash": SDPBackend.FLASH_ATTENTION,
            "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
            "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
        }[kind]
        inputs = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]

        def forward() -> Any:
            with sdpa_kernel(backend):
                return self.torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=self.causal)

        def both() -> Any:
            for tensor in inputs:
                tensor.grad = None
            out = forward()
            out.backward(self.gradient)
            return out.detach(), *(t.grad for t in inputs)

        return forward, both

    def prepare_truth(self, *, exact: bool) -> None:
        """What the kernels should give: float64 attention, or PyTorch's flash attention on a shape too long for it."""
        torch = self.torch
        sdpa = dict(
            zip(
                ("out", "dq", "dk", "dv"),
                self.sdpa("sdpa-flash" if self.q.element_size() == 2 else "sdpa-efficient")[1](),
                strict=True,
            )
        )
        if exact:
            q, k, v = (t.double().requires_grad_() for t in (self.q, self.k, self.v))
            scores = q @ k.transpose(-1, -2) * self.scale
            if self.causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            self.logsumexp_truth = torch.logsumexp(scores, -1).detach()
            out = torch.softmax(scores, -1) @ v
            out.backward(self.gradient.double())
            self.truth = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
            self.allowed = {n: 2 * (sdpa[n].double() - t).abs().max().item() for n, t in self.truth.items()}
        else:
            self.truth = sdpa
            # Two roundings to bf16, of numbers whose largest is near the tensor's maximum, and two sums' errors.
            share = 0.02 if self.q.element_size() == 2 else 2e-5
            self.allowed = {n: share * t.abs().max().item() for n, t in sdpa.items()}
            self.logsumexp_truth = self.logsumexp_of_sdpa()
        self.out.copy_(self.truth["out"])
        self.logsumexp.copy_(self.logsumexp_truth)

    def logsumexp_of_sdpa(self) -> Any:
        """(B, H, S) fp32, as PyTorch's own kernels save it."""
        aten = self.torch.ops.aten
        if self.rival == "sdpa-efficient":
            return aten._scaled_dot_product_efficient_attention(self.q, self.k, self.v, None, True, 0.0, self.causal)[
                1
            ][..., : self.q.shape[2]]
        if self.q.is_cuda:
            return aten._scaled_dot_product_flash_attention(self.q, self.k, self.v, 0.0, self.causal)[1]
        return aten._scaled_dot_product_flash_attention_for_cpu(self.q, self.k, self.v, 0.0, self.causal)[1]

    def check(self, task: dict[str, Any]) -> tuple[Any, float]:
        """Run once into poisoned outputs. Returns what was compiled, and the worst error over what is allowed."""
        assert self.truth is not None
        run = self.runner(task)
        names = self.FILLS[task["kind"]]
        for name in names:
            getattr(self, name).fill_(float("nan"))
        compiled = run()
        self.synchronize()
        worst = 0.0
        for name in names:
            error = (getattr(self, name).to(self.truth[name].dtype) - self.truth[name]).abs().max().item()
            worst = max(worst, error / self.allowed[name]) if error == error else float("inf")  # noqa: PLR0124
        if task["kind"] == "forward":
            # 1e-3 of a logsumexp is 1e-3 of every weight, a quarter of what bf16 resolves.
            difference = (self.logsumexp - self.logsumexp_truth).abs().max().item()
            worst = max(worst, difference / 1e-3) if difference == difference else float("inf")  # noqa: PLR0124
            self.out.copy_(self.truth["out"])
            self.logsumexp.copy_(self.logsumexp_truth)
        return compiled, worst


def short(shape: Shape) -> Shape:
    """The same to Triton's compiler, and small enough for float64."""
    batch, heads, sequence, head_dim, causal, dtype = shape
    return batch, heads, min(sequence, 1024), head_dim, causal, dtype


def compile_ahead(task: dict[str, Any]) -> None:
    """In a process of the pool: compile the task's kernel into Triton's cache on disk, without running it."""
    from stepscope.kernels import flash_launch  # noqa: PLC0415

    if flash_launch.interpreted():
        return
    flash_launch.launch = lambda kernel, grid, *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)
    batch, heads, _, head_dim, causal, dtype = SHAPES[task["shape"]]
    # Long enough that every tile divides it, as it does the shape's own.
    Bench((batch, heads, 1024, head_dim, causal, dtype), empty=True).runner(task)()


def work(deadline: float) -> None:
    """The process with the GPU: tasks as JSON lines in, results out, until the input ends."""

    benches: dict[tuple[int, bool], Bench] = {}

    def bench_of(shape: int, exact: bool) -> Bench:
        if (shape, exact) not in benches:
            bench = Bench(short(SHAPES[shape]) if exact else SHAPES[shape])
            bench.prepare_truth(exact=exact)
            benches[shape, exact] = bench
        return benches[shape, exact]

    for line in sys.stdin:
        task = json.loads(line)
        result: dict[str, Any] = {"task": task}
        try:
            if time.time() > deadline:
                break
            if task["kind"].startswith("sdpa"):
                forward, both = bench_of(task["shape"], False).sdpa(task["kind"])
                result["ms"] = median_ms(forward, 15, 60)
                result["total_ms"] = median_ms(both, 15, 80)
            elif task["kind"] == "total":
                result |= time_total(bench_of(task["shape"], False), task)
            elif task["kind"] == "host":
                result |= time_host()
            else:
                _, exact_error = bench_of(task["shape"], True).check(task)
                compiled, error = bench_of(task["shape"], False).check(task)
                result["of_allowed"] = round(exact_error, 3)
                result["of_allowed_long"] = round(error, 3)
                if compiled is not None:
                    result |= {"regs": compiled.n_regs, "spills": compiled.n_spills, "shared": compiled.metadata.shared}
                if exact_error > 1 or error > 1:
                    result["error"] = f"WRONG: error {exact_error:.2f} / {error:.2f} of what is allowed"
                else:
                    run = bench_of(task["shape"], False).runner(task)
                    result["ms"] = median_ms(run, 10, 50)
        except Exception as error:  # whatever a configuration does, the others are still measured
            result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            if "CUDA error" in str(error) or "illegal" in str(error):
                print(json.dumps(result), flush=True)
                os._exit(1)
        print(json.dumps(result), flush=True)


def time_total(bench: Bench, task: dict[str, Any]) -> dict[str, Any]:
    """Forward, and forward and backward through the operator and autograd, with the given configurations."""
    from stepscope.kernels import flash_tuning  # noqa: PLC0415
    from stepscope.kernels.flash_attention import flash_attention  # noqa: PLC0415
    from stepscope.kernels.flash_configuration import (  # noqa: PLC0415
        BackwardConfiguration,
        ForwardConfiguration,
        tiles,
    )

    f, b = task["forward"], task["backward"]
    forward = ForwardConfiguration(
        tiles=tiles(*f["tile"]), tma=f["tma"], warp_specialize=f.get("warp_specialize", False),
        persistent=f.get("persistent", False), rows_first=f.get("rows_first", True),
    )  # fmt: skip
    backward = BackwardConfiguration(
        way=b["way"], keys=tiles(*b["tile"]), queries=tiles(*b["tile2"]) if "tile2" in b else None, tma=b["tma"],
        tma_reduce=b.get("tma_reduce", False),
    )  # fmt: skip
    inputs = [t.detach().requires_grad_() for t in (bench.q, bench.k, bench.v)]

    def both() -> Any:
        for tensor in inputs:
            tensor.grad = None
        out = flash_attention(*inputs, causal=bench.causal)
        out.backward(bench.gradient)
        return out.detach(), *(t.grad for t in inputs)

    with flash_tuning.forced(forward=forward, backward=backward, precision=f.get("precision")):
        assert bench.truth is not None
        results = both()
        worst = max(
            (got - bench.truth[name]).abs().max().item() / bench.allowed[name]
            for name, got in zip(("out", "dq", "dk", "dv"), results, strict=True)
        )
        if not worst <= 1:
            return {"error": f"WRONG: {worst:.2f} of what is allowed"}
        return {
            "of_allowed_long": round(worst, 3),
            "ms": median_ms(lambda: flash_attention(*inputs, causal=bench.causal), 15, 60),
            "total_ms": median_ms(both, 15, 80),
        }


def time_host() -> dict[str, Any]:
    """Microseconds that the host needs to enqueue a call, beside PyTorch's own; the GPU has next to nothing to do."""
    import torch  # noqa: PLC0415

    from stepscope.kernels.flash_attention import FlashAttention, flash_attention  # noqa: PLC0415

    q, k, v = (
        torch.randn((1, 2, 64, 64), device=device_type(), dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    gradient = torch.randn_like(q)
    found: dict[str, Any] = {}
    for name, attend in {
        "flash_attention": lambda: flash_attention(q, k, v, causal=True),
        "FlashAttention.apply": lambda: FlashAttention.apply(q, k, v, True),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }.items():
        for what in ("forward", "both"):
            times = []
            for _ in range(300 if device_type() == "cuda" else 60):
                if device_type() == "cuda":
                    torch.cuda.synchronize()
                if what == "forward":
                    started = time.perf_counter()
                    with torch.no_grad():
                        attend()
                else:
                    started = time.perf_counter()
                    attend().backward(gradient)
                times.append((time.perf_counter() - started) * 1e6)
            found[f"{name} {what} us"] = round(statistics.median(times[50:]), 1)
    return found


class Worker:
    """The GPU's process, and a thread that reads its answers."""

    def __init__(self, deadline: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(deadline)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, task: dict[str, Any], patience_s: float) -> dict[str, Any] | None:
        """The answer; None where the process died or hung."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            while True:
                line = self.answers.get(timeout=patience_s)
                if line is None:
                    return None
                if line.startswith("{"):
                    return json.loads(line)
        except (queue.Empty, BrokenPipeError, json.JSONDecodeError):
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Experiments:
    """The whole run: results as they come, within the budget."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.time() + seconds
        self.results: list[dict[str, Any]] = []
        self.worker: Worker | None = None

    @property
    def left_s(self) -> float:
        return self.deadline - time.time()

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        if self.worker is None:
            self.worker = Worker(self.deadline)
        answer = self.worker.ask(task, max(0.1, min(TASK_PATIENCE_S, self.left_s)))
        if answer is None or self.worker.process.poll() is not None:
            self.worker.end()
            self.worker = None
        if answer is None:
            answer = {"task": task, "error": "its process died or hung"}
        self.results.append(answer)
        return answer

    def best(self, shape: int, kind: str) -> dict[str, Any] | None:
        """The task of the fastest."""
        found = [r for r in self.results if r["task"]["kind"] == kind and r["task"]["shape"] == shape and "ms" in r]
        return min(found, key=lambda r: r["ms"])["task"] if found else None

    def totals(self, shape: int, ways: tuple[str, ...]) -> None:
        """Whole passes of the best forward and the best backward of each way."""
        forward, keys, queries, fused = (self.best(shape, kind) for kind in ("forward", "keys", "queries", "fused"))
        for way in ways:
            if self.left_s < 2 or forward is None:
                return
            if way == "fused" and fused is not None:
                backward = {name: fused[name] for name in ("tile", "tma", "tma_reduce")}
            elif way != "fused" and keys is not None and queries is not None:
                backward = {"tile": keys["tile"], "tile2": queries["tile"], "tma": keys["tma"] and queries["tma"]}
            else:
                continue
            self.run({"shape": shape, "kind": "total", "forward": forward, "backward": {"way": way, **backward}})


def print_table(results: list[dict[str, Any]], rows_each: int) -> None:
    """The fastest of every kind, and in a line how the others failed."""
    for shape in sorted({r["task"]["shape"] for r in results if "shape" in r["task"]}):
        print(f"\n== {shape}: {SHAPES[shape]}: median ms")
        mine = [r for r in results if r["task"].get("shape") == shape]
        for kind in (*rivals(SHAPES[shape][5]), "preprocess", *KINDS, "total"):
            rows = sorted((r for r in mine if r["task"]["kind"] == kind and "ms" in r), key=lambda r: r["ms"])
            for r in rows[:rows_each]:
                total = f" f+b {r['total_ms']:.3f}" if "total_ms" in r else ""
                code = f" r{r['regs']} spill{r['spills']} sm{r['shared'] // 1024}K" if "regs" in r else ""
                error = f" e{r['of_allowed']}" if "of_allowed" in r else ""
                name = label(r["task"])
                if kind == "total":
                    backward = r["task"]["backward"]
                    name = f"{label(r['task']['forward'])} | {label({'kind': backward['way'], **backward})}"
                print(f"{r['ms']:.3f}{total} {name}{code}{error}")
            errors: dict[str, int] = {}
            for r in mine:
                if r["task"]["kind"] == kind and "ms" not in r:
                    reason = str(r.get("error"))[:70]
                    errors[reason] = errors.get(reason, 0) + 1
            for reason, count in errors.items():
                print(f"    {kind}: {count} x {reason}")


def collect(run: Experiments, tasks: list[dict[str, Any]], processes: int) -> None:
    """Compile ahead, and measure what is compiled, until the budget is nearly spent."""
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=spawn)
    compiling = {pool.submit(compile_ahead, task): task for task in tasks if not task["kind"].startswith("sdpa")}
    for task in [task for task in tasks if task["kind"].startswith("sdpa")]:
        run.run(task)
    try:
        for future in as_completed(compiling, timeout=max(0.1, run.left_s - RESERVE_S)):
            failure = future.exception()
            if failure is not None:
                reason = f"compiling: {type(failure).__name__} {' '.join(str(failure).split())[:160]}"
                run.results.append({"task": compiling[future], "error": reason})
            elif run.left_s > RESERVE_S:
                run.run(compiling[future])
    except TimeoutError:
        pass
    finally:
        workers = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--rows", type=int, default=4, help="configurations of a kind to print")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker)
        return
    run = Experiments(arguments.seconds)
    tasks = tasks_for(arguments.shapes, arguments.only)
    try:
        collect(run, tasks, arguments.processes)
        run.run({"kind": "host"})  # now that no compiler keeps the host busy
        reached = {json.dumps(r["task"]) for r in run.results}
        for ways in (("apart", "fused"), ("joint",)):
            for shape in arguments.shapes:
                run.totals(shape, ways)
    finally:
        if run.worker is not None:
            run.worker.end()
        if arguments.json:
            arguments.json.write_text(json.dumps(run.results, indent=1))
    print_table(run.results, arguments.rows)
    print(
        "\nhost:",
        *(f"{k} {v}" for r in run.results if r["task"]["kind"] == "host" for k, v in r.items() if k != "task"),
    )
    missed = [label(task) for task in tasks if json.dumps(task) not in reached]
    print(f"not reached in {arguments.seconds:.0f} s: {len(missed)} of {len(tasks)}")


if __name__ == "__main__":
    main()
