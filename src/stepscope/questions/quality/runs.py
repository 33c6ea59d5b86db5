"""The runs of the study: which there are, one after another, and what each is judged by."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from stepscope.core.errors import DeviceError, InputError, choose, one_line
from stepscope.core.model_config import LARGEST, whole_number
from stepscope.core.workload import Workload
from stepscope.questions.quality.departure import (
    departure,
    not_finite_from,
    reach_of,
    smoothed,
    starts_apart,
    window_of,
)
from stepscope.questions.quality.findings import FinalLoss, Kind, RunJudged, RunsJudged
from stepscope.questions.quality.training import REFERENCE, VARIANTS, Trained, Variant


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the study. Its parameters begin as those of `start_seed`."""

    name: str
    variant: Variant
    start_seed: int
    of_starts: bool = False
    """Whether it is fp32 from the parameters of another seed: a yardstick."""
    step: Workload | None = None
    """The whole step that it trains by, in place of a variant's; the variant then says nothing."""

    @property
    def kind(self) -> Kind:
        if self.step is not None:
            return "whole steps"
        return "parameters in fp32" if self.variant.keeping is None else "parameters in bf16"


OTHER_STARTS = 2  # More runs of fp32, each from the parameters of the next seed.


def planned_runs(
    asked: Sequence[str] | None, check: Callable[[str, Variant], None], seed: int
) -> tuple[list[PlannedRun], dict[str, str]]:
    """fp32, fp32 from OTHER_STARTS other starts, and each variant, all if none is asked for; and why each other variant
    is left out.

    check: raises InputError for a variant that cannot run. So does this function, for one that was asked for.
    """
    names, left_out = _chosen(asked, check)
    reference = VARIANTS[REFERENCE]
    starts = [
        PlannedRun(name=f"fp32, start of seed {start}", variant=reference, start_seed=start, of_starts=True)
        for start in range(seed + 1, seed + OTHER_STARTS + 1)
    ]
    others = [PlannedRun(name=name, variant=VARIANTS[name], start_seed=seed) for name in names if name != REFERENCE]
    return [PlannedRun(name=REFERENCE, variant=reference, start_seed=seed), *starts, *others], left_out


def _chosen(asked: Sequence[str] | None, check: Callable[[str, Variant], None]) -> tuple[list[str], dict[str, str]]:
    if asked is not None and not asked:
        raise InputError(f"no variant is given: choose of {', '.join(VARIANTS)}")
    for name in asked or ():
        choose(name, tuple(VARIANTS), "variant")
    names, left_out = [], {}
    for name in dict.fromkeys(asked or VARIANTS):
        try:
            check(name, VARIANTS[name])
        except InputError as error:
            if asked is not None:
                raise
            left_out[name] = str(error).partition(":")[0]
        else:
            names.append(name)
    return names, left_out


LEAST_STEPS = 20
Told = Callable[[str, float], None]
"""A function that is called with the name of the run and the share of the study that is done."""


def check_training(steps: int, learning_rate: float, seed: int) -> None:
    """Raise InputError for a length, a learning rate or a seed that cannot be."""
    whole_number(steps, "steps", LEAST_STEPS, 1_000_000)
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InputError(f"the learning rate {learning_rate!r} is not a positive number: choose one as 1e-3")
    whole_number(seed, "seed", 0, LARGEST)


def run_in_turn(
    planned: Sequence[PlannedRun],
    train: Callable[[PlannedRun, Callable[[int], None]], Trained | None],
    steps: int,
    tell: Told | None,
) -> tuple[dict[str, Trained], str | None]:
    """The results of the runs by name, and the name of the run in which the user stopped the study.

    train: returns None for a run that is left out. Raises KeyboardInterrupt where not even the first run has ended, and
    DeviceError where a GPU lacks memory.
    """
    runs: dict[str, Trained] = {}
    for i, each in enumerate(planned):
        try:
            with _device_failures():
                trained = train(each, _teller(tell, f"{each.name} ({i + 1} of {len(planned)})", i, len(planned), steps))
        except KeyboardInterrupt:
            if not runs:
                raise
            return runs, each.name
        if trained is not None:
            runs[each.name] = trained
    return runs, None


def _teller(tell: Told | None, name: str, before: int, runs: int, steps: int) -> Callable[[int], None]:
    def told(step: int) -> None:
        if tell is not None:
            tell(name, (before + step / steps) / runs)

    told(0)
    return told


@contextlib.contextmanager
def _device_failures() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"the GPU has too little memory for this size: {one_line(error)}") from error


def judged_runs(
    runs: Mapping[str, Trained], planned: Sequence[PlannedRun], steps: int, final: FinalLoss, bar: float, *,
    same_starts: bool = False,
) -> RunsJudged:  # fmt: skip
    """Judge each run beside fp32, the first, by what other starts change."""
    window, reach = window_of(steps), reach_of(steps)
    there = [each for each in planned if each.name in runs]
    curves = {each.name: smoothed(runs[each.name].losses, window) for each in there}
    started = [curves[each.name] for each in there if each.name == REFERENCE or each.of_starts]
    whole = all(len(curve) == steps and not_finite_from(curve) is None for curve in started)
    apart = starts_apart(started, reach) if whole and len(started) > 1 else None
    found: list[RunJudged] = []
    for each in there:
        run, departs = runs[each.name], None
        if apart is not None and each.name != REFERENCE and not each.of_starts:
            departs = departure(run.losses, curves[REFERENCE], apart, window=window, reach=reach)
        found.append(
            RunJudged(
                name=each.name,
                of_starts=each.of_starts,
                kind=each.kind,
                losses=curves[each.name],
                final_loss=run.final_loss,
                departs=departs,
                not_finite_from=not_finite_from(run.losses),
                skipped_steps=run.skipped_steps,
                zero_gradients=run.zero_gradients,
                swallowed=run.swallowed,
            )
        )
    return RunsJudged(
        reference=found[0], others=tuple(found[1:]), apart=apart, steps=steps, window=window, reach=reach,
        seed=planned[0].start_seed, final=final, bar=bar, same_starts=same_starts,
    )  # fmt: skip
