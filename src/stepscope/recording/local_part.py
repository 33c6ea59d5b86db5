"""This rank's part of a tensor that is spread over several, and the size of the whole."""

from collections.abc import Callable

from torch import Tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part; any other tensor itself. Nothing is communicated, and nothing waited for."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor takes half a second
    part = to_local() if to_local is not None else tensor
    return getattr(part, "elem", part)  # what a collective still fills (AsyncCollectiveTensor) wraps a plain tensor


_WHOLE = "_whole_numel"


def mark_part(tensor: Tensor, whole_numel: int) -> None:
    """Let a tensor that is no DTensor say how many numbers the whole has of which it is a part."""
    setattr(tensor, _WHOLE, whole_numel)


def whole_numel(tensor: Tensor) -> int:
    """The numbers in the whole of which this tensor is a part, or in the tensor."""
    return getattr(tensor, _WHOLE, tensor.numel())
