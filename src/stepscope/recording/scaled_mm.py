"""The product of operands of 8 bits: PyTorch's on a GPU, and the same of the same operands on a CPU."""

import torch
from torch import Tensor

OPERATORS = ("aten::_scaled_mm", "stepscope::scaled_product")
"""The operators of the product, by device: that of a GPU first."""

CASTS = ("stepscope::eight_bit_scale", "stepscope::eight_bit_layouts")
"""The operators that make its operands on a GPU (kernels/eight_bits.py). They multiply nothing, and keep nothing."""

CAST_KERNELS = ("largest_of_eight_bits", "scale_to_eight_bits", "cast_to_eight_bits")
"""Their kernels in Triton."""


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool = False) -> Tensor:
    """a (R, K) b (K, N) as bf16 (R, N), times both scales. Rows of a and columns of b must lie together, and all three
    sizes but R be multiples of 16. fast: whether Tensor Cores may add up in fewer bits than fp32 has."""
    if a.device.type == "cpu":
        return _on_a_cpu(a, b, scale_a, scale_b)
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
