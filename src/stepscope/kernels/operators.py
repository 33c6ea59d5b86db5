"""What the operators of this room share: when a call must be an operator, and where its tensors may lie."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from stepscope.core.errors import InputError

_PLAIN = (Tensor, torch.nn.Parameter)


class _Here(threading.local):
    """Who learns the launches of this thread's call (native.py): it gets what was compiled, the grid and the arguments.
    It follows operators, too, by a mode of its own, for which nothing need be one."""

    watcher: Callable[[Any, tuple[int, ...], tuple[object, ...]], None] | None = None


HERE = _Here()


def watched(*tensors: Tensor) -> bool:
    """Whether the call must be an operator.

    A compiler, a mode (fake tensors, a counter, checkpointing's policy), a transformation, a profiler, a subclass and
    tensors without data need one. Any other call skips the operator's layers in Python, which take several times as
    long as a launch.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > (HERE.watcher is not None)
        or torch._C._are_functorch_transforms_active()
        or _profiler_enabled()
        or tensors[0].is_meta
    ):
        return True
    for tensor in tensors:  # noqa: SIM110  (a generator costs as much as the rest)
        if type(tensor) not in _PLAIN:
            return True
    return False


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward that is itself differentiated. A compiler traces backward once, whatever is enabled."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} has no second derivative: choose the reference")


def check_kernel_place(name: str, tensor: Tensor, *, interpreted: bool) -> None:
    """Raise an InputError, one line, for tensors where no kernel runs."""
    if tensor.device.type == "cpu" and not interpreted:
        raise InputError(
            f"{name} runs on an NVIDIA GPU, and these tensors lie on cpu: move them, choose the reference, or set "
            "TRITON_INTERPRET=1 before Triton is imported, which runs its kernels in Python"
        )


def check_kernel_dtype(name: str, *tensors: Tensor) -> None:
    """Raise an InputError, one line, for tensors of a dtype that the kernels do not compute."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InputError(f"{name} takes fp32, bf16, fp16 or fp64, not {str(tensor.dtype).removeprefix('torch.')}")


def define(library: torch.library.Library, schema: str, function: Any, fake: Any) -> None:
    """Define an operator without autograd: an autograd.Function calls it, which a compiler can follow."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stepscope::{name}", fake, lib=library)
