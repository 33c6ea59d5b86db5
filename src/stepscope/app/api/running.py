"""`stepscope.run`: measure one training step here, of a module, of a factory, or of the textbook's model."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stepscope.app.api.reading import Measured, measured
from stepscope.core.errors import InputError, choose, warn
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.parts import Attention, named_kernels, own_kernels
from stepscope.core.precisions import Dtype
from stepscope.core.run import settings_from
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.user_model import code_digest, unmet
from stepscope.core.workloads import (
    Compile,
    FactoryWorkload,
    Graph,
    Optimizer,
    Phase,
    Projections,
    TextbookWorkload,
    UserModel,
    Workload,
)
from stepscope.engine.request import MemoryRequest, Stage, StepRequest, Tell, TraceRequest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.training.user_module.loading import Loaded


# Makes the workload from what a caller in Python says: of the textbook's model, of a factory, or of a module.


_OF_ANY_MODEL = (
    "dtype", "phase", "compile", "graph", "optimizer", "clip", "checkpointing", "accumulation", "seed", "kernels",
    "parallel", "ranks",
)  # fmt: skip
"""The choices for a step of any model. All others belong to the textbook's model."""
_SIZES = tuple(field for field in ModelConfig.__struct_fields__ if field != "name")


def given(**said: Any) -> dict[str, Any]:
    """The arguments that a caller gave: one that is None was left out."""
    return {name: value for name, value in said.items() if value is not None}


def textbook(preset: object, said: dict[str, Any]) -> TextbookWorkload:
    """The textbook's workload, with Workload's defaults for the rest. Raises InputError for choices that cannot be."""
    if not isinstance(preset, str):
        raise InputError(f"the model is {type(preset).__name__}: give the name of a preset, as in 'small'")
    parts = named_kernels(said["kernels"]) if "kernels" in said else {}
    chosen: dict[str, Any] = {**{name: value for name, value in said.items() if name != "kernels"}, **parts}
    sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
    return TextbookWorkload(model=configure(preset, **sizes), **chosen)


def check_one_model(
    model: object, module: str | None, arguments: Mapping[str, Any] | None, *, batch: object, loss: object,
    optimizer: object,
) -> None:  # fmt: skip
    """Raise InputError if two models are named, or if a model is given something that it does not take."""
    if model is not None and module is not None:
        raise InputError("model and module both say which model is meant: give one of them")
    if arguments and module is None:
        raise InputError("arguments belong to module, a factory: say whose they are")
    of_a_module = {"batch": batch, "loss": loss, "optimizer": None if isinstance(optimizer, str) else optimizer}
    strangers = [name for name, value in of_a_module.items() if value is not None]
    if strangers and (module is not None or model is None or isinstance(model, str)):
        whose = "a factory gives its own" if module is not None else "the textbook's model has its own"
        raise InputError(f"{' and '.join(strangers)}: only a model that is an nn.Module takes it, {whose}")


def of_factory(factory: str, arguments: Mapping[str, Any] | None, said: Mapping[str, Any]) -> FactoryWorkload:
    """The workload of what a factory makes of its arguments. Raises InputError for choices of the textbook's model."""
    chosen = _choices(said, "give the factory arguments")
    workload = FactoryWorkload(
        factory=factory, code=code_digest(factory), model=UserModel(name=""), arguments=dict(arguments or {}), **chosen
    )
    for sentence in unmet(workload):
        warnings.warn(f"{factory}: {sentence}", stacklevel=3)
    return workload


def of_object(
    model: object, batch: object, loss: object, said: dict[str, Any]
) -> "tuple[FactoryWorkload, Callable[[], Loaded]]":
    """The workload of a module that exists already, and a function that returns a copy of the module. Raises InputError
    for another object, and for choices of the textbook's model."""
    from torch import nn, optim

    from stepscope.training.user_module.loading import code_of, copy_of, take_object

    is_step = not isinstance(model, nn.Module) and hasattr(model, "phases")
    if not isinstance(model, nn.Module) and not is_step:
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"the model is {kind}: give an nn.Module, the name of a preset, or module='file.py:factory'")
    if "seed" in said:
        raise InputError("seed is of weights that are made, and this model has its own: leave it out")
    own = said.pop("optimizer") if isinstance(said.get("optimizer"), optim.Optimizer) else None
    chosen = _choices(said, "your module and its batch say their own sizes and attention")
    name = type(model).__name__
    parts = {"module": model, "batch": () if batch is None else batch, "loss": loss, "optimizer": own}
    loaded = take_object(model if is_step else parts, f"the model {name}")
    return FactoryWorkload(factory=name, code=code_of(loaded), model=UserModel(name=""), **chosen), functools.partial(
        copy_of, loaded
    )


