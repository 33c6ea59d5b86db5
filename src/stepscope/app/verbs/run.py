"""`run`: measure one training step here, of a module, of a factory, or of the textbook's model."""

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Unpack, cast

import msgspec

from stepscope.app.cli.output import Presentation, exit_code_of, progress, stdout_kept_clean
from stepscope.app.verbs.stored_runs import Measured, measured, records_of
from stepscope.core.environment import place_in_job, refuse_several
from stepscope.core.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DEVICE_FAILED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    InputError,
    choose,
    warn,
)
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.files import json_document
from stepscope.core.model_config import ModelOptions
from stepscope.core.options import GIVEN, MEASURING, Option, spelled_out, verb
from stepscope.core.parts import Attention
from stepscope.core.precisions import Dtype
from stepscope.core.run import Run, Settings, settings_from
from stepscope.core.run_directory import encode_run, find_run, load_run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import Compile, FactoryWorkload, Graph, Optimizer, Phase, Projections, UserModel, Workload
from stepscope.engine.request import MemoryRequest, Stage, StepRequest, Tell, TraceRequest
from stepscope.engine.workload_options import (
    RECORDED,
    TEXTBOOK_OPTIONS,
    OneWorkload,
    Recording,
    Timing,
    check_one_model,
    choices_among,
    fields_of_any_model,
    of_factory,
    usual_sizes,
)
from stepscope.runs.metrics import check_metrics_file, write_metrics

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stepscope.engine.sweep_plan import Cell, SweepPlan
    from stepscope.training.user_module.loading import Loaded


@spelled_out(before="device")
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
    log: str | Iterable[str] = (),
    tell: Tell | None = None,
    **options: Unpack[ModelOptions],
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
      on a GPU, 128 on a CPU), an attention, and {options} in place of
      the preset's own. kernels says how norm, rope, mlp and loss are computed: reference, compiled, fused, liger or
      quack (which has no mlp), for all or by part, as in {"norm": "fused"}; of a module or a factory's, where modules
      compute the same. projections: apart, or joint: those of one input are one product, and so are a picture's
      patches.

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
    seconds: how long to go on measuring between the least and the most steps; 5 if left out. Where they are given, the
    whole run ends soon after: what there is no time for is left out.
    profile: whether one more step runs under the profiler.
    peak_flops: the device's peak in FLOP/s, where no datasheet is known.
    record: what is kept of some more steps, with commas between: every allocation ("memory"), a trace of torch.profiler
    ("kineto"), a trace of Nsight Systems ("nsys").
    trace_steps, memory_steps: of how many steps; 3 or more steps of memory show what grows.
    runs: where the run's directory is made.
    tag: a word to find the run by.
    log: `wandb`, `mlflow` or `tensorboard`, which get the figures: in their active run, or else in one that ends here.
    tell: is called with each stage of the measurement.

    Raises InputError, in one line with the remedy, for what cannot be measured as asked, and KeyboardInterrupt where it
    is interrupted (what was measured is stored). A failure of the device is no exception: `measured.run.status` is then
    `out-of-memory` or `failed`, and `measured.run.failure` says where.
    """
    choices = choices_among("run", locals(), options)
    names = record.split(",") if isinstance(record, str) else record
    recorded = [choose(name.strip(), RECORDED, "record") for name in names if name.strip()]
    written = _writer(log)
    settings = settings_from(warmup, steps, seconds, not profile)
    check_one_model(model, module, arguments, batch=batch, loss=loss, optimizer=optimizer)

    from stepscope.engine.step import measure_step
    from stepscope.recording.environment import resolve_device

    on_gpu = resolve_device(device).type == "cuda"
    workload: Workload
    load: Callable[[], Loaded] | None = None
    if module is not None:
        workload = of_factory(module, arguments, choices)
    elif model is None or isinstance(model, str):
        named = {"model": model} if model else {}
        workload = OneWorkload({**named, **choices}).workload(**usual_sizes(on_gpu=on_gpu))
    else:
        if "nsys" in recorded:
            raise InputError("nsys watches a process of its own, which has no such object: give module='FILE:FACTORY'")
        if "parallel" in choices or "ranks" in choices:
            raise InputError("ranks are processes of their own, which have no such object: give module='FILE:FACTORY'")
        workload, load = of_object(model, batch, loss, choices)
    tools = tuple(name for name in dict.fromkeys(recorded) if name in TRACE_TOOLS)
    request = StepRequest(
        workload=workload, settings=settings, device=device, out=str(runs), tag=tag, peak_flops_per_s=peak_flops,
        trace=TraceRequest(tools=cast("tuple[TraceTool, ...]", tools), steps=trace_steps),
        memory=MemoryRequest(steps=memory_steps) if "memory" in recorded else None,
        in_seconds=seconds is not None and steps is None and workload.parallel == NOT_PARALLEL,
    )  # fmt: skip
    tell = tell or (lambda _: None)
    if workload.parallel != NOT_PARALLEL:
        shared = _measured_by_ranks(request, tell)
        written(shared.run, shared.directory)
        return shared
    with gradients_kept(model):
        result, directory = measure_step(request, tell, load=load)
    written(result, directory)
    if exit_code(result) == EXIT_INTERRUPTED:
        warn(f"interrupted; what was measured is in {directory}")
        raise KeyboardInterrupt
    return measured(result, directory)


def _writer(log: str | Iterable[str]) -> Callable[[Run, Path], None]:
    """What writes a run's figures into these trackers. Raises InputError for one that is not here."""
    if not log:
        return lambda _run, _directory: None
    from stepscope.engine.trackers import trackers_named, write_own

    trackers = trackers_named(log)
    return lambda run, directory: write_own(trackers, run, directory, warn)


