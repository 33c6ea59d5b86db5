"""What measures for a search: races turn by turn in one process, and processes of their own that confirm its end."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import msgspec
import torch

from stepscope.allocations.planning.search import planned_step
from stepscope.allocations.prediction.estimate import estimate_quickly
from stepscope.allocations.prediction.fit import Budget
from stepscope.core.answer import worst
from stepscope.core.attention_support import is_predicted
from stepscope.core.device_spec import DeviceSpec, find_device_spec
from stepscope.core.environment import Environment
from stepscope.core.errors import DeviceError, InputError
from stepscope.core.networks import Network, measured_network, network_for
from stepscope.core.processes import FEWEST_PROCESSES, Change
from stepscope.core.range_names import STEP
from stepscope.core.run import Run, settings_from
from stepscope.core.run_directory import load_run
from stepscope.core.samples import Interval
from stepscope.core.study_results import Tried, Verdict, kept_fits
from stepscope.core.units import format_bytes
from stepscope.core.workloads import Workload, by_sizes
from stepscope.engine.measured_cell import REFUSED, WRONG
from stepscope.engine.sweep import Series, fits, is_foretold, memory_of, needed_bytes, run_sweep
from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan, SweepState, TellSweep, order_cells, repeated
from stepscope.questions.tuning_curves import STEPS, TRAININGS
from stepscope.recording.device import host_memory
from stepscope.recording.nvml import smallest_gpu
from stepscope.runs.run_sets import RunSet, change_of, paired_ratios, sets_of

RACED = msgspec.structs.replace(settings_from(None, None, seconds=2.0, no_profile=True), warmup_seconds=2.0)
"""How long the two steps of a race take turns. What drifts meets both, so they need not be as steady as one alone."""

TRIED = msgspec.structs.replace(RACED, warmup_seconds=0.5, steps_floor=3, seconds=0.5)
"""How long the step that is asked for runs by itself before the first race: no verdict needs its time."""

ALONE = settings_from(None, None, seconds=3.0, no_profile=True)
"""How long a step is measured that takes no turns: it must be steady by itself."""

_LONGEST_S = Policy().timeout_s
"""Seconds that a race may take at most, whatever the budget."""

KEPT_SHARE = 0.6
"""The share of the time to compile that a later process does not need, at least. What stays is following the model's
Python: four layers of a Qwen-like model took 8.6 s again, after 74 s, on two cores; and GPT-2 medium on an H200 2.6 s
compiled by blocks, after 11 to 17 s (results/h200/fit-choices)."""

GET_READY = 1.5
"""How many times as long processes may take to get ready side by side as one alone."""
_HOST_BYTES = 6 << 30
"""Memory of the host for each of these processes, and its compilers."""
_DEVICE_SHARE = 0.9
"""The share of the device's memory that they may fill together."""

_DEVIATIONS = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The parts of the time that one process took for two steps by turns."""

    start_s: float
    """Until its run had begun: the process, and the device's own start."""
    first_s: Mapping[str, float]
    """By a step's key, what its first step took."""
    later_s: Mapping[str, float]
    """By a step's key, what its other steps took."""
    step_s: Mapping[str, float]
    """By a step's key, the median of those."""
    kept_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """By a step's key, what of its first step compiled what a later process finds on disk."""

    def ready_s(self, key: str, whole_s: float) -> float:
        """What of a process that measures this step alone comes before its steps are timed: the start, the model, and
        the first step."""
        return self.start_s + self._made_s(whole_s) / 3 + self._later_first_s(key)

    def alone_s(self, key: str, whole_s: float) -> float:
        """What a process would take that measures this step alone, of the whole time for both.

        What is neither start nor steps is making both models and looking at what they do, of which they share some: on
        an H200, processes of `large` and of a Qwen-like model of half a billion parameters took two thirds of it.
        """
        return self.start_s + self._made_s(whole_s) * 2 / 3 + self._later_first_s(key) + self.later_s[key]

    def trained_s(self, key: str, whole_s: float) -> float:
        """What a training of this step would take in a process that has begun: it makes the model and looks at
        nothing."""
        return self._made_s(whole_s) / 3 + self._later_first_s(key) + STEPS * self.step_s[key]

    def _later_first_s(self, key: str) -> float:
        return self.first_s[key] - self.kept_s.get(key, 0.0)

    def _made_s(self, whole_s: float) -> float:
        return max(0.0, whole_s - self.start_s - sum(self.first_s.values()) - sum(self.later_s.values()))


