"""Dynamic loss scaling, our own, traced over a run that overflows on purpose and held against torch.amp.GradScaler.

The loss is multiplied by a scale so that small gradients survive fp16 (`gradient_underflow.py`). Nobody knows the best
scale beforehand, and it changes; so it is tried out. A step whose gradients are not all finite is skipped, and the
scale multiplied by the backoff factor; after so many steps without (the growth interval) it is multiplied by the growth
factor (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the rule and its constants are those of
torch.amp.GradScaler).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.finding import Finding
from stepscope.core.float_format import FORMATS
from stepscope.core.model_config import LARGEST, whole_number
from stepscope.measure.device import resolve_device
from stepscope.numerics.setting import device_name, one_thread, versions

INITIAL_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
PLANTED = (7, 8, 60, 90, 91, 92, 150)
"""Steps whose batch is made to overflow: alone, in a row, and soon after the scale has grown."""

_WIDTH, _BATCH = 32, 64
_OUTLIER = 2.0**24
"""Added to a planted batch's targets: the gradient of the squared error is then beyond fp16 at any scale above 1."""


class DynamicLossScaler:
    """The scale of a loss, and whether a step may be taken.

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
        """The loss that backward is to begin with."""
        return loss * self.scale

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale the gradients in place and step, if all of them are finite. Returns whether the step was taken."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._overflowed = not all_finite(gradients)
        # 1 / scale overflows only for a scale that is a subnormal number of fp32; GradScaler then has infinity too.
        inverse = FORMATS["fp32"].round(1 / self.scale) if self.scale else math.inf
        for gradient in gradients:
            gradient.mul_(inverse)
        if not self._overflowed:
            optimizer.step()
        return not self._overflowed

    def update(self) -> None:
        """After every step: back off, grow, or leave the scale."""
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


def all_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


@dataclass(frozen=True)
class _Step:
    """One step of both runs. Scales are those that its loss was multiplied by."""

    number: int
    planted: bool
    scale: float
    torch_scale: float
    taken: bool
    torch_taken: bool
    next_scale: float
    torch_next_scale: float

    @property
    def same(self) -> bool:
        return (self.scale, self.taken, self.next_scale) == (self.torch_scale, self.torch_taken, self.torch_next_scale)


def study_scaling(
    *, steps: int = 200, growth_interval: int = 20, planted: tuple[int, ...] | None = None, device: str = "auto",
    seed: int = 0,
) -> Experiment:  # fmt: skip
    """Train under fp16 autocast twice, with our scaler and with PyTorch's, and set the two runs side by side.

    planted: steps, counted from 1, that are made to overflow; None takes the steps of PLANTED up to `steps`.
    """
    whole_number(steps, "steps", 1, 100_000)
    whole_number(seed, "seed", 0, LARGEST)
    if planted is None:
        planted = tuple(step for step in PLANTED if step <= steps)
    for step in planted:
        whole_number(step, "a planted overflow's step", 1, steps)
    on = resolve_device(device)
    with one_thread():
        trace, same_parameters = _trace(steps, growth_interval, frozenset(planted), on, seed)
    return Experiment(
        study="scaling",
        question="How does a dynamic loss scale find its way, and is ours that of torch.amp.GradScaler?",
        device=device_name(on),
        versions=versions(),
        settings={
            "steps": steps, "growth_interval": growth_interval, "growth_factor": GROWTH_FACTOR,
            "backoff_factor": BACKOFF_FACTOR, "initial_scale": INITIAL_SCALE, "seed": seed,
            "planted": ", ".join(map(str, sorted(set(planted)))),
        },
        tables=(_changes(trace), _totals(trace, same_parameters)),
        panels=(_panel(trace),),
        findings=tuple(_findings(trace, growth_interval, same_parameters)),
    )  # fmt: skip


def _trace(
    steps: int, growth_interval: int, planted: frozenset[int], device: torch.device, seed: int
) -> tuple[list[_Step], bool]:
    """Every step, and whether both runs end with the same parameters, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = (_model(seed, device) for _ in range(2))
    scaler = DynamicLossScaler(growth_interval=growth_interval)
    grad_scaler = torch.amp.GradScaler(
        device.type, init_scale=INITIAL_SCALE, growth_factor=GROWTH_FACTOR, backoff_factor=BACKOFF_FACTOR,
        growth_interval=growth_interval,
    )  # fmt: skip
    our_optimizer, their_optimizer = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (ours, theirs))
    mixing = torch.randn(_WIDTH, 1, generator=generator)
    trace: list[_Step] = []
    moves: list[torch.optim.Optimizer] = []
    # GradScaler does not say whether it stepped.
    their_optimizer.register_step_post_hook(lambda optimizer, _args, _kwargs: moves.append(optimizer))
    for number in range(1, steps + 1):
        inputs = torch.randn(_BATCH, _WIDTH, generator=generator)
        targets = inputs @ mixing + (_OUTLIER if number in planted else 0.0)
        inputs, targets = inputs.to(device), targets.to(device)
        scale, their_scale = scaler.scale, grad_scaler.get_scale()
        _backward(ours, inputs, targets, scaler.scaled)
        _backward(theirs, inputs, targets, grad_scaler.scale)
        taken = scaler.step(our_optimizer)
        scaler.update()
        moves.clear()
        grad_scaler.step(their_optimizer)
        grad_scaler.update()
        trace.append(
            _Step(
                number, number in planted, scale, their_scale, taken, bool(moves), scaler.scale, grad_scaler.get_scale()
            )
        )  # fmt: skip
    same = all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    return trace, same


