"""What a loop called, and what its step is: which module's forward, which optimizer's step.

Nothing is guessed. Where two modules could be meant, or optimizers step in no order, the answer is a sentence that says
so.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from stepscope.core.units import counted
from stepscope.recording.held_tensors import local_part
from stepscope.recording.updates import held_by

# Attributes that do not keep a user's model or optimizer alive: the loop alone decides how long they live.


class LoopGone(Exception):
    """Raised where the model or the optimizer of the loop is no more."""


class _Weakly:
    """An attribute of a class, whose objects are held weakly. To read it when its object is dead raises LoopGone, or
    gives None with `or_none`. In a dataclass, None is then its default."""

    def __init__(self, *, or_none: bool = False) -> None:
        self._or_none = or_none

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object | None, owner: type) -> Any:
        if holder is None:  # As a dataclass asks, for the default.
            if self._or_none:
                return None
            raise AttributeError(self._name)
        reference = vars(holder)[self._name]
        if reference is None:
            return None
        thing = reference()
        if thing is None and not self._or_none:
            raise LoopGone("the loop's model or optimizer is no more")
        return thing

    def __set__(self, holder: object, value: Any) -> None:
        vars(holder)[self._name] = weakref.ref(value) if value is not None else None


class _WeaklyEach:
    """An attribute of a class, whose objects hold several things weakly: read, it is the list of those alive."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object | None, owner: type) -> Any:
        if holder is None:
            raise AttributeError(self._name)
        return [thing for thing in (reference() for reference in vars(holder)[self._name]) if thing is not None]

    def __set__(self, holder: object, things: Iterable[Any]) -> None:
        vars(holder)[self._name] = [weakref.ref(thing) for thing in things]


# Their types are those of the things that are held.
weakly: Any = _Weakly
weakly_each: Any = _WeaklyEach


# ---- what a loop called while it was looked at
#
# Nothing here keeps a module, an optimizer or a tensor of the loop alive.


@dataclass(frozen=True)
class TensorSeen:
    """A tensor that the module's forward took."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(kw_only=True, eq=False)
class CallSeen:
    """A call of a module by the loop itself, with gradients on; no other module made it."""

    module: nn.Module | None = weakly(or_none=True)  # noqa: RUF009  (a descriptor, not a value)
    """None where it is no more, as a loss that is made anew for each batch."""
    training: bool = True
    in_closure: bool = False
    """Whether it ran inside an optimizer's step."""
    autocast: str | None = None
    """The dtype of autocast round the call or inside it; None without."""
    inputs: dict[str, TensorSeen] = field(default_factory=dict[str, TensorSeen])
    """Tensors that the module took, by their place or their name."""
    sizes: set[int] = field(default_factory=set[int])
    """The first sizes of what it returned."""
    reached: bool = False
    """Whether a backward has come to what it returned. None comes to a call that a log makes."""
    dropped: bool = False
    """Whether the gradients that its backward made were gone before the next one, so that they are summed up in no
    update: the first of the two passes of sharpness-aware minimisation, whose samples come again in the second."""

    @property
    def takes_one_sample(self) -> bool:
        """Whether its one tensor is a sample without a dimension for the batch: a layer takes all of it as features, or
        nothing that it returned has its size."""
        tensors = list(self.inputs.values())
        if len(tensors) != 1 or len(tensors[0].shape) != 1 or not tensors[0].dtype.startswith(("float", "bfloat")):
            return False
        (size,) = tensors[0].shape
        parts = self.module.modules() if self.module is not None else ()
        layers = [each for each in parts if isinstance(each, nn.Linear)]
        return any(layer.in_features == size > 1 for layer in layers) or bool(self.sizes and size not in self.sizes)


