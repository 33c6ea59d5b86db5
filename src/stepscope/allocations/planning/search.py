"""The search: every layout of a step, whether it fits, how long it takes, and which is best."""

import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from stepscope.allocations.planning.times import Clock, Rates, StepTime, rates_of
from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import (
    QUICK_SAFETY,
    Budget,
    divisors,
    safety_of,
    share_for_compiled,
    will_fit,
)
from stepscope.allocations.prediction.layouts import RankMemory, RankNeeds, memory_of_ranks
from stepscope.core.checkpointing import KEEPING, keeping, most_that_fit, offload_of, spans_of
from stepscope.core.device_spec import DeviceSpec
from stepscope.core.formulas.planned_model import PlannedModel, local_keys
from stepscope.core.layout import SHARDINGS, Layout, layout_of
from stepscope.core.networks import Network
from stepscope.core.parts import REFERENCE, is_kept, scores_of
from stepscope.core.units import GIB
from stepscope.core.workloads import TextbookWorkload

# Every layout of a step over so many ranks, and why a combination is none.


CHECKPOINTINGS = ("none", "selective", "every-1")
"""The checkpointing that is tried unasked, what computes least again first. Where `selective` does not fit, a search
tries `selective-K` and `attention` besides."""
MOST_SEQUENCES = 8
"""The most sequences of a micro-batch that are tried."""
CHUNKS = (1, 2, 4, 8)
"""Pieces of the model on a pipeline rank that are tried."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is asked: a step, its ranks, and what of the layout is settled."""

    workload: TextbookWorkload
    """The whole step; its accumulation and checkpointing are not read."""
    model: PlannedModel
    ranks: int
    node: int
    """GPUs of a node."""
    fixed: Mapping[str, int | str] = {}
    checkpointings: tuple[str, ...] = ()
    """The checkpointings that the question settles, if any."""

    @property
    def what_would_fit(self) -> str:
        """What needs less memory, in words: first what the question itself settles."""
        changes = ["another --checkpointing"] if self.checkpointings and "every-1" not in self.checkpointings else []
        changes += [] if is_kept(self.workload.attention) else ["--attention flash"]
        usual = "more ranks, a shorter sequence, optimizer state in 16 bits or more memory is needed"
        return f"{' or '.join(changes)} may fit; else {usual}" if changes else usual

    @property
    def tried(self) -> tuple[str, ...]:
        """The checkpointing of its layouts, but for mixtures."""
        return self.checkpointings or CHECKPOINTINGS

    @property
    def mixes(self) -> bool:
        """Whether mixtures of `selective` and `attention` are tried where `selective` does not fit."""
        return not self.checkpointings and is_kept(self.workload.attention)

    @property
    def offloads(self) -> bool:
        """Whether blocks that offload are tried there, too."""
        return self.mixes and self.workload.one_by_one


