"""What autocast makes of the arguments of our own functions.

Queries, keys and values are cast as autocast casts the arguments of PyTorch's scaled_dot_product_attention.

That function is on autocast's list for the lower precision, on CUDA and on a CPU: under autocast every floating tensor
of the device but fp64 is cast to autocast's dtype first, so that its output has that dtype too. A custom function is on
no list: called with fp32 it would stay in fp32, while the products of `reference` go to 16 bits.
"""

import torch
from torch import Tensor


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype, or unchanged where autocast is off for their device; casts are differentiable."""
    device_type = q.device.type
    # A device without autocast raises here. A compiler cannot follow any other way to ask.
    if device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        tensor.to(dtype)
        if tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
        else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product after x would cast it to: autocast's, or that of x where autocast is off."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)