@dataclass(kw_only=True)
class ModuleSeen:
    """A module that the loop itself called in a step, and its calls."""

    module: nn.Module
    made: list[CallSeen] = field(default_factory=list[CallSeen])
    """Its calls that a backward came to; all, where none was."""

    @property
    def calls(self) -> int:
        return len(self.made)

    @property
    def training(self) -> bool:
        return self.made[0].training

    @property
    def autocast(self) -> str | None:
        return next((call.autocast for call in self.made if call.autocast), None)

    @property
    def inputs(self) -> dict[str, set[TensorSeen]]:
        """Tensors that the module took, by their place or their name."""
        inputs: dict[str, set[TensorSeen]] = {}
        for call in self.made:
            for name, tensor in call.inputs.items():
                inputs.setdefault(name, set()).add(tensor)
        return inputs

    @property
    def takes_one_sample(self) -> bool:
        return bool(self.made) and all(call.takes_one_sample for call in self.made)


@dataclass(frozen=True)
class BackwardSeen:
    """A backward, as autograd's engine ran it."""

    in_closure: bool
    adds: bool
    """Whether it adds to the gradients that parameters hold, as `torch.autograd.grad` does not."""


@dataclass(kw_only=True)
class UpdateSeen:
    """What ran between the update before this one and its end. A closure runs inside the optimizer's step."""

    optimizer: torch.optim.Optimizer | None = weakly(or_none=True)  # noqa: RUF009  (a descriptor)
    """The optimizer that stepped; None until one has, and where the loop says itself that a step has ended."""
    calls: list[CallSeen] = field(default_factory=list[CallSeen])
    backwards: list[BackwardSeen] = field(default_factory=list[BackwardSeen])

    def evaluations_of(self, module: nn.Module) -> int:
        """How often the closure ran forward of this module, and backward."""
        return min(self._sums(in_closure=True), len(self._of(module, in_closure=True)))

    def batches_of(self, module: nn.Module) -> list[CallSeen]:
        """The calls of this module, each with other samples: of those in a closure, the calls of one evaluation."""
        inside = self._of(module, in_closure=True)
        once = -(-len(inside) // max(1, self.evaluations_of(module)))
        return self._of(module, in_closure=False) + inside[:once]

    def micro_batches_of(self, module: nn.Module) -> int:
        """The number of batches whose gradients add up. A closure is evaluated again and again on one batch."""
        inside = min(1, self.evaluations_of(module))
        return max(1, min(self._sums(in_closure=False), len(self._of(module, in_closure=False))) + inside)

    def begins_backward(self, backward: BackwardSeen) -> None:
        """Note a backward that begins."""
        modules = {id(call.module): call.module for call in self.calls if call.reached and call.module is not None}
        if modules and any(each.adds for each in self.backwards if not each.in_closure):
            gradients = [p.grad for module in modules.values() for p in module.parameters() if p.grad is not None]
            # A graph that is being captured cannot be asked for numbers.
            asks = not (any(each.is_cuda for each in gradients) and torch.cuda.is_current_stream_capturing())
            if asks and not any(each.is_sparse or bool(local_part(each).any()) for each in gradients):
                for call in self.calls:
                    call.dropped = call.dropped or (call.reached and not call.in_closure)
        self.backwards.append(backward)

    def _sums(self, *, in_closure: bool) -> int:
        """Backwards that add to gradients. What `torch.autograd.grad` returns is usually a part of the loss, as a
        penalty on gradients is; it counts where nothing else runs."""
        there = [each for each in self.backwards if each.in_closure is in_closure]
        return sum(each.adds for each in there) or len(there)

    def _of(self, module: nn.Module, *, in_closure: bool) -> list[CallSeen]:
        calls = _that_count([call for call in self.calls if call.module is module])
        return [call for call in calls if call.in_closure is in_closure and not call.dropped]


@dataclass(kw_only=True)
class LoopSeen:
    """What a loop called, update by update."""

    updates: list[UpdateSeen] = field(default_factory=lambda: [UpdateSeen()])
    """Each update in turn, and last what ran after them."""
    called_quietly: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary[int, nn.Module])
    """Modules that the loop itself called with gradients off, by their ids."""
    leaves: WeakValueDictionary[int, torch.Tensor] = field(default_factory=WeakValueDictionary[int, torch.Tensor])
    """Tensors that got a gradient from a loss that no module had a part in, by their ids."""

    @property
    def backwards(self) -> int:
        return sum(len(update.backwards) for update in self.updates)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped, in the order of their last steps."""
        last = {id(update.optimizer): update.optimizer for update in reversed(self.updates) if update.optimizer}
        return list(reversed(last.values()))

    @property
    def turns(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer of each update."""
        return tuple(update.optimizer for update in self.updates if update.optimizer is not None)

    @property
    def modules(self) -> list[ModuleSeen]:
        """The modules that were called with gradients on, in the order of their first calls."""
        calls: dict[int, tuple[nn.Module, list[CallSeen]]] = {}
        for call in (call for update in self.updates for call in update.calls):
            if (module := call.module) is not None:
                calls.setdefault(id(module), (module, []))[1].append(call)
        return [ModuleSeen(module=module, made=_that_count(of_it)) for module, of_it in calls.values()]

    def last(self, updates: int) -> "LoopSeen":
        """The last updates alone."""
        done = self.updates[:-1][-updates:]
        return LoopSeen(updates=[*done, self.updates[-1]], called_quietly=self.called_quietly, leaves=self.leaves)

    def update_by(self, optimizer: torch.optim.Optimizer) -> UpdateSeen:
        """The update of this optimizer, with the backward that made its gradients. Another optimizer may step between
        that backward and this update, or the step that was looked at may have begun there."""
        turns = self.updates
        last = max((i for i, each in enumerate(turns) if each.optimizer is optimizer), default=len(turns) - 1)
        before = [*turns[last + 1 :], *turns[: last + 1]]
        return next((each for each in reversed(before) if each.backwards), before[-1])


