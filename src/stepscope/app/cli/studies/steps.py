"""The studies that measure steps in cells: speed, compile, kernels, parallel, attention-step, allocator, warmup."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.app.cli.output import Presentation, draw, emit, json_line, warn
from stepscope.app.cli.questions import Answering
from stepscope.app.cli.studies.answering import AskedSteps, AskedStepsOfAny, Comparing
from stepscope.app.verbs.sweep import finished_answer, stored_runs
from stepscope.core.answer import Answer
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.options import MEASURING, OUTPUT, PARALLEL, STORED, WORKLOAD, Option, refuse_beside, verb
from stepscope.core.parts import attention_names, named_kernels
from stepscope.core.run import Run, settings_from
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.core.strategies import SCALINGS, spelled
from stepscope.core.workloads import COMPILES, DTYPES
from stepscope.engine.request import TraceRequest, type_of_device
from stepscope.engine.workload_options import OneWorkload, Record, Recording, Timing, TraceSteps
from stepscope.questions.one_model import given_ones

if TYPE_CHECKING:
    from stepscope.questions.kernels import CapturedCell
    from stepscope.traces.captures.digest import TraceDigest


@verb(
    "study speed",
    "stepscope study speed --model small,medium --dtype fp32,bf16",
    "stepscope study speed --from results/h200/precision-speed --only amdahl",
    model="small to 2.7B; tiny,small on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="fp32,tf32,bf16",
)
def speed(*, asked: AskedStepsOfAny, warmup: int | None) -> None:
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    from stepscope.questions.speed import ON_CPU, ON_GPU, TimedCell, answer_speed, dtypes_here, pair_up, speed_cells

    lacking: tuple[str, ...] = ()

    def answer(cells: list[TimedCell], unread: int) -> Answer:
        return answer_speed(pair_up(cells, asked.dtype or DTYPES), lacking=lacking, unread=unread)

    comparing = asked.comparing("speed", TimedCell, answer)
    if asked.from_:
        comparing.from_stored(asked.from_, asked.given)
        return
    usual = ON_CPU if asked.device_type == "cpu" else ON_GPU
    here, lacking = dtypes_here(asked.dtype or usual.dtypes, asked.device_type)
    if asked.is_own:
        cells = dataclasses.replace(asked, dtype=here).own_cells(ON_CPU, ON_GPU, warmup, phase=("forward-backward",))
    else:
        cells = speed_cells(**{**asked.sizes(ON_CPU, ON_GPU, warmup), "dtypes": here})
    comparing.measured(asked.plan(cells, TraceRequest(tools=("kineto",), steps=1)))


# `stepscope study compile`: the whole model, eager against compiled, measured and captured here, or before.


Compile = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=COMPILES[1:4])]
Prices = Annotated[bool, Option("What each graph break and recompilation costs a step of your own module (--module).")]


@verb(
    "study compile",
    "stepscope study compile --model small --compile default,max-autotune",
    "stepscope study compile --module train.py:make --prices",
    model="small,large,2.7B; tiny on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    phase="forward,train",
    attention="reference",
    compile="default",
)
def compiled(
    *,
    asked: AskedStepsOfAny,
    phase: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    compile: Compile,
    warmup: int | None,
    prices: Prices = False,
) -> None:
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    from stepscope.questions.compile import (
        BASELINE,
        ON_CPU,
        ON_GPU,
        CompileCell,
        answer_compile,
        check_modes,
        cold_caches,
        compile_cells,
        pair_up,
    )

    if prices:
        _prices(asked, warmup, phase, attention, compile)
        return

    def answer(cells: list[CompileCell], unread: int) -> Answer:
        return answer_compile(pair_up(cells), unread=unread)

    comparing = asked.comparing("compile", CompileCell, answer)
    if asked.from_:
        modes = None if compile is None else (BASELINE, *check_modes(compile))
        comparing.from_stored(asked.from_, {**asked.given, "phase": phase, "attention": attention, "compile": modes})
        return
    phases, modes = phase or ("forward", "train"), check_modes(compile or ("default",))
    if asked.is_own:
        compared = {"phase": phases, "compile": (BASELINE, *modes), "attention": attention}
        cells = asked.own_cells(ON_CPU, ON_GPU, warmup, **compared)
    else:
        cells = compile_cells(
            phases=phases, modes=modes, attentions=attention or ("reference",), **asked.sizes(ON_CPU, ON_GPU, warmup)
        )
    trace = TraceRequest(tools=() if asked.device_type == "cpu" else ("kineto",), steps=1)
    with cold_caches():
        comparing.measured(asked.plan(cells, trace))


def _prices(asked: AskedStepsOfAny, warmup: int | None, *others: tuple[str, ...] | None) -> None:
    """The price of each graph break and recompilation of the user's own module."""
    from stepscope.core.workloads import FactoryWorkload
    from stepscope.questions.compile import ON_CPU, ON_GPU
    from stepscope.questions.compile_prices import answer_prices, compile_prices

    if not asked.is_own:
        raise InputError("--prices is for a module of your own: add --module FILE:FACTORY")
    if asked.from_ or any(others):
        raise InputError(
            "--prices compiles the whole step in the default mode: leave out --from, --phase and --compile"
        )
    cells = asked.own_cells(ON_CPU, ON_GPU, warmup)
    cell = next(iter(cells))
    if len(cells) > 1:
        raise InputError("--prices takes one workload: give one value for each option")
    workload = cell.workload
    assert isinstance(workload, FactoryWorkload)
    answering = Answering(study="compile", shown=asked.shown, save=None)
    answering.run(lambda tell: answer_prices(compile_prices(workload, asked.device, cell.settings)))


