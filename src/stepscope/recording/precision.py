"""Sets the precision of fp32 matrix products, and checks by experiment what was set."""

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from stepscope.core.evidence import Precision, ProfiledStep
from stepscope.core.workloads import Dtype

PROBE_SIZE = 512


@contextlib.contextmanager
def matmul_precision(dtype: Dtype) -> Iterator[None]:
    """A context in which fp32 products are true fp32, or TF32 for dtype `tf32`; the setting is restored after it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """A context in which cuDNN's convolutions of fp32 are true fp32: its usual is TF32, whatever products are."""
    convolutions: Any = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def probe_relative_error(device: torch.device) -> float:
    """||AB - ref|| / ||ref|| of one fp32 product on `device` under the present settings, against float64.

    True fp32 lands near 2e-7, TF32 (10 mantissa bits) near 3e-4: three decades apart, so the verdict is sure.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(PROBE_SIZE, PROBE_SIZE, generator=generator).to(device) for _ in range(2))
    reference = a.double().cpu() @ b.double().cpu()
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    error = (a @ b).double().cpu() - reference
    if device.type == "cuda" and torch.cuda.memory_allocated(device) > held:
        # A step without a product of matrices has no workspace of cuBLAS, and must not be found with this one's.
        torch._C._cuda_clearCublasWorkspaces()
    return float(error.norm() / reference.norm())


def with_kernels(precision: Precision, profile: ProfiledStep) -> Precision:
    """The Precision with one witness more: the names of the kernels that ran.

    TF32 products are named so. True fp32 products run on CUDA cores and are named sgemm, or f32f32_f32f32_f32 for the
    types of A, B, the accumulator and the output.
    """
    names = [kernel.name for kernel in profile.kernels]
    tf32 = tuple(name for name in names if "tf32" in name.lower())
    fp32 = tuple(name for name in names if ("sgemm" in name or "f32f32_f32f32_f32" in name) and name not in tf32)
    return msgspec.structs.replace(precision, tf32_kernels=tf32, fp32_kernels=fp32)


# The product of operands of 8 bits: PyTorch's on a GPU, and the same of the same operands on a CPU.


SCALED_PRODUCTS = ("aten::_scaled_mm", "stepscope::scaled_product")
"""The operators of the product, by device: that of a GPU first."""

SCALED_CASTS = ("stepscope::eight_bit_scale", "stepscope::eight_bit_layouts")
"""The operators that make its operands on a GPU (kernels/eight_bits.py). They multiply nothing, and keep nothing."""

SCALED_CAST_KERNELS = ("largest_of_eight_bits", "scale_to_eight_bits", "cast_to_eight_bits")
"""Their kernels in Triton."""


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool = False) -> Tensor:
    """a (R, K) b (K, N) as bf16 (R, N), times both scales. Rows of a and columns of b must lie together, and all three
    sizes but R be multiples of 16. fast: whether Tensor Cores may add up in fewer bits than fp32 has."""
    if a.device.type == "cpu":
        return _on_a_cpu(a, b, scale_a, scale_b)
    # The public function calls another operator: compilers lower this one, and stored runs name it.
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


@torch.library.custom_op("stepscope::scaled_product", mutates_args=())
def _on_a_cpu(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product in fp32: PyTorch's own for CPUs takes a minute where this takes milliseconds."""
    with torch.autocast("cpu", enabled=False):  # which would round the product, and then what it is times a scale
        return ((a.float() @ b.float()) * scale_a * scale_b).to(torch.bfloat16)


@_on_a_cpu.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)
