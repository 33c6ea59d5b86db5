"""What studies leave as results: a search for the fastest step, the prices of graph breaks, times of collectives."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.errors import InputError, choose
from stepscope.core.files import cache_file, read_cached, replace_file
from stepscope.core.parts import ATTENTIONS, PARTS, choose_name, is_users
from stepscope.core.processes import Change
from stepscope.core.samples import Interval, Samples
from stepscope.core.workloads import Workload, kernels_at_once

TUNED_FIELDS = (
    "attention", "dtype", "optimizer", "compile", "graph", "checkpointing", "accumulation", "parallel", *PARTS,
    "projections",
)  # fmt: skip
"""Fields of a workload that a search may change."""


def fields_kept(names: Iterable[str]) -> frozenset[str]:
    """The fields that stay as they are. Raises InputError for another name, and where nothing is left to change."""
    kept = frozenset(choose(name, TUNED_FIELDS, "keep") for name in names)
    if kept.issuperset(TUNED_FIELDS):
        raise InputError(f"keep names all that tune changes: leave one out of {', '.join(TUNED_FIELDS)}")
    return kept


def named_apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The options of a step with one name each, and by field the others that were named, as in `mine.py:fn,sdpa`: they
    are raced against the first that is no user's own. Raises InputError for a name that means nothing."""
    one, others = dict(options), dict[str, tuple[str, ...]]()
    ways: dict[str, Mapping[str, Any]] = {"attention": ATTENTIONS, **PARTS}
    for field, known in ways.items():
        written = [name.strip() for name in str(options.get(field, "")).split(",")]
        if len(written) > 1:
            names = [*dict.fromkeys(choose_name(name, known, field) for name in written)]
            one[field] = next((name for name in names if not is_users(name)), names[0])
            others[field] = tuple(name for name in names if name != one[field])
    return one, others


NAMED = "named "
"""How a round's name begins that races what the user named; the field follows."""

Verdict = Literal[
    "taken", "faster", "undecided", "slower", "slower by plan", "refused", "does not fit", "failed", "doubted",
    "not right", "not reached",
]  # fmt: skip
"""taken: the fastest of its round, and part of every later step. faster: surely, but another of its round was more so.
undecided: its interval holds 1, or it has none. slower by plan: so much slower by prediction that it was not measured.
refused: it cannot run here, or beside another choice. does not fit: by prediction, or it ran out of memory. failed: it
was measured, and ended without a result. doubted: a check of its run found an error. not right: its losses depart from
the baseline's. not reached: the time was over."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One change of the step, and what it gave beside the best step until then."""

    round: str
    """What was changed, in a word: `attention`, `precision`."""
    change: dict[str, str | int | None]
    """Fields of the workload with their new values."""
    verdict: Verdict
    step_s: float | None = None
    """Its median step, in seconds; None where none was measured."""
    ratio: float | None = None
    """How many times as long it took as the best step until then."""
    interval: Interval | None = None
    """The interval of `ratio` within one process."""
    p_value: float | None = None
    """Two-sided, of "both take equally long", by the interval; a round's are judged together (Holm)."""
    apart: bool = False
    """Whether there is no interval, and each of its steps was shorter, or each longer, than every step of the best
    until then. That settles the race. How much processes differ, the end tells."""
    peak_bytes: int | None = None
    """The most bytes of tensors at once; None where two models lay in the memory, or it was not counted."""
    why: str = ""
    """The reason of a refusal, a failure or a doubt, in one line."""
    began_s: float | None = None
    """When its race began, in seconds of the search; None where there was none, and in searches from before this was
    kept. What an earlier search had measured is found at once."""
    ended_s: float | None = None
    """When its race ended."""
    runs: tuple[str, ...] = ()
    """The runs of the best step until then, and of this one."""


def change_words(change: Mapping[str, str | int | None]) -> str:
    """A change in words: `dtype bf16-master, kernels fused`, where all parts have one name. None is what a user's model
    has of its own."""
    named = kernels_at_once(change).items()
    return ", ".join(f"the model's own {name}" if value is None else f"{name} {value}" for name, value in named)


NEAR = 0.05
"""How much longer than the last one a step may take that is near the end."""


class LossCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a short training: of each step, before its update."""

    name: str
    losses: tuple[float, ...]


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A search, as far as it came."""

    asked: Workload
    """The step that the user asked for."""
    baseline: Workload
    """The step that the search began with: the one asked for, or one that fits."""
    best: Workload
    tried: tuple[Tried, ...] = ()
    confirmed: Change | None = None
    """The best step against the baseline, in processes of their own; None where that was not reached."""
    baseline_s: float | None = None
    """The typical step of the baseline in these processes, in seconds."""
    best_s: float | None = None
    baseline_peak_bytes: int | None = None
    best_peak_bytes: int | None = None
    confirmed_by: tuple[str, ...] = ()
    """The runs of these processes."""
    curves: tuple[LossCurve, ...] = ()
    """Losses of the baseline, of the baseline from other starts, and of the best."""
    departs_at: int | None = None
    """The step at which the best one's losses depart from the baseline's; None where they do not."""
    why_no_losses: str = ""
    """Why no losses were compared, or why they cannot tell how much is far, in one line."""
    doubt: str = ""
    """The error that a check found in the run of the baseline by itself, in one line."""
    own_optimizer: str = ""
    """The class of the optimizer that the model's factory gives: no change replaces it."""
    seconds: float = 0.0
    """How long the search took."""
    needed_s: float = 0.0
    """The time that one more race and the confirmation of the end would have taken, when it was asked for last."""
    budget_s: float = 0.0
    interrupted: bool = False
    device: str = ""
    versions: dict[str, str] = {}
    folder: str = ""
    """Where the runs are."""

    @property
    def near_end_s(self) -> float | None:
        """When the best step until then was within NEAR of the end, in seconds of the search. None where a time or a
        ratio of what was taken is not known, or nothing was taken."""
        taken = [tried for tried in self.tried if tried.verdict == "taken"]
        behind, reached_s = 1.0, None
        for tried in reversed(taken):
            if behind < 1 / (1 + NEAR):
                break
            if tried.ratio is None or tried.ended_s is None:
                return None
            reached_s = tried.ended_s
            behind *= tried.ratio
        return reached_s


# What graph breaks and recompilations of a user's module cost, as it was measured: plain data that travels.


class GraphBreak(NamedTuple):
    """A line at which dynamo ended a graph: its file and number, the function that it is in, and dynamo's own words."""

    place: str
    function: str
    reason: str


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step compiled in one way: with some breaks avoided, or for any shape."""

    pieces: float
    """Calls of compiled graphs in a step's forward: 1 where nothing breaks it."""
    compile_s: float
    graphs: int
    """Graphs that were compiled."""
    saved_bytes: int | None = None
    """Bytes that forward leaves for backward."""
    peak_bytes: int | None = None
    """The step's peak, on a GPU."""
    samples: Samples | None = None
    """Times of the steps; None where they were not timed."""
    breaks: tuple[GraphBreak, ...] = ()


class PricedBreak(msgspec.Struct, frozen=True, kw_only=True):
    """Breaks that one change avoids, and the step with them and without them, where all else is the same."""

    breaks: tuple[GraphBreak, ...]
    how: str = ""
    """What avoids them, as a setting of dynamo; empty where nothing here can."""
    with_them: CompiledStep | None = None
    without: CompiledStep | None = None
    eagerly: CompiledStep | None = None
    """The step with their functions left to run eagerly; measured where they cannot be avoided."""
    why_not: str = ""
    """Why they have no price."""

    @property
    def pieces(self) -> float:
        """Calls of compiled graphs that they add to a step."""
        if self.with_them is None or self.without is None:
            return 0.0
        return self.with_them.pieces - self.without.pieces

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that they add to what is saved for backward."""
        saved = [each.saved_bytes for each in (self.with_them, self.without) if each is not None]
        return saved[0] - saved[1] if len(saved) == 2 and saved[0] is not None and saved[1] is not None else None

    @property
    def decided_s(self) -> float:
        """Seconds that they add to a step, by the medians; 0 where the samples leave open whether they add any."""
        if self.with_them is None or self.without is None:
            return 0.0
        slow, fast = self.with_them.samples, self.without.samples
        ratio = fast.speedup_over(slow) if fast is not None and slow is not None else None
        if ratio is None or ratio.undecided or slow is None or fast is None:
            return 0.0
        return (slow.median_s or 0.0) - (fast.median_s or 0.0)


class Recompilation(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was compiled again, since a guard failed."""

    function: str
    place: str
    guard: str
    step: int
    """The step that it delayed; the first is 0."""
    seconds: float


