"""torch.compile for attention: a kernel for each shape, or an error."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config

_SHAPES = 1024
"""Shapes that a function is compiled for before dynamo gives up on it (its default is 8). What it runs then is not
compiled, and is another implementation.
"""


def compile_for_each_shape(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, compiled anew for each shape: what is compared is a kernel for this one. Raises where it would run
    uncompiled.
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
