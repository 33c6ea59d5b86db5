"""Data parallel, lesson 4: few messages, and while backward goes on.

Parameters are put into buckets of some MiB, in the reverse of their order, which is about the order in which backward
reaches them. When the last gradient of a bucket is ready, the bucket is flattened and its all-reduce is started. From
then on the gradients are views of the message, so nothing is copied back and the bytes are there once; a gradient that
is alone in its bucket is the message. Large buckets pay less latency, and begin later; the last bucket to be full hides
nothing (Li et al. 2020, "PyTorch Distributed", section 3.2). The bytes are those of lesson 1.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.training.optimizer import before_more, when_ready
from stepscope.training.parallel.collective import (
    begin_average,
    broadcast_from_first,
    flat,
    parts_of,
    trained,
    with_gradient,
)
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks

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

    @property
    def is_full(self) -> bool:
        """Whether every gradient is there."""
        return all(parameter in self.ready for parameter in self.trained)


class BucketedDataParallel(nn.Module):
    """A module that every rank has whole: gradients are averaged over the ranks in buckets while backward goes on."""

    def __init__(self, module: nn.Module, bucket_mib: float = BUCKET_MIB) -> None:
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        now = trained(module)
        later = [one for one in module.parameters() if one not in set(now) and one.is_floating_point()]
        self._buckets = [_Bucket(each) for group in (now, later) for each in in_buckets(group, bucket_mib * 2**20)]
        self._unsent = 0
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._local = False
        for parameter in now:
            before_more(parameter, self._before_more)
            when_ready(parameter, self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

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
        while self._unsent < len(self._buckets) and self._buckets[self._unsent].is_full:
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

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of a backward on their rank: those of all micro-batches but the last."""
        self._local = True
        try:
            yield
        finally:
            self._local = False


def in_buckets(parameters: list[nn.Parameter], most_bytes: float) -> list[list[nn.Parameter]]:
    """The parameters in the reverse of their order, in buckets of one dtype and at most so many bytes; a larger
    parameter is alone in its own."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        fits = buckets and buckets[-1][0].dtype == parameter.dtype and size + parameter.nbytes <= most_bytes
        if fits:
            buckets[-1].append(parameter)
            size += parameter.nbytes
        else:
            buckets.append([parameter])
            size = parameter.nbytes
    return buckets


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce gradients in buckets while backward goes on."""
    module = BucketedDataParallel(whole.forward, float(whole.record.chosen("bucket")))
    return replicated(whole, module, finish=module.finish_gradient_synchronization, local=module.no_sync)
