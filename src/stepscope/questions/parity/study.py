"""Whether the same batch gives the same loss and gradients in other micro-batches, compiled, checkpointed, or with
another attention; and where one does not, what departs first.

All of them run from the same weights, buffers, batch and random state. What counts as the same is measured: `plain.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.answer import Answer, Cell, Panel, Point, Table
from stepscope.core.errors import InputError, choose
from stepscope.core.figures import digits
from stepscope.core.model_config import ModelConfig
from stepscope.core.workload import COMPILES, DTYPES
from stepscope.questions.answers import computed_answer
from stepscope.questions.parity.findings import parity_found, place_in_words
from stepscope.questions.parity.judged import Judged, judge
from stepscope.questions.parity.plain import FACTOR, Plain, Setting, StepVariant
from stepscope.questions.replays.results import patient, run_step
from stepscope.questions.replays.subject import Subject
from stepscope.questions.steps import one_step_of, settings_of
from stepscope.recording.device import resolve_device
from stepscope.recording.precision import matmul_precision
from stepscope.training.attention.pytorch import BACKENDS
from stepscope.training.own.batches import named_tensors
from stepscope.training.own.blocks import find_blocks

VARIANTS, ROUNDING = "Ways to run the step", "How far rounding moves the plain step"
"""Titles of the tables."""

Several = Sequence[Any] | None


def study_parity(
    *,
    model: ModelConfig | None = None,
    batch_size: int = 4,
    seq_len: int = 64,
    seed: int = 0,
    own: str | None = None,
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

    own: the factory of a model of the user's own, or its config.json, in place of a model and its sizes; `arguments`:
    what it is called with. accumulation, compile, attention, checkpointing: the ways; where none is asked for, those
    that the model can run. Raises InputError for a way that cannot be.
    """
    on, told = resolve_device(device), patient(tell)
    choose(dtype, DTYPES, "dtype")
    workload = one_step_of(own, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    asked = {"accumulation": accumulation, "compile": compile, "attention": attention, "checkpointing": checkpointing}
    subject = Subject(workload, on)
    with matmul_precision(dtype), torch.random.fork_rng([on] if on.type == "cuda" else []):  # type: ignore[arg-type]
        setting = Setting(subject=subject, dtype=dtype)  # type: ignore[arg-type]
        variants = list(_asked(setting, asked) if any(asked.values()) else _usual(setting))
        if not variants:
            raise InputError(
                f"there is no other way to run {subject.name} that is known: its batch cannot be cut in 2 or 4, and it "
                "has no blocks; ask for one, as in --compile default"
            )
        told("the plain step", 0.0)
        plain = Plain(setting)
        quiet = Plain(Setting(subject=subject, dtype=dtype, quiet=True)) if plain.draws else plain  # type: ignore[arg-type]
        judged: list[Judged] = []
        for i, variant in enumerate(variants):
            told(variant.name, (i + 1) / (len(variants) + 1))
            judged.append(judge(quiet if variant.accumulation > 1 else plain, variant))
    return computed_answer(
        on,
        study="parity",
        question=f"Does one step of {subject.name} give the same loss and gradients however it is run?",
        settings={**settings_of(workload), "seed": seed, "dtype": dtype, "gradients": len(plain.result.gradients)},
        tables=(_variants(judged), _roundings(plain)),
        panels=(_panel(judged),),
        findings=parity_found(plain, quiet, judged),
    )


def _asked(setting: Setting, asked: Mapping[str, Several]) -> Iterator[StepVariant]:
    """The ways that were asked for. Raises InputError for one that cannot be."""
    subject = setting.subject
    for parts in asked["accumulation"] or ():
        if parts == 1:
            raise InputError("--accumulation 1 is the plain step itself: ask for 2 or more")
        yield _checked(setting, StepVariant(name=f"accumulation {parts}", accumulation=parts))
    for name in asked["attention"] or ():
        if subject.is_own:
            choose(name, tuple(BACKENDS), "attention of a model of your own")
            if not _calls_attention(setting):
                raise InputError(
                    f"--attention {name} changes nothing in {subject.name}: its step runs no fused "
                    "scaled_dot_product_attention of PyTorch's; leave it out"
                )
        yield _checked(setting, StepVariant(name=f"attention {name}", attention=name))
    for how in asked["checkpointing"] or ():
        if how == "none":
            raise InputError("--checkpointing none is the plain step itself: ask for selective, attention or every-1")
        yield _checked(setting, StepVariant(name=f"checkpointing {how}", checkpointing=how))
    for mode in asked["compile"] or ():
        yield StepVariant(name=f"compile {mode}", compile=choose(mode, COMPILES[1:], "compile mode"))


def _usual(setting: Setting) -> Iterator[StepVariant]:
    """The ways that this model can be run."""
    step = setting.step()
    tensors = named_tensors(step.own.batches[0])
    samples = tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 0
    for parts in (2, 4):
        if samples and samples % parts == 0:
            yield StepVariant(name=f"accumulation {parts}", accumulation=parts)
    if not setting.subject.is_own:
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

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or "scaled_dot_product" in func._schema.name
        return func(*args, **(kwargs or {}))


def _calls_attention(setting: Setting) -> bool:
    with _Attentions() as attentions:
        run_step(setting.step(), setting.subject.seed)
    return attentions.seen


def _variants(judged: Sequence[Judged]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in judged:
        if each.found is None or each.off is None:
            rows.append((each.variant.name, None, None, None, None, None, "", "", each.verdict))
            continue
        worst, _ = each.plain.alone(each.off)
        rows.append((
            each.variant.name, digits(each.loss), digits(each.off.loss), digits(each.off.gradients),
            digits(each.plain.gradients), digits(each.times), worst, _departs_first(each), each.verdict,
        ))  # fmt: skip
    columns = (
        "way", "loss", "loss off by", "gradients off by", "rounding", "times rounding", "worst parameter",
        "departs first", "verdict",
    )  # fmt: skip
    return Table(title=VARIANTS, columns=columns, rows=tuple(rows))


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
        if each.off is not None:
            points += [
                _bar("difference", each.variant.name, each.off.gradients),
                _bar("rounding", each.variant.name, each.plain.gradients),
            ]
    title = "difference of the gradients, relative"
    return Panel(x_title="", y_title=title, points=tuple(points), kind="bars", y_log=True)


def _bar(line: str, name: str, value: float) -> Point:
    known = 0 < value < float("inf")
    return Point(line=line, name=name, y=value if known else 0.0, missing="" if known else str(value or "none"))
