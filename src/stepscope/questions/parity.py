"""Whether the same batch gives the same loss and gradients in other micro-batches, compiled, checkpointed, or with
another attention; and where one does not, what departs first.

All of them run from the same weights, buffers, batch and random state. What counts as the same is measured:
`parity_plain.py`.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.core.answer import Answer, Cell, Finding, Panel, Point, Table, note, warning
from stepscope.core.errors import InputError, StepscopeError, choose
from stepscope.core.figures import digits
from stepscope.core.model_config import ModelConfig
from stepscope.core.range_names import FORWARD
from stepscope.core.workloads import COMPILES, DTYPES
from stepscope.questions import replays
from stepscope.questions.answers import computed_answer, table_by
from stepscope.questions.parity_plain import (
    FACTOR,
    Explained,
    Plain,
    Setting,
    StepVariant,
    empty_micro_batches,
    explain,
)
from stepscope.questions.replays import Distance, Subject, share
from stepscope.questions.steps import one_step_of
from stepscope.recording.environment import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import Recorder
from stepscope.training.attention.pytorch import BACKENDS
from stepscope.training.user_module.module_step import ModuleStep, find_blocks
from stepscope.training.user_module.user_code import named_tensors

# The first module whose output, or whose output's gradient, is not what it is in the plain step.
#
# What goes into each module and comes out of it is compared in the order of execution, micro-batches put together along
# the batch; then the gradients of the outputs, in the order of backward. How far rounding moves each of them is
# measured as for the gradients.


What = Literal["input", "output", "gradient"]


@dataclass(frozen=True, order=True)
class Event:
    """A place in the step where tensors are compared."""

    what: What
    """What goes into a module, what comes out of it, or the gradient of that."""
    module: str
    """The module's path; empty for the whole model."""
    call: int
    """Which call of the module in its micro-batch, from 0."""
    leaf: int
    """Which of the tensors."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The first place where a variant departs from the plain step."""

    event: Event | None
    """None where every tensor that can be compared agrees."""
    off: float = 0.0
    rounding: float = 0.0
    """How far rounding moves it, relative as `off` is."""
    before: Event | None = None
    """The last place of the same kind that agreed."""
    compared: int
    skipped: int
    """Tensors that micro-batches do not make up along a dimension, so that they cannot be compared."""


Told = Callable[[Event, int, Tensor], None]
"""Called with a place, the number of the micro-batch, and the tensor there."""


def find_departure(plain: Plain, variant: StepVariant) -> Departure:
    """Where a variant departs first."""
    setting = plain.setting
    kept: dict[Event, Tensor] = {}

    def keep(event: Event, _micro: int, tensor: Tensor) -> None:
        # On the host, since all outputs of a step may be more than the device has left.
        kept.setdefault(event, tensor.detach().to("cpu", copy=True))

    _watch(setting.step(), setting.subject.seed, keep)
    moved: dict[Event, float] = {}
    for _, make in setting.roundings():
        with contextlib.suppress(StepscopeError):
            compared = _Compared(kept, 1)
            _watch(make(), setting.subject.seed, compared)
            for event, off in compared.off().items():
                moved[event] = max(moved.get(event, 0.0), off)
    compared = _Compared(kept, variant.accumulation)
    with setting.around(variant):
        _watch(setting.step(variant), setting.subject.seed, compared)
    measured = compared.off()
    before: Event | None = None
    for event, off in measured.items():
        rounding = max(moved.get(event, 0.0), setting.rounding)
        if off > FACTOR * rounding:
            if before is not None and (before.what == "gradient") != (event.what == "gradient"):
                before = None
            return Departure(
                event=event,
                off=off,
                rounding=rounding,
                before=before,
                compared=len(measured),
                skipped=len(compared.unlike),
            )
        before = event
    return Departure(event=None, compared=len(measured), skipped=len(compared.unlike))


