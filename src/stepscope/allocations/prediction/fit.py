"""Whether a step fits into so much memory, and the cheapest changes that would make it fit.

There is one search, over what a Predictor says of a step: `SymbolicPredictor` where formulas know the model's sizes,
and `engine/fake_module.py` for a user's module, whose code runs on fake tensors.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from stepscope.allocations.prediction.estimate import (
    DeviceType,
    MemoryEstimate,
    estimate,
    estimate_quickly,
    runs_within,
)
from stepscope.allocations.prediction.layouts import sharded_peak
from stepscope.core.checkpointing import OFFLOAD, group_of, keeping, mixtures, most_that_fit, selective_of
from stepscope.core.device_spec import HOST_BYTES_PER_S, REPORTED_MIB, DeviceSpec, device_named, is_unified
from stepscope.core.errors import InputError
from stepscope.core.evidence import MemoryCategory, PhaseMemory
from stepscope.core.formulas.transformer import parameter_count, recomputed_flops, state_bytes, step_flops
from stepscope.core.parts import is_kept, scores_of
from stepscope.core.precisions import PRECISIONS, SCALED_MULTIPLE
from stepscope.core.run import Run
from stepscope.core.units import MIB, format_bytes
from stepscope.core.workloads import (
    OF_ONE_LAUNCH,
    OPTIMIZERS,
    ROUNDED_STATES,
    FactoryWorkload,
    TextbookWorkload,
    UserModel,
    WatchedWorkload,
    Workload,
    by_sizes,
)

# The memory that there is.

OUTSIDE_BYTES = 768 * MIB
"""What a process holds on a GPU beyond PyTorch's allocator: the CUDA context, and the libraries' code. 0.70 to 0.72 GiB
on an H200 under CUDA 13 (the out-of-memory messages in results/h200/limit-80GiB)."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a step may use."""

    total_bytes: int
    usable_bytes: int
    """Bytes of it that PyTorch's allocator may take."""
    said: str
    """Where the figure comes from, in words."""


def budget_of_memory(memory_bytes: int) -> Budget:
    """A budget for PyTorch's allocator alone, as `stepscope run --memory` enforces one."""
    source = f"{format_bytes(memory_bytes)} for PyTorch's allocator"
    return Budget(total_bytes=memory_bytes, usable_bytes=memory_bytes, said=source)


def budget_of_device(name: str, otherwise: str = "; or say --memory, as in --memory 80GiB") -> Budget:
    """The memory of a device of the datasheets. Raises InputError for a name that is not one of them, which ends with
    what to do otherwise."""
    return budget_of_spec(device_named(name, otherwise=otherwise))


def budget_of_spec(spec: DeviceSpec) -> Budget:
    """The memory of a device by its datasheet: what PyTorch may take of what the card reports."""
    total = spec.memory_bytes
    assert total is not None
    if is_unified(spec):
        said = (
            f"{format_bytes(total)} of {spec.name} ({spec.source}): what Metal takes by default, predicted as on CUDA"
        )
        return Budget(total_bytes=total, usable_bytes=total, said=said)
    reported = REPORTED_MIB.get(spec.name)
    of = f"; of {reported:,} MiB in nvidia-smi" if reported else ""
    return budget_of_total(total, f"{spec.name} ({spec.source}{of})")


def budget_of_total(total_bytes: int, device_name: str) -> Budget:
    """All memory of a device, less what a process holds beyond PyTorch's allocator."""
    return Budget(
        total_bytes=total_bytes,
        usable_bytes=max(0, total_bytes - OUTSIDE_BYTES),
        said=f"{format_bytes(total_bytes)} of {device_name}, less {format_bytes(OUTSIDE_BYTES)} of CUDA context",
    )


# What is predicted of a step.

KEPT_FREE = 0.04
"""Share of the memory that is left free beside a step on fake tensors. The prediction does not see memory that an
operator's kernel takes and gives back."""

KEPT_FREE_FOR_CUSTOM, KEPT_FREE_FOR_GROUPED = 0.1, 0.01
"""Shares of the memory that are left free in addition: if the step calls operators that are not PyTorch's, or a part of
it is compiled; and if FlexAttention's query heads share keys, of which a measured step needed 0.85 % more."""

OF_COMPILED_PARTS = (
    "What is under torch.compile is predicted as it runs without, but for blocks of PyTorch's parts alone, whose kept "
    f"tensors were measured. {100 * KEPT_FREE_FOR_CUSTOM:g} % more of the memory is kept free for what kernels take."
)

