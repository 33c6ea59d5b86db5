"""Says whether a step of a user's own module fits, and what would make it fit. Each answer is a step on fake
tensors.
"""

import contextlib
import dataclasses
import gc
import inspect
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from stepscope.allocations.prediction import fit as plans
from stepscope.allocations.prediction.caching_allocator import CachingAllocator
from stepscope.allocations.prediction.estimate import WORKSPACE_BYTES, DeviceType
from stepscope.allocations.prediction.fit import Budget, Change, Lever, Plan, together
from stepscope.allocations.prediction.own_fit import MOST_SEARCHED, OwnEstimate, OwnFit, OwnVerdict, Unseen
from stepscope.allocations.prediction.symbolic_tensors import RoundingAllocator
from stepscope.core.errors import InputError, named_line
from stepscope.core.factory_arguments import is_configuration
from stepscope.core.parts import REFERENCE
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.units import MIB
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.fake_step import STEPS_BEFORE, RefusedInPhase, WatchedStep, label_residents, replayed, run_steps
from stepscope.recording.fake_memory import (
    LARGEST_REAL,
    AsOnCuda,
    AttentionBackend,
    FakeMemoryOfOwn,
    without_tracebacks,
)
from stepscope.recording.step import Phase
from stepscope.training.scaled_products import cast_as_on_a_gpu
from stepscope.training.user_module.batches import named_tensors
from stepscope.training.user_module.loading import BATCH_SIZE, SEQ_LEN, find_factory, load_module
from stepscope.training.user_module.module_step import ModuleStep, UserModule
from stepscope.training.user_module.user_code import describe_module

# Predicts the memory of a step of a user's own module, by running it on fake tensors.
#
# The factory really runs, since it may read files or ask for values. Only large parameters are not filled with random
# numbers, so that they take addresses but no memory. Parameters, buffers and floating inputs then become fake. As for
# the textbook (`engine/fake_step.py`), the step then runs, and a simulated allocator plays what it allocates.


LARGE = 4 * MIB
"""Bytes from which a tensor is not filled with random numbers."""

_CPU = torch.device("cpu")
_aten = torch.ops.aten
_FILLS = (_aten.normal_, _aten.uniform_, _aten.erfinv_)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnWatchedStep(WatchedStep):
    """The allocations of a step of a user's module, and the workload that it turned out to be."""

    watch: FakeMemoryOfOwn
    workload: FactoryWorkload
    """With the model and the optimizer as they were found."""


def watch_own_step(
    workload: FactoryWorkload, device_type: DeviceType, *, batch_size: int | None = None, steps: int = STEPS_BEFORE + 1,
    given: Callable[[], UserModule] | None = None,
) -> OwnWatchedStep:  # fmt: skip
    """Make and run `steps` steps on fake tensors. Raises InputError for compiled steps, for steps of the user's own,
    and for operators that depend on data.

    batch_size: samples in a step, in place of the factory's. It is given as the argument of this name, or the batch is
    repeated. given: returns a copy of a module that exists already, in place of what the workload's factory would make.
    """
    if workload.compile != "eager":
        raise InputError(f"compile {workload.compile} cannot be run on fake tensors: leave it out")
    if any(name != REFERENCE for name in workload.parts.values()):
        # Whether they compute what a module does is told by numbers, which fake tensors have not.
        raise InputError(
            "other kernels in a model of your own cannot be run on fake tensors: leave out --kernels, --norm, --mlp "
            "and --loss"
        )
    if given is not None:
        return watch_module(given().on(_CPU), workload, device_type, batch_size=batch_size, steps=steps)
    arguments, by_argument = (
        workload.arguments,
        batch_size is not None and default_of(workload.factory, "batch_size") is not None,
    )
    if by_argument:
        arguments = {**arguments, "batch_size": batch_size}
    with _UnfilledParameters():
        own = load_module(workload.factory, arguments, seed=workload.seed)
    resized = None if by_argument else batch_size
    return watch_module(own, workload, device_type, batch_size=resized, steps=steps)