class CompilePrices(msgspec.Struct, frozen=True, kw_only=True):
    """A module's step compiled as it is, and in other ways."""

    module: str
    as_it_is: CompiledStep
    clean: CompiledStep
    """With all breaks avoided that can be."""
    breaks: tuple[PricedBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    gave_up_at: str = ""
    """The guard whose failure reached dynamo's limit of recompilations; empty where none did."""
    steps: int = 0
    """Steps in which recompilations were looked for."""
    dynamic: CompiledStep | None = None
    """Compiled with dynamic=True; None where nothing was compiled again."""
    environment: Environment | None = None
    date: str = ""

    @property
    def ranked(self) -> tuple[PricedBreak, ...]:
        """The breaks, the dearest first: by time where the samples tell, then by pieces, then by what is saved."""
        return tuple(
            sorted(self.breaks, key=lambda each: (-each.decided_s, -each.pieces, -(each.saved_bytes or 0), each.how))
        )


# What was measured of collectives, and the latencies and bandwidths fitted to it, kept as ceilings are.


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one size: how long it took from the first rank's start to the last one's end."""

    kind: str
    backend: str
    ranks: int
    message_bytes: int
    samples: Samples | None = None
    """Seconds of one collective, each the mean of `calls` in a row."""
    calls: int = 1
    failure: str = ""
    """Why it has no time."""


class LatencyAndBandwidth(msgspec.Struct, frozen=True, kw_only=True):
    """A line through times over sizes: t = latency + bytes / bandwidth."""

    latency_s: float
    bytes_per_s: float | None
    """None where time does not grow with size: all messages were too small."""
    residual: float
    """The root of the mean square of the relative errors."""
    count: int
    """How many sizes it is of."""

    def seconds(self, message_bytes: float) -> float:
        """How long a message of this size takes."""
        return self.latency_s + (message_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


class CollectiveFit(LatencyAndBandwidth, frozen=True, kw_only=True):
    """Latency and bandwidth of one kind of collective among so many ranks, by the bytes of the message."""

    kind: str
    backend: str
    ranks: int


class CollectiveFits(msgspec.Struct, frozen=True, kw_only=True):
    """The fits of one device under one build of PyTorch."""

    device_name: str
    torch_version: str
    measured_at: str
    """When the newest of them was measured."""
    fits: tuple[CollectiveFit, ...] = ()

    def fit(self, kind: str, backend: str, ranks: int) -> CollectiveFit | None:
        """The fit of this kind among so many ranks, or None."""
        wanted = (kind, backend, ranks)
        return next((fit for fit in self.fits if (fit.kind, fit.backend, fit.ranks) == wanted), None)


def keep_fits(where: Environment, measured_at: str, fits: Iterable[CollectiveFit]) -> None:
    """Keep these fits for later predictions, beside those of other kinds and ranks that are kept already."""
    fresh = tuple(fits)
    again = {(fit.kind, fit.backend, fit.ranks) for fit in fresh}
    version = where.versions.get("torch", "")
    stored = kept_fits(where.device_name, version)
    others = (fit for fit in (stored.fits if stored else ()) if (fit.kind, fit.backend, fit.ranks) not in again)
    document = CollectiveFits(
        device_name=where.device_name, torch_version=version, measured_at=measured_at, fits=(*others, *fresh)
    )
    replace_file(cache_file("collectives", where.device_name, f"torch{version}"), msgspec.json.encode(document))


def kept_fits(device_name: str, torch_version: str) -> CollectiveFits | None:
    """The fits of this device under this build; None where there is nothing that can be read."""
    return read_cached(cache_file("collectives", device_name, f"torch{torch_version}"), CollectiveFits)
