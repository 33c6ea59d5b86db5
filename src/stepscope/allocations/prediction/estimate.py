"""What a step of a workload needs, predicted from the workload alone: without torch, without a GPU.

The step runs symbolically (`symbolic_model.py`: what every operation makes, and what autograd keeps of it), a simulated
allocator serves its requests (`caching_allocator.py`), and the highest moment is the peak. No figure in it was fitted:
the sizes follow from the model's code; the allocator's rules and the library's workspace, from PyTorch's.
"""

import functools
import math
from typing import Literal

import msgspec

from stepscope.allocations.prediction.caching_allocator import CachingAllocator, OutOfMemory
from stepscope.allocations.prediction.symbolic_model import CompiledSymbolicModel, FusedSymbolicModel, SymbolicModel
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
from stepscope.core.attention_support import unpredicted
from stepscope.core.errors import InputError
from stepscope.core.evidence import CATEGORIES, MemoryCategory
from stepscope.core.formulas.transformer import aligned_numbers, moment_blocks, moment_bytes
from stepscope.core.parts import ATTENTIONS, REFERENCE, Attention
from stepscope.core.precisions import PRECISIONS, check_scaled_layers, check_scaled_rows, takes_scaled
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.units import MIB
from stepscope.core.workloads import GRAPH_WARMUP, OF_ONE_LAUNCH, TextbookWorkload

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
    step = SymbolicStep(workload, "cuda", CachingAllocator(limit_bytes))
    try:
        step.run(GRAPH_WARMUP if workload.graph == "step" else STEPS_TO_FAIL)
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
    eager = workload.compile == "eager"
    if any(name != REFERENCE for name in workload.parts.values()):
        return FusedSymbolicModel(workload, device_type)
    return (SymbolicModel if eager else CompiledSymbolicModel)(workload, device_type)


_CHUNK = 1024
"""Elements of a chunk of the update in one launch (kernels/adamw.py)."""

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
        self._workload, self._allocator = workload, allocator
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

    def run(self, steps: int) -> MemoryEstimate:
        """Build, and predict from the last of so many steps. Raises OutOfMemory where the allocator has a limit."""
        workload, before = self._workload, 0
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
        workload, model = self._workload, self._model
        angles = (workload.seq_len * workload.model.head_dim, model.sizes.buffers)
        first, *others = ((p.elements, p.itemsize) for p in model.parameters)
        tensors = [first, angles, angles, *others]
        # A model in bf16 is made in fp32 and then cast, tensor by tensor. What was made becomes the master weight.
        keeps_masters = PRECISIONS[workload.dtype].masters and workload.phase == "train"
        cast = any(size != 4 for _, size in tensors)
        made = [4 * elements for elements, _ in tensors]
        if cast:
            storages = [self._stay(size, "parameters") for size in made]
        else:
            storages = self._ledger.together(made, CATEGORIES.index("parameters"))
        for i, (elements, size) in enumerate(tensors if cast else ()):
            if size != 4:
                if keeps_masters:
                    storages[i].become(CATEGORIES.index("optimizer state"))
                    self._resident.append(storages[i])
                storages[i] = self._stay(size * elements, "parameters")
        self._resident += storages
        self._resident += [self._stay(workload.tokens * 8, "inputs") for _ in range(2 * DISTINCT_BATCHES)]

    def _stay(self, size: int, category: MemoryCategory) -> Storage:
        return self._ledger.storage(size, CATEGORIES.index(category))

    def _forward_and_backward(self, first: bool) -> None:
        tape = Tape(self._ledger, recording=self._workload.phase != "forward")
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
        parameters, optimizer = self._model.parameters, self._workload.optimizer
        if first:
            self._make_optimizer_state()
        masters = PRECISIONS[self._workload.dtype].masters
        # training/optimizer.py `OnMasters`: every gradient in fp32.
        casts = [p for p in parameters if masters and p.itemsize != masters and optimizer not in OF_ONE_LAUNCH]
        gradients = [self._ledger.storage(masters * p.elements) for p in casts]
        if self._workload.clip is not None and optimizer not in OF_ONE_LAUNCH:
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
        parameters, masters = self._model.parameters, PRECISIONS[self._workload.dtype].masters
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
        if self._workload.optimizer in OF_ONE_LAUNCH:
            numbers = [2 * aligned_numbers(count) for count in elements]
            sizes = [4 * sum(numbers[i] for i in places) for places in moment_blocks(numbers)]
            tensors, chunks = len(elements), sum(-(-count // _CHUNK) for count in elements)
            sizes += [8 * tensors, 4 * tensors, 4 * chunks, 8 * chunks, 5 * 8 * tensors, 32, 32, 32]
            if self._workload.clip is not None:
                sizes += [4 * min(chunks, _SUMS), 8]
        else:
            itemsize = moment_bytes(self._workload)
            counts = [4] if self._workload.optimizer == "adamw-fused" else []  # its count of steps
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
    }  # fmt: skip
    shapes = _WEIGHTS if is_weight else _ACTIVATIONS
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
