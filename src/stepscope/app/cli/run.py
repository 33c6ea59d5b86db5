"""`stepscope run`: measure one training step here."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec

from stepscope.app.cli.output import Presentation, check_picture, draw, progress, stdout_kept_clean, warn
from stepscope.app.cli.sweep import measure_and_report
from stepscope.app.cli.verb import workload_in
from stepscope.core.answer import worst
from stepscope.core.environment import place_in_job, refuse_several
from stepscope.core.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DEVICE_FAILED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    InputError,
    StepscopeError,
)
from stepscope.core.files import json_document
from stepscope.core.options import MEASURING, Option, verb
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import encode_run, find_run, load_run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload, Workload
from stepscope.engine.request import type_of_device
from stepscope.engine.workload_options import TEXTBOOK_OPTIONS, OneWorkload, Recording, Timing

if TYPE_CHECKING:
    from stepscope.allocations.explain import Explained
    from stepscope.engine.request import Cell, SweepPlan
    from stepscope.traces.captures.summary import TraceSummary


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
    model="small on a GPU, tiny on a CPU",
    seq_len="512 on a GPU, 128 on a CPU",
)
def run(
    *,
    said: OneWorkload,
    device: str,
    timing: Timing,
    repeat: int,
    against: Against = None,
    peak_flops: float | None,
    recording: Recording,
    memory: int | None,
    tag: str | None,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Measure one step: time by phase, rates, memory, and what to doubt. Saves a run directory."""
    check_picture(save)
    own = said.own
    if own is None:
        said.check()

    place = place_in_job(os.environ)
    parallel = said.said.get("parallel", NOT_PARALLEL) != NOT_PARALLEL
    if place is not None and parallel:
        said = said.joined(place.ranks)
    if not parallel:
        refuse_several(os.environ, "measure a step of its own", "say --parallel, or start it without torchrun")
    if repeat > 1 or against is not None or (parallel and place is None):
        from stepscope.engine.request import SweepPlan

        cells = _cells(said, against, runs, timing.settings, repeat, on_gpu=type_of_device(device) == "cuda")
        plan = SweepPlan(
            cells=cells, devices=(device,), out=str(runs), tag=tag, memory_limit_bytes=memory,
            peak_flops_per_s=peak_flops, trace=recording.trace, memory=recording.memory,
        )  # fmt: skip
        if against is not None and (recording.memory is not None or "nsys" in recording.trace.tools):
            raise InputError("--against records kineto alone: a record of memory, or one by nsys, is of one step")
        _measure_in_processes(plan, shown, save)
    from stepscope.engine.step import StepRequest, measure_step
    from stepscope.recording.device import resolve_device  # torch, only now that the input is known to be sound

    on_gpu = resolve_device(device).type == "cuda"
    workload = own or _usual(said, on_gpu)
    request = StepRequest(
        workload=workload, settings=timing.settings, device=device, out=str(runs), tag=tag,
        memory_limit_bytes=memory, peak_flops_per_s=peak_flops, trace=recording.trace, memory=recording.memory,
        place=place if parallel else None,
    )  # fmt: skip
    with stdout_kept_clean(), progress() as tell:
        measured, directory = measure_step(request, tell)
    if place is not None and place.rank:
        code = exit_code(measured)  # what is to be doubted is said by the first rank, which shows what all measured
        return EXIT_DONE if code == EXIT_CHECK_FAILED else code
    for capture in measured.evidence.captures:
        if capture.failure:
            warn(f"no {capture.tool} trace: {capture.failure}")
    _show(measured, directory, shown, save)
    return exit_code(measured)


def _usual(said: OneWorkload, on_gpu: bool) -> TextbookWorkload:
    """The textbook's workload, with the usual sizes for what was not said."""
    return said.workload(model="small" if on_gpu else "tiny", seq_len=512 if on_gpu else 128)


def _cells(
    said: OneWorkload, against: str | None, runs: Path, settings: Settings, repeat: int, *, on_gpu: bool
) -> "tuple[Cell, ...]":
    """What is measured in processes of their own: the workload, or two that take turns."""
    from stepscope.engine.request import Cell, order_cells, repeated

    first = said.own or _usual(said, on_gpu)
    cells = [Cell(workload=first, settings=settings)]
    if repeat == 1 and against is None:
        return tuple(cells)  # ranks that share its steps are processes, too
    if against is not None:
        if is_options(against):
            other = with_options(said, against)
            second = other.own or _usual(other, on_gpu)
        else:
            second = stored_workload(against, runs)
        if (first.dtype == "tf32") == (second.dtype == "tf32"):
            cells = [Cell(workload=first, settings=settings, against=second)]
        else:  # whether fp32's products may be TF32 holds for a whole process
            cells.append(Cell(workload=second, settings=settings))
    begun = datetime.now(UTC).isoformat()
    return tuple(order_cells(repeated(cells, repeat, begun)))


