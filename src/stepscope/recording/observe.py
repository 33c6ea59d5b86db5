"""Observing a step with hooks, untimed: what ran in which phase, under which autocast, and what stayed alive.

The timed steps carry no hooks; these steps run after them.
"""

import bisect
import contextlib
import functools
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch._ops import HigherOrderOperator
from torch.autograd.profiler_util import _filter_name, _rewrite_name
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.core.evidence import PhaseMemory, StepObservation, StepOperators
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, OPTIMIZER
from stepscope.recording import ranges
from stepscope.recording.capture import profiler_for
from stepscope.recording.held_tensors import local_part, model_tensors, optimizer_tensors, plain_parts, whole_numel
from stepscope.recording.nvml import read_gpu
from stepscope.recording.precision import SCALED_PRODUCTS
from stepscope.recording.step import Recorder, Step, optimizers_of

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", *SCALED_PRODUCTS)
_BLOCK_AGAIN = "block again"


@dataclass(eq=False)
class _Saved:
    """A tensor that autograd keeps for backward, in an object whose end can be watched."""

    tensor: torch.Tensor


class _ProductDtypes(TorchDispatchMode):
    """A mode below autocast that collects the dtypes of matrix products' operands."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, HigherOrderOperator) and func._schema.name in _PRODUCTS:
            # Of a scaled product the first two are the operands, and the others their scales.
            count = 2 if func._schema.name in SCALED_PRODUCTS else len(args)
            operands = [arg for arg in args[:count] if isinstance(arg, torch.Tensor)]
            # A product over one element adds nothing up: so Hugging Face's models multiply positions and frequencies,
            # in fp32 whatever autocast says.
            if operands[-1].shape[-2] > 1:
                self.names |= {str(operand.dtype).removeprefix("torch.") for operand in operands}
        return func(*args, **(kwargs or {}))


class Observer(Recorder):
    """Hooks on the next step: what runs in which phase, under which autocast, and what autograd keeps."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._batch = next((tensor for _, tensor in step.named_tensors(step.batch)), None)
        self._autocast_outside = torch.is_autocast_enabled(device.type)
        self._autocast: dict[str, bool] = {}
        # Saved-tensor hooks and dispatch modes make a compiled region compile anew, or refuse to run.
        self._hooked = not (step.compiled or step.compiles_parts)
        self._products = _ProductDtypes()
        self._watching = contextlib.ExitStack()
        self._phase = ""
        self._forwards: dict[str, int] = {}
        self._passes = {BACKWARD: 0, OPTIMIZER: 0, _BLOCK_AGAIN: 0}
        self._inputs: list[torch.Tensor] = []
        self._owned = storages_of(resident_tensors(step, device)).keys()
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._saved_storages: dict[int, int] = {}
        self._saved_bytes = 0
        self._boxes: Counter[int] = Counter()
        """How many boxes hold a storage, by its address, while forward and backward run as one."""
        self._held_bytes = self._most_held_bytes = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """A context in which the hooks are on."""
        step = self._step
        with contextlib.ExitStack() as stack:
            # A hook inside the compiled module would make it compile anew.
            counted = step.forward_module if step.compiled else step.model
            stack.callback(counted.register_forward_pre_hook(self._count_forward, with_kwargs=True).remove)
            if step.optimizer is not None:
                stack.callback(step.optimizer.register_step_pre_hook(lambda *_: self._pass(OPTIMIZER)).remove)
            for block in () if step.compiled else step.blocks:
                stack.callback(block.register_forward_pre_hook(lambda *_: self._pass(_BLOCK_AGAIN)).remove)
            stack.enter_context(self._watching)
            yield self

    def phase_begins(self, name: str) -> None:
        self._phase = name
        self._forwards.setdefault(name, 0)
        self._saved_storages.clear()  # each forward counts alone, since the graphs of several do not live together
        if name in (FORWARD, FORWARD_BACKWARD) and self._hooked:
            self._watching.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor))
            self._watching.enter_context(self._products)

    def phase_ends(self, name: str) -> None:
        self._watching.close()
        kept = self._most_held_bytes if name == FORWARD_BACKWARD else sum(self._saved_storages.values())
        self._saved_bytes = max(self._saved_bytes, kept)
        loss = self._step.loss
        if name == FORWARD and loss is not None and loss.requires_grad:
            loss.register_hook(lambda _gradient: self._pass(BACKWARD))

    @property
    def graphs_alive(self) -> bool | None:
        """Whether anything that autograd kept in this step is still alive; None where that cannot be known."""
        return len(self._saved) > 0 if self._hooked and self._step.loss is not None else None

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that a forward kept for its backward; None where they cannot be known, or there was no backward."""
        return self._saved_bytes if self._hooked and self._phase != FORWARD else None

    def observation(self, distinct: tuple[int | None, int | None], graphs_alive: bool | None) -> StepObservation:
        """The StepObservation of this step. distinct: what `distinct_in` says of its batches; graphs_alive is as it was
        just before the next step."""
        batch, inputs = self._batch, self._inputs
        of_tokens = batch is not None and not batch.is_floating_point()
        covers = None
        if batch is not None and batch.dim():
            alike = all(tokens.shape[1:] == batch.shape[1:] for tokens in inputs)
            covers = bool(inputs) and alike and torch.equal(torch.cat(inputs), batch)
        return StepObservation(
            model_forwards=self._forwards,
            autocast_outside=self._autocast_outside,
            autocast_in_backward=self._autocast.get(BACKWARD),
            autocast_in_optimizer=self._autocast.get(OPTIMIZER),
            distinct_tokens=distinct[0],
            distinct_batches=distinct[1],
            graphs_alive_before=graphs_alive,
            product_dtypes=tuple(sorted(self._products.names)) if self._hooked else None,
            forward_tokens=sum(tokens.numel() for tokens in self._inputs) if of_tokens else None,
            covers_batch=covers,
            backward_passes=self._passes[BACKWARD],
            optimizer_steps=self._passes[OPTIMIZER],
            blocks_again=None if self._step.compiled else self._passes[_BLOCK_AGAIN],
        )

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        box = _Saved(tensor)
        self._saved.add(box)
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() not in self._owned:
            self._saved_storages[storage.data_ptr()] = storage.nbytes()
            if self._phase == FORWARD_BACKWARD:
                key, size = storage.data_ptr(), storage.nbytes()
                self._boxes[key] += 1
                if self._boxes[key] == 1:
                    self._held_bytes += size
                    self._most_held_bytes = max(self._most_held_bytes, self._held_bytes)
                weakref.finalize(box, self._unpacked, key, size)
        return box

    def _unpacked(self, key: int, size: int) -> None:
        """Count that the end of a box has come, which may be the last one of its storage."""
        self._boxes[key] -= 1
        if not self._boxes[key]:
            self._held_bytes -= size

    def _count_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forwards[self._phase] += 1
        if self._phase == FORWARD:
            self._inputs += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)][:1]

    def _pass(self, what: str) -> None:
        """Count a pass of backward or of the optimizer, or a block that runs while another one does."""
        if what != _BLOCK_AGAIN:
            self._autocast[what] = torch.is_autocast_enabled(self._device.type)
        self._passes[what] += what != _BLOCK_AGAIN or self._phase == BACKWARD


def distinct_in(step: Step) -> tuple[int | None, int | None]:
    """The fewest distinct tokens in a batch, or distinct numbers of another input, and how many batches differ; None
    where they hold no tensor. A round of steps is prepared, and not run, to look at the batch that each would get."""
    fewest: list[int] = []
    digests: set[bytes] = set()
    for _ in step.batches:
        step.prepare()
        for _, tensor in list(step.named_tensors(step.batch))[:1]:
            values = tensor.detach().cpu().contiguous().flatten()
            fewest.append(int(values.unique().numel()))
            digests.add(hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).digest())
    return (min(fewest), len(digests)) if fewest else (None, None)


def parameter_bytes(step: Step) -> int:
    """Bytes of the parameters, as tensors."""
    return sum(storages_of(step.model.parameters()).values())


def resident_tensors(step: Step, device: torch.device) -> list[torch.Tensor]:
    """Every tensor on the device that should be alive between steps: parameters, gradients kept, buffers, state,
    batches."""
    tensors = [tensor for _, _, tensor in model_tensors(step.model)]
    tensors += [p.grad for p in step.model.parameters() if p.grad is not None]
    for optimizer in optimizers_of(step):
        tensors += [tensor for _, tensor in optimizer_tensors(optimizer, step.model, {})]
    tensors += [tensor for batch in step.batches for _, tensor in step.named_tensors(batch)]
    return [tensor for tensor in tensors if tensor.device == device]


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Address and bytes of every storage of the tensors, once."""
    storages = (part.untyped_storage() for tensor in tensors for part in plain_parts(tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# Counts the operators that a step really calls, by phase, for the checks of what ran against what was asked.


_RANGE = "stepscope operators of "
_ENGINE = "autograd::engine::"
"""How events of autograd's engine itself begin; the operator that it evaluates has an event of its own."""


class OperatorCounts(Recorder):
    """Counts what the host calls in the next step, under torch.profiler."""

    def __init__(self, device: torch.device) -> None:
        # Not for its events: a process whose first profile leaves the GPU out may see none of it in later ones. Where a
        # tool watches the process there is no later one, since CUDA lets one profiler in at a time.
        self.profiler = profiler_for(device, gpu=not ranges.watched(), events=False)
        """The context in which to run the step."""

    def phase_begins(self, name: str) -> None:
        self._phase = record_function(f"{_RANGE}{name}")
        self._phase.__enter__()

    def phase_ends(self, name: str) -> None:
        self._phase.__exit__(None, None, None)

    phase_failed = phase_ends

    def counted(self) -> StepOperators:
        """Number of calls of each operator, by phase."""
        assert self.profiler.profiler is not None and self.profiler.profiler.kineto_results is not None
        called = _called_on_the_host(self.profiler.profiler.kineto_results.events())
        # On a GPU autograd calls its operators on a thread of its own, so time decides which phase they belong to.
        phases = sorted((start_ns, name.removeprefix(_RANGE)) for start_ns, name in called if name.startswith(_RANGE))
        starts_ns = [start_ns for start_ns, _ in phases]
        calls: dict[str, Counter[str]] = {name: Counter() for _, name in phases}
        for start_ns, name in called:
            if name.startswith((_RANGE, _ENGINE)):
                continue
            before = bisect.bisect_right(starts_ns, start_ns)
            if before:
                calls[phases[before - 1][1]][name] += 1
        return StepOperators(calls={phase: dict(sorted(counted.items())) for phase, counted in calls.items()})


def _called_on_the_host(recorded: Iterable[Any]) -> list[tuple[int, str]]:
    """The start and the name of each call among Kineto's events. A call that is all that one of its own name makes is
    no other call.

    The same as the profiler's own `events()`, whose objects and tree take ten times as long.
    """
    named = functools.cache(functools.partial(_rewrite_name, with_wildcard=True))
    events = [
        event for event in recorded
        if event.device_type() == DeviceType.CPU and not _filter_name(event.name()) and not event.is_hidden_event()
    ]  # fmt: skip
    calls = [(event.start_ns(), event.end_ns(), named(event.name())) for event in events]
    parents: dict[int, int] = {}
    for places in _by_thread(events):
        around: list[int] = []
        for place in sorted(places, key=lambda place: (calls[place][0], -calls[place][1])):
            start_ns, end_ns, _ = calls[place]
            while around and (start_ns >= calls[around[-1]][1] or end_ns > calls[around[-1]][1]):
                around.pop()
            if around:
                parents[place] = around[-1]
            around.append(place)
    children = Counter(parents.values())
    passed_on = {
        place for place, parent in parents.items() if children[parent] == 1 and calls[place][2] == calls[parent][2]
    }
    return [(start_ns, name) for place, (start_ns, _, name) in enumerate(calls) if place not in passed_on]


def _by_thread(events: Sequence[Any]) -> Iterable[list[int]]:
    """The places of the events of each thread. A call of CUDA's runtime belongs to the thread of its operator; what
    begins on one thread and ends on another belongs to none."""
    threads = [
        None if event.is_async() or event.start_thread_id() != event.end_thread_id() else event.start_thread_id()
        for event in events
    ]
    of_operators = {
        event.correlation_id(): thread
        for event, thread in zip(events, threads, strict=True)
        if thread is not None and not event.linked_correlation_id()
    }
    places: dict[int, list[int]] = {}
    for place, (event, thread) in enumerate(zip(events, threads, strict=True)):
        if thread is not None:
            linked = event.linked_correlation_id()
            places.setdefault(of_operators.get(linked, thread) if linked else thread, []).append(place)
    return places.values()


def whole_bytes(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes of the whole parameters, however they are sharded, and of those that are trained."""
    sizes = [(whole_numel(one) * one.element_size(), one.requires_grad) for one in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


# The memory of a step's phases, from a GPU allocator's counters.


class PhasePeaks(Recorder):
    """Records a GPU allocator's counters around the phases of one step; of phases of one name, the largest figure.

    Make it just before the step: what is allocated then counts as what was there before.
    """

    def __init__(self, step: Step, device: torch.device, held_before_bytes: int = 0) -> None:
        self._step, self._device = step, device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        self._requested_before = torch.cuda.memory_stats(device).get("requested_bytes.all.current")
        self._reserved_before = torch.cuda.memory_reserved(device)
        self._expected = sum(storages_of(resident_tensors(step, device)).values()) + held_before_bytes
        self._peaks: dict[str, int] = {}
        self._reserved = self._at_start = 0
        self._saved: int | None = None
        self._gradients: int | None = None

    def phase_begins(self, name: str) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._at_start = torch.cuda.memory_allocated(self._device)

    def phase_ends(self, name: str) -> None:
        self.phase_failed(name)
        if name == FORWARD:
            self._saved = max(torch.cuda.memory_allocated(self._device) - self._at_start, self._saved or 0)
        elif name in (BACKWARD, FORWARD_BACKWARD):
            self._gradients = gradient_bytes(self._step)

    def phase_failed(self, name: str) -> None:
        """Read the peaks of a phase that has ended, or that ran out of memory: it also had one."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peaks[name] = max(peak, self._peaks.get(name, 0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))

    def memory(self) -> PhaseMemory:
        """The memory of each phase. A step that replays CUDA graphs has no peaks: a replayed graph's tensors live in
        its private pool, which is reserved but never counted as allocated, so the peaks would be too low.
        """
        torch.cuda.synchronize(self._device)
        # What this process holds beyond its allocator: the driver's context, the libraries' kernels and workspaces. The
        # driver counts all processes together, so it is not known where there are, or may be, others.
        reading, outside = read_gpu(self._device), None
        if reading is not None and reading.other_processes == 0:
            free, total = torch.cuda.mem_get_info(self._device)
            outside = total - free - torch.cuda.memory_reserved(self._device)
        memory = PhaseMemory(
            parameter_bytes=parameter_bytes(self._step),
            after_parameters=self._before,
            requested_before=self._requested_before,
            reserved_before=self._reserved_before,
            reserved_peak=self._reserved,
            outside_allocator=outside,
        )
        if self._step.cuda_graphs:
            return memory
        return msgspec.structs.replace(
            memory,
            resident_expected=self._expected,
            forward_peak=self._peaks.get(FORWARD),
            turns_peak=self._peaks.get(FORWARD_BACKWARD),
            saved_for_backward=self._saved if BACKWARD in self._peaks else None,
            backward_peak=self._peaks.get(BACKWARD),
            gradient_bytes=self._gradients,
            optimizer_peak=self._peaks.get(OPTIMIZER),
        )


def gradient_bytes(step: Step) -> int:
    """Bytes of the gradients on the parameters, as tensors."""
    return sum(storages_of(p.grad for p in step.model.parameters() if p.grad is not None).values())
