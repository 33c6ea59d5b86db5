"""Fully sharded data parallel, lesson 6: a rank keeps 1/n of everything, and borrows the rest for a while.

Each parameter is flattened, padded to n equal parts, and each rank keeps one: its shard, which alone is trained, so
that gradients and the optimizer's state are shards, too (Rajbhandari et al. 2020, ZeRO, stage 3). A block's parameters
are gathered before its forward and let go after it, gathered again before its backward, and let go when their gradients
are reduced to the shards:

    forward     all-gather   w         (n - 1) / n P bytes a rank
    backward    all-gather   w         (n - 1) / n P
                reduce-scatter dw      (n - 1) / n P

half as much again as data parallel sends, while a rank keeps 1/n of the 16 bytes a parameter that training in fp32
takes, and one block whole at a time.

How a parameter comes and goes without autograd's notice: what forward saved for backward are views of the gathered
tensor's storage. Letting it go shrinks that storage to nothing, and gathering fills it again at the same tensor, as
PyTorch's first FSDP does. Meanwhile the shard stands in the parameter's place in its module, so that nobody reads a
tensor without storage: a module's state and its parameters are this rank's. With a compute dtype the gathered copy is
in it, and so is what is sent; shards, gradients and the optimizer stay as they were.
"""

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stepscope.recording.held_tensors import mark_part
from stepscope.training.optimizer import when_ready
from stepscope.training.parallel.collective import broadcast_from_first, norm_over_ranks
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.training_step import Ranks


class _Sharded:
    """One parameter: its shard on this rank, and the whole while it is gathered."""

    def __init__(self, name: str, original: nn.Parameter, compute_dtype: torch.dtype | None) -> None:
        self.name, self.shape, self.count = name, original.shape, original.numel()
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._length = -(-self.count // ranks)  # the last shard is padded
        padded = torch.zeros(self._length * ranks, dtype=original.dtype, device=original.device)
        padded[: self.count] = original.detach().reshape(-1)
        part = padded[rank * self._length : (rank + 1) * self._length].clone()
        self.shard = nn.Parameter(part, requires_grad=original.requires_grad)
        mark_part(self.shard, self.count)
        dtype = compute_dtype if compute_dtype is not None and original.is_floating_point() else original.dtype
        self._padded = torch.empty(self._length * ranks, dtype=dtype, device=original.device)
        self.whole = nn.Parameter(self._padded[: self.count].view(self.shape), original.is_floating_point())
        self.is_gathered = False
        self.places: list[tuple[dict[str, nn.Parameter | None], str]] = []
        """Where the parameter stands: several places have a tied one."""
        self.let_go()
        if original.is_floating_point():
            when_ready(self.whole, self._reduce)

    @torch.no_grad()
    def gather(self) -> None:
        """Have the whole parameter in its storage."""
        if self.is_gathered:
            return
        storage = self._padded.untyped_storage()
        storage.resize_(self._padded.numel() * self._padded.element_size())
        # Through .data: autograd counts writes to a tensor that it saved, and this one restores what it saved.
        dist.all_gather_into_tensor(self._padded.data, self.shard.data.to(self._padded.dtype))
        self.is_gathered = True
        self.whole.requires_grad_(self.shard.requires_grad)  # which may be frozen in one step and not in another
        self.stand_in_place(self.whole)

    def let_go(self, unless_at: Container[int] = ()) -> None:
        """Give the storage back, unless somebody reads what is at one of these addresses; the tensor itself stays."""
        storage = self._padded.untyped_storage()
        if storage.data_ptr() not in unless_at:
            storage.resize_(0)
        self.stand_in_place(self.shard)
        self.is_gathered = False

    def stand_in_place(self, parameter: nn.Parameter) -> None:
        """Put the shard or the whole where the modules look for their parameter."""
        for parameters, name in self.places:
            parameters[name] = parameter

    @torch.no_grad()
    def _reduce(self, _: Tensor | None = None) -> None:
        """Reduce the gradient to its shard, averaged, and let the whole go."""
        gradient = self.whole.grad
        padded = torch.zeros_like(self._padded, dtype=self.shard.dtype)
        if gradient is not None:
            padded[: self.count] = gradient.reshape(-1)
        self.whole.grad = None
        mean = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mean, padded)
        mean /= dist.get_world_size()
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.was_reduced = True
        self.let_go()

    was_reduced = False
    """Whether this backward had a gradient for it."""

    def finish(self) -> None:
        """Reduce what no backward of this rank reached: another rank's may have. Then be ready for the next."""
        if self.shard.requires_grad and not self.was_reduced:
            self._reduce()
        self.was_reduced = False
        self.let_go()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a fully sharded module is not copied or pickled whole: save state_dict() on every rank, or "
            "full_parameters(), which all ranks call; or copy the module before it is sharded"
        )

    def full(self, shard: Tensor) -> Tensor:
        """The whole of a shard, in the shard's dtype."""
        padded = torch.empty(self._length * dist.get_world_size(), dtype=shard.dtype, device=shard.device)
        dist.all_gather_into_tensor(padded, shard.detach())
        return padded[: self.count].view(self.shape)


