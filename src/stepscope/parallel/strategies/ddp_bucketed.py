"""Data parallel, lesson 4: few messages, and while backward goes on.

Parameters are put into buckets of some MiB, in the reverse of their order, which is about the order in which backward
reaches them. When the last gradient of a bucket is ready, the bucket is flattened and its all-reduce is started. Large
buckets pay less latency, and begin later; the last bucket to be full hides nothing (Li et al. 2020, "PyTorch
Distributed", section 3.2). The bytes are those of lesson 1.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.parallel.collective import broadcast_from_first, flat, trained, unflatten_into, with_gradient
from stepscope.parallel.ranks import Ranks
from stepscope.parallel.spread import Spread, Whole, replicated

BUCKET_MIB = 25.0
"""As large as PyTorch's own (`bucket_cap_mb`)."""


@dataclass(eq=False)
class _Bucket:
    """Parameters of one dtype whose gradients are one message."""

    parameters: list[nn.Parameter]
    waiting: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    """Those whose gradients are not ready yet."""
    sent: tuple[Any, Tensor] | None = None
    """What waits for the message, and the message."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Wait for every gradient anew."""
        self.waiting, self.sent = set(self.parameters), None


class BucketedDataParallel(nn.Module):
    """A module that every rank has whole: gradients are averaged over the ranks in buckets while backward goes on."""

    def __init__(self, module: nn.Module, bucket_mib: float = BUCKET_MIB) -> None:
        super().__init__()
        self.module = module
        broadcast_from_first(module)
        self._buckets = [_Bucket(parameters) for parameters in in_buckets(trained(module), bucket_mib * 2**20)]
        self._of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._local = False
        for parameter in self._of:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def _ready(self, parameter: Tensor) -> None:
        if self._local or not isinstance(parameter, nn.Parameter):
            return
        self._of[parameter].waiting.discard(parameter)
        # Every rank sends the buckets in one order, or messages of different buckets would meet.
        for bucket in self._buckets:
            if bucket.sent is None:
                if bucket.waiting:
                    return
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        message = flat(with_gradient(bucket.parameters))
        bucket.sent = dist.all_reduce(message, async_op=True), message

    @torch.no_grad()
    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        for bucket in self._buckets:
            if bucket.sent is None:
                self._send(bucket)
            assert bucket.sent is not None
            handle, message = bucket.sent
            handle.wait()
            message /= dist.get_world_size()
            unflatten_into(message, with_gradient(bucket.parameters))
            bucket.begin()

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
