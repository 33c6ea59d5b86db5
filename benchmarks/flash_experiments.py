"""Which configuration of the FlashAttention kernels is fastest? Each checked, then timed, beside PyTorch's.

    python benchmarks/flash_experiments.py [--seconds 110] [--json FILE] [--only forward keys ...] [--shapes 0 1 ...]

Of a pass's kernels in Triton each by itself: forward, over keys, over queries, joint (both in one launch); and those in
Gluon, on Hopper: hopper-forward, hopper-backward (a whole pass). Then whole passes of the fastest.

Kernels are compiled ahead by a pool of processes. One process owns the GPU and is started again when a configuration
kills or hangs it. Every configuration is first compared with float64 attention on a shorter sequence and with PyTorch's
flash attention on the shape itself: a wrong one gets no time. Times are medians of stepscope's own timer (CUDA events;
the L2 cache is overwritten before each call). The list is worked through breadth first, and the budget of
seconds is kept: what is not reached is named.
"""

import argparse
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from flash_bench import HOPPER_KINDS, SHAPES, compile_ahead, rivals, why_not_hopper, work
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.units import parse_seconds
from stepscope.kernels.flash.configuration import HopperBackward, HopperForward

KINDS = ("forward", "hopper-forward", "keys", "queries", "joint", "hopper-backward")
RESERVE_S = 28
"""Kept for the host, and for the whole passes of the best."""
TASK_PATIENCE_S = 40
"""A task that answers nothing for so long has hung: its process is killed."""

Tile = tuple[int, int, int, int]
"""block_m, block_n, num_warps, num_stages."""


FORWARD = {
    64: [((64, 128, 4, 2), ""), ((64, 64, 4, 3), "p"), ((64, 128, 4, 3), ""), ((64, 64, 4, 2), "r96"),
         ((64, 64, 4, 3), "p h")],
    128: [((64, 64, 4, 3), ""), ((64, 128, 4, 1), ""), ((64, 64, 4, 3), "h")],
}  # fmt: skip
"""By head_dim, most promising first: what came near the fastest of some shape.

docs/results/flash-ideas.md says what did not. Flags are `p` for pointers, `h` for heads first, and `rN` for a cap on
registers."""
KEYS = {
    64: [((64, 64, 4, 2), "r168"), ((128, 64, 4, 2), ""), ((64, 64, 4, 3), ""), ((64, 64, 4, 3), "r168"),
         ((64, 64, 4, 2), "p"), ((64, 64, 4, 3), "r168 h")],
    128: [((64, 64, 4, 2), ""), ((64, 64, 4, 2), "h"), ((64, 128, 8, 3), ""), ((64, 128, 8, 2), "")],
}  # fmt: skip
QUERIES = {
    64: [((128, 64, 8, 3), ""), ((64, 64, 4, 2), ""), ((64, 64, 4, 2), "p"), ((128, 64, 8, 4), ""),
         ((64, 64, 4, 3), "h")],
    128: [((64, 64, 4, 2), ""), ((64, 64, 4, 2), "h"), ((128, 64, 8, 3), "")],
}  # fmt: skip
HOPPER = {
    "hopper-forward": {
        64: [{"consumers": 1, "late": True, "max_registers": 128}, {"consumers": 3}, {"late": True},
             {"turns": True, "late": True}],
        128: [{"turns": True, "late": True}, {"late": True}, {"turns": True, "late": True, "stages": 3}],
    },
    "hopper-backward": {
        64: [{"v_in_registers": True, "spread": True, "share": True, "ahead": True}, {"v_in_registers": True}],
        128: [{"spread": True, "share": True}, {}],
    },
}  # fmt: skip
"""Fields of HopperForward and HopperBackward. What shares tiles depends on the device, so it is not compiled ahead."""
FP32: dict[str, dict[int, list[tuple[str, tuple[Tile, ...], str]]]] = {
    "forward": {
        64: [("tf32x3", ((128, 64, 8, 3),), ""), ("tf32x3", ((128, 64, 8, 2),), ""), ("tf32x3", ((64, 64, 4, 2),), "")],
        128: [("bf16x6", ((64, 64, 4, 1),), "h"), ("tf32x3", ((128, 64, 8, 2),), ""), ("bf16x6", ((64, 64, 4, 1),), ""),
              ("bf16x6", ((128, 32, 8, 2),), "")],
    },
    "keys": {
        64: [("tf32x3", ((64, 128, 8, 2),), "p"), ("tf32x3", ((32, 32, 4, 2),), "p")],
        128: [("bf16x6", ((32, 64, 4, 2),), ""), ("tf32x3", ((32, 32, 4, 2),), "p"),
              ("bf16x6", ((32, 64, 4, 2),), "p")],
    },
    "queries": {
        64: [("tf32x3", ((128, 64, 8, 2),), "p"), ("tf32x3", ((64, 32, 4, 2),), "")],
        128: [("bf16x6", ((64, 32, 4, 2),), ""), ("tf32x3", ((32, 32, 4, 2),), "p")],
    },
    "joint": {
        64: [("tf32x3", ((64, 128, 8, 2), (128, 64, 8, 2)), "p")],
        128: [("bf16x6", ((32, 64, 4, 2), (64, 32, 4, 2)), ""), ("tf32x3", ((32, 32, 4, 2), (32, 32, 4, 2)), "p")],
    },
}  # fmt: skip
"""fp32 on the tensor cores, as three products of TF32 each or six of bf16: precision, tiles (of the kernel over queries
too, where they are two), flags."""


