"""Data parallel, lesson 3: communication while backward goes on.

Autograd reaches the last layer's parameters first, and their gradients are final long before backward ends. A hook on
each parameter starts its all-reduce, which does not wait, as soon as its gradient is there; before the optimizer steps,
a rank waits for those that are still under way. What is left of the communication's time is what backward was too short
to hide, and the last gradient's. The messages are as small as in lesson 1.

A second backward before that adds to gradients which may be under way, and must not: each is waited for before more is
added to it, and sent again. The mean of a mean is itself, so all ends right, for twice the bytes; `no_sync` saves them.

A gradient that a step has no use for never becomes ready, on this rank or on another: it is all-reduced at the end, as
zero where it is missing, so that every rank sends the same messages. They are matched by their order, so each rank
waits for the others' order to be its own: the model must do the same on every rank.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from stepscope.training.optimizer import before_more, when_ready
from stepscope.training.parallel.collective import begin_average, broadcast_from_first, trained, with_gradient
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks


class OverlappedDataParallel(nn.Module):
    """A module that every rank has whole: gradients are averaged over the ranks while backward goes on.

    Parameters and buffers begin as the first rank's. `finish_gradient_synchronization` belongs between backward and the
    optimizer's step. Tied parameters are one; frozen ones are left alone, and one that
    is no longer frozen is averaged after backward. Of several micro-batches, those but the last
    may run backward within `no_sync`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        self._all = list(module.parameters())
        self._under_way: dict[Tensor, Callable[[], None]] = {}
        """What waits for the message of each parameter, which is its gradient."""
        self._local = False
        for parameter in trained(module):
            before_more(parameter, self._before_more)
            when_ready(parameter, self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def _before_more(self, parameter: Tensor) -> None:
        if parameter in self._under_way:
            self._wait(parameter)

    def _ready(self, parameter: Tensor) -> None:
        if not self._local and isinstance(parameter, nn.Parameter):
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        (gradient,) = with_gradient([parameter])
        self._under_way[parameter] = begin_average(gradient)

    def _wait(self, parameter: Tensor) -> None:
        self._under_way.pop(parameter)()

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        for parameter in self._all:
            if parameter.requires_grad and parameter not in self._under_way:
                self._send(parameter)
        for parameter in list(self._under_way):
            self._wait(parameter)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of a backward on their rank: those of all micro-batches but the last."""
        self._local = True
        try:
            yield
        finally:
            self._local = False


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce each gradient as soon as it is ready."""
    module = OverlappedDataParallel(whole.forward)
    return replicated(whole, module, finish=module.finish_gradient_synchronization, local=module.no_sync)