def _measured_by_ranks(request: StepRequest, tell: Tell) -> Measured:
    """Start the processes that share the step, and wait for what they measured."""
    from stepscope.engine.sweep import SweepInterrupted, run_sweep
    from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan, SweepState

    def tell_of_cell(state: SweepState) -> None:
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
        (result,) = run_sweep(plan, Policy(fresh=True, refuses=True), tell_of_cell)
    except SweepInterrupted as interruption:
        warn(f"interrupted; what was measured is in {', '.join(map(str, interruption.kept)) or 'no directory'}")
        raise KeyboardInterrupt from None
    return measured(result, Path(request.out) / result.id)


# A module that exists already.


def of_object(
    model: object, batch: object, loss: object, choices: Mapping[str, Any]
) -> "tuple[FactoryWorkload, Callable[[], Loaded]]":
    """The workload of a module that exists already, and a function that returns a copy of the module. Raises InputError
    for another object, and for choices of the textbook's model."""
    from torch import nn, optim

    from stepscope.training.user_module.loading import code_of, copy_of, take_object

    is_step = not isinstance(model, nn.Module) and hasattr(model, "phases")
    if not isinstance(model, nn.Module) and not is_step:
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"the model is {kind}: give an nn.Module, the name of a preset, or module='file.py:factory'")
    if "seed" in choices:
        raise InputError("seed is of weights that are made, and this model has its own: leave it out")
    choices = dict(choices)
    optimizer = choices.pop("optimizer") if isinstance(choices.get("optimizer"), optim.Optimizer) else None
    fields = fields_of_any_model(choices, "your module and its batch say their own sizes and attention")
    name = type(model).__name__
    parts = {"module": model, "batch": () if batch is None else batch, "loss": loss, "optimizer": optimizer}
    loaded = take_object(model if is_step else parts, f"the model {name}")
    workload = FactoryWorkload(factory=name, code=code_of(loaded), model=UserModel(name=""), **fields)
    return workload, functools.partial(copy_of, loaded)


@contextlib.contextmanager
def gradients_kept(model: object) -> Generator[None]:
    """A context in which a copy of the model is trained, and after which its own gradients are what they were. Raises
    InputError at its end where the loss reached them: no copy is made of what a function refers to."""
    from torch import nn

    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    before = [parameter.grad for parameter in parameters]
    reached: list[object] = []
    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(reached.append) for parameter in trained]
    for parameter in parameters:
        parameter.grad = None  # into one that is there, backward would add
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    if reached:
        raise InputError(
            f"the loss of {type(model).__name__} reads parameters of the model itself, and the step is of a copy: give "
            "a module whose forward returns the loss, or a factory"
        )


# The command, which can also measure in several processes, and beside another step.


Against = Annotated[
    str | None,
    Option(
        "Another step, measured turn by turn with this one: a run's name, or the options in which it differs, as in "
        '"--compile default".',
        MEASURING,
        metavar="RUN|OPTIONS",
    ),
]


