"""How many warm-up steps does a measurement need? The same step after 0, 1, 2 and 5 of them, in fresh processes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from stepscope.core.answer import TEXT, Answer, Cell, as_lines, table_of
from stepscope.core.errors import InputError
from stepscope.core.figures import figure
from stepscope.core.model_config import configure
from stepscope.core.options import MEASURING, STORED, Option, refuse_beside
from stepscope.core.range_names import STEP
from stepscope.core.run import Run, Settings
from stepscope.core.units import format_milliseconds, format_seconds
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.engine.sweep_plan import SweepPlan
from stepscope.questions.comparison import stored_runs
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs.answer import doubts, heading, status_word

Warmup = Annotated[tuple[int, ...], Option("Numbers of warm-up steps.", MEASURING)]
Steps = Annotated[int, Option("Measured steps.", MEASURING, least=2)]


def compare_warmups(
    *,
    model: str = "tiny",
    seq_len: int = 128,
    batch_size: int = 4,
    dtype: str = "fp32",
    device: str,
    warmup: Warmup = (0, 1, 2, 5),
    steps: Steps = 10,
    from_: Annotated[
        tuple[Path, ...], Option("A folder of such runs: nothing is measured.", STORED, metavar="FOLDER")
    ] = (),
    tag: str | None,
    runs: Path,
) -> Cells | Result:
    """Measure a step after 0, 1, 2 and 5 warm-up steps, each in a fresh process."""
    if from_:
        refuse_beside("--from")
        stored = most_warmups(run for run, _ in stored_runs(from_))
        if len(stored) < 2:
            places = ", ".join(map(str, from_))
            raise InputError(
                f"no step in {places} was measured after several numbers of warm-up steps: leave out --from, and it is"
            )
        return Result(answer=answer_warmup(stored))
    workload = TextbookWorkload(model=configure(model), seq_len=seq_len, batch_size=batch_size, dtype=dtype)  # type: ignore[arg-type]
    cells = warmup_cells(workload, steps, warmup)
    return Cells(
        plan=SweepPlan(cells=cells, devices=(device,), out=str(runs), tag=tag),
        answer=lambda measured: Result(answer=answer_warmup(measured)),
        lists_runs=True,
    )


def warmup_cells(
    workload: TextbookWorkload, steps: int = 10, warmups: tuple[int, ...] = (0, 1, 2, 5)
) -> tuple[SweepCell, ...]:
    """One cell for each number of warm-up steps; nothing else differs."""
    bounds = {"steps_floor": steps, "steps_cap": steps, "seconds": 0, "profile": False}
    counts = [Settings(warmup_floor=count, warmup_cap=count, **bounds) for count in warmups]
    return tuple(SweepCell(workload=workload, settings=settings) for settings in counts)


def most_warmups(runs: Iterable[Run]) -> list[Run]:
    """The runs of the one step that was measured after most numbers of warm-up steps: the last after each number, the
    fewest first."""
    by_step: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.instant):
        if run.settings.warmup_floor == run.settings.warmup_cap:
            by_step.setdefault(run.workload.key, {})[run.settings.warmup_floor] = run
    most = max(by_step.values(), key=len, default={})
    return [most[count] for count in sorted(most)]


def answer_warmup(runs: Sequence[Run]) -> Answer:
    """Mean and deviation of the step by number of warm-up steps, and what leaving them out costs."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        samples = run.samples.get(STEP)
        if run.status != "done" or samples is None or samples.mean_s is None or samples.median_s is None:
            rows.append((run.settings.warmup_floor, status_word(run), None, None, None))
            continue
        deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
        rows.append((
            run.settings.warmup_floor, figure(f"{format_milliseconds(samples.mean_s)}{deviation}", run),
            figure(samples.median_s, run), figure(samples.values_s[0], run), samples.count,
        ))  # fmt: skip
    doubted = [f"{doubts(run)} after {run.settings.warmup_floor} warm-up steps" for run in runs if doubts(run)]
    notes = [f"Doubtful: {'; '.join(doubted)}."] if doubted else []
    table = table_of(
        ("warm-up steps", TEXT), ("mean ± std (ms)", TEXT), ("median (ms)", "ms of s"), ("first step (ms)", "ms of s"),
        ("steps", TEXT), rows=rows, notes=as_lines(_difference(runs), *notes),
    )  # fmt: skip
    where = runs[0].environment
    return Answer(
        study="warmup",
        question="How many warm-up steps does a measurement need?",
        device=where.limited_device if where else "",
        date=runs[0].day,
        versions=dict(where.versions) if where else {},
        lead=heading(runs[0]),
        tables=(table,),
    )


def _difference(runs: Sequence[Run]) -> str:
    """The mean without warm-up against the mean with the most of it, in figures."""
    measured = sorted((run for run in runs if run.status == "done"), key=lambda run: run.settings.warmup_floor)
    if len(measured) < 2:
        return "Too few of the cells were measured to compare."
    cold, warm = measured[0], measured[-1]
    cold_step, warm_step = cold.samples[STEP], warm.samples[STEP]
    assert cold_step.mean_s and warm_step.mean_s and warm_step.median_s  # done runs have samples
    return (
        f"After {cold.settings.warmup_floor} warm-up steps the mean step is {format_seconds(cold_step.mean_s)}, "
        f"{cold_step.mean_s / warm_step.mean_s:.2f} times that after {warm.settings.warmup_floor} "
        f"({format_seconds(warm_step.mean_s)}): the first step took {format_seconds(cold_step.values_s[0])}, "
        f"{cold_step.values_s[0] / warm_step.median_s:.1f} times the warm median."
    )


QUESTION = Question(
    "warmup",
    compare_warmups,
    examples=("--model small --seq-len 512", "--from results/h200/warmup"),
    shared=("shown",),
)
