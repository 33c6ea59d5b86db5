"""How many bytes an element takes in each part of the step, by the workload's dtype."""

from dataclasses import dataclass

from stepscope.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ItemSizes:
    """Bytes per element, by the kind of tensor."""

    parameters: int
    residual: int
    """Bytes per element of the residual stream."""
    products: int
    """Bytes per element of the inputs and outputs of matrix products."""
    exponentials: int
    """Bytes per element of the exponentials where softmax is written out."""


def item_sizes(workload: Workload, device_type: str) -> ItemSizes:
    """Sizes for a workload: autocast leaves parameters and residual stream in fp32, and on a GPU exponentials too."""
    if workload.dtype in ("bf16", "fp16"):
        exponentials = 4 if device_type == "cuda" else 2
        return ItemSizes(parameters=4, residual=4, products=2, exponentials=exponentials)
    size = 2 if workload.dtype == "bf16-pure" else 4
    return ItemSizes(parameters=size, residual=size, products=size, exponentials=size)
