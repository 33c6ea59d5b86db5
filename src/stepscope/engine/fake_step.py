"""Predicts a step's memory on a GPU by running it on fake tensors: without a GPU, without memory, in a few seconds.

This is the second of two predictions that know nothing of each other. `allocations/prediction/estimate.py` adds up
formulas, tensor by tensor; here nobody says what is saved: the step itself runs, with the model's own code and
PyTorch's autograd, and its allocations are watched (`recording/fake_memory.py`). They then go through the simulated
allocator, which both predictions share, as they share the size of cuBLAS' workspace.

Compared with runs on an H200 (results/h200: plain, optimizer, tf32, kernels), every phase's peak is within 0.4 %, and
many are equal to the byte. What differs is the allocator's remainders: a request keeps up to 1 MiB beyond its size, or
not, by what happens to be free, and that depends on all that ran before.
"""

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Generator

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.allocations.prediction.caching_allocator import CachingAllocator, OutOfMemory
from stepscope.allocations.prediction.estimate import WORKSPACE_BYTES
from stepscope.allocations.prediction.fit import FakeEstimate
from stepscope.allocations.prediction.symbolic_tensors import Allocator
from stepscope.core.attention_support import predicted_attention
from stepscope.core.attentions import ATTENTIONS, Memory
from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import MemoryCategory
from stepscope.core.parts import REFERENCE
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workloads import TextbookWorkload
from stepscope.recording.fake_memory import AsOnCuda, AttentionBackend, FakeMemory
from stepscope.recording.held_tensors import optimizer_tensors
from stepscope.recording.step import Recorder, drive
from stepscope.training.scaled_products import cast_as_on_a_gpu
from stepscope.training.training_step import AssembledStep, TrainingStep

LARGEST_TENSOR = 2**58
"""The most elements of a tensor, since PyTorch counts its bytes in 63 bits."""

STEPS_BEFORE = 2
"""Steps before the one that counts. The first makes the optimizer's state, so the second is the first that is like
all later ones."""

_BACKENDS: dict[Memory, AttentionBackend] = {
    "math": "math", "efficient": "efficient", "flash": "flash", "cudnn": "cudnn", "fused": "flash", "hopper": "flash",
}  # fmt: skip
"""The backend of scaled_dot_product_attention that stands in for an attention: our own fused kernels keep and allocate
the same as PyTorch's kernels of the same algorithm."""


def estimate_by_running(workload: TextbookWorkload, *, workspace_bytes: int = WORKSPACE_BYTES) -> FakeEstimate:
    """Run the step on fake tensors and count. Raises InputError for what cannot be run so: compiled steps.

    workspace_bytes: what cuBLAS keeps for each thread that multiplies matrices. Every layer runs: 48 of them take
    seconds, so nothing is extrapolated from fewer.
    """
    watched = watch_fake_step(workload, workspace_bytes=workspace_bytes)
    return replayed(watched)


