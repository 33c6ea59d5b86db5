"""Observing a step with hooks, untimed: what ran in which phase, under which autocast, and what stayed alive.

The timed steps carry no hooks; these steps run after them.
"""

import contextlib
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.evidence import PhaseMemory, StepObservation
from stepscope.measure.nvml import read_gpu
from stepscope.measure.timer import Phase

_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class ObservableStep(Protocol):
    """What observing asks of a step, beyond what timing asks."""

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, for its parameters and buffers."""
        ...

    @property
    def forward_module(self) -> torch.nn.Module:
        """What the forward phase calls: the model, or what torch.compile made of it."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The model's blocks: what checkpointing runs again."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    @property
    def batches(self) -> Sequence[Sequence[torch.Tensor]]: ...

    @property
    def tokens(self) -> torch.Tensor:
        """The token ids that the next forward takes."""
        ...

    loss: torch.Tensor | None

    @property
    def compiled(self) -> bool: ...

    @property
    def compiles_parts(self) -> bool:
        """Whether an eager step calls something that torch.compile made, as FlexAttention is."""
        ...

    @property
    def cuda_graphs(self) -> bool:
        """Whether the step replays CUDA graphs."""
        ...

    @property
    def phases(self) -> Sequence[Phase]: ...

    def prepare(self) -> None: ...


class _Saved:
    """A tensor kept for backward, in a box that can be watched."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _ProductDtypes(TorchDispatchMode):
    """Collects the dtypes of matrix products' operands, below autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _PRODUCTS:
            operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
            self.found |= {str(operand.dtype).removeprefix("torch.") for operand in operands}
        return func(*args, **(kwargs or {}))


def observe_step(
    step: ObservableStep, device: torch.device, held_before_bytes: int = 0
) -> tuple[StepObservation, PhaseMemory]:
    """Run two steps: the first under hooks, the second for memory per phase (bytes as PhaseMemory defines them).

    held_before_bytes: what the process had allocated on the device before the step was made.
    """
    autocast_outside = torch.is_autocast_enabled(device.type)
    distinct_tokens, distinct_batches = _observe_inputs(step)
    step.prepare()
    tokens_of_step = step.tokens
    forwards: dict[str, int] = {phase.name: 0 for phase in step.phases}
    current = [step.phases[0].name]
    autocast_seen: dict[str, bool] = {}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
    saved_storages: dict[int, int] = {}
    saved_bytes = 0
    owned = {tensor.untyped_storage().data_ptr() for tensor in _resident_tensors(step)}

    def pack(tensor: torch.Tensor) -> _Saved:
        box = _Saved(tensor)
        saved.add(box)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved_storages[storage.data_ptr()] = storage.nbytes()
        return box

    taken: list[torch.Tensor] = []
    passes = {"backward": 0, "optimizer": 0, "block again": 0}

    def count_forward(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        forwards[current[0]] += 1
        if current[0] == "forward":
            taken.append(inputs[0])

    def count_block(*_: object) -> None:
        passes["block again"] += current[0] == "backward"

    def note(phase: str) -> None:
        passes[phase] += 1
        autocast_seen[phase] = torch.is_autocast_enabled(device.type)

    products = _ProductDtypes()
    # Saved-tensor hooks and dispatch modes make a compiled region compile anew, or refuse to run.
    hooked = not (step.compiled or step.compiles_parts)
    with contextlib.ExitStack() as stack:
        # A hook on a module inside the compiled one would make it compile anew.
        counted = step.forward_module if step.compiled else step.model
        stack.callback(counted.register_forward_pre_hook(count_forward).remove)
        if step.optimizer is not None:
            handle = step.optimizer.register_step_pre_hook(lambda *_: note("optimizer"))
            stack.callback(handle.remove)
        for block in () if step.compiled else step.blocks:
            stack.callback(block.register_forward_pre_hook(count_block).remove)
        for phase in step.phases:
            current[0] = phase.name
            saved_storages.clear()  # of several forwards each counts alone: their graphs do not live together
            with contextlib.ExitStack() as watching:
                if phase.name == "forward" and hooked:
                    watching.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda b: b.tensor))
                    watching.enter_context(products)
                phase.run()
            saved_bytes = max(saved_bytes, sum(saved_storages.values()))
            if phase.name == "forward" and step.loss is not None and step.loss.requires_grad:
                step.loss.register_hook(lambda _gradient: note("backward"))
    memory, graphs_alive = _observe_memory(step, device, saved, saved_bytes if hooked else None, held_before_bytes)
    observation = StepObservation(
        model_forwards=forwards,
        autocast_outside=autocast_outside,
        autocast_in_backward=autocast_seen.get("backward"),
        autocast_in_optimizer=autocast_seen.get("optimizer"),
        distinct_tokens=distinct_tokens,
        distinct_batches=distinct_batches,
        graphs_alive_before=graphs_alive if hooked and step.loss is not None else None,
        product_dtypes=tuple(sorted(products.found)) if hooked else None,
        forward_tokens=sum(tokens.numel() for tokens in taken),
        covers_batch=bool(taken) and torch.equal(torch.cat(taken), tokens_of_step),
        backward_passes=passes["backward"],
        optimizer_steps=passes["optimizer"],
        blocks_again=None if step.compiled else passes["block again"],
    )
    return observation, memory


