"""The processes that share a step, as each of them sees the others: meet, wait, agree, gather, part."""

import datetime
import gc
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.ranks import RankPlace

_WAIT = datetime.timedelta(minutes=10)
"""How long a rank waits for another before it gives up. The first step may compile for minutes."""


class Ranks:
    """One rank among those that share a step. Outside a job it is alone, and waits for nobody."""

    rank, ranks, local_rank = 0, 1, 0
    backend = ""
    threads: int | None = None
    """The CPU threads of each rank, where the ranks compute on CPUs."""
    start_s: float | None = None
    """From the start of the ranks' processes until all had met; None where somebody else started them."""
    started_here = True

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run."""
        return self.rank == 0

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def agree(self, here: bool) -> bool:
        """What the first rank says, on every rank."""
        return here

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        return [value]

    def told(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        return value

    def part(self) -> None:
        """Leave the job."""


class _Joined(Ranks):
    """A rank of a job. What ranks tell each other goes over gloo on CPUs, beside what the step communicates."""

    def __init__(self, place: RankPlace, device: torch.device) -> None:
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

    def told(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0, group=self._side)
        return values[0]

    def part(self) -> None:
        gc.collect()  # NCCL waits for CUDA graphs that hold its collectives, and a step that is left is a circle
        dist.destroy_process_group()


def join(place: RankPlace | None, device: torch.device) -> Ranks:
    """Meet the other ranks; alone where there is no place among any.

    Raises InputError for a backend that this PyTorch lacks, and StepscopeError where the others do not come.
    """
    return Ranks() if place is None else _Joined(place, device)


def host_name() -> str:
    """The name of this host: ranks of one share a clock."""
    return socket.gethostname()