class Space:
    """The grids and layouts of a question. `refused` counts the grids that cannot be, by the reason."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.refused: Counter[str] = Counter()
        self.grids_seen = 0

    def grids(self) -> Iterator[Layout]:
        """Every way to share out the ranks that can be, as a layout of their dimensions alone."""
        question = self.question
        for tensor in self._choices("tensor", question.ranks):
            for context in self._choices("context", question.ranks // tensor):
                for pipeline in self._choices("pipeline", question.ranks // tensor // context):
                    data = question.ranks // tensor // context // pipeline
                    if question.fixed.get("data", data) != data:
                        continue
                    for expert in self._choices("expert", data * context if question.model.experts > 1 else 1):
                        grid = Layout(tensor=tensor, context=context, pipeline=pipeline, data=data, expert=expert)
                        self.grids_seen += 1
                        reason = self._impossible(grid)
                        if reason:
                            self.refused[reason] += 1
                        else:
                            yield grid

    def layouts(self, grid: Layout) -> Iterator[list[Layout]]:
        """The layouts of a grid, those together that differ only in micro-batch and checkpointing."""
        question, fixed = self.question, self.question.fixed
        per_rank = question.workload.batch_size // grid.data
        sizes = [size for size in divisors(per_rank) if fixed.get("micro_batch", size) == size <= MOST_SEQUENCES]
        sizes = sizes or [int(fixed.get("micro_batch", 1))] * (per_rank % int(fixed.get("micro_batch", 1)) == 0)
        tried = CHUNKS if "chunks" not in fixed else (int(fixed["chunks"]),)
        fitting = [count for count in tried if count * grid.pipeline <= question.model.config.layers]
        for chunks in fitting if grid.pipeline > 1 else [1]:
            for sharding, shard in self._shardings(grid):
                candidates = [
                    msgspec.structs.replace(
                        grid, sharding=sharding, shard=shard, chunks=chunks, micro_batch=size,
                        micro_batches=per_rank // size, checkpointing=checkpointing,
                    )
                    for size in sizes
                    if chunks == 1 or per_rank // size % grid.pipeline == 0
                    for checkpointing in question.tried
                ]  # fmt: skip
                if candidates:
                    yield candidates

    def _choices(self, dimension: str, most: int) -> list[int]:
        return [one for one in divisors(most) if self.question.fixed.get(dimension, one) == one]

    def _shardings(self, grid: Layout) -> list[tuple[str, int]]:
        fixed, width = self.question.fixed, grid.data * grid.context
        if width == 1:
            return [("ddp", 1)]
        inside = max(d for d in divisors(width) if d * grid.tensor <= max(self.question.node, grid.tensor))
        shardings: list[tuple[str, int]] = []
        for name, sharding in SHARDINGS.items():
            if fixed.get("sharding", name) != name or not (sharding.usual or "sharding" in fixed):
                continue
            if name == "zero1-master" and self.question.workload.dtype not in ("bf16", "fp16"):
                continue  # without a compute dtype of its own it is zero1
            groups = (1,) if not sharding.shares else (width, inside) if sharding.parameters else (width,)
            if "shard" in fixed and sharding.shares:
                groups = (int(fixed["shard"]),)
            shardings += [(name, size) for size in dict.fromkeys(groups) if size > 1 or not sharding.shares]
        return shardings

    def _impossible(self, grid: Layout) -> str:
        """Why there is no such grid, or nothing."""
        question, config, tensor, context = self.question, self.question.model.config, grid.tensor, grid.context
        length, keys = question.workload.seq_len, config.key_heads
        whole_scores = scores_of(question.workload.attention) == "whole"
        spans = [spans_of(one, config.layers) for one in question.tried]
        unlike = any(len(each) > 1 or any(span.on_host for span in each) for each in spans)
        nested = any(span.calls for each in spans for span in each)
        # Each reason with what is true where it holds.
        faults: tuple[tuple[str, object], ...] = (
            ("tensor parallel ranks do not divide the heads", config.heads % tensor),
            ("tensor parallel ranks do not divide the heads of keys", keys % tensor and tensor % keys),
            ("tensor parallel ranks do not divide d_ff", config.d_ff % tensor),
            ("context parallel needs fused attention", context > 1 and whole_scores),
            (
                "context parallel ranks do not divide the sequence into two equal pieces each",
                context > 1 and length % (2 * context * tensor),
            ),
            ("a fused loss takes the whole vocabulary", tensor > 1 and question.workload.loss != REFERENCE),
            ("tensor parallel ranks do not divide the sequence", tensor > 1 and length % (context * tensor)),
            ("more pipeline stages than blocks", grid.pipeline > config.layers),
            ("checkpointing that nests calls is for a step of one process (choose every-1)", nested),
            (
                "blocks that keep unlike, or offload (--checkpointing), are not divided among pipeline stages",
                grid.pipeline > 1 and unlike,
            ),
            ("a rank's part of d_model, keys, d_ff or the sequence is no whole blocks (--recipe)", self._uneven(grid)),
            ("expert parallel ranks do not divide the experts", question.model.experts % grid.expert),
            ("data parallel ranks do not divide the batch", question.workload.batch_size % grid.data),
        )
        return next((reason for reason, fault in faults if fault), "")

    def _uneven(self, grid: Layout) -> bool:
        """Whether blocks of operands do not divide what a rank has of them."""
        model, tensor = self.question.model, grid.tensor
        tokens = self.question.workload.seq_len // grid.context // tensor
        sizes = (model.config.d_model // tensor, local_keys(model.config, tensor), model.config.d_ff // tensor, tokens)
        return model.form is not None and model.form.unfit(*sizes) is not None


# Checkpointing between `selective` and `attention`: how many blocks can keep what their products return.
#
# A block that keeps the outputs of its products needs more memory than one that keeps those of attention alone, and
# runs no product again. So of the mixtures of a layout one is worth planning: the one with most such blocks that still
# fits, which may be none of them.
#
# A rank's peak is nearly a line over their number, from the peak of `attention` to that of `selective`. The line says
# where to look, and two peaks there mostly settle it; where it is bent, halving does.


MIXTURES = (
    "selective-K: the last K blocks keep what their products and attention return, and the others what attention does "
    "alone. Backward computes the rest again. Where --checkpointing settles no K, it is the largest that fits."
)
"""What readers of a plan are told of `selective-K`."""


def open_to_mixtures(question: Question, alike: list[Layout], fit: list[bool]) -> list[Layout]:
    """The layouts of `selective` that do not fit, but do with `every-1`, which needs less than any mixture.

    alike: layouts that differ only in micro-batch and checkpointing. fit: whether each of them fits.
    """
    if not question.mixes:
        return []
    fitting = {(one.micro_batch, one.checkpointing) for one, fits in zip(alike, fit, strict=True) if fits}
    return [
        one
        for one in alike
        if one.checkpointing == "selective"
        and (one.micro_batch, "selective") not in fitting
        and (one.micro_batch, "every-1") in fitting
    ]


def mixed(layout: Layout, memory: RankMemory, room: int, *, exactly: bool = False) -> Layout | None:
    """The layout with as many blocks that keep what `selective` does as fit; None where not even `attention` does.

    Blocks of a pipeline's stages keep alike: there it is all of them or none.
    """
    layers = memory.model.config.layers

    def peak(one: Layout) -> int:
        return memory.needs(one, exactly=exactly).peak

    most, least = (msgspec.structs.replace(layout, checkpointing=one) for one in KEEPING)
    if peak(most) <= room:
        return most
    if peak(least) > room:
        return None
    if layout.pipeline > 1:
        return least
    return with_most(least, layers, on_line(layers, peak(least), peak(most), room), lambda one: peak(one) <= room)


def with_most(layout: Layout, layers: int, guess: int, fits: Callable[[Layout], bool]) -> Layout:
    """The layout with the most blocks that keep what `selective` does and fit. It must fit with none of them, and not
    with all."""

    def of(blocks: int) -> Layout:
        return msgspec.structs.replace(layout, checkpointing=keeping(blocks, layers))

    low, high = 0, layers
    for blocks in (guess, guess + 1):
        if low < blocks < high:
            low, high = (blocks, high) if fits(of(blocks)) else (low, blocks)
    return of(most_that_fit(low, high, lambda blocks: fits(of(blocks))))


def on_line(layers: int, least: int, most: int, room: int) -> int:
    """How many of the blocks fit into `room`, were the peak a line from `least` with none of them to `most`."""
    return layers * (room - least) // (most - least) if most > least else 0


COMMUNICATION_BYTES = GIB
"""What a rank of several leaves for the buffers of NCCL: an assumption."""
SHOWN = 10
_NEARLY = 1.05
_KEPT = 200
"""Layouts of which the search keeps the time, the fastest ones."""
_MISSED = 40
"""Layouts whose very stages are run before a plan says that nothing fits, those that need least."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits, and what it is predicted to need."""

    layout: Layout
    time: StepTime
    peak_bytes: int
    needs: RankNeeds | None
    """None for one rank, whose peak is `stepscope fit`'s."""
    host_bytes: int = 0
    """Bytes that a rank's blocks keep in the host's memory."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    question: Question
    best: tuple[Planned, ...]
    """The fastest layouts that fit, one for each grid and sharding, the fastest first."""
    layouts: int
    fitting: int
    grids: int
    refused: dict[str, int]
    """Grids that cannot be, by the reason."""
    too_large: dict[str, int]
    """Layouts that do not fit, by what is too large."""
    simplest: Planned | None = None
    """The layout of fewest dimensions whose step is within 5 % of the best."""
    nearest: Planned | None
    """Where nothing fits, the layout whose states are smallest."""
    fastest: tuple[Layout, ...] = ()
    """The fastest layouts, as the search saw them, but for mixtures: what another network would choose from."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is for: the memory, the rates and the network of its devices."""

    budget: Budget
    rates: Rates
    network: Network

    def room(self, ranks: int) -> int:
        """The peak that surely fits, as far as a search knows."""
        usable = self.budget.usable_bytes - (COMMUNICATION_BYTES if ranks > 1 else 0)
        return int(usable / (1 + QUICK_SAFETY))