def _that_count(calls: Sequence[CallSeen]) -> list[CallSeen]:
    """The calls that a backward came to; all, where none was."""
    return [call for call in calls if call.reached] or list(calls)


# ---- stand-ins for the model of a loop that has none: several that train together, or tensors that belong to no module
#
# Each is a module to those who ask for parameters and parts, and keeps nothing of the loop alive.


_kept: list[nn.Module] = []
"""Stand-ins for a model that were made. A watch holds its model weakly, so this list keeps them alive."""


class Several(nn.Module):
    """Models that train together, and that no module of the loop's holds."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        _kept.append(self)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_models", {}).get(name, lambda: None)()
        return model if model is not None else super().__getattr__(name)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """This module and those inside its models, with their paths."""
        memo = set() if memo is None else memo
        yield prefix, self
        for name, reference in self._models.items():
            model = reference()
            if model is not None:
                yield from model.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


class Loose(nn.Module):
    """Tensors that train, and that belong to no module."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        _kept.append(self)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """The tensors by their number, whether or not they are nn.Parameters."""
        alive = ((str(i), reference()) for i, reference in enumerate(self._tensors))
        yield from ((name, tensor) for name, tensor in alive if tensor is not None)


@dataclass(frozen=True, kw_only=True)
class LoopStep:
    """What a step is: from one end of the optimizer's step to the next."""

    roots: tuple[ModuleSeen, ...]
    """The modules whose calls are forward. Empty where the loop calls none that trains."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """First the optimizer that ends a step, then others that step in between. Empty where the loop itself says where a
    step ends."""
    backwards: int
    why: str
    in_backward: int = 0
    """Optimizers that step inside backward, whose end then ends a step."""
    turns: tuple[torch.optim.Optimizer, ...] = ()
    """The optimizer of each update in the step that was looked at."""
    update: UpdateSeen | None = None
    """The update that ends a step. None where the loop itself says where a step ends."""
    given: nn.Module | None = None
    """The whole model, where it is not the module that the loop calls: the one given, or one that holds all that
    trains."""
    quiet: tuple[nn.Module, ...] = ()
    """Other modules that the loop calls with gradients off: a teacher, a frozen encoder."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizers[0] if self.optimizers else None

    @property
    def model(self) -> nn.Module:
        return self.given if self.given is not None else bare(self.roots[0].module)

    @property
    def name(self) -> str:
        """The model's name; where it is several, theirs."""
        if isinstance(self.model, Several):
            return " and ".join(dict.fromkeys(class_name(root.module) for root in self.roots))
        return class_name(self.model)

    @property
    def forward_module(self) -> nn.Module:
        """The module that the loop calls, with what wraps the model."""
        return self.roots[0].module if self.roots else self.model

    @property
    def forwards(self) -> int:
        return sum(root.calls for root in self.roots)

    @property
    def evaluations(self) -> int:
        """How often the optimizer's step evaluated a closure."""
        return self.update.evaluations_of(self.forward_module) if self.update is not None else 0

    @property
    def micro_batches(self) -> int:
        """Batches whose gradients add up before the update that ends a step."""
        if self.update is None:
            return max(1, min(self.backwards, self.roots[0].calls if self.roots else 0))
        return self.update.micro_batches_of(self.forward_module)

    @property
    def batches(self) -> Sequence[CallSeen]:
        """Calls of the first module in a step, each with other samples."""
        if self.update is not None:
            return self.update.batches_of(self.forward_module)
        return self.roots[0].made if self.roots else ()

    def steps_of(self, optimizer: torch.optim.Optimizer) -> int:
        """How often this optimizer steps in a step."""
        return sum(each is optimizer for each in self.turns)

    def models_of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The classes of the models whose parameters this optimizer holds."""
        return list(dict.fromkeys(class_name(each.module) for each in _owned(self.roots, [optimizer])))

    @property
    def compiled(self) -> bool:
        return any(is_compiled(root.module) for root in self.roots)

    @property
    def trainable(self) -> int:
        """Numbers in the model's parameters that train: those that an optimizer holds and that require a gradient."""
        held = held_by(self.optimizers)
        trains = [p for p in self.model.parameters() if p.requires_grad and (not held or id(p) in held)]
        return sum(parameter.numel() for parameter in trains)


