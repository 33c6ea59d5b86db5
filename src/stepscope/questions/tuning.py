"""The search for the fastest step: its rounds, and how `tune` goes from search to confirmation."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.core.checkpointing import KEEPING, OFFLOAD, keeping, mixtures, most_that_fit, selective_of
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.parts import PARTS, PREFERRED, PREFERRED_ELSEWHERE, REFERENCE, is_kept
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.processes import standing
from stepscope.core.strategies import PARAMETERS, strategy_named
from stepscope.core.study_results import NAMED, Tried, Tuned, change_words
from stepscope.core.units import format_seconds
from stepscope.core.workloads import TextbookWorkload, Workload
from stepscope.questions.tuning_curves import curves, departs_at, why_not_compared
from stepscope.questions.tuning_races import Racing

# The rounds of a search for the fastest step: which changes are tried together, and in which order.
#
# A round's changes all begin at the best step so far, and the fastest of them is taken. What only helps together is one
# change: bf16 weights, and the optimizer that writes them. How ranks share the step comes first, and what fits. Then
# all that is usually faster on a GPU is one change: where it is faster here, one race stands for those of half the
# rounds, and a search with little time has most of what there is to gain. The rounds after it try what else there is;
# and where it was not faster, each choice by itself. Of these, what computes in fewer bits comes first. Then the step
# is replayed as one CUDA graph, which takes seconds to capture: where the host launches kernel after kernel, it would
# choose the attention with the fewest launches. By then kernels and a precision may have made room: what fits is looked
# at again. What torch.compile has to compile comes late, since each try takes minutes. Last, what was taken together is
# taken back, choice by choice, which says what each of them gives.


Change = dict[str, str | int | None]
"""Fields of a workload with new values."""

PRECISIONS_TRIED: dict[Dtype, tuple[Dtype, ...]] = {
    "fp32": ("tf32", "bf16", "bf16-master"),
    "tf32": ("bf16", "bf16-master"),
    "fp16": ("bf16", "bf16-master"),
    "bf16": ("bf16-master",),
}
"""The precisions that are tried in place of each: they may be faster, and the quality study sees them train as fp32."""

MOST_MICRO_BATCHES = 16


@dataclass(frozen=True, kw_only=True)
class Round:
    """Changes that are tried against the same step."""

    name: str
    changes: Callable[[Workload, bool], Iterable[Change]]
    """Returns the changes to try, from the best step so far and whether it runs on a GPU."""
    of_gpu: bool = False
    """Whether it needs a GPU."""
    by_plan: bool = False
    """Whether what is planned to be far slower than the round's best is not measured."""


def _layouts(best: Workload, on_gpu: bool) -> Iterator[Change]:
    if best.ranks == 1:
        return
    for name in ("ddp-bucketed", "ddp", "zero1", "fsdp2", "fsdp2:reshard=no"):
        yield {"parallel": name}
    if PRECISIONS[best.dtype].tensors == "bf16":
        yield {"parallel": "fsdp2:compute=bf16"}
        yield {"parallel": "fsdp2:compute=bf16:reshard=no"}
    if best.layers:
        yield {"parallel": "tensor-sequence"}


OURS: Change = {"attention": PREFERRED["cuda"][0]}


def _groups(best: Workload) -> Iterator[Change]:
    """What is usually faster on a GPU, each with what belongs to it."""
    lower = PRECISIONS_TRIED.get(best.dtype, ())
    if best.ranks > 1:  # bf16-master and AdamW in one launch are for one process
        yield {"dtype": "bf16" if "bf16" in lower else best.dtype, "optimizer": "adamw-fused"}
    else:
        yield {"dtype": "bf16-master", "optimizer": "adamw-one-launch"} if lower else {"optimizer": "adamw-one-launch"}
    yield _replay(best)
    yield OURS
    yield dict.fromkeys(best.parts, "fused")
    yield {"projections": "joint"}


COMPILED: Change = {"compile": "blocks"}
"""Compiled blocks are ready in half the time of a whole model, and with norms by kernels about as fast
(results/h200/own-step): the round `compile` races the whole."""


