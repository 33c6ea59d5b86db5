"""One GPU's side of flash_experiments.py: the tensors of a shape, every kernel on them, checked, then timed."""

import json
import os
import sys
import time
from typing import Any, ClassVar

Shape = tuple[int, int, int, int, bool, str]
"""batch, heads, sequence, head_dim, causal, dtype."""
HOPPER_KINDS = ("hopper-forward", "hopper-backward")
"""Of the kernels in Gluon; the backward one's time is a whole pass's: what goes before it and after it too."""
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


def rivals(dtype: str) -> tuple[str, ...]:
    """PyTorch's own; the first is what results are compared with."""
    return ("sdpa-efficient",) if dtype == "float32" else ("sdpa-flash", "sdpa-cudnn")


def device_type() -> str:
    """The GPU; without one, Triton's interpreter on a CPU: for trying this script out."""
    import torch  # noqa: PLC0415

    return "cuda" if torch.cuda.is_available() else "cpu"


def why_not_hopper() -> str | None:
    """Why the kernels in Gluon cannot be measured here; None where they can."""
    import torch  # noqa: PLC0415
    import triton  # noqa: PLC0415

    from stepscope.kernels.flash.launch import hopper_takes  # noqa: PLC0415

    if device_type() != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        return "the kernels in Gluon need a Hopper GPU (compute capability 9.0), and this machine has none"
    probe = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    if not hopper_takes(probe, probe, probe, limited=False):
        return f"the kernels in Gluon were not made for Triton {triton.__version__}"
    return None


def median_ms(run: Any, warmup_ms: int, repeat_ms: int) -> float:
    """The median of the device's own time; without a GPU the time of one call by the host's clock."""
    from stepscope.core.run import Settings  # noqa: PLC0415
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415
    from stepscope.recording.leads import median_call_s  # noqa: PLC0415

    once = Settings(warmup_floor=0, warmup_cap=0, steps_floor=1, steps_cap=1, seconds=0)
    timed = Settings(
        warmup_floor=1, warmup_cap=1000, warmup_seconds=warmup_ms * 1e-3, steps_floor=3, steps_cap=10_000,
        seconds=repeat_ms * 1e-3,
    )  # fmt: skip
    device = resolve_device("auto")
    return median_call_s(run, device, timed if device.type == "cuda" else once) * 1e3


def tiles_of(task: dict[str, Any], name: str = "tile") -> Any:
    """The task's tiles."""
    from stepscope.kernels.flash.configuration import Tiles  # noqa: PLC0415

    block_m, block_n, warps, stages = task[name]
    return Tiles(
        block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages,
        max_registers=task.get(f"{name}_registers"),
    )  # fmt: skip


def forward_of(task: dict[str, Any]) -> Any:
    """The task as a configuration of the forward kernel."""
    from stepscope.kernels.flash.configuration import (  # noqa: PLC0415
        ForwardConfiguration,
        HopperForward,
        tiles,
    )

    if "hopper" in task:
        return ForwardConfiguration(tiles=tiles(64, 64, 4, 2), hopper=HopperForward(**task["hopper"]))
    return ForwardConfiguration(
        tiles=tiles_of(task), tma=task["tma"], warp_specialize=task.get("warp_specialize", False),
        persistent=task.get("persistent", False), rows_first=task.get("rows_first", True),
    )  # fmt: skip


def backward_of(task: dict[str, Any]) -> Any:
    """The task as a configuration of the backward kernels."""
    from stepscope.kernels.flash.configuration import (  # noqa: PLC0415
        BackwardConfiguration,
        HopperBackward,
        tiles,
    )

    if "hopper" in task:
        some = tiles(64, 64, 4, 2)
        return BackwardConfiguration(keys=some, queries=some, hopper=HopperBackward(**task["hopper"]))
    return BackwardConfiguration(
        way=task["way"], keys=tiles_of(task), queries=tiles_of(task, "tile2"), tma=task["tma"],
        rows_first=task.get("rows_first", True),
    )  # fmt: skip


