"""What the ranks of one step measured: a step that several processes take part in is over when the last of them is.

Each rank times its own steps between two barriers that are not timed. On one host all processes share the monotonic
clock, so a step lasts from the earliest start to the latest end; on several hosts, whose clocks differ, it lasts as
long as the longest of its ranks.
"""

import os
import re
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.samples import Samples

Span = tuple[int, int]
"""When a step began and ended on one rank, in nanoseconds of its host's monotonic clock."""


class CollectiveCalls(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's calls of one kind of collective in one phase of a step."""

    phase: str
    kind: str
    """As core/formulas/communication.py names it."""
    ranks: int
    """How many take part."""
    calls: int
    message_bytes: int
    """Of all calls together."""
    sent_bytes: int
    """What has to leave this rank, whatever algorithm the backend chooses."""
    received_bytes: int


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank communicates in a step: counted in one untimed step, and timed in another under the profiler."""

    calls: tuple[CollectiveCalls, ...] | None = None
    """None where they were not counted."""
    communication_s: float | None = None
    """How long any collective was under way in the profiled step; waiting for other ranks is part of it."""
    exposed_s: float | None = None
    """The part in which this rank computed nothing."""
    computation_s: float | None = None
    """How long this rank computed in the profiled step."""

    @property
    def sent_bytes(self) -> int | None:
        """What the rank sends in a step."""
        return None if self.calls is None else sum(call.sent_bytes for call in self.calls)

    @property
    def received_bytes(self) -> int | None:
        """What the rank receives in a step."""
        return None if self.calls is None else sum(call.received_bytes for call in self.calls)


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of the steps that all took part in."""

    rank: int
    host: str
    device_name: str
    samples: dict[str, Samples] = {}
    """The rank's own times: of its step, its host and its phases."""
    memory: PhaseMemory | None = None
    parameter_bytes: int = 0
    """What the rank keeps of the parameters between steps."""
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    artifacts: dict[str, str] = {}
    """Files of the rank beside run.json, by kind."""
    communication: Communication | None = None
    """None in runs from before it was counted."""


class Correctness(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks are from one process on the same global batch, as a share, and how far they may be.

    Of each, the parameter that is furthest counts. The spread is that of one process over its own ways to split the
    batch (training/parallel/correctness.py).
    """

    gradient_error: float
    gradient_spread: float
    gradient_allowed: float
    update_error: float
    """Of what the steps made of the parameters."""
    update_spread: float
    update_allowed: float
    worst: str
    """The parameter that is furthest off, or the step whose loss is."""
    steps: int
    """Steps of plain SGD, and as many of AdamW for the losses."""
    layers: int | None = None
    """The layers of the model that was held against one process; None where it had all of them."""
    vocabulary: int | None = None
    """Its vocabulary; None where it was the whole."""
    seq_len: int | None = None
    """The tokens of its sequences; None where they were whole."""
    batch_size: int | None = None
    """The sequences of all ranks together; None where the whole batch was taken."""
    loss_error: float | None = None
    """Of the losses of steps of AdamW; None in runs from before they were compared."""
    loss_spread: float | None = None
    loss_allowed: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the ranks compute what one process does."""
        right = self.gradient_error <= self.gradient_allowed and self.update_error <= self.update_allowed
        return right and self.losses_passed

    @property
    def losses_passed(self) -> bool:
        """Whether the losses are one process's; true where nobody looked."""
        return self.loss_error is None or self.loss_allowed is None or self.loss_error <= self.loss_allowed


class RanksEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one step, in their order."""

    backend: str
    """gloo or nccl."""
    ranks: tuple[RankFigures, ...]
    threads: int | None = None
    """CPU threads of each rank, where the ranks compute on CPUs."""
    started_here: bool = True
    """Whether stepscope started the ranks; false inside a torchrun or srun of the user's."""
    correct: Correctness | None = None
    """That they compute what one process does; None where nobody looked, which the run's notes say."""
    start_s: float | None = None
    """From the start of the ranks' processes until all had met."""
    whole_parameter_bytes: int | None = None
    """Of the parameters of all ranks together, each once; None where no rank has them all, and in older runs."""
    whole_gradient_bytes: int | None = None
    """Of those that are trained."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks share a clock."""
        return len({figures.host for figures in self.ranks}) == 1


def steps_together(spans: Sequence[Sequence[Span]], *, one_clock: bool) -> tuple[float, ...]:
    """The seconds of each step that all ranks ended, of the spans of each rank's steps.

    Raises ValueError without a rank.
    """
    if not spans:
        raise ValueError("a step has at least one rank")
    count = min(map(len, spans))  # a rank that was interrupted lacks the last ones
    together: list[float] = []
    for step in range(count):
        of_ranks = [own[step] for own in spans]
        if one_clock:
            lasted_ns = max(end for _, end in of_ranks) - min(begin for begin, _ in of_ranks)
        else:
            lasted_ns = max(end - begin for begin, end in of_ranks)
        together.append(lasted_ns * 1e-9)
    return tuple(together)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the processes that share a step this one is, and where they meet."""

    rank: int
    ranks: int
    local_rank: int
    """Its number among the ranks of its host: the number of its GPU."""
    meeting: str
    """Where the ranks find each other, as torch.distributed's init_method: `file:///...`, or `env://` in a job that
    somebody else started."""
    local_ranks: int = 1
    """How many ranks share its host."""
    began_s: float | None = None
    """When the ranks were started, in seconds since 1970; None in a job that somebody else started."""


def place_in_job(environment: Mapping[str, str]) -> RankPlace | None:
    """This process's place in a job that torchrun or srun started; None where there is no such job.

    Raises InputError where the job does not say where its ranks meet.
    """
    names = next((names for names in _JOBS if names[0] in environment and names[1] in environment), None)
    if names is None:
        return None
    rank, ranks, local_rank, local_ranks = names
    try:
        place = RankPlace(
            rank=int(environment[rank]),
            ranks=int(environment[ranks]),
            local_rank=int(environment.get(local_rank, 0)),
            local_ranks=int(re.split(r"\D", environment.get(local_ranks, "1"))[0] or 1),
            meeting="env://",
        )
    except ValueError:
        raise InputError(f"{rank} and {ranks} in the environment are no numbers: who started this job?") from None
    if place.ranks < 2 and rank != "RANK":
        return None  # srun of one task is no job of ranks
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise InputError(
            f"this is rank {place.rank} of {place.ranks}, and the environment has no {' and no '.join(missing)}: start "
            "the ranks with torchrun, or export them before srun"
        )
    return place


def check_processes(ranks: int) -> None:
    """Raise InputError for more ranks than this machine has memory for processes that have imported torch."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _PROCESS_BYTES
    if ranks > max(room, 2):
        raise InputError(
            f"--ranks {ranks} are as many processes, and this machine has memory for {room:,} at most: ask for fewer"
        )


_PROCESS_BYTES = 128 << 20
"""Less than a process takes that has imported torch, of pages that it shares with no other."""


def refuse_several(environment: Mapping[str, str], what: str, remedy: str) -> None:
    """Raise InputError where torchrun started several processes, of which each would do this by itself.

    A batch script of Slurm is one process, though its environment counts the tasks that srun would start.
    """
    number = environment.get("WORLD_SIZE", "")
    if "RANK" in environment and number.isdecimal() and int(number) > 1:
        raise InputError(f"torchrun started {number} processes, and each would {what}: {remedy}")


_JOBS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""The variables in which torchrun, and srun, say which rank a process is."""
