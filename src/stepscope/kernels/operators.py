"""What our operators share: when a call must be an operator, checks and casts of its tensors, and their compiler."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from stepscope.core.errors import InputError

_SHAPES = 1024
"""How many shapes dynamo compiles a function for before it gives up (its default is 8). After that the function runs
uncompiled, and is another implementation."""

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


def check_part(part: str, *tensors: Tensor) -> None:
    """Raise an InputError, one line, for tensors of a dtype that the fused part does not compute, and inside a
    transformation of torch.func."""
    name = f"{part} fused"
    refuse_transforms(name, f"{part} reference")
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise InputError(f"{name} takes fp32, bf16, fp16 or fp64, not {str(tensor.dtype).removeprefix('torch.')}")


_library = torch.library.Library("stepscope", "FRAGMENT")


def define(schema: str, function: Any, fake: Any) -> None:
    """Define an operator without autograd: an autograd.Function calls it, which a compiler can follow."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"stepscope::{name}", fake, lib=_library)


def transformed_by_func() -> bool:
    """Whether a transformation of torch.func (`grad`, `vmap`, `jvp`) is active; a compiler handles that by itself.

    torch.func transforms only Functions that set their context apart from their forward.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_transforms(name: str, instead: str) -> None:
    """Raise an InputError, one line, inside a transformation of torch.func."""
    if transformed_by_func():
        raise InputError(f"{name} cannot be transformed by torch.func (grad, vjp, vmap, jvp): take {instead}")


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts the arguments of PyTorch's scaled_dot_product_attention; casts are differentiable.

    That function is on autocast's list for the lower precision, on CUDA and on a CPU: under autocast every floating
    tensor of the device but fp64 is cast to autocast's dtype first, so that its output has that dtype too. A custom
    function is on no list: called with fp32 it would stay in fp32, while the products of `reference` go to 16 bits.
    """
    device_type = q.device.type
    # A device without autocast raises here. A compiler cannot follow any other way to ask.
    if device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        tensor.to(dtype)
        if tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
        else tensor
        for tensor in (q, k, v)
    )
    return q, k, v


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a product after x would cast it to: autocast's, or that of x where autocast is off."""
    device_type = x.device.type
    if x.dtype == torch.float64 or device_type not in {"cpu", "cuda"} or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)


def check_targets(targets: Tensor, vocabulary: int, ignore_index: int = -100) -> None:
    """Check that each target (...) is a token, from 0 to vocabulary - 1, or `ignore_index`.

    PyTorch's own cross-entropy makes this check, and the losses of others make none. On a CPU it raises PyTorch's
    IndexError, which names the first that is not. On a GPU, and in what is compiled, the device asserts it, and nobody
    waits: the error comes at the next call that does.
    """
    fits = (targets >= 0) & (targets < vocabulary) | (targets == ignore_index)
    if targets.is_cuda or torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(fits.all(), "Target is out of bounds: it is neither a token nor ignore_index")
    elif not fits.all():
        raise IndexError(f"Target {int(targets[~fits][0])} is out of bounds.")


def compile_for_each_shape(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The function, compiled anew for each shape, so that a kernel for this very shape is judged. Raises where it would
    run uncompiled."""
    compiled: Any = torch.compile(function, dynamic=False, fullgraph=True)
    from torch._dynamo import config  # noqa: PLC0415  (which torch.compile loads)

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        if config.recompile_limit >= _SHAPES:
            return compiled(*tensors, **options)
        with config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES):
            return compiled(*tensors, **options)

    return call
