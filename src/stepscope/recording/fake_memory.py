"""What a step would allocate, seen by running it on fake tensors: shapes, dtypes and lifetimes without memory.

Under PyTorch's `FakeTensorMode` every operator says what it would return, and nothing is computed. `FakeMemory` stands
above that mode and below autograd, so it sees each operator of forward, backward and optimizer, in order: a storage
that it has not seen is an allocation, and the storage's end is its release. Nothing about the model is assumed.

Most of what an operator's kernel allocates for itself stays unseen: the sorted indices of embedding's backward, the
accumulators of fused attention's. CuBLAS' workspace is counted once for forward's thread, and once for backward's.
"""

import contextlib
import contextvars
import copy
import functools
import itertools
import logging
import math
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from stepscope.core.errors import InputError
from stepscope.core.evidence import MemoryCategory
from stepscope.core.formulas import Summed, bytes_of_convolution
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.units import MIB
from stepscope.recording.precision import SCALED_CASTS, SCALED_PRODUCTS

_aten = torch.ops.aten
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", *SCALED_PRODUCTS)
_UNSCALES = _aten._amp_foreach_non_finite_check_and_unscale_.default
_READS_A_NUMBER = _aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default


def _copied(*places: int) -> Callable[[tuple[Any, ...]], int]:
    """Bytes of the arguments at these places that are not contiguous, of which a kernel makes a copy that is."""
    return lambda args: sum(args[i].nbytes for i in places if not args[i].is_contiguous())


_TAKES: dict[Any, Callable[[tuple[Any, ...]], int]] = {
    # aten/src/ATen/native/SoftMax.cpp, layer_norm.cpp, Embedding.cpp, LossNLL2d.cpp and those in cuda/
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default), _copied(0)),
    **dict.fromkeys((_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default), _copied(0, 1)),
    **dict.fromkeys((_aten.native_layer_norm.default, _aten._fused_rms_norm.default), _copied(0)),
    **dict.fromkeys((_aten.embedding_dense_backward.default, _aten.nll_loss2d_forward.default), _copied(0)),
    _aten._safe_softmax.default: lambda args: args[0].numel(),  # which rows are masked whole
    _aten._ctc_loss_backward.default: lambda args: args[6].nbytes,  # log beta, beside the log alpha that forward kept
    _aten._ctc_loss_backward.Tensor: lambda args: args[6].nbytes,
    _aten.soft_margin_loss_backward.default: lambda args: 2 * args[1].nbytes,  # exp(-target * input), in three steps
}
"""Bytes that operators' kernels take for themselves, by their arguments."""

_CONVOLVES = _aten.convolution.default
_CONVOLUTIONS = frozenset({_CONVOLVES, _aten.convolution_backward.default})
_SUMS = frozenset({_aten.sum.dim_IntList, _aten.mean.dim})
"""Operators whose kernels on CUDA take memory for parts of sums."""

_LOSSES = {
    **dict.fromkeys((_aten.mse_loss.default, _aten.smooth_l1_loss.default), (1, 1)),
    _aten.huber_loss.default: (0, 1),
    **dict.fromkeys((_aten.binary_cross_entropy.default, _aten.soft_margin_loss.default), (1, 0)),
    _aten.binary_cross_entropy_with_logits.default: (0, 2),
}
"""Losses whose mean keeps the storage of all elements', and whose kernels take as much: how often (ATen/native/Loss.cpp
and cuda/Loss.cu)."""

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
    name: str = ""
    """Where tensors are described: that of a parameter or a state, or the line of the user's code, and so are the next;
    empty where no name and no line is known."""
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class FakePhase:
    """A phase, as the half-open range of events in it."""

    name: str
    start: int
    end: int