CONVOLUTION_WORKSPACE_BYTES = 72 * MIB
"""cuDNN's workspaces are counted as they were measured, but for rare shapes. For those the bytes by which the operands
of a convolution are more than what is counted, and so many besides, are kept free: none took more on an H200
(results/h200/convolutions/workspaces.json)."""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """What fake tensors do not show of a step, or count at its largest."""

    convolutions: int = 0
    """Calls of convolutions in three steps; on a GPU, cuDNN takes workspaces for them."""
    convolution_bytes: int = 0
    """The most bytes by which a convolution's operands and output are more than the workspace counted for it."""
    custom: tuple[str, ...] = ()
    """Operators that are not PyTorch's."""
    at_most: tuple[str, ...] = ()
    """Operators whose output was counted at its largest, since its shape depends on data: the peak is a bound."""
    recurrent: int = 0
    """Calls of recurrent layers in three steps, whose workspaces are counted at their largest: the peak is a bound."""
    grouped_flex: int = 0
    """Calls of FlexAttention in three steps whose keys several query heads share."""
    without_state_bytes: int = 0
    outside_bytes: int = 0
    """Bytes of parameters that the step trains and no module registers: of those that no optimizer has, and of all."""
    compiled: bool = False
    """Whether a part of the model is under torch.compile: it is predicted as it runs without."""
    bucket_bytes: int = 0
    """Bytes of DistributedDataParallel's buckets, counted among the gradients."""
    grads_in_buckets: bool = False
    """Whether the gradients lie in these buckets, and take no memory of their own."""

    def kept_free(self, budget: Budget) -> int:
        """Bytes of the memory that a step must leave free to fit."""
        share = KEPT_FREE + (KEPT_FREE_FOR_CUSTOM if self.custom or self.compiled else 0)
        share += KEPT_FREE_FOR_GROUPED * bool(self.grouped_flex)
        return int(budget.usable_bytes * share) + self.workspace_bytes

    @property
    def workspace_bytes(self) -> int:
        """The most that cuDNN takes for a convolution beyond what is counted; 0 where there is none."""
        return self.convolution_bytes + CONVOLUTION_WORKSPACE_BYTES if self.convolutions else 0


class FakeEstimate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The memory of one steady step that ran on fake tensors, as the allocator would count it."""

    peak_bytes: int
    peak_phase: str
    categories: dict[MemoryCategory, int]
    """Bytes that are alive at the peak, by category; they add up to `peak_bytes` exactly."""
    memory: PhaseMemory
    unseen: Unseen | None = None
    """What the prediction for a user's module leaves out; None for the textbook's model."""
    basis: str = ""
    """The measured run that the figures are of, and what was taken of it, in words; empty where a step was run."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes to a step that make it fit, as predicted."""

    change: str
    options: str
    """For the command line."""
    peak_bytes: int
    extra_flops_fraction: float | None = None
    """FLOPs that it runs again beyond what the workload does already, as a share of the step's model FLOPs; below zero
    where it runs fewer again. None where no formula counts them."""
    gpus: int | None = None
    """The GPUs that it needs; None for a user's module, of which plans keep to one."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a step that needs less memory, whether or not it is enough."""

    change: str
    options: str
    """For the command line."""
    peak_bytes: int
    """As predicted; of each GPU, where there are several."""
    fits: bool
    price: str
    """What it costs, in words, as far as it is known."""


W = TypeVar("W", TextbookWorkload, FactoryWorkload)
E = TypeVar("E", MemoryEstimate, FakeEstimate)


class Fit(msgspec.Struct, Generic[E], frozen=True, kw_only=True):
    """What a step needs, and whether it fits where a budget was named; with what would make it fit."""

    fits: bool | None = None
    """None without a budget, as all that depends on one."""
    peak_bytes: int
    categories: dict[MemoryCategory, int]
    """Bytes that are alive at the peak, by category."""
    plans: tuple[Plan, ...] = ()
    """The cheapest changes that would make it fit, the cheapest first; empty where it fits, or nothing helps."""
    ways: tuple[Way, ...] = ()
    """Single changes, the cheapest first, each with the memory that it leaves, whether or not it is enough; empty where
    the step fits, and for a user's module."""
    margin_bytes: int | None = None
    """What the budget leaves beyond the peak; below zero: what is missing."""
    kept_free_bytes: int | None = None
    """Bytes of the budget that must stay free."""
    fails_in: str | None = None
    """The phase in which the first request would be refused."""
    largest_batch: int | None = None
    """The largest batch that fits, in samples; 0 if not even one fits, None where it is not looked for."""
    longest_sequence: int | None = None
    """The longest sequence that fits, in tokens; 0 if none fits, None where it is not looked for."""
    longest_is_the_models: bool = False
    """Whether the model takes no longer sequence than that, whatever the memory."""
    not_searched: str = ""
    """Which of the two is not looked for, and why, in words; empty where both are."""
    is_bound: bool = False
    """Whether the peak is the highest that it can be, and the truth may be lower."""
    budget: Budget | None = None
    estimate: E
    workload: Workload
    """The workload; of a user's module, with the model as it was found."""