class FullyShardedDataParallel(nn.Module):
    """A module of whose every parameter a rank keeps a shard; `parameters()` and `state_dict()` are of the shards.

    compute_dtype: the dtype in which forward and backward compute, and parameters are sent; floating-point inputs are
    cast to it. Shards, gradients and their mean keep the parameters' own. units: submodules whose parameters come and
    go together; those that own parameters themselves, if left out. A module that reads another's parameters belongs to
    one unit with it. Parameters begin as the first rank's. `finish_gradient_synchronization` belongs between backward
    and the optimizer's step.
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, units: Sequence[nn.Module] | None = None
    ) -> None:
        super().__init__()
        broadcast_from_first(module)
        self._compute_dtype = compute_dtype
        self._sharded: dict[str, _Sharded] = {}
        self._replace(module, compute_dtype)
        self._of = {sharded.shard: sharded for sharded in self._sharded.values()}
        self.module = module
        for unit in units if units is not None else [one for one in module.modules() if one._parameters]:
            self._watch(unit)
        if units is not None:
            inside = {parameter for unit in units for parameter in unit.parameters()}
            rest = [
                one
                for one in module.modules()
                if any(p not in inside for p in one._parameters.values() if p is not None)
            ]
            for one in rest:
                self._watch(one, own_only=True)

    def _replace(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        """Put shards in the parameters' places; a tied one is the same in each of its."""
        by_parameter: dict[nn.Parameter, _Sharded] = {}
        for prefix, owner in module.named_modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in by_parameter:
                    full_name = f"{prefix}.{name}" if prefix else name
                    by_parameter[parameter] = self._sharded[full_name] = _Sharded(full_name, parameter, compute_dtype)
                by_parameter[parameter].places.append((owner._parameters, name))
        for sharded in self._sharded.values():
            sharded.stand_in_place(sharded.shard)

    def _watch(self, unit: nn.Module, *, own_only: bool = False) -> None:
        """Gather the unit's parameters before its forward and its backward, and let them go after its forward."""
        parameters = dict.fromkeys(unit.parameters(recurse=not own_only))
        sharded = [self._of[parameter] for parameter in parameters if parameter in self._of]

        def gather(*_: Any) -> None:
            for one in sharded:
                one.gather()

        def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            gather()
            return self._cast(args), self._cast(kwargs)

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return  # backward runs this forward again, and needs the parameters next
            outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
            for one in outputs:
                if one.requires_grad and not one.is_leaf:
                    one.register_hook(gather)  # backward comes to an output before it comes to what made it
            returned = {one.untyped_storage().data_ptr() for one in outputs}  # perhaps a parameter, or a part of one
            for one in sharded:
                one.let_go(unless_at=returned)

        unit.register_forward_pre_hook(before_forward, with_kwargs=True)
        unit.register_forward_hook(after_forward)

    def _cast(self, value: Any) -> Any:
        """Floating-point tensors in the compute dtype, however they are nested in what PyTorch's trees know."""
        if self._compute_dtype is None:
            return value
        return tree_map_only(Tensor, lambda one: one.to(self._compute_dtype) if one.is_floating_point() else one, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards by the names of their parameters."""
        for name, sharded in self._sharded.items():
            yield f"{prefix}.{name}" if prefix else name, sharded.shard

    def finish_gradient_synchronization(self) -> None:
        """Have every gradient averaged in its shard."""
        for sharded in self._sharded.values():
            sharded.finish()

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the module. All ranks must call it."""
        return {name: sharded.full(sharded.shard) for name, sharded in self._sharded.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, by its parameter's name. All ranks must call it."""
        return {
            name: sharded.full(sharded.shard.grad)
            for name, sharded in self._sharded.items()
            if sharded.shard.grad is not None
        }


def fsdp_textbook(whole: Whole, ranks: Ranks) -> Spread:
    """Shard every parameter; each block is a unit."""
    names = {parameter: name for name, parameter in whole.model.named_parameters()}
    inside = dict(whole.forward.named_parameters())
    renamed = {name: names[parameter] for name, parameter in inside.items() if parameter in names}
    compute = torch.bfloat16 if whole.record.chosen("compute") == "bf16" else None
    module = FullyShardedDataParallel(whole.forward, compute_dtype=compute, units=list(whole.blocks))
    return Spread(
        model=whole.model,
        forward=module,
        optimizer=whole.optimizer_of(module.parameters()),
        full_parameters=lambda: {renamed[n]: t for n, t in module.full_parameters().items() if n in renamed},
        full_gradients=lambda: {renamed[n]: t for n, t in module.full_gradients().items() if n in renamed},
        finish=module.finish_gradient_synchronization,
        finishes=True,
        local=contextlib.nullcontext,
        norm_of=norm_over_ranks,
    )
