"""Dynamic loss scaling, traced over a run that overflows on purpose: our scaler beside torch.amp.GradScaler."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, error, note
from stepscope.core.errors import InputError
from stepscope.core.figures import digits
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS
from stepscope.core.model_config import LARGEST, whole_number
from stepscope.questions.answers import computed_answer, curves, one_thread, table_by
from stepscope.questions.steps import check_loss, factory_workload, step_of, trained_parameters
from stepscope.questions.swallowed import IN_FORMATS, held_in
from stepscope.recording.environment import resolve_device
from stepscope.training.training_step import AssembledStep

# A dynamic loss scale, by the rule and the constants of torch.amp.GradScaler.
#
# The loss is multiplied by a scale so that small gradients survive fp16 (`underflow.py`). Nobody knows the best scale
# beforehand, and it changes; so it is tried out. A step whose gradients are not all finite is skipped, and the scale
# multiplied by the backoff factor; after so many steps without an overflow (the growth interval) it is multiplied by
# the growth factor (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).


INITIAL_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5


class DynamicLossScaler:
    """A loss scale that adapts itself, and leaves out steps whose gradients are not all finite.

    scaled(loss).backward(); step(optimizer); update() -- as with torch.amp.GradScaler, and to the same bits: the scale
    is a number of fp32, and gradients are multiplied by its reciprocal, rounded to fp32.
    """

    def __init__(
        self,
        *,
        initial_scale: float = INITIAL_SCALE,
        growth_factor: float = GROWTH_FACTOR,
        backoff_factor: float = BACKOFF_FACTOR,
        growth_interval: int = 2000,
    ) -> None:
        whole_number(growth_interval, "growth_interval", 1, 2**31 - 1)
        if not (math.isfinite(initial_scale) and initial_scale > 0):
            raise InputError(f"the initial loss scale is {initial_scale!r}: it must be positive and finite")
        if not (math.isfinite(growth_factor) and growth_factor > 1 and 0 < backoff_factor < 1):
            raise InputError(
                f"growth factor {growth_factor!r}, backoff factor {backoff_factor!r}: the first must be above 1, the "
                "second between 0 and 1"
            )
        self.scale = FORMATS["fp32"].round(initial_scale)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.steps_since_change = 0
        """Steps in a row without an overflow, since the scale last changed."""
        self._overflowed = False

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale: what backward begins with."""
        return loss * self.scale

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale the gradients in place and step, if all of them are finite. Returns whether the step was taken."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._overflowed = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        # 1 / scale overflows only for a scale that is a subnormal number of fp32; GradScaler then has infinity too.
        inverse = FORMATS["fp32"].round(1 / self.scale) if self.scale else math.inf
        for gradient in gradients:
            gradient.mul_(inverse)
        if not self._overflowed:
            optimizer.step()
        return not self._overflowed

    def update(self) -> None:
        """Let the scale back off, grow, or stay as it is. To be called after every step."""
        if self._overflowed:
            self.scale = FORMATS["fp32"].round(self.scale * self.backoff_factor)
            self.steps_since_change = 0
            return
        self.steps_since_change += 1
        if self.steps_since_change == self.growth_interval:
            grown = FORMATS["fp32"].round(self.scale * self.growth_factor)
            # A scale that would be infinite stays.
            self.scale = grown if math.isfinite(grown) else self.scale
            self.steps_since_change = 0


PLANTED = (7, 8, 60, 90, 91, 92, 150)
"""Steps whose batch is made to overflow: alone, in a row, and soon after the scale has grown."""

_WIDTH, _BATCH = 32, 64
_OUTLIER = 2.0**24
"""Added to a planted batch's targets: the gradient of the squared error is then beyond fp16 at any scale above 1."""
_MULTIPLIED = 2.0**40
"""The factor of the loss of a planted batch of a user's own module: what reaches a product in fp16 is then infinite."""


@dataclass(frozen=True)
class _Turn:
    """What one scaler did in one step."""

    scale: float
    """What the step's loss was multiplied by."""
    stepped: bool
    next_scale: float


