"""A workload as the words that measure it: options of the command line, and arguments of `stepscope.run`."""

import shlex
from collections.abc import Iterable, Iterator

from stepscope.core.factory_arguments import is_configuration
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import PRESETS, ModelConfig, configure
from stepscope.core.parts import MODULE_PARTS, PARTS, REFERENCE
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import counted, format_count
from stepscope.core.workloads import (
    FactoryWorkload,
    RunnableWorkload,
    TextbookWorkload,
    UserModel,
    WatchedWorkload,
    Workload,
)

_Sized = TextbookWorkload | FactoryWorkload | ModelConfig


def run_command(workload: Workload, settings: Settings | None = None) -> str | None:
    """The `stepscope run ...` that measures the workload; None where no options say it, as for a watched loop."""
    chosen = _chosen(workload)
    if chosen is None:
        return None
    words: list[str] = []
    for name, value in chosen:
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, shlex.quote(str(value))]
    return " ".join(["stepscope", "run", *words, *_of_settings(settings or Settings())])


def run_call(workload: Workload) -> str | None:
    """The `stepscope.run(...)` in Python that measures the workload; None where no arguments say it, as for a watched
    loop."""
    chosen = _chosen(workload)
    if chosen is None:
        return None
    arguments = {name: value for name, value in chosen if name != "arg"}
    parts = {name: arguments.pop(name) for name in PARTS if name in arguments}
    if parts:
        arguments["kernels"] = parts  # `loss` is a function there
    said = [repr(arguments.pop("model"))] if "model" in arguments and isinstance(workload, TextbookWorkload) else []
    said += [f"{'module' if name == 'model' else name}={value!r}" for name, value in arguments.items()]
    if isinstance(workload, FactoryWorkload) and workload.arguments:
        said.insert(1, f"arguments={dict(workload.arguments)!r}")
    return f"stepscope.run({', '.join(said)})"


def _chosen(workload: Workload) -> list[tuple[str, object]] | None:
    """What is not the usual, by the names that options and arguments share."""
    if isinstance(workload, TextbookWorkload):
        model, preset = workload.model, workload.model.name.partition("+")[0]
        if preset not in PRESETS:
            return None
        of_model = _different(model, configure(preset), without=("name",))
        of_step = _different(workload, TextbookWorkload(model=model, phase=workload.phase), without=("model", "phase"))
        of_step = _kernels_at_once(dict(of_step))
        chosen = [("model", preset), *of_model, *of_step]
    elif isinstance(workload, FactoryWorkload) and (":" in workload.factory or is_configuration(workload.factory)):
        workload = workload.asked
        usual = FactoryWorkload(factory=workload.factory, model=UserModel(name=""), phase=workload.phase)
        without = ("factory", "code", "arguments", "model", "phase")
        chosen = [
            ("model" if is_configuration(workload.factory) else "module", workload.factory),
            *(("arg", f"{name}={value}") for name, value in workload.arguments.items()),
            *_kernels_at_once(dict(_different(workload, usual, without=without)), MODULE_PARTS),
        ]
    else:
        return None
    return [*chosen, *([("phase", workload.phase)] if workload.phase != "train" else [])]