class Bench:
    """The tensors of one shape, and the kernels on them. The processes that compile leave the tensors empty: they must
    not disturb the GPU."""

    FILLS: ClassVar = {"forward": ("out",), "keys": ("dk", "dv"), "queries": ("dq",), "joint": ("dq", "dk", "dv"),
                       "preprocess": (), "hopper-forward": ("out",), "hopper-backward": ("dq", "dk", "dv")}  # fmt: skip

    def __init__(self, shape: Shape, *, empty: bool = False, launcher: Any = None) -> None:
        import torch  # noqa: PLC0415

        from stepscope.kernels.flash.recorded_launches import launch  # noqa: PLC0415

        self.launcher = launcher or launch

        self.torch = torch
        batch, heads, sequence, head_dim, self.causal, dtype_name = shape
        dtype, device = getattr(torch, dtype_name), device_type()
        self.rival = rivals(dtype_name)[0] if device == "cuda" else "sdpa-flash"  # a CPU has no other
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
        from stepscope.kernels.flash.launch import Backward, launch_forward, statistics_for, sums_for  # noqa: PLC0415

        kind = task["kind"]
        self.refuse_elsewhere(task)
        if kind.startswith("sdpa"):
            return self.sdpa(kind)[0]
        if kind in {"forward", "hopper-forward"}:
            configuration = forward_of(task)
            return lambda: launch_forward(
                self.q, self.k, self.v, self.out, self.logsumexp, causal=self.causal, scale=self.scale, window=None,
                precision=task.get("precision", "ieee"), configuration=configuration, launcher=self.launcher,
            )  # fmt: skip
        configuration = None
        if kind != "preprocess":
            configuration = backward_of({"way": "apart", "tile2": task.get("tile"), **task})
        statistics, sums = statistics_for(self.q, configuration), None
        if configuration is not None and configuration.hopper is not None:
            sums = sums_for(
                configuration, statistics, self.q, self.k, self.v, self.gradient, causal=self.causal, limited=False
            )
        backward = Backward(
            self.gradient, self.q, self.k, self.v, self.out, self.logsumexp, self.dq, self.dk, self.dv,
            statistics, causal=self.causal, scale=self.scale, window=None,
            precision=task.get("precision", "ieee"), tma=task.get("tma", True),
            rows_first=task.get("rows_first", True), sums=sums, launcher=self.launcher,
        )  # fmt: skip
        if configuration is None:
            return backward.preprocess
        if configuration.hopper is not None:
            assert sums is not None, "PyTorch is not asked to be deterministic here"
            return lambda: backward.hopper(sums, configuration.hopper)
        backward.split()
        backward.preprocess()
        if kind == "keys":
            return lambda: backward.over_keys(tiles_of(task))
        if kind == "queries":
            return lambda: backward.over_queries(tiles_of(task), prepare=True)
        assert kind == "joint", kind
        return lambda: backward.joint(tiles_of(task), tiles_of(task, "tile2"))

    def refuse_elsewhere(self, *tasks: dict[str, Any]) -> None:
        """Raise where one is for a kernel in Gluon that would not run: another's time would be taken for its own."""
        from stepscope.kernels.flash.launch import hopper_takes  # noqa: PLC0415

        if any("hopper" in t for t in tasks) and not hopper_takes(self.q, self.k, self.v, self.gradient, limited=False):
            raise RuntimeError(why_not_hopper() or "the kernels in Gluon take 16 bits, head_dim 64, 72 .. 128")

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
        inputs = q, k, v = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]

        def forward() -> Any:
            with sdpa_kernel(backend):
                return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

        def both() -> Any:
            for tensor in inputs:
                tensor.grad = None
            out = forward()
            out.backward(self.gradient)
            return out.detach(), *(t.grad for t in inputs)

        return forward, both

    def prepare_truth(self, *, exact: bool) -> None:
        """What the kernels should give: float64 attention, or PyTorch's own on a shape too long for it."""
        torch = self.torch
        sdpa: dict[str, Any] = dict(
            zip(
                ("out", "dq", "dk", "dv"),
                self.sdpa(self.rival)[1](),
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
            truth: dict[str, Any] = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
            self.truth = truth
            self.allowed = {n: 2 * (sdpa[n].double() - t).abs().max().item() for n, t in truth.items()}
        else:
            self.truth = truth = sdpa
            # Two roundings to bf16, of numbers whose largest is near the tensor's maximum, and two sums' errors.
            share = 0.02 if self.q.element_size() == 2 else 2e-5
            self.allowed = {n: share * t.abs().max().item() for n, t in sdpa.items()}
            self.logsumexp_truth = self.logsumexp_of_sdpa()
        self.out.copy_(truth["out"])
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
        if "out" in names:
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
    from stepscope.kernels.flash import launch as flash_launch  # noqa: PLC0415

    if flash_launch.interpreted():
        return

    def warm_up(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: int) -> object:
        return kernel.warmup(*arguments, grid=grid, **options)

    if task["kind"] == "host":
        from flash_host import HOST_SHAPE, host_kernels  # noqa: PLC0415

        bench = Bench(HOST_SHAPE, empty=True, launcher=warm_up)
        for each in host_kernels():
            bench.runner(each)()
        return
    batch, heads, _, head_dim, causal, dtype = SHAPES[task["shape"]]
    # Long enough that every tile divides it, as it does the shape's own.
    Bench((batch, heads, 1024, head_dim, causal, dtype), empty=True, launcher=warm_up).runner(task)()


def work(deadline: float) -> None:
    """The process with the GPU: tasks as JSON lines in, results out, until the input ends."""
    from flash_host import time_host  # noqa: PLC0415

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
    from stepscope.kernels.flash import tuning_cache  # noqa: PLC0415
    from stepscope.kernels.flash.attention import flash_attention  # noqa: PLC0415

    f = task["forward"]
    forward, backward = forward_of(f), backward_of(task["backward"])
    bench.refuse_elsewhere(f, task["backward"])
    inputs = [t.detach().requires_grad_() for t in (bench.q, bench.k, bench.v)]

    def both() -> Any:
        for tensor in inputs:
            tensor.grad = None
        out = flash_attention(*inputs, causal=bench.causal)
        out.backward(bench.gradient)
        return out.detach(), *(t.grad for t in inputs)

    with tuning_cache.forced(forward=forward, backward=backward, precision=f.get("precision")):
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