def watch_module(
    own: UserModule, workload: FactoryWorkload, device_type: DeviceType, *, batch_size: int | None = None,
    steps: int = STEPS_BEFORE + 1,
) -> OwnWatchedStep:  # fmt: skip
    """Run the step of a real module. Afterwards the module has fake parameters."""
    watch = FakeMemoryOfOwn(name=own.name, workspace_bytes=WORKSPACE_BYTES if device_type == "cuda" else 0)
    with contextlib.ExitStack() as modes:
        modes.enter_context(without_tracebacks())
        mode = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake = _on_fake_tensors(own, workload, mode, batch_size)
        rotation = _rotation(fake.batches, steps)
        fake = dataclasses.replace(fake, batches=[*fake.batches[rotation:], *fake.batches[:rotation]])
        modes.enter_context(watch)
        watch.hold(fake.module.parameters())
        watch.hold(fake.module.buffers())
        step = ModuleStep(fake, _as_on_the_cpu(workload), _CPU)
        step.phases = _without_repeats(step.phases)
        watch.hold(tensor for batch in step.batches for _, tensor in step.named_tensors(batch))
        on_host = device_type == "cuda"
        label_residents(step, watch, on_host=on_host)
        built = len(watch.events)
        if device_type == "cuda":
            if own.optimizer is not None:
                _update_as_on_a_gpu(own.optimizer)
            cast_as_on_a_gpu(step.model)
            as_on_cuda = AsOnCuda(_attention_backend, heads_as_given=True)
            modes.enter_context(as_on_cuda.throughout([step.forward_module, *step.blocks]))
        with _gpu_alone_said(own.name) if on_host else contextlib.nullcontext():
            run_steps(step, watch, steps, on_host=on_host)
        parameter_bytes = sum(p.numel() * p.element_size() for p in fake.module.parameters())
        model = describe_module(step.model, step.named_tensors(step.batches[-rotation]), [])  # its first batch
        by_factory = own.optimizer is not None and step.optimizer is own.optimizer
        found = msgspec.structs.replace(
            workload, model=model, by_factory=("optimizer",) if by_factory else (),
            optimizer=type(own.optimizer).__name__ if by_factory else workload.optimizer,
        )  # fmt: skip
    watch.end()
    del step
    gc.collect()  # A step and its phases refer to each other.
    return OwnWatchedStep(watch=watch, built=built, parameter_bytes=parameter_bytes, workload=found)


@contextlib.contextmanager
def _gpu_alone_said(name: str) -> Generator[None]:
    """While open, what a CPU has no kernel for is no fault of a step that is predicted for a GPU."""
    try:
        yield
    except InputError as error:
        if not isinstance(error.__cause__, NotImplementedError):
            raise
        raise InputError(
            f"{name} cannot be predicted: its step is run on the CPU's fake tensors, and calls what a GPU alone has "
            f"({named_line(error.__cause__, 120)}); measure it on the GPU with stepscope run"
        ) from error


def _hang_on(found: Any, tensor: Any) -> None:
    """Give a fake tensor what a user's code hung on the real one: attributes, and hooks of its gradient."""
    attributes: dict[str, Any] = tensor.__dict__
    of_gradients: Mapping[int, Any] = tensor._backward_hooks or {}
    of_sums: Mapping[int, Any] = tensor._post_accumulate_grad_hooks or {}
    for name in attributes.keys() - set(dir(found)):
        setattr(found, name, attributes[name])
    for hook in of_gradients.values():
        found.register_hook(hook)
    for hook in of_sums.values():
        found.register_post_accumulate_grad_hook(hook)


def _rotation(batches: Sequence[Any], steps: int) -> int:
    """How many places to rotate the batches, so that the last step gets the largest: that step is predicted."""
    sizes = [sum(tensor.nbytes for _, tensor in named_tensors(batch)) for batch in batches]
    last = (steps - 1) % max(1, len(sizes))
    return 0 if not sizes or sizes[last] == max(sizes) else (sizes.index(max(sizes)) - last) % len(sizes)


