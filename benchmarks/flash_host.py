"""What a call of attention costs the host, part by part: flash_experiments.py asks it last, when nothing compiles."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from flash_bench import Shape, backward_of, device_type, forward_of, why_not_hopper

HOST_SHAPE: Shape = (1, 2, 64, 64, True, "bfloat16")
"""The GPU has next to nothing to do."""
_TILES = {"tile": (64, 64, 4, 2), "tile2": (64, 64, 4, 2), "way": "apart"}
_HOPPER = {
    "hopper-forward": {"consumers": 1, "late": True, "max_registers": 128},
    "hopper-backward": {"v_in_registers": True},
}


def host_kernels() -> list[dict[str, Any]]:
    """What `time_host` runs, kernel by kernel."""
    tasks: list[dict[str, Any]] = [
        {"kind": kind, "tma": tma, **_TILES} for tma in (True, False) for kind in ("forward", "keys", "queries")
    ]
    if why_not_hopper() is None:
        tasks += [{"kind": kind, "hopper": options} for kind, options in _HOPPER.items()]
    return tasks


def _ways() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name, the forward and the backward configuration that a call is forced to."""
    descriptors, pointers = ({**_TILES, "tma": tma} for tma in (True, False))
    found = {"descriptors": (descriptors, descriptors), "pointers": (pointers, pointers)}
    if why_not_hopper() is None:
        forward, backward = _HOPPER.values()
        found["hopper"] = ({"hopper": forward}, {"hopper": backward})
    return found


def time_host() -> dict[str, Any]:
    """Microseconds that the host needs to enqueue a call, part by part; the GPU has next to nothing to do."""
    import torch  # noqa: PLC0415

    from stepscope.kernels.flash import tuning_cache  # noqa: PLC0415
    from stepscope.kernels.flash.attention import FlashAttention, _forward, flash_attention  # noqa: PLC0415

    size = HOST_SHAPE[:4]
    q, k, v = (torch.randn(size, device=device_type(), dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    gradient = torch.randn_like(q)
    q0, k0, v0 = (t.detach() for t in (q, k, v))

    class Nothing(torch.autograd.Function):
        """What autograd itself costs: three inputs, one output, no kernel."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return tuple(torch.empty_like(t) for t in ctx.saved_tensors)

    found: dict[str, Any] = {}

    def add(name: str, attend: Callable[[], Any]) -> None:
        def forward() -> None:
            with torch.no_grad():
                attend()

        def both() -> None:
            q.grad = k.grad = v.grad = None
            attend().backward(gradient)

        both()  # what is launched from C++ is learnt from a first call
        for what, run in (("forward", forward), ("both", both)):
            found[f"{name} {what}"] = host_us(run)

    def operator() -> Any:
        return torch.ops.stepscope.flash_attention_forward(q, k, v, True, 0.125, None)[0]

    for name, (forward_task, backward_task) in _ways().items():
        with tuning_cache.forced(forward=forward_of(forward_task), backward=backward_of(backward_task)):
            add(name, lambda: flash_attention(q, k, v, causal=True))
            add(f"{name}, the operator", operator)
            add(f"{name}, FlashAttention", lambda: FlashAttention.apply(q, k, v, True))
            found[f"{name}, launch alone"] = host_us(lambda: _forward(q0, k0, v0, True, 0.125, None))
    add("sdpa", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    add("nothing", lambda: Nothing.apply(q, k, v))
    found["empty_like"] = host_us(lambda: torch.empty_like(q0))
    return found


def host_us(run: Callable[[], object]) -> float:
    """Median microseconds until `run` returns, the GPU idle before it."""
    times = []
    for _ in range(300 if device_type() == "cuda" else 60):
        if device_type() == "cuda":
            import torch  # noqa: PLC0415

            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return round(statistics.median(times[50:]), 1)
