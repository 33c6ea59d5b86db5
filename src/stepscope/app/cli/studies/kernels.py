"""`stepscope study kernels`: which kernels a step runs, over models and sequence lengths, captured here or before."""

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.app.cli.given_options import refuse_beside
from stepscope.app.cli.output import check_picture, draw, emit_json, warn
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.recording import recording_from
from stepscope.app.cli.verb import verb
from stepscope.core.errors import InputError
from stepscope.core.run import Run, settings_from
from stepscope.core.run_directory import find_run_files, load_run

if TYPE_CHECKING:
    from stepscope.questions.kernels.cells import CapturedCell
    from stepscope.traces.captures.digest import TraceDigest


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
    record: tuple[str, ...] = (),
    trace_steps: int,
    keep_digests: bool,
    tool: str,
    runs: Path,
    from_: Path | None,
    where: tuple[str, ...] = (),
    tag: str | None,
    only: tuple[str, ...],
    save: Path | None,
    style: str,
    brief: bool = False,
    json: bool,
) -> None:
    """Kernels by phase, their share, softmax and the rest, over models and sequence lengths."""
    from stepscope.core.errors import choose
    from stepscope.core.evidence import TRACE_TOOLS
    from stepscope.questions.kernels.answer import QUESTIONS

    shown = Presentation(style=style, json=json, brief=brief)
    check_picture(save)
    choose(tool, TRACE_TOOLS, "tool")
    for letter in only:
        choose(letter, list(QUESTIONS), "question")
    asked = "".join(only)
    if from_ is not None:
        refuse_beside("--from", "--where", "--tool", "--keep-digests")
        _report(_stored(from_, where), tool, keep_digests, asked, save, shown)
        return
    from stepscope.app.cli.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import Policy, SweepPlan
    from stepscope.questions.compared_cells import compared_cells

    recording = recording_from(record or (tool,), trace_steps)
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
    from stepscope.questions.kernels.answer import answer_kernels

    cells = [cell for run, directory in found for cell in _cell(run, directory, tool, keep)]
    if not cells:
        raise InputError("no run here (with these conditions) holds a capture: measure with --record kineto")
    captured = {cell.run.id for cell in cells}
    ended = [run for run, _ in found if run.id not in captured and run.status != "done"]
    answer = answer_kernels(cells, questions, ended)
    if shown.json and not shown.brief:
        for cell in cells:
            emit_json({"run": cell.run.id, "workload": cell.run.workload, "trace": cell.digest})
    else:
        shown.show(answer.body() if questions else answer)
    draw(answer, save)


def _stored(place: Path, where: tuple[str, ...]) -> list[tuple[Run, Path]]:
    """The runs in a folder that meet the conditions, each with its directory."""
    from stepscope.app.cli.table import conditions_of
    from stepscope.runs.conditions import meeting

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
    from stepscope.questions.kernels.cells import CapturedCell
    from stepscope.traces.captures.beside import digest_beside

    try:
        digests: dict[str, TraceDigest | None] = {
            name: digest_beside(run, directory, name, say=warn, keep=keep) for name in TRACE_TOOLS
        }
    except InputError as error:
        warn(f"left out: {error}")
        return []
    wanted = digests.pop(tool)
    return [CapturedCell(run=run, digest=wanted, other=next(iter(digests.values())))] if wanted else []