# `stepscope study kernels`: which kernels a step runs, over models and sequence lengths, captured here or before.


Tool = Annotated[str, Option("Whose captures to read.", choices=TRACE_TOOLS)]
From = Annotated[Path | None, Option("A folder of runs measured before: nothing is measured.", STORED, metavar="DIR")]
Only = Annotated[tuple[str, ...], Option("Only these tables, by their letters, as in d or b,e (default: all).", OUTPUT)]


@verb(
    "study kernels",
    "stepscope study kernels --model small --seq-len 128,512",
    "stepscope study kernels --from results/h200/kernels --where model=large --only d,h",
)
def kernels(
    *,
    model: tuple[str, ...] = ("tiny",),
    seq_len: tuple[int, ...] = (64, 128),
    batch_size: int = 4,
    dtype: tuple[str, ...] = ("fp32",),
    phase: tuple[str, ...] = ("forward", "train"),
    attention: str = "reference",
    compile: str = "eager",
    device: str,
    warmup: int | None,
    steps: int | None,
    seconds: float = 2.0,
    record: Record = (),
    trace_steps: TraceSteps = 2,
    keep_digests: bool,
    tool: Tool = "kineto",
    runs: Path,
    from_: From,
    where: tuple[str, ...] = (),
    tag: str | None,
    only: Only = (),
    save: Path | None,
    style: str,
    brief: bool = False,
    json: bool,
) -> None:
    """Kernels by phase, their share, softmax and the rest, over models and sequence lengths."""
    from stepscope.core.evidence import TRACE_TOOLS
    from stepscope.questions.kernels import QUESTIONS

    shown = Presentation(style=style, json=json, brief=brief)
    choose(tool, TRACE_TOOLS, "tool")
    for letter in only:
        choose(letter, list(QUESTIONS), "question")
    asked = "".join(only)
    if from_ is not None:
        refuse_beside("--from", "--where", "--tool", "--keep-digests")
        _report(_stored(from_, where), tool, keep_digests, asked, save, shown)
        return
    from stepscope.app.verbs.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.engine.request import Policy, SweepPlan
    from stepscope.questions.comparison import compared_cells

    recording = Recording(record=record or (tool,), trace_steps=trace_steps)
    plan = SweepPlan(
        cells=compared_cells(
            models=[configure(name) for name in model], seq_lens=seq_len, batch_size=batch_size, dtypes=dtype,
            settings=settings_from(warmup, steps, seconds), phase=phase, attention=[attention], compile=[compile],
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=recording.trace,
        memory=recording.memory,
    )  # fmt: skip

    def report(found: "list[tuple[Run, Path]]") -> None:
        _report(found, tool, keep_digests, asked, save, shown)

    measure_and_report(plan, Policy(), lambda found: report([(run, runs / run.id) for run in found]))


def _report(
    found: list[tuple[Run, Path]], tool: str, keep: bool, questions: str, save: Path | None, shown: Presentation
) -> None:
    """The answer from these runs, each with its directory."""
    from stepscope.questions.kernels import answer_kernels

    cells = [cell for run, directory in found for cell in _cell(run, directory, tool, keep)]
    if not cells:
        raise InputError("no run here (with these conditions) holds a capture: measure with --record kineto")
    captured = {cell.run.id for cell in cells}
    ended = [run for run, _ in found if run.id not in captured and run.status != "done"]
    answer = answer_kernels(cells, questions, ended)
    if shown.json and not shown.brief:
        for cell in cells:
            emit(json_line({"run": cell.run.id, "workload": cell.run.workload, "trace": cell.digest}))
    else:
        shown.show(answer.body() if questions else answer)
    if save is not None:
        draw(answer, save)


def _stored(place: Path, where: tuple[str, ...]) -> list[tuple[Run, Path]]:
    """The runs in a folder that meet the conditions, each with its directory."""
    from stepscope.app.verbs.stored_runs import conditions_of
    from stepscope.runs.fields import meeting

    conditions = conditions_of(where)
    if not place.is_dir():
        raise InputError(f"no runs at {place}: it is no folder")
    found: list[tuple[Run, Path]] = []
    for file in find_run_files(place):
        try:
            run = load_run(file)
        except InputError as error:
            warn(f"left out: {error}")
            continue
        found.append((run, file.parent))
    kept, nowhere = meeting([run for run, _ in found], conditions)
    for sentence in nowhere if kept else ():
        warn(sentence)
    wanted = set(map(id, kept))
    return [pair for pair in found if id(pair[0]) in wanted]


def _cell(run: Run, directory: Path, tool: str, keep: bool) -> "list[CapturedCell]":
    """The run's captures as digests: of the tool asked for, and of the other, if the run has one."""
    from stepscope.core.evidence import TRACE_TOOLS
    from stepscope.questions.kernels import CapturedCell
    from stepscope.traces.captures.digest import digest_beside

    try:
        digests: dict[str, TraceDigest | None] = {
            name: digest_beside(run, directory, name, say=warn, keep=keep) for name in TRACE_TOOLS
        }
    except InputError as error:
        warn(f"left out: {error}")
        return []
    wanted = digests.pop(tool)
    return [CapturedCell(run=run, digest=wanted, other=next(iter(digests.values())))] if wanted else []


# `stepscope study parallel`: strategies that share a step over ranks, measured here, or before.


Scaling = Annotated[
    str,
    Option("Whether ranks share one process's batch, or have one as large each.", PARALLEL, choices=SCALINGS),
]


@verb(
    "study parallel",
    "stepscope study parallel --model large --parallel ddp-bucketed --ranks 2,4 --graph step --scaling weak",
    "stepscope study parallel --model tiny --device cpu --save strategies.svg",
    model="large; tiny on a CPU",
    seq_len="512; 64 on a CPU",
    batch_size="8; 4 on a CPU",
    dtype="bf16; fp32 on a CPU",
    parallel="the lessons, ddp and fsdp2",
    ranks="every GPU, or 2 on a CPU",
    attention="reference",
    kernels="reference",
    graph="none",
    optimizer="adamw-foreach",
    checkpointing="none",
)
def parallel(
    *,
    asked: AskedSteps,
    parallel: tuple[str, ...] | None,
    ranks: tuple[int, ...] | None,
    scaling: Scaling = "both",
    attention: str | None,
    kernels: str | None,
    graph: str | None,
    optimizer: str | None,
    checkpointing: str | None,
) -> None:
    """Strategies that share a step, beside one process and one another: step, communication, memory, scaling.

    The batch is that of all ranks together; it is measured again with as many sequences for each rank. What is chosen
    of the step holds for one process, too: strategies whose step --graph step cannot replay are named, not measured.
    """
    from stepscope.questions.parallel import (
        ON_CPU,
        ON_GPU,
        STUDY,
        USUAL,
        SharedCell,
        answer_parallel,
        parallel_cells,
        usual_ranks,
        without_none,
    )

    refused: list[tuple[str, str]] = []
    chosen = given_ones(
        {"attention": attention, "graph": graph, "optimizer": optimizer, "checkpointing": checkpointing}
    )
    if attention is not None:
        choose(attention, attention_names(), "attention")
    if kernels is not None:
        chosen |= named_kernels(kernels)
    if graph == "step" and not asked.from_ and asked.device_type != "cuda":
        raise InputError(f"--graph step captures CUDA graphs, which {asked.device_type} has not: leave it out")

    def answer(cells: list[SharedCell], unread: int) -> Answer:
        return answer_parallel(cells, unread=unread, refused=refused)

    comparing = asked.comparing(STUDY, SharedCell, answer)
    if asked.from_:
        wanted = None if parallel is None else ("none", *map(spelled, parallel))
        among = {**asked.given, "parallel": wanted, "ranks": ranks and (1, *ranks)}
        among |= {field: (value,) for field, value in chosen.items()}
        comparing.from_stored(asked.from_, among, "--kernels")
        return
    sizes = asked.sizes(ON_CPU, ON_GPU)
    sizes["settings"] = settings_from(None, asked.steps, asked.seconds)  # the profile says what nothing hides
    cells, refused = parallel_cells(
        strategies=without_none(parallel or USUAL),
        ranks=ranks or usual_ranks(asked.device_type),
        scaling=scaling,
        **chosen,
        **sizes,
    )
    comparing.measured(asked.plan(cells, TraceRequest()))


# `stepscope study attention-step`: a whole training step with each attention, measured and captured, or read.


STUDY = "attention"
"""The answer's study: calls and steps are one."""


@verb(
    "study attention-step",
    "stepscope study attention-step --model small,medium --seq-len 1024 --attention reference,flash",
    "stepscope study attention-step --from results/h200/attention-steps --only findings",
    model="tiny",
    seq_len="1024; 64 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    attention="reference,sdpa-cudnn,flash; reference,sdpa on a CPU",
)
def attention_step(*, asked: AskedSteps, attention: tuple[str, ...] | None) -> None:
    """A whole training step with each attention in it: time, memory, and where the difference comes from."""
    answering = Answering(study=STUDY, shown=asked.shown, save=asked.save)
    if asked.from_:
        refuse_beside("--from", "--keep-digests")
        file = finished_answer(asked.from_, {})
        if file is not None:
            refuse_beside("--from")
            answering.read(file)
        else:
            read_steps(asked.from_, asked.keep_digests, answering)
        return
    if asked.shown.only is not None:
        from stepscope.questions.attention_step import TITLES

        check_only(asked.shown.only, TITLES)
    from stepscope.questions.attention_step import ON_CPU, ON_GPU, usual_attentions
    from stepscope.questions.comparison import compared_cells

    attentions = attention or usual_attentions(asked.device_type)
    cells = compared_cells(
        attention=[choose(name, attention_names(), "attention") for name in attentions], **asked.sizes(ON_CPU, ON_GPU)
    )
    # Operators of a CPU take now this long and now that; kernels do not.
    trace = TraceRequest(tools=("kineto",), steps=5 if asked.device_type == "cpu" else 1)
    _comparing(answering, asked.keep_digests).measured(asked.plan(cells, trace))


def check_only(only: str, titles: Sequence[str]) -> None:
    """Raises InputError, before anything is measured, for what is in no title that the answer may have."""
    if not only or not any(only.casefold() in title.casefold() for title in (*titles, "findings")):
        raise InputError(f"--only {only!r} names no table: there are {', '.join(map(repr, titles))}, and findings")


def read_steps(places: Sequence[Path], keep: bool, answering: Answering) -> None:
    """Answer from folders of runs."""
    found = [(run, directory) for run, directory in stored_runs(places) if run.workload.phase != "forward"]
    if not found:
        files = [file for place in places for file in sorted(place.glob("*.json"))]
        remedy = f"give one of its files, as in {files[0]}" if files else "give one that this study filled"
        raise InputError(f"no run of a training step in {', '.join(map(str, places))}: {remedy}")
    _comparing(answering, keep).from_runs(found)


def _comparing(answering: Answering, keep: bool) -> Comparing:
    from stepscope.questions.attention_step import StepCell, answer_steps

    return Comparing(
        verb="attention-step",
        answering=answering,
        cell=StepCell,
        answer=answer_steps,
        keep_digests=keep,
    )


# `stepscope study allocator`: what a setting of PyTorch's caching allocator would give, measured.


Setting = Annotated[
    str, Option("The setting of PyTorch's caching allocator that is added, as name:value.", metavar="NAME:VALUE")
]


@verb(
    "study allocator",
    "stepscope study allocator --module train.py:make --dtype bf16",
    "stepscope study allocator --model large --seq-len 1024 --setting garbage_collection_threshold:0.8",
    model="small",
    seq_len="512",
)
def allocator(
    *,
    workload: OneWorkload,
    setting: Setting = "expandable_segments:True",
    device: str,
    timing: Timing,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """Measure a step without a setting of the GPU's caching allocator and with it, each in a process of its own."""
    from stepscope.questions.allocator import allocator_setting, check_setting

    check_setting(setting)
    step = workload.any_workload(model="small", seq_len=512)
    if type_of_device(device) != "cuda":
        raise InputError("a CPU has no caching allocator whose settings could be compared: this study needs a GPU")

    from stepscope.app.cli.output import sweep_progress
    from stepscope.app.verbs.sweep import sweep_exit_code
    from stepscope.engine.request import Cell, Policy, SweepPlan
    from stepscope.engine.sweep import run_sweep
    from stepscope.questions.allocator import answer_allocator

    plan = SweepPlan(cells=(Cell(workload=step, settings=timing.settings),), devices=(device,), out=str(runs), tag=tag)
    found: list[Run] = []
    with sweep_progress() as tell:
        found += run_sweep(plan, Policy(fresh=True), tell)
        with allocator_setting(setting):
            found += run_sweep(plan, Policy(fresh=True), tell)
    shown.show(answer_allocator(found, setting))
    raise typer.Exit(sweep_exit_code(found))


Warmup = Annotated[tuple[int, ...], Option("Numbers of warm-up steps.", MEASURING)]
Steps = Annotated[int, Option("Measured steps.", MEASURING, least=2)]


@verb(
    "study warmup",
    "stepscope study warmup --model small --seq-len 512",
    "stepscope study warmup --warmup 0,1,10 --steps 20",
)
def warmup(
    *,
    model: str = "tiny",
    seq_len: int = 128,
    batch_size: int = 4,
    dtype: str = "fp32",
    device: str,
    warmup: Warmup = (0, 1, 2, 5),
    steps: Steps = 10,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """Measure a step after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    from stepscope.app.verbs.sweep import measure_and_report, report_runs
    from stepscope.core.model_config import configure
    from stepscope.core.workloads import TextbookWorkload
    from stepscope.engine.request import Policy, SweepPlan
    from stepscope.questions.warmup import answer_warmup, warmup_cells

    workload = TextbookWorkload(model=configure(model), seq_len=seq_len, batch_size=batch_size, dtype=dtype)  # type: ignore[arg-type]
    cells = warmup_cells(workload, steps, warmup)
    plan = SweepPlan(cells=cells, devices=(device,), out=str(runs), tag=tag)
    measure_and_report(plan, Policy(), lambda found: report_runs(found, answer_warmup(found), shown))
