"""Predicts the memory of a step of a user's module, by running it on fake tensors.

The factory really runs, since it may read files or ask for values. Only large parameters are not filled with random
numbers, so that they take addresses but no memory. Parameters, buffers and floating inputs then become fake. As for
the textbook (`engine/fake_module.py`), the step then runs, and a simulated allocator plays what it allocates.
"""

import contextlib
import dataclasses
import gc
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from stepscope.allocations.prediction.caching_allocator import Allocator, CachingAllocator, OutOfMemory, Program, scaled
from stepscope.allocations.prediction.estimate import WORKSPACE_BYTES, DeviceType
from stepscope.allocations.prediction.fit import SEQUENCE_STEP, Budget, FakeEstimate, Fit, Unseen, judge, largest
from stepscope.allocations.prediction.symbolic_tensors import RoundingAllocator
from stepscope.core.attention_support import predicted_attention
from stepscope.core.errors import InputError, message_of, named_line
from stepscope.core.evidence import MemoryCategory, PhaseMemory
from stepscope.core.parts import ATTENTIONS, REFERENCE, Memory
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workloads import OF_LIBRARIES, FactoryWorkload, TextbookWorkload, UserModel
from stepscope.engine.request import Stage, Tell
from stepscope.recording import fake_memory
from stepscope.recording.as_on_cuda import AsOnCuda, AttentionBackend, made_here
from stepscope.recording.held_tensors import gradient_buckets, model_tensors, optimizer_tensors
from stepscope.recording.step import Phase, Recorder, drive
from stepscope.training.optimizer import optimizers_within, require_fake_update, update_as_on_a_gpu, updated_by
from stepscope.training.parts.replaced import join_projections
from stepscope.training.scaled_products import cast_as_on_a_gpu
from stepscope.training.training_step import AssembledStep, TrainingStep, of_library
from stepscope.training.user_module.loading import UnfilledParameters, default_of, load_module
from stepscope.training.user_module.module_step import ModuleStep, UserModule
from stepscope.training.user_module.user_code import describe_module, named_tensors, resized, with_tensors

# This is the second of two predictions that know nothing of each other. `allocations/prediction/estimate.py` adds up
# formulas, tensor by tensor; here the step itself runs, with the model's own code and PyTorch's autograd, and its
# allocations are watched (`recording/fake_memory.py`). Both share the simulated allocator and cuBLAS' workspace.
#
# Compared with runs on an H200 (results/h200: plain, optimizer, tf32, kernels), every phase's peak is within 0.4 %, and
# many are equal to the byte. What differs is the allocator's remainders: a request keeps up to 1 MiB beyond its size,
# or not, by what happens to be free, and that depends on all that ran before.


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

    watch: fake_memory.FakeMemory
    """Every allocation, with the phases of the last step."""
    built: int
    """Number of events before the step, while the model and its optimizer were built."""
    parameter_bytes: int


def watch_fake_step(workload: TextbookWorkload, *, workspace_bytes: int = WORKSPACE_BYTES) -> WatchedStep:
    """Make and run the step on fake tensors. Raises InputError for what cannot be run so: compiled steps."""
    compiled, model, tokens = workload.compile != "eager", workload.model, workload.tokens
    if compiled or model.sinks or workload.graph == "step":
        what = f"compile {workload.compile}" if compiled else "sinks" if model.sinks else "graph step"
        raise InputError(f"{what} cannot be run on fake tensors: leave it out, or use the formulas")
    other = next(((part, name) for part, name in workload.parts.items() if name != REFERENCE), None)
    if other is not None:
        raise InputError(
            f"{other[0]} {other[1]} cannot be run on fake tensors, which see nothing of what its kernels make: "
            f"choose --{other[0]} {REFERENCE}, or use the formulas"
        )
    if tokens * max(model.heads * workload.seq_len, model.vocabulary, model.d_ff) > LARGEST_TENSOR:
        raise InputError(
            "a tensor of this step would be beyond PyTorch's 64-bit sizes: lower the batch or the sequence"
        )
    watch = fake_memory.FakeMemory(workspace_bytes=workspace_bytes)
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


def run_steps(
    step: AssembledStep, watch: fake_memory.FakeMemory, count: int, *recorders: Recorder, on_host: bool = True
) -> None:
    """Run so many steps; the watch keeps the phases of the last. on_host: as in `label_residents`."""
    phases = _FakePhases(step, watch)
    for _ in range(count):
        watch.steps.append((len(watch.events), [*watch.phases]))
        watch.phases.clear()
        step.prepare()
        drive(step, phases, *recorders)
        label_residents(step, watch, on_host=on_host)


