"""Our optimizers: moments in bf16, parameters in bf16, master weights, and clipping."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.workloads import OF_ONE_LAUNCH, FactoryWorkload
from stepscope.recording.held_tensors import tensors_within


class Updating(torch.optim.Optimizer, ABC):
    """An optimizer that says how parameters are updated. No `step` calls another: PyTorch wraps that of each class, and
    hooks would run twice."""

    max_norm: float | None = None
    """The bound to which it clips the gradients' global norm, in its own pass over them; None where it does not."""

    gradient_norm: Tensor | None = None
    """The norm of the last gradients before it clipped them, on the device; None where it measured none."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns what `closure`, run first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @abstractmethod
    def _update_all(self) -> None:
        """Update every parameter that has a gradient."""


# Gradients scaled down to a bound on their global norm, where the optimizer does not do it itself.
#
#     n = sqrt(sum g^2) over all gradients, in fp32;  g <- g min(1, max_norm / (n + 1e-6))
#
# (Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.) It is torch.nn.utils.clip_grad_norm_, but for
# gradients of 16 bits: there PyTorch rounds each tensor's norm to 16 bits, and here it is fp32. The host reads nothing,
# so nothing waits for the device, and a CUDA graph can hold it.


class NormOf(Protocol):
    """What finds the global norm of the gradients of these parameters: a number of this dtype, on their device."""

    def __call__(self, parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor: ...


@torch.no_grad()
def global_norm(parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The L2 norm of the gradients of these parameters. Of DTensors it is that of all ranks, which must call it."""
    norms: list[Tensor] = []
    for gradients in same_kind(gradients_of(parameters)):
        of_each = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            gradients, 2.0, dtype=dtype
        )
        norm: Any = torch.linalg.vector_norm(torch.stack(list(of_each)))
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not norms:
        return torch.zeros((), dtype=dtype, device=parameters[0].device if parameters else None)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[Tensor], max_norm: float, norm_of: NormOf = global_norm, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Scale the gradients of these parameters down to this norm; returns the norm that they had, on the device, in this
    dtype."""
    norm = norm_of(parameters, dtype)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in same_kind(gradients_of(parameters)):
        # A factor of another dtype would be a launch for each tensor.
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
            gradients, coefficient.to(gradients[0].dtype)
        )
    return norm


def updated_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer updates: those whose gradients count."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer, and those that it holds, as one that steps several does."""
    found = [optimizer]
    for each in found:
        others: list[torch.optim.Optimizer] = []
        attributes = {name: value for name, value in vars(each).items() if name not in ("state", "param_groups")}
        for _ in tensors_within(attributes, objects=1, others=others):
            pass
        found += [other for other in others if not any(other is one for one in found)]
    return found


def update_as_on_a_gpu(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of PyTorch's that may choose update all parameters together, as it does on a GPU
    (`_default_to_fused_or_foreach`); on the CPU, where fake parameters lie, it would take one after another."""
    one_by_one = torch.optim.Adafactor  # on a GPU, too
    several = [each for each in optimizers_within(optimizer) if not isinstance(each, one_by_one)]
    for group in (group for each in several for group in each.param_groups):
        chooses = "foreach" in group and group["foreach"] is None and not group.get("fused")
        fixed = group.get("differentiable") or (isinstance(group.get("lr"), Tensor) and not group.get("capturable"))
        if chooses and not fixed:
            group["foreach"] = True


def require_fake_update(workload: FactoryWorkload) -> None:
    """Raise an InputError where the update that the step chooses cannot be run on fake tensors."""
    if workload.phase == "train" and workload.optimizer in OF_ONE_LAUNCH:
        raise InputError(
            f"{workload.optimizer} cannot be run on fake tensors, which have no addresses for its kernel: "
            "choose --optimizer adamw-fused, or measure the step with stepscope run"
        )


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def same_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists that one operator, or one message, can take: of one dtype, and of one mesh if DTensors."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        # Importing DTensor takes half a second, so its mesh tells one.
        kinds.setdefault((tensor.dtype, getattr(tensor, "device_mesh", None)), []).append(tensor)
    return list(kinds.values())


# Hooks on the gradients of parameters that do not keep alive whoever asked for them.
#
# PyTorch keeps a hook where Python's collector does not look. A hook that holds the owner of the parameter, as a bound
# method does, makes a circle that nothing frees: the owner, its parameters and their gradients stay for good.


def when_ready(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call this bound method with the parameter whenever a backward has accumulated its gradient."""
    of_owner = weakref.WeakMethod(method)

    def ready(parameter: Tensor) -> None:
        call = of_owner()
        if call is not None:
            call(parameter)

    parameter.register_post_accumulate_grad_hook(ready)


def before_more(parameter: Tensor, method: Callable[[Tensor], None]) -> None:
    """Call this bound method with the parameter before a backward adds to its gradient."""
    of_owner, of_parameter = weakref.WeakMethod(method), weakref.ref(parameter)

    def before(_: Tensor) -> None:
        call, reached = of_owner(), of_parameter()
        if call is not None and reached is not None:
            call(reached)

    parameter.register_hook(before)
