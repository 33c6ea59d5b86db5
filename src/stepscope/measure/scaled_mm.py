"""PyTorch's product of operands of 8 bits on a GPU."""

import torch
from torch import Tensor


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool = False) -> Tensor:
    """a (R, K) b (K, N) as bf16 (R, N), times both scales. Rows of a and columns of b must lie together, and all three
    sizes but R be multiples of 16. fast: whether Tensor Cores may add up in fewer bits than fp32 has."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
