"""The few things that the lessons ask of torch.distributed, over tensors that are there already."""

import datetime
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepscope.core.environment import RankPlace
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.training.optimizer import global_norm
from stepscope.training.training_step import Ranks


@torch.no_grad()
def broadcast_from_first(module: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers: ranks that begin apart stay apart."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast(tensor, 0)()


@torch.no_grad()
def broadcast(tensor: Tensor, rank: int) -> Callable[[], None]:
    """Begin to give every rank this one's numbers, whatever their dtype and strides; returns what waits for them.

    A backend takes a tensor's memory as if it were contiguous, and would write beside one that is not; and gloo lacks
    dtypes, though a broadcast needs bytes alone.
    """
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim]:  # what is expanded has its numbers once
            tensor = tensor.narrow(dim, 0, 1)
    message = tensor.data.contiguous()
    its_bytes = message.as_strided((message.numel(),), (1,)).view(torch.uint8)
    handle = dist.broadcast(its_bytes, rank, async_op=True)

    def wait() -> None:
        if handle is not None:
            handle.wait()
        if not tensor.is_contiguous():
            tensor.data.copy_(message)

    return wait


def begin_average(tensor: Tensor) -> Callable[[], None]:
    """Begin to replace a tensor by its mean over the ranks. Returns what waits for it, to be called once.

    NCCL finds the mean itself. gloo adds up alone, so the sum is divided after it: one more pass over the tensor.
    """
    finds_mean = _backend_for(tensor.device.type) == "nccl"
    operation = dist.ReduceOp.AVG if finds_mean else dist.ReduceOp.SUM
    handle: Any = dist.all_reduce(tensor, operation, async_op=True)

    @torch.no_grad()
    def finish() -> None:
        handle.wait()
        if not finds_mean:
            tensor.div_(dist.get_world_size())

    return finish


def _backend_for(device_type: str) -> str:
    """The backend by which this job's tensors on such devices are sent: somebody's job may send those of a GPU by gloo,
    too."""
    named = [each.split(":") for each in dist.get_backend_config().split(",")]
    return dict(named).get(device_type, "")


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of these parameters, zero where a step had no use for one: another rank's may have had."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


@torch.no_grad()
def norm_over_ranks(
    parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32, *, but_for: Set[Tensor] = frozenset()
) -> Tensor:
    """The global norm of gradients of which each rank has some that no other has. but_for: parameters that another
    rank has, too, and counts."""
    square = global_norm([parameter for parameter in parameters if parameter not in but_for], dtype).square()
    dist.all_reduce(square)
    return square.sqrt_()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of the tensors' elements, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def parts_of(flat_tensor: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The views of `flat`'s tensor that have the shapes of these tensors, one after the other."""
    begin = 0
    for tensor in tensors:
        yield flat_tensor[begin : begin + tensor.numel()].view(tensor.shape)
        begin += tensor.numel()


def unflatten_into(flat_tensor: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy the elements of `flat` back."""
    tensors = list(tensors)
    for tensor, part in zip(tensors, parts_of(flat_tensor, tensors), strict=True):
        tensor.copy_(part)


# The processes that share a step, as each of them sees the others: meet, wait, agree, gather, part.


_WAIT = datetime.timedelta(minutes=10)
"""How long a rank waits for another before it gives up. The first step may compile for minutes."""


class Joined(Ranks):
    """A rank of a job. What ranks tell each other goes over gloo on CPUs, beside what the step communicates."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        """Meet the other ranks. Raises InputError for a backend that this PyTorch lacks, and StepscopeError where the
        others do not come."""
        self.rank, self.ranks, self.local_rank = place.rank, place.ranks, place.local_rank
        self.started_here = place.began_s is not None
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        if not dist.is_available() or not getattr(dist, f"is_{self.backend}_available")():
            raise InputError(f"this PyTorch has no {self.backend}, with which ranks on {device.type} talk")
        if device.type == "cpu":
            self.threads = max(1, torch.get_num_threads() // max(1, place.local_ranks))
            torch.set_num_threads(self.threads)
        try:
            # Shards that lie in the host's memory are gathered over gloo, by the same group.
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else self.backend,
                init_method=place.meeting,
                rank=place.rank,
                world_size=place.ranks,
                timeout=_WAIT,
                device_id=device if device.type == "cuda" else None,
            )
            side = dist.new_group(backend="gloo", timeout=_WAIT)
            assert isinstance(side, dist.ProcessGroup)  # all ranks are in this one
            self._side = side
        except (RuntimeError, ValueError, OSError) as error:
            raise StepscopeError(
                f"rank {self.rank} of {self.ranks} could not meet the others: {one_line(error)}"
            ) from error
        self.barrier()
        self.start_s = time.time() - place.began_s if place.began_s is not None else None

    def barrier(self) -> None:
        dist.barrier(self._side)

    def agree(self, here: bool) -> bool:
        answer = torch.tensor([int(here)])
        dist.broadcast(answer, 0, group=self._side)
        return bool(answer.item())

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._side)
        return values

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, group=self._side)
        return values[0]

    def part(self) -> None:
        gc.collect()  # NCCL waits for CUDA graphs that hold its collectives, and a step that is left is a circle
        dist.destroy_process_group()
