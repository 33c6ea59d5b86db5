"""`stepscope memory`: where the memory of a recorded step went, to the byte."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import completion
from stepscope.cli.output import check_picture, json_line, warn
from stepscope.cli.presentation import Presentation
from stepscope.cli.verb import verb
from stepscope.core.errors import InputError
from stepscope.core.run_directory import find_run_files

if TYPE_CHECKING:
    from stepscope.memory.explain import Explained


@verb("memory", "stepscope memory last --at backward", "stepscope memory snapshot.pickle --save memory.html")
def memory(
    file: Annotated[
        str,
        typer.Argument(
            help="A snapshot of torch.cuda.memory._dump_snapshot (.pickle, gzip too), a run directory, a part of a "
            "run's name, or `last`.",
            autocompletion=completion.run_names,
        ),
    ],
    *,
    at: str | None,
    device: int | None,
    runs: Path,
    stacks: int | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for."""
    # polars' allocator, read when polars is loaded: pages no longer used go back at once.
    os.environ.setdefault("_RJEM_MALLOC_CONF", "narenas:2,dirty_decay_ms:50,muzzy_decay_ms:0")
    check_picture(save)
    from stepscope.memory.answer import answer_memory
    from stepscope.memory.at_moment import moment_at
    from stepscope.memory.explain import explain
    from stepscope.memory.memory_json import memory_as_json
    from stepscope.memory.snapshot import read_snapshot

    explained = explain(read_snapshot(_find(file, runs), device=device))
    explained.self_check()
    moment = moment_at(explained, at)
    if save is not None:
        _draw(explained, save)
    shown.show(
        answer_memory(explained, moment, stacks or 0), document=lambda: json_line(memory_as_json(explained, moment))
    )


def _find(name: str, place: Path) -> Path:
    """The file or directory of this name; else the run of this name under `place`, or the newest for `last`."""
    path = Path(name)
    try:
        if path.exists():
            return path
        runs = [found.parent for found in find_run_files(place)]
    except OSError as error:
        raise InputError(f"{name[:100]}: cannot be read: {error.strerror or error}") from None
    matches = runs[-1:] if name == "last" else [run for run in runs if name in run.name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InputError(f"{len(matches)} runs in {place} match {name!r}: write more of the name")
    raise InputError(f"{name}: no such file, nor a run of that name in {place}")


def _draw(explained: "Explained", target: Path) -> None:
    from stepscope.memory.timeline import category_timeline
    from stepscope.report.plots.memory_timeline import draw_memory_timeline
    from stepscope.report.plots.save import is_interactive, save_plot

    notes = explained.snapshot.notes
    reserved = max(bytes_held for _, bytes_held in explained.replay.reserved)
    title = "Live memory by category"
    if notes and notes.workload:
        from stepscope.work.described import describe_workload

        title = f"{notes.workload.model.name}: {describe_workload(notes.workload)}"
    chart = draw_memory_timeline(
        category_timeline(explained),
        explained.phases,
        title=title,
        # The name alone: a plot may be kept with results, and says nothing of the machine it was drawn on.
        subtitle=", ".join(
            name for name in (notes.device_name if notes else "", Path(explained.snapshot.source).name) if name
        ),
        reserved_bytes=reserved or None,
        interactive=is_interactive(target),
    )
    save_plot(chart, target)
    warn(f"live memory over time in {target}")
