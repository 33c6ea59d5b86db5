"""Makes a step like the textbook's of a user's own module, or takes the step that a user's factory made."""

import contextlib
import dataclasses
import functools
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stepscope.core.checkpointing import KEEPING, group_of, nested_of, offload_of, selective_of
from stepscope.core.errors import InputError, StepscopeError, message_of, named_line
from stepscope.core.parts import REFERENCE, Kernels, Part, PartFound, compiles
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.workloads import Workload
from stepscope.kernels.parts.projections import join_projections, joined, lie_together, projections_found
from stepscope.recording.precision import exact_convolutions
from stepscope.recording.step import Phase
from stepscope.training.attention import implementation
from stepscope.training.attention.pytorch import as_captured, attention_found, calls_held, swap_attention
from stepscope.training.checkpointing import OUTPUTS_KEPT_OF_ANY, KeptCalls, checkpointed
from stepscope.training.optimizer import updated_by
from stepscope.training.parts.replaced import absent_from, replace_in
from stepscope.training.training_step import AssembledStep, Share, StepParts, check_choices, in_16_bits
from stepscope.training.user_module.user_code import (
    Call,
    WithItsLoss,
    batches_of,
    input_names,
    moved,
    named_tensors,
    split,
    user_errors,
)

# Checkpoints a user's module: finds its blocks, and makes each of them run again in backward.
#
# Blocks are the items of a ModuleList or Sequential whose items are all of one class, which is made of modules itself.
# A list inside a block is part of the block: the experts of a layer are no blocks.


def find_blocks(module: nn.Module) -> dict[str, Sequence[nn.Module]]:
    """The outermost lists of blocks in a module, by path, in the module's own order."""
    blocks_by_path: dict[str, Sequence[nn.Module]] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in blocks_by_path)
        if inside or not isinstance(part, (nn.ModuleList, nn.Sequential)):
            continue
        items = tuple(part.children())
        if len(items) > 1 and len({type(item) for item in items}) == 1 and [*items[0].children()]:
            blocks_by_path[path] = items
    return blocks_by_path


def checkpoint_blocks(module: nn.Module, checkpointing: str, name: str) -> tuple[nn.Module, ...]:
    """Make the module's blocks run again in backward as `checkpointing` says; returns them. Raises InputError where
    there are none, or they cannot be grouped."""
    blocks_by_path = find_blocks(module)
    blocks = tuple(block for each in blocks_by_path.values() for block in each)
    if checkpointing == "none":
        return blocks
    if not blocks:
        raise InputError(
            f"{name} cannot run with checkpointing {checkpointing}: it has no blocks, no ModuleList or Sequential of "
            "modules of one class"
        )
    # A block of transformers writes its keys and values to a cache. If it runs again in backward, it writes them twice.
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False
    size = _group_size(checkpointing, max(map(len, blocks_by_path.values())), name)
    if size in (None, 1):
        for block in blocks:
            _run_again(block, checkpointing)
        return blocks
    for path, several in blocks_by_path.items():
        home = module.get_submodule(path)
        if not isinstance(home, nn.Sequential):
            raise InputError(
                f"{name} cannot run with checkpointing {checkpointing}: its own forward calls the blocks of {path} one "
                f"by one; choose every-1, {' or '.join(KEEPING)}"
            )
        home.forward = functools.partial(_run_groups, several, size)  # type: ignore[method-assign]
    return blocks


def _group_size(checkpointing: str, most: int, name: str) -> int | None:
    """The number K of `every-K`; None for those of KEEPING."""
    if checkpointing in KEEPING:
        return None
    group = group_of(checkpointing)
    if any(of(checkpointing) is not None for of in (selective_of, offload_of, nested_of)):
        raise InputError(
            f"{name} cannot run with checkpointing {checkpointing}: the textbook's models alone have blocks that keep "
            f"unlike or offload; choose every-1, {' or '.join(KEEPING)}"
        )
    if group is None:
        choices = ", ".join(("none", *KEEPING, "every-1"))
        raise InputError(f"unknown checkpointing {checkpointing!r}: choose {choices} or every-K")
    if group > most:
        raise InputError(
            f"checkpointing {checkpointing} groups more blocks than {name} has in a list: choose every-1 to {most}"
        )
    return group


