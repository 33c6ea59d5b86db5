"""What a table of runs may be arranged by, and what it may show. Names are those of the command line."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.allocations.prediction.estimate import estimate
from stepscope.core.attention_support import is_predicted
from stepscope.core.checkpointing import OFFLOAD
from stepscope.core.errors import InputError, choose, printable
from stepscope.core.formulas.spelled import parameters_of
from stepscope.core.model_config import PRESETS
from stepscope.core.parts import PARTS, attention_names
from stepscope.core.range_names import BACKWARD, DATA, FORWARD, FORWARD_BACKWARD, OPTIMIZER, REST, STEP
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.strategies import NOT_PARALLEL, STRATEGIES
from stepscope.core.units import GIB, MIB, counted
from stepscope.core.workloads import COMPILES, DTYPES, GRAPHS, OPTIMIZERS, PHASES, PROJECTIONS
from stepscope.runs import metrics

Scalar = str | int | float | None

MISSING = "-"
"""What is shown of a field or a figure that a run has not."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A property of a run that rows or columns go by. `order` lists known values in their natural order."""

    read: Callable[[Run], Scalar]
    order: tuple[str, ...] = ()

    def rank(self, value: Scalar) -> tuple[int, float, str]:
        """Sort key: numbers by size, known words in their order, other words by the alphabet. What follows a colon are
        options of the word before it: they come behind the word alone."""
        if isinstance(value, (int, float)):
            return (0, float(value), "")
        word, _, options = str(value).partition(":")
        if word in self.order:
            return (1, float(self.order.index(word)), options)
        return (2, 0.0, str(value))


def _at(path: str) -> Callable[[Run], Any]:
    """Reads what lies at a path from the run, as at workload.model.heads; None where something on it is not there."""

    def read(run: Run) -> Any:
        value: Any = run
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    return read


def _argument(run: Run, name: str) -> Scalar:
    """An argument of the factory of a user's model, as it was written; None where none was given."""
    value = dict(run.workload.arguments).get(name)
    plain = not isinstance(value, bool) and (value is None or isinstance(value, (str, int, float)))
    return value if plain else json.dumps(value)


_CHECKPOINTINGS = (
    "none",
    "selective",
    *(f"{OFFLOAD}-{blocks}" for blocks in range(1, 257)),
    *(f"selective-{last}" for last in range(256, 0, -1)),
    "attention",
    *(f"every-{group}" for group in range(1, 257)),
    *(f"nested-{calls}" for calls in range(1, 257)),
)
"""Choices of checkpointing in order of how much they keep, the most first."""

_TIED: dict[bool | None, Scalar] = {True: "true", False: "false", None: None}

FIELDS: dict[str, Field] = {
    "model": Field(read=lambda run: run.workload.name, order=tuple(PRESETS)),
    "factory": Field(read=_at("workload.factory")),
    "code": Field(read=_at("workload.code")),
    "parameters": Field(read=lambda run: parameters_of(run.workload)),
    "d_model": Field(read=_at("workload.model.d_model")),
    "d_ff": Field(read=_at("workload.model.d_ff")),
    "layers": Field(read=_at("workload.model.layers")),
    "heads": Field(read=_at("workload.model.heads")),
    "kv_heads": Field(read=_at("workload.model.key_heads")),
    "tied": Field(read=lambda run: _TIED[getattr(run.workload.model, "tied", None)]),
    "head_dim": Field(read=_at("workload.model.head_dim")),
    "vocabulary": Field(read=_at("workload.model.vocabulary")),
    "batch_size": Field(read=_at("workload.batch_size")),
    "seq_len": Field(read=_at("workload.seq_len")),
    "dtype": Field(read=_at("workload.dtype"), order=DTYPES),
    "phase": Field(read=_at("workload.phase"), order=PHASES),
    "attention": Field(read=_at("workload.attention"), order=attention_names()),
    **{part: Field(read=_at(f"workload.{part}"), order=tuple(PARTS[part])) for part in PARTS},
    "projections": Field(read=_at("workload.projections"), order=PROJECTIONS),
    "compile": Field(read=_at("workload.compile"), order=COMPILES),
    "graph": Field(read=_at("workload.graph"), order=GRAPHS),
    "optimizer": Field(read=_at("workload.optimizer"), order=OPTIMIZERS),
    "clip": Field(read=_at("workload.clip")),
    "checkpointing": Field(read=_at("workload.checkpointing"), order=_CHECKPOINTINGS),
    "accumulation": Field(read=_at("workload.accumulation")),
    "parallel": Field(read=_at("workload.parallel"), order=(NOT_PARALLEL, *STRATEGIES)),
    "ranks": Field(read=_at("workload.ranks")),
    "micro_batch_size": Field(read=_at("workload.micro_batch_size")),
    "seed": Field(read=_at("workload.seed")),
    "warmup": Field(
        read=lambda run: floor if (floor := run.settings.warmup_floor) == run.settings.warmup_cap else "until steady"
    ),
    "device": Field(read=_at("environment.device_name")),
    "memory_limit": Field(read=_at("environment.memory_limit_bytes")),
    "torch": Field(read=lambda run: run.environment.versions.get("torch") if run.environment else None),
    "tag": Field(read=_at("tag")),
    "status": Field(read=_at("status")),
}

