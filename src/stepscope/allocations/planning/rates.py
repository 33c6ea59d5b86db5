"""The rates at which a device is assumed to work: shares of its datasheet, and where each share comes from.

A plan stands or falls with them, so an answer always names them. They were measured on an H200 by stepscope, and are
taken for any device:
    device.json      products of 4096 x 4096 matrices, and a copy (in results/h200, as all of these)
    attention        causal attention of 16,384 tokens, 16 heads, forward and backward, and how much less it reaches
                     with 4,096 (grid-bf16.json), with 1,024 in steps (attention-steps), and at most in a step of
                     seconds (h200-x2/long-step)
    kernels          time of the kernels of 18 training steps, op by op, and of the steps: elementwise kernels take
                     1.5 us and their bytes, products 3.6 us beyond what large ones take for their FLOPs, and the device
                     pauses 2 us between two kernels
    h100-x2/traced   fused parts: silu_product, forward and backward, moves 210 MB in 70.2 us of an H100, 89 % of its
                     memory's rate, as much as a copy
    best, plain      optimizers, and how long the host takes for a launch where it is the slower one
"""

import msgspec

from stepscope.core.attentions import scores_of
from stepscope.core.device_spec import DeviceSpec, pcie_generation, product_dtype
from stepscope.core.errors import InputError
from stepscope.core.parts import REFERENCE
from stepscope.core.workload import Workload

MATMUL_SHARES = {"bf16": 0.690, "fp16": 0.652, "tf32": 0.695, "fp32": 0.761}
COPY_SHARE = 0.888
ELEMENTWISE_SHARE = 0.522
"""Share of the memory's rate at which elementwise kernels of a step op by op move their bytes; fused ones are taken to
reach a copy's."""
FUSED_ADAMW_SHARE, ADAMW_SHARE = 0.715, 0.78
_PAUSE_S = 2.0e-6
KERNEL_S, PRODUCT_S = 1.5e-6 + _PAUSE_S, 3.6e-6 + _PAUSE_S
"""What an elementwise kernel and a product take however small they are, with the pause before the next."""
LAUNCH_S = 15e-6
"""What the host takes for a kernel of a step op by op."""
UNIT_S = (2.0e-3, 2.4e-3)
"""What the host takes beside that, forward and backward, to gather and let go the parameters of a block that ranks
share out: `fully_shard` runs its hooks in Python. Forward and backward of `large` wait 102 and 127 ms for a host with
37 such units (fsdp2 over four H200, 6 sequences a rank, results/h200-x4/scaling), and 27 and 37 ms for one without
ranks (results/h200/eager-parts)."""
ATTENTION_SHARES = {
    "flash": (0.477, 0.628), "sdpa-cudnn": (0.460, 0.595), "flex": (0.313, 0.394), "sdpa-flash": (0.279, 0.306),
    "sdpa": (0.460, 0.595),
}  # fmt: skip
"""Shares of the peak that attention of 16,384 tokens reaches in bf16, with a head_dim of 64 and of 128; below 128 the
first is taken. PyTorch's own choice, `sdpa`, is cuDNN's on Hopper (results/h200/best). Another fused one is taken for
it, and one that is written out is made of products."""
ATTENTION_IN_STEPS = 0.52
"""The largest share that attention is taken to reach in a step. By itself, for a moment, it reaches more. A step that
multiplies for seconds without a pause is at its power cap, which held an H200's clock at 1515 of 1980 MHz, and its
attention of 32,768 tokens and head_dim 128 to 514 TFLOP/s (the trace of selective-11 in results/h200-x2/long-step)."""
_LONG = 16_384
ATTENTION_HALVES = {"flash": 1900, "sdpa-cudnn": 1000, "flex": 1200, "sdpa-flash": 2000, "sdpa": 1000}
"""The tokens with which attention reaches half of what it does with very many: each block of queries takes, beside its
keys, as long as half as many keys do, to begin, to end, and for scores above the diagonal."""

PRODUCTS_BESIDE, OTHERS_BESIDE = 1.71, 1.12
"""How many times as long matrix products, and other kernels, take while a collective runs. NCCL's kernel of 24 blocks
keeps as many multiprocessors of 132 from them, and products whose grid has a block for each need a second round.
Of 1,007 products and 1,865 other kernels of a step of two H100: on the rank that waits in a collective meanwhile,
against the same ones alone on the other rank (results/h100-x2/traced). What a collective moves itself is not in it."""

