"""Says whether a step of a user's own module fits, and what would make it fit. Each answer is a step on fake
tensors."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepscope.allocations.prediction import fit as plans
from stepscope.allocations.prediction.caching_allocator import CachingAllocator
from stepscope.allocations.prediction.estimate import DeviceType
from stepscope.allocations.prediction.fit import Budget, Change, Lever, Plan, together
from stepscope.allocations.prediction.own_fit import MOST_SEARCHED, OwnEstimate, OwnFit, OwnVerdict, Unseen
from stepscope.allocations.prediction.symbolic_tensors import RoundingAllocator
from stepscope.core.errors import InputError
from stepscope.core.own_workload import OwnModel, OwnWorkload
from stepscope.core.precisions import PRECISIONS
from stepscope.engine.fake_step import STEPS_BEFORE, RefusedInPhase, replayed
from stepscope.engine.own_fake_step import OwnWatchedStep, default_of, watch_own_step
from stepscope.training.own.own_step import OwnModule

MOST_PLANS = 6
SEQUENCE_UNIT = 64
"""Sequences are looked for in multiples of so many tokens, if the one that is asked about is such a multiple."""
MOST_TIMES = 8
"""A search begins at no more than so many times the size that is asked about."""
MOST_MICRO_BATCHES = 64
"""A plan of more would have its GPU wait for launches."""


def fit_own(
    workload: OwnWorkload, budgets: Sequence[Budget], device_type: DeviceType = "cuda", *, search: bool = True,
    given: Callable[[], OwnModule] | None = None,
) -> OwnFit:  # fmt: skip
    """Predict the peak of a step, and for each budget say whether it fits; with `search` also what would make it fit,
    the largest batch and the longest sequence.

    given: returns a copy of a module that exists already, in place of what the workload's factory would make. Its
    sequences have one length.
    """
    watched = watch_own_step(workload, device_type, given=given)
    variants = _Search(watched.workload, device_type, given)
    return OwnFit(
        workload=watched.workload,
        estimate=_estimate(watched, device_type),
        verdicts=tuple(variants.verdict(watched, budget, search=search) for budget in budgets),
    )


def _estimate(watched: OwnWatchedStep, device_type: DeviceType) -> OwnEstimate:
    # On a CPU each request gets exactly the bytes that it asks for.
    found = replayed(watched, CachingAllocator() if device_type == "cuda" else RoundingAllocator(1))
    return OwnEstimate(
        peak_bytes=found.peak_bytes, peak_phase=found.peak_phase, categories=found.categories, memory=found.memory,
        unseen=_unseen(watched),
    )  # fmt: skip


def _unseen(watched: OwnWatchedStep) -> Unseen:
    watch = watched.watch
    return Unseen(
        convolutions=watch.convolutions,
        convolution_bytes=watch.convolution_bytes,
        custom=tuple(sorted(watch.custom)),
        at_most=tuple(sorted(watch.at_most)),
    )


class _Search:
    """Predicts variants of one step, and remembers the predictions."""

    def __init__(
        self, workload: OwnWorkload, device_type: DeviceType, given: Callable[[], OwnModule] | None = None
    ) -> None:
        self._workload, self._given = workload, given
        self._device_type: DeviceType = device_type
        self._watched: dict[tuple[bytes, int | None], OwnWatchedStep | None] = {}

    def verdict(self, watched: OwnWatchedStep, budget: Budget, *, search: bool) -> OwnVerdict:
        kept_free = _unseen(watched).kept_free(budget)
        fails_in = self._fails_in(watched, budget)
        longest, is_models = self._longest_sequence(watched, budget) if search else (None, False)
        return OwnVerdict(
            budget=budget, fits=fails_in is None, kept_free_bytes=kept_free, fails_in=fails_in,
            plans=tuple(self._plans(budget)) if search and fails_in is not None else (),
            largest_batch=self._largest_batch(watched, budget) if search else None,
            longest_sequence=longest, longest_is_the_models=is_models,
        )  # fmt: skip

    def _fails_in(self, watched: OwnWatchedStep, budget: Budget) -> str | None:
        """None if the step runs within the budget; else the phase of the first request that is refused."""
        limit = budget.usable_bytes - _unseen(watched).kept_free(budget)
        if self._device_type == "cpu":
            found = replayed(watched, RoundingAllocator(1))
            return None if found.peak_bytes <= limit else found.peak_phase
        try:
            replayed(watched, CachingAllocator(limit))
        except RefusedInPhase as refused:
            return str(refused)
        return None

    def _variant(self, workload: OwnWorkload, batch: int | None = None) -> OwnWatchedStep | None:
        """The step of a variant; None if it cannot be made."""
        key = (msgspec.json.encode(workload), batch)
        if key not in self._watched:
            try:
                self._watched[key] = watch_own_step(
                    workload, self._device_type, batch_size=batch, steps=STEPS_BEFORE, given=self._given
                )
            except InputError:
                self._watched[key] = None
        return self._watched[key]

    def _fits(self, workload: OwnWorkload, budget: Budget) -> bool:
        return self._runs(self._variant(workload), budget)

    def _runs(self, watched: OwnWatchedStep | None, budget: Budget) -> bool:
        return watched is not None and self._fails_in(watched, budget) is None

    def _runnable(self, lever: Lever) -> Lever:
        """The settings up to the strongest with which the step runs: a micro-batch may have too few rows."""
        count = len(lever)
        while count and self._variant(_with(self._workload, lever[count - 1 : count])) is None:
            count -= 1
        return lever[:count]

    def _plans(self, budget: Budget) -> Iterator[Plan]:
        """The single changes that suffice. If fewer than two do, pairs, triples and so on as well."""
        # A model without blocks cannot be checkpointed, and its other levers are tried all the same.
        levers = [runs for lever in _levers(self._workload) if (runs := self._runnable(lever))]
        found: list[tuple[Change, ...]] = []
        # Two levers may set one option; the later of them saves more, and overrides the other.
        strongest = [settings[-1] for settings in levers]
        if not levers or not self._fits(_with(self._workload, strongest), budget):
            return
        for count in range(1, len(levers) + 1):
            for several in itertools.combinations(levers, count):
                fields = {field for settings in several for field in settings[-1].fields}
                chosen = None
                if len(fields) == count and not any(_part_of(one, several) for one in found):
                    chosen = self._mildest(several, budget)
                if chosen is not None:
                    found.append(chosen)
                    peak = self._variant(_with(self._workload, chosen))
                    assert peak is not None
                    changes, peak_bytes = together(chosen), _estimate(peak, self._device_type).peak_bytes
                    yield Plan(change=changes.change, options=changes.options, peak_bytes=peak_bytes)
                if len(found) == MOST_PLANS:
                    return
            if len(found) >= 2:
                return

    def _mildest(self, levers: Sequence[Lever], budget: Budget) -> tuple[Change, ...] | None:
        if not self._fits(_with(self._workload, [settings[-1] for settings in levers]), budget):
            return None
        for chosen in itertools.product(*levers):
            if self._fits(_with(self._workload, chosen), budget):
                return chosen
        return None

    def _largest_batch(self, watched: OwnWatchedStep, budget: Budget) -> int | None:
        """The largest batch that fits. A batch with one sample more in each micro-batch does not fit."""
        start, unit = self._workload.model.batch_size, self._workload.accumulation
        if not start:
            return None
        return self._largest(start, unit, lambda size: self._variant(self._workload, size), watched, budget)

    def _longest_sequence(self, watched: OwnWatchedStep, budget: Budget) -> tuple[int | None, bool]:
        """The longest sequence that fits, where `seq_len` is an argument that changes the batch, and whether the model
        takes no longer one."""
        workload = self._workload
        if self._given is not None:
            return None, False
        start = workload.arguments.get("seq_len", default_of(workload.factory, "seq_len"))
        if not isinstance(start, int) or start < 1:
            return None, False

        def variant(length: int) -> OwnWatchedStep | None:
            return self._variant(
                msgspec.structs.replace(
                    workload, model=OwnModel(name=""), arguments={**workload.arguments, "seq_len": length}
                )
            )

        unit = SEQUENCE_UNIT if start % SEQUENCE_UNIT == 0 else 1
        shorter = variant(max(1, start // 2))
        if shorter is None or shorter.workload.model.inputs == watched.workload.model.inputs:
            return None, False  # an image model takes the argument and does not read it
        longest = self._largest(start, unit, variant, watched, budget)
        return longest, bool(longest) and variant(longest + unit) is None

    def _largest(
        self, start: int, unit: int, variant: Callable[[int], OwnWatchedStep | None], watched: OwnWatchedStep,
        budget: Budget,
    ) -> int | None:  # fmt: skip
        """The largest multiple of `unit` whose variant fits, looked for from `start` on; the next one does not fit."""
        limit = budget.usable_bytes - _unseen(watched).kept_free(budget)
        first = max(1, start // unit)
        half = variant(max(1, first // 2) * unit)
        if half is None:
            return None
        one, part = (_estimate(each, self._device_type).peak_bytes for each in (watched, half))
        by_unit = max(1, (one - part) // max(1, first - first // 2))
        # Peaks that barely differ foretell nothing, and a factory makes its batch in truth.
        guess = min(first + (limit - one) // by_unit, MOST_TIMES * first)
        found = _edge(guess, lambda units: self._runs(variant(units * unit), budget)) * unit
        # Beyond the end of the search nothing is known but that the size that was asked about fits.
        return max(found, start) if self._runs(watched, budget) else found


def _edge(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, or 0 if none does. The search begins at a guess, in strides that double."""
    low, high, stride = 0, MOST_SEARCHED, 1
    number = min(max(1, guess), MOST_SEARCHED - 1)
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        reached = low + stride if low else high - stride
        number = reached if low < reached < high else (low + high) // 2
        stride *= 2
    return low


