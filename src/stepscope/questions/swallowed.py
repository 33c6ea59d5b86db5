"""Training with parameters in bf16: updates that round to nothing, and what each way of keeping the rest saves.

A parameter p in bf16 takes an update u only if p + u rounds to another number: |u| must be more than half a unit in the
last place of p (less where p is a power of two and moves towards zero). bf16 has 8 bits of significand, so that half a
unit is between |p| / 512 and |p| / 256; an update of AdamW is about as large as the learning rate, whatever the
gradient. Moments and arithmetic are fp32 here: what differs between the runs is how the new parameter is stored.

Of other formats, those of blocks too, no run is made: each update of the fp32 run is added to the parameter as the
format holds it, and the sum rounded to nearest. In a block, what is rounded is seen beside the block's new largest.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, note
from stepscope.core.errors import InputError
from stepscope.core.figures import digits
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS
from stepscope.core.model_config import ModelConfig, configure, whole_number
from stepscope.core.workloads import TextbookWorkload, Workload
from stepscope.questions.answers import computed_answer, curves, pivot, table_by, threads_for
from stepscope.questions.steps import (
    check_loss,
    elements_of,
    factory_workload,
    in_fp32,
    layers_folded,
    step_of,
    trained_parameters,
)
from stepscope.recording.environment import resolve_device
from stepscope.recording.step import drive
from stepscope.training.half_optimizers import AdamWBf16Parameters, Keeping
from stepscope.training.scaled_products import round_blocks, round_to

LEARNING_RATES = (1e-5, 1e-4, 1e-3, 1e-2)
REMEDIES_AT = 1e-4
"""The learning rate at which remedies are compared: usual at the end of pretraining, and in fine-tuning."""

_NEAREST = "bf16, to nearest"

_RUNS: dict[str, tuple[Keeping | None, int]] = {
    "fp32": (None, 12),
    "bf16, fp32 master": ("master", 14),
    "bf16, Kahan": ("kahan", 12),
    "bf16, stochastic": ("stochastic", 10),
    _NEAREST: ("nearest", 10),
    "bf16, moments too": (None, 6),
}
"""How each run keeps its parameters, and the bytes of a parameter with both moments. The first is the reference; the
last is torch.optim.AdamW as it comes, given bf16 parameters."""


@dataclass
class Tally:
    """Counts and norms of the updates of some parameters over some steps."""

    wanted: int = 0
    """Updates that were not zero."""
    swallowed: int = 0
    """Updates that were not zero but changed nothing."""
    square: float = 0.0
    """Sum of squares of the wanted updates."""
    square_swallowed: float = 0.0
    along: float = 0.0
    """Sum of products of the wanted and the made updates."""
    last_updates: list[Tensor] = field(default_factory=list)
    last_half_units: list[Tensor] = field(default_factory=list)
    """Two lists for the last step, by parameter tensor: magnitudes of the wanted updates, and half a unit in the last
    place of the parameters."""

    def add(self, wanted: Tensor, change: Tensor) -> None:
        nothing = (change == 0) & (wanted != 0)
        self.wanted += int((wanted != 0).sum())
        self.swallowed += int(nothing.sum())
        exact = wanted.double()
        self.square += float(exact.square().sum())
        self.square_swallowed += float(exact[nothing].square().sum())
        self.along += float((exact * change.double()).sum())

    @property
    def median_update(self) -> float:
        return float(torch.cat(self.last_updates).median())

    @property
    def median_half_unit(self) -> float:
        return float(torch.cat(self.last_half_units).median())

    @property
    def share(self) -> float:
        return self.swallowed / self.wanted if self.wanted else 0.0

    @property
    def norm_share(self) -> float:
        """Norm of the swallowed updates as a share of the norm of all wanted ones."""
        return math.sqrt(self.square_swallowed / self.square) if self.square else 0.0

    @property
    def progress(self) -> float:
        """How far the made update goes along the wanted one: 1 where nothing is lost on average."""
        return self.along / self.square if self.square else 1.0


@dataclass
class _Trained:
    """The results of one training run."""

    losses: list[float] = field(default_factory=list)
    """The loss of each step before its update, in the run's own arithmetic."""
    by_layer: dict[str, Tally] = field(default_factory=dict)
    by_step: list[Tally] = field(default_factory=list)
    used: list[Tensor] = field(default_factory=list)
    """Parameters as forward uses them, in fp32."""
    held: list[Tensor] = field(default_factory=list)
    """Parameters as the optimizer knows them, in fp32."""

    total: Tally = field(default_factory=Tally)
    by_format: dict[str, Tally] = field(default_factory=dict[str, Tally])
    """What each format would make of the updates; of the run in fp32 alone."""