@contextlib.contextmanager
def gradients_kept(model: object) -> Generator[None]:
    """A context in which a copy of the model is trained, and after which its own gradients are what they were. Raises
    InputError at its end where the loss reached them: no copy is made of what a function refers to."""
    from torch import nn

    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # into one that is there, backward would add
    try:
        yield
    finally:
        reached = any(parameter.grad is not None for parameter in parameters)
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    if reached:
        raise InputError(
            f"the loss of {type(model).__name__} reads parameters of the model itself, and the step is of a copy: give "
            "a module whose forward returns the loss, or a factory"
        )


def _choices(said: Mapping[str, Any], remedy: str) -> dict[str, Any]:
    """The fields of an FactoryWorkload that were said. Raises InputError for choices of the textbook's model."""
    strangers = [name for name in said if name not in _OF_ANY_MODEL]
    if strangers:
        raise InputError(f"only the textbook's model takes {', '.join(strangers)}: {remedy}")
    parts = own_kernels(said["kernels"]) if "kernels" in said else {}
    return {**{name: value for name, value in said.items() if name != "kernels"}, **parts}


_RECORDED = ("memory", *TRACE_TOOLS)


def run(
    model: "str | nn.Module | object | None" = None,
    batch: object = None,
    loss: "Callable[..., Any] | None" = None,
    *,
    module: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    dtype: Dtype | None = None,
    phase: Phase | None = None,
    compile: Compile | None = None,
    graph: Graph | None = None,
    attention: Attention | None = None,
    kernels: str | Mapping[str, str] | None = None,
    projections: Projections | None = None,
    optimizer: "Optimizer | torch.optim.Optimizer | None" = None,
    clip: float | None = None,
    checkpointing: str | None = None,
    accumulation: int | None = None,
    parallel: str | None = None,
    ranks: int | None = None,
    seed: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocabulary: int | None = None,
    tied: bool | None = None,
    device: str = "auto",
    warmup: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    profile: bool = True,
    peak_flops: float | None = None,
    record: str | Iterable[str] = (),
    trace_steps: int = 2,
    memory_steps: int = 1,
    runs: str | Path = "runs",
    tag: str | None = None,
    tell: Tell | None = None,
) -> Measured:
    """Measure one training step: time by phase, rates, memory, and what to doubt. Saves a run directory.

        measured = stepscope.run(net, batch, loss, record="kineto,memory")    # a module of your own
        measured = stepscope.run(module="train.py:make", arguments={"width": 64})
        measured = stepscope.run("tiny", seq_len=64, dtype="bf16")            # the textbook's model
        measured = stepscope.run("large", parallel="fsdp2", ranks=2)          # two processes share each step
        measured                                          # in a notebook: tables and findings
        measured.samples["backward"].median_s             # seconds
        measured.run, measured.answer, measured.trace, measured.memory, measured.directory

    What is measured, one of three:

    - model, an nn.Module, with its batch and its loss. batch: a tensor, a tuple of positional arguments or a dict of
      keyword arguments for forward; a list, an iterator or a DataLoader gives several, which the steps rotate through
      (four at most of an iterator). Their shapes are yours. loss: a function of forward's output, or of the output and
      the batch, or of the output and what forward leaves of the batch where its parameter is named `target`, `labels`
      or `y`; left out where forward returns the loss (a number, `.loss`, or `["loss"]`). The steps train a copy of the
      module, on `device`; yours stays as it is. An object with `phases`, pairs of a name and a function, is a step of
      your own, and is not copied.
    - module, a factory as `--module` names it: "package.module:factory", "file.py:factory", or the config.json of a
      Hugging Face model; arguments are what it is called with.
    - model, the name of a preset of the textbook's model, as `stepscope models` lists them: tiny, small, medium, large,
      xl and larger ones (left out: small on a GPU, tiny on a CPU), with batch_size sequences (4) of seq_len tokens (512
      on a GPU, 128 on a CPU), an attention, and d_model, d_ff, layers, heads, kv_heads, vocabulary and tied in place of
      the preset's own. kernels says how norm, rope, mlp and loss are computed: reference, compiled, fused, liger or
      quack (which has no mlp), for all or by part, as in {"norm": "fused"}; of a module or a factory's it says so of
      norm, mlp and loss, where modules compute the same. projections: apart, or joint: those of one input are one
      product.

    How it runs, whatever the model:

    dtype: fp32, tf32, bf16 or fp16 (the last two by autocast); bf16-pure, where parameters are bf16, too; bf16-master,
    where weights are bf16 and the optimizer writes them from masters in fp32; or fp8 and fp8-row, whose products are of
    eight bits, scaled by tensor or by row.
    phase: train, forward-backward, or forward, which is inference without the loss.
    compile: eager, or a mode of torch.compile, or blocks: each block by itself.
    graph: none, or step: the whole step is replayed as CUDA graphs.
    optimizer: an AdamW by name; for a module of your own an optimizer that holds its parameters.
    clip: the bound on the gradients' global norm, to which they are scaled down; left out, they are not.
    checkpointing: none, selective, selective-K, attention, every-K, or offload-K.
    accumulation: how many micro-batches make a step.
    parallel, ranks: how several processes share each step, as in "fsdp2" and 2. They are started here, each with a
    device, and make the model themselves; so it is named, or made by a factory.
    seed: of weights and batches that are made.

    How it is measured:

    device: auto, cpu, cuda or cuda:N.
    warmup, steps: exactly so many. If left out, steps warm up until they are steady, and 10 to 100 are timed.
    seconds: how long to go on measuring between the least and the most steps; 5 if left out.
    profile: whether one more step runs under the profiler.
    peak_flops: the device's peak in FLOP/s, where no datasheet is known.
    record: what is kept of some more steps, with commas between: every allocation ("memory"), a trace of torch.profiler
    ("kineto"), a trace of Nsight Systems ("nsys").
    trace_steps, memory_steps: of how many steps; 3 or more steps of memory show what grows.
    runs: where the run's directory is made.
    tag: a word to find the run by.
    tell: is called with each stage of the measurement.

    Raises InputError, in one line with the remedy, for what cannot be measured as asked, and KeyboardInterrupt where it
    is interrupted (what was measured is stored). A failure of the device is no exception: `measured.run.status` is then
    `out-of-memory` or `failed`, and `measured.run.failure` says where.
    """
    said = given(
        seq_len=seq_len, batch_size=batch_size, dtype=dtype, phase=phase, compile=compile, graph=graph,
        attention=attention, kernels=kernels, projections=projections, optimizer=optimizer, clip=clip,
        checkpointing=checkpointing, accumulation=accumulation, parallel=parallel, ranks=ranks, seed=seed,
        d_model=d_model, d_ff=d_ff, layers=layers, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary, tied=tied,
    )  # fmt: skip
    asked = _recorded(record)
    settings = settings_from(warmup, steps, seconds, not profile)
    check_one_model(model, module, arguments, batch=batch, loss=loss, optimizer=optimizer)

    from stepscope.engine.step import measure_step
    from stepscope.recording.device import resolve_device

    on_gpu = resolve_device(device).type == "cuda"
    workload: Workload
    made: Callable[[], Loaded] | None = None
    if module is not None:
        workload = of_factory(module, arguments, said)
    elif model is None or isinstance(model, str):
        usual = {"seq_len": 512 if on_gpu else 128}
        workload = textbook(model or ("small" if on_gpu else "tiny"), {**usual, **said})
    else:
        if "nsys" in asked:
            raise InputError("nsys watches a process of its own, which has no such object: give module='FILE:FACTORY'")
        if "parallel" in said or "ranks" in said:
            raise InputError("ranks are processes of their own, which have no such object: give module='FILE:FACTORY'")
        workload, made = of_object(model, batch, loss, said)
    request = StepRequest(
        workload=workload, settings=settings, device=device, out=str(runs), tag=tag, peak_flops_per_s=peak_flops,
        trace=TraceRequest(tools=_tools(asked), steps=trace_steps),
        memory=MemoryRequest(steps=memory_steps) if "memory" in asked else None,
    )  # fmt: skip
    if workload.parallel != NOT_PARALLEL:
        return _measured_by_ranks(request, tell or _say_nothing)
    with gradients_kept(model):
        found, directory = measure_step(request, tell or _say_nothing, load=made)
    if found.status == "interrupted" or (found.status == "done" and found.failure is not None):
        warn(f"interrupted; what was measured is in {directory}")
        raise KeyboardInterrupt
    return measured(found, directory)