@dataclass(frozen=True)
class Unclear:
    """The reason why it cannot be told what a step is."""

    reason: str


def bare(module: nn.Module) -> nn.Module:
    """The model inside what wraps it whole: torch.compile, DistributedDataParallel, DataParallel, FSDP."""
    while True:
        inner, parts = None, dict(module._modules.items())  # A scripted module's are no dictionary.
        for name in ("_orig_mod", "_fsdp_wrapped_module", "module"):
            candidate = parts.get(name)
            wraps = name != "module" or isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
            if candidate is not None and wraps:
                inner = candidate
        if inner is None:
            return module
        module = inner


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place, or what it wraps."""
    while True:
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            return True
        inner = module._modules["module"] if module is not bare(module) and "module" in module._modules else None
        if inner is None:
            return False
        module = inner


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that really steps: Accelerate and Lightning wrap it."""
    inner = getattr(optimizer, "optimizer", None)
    return bare_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def class_name(thing: object) -> str:
    """The name of a thing's class, or of the class that it wraps."""
    return type(bare(thing) if isinstance(thing, nn.Module) else thing).__name__


def whole_round(turns: Sequence[object], *, at_once: bool = False) -> int | None:
    """The number of last updates that make up a round of a loop, in which each optimizer steps as often as in the round
    before; None while that does not show. A round ends with an optimizer that steps least often.

    turns: what stands for the optimizer of each update so far, in order.
    at_once: whether one update of one optimizer is a round.
    """
    ids = [id(optimizer) for optimizer in turns]
    counts = Counter(ids)
    if len(counts) == 1:
        return 1 if at_once or len(ids) > 1 else None
    places = [i for i, each in enumerate(ids) if each == ids[-1]]
    if len(places) < 2 or len(places) > min(counts.values()):
        return None
    begins = places[-3] + 1 if len(places) > 2 else 0
    before, latest = ids[begins : places[-2] + 1], ids[places[-2] + 1 :]
    return len(latest) if latest == before else None


def others_to_come(loop: LoopSeen) -> bool:
    """Whether an optimizer that has not stepped so far holds what the loop calls and what no other updates, as that of
    a generator does while its critic takes the first steps."""
    held = held_by(loop.optimizers)
    called = [*(each.module for each in loop.modules), *loop.called_quietly.values()]
    left = {id(p) for module in called for p in module.parameters() if p.requires_grad} - held
    if not left:
        return False
    return any(
        issubclass(type(thing), torch.optim.Optimizer) and not left.isdisjoint(held_by([thing]))
        for thing in gc.get_objects()
    )