def _update_as_on_a_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of PyTorch's that may choose update all parameters together, as it does on a GPU
    (`_default_to_fused_or_foreach`); on the CPU, where fake parameters lie, it would take one after another."""
    if isinstance(optimizer, torch.optim.Adafactor):
        return  # it takes one after another on a GPU, too
    for group in optimizer.param_groups:
        chooses = "foreach" in group and group["foreach"] is None and not group.get("fused")
        fixed = group.get("differentiable") or (isinstance(group.get("lr"), Tensor) and not group.get("capturable"))
        if chooses and not fixed:
            group["foreach"] = True


def _without_repeats(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """The phases of a step with its first two micro-batches and its last: each between allocates and frees what the
    second does, after which the gradients are there."""
    count = sum(phase.name == FORWARD for phase in phases)
    each = 2 if any(phase.name == BACKWARD for phase in phases) else 1
    return phases if count < 4 else phases[: 2 * each] + phases[(count - 1) * each :]


def _as_on_the_cpu(workload: FactoryWorkload) -> FactoryWorkload:
    """The workload without choices that change none of its tensors, or that were applied already."""
    dtype = "fp32" if workload.dtype in ("tf32", "bf16-pure") else workload.dtype
    return msgspec.structs.replace(workload, dtype=dtype)


def _on_fake_tensors(
    own: UserModule, workload: FactoryWorkload, mode: FakeTensorMode, batch_size: int | None
) -> UserModule:
    """The module and its batches with fake tensors, in the dtype of the workload. Small integers stay real."""
    pure = torch.bfloat16 if workload.dtype == "bf16-pure" else None
    made: dict[int, Tensor] = {}
    real: list[Tensor] = []  # A tensor that is freed leaves its id to the next one.

    def faked(tensor: Tensor) -> Tensor:
        found: Tensor = mode.from_tensor(tensor.detach())
        if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
            found = found.clone()  # Of a view, and of what is expanded, a device gets the elements.
        if pure is not None and tensor.is_floating_point():
            found = found.to(pure)
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, requires_grad=tensor.requires_grad)
        found.requires_grad_(tensor.requires_grad)
        _hang_on(found, tensor)
        return found

    def faked_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            real.append(leaf)
            if leaf.is_floating_point() or leaf.nbytes > LARGEST_REAL:
                made[id(leaf)] = faked(leaf)
            else:
                with unset_fake_temporarily():
                    made[id(leaf)] = leaf.clone()  # An operator in place writes into no tensor of the user's.
        return made[id(leaf)]

    for part in own.module.modules():
        homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
        for tensors in homes:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = faked_leaf(tensor)
    if own.optimizer is not None:
        for group in own.optimizer.param_groups:
            group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]
    batches = [tree_map(faked_leaf, resized(batch, batch_size)) for batch in own.batches]
    return dataclasses.replace(own, batches=batches)


def default_of(factory: str, size: Literal["batch_size", "seq_len"]) -> int | None:
    """The value of a factory's argument of this name where none is given, 1 if it has no default; None for a factory
    without such an argument. A configuration has both."""
    if is_configuration(factory):
        return {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}[size]
    try:
        argument = inspect.signature(find_factory(factory).found).parameters.get(size)
    except (TypeError, ValueError):
        return None
    if argument is None:
        return None
    return argument.default if isinstance(argument.default, int) else 1


def resized(batch: Any, batch_size: int | None) -> Any:
    """The batch with `batch_size` samples. Each tensor with the first tensor's first size is repeated and cut."""
    if batch_size is None:
        return batch
    sizes: list[int] = []

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        sizes.append(leaf.shape[0])
        if leaf.shape[0] != sizes[0]:
            return leaf
        times = -(-batch_size // max(1, sizes[0]))
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:batch_size].clone()

    return tree_map(resize, batch)


