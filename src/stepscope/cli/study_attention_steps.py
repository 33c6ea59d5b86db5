"""`stepscope study attention --model`: a whole training step with each attention, measured and captured, or read."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli import options
from stepscope.cli.captured_runs import captured, stored_runs, unread
from stepscope.cli.output import warn
from stepscope.core.errors import InputError, choose
from stepscope.core.experiment import Experiment
from stepscope.core.run import Run

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.attention.cells import StepCell

Shown = Callable[[Callable[[object], Experiment]], None]


def measure_steps(
    *, models: str, seq_len: str | None, batch_size: int | None, dtypes: str | None, implementations: str | None,
    seconds: float | None, steps: int | None, device: str, tag: str | None, out: Path, keep: bool, shown: Shown,
) -> None:  # fmt: skip
    """Each cell in a process of its own; `shown` gets the answer."""
    from stepscope.cli.sweep import measure_and_report, numbers, words
    from stepscope.core.attentions import attention_names
    from stepscope.core.model_config import configure
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
            attentions=[choose(name, attention_names(), "attention") for name in names],
            settings=options.settings_from(None, steps, 1.0 if seconds is None else seconds, device_type == "cpu"),
        ),
        devices=(device,),
        out=str(out),
        tag=tag,
        # Operators of a CPU take now this long and now that; kernels do not.
        trace=options.trace_from(["kineto"], 5 if device_type == "cpu" else 1, False),
    )

    def report(runs: list[Run]) -> None:
        cells = [_cell(run, out / run.id, keep) for run in runs]
        shown(lambda _: _experiment(cells))
        if unread(cell.run for cell in cells):
            warn(f"the captures lie in {out}: `stepscope study attention --read {out}` answers where polars is")

    measure_and_report(plan, Policy(), report)


def read_steps(places: Iterable[Path], keep: bool, shown: Shown) -> None:
    """Answer from folders of runs."""
    places = list(places)
    cells = [_cell(run, directory, keep) for run, directory in stored_runs(places) if run.workload.phase != "forward"]
    if not cells:
        files = [file for place in places for file in sorted(place.glob("*.json"))]
        remedy = f"give one of its files, as in {files[0]}" if files else "give one that --model filled"
        raise InputError(f"no run of a training step in {', '.join(map(str, places))}: {remedy}")
    shown(lambda _: _experiment(cells))


def _experiment(cells: "list[StepCell]") -> Experiment:
    from stepscope.analysis.comparisons.attention.answer import answer_steps

    return answer_steps(cells, unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "StepCell":
    from stepscope.analysis.comparisons.attention.cells import StepCell

    return StepCell(run=run, digest=captured(run, directory, keep))
