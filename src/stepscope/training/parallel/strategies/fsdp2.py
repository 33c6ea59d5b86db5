"""PyTorch's fully_shard (FSDP2): every parameter is a DTensor of which a rank keeps a shard.

Each block is a unit, whose parameters are gathered before its forward and its backward, one block ahead, and let go
after each; the last unit, of what is in no block, is the root, which keeps its own from forward to backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.training_step import Ranks


def fsdp2(whole: Whole, ranks: Ranks) -> Spread:
    """Shard each block, then the rest."""
    broadcast_from_first(whole.model)
    # Said, since PyTorch would take the GPU that a machine has, where the ranks are on its CPU.
    mesh = init_device_mesh(next(whole.model.parameters()).device.type, (ranks.ranks,))
    chosen = whole.record.chosen
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": chosen("reshard") == "yes"}
    if chosen("compute") == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if chosen("offload") == "yes":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=next(whole.model.parameters()).device.type == "cuda")
    for block in whole.blocks:
        fully_shard(block, **options)
    # The root's parameters are needed again at once, so they are never let go between.
    fully_shard(whole.forward, **{**options, "reshard_after_forward": False})
    model, forward = whole.model, whole.forward

    def full_parameters() -> dict[str, Tensor]:
        return {name: _full(parameter) for name, parameter in model.named_parameters()}

    def full_gradients() -> dict[str, Tensor]:
        return {name: _full(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    return Spread(
        model=model,
        forward=forward,
        optimizer=whole.optimizer_of(model.parameters()),
        full_parameters=full_parameters,
        full_gradients=full_gradients,
        local=lambda: Local(forward),
    )


class Local:
    """Within it, gradients are added up whole on each rank, and not yet reduced."""

    def __init__(self, module: torch.nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        self._module: FSDPModule = module

    def __enter__(self) -> None:
        self._module.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self._module.set_requires_gradient_sync(True)


@torch.no_grad()
def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