@dataclass(frozen=True)
class _Step:
    """One step of both runs."""

    number: int
    planted: bool
    ours: _Turn
    theirs: _Turn

    @property
    def what_happened(self) -> str:
        """What became of the scale, in words; empty where nothing was planted and it stayed, in both alike."""
        if not self.ours.stepped:
            return "planted overflow, skipped" if self.planted else "overflow of its own, skipped"
        if self.ours.next_scale > self.ours.scale:
            return "scale grows"
        eventful = self.planted or self.ours.next_scale != self.ours.scale or self.ours != self.theirs
        return "planted, but nothing overflowed" if eventful else ""


def study_scaling(
    *, steps: int = 200, growth_interval: int = 20, planted: Sequence[int] | None = None, device: str = "auto",
    seed: int = 0, factory: str | None = None, arguments: Mapping[str, Any] | None = None,
) -> Answer:  # fmt: skip
    """Train under fp16 autocast twice, with our scaler and with PyTorch's, and set the two runs side by side.

    planted: steps, counted from 1, that are made to overflow; None takes the steps of PLANTED up to `steps`.
    factory: that of a module of the user's own that is trained in place of a small network; `arguments`: what it is
    called with.
    """
    whole_number(steps, "steps", 1, 100_000)
    whole_number(seed, "seed", 0, LARGEST)
    if planted is None:
        planted = tuple(step for step in PLANTED if step <= steps)
    for step in planted:
        whole_number(step, "a planted overflow's step", 1, steps)
    on = resolve_device(device)
    precision = {"dtype": "fp16", "phase": "forward-backward"}
    workload = None if factory is None else factory_workload(factory, arguments, **precision, seed=seed)
    with one_thread() if workload is None else contextlib.nullcontext():
        both = [
            _regression(seed, on) if workload is None else _user_module(step_of(workload, on), seed) for _ in range(2)
        ]
        trace, same_parameters = _trace(steps, growth_interval, frozenset(planted), both, on)
    by_format = _by_format([each.grad for each in both[0].model.parameters() if each.grad is not None], trace[-1])
    return computed_answer(
        on,
        study="scaling",
        question="How does a dynamic loss scale find its way, and is ours that of torch.amp.GradScaler?",
        settings={
            **({} if workload is None else workload.named),
            "steps": steps,
            "growth_interval": growth_interval,
            "growth_factor": GROWTH_FACTOR,
            "backoff_factor": BACKOFF_FACTOR,
            "initial_scale": INITIAL_SCALE,
            "seed": seed,
            "planted": ", ".join(map(str, sorted(set(planted)))),
        },
        tables=(_changes(trace), _totals(trace, same_parameters), *([_formats(by_format)] if by_format else [])),
        panels=(_panel(trace),),
        findings=[
            *([_of_blocks(by_format, trace[-1].ours.scale)] if by_format else []),
            *_findings(trace, growth_interval, same_parameters),
        ],
    )


@dataclass(frozen=True)
class _Trainee:
    """What both scalers train, each a copy of its own."""

    model: nn.Module
    loss: Callable[[bool], Tensor]
    """The next batch's loss, its forward under fp16 autocast; made to overflow where that is planted."""


def _regression(seed: int, device: torch.device) -> _Trainee:
    """A small network that learns a linear function. A planted batch has targets that are far away."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(_WIDTH, 1, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1)
        model = nn.Sequential(*layers).to(device)

    def loss(planted: bool) -> Tensor:
        inputs = torch.randn(_BATCH, _WIDTH, generator=generator)
        targets = inputs @ mixing + (_OUTLIER if planted else 0.0)
        with torch.autocast(device.type, dtype=torch.float16):
            outputs = model(inputs.to(device))
        return F.mse_loss(outputs.float(), targets.to(device))

    return _Trainee(model, loss)


def _user_module(step: AssembledStep, seed: int) -> _Trainee:
    """A user's module. A planted batch has its loss multiplied."""
    seeds = itertools.count(seed)

    def loss(planted: bool) -> Tensor:
        step.prepare()
        # Dropout then leaves out the same of both copies.
        batch_seed = next(seeds)
        torch.manual_seed(batch_seed)
        step.phases[0].run()
        assert step.loss is not None
        if batch_seed == seed:
            check_loss(step.loss.item())
        return step.loss.float() * (_MULTIPLIED if planted else 1.0)

    return _Trainee(step.model, loss)


