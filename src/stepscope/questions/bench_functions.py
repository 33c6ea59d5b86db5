"""The functions that a bench calls: found by how they are spelled, and called as their signature has it."""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stepscope.core.errors import InputError, choose
from stepscope.core.parts import ATTENTIONS
from stepscope.questions.bench_calls import Asked
from stepscope.questions.bench_records import FLOATS, parse_shape, parse_sizes
from stepscope.training.attention import implementation
from stepscope.training.judging import Function
from stepscope.training.user_functions import find_object

ALIKE = (("is_causal", "causal"), ("attn_mask", "mask"), ("scale", "softmax_scale"), ("enable_gqa", "gqa"))
"""Arguments that functions of attention call by either name."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A question that many ask: its inputs, and whom they are set beside."""

    words: str
    shape: str
    dtype: str
    arguments: Mapping[str, Any]
    against: tuple[str, ...]


PRESETS: dict[str, Preset] = {
    "cs336-attention": Preset(
        words="causal attention, forward and backward, as the course's leaderboard has it: 1 x 16 x 16384 x 64 in bf16",
        shape="1x16x16384x64*3",
        dtype="bf16",
        arguments={"is_causal": True},
        against=("torch.nn.functional.scaled_dot_product_attention", "flash"),
    ),
}


def load_function(spelled: str, option: str) -> Function:
    """The function that `path/file.py:name`, `package.module:name`, `package.module.name` or an attention of stepscope
    names. Raises InputError that says what is missing."""
    if spelled in ATTENTIONS:
        return attention_called(spelled)
    if not {".", ":"} & {*spelled}:
        raise InputError(
            f"{option} {spelled!r}: write path/file.py:name, package.module:name, package.module.name, or one of "
            f"stepscope's attentions: {', '.join(ATTENTIONS)}"
        )
    target = find_object(spelled, option)
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return target.apply
    if isinstance(target, type) and issubclass(target, nn.Module):
        raise InputError(f"{option} {spelled} is a class of modules: name a function, or a module that is made")
    if not callable(target):
        raise InputError(f"{option} {spelled} is {type(target).__name__}, which cannot be called: name a function")
    return target


def attention_called(name: str) -> Function:
    """An attention of stepscope, with the arguments of PyTorch's."""
    run = implementation(name)

    def attention(q: Any, k: Any, v: Any, *, is_causal: bool = False, scale: float | None = None) -> Any:
        return run(q, k, v, causal=is_causal, scale=scale)

    attention.__name__ = name
    return attention


def names_of(spelled: Sequence[str]) -> dict[str, str]:
    """A short name for each function, and how it was spelled. Raises InputError where one is named twice."""
    short: dict[str, str] = {}
    for one in spelled:
        if one in short.values():
            raise InputError(f"{one} is named twice: a function beside itself says nothing")
        name = one.replace(":", ".").rpartition(".")[2]
        if one == name and name in short:  # `flash` of stepscope beside `mine.py:flash`, which keeps its whole name
            short = {spelling if key == name else key: spelling for key, spelling in short.items()}
        short[one if name in short else name] = one
    return short


def called_with(function: Function, arguments: Mapping[str, Any]) -> Function:
    """The function, called with these keyword arguments by the names that its signature has for them, or by their
    place where it has none, as `torch.autograd.Function.apply`. What it does not take is left out: if that matters,
    the gate sees it."""
    try:
        parameters = inspect.signature(function).parameters if arguments else {}
    except (TypeError, ValueError):  # a function written in C takes what its documentation says
        return function
    if not parameters or (any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and "args" not in parameters):
        return function
    names = {name: _name_in(parameters, name) for name in arguments}
    by_place = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    if not by_place and all(known == name for name, known in names.items()):
        return function

    @functools.wraps(function)
    def renaming(*args: Any, **kwargs: Any) -> Any:
        placed = [value for name, value in kwargs.items() if by_place and names.get(name, name) is None]
        known = {names.get(name, name): value for name, value in kwargs.items()}
        return function(*args, *placed, **{name: value for name, value in known.items() if name is not None})

    return renaming