class _UnfilledParameters(TorchDispatchMode):
    """A mode in which large tensors are not filled with random numbers, so that their pages are never touched."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _FILLS and args[0].nbytes >= LARGE:
            return args[0]
        return func(*args, **(kwargs or {}))


def _attention_backend(query: Tensor) -> AttentionBackend:
    """The backend that scaled_dot_product_attention takes on a Hopper GPU: in 16 bits cuDNN, else the efficient one."""
    return "efficient" if query.dtype == torch.float32 else "cudnn"


MOST_PLANS = 6
SEQUENCE_UNIT = 64
"""Sequences are looked for in multiples of so many tokens, if the one that is asked about is such a multiple."""
MOST_TIMES = 8
"""A search begins at no more than so many times the size that is asked about."""
MOST_MICRO_BATCHES = 64
"""A plan of more would have its GPU wait for launches."""


def fit_own(
    workload: FactoryWorkload, budgets: Sequence[Budget], device_type: DeviceType = "cuda", *, search: bool = True,
    given: Callable[[], UserModule] | None = None,
) -> OwnFit:  # fmt: skip
    """Predict the peak of a step, and for each budget say whether it fits; with `search` also what would make it fit,
    the largest batch and the longest sequence.

    given: returns a copy of a module that exists already, in place of what the workload's factory would make. Its
    sequences have one length.
    """
    watched = watch_own_step(workload, device_type, given=given)
    variants = _Search(watched.workload, device_type, given)
    return OwnFit(
        workload=watched.workload,
        estimate=_estimate(watched, device_type),
        verdicts=tuple(variants.verdict(watched, budget, search=search) for budget in budgets),
    )


def _estimate(watched: OwnWatchedStep, device_type: DeviceType) -> OwnEstimate:
    # On a CPU each request gets exactly the bytes that it asks for.
    found = replayed(watched, CachingAllocator() if device_type == "cuda" else RoundingAllocator(1))
    return OwnEstimate(
        peak_bytes=found.peak_bytes, peak_phase=found.peak_phase, categories=found.categories, memory=found.memory,
        unseen=_unseen(watched),
    )  # fmt: skip


def _unseen(watched: OwnWatchedStep) -> Unseen:
    watch = watched.watch
    return Unseen(
        convolutions=watch.convolutions,
        convolution_bytes=watch.convolution_bytes,
        custom=tuple(sorted(watch.custom)),
        at_most=tuple(sorted(watch.at_most)),
    )


class _Search:
    """Predicts variants of one step, and remembers the predictions."""

    def __init__(
        self, workload: FactoryWorkload, device_type: DeviceType, given: Callable[[], UserModule] | None = None
    ) -> None:
        self._workload, self._given = workload, given
        self._device_type: DeviceType = device_type
        self._watched: dict[tuple[bytes, int | None], OwnWatchedStep | None] = {}

    def verdict(self, watched: OwnWatchedStep, budget: Budget, *, search: bool) -> OwnVerdict:
        kept_free = _unseen(watched).kept_free(budget)
        fails_in = self._fails_in(watched, budget)
        longest, is_models = self._longest_sequence(watched, budget) if search else (None, False)
        return OwnVerdict(
            budget=budget, fits=fails_in is None, kept_free_bytes=kept_free, fails_in=fails_in,
            plans=tuple(self._plans(budget)) if search and fails_in is not None else (),
            largest_batch=self._largest_batch(watched, budget) if search else None,
            longest_sequence=longest, longest_is_the_models=is_models,
        )  # fmt: skip

    def _fails_in(self, watched: OwnWatchedStep, budget: Budget) -> str | None:
        """None if the step runs within the budget; else the phase of the first request that is refused."""
        limit = budget.usable_bytes - _unseen(watched).kept_free(budget)
        if self._device_type == "cpu":
            found = replayed(watched, RoundingAllocator(1))
            return None if found.peak_bytes <= limit else found.peak_phase
        try:
            replayed(watched, CachingAllocator(limit))
        except RefusedInPhase as refused:
            return str(refused)
        return None

    def _variant(self, workload: FactoryWorkload, batch: int | None = None) -> OwnWatchedStep | None:
        """The step of a variant; None if it cannot be made."""
        key = (msgspec.json.encode(workload), batch)
        if key not in self._watched:
            try:
                self._watched[key] = watch_own_step(
                    workload, self._device_type, batch_size=batch, steps=STEPS_BEFORE, given=self._given
                )
            except InputError:
                self._watched[key] = None
        return self._watched[key]

    def _fits(self, workload: FactoryWorkload, budget: Budget) -> bool:
        return self._runs(self._variant(workload), budget)

    def _runs(self, watched: OwnWatchedStep | None, budget: Budget) -> bool:
        return watched is not None and self._fails_in(watched, budget) is None

    def _runnable(self, lever: Lever) -> Lever:
        """The settings up to the strongest with which the step runs: a micro-batch may have too few rows."""
        count = len(lever)
        while count and self._variant(_with(self._workload, lever[count - 1 : count])) is None:
            count -= 1
        return lever[:count]

    def _plans(self, budget: Budget) -> Iterator[Plan]:
        """The single changes that suffice. If fewer than two do, pairs, triples and so on as well."""
        # A model without blocks cannot be checkpointed, and its other levers are tried all the same.
        levers = [runs for lever in _levers(self._workload) if (runs := self._runnable(lever))]
        found: list[tuple[Change, ...]] = []
        # Two levers may set one option; the later of them saves more, and overrides the other.
        strongest = [settings[-1] for settings in levers]
        if not levers or not self._fits(_with(self._workload, strongest), budget):
            return
        for count in range(1, len(levers) + 1):
            for several in itertools.combinations(levers, count):
                fields = {field for settings in several for field in settings[-1].fields}
                chosen = None
                if len(fields) == count and not any(_part_of(one, several) for one in found):
                    chosen = self._mildest(several, budget)
                if chosen is not None:
                    found.append(chosen)
                    peak = self._variant(_with(self._workload, chosen))
                    assert peak is not None
                    changes, peak_bytes = together(chosen), _estimate(peak, self._device_type).peak_bytes
                    yield Plan(change=changes.change, options=changes.options, peak_bytes=peak_bytes)
                if len(found) == MOST_PLANS:
                    return
            if len(found) >= 2:
                return

    def _mildest(self, levers: Sequence[Lever], budget: Budget) -> tuple[Change, ...] | None:
        if not self._fits(_with(self._workload, [settings[-1] for settings in levers]), budget):
            return None
        for chosen in itertools.product(*levers):
            if self._fits(_with(self._workload, chosen), budget):
                return chosen
        return None

    def _largest_batch(self, watched: OwnWatchedStep, budget: Budget) -> int | None:
        """The largest batch that fits. A batch with one sample more in each micro-batch does not fit."""
        start, unit = self._workload.model.batch_size, self._workload.accumulation
        if not start:
            return None
        return self._largest(start, unit, lambda size: self._variant(self._workload, size), watched, budget)

    def _longest_sequence(self, watched: OwnWatchedStep, budget: Budget) -> tuple[int | None, bool]:
        """The longest sequence that fits, where `seq_len` is an argument that changes the batch, and whether the model
        takes no longer one."""
        workload = self._workload
        if self._given is not None:
            return None, False
        start = workload.arguments.get("seq_len", default_of(workload.factory, "seq_len"))
        if not isinstance(start, int) or start < 1:
            return None, False

        def variant(length: int) -> OwnWatchedStep | None:
            return self._variant(
                msgspec.structs.replace(
                    workload, model=UserModel(name=""), arguments={**workload.arguments, "seq_len": length}
                )
            )

        unit = SEQUENCE_UNIT if start % SEQUENCE_UNIT == 0 else 1
        shorter = variant(max(1, start // 2))
        if shorter is None or shorter.workload.model.inputs == watched.workload.model.inputs:
            return None, False  # an image model takes the argument and does not read it
        longest = self._largest(start, unit, variant, watched, budget)
        return longest, bool(longest) and variant(longest + unit) is None

    def _largest(
        self, start: int, unit: int, variant: Callable[[int], OwnWatchedStep | None], watched: OwnWatchedStep,
        budget: Budget,
    ) -> int | None:  # fmt: skip
        """The largest multiple of `unit` whose variant fits, looked for from `start` on; the next one does not fit."""
        limit = budget.usable_bytes - _unseen(watched).kept_free(budget)
        first = max(1, start // unit)
        half = variant(max(1, first // 2) * unit)
        if half is None:
            return None
        one, part = (_estimate(each, self._device_type).peak_bytes for each in (watched, half))
        by_unit = max(1, (one - part) // max(1, first - first // 2))
        # Peaks that barely differ foretell nothing, and a factory makes its batch in truth.
        guess = min(first + (limit - one) // by_unit, MOST_TIMES * first)
        found = _edge(guess, lambda units: self._runs(variant(units * unit), budget)) * unit
        # Beyond the end of the search nothing is known but that the size that was asked about fits.
        return max(found, start) if self._runs(watched, budget) else found


def _edge(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, or 0 if none does. The search begins at a guess, in strides that double."""
    low, high, stride = 0, MOST_SEARCHED, 1
    number = min(max(1, guess), MOST_SEARCHED - 1)
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        reached = low + stride if low else high - stride
        number = reached if low < reached < high else (low + high) // 2
        stride *= 2
    return low