class _Compared:
    """Holds what it is told against what was kept of the plain step, so that of a variant nothing is kept."""

    def __init__(self, kept: dict[Event, Tensor], parts: int) -> None:
        self._kept, self._parts = kept, parts
        self._sums: dict[Event, list[float]] = {}
        self.unlike: set[Event] = set()
        """Tensors that could not be compared."""

    def __call__(self, event: Event, micro: int, tensor: Tensor) -> None:
        whole = self._kept.get(event)
        expected = None if whole is None else _part_like(whole, tensor, micro, self._parts)
        if expected is None:
            self.unlike.add(event)
            return
        wide, other = tensor.detach().double(), expected.to(tensor.device).double()
        equal = wide == other  # infinities, as masks have them
        off = torch.where(equal, torch.zeros_like(wide), wide - other)
        size = torch.where(equal & ~wide.isfinite(), torch.zeros_like(wide), other)
        sums = self._sums.setdefault(event, [0.0, 0.0])
        sums[0] += float(off.square().sum())
        sums[1] += float(size.square().sum())

    def off(self) -> dict[Event, float]:
        """How far each tensor is from the plain step's, relative, in the order in which they came: forward first."""
        relative: dict[Event, float] = {}
        for event, (off, size) in sorted(self._sums.items(), key=lambda item: item[0].what == "gradient"):
            if event not in self.unlike:
                share_of_size = math.sqrt(off / size) if off and size else math.inf if off else 0.0
                relative[event] = math.inf if math.isnan(off) else share_of_size
        return relative


def _part_like(whole: Tensor, tensor: Tensor, micro: int, parts: int) -> Tensor | None:
    """The part of a tensor that a micro-batch makes; None where it does not make one along a dimension."""
    if parts == 1:
        return whole if whole.shape == tensor.shape else None
    for dim, size in enumerate(tensor.shape):
        if whole.shape == (*tensor.shape[:dim], size * parts, *tensor.shape[dim + 1 :]):
            return whole.narrow(dim, micro * size, size)
    return None


def _watch(step: ModuleStep, seed: int, report: Told) -> None:
    watching = _Watching(step, report)
    # Compiled code leaves its graph for hooks.
    outside: Any = torch.compiler.disable if step.compiled else lambda hook: hook
    with replays.hooked(step.model, outside(watching.enter), outside(watching.leave)):
        replays.run_step(step, seed, watching)


class _Watching(Recorder):
    """Tells of what goes into each module of a step, what comes out, and of the gradients of that."""

    def __init__(self, step: ModuleStep, report: Told) -> None:
        self._scaler, self._report = step.scaler, report
        self._micro, self._in_forward = -1, False
        self._calls: Counter[str] = Counter()

    def phase_begins(self, name: str) -> None:
        if name == FORWARD:
            self._micro += 1
            self._calls.clear()
            self._in_forward = True

    def phase_ends(self, name: str) -> None:
        self._in_forward = False  # checkpointing calls modules again in backward

    def enter(self, path: str, _module: object, args: Any, kwargs: Any) -> None:
        """A hook before a module's forward."""
        if self._in_forward:
            for leaf, tensor in _floats((args, kwargs)):
                self._report(Event("input", path, self._calls[path], leaf), self._micro, tensor)

    def leave(self, path: str, _module: object, _args: object, output: Any) -> None:
        """A hook behind a module's forward."""
        if not self._in_forward:
            return
        call, micro = self._calls[path], self._micro
        self._calls[path] += 1
        for leaf, tensor in _floats(output):
            self._report(Event("output", path, call, leaf), micro, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._come_back, Event("gradient", path, call, leaf), micro))

    def _come_back(self, event: Event, micro: int, gradient: Tensor) -> None:
        scaler = self._scaler
        self._report(event, micro, gradient / scaler.get_scale() if scaler.is_enabled() else gradient)


