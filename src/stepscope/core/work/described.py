"""A workload and a model in words, each on one line."""

from stepscope.core.own_arguments import is_configuration
from stepscope.core.own_workload import AnyWorkload, DrivenWorkload, OwnWorkload, WatchedWorkload
from stepscope.core.parts import REFERENCE
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import counted, format_count
from stepscope.core.work.transformer import parameter_count
from stepscope.core.workload import Workload


def describe_workload(workload: AnyWorkload) -> str:
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
    attention = f" {workload.attention} attention," if isinstance(workload, Workload) else ""
    attention += _of_blocks(workload) if not isinstance(workload, WatchedWorkload) else ""
    return f"{_batch(workload)}, {workload.dtype}, {workload.phase},{attention} {compiled}{optimizer}{memory}"


def _of_blocks(workload: DrivenWorkload) -> str:
    """How the parts of a block are computed, where that is not the model's own code."""
    others = [f" {name} {part}," for part, name in workload.parts.items() if name != REFERENCE]
    names = set(workload.parts.values())
    said = f" {names.pop()} parts," if len(names) == 1 and others else "".join(others)
    if isinstance(workload, OwnWorkload) or workload.projections == "apart":
        return said
    return f"{said} projections {workload.projections},"


def _batch(workload: AnyWorkload) -> str:
    if isinstance(workload, Workload):
        tokens = format_count(workload.tokens)
        return f"batch {workload.batch_size} x sequence {workload.seq_len} = {tokens} tokens"
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in workload.model.inputs.items())
    return f"batch {inputs}" if inputs else "batch unknown"


def _micro_batches(workload: AnyWorkload) -> str:
    size = workload.micro_batch_size if isinstance(workload, Workload) else None
    if size is None and workload.batch_size and workload.batch_size % workload.accumulation == 0:
        size = workload.batch_size // workload.accumulation
    return f"{workload.accumulation} micro-batches{f' of {size}' if size else ''}"


def describe_model(workload: AnyWorkload, trainable: int | None = None) -> str:
    """A model's name, parameter count, and its sizes or where it comes from, on one line. trainable: how many of its
    parameters train, where that is known."""
    parameters = parameters_of(workload)
    count = f"{format_count(parameters)} parameters" if parameters is not None else "parameters not counted"
    if parameters is not None and trainable is not None and trainable < parameters:
        count = f"{format_count(trainable)} of {count} train"
    return f"{workload.name}: {count} ({_origin(workload)})"


def _origin(workload: AnyWorkload) -> str:
    if isinstance(workload, Workload):
        return ", ".join(f"{field} {format_count(size)}" for field, size in workload.model.sizes.items())
    if isinstance(workload, OwnWorkload):
        arguments = ", ".join(f"{name}={value}" for name, value in workload.arguments.items())
        if ":" not in workload.factory and not is_configuration(workload.factory):
            return "given as an object"
        return f"made by {workload.factory}{f' with {arguments}' if arguments else ''}"
    return _watched(workload)


def _watched(workload: WatchedWorkload) -> str:
    rank = f", rank {workload.rank} of {workload.world_size}" if workload.rank is not None else ""
    return f"watched in {workload.program}{rank}" if workload.program else f"watched{rank}"


def parameters_of(workload: AnyWorkload) -> int | None:
    """Number of parameters of a workload's model; None where they were not counted."""
    return parameter_count(workload.model) if isinstance(workload, Workload) else workload.model.parameters


def cell_name(workload: AnyWorkload, settings: Settings | None = None) -> str:
    """A cell's name: the key without its digest, and the number of warm-up steps where the settings fix one."""
    name = "-".join(workload.words())
    if settings is None or settings.warmup_floor != settings.warmup_cap:
        return name
    return f"{name}, warm-up {settings.warmup_floor}"
