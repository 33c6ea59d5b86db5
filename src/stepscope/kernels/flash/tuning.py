"""The configuration of a call of the FlashAttention kernels: forced, stored by an earlier tuning, or the default."""

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from stepscope.kernels import native
from stepscope.kernels.flash import replay
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    Precision,
    Problem,
    default_backward,
    default_forward,
)
from stepscope.kernels.flash.kept import device_name, kept_choices
from stepscope.kernels.launching import interpreted

_forced_forward: ForwardConfiguration | None = None
_forced_backward: BackwardConfiguration | None = None
_forced_precision: Precision | None = None
_numbers: dict[tuple[ForwardConfiguration | None, BackwardConfiguration | None], int] = {}
_number = 0


@contextlib.contextmanager
def forced(
    *,
    forward: ForwardConfiguration | None = None,
    backward: BackwardConfiguration | None = None,
    precision: Precision | None = None,
) -> Iterator[None]:
    """A context in which every call uses these configurations. None leaves a kernel's choice unchanged."""
    global _forced_forward, _forced_backward, _forced_precision, _number
    before = _forced_forward, _forced_backward, _forced_precision, _number
    chosen = forward or _forced_forward, backward or _forced_backward
    number = _numbers.setdefault(chosen, len(_numbers) + 1)
    _forced_forward, _forced_backward, _forced_precision, _number = *chosen, precision or _forced_precision, number
    try:
        yield
    finally:
        _forced_forward, _forced_backward, _forced_precision, _number = before


def configuration_number() -> int:
    """A number of the forced configurations, 0 where none are: it tells two calls of the same shapes apart."""
    return _number


def state(q: Tensor) -> tuple[ForwardConfiguration | None, BackwardConfiguration | None, Precision]:
    """A key of everything that a choice depends on, except shapes, dtypes and devices."""
    return _forced_forward, _forced_backward, precision_for(q)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    if interpreted() or device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(device)


_Class = tuple[torch.device, int, int, bool, int, Precision]


def _class_of(q: Tensor, causal: bool) -> _Class:
    """The values of a `Problem` as a tuple, which is quicker to make and to look up in each call."""
    shape = q.shape
    return q.device, shape[3], q.element_size(), causal, (shape[2] - 1).bit_length(), precision_for(q)


def problem_of(q: Tensor, *, causal: bool) -> Problem:
    """The problem class of a call."""
    return _problem(_class_of(q, causal))


def _problem(of: _Class) -> Problem:
    device, head_dim, bytes_per_element, causal, log2_queries, precision = of
    return Problem(
        capability=_capability(device), head_dim=head_dim, bytes_per_element=bytes_per_element, causal=causal,
        log2_queries=log2_queries, precision=precision,
    )  # fmt: skip


@functools.cache
def _choice(of: _Class) -> tuple[ForwardConfiguration, BackwardConfiguration]:
    problem = _problem(of)
    kept = kept_choices(device_name(of[0])).get(problem) if problem.capability != (0, 0) else None
    if kept is None:
        return default_forward(problem), default_backward(problem)
    return kept.forward, kept.backward


def forget() -> None:
    """Forget all choices, so that the next calls read the stored ones again. Tuning calls this at its end."""
    _choice.cache_clear()
    kept_choices.cache_clear()
    replay.forget()
    native.forget()


def forward_configuration(q: Tensor, *, causal: bool) -> ForwardConfiguration:
    """The forward kernel's configuration for this call."""
    return _forced_forward or _choice(_class_of(q, causal))[0]


def backward_configuration(q: Tensor, *, causal: bool) -> BackwardConfiguration:
    """The backward kernels' configuration for this call."""
    return _forced_backward or _choice(_class_of(q, causal))[1]


def precision_for(q: Tensor) -> Precision:
    """How fp32 operands are multiplied: in TF32 if the process allows TF32 for its other products.

    Otherwise they are multiplied as exactly as in PyTorch's own attention. On Hopper the tensor cores compute three
    products of TF32 up to head_dim 64, and six of bf16 up to 128. Each is the fastest way whose error is allowed, by
    the log in docs/results/flash-ideas.md. Elsewhere the products are in fp32. Half precisions are always multiplied
    exactly.
    """
    if q.dtype != torch.float32:
        return "ieee"
    if _forced_precision is not None:
        return _forced_precision
    # This setting also reflects `allow_tf32`. `allow_tf32` cannot be read: it raises if this setting allowed TF32.
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    if _capability(q.device)[0] != 9 or q.shape[3] > 128:
        return "ieee"
    return "tf32x3" if q.shape[3] <= 64 else "bf16x6"