_ARGUMENT = "arg."
"""How a field begins that is an argument of a factory, as in `arg.width`."""


def field_named(name: str) -> Field:
    """The field of this name. Raises InputError where there is none."""
    if name.startswith(_ARGUMENT) and name != _ARGUMENT:
        return Field(read=functools.partial(_argument, name=name.removeprefix(_ARGUMENT)))
    return FIELDS[choose(name, list(FIELDS), "field")]


def field_text(value: Scalar) -> str:
    """A field's value as tables show it."""
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and value >= 100_000 else printable(str(value))


def check_arguments(runs: Iterable[Run], names: Iterable[str]) -> None:
    """Raise InputError for a name of an argument that no run has."""
    there = argument_fields(runs)
    for name in names:
        if name.startswith(_ARGUMENT) and name not in there:
            known = f"they have {', '.join(there)}" if there else "they have no arguments"
            raise InputError(f"no run has the argument {name.removeprefix(_ARGUMENT)!r}: {known}")


def argument_fields(runs: Iterable[Run]) -> list[str]:
    """The names of the fields that are arguments of these runs' factories."""
    names = dict.fromkeys(name for run in runs for name in dict(run.workload.arguments))
    return [f"{_ARGUMENT}{name}" for name in names]


IDENTIFYING = (
    "model", "factory", "code", "batch_size", "seq_len", "dtype", "phase", "attention", *PARTS, "projections",
    "compile", "graph", "optimizer", "clip", "checkpointing", "accumulation", "parallel", "ranks", "seed",
    "warmup", "device", "memory_limit", "torch", "tag",
)  # fmt: skip
"""Fields that make two runs different experiments, as every argument does: a cell that holds runs which differ in one
would mix them."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A figure of a run: either samples (whose statistic is chosen) or one number."""

    unit: str
    scale: float = 1.0
    """What the stored figure is multiplied by for show."""
    digits: int = 2
    samples: Callable[[Run], Samples | None] | None = None
    number: Callable[[Run], float | int | None] | None = None

    def shown(self, run: Run) -> float | None:
        """The figure, of samples their median, in the unit; None where the run has none."""
        if self.samples is None:
            stored = self.number(run) if self.number is not None else None
        else:
            samples = self.samples(run)
            stored = samples.median_s if samples is not None else None
        return stored * self.scale if stored is not None else None


def _of_steps(figure: str) -> Callable[[Run], Any]:
    """Reads a figure of the samples of the step; None where there are none."""
    return lambda run: getattr(run.samples.get(STEP), figure, None)


def _predicted_peak(run: Run) -> int | None:
    """Predicted peak bytes of a run's step on the type of device that it ran on; None if it is not predicted."""
    if not is_predicted(run.workload):
        return None
    on_cpu = run.environment is not None and run.environment.device_type == "cpu"
    return estimate(run.workload, "cpu" if on_cpu else "cuda").peak_bytes


def _prediction_error(run: Run) -> float | None:
    measured = metrics.peak_bytes(run)
    predicted = _predicted_peak(run)
    return predicted / measured - 1 if measured and predicted is not None else None


