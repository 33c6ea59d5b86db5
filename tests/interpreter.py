"""Triton's interpreter, quickened: what it works out again and again is kept.

Whenever an interpreted kernel calls a function, and so at every `tl.sum`, the interpreter goes through all members of
Triton's modules for those that it has to replace: up to half of the time of a test. Which ones they are never changes.
For every tensor it builds its table of NumPy's types, and wraps each number of its shape anew. And it works out
whether sums of integers overflow, to throw the answer away unless it debugs.
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
    interpreter._quickened = True


def _keep_shapes(core: Any) -> None:
    """Make the wrapped shape of a tensor, and of its type, once for all that have it: nothing changes a shape."""

    @functools.cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    make_type = core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if not sizes:
            make_type(self, element_ty, shape)
        self.element_ty = element_ty
        self.shape, self.numel = of_type(sizes)
        self.name = f"<{self.shape}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
