"""Whether a step fits into so much memory, and the cheapest changes that would make it fit."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from stepscope.allocations.prediction.estimate import MemoryEstimate, estimate, estimate_quickly, runs_within
from stepscope.allocations.prediction.layouts import sharded_peak
from stepscope.core.attentions import is_kept, scores_of
from stepscope.core.checkpointing import group_of, keeping, mixtures, most_that_fit, selective_of
from stepscope.core.device_spec import DATASHEET, DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import recomputed_flops, step_flops
from stepscope.core.memory_notes import MemoryCategory
from stepscope.core.precisions import PRECISIONS, multiple_of_rows
from stepscope.core.units import MIB, format_bytes
from stepscope.core.workloads import TextbookWorkload

# Changes to a step that may make it fit: the words and the option of each, and plans of several.


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change to a step: its words, the options that ask for it, and the fields of the workload that it sets."""

    change: str
    options: str
    fields: dict[str, str | int]


Lever = tuple[Change, ...]
"""Settings of one option, the mildest first."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to a step that make it fit, as predicted."""

    change: str
    options: str
    """For the command line."""
    peak_bytes: int


def setting(words: str, option: str, value: str | int) -> Change:
    """The change that one option makes."""
    return Change(
        change=words, options=f"{option} {value}", fields={option.removeprefix("--").replace("-", "_"): value}
    )


FUSED_ADAMW = setting("fused AdamW", "--optimizer", "adamw-fused")
STATE_IN_BF16 = setting("optimizer state in bf16", "--optimizer", "adamw-bf16-state")
AUTOCAST = setting("bf16 autocast", "--dtype", "bf16")
SELECTIVE = setting("checkpointing that keeps matrix products", "--checkpointing", "selective")
KEEP_ATTENTION = setting("checkpointing that keeps attention's outputs", "--checkpointing", "attention")


def mixed(checkpointing: str) -> Change:
    """The checkpointing `selective-K`."""
    last = selective_of(checkpointing)
    words = "1 block" if last == 1 else f"{last} blocks"
    return setting(f"checkpointing that keeps matrix products of the last {words}", "--checkpointing", checkpointing)


def checkpointed_blocks(k: int) -> Change:
    """Checkpointing of whole blocks, k together."""
    words = "checkpointing of every block" if k == 1 else f"checkpointing of every {k} blocks together"
    return setting(words, "--checkpointing", f"every-{k}")