def _run_again(block: nn.Module, checkpointing: str) -> None:
    """Checkpoint a block in place. Backward runs the module again, and not only its forward, so that hooks on it see
    it."""
    forward, contexts = block.forward, OUTPUTS_KEPT_OF_ANY.get(checkpointing)
    running_again = threading.local()

    def again(*args: Any, **kwargs: Any) -> Any:
        running_again.now = True
        try:
            return block(*args, **kwargs)
        finally:
            running_again.now = False

    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(running_again, "now", False):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # Compiled code calls no hooks either.
            return checkpointed(forward, *args, contexts=contexts, random=True, **kwargs)
        first = iter((forward,))

        def first_then_again(*args: Any, **kwargs: Any) -> Any:
            return next(first, again)(*args, **kwargs)

        return checkpointed(first_then_again, *args, contexts=contexts, random=True, **kwargs)

    block.forward = run  # type: ignore[method-assign]


def _run_groups(blocks: Sequence[nn.Module], size: int, *args: Any) -> Any:
    """Sequential's forward, by groups of blocks that run again whole."""

    def through(group: Sequence[nn.Module], *args: Any) -> Any:
        for block in group:
            args = (block(*args),)
        return args[0]

    for start in range(0, len(blocks), size):
        args = (checkpointed(functools.partial(through, blocks[start : start + size]), *args, random=True),)
    return args[0]


# Understands what a user's factory returned: a module with its batches, its loss and perhaps its optimizer; or a step.
#
# A factory returns
#
#     (module, batch)                      forward returns the loss, alone or inside what it returns
#     (module, batch, loss)                loss(output), or loss(output, batch)
#     (module, batch, loss, optimizer)     the loss may be None
#     module                               forward takes nothing
#     an object with the attributes        module, batch or batches, loss, optimizer
#     an object with the attribute phases  a step of the user's own
#
# A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments; a list, an iterator or a
# DataLoader gives several, which the steps rotate through.


FORMS = "return (module, inputs, loss), or (module, inputs) or a module whose forward returns the loss"

_TARGETS = ("target", "targets", "label", "labels", "y", "y_true")
"""Names of a loss function's second parameter. It is then given the part of the batch that forward does not take."""

_LossTakes = Literal["output", "batch", "rest"]


