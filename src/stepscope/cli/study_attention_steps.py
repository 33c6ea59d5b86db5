"""`stepscope study attention --model`: a whole training step with each attention, measured and captured, or read."""

import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli import options
from stepscope.cli.output import warn
from stepscope.core.errors import InputError, choose
from stepscope.core.experiment import Experiment
from stepscope.core.run import Run

if TYPE_CHECKING:
    from stepscope.analysis.attention_steps import StepCell

Shown = Callable[[Callable[[object], Experiment]], None]


def measure_steps(
    *, models: str, seq_len: str | None, batch_size: int | None, dtypes: str | None, implementations: str | None,
    seconds: float | None, steps: int | None, device: str, tag: str | None, out: Path, keep: bool, shown: Shown,
) -> None:  # fmt: skip
    """Each cell in a process of its own; `shown` gets the answer."""
    from stepscope.cli.sweep import measure_and_report, numbers, words
    from stepscope.core.model_config import configure
    from stepscope.core.workload import ATTENTIONS
    from stepscope.studies.attention_steps import step_cells, step_sizes_for
    from stepscope.studies.sweep_plan import Policy, SweepPlan

    device_type = device.partition(":")[0]
    if device == "auto":
        from stepscope.measure.device import resolve_device

        device_type = resolve_device(device).type
    usual = step_sizes_for(device_type)
    names = words(implementations or usual.implementations, "--implementations")
    plan = SweepPlan(
        cells=step_cells(
            models=[configure(name) for name in words(models, "--model")],
            seq_lens=numbers(seq_len or usual.seq_len, "--seq-len"),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=words(dtypes or usual.dtypes, "--dtypes"),
            attentions=[choose(name, ATTENTIONS, "attention") for name in names],
            settings=options.settings_from(None, steps, 1.0 if seconds is None else seconds, device_type == "cpu"),
        ),
        devices=(device,),
        out=str(out),
        tag=tag,
        trace=options.trace_from(["kineto"], 1, False),
    )

    def report(runs: list[Run]) -> None:
        cells = [_cell(run, out / run.id, keep) for run in runs]
        shown(lambda _: _experiment(cells))
        if _unread(cells):
            warn(f"the captures lie in {out}: `stepscope study attention --read {out}` answers where polars is")

    measure_and_report(plan, Policy(), report)


def read_steps(places: Iterable[Path], keep: bool, shown: Shown) -> None:
    """Answer from folders of runs."""
    from stepscope.core.run_directory import find_run_files, load_run

    cells: list[StepCell] = []
    for file in dict.fromkeys(file.resolve() for place in places for file in find_run_files(place)):
        try:
            run = load_run(file)
        except InputError as error:
            warn(f"left out: {error}")
            continue
        if run.workload.phase != "forward":
            cells.append(_cell(run, file.parent, keep))
    shown(lambda _: _experiment(cells))


def _experiment(cells: "list[StepCell]") -> Experiment:
    from stepscope.analysis.attention_steps import answer_steps

    return answer_steps(cells, unread=_unread(cells))


def _unread(cells: "list[StepCell]") -> int:
    """Captures that nothing here can read."""
    return 0 if _reads_captures() else sum("kineto" in cell.run.artifacts for cell in cells)


@functools.cache
def _reads_captures() -> bool:
    """A machine that only measures has no polars."""
    try:
        importlib.import_module("stepscope.analysis.trace_digest")
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        return False
    return True


def _cell(run: Run, directory: Path, keep: bool) -> "StepCell":
    """The run with what its capture says; without that where polars is not installed, or the capture cannot be read."""
    from stepscope.analysis.attention_steps import StepCell

    if run.status != "done" or not _reads_captures():
        return StepCell(run=run)
    from stepscope.cli.study_kernels import digest_beside

    try:
        return StepCell(run=run, digest=digest_beside(run, directory, "kineto", keep))
    except InputError as error:
        warn(f"its capture is left out: {error}")
        return StepCell(run=run)
