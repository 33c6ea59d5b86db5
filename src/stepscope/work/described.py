"""A workload and a model in words, each on one line."""

from stepscope.core.run import Settings
from stepscope.core.units import format_count
from stepscope.core.workload import Workload
from stepscope.work.transformer import parameter_count


def describe_workload(workload: Workload) -> str:
    """A workload's sizes, tokens and choices on one line."""
    optimizer = f", {workload.optimizer}" if workload.optimizer else ""
    compiled = "eager" if workload.compile == "eager" else f"torch.compile {workload.compile}"
    memory = f", checkpointing {workload.checkpointing}" if workload.checkpointing != "none" else ""
    if workload.accumulation != 1:
        memory += f", {workload.accumulation} micro-batches of {workload.micro_batch_size}"
    return (
        f"batch {workload.batch_size} x sequence {workload.seq_len} = {format_count(workload.tokens)} tokens, "
        f"{workload.dtype}, {workload.phase}, {workload.attention} attention, {compiled}{optimizer}{memory}"
    )


def describe_model(workload: Workload) -> str:
    """A model's name, parameter count and sizes on one line."""
    sizes = ", ".join(f"{field} {format_count(size)}" for field, size in workload.model.sizes.items())
    return f"{workload.model.name}: {format_count(parameter_count(workload.model))} parameters ({sizes})"


def cell_name(workload: Workload, settings: Settings | None = None) -> str:
    """A cell's name: the key without its digest, and the number of warm-up steps where the settings fix one."""
    name = "-".join(workload.words())
    if settings is None or settings.warmup_floor != settings.warmup_cap:
        return name
    return f"{name}, warm-up {settings.warmup_floor}"