class Racing:
    """Measures steps for a search, and keeps the time. Use it as a context: races are forked from one process, which
    ends with it."""

    def __init__(
        self, *, device: str, out: str, budget_s: float, memory_limit_bytes: int | None = None, tag: str | None = None,
        fresh: bool = False, tell: TellSweep = lambda _: None, clock: Callable[[], float] = time.monotonic,
        series: Series | None = None,
    ) -> None:  # fmt: skip
        """fresh: whether nothing that an earlier search measured is taken. tell: is given the state of each sweep of
        cells as it goes on. series: of the device, which may have begun."""
        self.fresh = fresh
        self._device, self.out, self._limit, self._tag = device, out, memory_limit_bytes, tag
        self._tell, self._clock, self.budget_s = tell, clock, budget_s
        self._began, self._series = clock(), series or Series(device)
        self._longest_s = 0.0
        self._took_s: dict[str, float] = {}
        """By a step's key, the shortest time of a process that measured it: later ones find it compiled."""
        self._start_s = 0.0
        """How long the process of the last race took to begin, where that is known."""
        self._trained_s: dict[str, float] = {}
        """By a step's key, the shortest time of a training in a process that has begun, as its races foretell it."""
        self._ready_s: dict[str, float] = {}
        """By a step's key, the shortest time until a process that measures it alone has made its first step."""
        self._held_bytes = 0
        """The most that a race had on the device: both steps."""
        self._turns: Turns | None = None
        """The time of the last race, where both steps took turns in one process."""
        self._compiled_s = 0.0
        """Seconds that processes compiled for the first time, since a time was noted last. Later ones do not compile
        again, so no forecast counts them."""
        self._imported_s = 0.0
        """Seconds that the process from which races are forked imported, likewise: the first race waited for it."""
        self._found = False
        """Whether an earlier search had measured one of the last cells: then its time was another."""
        self._keeps_time: bool | None = None
        """Whether there is time for the end when a first race is asked for; None before."""
        self.needed_s = 0.0
        """The time that another race and the end would have taken, when it was asked for last."""
        self._kept_s = 0.0
        """The time that the end was to take, when a race was asked for last."""
        self._race_ends_s = math.inf
        """When a race that has begun is stopped, in `seconds`: what it would take longer is not its own."""
        self.where: Environment | None = None
        """The environment of the last run."""
        self.doubt = ""
        """The error that a check found in the run of the step that is to be tuned, by itself."""
        self.own_optimizer = ""
        """The class of the optimizer that the step's factory gives."""
        self.fixed: frozenset[str] = frozenset()
        """Fields of the workload that the step's factory decides, so that a change of them changes nothing."""
        self.absent: frozenset[str] = frozenset()
        """Fields of the workload that choose what the step's model does not have."""
        self.budget: Budget | None = memory_of(self._plan(()))
        self._machine = _machine_here() if device != "cpu" else None
        self._alone: dict[str, Run] = {}
        """The last run of each step that ranks share, by its key: it takes no turns, and its check takes long."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._series.close()

    @property
    def seconds(self) -> float:
        """How long it has taken until now."""
        return self._clock() - self._began

    def time_left(self, baseline: Workload, best: Workload) -> bool:
        """Whether another race, as long as the longest, would leave the time to train and to confirm these two. A
        budget that has no time for that when it is asked first is spent on races, and the rest on what it is enough
        for."""
        kept_s = self._kept_s = sum(self._end_s(baseline, best))
        self.needed_s = self.seconds + self._longest_s + kept_s
        if self._keeps_time is None:
            self._keeps_time = self.needed_s < self.budget_s
        elif best == baseline and self.needed_s >= self.budget_s:
            self._keeps_time = False  # nothing was found that is to be confirmed: the rest is for races, too
        self._race_ends_s = self.budget_s - (kept_s if self._keeps_time else 0.0)
        return self.needed_s - (0.0 if self._keeps_time else kept_s) < self.budget_s

    def time_for_losses(self, baseline: Workload, best: Workload) -> bool:
        """Whether there is time to train both: it was kept, or is left."""
        return self._keeps_time is not False or self.seconds + self._end_s(baseline, best)[0] < self.budget_s

    def time_to_confirm(self, baseline: Workload, best: Workload) -> bool:
        """Whether there is time to measure both in processes of their own: it was kept, or is left."""
        return self._keeps_time is not False or self.seconds + self._end_s(baseline, best)[1] < self.budget_s

    def _end_s(self, baseline: Workload, best: Workload) -> tuple[float, float]:
        """Seconds that it takes to train these two, and to confirm them."""
        import_s = self._series.forks.import_s  # races are forked; what trains and confirms imports PyTorch again
        train_s, confirm_s = list[float](), 0.0
        at_once = self.side_by_side(baseline, best)
        for one, trainings in ((baseline, TRAININGS - 1), (best, 1)):
            alone_s = self._took_s.get(one.key, self._longest_s)
            trained_s = self._trained_s.get(one.key, max(0.0, alone_s - self._start_s))
            # One process, or one of each rank, trains it from all its starts.
            train_s.append(import_s + self._start_s + trainings * trained_s)
            alone_s += import_s if at_once == 1 else -self._ready_s[one.key]
            confirm_s += FEWEST_PROCESSES * alone_s
        if at_once == 1:
            return sum(train_s), confirm_s
        ready_s = GET_READY * (import_s + max(self._ready_s[one.key] for one in (baseline, best)))
        return max(train_s), confirm_s + math.ceil(2 * FEWEST_PROCESSES / at_once) * ready_s

    def side_by_side(self, baseline: Workload, best: Workload) -> int:
        """How many processes of these two steps may get ready at once: as many as the device's memory and the host's
        hold, and 1 where that is not known, or where those that wait would wait too long."""
        if not self._held_bytes or self.where is None or self.where.memory_bytes is None:
            return 1
        if not {baseline.key, best.key} <= self._ready_s.keys():
            return 1
        own_s = sum(self._took_s[one.key] - self._ready_s[one.key] for one in (baseline, best))
        pairs = int(_DEVICE_SHARE * self.where.memory_bytes / self._held_bytes)
        most = min(2 * pairs, 2 * FEWEST_PROCESSES, (host_memory()[1] or 0) // _HOST_BYTES, os.cpu_count() or 1)
        return most if most > 1 and FEWEST_PROCESSES * own_s < _LONGEST_S / 2 else 1

    def fits(self, workload: Workload) -> str | None:
        """Why the step does not fit, by prediction; None where it does, or nothing predicts it."""
        if self.budget is None or not is_foretold(workload) or fits(workload, self.budget):
            return None
        return f"predicted to need {format_bytes(needed_bytes(workload))} of {self.budget.said}"

    def planned_s(self, workload: Workload) -> float | None:
        """Seconds that the step takes by its plan; None on a CPU, and where no plan is of it."""
        machine = self._machine
        if machine is None:
            return None
        try:
            planned = by_sizes(workload, lambda sized: planned_step(sized, *machine))
        except InputError:  # no plan is of such a step
            return None
        return planned.time.step_s if planned is not None else None

    def runs_alone(self, workload: Workload) -> str | None:
        """Why the step runs out of memory here; None where it runs. Raises InputError for one that cannot run as asked,
        and DeviceError for one that fails."""
        settings = ALONE if workload.ranks > 1 else TRIED
        (run,) = self._measured(Cell(workload=workload, settings=settings), refuses=True)
        # PyTorch was loaded from the disk: no race does so again. What the steps took, a race takes at least.
        self._compiled_s = self._imported_s = 0.0
        self._longest_s = max(self._longest_s, steps_s(run))
        if run.status == "out-of-memory":
            return "it ran out of memory"
        if run.status != "done":
            message = run.failure.message if run.failure is not None else run.status
            raise DeviceError(f"the step that is to be tuned {run.status}: {message}")
        workload_run, self.absent = run.workload, frozenset(run.evidence.absent)
        if "optimizer" in workload_run.by_factory:
            self.own_optimizer, self.fixed = workload_run.optimizer or "", frozenset({"optimizer"})
        if workload.ranks > 1:
            self._alone[workload.key] = run
        self.doubt = _gravest(run)
        return None

    def race(self, best: Workload, other: Workload) -> Tried:
        """The other step beside the best: by turns in one process, or one after another where that cannot hold both."""
        began_s = self.seconds
        tried = self._race(best, other)
        if tried.verdict == "not reached":  # it took longer than any before it: what was foretold was not enough
            self.needed_s = max(self.needed_s, self.seconds + self._kept_s)
        return msgspec.structs.replace(tried, began_s=round(began_s, 1), ended_s=round(self.seconds, 1))

    def _race(self, best: Workload, other: Workload) -> Tried:
        began, processes = self._clock(), 1
        self._turns = None
        try:
            if self._fit_together(best, other):
                tried = self._by_turns(best, other)
                if tried.verdict != "does not fit":
                    return tried
            self._turns, processes = None, 1 if best.key in self._alone else 2
            return self._apart(best, other)
        finally:
            self.note_time(began, best, other, processes=processes, turns=self._turns)

    def note_time(self, began: float, *workloads: Workload, processes: int = 1, turns: Turns | None = None) -> None:
        """Note how long so many processes took that measured these since then, one after another, less what was
        imported and compiled for the first time. turns: where one process measured both, the parts of its time."""
        whole_s = self._clock() - began - self._imported_s
        took_s = whole_s - self._compiled_s
        self._compiled_s = self._imported_s = 0.0
        if self._found:
            return
        self._longest_s = max(self._longest_s, took_s)
        for one in workloads:
            alone_s = took_s / processes if turns is None else turns.alone_s(one.key, whole_s)
            self._took_s[one.key] = min(self._took_s.get(one.key, math.inf), alone_s)
            if turns is not None:
                ready_s = turns.ready_s(one.key, whole_s)
                self._ready_s[one.key] = min(self._ready_s.get(one.key, math.inf), ready_s)
            if turns is not None and one.key in turns.step_s:
                self._start_s, trained_s = turns.start_s, turns.trained_s(one.key, whole_s)
                self._trained_s[one.key] = min(self._trained_s.get(one.key, math.inf), trained_s)

    def confirm(self, baseline: Workload, best: Workload) -> tuple[RunSet, RunSet, Change | None]:
        """Both steps in processes of their own, by rounds; and how many times as long the best one takes."""
        cells = [Cell(workload=workload, settings=ALONE) for workload in (baseline, best)]
        cells, at_once = repeated(cells, FEWEST_PROCESSES), self.side_by_side(baseline, best)
        runs = self._measured(*cells, policy=Policy(fresh=self.fresh, side_by_side=at_once))
        if at_once > 1 and any(run.status != "done" for run in runs):  # there was no room beside one another
            runs = self._measured(*cells, policy=Policy(fresh=True))
        before, after = sets_of(runs)[:2]
        if before.representative.workload.identity != baseline.identity:
            before, after = after, before
        return before, after, change_of(before, after)

    def _fit_together(self, best: Workload, other: Workload) -> bool:
        if best.ranks > 1 or other.ranks > 1:
            return False
        if (best.dtype == "tf32") != (other.dtype == "tf32"):
            return False  # whether fp32's products may be TF32 holds for a whole process
        if self.budget is None or not (is_predicted(best) and is_predicted(other)):
            return True
        needs = estimate_quickly(best).peak_bytes + estimate_quickly(other).peak_bytes
        return needs < self.budget.usable_bytes

    def _by_turns(self, best: Workload, other: Workload) -> Tried:
        began = datetime.now(UTC)
        (first,) = self._raced(Cell(workload=best, settings=RACED, against=other))
        if first.beside is None:
            return _without_result(first, (first,))
        second = load_run(Path(self.out) / first.beside)
        runs = (first, second)
        pairs = tuple(zip((best, other), runs, strict=True))
        self._held_bytes = max(self._held_bytes, *map(used_bytes, runs))
        self._turns = Turns(
            start_s=self._until(began, first),
            first_s={one.key: steps_s(run) - steps_s(run, first=False) for one, run in pairs},
            later_s={one.key: steps_s(run, first=False) for one, run in pairs},
            step_s={
                one.key: median
                for one, run in pairs
                if STEP in run.samples and (median := run.samples[STEP].median_s) is not None
            },
            kept_s={one.key: KEPT_SHARE * compiled_s(run) for one, run in pairs},
        )
        if first.status != "done" or second.status != "done":
            stopped = first.status == "timed-out" or second.failure is None
            return _without_result(first if stopped else second, runs)
        ratios = paired_ratios(first, second, STEP)
        if ratios is None or ratios.median_s is None:
            return _tried("failed", runs, why="no steps that ran next to one another")
        return _timed(second, runs, ratios.median_s, ratios.interval())

    def _apart(self, best: Workload, other: Workload) -> Tried:
        known = self._alone.get(best.key)
        workloads = (best, other) if known is None else (other,)
        began = datetime.now(UTC)
        measured = self._raced(*(Cell(workload=workload, settings=ALONE) for workload in workloads))
        if not self._found:
            self._start_s = self._until(began, measured[0])
        runs = [*([known] if known is not None else []), *measured]
        first, second = sorted(runs, key=lambda run: run.workload.identity == other.identity)
        self._alone.update({one.key: run for one, run in ((best, first), (other, second)) if one.ranks > 1})
        runs = (first, second)
        for run in (second, first):
            if run.status != "done":
                return _without_result(run, runs)
        return beside(first, second)

    def _raced(self, *cells: Cell) -> list[Run]:
        """The runs of a race's cells, stopped when its time is over. What an earlier search stopped is measured."""
        policy = Policy(fresh=self.fresh, timeout_s=min(_LONGEST_S, self._left_s / len(cells)))
        runs = self._measured(*cells, policy=policy)
        if self._found and any(run.status == "timed-out" for run in runs):
            runs = self._measured(*cells, policy=msgspec.structs.replace(policy, fresh=True))
        return runs

    @property
    def _left_s(self) -> float:
        return max(1.0, self._race_ends_s - self.seconds)

    def _measured(self, *cells: Cell, refuses: bool = False, policy: Policy | None = None) -> list[Run]:
        """The runs of these cells, each in a process of its own; those of an interrupted search are found again."""
        policy, imported_s = policy or Policy(fresh=self.fresh, refuses=refuses), self._series.forks.import_s
        policy = msgspec.structs.replace(policy, ceilings=False)  # seconds, and no verdict asks for them
        runs = run_sweep(self._plan(order_cells(list(cells))), policy, self._told, self._series)
        self._imported_s += max(0.0, self._series.forks.import_s - imported_s)
        self._compiled_s += sum(compiled_s(run) for run in runs)
        self.where = next((run.environment for run in runs if run.environment is not None), self.where)
        return runs

    def _until(self, began: datetime, run: Run) -> float:
        """Seconds from then until the run began in its process, less what was imported for all that are forked."""
        return max(0.0, (datetime.fromisoformat(run.created) - began).total_seconds() - self._imported_s)

    def _told(self, state: SweepState) -> None:
        self._found = any(cell.resumed for cell in state.cells)
        self._tell(state)

    def _plan(self, cells: tuple[Cell, ...]) -> SweepPlan:
        return SweepPlan(
            cells=cells, devices=(self._device,), out=self.out, tag=self._tag, memory_limit_bytes=self._limit
        )


