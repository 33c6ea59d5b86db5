"""Predicts the memory of a step of a user's module, by running it on fake tensors.

The factory really runs, since it may read files or ask for values. Only large parameters are not filled with random
numbers, so that they take addresses but no memory. Parameters, buffers and floating inputs then become fake. As for
the textbook (`engine/fake_step.py`), the step then runs, and a simulated allocator plays what it allocates.
"""

import contextlib
import dataclasses
import gc
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from stepscope.allocations.prediction.caching_allocator import CachingAllocator
from stepscope.allocations.prediction.estimate import WORKSPACE_BYTES, DeviceType
from stepscope.allocations.prediction.fit import (
    SEQUENCE_STEP,
    Budget,
    FakeEstimate,
    Fit,
    Unseen,
    judge,
    largest,
)
from stepscope.allocations.prediction.symbolic_tensors import Allocator, RoundingAllocator
from stepscope.core.errors import InputError, named_line
from stepscope.core.factory_arguments import is_configuration
from stepscope.core.parts import REFERENCE
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

LARGE = 4 * MIB
"""Bytes from which a tensor is not filled with random numbers."""

_CPU = torch.device("cpu")
_aten = torch.ops.aten
_FILLS = (_aten.normal_, _aten.uniform_, _aten.erfinv_)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedModule(WatchedStep):
    """The allocations of a step of a user's module, and the workload that it turned out to be."""

    watch: FakeMemoryOfOwn
    workload: FactoryWorkload
    """With the model and the optimizer as they were found."""


def watch_module_step(
    workload: FactoryWorkload,
    device_type: DeviceType,
    *,
    batch_size: int | None = None,
    steps: int = STEPS_BEFORE + 1,
    module: Callable[[], UserModule] | None = None,
) -> WatchedModule:
    """Make and run `steps` steps on fake tensors. Raises InputError for compiled steps, for steps of the user's own,
    and for operators that depend on data.

    batch_size: samples in a step, in place of the factory's. It is given as the argument of this name, or the batch is
    repeated. module: returns a copy of a module that exists already, in place of what the factory would make.
    """
    if workload.compile != "eager":
        raise InputError(f"compile {workload.compile} cannot be run on fake tensors: leave it out")
    if any(name != REFERENCE for name in workload.parts.values()):
        # Whether they compute what a module does is told by numbers, which fake tensors have not.
        raise InputError(
            "other kernels in a model of your own cannot be run on fake tensors: leave out --kernels, --norm, --mlp "
            "and --loss"
        )
    if module is not None:
        return watch_module(module().on(_CPU), workload, device_type, batch_size=batch_size, steps=steps)
    arguments, by_argument = (
        workload.arguments,
        batch_size is not None and default_of(workload.factory, "batch_size") is not None,
    )
    if by_argument:
        arguments = {**arguments, "batch_size": batch_size}
    with _UnfilledParameters():
        user_module = load_module(workload.factory, arguments, seed=workload.seed)
    resized = None if by_argument else batch_size
    return watch_module(user_module, workload, device_type, batch_size=resized, steps=steps)


def watch_module(
    user_module: UserModule,
    workload: FactoryWorkload,
    device_type: DeviceType,
    *,
    batch_size: int | None = None,
    steps: int = STEPS_BEFORE + 1,
) -> WatchedModule:
    """Run the step of a real module. Afterwards the module has fake parameters."""
    watch = FakeMemoryOfOwn(name=user_module.name, workspace_bytes=WORKSPACE_BYTES if device_type == "cuda" else 0)
    with contextlib.ExitStack() as modes:
        modes.enter_context(without_tracebacks())
        mode = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fake = _on_fake_tensors(user_module, workload, mode, batch_size)
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
            if user_module.optimizer is not None:
                _update_as_on_a_gpu(user_module.optimizer)
            cast_as_on_a_gpu(step.model)
            as_on_cuda = AsOnCuda(_attention_backend, heads_as_given=True)
            modes.enter_context(as_on_cuda.throughout([step.forward_module, *step.blocks]))
        with _what_a_cpu_lacks(user_module.name) if on_host else contextlib.nullcontext():
            run_steps(step, watch, steps, on_host=on_host)
        parameter_bytes = sum(p.numel() * p.element_size() for p in fake.module.parameters())
        model = describe_module(step.model, step.named_tensors(step.batches[-rotation]), [])  # its first batch
        by_factory = user_module.optimizer is not None and step.optimizer is user_module.optimizer
        found = msgspec.structs.replace(
            workload,
            model=model,
            by_factory=("optimizer",) if by_factory else (),
            optimizer=type(user_module.optimizer).__name__ if by_factory else workload.optimizer,
        )
    watch.end()
    del step
    gc.collect()  # A step and its phases refer to each other.
    return WatchedModule(watch=watch, built=built, parameter_bytes=parameter_bytes, workload=found)


@contextlib.contextmanager
def _what_a_cpu_lacks(name: str) -> Generator[None]:
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
    user_module: UserModule, workload: FactoryWorkload, mode: FakeTensorMode, batch_size: int | None
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

    for part in user_module.module.modules():
        homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)  # pyright: ignore[reportPrivateUsage]
        for tensors in homes:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = faked_leaf(tensor)
    if user_module.optimizer is not None:
        for group in user_module.optimizer.param_groups:
            group["params"] = [made.get(id(parameter), parameter) for parameter in group["params"]]
    batches = [tree_map(faked_leaf, resized(batch, batch_size)) for batch in user_module.batches]
    return dataclasses.replace(user_module, batches=batches)


