"""The step of a watched loop, traced on fake tensors at three sizes, from which `fit --from` predicts it at others.

One shape does not tell a sequence of 512 from a width of 512. So when a watch ends, a copy of the model without its
values runs a step at the loop's sizes, and at two others that have no factor in common. What each allocation is of the
batch and the sequence then shows: its bytes are c B^i S^j, or the sum of two such terms, and are the same numbers at
all three sizes. What is kept is the order of allocations and releases with these terms.
"""

import contextlib
import gc
import inspect
import io
import itertools
import math
import os
import pickle
import sys
import threading
import time
import types
import weakref
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.allocations.prediction.fit import SEQUENCE_STEP, Budget, FakeEstimate, Fit, fit_of_run, judge
from stepscope.core.errors import InputError, named_line
from stepscope.core.files import LARGEST_DOCUMENT_BYTES, decode_document, read_document
from stepscope.core.precisions import Dtype
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.run import Run
from stepscope.core.units import format_bytes
from stepscope.core.workloads import FactoryWorkload, Input, UserModel, WatchedWorkload
from stepscope.engine.fake_module import STEPS_BEFORE, FakePredictor, WatchedModule, watch_module
from stepscope.engine.request import Tell
from stepscope.recording.fake_memory import LARGEST_REAL, FakeAllocation, FakeMemoryOfOwn, FakePhase
from stepscope.recording.step import Recorder
from stepscope.recording.watch.loop import LoopStep, weakly
from stepscope.recording.watch.phases import Phases
from stepscope.training.user_module.module_step import UserModule

# A copy of a loop's step without its values: the model, the optimizer and a batch.


class Sketch(Recorder):
    """Looks at one step of a loop, and copies what it needs to run it on fake tensors. Keeps nothing of it alive."""

    _root: nn.Module | None = weakly(or_none=True)
    _optimizer: torch.optim.Optimizer | None = weakly(or_none=True)

    def __init__(self, loop: LoopStep, phases: Phases, inside_compiled: Callable[[], bool]) -> None:
        """inside_compiled: tells whether a step ends inside of what is compiled, which must meet nothing new."""
        self._inside_compiled = inside_compiled
        self._phases, self._root, self._optimizer = phases, loop.forward_module, loop.optimizer
        self.accumulation = loop.micro_batches
        self.why_not: str | None = _why_not(loop)
        """Why there is no copy; None where there is one, or will be."""
        self.batch: Any = None
        """What forward was called with, of the largest micro-batch."""
        self._returned: list[weakref.ref[Tensor]] = []
        self._keeps_output = self._keeps_gradients = self._zeroes_late = False
        self._packed: _Packed | None = None

    def step_begins(self) -> None:
        if self.why_not is None and self._inside_compiled():
            self.why_not = "its step is compiled"
        if self.why_not is None:
            self._phases.keeps_inputs, self._phases.heard = True, self._hear
            self._forwards = self._backwards = 0

    def phase_begins(self, name: str) -> None:
        root, inputs = self._root, self._phases.inputs
        if self.why_not is not None or root is None:
            return
        has_gradients = any(parameter.grad is not None for parameter in root.parameters())
        if name == FORWARD and inputs is not None:
            self._keeps_gradients = self._keeps_gradients or (not self._forwards and has_gradients)
            self._forwards += 1
            batch = _batch(root, *inputs)
            if _elements(batch) > _elements(self.batch):
                self.batch = batch
        elif name == BACKWARD:
            self._zeroes_late = self._zeroes_late or (not self._backwards and not has_gradients)
            self._backwards += 1
        elif name == OPTIMIZER:
            left = [each() for each in self._returned]
            self._keeps_output = any(each is not None and each.numel() > 1 for each in left)

    def step_ends(self) -> None:
        self._phases.keeps_inputs, self._phases.heard = False, None
        if self.why_not is not None or self._packed is not None:
            return
        try:
            self._copy()
        except Exception as error:  # whatever a module of the user's does when it is copied
            self.why_not = f"its model cannot be copied ({named_line(error, 160)})"

    def _hear(self, output: Any) -> None:
        """Note what a forward returned."""
        values = [each for leaf in tree_leaves(output) for each in (leaf, *getattr(leaf, "__dict__", {}).values())]
        tensors = [each for each in values if isinstance(each, Tensor)]
        self._returned = [weakref.ref(each) for each in tensors]
        if not any(each.numel() == 1 and each.requires_grad for each in tensors):
            self.why_not = _LOSS_OUTSIDE

    def _copy(self) -> None:
        root, optimizer = self._root, self._optimizer
        if root is None or optimizer is None or self.batch is None:
            self.why_not = _ENDED_BEFORE
            return
        kept = {name: value for name, value in vars(optimizer).items() if name not in ("step", "zero_grad", "state")}
        kept |= {
            name: OrderedDict[int, Any]() for name, value in kept.items() if isinstance(value, OrderedDict)
        }  # hooks
        self._packed = _Packed((root, type(optimizer), kept))

    @property
    def sizes(self) -> tuple[int, int | None]:
        """The samples in a micro-batch, and the length of its sequences; None where it has no token ids."""
        tensors = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise InputError("its batch has no tensor" if self.batch is not None else _ENDED_BEFORE)
        ids = next((t for t in tensors if t.dim() == 2 and t.dtype in (torch.int64, torch.int32)), None)
        return tensors[0].shape[0], ids.shape[1] if ids is not None and ids.shape[1] >= FEWEST else None

    def user_module(self, batch_size: int, seq_len: int | None) -> UserModule:
        """The model with a batch of these sizes, to be run on fake tensors; made anew for each call."""
        assert self._packed is not None
        model, kind, kept = self._packed.made()
        optimizer: torch.optim.Optimizer = kind.__new__(kind)
        vars(optimizer).update(kept, state=defaultdict[Tensor, Any](dict))
        converts = sum(_own_forward(module) for module in model.modules() if "forward" in vars(module)) > 0
        held: list[Any] = []
        zero = optimizer.zero_grad
        if self._keeps_gradients:
            vars(optimizer)["zero_grad"] = lambda set_to_none=True: None

        def loss(output: Any) -> Any:
            if converts and torch.is_autocast_enabled("cpu"):
                convert: Any = sys.modules["accelerate.utils.operations"]
                output = convert.convert_to_fp32(output)
            held[:] = [output] if self._keeps_output else []
            if self._keeps_gradients and self._zeroes_late:
                zero(set_to_none=True)
            return output

        own, length = self.sizes

        def resized(leaf: Any) -> Any:
            return _resized(leaf, own, length, batch_size, seq_len)

        batch = tree_map(resized, self.batch)
        return UserModule(name="the loop's model", module=model, batches=[batch], loss=loss, optimizer=optimizer)


