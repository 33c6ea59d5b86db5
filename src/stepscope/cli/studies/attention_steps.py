"""`stepscope study attention-step`: a whole training step with each attention, measured and captured, or read."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stepscope.cli.captured_runs import captured, finished_answer, stored_runs, type_of_device, unread
from stepscope.cli.options import settings_from
from stepscope.cli.output import warn
from stepscope.cli.studies.precision import answer
from stepscope.cli.verb import verb
from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError, choose
from stepscope.core.experiment import Experiment
from stepscope.core.run import Run
from stepscope.engine.request import Tell, TraceRequest

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.attention.cells import StepCell

STUDY = "attention"
"""The answer's study: calls and steps are one."""


class Shown(Protocol):
    """`answer` with everything given but how the answer is made, and where one may be read."""

    def __call__(self, run: Callable[[Tell], Experiment], *, read: Path | None) -> None: ...


@verb(
    "study attention-step",
    "stepscope study attention-step --model small,medium --seq-len 1024 --attention reference,flash",
    "stepscope study attention-step --from results/h200/attention-steps --only findings",
    seq_len="1024; 64 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    attention="reference,sdpa-cudnn,flash; reference,sdpa on a CPU",
)
def attention_step(
    *,
    model: tuple[str, ...] = ("tiny",),
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    device: str,
    steps: int | None,
    seconds: float = 1.0,
    keep_digests: bool,
    runs: Path,
    from_: tuple[Path, ...] = (),
    tag: str | None,
    only: str | None,
    json: bool,
) -> None:
    """A whole training step with each attention in it: time, memory, and where the difference comes from."""
    shown = functools.partial(answer, study=STUDY, save=None, json=json, only=only)
    if from_:
        file = finished_answer(from_, {})
        if file is not None:
            shown(lambda _: never(), read=file)
        else:
            read_steps(from_, keep_digests, shown)
        return
    if only is not None:
        from stepscope.analysis.comparisons.attention.answer import TITLES

        check_only(only, TITLES)
    from stepscope.cli.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import Policy, SweepPlan
    from stepscope.studies.attention_steps import step_cells, step_sizes_for

    device_type = type_of_device(device)
    usual = step_sizes_for(device_type)
    plan = SweepPlan(
        cells=step_cells(
            models=[configure(name) for name in model],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=dtype or usual.dtypes.split(","),
            attentions=[
                choose(name, attention_names(), "attention") for name in attention or usual.implementations.split(",")
            ],
            settings=settings_from(None, steps, seconds, device_type == "cpu"),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        # Operators of a CPU take now this long and now that; kernels do not.
        trace=TraceRequest(tools=("kineto",), steps=5 if device_type == "cpu" else 1),
    )

    def report(found: list[Run]) -> None:
        cells = [_cell(run, runs / run.id, keep_digests) for run in found]
        shown(lambda _: _experiment(cells), read=None)
        if unread(cell.run for cell in cells):
            warn(f"the captures lie in {runs}: `stepscope study attention-step --from {runs}` answers where polars is")

    measure_and_report(plan, Policy(), report)


def check_only(only: str, titles: Sequence[str]) -> None:
    """Raises InputError, before anything is measured, for what is in no title that the answer may have."""
    if not only or not any(only.casefold() in title.casefold() for title in (*titles, "findings")):
        raise InputError(f"--only {only!r} names no table: there are {', '.join(map(repr, titles))}, and findings")


def read_steps(places: Iterable[Path], keep: bool, shown: Shown) -> None:
    """Answer from folders of runs."""
    places = list(places)
    cells = [_cell(run, directory, keep) for run, directory in stored_runs(places) if run.workload.phase != "forward"]
    if not cells:
        files = [file for place in places for file in sorted(place.glob("*.json"))]
        remedy = f"give one of its files, as in {files[0]}" if files else "give one that this study filled"
        raise InputError(f"no run of a training step in {', '.join(map(str, places))}: {remedy}")
    shown(lambda _: _experiment(cells), read=None)


def _experiment(cells: "list[StepCell]") -> Experiment:
    from stepscope.analysis.comparisons.attention.answer import answer_steps

    return answer_steps(cells, unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "StepCell":
    from stepscope.analysis.comparisons.attention.cells import StepCell

    return StepCell(run=run, digest=captured(run, directory, keep))


def never() -> Experiment:
    """Stands where an answer would be made; it is read."""
    raise AssertionError("an answer is read, not made")
