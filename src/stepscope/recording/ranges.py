"""Named ranges that a profiler shows: the step, its phases, modules, the three parts of attention.

Ranges go to **emitters**. A process that an NVTX tool (Nsight Systems) launched has one from its start, so every step
shows with its phases; `emitted_to` adds others for a while. Modules and the parts of attention are **details**: they
are emitted in traced steps alone (`detailed`), and the timed steps stay cheap. While nobody watches, a range is one
shared null context and costs nothing measurable.
"""

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_NVTX_TOOLS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
NO_NVTX = "this PyTorch emits no NVTX ranges, and the package that does is missing: pip install 'stepscope[nsys]'"
_SILENT: AbstractContextManager[None] = contextlib.nullcontext()


class Emitter(Protocol):
    """A receiver of ranges. They nest on each thread: pop ends the one that was pushed last on the same thread."""

    def push(self, name: str, /) -> object: ...

    def pop(self) -> object: ...


class NvtxEmitter:
    """An emitter to NVTX tools: by PyTorch, or by NVIDIA's package `nvtx` where PyTorch is built without NVTX, as for
    CPUs alone. Raises ImportError where neither can."""

    def __init__(self) -> None:
        if hasattr(torch._C, "_nvtx"):
            self.push, self.pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
            return
        import nvtx  # noqa: PLC0415  (optional: `pip install 'stepscope[nsys]'`)

        # From 0.2.12 on the package asks the tool whether it listens. Nsight Systems 2023.4 answers that it does not,
        # so no range arrives, and nothing says so; 0.2.11 did not ask, and all arrive.
        if type(nvtx.get_domain("NVTX")).__name__ == "DummyDomain":
            raise ImportError("this release of nvtx finds no tool that listens")
        self.push, self.pop = nvtx.push_range, nvtx.pop_range


class OwnRange(torch.profiler.record_function):
    """A range of ours for torch.profiler, which is told by its class from those of a watched script."""


class Stacks(threading.local):
    """A stack of what is open for each thread."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


class ProfilerEmitter:
    """An emitter to torch.profiler."""

    def __init__(self) -> None:
        self._open = Stacks()

    def push(self, name: str) -> None:
        entered = OwnRange(name)
        entered.__enter__()
        self._open.stack.append(entered)

    def pop(self) -> None:
        self._open.stack.pop().__exit__(None, None, None)


def watched() -> bool:
    """Whether an NVTX tool launched this process."""
    return any(variable in os.environ for variable in _NVTX_TOOLS)


def nvtx_available() -> bool:
    """Whether a process that an NVTX tool launches here could emit ranges."""
    return hasattr(torch._C, "_nvtx") or importlib.util.find_spec("nvtx") is not None


class _Emission:
    """The emitters of the whole process now; read for every range."""

    emitters: tuple[Emitter, ...] = ()
    detailed = False


_emission = _Emission()
if watched():
    with contextlib.suppress(ImportError):
        _emission.emitters = (NvtxEmitter(),)


@dataclass(eq=False, slots=True)
class _Range:
    """A range on every emitter that is set when it begins."""

    name: str
    emitters: tuple[Emitter, ...]

    def __enter__(self) -> None:
        for emitter in self.emitters:
            emitter.push(self.name)

    def __exit__(self, *_: object) -> None:
        for emitter in reversed(self.emitters):
            emitter.pop()


def named_range(name: str) -> AbstractContextManager[object]:
    """A range of the step or of a phase; a null context while there is no emitter."""
    return _Range(name, _emission.emitters) if _emission.emitters else _SILENT


def detail_range(name: str) -> AbstractContextManager[object]:
    """A range inside the model, in traced steps only; a null context otherwise, and while torch.compile traces."""
    if torch.compiler.is_compiling() or not (_emission.detailed and _emission.emitters):
        return _SILENT
    return _Range(name, _emission.emitters)


def current_emitters() -> tuple[Emitter, ...]:
    """The emitters to which ranges go now."""
    return _emission.emitters


@contextlib.contextmanager
def emitted_to(*emitters: Emitter, alone: bool = False) -> Iterator[None]:
    """A context in which ranges go to these emitters too, or to them alone."""
    before = _emission.emitters
    _emission.emitters = emitters if alone else (*before, *emitters)
    try:
        yield
    finally:
        _emission.emitters = before


silenced = functools.partial(emitted_to, alone=True)
"""A context in which no range is emitted."""


@contextlib.contextmanager
def detailed(model: torch.nn.Module | None) -> Iterator[None]:
    """A context that emits the parts of attention, and by hooks every submodule of `model` as its module path
    (`blocks.3.attention`)."""
    before, _emission.detailed = _emission.detailed, True
    # A stack for each thread: checkpointing runs a module's forward again on autograd's thread.
    local = Stacks()

    def enter(path: str) -> None:
        entered = detail_range(path)
        entered.__enter__()
        local.stack.append(entered)

    def leave(*_: object) -> None:
        local.stack.pop().__exit__(None, None, None)

    with contextlib.ExitStack() as undo:
        undo.callback(setattr, _emission, "detailed", before)
        undo.callback(lambda: [leave() for _ in range(len(local.stack))])  # PyTorch calls no hook after a Ctrl-C
        for path, module in model.named_modules() if model is not None else ():
            if path:
                begins = module.register_forward_pre_hook(lambda _module, _args, path=path: enter(path))
                undo.callback(begins.remove)
                undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            del module
        del model  # a watched loop's may end before this context
        yield