def _different(one: _Sized, usual: _Sized, *, without: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """The fields that are not the usual. An optimizer that a factory brought is no choice."""
    for field in one.__struct_fields__:
        value = getattr(one, field)
        if field not in without and value != getattr(usual, field, None) and value is not None:
            yield field, value


def _kernels_at_once(of_step: dict[str, object], parts: Iterable[str] = PARTS) -> list[tuple[str, object]]:
    """With `kernels` in place of the model's parts, where all have one name."""
    names = {of_step.get(part) for part in parts}
    chosen = [*of_step.items()]
    if len(names) > 1 or None in names:
        return chosen
    return [*((name, value) for name, value in chosen if name not in PARTS), ("kernels", names.pop())]


def _of_settings(settings: Settings) -> list[str]:
    usual = Settings()
    words: list[str] = []
    if settings.warmup_floor == settings.warmup_cap:
        words += ["--warmup", str(settings.warmup_cap)]
    if settings.steps_floor == settings.steps_cap:
        words += ["--steps", str(settings.steps_cap)]
    elif settings.seconds != usual.seconds:
        words += ["--seconds", f"{settings.seconds:g}"]
    return words


# A workload and a model in words, each on one line.


def describe_workload(workload: Workload) -> str:
    """A workload's sizes, tokens and choices on one line."""
    optimizer = f", {workload.optimizer}" if workload.optimizer else ""
    optimizer += f", gradients clipped to a norm of {workload.clip:g}" if workload.clip is not None else ""
    compiled = "eager" if workload.compile == "eager" else f"torch.compile {workload.compile}"
    compiled += ", replayed as CUDA graphs" if workload.graph == "step" else ""
    memory = f", checkpointing {workload.checkpointing}" if workload.checkpointing != "none" else ""
    if workload.accumulation != 1:
        memory += f", {_micro_batches(workload)}"
    if not isinstance(workload, WatchedWorkload) and workload.parallel != NOT_PARALLEL:
        memory += f", {workload.parallel} over {counted(workload.ranks, 'rank')}"
    attention = f" {workload.attention} attention," if isinstance(workload, TextbookWorkload) else ""
    attention += _of_blocks(workload) if not isinstance(workload, WatchedWorkload) else ""
    return f"{_batch(workload)}, {workload.dtype}, {workload.phase},{attention} {compiled}{optimizer}{memory}"


def _of_blocks(workload: RunnableWorkload) -> str:
    """How the parts of a block are computed, where that is not the model's own code."""
    others = [f" {name} {part}," for part, name in workload.parts.items() if name != REFERENCE]
    names = set(workload.parts.values())
    said = f" {names.pop()} parts," if len(names) == 1 and others else "".join(others)
    if isinstance(workload, FactoryWorkload) or workload.projections == "apart":
        return said
    return f"{said} projections {workload.projections},"


def _batch(workload: Workload) -> str:
    if isinstance(workload, TextbookWorkload):
        tokens = format_count(workload.tokens)
        return f"batch {workload.batch_size} x sequence {workload.seq_len} = {tokens} tokens"
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in workload.model.inputs.items())
    return f"batch {inputs}" if inputs else "batch unknown"


def _micro_batches(workload: Workload) -> str:
    size = workload.micro_batch_size if isinstance(workload, TextbookWorkload) else None
    if size is None and workload.batch_size and workload.batch_size % workload.accumulation == 0:
        size = workload.batch_size // workload.accumulation
    return f"{workload.accumulation} micro-batches{f' of {size}' if size else ''}"


def describe_model(workload: Workload, trainable: int | None = None) -> str:
    """A model's name, parameter count, and its sizes or where it comes from, on one line. trainable: how many of its
    parameters train, where that is known."""
    parameters = parameters_of(workload)
    count = f"{format_count(parameters)} parameters" if parameters is not None else "parameters not counted"
    if parameters is not None and trainable is not None and trainable < parameters:
        count = f"{format_count(trainable)} of {count} train"
    return f"{workload.name}: {count} ({_origin(workload)})"


def _origin(workload: Workload) -> str:
    if isinstance(workload, TextbookWorkload):
        return ", ".join(f"{field} {format_count(size)}" for field, size in workload.model.sizes.items())
    if isinstance(workload, FactoryWorkload):
        arguments = ", ".join(f"{name}={value}" for name, value in workload.arguments.items())
        if ":" not in workload.factory and not is_configuration(workload.factory):
            return "given as an object"
        return f"made by {workload.factory}{f' with {arguments}' if arguments else ''}"
    return _watched(workload)


def _watched(workload: WatchedWorkload) -> str:
    rank = f", rank {workload.rank} of {workload.world_size}" if workload.rank is not None else ""
    return f"watched in {workload.program}{rank}" if workload.program else f"watched{rank}"


def parameters_of(workload: Workload) -> int | None:
    """Number of parameters of a workload's model; None where they were not counted."""
    return parameter_count(workload.model) if isinstance(workload, TextbookWorkload) else workload.model.parameters


def cell_name(workload: Workload, settings: Settings | None = None) -> str:
    """A cell's name: the key without its digest, and the number of warm-up steps where the settings fix one."""
    name = "-".join(workload.words())
    if settings is None or settings.warmup_floor != settings.warmup_cap:
        return name
    return f"{name}, warm-up {settings.warmup_floor}"