class FakeMemory(TorchDispatchMode):
    """Records every allocation and release of what runs inside it; to be entered inside a FakeTensorMode.

    events: i for the allocation of allocations[i], ~i (which is -i - 1) for its release, in their order.
    """

    def __init__(self, *, workspace_bytes: int = 0, describes: bool = False) -> None:
        """workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices. describes: whether each
        allocation gets its shape, its dtype and a name, which takes time."""
        super().__init__()
        self._describes = describes
        self.allocations: list[FakeAllocation] = []
        self.events: list[int] = []
        self.phases: list[FakePhase] = []
        self.steps: list[tuple[int, list[FakePhase]]] = []
        """Before each step, how many events there were, and the phases of that before it."""
        self._workspace_bytes = workspace_bytes
        self._threads_with_workspace: set[str] = set()
        self._index: dict[int, int] = {}  # address of a live storage -> its allocation
        self._references: dict[int, weakref.ref[Any]] = {}
        self._phase = ""
        self.convolutions = 0
        """Calls of convolutions."""
        self.convolution_bytes = 0
        """The most bytes by which a convolution's operands are more than the workspace that was counted for it."""
        self._weights: set[int] = set()
        self._recomputed: list[int] = []
        self._overflow_flags: set[int] = set()
        self.sums: dict[int, Summed] | None = None
        """By the index of an allocation, of which sum it holds the parts; also of those that need none."""
        self.outside: list[Tensor] = []
        """Parameters that no module registers, which the step uses all the same."""
        self.grads_in_buckets = False
        """Whether gradients lie in what was counted before the step."""

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

    @property
    def begun(self) -> list[tuple[int, list[FakePhase]]]:
        """`steps`, and as if one more began now: last are all events, and the phases of the last step."""
        return [*self.steps, (len(self.events), self.phases)]

    def with_updates_of(self, other: "FakeMemory", asked: "FakeMemory", steps: int) -> "FakeMemory | None":
        """A copy whose first steps have another's optimizer phases, where both differ from `asked`: this one in all but
        these phases, and the other in them. None where these phases and the rest are not told apart so."""
        mine, others, both = (each._updates_apart(steps) for each in (self, other, asked))
        if mine is None or others is None or both is None or mine[1] != both[1] or others[0] != both[0]:
            return None
        copied = copy.copy(self)
        copied.allocations, copied.events, copied.steps, copied.sums = [], [], [self.steps[0]], {}
        updates = (other.events[start:end] for name, start, end in other._parts_of(steps) if name == OPTIMIZER)
        places: dict[tuple[FakeMemory, int], int] = {}
        phases: list[FakePhase] = []
        for name, start, end in self._parts_of(steps):
            source, first, events = self, len(copied.events), self.events[start:end]
            gradients = {self.allocations[~event].name: ~event for event in events if event < 0}
            if name == OPTIMIZER:
                source, events = other, next(updates)
            for event in events:
                index, key = max(event, ~event), (source, max(event, ~event))
                if event >= 0:
                    places[key] = len(copied.allocations)
                    copied.allocations.append(source.allocations[index])
                    if source.sums and index in source.sums:
                        copied.sums[places[key]] = source.sums[index]
                elif key not in places:  # a gradient, which has its parameter's name
                    key = (self, gradients[source.allocations[index].name])
                copied.events.append(places[key] if event >= 0 else ~places[key])
            if name is None:
                copied.steps.append((len(copied.events), phases))
                phases = []
            elif name:
                phases.append(FakePhase(name=name, start=first, end=len(copied.events)))
        copied.phases = copied.steps.pop()[1]
        return copied

    def _parts_of(self, steps: int) -> Iterator[tuple[str | None, int, int]]:
        """The events of the first steps in their order, by phases: the name of each, empty between them and None at a
        step's end, and where it begins and ends."""
        at = 0
        for end, phases in self.begun[1 : steps + 1]:
            for phase in phases:
                yield "", at, phase.start
                yield phase.name, phase.start, phase.end
                at = phase.end
            yield None, at, end
            at = end

    def _updates_apart(self, steps: int) -> "tuple[list[Any], list[Any]] | None":
        """What the first steps allocate and release outside their optimizer phases, and in them; None where one of the
        two releases what the other has allocated, but for named gradients."""
        apart: tuple[list[Any], list[Any]] = ([], [])
        numbers: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for name, start, end in self._parts_of(steps):
            of = name == OPTIMIZER
            for event in self.events[start:end]:
                made = self.allocations[max(event, ~event)]
                if event >= 0:
                    numbers[of][event] = len(numbers[of])
                    apart[of].append((made.operator, made.nbytes, made.on_device))
                elif ~event in numbers[of]:
                    apart[of].append(numbers[of][~event])
                elif of and made.category == "gradients" and made.name:
                    apart[of].append(("released", made.name, made.nbytes))
                else:
                    return None
            apart[of].append(name)
        return apart

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as allocated now, in the order given: they were made before the mode was entered."""
        for tensor in _parts(tensors):
            self._note(tensor, "held")

    def end(self) -> None:
        """Record no further event; what is released now belongs to no phase. Real parameters lose fake gradients."""
        for parameter in self.outside:
            parameter.grad = None if isinstance(parameter.grad, FakeTensor) else parameter.grad
        self._index.clear()
        self._references.clear()

    def label(
        self, tensors: Iterable[Tensor], category: MemoryCategory, *, on_device: bool = True, name: str = ""
    ) -> None:
        """Set the category of live tensors, and their name. Those that are not on the device belong to the host, and
        count nowhere."""
        for tensor in _parts(tensors):
            index = self._index.get(tensor.untyped_storage()._cdata)
            if index is None:
                continue
            self.allocations[index].category = category
            self.allocations[index].on_device = on_device
            self.allocations[index].name = name
            if isinstance(tensor, nn.Parameter):
                self._weights.add(index)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `_watched` does, and not the questions about devices, which are most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd asks for it several times an operator
        if any(kind is not FakeTensor and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that is made of others calls operators of theirs
        # The engine runs backward inside `AsOnCuda`, which else would be called for each size that is read.
        with torch._C.DisableTorchFunction():
            return self._watched(func, args, kwargs or {})

    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns; its outputs are noted."""
        if func is _READS_A_NUMBER:
            return self._number(args[0], func)
        # Gradients are enabled inside autograd's engine only where a checkpoint runs a part of forward again.
        again = torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0
        if func is _aten.add.Tensor and _adds_up_in_place(args[0]):
            func = _aten.add_.Tensor
        outputs = self._run(func, args, kwargs)
        whole, takes = _of_mean(func, args, outputs) if func in _LOSSES else (0, 0)
        for tensor in _tensors(outputs):
            index = self._note(tensor, func, whole)
            if index is not None:
                casts = func is _aten._to_copy.default and self._phase in (FORWARD, BACKWARD) and tensor.itemsize == 2
                if casts and self._index.get(args[0].untyped_storage()._cdata) in self._weights:
                    self.allocations[index].category = "cast copies"
                if again:
                    self._recomputed.append(index)
                else:
                    self._end_recomputation()
        thread = "backward" if self._phase == BACKWARD else "main"
        if takes := takes or (_TAKES[func](args) if func in _TAKES else 0):
            self._passes(takes, func)
        if self._workspace_bytes and func in _SUMS:
            self._sum(func, args)
        if func in _CONVOLUTIONS:
            self._convolve(func, args, outputs)
        needs_workspace = self._workspace_bytes and func._schema.name in _PRODUCTS
        if needs_workspace and thread not in self._threads_with_workspace:
            self._threads_with_workspace.add(thread)
            self.allocations[self._allocate(self._workspace_bytes, "cuBLAS")].category = "workspaces"
        if func is _UNSCALES:
            self._overflow_flags.add(args[1].untyped_storage()._cdata)
        return outputs

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns."""
        return _Call(func, args, kwargs).worked_out()

    def _number(self, tensor: Tensor, _func: Any) -> bool | float:
        """A stand-in for the value that a fake tensor lacks. A step asks for conditions, its count, and overflow."""
        if tensor.dtype == torch.bool:
            return False
        return 0.0 if tensor.untyped_storage()._cdata in self._overflow_flags else 1.0

    def _note(self, tensor: Tensor, func: Any, at_least: int = 0) -> int | None:
        """The index of the allocation, of `at_least` so many bytes, if this tensor's storage is new, else None."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._index:
            return None
        index = self._allocate(max(storage.nbytes(), at_least), func)
        if self._describes:
            made = self.allocations[index]
            made.shape, made.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            made.name = users_line()
        self._index[key] = index
        self._references[key] = weakref.ref(storage, lambda _: self._release(key))
        return index

    def _allocate(self, nbytes: int, func: Any) -> int:
        self.allocations.append(
            FakeAllocation(nbytes=nbytes, operator=str(func), phase=self._phase, on_device=not _OF_HOST.get())
        )
        index = len(self.allocations) - 1
        self.events.append(index)
        return index

    def _passes(self, nbytes: int, func: Any) -> None:
        """What an operator's kernel takes for itself."""
        index = self._allocate(nbytes, func)
        self.allocations[index].live = False
        self.events.append(~index)

    def _release(self, key: int) -> None:
        index = self._index.pop(key)
        del self._references[key]
        self.allocations[index].live = False
        self.events.append(~index)

    def _sum(self, func: Any, args: tuple[Any, ...]) -> None:
        """Count the parts of sums."""
        summed = Summed(tuple(args[0].shape), args[0].stride(), args[1], args[0].itemsize)
        if self.sums is not None:
            self.sums[len(self.allocations)] = summed
        if summed.nbytes or self.sums is not None:
            self._passes(summed.nbytes, func)

    def _convolve(self, func: Any, args: tuple[Any, ...], outputs: Any) -> None:
        """Count what cuDNN takes for a convolution, and for its gradients one after the other."""
        self.convolutions += 1
        if func is _CONVOLVES:
            (x, weight), y, how, (of_x, of_weight) = args[:2], outputs, args[3:], (outputs, None)
        else:
            (y, x, weight), how, (of_x, of_weight) = args[:3], args[4:], outputs[:2]
        stride, padding, groups = how[0], how[1], how[5]
        plain = math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and not any(padding) and groups == 1
        most = 0
        for made, sums in ((of_x, False), (of_weight, True)):
            if made is not None and self._workspace_bytes:
                taken = bytes_of_convolution(
                    x.shape, weight.shape, y.shape, x.itemsize, groups=groups, plain=plain, sums=sums
                )
                most = max(most, taken)
                self._passes(taken, func)
                self.allocations[-1].category = "workspaces"
        self.convolution_bytes = max(self.convolution_bytes, x.nbytes + weight.nbytes + y.nbytes - most)

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


