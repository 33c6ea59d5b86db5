"""How many bytes an element takes in each part of the step, by the workload's dtype and the device."""

from dataclasses import dataclass

from stepscope.core.precisions import PRECISIONS
from stepscope.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ItemSizes:
    """Bytes per element, by the kind of tensor."""

    weights: int
    """Bytes per element of a parameter of two dimensions or more."""
    vectors: int
    """Bytes per element of any other parameter."""
    buffers: int
    residual: int
    """Bytes per element of the residual stream."""
    products: int
    """Bytes per element of the inputs and outputs of matrix products."""
    exponentials: int
    """Bytes per element of the exponentials where softmax is written out."""


def item_sizes(workload: Workload, device_type: str) -> ItemSizes:
    """Sizes for a workload: autocast leaves parameters and residual stream in fp32, and on a GPU exponentials too."""
    precision = PRECISIONS[workload.dtype]
    in_fp32 = precision.autocast and device_type == "cuda"
    return ItemSizes(
        weights=precision.weights,
        vectors=precision.vectors,
        buffers=precision.buffers,
        residual=precision.residual,
        products=precision.products,
        exponentials=4 if in_fp32 else precision.products,
    )