def _observe_inputs(step: ObservableStep) -> tuple[int, int]:
    """The fewest distinct tokens in a batch, and how many batches differ, over a round of batches as steps get them."""
    seen: set[bytes] = set()
    fewest = None
    for _ in step.batches:
        step.prepare()
        tokens = step.tokens.cpu()
        distinct = int(tokens.unique().numel())
        fewest = distinct if fewest is None else min(fewest, distinct)
        seen.add(hashlib.sha256(tokens.numpy().tobytes()).digest())
    return fewest or 0, len(seen)


class PhasePeaks:
    """The allocator's counters round the phases of one step on a GPU; of phases of one name, the largest figure.

    Made when the step is about to begin: what is allocated then is what was there before it.
    """

    def __init__(self, step: ObservableStep, device: torch.device, held_before_bytes: int = 0) -> None:
        self._step, self._device = step, device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        self._requested_before = torch.cuda.memory_stats(device).get("requested_bytes.all.current")
        self._reserved_before = torch.cuda.memory_reserved(device)
        self._expected = _unique_bytes(_resident_tensors(step)) + held_before_bytes
        self._peaks: dict[str, int] = {}
        self._reserved = 0
        self._saved: int | None = None
        self._gradients: int | None = None

    def run(self, phase: Phase) -> None:
        """Run the phase between a reset and a reading of the peaks."""
        device = self._device
        torch.cuda.reset_peak_memory_stats(device)
        at_start = torch.cuda.memory_allocated(device)
        try:
            phase.run()
        finally:  # a phase that ran out of memory had a peak too
            peak = torch.cuda.max_memory_allocated(device)
            self._peaks[phase.name] = max(peak, self._peaks.get(phase.name, 0))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(device))
        if phase.name == "forward":
            self._saved = max(torch.cuda.memory_allocated(device) - at_start, self._saved or 0)
        elif phase.name == "backward":
            self._gradients = gradient_bytes(self._step)

    def memory(self) -> PhaseMemory:
        """What was counted. Without peaks where the step replays CUDA graphs: a replayed graph's tensors live in its
        private pool, which is reserved but never counted as allocated, so allocated peaks would lie below the truth.
        """
        torch.cuda.synchronize(self._device)
        memory = PhaseMemory(
            parameter_bytes=parameter_bytes(self._step),
            after_parameters=self._before,
            requested_before=self._requested_before,
            reserved_before=self._reserved_before,
            reserved_peak=self._reserved,
            outside_allocator=_outside_allocator(self._device),
        )
        if self._step.cuda_graphs:
            return memory
        return msgspec.structs.replace(
            memory,
            resident_expected=self._expected,
            forward_peak=self._peaks.get("forward"),
            saved_for_backward=self._saved if "backward" in self._peaks else None,
            backward_peak=self._peaks.get("backward"),
            gradient_bytes=self._gradients,
            optimizer_peak=self._peaks.get("optimizer"),
        )


def gradient_bytes(step: ObservableStep) -> int:
    """What the gradients on the parameters take, as tensors."""
    return _unique_bytes([p.grad for p in step.model.parameters() if p.grad is not None])


def parameter_bytes(step: ObservableStep) -> int:
    """What the parameters take, as tensors."""
    return _unique_bytes(list(step.model.parameters()))


def _outside_allocator(device: torch.device) -> int | None:
    """What this process holds on the GPU beyond its allocator: the driver's context, the libraries' kernels and
    workspaces. The driver counts all processes together, so None where there are others, or where none can tell."""
    reading = read_gpu(device)
    if reading is None or reading.other_processes != 0:
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _observe_memory(
    step: ObservableStep,
    device: torch.device,
    saved_earlier: "weakref.WeakSet[_Saved]",
    saved_bytes: int | None,
    held_before_bytes: int,
) -> tuple[PhaseMemory, bool]:
    """One step with the allocator's peaks read and reset between phases; whether earlier graphs were alive."""
    step.prepare()
    graphs_alive = len(saved_earlier) > 0
    if device.type != "cuda":
        for phase in step.phases:
            phase.run()
        saved = saved_bytes if step.phases[-1].name != "forward" else None
        return PhaseMemory(parameter_bytes=parameter_bytes(step), saved_for_backward=saved), graphs_alive
    peaks = PhasePeaks(step, device, held_before_bytes)
    for phase in step.phases:
        peaks.run(phase)
    return peaks.memory(), graphs_alive


def _resident_tensors(step: ObservableStep) -> list[torch.Tensor]:
    """Everything that should be alive between steps: parameters, gradients kept, buffers, state, batches."""
    tensors = [*step.model.parameters(), *step.model.buffers()]
    tensors += [p.grad for p in step.model.parameters() if p.grad is not None]
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    tensors += [tensor for batch in step.batches for tensor in batch]
    return [tensor for tensor in tensors if tensor.device == step.batches[0][0].device]


def _unique_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
