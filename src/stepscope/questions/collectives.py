"""How fast do ranks communicate here? Each kind of collective over sizes, numbers of ranks and backends."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from stepscope.core import interrupts
from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, measured_answer, note, table_of, warning
from stepscope.core.device_spec import find_device_spec
from stepscope.core.environment import Environment, RankPlace, place_in_job
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.evidence import steps_together
from stepscope.core.formulas.communication import bus_bandwidth, fit_latency_and_bandwidth
from stepscope.core.options import MEASURING, Option
from stepscope.core.samples import Samples
from stepscope.core.study_results import CollectiveFit, CollectiveTime, keep_fits
from stepscope.core.units import KIB, format_bytes, format_rate, format_seconds, format_share, parse_bytes
from stepscope.engine.request import Stage, Tell
from stepscope.questions.question import Question

if TYPE_CHECKING:
    from stepscope.training.parallel.collective_times import OneTime, RankTimes  # a module that needs torch

_GOOD_FIT = 0.25
"""The residual up to which latency and bandwidth describe the times."""


def answer_collectives(
    times: Sequence[CollectiveTime], where: Environment | None, date: str, threads: int | None = None
) -> Answer:
    """The answer from times of collectives that were measured on one device. threads: of each CPU rank."""
    fits = fits_of(times)
    spec = find_device_spec(where.device_name) if where else None
    peak = spec.link_bytes_per_s if spec else None
    settings: dict[str, Cell] = {"dtype": "fp32", "backends": ", ".join(dict.fromkeys(t.backend for t in times))}
    if threads is not None:
        settings["threads of a rank"] = threads
    return measured_answer(
        where, study="collectives", question="How fast do ranks communicate here?", date=date, settings=settings,
        tables=(_times(times, peak), _fits(fits)), panels=tuple(_panels(times)),
        findings=_findings(times, fits, peak),
    )  # fmt: skip


def fits_of(times: Iterable[CollectiveTime]) -> list[CollectiveFit]:
    """Latency and bandwidth of each kind, backend and number of ranks that has two sizes or more."""
    groups: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for time in times:
        if reached := _median_and_bus(time):
            groups.setdefault((time.kind, time.backend, time.ranks), []).append((time.message_bytes, reached[0]))
    fits: list[CollectiveFit] = []
    for (kind, backend, ranks), known in groups.items():
        fit = fit_latency_and_bandwidth(known)
        if fit is not None:
            fits.append(CollectiveFit(kind=kind, backend=backend, ranks=ranks, **msgspec.structs.asdict(fit)))
    return fits


def fits_in(answer: Answer, source: str) -> list[CollectiveFit]:
    """The latencies and bandwidths in an answer of this study that was stored. Raises InputError where it has none."""
    table = next((table for table in answer.tables if table.title == _FITS), None)
    if answer.study != "collectives" or table is None or not table.rows:
        raise InputError(f"{source} has no latency and bandwidth: write one with `stepscope study collectives --json`")
    columns = [table.columns.index(name) for name in _FIT_COLUMNS]
    try:
        return [
            msgspec.convert(dict(zip(_FIT_FIELDS, (row[i] for i in columns), strict=True)), CollectiveFit)
            for row in table.rows
        ]
    except msgspec.ValidationError as error:
        raise InputError(f"{source} is damaged: its latencies and bandwidths are no figures ({error})") from None


_FITS = "Latency and bandwidth"
_FIT_COLUMNS = ("collective", "backend", "ranks", "latency", "bandwidth", "residual", "sizes")
_FIT_FIELDS = ("kind", "backend", "ranks", "latency_s", "bytes_per_s", "residual", "count")


def _median_and_bus(time: CollectiveTime) -> tuple[float, float] | None:
    """The median in seconds, and the bus bandwidth that it is; None where it was not timed."""
    median_s = time.samples.median_s if time.samples else None
    if not median_s:
        return None
    return median_s, bus_bandwidth(time.kind, time.message_bytes, time.ranks, median_s)


def _times(times: Sequence[CollectiveTime], peak: float | None) -> Table:
    rows: list[tuple[Cell, ...]] = []
    rules: list[int] = []
    for i, time in enumerate(times):
        if i and (time.kind, time.backend, time.ranks) != (times[i - 1].kind, times[i - 1].backend, times[i - 1].ranks):
            rules.append(i)
        head = (time.kind, time.backend, time.ranks, time.message_bytes)
        reached = _median_and_bus(time)
        if reached is None or time.samples is None:
            rows.append((*head, time.failure, None, None, None, None))
            continue
        median_s, bus = reached
        share = bus / peak if peak and time.backend == "nccl" else None
        rows.append((*head, median_s, time.message_bytes / median_s, bus, share, time.samples.count))
    return table_of(
        "collective", "backend", "ranks", ("message", "B"), ("time", "s"), ("algorithm bandwidth", "B/s"),
        ("bus bandwidth", "B/s"), ("of the link's peak", "%"), "samples",
        title="Times", rows=rows, rules=tuple(rules),
    )  # fmt: skip


def _fits(fits: Sequence[CollectiveFit]) -> Table:
    rows = [
        (
            fit.kind, fit.backend, fit.ranks, fit.latency_s, fit.bytes_per_s,
            bus_bandwidth(fit.kind, 1, fit.ranks, 1 / fit.bytes_per_s) if fit.bytes_per_s else None,
            fit.residual, fit.count,
        )
        for fit in fits
    ]  # fmt: skip
    return table_of(
        "collective", "backend", "ranks", ("latency", "s"), ("bandwidth", "B/s"), ("bus bandwidth", "B/s"),
        ("residual", "%"), "sizes", title=_FITS, rows=rows,
    )  # fmt: skip


def _panels(times: Sequence[CollectiveTime]) -> Iterator[Panel]:
    """A panel for each backend and number of ranks: the lines of all of them are more than the eye tells apart."""
    groups = list(dict.fromkeys((time.backend, time.ranks) for time in times))
    for backend, ranks in groups:
        points = tuple(
            Point(line=time.kind, x=float(time.message_bytes), y=reached[1] * 1e-9)
            for time in times
            if (time.backend, time.ranks) == (backend, ranks) and (reached := _median_and_bus(time))
        )
        of = f", {ranks} ranks over {backend}" if len(groups) > 1 else ""
        if points:
            yield Panel(
                x_title="message (bytes)", y_title=f"bus bandwidth (GB/s){of}", points=points, x_log=True, y_log=True
            )


def _findings(times: Sequence[CollectiveTime], fits: Sequence[CollectiveFit], peak: float | None) -> Iterator[Finding]:
    for backend, ranks in dict.fromkeys((time.backend, time.ranks) for time in times):
        of_group = [time for time in times if (time.backend, time.ranks) == (backend, ranks)]
        rates = [(reached[1], time) for time in of_group if (reached := _median_and_bus(time))]
        if not rates:
            continue
        bus, best = max(rates, key=lambda pair: pair[0])
        of_peak = f", {format_share(bus / peak)} of the link's peak" if peak and backend == "nccl" else ""
        yield note(
            "fastest-collective",
            f"Over {backend}, {ranks} ranks reach {format_rate(bus, 'B/s')} of bus bandwidth at most{of_peak}: "
            f"{best.kind} of {format_bytes(best.message_bytes)}.",
            {"bytes_per_s": bus, "message_bytes": best.message_bytes},
        )
        fitted = [fit for fit in fits if (fit.backend, fit.ranks) == (backend, ranks)]
        reduce = next((fit for fit in fitted if fit.kind == "all-reduce" and fit.bytes_per_s), None)
        if reduce is not None and reduce.bytes_per_s:
            half = reduce.latency_s * reduce.bytes_per_s
            yield note(
                "latency-bound",
                f"An all-reduce over {backend} waits {format_seconds(reduce.latency_s)} before its bytes count: below "
                f"{format_bytes(half)}, latency is more than half of its time.",
                {"latency_s": reduce.latency_s, "half_bytes": half},
            )
        poor = [fit for fit in fitted if fit.residual > _GOOD_FIT]
        if poor:
            worst = max(poor, key=lambda fit: fit.residual)
            yield warning(
                "poor-fit",
                f"Latency and bandwidth alone describe {len(poor)} of {len(fitted)} collectives over {backend} with "
                f"{ranks} ranks badly: they miss the times of {worst.kind} by {format_share(worst.residual)}.",
                {"residual": worst.residual, "poor": len(poor)},
                "take the table of times where a size matters",
            )
    for failure, time in {time.failure: time for time in times if time.failure}.items():
        yield warning(
            "no-time", f"{time.kind} over {time.backend} of {format_bytes(time.message_bytes)} has no time: {failure}."
        )


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
    from stepscope.training.parallel.collective_times import MAKERS, CollectivePlan, RankTimes
    from stepscope.training.parallel.launching import check_launch, launch

    if not backends:
        from stepscope.recording.environment import resolve_device

        backends = ("nccl" if resolve_device("auto").type == "cuda" else "gloo",)
    plans = [(backend, number) for backend in dict.fromkeys(backends) for number in _ranks(ranks, backend, place)]
    for backend, number in plans:
        check_launch(number, BACKENDS[backend])
    times: list[CollectiveTime] = []
    where: Environment | None = None
    threads: int | None = None
    early: Finding | None = None
    for i, (backend, number) in enumerate(plans):
        device = BACKENDS[backend]
        plan = CollectivePlan(kinds=tuple(MAKERS), sizes=_sizes(sizes, largest, device), seconds=seconds)
        done, whole = 0, len(plan.kinds) * len(plan.sizes)
        kept: list[list[RankTimes]] = [[] for _ in range(number)]

        def report(rank: int, stage: str, first: int = i, whole: int = whole) -> None:
            nonlocal done
            if rank == 0:
                done += " of " in stage
                tell(stage, (first + min(1.0, done / whole)) / len(plans))

        def keep(rank: int, part: bytes, kept: list[list["RankTimes"]] = kept) -> None:
            kept[rank].append(msgspec.json.decode(part, type=RankTimes))

        try:
            launched = launch(
                "stepscope.training.parallel.collective_times:time_collectives",
                plan,
                ranks=number,
                device=device,
                tell=report,
                keep=keep,
            )
            of_ranks = [msgspec.json.decode(value, type=RankTimes) for value in launched.values]
            threads = launched.threads
        except (KeyboardInterrupt, StepscopeError) as error:
            of_ranks = _until_then(kept)
            if not times and not of_ranks:
                raise
            here = f"in the collectives of {number} ranks over {backend}: only what was timed until then is here."
            if isinstance(error, KeyboardInterrupt):
                early = warning("interrupted", f"Interrupted {here}")
            else:
                early = warning("ended-early", f"Ended, since {error}, {here}")
        if of_ranks:
            where = of_ranks[0].environment
            fresh = times_together(of_ranks, backend)
            times += fresh
            if early is None and (place is None or place.rank == 0):
                keep_fits(where, datetime.now(UTC).isoformat(timespec="seconds"), fits_of(fresh))
        if early is not None:
            break
    answer = answer_collectives(times, where, datetime.now(UTC).date().isoformat(), threads)
    return answer if early is None else msgspec.structs.replace(answer, findings=(early, *answer.findings))


def _until_then(kept: "Sequence[Sequence[RankTimes]]") -> "list[RankTimes]":
    """What all ranks have told of; empty where one has told of nothing."""
    count = min(map(len, kept))
    return [
        msgspec.structs.replace(of_rank[0], times=tuple(time for part in of_rank[:count] for time in part.times))
        for of_rank in kept
        if count
    ]


def times_together(of_ranks: "Sequence[RankTimes]", backend: str) -> list[CollectiveTime]:
    """The times of all ranks, taken together.

    On a CPU a collective lasts from the earliest start to the latest end, by the clock that ranks of a host share. On
    GPUs it lasts as long as on the rank that took longest, by the device's own clock.
    """
    one_clock = len({rank.host for rank in of_ranks}) == 1
    together: list[CollectiveTime] = []
    for same in zip(*(rank.times for rank in of_ranks), strict=True):
        first: OneTime = same[0]
        samples = None
        if not first.failure:
            if backend == "nccl":
                steps = tuple(max(of_step) for of_step in zip(*(one.device_s for one in same), strict=False))
            else:
                steps = steps_together([one.spans_ns for one in same], one_clock=one_clock)
            samples = Samples(values_s=tuple(step / first.calls for step in steps), clock=first.clock)
        together.append(
            CollectiveTime(
                kind=first.kind, backend=backend, ranks=len(of_ranks), message_bytes=first.message_bytes,
                samples=samples, calls=first.calls, failure=first.failure,
            )
        )  # fmt: skip
    return together


def _ranks(requested: Sequence[int] | None, backend: str, place: RankPlace | None) -> Sequence[int]:
    """How many ranks take part. In a job that runs already, those that it has; else every GPU, or two CPU ranks."""
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    if requested is None and place is not None:
        requested = (place.ranks,)
    if requested is None and backend == "nccl":
        import torch

        requested = (max(2, torch.cuda.device_count()),)
    if any(number < 2 for number in requested or ()):
        raise InputError("--ranks is below 2: a collective has at least two ranks")
    return tuple(dict.fromkeys(requested or (2,)))


def _sizes(requested: Sequence[int] | None, largest: int | None, device: str) -> tuple[int, ...]:
    """The sizes of messages: those asked for, or each fourth power of two from 1 KiB on."""
    if requested and largest is not None:
        raise InputError("--sizes and --largest both say which sizes: leave one out")
    if requested:
        return tuple(sorted(set(requested)))
    end = _LARGEST[device] if largest is None else largest
    if end < KIB:
        raise InputError(f"--largest is {format_bytes(end)}: sizes begin at 1 KiB, or name them with --sizes")
    sizes = [KIB]
    while sizes[-1] * _STEP <= end:
        sizes.append(sizes[-1] * _STEP)
    return tuple(sizes)


Seconds = Annotated[float | None, Option("Seconds for each collective and size (default: 0.2).", MEASURING, least=0)]
Ranks = Annotated[tuple[int, ...] | None, Option("Processes that take part, a device each.", MEASURING, least=2)]
Backend = Annotated[
    tuple[str, ...] | None,
    Option("What the ranks talk over: gloo is for CPUs, nccl for GPUs.", MEASURING, choices=("gloo", "nccl")),
]
Sizes = Annotated[
    tuple[int, ...] | None, Option("Sizes of messages, as in 1KiB,1MiB.", MEASURING, takes=parse_bytes, metavar="SIZE")
]
Largest = Annotated[
    int | None, Option("The largest message; sizes begin at 1 KiB.", MEASURING, takes=parse_bytes, metavar="SIZE")
]


def measure_collectives(
    tell: Tell, *, ranks: Ranks, backend: Backend, sizes: Sizes, largest: Largest, seconds: Seconds
) -> Answer:
    """Time, bandwidth and latency of all-reduce, all-gather, reduce-scatter, all-to-all, broadcast and send, by size.

    Inside torchrun or srun the ranks of that job take part.
    """
    place = place_in_job(os.environ)
    options: dict[str, Any] = {"ranks": ranks, "backends": backend, "sizes": sizes, "largest": largest, "place": place}
    options["seconds"] = 0.2 if seconds is None else seconds
    with interrupts.raising():
        answer = study_collectives(lambda name, share: tell(Stage(name=name, fraction=share)), **options)
    if place is not None and place.rank:
        sys.exit()  # the first rank shows what all measured
    return answer


QUESTION = Question(
    "collectives",
    measure_collectives,
    examples=("--ranks 2 --backend gloo --largest 1MiB", "--ranks 2,4,8 --save bandwidth.svg"),
    defaults={
        "ranks": "every GPU, or 2 on CPUs",
        "backend": "nccl where GPUs are",
        "largest": "1 GiB on GPUs, 16 MiB on CPUs",
    },
)
