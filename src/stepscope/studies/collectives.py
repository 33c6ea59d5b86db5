"""How fast do ranks communicate here? Each kind of collective over sizes, numbers of ranks and backends."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from stepscope.analysis.collectives import answer_collectives, fits_of
from stepscope.core.answer import Answer
from stepscope.core.collective_figures import CollectiveTime, keep_fits
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.ranks import RankPlace, steps_together
from stepscope.core.samples import Samples
from stepscope.core.units import KIB, format_bytes
from stepscope.measure.device import resolve_device
from stepscope.parallel.collective_times import MAKERS, CollectivePlan, OneTime, RankTimes
from stepscope.parallel.launching import launch

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
"""The device of each backend's ranks."""
_LARGEST = {"cpu": 1 << 24, "cuda": 1 << 30}
_STEP = 4
"""The factor from a size to the next."""


def study_collectives(
    tell: Callable[[str, float], object], *, ranks: Sequence[int] | None = None, backends: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None, largest: int | None = None, seconds: float = 0.2,
    place: RankPlace | None = None,
) -> Answer:  # fmt: skip
    """The answer, of every backend and number of ranks. place: this process's, in a job that somebody else started."""
    found: list[CollectiveTime] = []
    where: Environment | None = None
    threads: int | None = None
    plans = [
        (backend, number) for backend in backends or (_usual_backend(),) for number in _ranks(ranks, backend, place)
    ]
    for i, (backend, number) in enumerate(plans):
        device = BACKENDS[backend]
        plan = CollectivePlan(kinds=tuple(MAKERS), sizes=_sizes(sizes, largest, device), seconds=seconds)
        done, whole = 0, len(plan.kinds) * len(plan.sizes)

        def told(rank: int, stage: str, first: int = i, whole: int = whole) -> None:
            nonlocal done
            if rank == 0:
                done += " of " in stage
                tell(stage, (first + min(1.0, done / whole)) / len(plans))

        launched = launch(
            "stepscope.parallel.collective_times:time_collectives", plan, ranks=number, device=device, tell=told
        )
        of_ranks = [msgspec.json.decode(value, type=RankTimes) for value in launched.values]
        where, threads = of_ranks[0].environment, launched.threads
        found += times_together(of_ranks, backend)
        if place is None or place.rank == 0:
            fresh = [time for time in found if (time.backend, time.ranks) == (backend, number)]
            keep_fits(where, datetime.now(UTC).isoformat(timespec="seconds"), fits_of(fresh))
    return answer_collectives(found, where, datetime.now(UTC).date().isoformat(), threads)


def times_together(of_ranks: Sequence[RankTimes], backend: str) -> list[CollectiveTime]:
    """The times of all ranks, taken together.

    On a CPU a collective lasts from the earliest start to the latest end, by the clock that ranks of a host share. On
    GPUs it lasts as long as on the rank that took longest, by the device's own clock.
    """
    one_clock = len({rank.host for rank in of_ranks}) == 1
    made: list[CollectiveTime] = []
    for same in zip(*(rank.times for rank in of_ranks), strict=True):
        first: OneTime = same[0]
        if first.failure:
            samples = None
        elif backend == "nccl":
            steps = tuple(max(of_step) for of_step in zip(*(one.device_s for one in same), strict=False))
            samples = Samples(values_s=tuple(step / first.calls for step in steps), clock=first.clock)
        else:
            steps = steps_together([one.spans_ns for one in same], one_clock=one_clock)
            samples = Samples(values_s=tuple(step / first.calls for step in steps), clock=first.clock)
        made.append(
            CollectiveTime(
                kind=first.kind, backend=backend, ranks=len(of_ranks), message_bytes=first.message_bytes,
                samples=samples, calls=first.calls, failure=first.failure,
            )
        )  # fmt: skip
    return made


def _usual_backend() -> str:
    return "nccl" if resolve_device("auto").type == "cuda" else "gloo"


def _ranks(asked: Sequence[int] | None, backend: str, place: RankPlace | None) -> Sequence[int]:
    """How many ranks take part. In a job that runs already, those that it has; else every GPU, or two CPU ranks."""
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if asked is None and place is not None:
        asked = (place.ranks,)
    if asked is None and backend == "nccl":
        import torch  # noqa: PLC0415  (for GPUs alone)

        asked = (max(2, torch.cuda.device_count()),)
    if any(number < 2 for number in asked or ()):
        raise InputError("--ranks is below 2: a collective has at least two ranks")
    return asked or (2,)


def _sizes(asked: Sequence[int] | None, largest: int | None, device: str) -> tuple[int, ...]:
    """The sizes of messages: those asked for, or each fourth power of two from 1 KiB on."""
    if asked and largest is not None:
        raise InputError("--sizes and --largest both say which sizes: leave one out")
    if asked:
        return tuple(sorted(asked))
    end = _LARGEST[device] if largest is None else largest
    if end < KIB:
        raise InputError(f"--largest is {format_bytes(end)}: sizes begin at 1 KiB, or name them with --sizes")
    found = [KIB]
    while found[-1] * _STEP <= end:
        found.append(found[-1] * _STEP)
    return tuple(found)
