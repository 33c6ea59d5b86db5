"""Triton's interpreter, quickened: what it works out again and again is kept.

Whenever an interpreted kernel calls a function, and so at every `tl.sum`, the interpreter goes through all members of
Triton's modules for those that it has to replace: up to half of the time of a test. Which ones they are never changes.
For every tensor it builds its table of NumPy's types.
"""

import functools
import inspect
import sys
from typing import Any


def quicken() -> None:
    """Quicken the interpreter of this process, where it has been imported and is as we know it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    known = ("_patch_builtin", "_patch_attr", "_get_np_dtype")
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
    interpreter._quickened = True
