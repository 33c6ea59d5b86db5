"""Decides what a step of the loop is, from what one whole step called: which module's forward, which optimizer's step.

It does not guess. Where two modules or two optimizers could be meant, the answer is a sentence that says so.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from stepscope.core.units import counted


@dataclass(frozen=True)
class TensorSeen:
    """A tensor that the module's forward took."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(kw_only=True)
class ModuleSeen:
    """A module that the loop itself called with gradients on; no other module called it."""

    module: nn.Module
    calls: int = 0
    training: bool = True
    autocast: str | None = None
    """The dtype of autocast round its forward or inside it; None without."""
    inputs: dict[str, set[TensorSeen]] = field(default_factory=dict[str, set[TensorSeen]])
    """Tensors that the module took, by their place or their name."""


@dataclass(kw_only=True)
class UpdateSeen:
    """What ran between the update before this one and its end. A closure runs inside the optimizer's step."""

    optimizer: torch.optim.Optimizer | None = None
    """The optimizer that stepped; None until one has."""
    forwards: Counter[int] = field(default_factory=Counter[int])
    """Calls of each module before the optimizer's step, by the module's id."""
    backwards: int = 0
    closure_forwards: Counter[int] = field(default_factory=Counter[int])
    closure_backwards: int = 0

    @property
    def ran_backward(self) -> bool:
        return self.backwards + self.closure_backwards > 0

    def evaluations_of(self, module: nn.Module) -> int:
        """How often the closure ran forward of this module, and backward."""
        return min(self.closure_backwards, self.closure_forwards[id(module)])

    def forwards_of(self, module: nn.Module) -> int:
        """Calls of this module, of which those in a closure count for one evaluation."""
        inside = self.closure_forwards[id(module)]
        return self.forwards[id(module)] + -(-inside // max(1, self.evaluations_of(module)))

    def micro_batches_of(self, module: nn.Module) -> int:
        """The number of batches whose gradients add up. A closure is evaluated again and again on one batch."""
        inside = min(1, self.evaluations_of(module))
        return max(1, min(self.backwards, self.forwards[id(module)]) + inside)


@dataclass(kw_only=True)
class LoopSeen:
    """What one whole step of a loop called."""

    modules: list[ModuleSeen]
    optimizers: list[torch.optim.Optimizer]
    """The optimizers that stepped, in the order of their last steps."""
    backwards: int = 0
    updates: list[UpdateSeen] = field(default_factory=lambda: [UpdateSeen()])
    """Each update in turn, and last what ran after them."""

    def update_by(self, optimizer: torch.optim.Optimizer) -> UpdateSeen:
        """The update of this optimizer, with the backward that made its gradients. Another optimizer may step between
        that backward and this update, or the step that was looked at may have begun there."""
        turns = self.updates
        last = max((i for i, each in enumerate(turns) if each.optimizer is optimizer), default=len(turns) - 1)
        before = [*turns[last + 1 :], *turns[: last + 1]]
        return next((each for each in reversed(before) if each.ran_backward), before[-1])


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a step is: from one end of the optimizer's step to the next."""

    roots: tuple[ModuleSeen, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    """First the optimizer that ends a step, then others that step in between. Empty where the loop itself says where a
    step ends."""
    backwards: int
    why: str
    update: UpdateSeen | None = None
    """The update that ends a step. None where the loop itself says where a step ends."""
    given: nn.Module | None = None
    """The whole model, where the loop calls only parts of it: the one given, or the one found to hold them all."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizers[0] if self.optimizers else None

    @property
    def model(self) -> nn.Module:
        return self.given if self.given is not None else bare(self.roots[0].module)

    @property
    def forwards(self) -> int:
        return sum(root.calls for root in self.roots)

    @property
    def evaluations(self) -> int:
        """How often the optimizer's step evaluated a closure."""
        return self.update.evaluations_of(self.roots[0].module) if self.update is not None else 0

    @property
    def micro_batches(self) -> int:
        """Batches whose gradients add up before the update that ends a step."""
        root = self.roots[0]
        if self.update is None:
            return max(1, min(self.backwards, root.calls))
        return self.update.micro_batches_of(root.module)

    @property
    def batches(self) -> int:
        """Calls of the first module in a step, each with other samples."""
        root = self.roots[0]
        return max(1, root.calls if self.update is None else self.update.forwards_of(root.module))

    @property
    def compiled(self) -> bool:
        return any(is_compiled(root.module) for root in self.roots)


@dataclass(frozen=True)
class Unclear:
    """The reason why it cannot be told what a step is."""

    reason: str


def bare(module: nn.Module) -> nn.Module:
    """The model inside what wraps it whole: torch.compile, DistributedDataParallel, DataParallel, FSDP."""
    while True:
        inner = None
        for name in ("_orig_mod", "_fsdp_wrapped_module", "module"):
            candidate = module._modules.get(name)
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
        inner = module._modules.get("module") if module is not bare(module) else None
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


def decide(
    seen: LoopSeen,
    *,
    step_of: str | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    said: bool = False,
) -> Found | Unclear:
    """Decide what a step is from what one step called. `step_of` names a class of module or optimizer.

    said: whether the loop says itself where a step ends, so that no optimizer is needed.
    """
    if model is None:
        return _decide(seen, step_of, optimizer, said=said, apart=False)
    whole = _holding(seen.modules, model)
    modules = whole or _inside(seen.modules, model)
    if not modules:
        return Unclear(f"the loop never called {class_name(model)}, which was given, with gradients on")
    optimizers = [each for each in seen.optimizers if _owned(modules, each)]
    seen = replace(seen, modules=modules, optimizers=optimizers)
    found = _decide(seen, step_of, optimizer, said=said, apart=not whole)
    return found if whole or isinstance(found, Unclear) else replace(found, given=model)


def _decide(
    seen: LoopSeen, step_of: str | None, optimizer: torch.optim.Optimizer | None, *, said: bool, apart: bool
) -> Found | Unclear:
    """Decide what a step is from the modules that count. apart: whether several of them may be parts of one model."""
    if said and seen.modules:
        roots = tuple(_outermost(seen.modules))
        return Found(roots=roots, optimizers=(), backwards=seen.backwards, why="the loop says where")
    if optimizer is not None:
        return _of_optimizer(optimizer, seen, seen.modules, "the one that was given")
    if step_of is not None:
        return _named(step_of, seen, seen.modules)
    if not seen.optimizers:
        return Unclear("no optimizer stepped")
    if len(seen.optimizers) > 1:
        whose = ", ".join(_with_its_models(each, seen.modules) for each in seen.optimizers)
        return Unclear(f"{len(seen.optimizers)} optimizers step ({whose})")
    return _of_optimizer(seen.optimizers[0], seen, seen.modules, "the only one that steps", alone=not apart)


def _named(name: str, seen: LoopSeen, modules: Sequence[ModuleSeen]) -> Found | Unclear:
    by_optimizer = [each for each in seen.optimizers if class_name(each) == name]
    if len(by_optimizer) > 1:
        return Unclear(f"{len(by_optimizer)} optimizers are of class {name}: name the class of the model")
    if by_optimizer:
        return _of_optimizer(by_optimizer[0], seen, modules, f"--step-of {name}")
    by_module = [each for each in modules if name in (class_name(each.module), type(each.module).__name__)]
    if not by_module:
        there = _names([*(each.module for each in modules), *seen.optimizers])
        return Unclear(f"nothing of class {name} was called: there are {there or 'none'}")
    if len(by_module) > 1:
        return Unclear(f"{len(by_module)} modules of class {name} were called: name the class of the optimizer")
    holding = [each for each in seen.optimizers if _owned(by_module, each)]
    if len(holding) != 1:
        of = f"{counted(len(holding), 'optimizer')} ({_names(holding)})" if holding else "no optimizer"
        return Unclear(f"the parameters of {name} are in {of}: name the class of the optimizer")
    return _of_optimizer(holding[0], seen, by_module, f"--step-of {name}")


def _of_optimizer(
    optimizer: torch.optim.Optimizer, seen: LoopSeen, modules: Sequence[ModuleSeen], why: str, *, alone: bool = False
) -> Found | Unclear:
    roots = _outermost(_owned(modules, optimizer))
    if not roots:
        return Unclear(f"no module that the loop called holds the parameters of {class_name(optimizer)}")
    whole = _smallest_that_holds([root.module for root in roots]) if alone and len(roots) > 1 else None
    if alone and len(roots) > 1 and whole is None:
        names = _names(root.module for root in roots)
        return Unclear(f"{len(roots)} modules with parameters of {class_name(optimizer)} are called ({names})")
    others = [each for each in seen.optimizers if each is not optimizer]
    return Found(
        roots=tuple(roots), optimizers=(optimizer, *others), backwards=seen.backwards, why=why,
        update=seen.update_by(optimizer), given=whole,
    )  # fmt: skip


def _with_its_models(optimizer: torch.optim.Optimizer, modules: Sequence[ModuleSeen]) -> str:
    """An optimizer by its class and the classes of its models, either of which may be what tells it from others."""
    models = list(dict.fromkeys(class_name(each.module) for each in _outermost(_owned(modules, optimizer))))
    of = f" of {', '.join(models[:3])}{', ...' if len(models) > 3 else ''}" if models else ""
    return f"{class_name(optimizer)}{of}"


def _owned(modules: Sequence[ModuleSeen], optimizer: torch.optim.Optimizer) -> list[ModuleSeen]:
    """The modules that hold parameters of this optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [each for each in modules if any(id(parameter) in held for parameter in each.module.parameters())]


def _outermost(modules: Sequence[ModuleSeen]) -> list[ModuleSeen]:
    """The modules that are not inside another one of these modules."""
    inside = {id(part) for each in modules for part in each.module.modules() if part is not each.module}
    return [each for each in modules if id(each.module) not in inside]


def _holding(modules: Sequence[ModuleSeen], model: nn.Module) -> list[ModuleSeen]:
    """The modules that are the model, or hold all of it."""
    return [each for each in modules if any(part is model for part in each.module.modules())]


def _inside(modules: Sequence[ModuleSeen], model: nn.Module) -> list[ModuleSeen]:
    """The modules that are parts of the model and have parameters."""
    parts = {id(part) for part in model.modules()}
    return [each for each in modules if id(each.module) in parts and next(each.module.parameters(), None) is not None]


def _smallest_that_holds(modules: Sequence[nn.Module]) -> nn.Module | None:
    """The smallest module of this process that holds all of these, such as a LightningModule; None without
    one."""
    wanted = {id(module) for module in modules}
    holding: list[tuple[int, nn.Module]] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module):
            parts = {id(part) for part in thing.modules()}
            if wanted < parts:
                holding.append((len(parts), thing))
    return min(holding, key=lambda each: each[0], default=(0, None))[1]


def _names(things: Iterable[object]) -> str:
    return ", ".join(class_name(thing) for thing in things)