def groups_that_may(best: Workload, kept: frozenset[str], *, compiled: bool = False) -> list[Change]:
    """The usually faster changes (`_groups`) that this step can take together, without the fields in `kept`. compiled:
    whether torch.compile is one of them."""
    groups: list[Change] = []
    step = best
    for group in (*_groups(best), *([COMPILED] if compiled else [])):
        different = {name: value for name, value in group.items() if getattr(best, name) != value and name not in kept}
        different = {name: value for name, value in different.items() if name in best.__struct_fields__}
        if different:
            with contextlib.suppress(InputError):  # the rest may do without
                step = changed(step, different)
                groups.append(different)
    return groups


def _attentions(best: Workload, on_gpu: bool) -> Iterator[Change]:
    # `sdpa` stands for all of PyTorch's but cuDNN's: it chooses among them by itself.
    # A model of a user's own calls SDPA as it is, with a mask wherever transformers makes one.
    elsewhere = PREFERRED_ELSEWHERE if best.sizes is not None else ()
    for name in ("flash", "sdpa-cudnn", "sdpa") if on_gpu else elsewhere:
        yield {"attention": name}


def _precisions(best: Workload, on_gpu: bool) -> Iterator[Change]:
    for dtype in PRECISIONS_TRIED.get(best.dtype, ()):
        if dtype == "bf16-master":
            if on_gpu:
                yield {"dtype": dtype, "optimizer": "adamw-one-launch"}
        elif on_gpu or dtype != "tf32":
            yield {"dtype": dtype}


def _optimizers(best: Workload, on_gpu: bool) -> Iterator[Change]:
    if best.optimizer == "adamw-one-launch":
        return  # the one that may write bf16 weights; the last round takes it back, and them with it
    for name in ("adamw-fused", *(("adamw-one-launch",) if on_gpu else ())):
        yield {"optimizer": name}


def _replay(best: Workload) -> Change:
    """The step replayed as a whole. No graph holds PyTorch's DDP; where ranks share the step by it, the textbook's,
    which sends the same, takes its place."""
    if best.ranks > 1 and strategy_named(best.parallel).name == "ddp":
        return {"graph": "step", "parallel": "ddp-bucketed"}
    return {"graph": "step"}


def _compiled(best: Workload, on_gpu: bool) -> Iterator[Change]:
    yield {"compile": "default"}
    if on_gpu:
        yield {"compile": "blocks"}
        if best.graph == "none":  # a step that is replayed as a whole gains nothing by CUDA graphs of its parts
            yield {"compile": "reduce-overhead"}


def _left_to_the_compiler(best: Workload, _on_gpu: bool) -> Iterator[Change]:
    """Parts back in the model's own code, which the compiler fuses with what stands beside them: all but the loss,
    whose logits it would make as a whole, and each by itself."""
    fused = [part for part, name in best.parts.items() if name != REFERENCE] if best.compile != "eager" else []
    others = [part for part in fused if part != "loss"]
    for parts in (others, *([part] for part in fused if others != [part])):
        yield dict.fromkeys(parts, REFERENCE)


def _longest_compiled(best: Workload, _on_gpu: bool) -> Iterator[Change]:
    if best.compile == "default" and best.graph == "step":
        yield {"compile": "max-autotune-no-cudagraphs"}  # which times kernels for each product: minutes


def _under_backward(best: Workload, on_gpu: bool) -> Iterator[Change]:
    if best.clip is not None:
        return  # the norm of all gradients is known only after backward
    for compiled in ("eager", "blocks"):
        yield {"optimizer": "adamw-under-backward", "compile": compiled}


def recomputed(best: Workload) -> tuple[str, ...]:
    """Checkpointing that the step may have, by what it computes again: the least first."""
    if best.sizes is None or not is_kept(best.attention):
        return ("none", *KEEPING, "every-1")
    current = (best.checkpointing,) if selective_of(best.checkpointing) else ()
    mixed = sorted({*mixtures(best.layers), *current}, key=lambda each: selective_of(each) or 0, reverse=True)
    return ("none", "selective", *mixed, "attention", "every-1")


