"""How many bytes an element takes in each part of the step, by the workload's dtype."""

from dataclasses import dataclass

from stepscope.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ItemSizes:
    """Bytes of an element, by what it belongs to."""

    parameters: int
    residual: int
    """Of the residual stream."""
    products: int
    """Of what goes into matrix products, and comes out."""
    exponentials: int
    """Of softmax written out."""


def item_sizes(workload: Workload, device_type: str) -> ItemSizes:
    """Autocast leaves parameters and the residual stream in fp32; on a GPU it takes exponentials up to fp32 too."""
    if workload.dtype in ("bf16", "fp16"):
        exponentials = 4 if device_type == "cuda" else 2
        return ItemSizes(parameters=4, residual=4, products=2, exponentials=exponentials)
    size = 2 if workload.dtype == "bf16-pure" else 4
    return ItemSizes(parameters=size, residual=size, products=size, exponentials=size)