@verb(
    "run",
    "stepscope run --model small --seq-len 512 --dtype bf16 --attention sdpa --compile default",
    "stepscope run --model small --record kineto,memory",
    common="--model --module --seq-len --batch-size --dtype --attention --compile --optimizer --parallel --device "
    "--seconds --repeat --against --record --tag --json",
    model="small on a GPU, tiny on a CPU",
    seq_len="512 on a GPU, 128 on a CPU",
)
def command(
    *,
    workload: OneWorkload,
    device: str,
    timing: Timing,
    repeat: int,
    against: Against = None,
    peak_flops: float | None,
    recording: Recording,
    memory: int | None,
    tag: str | None,
    runs: Path,
    log: tuple[str, ...],
    metrics: Path | None,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Measure one step: time by phase, rates, memory, and what to doubt. Saves a run directory."""
    workload.check()
    if metrics is not None:
        check_metrics_file(metrics)
    place = place_in_job(os.environ)
    is_shared = workload.options.get("parallel", NOT_PARALLEL) != NOT_PARALLEL
    if place is not None and is_shared:
        workload = workload.joined(place.ranks)
    if not is_shared:
        refuse_several(os.environ, "measure a step of its own", "say --parallel, or start it without torchrun")
    if repeat > 1 or against is not None or (is_shared and place is None):
        from stepscope.engine.request import type_of_device
        from stepscope.engine.sweep_plan import SweepPlan

        cells = _cells(workload, against, runs, timing.settings, repeat, on_gpu=type_of_device(device) == "cuda")
        plan = SweepPlan(
            cells=cells, devices=(device,), out=str(runs), tag=tag, memory_limit_bytes=memory,
            peak_flops_per_s=peak_flops, trace=recording.trace, memory=recording.memory,
        )  # fmt: skip
        if against is not None and (recording.memory is not None or "nsys" in recording.trace.tools):
            raise InputError("--against records kineto alone: a record of memory, or one by nsys, is of one step")
        _measure_in_processes(plan, shown, save, log, metrics)
    from stepscope.engine.step import measure_step
    from stepscope.recording.environment import resolve_device  # torch, only now that the input is known to be sound

    on_gpu = resolve_device(device).type == "cuda"
    request = StepRequest(
        workload=workload.any_workload(**usual_sizes(on_gpu=on_gpu)), settings=timing.settings, device=device,
        out=str(runs), tag=tag, memory_limit_bytes=memory, peak_flops_per_s=peak_flops, trace=recording.trace,
        memory=recording.memory, place=place if is_shared else None,
        in_seconds="--seconds" in GIVEN.get() and timing.steps is None and not is_shared,
    )  # fmt: skip
    with stdout_kept_clean(), progress() as tell:
        result, directory = measure_step(request, tell)
        if place is None or not place.rank:
            _hand_out([result], directory.parent, log, metrics)
    code = exit_code(result)
    if place is not None and place.rank:
        return EXIT_DONE if code == EXIT_CHECK_FAILED else code  # the first rank shows what all measured, and doubts it
    for capture in result.evidence.captures:
        if capture.failure:
            warn(f"no {capture.tool} trace: {capture.failure}")
    _show(result, directory, shown, save)
    return code


def exit_code(run: Run) -> int:
    """0 done, 1 measured but a check failed, 3 the device failed, 130 interrupted."""
    if run.status == "interrupted" or (run.status == "done" and run.failure is not None):
        return EXIT_INTERRUPTED
    if run.status != "done":
        return EXIT_DEVICE_FAILED
    return exit_code_of(run.findings)


def _hand_out(measured_runs: Sequence[Run], out: Path, log: tuple[str, ...], metrics: Path | None) -> None:
    """Write the figures of runs, which lie in this folder, where they were asked for."""
    if log:
        from stepscope.engine.trackers import write_own

        for run in measured_runs:
            write_own(log, run, out / run.id, warn)
    if metrics is not None:
        try:
            write_metrics(measured_runs, metrics)
        except InputError as error:  # The runs are stored, and are shown all the same.
            warn(str(error))


def _show(run: Run, directory: Path, shown: Presentation, save: Path | None) -> None:
    """The run, and what its trace and its memory say, where it kept them and this machine can read them."""
    result = measured(run, directory)
    traced, remembered = records_of(result)

    def document() -> str:
        documents: dict[str, object] = {}
        if traced is not None:
            from stepscope.traces.captures.answer import trace_as_json

            documents["trace"] = trace_as_json(traced.summary, traced.findings)
        if remembered is not None:
            from stepscope.allocations.answer import memory_document

            documents["memory"] = memory_document(remembered.explained, remembered.moment)
        text = encode_run(run).decode()
        return json_document({**msgspec.json.decode(text), **documents}) if documents else text

    records = [record.answer for record in (traced, remembered) if record is not None]
    shown.show(result.answer, *records, document=document, save=save)
    if run.status == "done" and run.failure is None:
        shown.name_the_page(directory)


def _cells(
    workload: OneWorkload, against: str | None, runs: Path, settings: Settings, repeat: int, *, on_gpu: bool
) -> "tuple[Cell, ...]":
    """What is measured in processes of their own: the workload, or two that take turns."""
    from stepscope.engine.sweep_plan import Cell, order_cells, repeated

    usual = usual_sizes(on_gpu=on_gpu)
    first = workload.any_workload(**usual)
    cells = [Cell(workload=first, settings=settings)]
    if repeat == 1 and against is None:
        return tuple(cells)  # ranks that share its steps are processes, too
    if against is not None:
        is_options = against.lstrip().startswith("-")
        if is_options:
            second = with_options(workload, against).any_workload(**usual)
        elif not against.strip():
            raise InputError(f"--against {against!r} names no run: {_OF_ANOTHER_STEP}")
        else:
            second = find_run(against, runs).workload
            if not second.may_run:
                raise InputError(
                    f"--against {against}: a loop that was watched runs only by its script; name a run of `run`"
                )
        if (first.dtype == "tf32") == (second.dtype == "tf32"):
            cells = [Cell(workload=first, settings=settings, against=second)]
        else:  # whether fp32's products may be TF32 holds for a whole process
            cells.append(Cell(workload=second, settings=settings))
    begun = datetime.now(UTC).isoformat()
    return tuple(order_cells(repeated(cells, repeat, begun)))


def _measure_in_processes(
    plan: "SweepPlan", shown: Presentation, save: Path | None, log: tuple[str, ...], metrics: Path | None
) -> NoReturn:
    """Measure one step in several processes, or two, and show what they say; leaves with the exit code."""
    from stepscope.app.verbs.sweep import measure_and_report
    from stepscope.engine.sweep_plan import Policy

    def report(runs: list[Run]) -> None:
        from stepscope.runs.run_sets import answer_against, answer_set, compare_sets, sets_of

        with stdout_kept_clean():
            _hand_out(runs, Path(plan.out), log, metrics)
        if len(runs) == 1 and plan.cells[0].repeat is None and plan.cells[0].against is None:
            _show(runs[0], Path(plan.out) / runs[0].id, shown, save)
            return
        beside = [load_run(Path(plan.out) / run.beside) for run in runs if run.beside is not None]
        sets = [*sets_of(runs), *sets_of(beside)]
        in_turns = any(cell.against is not None for cell in plan.cells)
        alone = len(sets) == 1 and not in_turns
        if not alone and len(sets) != 2:
            raise InputError("too few of the processes ended with a result to compare two steps")
        first, second = sets[0], sets[-1]
        answer = answer_set(first, plan.out) if alone else answer_against(first, second, plan.out)
        document = first.document if alone else compare_sets(first, second)
        shown.show(answer, document=lambda: json_document(document), save=save)
        if alone:
            shown.name_the_page(f"{first.name} --runs {plan.out}")

    measure_and_report(plan, Policy(fresh=True, refuses=True), report, again=False)


# `--against`: the other step, said by a run or by the options in which it differs.


_OF_ANOTHER_STEP = (
    "it takes a run's name, or options of the workload in which the other step differs, as in "
    '--against "--compile default"'
)
_OF_A_STEP = 'write those of a step, as in --against "--dtype bf16"'


def with_options(workload: OneWorkload, text: str) -> OneWorkload:
    """The options of a workload, with those in this text in place of the ones that it had."""
    from stepscope.app.cli.verb import workload_in

    other = workload_in(text, _OF_ANOTHER_STEP).options
    kept = dict(workload.options)
    if {"model", "module"} & other.keys():  # of another model, the options of the first one's do not hold
        dropped = {"model", "module", "arg", *(TEXTBOOK_OPTIONS if "module" in other else ())}
        kept = {name: value for name, value in kept.items() if name not in dropped}
    words = (text.partition("=") for options in (kept, other) for text in options.get("arg", ()))
    arguments = {name: value for name, _, value in words}
    both = {**kept, **other, "arg": tuple(f"{name}={value}" for name, value in arguments.items())}
    return OneWorkload({name: value for name, value in both.items() if name != "arg" or value})


def options_in(text: str) -> dict[str, Any]:
    """The fields of a workload that options say. Raises InputError for a text that is none."""
    from stepscope.app.cli.verb import workload_in

    if not text.lstrip().startswith("-"):
        raise InputError(f"--against {text!r} is no options: {_OF_A_STEP}")
    return workload_in(text, _OF_A_STEP).fields
