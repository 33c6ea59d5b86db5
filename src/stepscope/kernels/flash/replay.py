"""Repeated launches of the FlashAttention kernels, with recorded arguments on other tensors.

Most of a launch's cost on the host is work that the last launch did too: the grid, some forty arguments, how each
argument specialises the kernel, and which compiled kernel that is. A recording keeps all of this except the tensors'
addresses. It is valid while shapes, strides, dtypes, device and every option stay the same (its key holds them), and
while every address is a multiple of 16 bytes, which each call checks.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.launching import Launcher, launch

ALIGNMENT_BYTES = 16
"""An alignment in bytes. Triton compiles a separate variant for addresses that are a multiple of this."""
_MOST = 512
"""The most recordings that are kept. There is a limit, since every call may have another sequence length."""

_Call = Callable[[tuple[Tensor, ...], Launcher], None]
_Operand = tuple[int, int, tuple[type[Any], dict[str, Any]] | None]
"""An argument's index, its tensor's index and, for a descriptor, its class and the fields that never change."""


def _is_descriptor(argument: Any) -> bool:
    """Whether the argument is a tensor descriptor; Triton and Gluon each have their own class."""
    return hasattr(argument, "block_shape")


class Recording:
    """The launches of one call: `launch` runs and records each kernel, then `repeat` runs them on other tensors."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        """Record a call on the tensors `seen`, which are distinct objects even if two tensors are the same."""
        self.seen = tuple(t.detach() for t in tensors)
        self._place_of = {id(t): place for place, t in enumerate(self.seen)}
        self._steps: list[tuple[Callable[..., object], list[object], list[_Operand]]] = []
        self._repeatable = True

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: int) -> Any:
        """Run a kernel and record its arguments."""
        compiled = kernel[grid](*arguments, **options)
        if compiled is None or not all(type(a) in _FIXED or self._is_known(a) for a in arguments):
            self._repeatable = False
            return compiled
        operands: list[_Operand] = []
        template = list(arguments)
        for at, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                operands.append((at, self._place_of[id(argument)], None))
                template[at] = None
            elif _is_descriptor(argument):
                same = {name: value for name, value in vars(argument).items() if name != "base"}
                operands.append((at, self._place_of[id(argument.base)], (type(argument), same)))
                template[at] = None
        self._steps.append((compiled[(*grid, 1, 1)[:3]], template, operands))
        return compiled

    def _is_known(self, argument: Any) -> bool:
        base = argument.base if _is_descriptor(argument) else argument
        return id(base) in self._place_of and hasattr(argument, "__dict__")

    def finish(self) -> bool:
        """Release the tensors. Returns whether the call can be repeated: not if it allocates between launches."""
        self.seen = ()
        self._place_of = {}
        return self._repeatable

    def repeat(self, tensors: tuple[Tensor, ...], addresses: list[int], stream: int | None) -> None:
        """Repeat the recorded launches on `tensors`, given in the order of `seen`, all on one stream."""
        for run, template, operands in self._steps:
            arguments = template.copy()
            for at, place, descriptor in operands:
                if descriptor is None:
                    arguments[at] = addresses[place]
                else:
                    kind, same = descriptor
                    described = object.__new__(kind)
                    described.__dict__.update(same, base=tensors[place])
                    arguments[at] = described
            run(*arguments, stream=stream)


_FIXED = {int, float, bool, str, type(None)}
_recordings: dict[Hashable, Recording] = {}


def forget() -> None:
    """Drop all recordings, for example when other configurations are chosen."""
    _recordings.clear()


def run(key: Hashable, tensors: tuple[Tensor, ...], call: _Call) -> None:
    """Repeat the launches recorded under the key, or make `call(tensors, launcher)` if there is no recording.

    The key must hold everything except the tensors' addresses that the launches depend on.
    """
    device = tensors[0].device
    if device.type != "cuda":
        call(tensors, launch)
    elif device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run_here(key, tensors, call)
    else:
        _run_here(key, tensors, call)


def _run_here(key: Hashable, tensors: tuple[Tensor, ...], call: _Call) -> None:
    addresses = [t.data_ptr() for t in tensors]
    if any(address % ALIGNMENT_BYTES for address in addresses):
        call(tensors, launch)
        return
    recording = _recordings.get(key)
    if recording is not None:
        device = tensors[0].device.index
        stream = None if device is None else torch._C._cuda_getCurrentRawStream(device)
        recording.repeat(tensors, addresses, stream)
        return
    recording = Recording(tensors)
    call(recording.seen, recording.launch)
    if recording.finish():
        if len(_recordings) >= _MOST:
            forget()
        _recordings[key] = recording
