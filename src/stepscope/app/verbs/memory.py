"""`memory`: where the memory of a recorded step went, to the byte. Needs no PyTorch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, told_where_long
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.environment import give_pages_back
from stepscope.core.options import STORED, Option, completed, file_or_run, verb
from stepscope.core.range_names import PHASES
from stepscope.core.run_directory import find_place

if TYPE_CHECKING:
    from stepscope.allocations.at_moment import Moment
    from stepscope.allocations.explain import Explained


@dataclass(frozen=True, repr=False)
class Remembered(Shown):
    """A memory snapshot, explained: what was alive at its peak, or at another moment, to the byte."""

    path: Path
    """The snapshot, or the run directory that holds it."""
    explained: "Explained"
    """Every block with its category, its tensor, and the line of code that allocated it."""
    moment: "Moment"
    """What was alive at the moment that was asked for."""
    answer: ShownAnswer
    """What was alive, by category, tensor, line of code and block."""


def memory(
    path: str | Path = "last",
    *,
    at: str | None = None,
    device: int | None = None,
    stacks: int = 0,
    runs: str | Path = "runs",
) -> Remembered:
    """Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for.

        found = stepscope.memory("snapshot.pickle", at="backward")
        found                              # in a notebook: tables
        found.moment.alive                 # a polars frame: every block that was alive, in bytes

    path: a snapshot of torch.cuda.memory._dump_snapshot (.pickle, gzip too), a run directory, a part of a run's name,
    or `last`.
    at: another moment than the peak, as in "12ms", "12000us", "start", "end", or a phase for its peak.
    device: the index of the device, where the snapshot holds several; if left out, the one that held most.
    stacks: for how many of the largest allocations the call stack is shown.
    runs: the folder in which names are looked up.

    Raises InputError where there is no such file or moment, or the file is damaged: nothing in a pickle is executed.
    Needs no PyTorch.
    """
    place = find_place(str(path), Path(runs))
    explained, moment = _explained(place, at, device)
    return Remembered(place, explained, moment, _answer(explained, moment, stacks))


def _explained(place: Path, at: str | None, device: int | None) -> "tuple[Explained, Moment]":
    give_pages_back()
    from stepscope.allocations.at_moment import moment_at
    from stepscope.allocations.explain import explain
    from stepscope.allocations.snapshot import read_snapshot

    explained = explain(read_snapshot(place, device=device))
    explained.self_check()
    return explained, moment_at(explained, at)


def _answer(explained: "Explained", moment: "Moment", stacks: int) -> ShownAnswer:
    from stepscope.allocations.answer import answer_memory

    return shown_answer(answer_memory(explained, moment, stacks))


Device = Annotated[
    int | None, Option("Which device of a snapshot of several (default: the one that held most).", STORED)
]
At = Annotated[
    str | None,
    Option(
        "Another moment than the peak: 12ms, 12000us, start, end, or a phase for its peak.",
        complete=completed("start", "end", *PHASES),
    ),
]
Stacks = Annotated[int | None, Option("Print the call stacks of so many of the largest allocations.", least=1)]


@verb("memory", "stepscope memory last --at backward", "stepscope memory snapshot.pickle --save memory.html")
def command(
    file: Annotated[str, file_or_run("A snapshot of torch.cuda.memory._dump_snapshot (.pickle, gzip too)")],
    *,
    at: At,
    device: Device,
    runs: Path,
    stacks: Stacks,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for."""
    with told_where_long(f"reading {file}"):
        explained, moment = _explained(find_place(str(file), Path(runs)), at, device)
    from stepscope.allocations.answer import memory_document

    alone = shown.json and not shown.brief and save is None  # then nothing shows the answer
    answers = () if alone else (_answer(explained, moment, stacks or 0),)
    shown.show(*answers, document=lambda: memory_document(explained, moment), save=save)
