"""What a step would allocate, seen by running it on fake tensors: shapes, dtypes and lifetimes without memory.

Under PyTorch's `FakeTensorMode` every operator says what it would return, and nothing is computed. `FakeMemory` stands
above that mode and below autograd, so it sees each operator of forward, backward and optimizer, in order: a storage
that it has not seen is an allocation, and the storage's end is its release. Nothing about the model is assumed.

What an operator's kernel allocates for itself and releases before it returns stays unseen: the sorted indices of
embedding's backward, the accumulators of fused attention's. Of what libraries hold, cuBLAS' workspace is counted, one
for each thread that multiplies matrices; on a GPU autograd runs backward on a thread of its own.
"""

import contextlib
import contextvars
import logging
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.memory_notes import MemoryCategory
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.recording import scaled_mm

_aten = torch.ops.aten
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", *scaled_mm.OPERATORS)
_UNSCALES = _aten._amp_foreach_non_finite_check_and_unscale_.default
_READS_A_NUMBER = _aten._local_scalar_dense.default

_OF_HOST = contextvars.ContextVar("of_host", default=False)


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """A context in which what fake operators refuse is an error alone: PyTorch logs a traceback of each besides."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def of_host() -> Iterator[None]:
    """A context whose new tensors belong to the host, also where the device of a step is one that a CPU stands for."""
    token = _OF_HOST.set(True)
    try:
        yield
    finally:
        _OF_HOST.reset(token)


@dataclass(slots=True, kw_only=True)
class FakeAllocation:
    """One storage, from its first tensor to its last."""

    nbytes: int
    """Bytes of the storage as requested, before the allocator rounds them up."""
    operator: str
    """The operator that made the storage: `aten.mm.default`."""
    phase: str
    category: MemoryCategory = "temporaries"
    on_device: bool = True
    live: bool = True


@dataclass(frozen=True, kw_only=True)
class FakePhase:
    """A phase, as the half-open range of events in it."""

    name: str
    start: int
    end: int


class FakeMemory(TorchDispatchMode):
    """Records every allocation and release of what runs inside it; to be entered inside a FakeTensorMode.

    events: i for the allocation of allocations[i], ~i (which is -i - 1) for its release, in the order in which they
    happen.
    """

    def __init__(self, *, workspace_bytes: int = 0) -> None:
        """workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices."""
        super().__init__()
        self.allocations: list[FakeAllocation] = []
        self.events: list[int] = []
        self.phases: list[FakePhase] = []
        self._workspace_bytes = workspace_bytes
        self._threads_with_workspace: set[str] = set()
        self._index: dict[int, int] = {}  # address of a live storage -> its allocation
        self._references: dict[int, weakref.ref[Any]] = {}
        self._phase = ""
        self._weights: set[int] = set()
        self._recomputed: list[int] = []
        self._overflow_flags: set[int] = set()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context that is one phase. What `forward` allocates and leaves alive counts as saved for backward."""
        self._phase, start, first = name, len(self.events), len(self.allocations)
        try:
            yield
        finally:
            self._end_recomputation()
            self._phase = ""
        self.phases.append(FakePhase(name=name, start=start, end=len(self.events)))
        if name == FORWARD:
            self._keep(range(first, len(self.allocations)))

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as allocated now, in the order given: they were made before the mode was entered."""
        for tensor in tensors:
            self._note(tensor, "held")

    def end(self) -> None:
        """Record no further event, since what is released from now on belongs to no phase."""
        self._index.clear()
        self._references.clear()

    def label(self, tensors: Iterable[Tensor], category: MemoryCategory, *, on_device: bool = True) -> None:
        """Name the category of live tensors. Those that are not on the device belong to the host, and count nowhere."""
        for tensor in tensors:
            index = self._index.get(tensor.untyped_storage()._cdata)
            if index is None:
                continue
            self.allocations[index].category = category
            self.allocations[index].on_device = on_device
            if isinstance(tensor, nn.Parameter):
                self._weights.add(index)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READS_A_NUMBER:
            return self._number(args[0], func)
        # Gradients are enabled inside autograd's engine only where a checkpoint runs a part of forward again.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0
        if func is _aten.add.Tensor and _adds_up_in_place(args[0]):
            func = _aten.add_.Tensor
        outputs = self._run(func, args, kwargs or {})
        for tensor in _tensors(outputs):
            index = self._note(tensor, func)
            if index is not None:
                if self._is_cast_copy(tensor, func, args):
                    self.allocations[index].category = "cast copies"
                if again:
                    self._recomputed.append(index)
                else:
                    self._end_recomputation()
        if func._schema.name in _PRODUCTS:
            self._workspace()
        if func is _UNSCALES:
            self._overflow_flags.add(args[1].untyped_storage()._cdata)
        return outputs

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns."""
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor, _func: Any) -> bool | float:
        """A stand-in for the value that a fake tensor lacks. A step asks for conditions, its count, and overflow."""
        if tensor.dtype == torch.bool:
            return False
        return 0.0 if tensor.untyped_storage()._cdata in self._overflow_flags else 1.0

    def _note(self, tensor: Tensor, func: Any) -> int | None:
        """The index of the allocation if this tensor's storage is new, else None."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._index:
            return None
        index = self._allocate(storage.nbytes(), func)
        self._index[key] = index
        self._references[key] = weakref.ref(storage, lambda _: self._release(key))
        return index

    def _is_cast_copy(self, tensor: Tensor, func: Any, args: tuple[Any, ...]) -> bool:
        if func is not _aten._to_copy.default or self._phase not in (FORWARD, BACKWARD):
            return False
        return tensor.itemsize == 2 and self._index.get(args[0].untyped_storage()._cdata) in self._weights

    def _allocate(self, nbytes: int, func: Any) -> int:
        self.allocations.append(
            FakeAllocation(nbytes=nbytes, operator=str(func), phase=self._phase, on_device=not _OF_HOST.get())
        )
        index = len(self.allocations) - 1
        self.events.append(index)
        return index

    def _release(self, key: int) -> None:
        index = self._index.pop(key)
        del self._references[key]
        self.allocations[index].live = False
        self.events.append(~index)

    def _workspace(self) -> None:
        thread = "backward" if self._phase == BACKWARD else "main"
        if self._workspace_bytes and thread not in self._threads_with_workspace:
            self._threads_with_workspace.add(thread)
            self.allocations[self._allocate(self._workspace_bytes, "cuBLAS")].category = "workspaces"

    def _end_recomputation(self) -> None:
        """Count what a recomputed part of forward leaves alive as saved: without checkpointing it would have been."""
        if self._recomputed:
            self._keep(self._recomputed)
            self._recomputed = []

    def _keep(self, indices: Iterable[int]) -> None:
        for index in indices:
            allocation = self.allocations[index]
            if allocation.live and allocation.category == "temporaries":
                allocation.category = "saved for backward"


def _adds_up_in_place(gradient: Tensor) -> bool:
    """Whether autograd, having two gradients for one tensor, would add the second to this one in place.

    It does so to dense gradients that nothing else holds (torch/csrc/autograd/input_buffer.cpp,
    `can_accumulate_inplace`), but never to fake tensors, since they are a subclass: so they make a sum that a GPU does
    not make. Gradients that Python code keeps for itself are not told apart; no step here keeps any.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
        return False
    storage = gradient.untyped_storage()
    sole = torch._C._storage_Use_Count(storage._cdata) == _THE_GRADIENT_AND_OURS
    return sole and gradient.nbytes == storage.nbytes()  # one that is expanded has fewer


_THE_GRADIENT_AND_OURS = 2
"""References to a storage that one tensor has, while `storage` above is another."""


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            yield from _tensors(output)