def decide(
    loop: LoopSeen,
    *,
    step_of: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    marked: bool = False,
    in_backward: int = 0,
) -> LoopStep | Unclear:
    """Decide what a step is from what one step called. `step_of` names a class of module or optimizer.

    marked: whether the loop says itself where a step ends, so that no optimizer is needed. in_backward: how many
    optimizers step inside backward, whose end says it then.
    """
    if in_backward:
        step = decide(loop, model=model, marked=True)
        why = "the optimizers step inside it"
        return step if isinstance(step, Unclear) else replace(step, in_backward=in_backward, why=why)
    if model is None:
        return _decide(loop, loop.modules, step_of, optimizer, marked=marked, apart=False)
    whole = [each for each in loop.modules if any(part is model for part in each.module.modules())]
    parts = {id(part) for part in model.modules()}
    modules = whole or [
        each for each in loop.modules if id(each.module) in parts and next(each.module.parameters(), None) is not None
    ]
    if not modules and not marked and optimizer is None and not loop.optimizers:
        return Unclear(f"the loop never called {class_name(model)}, which was given, with gradients on")
    if not modules:
        return _without_forward(loop, [optimizer] if optimizer else loop.optimizers, "the model was given", model)
    step = _decide(loop, modules, step_of, optimizer, marked=marked, apart=not whole)
    return step if whole or isinstance(step, Unclear) else replace(step, given=model)


def _decide(
    loop: LoopSeen,
    modules: Sequence[ModuleSeen],
    step_of: str | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    marked: bool,
    apart: bool,
) -> LoopStep | Unclear:
    """Decide what a step is from the modules that count. apart: whether several of them may be parts of one model."""
    if marked:
        why, roots = "the loop says where", _outermost(modules)
        whole, quiet = _together(roots) if len(roots) > 1 else None, _quiet(loop, roots)
        step = LoopStep(roots=tuple(roots), optimizers=(), backwards=loop.backwards, why=why, given=whole, quiet=quiet)
        return step if roots else _without_forward(loop, [], why)
    if optimizer is not None:
        return _of_optimizer(optimizer, loop, modules, "the one that was given")
    if step_of is not None:
        return _named(step_of, loop, modules)
    if not loop.optimizers:
        return Unclear("no optimizer stepped")
    if len(loop.optimizers) == 1:
        return _of_optimizer(loop.optimizers[0], loop, modules, "the only one that steps", alone=not apart)
    # They step in turn. The last one ends the step.
    step = _of_optimizer(loop.optimizers[-1], loop, modules, f"a round of {len(loop.optimizers)} optimizers")
    if isinstance(step, LoopStep) and len(step.roots) > 1:
        step = replace(step, given=_together(step.roots))
    return step


def _named(name: str, loop: LoopSeen, modules: Sequence[ModuleSeen]) -> LoopStep | Unclear:
    by_optimizer = [each for each in loop.optimizers if class_name(each) == name]
    if len(by_optimizer) > 1:
        return Unclear(f"{len(by_optimizer)} optimizers are of class {name}: name the class of the model")
    if by_optimizer:
        return _of_optimizer(by_optimizer[0], loop, modules, f"--step-of {name}")
    by_module = [each for each in modules if name in (class_name(each.module), type(each.module).__name__)]
    if not by_module:
        there = _names([*(each.module for each in modules), *loop.optimizers])
        return Unclear(f"nothing of class {name} was called: there are {there or 'none'}")
    if len(by_module) > 1:
        return Unclear(f"{len(by_module)} modules of class {name} were called: name the class of the optimizer")
    holding = [each for each in loop.optimizers if _owned(by_module, [each])]
    if len(holding) != 1:
        of = f"{counted(len(holding), 'optimizer')} ({_names(holding)})" if holding else "no optimizer"
        return Unclear(f"the parameters of {name} are in {of}: name the class of the optimizer")
    return _of_optimizer(holding[0], loop, modules, f"--step-of {name}", first=by_module)