FEWEST = 8
"""The shortest sequence that is told from other sizes."""


_LOSS_OUTSIDE = "its loss is computed outside of the model, and not returned by its forward"
_ENDED_BEFORE = "the loop ended before its model was looked at"
_LEFT_NONE = "its watch left none, as of an older stepscope or a process that was killed"
_INTERRUPTED = "it was interrupted while its model was traced"
_GIVE = "give its model, as in --module train.py:make"
_REMEDIES = {
    **dict.fromkeys((_ENDED_BEFORE, _LEFT_NONE, _INTERRUPTED), f"watch the loop again, or {_GIVE}"),
    _LOSS_OUTSIDE: "give a factory that returns (model, batch, loss), as in --module train.py:make, or let its forward "
    "return the loss and watch it again",
}
"""What helps where a loop was not traced, by why; of all else that a factory gives its model."""


def _why_not(loop: LoopStep) -> str | None:
    """Why a step of this loop cannot be run on fake tensors; None where it may."""
    if len(loop.roots) != 1 or len(loop.optimizers) != 1 or loop.in_backward or loop.evaluations > 1:
        return "a step of it is not one model's forward, backward and one optimizer's step"
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        return "several processes share its step"
    if loop.compiled:
        return "its model is compiled"
    if any(is_traceable_wrapper_subclass(each) for each in loop.forward_module.parameters()):
        return "its parameters are no plain tensors"
    return None