@dataclass(frozen=True, kw_only=True)
class UserModule:
    """A user's module with its batches and its loss, still where the factory left them or moved to a device."""

    name: str
    """What names it in messages: `--module mine:make`."""
    module: nn.Module
    batches: list[Any]
    loss: Callable[..., Any] | None = None
    """A function from forward's output to the loss. If it is None, forward returns the loss."""
    optimizer: torch.optim.Optimizer | None = None
    found: tuple[PartFound, ...] = ()
    """Which modules other kernels compute, and which were left, where any were asked for."""

    @functools.cached_property
    def whole(self) -> nn.Module:
        """All that the step trains: the module, with its loss where that has parameters or buffers of its own."""
        if not isinstance(self.loss, nn.Module):
            return self.module
        of_both = WithItsLoss(self.module, self.loss)
        return of_both if len(_tensors_of(of_both)) > len(_tensors_of(self.module)) else self.module

    @functools.cached_property
    def call(self) -> Call:
        """How forward is called with a batch."""
        return Call(self.module, for_loss_too=self._loss_takes != "output")

    @functools.cached_property
    def _loss_takes(self) -> _LossTakes:
        """The arguments that the loss function takes beside the output, as its parameters say."""
        if self.loss is None:
            return "output"
        try:
            signature = inspect.signature(self.loss.forward if isinstance(self.loss, nn.Module) else self.loss)
        except (TypeError, ValueError):
            return "output"
        by_place = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(by_place) < 2 or by_place[1].default is not inspect.Parameter.empty:
            return "output"
        return "rest" if by_place[1].name in _TARGETS else "batch"

    @property
    def loss_name(self) -> str:
        """The name of the loss function, or words that say that forward returns the loss."""
        if self.loss is None:
            return f"returned by {type(self.module).__name__}"
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The loss of an output. Raises InputError where it is no number."""
        if self.loss is None:
            return _number(output, self.name, _FORWARD)
        others = {"output": (), "batch": (batch,), "rest": (self.call.rest(batch),)}[self._loss_takes]
        return _number(self.loss(output, *others), self.name, "its loss function")

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> "UserModule":
        """The module and its batches on a device. With a dtype, parameters, buffers and inputs are converted to it."""
        with user_errors(f"{self.name} cannot be moved to {device}"):
            # Fake parameters cannot be moved at all, not even to the device that they are on.
            there = dtype is None and all(tensor.device == device for tensor in _tensors_of(self.whole))
            module = self.module if there else self.module.to(device, dtype)
            if not there and isinstance(self.loss, nn.Module):
                self.loss.to(device, dtype)
        batches = [moved(batch, device, dtype, self.name) for batch in self.batches]
        return dataclasses.replace(self, module=module, batches=batches)

    def computed_by(self, chosen: Mapping[Part, Kernels]) -> "UserModule":
        """The module, parts of which these kernels compute, where its modules compute the same; it is changed in place.

        Raises InputError, one line, where they replace nothing.
        """
        if all(name == REFERENCE for name in chosen.values()):
            return self
        replaced = replace_in(self.module, chosen)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the trials took is no memory of the step
        if not replaced.replaced:
            raise InputError(f"{self.name} stays as it is: {replaced}; leave out kernels, norm, rope, mlp and loss")
        return dataclasses.replace(self, found=replaced.found)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def understand(returned: Any, name: str) -> UserModule:
    """The object that the factory returned, as a module with its batches. Raises InputError where it is none."""
    parts = _parts(returned, name)
    module, batch, loss, optimizer = parts.module, parts.batch, parts.loss, parts.optimizer
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise InputError(f"{name} is compiled by torch.jit, which takes no hooks: give the module before that")
    lazy = [path for path, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise InputError(f"{name} has parameters without a shape yet, as {lazy[0]}: call it with a batch before")
    if loss is not None and not callable(loss):
        raise InputError(f"{name}: the loss is {type(loss).__name__}, which cannot be called; {FORMS}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"{name}: the optimizer is {type(optimizer).__name__}, and no torch.optim.Optimizer")
    if optimizer is not None and _needs_closure(optimizer):
        raise InputError(
            f"{name}: {type(optimizer).__name__} steps by a closure that runs forward and backward again, which no "
            "step here gives: return another optimizer, or measure the loop with stepscope watch"
        )
    own = UserModule(name=name, module=module, batches=batches_of(batch, name), loss=loss, optimizer=optimizer)
    if optimizer is not None and not {*map(id, updated_by(optimizer))} & {*map(id, own.whole.parameters())}:
        remedy = "give it module.parameters(), after the module has all of them, as nn.Parameter"
        raise InputError(f"{name}: its optimizer holds none of the module's parameters: {remedy}")
    return own


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        arguments = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in named and each.default is inspect.Parameter.empty for each in arguments)


def check_gradient(loss: Tensor, name: str) -> None:
    """Raise InputError where no gradient can flow from the loss to a parameter."""
    if not loss.requires_grad:
        raise InputError(
            f"{name} has a loss without gradients: no parameter that requires one is part of it; leave out .detach() "
            "and torch.no_grad(), or let a parameter require gradients"
        )


def _parts(returned: Any, name: str) -> SimpleNamespace:
    if isinstance(returned, nn.Module):
        return SimpleNamespace(module=returned, batch=(), loss=None, optimizer=None)
    parts: dict[str, Any] = {"batch": (), "loss": None, "optimizer": None}
    if isinstance(returned, tuple) and not hasattr(returned, "module"):
        if 1 < len(returned) < 5:
            parts |= dict(zip(("module", "batch", "loss", "optimizer"), returned, strict=False))
    else:
        read = (
            returned.get if isinstance(returned, Mapping) else lambda key, otherwise: getattr(returned, key, otherwise)
        )
        parts = {key: read(key, value) for key, value in parts.items()}
        parts |= {"module": read("module", read("model", None)), "batch": read("batches", parts["batch"])}
    if not isinstance(parts.get("module"), nn.Module):
        kinds = f"({', '.join(type(part).__name__ for part in returned)})" if isinstance(returned, tuple) else ""
        raise InputError(f"{name} gave {kinds or type(returned).__name__}, and no nn.Module: {FORMS}")
    return SimpleNamespace(**parts)


def _number(value: Any, name: str, whose: str) -> Tensor:
    """The loss in a returned value: the value itself, its attribute or key `loss`, or the only number of a tuple."""
    loss: Any = value
    if isinstance(value, Mapping):
        loss = value.get("loss", value)
    elif not isinstance(value, Tensor):
        loss = getattr(value, "loss", value)
    if loss is value and isinstance(value, tuple):
        numbers = [item for item in value if _is_number(item)]
        loss = numbers[0] if len(numbers) == 1 else value
    if _is_number(loss):
        return loss
    inside = "" if loss is value else f"{type(value).__name__} whose loss is "
    shape = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(
        f"{name} has no loss: {whose} returned {inside}{shape}, and no floating tensor of one number; "
        f"{_remedy(loss, whose)}"
    )


def _remedy(loss: Any, whose: str) -> str:
    """What to do about a loss that is none."""
    if loss is None:
        return f"let {whose} return the loss"
    if isinstance(loss, int | float):
        return "return the tensor itself, without .item() or float()"
    if whose == _FORWARD or not isinstance(loss, Tensor):
        return FORMS
    return "reduce it, as by .mean()" if loss.is_floating_point() else "return a floating number"


_FORWARD = "forward"


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


class ModuleAlone(nn.Module):
    """A user's module without its loss, as inference runs it."""

    def __init__(self, user_module: UserModule) -> None:
        super().__init__()
        self.module = user_module.module
        self._arguments, self._loss_of = user_module.call.arguments, user_module.loss_of

    def forward(self, batch: Any) -> Any:
        args, kwargs = self._arguments(batch)
        return self.module(*args, **kwargs)