def _of_mean(func: Any, args: tuple[Any, ...], loss: Tensor) -> tuple[int, int]:
    """Bytes that a loss keeps, and that its kernel takes, as `_LOSSES` says; none where it is not reduced."""
    elements = 0 if loss.dim() else torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    keeps, takes = _LOSSES[func]
    return keeps * elements * loss.itemsize, takes * elements * loss.itemsize


def _adds_up_in_place(gradient: Tensor) -> bool:
    """Whether autograd, having two gradients for one tensor, would add the second to this one in place.

    It does so to dense gradients that nothing else holds (torch/csrc/autograd/input_buffer.cpp), but never to fake
    tensors, since they are a subclass. Gradients that Python code keeps for itself are not told apart.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0 or gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    sole = torch._C._storage_Use_Count(storage._cdata) == _THE_GRADIENT_AND_OURS
    return sole and gradient.nbytes == storage.nbytes()  # one that is expanded has fewer


_THE_GRADIENT_AND_OURS = 2
"""References to a storage that one tensor has, while `storage` above is another."""


# What operators return, worked out once for arguments of equal sizes: PyTorch's fake mode takes some 150 microseconds
# for a call, and each of a model's equal layers makes the same calls.


@dataclass(frozen=True, slots=True)
class _Outputs:
    """What an operator returns for arguments of certain sizes."""

    written: int | None = None
    """The place of the argument that it writes into and returns; None where it makes new tensors."""
    made: tuple[tuple[Any, ...] | None, ...] | None = ()
    """Size, stride, dtype and device of each new tensor; None where PyTorch's fake mode must be asked each time."""
    several: type | None = None
    """The type of what holds them, where it returns several."""