_STATES = "parameters, gradients and moments alone are too large"
_ACTIVATIONS = "activations are too large"


def search(question: Question, machine: Machine, *, shown: int = SHOWN) -> Plan:
    """Try every layout. Those that are shown are predicted a second time, stage by stage and not by interpolation."""
    memory = RankMemory(question.workload, question.model)
    clock = Clock(question.workload, memory, machine.rates, machine.network)
    space = Space(question)
    if question.ranks == 1 and question.model.experts == 1 and question.model.form is None:
        return _of_one_rank(question, machine, clock, space)
    room = int(machine.room(question.ranks) * (1 - share_for_compiled(question.workload)))
    tried = _Tried(question, memory, clock, room)
    for grid in space.grids():
        for alike in space.layouts(grid):
            tried.add(alike)
    best = tried.best(shown)
    nearest = planned(tried.smallest, memory, clock) if not best and tried.smallest else None
    return Plan(
        question=question, best=tuple(best), layouts=tried.count, fitting=tried.fitting, grids=space.grids_seen,
        refused=dict(space.refused), too_large=dict(tried.too_large), nearest=nearest, fastest=tried.fastest,
        simplest=tried.simplest(best[0]) if best else None,
    )  # fmt: skip


class _Tried:
    """Layouts that were tried: how many fit, and the fastest of them."""

    def __init__(self, question: Question, memory: RankMemory, clock: Clock, room: int) -> None:
        self._question, self._memory, self._clock, self._room = question, memory, clock, room
        self.count = self.fitting = 0
        self.too_large: Counter[str] = Counter()
        self.smallest: Layout | None = None
        """The layout whose states are smallest."""
        self._least = math.inf
        self._fastest: list[tuple[float, int, Layout]] = []
        self._missed: list[tuple[int, int, Layout]] = []
        """Layouts that do not fit by interpolation. Their peaks are negated, so that the heap drops the largest."""

    def add(self, alike: list[Layout]) -> None:
        """Try layouts that differ only in micro-batch and checkpointing, and of each micro-batch also the mixture."""
        self.count += len(alike)
        least = self._memory.least(alike[0])
        if least < self._least:
            checkpointed = [layout for layout in alike if layout.micro_batch == alike[0].micro_batch]
            self._least, self.smallest = least, checkpointed[-1]
        if least > self._room:
            self.too_large[_STATES] += len(alike)
            return
        fit = [self._fits(layout, number - self.count) for number, layout in enumerate(alike)]
        self.fitting += fit.count(True)
        if not all(fit):
            self.too_large[_ACTIVATIONS] += fit.count(False)
        slow: set[int] = set()
        """Micro-batches whose step is too slow already: what computes more again is slower, and need not be timed."""
        for number, layout in enumerate(alike):
            if fit[number] and layout.micro_batch not in slow and not self._take(layout, number - self.count):
                slow.add(layout.micro_batch)
        for layout in open_to_mixtures(self._question, alike, fit):
            for variant in (mixed(layout, self._memory, self._room), self._offloading(layout)):
                if variant is not None:
                    self.count += 1
                    self.fitting += 1
                    self._take(variant, -self.count)

    def _offloading(self, layout: Layout, *, exactly: bool = False) -> Layout | None:
        if layout.pipeline > 1 or not self._question.offloads:
            return None
        memory, room = self._memory, self._room
        return self._clock.offloading(layout, lambda one: memory.needs(one, exactly=exactly).peak <= room)

    def _fits(self, layout: Layout, number: int) -> bool:
        peak = self._memory.needs(layout).peak
        if peak > self._room and not self._fastest:
            entry = (-peak, number, layout)
            (heapq.heappush if len(self._missed) < _MISSED else heapq.heappushpop)(self._missed, entry)
        return peak <= self._room

    def _take(self, layout: Layout, number: int) -> bool:
        """Keep the layout if it is fast, of two as fast the one whose number is larger. False: it is far too slow."""
        full = len(self._fastest) == _KEPT
        if full and self._clock.least_s(layout) > -self._fastest[0][0]:
            return False
        entry = (-self._clock.step(layout).step_s, number, layout)
        if not full:
            heapq.heappush(self._fastest, entry)
        elif entry[:2] > self._fastest[0][:2]:
            heapq.heapreplace(self._fastest, entry)
        return True

    @property
    def fastest(self) -> tuple[Layout, ...]:
        # How many blocks of a mixture fit is settled for those of `best` alone.
        return tuple(one for _, _, one in self._fastest if one.checkpointing in self._question.tried)

    def simplest(self, best: Planned) -> Planned | None:
        """Of the fastest layouts, the one of fewest dimensions, and of these the fastest; None where that is `best`."""
        enough = sorted(self._fastest, key=lambda entry: (_dimensions(entry[2]), -entry[0]))
        for negative_s, _, layout in enough:
            if _dimensions(layout) >= _dimensions(best.layout):
                return None
            if -negative_s <= _NEARLY * best.time.step_s:
                plan = self._planned(layout)
                if plan.peak_bytes <= self._room:
                    return plan
        return None

    def _planned(self, layout: Layout) -> Planned:
        """A layout by its very stages; one of `selective`, of a mixture or that offloads with what these leave room
        for."""
        if offload_of(layout.checkpointing):
            layout = self._offloading(layout, exactly=True) or layout
        elif self._question.mixes and layout.checkpointing not in ("none", "every-1"):
            layout = mixed(layout, self._memory, self._room, exactly=True) or layout
        return planned(layout, self._memory, self._clock)

    def best(self, shown: int) -> list[Planned]:
        """The fastest layouts of different grids or shardings, the fastest first, that fit by their very stages."""
        if not self._fastest:
            # Take the layouts that fit by their very stages, where none did by interpolation, which counts more for
            # shards that come and go: a layout that a search found is found again where it is settled.
            for _, number, layout in self._missed:
                plan = self._planned(layout)
                if plan.peak_bytes <= self._room:
                    self.too_large[_ACTIVATIONS] -= 1
                    self.fitting += 1
                    self._take(plan.layout, number)
            self.too_large = +self.too_large
        best: list[Planned] = []
        kinds: set[tuple[object, ...]] = set()
        for _, _, layout in sorted(self._fastest, key=lambda entry: entry[:2], reverse=True):
            kind = (layout.tensor, layout.context, layout.pipeline, layout.data, layout.expert, layout.sharding)
            if kind in kinds or len(best) == shown:
                continue
            plan = self._planned(layout)
            if plan.peak_bytes <= self._room:
                kinds.add(kind)
                best.append(plan)
        return sorted(best, key=lambda plan: plan.time.step_s)