class ModuleWithLoss(ModuleAlone):
    """A user's module and its loss: all that `forward` means in a training step."""

    def forward(self, batch: Any) -> Tensor:
        args, kwargs = self._arguments(batch)
        return self._loss_of(self.module(*args, **kwargs), batch)


class ModuleStep(AssembledStep):
    """A step of a user's module. If the first run of one of its phases fails, one line says what is wrong."""

    def __init__(
        self, user_module: UserModule, choices: Workload, device: torch.device, share: Share | None = None
    ) -> None:
        """user_module: the module as the factory returned it. It is moved to the device. share: as of AssembledStep."""
        check_choices(choices, device)
        check_trained(user_module, choices)
        self.absent = absent_from(user_module.module)
        """Fields of the workload that choose what the module does not have."""
        user_module = placed(user_module, choices, device)
        if PRECISIONS[choices.dtype].masters and user_module.optimizer is not None:
            raise InputError(
                f"{user_module.name} gives an optimizer, which keeps no master weights: choose another --dtype"
            )
        blocks = checkpoint_blocks(user_module.module, choices.checkpointing, user_module.name)
        self.user_module, self._checkpointing = user_module, choices.checkpointing
        self.found = user_module.found
        """Which modules other kernels compute, and which were left, where any were asked for."""
        self._first = _FirstRuns(user_module.name)
        super().__init__(parts_of(user_module, choices, blocks), choices, device, share)

    def _forward(self, micro: int) -> None:
        with as_captured() if self._graphs is not None else contextlib.nullcontext():
            if FORWARD in self._first.done:
                super()._forward(micro)
                return
            self._first.run(FORWARD, lambda: self._first_forward(micro))
        assert self.loss is not None
        check_gradient(self.loss, self.user_module.name)

    def _first_forward(self, micro: int) -> None:
        if self._checkpointing != "attention" or self.compiled:
            super()._forward(micro)
            return
        with KeptCalls("attention") as kept:
            super()._forward(micro)
        if not kept.count:
            raise InputError(
                f"checkpointing attention keeps what a fused operator returns, and {self.user_module.name} calls none: "
                "let it call scaled_dot_product_attention where a fused kernel runs, or choose --checkpointing "
                "selective or every-1"
            )

    def _infer(self, micro: int) -> None:
        with as_captured() if self._graphs is not None else contextlib.nullcontext():
            self._first.run(FORWARD, lambda: super(ModuleStep, self)._infer(micro))

    def _backward(self) -> None:
        self._first.run(BACKWARD, super()._backward)

    def _optimize(self) -> None:
        self._first.run(OPTIMIZER, super()._optimize)


