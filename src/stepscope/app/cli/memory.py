"""`stepscope memory`: where the memory of a recorded step went, to the byte."""

from pathlib import Path
from typing import Annotated

from stepscope.app.cli.output import check_picture, draw, json_line
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import file_or_run, verb
from stepscope.core.polars_memory import give_pages_back
from stepscope.core.run_directory import find_place


@verb("memory", "stepscope memory last --at backward", "stepscope memory snapshot.pickle --save memory.html")
def memory(
    file: Annotated[str, file_or_run("A snapshot of torch.cuda.memory._dump_snapshot (.pickle, gzip too)")],
    *,
    at: str | None,
    device: int | None,
    runs: Path,
    stacks: int | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for."""
    give_pages_back()
    check_picture(save)
    from stepscope.allocations.answer import answer_memory
    from stepscope.allocations.at_moment import moment_at
    from stepscope.allocations.explain import explain
    from stepscope.allocations.memory_json import memory_as_json
    from stepscope.allocations.snapshot import read_snapshot

    explained = explain(read_snapshot(find_place(file, runs), device=device))
    explained.self_check()
    moment = moment_at(explained, at)
    answer = answer_memory(explained, moment, stacks or 0)
    shown.show(answer, document=lambda: json_line(memory_as_json(explained, moment)))
    draw(answer, save)
