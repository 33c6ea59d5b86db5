"""How fast do ranks communicate here? Each kind of collective over sizes, numbers of ranks and backends."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from stepscope.core.answer import Answer
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.finding import Finding, warning
from stepscope.core.ranks import RankPlace, steps_together
from stepscope.core.samples import Samples
from stepscope.core.study_results import CollectiveTime, keep_fits
from stepscope.core.units import KIB, format_bytes
from stepscope.questions.collectives.answer import answer_collectives, fits_of
from stepscope.recording.device import resolve_device
from stepscope.training.parallel.collective_times import MAKERS, CollectivePlan, OneTime, RankTimes
from stepscope.training.parallel.launching import check_launch, launch

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
    """The answer, of every backend and number of ranks. What ends early, by Ctrl-C or since a rank died, is answered
    from what was timed until then. place: this process's, in a job that somebody else started."""
    plans = [
        (backend, number) for backend in dict.fromkeys(backends or (_usual_backend(),))
        for number in _ranks(ranks, backend, place)
    ]  # fmt: skip
    for backend, number in plans:
        check_launch(number, BACKENDS[backend])
    found: list[CollectiveTime] = []
    where: Environment | None = None
    threads: int | None = None
    early: Finding | None = None
    for i, (backend, number) in enumerate(plans):
        device = BACKENDS[backend]
        plan = CollectivePlan(kinds=tuple(MAKERS), sizes=_sizes(sizes, largest, device), seconds=seconds)
        done, whole = 0, len(plan.kinds) * len(plan.sizes)
        kept: list[list[RankTimes]] = [[] for _ in range(number)]

        def told(rank: int, stage: str, first: int = i, whole: int = whole) -> None:
            nonlocal done
            if rank == 0:
                done += " of " in stage
                tell(stage, (first + min(1.0, done / whole)) / len(plans))

        def keep(rank: int, part: bytes, kept: list[list[RankTimes]] = kept) -> None:
            kept[rank].append(msgspec.json.decode(part, type=RankTimes))

        try:
            launched = launch(
                "stepscope.training.parallel.collective_times:time_collectives", plan, ranks=number, device=device,
                tell=told, keep=keep,
            )  # fmt: skip
            of_ranks = [msgspec.json.decode(value, type=RankTimes) for value in launched.values]
            threads = launched.threads
        except (KeyboardInterrupt, StepscopeError) as error:
            of_ranks = _until_then(kept)
            if not found and not of_ranks:
                raise
            early = _ended_early(backend, number, error)
        if of_ranks:
            where = of_ranks[0].environment
            fresh = times_together(of_ranks, backend)
            found += fresh
            if early is None and (place is None or place.rank == 0):
                keep_fits(where, datetime.now(UTC).isoformat(timespec="seconds"), fits_of(fresh))
        if early is not None:
            break
    answer = answer_collectives(found, where, datetime.now(UTC).date().isoformat(), threads)
    return answer if early is None else msgspec.structs.replace(answer, findings=(early, *answer.findings))


def _ended_early(backend: str, ranks: int, error: BaseException) -> Finding:
    """What ended the study, and where."""
    here = f"of {ranks} ranks over {backend}: only what was timed until then is here."
    if isinstance(error, KeyboardInterrupt):
        return warning("interrupted", f"Interrupted in the collectives {here}")
    return warning("ended-early", f"Ended, since {error}, in the collectives {here}")


def _until_then(kept: Sequence[Sequence[RankTimes]]) -> list[RankTimes]:
    """What all ranks have told of; empty where one has told of nothing."""
    count = min(map(len, kept))
    return [
        msgspec.structs.replace(of_rank[0], times=tuple(time for part in of_rank[:count] for time in part.times))
        for of_rank in kept
        if count
    ]


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
        import torch

        asked = (max(2, torch.cuda.device_count()),)
    if any(number < 2 for number in asked or ()):
        raise InputError("--ranks is below 2: a collective has at least two ranks")
    return tuple(dict.fromkeys(asked or (2,)))


def _sizes(asked: Sequence[int] | None, largest: int | None, device: str) -> tuple[int, ...]:
    """The sizes of messages: those asked for, or each fourth power of two from 1 KiB on."""
    if asked and largest is not None:
        raise InputError("--sizes and --largest both say which sizes: leave one out")
    if asked:
        return tuple(sorted(set(asked)))
    end = _LARGEST[device] if largest is None else largest
    if end < KIB:
        raise InputError(f"--largest is {format_bytes(end)}: sizes begin at 1 KiB, or name them with --sizes")
    found = [KIB]
    while found[-1] * _STEP <= end:
        found.append(found[-1] * _STEP)
    return tuple(found)