HOST_BYTES_PER_S = 50e9
"""What a GPU on PCIe 5.0 copies to its host's locked memory or from it in a second, while a step runs: 49.9 and 50.9
GB/s, two H200 at once (the trace of offload-22 in results/h200-x2/long-step). Each generation of PCIe before has half
of the next."""

STEP_SPREAD = 0.009
"""Relative standard deviation of the steps of one GPU: of 2.7B, bf16, compiled, in results/h200/best."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does in a second."""

    peak_flops_per_s: float
    matmul_flops_per_s: float
    attention_flops_per_s: float
    elementwise_bytes_per_s: float
    fused_bytes_per_s: float
    """The rate of fused parts' kernels, which read and write once, as a copy does."""
    optimizer_bytes_per_s: float
    products_beside: float = 1.0
    """How many times as long products take while a collective runs."""
    others_beside: float = 1.0
    """How many times as long all other kernels take while a collective runs."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """The rate of copies to the host's memory, and of those back."""
    launch_s: float
    """What the host takes for a kernel; 0 where a compiled step has few of them."""
    said: tuple[str, ...]
    """The assumptions in sentences."""


def attention_share(name: str, head_dim: int, tokens: int) -> float:
    """The share of the peak that fused attention of sequences of so many tokens reaches by itself in bf16."""
    known = name if name in ATTENTION_SHARES else "sdpa"
    half, (narrow, wide) = ATTENTION_HALVES[known], ATTENTION_SHARES[known]
    return (wide if head_dim >= 128 else narrow) * (1 + half / _LONG) / (1 + half / tokens)


def rates_of(spec: DeviceSpec, workload: Workload, matmul_share: float | None = None) -> Rates:
    """The rates of a device for a step's dtype and attention. Raises InputError where the datasheet lacks them."""
    peak = spec.peak_for(workload.dtype)
    if peak is None or spec.peak_bytes_per_s is None:
        raise InputError(f"{spec.name} multiplies no matrices of {workload.dtype}: choose another --dtype or --device")
    if matmul_share is not None and not 0 < matmul_share <= 1:
        raise InputError(f"--efficiency is {matmul_share:g}: write a share of the peak, above 0 and at most 1")
    product = product_dtype(workload.dtype)
    if matmul_share is None and product not in MATMUL_SHARES:
        raise InputError(f"what products in {product} reach was not measured: say it, as in --efficiency 0.5")
    share = MATMUL_SHARES[product] if matmul_share is None else matmul_share
    whose = "measured on an H200" if matmul_share is None else "as --efficiency says"
    if scores_of(workload.attention) == "whole":
        attention = share
    else:
        by_itself = attention_share(workload.attention, workload.model.head_dim, workload.seq_len)
        attention = min(by_itself, ATTENTION_IN_STEPS)
    eager = workload.compile == "eager"
    elementwise = ELEMENTWISE_SHARE if eager else COPY_SHARE
    adamw = FUSED_ADAMW_SHARE if workload.optimizer == "adamw-fused" else ADAMW_SHARE
    rate = spec.peak_bytes_per_s
    fused = [part for part, name in workload.parts.items() if name != REFERENCE]
    said = (
        f"Matrix products run at {share:.1%} of the {peak / 1e12:,.4g} TFLOP/s of {product} that the datasheet of "
        f"{spec.name} names ({whose}), attention ({workload.attention}) at {attention:.1%}.",
        f"Elementwise work moves its bytes at {elementwise:.1%} of {rate / 1e12:g} TB/s, the optimizer at {adamw:.1%} "
        "(measured on an H200).",
        *((f"Fused parts ({', '.join(fused)}) move theirs as a copy does, at {COPY_SHARE:.1%}.",) if fused else ()),
    )
    return Rates(
        peak_flops_per_s=peak,
        matmul_flops_per_s=peak * share,
        attention_flops_per_s=peak * attention,
        elementwise_bytes_per_s=rate * elementwise,
        fused_bytes_per_s=rate * COPY_SHARE,
        optimizer_bytes_per_s=rate * adamw,
        products_beside=PRODUCTS_BESIDE,
        others_beside=OTHERS_BESIDE,
        host_bytes_per_s=HOST_BYTES_PER_S * 2.0 ** (pcie_generation(spec.name) - 5),
        launch_s=LAUNCH_S if eager else 0.0,
        said=said,
    )
