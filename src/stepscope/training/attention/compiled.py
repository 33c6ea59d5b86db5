"""torch.compile for attention: a kernel for each shape, or an error."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config

_SHAPES = 1024
"""How many shapes dynamo compiles a function for before it gives up (its default is 8). After that the function runs
uncompiled, and is another implementation.
"""


def compile_for_each_shape(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, compiled anew for each shape, so that a kernel for this very shape is judged. Raises where it would
    run uncompiled.
    """
    compiled: Any = torch.compile(function, dynamic=False, fullgraph=True)

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        with _any_number_of_shapes():
            return compiled(*tensors, **options)

    return call


def _any_number_of_shapes() -> AbstractContextManager[Any]:
    if dynamo_config.recompile_limit >= _SHAPES:
        return nullcontext()
    return dynamo_config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES)