def default_of(factory: str, size: Literal["batch_size", "seq_len"]) -> int | None:
    """The value of a factory's argument of this name where none is given, 1 if it has no default; None for a factory
    without such an argument. A configuration has both."""
    if is_configuration(factory):
        return {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN}[size]
    try:
        argument = inspect.signature(find_factory(factory).target).parameters.get(size)
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


MOST_TIMES = 8
"""A search begins at no more than so many times the size that is asked about."""


def fit_module(
    workload: FactoryWorkload,
    budgets: Sequence[Budget],
    device_type: DeviceType = "cuda",
    *,
    search: bool = True,
    module: Callable[[], UserModule] | None = None,
) -> list[Fit[FakeEstimate]]:
    """Predict the peak of a step, and for each budget say whether it fits; with `search` also what would make it fit,
    the largest batch and the longest sequence. Without a budget the peak alone.

    module: returns a copy of a module that exists already, in place of what the workload's factory would make. Its
    sequences have one length.
    """
    predictor = FakePredictor(workload, device_type, module)
    if not budgets:
        return [judge(predictor, None)]
    fits = [judge(predictor, budget, search=search) for budget in budgets]
    if not search:
        return fits
    return [msgspec.structs.replace(fit, **predictor.sizes(budget)) for fit, budget in zip(fits, budgets, strict=True)]


class FakePredictor:
    """Predicts a user's module and its variants, each by a step on fake tensors."""

    def __init__(
        self,
        workload: FactoryWorkload,
        device_type: DeviceType,
        module: Callable[[], UserModule] | None,
    ) -> None:
        self._module = module
        self._device_type: DeviceType = device_type
        self._watched: dict[tuple[bytes, int | None], WatchedModule | None] = {}
        self._first = watch_module_step(workload, device_type, module=module)
        self.workload = self._first.workload
        self.estimate = self._estimate(self._first)
        assert self.estimate.unseen is not None
        self._unseen = self.estimate.unseen

    def peak(self, workload: FactoryWorkload) -> int | None:
        return self._peak(self._variant(workload))

    def fits(self, workload: FactoryWorkload, budget: Budget, *, quickly: bool = False) -> bool:
        return self._runs(self._variant(workload), budget)

    def fails_in(self, budget: Budget) -> str | None:
        return self._fails_in(self._first, budget)

    def kept_free(self, budget: Budget) -> int:
        return self._unseen.kept_free(budget)

    def extra_flops(self, workload: FactoryWorkload) -> None:
        """No formula counts them."""

    def sizes(self, budget: Budget) -> dict[str, int | bool | None]:
        """The fields of a Fit with the largest sizes that fit."""
        longest, is_models = self._longest_sequence(budget)
        return {
            "largest_batch": self._largest_batch(budget),
            "longest_sequence": longest,
            "longest_is_the_models": is_models,
        }

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
        if key not in self._watched:
            try:
                self._watched[key] = watch_module_step(
                    workload, self._device_type, batch_size=batch, steps=STEPS_BEFORE, module=self._module
                )
            except InputError:
                self._watched[key] = None
        return self._watched[key]

    def _peak(self, watched: WatchedModule | None) -> int | None:
        return None if watched is None else self._estimate(watched).peak_bytes

    def _runs(self, watched: WatchedModule | None, budget: Budget) -> bool:
        return watched is not None and self._fails_in(watched, budget) is None

    def _largest_batch(self, budget: Budget) -> int | None:
        """The largest batch that fits. A batch with one sample more in each micro-batch does not fit."""
        start, unit = self.workload.batch_size, self.workload.accumulation
        if not start:
            return None
        return self._largest(start, unit, lambda size: self._variant(self.workload, size), budget)

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

        unit = SEQUENCE_STEP if start % SEQUENCE_STEP == 0 else 1
        shorter = variant(max(1, start // 2))
        if shorter is None or shorter.workload.model.inputs == workload.model.inputs:
            return None, False  # an image model takes the argument and does not read it
        longest = self._largest(start, unit, variant, budget)
        return longest, bool(longest) and variant(longest + unit) is None

    def _largest(
        self, start: int, unit: int, variant: Callable[[int], WatchedModule | None], budget: Budget
    ) -> int | None:
        """The largest multiple of `unit` whose variant fits, looked for from `start` on; the next one does not fit."""
        first = max(1, start // unit)
        half = self._peak(variant(max(1, first // 2) * unit))
        if half is None:
            return None
        peak = self.estimate.peak_bytes
        by_unit = max(1, (peak - half) // max(1, first - first // 2))
        # Peaks that barely differ foretell nothing, and a factory makes its batch in truth.
        room = budget.usable_bytes - self.kept_free(budget) - peak
        guess = min(first + room // by_unit, MOST_TIMES * first)
        found = largest(guess, lambda units: self._runs(variant(units * unit), budget)) * unit
        # Beyond the end of the search nothing is known but that the size that was asked about fits.
        return max(found, start) if self.fails_in(budget) is None else found


def _unseen(watched: WatchedModule) -> Unseen:
    watch = watched.watch
    return Unseen(
        convolutions=watch.convolutions,
        convolution_bytes=watch.convolution_bytes,
        custom=tuple(sorted(watch.custom)),
        at_most=tuple(sorted(watch.at_most)),
    )