def micro_batches(batch: int, accumulation: int, most: int | None = None) -> Lever:
    """The batch in more equal micro-batches than it has."""
    small = [d for d in range(1, math.isqrt(batch) + 1) if batch % d == 0]
    divisors = sorted({*small, *(batch // d for d in small)})
    return tuple(
        setting(f"{n} micro-batches of {batch // n}", "--accumulation", n)
        for n in divisors
        if accumulation < n <= (most or batch)
    )


def together(changes: Iterable[Change]) -> Change:
    """Several changes as one."""
    parts = tuple(changes)
    return Change(
        change=", ".join(part.change for part in parts),
        options=" ".join(part.options for part in parts if part.options),
        fields={name: value for part in parts for name, value in part.fields.items()},
    )


OUTSIDE_BYTES = 768 * MIB
"""What a process holds on a GPU beyond PyTorch's allocator: the CUDA context, and the libraries' code. 0.70 to 0.72 GiB
on an H200 under CUDA 13 (the out-of-memory messages in results/h200/limit-80GiB)."""

SAFETY = 0.01
"""Share of the memory that is left free: a cache that is fragmented otherwise than predicted needs a little more."""

QUICK_SAFETY = 0.04
"""Share of the memory that a plan leaves free; larger, as its peak is predicted without the cache's remainders."""

AMPLE, AMPLE_BYTES = 0.4, 256 * MIB
"""Room beyond a plan's peak, as a share of it and in bytes, with which a training step fits however the cache is
fragmented: of 2524 random steps none needed as much, and 36 needed more than 0.3. Inference of long sequences may need
more than 0.75."""

MOST_PLANS = 6
MOST_GPUS = 1024


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a step may use."""

    total_bytes: int
    usable_bytes: int
    """Bytes of it that PyTorch's allocator may take."""
    said: str
    """Where the figure comes from, in words."""


class TextbookPlan(Plan, frozen=True, kw_only=True):
    """A plan for the textbook's step, with what it costs."""

    extra_flops_fraction: float
    """FLOPs that it runs again beyond what the workload does already, as a share of the step's model FLOPs; below zero
    where it runs fewer again."""
    gpus: int = 1


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a step fits, and what would make it fit."""

    fits: bool
    budget: Budget
    estimate: MemoryEstimate
    margin_bytes: int
    """What the budget leaves beyond the peak; below zero: what is missing."""
    fails_in: str | None = None
    """The phase in which the first request would be refused."""
    plans: tuple[TextbookPlan, ...] = ()
    """The cheapest changes that would make it fit, the cheapest first; empty where it fits, or nothing helps."""

    @property
    def categories(self) -> dict[MemoryCategory, int]:
        return self.estimate.categories


def budget_of_memory(memory_bytes: int) -> Budget:
    """A budget for PyTorch's allocator alone, as `stepscope run --memory` enforces one."""
    return Budget(
        total_bytes=memory_bytes,
        usable_bytes=memory_bytes,
        said=f"{format_bytes(memory_bytes)} for PyTorch's allocator",
    )


def budget_of_device(name: str) -> Budget:
    """The memory of a device of the datasheets. Raises InputError for a name that is not one of them."""
    spec = device_named(name)
    assert spec.memory_bytes is not None
    return budget_of_total(spec.memory_bytes, f"{spec.name} ({spec.source})")


def budget_of_total(total_bytes: int, device_name: str) -> Budget:
    """All memory of a device, less what a process holds beyond PyTorch's allocator."""
    return Budget(
        total_bytes=total_bytes,
        usable_bytes=max(0, total_bytes - OUTSIDE_BYTES),
        said=f"{format_bytes(total_bytes)} of {device_name}, less {format_bytes(OUTSIDE_BYTES)} of CUDA context",
    )


def fit(workload: TextbookWorkload, budget: Budget) -> Fit:
    """Predict the step's peak and say whether it fits; where it does not, what would make it fit."""
    predicted = estimate(workload)
    fails_in = _fails_in(workload, predicted, budget)
    return Fit(
        fits=fails_in is None,
        budget=budget,
        estimate=predicted,
        margin_bytes=budget.usable_bytes - predicted.peak_bytes,
        fails_in=fails_in,
        plans=() if fails_in is None else tuple(_plans(workload, budget)),
    )


def will_fit(workload: TextbookWorkload, budget: Budget, predicted: MemoryEstimate | None = None) -> bool:
    """Whether the step fits, without plans. Where its estimate is `predicted` already, most need no further step."""
    if predicted is not None:
        return _fails_in(workload, predicted, budget) is None
    return runs_within(workload, _safe_bytes(budget)) is None


def will_surely_fit(workload: TextbookWorkload, budget: Budget) -> bool:
    """Whether the step fits, decided faster and a little more strictly, for searches."""
    return _fits_quickly(estimate_quickly(workload).peak_bytes, budget)


def _fails_in(workload: TextbookWorkload, predicted: MemoryEstimate, budget: Budget) -> str | None:
    safe = _safe_bytes(budget)
    if predicted.reserved_peak is not None and predicted.reserved_peak <= safe:
        return None
    # The cache holds more than is alive, and gives it back when memory runs out: whether that is enough, the allocator
    # says when it is played through with this limit.
    return runs_within(workload, safe)


def _safe_bytes(budget: Budget) -> int:
    return int(budget.usable_bytes * (1 - SAFETY))


def _fits_quickly(peak_bytes: int, budget: Budget) -> bool:
    return peak_bytes * (1 + QUICK_SAFETY) <= budget.usable_bytes


def _levers(workload: TextbookWorkload) -> list[Lever]:
    """The levers that this workload has left, those that cost nothing first. Groups of
    checkpointed blocks are not among them (`_groups`): of those the search takes the best."""
    levers: list[Lever] = []
    if scores_of(workload.attention) == "whole":
        levers.append((setting("fused attention", "--attention", "sdpa"),))
    if workload.optimizer in ("adamw-foreach", "adamw-loop"):
        levers.append((FUSED_ADAMW,))
    if workload.dtype in ("fp32", "tf32"):
        levers.append((AUTOCAST,))
    if workload.optimizer not in (None, "adamw-bf16-state") and PRECISIONS[workload.dtype].weights == 4:
        levers.append((STATE_IN_BF16,))
    if workload.phase == "forward":
        return levers
    splits = _that_run(workload, micro_batches(workload.batch_size, workload.accumulation))
    if splits:
        levers.append(splits)
    if workload.checkpointing == "none":
        smaller = (*map(mixed, mixtures(workload.model.layers)), KEEP_ATTENTION) if is_kept(workload.attention) else ()
        levers.append((SELECTIVE, *smaller))
    return levers


def _that_run(workload: TextbookWorkload, splits: Lever) -> Lever:
    """The splits into micro-batches whose products have as many rows as they take."""

    def rows(split: Change) -> int:
        return msgspec.structs.replace(workload, **split.fields).micro_batch_size * workload.seq_len

    return tuple(split for split in splits if rows(split) % multiple_of_rows(workload.dtype) == 0)


def _groups(workload: TextbookWorkload) -> Lever:
    """Checkpointing of whole blocks, in groups that this workload does not have yet."""
    if workload.phase == "forward":
        return ()
    sizes = [k for k in _group_sizes(workload.model.layers) if k != group_of(workload.checkpointing)]
    return tuple(map(checkpointed_blocks, sizes))


def _group_sizes(layers: int) -> list[int]:
    """Groups worth a try: from one block to about the square root of them, beyond which the groups outweigh what they
    save (Chen et al. 2016)."""
    return [k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k * k <= 2 * layers]


def _plans(workload: TextbookWorkload, budget: Budget) -> Iterator[TextbookPlan]:
    """The cheapest changes first: by FLOPs, then by how many they are; what needs more GPUs comes last."""
    search = _Search(workload, budget)
    yield from search.plans()
    plan = search.sharded()
    if plan is not None:
        yield plan


class _Search:
    """Tries levers alone, then together, and remembers every prediction."""

    def __init__(self, workload: TextbookWorkload, budget: Budget) -> None:
        self._workload, self._budget = workload, budget
        self._flops = step_flops(workload)
        self._known: dict[TextbookWorkload, int] = {}
        self._levers = _levers(workload)
        best = self._best_group(_groups(workload))
        if best is not None:
            self._levers.append((best,))

    def plans(self) -> list[TextbookPlan]:
        """Single changes that suffice; where fewer than two do, pairs, triples and so on too, until some suffice."""
        found: list[TextbookPlan] = []
        if not self._everything_helps():
            return found
        for count in range(1, len(self._levers) + 1):
            for levers in itertools.combinations(self._levers, count):
                plan = self._try(levers, found)
                if plan is not None:
                    found.append(plan)
            if len(found) >= 2:
                break
        return sorted(found, key=lambda plan: (plan.extra_flops_fraction, plan.options.count("--")))[:MOST_PLANS]

    def sharded(self) -> TextbookPlan | None:
        """The fewest GPUs, by doubling, that hold the step with its state sharded; alone, or beside other changes."""
        for changes in ((), *((settings[-1],) for settings in self._levers), self._strongest()):
            if self._fits_quickly(changes):
                continue  # this one works without more GPUs
            workload = self._with(changes)
            gpus = 2
            while gpus <= MOST_GPUS and not _fits_quickly(sharded_peak(workload, gpus), self._budget):
                gpus *= 2
            if gpus <= MOST_GPUS:
                words = f"parameters, gradients and optimizer state sharded over {gpus} GPUs"
                # Each has this batch, and --batch-size is that of all ranks together.
                options = f"--parallel fsdp2 --ranks {gpus} --batch-size {gpus * workload.batch_size}"
                plan = together((*changes, Change(change=words, options=options, fields={})))
                return TextbookPlan(
                    change=plan.change,
                    options=plan.options,
                    peak_bytes=sharded_peak(workload, gpus),
                    extra_flops_fraction=self._extra(workload),
                    gpus=gpus,
                )
        return None

    def _everything_helps(self) -> bool:
        """Whether the strongest settings together fit: if not, no choice among them does."""
        return self._fits_quickly(self._strongest())

    def _strongest(self) -> tuple[Change, ...]:
        """The last setting of each lever; of two levers that set one option, the one that leaves less alive. Where they
        do not fit together, without those that only add to the peak: autocast's copies of weights may outweigh what
        they halve."""
        chosen: dict[str, Change] = {}
        for settings in self._levers:
            change = settings[-1]
            for field in change.fields:
                before = chosen.get(field)
                if before is None or self._peak(self._with((change,))) <= self._peak(self._with((before,))):
                    chosen[field] = change
        strongest = tuple(chosen.values())
        for change in chosen.values():
            if self._fits_quickly(strongest):
                break
            without = tuple(other for other in strongest if other is not change)
            if self._peak(self._with(without)) < self._peak(self._with(strongest)):
                strongest = without
        return strongest

    def _fits_quickly(self, changes: tuple[Change, ...]) -> bool:
        return _fits_quickly(self._peak(self._with(changes)), self._budget)

    def _best_group(self, groups: Lever) -> Change | None:
        """The group of the lowest peak. Larger ones keep fewer inputs and hold more at once, so that the peak falls and
        then rises: the first that does not lower it ends the search."""
        best = None
        for change in groups:
            if best is not None and self._peak(self._with((change,))) >= self._peak(self._with((best,))):
                break
            best = change
        return best

    def _try(self, levers: tuple[Lever, ...], found: list[TextbookPlan]) -> TextbookPlan | None:
        """The mildest settings of these levers that fit; None where not even the strongest do, or an earlier plan does
        with some of them."""
        fields = [field for settings in levers for field in settings[0].fields]
        if len(set(fields)) < len(fields):
            return None  # two settings of one option
        if not self._fits_quickly(tuple(settings[-1] for settings in levers)):
            return None
        for chosen in itertools.product(*levers):
            plan = self._plan(chosen)
            if not any(_within(earlier, plan) for earlier in found) and self._fits(self._with(chosen)):
                return self._plan(self._with_most_blocks(chosen))
        return None

    def _plan(self, chosen: tuple[Change, ...]) -> TextbookPlan:
        workload, changes = self._with(chosen), together(chosen)
        return TextbookPlan(
            change=changes.change, options=changes.options, peak_bytes=self._peak(workload),
            extra_flops_fraction=self._extra(workload),
        )  # fmt: skip

    def _with_most_blocks(self, chosen: tuple[Change, ...]) -> tuple[Change, ...]:
        """The changes with as many blocks that keep their products as fit: more than the quarters that were tried."""
        layers = self._workload.model.layers
        for place, change in enumerate(chosen):
            kept = change.fields.get("checkpointing")
            last = 0 if change is KEEP_ATTENTION else selective_of(kept)
            if last is None:
                continue

            def of(blocks: int, place: int = place) -> tuple[Change, ...]:
                return (*chosen[:place], mixed(keeping(blocks, layers)), *chosen[place + 1 :])

            most = most_that_fit(last, layers, lambda blocks: self._fits(self._with(of(blocks))))
            return of(most) if most > last else chosen
        return chosen

    def _fits(self, workload: TextbookWorkload) -> bool:
        """The quick verdict, and where it is a near thing the whole one: no plan is offered that would not run."""
        peak, budget = self._peak(workload), self._budget
        ample = workload.phase == "train" and peak * (1 + AMPLE) + AMPLE_BYTES <= budget.usable_bytes
        return ample or (_fits_quickly(peak, budget) and will_fit(workload, budget))

    def _extra(self, workload: TextbookWorkload) -> float:
        return (recomputed_flops(workload) - recomputed_flops(self._workload)) / self._flops

    def _with(self, changes: tuple[Change, ...]) -> TextbookWorkload:
        return msgspec.structs.replace(self._workload, **together(changes).fields)

    def _peak(self, workload: TextbookWorkload) -> int:
        if workload not in self._known:
            self._known[workload] = estimate_quickly(workload).peak_bytes
        return self._known[workload]


def _within(plan: Plan, other: Plan) -> bool:
    """Whether another plan does all that this one does, and more."""
    return set(plan.change.split(", ")) < set(other.change.split(", "))


def _is_meant(spec: DeviceSpec, wanted: list[str]) -> bool:
    """Whether each word begins a word of the device's name: h200 is no GH200."""
    words = spec.name.lower().replace("-", " ").split()
    return all(any(word.startswith(begin) for word in words) for begin in wanted)


_OR_MEMORY = "; or say --memory, as in --memory 80GiB"
_PLAIN = {"h100": "NVIDIA H100 80GB HBM3"}
"""The device that a plain name means, where its variants differ in memory: the one that most have."""


def device_named(name: str, *, otherwise: str = _OR_MEMORY) -> DeviceSpec:
    """The device of the datasheets that a name means. Raises InputError where it is none of them, or several that
    differ in memory."""
    if name.lower() in _PLAIN:
        return DATASHEET[_PLAIN[name.lower()]]
    wanted = name.lower().replace("-", " ").split()
    found = [spec for spec in DATASHEET.values() if _is_meant(spec, wanted)]
    found = [spec for spec in found if spec.name.lower() == name.lower()] or found
    if wanted and len({spec.memory_bytes for spec in found}) == 1:
        return found[0]  # or another of the same memory: nothing else is asked of it
    known = ", ".join(spec.name for spec in (found if wanted and found else DATASHEET.values()))
    what = "matches several devices" if wanted and found else "is in no datasheet that stepscope has"
    raise InputError(f"--device {name!r} {what}: choose one of {known}{otherwise}")


# Searches the largest batch, and the longest sequence, that fits.


SEQUENCE_STEP = 64
"""Sequences are tried in multiples of this."""

_MOST = 2**20


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sizes of one model that fit; 0 where not even the smallest does."""

    workload: TextbookWorkload
    """The sizes that stay fixed: the sequence length of the largest batch, the batch size of the longest sequence."""
    batch_size: int
    seq_len: int


def largest_that_fits(workload: TextbookWorkload, budget: Budget) -> Largest:
    """The largest batch at the workload's sequence length, and the longest sequence at its batch size."""
    multiple = multiple_of_rows(workload.dtype)
    micro = workload.accumulation * multiple // math.gcd(multiple, workload.seq_len)
    """The batch grows by so much at a time."""

    def with_batch(n: int) -> TextbookWorkload:
        return msgspec.structs.replace(workload, batch_size=n * micro)

    def with_length(n: int) -> TextbookWorkload:
        return msgspec.structs.replace(workload, seq_len=n * SEQUENCE_STEP)

    return Largest(
        workload=workload,
        batch_size=_largest(with_batch, budget) * micro,
        seq_len=_largest(with_length, budget) * SEQUENCE_STEP,
    )


def _largest(sized: Callable[[int], TextbookWorkload], budget: Budget) -> int:
    """The largest n whose workload fits: found with the quick prediction, and moved by the whole one."""
    found = _climb(0, lambda n: will_surely_fit(sized(n), budget))
    # Near the limit the cache may be cut up for one size and not for a larger one, so no step down is a long one.
    stride = max(1, found // 256)
    while found > 0 and not will_fit(sized(found), budget):
        found = max(0, found - stride)
    return _climb(found, lambda n: will_fit(sized(n), budget))


def _climb(low: int, fits: Callable[[int], bool]) -> int:
    """The last n from `low` on that fits, in strides that double and then halve; `low` itself is not asked."""
    stride = 1
    while low + stride <= _MOST and fits(low + stride):
        low, stride = low + stride, 2 * stride
    while stride > 1:
        stride //= 2
        if low + stride <= _MOST and fits(low + stride):
            low += stride
    return low