def _measured_by_ranks(request: StepRequest, tell: Tell) -> Measured:
    """Start the processes that share the step, and wait for what they measured."""
    from stepscope.engine.request import Cell, Policy, SweepPlan, SweepState
    from stepscope.engine.sweep import SweepInterrupted, run_sweep

    def told(state: SweepState) -> None:
        (cell,) = state.cells
        if cell.stage:
            tell(Stage(name=cell.stage, detail=cell.detail))

    plan = SweepPlan(
        cells=(Cell(workload=request.workload, settings=request.settings),),
        devices=(request.device,),
        out=request.out,
        tag=request.tag,
        peak_flops_per_s=request.peak_flops_per_s,
        trace=request.trace,
        memory=request.memory,
    )
    try:
        (found,) = run_sweep(plan, Policy(fresh=True, refuses=True), told)
    except SweepInterrupted as interruption:
        warn(f"interrupted; what was measured is in {', '.join(map(str, interruption.kept)) or 'no directory'}")
        raise KeyboardInterrupt from None
    return measured(found, Path(request.out) / found.id)


def _say_nothing(_: Stage) -> None:
    pass


def _recorded(record: str | Iterable[str]) -> tuple[str, ...]:
    named = record.split(",") if isinstance(record, str) else record
    return tuple(dict.fromkeys(choose(name.strip(), _RECORDED, "record") for name in named if name.strip()))


def _tools(asked: tuple[str, ...]) -> tuple[TraceTool, ...]:
    return cast("tuple[TraceTool, ...]", tuple(name for name in asked if name in TRACE_TOOLS))