class _Packed:
    """Objects as bytes: no copy of them lives until it is made. Of a tensor its size is kept, and not its values; code
    is kept by reference, since a script's own has no name to be found by."""

    def __init__(self, thing: Any) -> None:
        self._stream, self._beside = io.BytesIO(), list[Any]()
        places: dict[int, int] = {}

        def place(value: Any) -> int | None:
            key, is_tensor = id(value), isinstance(value, Tensor)
            if not is_tensor and not isinstance(value, _BY_REFERENCE):
                return None
            if key not in places:
                places[key] = len(self._beside)
                self._beside.append(_Empty(value) if is_tensor else value)
            return places[key]

        pickler: Any = pickle.Pickler(self._stream, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = place
        pickler.dump(thing)

    def made(self) -> Any:
        """A new copy, with tensors whose memory in the host is never touched."""
        made: dict[int, Any] = {}

        def load(place: int) -> Any:
            beside = self._beside[place]
            if place not in made:
                made[place] = beside.made() if isinstance(beside, _Empty) else beside
            return made[place]

        self._stream.seek(0)
        unpickler: Any = pickle.Unpickler(self._stream)
        unpickler.persistent_load = load
        return unpickler.load()


_BY_REFERENCE: tuple[Any, ...] = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, weakref.ref)


class _Empty:
    """A tensor's size, stride and dtype; of small integers and conditions the values."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            raise InputError(f"it holds a {type(tensor).__name__} of {tuple(tensor.shape)}, which is no plain tensor")
        self._is_parameter, self._needs_gradient = isinstance(tensor, nn.Parameter), tensor.requires_grad
        self._size, self._dtype = (tensor.shape, tensor.stride()), tensor.dtype
        floats = tensor.is_floating_point() or tensor.is_complex()
        self._values = None if floats or tensor.nbytes > LARGEST_REAL else tensor.detach().to("cpu", copy=True)

    def made(self) -> Tensor:
        if self._values is not None:
            return nn.Parameter(self._values.clone(), False) if self._is_parameter else self._values.clone()
        tensor = torch.empty_strided(*self._size, dtype=self._dtype, device="cpu")
        if self._is_parameter:
            return nn.Parameter(tensor, self._needs_gradient)
        return tensor.requires_grad_(self._needs_gradient)


def _own_forward(module: nn.Module) -> bool:
    """Take off a forward that was put over the module's own by Accelerate, which runs it under autocast; returns
    whether it was. Raises InputError for any other that belongs to the loop's own module."""
    forward = vars(module)["forward"]
    if "_original_forward" in vars(module):
        del vars(module)["forward"]
        return True
    if not isinstance(forward, types.MethodType) and getattr(forward, "__closure__", None):
        raise InputError(f"the forward of {type(module).__name__} was put in its place by other code")
    return False