def _levers(workload: OwnWorkload) -> Iterator[Lever]:
    """The levers of this workload, first those that cost nothing. The settings of each begin with the mildest."""
    if "optimizer" not in workload.by_factory and workload.phase == "train":
        if workload.optimizer in ("adamw-foreach", "adamw-loop"):
            yield (plans.FUSED_ADAMW,)
        if workload.optimizer != "adamw-bf16-state" and not PRECISIONS[workload.dtype].masters:
            yield (plans.STATE_IN_BF16,)
    if workload.dtype in ("fp32", "tf32"):
        yield (plans.AUTOCAST,)
    if workload.phase == "forward":
        return
    splits = plans.micro_batches(workload.model.batch_size or 1, workload.accumulation, MOST_MICRO_BATCHES)
    if splits:
        yield splits
    if workload.checkpointing == "none":
        yield (plans.SELECTIVE,)
        yield (plans.checkpointed_blocks(1),)


def _with(workload: OwnWorkload, changes: Sequence[Change]) -> OwnWorkload:
    return msgspec.structs.replace(workload, model=OwnModel(name=""), **together(changes).fields)


def _part_of(found: Sequence[Change], levers: Sequence[Lever]) -> bool:
    """Whether these levers include all changes of a plan that was found."""
    return all(any(change in settings for settings in levers) for change in found)