def left_out(function: Function, arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that `called_with` does not give to the function."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values()):
        return []
    return [name for name in arguments if _name_in(parameters, name) is None]


def _name_in(parameters: Mapping[str, inspect.Parameter], name: str) -> str | None:
    """What a signature calls this argument; None where it has no such parameter."""
    others = [a if name == b else b for a, b in ALIKE if name in (a, b)]
    return next((one for one in (name, *others) if one in parameters), None)


def asked_by_name(
    function: str, against: Sequence[str], *, reference: str | None, preset: str | None, shape: str | None,
    inputs: str | None, sizes: Sequence[str], arguments: Mapping[str, Any], dtype: str | None, backward: bool,
    seconds: float,
) -> Asked:  # fmt: skip
    """What the command line asks for. Raises InputError for what is missing, or excludes something else."""
    known = PRESETS[choose(preset, tuple(PRESETS), "preset")] if preset is not None else None
    if known is not None:
        shape, dtype = shape or known.shape, dtype or known.dtype
        arguments = {**known.arguments, **arguments}
        against = against or tuple(one for one in known.against if one != function)
    if (shape is None) == (inputs is None):
        raise InputError(
            "bench needs what to call the function with: --shape 4096x1024, --inputs mine.py:make, or --preset "
            f"{next(iter(PRESETS))}"
            if shape is None
            else "--shape and --inputs both say what to call the function with: leave one out"
        )
    spelled = names_of((function, *against))
    judge = reference or next((one for one in against if one not in ATTENTIONS), None)
    return _asked(
        {name: load_function(one, "--against" if one in against else "bench") for name, one in spelled.items()},
        spelled,
        reference=load_function(judge, "--reference") if judge is not None else None,
        reference_name=judge or "",
        yardstick=next((name for name, one in spelled.items() if one == judge), ""),
        shape=shape,
        make=load_function(inputs, "--inputs") if inputs is not None else None,
        sizes=sizes,
        arguments=arguments,
        dtype=dtype or "fp32",
        backward=backward,
        seconds=seconds,
    )


def asked_by_functions(
    functions: Mapping[str, Function], *, reference: Function | None, shape: str | None, inputs: Function | None,
    sizes: Mapping[str, Sequence[int] | int], arguments: Mapping[str, Any], dtype: str, backward: bool, seconds: float,
) -> Asked:  # fmt: skip
    """What Python asks for: the first function beside the others. Raises InputError for what is missing."""
    if not functions:
        raise InputError("bench needs a function: bench({'mine': f, 'torch': g}, shape='4096x1024')")
    for name, function in functions.items():
        if not callable(function):
            raise InputError(f"{name} is {type(function).__name__}, which cannot be called")
    if (shape is None) == (inputs is None):
        raise InputError("bench needs either shape= or inputs=: what to call the functions with")
    written = [
        f"{name}={','.join(map(str, [values] if isinstance(values, int) else values))}"
        for name, values in sizes.items()
    ]
    first = next(itertools.islice(functions, 1, None), "")
    return _asked(
        functions,
        {name: name for name in functions},
        reference=reference if reference is not None else functions.get(first),
        reference_name="reference" if reference is not None else first,
        yardstick="" if reference is not None else first,
        shape=shape,
        make=inputs,
        sizes=written,
        arguments=arguments,
        dtype=dtype,
        backward=backward,
        seconds=seconds,
    )


def _asked(
    functions: Mapping[str, Function],
    spelled: Mapping[str, str],
    *,
    reference: Function | None,
    shape: str | None,
    sizes: Sequence[str],
    dtype: str,
    arguments: Mapping[str, Any],
    **more: Any,
) -> Asked:
    """What is asked, of functions that are at hand: each is called by the names that its signature has."""
    specs, cases, judged = parse_shape(shape) if shape is not None else (), parse_sizes(sizes), FLOATS[1:]
    if dtype not in judged:
        raise InputError(f"--dtype {dtype}: the gate judges by float64, so choose among {', '.join(judged)}")
    left = {name: tuple(left_out(function, arguments)) for name, function in functions.items()}
    return Asked(
        functions={name: called_with(function, arguments) for name, function in functions.items()},
        spelled=spelled,
        reference=called_with(reference, arguments) if reference is not None else None,
        specs=specs,
        sizes=cases,
        dtype=dtype,
        arguments=arguments,
        left_out={name: names for name, names in left.items() if names},
        **more,
    )