def _batch(root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What forward was called with, as a batch of copies without values."""
    if args and kwargs:
        bound = inspect.signature(root.forward).bind(*args, **kwargs).arguments
        args, kwargs = (), bound
    batch = dict(kwargs) if kwargs else args

    def copied(leaf: Any) -> Any:
        return _Empty(leaf).made() if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, batch)


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) if batch is not None else -1


def _of_sizes(
    shape: Sequence[int], own: int, length: int | None, batch_size: int, seq_len: int | None
) -> tuple[int, ...]:
    """The shape of a batch's tensor at other sizes: its first size is the batch, others of the sequence's length are
    that, and so is the only one of a tensor that all samples share."""
    first, rest = shape[:1], shape[1:]
    if first == (own,) and not (len(shape) == 1 and own == length):
        first = (batch_size,)
    elif first == (length,) and seq_len:
        first = (seq_len,)
    return (*first, *(seq_len if seq_len and size == length else size for size in rest))


def _resized(leaf: Any, own: int, length: int | None, batch_size: int, seq_len: int | None) -> Any:
    """A tensor of the batch at other sizes: what it holds is repeated and cut."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return leaf
    shape = _of_sizes(leaf.shape, own, length, batch_size, seq_len)
    if leaf.is_floating_point():
        return torch.empty(shape, dtype=leaf.dtype, requires_grad=leaf.requires_grad)
    times = [-(-size // max(1, before)) for size, before in zip(shape, leaf.shape, strict=True)]
    return leaf.repeat(times)[tuple(map(slice, shape))].clone()


# The step at three sizes, and what each of its allocations is of them.


class Term(msgspec.Struct, frozen=True, array_like=True):
    """A term c B^i S^j P^k of an allocation's bytes, c being a fraction, and P the length padded to 32."""

    exponents: tuple[int, int, int]
    numerator: int
    denominator: int = 1

    def at(self, batch_size: int, seq_len: int) -> Fraction:
        return Fraction(self.numerator * _power(self.exponents, batch_size, seq_len), self.denominator)


def _power(exponents: tuple[int, int, int], batch_size: int, seq_len: int) -> int:
    of_batch, of_sequence, of_padded = exponents
    return batch_size**of_batch * seq_len**of_sequence * _padded(seq_len, PADDED) ** of_padded


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The allocations and releases of a step of one precision (`engine/fake_module.py`), sizes as terms."""

    dtype: Dtype
    built: int
    events: list[int]
    names: list[str]
    """Operators, phases and categories, by their places."""
    kinds: list[tuple[int, int, int, bool]]
    """An allocation's operator, phase and category by their places in `names`, and whether it is on the device."""
    sums: list[tuple[Term, ...]]
    sizes: list[int]
    """An allocation's bytes, by the place of their sum in `sums`."""
    steps: list[tuple[int, list[tuple[str, int, int]]]]
    """Before each step, how many events there were, and the phases of the step before; last of the last one."""
    convolutions: int = 0
    convolution_bytes: int = 0
    """As in Unseen, for each sample and place in the sequence."""
    custom: list[str] = []
    at_most: list[str] = []
    recurrent: int = 0
    grouped_flex: int = 0
    parameter_bytes: int

    def at(self, batch_size: int, seq_len: int, steps: int) -> WatchedModule:
        """The step at these sizes, after so many steps."""
        bytes_of = [math.ceil(max(0, sum(term.at(batch_size, seq_len) for term in each))) for each in self.sums]
        end, phases = self.steps[steps]
        events = self.events[:end]
        made = sum(event >= 0 for event in events)
        watch = FakeMemoryOfOwn(name="the loop's model")
        categories: list[Any] = [*self.names]
        watch.allocations = [
            FakeAllocation(
                nbytes=bytes_of[size],
                operator=self.names[operator],
                phase=self.names[phase],
                category=categories[category],
                on_device=on_device,
            )
            for (operator, phase, category, on_device), size in zip(self.kinds[:made], self.sizes, strict=False)
        ]
        watch.events, watch.phases = events, _phases(phases)
        watch.steps = [(count, _phases(each)) for count, each in self.steps[:steps]]
        watch.convolutions = self.convolutions
        watch.convolution_bytes = self.convolution_bytes * batch_size * seq_len
        watch.custom.update(self.custom)
        watch.at_most.update(self.at_most)
        watch.recurrent, watch.grouped_flex = self.recurrent, self.grouped_flex
        usual = FactoryWorkload(model=UserModel(name=""), factory="")
        return WatchedModule(
            watch=watch, built=self.built, parameter_bytes=self.parameter_bytes, workload=usual, alike=True
        )


def _phases(phases: Sequence[tuple[str, int, int]]) -> list[FakePhase]:
    return [FakePhase(name=name, start=start, end=end) for name, start, end in phases]


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a loop's step at other sizes than its own."""

    why_not: str = ""
    """Why nothing is; empty where something is."""
    batch_size: int = 1
    seq_len: int | None = None
    """The sizes at which the loop ran; None where its sequences are not told from other sizes."""
    accumulation: int = 1
    longest: int | None = None
    """The positions that the model has; None where none are known."""
    steps: tuple[TracedStep, ...] = ()
    left: dict[str, str] = {}
    """Precisions of which nothing is known, with the reasons."""


TRACED_FILE = "traced-step.json.z"
"""Beside run.json: what `Traced` holds, compressed by zlib."""
ENOUGH_S = 10.0
"""Seconds after which no further precision is traced."""
UNIT, PADDED = 8, 32
"""Lengths are traced in multiples of the first, to which kernels pad masks; some pad what they keep to the second."""
_EXPONENTS = (
    (0, 0, 0),
    (1, 1, 0),
    (1, 0, 0),
    (0, 1, 0),
    (1, 2, 0),
    (0, 2, 0),
    (1, 0, 1),
    (2, 0, 0),
    (2, 1, 0),
    (0, 0, 1),
)
"""Exponents of the batch, the sequence and the padded sequence in a term, in the order in which they are tried."""
_OTHERS: tuple[Dtype, ...] = ("bf16", "fp32", "bf16-pure")
"""Precisions that are traced besides the loop's own."""
_STEPS = 3
_SAMPLES = (7, 2, 11)
"""Samples in the micro-batches that are traced besides the loop's own."""


_SAID_AFTER_S = 2.0


def trace(sketch: Sketch, workload: WatchedWorkload) -> Traced:
    """Trace the loop's step, in its own precision and in others that its parameters may have. Where that fails, the
    result says why."""
    if sketch.why_not is not None:
        return Traced(why_not=sketch.why_not)
    begun_s, random = time.perf_counter(), torch.get_rng_state()
    frozen = gc.get_freeze_count() > 0  # by the script: then it is not for us to thaw
    if not frozen:
        gc.freeze()  # a collection after each step that is run would go through all that the script has made
    try:
        own, length = sketch.sizes
        samples = [own, *[size for size in _SAMPLES if size != own][:2]]
        points = [(size * sketch.accumulation, at) for size, at in zip(samples, _lengths(length), strict=True)]
        found: dict[str, TracedStep] = {}
        left: dict[str, str] = {}
        longest: int | None = None
        for dtype in _dtypes(sketch, workload.dtype):
            if found and time.perf_counter() - begun_s > ENOUGH_S:
                left[dtype] = "to trace the others took long"
                continue
            try:
                found[dtype], longest = _traced_step(sketch, dtype, points)
            except InputError as error:
                if not found:
                    raise
                left[dtype] = str(error)
    except KeyboardInterrupt:
        return Traced(why_not=_INTERRUPTED)
    except Exception as error:  # whatever the user's model does on fake tensors
        return Traced(why_not=named_line(error, 200))
    finally:
        if not frozen:
            gc.unfreeze()
        torch.set_rng_state(random)
    return Traced(
        batch_size=points[0][0],
        seq_len=length,
        accumulation=sketch.accumulation,
        longest=longest,
        steps=tuple(found.values()),
        left=left,
    )


def _lengths(length: int | None) -> tuple[int | None, int | None, int | None]:
    """The lengths that are traced: the loop's own, and two others whose eighths are odd and have no factor in common,
    so that what kernels pad to larger units is told from what they do not."""
    if length is None:
        return None, None, None
    own = _padded(length, UNIT)
    eighths = [3 * own // 64 | 1, 5 * own // 64 | 1] if own >= 64 else [each for each in (3, 5, 7) if 8 * each != own]
    while math.gcd(*eighths[:2]) > 1:
        eighths[1] += 2
    return own, UNIT * eighths[0], UNIT * eighths[1]


def _padded(length: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-length // unit) * unit


def _dtypes(sketch: Sketch, own: Dtype) -> Iterator[Dtype]:
    """The precisions to trace, the loop's own first. Parameters that are not all fp32 have been chosen one by one."""
    first: Dtype = "fp32" if own == "tf32" else own
    yield first
    _, length = sketch.sizes
    model = sketch.user_module(1, length).module
    if {parameter.dtype for parameter in model.parameters()} == {torch.float32}:
        for other in _OTHERS:
            if other != first:
                yield other


def _traced_step(
    sketch: Sketch, dtype: Dtype, points: Sequence[tuple[int, int | None]]
) -> tuple[TracedStep, int | None]:
    """The step of one precision, from runs at these batches and lengths; and the positions that the model has."""
    workload = FactoryWorkload(
        model=UserModel(name=""), factory="", dtype=dtype, accumulation=sketch.accumulation, optimizer="",
        by_factory=("optimizer",),
    )  # fmt: skip
    runs: list[WatchedModule] = []
    positions: list[list[int]] = []
    for batch_size, seq_len in points:
        user_module = sketch.user_module(batch_size, seq_len)
        with torch.enable_grad(), torch.device("cpu"), _OnTheHost():
            positions.append(_positions(user_module.module, seq_len))
            runs.append(watch_module(user_module, workload, "cuda", steps=_STEPS))
    if len({_order(run) for run in runs}) > 1:
        raise InputError("its step calls other operators at other sizes")
    watch = runs[0].watch
    known: dict[tuple[int, ...], int] = {}
    sums: list[tuple[Term, ...]] = []
    sizes: list[int] = []
    all_bytes = zip(*([each.nbytes for each in run.watch.allocations] for run in runs), strict=True)
    for nbytes, allocation in zip(all_bytes, watch.allocations, strict=True):
        if nbytes not in known:
            known[nbytes] = len(sums)
            sums.append(_terms(nbytes, points, allocation.operator))
        sizes.append(known[nbytes])
    names = list(dict.fromkeys(name for a in watch.allocations for name in (a.operator, a.phase, a.category)))
    place = {name: i for i, name in enumerate(names)}
    traced = TracedStep(
        dtype=dtype,
        built=runs[0].built,
        events=watch.events,
        names=names,
        kinds=[(place[a.operator], place[a.phase], place[a.category], a.on_device) for a in watch.allocations],
        sums=sums,
        sizes=sizes,
        steps=[(count, [(each.name, each.start, each.end) for each in phases]) for count, phases in watch.begun],
        convolutions=watch.convolutions,
        convolution_bytes=max(
            -(-run.watch.convolution_bytes // (batch * (length or 1)))
            for run, (batch, length) in zip(runs, points, strict=True)
        ),
        custom=sorted(watch.custom),
        at_most=sorted(watch.at_most),
        recurrent=watch.recurrent,
        grouped_flex=watch.grouped_flex,
        parameter_bytes=runs[0].parameter_bytes,
    )
    return traced, min(itertools.chain(*positions), default=None)


def _order(run: WatchedModule) -> tuple[Any, ...]:
    """What tells the steps of two sizes apart: their operators, phases, and events. What autocast has cast is released
    together, in the order of addresses."""
    events: list[int] = []
    for releases, group in itertools.groupby(run.watch.events, lambda event: event < 0):
        several = [*group]
        events += sorted(several) if releases else several
    phases = [(each.name, each.start, each.end) for each in run.watch.phases]
    return tuple(events), tuple(each.operator for each in run.watch.allocations), tuple(phases)


class _OnTheHost(TorchFunctionMode):
    """A mode in which what a model makes on the device that its script names is made on the CPU, where the rest is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        kwargs = {name: _on_the_host(value) for name, value in named.items()}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(map(_on_the_host, args))
        return func(*args, **kwargs)


def _on_the_host(value: Any) -> Any:
    """A GPU's device, or its name, as the CPU; any other value itself."""
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


def _positions(module: nn.Module, seq_len: int | None) -> list[int]:
    """A list that gets the rows of each table that the model looks up once for each place of a sequence."""
    config: Any = getattr(module, "config", None)
    said = getattr(config, "max_position_embeddings", None)
    rows = [said] if isinstance(said, int) else []

    def look(table: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(table, nn.Embedding) and args and args[0].numel() == seq_len:
            rows.append(table.num_embeddings)

    for part in module.modules():
        if isinstance(part, nn.Embedding) and seq_len:
            part.register_forward_pre_hook(look)
    return rows


def _terms(nbytes: tuple[int, ...], points: Sequence[tuple[int, int | None]], operator: str) -> tuple[Term, ...]:
    """What the bytes of an allocation are of the batch and the sequence. Raises InputError where they are no such
    sum."""
    exponents = [each for each in _EXPONENTS if points[0][1] is not None or not any(each[1:])]
    for several in (1, 2):
        for chosen in itertools.combinations(exponents, several):
            powers = [[_power(each, batch_size, seq_len or 1) for each in chosen] for batch_size, seq_len in points]
            factors = _solved(powers, nbytes)
            if factors is not None:
                return tuple(
                    Term(each, factor.numerator, factor.denominator)
                    for each, factor in zip(chosen, factors, strict=True)
                    if factor
                )
    raise InputError(f"what {operator} allocates is no sum of terms of the batch and the sequence: {nbytes} bytes")


def _solved(powers: Sequence[Sequence[int]], nbytes: Sequence[int]) -> list[Fraction] | None:
    """The factors with which these powers make the bytes in each of the runs; None where there are none."""
    if len(powers[0]) == 1:
        factors = [Fraction(nbytes[0], powers[0][0])]
    else:
        (a, b), (c, d) = powers[0], powers[1]
        determinant = a * d - b * c
        if not determinant:
            return None
        factors = [
            Fraction(nbytes[0] * d - nbytes[1] * b, determinant),
            Fraction(a * nbytes[1] - c * nbytes[0], determinant),
        ]
    made = (sum(map(Fraction.__mul__, factors, map(Fraction, row))) for row in powers)
    return factors if all(one == other for one, other in zip(made, nbytes, strict=True)) else None


def keep_traced(
    sketch: Sketch | None,
    run: Run | None,
    directory: Path | None,
    say: Callable[[str], object] = lambda _: None,
    *,
    goes_on: bool = True,
) -> None:
    """Trace a loop's step, and keep what is known beside its run, or why nothing is. Without a run nothing is traced.

    say: is called with what is done, where it takes long; then SIGINT leaves it out. goes_on: whether the process goes
    on after that; else KeyboardInterrupt is raised, once it is kept that nothing was traced.
    """
    if sketch is None or run is None or directory is None or not isinstance(run.workload, WatchedWorkload):
        return
    what = "tracing the loop on fake tensors, so that stepscope fit --from can answer for other sizes"
    stops = "leaves it out" if goes_on else "stops that and the script"
    said = threading.Timer(_SAID_AFTER_S, say, [f"{what}; Ctrl-C {stops}"])
    said.daemon = True
    if sketch.why_not is None and not run.workload.rank:
        with contextlib.suppress(RuntimeError):  # no thread begins when Python ends
            said.start()
    try:
        traced = trace(sketch, run.workload)
    finally:
        said.cancel()
    with contextlib.suppress(OSError):  # the run itself is kept, or its place was said
        (directory / TRACED_FILE).write_bytes(zlib.compress(msgspec.json.encode(traced)))
    if traced.why_not == _INTERRUPTED:
        memory = run.evidence.memory
        measured = memory is not None and memory.allocated_peak is not None
        knows = "knows what was measured at its own sizes only" if measured else "knows nothing of it"
        say(f"not traced, since it was interrupted: the run is kept, and stepscope fit --from {knows}")
        if not goes_on:
            raise KeyboardInterrupt


def read_traced(directory: Path) -> Traced:
    """What is kept beside a run. Raises InputError for a file that holds something else."""
    file = directory / TRACED_FILE
    try:
        packed = read_document(file)
    except OSError:
        return Traced(why_not=_LEFT_NONE)
    try:
        plain = zlib.decompressobj().decompress(packed, LARGEST_DOCUMENT_BYTES)
    except zlib.error as error:
        raise InputError(f"{file} is damaged: {error}") from error
    return decode_document(plain, Traced, str(file), holds="traced step", again="by watching the loop again")


# Predictions of a traced step.


class TracedPredictor(FakePredictor):
    """Predicts a traced step, and what of its variants was traced."""

    def __init__(self, workload: WatchedWorkload, traced: Traced, tell: Tell = lambda _: None) -> None:
        self._traced, self._asked = traced, workload
        self._sizes = traced.batch_size if workload.batch_size is None else workload.batch_size, workload.seq_len
        step: Any = workload  # of the loop, which no factory makes
        super().__init__(step, "cuda", None, tell)

    def _run(self, workload: Any, batch: int | None = None, steps: int = _STEPS, **how: Any) -> WatchedModule:
        del how  # nothing is run: there are no stages to tell of, and tensors have no descriptions
        return self._sized(workload, self._sizes[0] if batch is None else batch, self._sizes[1], steps)

    def _sized(self, workload: Any, batch_size: int, seq_len: int | None, steps: int = STEPS_BEFORE) -> WatchedModule:
        """The step of a variant at these sizes. Raises InputError for what was not traced."""
        traced, dtype = self._traced, "fp32" if workload.dtype == "tf32" else workload.dtype
        same = ("accumulation", "checkpointing", "compile", "optimizer", "phase", "clip")
        if any(getattr(workload, name) != getattr(self._asked, name) for name in same):
            raise InputError("no other step than the loop's was traced")
        step = next((each for each in traced.steps if each.dtype == dtype), None)
        if step is None:
            known = ", ".join(each.dtype for each in traced.steps)
            why = f", since {traced.left[dtype]}" if dtype in traced.left else ""
            raise InputError(f"the loop was traced in {known}, and not in {dtype}{why}: choose one of those")
        if batch_size < 1 or batch_size % traced.accumulation:
            raise InputError(
                f"batch_size is {batch_size}: give a multiple of {traced.accumulation}, the micro-batches of a step"
            )
        if seq_len is not None and seq_len < 1:
            raise InputError(f"seq_len is {seq_len}: give a whole number from 1 on")
        if seq_len is not None and traced.longest is not None and seq_len > traced.longest:
            raise InputError(
                f"the model has {traced.longest} positions, and seq_len is {seq_len}: choose at most those"
            )
        length = _padded(seq_len, UNIT) if seq_len is not None else 1
        return replace(step.at(batch_size, length, steps), workload=workload)

    def _longest_sequence(self, budget: Budget) -> tuple[int | None, bool]:
        workload, (batch_size, start) = self.workload, self._sizes
        if start is None:
            return None, False

        def variant(length: int) -> WatchedModule | None:
            try:
                return self._sized(workload, batch_size, length)
            except InputError:
                return None

        unit = SEQUENCE_STEP if start % SEQUENCE_STEP == 0 else UNIT
        longest = self._largest(_padded(start, unit), unit, variant, budget)
        return longest, bool(longest) and variant(longest + unit) is None


def fit_traced(
    run: Run,
    directory: Path,
    changes: Mapping[str, Any],
    budgets: Sequence[Budget],
    *,
    search: bool = True,
    know: Callable[[list[Fit[FakeEstimate]]], object] = lambda _: None,
    tell: Tell = lambda _: None,
) -> list[Fit[FakeEstimate]]:
    """The prediction of a watched run's step for each budget, or of its peak alone where there is none.

    directory: the run's. changes: batch_size, seq_len and dtype, where they differ from the loop's. know, tell: as of
    `fit_module`. Raises InputError for what was neither traced nor measured.
    """
    workload, traced, memory = run.workload, read_traced(directory), run.evidence.memory
    assert isinstance(workload, WatchedWorkload)
    if traced.why_not and not changes.keys() - {"batch_size"} and memory is not None and memory.allocated_peak:
        return [fit_of_run(run, changes.get("batch_size"), budget) for budget in budgets or [None]]
    if traced.why_not:
        raise InputError(
            f"run {run.id} cannot say it, since {traced.why_not}: {_REMEDIES.get(traced.why_not, _GIVE)}; a run that "
            "measured its peak on a GPU answers for another card or --batch-size"
        )
    if "seq_len" in changes and traced.seq_len is None:
        raise InputError(f"run {run.id} had no token ids, whose length --seq-len would be: leave it out")
    own = TracedPredictor(_resized_workload(workload, traced, {}), traced, tell)
    asked = _resized_workload(workload, traced, changes)
    predictor = TracedPredictor(asked, traced, tell) if changes else own
    basis = _basis(run, traced, own.estimate.peak_bytes, asked.seq_len)
    is_bound = (asked.seq_len or 0) % UNIT > 0

    def based(fit: Fit[FakeEstimate], **sizes: Any) -> Fit[FakeEstimate]:
        estimate = msgspec.structs.replace(fit.estimate, basis=basis)
        return msgspec.structs.replace(fit, **sizes, estimate=estimate, is_bound=fit.is_bound or is_bound)

    fits: list[Fit[FakeEstimate]] = []
    for budget in budgets or [None]:
        before = [*fits]
        fit = judge(predictor, budget, search=search, know=lambda fit, before=before: know([*before, based(fit)]))
        fits.append(based(fit))
        for sizes in predictor.sizes(budget) if search and budget is not None else ():
            fits[-1] = based(fits[-1], **sizes)
            know(fits)
    return fits


def _resized_workload(workload: WatchedWorkload, traced: Traced, changes: Mapping[str, Any]) -> WatchedWorkload:
    """The loop's step at other sizes and in another precision."""
    batch_size, seq_len = changes.get("batch_size", traced.batch_size), changes.get("seq_len", traced.seq_len)
    inputs = {
        name: Input(_of_sizes(each.shape, traced.batch_size, traced.seq_len, batch_size, seq_len), each.dtype)
        for name, each in workload.model.inputs.items()
    }
    model = msgspec.structs.replace(workload.model, inputs=inputs)
    return msgspec.structs.replace(workload, model=model, dtype=changes.get("dtype", workload.dtype))


def _basis(run: Run, traced: Traced, own_bytes: int, seq_len: int | None) -> str:
    """Where the figures come from, and how far the same way is off where the run measured its peak."""
    at = f"batch {traced.batch_size}" + (f" and sequence {traced.seq_len}" if traced.seq_len else "")
    said = f"Traced by run {run.id} on fake tensors at {at} and two other sizes, and scaled by what each allocation is."
    if seq_len is not None and seq_len % UNIT:
        said += f" Counted for the next multiple of {UNIT} tokens, so that this is a bound."
    memory = run.evidence.memory
    if memory is not None and memory.allocated_peak is not None:
        by = own_bytes / memory.allocated_peak - 1
        said += (
            f" At its own sizes so {format_bytes(own_bytes)}, where it measured {format_bytes(memory.allocated_peak)}"
        )
        said += f" ({by:+.1%})."
    return said
