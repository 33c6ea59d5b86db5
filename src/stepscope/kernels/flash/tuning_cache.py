"""The configuration of a call of the FlashAttention kernels: forced, stored by an earlier tuning, or the default.

What tuning chose is in one file per device and version of Triton.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import triton
from torch import Tensor

from stepscope.core.errors import InputError, one_line
from stepscope.core.files import cache_file, read_document, replace_file
from stepscope.kernels import native
from stepscope.kernels.flash import recorded_launches
from stepscope.kernels.flash.configuration import (
    BackwardConfiguration,
    ForwardConfiguration,
    Precision,
    Problem,
    default_backward,
    default_forward,
    uncapped,
)
from stepscope.kernels.launching import interpreted


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest correct configurations for a class of calls, with their times and the defaults' times."""

    problem: Problem
    batch_heads: int
    """The product of batch and heads in the calls that were measured."""
    forward: ForwardConfiguration
    backward: BackwardConfiguration
    forward_ms: float | None = None
    """The median time in milliseconds, as for all times here; None if the budget ended before it was measured."""
    backward_ms: float | None = None
    default_forward_ms: float | None = None
    """The default's median time; None also if the default failed or was wrong."""
    default_backward_ms: float | None = None
    deterministic: bool = False
    """Whether PyTorch had to be deterministic. The backward kernel in Gluon is not, so it was not measured then."""

    def __str__(self) -> str:
        lines = [f"{self.problem}, tuned at batch x heads {self.batch_heads}"]
        backward = msgspec.structs.replace(self.backward, hopper=None) if self.deterministic else self.backward
        for name, chosen, ms, default_ms in (
            ("forward", self.forward, self.forward_ms, self.default_forward_ms),
            ("backward", backward, self.backward_ms, self.default_backward_ms),
        ):
            measured = "default, not measured" if ms is None else f"{ms:.3f} ms"
            beside = "" if default_ms is None else f" (the default {default_ms:.3f})"
            lines.append(f"  {name:8} {chosen}: {measured}{beside}")
        if self.deterministic and not self.backward.deterministic:
            lines.append(f"  where PyTorch need not be deterministic, backward is {self.backward}, not measured")
        return "\n".join(lines)


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file with a device's choices."""

    device_name: str
    triton_version: str
    choices: tuple[Choice, ...]


def device_name(device: torch.device) -> str:
    """The GPU's name as CUDA reports it; "cpu" for Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kept_path(name: str) -> Path | None:
    """The file of the choices for a device of this name; None if there is no cache directory."""
    return cache_file("flash-attention", name, f"triton{triton.__version__}")


@functools.cache
def kept_choices(name: str) -> dict[Problem, Choice]:
    """The kept choices by problem, read once. A file that cannot be read gives one warning and no choices."""
    path = kept_path(name)
    if path is None:
        return {}
    try:
        stored = msgspec.json.decode(read_document(path), type=Choices)
    except FileNotFoundError:
        return {}
    except (InputError, OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"flash attention: what was tuned, {path}, cannot be read ({one_line(error)}): the defaults are taken; "
            "delete the file or tune again",
            stacklevel=2,
        )
        return {}
    return {choice.problem: choice for choice in stored.choices}


def keep(name: str, choice: Choice) -> Path | None:
    """Store the choice, which replaces an earlier one for the same problem. Returns None if it cannot be stored."""
    kept_choices.cache_clear()
    choices = kept_choices(name) | {choice.problem: choice}
    content = Choices(device_name=name, triton_version=triton.__version__, choices=tuple(choices.values()))
    path = kept_path(name)
    return path if replace_file(path, msgspec.json.format(msgspec.json.encode(content))) else None


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
        capability=_capability(device),
        head_dim=head_dim,
        bytes_per_element=bytes_per_element,
        causal=causal,
        log2_queries=log2_queries,
        precision=precision,
    )


@functools.cache
def _choice(of: _Class, dropout: bool = False) -> tuple[ForwardConfiguration, BackwardConfiguration]:
    problem = _problem(of)
    kept = kept_choices(device_name(of[0])).get(problem) if problem.capability != (0, 0) else None
    if kept is None:
        return default_forward(problem, dropout=dropout), default_backward(problem, dropout=dropout)
    return kept.forward, uncapped(kept.backward) if dropout else kept.backward


def forget() -> None:
    """Forget all choices, so that the next calls read the stored ones again. Tuning calls this at its end."""
    _choice.cache_clear()
    kept_choices.cache_clear()
    recorded_launches.forget()
    native.forget()


def forward_configuration(
    q: Tensor, *, causal: bool, dropout: bool = False, scored: bool = False
) -> ForwardConfiguration:
    """The forward kernel's configuration for this call.

    scored: scores get a softcap, slopes or a bias. These take registers that the tiles for dropout do not leave.
    """
    return _forced_forward or _choice(_class_of(q, causal), dropout and not scored)[0]


def backward_configuration(
    q: Tensor, *, causal: bool, dropout: bool = False, scored: bool = False
) -> BackwardConfiguration:
    """The backward kernels' configuration for this call, as `forward_configuration`."""
    if _forced_backward is None and not scored:
        return _choice(_class_of(q, causal), dropout)[1]
    chosen = _forced_backward or _choice(_class_of(q, causal))[1]
    return uncapped(chosen) if dropout else chosen


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
