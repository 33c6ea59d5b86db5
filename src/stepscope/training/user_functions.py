"""A user's functions found by name, and called as attention, norm, rope, mlp or loss as their signatures have it.

`core/parts.py` has the conventions (`CONVENTIONS`). A class of `torch.autograd.Function` is called by its `apply`, a
class of modules is made once, and a function without parameters makes the function. Whether it computes what it should
is for the gates (`attention/gate.py`, `parts/gate.py`).
"""

import contextlib
import dis
import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.core.errors import InputError, install_places, named_line, warn
from stepscope.core.files import code_file, digest_with_imports, files_imported
from stepscope.core.parts import CONVENTIONS, INTERPRETER, user_function
from stepscope.kernels.operators import autocast_dtype
from stepscope.training.judging import WrongKind, settings_kept
from stepscope.training.user_module.user_code import find_factory, printed_to_stderr, user_errors

Function = Callable[..., Any]

ALIASES: dict[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "gqa": ("enable_gqa", "gqa"),
    "eps": ("eps", "epsilon", "variance_epsilon"),
}
"""What functions call the arguments that are no tensors."""


def find_object(spelled: str, option: str) -> Any:
    """The object that `path/file.py:name`, `package.module:name` or `package.module.name` names. PyTorch's settings
    that its file changes are set back. Raises InputError that says what is missing."""
    changes: list[str] = []
    with settings_kept(changes):
        found = _find(spelled, option)
    leave_autotuning_out()
    if changes:
        warn(f"{option} {spelled}: its file changes PyTorch's {' and '.join(changes)}, which is set back")
    return found


def leave_autotuning_out() -> None:
    """Let Triton's autotuners take their first configuration where kernels run in its interpreter: they would time all
    of them, on a GPU."""
    module = sys.modules.get("triton.runtime.autotuner")
    if module is not None and os.environ.get(INTERPRETER) == "1" and not torch.cuda.is_available():
        module.Autotuner.do_bench = staticmethod(lambda *_, **__: [0.0, 0.0, 0.0])


def _find(spelled: str, option: str) -> Any:
    if ":" in spelled:
        _forget_twins(code_file(spelled.rpartition(":")[0]))
        try:
            return find_factory(spelled).target
        except InputError as error:
            raise InputError(str(error).replace("--module ", f"{option} ", 1)) from error
    if spelled.endswith(".py"):
        raise InputError(f"{option} {spelled} names a file and no function in it: write {spelled}:NAME")
    place, dot, name = spelled.rpartition(".")
    if not dot or not place:
        raise InputError(f"{option} {spelled!r}: write path/file.py:name, package.module:name or package.module.name")
    try:
        home = importlib.import_module(place)
    except Exception as error:  # a package may raise anything when it is imported
        raise InputError(f"{option} {spelled}: {place} cannot be imported: {named_line(error)}") from error
    if not hasattr(home, name):
        raise InputError(f"{option} {spelled}: {place} has no {name}")
    return getattr(home, name)


def _forget_twins(file: Path | None) -> None:
    """Let the imports of a file mean the files beside it, and not those of the same names beside another file, as where
    two versions of a folder are compared."""
    if file is None or not file.is_file():
        return
    folder = file.absolute().parent
    for one in files_imported(file):
        if not one.is_relative_to(folder):
            continue
        name = ".".join(one.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and not loaded.startswith(install_places()) and Path(loaded).resolve() != one.resolve():
            del sys.modules[name]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))