_ASKED = _Outputs(made=None)
_outputs: dict[tuple[Any, ...], _Outputs] = {}
_stays_real: dict[tuple[tuple[Any, ...], int], bool] = {}
_kinds: dict[Any, Literal["view", "nothing", "kept", "asked"]] = {}
_BY_DATA = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view})
_ALIASES = frozenset({_aten._unsafe_view.default})
"""Operators that return another view of their argument, though their schema does not say so."""
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments whose values are all that there is to them; 1 and 1.0 are two."""


class _Call:
    """A call of an operator.

    tensors: all that it was given. key: all that the sizes of its outputs may depend on; None where that is more.
    """

    __slots__ = ("args", "func", "key", "kwargs", "mode", "tensors")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.tensors: list[Tensor] = []
        self.mode: FakeTensorMode | None = None
        described: list[Any] = [func, torch.get_default_dtype()]
        sayable = self._describe(args, described)
        for name, value in kwargs.items():
            described.append(name)
            sayable = self._describe((value,), described) and sayable
        self.key = tuple(described) if sayable else None

    def _describe(self, values: Iterable[Any], described: list[Any]) -> bool:
        sayable = True
        for value in values:
            kind = type(value)
            if kind is FakeTensor or kind is Tensor:
                self.tensors.append(value)
                mode = None
                if kind is FakeTensor:
                    mode = self.mode = value.fake_mode
                    sayable &= value.constant is None
                if value.layout is not torch.strided or value.dtype.is_complex:
                    sayable = False
                else:
                    place = (value.storage_offset(), value.device if mode is None else value.fake_device, mode is None)
                    described.append((value.shape, value.stride(), value.dtype, place))
            elif kind in _PLAIN:
                described.append((kind, value))
            elif kind is list or kind is tuple or kind is torch.Size:
                described.append(len(value))
                sayable &= self._describe(value, described)
            else:
                sayable = False
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        self.tensors.append(leaf)
                    if isinstance(leaf, FakeTensor):
                        self.mode = leaf.fake_mode
        return sayable

    def asked(self) -> Any:
        """What PyTorch's fake mode returns."""
        return self.func(*self.args, **self.kwargs)

    def worked_out(self) -> Any:
        """What it returns: fake tensors of the sizes that PyTorch's fake mode found for such arguments before."""
        kind = _kinds.get(self.func) or _kinds.setdefault(self.func, _kind(self.func))
        if kind == "asked" or self.key is None or self.mode is None or torch.is_inference_mode_enabled():
            return self.asked()
        if kind == "nothing":
            return None
        if kind == "view":
            return self._seen() if all(type(tensor) is FakeTensor for tensor in self.tensors) else self.asked()
        return self._kept(self.key, self.mode)

    def _kept(self, key: tuple[Any, ...], mode: FakeTensorMode) -> Any:
        """What it writes into, or new tensors of the sizes that are kept for the key."""
        known = _outputs.get(key)
        if known is None:
            before = [*map(_size, self.tensors)]
            outputs = self.asked()
            _outputs[key] = self._understood(outputs) if before == [*map(_size, self.tensors)] else _ASKED
            return outputs
        if known.made is None:
            return self.asked()
        if known.written is not None:
            return self.args[known.written]
        with torch._C._DisableTorchDispatch():
            made = [None if each is None else _new(mode, *each) for each in known.made]
        return known.several(made) if known.several else made[0]

    def _seen(self) -> Any:
        """Views, by the operator's kernel for tensors on meta: it reads no more than sizes."""
        mode, base = self.mode, self.tensors[0]
        assert mode is not None and isinstance(base, FakeTensor)
        with in_kernel_invocation_manager(mode):
            views = self.asked()
        if isinstance(views, Tensor):
            return _faked(views, mode, base.fake_device)
        return type(views)(_faked(view, mode, base.fake_device) for view in views)

    def _understood(self, outputs: Any) -> _Outputs:
        """The outputs, to be made again of their sizes alone; of none that share memory with another tensor."""
        written = next((place for place, value in enumerate(self.args) if value is outputs), None)
        if written is not None:
            return _Outputs(written=written) if type(outputs) is FakeTensor else _ASKED
        several = type(outputs) if type(outputs) in (list, tuple) else None
        results = outputs if several else (outputs,)
        tensors = [each for each in results if each is not None]
        simple = all(type(each) is FakeTensor and each.constant is None and is_simple(each) for each in tensors)
        if self.func._schema.is_mutable or not simple:
            return _ASKED
        mine = {tensor.untyped_storage()._cdata for tensor in self.tensors}
        new = [tensor.untyped_storage()._cdata for tensor in tensors]
        if len(set(new)) < len(new) or mine & set(new):
            return _ASKED
        made = tuple(
            None if each is None else (tuple(each.shape), each.stride(), each.dtype, each.fake_device)
            for each in results
        )
        return _Outputs(made=made, several=several)