def lighter(best: Workload) -> list[Change]:
    """Checkpointing and micro-batches at the same batch, from what computes least again to what keeps least."""
    batch = best.batch_size or 1
    parts = [n for n in (1, 2, 4, 8, MOST_MICRO_BATCHES) if batch % n == 0]
    return [
        {"checkpointing": kept, "accumulation": micro_batches} for kept in recomputed(best) for micro_batches in parts
    ]


def _lighter_work(best: Workload, on_gpu: bool) -> Iterator[Change]:
    """What computes less again, or splits the batch less, than the best step does."""
    for change in lighter(best):
        if (change["checkpointing"], change["accumulation"]) == (best.checkpointing, best.accumulation):
            return
        yield change


def with_most_blocks(best: Workload, fits: Callable[[Workload], bool]) -> Workload:
    """The step with the most blocks that keep what their products return and fit, by prediction: between the mixtures
    that are tried by themselves. The step as it is where they all fit, or none of them does, or nothing predicts it."""
    if best.sizes is None or not is_kept(best.attention):
        return best
    last, layers = selective_of(best.checkpointing), best.layers
    if last is None and best.checkpointing != "attention":
        return best

    def of(blocks: int) -> TextbookWorkload:
        return msgspec.structs.replace(best, checkpointing=keeping(blocks, layers))

    if fits(of(layers)):
        return best
    return of(most_that_fit(last or 0, layers, lambda blocks: fits(of(blocks))))


