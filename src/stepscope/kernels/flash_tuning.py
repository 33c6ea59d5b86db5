"""Which configuration a call of the FlashAttention kernels gets: forced, tuned before and kept, or the default."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from stepscope.kernels.flash_configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    Precision,
    Problem,
    default_backward,
    default_forward,
)
from stepscope.kernels.flash_launch import interpreted

_forced_forward: ForwardConfiguration | None = None
_forced_backward: BackwardConfiguration | None = None
_forced_precision: Precision | None = None


@contextlib.contextmanager
def forced(
    *,
    forward: ForwardConfiguration | None = None,
    backward: BackwardConfiguration | None = None,
    precision: Precision | None = None,
) -> Iterator[None]:
    """Inside, every call takes these configurations; None leaves a kernel's choice alone."""
    global _forced_forward, _forced_backward, _forced_precision
    before = _forced_forward, _forced_backward, _forced_precision
    _forced_forward, _forced_backward, _forced_precision = (
        forward or _forced_forward,
        backward or _forced_backward,
        precision or _forced_precision,
    )
    try:
        yield
    finally:
        _forced_forward, _forced_backward, _forced_precision = before


def state(q: Tensor) -> tuple[ForwardConfiguration | None, BackwardConfiguration | None, Precision]:
    """What choices depend on besides shapes, dtypes and devices."""
    return _forced_forward, _forced_backward, precision_for(q)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    if interpreted() or device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def problem_of(q: Tensor, *, causal: bool) -> Problem:
    """The class of problems a call belongs to."""
    return Problem(
        capability=_capability(q.device),
        head_dim=q.shape[3],
        bytes_per_element=q.element_size(),
        causal=causal,
        log2_queries=(q.shape[2] - 1).bit_length(),
    )


@functools.cache
def _forward_choice(problem: Problem) -> ForwardConfiguration:
    return default_forward(problem)


@functools.cache
def _backward_choice(problem: Problem) -> BackwardConfiguration:
    return default_backward(problem)


def forward_configuration(q: Tensor, *, causal: bool) -> ForwardConfiguration:
    """The forward kernel's configuration for this call."""
    return _forced_forward or _forward_choice(problem_of(q, causal=causal))


def backward_configuration(q: Tensor, *, causal: bool) -> BackwardConfiguration:
    """The backward kernels' configuration for this call."""
    return _forced_backward or _backward_choice(problem_of(q, causal=causal))


def precision_for(q: Tensor) -> Precision:
    """How fp32 operands are multiplied: as the process allows its other products.

    Half precisions are multiplied exactly whatever this says.
    """
    if q.dtype != torch.float32:
        return "ieee"
    if _forced_precision is not None:
        return _forced_precision
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