def _trace(
    steps: int, growth_interval: int, planted: frozenset[int], trainees: Sequence[_Trainee], device: torch.device
) -> tuple[list[_Step], bool]:
    """Every step, and whether both runs end with the same parameters, bit for bit."""
    scaler = DynamicLossScaler(growth_interval=growth_interval)
    grad_scaler = torch.amp.GradScaler(
        device.type,
        init_scale=INITIAL_SCALE,
        growth_factor=GROWTH_FACTOR,
        backoff_factor=BACKOFF_FACTOR,
        growth_interval=growth_interval,
    )
    parameters = [list(trained_parameters(trainee.model).values()) for trainee in trainees]
    our_optimizer, their_optimizer = (torch.optim.SGD(each, lr=1e-3) for each in parameters)
    trace: list[_Step] = []
    moves: list[torch.optim.Optimizer] = []
    # GradScaler does not say whether it stepped.
    their_optimizer.register_step_post_hook(lambda optimizer, _args, _kwargs: moves.append(optimizer))
    for number in range(1, steps + 1):
        scale, their_scale = scaler.scale, grad_scaler.get_scale()
        for trainee, scaled in zip(trainees, (scaler.scaled, grad_scaler.scale), strict=True):
            trainee.model.zero_grad(set_to_none=True)
            scaled(trainee.loss(number in planted)).backward()
        stepped = scaler.step(our_optimizer)
        scaler.update()
        moves.clear()
        grad_scaler.step(their_optimizer)
        grad_scaler.update()
        ours_now = _Turn(scale, stepped, scaler.scale)
        theirs_now = _Turn(their_scale, bool(moves), grad_scaler.get_scale())
        trace.append(_Step(number, number in planted, ours_now, theirs_now))
    same = all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))
    return trace, same


def _changes(trace: list[_Step]) -> Table:
    return table_by(
        "Steps at which something happened",
        (step for step in trace if step.what_happened),
        {
            "step": lambda step: step.number,
            "what happened": lambda step: step.what_happened,
            "scale": lambda step: step.ours.scale,
            "scale after": lambda step: step.ours.next_scale,
            "GradScaler after": lambda step: step.theirs.next_scale,
            "GradScaler skipped": lambda step: not step.theirs.stepped,
            "same": lambda step: step.ours == step.theirs,
        },
    )


def _totals(trace: list[_Step], same_parameters: bool) -> Table:
    both = [step.ours for step in trace], [step.theirs for step in trace]
    rows: tuple[tuple[Cell, ...], ...] = (
        ("steps", len(trace), len(trace)),
        ("skipped steps", *(sum(not turn.stepped for turn in turns) for turns in both)),
        ("last scale", *(turns[-1].next_scale for turns in both)),
        ("highest scale", *(max(turn.scale for turn in turns) for turns in both)),
        ("parameters at the end", "the same" if same_parameters else "different", ""),
    )
    return Table(title="Both runs", columns=("", "ours", "GradScaler"), rows=rows)


@dataclass(frozen=True)
class _Format:
    """What a format makes of gradients without the loss scale and with it: shares of those that are not zero."""

    name: str
    zero: float
    scaled_zero: float
    changed: float
    """Where the scale changes what they become, once they are divided by it again."""


def _by_format(gradients: Sequence[Tensor], last: _Step) -> list[_Format]:
    """What the formats make of the last step's gradients; nothing of gradients that overflowed, with the scale in fp32
    too, or are all zero."""
    total = sum(int(each.count_nonzero()) for each in gradients)
    held = all(bool((each.float() * last.ours.scale).isfinite().all()) for each in gradients)
    if not (last.ours.stepped and total and held):
        return []
    found: list[_Format] = []
    for name in IN_FORMATS:
        zero = scaled_zero = changed = 0
        for each in gradients:
            exact = each.float()
            plain, scaled = held_in(exact, name), held_in(exact * last.ours.scale, name) / last.ours.scale
            zero += int(((plain == 0) & (exact != 0)).sum())
            scaled_zero += int(((scaled == 0) & (exact != 0)).sum())
            changed += int((plain != scaled).sum())
        found.append(_Format(name, zero / total, scaled_zero / total, changed / total))
    return found