VALUES: dict[str, Value] = {
    **{
        name: Value(unit="ms", scale=1e3, samples=functools.partial(metrics.samples_of, name=name))
        for name in (FORWARD, BACKWARD, OPTIMIZER, DATA, REST, FORWARD_BACKWARD, STEP, "host")
    },
    "first_step": Value(unit="ms", scale=1e3, number=_of_steps("first_s")),
    "largest_step": Value(unit="ms", scale=1e3, number=_of_steps("largest_s")),
    "steps": Value(unit="", digits=0, number=_of_steps("count")),
    "tokens_per_s": Value(unit="tokens/s", digits=0, number=metrics.tokens_per_s),
    "samples_per_s": Value(unit="samples/s", digits=0, number=metrics.samples_per_s),
    "model_flops_per_s": Value(unit="TFLOP/s", scale=1e-12, digits=1, number=metrics.model_flops_per_s),
    "mfu_datasheet": Value(unit="%", scale=100, digits=1, number=metrics.mfu_datasheet),
    "mfu_measured": Value(unit="%", scale=100, digits=1, number=metrics.mfu_measured),
    "launch_bound_share": Value(unit="%", scale=100, digits=1, number=metrics.launch_bound_share),
    "profiler_slowdown": Value(unit="x", digits=2, number=metrics.profiler_slowdown),
    "joules_per_step": Value(unit="J", digits=2, number=metrics.joules_per_step),
    "joules_per_token": Value(unit="mJ", scale=1e3, digits=2, number=metrics.joules_per_token),
    **{
        name: Value(unit=unit, digits=0, number=functools.partial(metrics.while_measured, quantity=quantity))
        for name, quantity, unit in (
            ("sm_clock", "sm_clock_mhz", "MHz"),
            ("power", "power_w", "W"),
            ("temperature", "temperature_c", "°C"),
        )
    },
    "peak_memory": Value(unit="GiB", scale=1 / GIB, number=metrics.peak_bytes),
    "saved_for_backward": Value(unit="GiB", scale=1 / GIB, number=_at("evidence.memory.saved_for_backward")),
    "predicted_peak": Value(unit="GiB", scale=1 / GIB, number=_predicted_peak),
    "prediction_error": Value(unit="%", scale=100, number=_prediction_error),
    "sent": Value(unit="MiB", scale=1 / MIB, number=metrics.sent_bytes),
    "sent_by_formula": Value(unit="MiB", scale=1 / MIB, number=metrics.sent_by_formula),
    "communication": Value(unit="ms", scale=1e3, number=metrics.communication_s),
    "exposed": Value(unit="ms", scale=1e3, number=metrics.exposed_s),
    "overlap": Value(unit="%", scale=100, digits=1, number=metrics.overlap_share),
    "kept": Value(unit="MiB", scale=1 / MIB, number=metrics.kept_bytes),
    "compile_time": Value(unit="s", digits=1, number=_at("evidence.compilation.compile_s")),
}


# Conditions on the fields of runs, as in `dtype=fp32,bf16`: one way to write them, for all who choose runs.


Condition = tuple[str, tuple[str, ...]]
"""A field, and the values of which a run has one."""

_NAMED = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.*)", re.DOTALL)
_FREE = ("tag", "factory", "code")
"""Fields whose values may hold `name=`, beside the arguments of factories."""


def conditions_in(text: str, option: str = "--where") -> list[Condition]:
    """The conditions in `field=value[,value][,field=value...]`: a comma before the name of a field begins the next.

    Raises InputError for any other form, and for a name that is no field's. Where the field's values are free text, as
    those of a tag, what follows the comma is another value unless it begins with the name of a field.
    """
    conditions: list[tuple[str, list[str]]] = []
    for piece in text.split(","):
        named = _NAMED.fullmatch(piece)
        if named is not None and (not conditions or is_field(named[1]) or not holds_names(conditions[-1][0])):
            field_named(named[1])
            conditions.append((named[1], [named[2].strip()]))
        elif conditions:
            conditions[-1][1].append(piece.strip())
        else:
            break
    kept = [(field, tuple(value for value in values if value)) for field, values in conditions]
    if not kept or not all(values for _, values in kept):
        raise InputError(f"cannot read {option} {text!r}: write field=value, as in dtype=bf16")
    return kept


def is_field(name: str) -> bool:
    """Whether a name is that of a field, or of an argument of a factory."""
    return name in FIELDS or name.startswith(_ARGUMENT)


def holds_names(field: str) -> bool:
    """Whether values of this field may hold `name=` themselves."""
    return field in _FREE or field.startswith(_ARGUMENT)


def matches(run: Run, field: str, wanted: Sequence[str]) -> bool:
    """Whether the run's field of that name is one of the values wanted. Raises InputError for an unknown field."""
    value = field_named(field).read(run)
    return bool({str(value), field_text(value)} & set(wanted))


def meeting(runs: Sequence[Run], conditions: Iterable[Condition]) -> tuple[list[Run], list[str]]:
    """The runs that meet all conditions, and a sentence for each value that no run has at all."""
    conditions = list(conditions)
    check_arguments(runs, (field for field, _ in conditions))
    kept = [run for run in runs if all(matches(run, *condition) for condition in conditions)]
    nowhere = [
        f"None of {counted(len(runs), 'run')} has {field}={value}."
        for field, values in conditions
        for value in values
        if not any(matches(run, field, (value,)) for run in runs)
    ]
    return kept, nowhere


def in_words(conditions: Iterable[Condition]) -> str:
    """The conditions as they may be written."""
    return " and ".join(f"{field}={','.join(values)}" for field, values in conditions)