class Predictor(Protocol[W, E]):
    """Predicts the memory of one workload and of its variants."""

    workload: W
    estimate: E
    """All figures of the workload."""

    def peak(self, workload: W) -> int | None:
        """The peak of a variant in bytes, to compare choices; None where its step cannot run."""
        ...

    def fits(self, workload: W, budget: Budget, *, quickly: bool = False) -> bool:
        """Whether a variant fits. Quickly: without a closer look where it is a near thing."""
        ...

    def fails_in(self, budget: Budget) -> str | None:
        """None if the workload's step runs; else the phase in which the first request is refused."""
        ...

    def kept_free(self, budget: Budget) -> int:
        """Bytes of the budget that the workload's step must leave free."""
        ...

    def extra_flops(self, workload: W) -> float | None:
        """FLOPs that a variant runs again beyond the workload's, as in a Plan."""
        ...


def judge(
    predictor: Predictor[W, E],
    budget: Budget | None,
    *,
    search: bool = True,
    know: Callable[[Fit[E]], object] = lambda _: None,
) -> Fit[E]:
    """Whether the predictor's workload fits; with `search` also what would make it fit, where it does not.

    know: is called with what is known so far: the peak, and again with each plan that is found.
    """
    predicted = predictor.estimate
    unseen = predicted.unseen if isinstance(predicted, FakeEstimate) else None
    peak = Fit(
        peak_bytes=predicted.peak_bytes,
        categories=predicted.categories,
        is_bound=unseen is not None and bool(unseen.at_most or unseen.recurrent),
        estimate=predicted,
        workload=predictor.workload,
    )
    if budget is None:
        know(peak)
        return peak
    fails_in = predictor.fails_in(budget)
    judged = msgspec.structs.replace(
        peak,
        fits=fails_in is None,
        margin_bytes=budget.usable_bytes - predicted.peak_bytes,
        kept_free_bytes=predictor.kept_free(budget),
        fails_in=fails_in,
        budget=budget,
    )
    know(judged)
    if fails_in is None or not search:
        return judged
    found: list[Plan] = []

    def find(plan: Plan) -> None:
        found.append(plan)
        know(msgspec.structs.replace(judged, plans=tuple(found)))

    searched = _Search(predictor, budget, find)
    return msgspec.structs.replace(judged, plans=tuple(searched.plans()), ways=tuple(searched.ways()))


# Where formulas know the model's sizes.

SAFETY = 0.01
"""Share of the memory that is left free: a cache that is fragmented otherwise than predicted needs a little more."""

GRAPH_SAFETY = 0.02
"""Share of the memory that is left free beside a step that is replayed as CUDA graphs: what is reserved was predicted
0.06 to 1.4 % too low for those that were measured (results/h100-x2/parallel)."""

QUICK_SAFETY = 0.04
"""Share of the memory that a plan leaves free; larger, as its peak is predicted without the cache's remainders."""

AMPLE, AMPLE_BYTES = 0.4, 256 * MIB
"""Room beyond a plan's peak, as a share of it and in bytes, with which a training step fits however the cache is
fragmented: of 2524 random steps none needed as much, and 36 needed more than 0.3. Inference of long sequences may need
more than 0.75."""


class SymbolicPredictor:
    """Predicts a workload of which formulas know the sizes, without torch."""

    def __init__(self, workload: TextbookWorkload, device_type: DeviceType = "cuda") -> None:
        self.workload, self.estimate = workload, estimate(workload, device_type)
        self._peaks: dict[TextbookWorkload, int | None] = {}

    def peak(self, workload: TextbookWorkload) -> int | None:
        if workload not in self._peaks:
            try:
                self._peaks[workload] = estimate_quickly(workload).peak_bytes
            except InputError:
                self._peaks[workload] = None  # as products of 8 bits that take no such number of rows
        return self._peaks[workload]

    def fits(self, workload: TextbookWorkload, budget: Budget, *, quickly: bool = False) -> bool:
        if _states(workload) > budget.usable_bytes:
            return False  # most combinations of changes, which need not be simulated
        peak = self.peak(workload)
        if peak is None or quickly:
            return peak is not None and _fits_quickly(workload, peak, budget)
        usable = budget.usable_bytes * (1 - share_for_compiled(workload))
        ample = workload.phase == "train" and peak * (1 + AMPLE) + AMPLE_BYTES <= usable
        return ample or (_fits_quickly(workload, peak, budget) and will_fit(workload, budget))

    def fails_in(self, budget: Budget) -> str | None:
        return _fails_in(self.workload, budget, self.estimate)

    def kept_free(self, budget: Budget) -> int:
        return budget.usable_bytes - int(budget.usable_bytes * (1 - safety_of(self.workload)))

    def extra_flops(self, workload: TextbookWorkload) -> float:
        return (recomputed_flops(workload) - recomputed_flops(self.workload)) / step_flops(self.workload)


def fit(
    workload: TextbookWorkload, budget: Budget | None = None, device_type: DeviceType = "cuda"
) -> Fit[MemoryEstimate]:
    """Predict the step's peak, and say whether it fits a budget; where it does not, what would make it fit."""
    return judge(SymbolicPredictor(workload, device_type), budget)


