"""What holds a tensor that a step left behind: a path from a name of the user's to it, or the graph it is saved in.

Python's garbage collector knows which object refers to which. From each tensor the search goes up, through lists,
dicts and objects, until it comes to something with a name: a local variable of a function that is running, a variable
of a module, a module of the model. What autograd saved is held by no object of Python's: it is read off the graphs of
the tensors that are.
"""

import gc
import inspect
import re
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from stepscope.core.errors import install_places
from stepscope.core.evidence import KeptTensor
from stepscope.recording.held_tensors import local_part

# What autograd saved for backward, read off the graph when forward has ended.
#
# No hook runs in forward for it: hooks on saved tensors make autograd keep other objects than it would, and what is to
# be measured is what it keeps. Every node of the graph shows its saved tensors as attributes instead
# (`MulBackward0._raw_saved_self`), under the names that autograd's formulas give them.


_RAW = "_raw_saved_"
_NODE_SUFFIX = re.compile(r"Backward\d*$")


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that a node of the graph keeps."""

    tensor: torch.Tensor
    operator: str
    """Name of the operator: `Mul` for the node MulBackward0; for a Python function, its class."""
    name: str
    """The operator's name for the tensor: `self`, `result`; `saved[2]` for the third of a Python function."""
    sequence_nr: int
    """Autograd's sequence number of the node."""


def saved_tensors(root: Node) -> Iterator[SavedTensor]:
    """Every tensor that the graph below `root` keeps, in the order in which forward made the nodes.

    Tensors that hooks hold for autograd, as in activation checkpointing, are left out: to ask for them would run the
    forward again.
    """
    nodes, waiting = {root}, [root]
    while waiting:
        fresh = {edge for edge, _ in waiting.pop().next_functions if edge is not None} - nodes
        waiting += fresh
        nodes |= fresh
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for attribute in _saved_attributes(type(node)):
            name = attribute.removeprefix(_RAW)
            raw = getattr(node, attribute)
            several = isinstance(raw, tuple)
            for i, saved in enumerate(raw if several else (raw,)):
                tensor = _held_by_autograd(saved)
                if tensor is not None:
                    yield SavedTensor(
                        tensor=tensor,
                        operator=_NODE_SUFFIX.sub("", node.name().rpartition("::")[2]),
                        name=f"{'saved' if attribute == '_raw_saved_tensors' else name}[{i}]" if several else name,
                        sequence_nr=node._sequence_nr(),
                    )


@cache
def _saved_attributes(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith(_RAW))


def _held_by_autograd(saved: Any) -> torch.Tensor | None:
    """The tensor that autograd holds; None where a hook holds it, or the node was given none."""
    if getattr(saved, "unpack_hook", None) is not None:
        return None
    try:
        held = saved.data
    except (AttributeError, RuntimeError):  # an optional tensor that was not there; a PyTorch without this view
        return None
    return held if isinstance(held, torch.Tensor) else None


_LONGEST_PATH = 8
"""Objects between a tensor and a name. What lies deeper is named by the class of the last object."""
_FEW = 64
"""Objects whose holders Python is asked for: it compares each reference of the process with each of them."""
_LONGEST_KEY = 40
_ATTRIBUTES = "__dict__"
_SCRIPT = ("__main__", "__mp_main__")
"""Names of the module that a script is."""


class Keepers:
    """Tells what holds the tensors on a device that were made after it was."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        self._device = device
        self._known = {id(tensor): weakref.ref(tensor) for tensor in self._tensors()}
        self._names: dict[int, str] = {
            id(module): f"{type(model).__name__}{f'.{path}' if path else ''}" for path, module in model.named_modules()
        }
        if optimizer is not None:
            self._names[id(optimizer)] = type(optimizer).__name__

    def kept(self) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[KeptTensor, ...]]:
        """The new tensors of Python's, those that graphs keep, and what holds each storage, as far as it is known."""
        keepers: dict[int, str] = {}
        with torch._C.DisableTorchFunction(), torch.no_grad():
            known = self._known
            new = [t for t in self._tensors() if id(t) not in known or known[id(t)]() is not t]
            paths = _Search(self._names).paths(new)
            for tensor in new:
                path = paths.get(id(tensor), "")
                if path or _address(tensor) not in keepers:
                    keepers[_address(tensor)] = path
            saved = list(self._saved(new, paths))
            for tensor, keeper in saved:
                keepers[_address(tensor)] = keepers.get(_address(tensor)) or keeper
        kept = tuple(KeptTensor(address=address, kept_by=by) for address, by in keepers.items() if address and by)
        return new, [tensor for tensor, _ in saved], kept

    def _tensors(self) -> Iterator[torch.Tensor]:
        for tensor in gc.get_objects():
            if issubclass(type(tensor), torch.Tensor) and _address(tensor) and tensor.device == self._device:
                yield tensor

    def _saved(self, new: Sequence[torch.Tensor], paths: Mapping[int, str]) -> Iterator[tuple[torch.Tensor, str]]:
        """What the graphs of these tensors keep, those of named tensors first."""
        for tensor in sorted(new, key=lambda tensor: not paths.get(id(tensor))):
            if tensor.grad_fn is not None:
                path = paths.get(id(tensor))
                keeper = f"the graph of {path}" if path else "a graph"
                for saved in saved_tensors(tensor.grad_fn):
                    if saved.tensor.device == self._device:
                        yield saved.tensor, keeper


