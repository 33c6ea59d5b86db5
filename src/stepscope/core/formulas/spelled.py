"""A workload as the words that measure it: options of the command line, and arguments of `stepscope.run`."""

import shlex

from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.parts import PARTS, REFERENCE
from stepscope.core.precisions import PRECISIONS
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.units import counted, format_count
from stepscope.core.workloads import OF_ONE_LAUNCH, TextbookWorkload, UserModel, Workload


def run_command(workload: Workload, settings: Settings | None = None) -> str | None:
    """The `stepscope run ...` that measures the workload; None where no options say it, as for a watched loop."""
    chosen = workload.spelled
    if chosen is None:
        return None
    words: list[str] = []
    for name, value in chosen:
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, shlex.quote(str(value))]
    usual = Settings()
    settings = settings or usual
    if settings.warmup_floor == settings.warmup_cap:
        words += ["--warmup", str(settings.warmup_cap)]
    if settings.steps_floor == settings.steps_cap:
        words += ["--steps", str(settings.steps_cap)]
    elif settings.seconds != usual.seconds:
        words += ["--seconds", f"{settings.seconds:g}"]
    return " ".join(["stepscope", "run", *words])


def run_call(workload: Workload) -> str | None:
    """The `stepscope.run(...)` in Python that measures the workload; None where no arguments say it, as for a watched
    loop."""
    chosen = workload.spelled
    if chosen is None:
        return None
    arguments = {name: value for name, value in chosen if name != "arg"}
    parts = {name: arguments.pop(name) for name in PARTS if name in arguments}
    if parts:
        arguments["kernels"] = parts  # `loss` is a function there
    first = [f"module={workload.factory!r}"] if workload.factory else [repr(arguments["model"])]
    if workload.arguments:
        first.append(f"arguments={dict(workload.arguments)!r}")
    rest = [f"{name}={value!r}" for name, value in arguments.items() if name not in ("model", "module")]
    return f"stepscope.run({', '.join([*first, *rest])})"


def script_lines(workload: Workload) -> list[str]:
    """Lines that give a training script of one's own these choices, for its `model` on its device and its learning
    rate `lr`; none for the textbook's model. What lines cannot say is a comment."""
    if workload.sizes is not None or not workload.may_run:
        return []
    parts = {part: name for part, name in workload.parts.items() if name != REFERENCE}
    parts |= {"attention": workload.attention} if workload.attention is not None else {}
    parts |= {"projections": workload.projections} if workload.projections != "apart" else {}
    precision, optimizer = PRECISIONS[workload.dtype], str(workload.optimizer)
    masters = ", masters=masters" if precision.masters else ""
    of_pytorch = {"adamw-fused": "fused", "adamw-foreach": "foreach"}
    updates = [f"# optimizer: {optimizer}"]
    if optimizer in of_pytorch and masters:
        made = f"lambda held: torch.optim.AdamW(held, lr=lr, {of_pytorch[optimizer]}=True)"
        imported = "from stepscope.training.half_optimizers import OnMasters"
        updates = [imported, f"optimizer = OnMasters(model.parameters(), {made}, masters)"]
    elif optimizer in of_pytorch:
        updates = [f"optimizer = torch.optim.AdamW(model.parameters(), lr=lr, {of_pytorch[optimizer]}=True)"]
    elif optimizer in OF_ONE_LAUNCH:
        name = f"AdamW{optimizer.removeprefix('adamw-').title().replace('-', '')}"
        imported = f"from stepscope.training.one_launch import {name}"
        updates = [imported, f"optimizer = {name}(model.parameters(), lr=lr{masters})"]
    mode = f"mode={workload.compile!r}" if workload.compile != "default" else ""
    blocks = ["for block in blocks:  # the model's list of blocks", "    block.compile()"]
    compiled = {"eager": [], "blocks": blocks}.get(workload.compile, [f"model.compile({mode})"])
    if compiled and parts.keys() - {"projections"}:  # which compiler and kernels do together
        passes = "use_graph_passes"
        compiled = [f"from stepscope.kernels.operators import {passes}", f"{passes}()", *compiled]
    said = ", ".join(f"{name}={value!r}" for name, value in parts.items())
    return [
        *(["from stepscope.training.half_optimizers import halve", "masters = halve(model)"] if masters else []),
        *(["import stepscope", f"stepscope.replace_parts(model, {said})"] if parts else []),
        *updates,
        *compiled,
        *(["# forward and loss: with torch.autocast(device, torch.bfloat16)"] if precision.tensors == "bf16" else []),
        *(["# the whole step as one CUDA graph: torch.cuda.graph"] if workload.graph == "step" else []),
    ]


# A workload and a model in words, each on one line.


def describe_workload(workload: Workload) -> str:
    """A workload's sizes, tokens and choices on one line."""
    optimizer = f", {workload.optimizer}" if workload.optimizer else ""
    optimizer += f", gradients clipped to a norm of {workload.clip:g}" if workload.clip is not None else ""
    compiled = "eager" if workload.compile == "eager" else f"torch.compile {workload.compile}"
    compiled += ", replayed as CUDA graphs" if workload.graph == "step" else ""
    memory = f", checkpointing {workload.checkpointing}" if workload.checkpointing != "none" else ""
    if workload.accumulation != 1:
        size = workload.micro_batch_size
        memory += f", {workload.accumulation} micro-batches{f' of {size}' if size else ''}"
    if workload.may_run and workload.parallel != NOT_PARALLEL:
        memory += f", {workload.parallel} over {counted(workload.ranks, 'rank')}"
    batch = f"{workload.batch_size} x sequence {workload.seq_len} = {format_count(workload.tokens or 0)} tokens"
    if isinstance(workload.model, UserModel):
        batch = ", ".join(f"{name} {tensor}" for name, tensor in workload.model.inputs.items()) or "unknown"
    attention = f" {workload.attention} attention," if workload.attention is not None else ""
    others = [f" {name} {part}," for part, name in workload.parts.items() if name != REFERENCE]
    names = set(workload.parts.values())
    parts = f" {names.pop()} parts," if len(names) == 1 and others else "".join(others)
    parts += f" projections {workload.projections}," if workload.projections != "apart" else ""
    return f"batch {batch}, {workload.dtype}, {workload.phase},{attention}{parts} {compiled}{optimizer}{memory}"


def describe_model(workload: Workload, trainable: int | None = None) -> str:
    """A model's name, parameter count, and its sizes or where it comes from, on one line. trainable: how many of its
    parameters train, where that is known."""
    parameters = parameters_of(workload)
    count = f"{format_count(parameters)} parameters" if parameters is not None else "parameters not counted"
    if parameters is not None and trainable is not None and trainable < parameters:
        count = f"{format_count(trainable)} of {count} train"
    return f"{workload.name}: {count} ({workload.origin})"


def parameters_of(workload: Workload) -> int | None:
    """Number of parameters of a workload's model; None where they were not counted."""
    if isinstance(workload, TextbookWorkload):
        return parameter_count(workload.model)
    return workload.model.parameters


def cell_name(workload: Workload, settings: Settings | None = None) -> str:
    """A cell's name: the key without its digest, and the number of warm-up steps where the settings fix one."""
    name = "-".join(workload.words())
    if settings is None or settings.warmup_floor != settings.warmup_cap:
        return name
    return f"{name}, warm-up {settings.warmup_floor}"