@dataclass(eq=False)
class _FirstRuns:
    """Runs the phases of a user's step. What a phase raises in its first run is a mistake in the user's code; later, it
    is a failure of the run, which keeps the steps before it."""

    name: str
    done: set[str] = field(init=False, default_factory=set[str])

    def run(self, phase: str, run: Callable[[], object]) -> None:
        """Run a phase. Raises InputError if its first run fails, unless the device failed: that is not the user's
        mistake."""
        if phase in self.done:
            run()
            return
        try:
            run()
        except (StepscopeError, torch.OutOfMemoryError, torch.AcceleratorError, MemoryError):
            raise
        except (Exception, SystemExit) as error:  # The user's own code may raise anything.
            missing = isinstance(error, NotImplementedError)  # names operators, as empty.memory_format
            if isinstance(error, RuntimeError) and not missing and "memory" in message_of(error):
                raise
            called = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            where = f"{phase}, in its loss function" if UserModule.loss_of.__code__ in called else phase
            raise InputError(f"{self.name} fails in {where}: {named_line(error)}") from error
        self.done.add(phase)


class UserStep:
    """A step that a user made: an object with `phases`, and perhaps with other attributes of a Step."""

    def __init__(self, user_step: Any, name: str, device: torch.device) -> None:
        self.user_step, self.device = user_step, device
        self._first = _FirstRuns(name)
        self.phases = self._phases(user_step.phases, name)
        model = getattr(user_step, "model", getattr(user_step, "module", None))
        if not isinstance(model, nn.Module | None):
            raise InputError(f"{name} gave a step whose model is {type(model).__name__}, and no nn.Module")
        self.model: nn.Module = nn.Module() if model is None else model
        self.forward_module: nn.Module = getattr(user_step, "forward_module", self.model)
        self.blocks: Sequence[nn.Module] = tuple(getattr(user_step, "blocks", ()))
        self.optimizer: torch.optim.Optimizer | None = getattr(user_step, "optimizer", None)
        self.scaler = getattr(user_step, "scaler", None) or torch.amp.GradScaler(device.type, enabled=False)
        self.batches: Sequence[Any] = list(getattr(user_step, "batches", ()))
        self.compiled = bool(getattr(user_step, "compiled", False))
        self.compiles_parts = bool(getattr(user_step, "compiles_parts", False))
        self.cuda_graphs = bool(getattr(user_step, "cuda_graphs", False))
        self._names = input_names(self.model)

    def _phases(self, phases: Any, name: str) -> tuple[Phase, ...]:
        """The phases of the user's step, each to be run by `_first`."""
        if not isinstance(phases, (list, tuple)) or not phases:
            raise InputError(
                f"{name} gave a step whose phases are {type(phases).__name__}: give a list of (name, function)"
            )
        checked: list[Phase] = []
        for user_phase in phases:
            named = hasattr(user_phase, "run") and hasattr(user_phase, "name")
            pair = (user_phase.name, user_phase.run) if named else user_phase
            match pair:
                case (str(phase_name), run) if isinstance(pair, tuple) and phase_name and callable(run):
                    checked.append(Phase(name=phase_name, run=functools.partial(self._first.run, phase_name, run)))
                case _:
                    raise InputError(
                        f"{name} gave a step with the phase {user_phase!r:.60}: each is a name and a function"
                    )
        return tuple(checked)

    @property
    def batch(self) -> Any:
        """The batch of the next step; () where the step does not say."""
        return getattr(self.user_step, "batch", self.batches[0] if self.batches else ())

    @property
    def loss(self) -> Tensor | None:
        """The loss of the last forward; None where the step does not say."""
        loss = getattr(self.user_step, "loss", None)
        return loss if isinstance(loss, Tensor) else None

    @loss.setter
    def loss(self, loss: Tensor | None) -> None:
        if hasattr(self.user_step, "loss"):
            self.user_step.loss = loss

    def named_tensors(self, batch: Any) -> list[tuple[str, Tensor]]:
        """The tensors of a batch with their names."""
        return named_tensors(batch, self._names)

    def prepare(self) -> None:
        """Run what the user's step prepares before each step. It is not timed."""
        prepare = getattr(self.user_step, "prepare", None)
        if prepare is not None:
            self._first.run("prepare", prepare)