class _Search:
    """One search for the names of objects. It holds nothing of the process when it is over."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = {**names}
        self._spaces: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType):
                prefix = self._spaces[id(vars(module))] = "" if name in _SCRIPT else f"{name}."
                if not _is_installed(getattr(module, "__file__", None) or "<frozen"):
                    # The collector does not see what gc.freeze() has set aside, as the variables of a module may be.
                    for variable, value in list(vars(module).items()):
                        self._names.setdefault(id(value), f"{prefix}{variable}")
        self._locals: list[dict[str, Any]] = []
        for frame, _ in traceback.walk_stack(sys._getframe()):
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _is_installed(frame.f_code.co_filename):
                local = _locals_of(frame)
                self._locals.append(local)
                for name, value in local.items():
                    self._names.setdefault(id(value), f"{name} in {frame.f_code.co_qualname}()")

    def paths(self, objects: Sequence[object]) -> dict[int, str]:
        """The path to each of the objects, by its id; those that only a name of its own holds have that name."""
        holders: dict[int, Any] = {}
        hows: dict[int, str] = {}
        frontier: list[Any] = [item for item in objects if id(item) not in self._names]
        visited = {id(item) for item in objects}
        ours = {id(objects), id(self._locals), id(holders), *map(id, self._locals)}
        for _ in range(_LONGEST_PATH):
            wanted = {id(item) for item in frontier}
            above: list[Any] = []
            for holder in _holders_of(frontier, wanted):
                if id(holder) in ours or holder is frontier or holder is above or isinstance(holder, ModuleType):
                    continue
                if any(holder is frame for frame, _ in traceback.walk_stack(sys._getframe())):
                    continue  # what it holds has the names of its variables
                for child, how in _held(holder):
                    if id(child) in wanted and id(child) not in holders:
                        holders[id(child)], hows[id(child)] = holder, how
                if id(holder) not in visited:
                    visited.add(id(holder))
                    if id(holder) not in self._names and id(holder) not in self._spaces:
                        above.append(holder)
            frontier = above
        return {id(item): path for item in objects if (path := self._path(item, holders, hows))}

    def _path(self, wanted: object, holders: Mapping[int, Any], hows: Mapping[int, str]) -> str:
        """The path down to an object: a name, and how to go on from there."""
        how = ""
        at = wanted
        for _ in range(_LONGEST_PATH + 1):
            name = self._names.get(id(at))
            if name is not None:
                place, _, function = name.partition(" in ")
                return f"{place}{how}{f' in {function}' if function else ''}"
            if id(at) not in holders:
                break
            at, step = holders[id(at)], hows[id(at)]
            space = self._spaces.get(id(at))
            if space is not None:
                return f"{space}{_attribute(step + how)[1:]}"
            how = _attribute(how) if step == _ATTRIBUTES else step + how
        if at is wanted:
            return ""
        if isinstance(at, FrameType):
            return f"{how.removeprefix('.')} in {at.f_code.co_qualname}(), which has ended"
        if isinstance(at, FunctionType):
            return f"{at.__qualname__}(){how}"
        kind = type(at)
        return f"a {kind.__name__}{how}" if kind.__module__ == "builtins" else f"{kind.__qualname__}{how}"


def _holders_of(objects: list[Any], wanted: set[int]) -> list[Any]:
    """The objects that refer to one of these."""
    if not objects:
        return []
    if len(objects) <= _FEW:
        return gc.get_referrers(*objects)
    everything = gc.get_objects()
    ours = {id(everything), id(objects)}
    return [
        holder
        for holder in everything
        if id(holder) not in ours and not wanted.isdisjoint(map(id, gc.get_referents(holder)))
    ]


def _held(holder: Any) -> Iterator[tuple[object, str]]:
    """What an object holds, each with how."""
    if isinstance(holder, dict):
        for key, value in list(holder.items()):
            # A word tells something, any other key nothing.
            tells = isinstance(key, str) and len(key) <= _LONGEST_KEY
            yield value, f"[{key!r}]" if tells else "[...]"
            yield key, "[key]"
    elif isinstance(holder, (list, tuple, deque, set, frozenset)):
        yield from ((value, "[...]") for value in list(holder))
    elif isinstance(holder, CellType):
        yield from ((value, "") for value in gc.get_referents(holder))
    elif isinstance(holder, FunctionType):
        names = holder.__code__.co_freevars
        yield from ((cell, f".{name}") for name, cell in zip(names, holder.__closure__ or (), strict=False))
        if holder.__closure__ is not None:
            yield holder.__closure__, ".__closure__"
    elif isinstance(holder, (FrameType, GeneratorType)):
        frame = holder if isinstance(holder, FrameType) else holder.gi_frame
        if frame is not None:
            yield from ((value, f".{name}") for name, value in _locals_of(frame).items())
    else:
        attributes = getattr(holder, "__dict__", None)
        if isinstance(attributes, dict):
            yield attributes, _ATTRIBUTES
            yield from ((value, f".{name}") for name, value in list(attributes.items()))
        yield from ((value, "") for value in gc.get_referents(holder) if value is not attributes)


def _attribute(path: str) -> str:
    """The path of an object's attribute, of that into the dict of its attributes: `.losses[...]`."""
    key, bracket, rest = path.removeprefix("['").partition("']")
    return f".{key}{rest}" if bracket else path


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, which afterwards holds no copy of them.

    Up to Python 3.12 a function's frame keeps the dict that was asked for, with what it held then: it would be a leak
    of ours. A dict that the function itself has asked for stays as it is.
    """
    kept = frame.f_locals
    variables = {name: value for name, value in kept.items() if not name.startswith("__")}
    alone = 3  # the frame, this function, the call that counts
    if type(kept) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(kept) <= alone:
        kept.clear()
    return variables


def _is_installed(file: str) -> bool:
    return file.startswith("<frozen") or any(file.startswith(place) for place in install_places())


def _address(tensor: Any) -> int:
    """The address of a tensor's storage; 0 for a tensor without one, as fake and sparse ones are."""
    try:
        return local_part(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
