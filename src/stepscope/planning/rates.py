"""The rates at which a device is assumed to work: shares of its datasheet, and where each share comes from.

A plan stands or falls with them, so an answer always names them. The shares were measured on an H200 by stepscope and
are taken for any device: results/h200/device.json (products of 4096 x 4096 matrices, and a copy) and
results/h200/attention/benchmark.json (causal attention of 16,384 tokens, head_dim 128, forward and backward).
"""

import msgspec

from stepscope.core.attentions import scores_of
from stepscope.core.device_spec import DeviceSpec, product_dtype
from stepscope.core.errors import InputError
from stepscope.core.workload import Workload

MATMUL_SHARES = {"bf16": 0.690, "fp16": 0.652, "tf32": 0.695, "fp32": 0.761}
COPY_SHARE = 0.888
ATTENTION_SHARES = {"flash": 0.628, "sdpa-cudnn": 0.595, "flex": 0.394, "sdpa-flash": 0.306, "sdpa": 0.306}
"""Shares of the peak that attention reaches in bf16. Another fused one is taken for PyTorch's own choice, `sdpa`, and
one that is written out is made of products."""

STEP_SPREAD = 0.009
"""Relative standard deviation of the steps of one GPU: of 2.7B, bf16, compiled, in results/h200/best."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does in a second."""

    peak_flops_per_s: float
    matmul_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    said: tuple[str, ...]
    """The assumptions in sentences."""


def rates_of(spec: DeviceSpec, workload: Workload, matmul_share: float | None = None) -> Rates:
    """The rates of a device for a step's dtype and attention. Raises InputError where the datasheet lacks them."""
    peak = spec.peak_for(workload.dtype)
    if peak is None or spec.peak_bytes_per_s is None:
        raise InputError(f"{spec.name} multiplies no matrices of {workload.dtype}: choose another --dtype or --device")
    if matmul_share is not None and not 0 < matmul_share <= 1:
        raise InputError(f"--efficiency is {matmul_share:g}: write a share of the peak, above 0 and at most 1")
    product = product_dtype(workload.dtype)
    share = MATMUL_SHARES[product] if matmul_share is None else matmul_share
    whose = "measured on an H200" if matmul_share is None else "as --efficiency says"
    if scores_of(workload.attention) == "whole":
        attention = share
    else:
        attention = ATTENTION_SHARES.get(workload.attention, ATTENTION_SHARES["sdpa"])
    said = (
        f"Matrix products run at {share:.1%} of the {peak / 1e12:,.4g} TFLOP/s of {product} that the datasheet of "
        f"{spec.name} names ({whose}), attention ({workload.attention}) at {attention:.1%}.",
        f"Elementwise work and the optimizer move their bytes at {COPY_SHARE:.1%} of {spec.peak_bytes_per_s / 1e12:g} "
        "TB/s (a copy measured on an H200); what is written is read once.",
    )
    return Rates(
        peak_flops_per_s=peak,
        matmul_flops_per_s=peak * share,
        attention_flops_per_s=peak * attention,
        memory_bytes_per_s=spec.peak_bytes_per_s * COPY_SHARE,
        said=said,
    )
