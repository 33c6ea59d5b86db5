"""Data parallel, lessons 1 to 4: every rank has the whole model and its part of the batch.

The loss is the mean over the batch, so its gradient is the mean of the ranks' gradients:

    g = 1/n (g_1 + ... + g_n)        all parts of the batch being equally large

Whatever the messages, a rank sends 2 (n - 1) / n of the gradients' bytes. The lessons send them in fewer messages, and
while backward goes on.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.training.optimizer import before_more, same_kind, when_ready
from stepscope.training.parallel.collective import (
    begin_average,
    broadcast_from_first,
    flat,
    parts_of,
    trained,
    unflatten_into,
    with_gradient,
)
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks

# Lesson 1. Each gradient is all-reduced by itself, one after the other, when backward is over: in as many messages as
# there are parameters. A rank computes nothing meanwhile, and small messages pay the latency of a collective each.


def ddp_naive(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce each gradient after backward."""
    broadcast_from_first(whole.model)
    parameters = trained(whole.model)

    @torch.no_grad()
    def finish() -> None:
        for gradient in with_gradient(parameters):
            begin_average(gradient)()

    return replicated(whole, finish=finish)


# Lesson 2: one message in place of many. The gradients are copied into one tensor, which is all-reduced once, and
# copied back. The same bytes take one latency in place of one for each parameter; the copies read and write the
# gradients twice more, and the flat tensor takes as much memory as they do. Nothing is hidden yet: the collective
# begins when backward has ended.