class RefusedInPhase(Exception):
    """Raised where the simulated allocator refuses a request, with the name of the phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedStep:
    """The allocations and releases while a step was made and run until it was steady."""

    watch: FakeMemory
    """Every allocation, with the phases of the last step."""
    built: int
    """Number of events before the step, while the model and its optimizer were built."""
    parameter_bytes: int


def watch_fake_step(workload: TextbookWorkload, *, workspace_bytes: int = WORKSPACE_BYTES) -> WatchedStep:
    """Make and run the step on fake tensors. Raises InputError for what cannot be run so: compiled steps."""
    if workload.compile != "eager":
        raise InputError(f"compile {workload.compile} cannot be run on fake tensors: choose eager, or use the formulas")
    other = next(((part, name) for part, name in workload.parts.items() if name != REFERENCE), None)
    if other is not None:
        raise InputError(
            f"{other[0]} {other[1]} cannot be run on fake tensors, which see nothing of what its kernels make: "
            f"choose --{other[0]} {REFERENCE}, or use the formulas"
        )
    model, tokens = workload.model, workload.tokens
    if tokens * max(model.heads * workload.seq_len, model.vocabulary, model.d_ff) > LARGEST_TENSOR:
        raise InputError(
            "a tensor of this step would be beyond PyTorch's 64-bit sizes: lower the batch or the sequence"
        )
    watch = FakeMemory(workspace_bytes=workspace_bytes)
    as_on_cuda = AsOnCuda(lambda query: attention_backend(workload, query))
    with contextlib.ExitStack() as modes:
        modes.enter_context(FakeTensorMode())
        modes.enter_context(watch)
        step = make_fake_step(workload)
        label_residents(step, watch)
        built = len(watch.events)
        modes.enter_context(as_on_cuda.throughout([step.forward_module, *step.model.blocks]))
        run_steps(step, watch, STEPS_BEFORE + 1)
        parameter_bytes = sum(p.numel() * p.element_size() for p in step.model.parameters())
    watched = WatchedStep(watch=watch, built=built, parameter_bytes=parameter_bytes)
    watch.end()
    del step
    gc.collect()  # a step and its phases refer to each other
    return watched


def run_steps(step: AssembledStep, watch: FakeMemory, count: int, *, on_host: bool = True) -> None:
    """Run so many steps; the watch keeps the phases of the last. on_host: as in `label_residents`."""
    phases = _FakePhases(step, watch)
    for _ in range(count):
        watch.phases.clear()
        step.prepare()
        drive(step, phases)
        label_residents(step, watch, on_host=on_host)


class _FakePhases(Recorder):
    """A Recorder that tells FakeMemory of the phases and names the gradients."""

    def __init__(self, step: AssembledStep, watch: FakeMemory) -> None:
        self._step, self._watch = step, watch

    def phase_begins(self, name: str) -> None:
        self._phase = self._watch.phase(name)
        self._phase.__enter__()

    def phase_ends(self, name: str) -> None:
        self._phase.__exit__(None, None, None)
        if name == BACKWARD:
            self._watch.label([p.grad for p in self._step.model.parameters() if p.grad is not None], "gradients")


def attention_backend(workload: TextbookWorkload, query: Tensor) -> AttentionBackend:
    """The backend that scaled_dot_product_attention takes on a Hopper GPU: in 16 bits cuDNN (PyTorch 2.11).

    The only fused kernel for fp32, the efficient one, takes no shared keys (sdp_utils.cpp).
    """
    memory = ATTENTIONS[predicted_attention(workload, "cuda")].memory
    assert memory is not None
    if memory == "chosen" and query.dtype == torch.float32:
        return "math" if workload.model.kv_heads else "efficient"
    if memory == "chosen":
        return "cudnn"
    return _BACKENDS[memory]


def make_fake_step(workload: TextbookWorkload) -> TrainingStep:
    """The eager step, to be made under FakeTensorMode and FakeMemory. Raises InputError for what no GPU runs."""
    attention = predicted_attention(workload, "cuda")
    # The CPU refuses some choices that do not change the tensors: TF32 is fp32 in memory, and the backend is decided
    # above. A module of fake tensors cannot be converted to bf16, but it can be made so.
    stand_in = msgspec.structs.replace(
        workload,
        dtype="fp32" if workload.dtype in ("tf32", "bf16-pure") else workload.dtype,
        attention=attention if ATTENTIONS[attention].memory == "scores" else "sdpa",
        compile="eager",
    )
    with _default_dtype(torch.bfloat16 if workload.dtype == "bf16-pure" else torch.float32):
        step = TrainingStep(stand_in, torch.device("cpu"))
    cast_as_on_a_gpu(step.model)
    # On the CPU the batches are views of one tensor; on a GPU each is a tensor of its own.
    step.batches = [(tokens.clone(), targets.clone()) for tokens, targets in step.batches]
    return step


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def label_residents(step: AssembledStep, watch: FakeMemory, *, on_host: bool = True) -> None:
    """Name what lives on between steps. on_host: the optimizer's counts of steps are on the host."""
    watch.label([*step.model.parameters(), *step.model.buffers()], "parameters")
    watch.label([tensor for batch in step.batches for _, tensor in step.named_tensors(batch)], "inputs")
    fused = step.workload.optimizer == "adamw-fused"
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    for name, value in optimizer_tensors(step.optimizer, step.model, names):
        # Only the fused kernel reads the count of steps on the device.
        watch.label([value], "optimizer state", on_device=fused or not name.endswith(".step") or not on_host)