def _options(tiles: tuple[Tile, ...], flags: str, precision: str | None = None) -> dict[str, Any]:
    """One configuration."""
    found: dict[str, Any] = {"tile": tiles[0], "tma": True}
    if len(tiles) > 1:
        found["tile2"] = tiles[1]
    if precision is not None:
        found["precision"] = precision
    for flag in flags.split():
        if flag == "p":
            found["tma"] = False
        elif flag == "h":
            found["rows_first"] = False
        else:
            found["tile_registers"] = int(flag.removeprefix("r"))
    return found


def configurations(shape: int) -> dict[str, list[dict[str, Any]]]:
    """By kind, what is measured of a shape."""
    _, _, _, head_dim, _, dtype = SHAPES[shape]
    if dtype == "float32":
        return {
            kind: [_options(tiles, flags, precision) for precision, tiles, flags in lists[head_dim]]
            for kind, lists in FP32.items()
        }
    in_triton = {"forward": FORWARD, "keys": KEYS, "queries": QUERIES}
    found = {kind: [_options((tile,), flags) for tile, flags in of[head_dim]] for kind, of in in_triton.items()}
    return found | {kind: [{"hopper": options} for options in of[head_dim]] for kind, of in HOPPER.items()}


def tasks_for(shapes: list[int], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Breadth first: the first configuration of every kind and shape before the second of any. Of fp32 before others:
    they take the longest to compile."""
    ranked = []
    for place, shape in enumerate(sorted(shapes, key=lambda shape: SHAPES[shape][5] != "float32")):
        ranked += [(-1, place, {"shape": shape, "kind": name}) for name in (*rivals(SHAPES[shape][5]), "preprocess")]
        for kind, listed in configurations(shape).items():
            if kind in kinds:
                ranked += [(rank, place, {"shape": shape, "kind": kind, **each}) for rank, each in enumerate(listed)]
    return [task for _, _, task in sorted(ranked, key=lambda entry: entry[:2])]


def label(task: dict[str, Any]) -> str:
    """One task, short."""
    if "hopper" in task:
        options = task["hopper"]
        return f"forward {HopperForward(**options)}" if task["kind"] == "hopper-forward" else (
            f"backward {HopperBackward(**options)}"
        )  # fmt: skip
    if "tile" not in task:
        return str(task["kind"])
    block_m, block_n, warps, stages = task["tile"]
    flags = [name for name in ("tma", "warp_specialize", "persistent") if task.get(name)]
    flags += [f"r{task['tile_registers']}"] if "tile_registers" in task else []
    flags += [f"r{task['tile2_registers']} over queries"] if "tile2_registers" in task else []
    flags += [task["precision"]] if "precision" in task else []
    flags += ["heads-first"] if task.get("rows_first") is False else []
    second = " + {}x{} w{} s{}".format(*task["tile2"]) if "tile2" in task else ""
    return f"{task['kind']} {block_m}x{block_n} w{warps} s{stages}{second} {' '.join(flags)}"


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

    def best(self, shape: int, kind: str, **wanted: object) -> dict[str, Any] | None:
        """The task of the fastest right one, among those that have what is wanted."""
        found = [
            r for r in self.results
            if r["task"]["kind"] == kind and r["task"].get("shape") == shape and "ms" in r
            and all(r["task"].get(name) == value for name, value in wanted.items())
        ]  # fmt: skip
        return min(found, key=lambda r: r["ms"])["task"] if found else None

    def total(self, shape: int, way: str, **wanted: object) -> None:
        """A whole pass of the best forward and the best backward of one way: "hopper", "apart" or "joint"."""
        forward = self.best(shape, "hopper-forward" if way == "hopper" else "forward", **wanted)
        backward = None
        if way == "apart":
            keys, queries = (self.best(shape, kind, **wanted) for kind in ("keys", "queries"))
            if keys is not None and queries is not None:
                backward = {"tile": keys["tile"], "tile2": queries["tile"], "tma": keys["tma"] and queries["tma"]}
                if keys.get("rows_first") is False:  # of a pass both kernels have one order
                    backward["rows_first"] = False
                for name, part in (("tile_registers", keys), ("tile2_registers", queries)):
                    if "tile_registers" in part:
                        backward[name] = part["tile_registers"]
        elif (best := self.best(shape, "hopper-backward" if way == "hopper" else way, **wanted)) is not None:
            backward = {name: value for name, value in best.items() if name != "shape"}
        if self.left_s < 2 or forward is None or backward is None:
            return
        self.run({"shape": shape, "kind": "total", "forward": forward, "backward": {"way": way, **backward}})

    def totals(self, shapes: list[int]) -> None:
        """Of each shape: by the kernels in Gluon, in fp32 joint, and by Triton's apart. One precision a pass."""
        for ways in (("hopper", "joint"), ("apart",)):
            for shape in shapes:
                for precision in ("bf16x6", "tf32x3") if SHAPES[shape][5] == "float32" else (None,):
                    for way in ways:
                        self.total(shape, way, precision=precision)
        for shape in shapes:
            if SHAPES[shape][2] <= 1024:
                self.total(shape, "apart", tma=False)


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
    ahead = [{"kind": "host"}, *(task for task in tasks if not task["kind"].startswith("sdpa"))]
    compiling = {pool.submit(compile_ahead, task): task for task in ahead}
    for task in [task for task in tasks if task["kind"].startswith("sdpa")]:
        run.run(task)
    try:
        for future in as_completed(compiling, timeout=max(0.1, run.left_s - RESERVE_S)):
            failure, task = future.exception(), compiling[future]
            if task["kind"] == "host":
                continue
            # What is in Gluon is compiled where it is measured, if it cannot be here.
            if failure is not None and "hopper" not in task:
                reason = f"compiling: {type(failure).__name__} {' '.join(str(failure).split())[:160]}"
                run.results.append({"task": task, "error": reason})
            elif run.left_s > RESERVE_S:
                run.run(task)
    except TimeoutError:
        pass
    finally:
        workers = list((getattr(pool, "_processes", None) or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()


def given(words: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for, or an InputError for what nothing can be made of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=lambda text: parse_seconds(text, "--seconds"), default=110)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=KINDS)
    parser.add_argument("--shapes", nargs="+", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--rows", type=int, default=4, help="configurations of a kind to print")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    for shape in arguments.shapes:
        if not 0 <= shape < len(SHAPES):
            raise InputError(f"--shapes has {shape}: the shapes are 0 to {len(SHAPES) - 1}")
    if arguments.processes < 1:
        raise InputError(f"--processes is {arguments.processes}: write 1 or more")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Parse, measure, print."""
    try:
        arguments = given(words)
    except StepscopeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if arguments.worker is not None:
        work(arguments.worker)
        return 0
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        print("no NVIDIA GPU on this machine: TRITON_INTERPRET=1 tries this script out without one", file=sys.stderr)
        return 2
    kinds, why = arguments.only or KINDS, why_not_hopper()
    if why is not None:
        kinds = [kind for kind in kinds if kind not in HOPPER_KINDS]
        if arguments.only and len(kinds) < len(arguments.only):
            print(f"--only: {why}: leave out {' and '.join(HOPPER_KINDS)}", file=sys.stderr)
            return 2
        print(f"{' and '.join(HOPPER_KINDS)} are left out: {why}", file=sys.stderr)
    run = Experiments(arguments.seconds)
    tasks = tasks_for(arguments.shapes, kinds)
    try:
        collect(run, tasks, arguments.processes)
        run.run({"kind": "host"})  # now that no compiler keeps the host busy
        reached = {json.dumps(r["task"]) for r in run.results}
        run.totals(arguments.shapes)
    finally:
        if run.worker is not None:
            run.worker.end()
        if arguments.json:
            arguments.json.write_text(json.dumps(run.results, indent=1))
    print_table(run.results, arguments.rows)
    print("\nmicroseconds of the host:")
    for result in run.results:
        if result["task"]["kind"] == "host":
            print("\n".join(f"{us:8} {name}" for name, us in result.items() if name != "task"))
    missed = [label(task) for task in tasks if json.dumps(task) not in reached]
    print(f"not reached in {arguments.seconds:.0f} s: {len(missed)} of {len(tasks)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