@functools.cache
def users_part(part: str, name: str) -> Function:
    """The function that this names, called as stepscope calls its own for this part.

    Raises InputError where it cannot be loaded, is another file's than was named, or takes something else.
    """
    spelled, digest = user_function(name)
    file = code_file(spelled.rpartition(":")[0])
    if digest and (file is None or digest_with_imports(file)[:8] != digest):
        raise InputError(
            f"{part} {name}: {file or spelled} (or what it imports) has changed since it was named, or is not "
            f"there: name {spelled}"
        )
    found = find_object(spelled, f"--{part}")
    called = _ADAPTERS[part](_Target.of(found, part, spelled))
    if is_interpreted(found):
        warn(f"{part} {spelled} runs kernels in Triton's interpreter: it is judged, and times of its step say nothing")
    return called


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What a user named, ready to be called, and the parameters that it says it has."""

    part: str
    spelled: str
    call: Function
    parameters: Mapping[str, inspect.Parameter] | None
    """By name; None where it does not say, as a function written in C."""
    by_place: bool
    """Whether arguments have no names, as those of `torch.autograd.Function.apply`."""

    @classmethod
    def of(cls, target: Any, part: str, spelled: str) -> "_Target":
        make = functools.partial(cls, part=part, spelled=spelled)
        owner = getattr(target, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            target = owner  # `attention = Attention.apply`
        if isinstance(target, type) and issubclass(target, torch.autograd.Function):
            own = [*inspect.signature(target.forward).parameters.items()]
            has_context = target.setup_context is torch.autograd.Function.setup_context
            return make(call=target.apply, parameters=dict(own[1:] if has_context else own), by_place=True)
        if isinstance(target, type) and any("__call__" in vars(each) for each in target.__mro__):
            if part == "norm" and issubclass(target, nn.Module):
                return make(call=_by_modules(target), parameters=None, by_place=False)
            with printed_to_stderr(), user_errors(f"{part} {spelled} cannot be made without arguments"):
                target = target()
        if isinstance(target, nn.Module) and any(True for _ in target.parameters()):
            raise InputError(f"{part} {spelled} has parameters of its own: {CONVENTIONS[part]}")
        if not callable(target):
            raise InputError(f"{part} {spelled} is {type(target).__name__}, which cannot be called")
        parameters = _parameters(target.forward if isinstance(target, nn.Module) else target)
        if parameters is not None and not parameters and inspect.isfunction(target):
            with printed_to_stderr(), user_errors(f"{part} {spelled} fails"):
                return cls.of(target(), part, spelled)
        kinds = {one.kind for one in (parameters or {}).values()}
        by_place = inspect.Parameter.POSITIONAL_ONLY in kinds and inspect.Parameter.KEYWORD_ONLY not in kinds
        return make(call=target, parameters=parameters, by_place=by_place)

    def named(self, what: str) -> str | None:
        """What it calls this argument; None where it has none."""
        names = ALIASES[what]
        return names[-1] if self.parameters is None else next((one for one in names if one in self.parameters), None)

    @property
    def required(self) -> list[str]:
        """The parameters that must be given, in order."""
        return [name for name, one in (self.parameters or {}).items() if one.default is one.empty]

    def check(self, least: int, most: int, known: Sequence[str | None] = ()) -> None:
        """Raise InputError unless it can be called with so many tensors, and with the arguments that are `known`."""
        if self.parameters is None:
            return
        needed = [name for name in self.required if name not in known]
        if len(self.parameters) < least or len(needed) > most:
            takes = ", ".join(self.parameters)
            raise InputError(f"{self.part} {self.spelled} takes ({takes}): write {CONVENTIONS[self.part]}")

    def run(self, *tensors: Tensor, **more: Any) -> Any:
        """Call it; `more` by the names that it has for them."""
        if not self.by_place:
            return self.call(*tensors, **more)
        rest = [(name, one) for name, one in (self.parameters or {}).items()][len(tensors) :]
        return self.call(*tensors, *(more.get(name, one.default) for name, one in rest))


def _parameters(function: Function) -> dict[str, inspect.Parameter] | None:
    """The parameters that a function says it has, an operator or a scripted function by its schema."""
    operator = getattr(function, "_opoverload", function)
    operator = getattr(operator, "default", operator)
    schema = getattr(operator, "_schema", getattr(operator, "schema", None))
    if isinstance(schema, torch.FunctionSchema):
        return {
            each.name: inspect.Parameter(
                each.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in schema.arguments
        }
    try:
        found = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in found.values()):
        return None
    return found


def only_tensor(made: Any) -> Tensor:
    """The tensor that a call returned. Raises WrongKind for anything else, as a tuple that has one."""
    if not isinstance(made, Tensor):
        raise WrongKind(f"it returns {_kind(made)}, not one tensor")
    return made


def _kind(made: Any) -> str:
    inside = f" of {', '.join(type(each).__name__ for each in made)}" if isinstance(made, tuple | list) else ""
    return f"{type(made).__name__}{inside}"


def _attention(target: _Target) -> Function:
    """A user's attention, called by q, k, v, causal, scale and window."""
    of_causal, of_scale, of_gqa = map(target.named, ("causal", "scale", "gqa"))
    if of_causal is None and len(target.required) == 4:
        of_causal = target.required[3]
    if target.parameters is None:  # PyTorch's own says it in its documentation
        of_scale = of_gqa = None
    target.check(3, 3, (of_causal, of_scale, of_gqa))

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        more: dict[str, Any] = {}
        if of_causal is not None:
            more[of_causal] = causal
        elif not causal:
            raise InputError("has no argument causal: it is taken to be causal")
        if window is not None:
            raise InputError("takes no sliding window")
        if of_scale is not None:
            more[of_scale] = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        elif scale is not None:
            raise InputError("has no argument scale")
        if of_gqa is not None:
            more[of_gqa] = q.shape[1] != k.shape[1]
        elif q.shape[1] != k.shape[1]:
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        return only_tensor(target.run(q, k, v, **more))

    return attention


