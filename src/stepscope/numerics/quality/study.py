"""What precision does to training, as a study: one small transformer, real text, one seed, every precision.

Each run has the same parameters at the start and the same batches (`training.py`), so that what differs is the
precision. How much a difference means is told by runs of fp32 that start from the parameters of other seeds, over the
same batches: with other batches too, differences in smoothed losses would be mostly the batches' own
(`departure.py`).
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch

from stepscope.core.answer import Answer, Cell, Panel, Table
from stepscope.core.errors import DeviceError, InputError, choose, one_line
from stepscope.core.model_config import LARGEST, ModelConfig, whole_number
from stepscope.core.workload import Workload
from stepscope.measure.device import resolve_device
from stepscope.models.training_step import check_supported
from stepscope.numerics.answers import computed_answer, curves, pivot
from stepscope.numerics.quality.bundled_text import BYTE_VALUES, LICENCE, WORKS, BundledText, bundled_text
from stepscope.numerics.quality.departure import departure, not_finite_from, reach_of, smoothed, starts_apart, window_of
from stepscope.numerics.quality.findings import RunJudged, RunsJudged, quality_findings
from stepscope.numerics.quality.training import REFERENCE, VARIANTS, Trained, TrainingSize, train
from stepscope.numerics.setting import threads_for

OTHER_STARTS = 2
"""How many more runs of fp32 there are, each from the parameters of the next seed."""
LEAST_STEPS = 20
SIZES: dict[str, TrainingSize] = {
    # fp16 products are slow on a CPU without instructions for them (five times fp32's step): two runs of ten have them.
    "cpu": TrainingSize(
        model=ModelConfig(name="quality-cpu", d_model=64, d_ff=128, layers=2, heads=2, vocabulary=BYTE_VALUES),
        batch_size=8, seq_len=32, steps=600, learning_rate=3e-3,
    ),
    "gpu": TrainingSize(
        model=ModelConfig(name="quality-gpu", d_model=384, d_ff=1024, layers=6, heads=6, vocabulary=BYTE_VALUES),
        batch_size=16, seq_len=256, steps=1000, learning_rate=1e-3,
    ),
}  # fmt: skip
RUNS, BY_STEP, ABOVE = "Runs", "Training loss, smoothed", "More than fp32, smoothed"

_POINTS = 30
"""Points per curve of smoothed losses, whose means include the steps between points."""
_COLUMNS = 8


def study_quality(
    tell: Callable[[str, float], None] | None = None,
    *,
    size: str | TrainingSize | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    variants: tuple[str, ...] | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Answer:
    """Train in fp32, from OTHER_STARTS other starts too, and in each variant; say where each departs from fp32.

    tell: called with the run's name and the share of the study that is done. size: a name of SIZES, or a size of one's
    own; None takes the device's. variants: names of VARIANTS, all if None; fp32 always runs. Interrupted after the
    first run, the study is of the runs that ended, and says so. Raises InputError for what cannot be run here.
    """
    on = resolve_device(device)
    chosen = _size(size, on, steps, learning_rate)
    whole_number(seed, "seed", 0, LARGEST)
    names, left_out = _variants(variants, on, chosen)
    planned = [(REFERENCE, REFERENCE, seed)]
    planned += [(f"fp32, start of seed {seed + i}", REFERENCE, seed + i) for i in range(1, OTHER_STARTS + 1)]
    planned += [(name, name, seed) for name in names if name != REFERENCE]
    text = bundled_text()
    runs: dict[str, Trained] = {}
    interrupted = None
    with _threads(chosen, on), _device_failures(on):
        for i, (name, variant, start_seed) in enumerate(planned):
            try:
                told = _teller(tell, f"{name} ({i + 1} of {len(planned)})", i, len(planned), chosen.steps)
                runs[name] = train(
                    VARIANTS[variant], chosen, text, device=on, seed=seed, start_seed=start_seed, tell_step=told
                )
            except KeyboardInterrupt:
                if not runs:
                    raise
                interrupted = name
                break
    other_starts = [name for name, _, start_seed in planned if start_seed != seed]
    outcomes = _outcomes(runs, chosen, other_starts, seed, text)
    parameters = sum(parameter.numel() for parameter in runs[REFERENCE].parameters)
    return computed_answer(
        on,
        study="quality",
        question="What does each precision do to training, and where does a run depart from fp32?",
        settings={
            "model": chosen.model.name, **chosen.model.sizes, "parameters": parameters,
            "batch_size": chosen.batch_size, "seq_len": chosen.seq_len, "steps": chosen.steps,
            "learning_rate": chosen.learning_rate, "seed": seed,
            "text": "; ".join(WORKS.values()), "text_licence": LICENCE,
            "bytes_trained_on": len(text.train), "bytes_held_out": len(text.held_out),
        },
        tables=(_runs(outcomes), *_by_step(outcomes)),
        panels=_panels(outcomes),
        findings=quality_findings(outcomes, left_out=left_out, interrupted=interrupted, planned=len(planned)),
    )  # fmt: skip


def _size(
    size: str | TrainingSize | None, device: torch.device, steps: int | None, learning_rate: float | None
) -> TrainingSize:
    if not isinstance(size, TrainingSize):
        size = SIZES[choose(size or ("gpu" if device.type == "cuda" else "cpu"), tuple(SIZES), "model size")]
    size = dataclasses.replace(
        size,
        steps=size.steps if steps is None else steps,
        learning_rate=size.learning_rate if learning_rate is None else learning_rate,
    )
    whole_number(size.steps, "steps", LEAST_STEPS, 1_000_000)
    if not (math.isfinite(size.learning_rate) and size.learning_rate > 0):
        raise InputError(f"the learning rate {size.learning_rate!r} is not a positive number: choose one as 1e-3")
    return size


def _variants(
    asked: tuple[str, ...] | None, device: torch.device, size: TrainingSize
) -> tuple[list[str], dict[str, str]]:
    """The variants to run, and why each other is left out. Raises InputError if one that was asked for cannot run."""
    if asked is not None and not asked:
        raise InputError(f"no variant is given: choose of {', '.join(VARIANTS)}")
    for name in asked or ():
        choose(name, tuple(VARIANTS), "variant")
    names, left_out = [], {}
    for name in dict.fromkeys(asked or VARIANTS):
        try:
            check_supported(Workload(model=size.model, dtype=VARIANTS[name].dtype), device)
        except InputError as error:
            if asked is not None:
                raise
            left_out[name] = str(error).partition(":")[0]
        else:
            names.append(name)
    return names, left_out


def _threads(size: TrainingSize, device: torch.device) -> contextlib.AbstractContextManager[None]:
    model = size.model
    parameters = model.layers * (4 * model.d_model**2 + 3 * model.d_model * model.d_ff)
    tokens = size.batch_size * size.seq_len
    return threads_for(parameters, tokens) if device.type == "cpu" else contextlib.nullcontext()


@contextlib.contextmanager
def _device_failures(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{device} has too little memory for this size: {one_line(error)}") from error


def _teller(
    tell: Callable[[str, float], None] | None, name: str, before: int, runs: int, steps: int
) -> Callable[[int], None]:
    def told(step: int) -> None:
        if tell is not None:
            tell(name, (before + step / steps) / runs)

    told(0)
    return told


def _outcomes(
    runs: dict[str, Trained], size: TrainingSize, other_starts: list[str], seed: int, text: BundledText
) -> RunsJudged:
    window, reach = window_of(size.steps), reach_of(size.steps)
    curves = {name: smoothed(run.losses, window) for name, run in runs.items()}
    started = [curves[name] for name in (REFERENCE, *other_starts) if name in curves]
    whole = all(len(curve) == size.steps and not_finite_from(curve) is None for curve in started)
    apart = starts_apart(started, reach) if whole and len(started) > 1 else None
    found = []
    for name, run in runs.items():
        departs = None
        if apart is not None and name not in (REFERENCE, *other_starts):
            departs = departure(run.losses, curves[REFERENCE], apart, window=window, reach=reach)
        found.append(
            RunJudged(
                name=name,
                of_starts=name in other_starts,
                losses=curves[name],
                validation_loss=run.validation_loss,
                departs=departs,
                not_finite_from=not_finite_from(run.losses),
                skipped_steps=run.skipped_steps,
                zero_gradients=run.zero_gradients,
                swallowed=run.swallowed,
            )
        )
    return RunsJudged(
        reference=found[0], others=tuple(found[1:]), apart=apart, steps=size.steps, window=window, reach=reach,
        seed=seed, unigram_loss=text.unigram_loss,
    )  # fmt: skip


def _figure(value: float | None, digits: int = 4) -> Cell:
    """The value rounded, without a sign if that is zero."""
    return None if value is None else round(value, digits) + 0.0


def _percent(share: float | None) -> Cell:
    return None if share is None else float(f"{100 * share:.3g}")


def _runs(outcomes: RunsJudged) -> Table:
    reference = outcomes.reference
    rows: list[tuple[Cell, ...]] = [
        (
            each.name, _figure(each.last), _figure(each.validation_loss),
            None if each is reference else _figure(each.validation_loss - reference.validation_loss),
            _departs(each, outcomes), each.skipped_steps, _percent(each.zero_gradients), _percent(each.swallowed),
        )
        for each in outcomes.all
    ]  # fmt: skip
    columns = (
        "run", "training loss at the end, smoothed", "validation loss", "more than fp32", "departs at step",
        "skipped steps", "gradients of zero, %", "updates lost, %",
    )  # fmt: skip
    return Table(title=RUNS, columns=columns, rows=tuple(rows))


def _departs(each: RunJudged, outcomes: RunsJudged) -> Cell:
    if each is outcomes.reference or each.of_starts or outcomes.apart is None:
        return None
    return "no" if each.departs is None else each.departs


def _by_step(outcomes: RunsJudged) -> Iterator[Table]:
    steps = _places(outcomes.steps, _COLUMNS)

    def table(title: str, figures: dict[str, Callable[[int], float | None]]) -> Table:
        cells = (((name,), f"step {step}", _figure(at(step))) for name, at in figures.items() for step in steps)
        return pivot(title, ("run",), cells)

    yield table(BY_STEP, {each.name: each.at for each in outcomes.all})
    above = {each.name: functools.partial(each.above, outcomes.reference) for each in outcomes.others}
    apart = outcomes.apart
    yield table(ABOVE, above | ({} if apart is None else {"starts apart, at most": lambda step: apart[step - 1]}))


def _places(steps: int, count: int) -> list[int]:
    """Up to `count` steps from 1 to `steps`, evenly spread; the last step is among them."""
    return sorted({round(steps * i / count) for i in range(1, count + 1)})


def _panels(outcomes: RunsJudged) -> Iterator[Panel]:
    """Panels of the losses, and of their difference from fp32's: first with parameters in fp32, then in bf16."""
    reference = outcomes.reference
    starts, variants = outcomes.starts, outcomes.variants
    steps = _places(outcomes.steps, _POINTS)
    for of_bf16, kept_in in ((False, "fp32"), (True, "bf16")):
        shown = tuple(each for each in variants if (VARIANTS[each.name].keeping is not None) == of_bf16)
        if not shown and (of_bf16 or variants):
            continue
        for y_title, lines, figure in (
            ("training loss, smoothed, nats a byte", (reference, *starts, *shown), RunJudged.at),
            ("more than fp32", (*starts, *shown), lambda each, step: each.above(reference, step)),
        ):
            points = (
                (each.name, float(step), y) for each in lines for step in steps if (y := figure(each, step)) is not None
            )
            yield curves(points, x_title=f"step, parameters in {kept_in}", y_title=y_title)
