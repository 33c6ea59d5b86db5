"""The parts of a step whose precision can be changed: modules by what they compute themselves, and the loss.

A part is a module's own operators. What another module inside it computes is a part of its own and keeps its precision,
so that a block is what stands between its modules: the sums of a residual stream, or an attention written out.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.core.range_names import FORWARD
from stepscope.questions.replays.results import run_step
from stepscope.questions.steps import folded
from stepscope.recording.step import Recorder
from stepscope.training.own.own_step import OwnStep

LOSS = "the loss"
"""The name of the part that is no module: what the loss function computes."""

_NO_ARITHMETIC = ("_to_copy", "clone", "copy_", "detach", "alias", "contiguous")
"""Operators that move numbers and compute none."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module's own operators; of layers that differ in a number alone, those of all of them."""

    name: str
    """The path, with * for the numbers of layers; LOSS for the loss function."""
    kind: str
    """The class, and that it is what stands between modules where it has some."""
    paths: tuple[str, ...]
    """The module of each layer. Empty for the loss."""
    widest: int
    """The bytes of the widest floating number that its operators take."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What computes in a step, and what does not."""

    computing: tuple[Part, ...]
    """In the order in which they first compute."""
    called: frozenset[str]
    """The paths of all modules that run."""
    idle: tuple[str, ...]
    """Modules that run and compute nothing, such as a dropout that is off."""


def find_parts(step: OwnStep, seed: int) -> Parts:
    """Run a step once, and see which modules compute."""
    seeing = _Seeing(step.model)
    with seeing.running():
        run_step(step, seed, seeing)
    # Modules of a Sequential differ in a number alone, too: only those of one class are layers.
    grouped: dict[tuple[str, str], list[str]] = {}
    for path in seeing.widest:
        kind = step.own.loss_name if path is None else _kind(step, path, frozenset(seeing.called))
        grouped.setdefault((LOSS if path is None else folded(path), kind), []).extend([] if path is None else [path])
    names = {key: paths[0] if len(paths) == 1 and paths[0] else key[0] for key, paths in grouped.items()}
    several = Counter(names.values())
    found = tuple(
        Part(
            name=f"{names[key]} ({key[1]})" if several[names[key]] > 1 else names[key], kind=key[1],
            paths=tuple(paths), widest=max(seeing.widest[path] for path in paths or (None,)),
        )
        for key, paths in grouped.items()
    )  # fmt: skip
    inside = {path for path in seeing.called if any(_is_inside(other, path) for other in seeing.called)}
    idle = {folded(path): None for path in seeing.called if path not in seeing.widest and path not in inside}
    return Parts(computing=found, called=frozenset(seeing.called), idle=tuple(idle))


def nearest_inside(path: str, called: frozenset[str]) -> list[str]:
    """The modules inside of one that run, without those that stand inside of another of them."""
    inside = [other for other in called if _is_inside(other, path)]
    return [other for other in inside if not any(_is_inside(other, between) for between in inside)]


def _is_inside(path: str, outer: str) -> bool:
    return path != outer and path.startswith(f"{outer}." if outer else "")


def _kind(step: OwnStep, path: str, called: frozenset[str]) -> str:
    name = type(step.model.get_submodule(path)).__name__
    return f"{name}, between its modules" if nearest_inside(path, called) else name


class _Seeing(Recorder):
    """Hooks that know which module runs, and a mode that sees operators."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[str] = []
        self._watching = contextlib.ExitStack()
        self.called: dict[str, None] = {}
        self.widest: dict[str | None, int] = {}
        """The bytes of the widest number that each module's own operators take; under None the loss's."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the hooks are on."""
        with contextlib.ExitStack() as stack:
            for path, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(path)).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            stack.enter_context(self._watching)
            yield

    def phase_begins(self, name: str) -> None:
        if name == FORWARD:
            self._watching.enter_context(_Operators(self._computed))

    def phase_ends(self, name: str) -> None:
        self._watching.close()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._open.append(path)
            self.called[path] = None

        return enter

    def _leave(self, *_: object) -> None:
        self._open.pop()

    def _computed(self, widest: int) -> None:
        module = self._open[-1] if self._open else None
        self.widest[module] = max(self.widest.get(module, 0), widest)


class _Operators(TorchDispatchMode):
    """A mode that tells of each operator that computes floating numbers from others, and how wide those are."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        widest = _widest_number((args, kwargs))
        if not views and name not in _NO_ARITHMETIC and widest and _widest_number(output):
            self._tell(widest)
        return output


def _widest_number(value: Any) -> int:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
    return max((leaf.dtype.itemsize for leaf in leaves), default=0)