def _norm(target: _Target) -> Function:
    of_eps = target.named("eps")
    target.check(2, 2 if of_eps is not None else 3, (of_eps,))
    third = of_eps is None and len(target.parameters or ()) > 2

    def norm(
        x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + branch, or x without a branch, and its RMSNorm, in this dtype where one is given."""
        x = x if branch is None else x + branch
        if target.parameters is None or third:
            y = target.call(x, weight, epsilon)
        else:
            y = target.run(x, weight, **({of_eps: epsilon} if of_eps is not None else {}))
        y = only_tensor(y)
        return x, y if dtype is None else y.to(dtype)

    return norm


def _by_modules(module_class: type[nn.Module]) -> Function:
    """A class of norms as a function: a module for each width and epsilon, with the weight of the call."""
    made: dict[tuple[int, float], tuple[nn.Module, str]] = {}

    def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kind = x.shape[-1], epsilon
        if kind not in made:
            module = module_class(x.shape[-1])
            names = [name for name, _ in module.named_parameters()]
            if len(names) != 1:
                raise InputError(f"{module_class.__name__} has {len(names)} parameters, and a norm one: its weight")
            for name in ALIASES["eps"]:
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, epsilon)
            made[kind] = module, names[0]
        module, name = made[kind]
        return functional_call(module, {name: weight}, (x,))

    return norm


def _rope(target: _Target) -> Function:
    target.check(3, 4)
    apart = len(target.required) == 3

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with each pair of halves turned by its position's angle."""
        tables = cos[: q.shape[2]].to(q.dtype), sin[: q.shape[2]].to(q.dtype)
        both = (target.call(q, *tables), target.call(k, *tables)) if apart else target.call(q, k, *tables)
        if not isinstance(both, tuple | list) or len(both) != 2:
            raise WrongKind(f"it returns {_kind(both)}, not queries and keys")
        return only_tensor(both[0]), only_tensor(both[1])

    return rotated


def _mlp(target: _Target) -> Function:
    target.check(2, 2)
    return lambda gate, up: only_tensor(target.call(gate, up))


def _loss(target: _Target) -> Function:
    target.check(2, 3)
    with_head = len(target.required) == 3

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of softmax(x weight^T) with the targets."""
        if with_head:
            dtype = autocast_dtype(x)
            return only_tensor(target.call(x.to(dtype).flatten(0, -2), weight.to(dtype), targets.flatten()))
        mean = only_tensor(target.call(F.linear(x, weight).flatten(0, -2), targets.flatten()))
        return mean.to(torch.promote_types(mean.dtype, torch.float32))

    return loss


_ADAPTERS: dict[str, Callable[[_Target], Function]] = {
    "attention": _attention, "norm": _norm, "rope": _rope, "mlp": _mlp, "loss": _loss,
}  # fmt: skip


# Which kernels a function runs.


def is_interpreted(function: Any) -> bool:
    """Whether a function calls a kernel that Triton's interpreter runs: itself, or what it names in a user's files."""
    return "triton" in sys.modules and any(type(one).__name__ == "InterpretedFunction" for one in reached_by(function))


def reached_by(function: Any) -> Iterator[Any]:
    """The function, what it names in the user's own files, and so on; of libraries the kernels alone."""
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        one = inspect.unwrap(one) if callable(one) else one
        one = getattr(one, "__self__", one)  # the class of `Function.apply`, the object of a method
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, type):
            methods = [getattr(value, "__func__", value) for value in vars(one).values()]
            waiting += [method for method in methods if inspect.isfunction(method)]
        elif inspect.isfunction(one):
            names = list(_names_in(one.__code__, _OF_GLOBALS))
            near = [one.__globals__[name] for name in names if name in one.__globals__]
            for cell in one.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    near.append(cell.cell_contents)
            modules = [value for value in near if inspect.ismodule(value) and _is_of_user(value)]
            members = list(_names_in(one.__code__, _OF_MEMBERS))
            near += [getattr(module, name) for module in modules for name in members if hasattr(module, name)]
            waiting += [value for value in near if _holds_another(value) or _is_of_user(value)]
        elif _holds_another(one):
            waiting += [getattr(one, name) for name in _HOLDERS if hasattr(one, name)]
        elif not inspect.ismodule(one) and _is_of_user(type(one)):  # an object that is called
            waiting.append(type(one))


_HOLDERS = ("fn", "func", "_init_fn")
"""What holds another function: a kernel under an autotuner, a partial, an operator of `torch.library`."""


def _holds_another(value: Any) -> bool:
    return not inspect.isfunction(value) and any(hasattr(value, name) for name in _HOLDERS)


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_OF_MEMBERS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
"""Instructions that read a global, and a member: `scores.softmax(-1)` does not name the file's own `softmax`."""


def _names_in(code: CodeType, instructions: tuple[str, ...]) -> Iterator[str]:
    """The names that these instructions of a function's code read, and of the functions written inside it."""
    for one in dis.get_instructions(code):
        if one.opname in instructions:
            yield str(one.argval)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const, instructions)


def _is_of_user(value: Any) -> bool:
    """Whether a module, or what a value is defined in, lies in no library."""
    module = value if inspect.ismodule(value) else sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return bool(file) and not file.startswith(install_places())
