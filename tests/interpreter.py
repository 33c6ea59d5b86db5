"""Triton's interpreter, quickened: what it works out again and again is kept.

Whenever an interpreted kernel calls a function, and so at every `tl.sum`, the interpreter goes through all members of
Triton's modules for those that it has to replace: up to half of the time of a test. Which ones they are never changes.
For every tensor it builds its table of NumPy's types, and wraps each number of its shape anew, which it compares
number by number wherever two tensors meet. And it works out whether sums of integers overflow, to throw the answer away
unless it debugs.
"""

import dataclasses
import functools
import inspect
import math
import sys
from typing import Any


def quicken() -> None:
    """Quicken the interpreter of this process, where it has been imported and is as we know it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    known = ("_patch_builtin", "_patch_attr", "_get_np_dtype", "interpreter_builder")
    if interpreter is None or hasattr(interpreter, "_quickened") or not all(hasattr(interpreter, n) for n in known):
        return
    language = interpreter.tl
    core = language.core

    @functools.cache
    def builtins(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]

    # All of them now, while no kernel runs: later some are replaced already.
    for package in (language, core, language.tensor, core.tensor, language.math, core.tensor_descriptor_base):
        builtins(package)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    of_scalar = functools.cache(interpreter._get_np_dtype)
    of_pointer = interpreter._get_np_dtype(core.pointer_type(core.float32))

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        return of_pointer if isinstance(scalar, core.pointer_type) else of_scalar(scalar)

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, numpy_dtype
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _keep_shapes(core)
    _compare_by_identity(interpreter, core)
    _replace_once(interpreter, core)
    interpreter._quickened = True


def _keep_shapes(core: Any) -> None:
    """Make the wrapped shape of a tensor, and of its type, once for all that have it: nothing changes a shape."""
    kept: dict[int, tuple[int, ...]] = {}

    @functools.cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int]:
        shape = core.tuple(sizes)
        kept[id(shape)] = sizes
        return shape, core.validate_block_shape(sizes)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    @functools.cache
    def name_of(sizes: tuple[int, ...], element: str) -> str:
        return f"<{of_type(sizes)[0]}, {element}>"

    make_type = core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = kept.get(id(shape)) or tuple([getattr(size, "value", size) for size in shape])
        if not sizes:
            make_type(self, element_ty, shape)
        self.element_ty = element_ty
        self.shape, self.numel = of_type(sizes)
        self.name = name_of(sizes, str(element_ty))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _compare_by_identity(interpreter: Any, core: Any) -> None:
    """Leave two tensors of one shape, and one of the asked type, as they are: of equal shapes there is one, which is
    kept."""
    semantic = type(interpreter.interpreter_semantic)
    as_known = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if not (left.is_block() and right.is_block()):
            return as_known(self, lhs, rhs)
        if left.shape is right.shape:
            return lhs, rhs
        sizes, others = left.shape.values, right.shape.values
        if len(sizes) != len(others) or any(
            1 not in pair and pair[0] != pair[1] for pair in zip(sizes, others, strict=True)
        ):
            return as_known(self, lhs, rhs)
        whole = [other if size == 1 else size for size, other in zip(sizes, others, strict=True)]

        def filled(value: Any) -> Any:
            if value.type.shape.values == whole:
                return value
            kind = core.block_type(value.type.scalar, whole)
            return self.tensor(self.builder.create_broadcast(value.handle, whole), kind)

        return filled(lhs), filled(rhs)

    cast_as_known = semantic.cast

    def cast(self: Any, value: Any, kind: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.type.scalar is kind.scalar else cast_as_known(self, value, kind, *rounding, **named)

    semantic.broadcast_impl_value, semantic.cast = broadcast, cast


def _replace_once(interpreter: Any, core: Any) -> None:
    """Look for what is to be replaced when a kernel begins, and no more when it calls a function of the same modules:
    `print` stands where a module has been gone through."""
    called = interpreter.InterpretedFunction

    @functools.cache
    def modules(function: Any) -> list[Any]:
        found = function.__globals__.values()
        return [each for each in found if each is interpreter.tl or each is core]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = "__index__" in vars(core.tensor)
        if not (begun and all(module.static_print is print for module in modules(self.fn))):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    called.__call__ = call