def _kind(func: Any) -> Literal["view", "nothing", "kept", "asked"]:
    """What is known of an operator: it makes views, writes into lists and returns nothing, or returns what is kept."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or _BY_DATA & set(func.tags):
        return "asked"
    if any(argument.is_out for argument in func._schema.arguments):
        return "asked"
    if func._schema.name.startswith("aten::_foreach_") and not func._schema.returns:
        return "nothing"
    if not func.is_view and func not in _ALIASES:
        return "kept"
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return "asked" if composite else "view"


def _size(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def like(tensor: Tensor, mode: FakeTensorMode) -> FakeTensor:
    """A new fake tensor of a simple tensor's size, stride, dtype and device."""
    with torch._C._DisableTorchDispatch():
        return _new(mode, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def storage_of(tensor: Tensor) -> int | None:
    """What tells the storage of a strided tensor from others; None for another layout."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def is_simple(tensor: Tensor) -> bool:
    """Whether a tensor is a plain or fake one with a storage that it fills, so that its size and stride say all."""
    if type(tensor) not in (Tensor, nn.Parameter, FakeTensor) or tensor.layout is not torch.strided:
        return False
    if tensor.dtype.is_complex or tensor.storage_offset() or tensor.is_inference():
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() == (last + 1 if tensor.numel() else 0) * tensor.itemsize


def _new(
    mode: FakeTensorMode, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    return _faked(torch.empty_strided(size, stride, dtype=dtype, device="meta"), mode, device)


def _faked(meta: Tensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """A fake tensor, made as `FakeTensor.__new__` does it, which takes five times as long."""
    if device not in _attributes:
        _attributes[device] = FakeTensor(mode, meta, device).__dict__.copy()
    fake = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(_attributes[device], fake_mode=mode)
    return fake


_attributes: dict[torch.device, dict[str, Any]] = {}
"""Attributes of a new fake tensor on each device."""


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, and in place of one that is made of others (`__tensor_flatten__`, or sparse) those that it is made
    of."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())
        elif is_traceable_wrapper_subclass(tensor):
            yield from _parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield from _parts([outputs]) if outputs.layout is torch.sparse_coo else (outputs,)
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            yield from _tensors(output)


# Finds what a step of any module would allocate, on fake tensors, and the operators that fake tensors cannot follow.
#
# A user's step may look at a value: it leaves out a mask that hides nothing, or reads a count. So a small tensor keeps
# its values if it was computed from no fake tensor. Token ids, positions and masks are then real, and code that reads
# them takes its real path. Tensors that depend on weights and activations are fake. If an operator needs a value of
# one, or the shape of its output depends on one, it is named: it is refused, or counted at its largest.


LARGEST_REAL = 64 * MIB
"""Bytes up to which integers and conditions keep their values, if they were computed from no fake tensor."""

LARGEST_REAL_FLOATS = MIB
"""Bytes up to which floating numbers keep their values, if they were computed from no fake tensor."""


_OURS = frozenset({"aten", "prims", "prim", "profiler", "inductor", "transformers", "torchvision", "torch_attn"})
_OF_BITSANDBYTES = (
    "dequantize_4bit",
    "dequantize_blockwise",
    "optimizer_update_32bit",
    "optimizer_update_8bit_blockwise",
)
_KNOWN = frozenset({*SCALED_PRODUCTS, *SCALED_CASTS, *(f"bitsandbytes::{name}" for name in _OF_BITSANDBYTES)})
"""Operators that are not PyTorch's, and whose kernels take no memory."""
_GROUPED = torch.ops.aten._grouped_mm.default
_HOUSES = (
    *(str(Path(file).parent) for file in (torch.__file__, sys.modules["stepscope"].__file__ or "")),
    contextlib.__file__,
)


class FakeMemoryOfOwn(FakeMemory):
    """FakeMemory for any step, to be entered inside a FakeTensorMode that takes real tensors. name: in messages."""

    def __init__(self, *, name: str, workspace_bytes: int = 0, describes: bool = False) -> None:
        super().__init__(workspace_bytes=workspace_bytes, describes=describes)
        self._name = name
        self.sums = {}
        self.at_most: Counter[str] = Counter()
        """Calls of operators whose output was counted at its largest, since its shape depends on data."""
        self.custom: Counter[str] = Counter()
        """Calls of operators that are not PyTorch's, whose own memory nobody knows."""
        self.recurrent = 0
        """Calls of recurrent layers, as CUDA's would be."""
        self.grouped_flex = 0
        """Calls of FlexAttention whose keys several query heads share."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(func, args, kwargs)
        for tensor in call.tensors:
            if type(tensor) is not FakeTensor:
                self._meet(tensor)
        if call.mode is None and self._stays_real(call):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            if func is _GROUPED:
                outputs = _grouped(*args, **kwargs)
            elif func is _aten.clone.default and args[0].layout is torch.sparse_coo:
                outputs = _sparse_clone(args[0])
            elif func is _aten._coalesce.default:  # of which fake tensors lose the elements
                raise UnsupportedFakeTensorException(str(func))
            else:
                outputs = call.worked_out()
        except (DynamicOutputShapeException, DataDependentOutputException):
            outputs = self._at_most(func, args)
        except UnsupportedOperatorException as error:
            why = "has no fake implementation: register one by torch.library.register_fake"
            raise self._refused(func, why) from error
        except UnsupportedFakeTensorException as error:
            why = "works on sparse tensors, which fake tensors cannot follow: measure it with stepscope run"
            raise self._refused(func, why) from error
        if func._schema.name in _TAKES_OF_OTHERS:
            self._passes(_TAKES_OF_OTHERS[func._schema.name](*args), func)
        elif func.namespace not in _OURS and func._schema.name not in _KNOWN:
            self.custom[str(func)] += 1
        return outputs

    def _meet(self, tensor: Tensor) -> None:
        """Count a tensor that was there before the step and is seen now, as one in a list or of a function's closure.
        A single number stays on the host."""
        if tensor.layout is torch.strided and (index := self._note(tensor, "held")) is not None:
            trained = tensor.is_leaf and tensor.requires_grad
            self.allocations[index].category = "parameters" if trained else "there before"
            self.allocations[index].on_device = trained or bool(tensor.dim())
            if trained:
                self._weights.add(index)
                self.outside.append(tensor)

    def _stays_real(self, call: _Call) -> bool:
        """Whether an operator that reads no fake tensor may really run: its output is small, or there is none."""
        if call.tensors and call.func._schema.is_mutable:
            return True
        # An optimizer draws numbers to round by, of each parameter's size: nothing depends on them.
        limit = LARGEST_REAL_FLOATS if self._phase == OPTIMIZER else LARGEST_REAL
        if call.key is not None and (call.key, limit) in _stays_real:
            return _stays_real[call.key, limit]
        try:
            outputs = call.asked()
        except (DynamicOutputShapeException, DataDependentOutputException):
            return True
        results = [*_parts(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))]
        small = all(
            tensor.nbytes <= (LARGEST_REAL_FLOATS if tensor.is_floating_point() else limit) for tensor in results
        )
        if call.key is not None:
            _stays_real[call.key, limit] = small
        return small

    def _number(self, tensor: Tensor, func: Any) -> bool | float:
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return func(tensor)
        if self._phase == OPTIMIZER or not self._phase:
            return super()._number(tensor, func)
        if tensor.dtype == torch.bool and _distribution_checks():
            return True
        why = "reads a value that depends on the weights, as .item(), float() and a condition do"
        raise self._refused(func, f"{why}: leave it out, let a loss stay a tensor, or measure: stepscope run")

    def _at_most(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The largest output that an operator may have, where its shape depends on data."""
        packet, tensor = func.overloadpacket, args[0] if args else None
        if not isinstance(tensor, Tensor):
            raise self._refused(func, "has an output whose shape depends on data")
        if packet is _aten._ctc_loss and not isinstance(args[3], FakeTensor):
            return _ctc(tensor, *args[1:4])
        if packet is _aten.nonzero:
            largest: Any = torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64)
        elif packet is _aten.masked_select:
            largest = tensor.new_empty(tensor.numel())
        elif packet is _aten._ctc_loss:
            largest = _ctc(tensor, *args[1:4])
        elif packet is _aten.index and all(index is None or isinstance(index, Tensor) for index in args[1]):
            largest = func(tensor, list(_whole(args[1])))
        else:
            raise self._refused(func, "has an output whose shape depends on data")
        self.at_most[str(func)] += 1
        return largest

    def _refused(self, func: Any, why: str) -> InputError:
        line = users_line()
        return InputError(f"{self._name} cannot be predicted: {func}{line and f' ({line})'} {why}")


