"""Sharded optimizer, lesson 5: each rank keeps the optimizer's state of a part of the parameters.

AdamW keeps two fp32 figures for each parameter, 8 bytes of the 16 that training in fp32 needs (with 4 of the parameter
and 4 of its gradient). Every rank would keep the same. Here a rank keeps those of its part alone, about 1/n, updates
that part, and sends it to the others (Rajbhandari et al. 2020, ZeRO, stage 1).

Gradients are averaged as in lesson 4. The updated parameters are one broadcast each, of which a rank sends its part: in
all 2 (n - 1) / n of the gradients' bytes and (n - 1) / n of the parameters'. ZeRO itself reduces each gradient to its
owner alone, which saves half of the first.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.recording.held_tensors import local_part, whole_numel
from stepscope.training.parallel.collective import broadcast, trained
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.parallel.strategies.ddp_textbook import BucketedDataParallel
from stepscope.training.training_step import Ranks


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is spread over the ranks.

    parameters, as any optimizer takes them: tensors, or groups with options of their own. optimizer_class: the
    optimizer of each rank's part, called with that part and **kwargs. Each parameter has one owner, which alone updates
    it; the largest go first to the rank with least, so that the parts are about equally large. Parameters begin as the
    first rank's. `state` is that of this rank's part.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        self._make, self._kwargs = optimizer_class, kwargs
        self._owner: dict[Tensor, int] = {}
        self._held = [0] * dist.get_world_size()
        self._local_optimizer: torch.optim.Optimizer | None = None
        super().__init__(parameters, dict(kwargs))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give each of the group's parameters an owner, and keep those of this rank."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        added: list[Tensor] = group["params"]
        if any(local_part(one) is not one or whole_numel(one) != one.numel() for one in added):
            raise InputError(
                "ShardedOptimizer takes parameters that every rank has whole, and these are each rank's own shards: "
                "give them to the optimizer itself"
            )
        for parameter in added:
            broadcast(parameter, 0)()
        for parameter in sorted(added, key=lambda one: -one.numel()):
            rank = self._held.index(min(self._held))
            self._owner[parameter] = rank
            self._held[rank] += parameter.numel() if parameter.requires_grad else 0
        sharded = [parameter for parameter in added if self._owner[parameter] == dist.get_rank()]
        options = {name: value for name, value in group.items() if name in param_group and name != "params"}
        mine = {**options, "params": sharded}  # perhaps of no parameter: each rank has all groups, and their options
        if self._local_optimizer is None:
            self._local_optimizer = self._make([mine], **self._kwargs)
            self.state = self._local_optimizer.state
            # A scheduler looks here for what it may change.
            self.defaults = {**self._local_optimizer.defaults, **self.defaults}
        else:
            self._local_optimizer.add_param_group(mine)
        for name, value in self._local_optimizer.param_groups[-1].items():
            group.setdefault(name, value)  # a scheduler reads options that nobody gave, too

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update this rank's part, and send it to the others. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._local_optimizer is not None:
            self._follow_options()
            self._local_optimizer.step()
        under_way = [
            broadcast(one, rank)
            for one, rank in self._owner.items()
            if one.requires_grad or one.grad is not None  # what is frozen has not changed
        ]
        for wait in under_way:
            wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's part, and whose it is: each rank saves its own."""
        return {**super().state_dict(), "rank": dist.get_rank(), "ranks": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what this rank has saved, or its part of what one process saved of all parameters.

        Raises InputError for what another rank has saved, or one among more or fewer.
        """
        saved, here = (state_dict.get("rank"), state_dict.get("ranks")), (dist.get_rank(), dist.get_world_size())
        if saved not in ((None, None), here):
            raise InputError(
                f"this optimizer's state is of rank {saved[0]} of {saved[1]}, and this is rank {here[0]} of {here[1]}: "
                "each of as many ranks loads what it has saved itself"
            )
        super().load_state_dict(state_dict)
        assert self._local_optimizer is not None
        loaded, self.state = self.state, self._local_optimizer.state
        self.state.clear()
        self.state.update({one: state for one, state in loaded.items() if self._owner.get(one) == here[0]})
        self._follow_options()

    def _follow_options(self) -> None:
        """Take over what a scheduler may have changed, such as the learning rate."""
        assert self._local_optimizer is not None
        for group, shown in zip(self._local_optimizer.param_groups, self.param_groups, strict=True):
            group.update({name: value for name, value in shown.items() if name != "params" and name in group})


def zero1(whole: Whole, ranks: Ranks) -> Spread:
    """Average gradients in buckets, and keep the optimizer's state sharded."""
    module = BucketedDataParallel(whole.forward)
    optimizer = None
    if (make := whole.make_optimizer) is not None:
        optimizer = ShardedOptimizer(trained(whole.model), lambda groups, **_: make(groups))
    return replicated(
        whole, module, optimizer=optimizer, finish=module.finish_gradient_synchronization, local=module.no_sync
    )
