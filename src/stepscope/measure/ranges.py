"""Named ranges that a profiler shows: the step, its phases, modules, the three parts of attention.

Ranges cost nothing measurable while nobody watches: `named_range` then returns one shared null context. They are
emitted inside `emitted()`, and from the start when an NVTX tool (Nsight Systems) launched this process.
"""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_NVTX_TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
_SILENT: AbstractContextManager[None] = contextlib.nullcontext()


class _Emission:
    """Whether ranges are emitted now: one flag for the process, read on every range."""

    def __init__(self) -> None:
        self.nvtx = any(variable in os.environ for variable in _NVTX_TOOLS)
        self.profiler = False


_emission = _Emission()


def watched() -> bool:
    """Whether an NVTX tool watches this process."""
    return _emission.nvtx


def named_range(name: str) -> AbstractContextManager[object]:
    """A range for NVTX tools and torch.profiler, or nothing while neither watches or torch.compile is tracing."""
    if torch.compiler.is_compiling() or not (_emission.nvtx or _emission.profiler):
        return _SILENT
    return _emitting_range(name)


@contextlib.contextmanager
def _emitting_range(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if _emission.nvtx and torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        if _emission.profiler:
            stack.enter_context(torch.profiler.record_function(name))
        yield


@contextlib.contextmanager
def emitted() -> Iterator[None]:
    """Emit ranges to torch.profiler inside this context."""
    before = _emission.profiler
    _emission.profiler = True
    try:
        yield
    finally:
        _emission.profiler = before


@contextlib.contextmanager
def module_ranges(model: torch.nn.Module) -> Iterator[None]:
    """Give every submodule's forward a range named by its module path (`blocks.3.attention`), by hooks."""
    open_ranges: list[AbstractContextManager[object]] = []
    handles = []

    def enter(path: str) -> None:
        entered = named_range(path)
        entered.__enter__()
        open_ranges.append(entered)

    def leave() -> None:
        open_ranges.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        if not path:
            continue
        handles.append(module.register_forward_pre_hook(lambda _module, _args, path=path: enter(path)))
        handles.append(module.register_forward_hook(lambda _module, _args, _output: leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