def _grouped(
    rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The output of a grouped product, in any dtype: PyTorch's own fake implementation takes bf16 alone. Its rows are
    padded to 16 bytes (aten/src/ATen/native/GroupedMMUtils.h)."""
    shape = [rows.shape[-2], matrices.shape[-1]]
    if rows.dim() == matrices.dim():
        shape = [offs.shape[0] if rows.dim() == 2 and offs is not None else rows.shape[0], *shape]
    dtype = out_dtype or rows.dtype
    unit = 16 // dtype.itemsize
    width = -(-shape[-1] // unit) * unit
    return rows.new_empty([*shape[:-1], width], dtype=dtype)[..., : shape[-1]]


def _sparse_clone(tensor: Tensor) -> Tensor:
    """A copy of a sparse tensor, as autograd accumulates it: PyTorch's own fake implementation loses its elements."""
    indices, values = tensor._indices().clone(), tensor._values().clone()
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)


def _dequantised(rows: Tensor, _: Tensor, shape: Sequence[int], scales: Tensor, block: int, *others: Any) -> int:
    """Bytes of the weights and their fp32 scales that bitsandbytes' product of 4-bit weights makes for itself: each
    time, also where few rows are multiplied in a kernel without them (bitsandbytes/backends/default/ops.py)."""
    weights = math.prod(shape)
    nested = len(others) > 2 and others[2] is not None
    return weights * rows.itemsize + (weights // block * scales.itemsize if nested else 0)


def _joined(x: Tensor, weights: Sequence[Tensor], _biases: Sequence[Tensor]) -> int:
    """Bytes of the weights that a product of joint projections casts, and of its output, which is counted after it."""
    numbers = sum(weight.numel() for weight in weights)
    outputs = x.numel() // x.shape[-1] * numbers // x.shape[-1]
    return (numbers + outputs) * x.itemsize if weights[0].dtype != x.dtype else 0


def _joined_backward(dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], *_: Any) -> int:
    """Bytes of the gradients side by side, if they do not lie so, of x's, and of the weights' before its cast."""
    *starts, width = itertools.accumulate((dy.shape[1] for dy in dys), initial=0)
    rows = {(storage_of(dy), dy.stride(), dy.storage_offset() - start) for dy, start in zip(dys, starts, strict=True)}
    copied = sum(dy.nbytes for dy in dys) if len(rows) > 1 or dys[0].stride(0) != width else 0
    return copied + x.nbytes + sum(weight.numel() for weight in weights) * x.itemsize


