"""What the ranks of one step measured: a step that several processes take part in is over when the last of them is.

Each rank times its own steps between two barriers that are not timed. On one host all processes share the monotonic
clock, so a step lasts from the earliest start to the latest end; on several hosts, whose clocks differ, it lasts as
long as the longest of its ranks.
"""

from collections.abc import Sequence

import msgspec

from stepscope.core.evidence import PhaseMemory
from stepscope.core.samples import Samples

Span = tuple[int, int]
"""When a step began and ended on one rank, in nanoseconds of its host's monotonic clock."""


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


class RanksEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one step, in their order."""

    backend: str
    """gloo or nccl."""
    ranks: tuple[RankFigures, ...]
    threads: int | None = None
    """CPU threads of each rank, where the ranks compute on CPUs."""
    started_here: bool = True
    """Whether stepscope started the ranks; false inside a torchrun or srun of the user's."""
    start_s: float | None = None
    """From the start of the ranks' processes until all had met."""

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
