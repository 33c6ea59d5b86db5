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

Modules that hold no matrix, norms above all, may be replicated instead: every rank keeps their parameters whole, and
their gradients are averaged in one message after backward. A norm has M parameters beside the 12 M^2 or so of a block:
to shard it saves nothing, costs three messages of a few KiB each, and rounds its weight to the compute dtype.

The order of sums. A rank adds up the gradient over its own samples, and the ranks' sums are added: in floating point
another sum than one process's over all samples, and no order of adding the ranks' sums gives that one back.
`sums="batch"` does: the inputs and output gradients of each module are gathered (the sufficient factors of Xie et al.
2016), and every rank finds the gradient of the weight over the whole batch, in the order of one process. That is more
work and, for large batches, more bytes: it is for tests, to tell rounding from a mistake.
"""

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from stepscope.core.errors import InputError
from stepscope.recording.held_tensors import mark_part
from stepscope.training.optimizer import when_ready
from stepscope.training.parallel.collective import broadcast_from_first, norm_over_ranks
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.parallel.strategies.ddp_textbook import average_flat
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
    """A module of whose parameters a rank keeps shards; `parameters()` and `state_dict()` are of the shards.

    compute_dtype: the dtype in which forward and backward compute, and parameters are sent; floating-point inputs are
    cast to it. Shards, gradients and their mean keep the parameters' own. units: submodules whose parameters come and
    go together; those that own parameters themselves, if left out. A module that reads another's parameters belongs to
    one unit with it. replicated: submodules whose own parameters every rank keeps whole, and computes with in their own
    dtype; `without_matrices(module)` names the norms. sums: "ranks" adds up what each rank summed over its samples;
    "batch" sums over all ranks' samples at once, in the order of one process, for modules that take and return tensors
    whose first dimension is the batch. Parameters begin as the first rank's. `finish_gradient_synchronization` belongs
    between backward and the optimizer's step. Raises InputError for sums="batch" with units, or with a module that
    returns something else.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        units: Sequence[nn.Module] | None = None,
        *,
        replicated: Sequence[nn.Module] = (),
        sums: Literal["ranks", "batch"] = "ranks",
    ) -> None:
        super().__init__()
        if sums == "batch" and units is not None:
            raise InputError('sums="batch" takes each module by itself: leave out units')
        broadcast_from_first(module)
        self._compute_dtype = compute_dtype
        self._sharded: dict[str, _Sharded] = {}
        self.replicated_parameters: dict[str, nn.Parameter] = {}
        """What every rank keeps whole, by its name in the module."""
        self._replace(module, compute_dtype, set(replicated))
        self._of = {sharded.shard: sharded for sharded in self._sharded.values()}
        self.module = module
        owners = [one for one in module.modules() if one._parameters]
        for one in owners:
            if compute_dtype is not None and one in replicated:
                _compute_in_own_dtype(one, compute_dtype)
        for unit in units if units is not None else owners:
            self._watch(unit)
        if units is not None:
            inside = {parameter for unit in units for parameter in unit.parameters()}
            for one in owners:
                if any(p in self._of and p not in inside for p in one._parameters.values()):
                    self._watch(one, own_only=True)
        if sums == "batch":
            _sum_over_the_batch(owners, {**self.replicated_parameters, **self._wholes()})

    def _wholes(self) -> dict[str, nn.Parameter]:
        return {name: sharded.whole for name, sharded in self._sharded.items()}

    def _replace(self, module: nn.Module, compute_dtype: torch.dtype | None, replicated: Container[nn.Module]) -> None:
        """Put shards in the parameters' places; a tied one is the same in each of its."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
        for prefix, owner in module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    full_name = f"{prefix}.{name}" if prefix else name
                    places.setdefault(parameter, []).append((owner, name, full_name))
        for parameter, stands_at in places.items():
            _, _, full_name = stands_at[0]
            if all(owner in replicated for owner, _, _ in stands_at):
                self.replicated_parameters[full_name] = parameter
                continue
            sharded = self._sharded[full_name] = _Sharded(full_name, parameter, compute_dtype)
            sharded.places = [(owner._parameters, name) for owner, name, _ in stands_at]
            sharded.stand_in_place(sharded.shard)

    def _watch(self, unit: nn.Module, *, own_only: bool = False) -> None:
        """Gather the unit's parameters before its forward and its backward, and let them go after its forward."""
        parameters = dict.fromkeys(unit.parameters(recurse=not own_only))
        sharded = [self._of[parameter] for parameter in parameters if parameter in self._of]
        if not sharded:
            return

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
        """The shards, and what is replicated, by the names of their parameters."""
        shards = {name: sharded.shard for name, sharded in self._sharded.items()}
        for name, parameter in {**shards, **self.replicated_parameters}.items():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def finish_gradient_synchronization(self) -> None:
        """Have every gradient averaged: in its shard, or whole where its parameter is."""
        for sharded in self._sharded.values():
            sharded.finish()
        average_flat([one for one in self.replicated_parameters.values() if one.requires_grad])

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter whole, by its name in the module. All ranks must call it."""
        return self._full(dict(self.named_parameters()))

    def full_gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, by its parameter's name. All ranks must call it."""
        return self._full({name: one.grad for name, one in self.named_parameters() if one.grad is not None})

    def _full(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._sharded[name].full(tensor) if name in self._sharded else tensor.detach()
            for name, tensor in kept.items()
        }