_TAKES_OF_OTHERS: dict[str, Callable[..., int]] = {
    "bitsandbytes::gemm_4bit": _dequantised,
    "stepscope::joint_projections": _joined,
    "stepscope::joint_projections_backward": _joined_backward,
}
"""Bytes that kernels of operators that are not PyTorch's take for themselves, by their arguments."""


def _ctc(log_probabilities: Tensor, targets: Tensor, _: Any, lengths: Any) -> tuple[Tensor, Tensor]:
    """The losses (N,) and log alpha (N, T, 2 L + 1) of log probabilities (T, N, C). L is the longest target: the most
    that T admits where its length is not known (aten/src/ATen/native/cuda/LossCTC.cu)."""
    steps, samples = log_probabilities.shape[:2]
    longest = min(steps, targets.shape[1] if targets.dim() == 2 else targets.numel())
    if isinstance(lengths, Tensor) and not isinstance(lengths, FakeTensor):
        with unset_fake_temporarily():
            longest = int(lengths.max())
    elif not isinstance(lengths, Tensor):
        longest = max(lengths)
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(samples, steps, 2 * longest + 1)


def _whole(indices: list[Tensor | None]) -> Iterator[Tensor | None]:
    """The indices, where each condition is replaced by the places of all its elements."""
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            yield index
        else:
            yield from (torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.dim()))


def _distribution_checks() -> bool:
    """Whether the value that is read says whether a distribution's parameters are valid: otherwise it would raise."""
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(file.startswith(_DISTRIBUTIONS) for file in itertools.islice(frames, 12))


_DISTRIBUTIONS = str(Path(torch.__file__).parent / "distributions")


def users_line() -> str:
    """The line of the user's code that is running, as file:line; empty if none is found."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


@functools.cache
def _is_users(file: str) -> bool:
    return Path(file).is_file() and not file.startswith(_HOUSES)
