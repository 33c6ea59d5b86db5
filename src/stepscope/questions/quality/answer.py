"""The tables and panels of the study: every run with its final figures, and losses by step."""

import functools
from collections.abc import Callable, Iterator
from typing import get_args

from stepscope.core.answer import Cell, Panel, Table
from stepscope.questions.answers import curves, pivot
from stepscope.questions.quality.findings import Kind, RunJudged, RunsJudged

RUNS, BY_STEP, ABOVE = "Runs", "Training loss, smoothed", "More than fp32, smoothed"

_POINTS = 30
"""Points per curve of smoothed losses, whose means include the steps between points."""
_COLUMNS = 8


def tables_of(outcomes: RunsJudged) -> tuple[Table, ...]:
    """A table of the runs, and two of their losses by step."""
    return (_runs_table(outcomes), *_by_step(outcomes))


def _figure(value: float | None, outcomes: RunsJudged) -> Cell:
    """A loss, or a difference of losses, as a table shows it; without a sign if that is zero."""
    if value is None:
        return None
    decimals = outcomes.final.decimals
    return (float(f"{value:.4g}") if decimals is None else round(value, decimals)) + 0.0


def _percent(share: float | None) -> Cell:
    return None if share is None else float(f"{100 * share:.3g}")


def _runs_table(outcomes: RunsJudged) -> Table:
    reference = outcomes.reference
    rows: list[tuple[Cell, ...]] = [
        (
            each.name, _figure(each.last, outcomes), _figure(each.final_loss, outcomes),
            None if each is reference else _figure(each.final_loss - reference.final_loss, outcomes),
            _departs(each, outcomes), each.skipped_steps, _percent(each.zero_gradients), _percent(each.swallowed),
        )
        for each in outcomes.all
    ]  # fmt: skip
    columns = (
        "run", "training loss at the end, smoothed", outcomes.final.column, "more than fp32",
        "departs at step", "skipped steps", "gradients of zero, %", "updates lost, %",
    )  # fmt: skip
    return Table(title=RUNS, columns=columns, rows=tuple(rows))


def _departs(each: RunJudged, outcomes: RunsJudged) -> Cell:
    if each is outcomes.reference or each.of_starts or outcomes.apart is None:
        return None
    return "no" if each.departs is None else each.departs


def _by_step(outcomes: RunsJudged) -> Iterator[Table]:
    steps = _places(outcomes.steps, _COLUMNS)

    def table(title: str, figures: dict[str, Callable[[int], float | None]]) -> Table:
        cells = (
            ((name,), f"step {step}", _figure(at(step), outcomes)) for name, at in figures.items() for step in steps
        )
        return pivot(title, ("run",), cells)

    yield table(BY_STEP, {each.name: each.at for each in outcomes.all})
    above = {each.name: functools.partial(each.above, outcomes.reference) for each in outcomes.others}
    apart = outcomes.apart
    yield table(ABOVE, above | ({} if apart is None else {"starts apart, at most": lambda step: apart[step - 1]}))


def _places(steps: int, count: int) -> list[int]:
    """Up to `count` steps from 1 to `steps`, evenly spread; the last step is among them."""
    return sorted({round(steps * i / count) for i in range(1, count + 1)})


def panels_of(outcomes: RunsJudged) -> Iterator[Panel]:
    """Panels of the losses, and of their difference from fp32's: first with parameters in fp32, then in bf16, then of
    whole steps."""
    reference = outcomes.reference
    starts, variants = outcomes.starts, outcomes.variants
    axis = f", {outcomes.final.axis}" if outcomes.final.axis else ""
    steps = _places(outcomes.steps, _POINTS)
    for i, kind in enumerate(get_args(Kind)):
        shown = tuple(each for each in variants if each.kind == kind)
        if not shown and (i or variants):
            continue
        for y_title, lines, figure in (
            (f"training loss, smoothed{axis}", (reference, *starts, *shown), RunJudged.at),
            ("more than fp32", (*starts, *shown), lambda each, step: each.above(reference, step)),
        ):
            points = (
                (each.name, float(step), y) for each in lines for step in steps if (y := figure(each, step)) is not None
            )
            yield curves(points, x_title=f"step, {kind}", y_title=y_title)