@dataclasses.dataclass(eq=False)
class _FakePhases(Recorder):
    """A Recorder that tells FakeMemory of the phases and names the gradients."""

    step: AssembledStep
    watch: fake_memory.FakeMemory

    def phase_begins(self, name: str) -> None:
        self._phase = self.watch.phase(name)
        self._phase.__enter__()

    def phase_ends(self, name: str) -> None:
        self._phase.__exit__(None, None, None)
        if name == BACKWARD:
            on_device = not self.watch.grads_in_buckets
            for place, p in [*self.step.model.named_parameters(), *(("", each) for each in self.watch.outside)]:
                self.watch.label([] if p.grad is None else [p.grad], "gradients", on_device=on_device, name=place)


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
    written_out = ATTENTIONS[attention].memory == "scores"
    # The CPU refuses some choices that do not change the tensors: TF32 is fp32 in memory, and the backend is decided
    # above. A module of fake tensors cannot be converted to bf16, but it can be made so.
    stand_in = msgspec.structs.replace(
        workload,
        # A fused kernel makes no tensors for a window or a softcap: it reads no mask.
        model=workload.model if written_out else msgspec.structs.replace(workload.model, window=None, softcap=None),
        dtype="fp32" if workload.dtype in ("tf32", "bf16-pure") else workload.dtype,
        attention=attention if written_out else "sdpa",
        compile="eager",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if workload.dtype == "bf16-pure" else torch.float32)
    try:
        step = TrainingStep(stand_in, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    cast_as_on_a_gpu(step.model)
    # On the CPU the batches are views of one tensor; on a GPU each is a tensor of its own.
    step.batches = [(tokens.clone(), targets.clone()) for tokens, targets in step.batches]
    return step


def label_residents(step: AssembledStep, watch: fake_memory.FakeMemory, *, on_host: bool = True) -> None:
    """Name what lives on between steps. on_host: the optimizer's counts of steps are on the host."""
    for category, name, tensor in model_tensors(step.model):
        watch.label([tensor], category, name=name)
    for name, tensor in (each for batch in step.batches for each in step.named_tensors(batch)):
        watch.label([tensor], "inputs", name=name)
    fused = step.workload.optimizer == "adamw-fused"
    names = {id(parameter): name for name, parameter in step.model.named_parameters()}
    pages = on_host and getattr(step.optimizer, "is_paged", False)
    for name, value in optimizer_tensors(step.optimizer, step.model, names):
        # Only the fused kernel reads the count of steps on the device. CUDA's managed memory holds bitsandbytes' paged
        # states, which its `get_state_buffer` makes of parameters of so many elements: no allocator of PyTorch's.
        hosted = (on_host and not fused and name.endswith(".step")) or (pages and value.numel() >= _PAGED_FROM)
        watch.label([value], "optimizer state", on_device=not hosted, name=name)


_PAGED_FROM = 100_000
"""Elements of a parameter from which an optimizer of bitsandbytes pages its states."""


def replayed(watched: WatchedStep, allocator: Allocator | None = None) -> FakeEstimate:
    """Play the events through the allocator, PyTorch's on a GPU if left out; returns the last step's figures.

    Raises RefusedInPhase where the allocator has a limit, and refuses a request.
    """
    return at_peak(watched, allocator)[0]


def at_peak(watched: WatchedStep, allocator: Allocator | None = None) -> tuple[FakeEstimate, dict[int, int]]:
    """What `replayed` returns, and the bytes that the allocator gave each allocation that is alive at the peak."""
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
    peaks: dict[str, tuple[int, int]] = {}  # of each phase the highest count, and the event that made it
    saved: list[int] = []
    for phase in watch.phases:
        # The phase begins with the event before it, which may be its highest moment.
        event = max(range(phase.start - 1, phase.end), key=counts.__getitem__)
        if phase.name not in peaks or counts[event] > peaks[phase.name][0]:
            peaks[phase.name] = (counts[event], event)
        if phase.name == FORWARD:
            saved.append(counts[phase.end - 1] - counts[phase.start - 1])
    start = watch.phases[0].start - 1
    memory = PhaseMemory(
        parameter_bytes=watched.parameter_bytes,
        after_parameters=counts[start],
        forward_peak=peaks[FORWARD][0],
        saved_for_backward=max(saved) if BACKWARD in peaks else None,
        backward_peak=peaks[BACKWARD][0] if BACKWARD in peaks else None,
        optimizer_peak=peaks[OPTIMIZER][0] if OPTIMIZER in peaks else None,
        reserved_peak=max(reserved[start:]),
    )
    peak_phase = max(peaks, key=lambda name: peaks[name][0])
    alive: set[int] = set()
    for event in watch.events[: peaks[peak_phase][1] + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.remove(~event)
    held = {index: blocks[index][1] for index in alive if watch.allocations[index].on_device}
    categories: Counter[MemoryCategory] = Counter()
    for index, given in held.items():
        allocation = watch.allocations[index]
        categories[allocation.category] += allocation.nbytes
        categories["rounding"] += given - allocation.nbytes
    estimate = FakeEstimate(
        peak_bytes=sum(categories.values()), peak_phase=peak_phase, categories=dict(categories), memory=memory
    )
    return estimate, held


_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedModule(WatchedStep):
    """The allocations of a step of a user's module, and the workload that it turned out to be."""

    watch: fake_memory.FakeMemoryOfOwn
    workload: FactoryWorkload
    """With the model and the optimizer as they were found."""
    alike: bool
    """Whether its batches have one size, so that no step is told from another."""
    without_state_bytes: int = 0
    """As in Unseen, and so are the next."""
    compiled: bool = False
    bucket_bytes: int = 0

    @property
    def count(self) -> int:
        """Allocations and releases until the step before the last that a prediction runs."""
        return self.watch.begun[STEPS_BEFORE][0]

    def program(self, steps: int | None = None) -> Program:
        """All that the allocator is asked, of all steps or of the first so many."""
        end, phases = self.watch.begun[-1 if steps is None else steps]
        events = self.watch.events[:end]
        made = self.watch.allocations[: sum(event >= 0 for event in events)]
        passing = {~event for event in events[: self.built] if event < 0}
        of_device = (e for e in events if max(e, ~e) not in passing and made[max(e, ~e)].on_device)
        # What is freed at once, as all of autocast's copies, in an order that depends on addresses, leaves the same.
        runs = itertools.groupby(of_device, key=lambda event: event < 0)
        asked = [event for _, run in runs for event in sorted(run)]
        sizes = [*(allocation.nbytes for allocation in made), self.watch.convolution_bytes]
        sums = {index: summed for index, summed in (self.watch.sums or {}).items() if index < len(made)}
        return Program(asked, [each.operator for each in made], [phase.name for phase in phases], sizes, sums)


def watch_module_step(
    workload: FactoryWorkload,
    device_type: DeviceType,
    *,
    batch_size: int | None = None,
    steps: int = STEPS_BEFORE + 1,
    module: Callable[[], UserModule] | None = None,
    tell: Tell = lambda _: None,
    **how: Any,
) -> WatchedModule:
    """Make and run `steps` steps on fake tensors. Raises InputError for replayed CUDA graphs, for steps of the user's
    own, and for operators that depend on data. What is compiled runs without.

    batch_size: samples in a step, in place of the factory's. It is given as the argument of this name, or the batch is
    repeated. module: returns a copy of a module that exists already, in place of what the factory would make. how: of
    `watch_module`."""
    if workload.graph == "step" or workload.compile in ("reduce-overhead", "max-autotune"):
        what = "graph step" if workload.graph == "step" else f"compile {workload.compile}"
        raise InputError(f"{what} replays CUDA graphs, which fake tensors cannot: leave it out, or measure the step")
    if any(name != REFERENCE for name in workload.parts.values()):
        # Whether they compute what a module does is told by numbers, which fake tensors have not.
        raise InputError(
            "other kernels in a model of your own cannot be run on fake tensors: leave out norm, rope, mlp and loss"
        )
    if workload.optimizer in OF_LIBRARIES:
        of_library(workload.optimizer)  # before all that takes longer
    if module is not None:
        return watch_module(module().on(_CPU), workload, device_type, batch_size=batch_size, steps=steps, **how)
    arguments, by_argument = (
        workload.arguments,
        batch_size is not None and default_of(workload.factory, "batch_size") is not None,
    )
    if by_argument:
        arguments = {**arguments, "batch_size": batch_size}
    with UnfilledParameters(), made_here() if device_type == "cuda" else contextlib.nullcontext():
        user_module = _loaded(workload, arguments)
    parameters = sum(parameter.numel() for parameter in user_module.whole.parameters())
    tell(Stage(name=f"{type(user_module.module).__name__}: {parameters:,} parameters", lasts=True))
    tell(Stage(name="running a step on fake tensors"))
    resized = None if by_argument else batch_size
    return watch_module(user_module, workload, device_type, batch_size=resized, steps=steps, **how)


def _loaded(workload: FactoryWorkload, arguments: Mapping[str, Any]) -> UserModule:
    try:
        return load_module(workload.factory, arguments, seed=workload.seed)
    except InputError as error:
        words = str(error.__cause__)
        if torch.cuda.is_available() or not ("CUDA" in words or "NVIDIA driver" in words):
            raise
        raise InputError(
            f"{error}; a prediction needs no GPU: ask torch.cuda.is_available() and make all of it on the CPU otherwise"
        ) from error


def watch_module(
    user_module: UserModule, workload: FactoryWorkload, device_type: DeviceType, *, batch_size: int | None = None,
    steps: int = STEPS_BEFORE + 1, describes: bool = False,
    around: Callable[[nn.Module], contextlib.AbstractContextManager[Sequence[Recorder]]] | None = None,
) -> WatchedModule:  # fmt: skip
    """Run the step of a real module. Afterwards the module has fake parameters. describes: whether its allocations get
    names and shapes. around: a context of the steps, of the model; its recorders are told of them."""
    if workload.projections == "joint":  # without the trial of its numbers, which fake tensors have not
        join_projections(user_module.module)
    watch = fake_memory.FakeMemoryOfOwn(
        name=user_module.name,
        workspace_bytes=WORKSPACE_BYTES if device_type == "cuda" else 0,
        describes=describes,
    )
    with contextlib.ExitStack() as modes:
        modes.enter_context(fake_memory.without_tracebacks())
        mode = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake = _on_fake_tensors(user_module, workload, mode, batch_size)
        # The batches are rotated, so that the last step gets the largest: that step is predicted.
        sizes = [sum(tensor.nbytes for _, tensor in named_tensors(batch)) for batch in fake.batches]
        last, rotation = (steps - 1) % max(1, len(sizes)), 0
        if sizes and sizes[last] != max(sizes):
            rotation = (sizes.index(max(sizes)) - last) % len(sizes)
        fake = dataclasses.replace(fake, batches=[*fake.batches[rotation:], *fake.batches[:rotation]])
        modes.enter_context(watch)
        watch.hold(fake.whole.parameters())
        watch.hold(tensor for _, _, tensor in model_tensors(fake.whole))  # buffers, and what quantised weights need
        # The CPU refuses choices that change none of its tensors, or that were applied already.
        dtype = "fp32" if workload.dtype in ("tf32", "bf16-pure") else workload.dtype
        step = ModuleStep(
            fake, msgspec.structs.replace(workload, dtype=dtype, projections="apart", compile="eager"), _CPU
        )
        step.phases = _without_repeats(step.phases)
        watch.hold(tensor for batch in step.batches for _, tensor in step.named_tensors(batch))
        on_host = device_type == "cuda"
        label_residents(step, watch, on_host=on_host)
        buckets, watch.grads_in_buckets = gradient_buckets(fake.whole)
        watch.label(buckets, "gradients")
        built = len(watch.events)
        as_on_cuda = AsOnCuda("chosen")
        if device_type == "cuda":
            if user_module.optimizer is not None:
                update_as_on_a_gpu(user_module.optimizer)
            cast_as_on_a_gpu(step.model)
            modes.enter_context(as_on_cuda.throughout([step.forward_module, *step.blocks]))
        if user_module.optimizer is not None or workload.optimizer in OF_LIBRARIES:
            # One that compiles its update, as torchao's do, runs it uncompiled: no compiler follows these modes.
            modes.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            recorders = modes.enter_context(around(step.model)) if around else ()
            run_steps(step, watch, steps, *recorders, on_host=on_host)
        except InputError as error:
            # What a CPU has no kernel for is no fault of a step that is predicted for a GPU.
            if not on_host or (why := _of_gpus_alone(error.__cause__)) is None:
                raise
            raise InputError(
                f"{user_module.name} cannot be predicted: its step is run on the CPU's fake tensors, which cannot do "
                f"what it calls ({why}); measure it on the GPU with stepscope run"
            ) from error
        watch.recurrent, watch.grouped_flex = as_on_cuda.recurrent, as_on_cuda.grouped_flex
        model = describe_module(step.model, step.named_tensors(step.batches[-rotation]), [])  # its first batch
        by_factory = user_module.optimizer is not None and step.optimizer is user_module.optimizer
        described = msgspec.structs.replace(
            workload,
            model=model,
            by_factory=("optimizer",) if by_factory else (),
            optimizer=type(user_module.optimizer).__name__ if by_factory else workload.optimizer,
        )
        updated = {id(parameter) for parameter in updated_by(step.optimizer)} if step.optimizer is not None else None
        stateless = [] if updated is None else [each for each in watch.outside if id(each) not in updated]
    watch.end()
    del step
    gc.collect()  # A step and its phases refer to each other.
    alike = len(set(sizes)) <= 1
    return WatchedModule(
        watch=watch,
        built=built,
        parameter_bytes=sum(p.numel() * p.element_size() for p in fake.whole.parameters()),
        workload=described,
        alike=alike,
        without_state_bytes=sum(parameter.nbytes for parameter in stateless),
        compiled=workload.compile != "eager" or any(map(_is_compiled, user_module.whole.modules())),
        bucket_bytes=sum(bucket.nbytes for bucket in buckets),
    )


def _is_compiled(part: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place."""
    return "_orig_mod" in dict(part.named_children()) or vars(part).get("_compiled_call_impl") is not None


def _of_gpus_alone(error: BaseException | None) -> str | None:
    """What a CPU has no kernel for, in words; None where something else went wrong."""
    frames = [] if error is None else [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    launchers = [each for frame in frames if type(each := frame.f_locals.get("self")).__module__.startswith("triton.")]
    kernels = [name for each in launchers if (name := getattr(getattr(each, "fn", None), "__name__", ""))]
    if kernels:
        return f"the Triton kernel {kernels[-1]}: give it a fake rule, by torch.library.custom_op and register_fake"
    if isinstance(error, AssertionError) and "shape_env" in message_of(error):  # of `_to_copy` of a nested tensor
        return "autocast of nested tensors: choose --dtype bf16-pure or fp32"
    return named_line(error, 120) if isinstance(error, NotImplementedError) else None


def _hang_on(fake: Any, tensor: Any) -> None:
    """Give a fake tensor what a user's code hung on the real one: attributes, and hooks of its gradient."""
    attributes: dict[str, Any] = tensor.__dict__
    of_gradients: Mapping[int, Any] = tensor._backward_hooks or {}
    of_sums: Mapping[int, Any] = tensor._post_accumulate_grad_hooks or {}
    for name in attributes.keys() - set(dir(fake)) if attributes else ():
        setattr(fake, name, attributes[name])
    for hook in of_gradients.values():
        fake.register_hook(hook)
    for hook in of_sums.values():
        fake.register_post_accumulate_grad_hook(hook)


def _without_repeats(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases of a step with its first two micro-batches and its last: each between allocates and frees what the
    second does, after which the gradients are there."""
    count = sum(phase.name == FORWARD for phase in phases)
    each = 2 if any(phase.name == BACKWARD for phase in phases) else 1
    return phases if count < 4 else phases[: 2 * each] + phases[(count - 1) * each :]


def _on_fake_tensors(
    user_module: UserModule, workload: FactoryWorkload, mode: FakeTensorMode, batch_size: int | None
) -> UserModule:
    """The module and its batches with fake tensors, in the dtype of the workload. Small integers stay real."""
    if user_module.optimizer is None:
        require_fake_update(workload)
    pure = torch.bfloat16 if workload.dtype == "bf16-pure" else None
    fakes: dict[int, Tensor] = {}
    real: list[Tensor] = []  # A tensor that is freed leaves its id to the next one.
    whole = user_module.whole
    tensors = itertools.chain(whole.parameters(), whole.buffers())
    shared = Counter(map(fake_memory.storage_of, tensors))

    def faked(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            return _ragged(tensor, faked_once)
        if fake_memory.is_simple(tensor) and shared[fake_memory.storage_of(tensor)] == 1:
            fake: Tensor = fake_memory.like(tensor, mode)
        else:
            fake = mode.from_tensor(tensor.detach())
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            fake = fake.clone()  # Of a view, and of what is expanded, a device gets the elements.
        if pure is not None and tensor.is_floating_point():
            fake = fake.to(pure)
        if isinstance(tensor, nn.Parameter):
            vars(fake)["_is_param"] = True  # as nn.Parameter marks those of a subclass
        fake.requires_grad_(tensor.requires_grad)
        _hang_on(fake, tensor)
        return fake

    def faked_once(leaf: Tensor) -> Any:
        if id(leaf) not in fakes:
            real.append(leaf)
            weight = isinstance(leaf, nn.Parameter)  # quantised ones hold integers
            if weight or leaf.is_floating_point() or leaf.is_complex() or leaf.nbytes > fake_memory.LARGEST_REAL:
                fakes[id(leaf)] = faked(leaf)
            else:
                with unset_fake_temporarily():
                    fakes[id(leaf)] = leaf.clone()  # An operator in place writes into no tensor of the user's.
        return fakes[id(leaf)]

    for part in whole.modules():
        homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
        for tensors in homes:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = faked_once(tensor)
    if user_module.optimizer is not None:
        for group in (group for each in optimizers_within(user_module.optimizer) for group in each.param_groups):
            group["params"] = [fakes.get(id(parameter), parameter) for parameter in group["params"]]
    batches = [with_tensors(faked_once, resized(batch, batch_size)) for batch in user_module.batches]
    return dataclasses.replace(user_module, batches=batches)


def _ragged(tensor: Tensor, faked_once: Callable[[Tensor], Tensor]) -> Tensor:
    """A nested tensor of fake values between the same offsets. Raises InputError where it is not jagged."""
    if tensor.layout != torch.jagged:
        raise InputError("a nested tensor of the batch is strided, which fake tensors cannot be: make it jagged")
    get: Any = tensor
    parts = (faked_once(get.values()), faked_once(get.offsets()), get.lengths(), get._ragged_idx)
    return torch.nested.nested_tensor_from_jagged(*parts, get._get_min_seqlen(), get._get_max_seqlen())


MOST_TIMES = 8
"""A search that runs the model tries no more than so many times a size that is known: a factory makes its batch in
truth."""

MOST_EVENTS = 100_000
"""The most allocations and releases of a step that a search runs, where larger sizes have more, as a loop over tokens
does: some ten seconds of one core."""


def fit_module(
    workload: FactoryWorkload,
    budgets: Sequence[Budget],
    device_type: DeviceType = "cuda",
    *,
    search: bool = True,
    module: Callable[[], UserModule] | None = None,
    know: Callable[[list[Fit[FakeEstimate]]], object] = lambda _: None,
    tell: Tell = lambda _: None,
) -> list[Fit[FakeEstimate]]:
    """Predict the peak of a step, and for each budget say whether it fits; with `search` also what would make it fit,
    the largest batch and the longest sequence. Without a budget the peak alone.

    module: returns a copy of a module that exists already, in place of what the workload's factory would make. Its
    sequences have one length. know: is called with the predictions as far as they are known, whenever that is more.
    tell: is told which step is run.
    """
    predictor = FakePredictor(workload, device_type, module, tell)
    fits = [judge(predictor, budget, search=False) for budget in budgets or [None]]
    know(fits)
    if not search:
        return fits
    predictor.expected = sum(STEPS_TO_SIZES + (0 if fit.fits else STEPS_TO_PLANS) for fit in fits)
    for place, budget in enumerate(budgets):

        def know_one(fit: Fit[FakeEstimate], place: int = place) -> None:
            fits[place] = fit
            know(fits)

        if not fits[place].fits:
            know_one(judge(predictor, budget, know=know_one))
        for found in predictor.sizes(budget):
            know_one(msgspec.structs.replace(fits[place], **found))
    return fits


STEPS_TO_SIZES, STEPS_TO_PLANS = 5, 8
"""Steps that a search for the largest sizes, and one for what would make a step fit, mostly run: to say how long."""


_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


class FakePredictor:
    """Predicts a user's module and its variants, each by a step on fake tensors."""

    def __init__(
        self,
        workload: FactoryWorkload,
        device_type: DeviceType,
        module: Callable[[], UserModule] | None,
        tell: Tell = lambda _: None,
        **how: Any,
    ) -> None:
        self._module, self._tell = module, tell
        self.expected = 0
        """Steps that will probably be run."""
        self._seconds: list[float] = []
        """How long each step took that was tried; of the first one, without making its module, which imports."""
        self._device_type: DeviceType = device_type
        self._watched: dict[tuple[bytes, int | None], WatchedModule | None] = {}
        begun_s = time.perf_counter()

        def told(stage: Stage) -> None:
            nonlocal begun_s
            begun_s = time.perf_counter()
            tell(stage)

        self.first = self._run(workload, tell=told, **how)
        self._seconds.append(time.perf_counter() - begun_s)
        self.workload = self.first.workload
        self.estimate = self._estimate(self.first)
        assert self.estimate.unseen is not None
        self._unseen = self.estimate.unseen

    def peak(self, workload: FactoryWorkload) -> int | None:
        watched = self._variant(workload)
        return None if watched is None else self._estimate(watched).peak_bytes

    def fits(self, workload: FactoryWorkload, budget: Budget, *, quickly: bool = False) -> bool:
        return self._runs(self._variant(workload), budget)

    def fails_in(self, budget: Budget) -> str | None:
        return self._fails_in(self.first, budget)

    def kept_free(self, budget: Budget) -> int:
        return self._unseen.kept_free(budget)

    def extra_flops(self, workload: FactoryWorkload) -> None:
        """No formula counts them."""

    def sizes(self, budget: Budget) -> Iterator[dict[str, int | bool | str | None]]:
        """The fields of a Fit with the largest sizes that fit, as they are found, or why one is not looked for."""
        try:
            longest, is_models = self._longest_sequence(budget)
            yield {"longest_sequence": longest, "longest_is_the_models": is_models}
        except _TakesLong as error:
            yield {"not_searched": f"The longest sequence is not looked for: {error}"}
        start, unit, batch = self.workload.batch_size, self.workload.accumulation, None
        try:
            if start:  # a batch with one sample more in each micro-batch does not fit
                batch = self._largest(start, unit, lambda size: self._variant(self.workload, size), budget)
            yield {"largest_batch": batch}
        except _TakesLong as error:
            yield {"not_searched": f"The largest batch is not looked for: {error}"}

    def _run(
        self,
        workload: FactoryWorkload,
        batch: int | None = None,
        steps: int = STEPS_BEFORE + 1,
        **how: Any,
    ) -> WatchedModule:
        """The steps of a variant. Raises InputError where it cannot be made."""
        return watch_module_step(workload, self._device_type, batch_size=batch, steps=steps, module=self._module, **how)

    def _allocator(self, limit: int | None = None) -> Allocator:
        # On a CPU each request gets exactly the bytes that it asks for.
        return CachingAllocator(limit) if self._device_type == "cuda" else RoundingAllocator(1)

    def _estimate(self, watched: WatchedModule) -> FakeEstimate:
        return msgspec.structs.replace(replayed(watched, self._allocator()), unseen=_unseen(watched))

    def _fails_in(self, watched: WatchedModule, budget: Budget) -> str | None:
        """None if the step runs within the budget; else the phase of the first request that is refused."""
        limit = budget.usable_bytes - _unseen(watched).kept_free(budget)
        try:
            replay = replayed(watched, self._allocator(limit))
        except RefusedInPhase as refused:
            return str(refused)
        return replay.peak_phase if self._device_type == "cpu" and replay.peak_bytes > limit else None

    def _variant(self, workload: FactoryWorkload, batch: int | None = None) -> WatchedModule | None:
        """The step of a variant; None if it cannot be made."""
        workload = msgspec.structs.replace(workload, model=UserModel(name=""))
        key = (msgspec.json.encode(workload), batch)
        if key not in self._watched and batch is None and (joined := self._joined(workload)) is not None:
            self._watched[key] = joined
        if key not in self._watched:
            self._tell_of(workload, batch)
            begun_s = time.perf_counter()
            try:
                self._watched[key] = self._run(workload, batch, STEPS_BEFORE)
            except InputError:
                self._watched[key] = None
            self._seconds.append(time.perf_counter() - begun_s)
        return self._watched[key]

    def _joined(self, workload: FactoryWorkload) -> WatchedModule | None:
        """The step of a variant with another optimizer and more: its forward and backward as with the optimizer that
        was asked about, and its updates as of the asked step with the other; None where they are not told apart."""
        asked = msgspec.structs.replace(self.workload, model=UserModel(name=""))
        rest = msgspec.structs.replace(workload, optimizer=asked.optimizer)
        updates = msgspec.structs.replace(asked, optimizer=workload.optimizer)
        if workload in (rest, updates):
            return None
        of_rest, of_updates = self._variant(rest), self._variant(updates)
        if of_rest is None or of_updates is None:
            return None
        watch = of_rest.watch.with_updates_of(of_updates.watch, self.first.watch, STEPS_BEFORE)
        return None if watch is None else dataclasses.replace(of_rest, watch=watch)

    def _words(self, workload: FactoryWorkload, batch: int | None) -> str:
        """What differs from the step that was asked about, as options."""
        asked, fields = self.workload, ("attention", "optimizer", "dtype", "accumulation", "checkpointing")
        changed = {name: getattr(workload, name) for name in fields if getattr(workload, name) != getattr(asked, name)}
        changed |= {name: n for name, n in workload.arguments.items() if asked.arguments.get(name) != n}
        changed |= {} if batch is None else {"batch_size": batch}
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed.items())

    def _tell_of(self, workload: FactoryWorkload, batch: int | None) -> None:
        """Tell which step is run next, and how long the rest will take."""
        done = len(self._seconds) - 1
        left = max(1, self.expected - done) * sum(self._seconds) / len(self._seconds)
        self._tell(
            Stage(
                name=f"trying {self._words(workload, batch)}",
                detail=f"(about {left:.0f} s left)" if self.expected else "",
                fraction=min(done / self.expected, 0.95) if self.expected else None,
            )
        )

    def _runs(self, watched: WatchedModule | None, budget: Budget) -> bool:
        return watched is not None and self._fails_in(watched, budget) is None

    def _longest_sequence(self, budget: Budget) -> tuple[int | None, bool]:
        """The longest sequence that fits, where `seq_len` is an argument that changes the batch, and whether the model
        takes no longer one."""
        if self._module is not None:
            return None, False
        workload = self.workload
        start = workload.arguments.get("seq_len", default_of(workload.factory, "seq_len"))
        if not isinstance(start, int) or start < 1:
            return None, False

        def variant(length: int) -> WatchedModule | None:
            arguments = {**workload.arguments, "seq_len": length}
            return self._variant(msgspec.structs.replace(workload, arguments=arguments))

        shorter = variant(max(1, start // 2))
        if shorter is None or shorter.workload.model.inputs == workload.model.inputs:
            return None, False  # an image model takes the argument and does not read it
        # Where each length must be run, tokens are not told apart.
        in_steps = start % SEQUENCE_STEP == 0 or (start > SEQUENCE_STEP and self._grows(shorter))
        unit = SEQUENCE_STEP if in_steps else 1
        longest = self._largest(start, unit, variant, budget)
        return longest, bool(longest) and variant(longest + unit) is None

    def _grows(self, other: WatchedModule) -> bool:
        """Whether the step of another size has far fewer operators, or far more, as one that loops over tokens."""
        return 10 * abs(self.first.count - other.count) > self.first.count

    def _largest(
        self, start: int, unit: int, variant: Callable[[int], WatchedModule | None], budget: Budget
    ) -> int | None:
        """The largest multiple of `unit` whose variant fits, looked for from `start` on; the next one does not fit.
        Raises _TakesLong where a step of too many operators would have to be run."""
        first = max(1, start // unit)
        apart = (first // 2 or 2) * unit
        other = variant(apart)
        if other is None and first > 1:
            return None
        guess, more = first, 0.0
        if other is not None:
            both = sorted([(start, self.estimate), (apart, self._estimate(other))], key=lambda each: each[0])
            guess = (both[1][0] + self._room(both[1][1], both[0][1], abs(start - apart), budget)) // unit
            more = (self.first.count - other.count) / (start - apart) if self._grows(other) else 0.0

        def of(units: int) -> WatchedModule | None:
            events = self.first.count + more * (units * unit - start)
            if more and events > MOST_EVENTS:
                took_s = self._seconds[0] * events / len(self.first.watch.events)
                raise _TakesLong(f"a step at {units * unit:,}, where it may lie, takes about {took_s:,.0f} s to run.")
            return variant(units * unit)

        units = self._largest_scaled(guess, first, of, budget) if self._device_type == "cuda" and not more else None
        if units is None:
            near = guess if more else self._near(guess, first, of, budget)
            units = largest(near, lambda units: self._runs(of(units), budget))
        # Beyond the end of the search nothing is known but that the size that was asked about fits.
        return max(units * unit, start) if self.fails_in(budget) is None else units * unit

    def _room(self, larger: FakeEstimate, smaller: FakeEstimate, span: int, budget: Budget) -> int:
        """How much larger than the larger of two steps, whose sizes are so far apart, one may be that fits, if the peak
        of each phase goes on as between them."""
        left = budget.usable_bytes - self.kept_free(budget)
        peaks = ((getattr(one.memory, f"{name}_peak") or 0 for one in (larger, smaller)) for name in _PHASES)
        return min((left - more) * span // max(1, more - less) for more, less in peaks)

    def _near(self, guess: int, first: int, of: Callable[[int], WatchedModule | None], budget: Budget) -> int:
        """The guess; where that is far beyond what was run, one by the peaks of larger sizes, each run."""
        known, before = first, self.estimate
        while guess > MOST_TIMES * known:
            further = of(MOST_TIMES * known)
            if further is None or not self._runs(further, budget):
                return MOST_TIMES * known
            reached, span = self._estimate(further), MOST_TIMES * known - known
            known *= MOST_TIMES
            guess, before = known + self._room(reached, before, span, budget), reached
        return guess

    def _largest_scaled(
        self, guess: int, first: int, of: Callable[[int], WatchedModule | None], budget: Budget
    ) -> int | None:
        """The largest number of units that fits, by the recorded programs of other numbers. The step beyond the answer
        is run, and must ask the allocator what was scaled; None where that fails with programs of three sizes, too."""
        programs: dict[int, Program] = {}
        for units in (first // 2, first) if first > 1 else (1, 2):
            watched = self.first if units == first and self.first.alike else of(units)
            if watched is None:
                return None
            programs[units] = watched.program(STEPS_BEFORE)
        if len({tuple(program.sizes) for program in programs.values()}) == 1:
            return None  # nothing grows, so that nothing would end the search
        while len(programs) in (2, 3):

            def fits(units: int) -> bool:
                program = scaled(programs, units)
                if program is None:
                    raise _ScalesOtherwise
                unseen = msgspec.structs.replace(self._unseen, convolution_bytes=program.sizes[-1])
                return program.runs(self._allocator(budget.usable_bytes - unseen.kept_free(budget)))

            try:
                guess = largest(guess, fits)
            except _ScalesOtherwise:
                return None
            beyond = of(guess + 1)
            if beyond is None:
                return None
            program = beyond.program()
            if program == scaled(programs, guess + 1):
                return guess
            programs[guess + 1] = program
        return None


class _TakesLong(Exception):
    """Raised where a search would have to run a step that takes long, with how long."""


class _ScalesOtherwise(Exception):
    """Raised where the requests of a step are no polynomials of its size."""


def _unseen(watched: WatchedModule) -> Unseen:
    watch = watched.watch
    return Unseen(
        convolutions=watch.convolutions,
        convolution_bytes=watch.convolution_bytes,
        custom=tuple(sorted(watch.custom)),
        at_most=tuple(sorted(watch.at_most)),
        recurrent=watch.recurrent,
        grouped_flex=watch.grouped_flex,
        without_state_bytes=watched.without_state_bytes,
        outside_bytes=sum(parameter.nbytes for parameter in watch.outside),
        compiled=watched.compiled,
        bucket_bytes=watched.bucket_bytes,
        grads_in_buckets=watch.grads_in_buckets,
    )