@dataclasses.dataclass
class _Moment:
    """The allocator's count at the highest point of a phase."""

    allocated: int = 0
    event: int = 0


def replayed(watched: WatchedStep, allocator: Allocator | None = None) -> FakeEstimate:
    """Play the events through the allocator, PyTorch's on a GPU if left out; returns the last step's figures.

    Raises RefusedInPhase where the allocator has a limit, and refuses a request.
    """
    watch = watched.watch
    allocator = allocator or CachingAllocator()
    blocks: dict[int, tuple[int, int]] = {}
    allocated = 0
    counts: list[int] = []
    reserved: list[int] = []
    # Temporaries of filling the model are left out, since how PyTorch draws numbers in place differs by version.
    passing = {~event for event in watch.events[: watched.built] if event < 0}
    for event in watch.events:
        index = event if event >= 0 else ~event
        if watch.allocations[index].on_device and index not in passing:
            if event >= 0:
                try:
                    blocks[index] = allocator.allocate(watch.allocations[index].nbytes)
                except OutOfMemory as error:
                    raise RefusedInPhase(watch.allocations[index].phase or "build") from error
                allocated += blocks[index][1]
            else:
                allocator.free(blocks[index][0])
                allocated -= blocks[index][1]
        counts.append(allocated)
        reserved.append(getattr(allocator, "reserved", 0))
    peaks: dict[str, _Moment] = {}
    saved: list[int] = []
    for phase in watch.phases:
        # The phase begins with the event before it, which may be its highest moment.
        event = max(range(phase.start - 1, phase.end), key=counts.__getitem__)
        if phase.name not in peaks or counts[event] > peaks[phase.name].allocated:
            peaks[phase.name] = _Moment(allocated=counts[event], event=event)
        if phase.name == FORWARD:
            saved.append(counts[phase.end - 1] - counts[phase.start - 1])
    start = watch.phases[0].start - 1
    memory = PhaseMemory(
        parameter_bytes=watched.parameter_bytes,
        after_parameters=counts[start],
        forward_peak=peaks[FORWARD].allocated,
        saved_for_backward=max(saved) if BACKWARD in peaks else None,
        backward_peak=peaks[BACKWARD].allocated if BACKWARD in peaks else None,
        optimizer_peak=peaks[OPTIMIZER].allocated if OPTIMIZER in peaks else None,
        reserved_peak=max(reserved[start:]),
    )
    peak_phase = max(peaks, key=lambda name: peaks[name].allocated)
    categories = _categories(watch, blocks, peaks[peak_phase].event)
    return FakeEstimate(
        peak_bytes=sum(categories.values()), peak_phase=peak_phase, categories=categories, memory=memory
    )


def _categories(watch: FakeMemory, blocks: dict[int, tuple[int, int]], at: int) -> dict[MemoryCategory, int]:
    alive: set[int] = set()
    for event in watch.events[: at + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.remove(~event)
    categories: Counter[MemoryCategory] = Counter()
    for index in alive:
        allocation = watch.allocations[index]
        if allocation.on_device:
            categories[allocation.category] += allocation.nbytes
            categories["rounding"] += blocks[index][1] - allocation.nbytes
    return dict(categories)
