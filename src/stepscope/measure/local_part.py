"""This rank's part of a tensor that PyTorch has spread over several (a DTensor)."""

from collections.abc import Callable

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part; any other tensor itself. Nothing is communicated, and nothing waited for."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor takes half a second
    part = to_local() if to_local is not None else tensor
    return getattr(part, "elem", part)  # what a collective still fills (AsyncCollectiveTensor) wraps a plain tensor
