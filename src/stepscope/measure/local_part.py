"""This rank's part of a tensor that PyTorch has spread over several (a DTensor)."""

from collections.abc import Callable

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part; any other tensor itself. Nothing is communicated."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor takes half a second
    return to_local() if to_local is not None else tensor