def will_fit(workload: TextbookWorkload, budget: Budget, predicted: MemoryEstimate | None = None) -> bool:
    """Whether the step fits, without plans. Where its estimate is `predicted` already, most need no further step."""
    return _fails_in(workload, budget, predicted) is None


def will_surely_fit(workload: TextbookWorkload, budget: Budget) -> bool:
    """Whether the step fits, decided faster and a little more strictly, for searches."""
    return _fits_quickly(workload, estimate_quickly(workload).peak_bytes, budget)


def _fails_in(workload: TextbookWorkload, budget: Budget, predicted: MemoryEstimate | None) -> str | None:
    safe = int(budget.usable_bytes * (1 - safety_of(workload)))
    if predicted is not None and predicted.reserved_peak is not None and predicted.reserved_peak <= safe:
        return None
    # The cache holds more than is alive, and gives it back when memory runs out: whether that is enough, the allocator
    # says when it is played through with this limit.
    return runs_within(workload, safe)


def safety_of(workload: Workload) -> float:
    """Share of the memory that is left free beside a step whose sizes formulas know."""
    return (GRAPH_SAFETY if workload.graph == "step" else SAFETY) + share_for_compiled(workload)


def share_for_compiled(workload: Workload) -> float:
    """The part of it for compiled blocks: one measured step reserved 3.8 % more (results/h100-x2/parallel)."""
    return KEPT_FREE_FOR_CUSTOM if workload.compile == "blocks" else 0.0


def _states(workload: TextbookWorkload) -> int:
    """Bytes that a step holds at its end at least: parameters, and in training their gradients and the optimizer's
    state."""
    precision, trains = PRECISIONS[workload.dtype], workload.phase == "train"
    gradients = precision.weights if workload.phase != "forward" else 0
    of_optimizer = state_bytes(workload) if trains else 0
    return parameter_count(workload.model) * (precision.weights + gradients + of_optimizer)


def _fits_quickly(workload: Workload, peak_bytes: int, budget: Budget) -> bool:
    return peak_bytes * (1 + QUICK_SAFETY) <= budget.usable_bytes * (1 - share_for_compiled(workload))


# Changes to a step that may make it fit: the words and the option of each.


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change to a step: its words, the options that ask for it, and the fields of the workload that it sets."""

    change: str
    options: str
    fields: dict[str, str | int]


Lever = tuple[Change, ...]
"""Settings of one option, the mildest first."""


def setting(words: str, option: str, value: str | int) -> Change:
    """The change that one option makes."""
    field = option.removeprefix("--").replace("-", "_")
    return Change(change=words, options=f"{option} {value}", fields={field: value})


SELECTIVE = setting("checkpointing that keeps matrix products", "--checkpointing", "selective")
KEEP_ATTENTION = setting("checkpointing that keeps attention's outputs", "--checkpointing", "attention")

MOST_MICRO_BATCHES = 64
"""The most that are proposed for a user's module: with more, its GPU would wait for launches."""


def mixed(checkpointing: str) -> Change:
    """The checkpointing `selective-K`."""
    last = selective_of(checkpointing)
    words = "1 block" if last == 1 else f"{last} blocks"
    return setting(f"checkpointing that keeps matrix products of the last {words}", "--checkpointing", checkpointing)


def micro_batches(batch: int, accumulation: int, most: int) -> Lever:
    """The batch in more equal micro-batches than it has, up to the most."""
    counts = (n for n in divisors(batch) if accumulation < n <= most)
    return tuple(setting(f"{n} micro-batches of {batch // n}", "--accumulation", n) for n in counts)


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, the smallest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def together(changes: Iterable[Change]) -> Change:
    """Several changes as one."""
    parts = tuple(changes)
    return Change(
        change=", ".join(part.change for part in parts),
        options=" ".join(part.options for part in parts if part.options),
        fields={name: value for part in parts for name, value in part.fields.items()},
    )


def _levers(workload: Workload) -> Iterator[Lever]:
    """The levers that this workload has left, those that cost nothing first. Groups of
    checkpointed blocks are not among them (`_groups`): of those the search takes the best."""
    if workload.attention is not None and scores_of(workload.attention) == "whole":
        ours = (model := workload.sizes) and (model.window or model.softcap or model.sinks)  # sdpa masks, or refuses
        yield (setting("fused attention", "--attention", "flash" if ours else "sdpa"),)
    if workload.optimizer in ("adamw-foreach", "adamw-loop"):
        yield (setting("fused AdamW", "--optimizer", "adamw-fused"),)
    if workload.dtype in ("fp32", "tf32"):
        yield (setting("bf16 autocast", "--dtype", "bf16"),)
    by_kernel = workload.optimizer in OF_ONE_LAUNCH  # a graph holds no optimizer that counts its updates on the host
    one_by_one = workload.graph != "step" and PRECISIONS[workload.dtype].weights == 4
    name = "adamw-8bit" if by_kernel else "adamw-bf16-state"
    if workload.optimizer in set(OPTIMIZERS) - set(ROUNDED_STATES) and (by_kernel or one_by_one):
        yield (setting(f"optimizer state in {ROUNDED_STATES[name][0]}", "--optimizer", name),)
    if workload.phase == "forward":
        return
    batch = workload.batch_size or 1
    yield micro_batches(batch, workload.accumulation, batch if workload.sizes is not None else MOST_MICRO_BATCHES)
    if workload.checkpointing == "none":
        kept = workload.attention is not None and is_kept(workload.attention)
        yield (SELECTIVE, *map(mixed, mixtures(workload.layers)), KEEP_ATTENTION) if kept else (SELECTIVE,)