def _offloaded(best: Workload, on_gpu: bool) -> Iterator[Change]:
    """Where the memory does not hold what all blocks' products return: two thirds and a third of them in the host's."""
    if best.layers and best.checkpointing not in ("none", "selective") and best.one_by_one:
        for blocks in dict.fromkeys(max(1, thirds * best.layers // 3) for thirds in (2, 1)):
            yield {"checkpointing": f"{OFFLOAD}-{blocks}"}


def blocks(name: str, best: Workload, fits: Callable[[Workload], bool]) -> Round:
    """The most blocks that fit, where they are more than the best step's."""
    most: Change = {"checkpointing": with_most_blocks(best, fits).checkpointing}
    return Round(name=name, changes=lambda _best, _on_gpu: [most])


BEFORE: tuple[Round, ...] = (
    Round(name="layout", changes=_layouts, by_plan=True),
    Round(name="memory", changes=_lighter_work),
)
"""What is looked for before what is usually faster."""

TOGETHER, WITHOUT = "together", "without"
"""The round of all that is usually faster, and the one that takes its choices back, one by one."""

MEMORY_AGAIN = "memory again"
"""The round of what fits by now: kernels, a precision and an optimizer may have made room."""

ROUNDS: tuple[Round, ...] = (
    Round(name="precision", changes=_precisions),
    Round(name="optimizer", changes=_optimizers),
    Round(name="graph", changes=lambda best, _: [_replay(best)], of_gpu=True),
    Round(name="attention", changes=_attentions),
    Round(name="kernels", changes=lambda best, _: [dict.fromkeys(best.parts, "fused")], of_gpu=True),
    Round(
        name="kernels apart",
        changes=lambda best, _: [{part: "fused"} for part in best.parts if {*best.parts.values()} != {"fused"}],
        of_gpu=True,
    ),
    Round(name="projections", changes=lambda _best, _: [{"projections": "joint"}]),
    Round(name=MEMORY_AGAIN, changes=_lighter_work),
    Round(name="offload", changes=_offloaded, of_gpu=True),
    Round(name="compile", changes=_compiled),
    Round(name="graph again", changes=lambda best, _: [_replay(best)] if best.compile != "eager" else [], of_gpu=True),
    Round(name="parts in compiled code", changes=_left_to_the_compiler),
    Round(name="under backward", changes=_under_backward, of_gpu=True),
    Round(name="compile longest", changes=_longest_compiled, of_gpu=True),
)


def together(groups: list[Change]) -> Round:
    """All of these at once; where they are one or none, their own rounds try them."""
    whole = {name: value for group in groups for name, value in group.items()}
    return Round(name=TOGETHER, changes=lambda _best, _on_gpu: [whole] if len(groups) > 1 else [])


def without(groups: list[Change], baseline: Workload) -> Round:
    """Each of these taken back, as far as the best step still has it."""

    def changes(best: Workload, _on_gpu: bool) -> Iterator[Change]:
        for group in groups:
            if all(getattr(best, name) == value for name, value in group.items()):
                yield {name: getattr(baseline, name) for name in group}

    return Round(name=WITHOUT, changes=changes)


def changed(best: Workload, change: Change) -> Workload:
    """The step with the change. Raises InputError where it excludes what the step has."""
    return msgspec.structs.replace(best, **change)


def changes_of(
    round_: Round, best: Workload, *, on_gpu: bool, kept: frozenset[str]
) -> Iterator[tuple[Change, Workload | str]]:
    """Each change of a round that changes anything, with the step that it makes, or with why it cannot be.

    kept: fields that stay as they are; a change of one is left out, and one of several parts is made of the others.
    """
    if round_.of_gpu and not on_gpu:
        return
    keys = {best.key}
    for change in round_.changes(best, on_gpu):
        different = {name: value for name, value in change.items() if getattr(best, name) != value}
        if len(different.keys() & PARTS.keys()) > 1 and different.keys() & PARTS.keys() & kept:
            different = {name: value for name, value in different.items() if name not in PARTS or name not in kept}
            if len(different) == 1:
                continue  # which is tried by itself, too
        if not different or kept & different.keys() or not different.keys() <= {*best.__struct_fields__}:
            continue
        try:
            workload = changed(best, different)
        except InputError as error:
            yield different, str(error)
            continue
        if workload.key not in keys:
            keys.add(workload.key)
            yield different, workload


# The search: round after round, the fastest change that surely helps is taken; then the end is confirmed.
#
# It knows neither processes nor clocks: what races, confirms and trains is given. `tuning_races.py` has what measures.

NOT_REACHED = "the time was over"
FAR = 1.15
"""How many times as long as the shortest plan another may be and still be measured: plans of steps that ran are off by
up to a tenth (docs/planning.md)."""


class Bench(Protocol):
    """What measures for a search."""

    def fits(self, workload: Workload) -> str | None:
        """Why the step does not fit, by prediction; None where it does, or nothing predicts it."""
        ...

    def planned_s(self, workload: Workload) -> float | None:
        """Seconds that the step takes by prediction; None where nothing predicts it."""
        ...

    def race(self, best: Workload, other: Workload) -> Tried:
        """The other step beside the best one; its round and its change are filled in later."""
        ...

    def time_left(self, baseline: Workload, best: Workload) -> bool:
        """Whether there is time for another race, and to confirm the best step afterwards."""
        ...


ABSENT = ("replace nothing", "replaces nothing", "takes the place of")
"""Words of a refusal of what a user's model does not have at all."""


def refused_fields(why: str) -> frozenset[str]:
    """The fields of a user's step that a refusal speaks of."""
    named = {
        "attention ": "attention",
        "projections ": "projections",
        "CUDA graph": "graph",
        "compile mode ": "compile",
    }
    return next((frozenset({field}) for words, field in named.items() if words in why), frozenset(PARTS))


def blamed_fields(tried: Tried) -> frozenset[str]:
    """The fields of a user's step without which what was tried together may be tried again. Where it ran compiled and
    was refused by a graph, failed or was not faster, compiling is blamed: it is the least sure of them."""
    if tried.verdict in ("not reached", "taken"):
        return frozenset()
    fields = refused_fields(tried.why) if tried.verdict == "refused" else frozenset({"graph"})
    if "compile" in tried.change and fields == {"graph"}:
        return frozenset({"compile"})
    if tried.verdict == "refused":
        return fields
    return frozenset(PARTS) if tried.verdict == "failed" else frozenset()


@dataclass
class Search:
    """A search as it goes on: stopped at any moment, it has what it found."""

    baseline: Workload
    on_gpu: bool
    kept: frozenset[str] = frozenset()
    named: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """By field, names that the user chose: they are raced first, and nothing else in that field."""
    compiles: bool = False
    """Whether a user's step is compiled with all that is usually faster."""
    best: Workload = field(init=False)
    tried: list[Tried] = field(default_factory=list[Tried])

    def __post_init__(self) -> None:
        self.best = self.baseline

    def run(self, bench: Bench, tell: Callable[[str], None] = lambda _: None) -> None:
        """Go through the rounds. A KeyboardInterrupt leaves what was found."""
        for name, values in self.named.items():
            chosen: list[Change] = [{name: value} for value in values]
            self._go(Round(name=f"{NAMED}{name}", changes=lambda _best, _on_gpu, chosen=chosen: chosen), bench, tell)
        self.kept |= self.named.keys()
        for round_ in BEFORE:
            self._go(round_, bench, tell)
        self._go_between("blocks", bench, tell)
        before = self.best
        compiled = self.compiles and before.sizes is None and before.compile == "eager"
        usual = groups_that_may(before, self.kept, compiled=compiled) if self.on_gpu else []
        usual = self._go_together(usual, bench, tell)
        improved = self.best != before
        for round_ in ROUNDS:
            if round_.name == MEMORY_AGAIN and self.best == before:
                continue  # it needs what it needed
            self._go(round_, bench, tell)
            if round_.name == MEMORY_AGAIN:
                self._go_between("blocks again", bench, tell)
        if improved:
            self._go(without(usual, before), bench, tell)

    def _go_between(self, name: str, bench: Bench, tell: Callable[[str], None]) -> None:
        """Try as many blocks that keep their products as fit."""
        if "checkpointing" not in self.kept:
            self._go(blocks(name, self.best, lambda step: bench.fits(step) is None), bench, tell)

    def _go_together(self, usual: list[Change], bench: Bench, tell: Callable[[str], None]) -> list[Change]:
        """Try all of these as one change; returns those that were tried last.

        Whether a user's model has modules that other kernels compute, projections of one input, or an attention that
        can be swapped, only its process can tell: it makes the model, and holds what is swapped against the model's own
        code on the device. Where it has none, the race is refused as soon as the model is made. So nobody asks before:
        the change is tried again without what was refused. What the model does not have at all, no later round asks
        for.
        """
        self._go(together(usual), bench, tell)
        while self.best.factory and self.tried and self.tried[-1].round == TOGETHER:
            last = self.tried[-1]
            fields = blamed_fields(last)
            others = [group for group in usual if not group.keys() <= fields]
            if len(others) == len(usual):
                break
            if last.verdict == "refused" and any(words in last.why for words in ABSENT):
                self.kept |= fields
            elif fields == {"attention"} and OURS in usual:  # dropout is left to SDPA, without a mask
                others.append({"attention": "sdpa"})
            elif fields == {"compile"} and "blocks are known" in last.why:
                others.append({"compile": "default"})
            tries, usual = len(self.tried), others
            self._go(together(usual), bench, tell)
            if len(self.tried) == tries:
                break
        return usual

    def _go(self, round_: Round, bench: Bench, tell: Callable[[str], None]) -> None:
        if (faster := self._round(round_, bench, tell)) is not None:
            self.best = faster

    def _round(self, round_: Round, bench: Bench, tell: Callable[[str], None]) -> Workload | None:
        """Try the changes of a round; returns the step with the one that is taken."""
        raced: list[tuple[int, Workload]] = []
        changes = list(changes_of(round_, self.best, on_gpu=self.on_gpu, kept=self.kept))
        possible = [workload for _, workload in changes if round_.by_plan and not isinstance(workload, str)]
        planned = self._planned(possible, bench) if possible else {}
        least_s = min(planned.values(), default=0.0)
        for change, workload in changes:
            if isinstance(workload, str):
                self.tried.append(Tried(round=round_.name, change=change, verdict="refused", why=workload))
            elif not bench.time_left(self.baseline, self.best):
                self.tried.append(Tried(round=round_.name, change=change, verdict="not reached", why=NOT_REACHED))
            elif (why := bench.fits(workload)) is not None:
                self.tried.append(Tried(round=round_.name, change=change, verdict="does not fit", why=why))
            elif (far_s := planned.get(workload.key, 0.0)) > FAR * least_s:
                why = f"planned to take {format_seconds(far_s)}, and another {format_seconds(least_s)}"
                self.tried.append(Tried(round=round_.name, change=change, verdict="slower by plan", why=why))
            else:
                tell(f"{round_.name}: {change_words(change)}")
                raced.append((len(self.tried), workload))
                tried = bench.race(self.best, workload)
                if tried.ratio is not None:
                    tell(f"{change_words(change)}: {tried.ratio:.3f} times as long as the best step")
                self.tried.append(msgspec.structs.replace(tried, round=round_.name, change=change))
        return self._judged(raced)

    def _planned(self, steps: Iterable[Workload], bench: Bench) -> dict[str, float]:
        """By key, the seconds that these and the best one take, as far as they are planned; none of what does not
        fit, beside which nothing else is slow."""
        planned = {step.key: bench.planned_s(step) for step in (self.best, *steps) if bench.fits(step) is None}
        return {key: seconds for key, seconds in planned.items() if seconds is not None}

    def _judged(self, raced: list[tuple[int, Workload]]) -> Workload | None:
        """Judge the races of a round together, and take the fastest that surely is faster."""
        places = [place for place, _ in raced if self.tried[place].ratio is not None]
        stands = standing(self.tried[place].p_value for place in places)
        faster: list[tuple[float, int]] = []
        for place, stand in zip(places, stands, strict=True):
            tried = self.tried[place]
            if tried.ratio is None or tried.verdict != "undecided":
                continue
            interval = tried.interval
            if (stand and interval is not None and not interval.low <= 1 <= interval.high) or tried.apart:
                self.tried[place] = msgspec.structs.replace(tried, verdict="faster" if tried.ratio < 1 else "slower")
                faster += [(tried.ratio, place)] if tried.ratio < 1 else []
        if not faster:
            return None
        _, place = min(faster)
        self.tried[place] = msgspec.structs.replace(self.tried[place], verdict="taken")
        return dict(raced)[place]

    def so_far(self, workload: Workload) -> Tuned:
        """What was found until now."""
        return Tuned(asked=workload, baseline=self.baseline, best=self.best, tried=tuple(self.tried))


# Search, check the losses, confirm: `tune` goes this way, and what it has when it is interrupted is its answer.


NUMERIC = ("dtype", "optimizer")
"""Fields that compute something else on purpose, where a change has a dtype: what writes its weights goes with it. They
are taken back where the losses depart."""


TIME_TO_COMPILE_S = 240.0
"""Seconds without which a user's step is not compiled before its eager one is raced: of half a billion parameters, the
first race took 90 to 120 s so, and the end as long (docs/tuning.md)."""


def tune(
    start: Workload, racing: Racing, *, device: str, on_gpu: bool, kept: frozenset[str] = frozenset(),
    named: Mapping[str, Sequence[str]] | None = None, memory_limit_bytes: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:  # fmt: skip
    """Find the fastest step that trains as the one asked for does, at the same batch.

    kept: fields of the workload that stay as they are. named: by field, what is raced in it. tell: is given what is
    tried, in words. Interrupted, it returns what it found. Raises InputError for a step that is no training step, or
    that nothing makes fit.
    """

    def timed(words: str) -> None:
        tell(f"after {racing.seconds:.0f} s, {words}")

    if start.phase != "train":
        raise InputError(f"tune makes a training step faster, and --phase {start.phase} asks for another: leave it out")
    try:
        baseline = one_that_fits(start, racing, kept)
    except KeyboardInterrupt:
        return Tuned(asked=start, baseline=start, best=start, interrupted=True, seconds=racing.seconds)
    left = racing.fixed | (racing.absent - {*(named or {})})
    compiles = racing.budget_s - racing.seconds > TIME_TO_COMPILE_S
    search = Search(baseline=baseline, on_gpu=on_gpu, kept=kept | left, named=named or {}, compiles=compiles)
    tuned = Tuned(asked=start, baseline=baseline, best=baseline)
    try:
        search.run(racing, timed)
        tuned = search.so_far(start)
        while tuned.best != baseline:
            if not racing.time_for_losses(baseline, tuned.best):
                tuned = msgspec.structs.replace(tuned, why_no_losses="the budget leaves no time for it")
                break
            timed("losses of both steps")
            try:
                losses = curves(
                    baseline, tuned.best, device, memory_limit_bytes, out=Path(racing.out), fresh=racing.fresh,
                    at_once=racing.side_by_side(baseline, tuned.best) > 1,
                )  # fmt: skip
            except StepscopeError as error:
                tuned = msgspec.structs.replace(tuned, curves=(), why_no_losses=str(error))
                break
            tuned = msgspec.structs.replace(
                tuned, curves=losses, departs_at=departs_at(losses), why_no_losses=why_not_compared(losses)
            )
            if tuned.departs_at is None:
                break
            tuned = without_numeric_changes(tuned)
        if tuned.best != baseline and racing.time_to_confirm(baseline, tuned.best):
            timed("both steps in processes of their own")
            tuned = _confirmed(tuned, racing)
    except KeyboardInterrupt:
        known = tuned if tuned.tried else search.so_far(start)
        tuned = msgspec.structs.replace(known, interrupted=True)
    where = racing.where
    return msgspec.structs.replace(
        tuned, seconds=racing.seconds, budget_s=racing.budget_s, needed_s=racing.needed_s,
        folder=racing.out, doubt=racing.doubt, own_optimizer=racing.own_optimizer,
        device=where.device_name if where is not None else "", versions=where.versions if where is not None else {},
    )  # fmt: skip


def one_that_fits(workload: Workload, racing: Racing, kept: frozenset[str] = frozenset()) -> Workload:
    """The step, or the one that computes least again of those that fit and run. kept: fields that stay as they are."""
    why = racing.fits(workload) or racing.runs_alone(workload)
    if why is None:
        return workload
    # Ranks that keep all of the step's state each may shard it: that comes first, and what cannot be sharded after it.
    whole = workload.ranks > 1 and PARAMETERS not in strategy_named(workload.parallel).shards
    sharded: list[Change] = [{"parallel": "fsdp2"}] if whole else []
    for change in (*sharded, *({**each, **change} for each in (*sharded, {}) for change in lighter(workload))):
        if any(name in kept and getattr(workload, name) != value for name, value in change.items()):
            continue
        try:
            other = changed(workload, change)
            if other != workload and racing.fits(other) is None and racing.runs_alone(other) is None:
                if "checkpointing" in kept:
                    return other
                more = with_most_blocks(other, lambda step: racing.fits(step) is None)
                return more if more != other and racing.runs_alone(more) is None else other
        except InputError:  # the step has nothing that this checkpointing keeps, or cannot be split so
            continue
    raise InputError(f"the step does not fit, however it is split or computed again: {why}; choose a smaller batch")


def without_numeric_changes(tuned: Tuned) -> Tuned:
    """The search with what it took less the changes that compute something else; without any, the baseline is best."""
    accepted = [tried for tried in tuned.tried if tried.verdict == "taken"]
    numeric = [tried for tried in accepted if "dtype" in tried.change]
    why = f"losses depart from the baseline's at step {tuned.departs_at}"
    best, tried = tuned.baseline, list[Tried]()
    for one in tuned.tried:
        if one.verdict != "taken":
            tried.append(one)
            continue
        stays = {name: value for name, value in one.change.items() if name not in NUMERIC} if one in numeric else {}
        if numeric and one not in numeric:
            stays = one.change
        wrong = {name: value for name, value in one.change.items() if name not in stays}
        if wrong:
            tried.append(msgspec.structs.replace(one, change=wrong, verdict="not right", why=why))
        if stays:
            # What was raced together was not timed apart.
            alone = Tried(round=one.round, change=stays, verdict="taken", why="raced with what was taken back")
            tried.append(one if not wrong else alone)
            with contextlib.suppress(InputError):  # it was for what is taken back
                best = changed(best, stays)
    return msgspec.structs.replace(tuned, best=best, tried=tuple(tried), curves=(), departs_at=None, why_no_losses="")


def _confirmed(tuned: Tuned, racing: Racing) -> Tuned:
    before, after, change = racing.confirm(tuned.baseline, tuned.best)
    memory = [side.representative.evidence.memory for side in (before, after)]
    return msgspec.structs.replace(
        tuned,
        confirmed=change,
        baseline_s=before.processes("step").typical_s,
        best_s=after.processes("step").typical_s,
        baseline_peak_bytes=memory[0].allocated_peak if memory[0] else None,
        best_peak_bytes=memory[1].allocated_peak if memory[1] else None,
        confirmed_by=tuple(run.id for side in (before, after) for run in side.runs),
    )