def _floats(value: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors of floating numbers in nested values, with their places. A single number is no part of a batch."""
    for i, leaf in enumerate(tree_leaves(value)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim():
            yield i, leaf


# One way to run the step, judged: whether it gives what the plain step gives, and why not.


Verdict = Literal["agrees", "agrees, losses added", "departs", "draws anew", "fails"]
"""agrees, losses added: the losses of the micro-batches make up the batch's as a sum, and not as a mean. draws anew:
forward draws random numbers, which other micro-batches draw anew, so that nothing can be told."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A variant, how far it is from the plain step, and why."""

    plain: Plain
    """The plain step that it is held against."""
    variant: StepVariant
    verdict: Verdict
    result: replays.StepResult | None = None
    off: Distance | None = None
    """How far it is from the plain step. It stands here, with what it gave, unless the variant does not run; where its
    losses are added up, it is that of the sum."""
    explained: Explained | None = None
    """How its micro-batches make up the batch, where they do not as a mean."""
    empty: tuple[int, ...] = ()
    """Micro-batches without a target."""
    departure: Departure | None = None
    failure: str = ""

    @property
    def loss(self) -> float | None:
        """Its loss: the mean of its micro-batches', or their sum where that is what they make up."""
        if self.result is None:
            return None
        return sum(self.result.losses) if self.verdict == "agrees, losses added" else self.result.loss

    @property
    def times(self) -> float:
        """How many times as far as rounding it is."""
        return self.plain.times(self.off) if self.off else 0.0


def judge(plain: Plain, variant: StepVariant) -> Judged:
    """Run a variant and hold it against the plain step."""
    judged = partial(Judged, variant=variant, plain=plain)
    try:
        result = plain.setting.run(variant)
    except StepscopeError as error:
        return judged(verdict="fails", failure=str(error))
    off = replays.distance(result, plain.result)
    if plain.agrees(off):
        return judged(verdict="agrees", result=result, off=off)
    if variant.accumulation > 1:
        if plain.draws:
            return judged(verdict="draws anew", result=result, off=off)
        empty = tuple(empty_micro_batches(plain, variant.accumulation)) if not result.is_finite else ()
        explained = None if empty else explain(plain, variant, result)
        if explained is not None and not explained.counted:
            return judged(verdict="agrees, losses added", result=result, off=explained.off, explained=explained)
        if empty or explained:
            return judged(verdict="departs", result=result, off=off, explained=explained, empty=empty)
    try:
        departure = find_departure(plain, variant)
    except StepscopeError:  # hooks may be more than a compiler takes; that it departs is known all the same
        departure = None
    return judged(verdict="departs", result=result, off=off, departure=departure)


# What the ways to run a step show, in sentences.


def parity_found(plain: Plain, quiet: Plain, judged: Sequence[Judged]) -> Iterator[Finding]:
    """What is the same, what is not and why, and what the comparison could not see."""
    ran = [each for each in judged if each.off is not None and each.verdict != "draws anew"]
    departing = [each for each in ran if each.verdict == "departs"]
    if ran:
        yield _headline(ran, departing)
    for each in departing:
        yield _why(each)
    for each in judged:
        if each.verdict == "fails":
            yield warning("variant-fails", f"{each.variant.name} does not run: {each.failure}")
    added = [each for each in ran if each.verdict == "agrees, losses added"]
    if added:
        yield _added(added)
    if plain.draws:
        yield _drawn(plain, quiet, judged)
    yield _rounding(plain)


def place_in_words(departure: Departure) -> str:
    """The module that departs first, or what between modules does, in a few words."""
    event = departure.event
    if event is None:
        return "no module"
    if event.what == "input":
        return f"what goes into {_named(event.module)}"
    return _named(event.module) if event.what == "output" else f"the gradient of {_named(event.module)}"


def _headline(ran: Sequence[Judged], departing: Sequence[Judged]) -> Finding:
    if departing:
        worst = max(departing, key=lambda each: each.times)
        assert worst.off is not None
        names = replays.listed([each.variant.name for each in departing])
        return warning(
            "parity",
            f"{len(departing)} of {len(ran)} ways to run this step do not give what the plain step gives: {names}. "
            f"With {worst.variant.name} {_off(worst)}, where rounding explains {share(worst.plain.gradients)} and "
            f"{share(worst.plain.loss)}.",
            _evidence(worst),
        )
    farthest = max(ran, key=lambda each: each.times)
    assert farthest.off is not None
    if not any(each.off and (each.off.gradients or each.off.loss) for each in ran):
        amount = "to the last bit"
    else:
        amount = (
            f"within rounding. With {farthest.variant.name} {_off(farthest)}, where rounding moves the plain step's by "
            f"{share(farthest.plain.gradients)} and {share(farthest.plain.loss)}"
        )
    ways = f"All {len(ran)} ways to run this step give" if len(ran) > 1 else "The one way to run this step gives"
    return note("parity", f"{ways} what the plain step gives, {amount}.", _evidence(farthest))


def _why(judged: Judged) -> Finding:
    name, parts = judged.variant.name, judged.variant.accumulation
    if judged.empty:
        which = replays.listed([str(each) for each in judged.empty])
        return warning(
            "loss-normalisation",
            f"With {name} the loss is not finite, because no target counts in micro-batch {which}: a mean over none is "
            "0/0.",
            {"accumulation": parts},
            "divide the sum of each micro-batch's loss by the targets of the whole batch",
        )
    if judged.explained:
        return _normalised(judged)
    if judged.departure is None:
        return warning(
            "first-departure", f"With {name} the step departs, and no module can be looked at: hooks make it fail."
        )
    return _first_departure(judged, judged.departure)


def _normalised(judged: Judged) -> Finding:
    explained, off = judged.explained, judged.off
    assert explained is not None and off is not None
    counts, whole = explained.counts, sum(explained.counts)
    numbers = replays.listed([f"{each:,}" for each in counts])
    least, most = counts.index(min(counts)) + 1, counts.index(max(counts)) + 1
    parts = judged.variant.accumulation
    factor = whole / (parts * min(counts))
    return warning(
        "loss-normalisation",
        f"With {judged.variant.name} the loss's normalisation departs: each micro-batch's loss is a mean over its own "
        f"tokens, and the means are averaged, but the micro-batches have {numbers} of the {whole:,} "
        f"{explained.counted}. "
        f"So a token in micro-batch {least} weighs {explained.ratio:.3g} times as much as one in micro-batch {most}, "
        f"and {factor:.3g} times what it weighs in the plain step; the gradients are off by {share(off.gradients)}. "
        f"Weighed by their tokens, the micro-batches give the plain step's gradients to "
        f"{share(explained.off.gradients)}: every module agrees.",
        {
            "accumulation": parts, "tokens": whole, "fewest": min(counts), "most": max(counts),
            "ratio": explained.ratio, "factor": factor, "gradients_off": off.gradients,
            "gradients_off_when_weighed": explained.off.gradients,
        },
        "divide the sum of each micro-batch's loss by the tokens of the whole batch, and add the losses up",
    )  # fmt: skip


def _first_departure(judged: Judged, departure: Departure) -> Finding:
    name, event = judged.variant.name, departure.event
    compiled = judged.variant.compile != "eager"
    if event is None:
        assert judged.off is not None
        sentence = (
            f"With {name} all of {departure.compared} tensors that go into modules, come out, and come back as "
            "gradients agree, "
        )
        sentence += (
            "once the graph is left after each module: the difference is made where operators of several modules are "
            "compiled together."
            if compiled
            else f"and the gradients of parameters do not: {judged.plain.alone(judged.off)[0]} is the farthest."
        )
        return warning("first-departure", sentence, {"compared": departure.compared})
    amount = f"by {share(departure.off)}, where rounding moves it by {share(departure.rounding)}"
    before, last = "", departure.before
    has_input = last is not None and (last.what, last.module) == ("input", event.module)
    if last is not None and not has_input:
        of = {"input": "what goes into", "output": "the output of", "gradient": "the gradient of the output of"}
        before = f" The last that agrees is {of[last.what]} {_named(last.module)}."
    remedy = ""
    if event.what == "output":
        sentence = f"With {name} {_named(event.module)} is the first module to depart: its output is off {amount}"
        sentence += ", and what goes into it agrees." if has_input else "."
        module = _module(judged, event.module)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and judged.variant.accumulation > 1:
            sentence += (
                f" It is {type(module).__name__} in training mode, whose mean and variance are those of the "
                "micro-batch: it cannot agree."
            )
            remedy = "use a norm that looks at each sample alone, such as GroupNorm, or keep the micro-batch's size"
    elif event.what == "input":
        sentence = (
            f"With {name} what goes into {_named(event.module)} is the first to depart, {amount}: it is made by the "
            f"code of {_owner(judged, event.module)} itself, outside of its modules."
        )
    elif departure.before is None:
        sentence = (
            f"With {name} every module's output agrees, and the first gradient that backward makes, that of "
            f"{_named(event.module)}'s output, is off {amount}: the loss departs, by its normalisation or its own code."
        )
    else:
        sentence = (
            f"With {name} every module's output agrees; in backward the gradient of {_named(event.module)}'s output is "
            f"the first to depart, {amount}."
        )
    evidence = {"off": departure.off, "rounding": departure.rounding, "module": event.module, "what": event.what}
    skipped = (
        f" {departure.skipped} tensors could not be compared: micro-batches do not make them up."
        if departure.skipped and judged.variant.accumulation > 1
        else ""
    )
    return warning("first-departure", sentence + before + skipped, evidence, remedy)


def _added(added: Sequence[Judged]) -> Finding:
    parts = replays.listed([str(each.variant.accumulation) for each in added])
    return note(
        "summed-loss",
        f"The losses of {parts} micro-batches make up the batch's when they are added up, and not when they are "
        "averaged: the loss is a sum over the micro-batch, divided by nothing or by a number of the whole batch. A "
        "loop that divides by the number of micro-batches makes gradients so many times too small.",
    )


def _drawn(plain: Plain, quiet: Plain, judged: Sequence[Judged]) -> Finding:
    drawing = replays.drawing_modules(plain.setting.step().model)
    who = "Forward draws random numbers"
    if drawing:
        who += f" in dropout ({replays.listed([_named(each) for each in drawing])})"
    if not any(each.variant.accumulation > 1 for each in judged):
        return note("random-forward", f"{who}: each way drew the same numbers, from the same random state.")
    if quiet.draws:
        return warning(
            "random-forward",
            f"{who}, and other micro-batches draw others: whether accumulation agrees cannot be told.",
            remedy="give the factory an argument that turns randomness off in forward",
        )
    return note(
        "random-forward",
        f"{who}, and other micro-batches draw other numbers: accumulation was held against the plain step with both "
        "without dropout, everything else with dropout from the same random state.",
    )


def _rounding(plain: Plain) -> Finding:
    double = plain.moved.get("in float64")
    beside = (
        f"the same step in float64 is {share(double.gradients)} away"
        if double
        else f"float64 cannot say it ({plain.refused.get('in float64', 'it does not run')})"
    )
    sentence = (
        f"Rounding moves the gradients of the plain step by {share(plain.gradients)} and its loss by "
        f"{share(plain.loss)}: {beside}, and its weights were moved by a rounding, too. What is up to {FACTOR:g} "
        "times as far away counts as the same."
    )
    evidence = {"gradients": plain.gradients, "loss": plain.loss, "factor": FACTOR}
    again = plain.moved["the step again"]
    if again.gradients > 2.0**-10:
        return warning(
            "parity-rounding",
            f"{sentence} The step again, from the same state, is already {share(again.gradients)} away: it keeps "
            "a state, or draws random numbers that are not PyTorch's, NumPy's or Python's.",
            evidence,
        )
    return note("parity-rounding", sentence, evidence)


def _off(judged: Judged) -> str:
    """How far a variant is from the plain step, as a clause."""
    assert judged.result is not None and judged.off is not None
    if not judged.result.is_finite:
        return "the loss or a gradient is not finite"
    return f"the gradients are off by {share(judged.off.gradients)} and the loss by {share(judged.off.loss)}"


def _evidence(judged: Judged) -> dict[str, float | int | str | None]:
    assert judged.off is not None
    return {
        "variant": judged.variant.name,
        "gradients_off": judged.off.gradients,
        "loss_off": judged.off.loss,
        "rounding_gradients": judged.plain.gradients,
        "rounding_loss": judged.plain.loss,
        "times": judged.times,
    }


def _module(judged: Judged, path: str) -> nn.Module:
    return judged.plain.setting.step().model.get_submodule(path)


def _named(path: str) -> str:
    return f"`{path}`" if path else "the whole model"


def _owner(judged: Judged, path: str) -> str:
    """The module whose code calls another: the one in which it stands, without the lists between them."""
    above = path.rpartition(".")[0]
    while isinstance(_module(judged, above), (nn.ModuleList, nn.ModuleDict)):
        above = above.rpartition(".")[0]
    return _named(above)


VARIANTS, ROUNDING = "Ways to run the step", "How far rounding moves the plain step"
"""Titles of the tables."""

Several = Sequence[Any] | None


def study_parity(
    *,
    model: ModelConfig | None = None,
    batch_size: int = 4,
    seq_len: int = 64,
    seed: int = 0,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    dtype: str = "fp32",
    accumulation: Several = None,
    compile: Several = None,
    attention: Several = None,
    checkpointing: Several = None,
    device: str = "auto",
    tell: Callable[[str, float], None] | None = None,
) -> Answer:
    """Hold other ways to run one step against the plain one: eager, in one micro-batch, nothing run again.

    factory: that of a model of the user's own, or its config.json, in place of a model and its sizes; `arguments`:
    what it is called with. accumulation, compile, attention, checkpointing: the ways; where none is asked for, those
    that the model can run. Raises InputError for a way that cannot be.
    """
    on, report = resolve_device(device), replays.patient(tell)
    choose(dtype, DTYPES, "dtype")
    workload = one_step_of(factory, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    ways = {"accumulation": accumulation, "compile": compile, "attention": attention, "checkpointing": checkpointing}
    subject = Subject(workload, on)
    with matmul_precision(dtype), torch.random.fork_rng([on] if on.type == "cuda" else []):  # type: ignore[arg-type]
        setting = Setting(subject=subject, dtype=dtype)  # type: ignore[arg-type]
        variants = list(_requested(setting, ways) if any(ways.values()) else _usual(setting))
        if not variants:
            raise InputError(
                f"there is no other way to run {subject.name} that is known: its batch cannot be cut in 2 or 4, and it "
                "has no blocks; ask for one, as in --compile default"
            )
        report("the plain step", 0.0)
        plain = Plain(setting)
        quiet = Plain(Setting(subject=subject, dtype=dtype, quiet=True)) if plain.draws else plain  # type: ignore[arg-type]
        judged: list[Judged] = []
        for i, variant in enumerate(variants):
            report(variant.name, (i + 1) / (len(variants) + 1))
            judged.append(judge(quiet if variant.accumulation > 1 else plain, variant))
    return computed_answer(
        on,
        study="parity",
        question=f"Does one step of {subject.name} give the same loss and gradients however it is run?",
        settings={**workload.named, "seed": seed, "dtype": dtype, "gradients": len(plain.result.gradients)},
        tables=(_variants(judged), _roundings(plain)),
        panels=(_panel(judged),),
        findings=parity_found(plain, quiet, judged),
    )


def _requested(setting: Setting, requested: Mapping[str, Several]) -> Iterator[StepVariant]:
    """The ways that were asked for. Raises InputError for one that cannot be."""
    subject = setting.subject
    for parts in requested["accumulation"] or ():
        if parts == 1:
            raise InputError("--accumulation 1 is the plain step itself: ask for 2 or more")
        yield _checked(setting, StepVariant(name=f"accumulation {parts}", accumulation=parts))
    for name in requested["attention"] or ():
        if not subject.takes_attention:
            choose(name, tuple(BACKENDS), "attention of a model of your own")
            if not _calls_attention(setting):
                raise InputError(
                    f"--attention {name} changes nothing in {subject.name}: its step runs no fused "
                    "scaled_dot_product_attention of PyTorch's; leave it out"
                )
        yield _checked(setting, StepVariant(name=f"attention {name}", attention=name))
    for how in requested["checkpointing"] or ():
        if how == "none":
            raise InputError("--checkpointing none is the plain step itself: ask for selective, attention or every-1")
        yield _checked(setting, StepVariant(name=f"checkpointing {how}", checkpointing=how))
    for mode in requested["compile"] or ():
        yield StepVariant(name=f"compile {mode}", compile=choose(mode, COMPILES[1:], "compile mode"))


def _usual(setting: Setting) -> Iterator[StepVariant]:
    """The ways that this model can be run."""
    step = setting.step()
    tensors = named_tensors(step.user_module.batches[0])
    samples = tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 0
    for parts in (2, 4):
        if samples and samples % parts == 0:
            yield StepVariant(name=f"accumulation {parts}", accumulation=parts)
    if setting.subject.takes_attention:
        yield StepVariant(name="attention sdpa", attention="sdpa")
    elif _calls_attention(setting):
        yield StepVariant(name="attention sdpa-math", attention="sdpa-math")
    if find_blocks(step.model):
        yield StepVariant(name="checkpointing every-1", checkpointing="every-1")
    yield StepVariant(name="compile default", compile="default")


def _checked(setting: Setting, variant: StepVariant) -> StepVariant:
    setting.step(variant)  # refused before anything runs
    return variant


class _Attentions(TorchDispatchMode):
    """A mode that sees PyTorch's fused attentions."""

    called = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.called = self.called or "scaled_dot_product" in func._schema.name
        return func(*args, **(kwargs or {}))


def _calls_attention(setting: Setting) -> bool:
    with _Attentions() as attentions:
        replays.run_step(setting.step(), setting.subject.seed)
    return attentions.called


def _variants(judged: Sequence[Judged]) -> Table:
    def of_those_that_ran(take: Callable[[Judged, Distance], Cell], otherwise: Cell = None) -> Callable[[Judged], Cell]:
        return lambda each: take(each, each.off) if each.result is not None and each.off is not None else otherwise

    return table_by(
        VARIANTS,
        judged,
        {
            "way": lambda each: each.variant.name,
            "loss": of_those_that_ran(lambda each, _: digits(each.loss)),
            "loss off by": of_those_that_ran(lambda _, off: digits(off.loss)),
            "gradients off by": of_those_that_ran(lambda _, off: digits(off.gradients)),
            "rounding": of_those_that_ran(lambda each, _: digits(each.plain.gradients)),
            "times rounding": of_those_that_ran(lambda each, _: digits(each.times)),
            "worst parameter": of_those_that_ran(lambda each, off: each.plain.alone(off)[0], ""),
            "departs first": of_those_that_ran(lambda each, _: _departs_first(each), ""),
            "verdict": lambda each: each.verdict,
        },
    )


def _departs_first(judged: Judged) -> str:
    if judged.verdict != "departs":
        return ""
    if judged.explained or judged.empty:
        return "the loss"
    return place_in_words(judged.departure) if judged.departure else "not found"


def _roundings(plain: Plain) -> Table:
    limit = f"{FACTOR:g} times the largest is still the same"
    rows: list[tuple[Cell, ...]] = [
        *((name, digits(each.loss), digits(each.gradients), "") for name, each in plain.moved.items()),
        *((name, None, None, why) for name, why in plain.refused.items()),
        (limit, digits(FACTOR * plain.loss), digits(FACTOR * plain.gradients), ""),
    ]
    columns = ("what moves it", "loss off by", "gradients off by", "not measured")
    kept = columns if plain.refused else columns[:-1]
    return Table(title=ROUNDING, columns=kept, rows=tuple(row[: len(kept)] for row in rows))


def _panel(judged: Sequence[Judged]) -> Panel:
    """The gradients' differences beside what rounding explains."""
    points: list[Point] = []
    for each in judged:
        if each.off is None:
            continue
        for line, value in (("difference", each.off.gradients), ("rounding", each.plain.gradients)):
            known = 0 < value < float("inf")
            missing = "" if known else str(value or "none")
            points.append(Point(line=line, name=each.variant.name, y=value if known else 0.0, missing=missing))
    title = "difference of the gradients, relative"
    return Panel(x_title="", y_title=title, points=tuple(points), kind="bars", y_log=True)
