"""Makes the workload from what a caller in Python says: of the textbook's model, of a factory, or of a module."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.model_file import unmet
from stepscope.core.own_arguments import code_digest
from stepscope.core.own_workload import OwnModel, OwnWorkload
from stepscope.core.parts import named_kernels, own_kernels
from stepscope.core.workload import Workload

if TYPE_CHECKING:
    from stepscope.training.own.loading import Loaded

_OF_ANY_MODEL = (
    "dtype", "phase", "compile", "graph", "optimizer", "clip", "checkpointing", "accumulation", "seed", "kernels",
    "parallel", "ranks",
)  # fmt: skip
"""The choices for a step of any model. All others belong to the textbook's model."""
_SIZES = tuple(field for field in ModelConfig.__struct_fields__ if field != "name")


def given(**said: Any) -> dict[str, Any]:
    """The arguments that a caller gave: one that is None was left out."""
    return {name: value for name, value in said.items() if value is not None}


def textbook(preset: object, said: dict[str, Any]) -> Workload:
    """The textbook's workload, with Workload's defaults for the rest. Raises InputError for choices that cannot be."""
    if not isinstance(preset, str):
        raise InputError(f"the model is {type(preset).__name__}: give the name of a preset, as in 'small'")
    parts = named_kernels(said["kernels"]) if "kernels" in said else {}
    chosen: dict[str, Any] = {**{name: value for name, value in said.items() if name != "kernels"}, **parts}
    sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
    return Workload(model=configure(preset, **sizes), **chosen)


def check_one_model(
    model: object, module: str | None, arguments: Mapping[str, Any] | None, *, batch: object, loss: object,
    optimizer: object,
) -> None:  # fmt: skip
    """Raise InputError if two models are named, or if a model is given something that it does not take."""
    if model is not None and module is not None:
        raise InputError("model and module both say which model is meant: give one of them")
    if arguments and module is None:
        raise InputError("arguments belong to module, a factory: say whose they are")
    of_a_module = {"batch": batch, "loss": loss, "optimizer": None if isinstance(optimizer, str) else optimizer}
    strangers = [name for name, value in of_a_module.items() if value is not None]
    if strangers and (module is not None or model is None or isinstance(model, str)):
        whose = "a factory gives its own" if module is not None else "the textbook's model has its own"
        raise InputError(f"{' and '.join(strangers)}: only a model that is an nn.Module takes it, {whose}")


def of_factory(factory: str, arguments: Mapping[str, Any] | None, said: Mapping[str, Any]) -> OwnWorkload:
    """The workload of what a factory makes of its arguments. Raises InputError for choices of the textbook's model."""
    chosen = _choices(said, "give the factory arguments")
    workload = OwnWorkload(
        factory=factory, code=code_digest(factory), model=OwnModel(name=""), arguments=dict(arguments or {}), **chosen
    )
    for sentence in unmet(workload):
        warnings.warn(f"{factory}: {sentence}", stacklevel=3)
    return workload


def of_object(
    model: object, batch: object, loss: object, said: dict[str, Any]
) -> "tuple[OwnWorkload, Callable[[], Loaded]]":
    """The workload of a module that exists already, and a function that returns a copy of the module. Raises InputError
    for another object, and for choices of the textbook's model."""
    from torch import nn, optim  # noqa: PLC0415  (the caller has it)

    from stepscope.training.own.loading import code_of, copy_of, take_own  # noqa: PLC0415

    is_step = not isinstance(model, nn.Module) and hasattr(model, "phases")
    if not isinstance(model, nn.Module) and not is_step:
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"the model is {kind}: give an nn.Module, the name of a preset, or module='file.py:factory'")
    if "seed" in said:
        raise InputError("seed is of weights that are made, and this model has its own: leave it out")
    own = said.pop("optimizer") if isinstance(said.get("optimizer"), optim.Optimizer) else None
    chosen = _choices(said, "your module and its batch say their own sizes and attention")
    name = type(model).__name__
    parts = {"module": model, "batch": () if batch is None else batch, "loss": loss, "optimizer": own}
    loaded = take_own(model if is_step else parts, f"the model {name}")
    return OwnWorkload(factory=name, code=code_of(loaded), model=OwnModel(name=""), **chosen), functools.partial(
        copy_of, loaded
    )


@contextlib.contextmanager
def gradients_kept(model: object) -> Generator[None]:
    """A context in which a copy of the model is trained, and after which its own gradients are what they were. Raises
    InputError at its end where the loss reached them: no copy is made of what a function refers to."""
    from torch import nn  # noqa: PLC0415  (the caller has it)

    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # into one that is there, backward would add
    try:
        yield
    finally:
        reached = any(parameter.grad is not None for parameter in parameters)
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    if reached:
        raise InputError(
            f"the loss of {type(model).__name__} reads parameters of the model itself, and the step is of a copy: give "
            "a module whose forward returns the loss, or a factory"
        )


def _choices(said: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """The fields of an OwnWorkload that were said. Raises InputError for choices of the textbook's model."""
    strangers = [name for name in said if name not in _OF_ANY_MODEL]
    if strangers:
        raise InputError(f"only the textbook's model takes {', '.join(strangers)}: {remedy}")
    parts = own_kernels(said["kernels"]) if "kernels" in said else {}
    return {**{name: value for name, value in said.items() if name != "kernels"}, **parts}