def study_swallowed(
    *, model: ModelConfig | None = None, steps: int = 40, learning_rates: Sequence[float] = LEARNING_RATES,
    remedies_at: float = REMEDIES_AT, batch_size: int = 4, seq_len: int = 32, device: str = "auto", seed: int = 0,
    factory: str | None = None, arguments: Mapping[str, Any] | None = None,
) -> Answer:  # fmt: skip
    """Count swallowed updates by layer and learning rate; at one learning rate, compare the remedies.

    Every run has the same seed, batches and start: the fp32 one begins at the bf16 ones' rounded parameters.
    factory: that of a module of the user's own, in place of a model and its sizes; `arguments`: what it is called
    with. AdamW trains it, whatever optimizer comes with it.
    """
    whole_number(steps, "steps", 1, 100_000)
    if not learning_rates:
        raise InputError("no learning rate is given: write one or more, as in 1e-4,1e-3")
    for rate in (*learning_rates, remedies_at):
        if not (math.isfinite(rate) and rate > 0):
            raise InputError(f"the learning rate {rate!r} is not a positive number: choose one as 1e-4")
    on = resolve_device(device)
    workload: Workload
    if factory is not None:
        workload = factory_workload(factory, arguments, dtype="bf16-pure", optimizer="adamw-loop", seed=seed)
    else:
        workload = TextbookWorkload(
            model=model or configure("tiny", d_model=64, d_ff=256, layers=2, vocabulary=256),
            batch_size=batch_size,
            seq_len=seq_len,
            dtype="bf16-pure",
            optimizer="adamw-loop",
            seed=seed,
        )
    with threads_for(*elements_of(step_of(workload, on))):
        runs = {name: _train(workload, name, remedies_at, steps, on) for name in _RUNS}
        nearest = {
            rate: runs[_NEAREST] if rate == remedies_at else _train(workload, _NEAREST, rate, steps, on)
            for rate in dict.fromkeys(learning_rates)
        }
        outcomes = _outcomes(workload, runs, on)
    return computed_answer(
        on,
        study="swallowed",
        question="Which updates do parameters in bf16 swallow, and what keeps them?",
        settings={**workload.named, "steps": steps, "remedies_at": remedies_at, "seed": seed},
        tables=(
            *(_by_layer(title, nearest, figure) for title, figure in _FIGURES.items()),
            _sizes(nearest),
            _remedies(outcomes, remedies_at),
            _formats(runs["fp32"].by_format, remedies_at),
        ),
        panels=_panels(runs),
        findings=(
            *(_swallowed(rate, run) for rate, run in nearest.items()),
            *_compared(outcomes, remedies_at),
            _best_format(runs["fp32"].by_format, remedies_at),
        ),
    )


_FIGURES: dict[str, Callable[[Tally], float]] = {
    "Updates that round to nothing, %, to nearest": lambda tally: tally.share,
    "Their norm, % of all updates' norm": lambda tally: tally.norm_share,
    "Update made along the one wanted, %": lambda tally: tally.progress,
}


