"""PyTorch's own data parallel: DistributedDataParallel and fully_shard."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stepscope.core.errors import InputError
from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole, named_gradients, replicated
from stepscope.training.training_step import Ranks

_WAITS = "Expected to have finished reduction"


class _Named(DistributedDataParallel):
    """It waits for every parameter's gradient, and says in one line that one never came."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if _WAITS not in str(error):
                raise
            raise InputError(
                "a parameter of the model got no gradient, and PyTorch's DistributedDataParallel waits for it: say "
                "--parallel ddp:unused=yes, or train the parameter"
            ) from None


def ddp(whole: Whole, ranks: Ranks) -> Spread:
    """Wrap the module; gradients are all-reduced while backward goes on, in buckets in the order in which it filled
    them."""
    chosen = whole.record.chosen
    module = _Named(
        whole.forward, bucket_cap_mb=float(chosen("bucket")), find_unused_parameters=chosen("unused") == "yes"
    )
    return replicated(whole, module, local=module.no_sync)


# PyTorch's fully_shard (FSDP2): every parameter is a DTensor of which a rank keeps a shard.
#
# Each block is a unit, whose parameters are gathered before its forward and its backward, one block ahead, and let go
# after each; the last unit, of what is in no block, is the root, which keeps its own from forward to backward.


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
    return Spread(
        model=whole.model,
        forward=whole.forward,
        optimizer=whole.optimizer_of(whole.model.parameters()),
        full_parameters=lambda: full(dict(whole.model.named_parameters())),
        full_gradients=lambda: full(named_gradients(whole.model)),
        local=lambda: unreduced(whole.forward),
    )


@contextlib.contextmanager
def unreduced(module: torch.nn.Module) -> Iterator[None]:
    """While open, gradients are added up whole on each rank, and not yet reduced."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


@torch.no_grad()
def full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each whole that is a DTensor. All ranks must call it."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