def check_trained(user_module: UserModule, choices: Workload) -> None:
    """Raise InputError for a training step of a module without parameters that are trained."""
    if choices.phase != "forward" and not any(parameter.requires_grad for parameter in user_module.whole.parameters()):
        remedy = "give it some, or measure forward alone with stepscope run --phase forward"
        raise InputError(f"{user_module.name} has no parameters to train: {remedy}")


def placed(user_module: UserModule, choices: Workload, device: torch.device) -> UserModule:
    """The module on its device and in its dtype, with the parts that other kernels compute.

    They come first of all that changes a module: a replacement is held against the module's own forward and its own
    linear layers, before blocks run again in backward, weights are halved, and products take eight bits. All of these
    keep the replacement, which calls the layers as modules and reads their dtypes when it runs.
    """
    there = user_module.on(device, torch.bfloat16 if choices.dtype == "bf16-pure" else None)
    return swapped(there.computed_by(choices.parts), choices)


# What computes a model otherwise as a whole: attention by another function; projections of one input as one product,
# and patches as one.
#
# The model itself is the judge: its loss and all its gradients on one sample of its batch, before and after. In fp32
# they may differ by fp32's rounding. Under autocast the model's own code rounds to bf16, too: beside the gradients in
# fp32 the swapped model's error may be twice its own.


_FP32_BOUND = 1e-3
"""How far gradients in fp32 may be apart, as a share of their norm. Kernels on a GPU multiply fp32 by parts of it."""


def swapped(user_module: UserModule, choices: Workload) -> UserModule:
    """The module with the attention and the projections that were chosen, held against itself first; it is changed in
    place. Raises InputError, one line, where they replace nothing, or where gradients are others."""
    if choices.attention is None and choices.projections == "apart":
        return user_module
    own, found = _gradients_of(user_module), [*user_module.found]
    for what, swap in _swaps(user_module.module, choices).items():
        undo = swap()
        try:
            with calls_held() as calls:
                _hold(user_module, own, what)
            if what.startswith("attention") and not any(not why_not for _, why_not in calls):
                why_not = next((why for _, why in calls), "it calls none by transformers' interface")
                raise InputError(f"{what} takes no call of {user_module.name}: {why_not}; leave out attention")
        except InputError:
            undo()
            raise
        if what.startswith("attention"):
            found += attention_found(user_module.module, choices.attention or "", calls)
        else:
            found += projections_found(user_module.module)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the trials took is no memory of the step
    return dataclasses.replace(user_module, found=tuple(found))