def _measure_in_processes(plan: "SweepPlan", shown: Presentation, save: Path | None) -> NoReturn:
    """Measure one step in several processes, or two, and show what they say; leaves with the exit code."""
    from stepscope.engine.request import Policy

    def report(measured: list[Run]) -> None:
        from stepscope.runs.run_sets import against_as_json, answer_against, answer_set, set_as_json, sets_of

        if len(measured) == 1 and plan.cells[0].repeat is None and plan.cells[0].against is None:
            _show(measured[0], Path(plan.out) / measured[0].id, shown, save)
            return
        beside = [load_run(Path(plan.out) / run.beside) for run in measured if run.beside is not None]
        found = [*sets_of(measured), *sets_of(beside)]
        in_turns = any(cell.against is not None for cell in plan.cells)
        alone = len(found) == 1 and not in_turns
        if not alone and len(found) != 2:
            raise InputError("too few of the processes ended with a result to compare two steps")
        first, second = found[0], found[-1]
        answer = answer_set(first, plan.out) if alone else answer_against(first, second, plan.out)
        document = set_as_json(first) if alone else against_as_json(first, second)
        shown.show(answer, document=lambda: json_document(document))
        draw(answer, save)
        if alone:
            shown.name_the_page(f"{first.name} --runs {plan.out}")

    measure_and_report(plan, Policy(fresh=True, refuses=True), report, again=False)


def exit_code(measured: Run) -> int:
    """0 done, 1 measured but a check failed, 3 the device failed, 130 interrupted."""
    if measured.status == "interrupted" or (measured.status == "done" and measured.failure is not None):
        return EXIT_INTERRUPTED
    if measured.status != "done":
        return EXIT_DEVICE_FAILED
    return EXIT_CHECK_FAILED if worst(measured.findings) == "error" else EXIT_DONE


def _show(measured: Run, directory: Path, shown: Presentation, save: Path | None) -> None:
    """The run, and what its trace and its memory say, where it kept them and this machine can read them."""
    from stepscope.runs.answer import answer_run

    answers = [answer_run(measured, str(directory))]
    documents: dict[str, object] = {}
    summary, explained = _summary_of_trace(measured, directory), _explained_memory(measured, directory)
    if summary is not None:
        from stepscope.traces.captures.answer import answer_trace, trace_as_json
        from stepscope.traces.captures.checks import check_trace

        findings = check_trace(summary)
        answers.append(answer_trace(summary, findings, str(directory)))
        documents["trace"] = trace_as_json(summary, findings)
    if explained is not None:
        from stepscope.allocations.answer import answer_memory, memory_as_json
        from stepscope.allocations.at_moment import moment_at

        moment = moment_at(explained, None)
        answers.append(answer_memory(explained, moment))
        documents["memory"] = memory_as_json(explained, moment)

    def document() -> str:
        text = encode_run(measured).decode()
        return json_document({**msgspec.json.decode(text), **documents}) if documents else text

    shown.show(*answers, document=document)
    draw(answers[0], save)
    if measured.status == "done" and measured.failure is None:
        shown.name_the_page(directory)


def _summary_of_trace(measured: Run, directory: Path) -> "TraceSummary | None":
    if not any(capture.artifact in ("kineto", "nsys") for capture in measured.evidence.captures):
        return None
    try:
        from stepscope.app.cli.trace import load_summary

        return load_summary(directory)
    except ModuleNotFoundError as error:
        warn(f"the trace is kept, and read where {error.name} is installed: stepscope trace {directory}")
    except StepscopeError as error:
        warn(f"the trace is kept, and cannot be read: {error}")
    return None


def _explained_memory(measured: Run, directory: Path) -> "Explained | None":
    if "memory" not in measured.artifacts:
        return None
    try:
        from stepscope.allocations.explain import explain
        from stepscope.allocations.snapshot import read_snapshot

        return explain(read_snapshot(directory))
    except ModuleNotFoundError as error:
        warn(f"the memory snapshot is kept, and read where {error.name} is installed: stepscope memory {directory}")
    except StepscopeError as error:
        warn(f"the memory snapshot is kept, and cannot be read: {error}")
    return None


# `--against`: the other step, said by a run or by the options in which it differs.


_OF_ANOTHER_STEP = (
    "it takes a run's name, or options of the workload in which the other step differs, as in "
    '--against "--compile default"'
)
_OF_A_STEP = 'write those of a step, as in --against "--dtype bf16"'


def stored_workload(name: str, runs: Path) -> Workload:
    """The workload of the run of this name. Raises InputError for a watched loop, which only its script can run."""
    if not name.strip():
        raise InputError(f"--against {name!r} names no run: {_OF_ANOTHER_STEP}")
    workload = find_run(name, runs).workload
    if not workload.may_run:
        raise InputError(f"--against {name}: a loop that was watched runs only by its script; name a run of `run`")
    return workload


def is_options(text: str) -> bool:
    """Whether --against names options, and no run."""
    return text.lstrip().startswith("-")


def with_options(said: OneWorkload, text: str) -> OneWorkload:
    """What was said of the workload, with the options in this text in place of those that it had."""
    other = workload_in(text, _OF_ANOTHER_STEP).said
    kept = dict(said.said)
    if {"model", "module"} & other.keys():  # another model: what was said of the first one's does not hold for it
        dropped = {"model", "module", "arg", *(TEXTBOOK_OPTIONS if "module" in other else ())}
        kept = {name: value for name, value in kept.items() if name not in dropped}
    arguments = {**_arguments(kept), **_arguments(other)}
    both = {**kept, **other, "arg": tuple(f"{name}={value}" for name, value in arguments.items())}
    return OneWorkload({name: value for name, value in both.items() if name != "arg" or value})


def options_in(text: str) -> dict[str, Any]:
    """The fields of a workload that options say. Raises InputError for a text that is none."""
    if not is_options(text):
        raise InputError(f"--against {text!r} is no options: {_OF_A_STEP}")
    return workload_in(text, _OF_A_STEP).fields


def _arguments(said: Mapping[str, Any]) -> dict[str, str]:
    parts = (text.partition("=") for text in said.get("arg", ()))
    return {name: value for name, _, value in parts}