def _formats(by_format: Sequence[_Format]) -> Table:
    return table_by(
        "The last gradients in each format, without the loss scale and with it",
        by_format,
        {
            "format": lambda each: each.name,
            "become zero without, %": lambda each: digits(100 * each.zero),
            "become zero with it, %": lambda each: digits(100 * each.scaled_zero),
            "changed by it, %": lambda each: digits(100 * each.changed),
        },
    )


def _of_blocks(by_format: Sequence[_Format], scale: float) -> Finding:
    blocks = [each for each in by_format if each.name in BLOCK_FORMATS]
    moved = [f"{each.name} ({100 * each.changed:.3g} %)" for each in blocks if each.changed]
    most = max(by_format, key=lambda each: each.zero - each.scaled_zero)
    kept = f"{100 * (most.zero - most.scaled_zero):.3g} %" if most.zero > most.scaled_zero else "none"
    where = f"{most.name}, the most of all formats" if kept != "none" else "any format"
    return note(
        "loss-scale-formats",
        f"A loss scale of {scale:g} keeps {kept} of the last gradients from zero in {where}. In formats of blocks it "
        + (
            f"changes what some become: {', '.join(moved)}."
            if moved
            else "changes none: each block's scale takes it up."
        ),
        {"scale": scale, "format": most.name, "saved": most.zero - most.scaled_zero},
    )


def _panel(trace: list[_Step]) -> Panel:
    """Curves of the scale in both runs. Where they are the same, one line lies on the other."""
    lines = {"GradScaler": [step.theirs for step in trace], "ours": [step.ours for step in trace]}
    points = ((line, float(i), turn.scale) for line, turns in lines.items() for i, turn in enumerate(turns, start=1))
    return curves(points, x_title="step", y_title="loss scale", y_log=True)


def _findings(trace: list[_Step], growth_interval: int, same_parameters: bool) -> Iterator[Finding]:
    skipped = [step for step in trace if not step.ours.stepped]
    unplanted = [step for step in skipped if not step.planted]
    grown = sum(step.ours.next_scale > step.ours.scale for step in trace)
    ends = trace[-1].ours.next_scale
    planted = len(skipped) - len(unplanted)
    grew = "The scale never grew"
    if grown:
        times = "once" if grown == 1 else f"{grown} times"
        grew = f"The scale grew {times}, after {growth_interval} steps without an overflow each time"
    yield note(
        "loss-scale-trace",
        f"Skipped: {len(skipped)} of {len(trace)} steps, {planted} with a planted overflow, {len(unplanted)} "
        f"because the scale itself was too large. {grew}, and ends at {ends:g}.",
        {"skipped": len(skipped), "planted": planted, "own": len(unplanted), "grown": grown, "last_scale": ends},
    )
    if unplanted:
        scales = sorted({step.ours.scale for step in unplanted})
        lowest, highest = scales[0], scales[-1]
        at = f"a scale of {lowest:g}" if lowest == highest else f"scales from {lowest:g} to {highest:g}"
        times = "once" if len(unplanted) == 1 else f"{len(unplanted)} times"
        yield note(
            "loss-scale-ceiling",
            f"Where nothing was planted the gradients overflowed fp16 at {at}, "
            f"{times} in {len(trace) - planted} steps: that is the price of finding the scale by trying.",
            {"lowest_overflowing_scale": lowest, "highest_overflowing_scale": highest},
        )
    different = [step.number for step in trace if step.ours != step.theirs]
    if different or not same_parameters:
        comparison = f"differ first at step {different[0]}" if different else "agree, but the parameters do not"
        yield error(
            "loss-scale-agreement",
            f"Our scaler and torch.amp.GradScaler {comparison}.",
            {"first_different_step": different[0] if different else None, "different": len(different)},
        )
        return
    yield note(
        "loss-scale-agreement",
        f"Our scaler and torch.amp.GradScaler had the same scale and the same skipped steps in all "
        f"{len(trace)} steps, and the parameters at the end are the same, bit for bit.",
        {"steps": len(trace), "different": 0},
    )