def _train(workload: Workload, name: str, rate: float, steps: int, device: torch.device) -> _Trained:
    keeping, _ = _RUNS[name]
    step = step_of(workload, device)
    if name == "fp32":
        in_fp32(step)
    names = {parameter: of for of, parameter in trained_parameters(step.model).items()}
    trained = _Trained()
    module_of = layers_folded(step.model)

    def layer(parameter: str) -> str:
        return layer_of(parameter) if workload.sizes is not None else module_of(parameter.rpartition(".")[0])

    def watch(parameter: Tensor, before: Tensor, wanted: Tensor, change: Tensor) -> None:
        of_layer = trained.by_layer.setdefault(layer(names[parameter]), Tally())
        for tally in (of_layer, trained.by_step[-1], trained.total):
            tally.add(wanted, change)
        if len(trained.by_step) == steps:
            for tally in (of_layer, trained.total):
                tally.last_updates.append(wanted.abs().flatten())
                tally.last_half_units.append(half_unit(before).flatten())

    if keeping is None:
        adamw, step.optimizer = None, torch.optim.AdamW(names, lr=rate, foreach=False)
        if name == "fp32":
            trained.by_format = _count_by_format(
                step.optimizer, list(names), lambda: len(trained.by_step) > steps - _COUNTED_STEPS
            )
    else:
        adamw = step.optimizer = AdamWBf16Parameters(names, keeping=keeping, lr=rate, watch=watch)
    # So that rounding at random is the same whatever ran before.
    torch.manual_seed(workload.seed)
    for _ in range(steps):
        trained.by_step.append(Tally())
        step.prepare()
        drive(step)
        assert step.loss is not None
        trained.losses.append(float(step.loss))
    trained.used = [parameter.detach().float().clone() for parameter in names]
    trained.held = trained.used if adamw is None else [adamw.held(parameter) for parameter in names]
    return trained


IN_FORMATS = ("fp16", "bf16", "fp8-e5m2", "fp8-e4m3", "fp8-e5m2fnuz", "fp8-e4m3fnuz", *BLOCK_FORMATS)
"""Formats that could hold parameters: the first as they are, without a scale; those of blocks with theirs."""
_COUNTED_STEPS = 5
"""The last steps of the run in fp32, in which they are counted: rounding by all of them takes as long as a run."""


def held_in(values: Tensor, name: str) -> Tensor:
    """Parameters in fp32 as a format holds them, in fp32. Blocks lie along the last dimension of a matrix."""
    if not values.numel():
        return values
    if name in BLOCK_FORMATS:
        rows = values.reshape(len(values), -1) if values.dim() > 1 else values.reshape(1, -1)
        return round_blocks(rows, BLOCK_FORMATS[name], weight=True).view(values.shape)
    if name in ("fp16", "bf16"):
        return values.to(torch.float16 if name == "fp16" else torch.bfloat16).float()
    return round_to(values, FORMATS[name])


def _count_by_format(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], counts: Callable[[], bool]
) -> dict[str, Tally]:
    """What each format would make of the updates of an optimizer in fp32, in the steps that count."""
    tallies = {name: Tally() for name in IN_FORMATS}
    before: list[Tensor] = []

    def keep(*_: object) -> None:
        before.extend(parameter.detach().clone() for parameter in parameters if counts())

    def count(*_: object) -> None:
        if not before:
            return
        for parameter, old in zip(parameters, before, strict=True):
            wanted = parameter.detach() - old
            for name, tally in tallies.items():
                held = held_in(old, name)
                tally.add(wanted, held_in(held + wanted, name) - held)
        before.clear()

    optimizer.register_step_pre_hook(keep)
    optimizer.register_step_post_hook(count)
    return tallies


def half_unit(values: Tensor) -> Tensor:
    """Half a unit in the last place of bf16 at each of these numbers of fp32."""
    bf16 = FORMATS["bf16"]
    _, exponent = torch.frexp(values.double())
    exponent = (exponent - 1).clamp(min=bf16.smallest_exponent)
    exponent = torch.where(values == 0, bf16.smallest_exponent, exponent)
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - bf16.significand_bits - 1)


def layer_of(parameter: str) -> str:
    """The part of the model that a parameter belongs to: in a block its attention, feed-forward or one of its norms."""
    parts = parameter.split(".")
    return ".".join(parts[:3]) if parts[0] == "blocks" else parts[0]


@dataclass(frozen=True)
class _Outcome:
    """One run, compared with the fp32 run."""

    name: str
    bytes_per_parameter: int
    last_loss: float
    """The loss of the last training step, in the run's own arithmetic."""
    loss_in_fp32: float
    """Mean over the batches after the last step, of the parameters that forward uses, in fp32 arithmetic."""
    distance: float
    """Distance of the optimizer's parameters from those of the fp32 run, over the distance that the fp32 run moved."""
    swallowed: float | None
    progress: float | None