def _machine_here() -> tuple[DeviceSpec, Network] | None:
    """The GPU with the least memory here, and what joins it to its like, as far as it was measured (`stepscope study
    collectives`); None where no datasheet is known of it."""
    gpu = smallest_gpu()
    spec = find_device_spec(gpu[0]) if gpu is not None else None
    if gpu is None or spec is None:
        return None
    kept = kept_fits(gpu[0], torch.__version__)
    network = network_for(spec)
    if kept is not None:
        network = measured_network(network, kept.fits, f"measured here, {kept.measured_at}")
    return spec, network


def steps_s(run: Run, *, first: bool = True) -> float:
    """Seconds that the run's steps took, those of its warm-up with them; with or without the first, which compiles."""
    steps = run.samples.get(STEP)
    return sum(steps.warmup_s[0 if first else 1 :]) + sum(steps.values_s) if steps is not None else 0.0


def used_bytes(run: Run) -> int:
    """Bytes of the device's memory that were in use when the steps had been timed; 0 where nothing tells."""
    reading = run.environment.after if run.environment is not None else None
    return (reading.memory_used_bytes or 0) if reading is not None else 0


def compiled_s(run: Run) -> float:
    """Seconds that the run's process compiled what no cache had, as far as they are known."""
    compilation = run.evidence.compilation
    return compilation.compile_s or 0.0 if compilation is not None and not compilation.cached_graphs else 0.0