def _dimensions(layout: Layout) -> int:
    """How many ways of being parallel a layout combines."""
    sizes = (
        layout.tensor, layout.context, layout.pipeline, layout.data, layout.expert, layout.chunks,
        layout.replicas if SHARDINGS[layout.sharding].shares else 1,
    )  # fmt: skip
    return sum(size > 1 for size in sizes)


def planned(layout: Layout, memory: RankMemory, clock: Clock) -> Planned:
    """A layout with its time and its memory, whether it fits or not."""
    needs = memory.needs(layout, exactly=True)
    blocks = offload_of(layout.checkpointing)
    host_bytes = blocks * memory.offloaded(layout) if blocks else 0
    return Planned(layout=layout, time=clock.step(layout), peak_bytes=needs.peak, needs=needs, host_bytes=host_bytes)


def planned_step(workload: TextbookWorkload, spec: DeviceSpec, network: Network) -> Planned | None:
    """A step in the layout in which its strategy runs it, on these devices; None where no plan is of that strategy.

    Raises InputError for a step that no plan is of.
    """
    layout = layout_of(workload)
    if layout is None:
        return None
    memory = memory_of_ranks(workload)
    return planned(layout, memory, Clock(memory.workload, memory, rates_of(spec, memory.workload), network))


def _of_one_rank(question: Question, machine: Machine, clock: Clock, space: Space) -> Plan:
    """One GPU: memory and verdict are those of `stepscope fit`, with the layout's micro-batches as --accumulation."""

    @functools.cache
    def alone(layout: Layout) -> tuple[Planned, bool, int]:
        """The layout, whether it fits, and what the allocator's cache holds at most."""
        workload = msgspec.structs.replace(
            question.workload, accumulation=layout.micro_batches, checkpointing=layout.checkpointing
        )
        predicted = estimate(workload)
        peak, host = predicted.peak_bytes, predicted.host_bytes
        plan = Planned(layout=layout, time=clock.step(layout), peak_bytes=peak, needs=None, host_bytes=host)
        return plan, will_fit(workload, machine.budget, predicted), predicted.reserved_peak or peak

    every: list[Layout] = []
    layers, room = question.model.config.layers, int(machine.budget.usable_bytes * (1 - safety_of(question.workload)))
    for grid in space.grids():
        for alike in space.layouts(grid):
            every += alike
            for most in open_to_mixtures(question, alike, [alone(one)[1] for one in alike]):
                least = msgspec.structs.replace(most, checkpointing="attention")
                if alone(least)[1]:
                    guess = on_line(layers, alone(least)[2], alone(most)[2], room)
                    every.append(with_most(least, layers, guess, lambda one: alone(one)[1]))
                if question.offloads:
                    offloaded = clock.offloading(most, lambda one: alone(one)[1])
                    every += [offloaded] if offloaded is not None else []
    best = sorted((one for one, fits, _ in map(alone, every) if fits), key=lambda one: one.time.step_s)
    too_large = len(every) - len(best)
    nearest = min((alone(one)[0] for one in every), key=lambda one: one.peak_bytes) if every and not best else None
    return Plan(
        question=question, best=tuple(best[:SHOWN]), layouts=len(every), fitting=len(best), grids=space.grids_seen,
        refused=dict(space.refused), too_large={_ACTIVATIONS: too_large} if too_large else {}, nearest=nearest,
    )  # fmt: skip