def _groups(workload: Workload) -> Lever:
    """Checkpointing of whole blocks, in groups that this workload does not have yet. Worth a try are groups from one
    block to about the square root of them, beyond which the groups outweigh what they save (Chen et al. 2016)."""
    if workload.phase == "forward":
        return ()
    if workload.sizes is not None:
        sizes = [k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k * k <= 2 * workload.layers]
    else:
        sizes = [1] if workload.checkpointing == "none" else []
    words = {k: "every block" if k == 1 else f"every {k} blocks together" for k in sizes}
    return tuple(
        setting(f"checkpointing of {words[k]}", "--checkpointing", f"every-{k}")
        for k in sizes
        if k != group_of(workload.checkpointing)
    )


_SHORTEST = 64
"""Tokens below which no shorter sequence is proposed."""


def _smaller(workload: Workload) -> Iterator[Lever]:
    """A smaller batch and a shorter sequence, halved again and again."""
    batches = [n for n in divisors(workload.batch_size or 1)[-2::-1] if n % workload.accumulation == 0]
    yield tuple(setting(f"a batch of {n}", "--batch-size", n) for n in batches)
    lengths = [(workload.seq_len or 0) >> halvings for halvings in range(1, 20)]
    yield tuple(setting(f"a sequence of {n}", "--seq-len", n) for n in lengths if n >= _SHORTEST)


