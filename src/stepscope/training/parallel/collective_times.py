"""Times each kind of collective over sizes, on every rank; runs on ranks that `training/parallel/launching.py` starts.

A collective whose outcome is not right is not timed. Each step is so many calls in a row, after an untimed barrier, so
that what the barrier leaves between the ranks counts little in short ones.
"""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from stepscope.core.environment import Environment
from stepscope.core.errors import StepscopeError, named_line
from stepscope.core.evidence import Span
from stepscope.core.run import Settings
from stepscope.core.units import format_bytes
from stepscope.recording.device import is_out_of_memory, timing_device
from stepscope.recording.environment import read_environment
from stepscope.recording.step import Phase
from stepscope.recording.timer import StepFailed, measure
from stepscope.training.parallel.launching import Say
from stepscope.training.training_step import Ranks

CALL = "call"
_SHORT_BYTES = {"cpu": 1 << 20, "cuda": 1 << 24}
"""The largest message that is sent several times in a step."""
_CALLS = {"cpu": 10, "cuda": 20}


class CollectivePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which collectives are timed, over which sizes, and for how long each."""

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    seconds: float


class OneTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured of one kind and size."""

    kind: str
    message_bytes: int
    calls: int
    spans_ns: tuple[Span, ...] = ()
    device_s: tuple[float, ...] = ()
    """Seconds of each step by the clock of the device."""
    clock: str = ""
    failure: str = ""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured."""

    host: str
    environment: Environment
    times: tuple[OneTime, ...]


@dataclass(frozen=True)
class _Collective:
    """A collective over buffers that exist, and what its outcome must be."""

    run: Callable[[], object]
    outcome: Tensor
    expected: Tensor


def time_collectives(argument: bytes, ranks: Ranks, device: torch.device, say: Say) -> RankTimes:
    """The times of all that the CollectivePlan names, as this rank sees them. Each is told when it is known."""
    plan = msgspec.json.decode(argument, type=CollectivePlan)
    times = RankTimes(host=socket.gethostname(), environment=read_environment(device), times=())
    part = b""
    for kind in plan.kinds:
        for size in plan.sizes:
            say(f"{kind} of {format_bytes(size)}", part)
            unit = 4 * ranks.ranks  # the ranks divide the elements, in fp32
            time = _time(kind, -(-size // unit) * unit, ranks, device, plan.seconds)
            times = msgspec.structs.replace(times, times=(*times.times, time))
            part = msgspec.json.encode(msgspec.structs.replace(times, times=(time,)))
    return times


def _time(kind: str, message_bytes: int, ranks: Ranks, device: torch.device, seconds: float) -> OneTime:
    calls = _CALLS[device.type] if message_bytes <= _SHORT_BYTES[device.type] else 1
    collective, failure = _collective_of(kind, message_bytes, ranks, device)
    failure = next(filter(None, ranks.gathered(failure)), "")
    if collective is None or failure:
        return OneTime(kind=kind, message_bytes=message_bytes, calls=calls, failure=failure)
    right = ranks.gathered(bool(torch.equal(collective.outcome, collective.expected)))
    if not all(right):
        raise StepscopeError(
            f"{kind} of {format_bytes(message_bytes)} over {ranks.backend} gives rank {right.index(False)} a wrong "
            "outcome: no time is shown"
        )
    collective.outcome.zero_()  # an all-reduce in place, again and again, would overflow

    def several() -> None:
        for _ in range(calls):
            collective.run()

    settings = Settings(
        warmup_floor=2, warmup_cap=6, warmup_seconds=seconds / 4, steps_floor=5, steps_cap=1000, seconds=seconds
    )
    timing = timing_device(device)
    try:
        repeated = _Repeated((Phase(name=CALL, run=several),))
        timing_result = measure({kind: repeated}, device=timing, settings=settings, peers=ranks)[kind]
    except StepFailed as failed:
        raise failed.__cause__ or failed from None
    if timing_result.interrupted:
        raise KeyboardInterrupt
    return OneTime(
        kind=kind,
        message_bytes=message_bytes,
        calls=calls,
        spans_ns=timing_result.spans_ns,
        device_s=timing_result.samples[CALL].values_s,
        clock=timing.clock_name,
    )


@dataclass(frozen=True)
class _Repeated:
    """Calls in a row as something to measure."""

    phases: tuple[Phase, ...]

    def prepare(self) -> None: ...


def _collective_of(kind: str, message_bytes: int, ranks: Ranks, device: torch.device) -> tuple[_Collective | None, str]:
    """The collective after its first run; or why there is none, as where a backend lacks it or memory ends."""
    try:
        collective = MAKERS[kind](message_bytes // 4, ranks, device)
        collective.run()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return None, "out of memory" if is_out_of_memory(error) else named_line(error, 120)
    return collective, ""


def _pattern(count: int, device: torch.device) -> Tensor:
    """Small whole numbers, of which sums are exact."""
    return torch.arange(count, device=device, dtype=torch.float32).remainder_(61)


def _part(whole: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor."""
    return whole.chunk(ranks.ranks)[ranks.rank]


def _all_reduce(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    pattern = _pattern(count, device)
    buffer = pattern + ranks.rank
    return _Collective(lambda: dist.all_reduce(buffer), buffer, ranks.ranks * pattern + sum(range(ranks.ranks)))


def _all_gather(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    pattern = _pattern(count // ranks.ranks, device)
    mine, out = pattern + ranks.rank, torch.empty(count, device=device)
    expected = torch.cat([pattern + rank for rank in range(ranks.ranks)])
    return _Collective(lambda: dist.all_gather_into_tensor(out, mine), out, expected)


def _reduce_scatter(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    pattern = _pattern(count, device)
    mine, out = pattern + ranks.rank, torch.empty(count // ranks.ranks, device=device)
    expected = _part(ranks.ranks * pattern + sum(range(ranks.ranks)), ranks)
    return _Collective(lambda: dist.reduce_scatter_tensor(out, mine), out, expected)


def _all_to_all(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    pattern = _pattern(count, device)
    mine, out = pattern + 100 * ranks.rank, torch.empty(count, device=device)
    expected = torch.cat([_part(pattern, ranks) + 100 * rank for rank in range(ranks.ranks)])
    return _Collective(lambda: dist.all_to_all_single(out, mine), out, expected)


def _broadcast(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    pattern = _pattern(count, device)
    buffer = pattern + ranks.rank
    return _Collective(lambda: dist.broadcast(buffer, 0), buffer, pattern)


def _send_and_receive(count: int, ranks: Ranks, device: torch.device) -> _Collective:
    """Each rank sends to the next one and receives from the one before, as sendrecv of nccl-tests does."""
    pattern = _pattern(count, device)
    mine, out = pattern + ranks.rank, torch.empty(count, device=device)
    after, before = (ranks.rank + 1) % ranks.ranks, (ranks.rank - 1) % ranks.ranks

    def run() -> None:
        both = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, out, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return _Collective(run, out, pattern + before)


MAKERS: dict[str, Callable[[int, Ranks, torch.device], _Collective]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}
"""What makes each kind, by its name in core/formulas/communication.py."""
