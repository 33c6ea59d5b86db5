"""What a step of a workload needs, predicted from the workload alone: without torch, without a GPU.

The step runs symbolically (`symbolic_model.py`: what every operation makes, and what autograd keeps of it), a simulated
allocator serves its requests (`caching_allocator.py`), and the highest moment is the peak. No figure in it was fitted:
the sizes follow from the model's code; the allocator's rules and the library's workspace, from PyTorch's.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from stepscope.allocations.prediction.caching_allocator import NO_BLOCK, CachingAllocator, OutOfMemory
from stepscope.allocations.prediction.symbolic_model import (
    JOINT,
    BlockParameters,
    CompiledSymbolicModel,
    FusedSymbolicModel,
    ScaledProducts,
    SymbolicModel,
)
from stepscope.allocations.prediction.symbolic_tensors import (
    Allocator,
    Ledger,
    Node,
    Parameter,
    RoundingAllocator,
    Storage,
    Tape,
    Tensor,
)
from stepscope.core.attention_support import as_eager, predicted_attention, unpredicted
from stepscope.core.checkpointing import group_of
from stepscope.core.device_spec import DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.evidence import CATEGORIES, MemoryCategory
from stepscope.core.float_formats import BlockFormat
from stepscope.core.formulas.transformer import (
    aligned_numbers,
    moment_blocks,
    moment_bytes,
)
from stepscope.core.parts import ATTENTIONS, REFERENCE, Attention
from stepscope.core.precisions import PRECISIONS, check_scaled_layers, check_scaled_rows, takes_scaled
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.units import MIB
from stepscope.core.workloads import GRAPH_WARMUP, NOT_PARALLEL, OF_ONE_LAUNCH, TextbookWorkload, Workload

WORKSPACE_BYTES = 32 * MIB
"""What cuBLAS is given for each thread that asks it for matrix products, on Hopper
(aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`); 8.1 MiB before it, so this is the larger."""

DISTINCT_BATCHES = 4
"""Batches of tokens and targets that a step's data rotates through (training/training_step.py)."""

STEPS = 3
"""Steps that are simulated: the first makes the optimizer's state, the second finds its cache; the third is steady."""

MANY_LAYERS = 256
"""With more layers, blocks that are alike are simulated as one piece, as in `estimate_quickly`."""

MOST_LAYERS = 2**15
"""The most layers that a prediction accepts: it would take too long, and no such model exists."""

MICRO_BATCHES = 4
"""The most micro-batches that are simulated: further ones find the memory as the one before did, and change no peak."""

STEPS_TO_FAIL = 2
"""Steps simulated for the verdict: the first makes the optimizer's state, the second has it. A third asks a little more
of a simulated cache that is fragmented; on an H200 the runs with 1 % more than two steps need finished, and those with
1 % less did not (results/h200/memory-limits)."""

DeviceType = Literal["cuda", "cpu"]


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted bytes of one steady step. The peaks are defined as those of `PhaseMemory`, which measures them."""

    peak_bytes: int
    peak_phase: str
    categories: dict[MemoryCategory, int]
    """Bytes that are alive at the peak, by category; they add up to `peak_bytes` exactly."""
    by_phase: dict[str, dict[MemoryCategory, int]] = {}
    """For each phase, the bytes that are alive at its peak, by category."""
    after_parameters: int
    forward_peak: int
    saved_for_backward: int | None = None
    backward_peak: int | None = None
    optimizer_peak: int | None = None
    reserved_peak: int | None = None
    """Bytes that the caching allocator takes from the device; None where it was not simulated."""
    host_bytes: int = 0
    """Bytes that blocks keep in the host's memory."""


def estimate(workload: TextbookWorkload, device_type: DeviceType = "cuda") -> MemoryEstimate:
    """Peaks of a steady step, every block as large as PyTorch's caching allocator makes it."""
    return _estimated(workload, ATTENTIONS.get(workload.attention), device_type)


# Stored runs and searches ask of one workload several times, and a simulated step takes a tenth of a second. The record
# of the attention is part of the question.
@functools.lru_cache(maxsize=1024)
def _estimated(workload: TextbookWorkload, _attention: Attention | None, device_type: DeviceType) -> MemoryEstimate:
    allocator: Allocator = CachingAllocator() if device_type == "cuda" else RoundingAllocator(64)
    return SymbolicStep(workload, device_type, allocator).run(GRAPH_WARMUP if workload.graph == "step" else STEPS)


def estimate_quickly(workload: TextbookWorkload) -> MemoryEstimate:
    """Peaks of a steady step without the cache's remainders and with alike blocks as one piece: to compare choices."""
    return SymbolicStep(workload, "cuda", RoundingAllocator(), abridged=True).run(1)


def runs_within(workload: TextbookWorkload, limit_bytes: int) -> str | None:
    """None if the step runs while the allocator may take no more than this; else the phase in which it fails."""
    return _run_within(workload, ATTENTIONS.get(workload.attention), limit_bytes)


@functools.lru_cache(maxsize=1024)
def _run_within(workload: TextbookWorkload, _attention: Attention | None, limit_bytes: int) -> str | None:
    if _repeats(workload):
        with contextlib.suppress(_Unlike):
            return _failing_phase(PlayedStep(workload, "cuda", CachingAllocator(limit_bytes)))
    return _failing_phase(SymbolicStep(workload, "cuda", CachingAllocator(limit_bytes)))


def _failing_phase(step: "SymbolicStep") -> str | None:
    try:
        step.run(GRAPH_WARMUP if step.workload.graph == "step" else STEPS_TO_FAIL)
    except OutOfMemory:
        return step.phase
    return None


def symbolic_model(workload: TextbookWorkload, device_type: DeviceType) -> SymbolicModel:
    """The symbolic model as the workload runs it: op by op, or compiled. Raises InputError for what would not run."""
    config = workload.model
    if (why := unpredicted(workload)) is not None:
        raise InputError(why)
    if config.layers > MOST_LAYERS:
        raise InputError(f"layers is {config.layers}: memory is predicted for at most {MOST_LAYERS}")
    if PRECISIONS[workload.dtype].scaled:
        check_scaled_layers(takes_scaled(config.d_model, config.d_model), workload.dtype)
        check_scaled_rows(workload.micro_batch_size * workload.seq_len)
    if any(name != REFERENCE for name in workload.parts.values()):
        return FusedSymbolicModel(workload, device_type)
    if blocks_are_known(workload):
        return CompiledBlocks(workload, device_type)
    return (SymbolicModel if as_eager(workload) else CompiledSymbolicModel)(workload, device_type)


def blocks_are_known(workload: TextbookWorkload) -> bool:
    """Whether what compiled blocks keep is predicted: of PyTorch's parts alone, in a process of its own. Others are
    predicted as they run without a compiler."""
    scaled, run_again = PRECISIONS[workload.dtype].scaled, group_of(workload.checkpointing) is not None
    return (
        workload.compile == "blocks"
        and workload.projections == "apart"
        and not scaled
        and (workload.checkpointing == "none" or run_again)
        and workload.parallel == NOT_PARALLEL
        and all(name == REFERENCE for name in workload.parts.values())
        and ATTENTIONS[predicted_attention(workload, "cuda")].predicted == "always"
        and workload.model.window is None
    )


class CompiledBlocks(CompiledSymbolicModel):
    """The symbolic model of a step whose blocks are compiled one by one; the rest runs op by op.

    As measured on an H200 with PyTorch 2.11 in four dtypes and attentions (results/h200/fit-choices): a block's graph
    keeps what a whole one keeps of it, but under autocast the output of one norm, which backward computes again.
    """

    def _outside(self) -> SymbolicModel:
        """This model, with the same parameters, run op by op: for what lies outside of its blocks."""
        outside = object.__new__(SymbolicModel)
        vars(outside).update(vars(self))
        return outside

    def _branch(self, tape: Tape, x: Tensor, weight: Parameter, module: Callable[[Tape, Tensor], Tensor]) -> Tensor:
        if self.sizes.residual == self.sizes.products or not weight.name.endswith("attention_norm.weight"):
            return super()._branch(tape, x, weight, module)
        normal = self._norm(tape, x, weight)
        normal.storage = x.storage  # what its products keep for backward is their input's input, which is there
        return self._add(tape, x, module(tape, normal))

    def head(self, tape: Tape, x: Tensor) -> Tensor:
        """The logits, not compiled."""
        return self._outside().head(tape, x)

    def loss(self, tape: Tape, logits: Tensor) -> Tensor:
        """The cross-entropy, not compiled."""
        return self._outside().loss(tape, logits)


_CHUNK, _BLOCK = 1024, 256
"""Elements of a chunk of the update in one launch, and those that share a scale of 8 bits (kernels/adamw.py)."""

_SUMS = 4096
"""The most sums of squares that clipping in one launch makes (kernels/adamw.py)."""

_NORM_CHUNK = 65_536
"""Elements of whose squares PyTorch's norm of many tensors makes one number (aten/src/ATen/native/cuda/
MultiTensorApply.cuh, `kChunkSize`)."""


class SymbolicStep:
    """A workload's step without values: symbolic parameters, data and optimizer, and the phases that use them."""

    phase = "build"
    """The phase that the step is in."""

    def __init__(
        self, workload: TextbookWorkload, device_type: DeviceType, allocator: Allocator, *, abridged: bool = False
    ) -> None:
        self.workload, self._allocator = workload, allocator
        self._on_gpu = device_type == "cuda"
        self._ledger = Ledger(allocator)
        self._model = symbolic_model(workload, device_type)
        self._model.abridged = abridged or workload.model.layers > MANY_LAYERS
        self._resident: list[Storage] = []
        self._peaks: dict[str, tuple[int, list[int]]] = {}
        self._saved = self._host_bytes = 0
        self._loss: Tensor | None = None
        """The last forward's loss, which the step keeps until the next forward has made its own."""
        self._norm: Storage | None = None
        """The norm of the last gradients that were clipped, which the step keeps until it has the next."""

    def take_blocks(self, form: BlockFormat) -> None:
        """Let the linear layers of the blocks multiply operands in this format."""
        self._model.scaled = products_in(form, self._model.sizes.products)

    def run(self, steps: int) -> MemoryEstimate:
        """Build, and predict from the last of so many steps. Raises OutOfMemory where the allocator has a limit."""
        workload, before = self.workload, 0
        self._build()
        if steps == 1 and workload.phase == "train":
            self._make_optimizer_state()
        for step in range(steps):
            if workload.graph == "step" and step == GRAPH_WARMUP - 1 and isinstance(self._allocator, CachingAllocator):
                self._allocator.begin_private_pool()  # as `StepGraphs` empties the cache before it captures
            self._peaks, self._saved = {}, 0
            before = self._ledger.total
            # Where the allocator only rounds, the second finds the gradients, and all later ones what it found.
            different = MICRO_BATCHES if isinstance(self._allocator, CachingAllocator) else 2
            for micro in range(min(workload.accumulation, different)):
                self._forward_and_backward(first=step == 0 and micro == 0)
            if workload.phase == "train":
                self._optimize(first=step == 0 and steps > 1)
            else:
                self._release_gradients()
            if steps == 1:
                # The workspaces were taken on the way: in a steady step they are there from its start.
                before += WORKSPACE_BYTES * self._on_gpu * (1 if workload.phase == "forward" else 2)
        return self._result(before)

    def _build(self) -> None:
        workload, model = self.workload, self._model
        angles = (workload.seq_len * workload.model.head_dim, model.sizes.buffers)
        first, *others = ((p.elements, p.itemsize) for p in model.parameters)
        tensors = [first, angles, angles, *others]
        # A model in bf16 is made in fp32 and then cast, tensor by tensor. What was made becomes the master weight.
        masters = PRECISIONS[workload.dtype].masters and workload.phase == "train"
        keeps_masters, halves = masters and workload.optimizer not in OF_ONE_LAUNCH, list[tuple[int, Storage]]()
        cast = any(size != 4 for _, size in tensors)
        made = [4 * elements for elements, _ in tensors]
        joint = [[block[name] for name in names] for block in model.blocks for names in JOINT if model.joint]
        if cast or joint:
            storages = [self._stay(size, "parameters") for size in made]
        else:
            storages = self._ledger.together(made, CATEGORIES.index("parameters"))
        for i, (elements, size) in enumerate(tensors if cast else ()):
            if size != 4:
                if keeps_masters:
                    storages[i].become(CATEGORIES.index("optimizer state"))
                    self._resident.append(storages[i])
                elif masters:
                    halves.append((elements, storages[i]))
                storages[i] = self._stay(size * elements, "parameters")
        places = {p.name: i + 2 if i else 0 for i, p in enumerate(model.parameters)}
        for weights in joint:  # kernels/parts/projections.py `lie_together`
            block = self._stay(sum(weight.bytes for weight in weights), "parameters")
            for weight in weights:
                storages[places[weight.name]] = block
        self._resident += storages
        self._resident += [self._stay(workload.tokens * 8, "inputs") for _ in range(2 * DISTINCT_BATCHES)]
        # kernels/adamw.py `lower_bits`; the masters go when all are there.
        self._resident += [self._stay(2 * elements, "optimizer state") for elements, _ in halves]

    def _stay(self, size: int, category: MemoryCategory) -> Storage:
        return self._ledger.storage(size, CATEGORIES.index(category))

    def _forward_and_backward(self, first: bool) -> None:
        tape = Tape(self._ledger, recording=self.workload.phase != "forward")
        tape.after_rerun = self._model.end_autocast
        workspace = WORKSPACE_BYTES if first and self._on_gpu else 0
        self._begin(FORWARD)
        before = self._ledger.total
        tape.workspace_bytes = workspace
        loss = self._loss = self._forward(tape)
        self._end()
        self._resident += tape.workspaces
        self._host_bytes = tape.offloaded
        if loss is None:
            return
        self._saved = max(self._saved, self._ledger.total - before)
        self._begin(BACKWARD)
        tape.workspaces, tape.workspace_bytes = [], workspace
        tape.backward(loss)
        self._end()
        self._resident += tape.workspaces

    def _forward(self, tape: Tape) -> Tensor | None:
        """training/training_step.py `ForwardLoss`, or the model alone; autocast ends with it."""
        model = self._model
        logits = model.head(tape, model.run_blocks(tape, model.embedding(tape)))
        loss = model.loss(tape, logits) if tape.recording else None
        del logits
        model.end_autocast()
        return loss

    def _optimize(self, first: bool) -> None:
        self._begin(OPTIMIZER)
        parameters, optimizer = self._model.parameters, self.workload.optimizer
        if first:
            self._make_optimizer_state()
        masters = PRECISIONS[self.workload.dtype].masters
        # training/optimizer.py `OnMasters`: every gradient in fp32.
        casts = [p for p in parameters if masters and p.itemsize != masters and optimizer not in OF_ONE_LAUNCH]
        gradients = [self._ledger.storage(masters * p.elements) for p in casts]
        if self.workload.clip is not None and optimizer not in OF_ONE_LAUNCH:
            self._norm = self._clip()
        if optimizer == "adamw-foreach":
            # torch/optim/adamw.py, `_multi_tensor_adamw`: the square roots of all second moments at once.
            roots = self._ledger.together([(masters or p.itemsize) * p.elements for p in parameters])
            del roots
        elif optimizer == "adamw-loop":
            # `_single_tensor_adamw`: a square root and its quotient, which lives until the next parameter's is there.
            denominator = None
            for parameter in parameters:
                size = (masters or parameter.itemsize) * parameter.elements
                root = self._ledger.storage(size)
                denominator = self._ledger.storage(size)
                del root
            del denominator
        elif optimizer == "adamw-bf16-state":
            # training/optimizer.py: one parameter at a time, in fp32; gradients that are not fp32 are copied.
            alike = {(p.elements, p.itemsize): p for p in parameters}  # each leaves the memory as it was
            for parameter in alike.values() if self._model.abridged else parameters:
                self._update_in_fp32(parameter)
        del gradients
        self._release_gradients()
        self._end()

    def _clip(self) -> Storage:
        """training/optimizer.py: the norm of each tensor, these together, their norm, and the factor made of it."""
        parameters, masters = self._model.parameters, PRECISIONS[self.workload.dtype].masters
        sizes = [parameter.elements for parameter in parameters]
        if self._on_gpu:
            parts = self._ledger.storage(4 * len(sizes) * max(-(-size // _NORM_CHUNK) for size in sizes))
            _norms = [self._ledger.storage(4) for _ in sizes]
            del parts
        else:
            for parameter in parameters:  # one after another, of which 16 bits are cast
                self._ledger.storage(4 * parameter.elements if parameter.itemsize == 2 and not masters else 0)
            _norms = [self._ledger.storage(4 * len(sizes))]
        together = self._ledger.storage(4 * len(sizes))
        norm = self._ledger.storage(4)
        del together
        _factors = [self._ledger.storage(4) for _ in range(3)]
        return norm

    def _update_in_fp32(self, parameter: Parameter) -> None:
        size = parameter.elements * 4
        _gradient = self._ledger.storage(size if parameter.itemsize != 4 else 0)
        _square = self._ledger.storage(size)
        random_bits = self._ledger.storage(size)
        del random_bits
        _average = self._ledger.storage(size)

    def _make_optimizer_state(self) -> None:
        """training/optimizer.py: both moments of each parameter. In one launch: moments in blocks; of kernels/adamw.py
        the tables of tensors and of chunks, and three times four numbers in fp64."""
        elements = [parameter.elements for parameter in self._model.parameters]
        if self.workload.optimizer in OF_ONE_LAUNCH:
            numbers = [2 * aligned_numbers(count) for count in elements]
            itemsize = moment_bytes(self.workload)
            sizes = [itemsize * sum(numbers[i] for i in places) for places in moment_blocks(numbers)]
            if itemsize == 1:  # a scale for each block of a moment
                scales = [2 * aligned_numbers(-(-count // _BLOCK)) for count in elements]
                sizes += [4 * sum(scales[i] for i in places) for places in moment_blocks(scales)]
            tensors, chunks = len(elements), sum(-(-count // _CHUNK) for count in elements)
            sizes += [8 * tensors, 4 * tensors, 4 * chunks, 8 * chunks, 7 * 8 * tensors, 32, 32, 32]
            if self.workload.clip is not None:
                sizes += [4 * min(chunks, _SUMS), 8]
        else:
            itemsize = moment_bytes(self.workload)
            counts = [4] if self.workload.optimizer == "adamw-fused" else []  # its count of steps
            sizes = [size for count in elements for size in (count * itemsize, count * itemsize, *counts)]
        self._resident += self._ledger.together(sizes, CATEGORIES.index("optimizer state"))

    def _release_gradients(self) -> None:
        for parameter in self._model.parameters:
            parameter.gradient = None

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self._ledger.begin()

    def _end(self) -> None:
        """Keep the phase's peak: the highest, where a step has the phase several times."""
        if self.phase not in self._peaks or self._ledger.peak > self._peaks[self.phase][0]:
            self._peaks[self.phase] = (self._ledger.peak, self._ledger.at_peak)

    def _result(self, before: int) -> MemoryEstimate:
        phase = max(self._peaks, key=lambda name: self._peaks[name][0])
        peak, at_peak = self._peaks[phase]
        peaks = {name: highest for name, (highest, _) in self._peaks.items()}
        allocator = self._allocator
        return MemoryEstimate(
            peak_bytes=peak,
            peak_phase=phase,
            categories=_named(at_peak),
            by_phase={name: _named(alive) for name, (_, alive) in self._peaks.items()},
            after_parameters=before,
            forward_peak=peaks[FORWARD],
            saved_for_backward=self._saved if BACKWARD in peaks else None,
            backward_peak=peaks.get(BACKWARD),
            optimizer_peak=peaks.get(OPTIMIZER),
            reserved_peak=allocator.reserved_peak if isinstance(allocator, CachingAllocator) else None,
            host_bytes=self._host_bytes,
        )


def _named(alive: list[int]) -> dict[MemoryCategory, int]:
    return {name: count for name, count in zip(CATEGORIES, alive, strict=True) if count}


# The requests of a step with few groups of blocks, played for one with many.

FEW = 6
"""Groups of blocks in the step that is recorded: of the two in the middle, which must be alike, the step has more."""

FARTHEST = 2
"""How far a group may be from one whose memory it gives back."""

_OUTSIDE, _LOSS = "outside", "loss"
_OF_GROUPS = ("forward", "backward")

_Place = tuple[str, int, int]
"""What made a block: the kind of part, its group, and which of the part's requests. Where one group names another, its
group counts from that one."""

_Part = tuple[str, int, list["int | _Place"]]
"""A part of a pass: its kind, its group, and its requests: a size, or the place of a block that is given back."""


class _Unlike(Exception):
    """Raised where the requests of a step do not repeat from group to group."""


def _repeats(workload: TextbookWorkload) -> bool:
    """Whether all blocks keep alike, in so many groups that it is worth while to record few of them."""
    span, *others = workload.spans
    kept_here = span.calls is None and not span.on_host
    return kept_here and not others and 2 * FEW * span.group < workload.model.layers <= MANY_LAYERS


class _Recorder:
    """An allocator that notes the requests of one pass after another."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.places: list[_Place] = []
        """By block."""
        self.earlier, self.loss, self.unlike = 0, NO_BLOCK, False
        self.begin(_OUTSIDE, 0)

    def begin(self, kind: str, group: int) -> None:
        self._kind, self._group, self._made = kind, group, 0
        self._requests: list[int | _Place] = []
        self.parts.append((kind, group, self._requests))

    def allocate(self, size: int) -> tuple[int, int]:
        if not size:
            return NO_BLOCK, 0
        self._requests.append(size)
        self.places.append((self._kind, self._group, self._made))
        self._made += 1
        return len(self.places) - 1, size

    def free(self, block: int) -> None:
        kind, group, made = (_LOSS, 0, 0) if block == self.loss else self.places[block]
        if kind in _OF_GROUPS and self._kind in _OF_GROUPS:
            group -= self._group
            self.unlike |= abs(group) > FARTHEST
        self.unlike |= block < self.earlier and block != self.loss
        self._requests.append((kind, group, made))

    def between(self, tape: Tape, x: Tensor, number: int) -> Tensor:
        """Begin the forward of a group. Its alias runs when the backward of all later groups has ended."""

        def backward(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
            self.begin(*(("backward", number - 1) if number else (_OUTSIDE, 3)))
            return (gradient,)

        self.begin(*(("forward", number) if number < FEW else (_OUTSIDE, 1)))
        return tape.alias("Between", x, backward)


class _RecordedStep(SymbolicStep):
    """A step with few groups, which notes the requests of its passes."""

    def __init__(self, workload: TextbookWorkload, layers: int) -> None:
        self.recorder = _Recorder()
        model = msgspec.structs.replace(workload.model, layers=layers)
        super().__init__(msgspec.structs.replace(workload, model=model), "cuda", self.recorder)
        self._model.between = self.recorder.between

    @property
    def blocks(self) -> Sequence[BlockParameters]:
        return self._model.blocks

    def record(self, first: bool, adds: bool) -> tuple[list[_Part], dict[str, _Place], _Place | None]:
        """The parts of a pass, the places of the gradients that it made, and that of its loss."""
        recorder = self.recorder
        if not adds:
            self._release_gradients()
        recorder.loss = self._loss.storage.block if self._loss else NO_BLOCK
        recorder.parts, recorder.unlike, recorder.earlier = [], False, len(recorder.places)
        self._forward_and_backward(first)
        if recorder.unlike:
            raise _Unlike
        gradients = {p.name: p.gradient.block for p in self._model.parameters if p.gradient}
        places = {name: recorder.places[block] for name, block in gradients.items() if block >= recorder.earlier}
        return recorder.parts, places, recorder.places[self._loss.storage.block] if self._loss else None

    def _begin(self, phase: str) -> None:
        self.recorder.begin(_OUTSIDE, 0 if phase == FORWARD else 2)
        super()._begin(phase)


class PlayedStep(SymbolicStep):
    """A step that plays the requests of one with few groups to the allocator, which alone is right: no peak is counted.

    The symbolic tensors of a step of 48 blocks take twice as long as the allocator.
    """

    def __init__(self, workload: TextbookWorkload, device_type: DeviceType, allocator: Allocator) -> None:
        super().__init__(workload, device_type, allocator)
        self._group, layers = workload.spans[0].group, workload.model.layers
        self._more = -(-layers // self._group) - FEW
        """Groups that the step has more than the recorded one."""
        self._recorded = _RecordedStep(workload, layers - self._more * self._group)
        self._passes: dict[tuple[bool, bool], tuple[list[_Part], list[tuple[Parameter, _Place]], _Place | None]] = {}
        self._last_loss = NO_BLOCK

    def _forward_and_backward(self, first: bool) -> None:
        """Play a pass: the first of all, one that adds to gradients, or another."""
        adds = any(parameter.gradient for parameter in self._model.parameters)
        if (first, adds) not in self._passes:
            parts, gradients, loss = self._recorded.record(first, adds)
            self._passes[first, adds] = self._with_more(parts), self._of_parameters(gradients), loss
        parts, gradients, loss = self._passes[first, adds]
        made: dict[str, dict[int, list[int]]] = {kind: {} for kind in (_OUTSIDE, *_OF_GROUPS)}
        made[_LOSS] = {0: [self._last_loss]}
        for kind, group, requests in parts:
            if kind == _OUTSIDE and group in (0, 2):
                self._begin(BACKWARD if group else FORWARD)
            self._play(requests, made[kind].setdefault(group, []), made, group if kind in _OF_GROUPS else 0)
            self._end()
        held: dict[_Place, Storage] = {}
        for parameter, place in gradients:
            if place not in held:  # those of joint projections lie in one block
                (kind, group, number), size = place, parameter.bytes
                block = made[kind][group][number]
                held[place] = Storage(self._ledger, size, CATEGORIES.index("gradients"), block, size)
            parameter.gradient = held[place]
        self._last_loss = made[loss[0]][loss[1]][loss[2]] if loss else NO_BLOCK

    def _play(
        self, requests: list[int | _Place], own: list[int], made: dict[str, dict[int, list[int]]], own_group: int
    ) -> None:
        allocate, free = self._allocator.allocate, self._allocator.free
        first = {_OUTSIDE: 0, _LOSS: 0, "forward": own_group, "backward": own_group}
        for request in requests:
            if isinstance(request, int):
                own.append(allocate(request)[0])
            else:
                kind, group, number = request
                free(made[kind][first[kind] + group][number])

    def _with_more(self, parts: list[_Part]) -> list[_Part]:
        """The parts of a pass with as many groups as the step has."""
        by_place = {(kind, group): requests for kind, group, requests in parts}
        if any(by_place.get((kind, 2)) != by_place.get((kind, 3)) for kind in _OF_GROUPS):
            raise _Unlike
        more: list[_Part] = []
        for kind, group, requests in parts:
            if kind == _OUTSIDE:
                more.append((kind, group, self._frees_of_more(requests)))
            elif group == 2:
                groups = range(2, 3 + self._more)
                more += [(kind, one, requests) for one in (groups if kind == "forward" else reversed(groups))]
            else:
                more.append((kind, self._moved(group), requests))
        return more

    def _moved(self, group: int) -> int:
        """The group's number in the step, of which those in the end are later."""
        return group + self._more * (group > 2)

    def _frees_of_more(self, requests: list[int | _Place]) -> list[int | _Place]:
        """Requests outside of groups. What they give back of the two in the middle, one right after the other, they
        give back of all between."""

        def of_group(request: int | _Place) -> int | None:
            return request[1] if isinstance(request, tuple) and request[0] in _OF_GROUPS else None

        runs = [(group, list(run)) for group, run in itertools.groupby(requests, of_group)]
        groups = [group for group, _ in runs]
        if not groups.count(2) == groups.count(3) <= 1:
            raise _Unlike
        played: list[int | _Place] = []
        for place, (group, run) in enumerate(runs):
            if group is None:
                played += run
                continue
            numbers = [self._moved(group)]
            if group == 2:
                upwards = groups[place + 1 : place + 2] == [3]
                other, others = runs[place + 1 if upwards else max(0, place - 1)]
                if other != 3 or _numbers(run) != _numbers(others):
                    raise _Unlike
                numbers = [*range(2, 3 + self._more)][:: 1 if upwards else -1]
            played += [(kind, number, made) for number in numbers for kind, made in _numbers(run)]
        return played

    def _of_parameters(self, places: dict[str, _Place]) -> list[tuple[Parameter, _Place]]:
        """The parameters whose gradients a pass makes, and where."""
        size, few = self._group, self._recorded.blocks
        found: dict[Parameter, _Place] = {}
        for number, block in enumerate(self._model.blocks):
            group = number // size
            recorded = min(group, max(2, group - self._more))
            for name, parameter in block.items():
                place = places.get(few[recorded * size + number % size][name].name)
                if place is None:
                    continue
                kind, away, made = place[0], place[1] - recorded, place[2]
                if kind not in _OF_GROUPS or abs(away) > FARTHEST:
                    raise _Unlike
                if recorded == 2 and places.get(few[3 * size + number % size][name].name) != (kind, 3 + away, made):
                    raise _Unlike
                found[parameter] = kind, group + away, made
        of_blocks = {parameter for block in self._model.blocks for parameter in block.values()}
        for parameter in self._model.parameters:
            if parameter not in of_blocks and (place := places.get(parameter.name)) is not None:
                kind, group, made = place
                found[parameter] = kind, self._moved(group) if kind in _OF_GROUPS else group, made
        return list(found.items())


def _numbers(requests: list[int | _Place]) -> list[tuple[str, int]]:
    """What requests give back, whatever its group."""
    return [(request[0], request[2]) for request in requests if isinstance(request, tuple)]


# What one block keeps for backward, tensor by tensor.

_CAST = CATEGORIES.index("cast copies")


class KeptTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one size that the same operators of a block keep."""

    operators: tuple[str, ...]
    """The operators that keep it for their backward, as autograd names them."""
    dimensions: tuple[str, ...]
    """`batch_size`, `seq_len`, `d_model`...: their product is the number of elements."""
    sizes: tuple[int, ...]
    itemsize: int
    count: int = 1
    cast_copy: bool
    """Whether it is autocast's copy of a weight."""

    @property
    def bytes_each(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @property
    def total_bytes(self) -> int:
        return self.count * self.bytes_each


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a user's step that are alike and alive at its peak."""

    category: MemoryCategory
    name: str
    """That of a parameter, or the operator that made it and the line that called it; numbers in it are `*`."""
    shape: tuple[int, ...]
    dtype: str
    bytes_each: int
    """Bytes that were asked for."""
    count: int = 1
    total_bytes: int
    """Bytes that the allocator gives all of them."""


def kept_by_block(workload: TextbookWorkload) -> tuple[KeptTensor, ...]:
    """Everything that a block keeps, the largest first; its input is counted with it, its output with the next.

    For a workload that checkpoints, this is what a block keeps while backward runs it again.
    """
    model = symbolic_model(workload, "cuda")
    tape = Tape(Ledger(), recording=True)
    x = model.embedding(tape)
    out = model.block(tape, x, model.blocks[0])
    nodes: dict[int, Node] = {}
    waiting: list[Node | Parameter | None] = [out.node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Node) and node.number not in nodes:
            nodes[node.number] = node
            waiting += node.inputs
    operators: dict[int, list[str]] = {}
    storages: dict[int, Storage] = {}
    for number in sorted(nodes, reverse=True):
        node = nodes[number]
        for storage in node.saved:
            storages[id(storage)] = storage
            operators.setdefault(id(storage), []).insert(0, node.operator)
    counts: dict[KeptTensor, int] = {}
    for key, storage in storages.items():
        tensor = _described(workload, storage, tuple(dict.fromkeys(operators[key])))
        counts[tensor] = counts.get(tensor, 0) + 1
    kept = [msgspec.structs.replace(tensor, count=count) for tensor, count in counts.items()]
    return tuple(sorted(kept, key=lambda tensor: (-tensor.total_bytes, tensor.operators)))


def _described(workload: TextbookWorkload, storage: Storage, operators: tuple[str, ...]) -> KeptTensor:
    """The storage with the first natural shape whose product is its size."""
    is_weight = storage.category == _CAST
    config, batch, length = workload.model, workload.micro_batch_size, workload.seq_len
    size = {
        "batch_size": batch, "seq_len": length, "d_model": config.d_model, "d_ff": config.d_ff,
        "heads": config.heads, "head_dim": config.head_dim, "key_width": config.key_width,
        "qkv_width": config.d_model + 2 * config.key_width, "gate_up_width": 2 * config.d_ff,
    }  # fmt: skip
    shapes = _WEIGHTS if is_weight else _ACTIVATIONS if workload.projections == "apart" else (*_JOINT, *_ACTIVATIONS)
    if _OF_SCORES & set(operators):  # sizes of other shapes may be equal
        shapes = sorted(shapes, key=lambda shape: shape[0].count("seq_len") < 2)
    wide = workload.dtype in ("fp32", "tf32")
    for dimensions, itemsizes in shapes:
        for itemsize in itemsizes:
            if wide and itemsize == 2:
                continue  # nothing there is of 16 bits
            if math.prod(size[name] for name in dimensions) * itemsize == storage.bytes:
                return KeptTensor(
                    operators=operators,
                    dimensions=dimensions,
                    sizes=tuple(size[name] for name in dimensions),
                    itemsize=itemsize,
                    cast_copy=is_weight,
                )
    return KeptTensor(
        operators=operators, dimensions=("bytes",), sizes=(storage.bytes,), itemsize=1, cast_copy=is_weight
    )


_OF_SCORES = {"Bmm", "Softmax", "SafeSoftmax"}
"""Operators that keep scores of attention, a figure for each query and key."""

_Shapes = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
_WEIGHTS: _Shapes = ((("d_model", "d_model"), (2,)), (("d_model", "d_ff"), (2,)), (("key_width", "d_model"), (2,)))
_JOINT: _Shapes = (
    (("batch_size", "seq_len", "qkv_width"), (4, 2)),
    (("batch_size", "seq_len", "gate_up_width"), (4, 2)),
)
_ACTIVATIONS: _Shapes = (
    (("batch_size", "seq_len", "d_model"), (4, 2)),
    (("batch_size", "seq_len", "key_width"), (4, 2)),
    (("batch_size", "seq_len", "d_ff"), (4, 2)),
    (("batch_size", "heads", "seq_len", "seq_len"), (4, 2)),
    (("batch_size", "heads", "seq_len"), (4, 2)),
    (("batch_size", "seq_len"), (4,)),
    (("seq_len", "seq_len"), (1,)),
    (("seq_len", "head_dim"), (4, 2)),
)


# A step whose blocks' linear layers multiply operands in blocks of few bits: weights, gradients and states are those of
# its dtype. A layer keeps its input in the format, laid out as the weight's gradient takes it, instead of in 16 bits;
# layers of one input keep it once. All other operands are there for a product alone. The products of attention and of
# the head stay in 16 bits. No GPU that was measured has such products: nothing here was compared with a run.


class BlockProducts(ScaledProducts):
    """Products whose operands are in blocks of a format."""

    form: BlockFormat
    kept: tuple["weakref.ref[Storage]", "weakref.ref[Storage]"] | None = None
    """The input that was last kept, and it in the format."""
    moved = 0
    """Bytes that rounding reads, and in backward those that it writes."""

    def linear(self, tape: Tape, x: Tensor, weight: Parameter, in_features: int) -> Tensor:
        """x w^T."""
        rows, outer = x.elements // in_features, weight.elements // in_features

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            along, across, turned = self.backward_operands(tape, rows, in_features, outer)
            for_x = self.result_of_product(tape, rows, in_features)
            del along, turned
            for_weight = self.result_of_product(tape, outer, in_features)
            del across
            return for_x, for_weight

        kept = self.kept_input(tape, x, in_features)
        _operands = self.operands(tape, rows, in_features, outer)
        return tape.op(
            "ScaledMm", rows * outer, x.itemsize, [x, weight], also_saves=kept, backward=backward, saves_late=True
        )

    def kept_input(self, tape: Tape, x: Tensor, columns: int) -> Sequence[Storage]:
        """The input (rows, columns) as the weight's gradient takes it: that which is kept already, if any is."""
        kept = self.kept[1]() if self.kept is not None and self.kept[0]() is x.storage else None
        if kept is None and tape.recording:
            kept = tape.storage(self.form.bytes_of(columns, x.elements // columns))
            self.kept = weakref.ref(x.storage), weakref.ref(kept)
        return [kept] if kept else []

    def operands(self, tape: Tape, rows: int, inner: int, outer: int) -> Sequence[Storage]:
        """x and w."""
        self.moved += (rows + outer) * inner * self.itemsize
        size = self.form.bytes_of
        return tape.storage(size(rows, inner)), tape.storage(size(outer, inner, weight=True))

    def backward_operands(self, tape: Tape, rows: int, inner: int, outer: int) -> Sequence[Storage]:
        """dy in both layouts, and w^T."""
        size = self.form.bytes_of
        made = [size(rows, outer), size(outer, rows), size(inner, outer, weight=True)]
        self.moved += (rows + inner) * outer * self.itemsize + sum(made)
        return [*map(tape.storage, made)]


def products_in(form: BlockFormat, itemsize: int) -> BlockProducts:
    """Products whose operands of so many bytes are rounded to blocks."""
    products = BlockProducts(by_row=False, on_gpu=True, itemsize=itemsize)
    products.form = form
    return products


@functools.lru_cache(maxsize=64)
def estimate_in_blocks(workload: TextbookWorkload, form: BlockFormat) -> MemoryEstimate:
    """Peaks of a steady step with the products of its blocks' linear layers in these blocks."""
    step = SymbolicStep(workload, "cuda", CachingAllocator())
    step.take_blocks(form)
    return step.run(STEPS)


def check_operands(workload: Workload) -> None:
    """Raise InputError for a step whose operands blocks cannot take the place of, or of which no prediction is."""
    if PRECISIONS[workload.dtype].products != 2 or PRECISIONS[workload.dtype].scaled:
        raise InputError(
            f"a recipe takes the place of operands of 16 bits, not of {workload.dtype}'s: choose dtype bf16"
        )
    if isinstance(workload, TextbookWorkload) and not as_eager(workload):
        raise InputError("what a compiler keeps of operands in blocks is not predicted: choose compile eager or blocks")
    if isinstance(workload, TextbookWorkload) and workload.projections != "apart":
        raise InputError("operands of joint projections in blocks are not predicted: choose projections apart")


def rate_in_blocks(form: BlockFormat, spec: DeviceSpec) -> float | None:
    """FLOP/s of products in blocks of a format by the datasheet; None where the device does not multiply them."""
    rates = spec.peak_flops_per_s
    # Scales of blocks came with products of 4 bits; those of NVFP4 are NVIDIA's.
    lacks_scales = form.scale != "fp32" and "fp4" not in rates
    is_anothers = form.tensor_scale and "NVIDIA" not in spec.name
    return None if lacks_scales or is_anothers else rates.get(form.element.partition("-")[0])