def _model(seed: int, device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1)).to(device)


def _backward(model: nn.Module, inputs: Tensor, targets: Tensor, scaled: Callable[[Tensor], Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        outputs = model(inputs)
    scaled(F.mse_loss(outputs.float(), targets)).backward()


def _what_happened(step: _Step) -> str:
    if not step.taken:
        return "planted overflow, skipped" if step.planted else "overflow of its own, skipped"
    return "scale grows" if step.next_scale > step.scale else "planted, but nothing overflowed"


def _changes(trace: list[_Step]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            step.number, _what_happened(step), step.scale, step.next_scale, step.torch_next_scale, not step.torch_taken,
            step.same,
        )
        for step in trace
        if step.planted or not step.taken or step.next_scale != step.scale or not step.same
    )  # fmt: skip
    columns = ("step", "what happened", "scale", "scale after", "GradScaler after", "GradScaler skipped", "same")
    return Table(title="Steps at which something happened", columns=columns, rows=rows)


def _totals(trace: list[_Step], same_parameters: bool) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("steps", len(trace), len(trace)),
        ("skipped steps", sum(not step.taken for step in trace), sum(not step.torch_taken for step in trace)),
        ("last scale", trace[-1].next_scale, trace[-1].torch_next_scale),
        ("highest scale", max(step.scale for step in trace), max(step.torch_scale for step in trace)),
        ("parameters at the end", "the same" if same_parameters else "different", ""),
    )
    return Table(title="Both runs", columns=("", "ours", "GradScaler"), rows=rows)


def _panel(trace: list[_Step]) -> Panel:
    """Every step's scale in both runs: where they are the same, one line lies on the other."""
    points = [Point(line="GradScaler", x=float(step.number), y=step.torch_scale) for step in trace]
    points += [Point(line="ours", x=float(step.number), y=step.scale) for step in trace]
    return Panel(x_title="step", y_title="loss scale", points=tuple(points), x_log=False, y_log=True)


def _scales(scales: list[float]) -> str:
    return f"a scale of {scales[0]:g}" if len(scales) == 1 else f"scales from {scales[0]:g} to {scales[-1]:g}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _findings(trace: list[_Step], growth_interval: int, same_parameters: bool) -> Iterator[Finding]:
    skipped = [step for step in trace if not step.taken]
    own = [step for step in skipped if not step.planted]
    grown = sum(step.next_scale > step.scale for step in trace)
    planted = len(skipped) - len(own)
    grew = "The scale never grew"
    if grown:
        grew = f"The scale grew {_times(grown)}, after {growth_interval} steps without an overflow each time"
    yield Finding(
        kind="loss-scale-trace",
        severity="note",
        sentence=f"Skipped: {len(skipped)} of {len(trace)} steps, {planted} with a planted overflow, {len(own)} "
        f"because the scale itself was too large. {grew}, and ends at {trace[-1].next_scale:g}.",
        evidence={
            "skipped": len(skipped), "planted": planted, "own": len(own), "grown": grown,
            "last_scale": trace[-1].next_scale,
        },
    )  # fmt: skip
    if own:
        scales = sorted({step.scale for step in own})
        yield Finding(
            kind="loss-scale-ceiling",
            severity="note",
            sentence=f"Where nothing was planted the gradients overflowed fp16 at {_scales(scales)}, "
            f"{_times(len(own))} in {len(trace) - planted} steps: that is the price of finding the scale by trying.",
            evidence={"lowest_overflowing_scale": scales[0], "highest_overflowing_scale": scales[-1]},
        )
    different = [step.number for step in trace if not step.same]
    if different or not same_parameters:
        said = f"differ first at step {different[0]}" if different else "agree, but the parameters do not"
        yield Finding(
            kind="loss-scale-agreement",
            severity="error",
            sentence=f"Our scaler and torch.amp.GradScaler {said}.",
            evidence={"first_different_step": different[0] if different else None, "different": len(different)},
        )
        return
    yield Finding(
        kind="loss-scale-agreement",
        severity="note",
        sentence=f"Our scaler and torch.amp.GradScaler had the same scale and the same skipped steps in all "
        f"{len(trace)} steps, and the parameters at the end are the same, bit for bit.",
        evidence={"steps": len(trace), "different": 0},
    )