def beside(best: Run, other: Run) -> Tried:
    """The other step beside the best one, each from a process of its own. Where a side has no interval, as one whose
    steps hang on a busy host, steps that do not overlap tell which is faster."""
    before, after = best.samples[STEP], other.samples[STEP]
    ratio = before.speedup_over(after)  # how many times as long the other takes
    if ratio is None:
        return _tried("failed", (best, other), why="no steps to compare")
    memory = other.evidence.memory
    tried = _timed(other, (best, other), ratio.value, ratio.interval, memory.allocated_peak if memory else None)
    if ratio.interval is not None:
        return tried
    apart = ratio.extremes is not None and not ratio.extremes.low <= 1 <= ratio.extremes.high
    how = "shorter" if ratio.value < 1 else "longer"
    why = after.why_no_interval or before.why_no_interval or ""
    if apart:
        why = f"without an interval: each of its steps was {how} than every step of the best"
    return msgspec.structs.replace(tried, apart=apart, why=tried.why or why)


def p_value_of(ratio: float, interval: Interval | None) -> float | None:
    """Two-sided, of "both take equally long", as the interval of the ratio's logarithm says it of a normal law."""
    if interval is None or interval.low <= 0:
        return None
    error = math.log(interval.high / interval.low) / (2 * _DEVIATIONS)
    if error <= 0:
        return 0.0 if ratio != 1 else 1.0
    return 2 * (1 - statistics.NormalDist().cdf(abs(math.log(ratio)) / error))