@torch.no_grad()
def _outcomes(workload: Workload, runs: dict[str, _Trained], device: torch.device) -> list[_Outcome]:
    judge = step_of(workload, device)
    in_fp32(judge)
    judge.model.eval()
    parameters = trained_parameters(judge.model).values()
    start = [parameter.detach().clone() for parameter in parameters]
    check_loss(runs["fp32"].losses[0])
    exact = runs["fp32"].held
    way = _distance(exact, start)
    if not way:
        raise InputError("no parameter moves in fp32: every gradient of these steps is zero; give another batch")
    outcomes = []
    for name, run in runs.items():
        for parameter, value in zip(parameters, run.used, strict=True):
            parameter.data.copy_(value)
        total = run.total if run.total.wanted else None
        outcomes.append(
            _Outcome(
                name=name,
                bytes_per_parameter=_RUNS[name][1],
                last_loss=run.losses[-1],
                loss_in_fp32=float(torch.stack([judge.forward_module(*batch) for batch in judge.batches]).mean()),
                distance=_distance(run.held, exact) / way,
                swallowed=None if total is None else total.share,
                progress=None if total is None else total.progress,
            )
        )
    return outcomes


def _distance(one: list[Tensor], other: list[Tensor]) -> float:
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(one, other, strict=True)))


def _by_layer(title: str, nearest: dict[float, _Trained], figure: Callable[[Tally], float]) -> Table:
    """A row for each layer and one for all, a column for each learning rate."""
    layers = list(next(iter(nearest.values())).by_layer)
    cells = [
        ((layer,), f"lr {rate:g}", digits(100 * figure(run.by_layer[layer])))
        for layer in layers
        for rate, run in nearest.items()
    ]
    cells += [(("all",), f"lr {rate:g}", digits(100 * figure(run.total))) for rate, run in nearest.items()]
    return pivot(title, ("layer",), cells)


def _sizes(nearest: dict[float, _Trained]) -> Table:
    """Median updates by layer beside half a unit in the last place of the parameter: smaller ones are swallowed."""
    first = next(iter(nearest.values()))
    rows: list[tuple[Cell, ...]] = [
        (layer, tally.median_half_unit, *(digits(run.by_layer[layer].median_update) for run in nearest.values()))
        for layer, tally in first.by_layer.items()
    ]
    columns = ("layer", "half a unit in the last place", *(f"update, lr {rate:g}" for rate in nearest))
    return Table(title="Medians in the last step", columns=columns, rows=tuple(rows))


def _remedies(outcomes: list[_Outcome], rate: float) -> Table:
    def percent(share: float | None) -> Cell:
        return None if share is None else digits(100 * share)

    reference = outcomes[0].loss_in_fp32
    return table_by(
        f"The same training at lr {rate:g}",
        outcomes,
        {
            "parameters": lambda each: each.name,
            "bytes a parameter, with moments": lambda each: each.bytes_per_parameter,
            "loss of the last step": lambda each: digits(each.last_loss),
            "loss after it, in fp32": lambda each: float(f"{each.loss_in_fp32:.6g}"),
            "more than fp32": lambda each: float(f"{each.loss_in_fp32 - reference:.3g}"),
            "distance to fp32, % of its way": lambda each: percent(each.distance),
            "updates lost, %": lambda each: percent(each.swallowed),
            "made along the wanted, %": lambda each: percent(each.progress),
        },
    )


def _formats(by_format: Mapping[str, Tally], rate: float) -> Table:
    return table_by(
        f"What each format would swallow of the updates of fp32 at lr {rate:g}",
        by_format.items(),
        {
            "format": lambda of: of[0],
            "updates that round to nothing, %": lambda of: digits(100 * of[1].share),
            "their norm, %": lambda of: digits(100 * of[1].norm_share),
            "made along the wanted, %": lambda of: digits(100 * of[1].progress),
        },
    )


