"""Where autocast keeps its 16-bit copies of parameters.

Autocast casts a parameter when a product first asks for it, and keeps the copy until its region ends. The cache has no
reader. But a product under autocast is called with the copy, so a product that is caught below autocast, before it
runs, shows the copy that the cache holds; nothing is computed and nothing allocated.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _NotCached(Exception):
    """Raised when autocast asks for a new copy, since its cache holds none."""


class _Caught(TorchDispatchMode):
    """Ends every operator before it runs, and keeps what the product was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.operand: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name != "aten::mm":
            # This cast would be cached: autocast would keep any tensor that it returned as the parameter's copy.
            raise _NotCached
        self.operand = args[0]
        return args[0]


def cast_copy(parameter: torch.Tensor) -> torch.Tensor | None:
    """The copy of this parameter that autocast holds now, on this thread; None where it holds none."""
    if not torch.is_autocast_enabled(parameter.device.type) or not torch.is_autocast_cache_enabled():
        return None
    try:
        # Modes that see functions of PyTorch must not see this one: their own operators would be caught.
        with torch.no_grad(), torch._C.DisableTorchFunction(), _Caught() as caught:
            torch.mm(parameter, parameter)
    except _NotCached:
        return None
    return caught.operand if caught.operand is not parameter else None