def _offloads(workload: Workload) -> Lever:
    """Blocks whose kept products wait in the host's memory: a quarter of them, half, three quarters and all."""
    if workload.phase == "forward" or workload.checkpointing != "none" or not workload.one_by_one:
        return ()
    return tuple(
        setting(f"matrix products of {blocks} blocks kept on the host", "--checkpointing", f"{OFFLOAD}-{blocks}")
        for blocks in dict.fromkeys(max(1, workload.layers * quarters // 4) for quarters in (1, 2, 3, 4))
    )


def _price(change: Change, workload: Workload, extra_flops: float | None) -> str:
    """What a change costs, in words: FLOPs, steps and copies, which are known. Its time is not, before it is
    measured."""
    [(field, value)] = change.fields.items()
    changed = msgspec.structs.replace(workload, **change.fields)
    offloads = (changed.checkpointing or "").startswith(OFFLOAD)
    if offloads and (host_bytes := by_sizes(changed, lambda one: estimate_quickly(one).host_bytes)):
        seconds = workload.accumulation * host_bytes / HOST_BYTES_PER_S
        return f"{format_bytes(workload.accumulation * host_bytes)} copied, {seconds:.2g} s each way over PCIe 5.0"
    sizes = {"batch_size": workload.batch_size or 0, "seq_len": workload.seq_len or 0}
    times = f"{sizes[field] / int(value):.3g} times" if field in sizes else ""
    flops = f"{max(0.0, extra_flops or 0.0):.1%} more FLOPs".replace("%", " %")
    words = {
        "batch_size": f"{times} the steps for as many samples",
        "seq_len": f"a context {times} as short, and as many more steps",
        "accumulation": f"{value} forward and backward passes a step",
        "dtype": "products rounded to 16 bits",
        "checkpointing": flops if extra_flops else f"{flops}, elementwise operations run again",
    }
    return f"moments rounded to {ROUNDED_STATES[value][1]}" if value in ROUNDED_STATES else words.get(field, flops)


MOST_PLANS, MOST_GPUS = 6, 1024


class _Search(Generic[W]):
    """Tries levers alone, then together. The predictor remembers what it predicted."""

    def __init__(self, predictor: Predictor[W, Any], budget: Budget, find: Callable[[Plan], object]) -> None:
        """find: is called with each plan when it is found, which may yet be one of more blocks, or too many."""
        self._predictor, self._budget, self._find = predictor, budget, find
        self._levers: list[Lever] = []
        self._sufficient: list[tuple[Change, ...]] = []
        for lever in _levers(predictor.workload):
            self._try_alone(self._runnable(lever))
        best = self._best_group(_groups(predictor.workload))
        if best is not None:
            self._try_alone((best,))

    def _try_alone(self, lever: Lever) -> None:
        if lever:
            self._levers.append(lever)
            self._try((lever,))

    def _try(self, levers: tuple[Lever, ...]) -> None:
        changes = self._mildest(levers, self._sufficient)
        if changes is not None:
            self._sufficient.append(changes)
            self._find(self._plan(changes))

    def plans(self) -> list[Plan]:
        """The cheapest changes first: by FLOPs, then by how many they are; what needs more GPUs comes last.

        Single changes that suffice; where fewer than two do, pairs, triples and so on too, until some suffice.
        """
        # If the strongest settings together do not fit, no choice among them does.
        most = len(self._levers) if len(self._sufficient) < 2 and self._fits(self._strongest()) else 0
        for count in range(2, most + 1):
            if len(self._sufficient) >= 2:
                break
            for levers in itertools.combinations(self._levers, count):
                if len(self._sufficient) < MOST_PLANS or self._predictor.workload.sizes is not None:
                    self._try(levers)  # else the first are shown, since no formula tells their FLOPs apart
        plans = [self._plan(self._with_most_blocks(changes)) for changes in self._sufficient]
        plans.sort(key=lambda plan: (plan.extra_flops_fraction or 0, plan.options.count("--")))
        return plans[:MOST_PLANS] + self._sharded()

    def ways(self) -> Iterator[Way]:
        """Every single change, the cheapest first: what computes as much, what computes more, what makes smaller steps,
        and more GPUs. Of each the mildest setting that fits, or else the strongest. None for a user's module, whose
        sizes no option sets."""
        workload = self._predictor.workload
        if workload.sizes is None:
            return
        dearness = ("attention", "accumulation", "optimizer", "dtype", "checkpointing")
        levers = sorted(self._levers, key=lambda lever: dearness.index(next(iter(lever[0].fields))))
        offloads = self._runnable(_offloads(workload))
        if self._lowers(offloads[-1:], (SELECTIVE,)):  # what is kept is what fills it
            levers.append(offloads)
        for lever in filter(None, (*levers, *map(self._runnable, _smaller(workload)))):
            enough = next((one for one in lever if self._fits((one,), quickly=False)), None)
            chosen = (lever[-1],) if enough is None else self._with_most_blocks((enough,))
            plan = self._plan(chosen)
            if plan.peak_bytes < (self._peak(()) or 0):
                yield Way(
                    change=plan.change,
                    options=plan.options,
                    peak_bytes=plan.peak_bytes,
                    fits=enough is not None,
                    price=_price(chosen[0], workload, plan.extra_flops_fraction),
                )
        sharded = by_sizes(workload, lambda alone: self._over_gpus(alone, ()))
        if sharded is not None and sharded.gpus is not None:
            price = f"{sharded.gpus} GPUs of that peak, and what they send"
            yield Way(
                change=sharded.change, options=sharded.options, peak_bytes=sharded.peak_bytes, fits=True, price=price
            )

    def _sharded(self) -> list[Plan]:
        """The fewest GPUs that hold the step with its state sharded; alone, or beside other changes. No formula says it
        of a user's module."""
        if self._predictor.workload.sizes is None:
            return []
        for changes in ((), *((settings[-1],) for settings in self._levers), self._strongest()):
            if self._fits(changes):
                continue  # this one works without more GPUs
            plan = by_sizes(self._with(changes), lambda workload, changes=changes: self._over_gpus(workload, changes))
            if plan is not None:
                return [plan]
        return []

    def _over_gpus(self, workload: TextbookWorkload, changes: tuple[Change, ...]) -> Plan | None:
        """The plan with the fewest GPUs, by doubling; None where not even the most hold the step."""
        # What no step of FSDP2's has is left out.
        without = {"graph": "none"} if workload.graph == "step" else {}
        without |= {"projections": "apart"} if workload.projections == "joint" else {}
        workload = msgspec.structs.replace(workload, **without)
        for gpus in (2**n for n in range(1, MOST_GPUS.bit_length())):
            peak = sharded_peak(workload, gpus)
            if _fits_quickly(workload, peak, self._budget):
                words = f"parameters, gradients and optimizer state sharded over {gpus} GPUs"
                # Each has this batch, and --batch-size is that of all ranks together.
                options = f"--parallel fsdp2 --ranks {gpus} --batch-size {gpus * workload.batch_size}"
                options += "".join(f" --{option} {value}" for option, value in without.items())
                plan = self._plan((*changes, Change(change=words, options=options, fields={})))
                return msgspec.structs.replace(plan, peak_bytes=peak, gpus=gpus)
        return None

    def _runnable(self, lever: Lever) -> Lever:
        """The settings up to the strongest with which the step runs: a micro-batch may have too few rows."""
        while lever and self._peak(lever[-1:]) is None:
            lever = lever[:-1]
        return lever

    def _best_group(self, groups: Lever) -> Change | None:
        """The group of the lowest peak. Larger ones keep fewer inputs and hold more at once, so that the peak falls and
        then rises: the first that does not lower it ends the search."""
        best = None
        for change in groups:
            if self._peak((change,)) is None:
                break  # its step cannot run
            if best is not None and not self._lowers((change,), (best,)):
                break
            best = change
        return best

    def _strongest(self) -> tuple[Change, ...]:
        """The last setting of each lever; of two levers that set one option, the one that leaves less alive. Where they
        do not fit together, without those that only add to the peak: autocast's copies of weights may outweigh what
        they halve."""
        chosen: dict[str, Change] = {}
        for settings in self._levers:
            change = settings[-1]
            for field in change.fields:
                before = chosen.get(field)
                if before is None or not self._lowers((before,), (change,)):
                    chosen[field] = change
        strongest = tuple(chosen.values())
        for change in chosen.values():
            if self._fits(strongest):
                break
            without = tuple(other for other in strongest if other is not change)
            if self._lowers(without, strongest):
                strongest = without
        return strongest

    def _mildest(self, levers: tuple[Lever, ...], earlier: list[tuple[Change, ...]]) -> tuple[Change, ...] | None:
        """The mildest settings of these levers that fit; None where not even the strongest do, or some of them are what
        was found earlier, or go further."""
        fields = [field for settings in levers for field in settings[0].fields]
        if len(set(fields)) < len(fields):
            return None  # two settings of one option
        if not self._fits(tuple(settings[-1] for settings in levers)):
            return None
        for chosen in itertools.product(*levers):
            for changes in earlier:
                stronger = [lever[lever.index(one) :] for one in changes for lever in self._levers if one in lever]
                if all(any(one in settings for one in chosen) for settings in stronger):
                    break  # each of these changes, or a stronger setting of its lever, is among those chosen
            else:
                if self._fits(chosen, quickly=False):
                    return chosen
        return None

    def _with_most_blocks(self, chosen: tuple[Change, ...]) -> tuple[Change, ...]:
        """The changes with as many blocks that keep their products as fit: more than the quarters that were tried."""
        layers = self._predictor.workload.layers
        for place, change in enumerate(chosen):
            last = 0 if change is KEEP_ATTENTION else selective_of(change.fields.get("checkpointing"))
            if last is None:
                continue

            def of(blocks: int, place: int = place) -> tuple[Change, ...]:
                return (*chosen[:place], mixed(keeping(blocks, layers)), *chosen[place + 1 :])

            most = most_that_fit(last, layers, lambda blocks: self._fits(of(blocks), quickly=False))
            return of(most) if most > last else chosen
        return chosen

    def _plan(self, chosen: tuple[Change, ...]) -> Plan:
        changes, peak = together(chosen), self._peak(chosen)
        assert peak is not None
        return Plan(
            change=changes.change,
            options=changes.options,
            peak_bytes=peak,
            extra_flops_fraction=self._predictor.extra_flops(self._with(chosen)),
            gpus=1 if self._predictor.workload.sizes is not None else None,
        )

    def _lowers(self, changes: tuple[Change, ...], others: tuple[Change, ...]) -> bool:
        """Whether the peak with some changes is below that with others."""
        peak, other = self._peak(changes), self._peak(others)
        return peak is not None and (other is None or peak < other)

    def _peak(self, changes: tuple[Change, ...]) -> int | None:
        return self._predictor.peak(self._with(changes))

    def _fits(self, changes: tuple[Change, ...], *, quickly: bool = True) -> bool:
        return self._predictor.fits(self._with(changes), self._budget, quickly=quickly)

    def _with(self, changes: tuple[Change, ...]) -> W:
        return msgspec.structs.replace(self._predictor.workload, **together(changes).fields)


# The largest batch, and the longest sequence, that fits.

SEQUENCE_STEP = 64
"""Sequences are tried in multiples of this."""

MOST_SEARCHED = 2**20
"""Where the search for the largest number ends: one so large is a bound."""


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest sizes of one model that fit; 0 where not even the smallest does."""

    workload: TextbookWorkload
    """The sizes that stay fixed: the sequence length of the largest batch, the batch size of the longest sequence."""
    batch_size: int
    seq_len: int


def largest_that_fits(workload: TextbookWorkload, budget: Budget) -> Largest:
    """The largest batch at the workload's sequence length, and the longest sequence at its batch size."""
    multiple = SCALED_MULTIPLE if PRECISIONS[workload.dtype].scaled else 1
    micro = workload.accumulation * multiple // math.gcd(multiple, workload.seq_len)
    """The batch grows by so much at a time."""

    def with_size(field: str, step: int) -> int:
        def sized(n: int) -> TextbookWorkload:
            return msgspec.structs.replace(workload, **{field: n * step})

        guess = largest(1, lambda n: will_surely_fit(sized(n), budget))
        return step * largest(guess, lambda n: will_fit(sized(n), budget))

    batch, length = with_size("batch_size", micro), with_size("seq_len", SEQUENCE_STEP)
    return Largest(workload=workload, batch_size=batch, seq_len=length)


def largest(guess: int, fits: Callable[[int], bool]) -> int:
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


# What a run that measured a step tells of other cards and other batches, without its model.


def fit_of_run(run: Run, batch_size: int | None, budget: Budget | None) -> Fit[FakeEstimate]:
    """The measured peak of a run, or a bound of that with another batch, and whether it fits a budget; with the largest
    batch whose bound fits. Raises InputError for a run that has no measured peaks."""
    memory, workload = run.evidence.memory, run.workload
    own = workload.batch_size
    if memory is None or memory.allocated_peak is None:
        raise InputError(
            f"run {run.id} has no measured peaks, as of every CPU: give its model, as in --module train.py:make"
        )
    unit = workload.accumulation
    if batch_size is not None and (own is None or batch_size < 1 or batch_size % unit):
        of = f"{unit} micro-batches" if own else "no samples that were seen"
        raise InputError(f"--batch-size {batch_size} cannot be: a step of run {run.id} has {of}")
    share = 1.0 if batch_size is None or own is None else batch_size / own
    predicted = _of_batch(memory, share)
    if share != 1 and isinstance(workload, (FactoryWorkload, WatchedWorkload)):
        workload = msgspec.structs.replace(workload, model=_with_batch(workload.model, own, batch_size))
    device = run.environment.device_name if run.environment else "a device that is not known"
    measured = f"Run {run.id} measured {format_bytes(memory.allocated_peak)} with a batch of {own} on {device}."
    peaks = {name: getattr(predicted, f"{name}_peak") or 0 for name in ("forward", "backward", "optimizer", "turns")}
    phase = max(peaks, key=peaks.__getitem__)
    there = min(predicted.after_parameters or 0, peaks[phase])
    parameters = min(memory.parameter_bytes, there)
    categories: dict[MemoryCategory, int] = {
        "parameters": parameters, "there before": there - parameters, "temporaries": peaks[phase] - there,
    }  # fmt: skip
    bound = " What may grow with the batch is taken to, so that this is a bound." if share != 1 else ""
    estimate = FakeEstimate(
        peak_bytes=peaks[phase], peak_phase=phase, categories=categories, memory=predicted, basis=measured + bound
    )
    found = Fit(
        peak_bytes=peaks[phase], categories=categories, is_bound=share != 1, estimate=estimate, workload=workload
    )
    if budget is None:
        return found
    kept = int(budget.usable_bytes * KEPT_FREE)

    def fits(samples: int) -> bool:
        peak = _of_batch(memory, samples / (own or 1)).allocated_peak
        return peak is not None and peak + kept <= budget.usable_bytes

    runs = (share == 1 and (memory.reserved_peak or math.inf) <= budget.usable_bytes) or fits(batch_size or own or 1)
    return msgspec.structs.replace(
        found,
        fits=runs,
        fails_in=None if runs else phase,
        budget=budget,
        kept_free_bytes=kept,
        margin_bytes=budget.usable_bytes - peaks[phase],
        largest_batch=unit * largest(own // unit, lambda units: fits(units * unit)) if own else None,
    )


def _of_batch(memory: PhaseMemory, share: float) -> PhaseMemory:
    """A bound of a step's memory with a batch of another size, as a share of its own, but for the remainders of the
    allocator's cache.

    Of a larger one all beyond what is there before the step is taken to grow, but for the gradients that the optimizer
    reads. Of a smaller one the optimizer's peak is taken to stay, and in the other phases the gradients and a copy of
    each parameter.
    """
    if share == 1:
        return memory
    before, gradients = memory.after_parameters or 0, memory.gradient_bytes or memory.parameter_bytes
    both = memory.parameter_bytes + gradients
    same = {"forward": memory.parameter_bytes, "backward": both, "turns": both, "optimizer": math.inf}

    def of(phase: str, peak: int | None) -> int | None:
        if peak is None:
            return None
        beyond = max(0, peak - before)
        stays = min(beyond, same[phase] if share < 1 else gradients if phase == "optimizer" else 0)
        return int(before + stays + math.ceil((beyond - stays) * share)) if beyond else peak

    peaks = {f"{phase}_peak": of(phase, getattr(memory, f"{phase}_peak")) for phase in same}
    saved = memory.saved_for_backward
    return msgspec.structs.replace(
        memory,
        reserved_peak=None,
        saved_for_backward=None if saved is None else math.ceil(saved * max(1.0, share)),
        **peaks,
    )


def _with_batch(model: UserModel, own: int | None, batch_size: int | None) -> UserModel:
    """The model with another first size of the tensors of its batch that have that of the batch."""
    inputs = {
        name: msgspec.structs.replace(tensor, shape=(batch_size, *tensor.shape[1:]))
        if tensor.shape[:1] == (own,)
        else tensor
        for name, tensor in model.inputs.items()
    }
    return msgspec.structs.replace(model, inputs=inputs)