def _best_format(by_format: Mapping[str, Tally], rate: float) -> Finding:
    fixed = {
        name: tally
        for name, tally in by_format.items()
        if name not in ("fp16", "bf16") and (name not in BLOCK_FORMATS or BLOCK_FORMATS[name].powers_of_two)
    }
    name, best = min(fixed.items(), key=lambda of: of[1].share)
    return note(
        "updates-by-format",
        f"Of the formats of 8 bits and fewer with scales of powers of two, or none, {name} would make nothing of the "
        f"fewest updates of fp32 at lr {rate:g}: {100 * best.share:.3g} %. Another scale moves with the largest number "
        "of its block, and every number with it: few updates then change nothing, and little goes along the wanted.",
        {"format": name, "swallowed": best.share},
    )


def _panels(runs: dict[str, _Trained]) -> Iterator[Panel]:
    exact = runs["fp32"].losses
    figures: dict[str, Callable[[_Trained], Iterable[float]]] = {
        "loss above that of the fp32 run": lambda run: map(operator.sub, run.losses, exact),
        "share of updates that round to nothing": lambda run: (t.share for t in run.by_step if t.wanted),
    }
    for y_title, of in figures.items():
        points = ((name, float(i), y) for name, run in runs.items() for i, y in enumerate(of(run), start=1))
        yield curves(points, x_title="step", y_title=y_title)


def _swallowed(rate: float, run: _Trained) -> Finding:
    total = run.total
    worst, most = max(run.by_layer.items(), key=lambda item: item[1].share)
    least, fewest = min(run.by_layer.items(), key=lambda item: item[1].share)
    return note(
        "updates-swallowed",
        f"At lr {rate:g} {100 * total.share:.3g} % of the updates of bf16 parameters round to nothing, and "
        f"with them {100 * total.norm_share:.3g} % of the updates' norm: most in {worst} ({100 * most.share:.3g} %), "
        f"where the median update is {most.median_update:.2g} and half a unit in the last place of the median "
        f"parameter {most.median_half_unit:.2g}, fewest in {least} ({100 * fewest.share:.3g} %), with "
        f"{fewest.median_update:.2g} against {fewest.median_half_unit:.2g}. What was made goes "
        f"{100 * total.progress:.3g} % of the way along what was wanted.",
        {
            "learning_rate": rate,
            "swallowed": total.share,
            "norm_share": total.norm_share,
            "progress": total.progress,
            "worst_layer": worst,
            "worst_share": most.share,
        },
    )


def _compared(outcomes: list[_Outcome], rate: float) -> Iterator[Finding]:
    reference, *others = outcomes
    for each in others:
        difference = each.loss_in_fp32 - reference.loss_in_fp32
        yield note(
            "updates-kept",
            f"{each.name}, {each.bytes_per_parameter} bytes a parameter where fp32 takes "
            f"{reference.bytes_per_parameter}: at lr {rate:g} the loss ends at {each.loss_in_fp32:.5g}, "
            f"{abs(difference):.2g} {'above' if difference > 0 else 'below'} fp32's; the parameters are "
            f"{100 * each.distance:.3g} % of the fp32 run's way from where it ended.",
            {"loss": each.loss_in_fp32, "distance": each.distance, "bytes": each.bytes_per_parameter},
        )
    near, far = (pick(others, key=lambda each: each.distance) for pick in (min, max))
    ahead, behind = (
        pick(others, key=lambda each: abs(each.loss_in_fp32 - reference.loss_in_fp32)) for pick in (min, max)
    )
    random = next(each for each in others if "stochastic" in each.name)
    assert random.swallowed is not None and random.progress is not None
    yield note(
        "updates-ranked",
        f'By the parameters "{near.name}" ends nearest to the fp32 run and "{far.name}" farthest; by the loss '
        f'"{ahead.name}" nearest and "{behind.name}" farthest. Of the updates rounded at random '
        f"{100 * random.swallowed:.3g} % change nothing, and all together go {100 * random.progress:.4g} % of the way "
        "along what was wanted: what takes the parameters away from the fp32 run is noise.",
        {each.name: each.distance for each in others},
    )
