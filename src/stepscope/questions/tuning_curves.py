"""Do the losses of the fastest step follow those of the step that it replaces? Short trainings, a process each.

A step that is faster because it computes something else shows it in its losses. How far they may be apart is told by
the baseline itself, started from other parameters over the same batches (`questions/quality_answer.py`).
"""

import contextlib
import gc
import hashlib
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from stepscope.core.errors import InputError
from stepscope.core.files import replace_file
from stepscope.core.study_results import LossCurve
from stepscope.core.workloads import Workload
from stepscope.engine.stages import make_step
from stepscope.engine.user_code import answer_apart, ask_apart, end_asked
from stepscope.questions.quality_answer import departure, reach_of, smoothed, starts_apart, window_of
from stepscope.recording.device import limit_memory
from stepscope.recording.environment import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.recording.step import drive
from stepscope.training.parallel.launching import Say, launch
from stepscope.training.training_step import AssembledStep, Ranks

STEPS = 50
OTHER_STARTS = 2
TRAININGS = 2 + OTHER_STARTS
"""The baseline, the same from other parameters, and the fastest step."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """A short training: its step, and where it starts."""

    workload: Workload
    device: str
    start_seed: int | None = None
    """The seed of its first parameters, where that is not the workload's; its batches are the workload's."""
    memory_limit_bytes: int | None = None
    steps: int = STEPS

    @property
    def identity(self) -> tuple[object, ...]:
        """What its losses depend on, as far as the same command has it again."""
        kind = self.device.partition(":")[0]
        return self.workload.identity, kind, self.start_seed, self.memory_limit_bytes, self.steps


def losses_of(*trainings: Training) -> list[list[float] | None]:
    """The losses of each training: that of each step before its update, until one is not finite. A training whose other
    start would have the same parameters has None. One process of its own runs all trainings, one after another; where
    ranks share the step, one of each rank does. Raises InputError for a step of the user's own, which has no loss
    that is known."""
    first = trainings[0]
    if first.workload.ranks > 1:
        device = resolve_device(first.device).type
        losses = launch(f"{__name__}:train_on_ranks", trainings, ranks=first.workload.ranks, device=device).values[0]
    else:
        text = msgspec.json.encode(trainings).decode()
        losses = ask_apart(__name__, text, what=f"the training of {first.workload.name}")
    return msgspec.json.decode(losses, type=list[list[float] | None])


def main(text: str) -> str:
    """Train, and write the losses as JSON, for `losses_of`."""
    return msgspec.json.encode(_one_by_one(text.encode(), trained)).decode()


def train_on_ranks(argument: bytes, ranks: Ranks, device: torch.device, say: Say) -> list[list[float] | None]:
    """The mean losses of all ranks, for `losses_of`. Each step is told: ranks that say nothing are taken to hang."""

    def mean_losses(training: Training) -> list[float] | None:
        of_ranks = ranks.gathered(_trained(training, device, ranks, lambda step: say(f"training step {step}")))
        if None in of_ranks:
            return None
        known = [losses for losses in of_ranks if losses]  # in a pipeline, the last stage alone has a loss
        return [statistics.fmean(of_step) for of_step in zip(*known, strict=False)]

    return _one_by_one(argument, mean_losses)


def _one_by_one(text: bytes, train: Callable[[Training], list[float] | None]) -> list[list[float] | None]:
    losses: list[list[float] | None] = []
    for training in msgspec.json.decode(text, type=list[Training]):
        losses.append(train(training))
        gc.collect()  # a step's hooks hold it in circles, and the next one needs its memory
    return losses


def trained(training: Training) -> list[float] | None:
    """The losses of a training in this process, as `losses_of` has them."""
    return _trained(training, resolve_device(training.device))


def _trained(
    training: Training,
    device: torch.device,
    ranks: Ranks | None = None,
    tell: Callable[[int], object] = lambda _step: None,
) -> list[float] | None:
    limit_memory(device, training.memory_limit_bytes)
    with matmul_precision(training.workload.dtype):
        step, _ = make_step(training.workload, device, None, ranks)
        if not isinstance(step, AssembledStep):
            raise InputError("a step of your own tells no loss")
        if training.start_seed is not None:
            batches, usual = step.batches, _sums(step)
            del step
            step, _ = make_step(
                msgspec.structs.replace(training.workload, seed=training.start_seed), device, None, ranks
            )
            assert isinstance(step, AssembledStep)
            alike = (ranks or Ranks()).gathered(_sums(step) == usual)
            if all(alike):  # ranks go on together, or not at all
                return None
            step.batches = batches
        step.keep_losses()
        losses: list[torch.Tensor] = []
        for number in range(training.steps):
            tell(number + 1)
            drive(step)
            if step.mean_loss is not None:
                losses.append(step.mean_loss)
    return list(itertools.takewhile(math.isfinite, map(float, losses)))


def _sums(step: AssembledStep) -> list[float]:
    """The sum of each parameter, by which other parameters are told."""
    return [float(parameter.detach().sum(dtype=torch.float64)) for parameter in step.model.parameters()]


def curves(
    baseline: Workload, best: Workload, device: str, memory_limit_bytes: int | None = None, *,
    out: Path | None = None, fresh: bool = False, at_once: bool = False,
) -> tuple[LossCurve, ...]:  # fmt: skip
    """Losses of the baseline, of the baseline from other starts, where it has any, and of the fastest step.

    out: where a search keeps its runs. Losses are kept there, too, and those of an earlier search taken, unless fresh.
    at_once: whether the device has room for both steps: nothing is timed, so they may train beside each other.
    """
    training = Training(workload=baseline, device=device, memory_limit_bytes=memory_limit_bytes)
    starts = {f"baseline, start {n + 1}": baseline.seed + n for n in range(1, 1 + OTHER_STARTS)}
    others = (msgspec.structs.replace(training, start_seed=seed) for seed in starts.values())
    sides = ((training, *others), (msgspec.structs.replace(training, workload=best),))
    trained = _at_once(sides, out, fresh) if at_once else [_kept_losses(side, out, fresh) for side in sides]
    by_name = dict(zip(("baseline", *starts, "fastest"), itertools.chain(*trained), strict=True))
    return tuple(LossCurve(name=name, losses=tuple(losses)) for name, losses in by_name.items() if losses is not None)


def _at_once(sides: Sequence[tuple[Training, ...]], out: Path | None, fresh: bool) -> list[list[list[float] | None]]:
    """The losses of both sides, which train beside each other. An interrupt ends their processes."""
    with ThreadPoolExecutor(len(sides)) as threads:
        try:
            return [*threads.map(lambda side: _kept_losses(side, out, fresh), sides)]
        except BaseException:
            end_asked()
            raise


def _kept_losses(trainings: tuple[Training, ...], out: Path | None, fresh: bool) -> list[list[float] | None]:
    """The losses of these trainings, from the file that an earlier search left where it left one."""
    of = msgspec.json.encode([each.identity for each in trainings], order="sorted")
    digest = hashlib.sha256(of).hexdigest()[:12]
    path = out / f".losses-{digest}.json" if out is not None else None
    if path is not None and not fresh:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            losses = msgspec.json.decode(path.read_bytes(), type=list[list[float] | None])
            if len(losses) == len(trainings):
                return losses
    losses = losses_of(*trainings)
    replace_file(path, msgspec.json.encode(losses))
    return losses


def why_not_compared(losses: Sequence[LossCurve], steps: int = STEPS) -> str:
    """Why these losses cannot say how far the fastest step's may be from the baseline's; empty where they can."""
    starts = losses[:-1]
    if len(starts) < 2:
        return "the factory makes the same parameters from every seed, so no other start says how far is too far"
    if len(starts[0].losses) < steps:
        return "the baseline's losses do not stay finite"
    if all(len(set(curve.losses)) == 1 for curve in starts):
        return "the baseline's losses never change, so they say nothing of training"
    if any(len(curve.losses) < steps for curve in starts):
        return "the baseline's losses from another start do not stay finite"
    return ""


def departs_at(every: Sequence[LossCurve], steps: int = STEPS) -> int | None:
    """The step at which the best one's losses depart from the baseline's; None where they do not."""
    *starts, best = (curve.losses for curve in every)
    length = min(map(len, starts), default=0)
    if not length:
        return None
    if len(starts) < 2:
        return len(best) + 1 if len(best) < length else None
    window, reach = window_of(steps), reach_of(steps)
    smooth = [smoothed(losses[:length], window) for losses in starts]
    return departure(best[:length], smooth[0], starts_apart(smooth, reach), window=window, reach=reach)


if __name__ == "__main__":
    answer_apart(main)