def _timed(
    run: Run, runs: tuple[Run, ...], ratio: float, interval: Interval | None, peak_bytes: int | None = None
) -> Tried:
    return _tried(
        "doubted" if worst(run.findings) == "error" else "undecided", runs, step_s=run.samples[STEP].median_s,
        ratio=ratio, interval=interval, p_value=p_value_of(ratio, interval), peak_bytes=peak_bytes,
        why=_gravest(run),
    )  # fmt: skip


def _gravest(run: Run) -> str:
    """The first error that a check found in the run, or else the part that was asked for and left; empty where none
    did."""
    sentences = (each.sentence for each in run.findings if each.severity == "error" or each.kind == "part-left")
    return next(sentences, "")


def _without_result(run: Run, runs: tuple[Run, ...]) -> Tried:
    refused = run.failure is not None and run.failure.during in (REFUSED, WRONG)
    by_status: dict[str, Verdict] = {"out-of-memory": "does not fit", "timed-out": "not reached"}
    verdict: Verdict = "refused" if refused else by_status.get(run.status, "failed")
    return _tried(verdict, runs, why=run.failure.message if run.failure is not None else run.status)


def _tried(verdict: Verdict, runs: tuple[Run, ...], **figures: object) -> Tried:
    named = tuple(run.id for run in runs)
    return Tried(round="", change={}, verdict=verdict, runs=named, **figures)  # pyright: ignore[reportArgumentType]