def _swaps(module: nn.Module, choices: Workload) -> dict[str, Callable[[], Callable[[], None]]]:
    """By what the option says, what swaps it in place and returns what undoes that."""
    swaps: dict[str, Callable[[], Callable[[], None]]] = {}
    if choices.attention is not None:
        function = implementation(choices.attention)
        swaps[f"attention {choices.attention}"] = functools.partial(swap_attention, module, choices.attention, function)
    if choices.projections == "joint":
        swaps["projections joint"] = functools.partial(join_projections, module)
    return swaps


def _gradients_of(user_module: UserModule, with_what: str = "") -> dict[bool, list[Tensor]]:
    """The loss and the gradients of one sample, in the model's own dtype and, where that is fp32, under autocast to
    bf16; every time from the same random numbers."""
    forward, batch = ModuleWithLoss(user_module), user_module.batches[0]
    sizes = [tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()]
    with contextlib.suppress(InputError):  # a batch that cannot be split is taken whole
        batch = split(batch, sizes[0] if sizes else 1, user_module.name)[0]
    trained = [parameter for parameter in user_module.whole.parameters() if parameter.requires_grad]
    device = trained[0].device
    found: dict[bool, list[Tensor]] = {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []), exact_convolutions():
        for autocast in (False, True):
            torch.manual_seed(0)
            with (
                user_errors(f"{user_module.name} fails{with_what}"),
                torch.autocast(device.type, torch.bfloat16, autocast),
            ):
                loss = forward(batch)
            check_gradient(loss, user_module.name)
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            found[autocast] = [loss.detach(), *(each for each in gradients if each is not None)]
    return found


def _hold(user_module: UserModule, own: Mapping[bool, Sequence[Tensor]], what: str) -> None:
    """Hold a model that was swapped against its own gradients. Raises InputError where they are others."""
    swapped = _gradients_of(user_module, f" with {what}")
    bounds = {False: _FP32_BOUND, True: 2 * _apart(own[True], own[False]) + _FP32_BOUND}
    for autocast, bound in bounds.items():
        error = _apart(swapped[autocast], own[False])
        if not error <= bound:  # nor where it is no number
            how = "under autocast to bf16" if autocast else "in its own dtype"
            raise InputError(
                f"{what} changes what {user_module.name} computes: its gradients are {error:.2g} of their norm away "
                f"{how}, and {bound:.2g} would be rounding; leave it out"
            )


def _apart(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """The norm of the difference of loss and gradients, as a share of the norm."""
    if len(these) != len(those):
        return math.inf
    pairs = list(zip(these, those, strict=True))
    away = sum((one.double() - other.double()).square().sum().item() for one, other in pairs)
    return math.sqrt(away / max(sum(other.double().square().sum().item() for _, other in pairs), 1e-300))


def parts_of(user_module: UserModule, choices: Workload, blocks: Sequence[nn.Module] = ()) -> StepParts:
    """What the step of a user's module is assembled of; its blocks, where they are known."""
    names = input_names(user_module.module)
    masters = in_16_bits(user_module.module, choices, blocks)
    for group in joined(user_module.module):
        lie_together([layer.weight for layer in group.layers])
        if group.biases:
            lie_together(group.biases)
    return StepParts(
        model=user_module.whole,
        masters=masters,
        forward=ModuleAlone(user_module) if choices.phase == "forward" else ModuleWithLoss(user_module),
        batches=[(batch,) for batch in user_module.batches],
        named_tensors=lambda batch: named_tensors(batch[0], names),
        split=lambda batch, parts: [(each,) for each in split(batch[0], parts, user_module.name)],
        blocks=blocks,
        optimizer=user_module.optimizer,
        compiles_parts=compiles(choices.parts),
    )