def _levers(workload: FactoryWorkload) -> Iterator[Lever]:
    """The levers of this workload, first those that cost nothing. The settings of each begin with the mildest."""
    if "optimizer" not in workload.by_factory and workload.phase == "train":
        if workload.optimizer in ("adamw-foreach", "adamw-loop"):
            yield (plans.FUSED_ADAMW,)
        if workload.optimizer != "adamw-bf16-state" and not PRECISIONS[workload.dtype].masters:
            yield (plans.STATE_IN_BF16,)
    if workload.dtype in ("fp32", "tf32"):
        yield (plans.AUTOCAST,)
    if workload.phase == "forward":
        return
    splits = plans.micro_batches(workload.model.batch_size or 1, workload.accumulation, MOST_MICRO_BATCHES)
    if splits:
        yield splits
    if workload.checkpointing == "none":
        yield (plans.SELECTIVE,)
        yield (plans.checkpointed_blocks(1),)


def _with(workload: FactoryWorkload, changes: Sequence[Change]) -> FactoryWorkload:
    return msgspec.structs.replace(workload, model=UserModel(name=""), **together(changes).fields)


def _part_of(found: Sequence[Change], levers: Sequence[Lever]) -> bool:
    """Whether these levers include all changes of a plan that was found."""
    return all(any(change in settings for settings in levers) for change in found)