def without_matrices(module: nn.Module) -> list[nn.Module]:
    """The submodules whose own parameters are vectors or single numbers: norms, above all."""
    of_modules = ((one, [p for p in one._parameters.values() if p is not None]) for one in module.modules())
    return [one for one, own in of_modules if own and all(parameter.dim() < 2 for parameter in own)]


def _compute_in_own_dtype(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Let a module whose parameters are not cast take inputs in their dtype, and return the others'."""

    def cast(value: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, value)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        own = next(module.parameters(recurse=False)).dtype
        return cast(args, own), cast(kwargs, own)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _module, _args, output: cast(output, compute_dtype))


def _sum_over_the_batch(owners: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
    """Have each parameter's gradient found over the samples of all ranks, by the module that owns it."""
    found: dict[nn.Parameter, list[Tensor]] = {parameter: [] for parameter in parameters.values()}

    def after_forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            raise InputError(f'sums="batch" takes modules that return one tensor, and {type(module).__name__} does not')
        if output.requires_grad:
            inputs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            output.register_hook(functools.partial(_gradients_of_batch, module, inputs, found))

    for owner in owners:
        owner.register_forward_hook(after_forward, with_kwargs=True)
    for parameter, of_uses in found.items():
        if parameter.is_floating_point():
            trained = parameter.requires_grad
            parameter.requires_grad_()  # a frozen one takes no hook, and may be trained later
            parameter.register_hook(functools.partial(_mean_over_ranks, of_uses))
            parameter.requires_grad_(trained)


def _gradients_of_batch(
    module: nn.Module, inputs: Any, found: Mapping[nn.Parameter, list[Tensor]], gradient: Tensor
) -> None:
    """Find the gradients of the module's own parameters, of the samples of all ranks."""
    args, kwargs = tree_map_only(Tensor, _of_all_ranks, inputs)
    wanted = [one for one in module._parameters.values() if one is not None and one.requires_grad]
    with torch.enable_grad():
        output = module.forward(*args, **kwargs)
    gradients = torch.autograd.grad(output, wanted, _of_all_ranks(gradient), allow_unused=True)
    for parameter, its_gradient in zip(wanted, gradients, strict=True):
        if its_gradient is not None:
            found[parameter].append(its_gradient)


def _of_all_ranks(part: Tensor) -> Tensor:
    """The tensors of all ranks, along their first dimension."""
    whole = part.new_empty((dist.get_world_size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous())
    return whole


def _mean_over_ranks(of_uses: list[Tensor], gradient: Tensor) -> Tensor:
    """What stands in the place of this rank's gradient: the ranks' mean of it is the batch's, as each has the same."""
    if not of_uses:
        return gradient
    mean = functools.reduce(torch.add, of_uses) / dist.get_world_size()
    of_uses.clear()
    return mean


def fsdp_textbook(whole: Whole, ranks: Ranks) -> Spread:
    """Shard every parameter, or all but the norms'; each block is a unit."""
    names = {parameter: name for name, parameter in whole.model.named_parameters()}
    inside = dict(whole.forward.named_parameters())
    renamed = {name: names[parameter] for name, parameter in inside.items() if parameter in names}
    compute = torch.bfloat16 if whole.record.chosen("compute") == "bf16" else None
    norms = without_matrices(whole.forward) if whole.record.chosen("norms") == "whole" else []
    module = FullyShardedDataParallel(whole.forward, compute_dtype=compute, units=list(whole.blocks), replicated=norms)
    counted = set[Tensor](module.replicated_parameters.values()) if ranks.rank else set[Tensor]()
    return Spread(
        model=whole.model,
        forward=module,
        optimizer=whole.optimizer_of(module.parameters()),
        full_parameters=lambda: {renamed[n]: t for n, t in module.full_parameters().items() if n in renamed},
        full_gradients=lambda: {renamed[n]: t for n, t in module.full_gradients().items() if n in renamed},
        finish=module.finish_gradient_synchronization,
        finishes=True,
        local=contextlib.nullcontext,
        norm_of=functools.partial(norm_over_ranks, but_for=counted),
    )
