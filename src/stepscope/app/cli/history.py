"""`stepscope history`: how the time of a step changed over stored runs, and whether forecasts came true."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.app.cli.listed import listed_runs
from stepscope.app.cli.output import check_picture, draw, json_line, warn
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.table import conditions_of
from stepscope.app.cli.verb import verb
from stepscope.core.errors import InputError


@verb("history", "stepscope history results/h200 --where dtype=bf16", "stepscope history --workload tiny-b4 --json")
def history(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run directories, folders of them, or `last` (default: --runs)."),
    ] = None,
    *,
    workload: str | None,
    predictions: bool,
    where: tuple[str, ...] = (),
    tag: str | None,
    runs: Path,
    shown: Presentation,
    save: Path | None,
) -> None:
    """Trends of stored runs by workload, with changes of level dated by commit."""
    check_picture(save)
    folders = places or [runs]
    if predictions:
        if workload is not None or where or tag is not None or save is not None:
            raise InputError("--predictions shows all forecasts of these places: leave out the other choices")
        _show_predictions(folders, shown)
        return
    from stepscope.runs.conditions import in_words, meeting
    from stepscope.runs.history.answer import answer_history, answer_trend, history_as_json
    from stepscope.runs.history.trends import trends_of

    if save is not None and workload is None:
        raise InputError("--save draws one trend: name it with --workload")
    conditions = conditions_of(where, tag)
    found = listed_runs(places, runs)
    kept, nowhere = meeting(found, conditions)
    if not kept:
        asked = f" with {in_words(conditions)}" if found and conditions else ""
        raise InputError(f"no runs in {', '.join(map(str, folders))}{asked}")
    for sentence in nowhere:
        warn(sentence)
    trends = trends_of(kept)
    if workload is None:
        shown.show(answer_history(trends), document=lambda: json_line(history_as_json(trends)))
        return
    chosen = [trend for trend in trends if workload in trend.key]
    if not chosen:
        raise InputError(f"no workload here has {workload!r} in its key: `stepscope history` lists them")
    if save is not None and len(chosen) > 1:
        raise InputError(f"{len(chosen)} trends match --workload {workload}: write more of the key, or add --where")
    answers = [answer_trend(trend) for trend in chosen]
    shown.show(*answers, document=lambda: json_line(history_as_json(chosen)))
    if save is not None:
        draw(answers[0], save)


def _show_predictions(folders: list[Path], shown: Presentation) -> None:
    """Every forecast that these places keep, beside what was measured."""
    from stepscope.runs.history.predictions import (
        JudgedForecast,
        answer_predictions,
        judged_in,
        predictions_as_json,
    )

    judged: list[JudgedForecast] = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no runs at {folder}: it is no folder")
        found, faults = judged_in(folder)
        judged += found
        for fault in faults:
            warn(fault)
    if not judged:
        raise InputError(f"no forecasts in {', '.join(map(str, folders))}: `stepscope fit` and `sweep` leave them")
    shown.show(answer_predictions(judged), document=lambda: json_line(predictions_as_json(judged)))