def ddp_flat(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce all gradients as one tensor after backward."""
    broadcast_from_first(whole.model)
    parameters = trained(whole.model)
    return replicated(whole, finish=lambda: average_flat(parameters))


@torch.no_grad()
def average_flat(parameters: list[torch.nn.Parameter]) -> None:
    """Replace the gradients of these parameters by their means over the ranks, in one message for each dtype."""
    for gradients in same_kind(with_gradient(parameters)):
        together = flat(gradients)
        begin_average(together)()
        unflatten_into(together, gradients)


# Lesson 3: communication while backward goes on. Autograd reaches the last layer's parameters first, and their
# gradients are final long before backward ends. A hook on each parameter starts its all-reduce, which does not wait, as
# soon as its gradient is there; before the optimizer steps, a rank waits for those that are still under way. What is
# left of the communication's time is what backward was too short to hide, and the last gradient's. The messages are as
# small as in lesson 1.
#
# A second backward before that adds to gradients which may be under way, and must not: each is waited for before more
# is added to it, and sent again. The mean of a mean is itself, so all ends right, for twice the bytes; `no_sync` saves
# them.
#
# A gradient that a step has no use for never becomes ready, on this rank or on another: it is all-reduced at the end,
# as zero where it is missing, so that every rank sends the same messages. They are matched by their order, so each rank
# waits for the others' order to be its own: the model must do the same on every rank.


class _WhileBackwardGoesOn(nn.Module, ABC):
    """A module that every rank has whole: gradients are averaged over the ranks while backward goes on.

    Parameters and buffers begin as the first rank's. `finish_gradient_synchronization` belongs between backward and the
    optimizer's step. Of several micro-batches, those but the last may run backward within `no_sync`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        self._local = False
        for parameter in trained(module):
            before_more(parameter, self._before_more)
            when_ready(parameter, self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    @abstractmethod
    def _before_more(self, parameter: Tensor) -> None:
        """Wait for the parameter's gradient, where that is under way: more is about to be added to it."""

    @abstractmethod
    def _ready(self, parameter: Tensor) -> None:
        """Send what the parameter's gradient completes, unless backward is local."""

    @abstractmethod
    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of a backward on their rank: those of all micro-batches but the last."""
        self._local = True
        try:
            yield
        finally:
            self._local = False


class OverlappedDataParallel(_WhileBackwardGoesOn):
    """A module that every rank has whole: gradients are averaged over the ranks while backward goes on.

    Parameters and buffers begin as the first rank's. `finish_gradient_synchronization` belongs between backward and the
    optimizer's step. Tied parameters are one; frozen ones are left alone, and one that is no longer frozen is averaged
    after backward. Of several micro-batches, those but the last may run backward within `no_sync`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._under_way: dict[Tensor, Callable[[], None]] = {}
        """What waits for the message of each parameter, which is its gradient."""

    def _before_more(self, parameter: Tensor) -> None:
        if parameter in self._under_way:
            self._under_way.pop(parameter)()

    def _ready(self, parameter: Tensor) -> None:
        if not self._local and isinstance(parameter, nn.Parameter):
            (gradient,) = with_gradient([parameter])
            self._under_way[parameter] = begin_average(gradient)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        late = [one for one in trained(self.module) if one not in self._under_way]
        for parameter, gradient in zip(late, with_gradient(late), strict=True):
            self._under_way[parameter] = begin_average(gradient)
        while self._under_way:
            self._under_way.pop(next(iter(self._under_way)))()


def ddp_overlap(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce each gradient as soon as it is ready."""
    module = OverlappedDataParallel(whole.forward)
    return replicated(whole, module, finish=module.finish_gradient_synchronization, local=module.no_sync)


# Lesson 4: few messages, and while backward goes on. Parameters are put into buckets of some MiB, in the reverse of
# their order, which is about the order in which backward reaches them. When the last gradient of a bucket is ready, the
# bucket is flattened and its all-reduce is started. From then on the gradients are views of the message, so nothing is
# copied back and the bytes are there once; a gradient that is alone in its bucket is the message. Large buckets pay
# less latency, and begin later; the last bucket to be full hides nothing (Li et al. 2020, "PyTorch Distributed",
# section 3.2).


BUCKET_MIB = 25.0
"""As large as PyTorch's own (`bucket_cap_mb`)."""


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype whose gradients are one message."""

    parameters: list[nn.Parameter]
    ready: set[Tensor] = field(default_factory=set[Tensor])
    """The parameters whose gradients are there."""
    sent: Callable[[], None] | None = None
    """What waits for the message; None until it is sent."""

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that get a gradient now: some may be frozen in one step and not in another."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]


class BucketedDataParallel(_WhileBackwardGoesOn):
    """A module that every rank has whole: gradients are averaged over the ranks in buckets while backward goes on."""

    def __init__(self, module: nn.Module, bucket_mib: float = BUCKET_MIB) -> None:
        super().__init__(module)
        now = trained(module)
        later = [one for one in module.parameters() if one not in set(now) and one.is_floating_point()]
        self._buckets = [_Bucket(each) for group in (now, later) for each in in_buckets(group, bucket_mib * 2**20)]
        self._unsent = 0
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}

    def _before_more(self, parameter: Tensor) -> None:
        # A second backward, of another micro-batch: what is under way must not change, and is sent again. The mean of a
        # mean is itself.
        if isinstance(parameter, nn.Parameter) and self._of[parameter].sent is not None:
            self._wait()

    def _ready(self, parameter: Tensor) -> None:
        if self._local or not isinstance(parameter, nn.Parameter):
            return
        self._of[parameter].ready.add(parameter)
        # Every rank sends the buckets in one order, or messages of different buckets would meet.
        while self._unsent < len(self._buckets):
            bucket = self._buckets[self._unsent]
            if not bucket.ready.issuperset(bucket.trained):
                break
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._unsent]
        self._unsent += 1
        parameters = bucket.trained
        gradients = with_gradient(parameters)
        if not gradients:
            bucket.sent = lambda: None
            return
        if len(gradients) == 1 and gradients[0].is_contiguous():
            bucket.sent = begin_average(gradients[0])
            return
        message = flat(gradients)
        for parameter, part in zip(parameters, parts_of(message, parameters), strict=True):
            parameter.grad = part
        bucket.sent = begin_average(message)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        while self._unsent < len(self._buckets):
            self._send_next()
        self._wait()

    def _wait(self) -> None:
        """Wait for what is under way, and begin anew."""
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent()
            bucket.sent = None
            bucket.ready.clear()
        self._unsent = 0


def in_buckets(parameters: list[nn.Parameter], most_bytes: float) -> list[list[nn.Parameter]]:
    """The parameters in the reverse of their order, in buckets of one dtype and at most so many bytes; a larger
    parameter is alone in its own."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        if buckets and buckets[-1][0].dtype == parameter.dtype and size + parameter.nbytes <= most_bytes:
            buckets[-1].append(parameter)
            size += parameter.nbytes
        else:
            buckets.append([parameter])
            size = parameter.nbytes
    return buckets


def ddp_bucketed(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce gradients in buckets while backward goes on."""
    module = BucketedDataParallel(whole.forward, float(whole.record.chosen("bucket")))
    return replicated(whole, module, finish=module.finish_gradient_synchronization, local=module.no_sync)
