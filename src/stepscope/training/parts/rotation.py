"""Lets other kernels turn queries and keys in a user's own model, where its attention calls a function for that.

The forward of an attention calls a function of q, k, cos and sin of its own module, which computes the same for all
who call it. So that function is held against its replacement, with tables of random numbers (`trials_of_tables` in
gate.py), and the forward of the attention's subclass is its class's, with another name for it. That name stands in the
same module, where a compiler looks it up.

A call that the kernel does not take, as with tables that take gradients, is one of the model's own function.
"""

import dis
import functools
import inspect
import itertools
import re
import types
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.core.parts import PartRecord
from stepscope.kernels.operators import transformed_by_func
from stepscope.training.attention.inputs import DTYPES


@dataclass(frozen=True)
class Turning:
    """The function by which a forward turns queries and keys, and its name there."""

    name: str
    function: Callable[..., Any]
    partial: bool
    """Whether tables may be of a part of the width, so that the rest stays as it is."""


_TABLES = ["q", "k", "cos", "sin"]
_TURNS_BY_NAME = re.compile("apply.*(rotary|rope)|(rotary|rope).*apply")
_numbers = itertools.count()


def turning_of(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The functions by which the forward of a class turns queries and keys, by their names there."""
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    named = {name: forward.__globals__.get(name) for name in _globals_of(forward.__code__)}
    return {
        name: function
        for name, function in named.items()
        if isinstance(function, types.FunctionType)
        and ([*inspect.signature(function).parameters][:4] == _TABLES or _TURNS_BY_NAME.search(name))
    }


@functools.cache
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names that code uses for globals alone."""
    uses = {(each.argval, each.opname) for each in dis.get_instructions(code) if each.argval in code.co_names}
    return tuple(name for name in code.co_names if {by for of, by in uses if of == name} == {"LOAD_GLOBAL"})


def why_not_turned(kind: type[nn.Module]) -> str:
    """Why no other function turns the queries and keys of a class; empty where one may."""
    called = turning_of(kind)
    name, function = next(iter(called.items()))
    parameters = [*inspect.signature(function).parameters]
    reasons = (
        (len(called) > 1, f"they turn queries and keys by {' and '.join(called)}"),
        (parameters[:4] != _TABLES, f"their {name} takes {', '.join(parameters)}, and not q, k, cos and sin"),
        (not isinstance(kind.forward, types.FunctionType) or hasattr(kind.forward, "__wrapped__"),
         "their forward has a decorator"),
    )  # fmt: skip
    return next((why for holds, why in reasons if holds), "")


def kind_of_turning(module: nn.Module) -> Hashable:
    """What tells whether queries and keys of two modules are turned alike: class, functions, dtype and device."""
    first = next((each for each in module.parameters() if each.is_floating_point()), None)
    where = None if first is None else (first.dtype, first.device)
    return type(module), type(module).forward, *turning_of(type(module)).values(), where, "forward" in vars(module)


def calling_another(forward: Any, name: str, function: Callable[..., Any]) -> Any:
    """A forward that calls another function where it calls the one of this name."""
    other = f"{name}_of_stepscope_{next(_numbers)}"
    forward.__globals__[other] = function
    names = tuple(other if each == name else each for each in forward.__code__.co_names)
    code = forward.__code__.replace(co_names=names)
    copied = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return functools.wraps(forward)(copied)


def turned_by(
    kernel: Callable[..., Any], record: PartRecord, turning: Turning, *, promoted: bool
) -> Callable[..., Any]:
    """A function of q, k, cos and sin that a kernel computes, wherever it may. promoted: whether its results have the
    dtype of queries times tables."""
    own, partial = turning.function, turning.partial
    usual = inspect.signature(own).parameters.get("unsqueeze_dim")
    usual_place = 0 if usual is None else usual.default

    @functools.wraps(own)
    def turned(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, unsqueeze_dim: int = usual_place, **more: Any
    ):
        heads_last, of_all = unsqueeze_dim == 2, usual is None and cos.dim() == 2
        why = "it has other arguments" if args or more or unsqueeze_dim not in (usual_place, 1, 2) else ""
        if usual is None and cos.dim() == 3 and cos.shape[0] != 1:
            why = "its tables are of each head"
        heads, tables = (q, k), (cos, sin)
        if heads_last and q.dim() == k.dim() == 4:
            heads = q.transpose(1, 2), k.transpose(1, 2)
        if usual is None and cos.dim() == sin.dim() == 4 and cos.shape[1] == sin.shape[1] == 1:
            tables = cos[:, 0], sin[:, 0]
        elif of_all and sin.dim() == 2:
            tables = cos[None], sin[None]
        why = why or _why_own(heads, tables, record, partial=partial)
        if why:
            if not torch.compiler.is_compiling():
                warnings.warn(
                    f"{own.__name__} turns these queries and keys by the model's own code: {why}", stacklevel=2
                )
            named = {} if unsqueeze_dim == usual_place else {"unsqueeze_dim": unsqueeze_dim}
            return own(q, k, cos, sin, *args, **named, **more)
        dtype = torch.promote_types(q.dtype, cos.dtype) if promoted else q.dtype
        if not record.any_tables:
            tables = tables[0][0], tables[1][0]
        q, k = kernel(heads[0].to(dtype), heads[1].to(dtype), *tables)
        return (q.transpose(1, 2), k.transpose(1, 2)) if heads_last else (q, k)

    return turned


def _why_own(heads: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], record: PartRecord, *, partial: bool) -> str:
    """Why a kernel does not turn these queries and keys (B, H, S, D) by these tables (1 or B, S, R); empty where it
    does."""
    (q, k), (cos, sin) = heads, tables
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]) or q.dtype != k.dtype:
        return f"its queries {list(q.shape)} and keys {list(k.shape)} are not alike"
    samples, length, width = q.shape[0], q.shape[2], q.shape[3]
    whole = cos.dim() == 3 and cos.shape[0] in (1, samples) and cos.shape[1] == length and cos.shape == sin.shape
    rotary = cos.shape[-1]
    fits = rotary == width or (partial and record.any_tables and rotary < width and rotary % 2 == 0)
    if not whole or not fits or (cos.shape[0] != 1 and not record.any_tables):
        return f"its tables are {list(cos.shape)} and {list(sin.shape)}, for queries {list(q.shape)}"
    every = (q, k, cos, sin)
    wide, half = record.multiples  # PyTorch 2.11 compiles no index that is a bool
    multiple = half if q.dtype in (torch.float16, torch.bfloat16) else wide
    reasons = (
        (cos.requires_grad or sin.requires_grad, "its tables take gradients"),
        (width % 2 != 0 or width > (record.largest_width or width) or width % multiple != 0, f"its heads have {width}"),
        (any(hasattr(each, "placements") for each in every), "its queries are in shards"),
        (any(each.dtype not in DTYPES or each.device != q.device for each in every), "its tensors are of other kinds"),
        (transformed_by_func(), "torch.func transforms it"),
    )
    return next((why for holds, why in reasons if holds), "")