def _of_optimizer(
    optimizer: torch.optim.Optimizer,
    loop: LoopSeen,
    modules: Sequence[ModuleSeen],
    why: str,
    *,
    alone: bool = False,
    first: Sequence[ModuleSeen] = (),
) -> LoopStep | Unclear:
    """The step that this optimizer ends. `first` are its models, where they are known; those of other optimizers that
    step in it count as forward too. alone: whether its models must be one, or parts of one."""
    others = [each for each in loop.optimizers if each is not optimizer]
    # An optimizer may hold copies of the parameters: then modules count that a backward came to.
    trained = [each for each in modules if each.made[0].reached and next(each.module.parameters(), None) is not None]
    mine = _outermost(first or _owned(modules, [optimizer]) or trained)
    if not mine:
        return _without_forward(loop, [optimizer, *others], why)
    whole = _smallest_that_holds([root.module for root in mine]) if alone and len(mine) > 1 else None
    if alone and len(mine) > 1 and whole is None:
        names = _names(root.module for root in mine)
        return Unclear(f"{len(mine)} modules with parameters of {class_name(optimizer)} are called ({names})")
    roots = _outermost([*mine, *(each for each in _owned(modules, others) if each not in mine)])
    return LoopStep(
        roots=tuple(roots),
        optimizers=(optimizer, *others),
        backwards=loop.backwards,
        why=why,
        update=loop.update_by(optimizer),
        given=whole,
        quiet=_quiet(loop, roots),
        turns=loop.turns,
    )


def _without_forward(
    loop: LoopSeen, optimizers: Sequence[torch.optim.Optimizer], why: str, model: nn.Module | None = None
) -> LoopStep | Unclear:
    """A step without a forward, since the loop calls no module that trains: it computes by functions, or by the
    module's method. Its model is the smallest module of this process that holds what trains."""
    tensors = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    tensors = tensors or list(loop.leaves.values())
    if model is None and not tensors:
        return Unclear("no module was called and no backward ran")
    wanted = {id(tensor) for tensor in tensors}
    whole = model or _smallest(lambda module: wanted <= set(map(id, module.parameters()))) or Loose(tensors)
    update = loop.update_by(optimizers[0]) if optimizers else None
    return LoopStep(
        roots=(),
        optimizers=tuple(optimizers),
        backwards=loop.backwards,
        why=why,
        update=update,
        given=whole,
        quiet=_quiet(loop, ()),
        turns=loop.turns,
    )


def _quiet(loop: LoopSeen, roots: Sequence[ModuleSeen]) -> tuple[nn.Module, ...]:
    """The modules that are called with gradients off, except for these and what they hold."""
    inside = {id(part) for root in roots for part in root.module.modules()}
    return tuple(module for module in loop.called_quietly.values() if id(module) not in inside)


def _owned(modules: Sequence[ModuleSeen], optimizers: Sequence[torch.optim.Optimizer]) -> list[ModuleSeen]:
    """The modules that hold parameters of these optimizers."""
    held = held_by(optimizers)
    return [each for each in modules if any(id(parameter) in held for parameter in each.module.parameters())]


def _outermost(modules: Sequence[ModuleSeen]) -> list[ModuleSeen]:
    """The modules that are not inside another one of these modules."""
    inside = {id(part) for each in modules for part in each.module.modules() if part is not each.module}
    return [each for each in modules if id(each.module) not in inside]


def _together(roots: Sequence[ModuleSeen]) -> nn.Module:
    """A module that holds all of these: one of the loop's own, or else one made here."""
    modules = [root.module for root in roots]
    return _smallest_that_holds(modules) or Several(
        {
            f"{class_name(module)}{i if i and class_name(module) in map(class_name, modules[:i]) else ''}": bare(module)
            for i, module in enumerate(modules)
        }
    )


def _smallest_that_holds(modules: Sequence[nn.Module]) -> nn.Module | None:
    """The smallest module of this process that holds all of these, such as a LightningModule; None without
    one."""
    wanted = {id(module) for module in modules}
    return _smallest(lambda module: wanted < {id(part) for part in module.modules()})


def _smallest(holds: Callable[[nn.Module], bool]) -> nn.Module | None:
    """The smallest module of this process of which this is true; None without one."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and holds(thing)]
    return min(modules, key=lambda module: sum(1 for _ in module.modules()), default=None)


def _names(things: Iterable[object]) -> str:
    return ", ".join(class_name(thing) for thing in things)
