"""`stepscope.show`, `trace` and `memory`: what is read back from files. None needs PyTorch."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.app.api.shown import Shown, ShownAnswer, shown
from stepscope.core.answer import Finding
from stepscope.core.environment import give_pages_back
from stepscope.core.errors import StepscopeError, warn
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, find_place, find_run, find_run_files
from stepscope.core.samples import Samples

if TYPE_CHECKING:
    from stepscope.allocations.at_moment import Moment
    from stepscope.allocations.explain import Explained
    from stepscope.traces.captures.summary import TraceSummary


@dataclass(frozen=True, repr=False)
class Traced(Shown):
    """A captured step, explained: where its time went, what bounded it, and when the device stood idle."""

    path: Path
    """The capture, or the run directory that holds it."""
    summary: "TraceSummary"
    """Its tables, as polars frames: `summary.phases`, `summary.families`, `summary.modules` and others."""
    findings: tuple[Finding, ...]
    """What to doubt, and what costs time, the gravest first."""
    answer: ShownAnswer
    """Time by phase, family, kernel and module, bounds, idle time, and the findings."""


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


@dataclass(frozen=True, repr=False)
class Measured(Shown):
    """A run and what it says, with its trace and its memory where it recorded them."""

    run: Run
    """What was measured, as run.json holds it: `run.status`, `run.samples`, `run.summary`, `run.findings`."""
    directory: Path
    """The run's directory."""
    answer: ShownAnswer
    """Times by phase, rates, memory, and what to doubt."""

    @property
    def samples(self) -> dict[str, Samples]:
        """Times in seconds by phase, and of the whole `step`: each with `median_s`, `interval()`, `values_s`."""
        return self.run.samples

    @functools.cached_property
    def trace(self) -> Traced | None:
        """What its trace says; None where it kept none (`record="kineto"`)."""
        kept = any(capture.artifact in ("kineto", "nsys") for capture in self.run.evidence.captures)
        return trace(self.directory) if kept else None

    @functools.cached_property
    def memory(self) -> Remembered | None:
        """What its memory snapshot says; None where it kept none (`record="memory"`)."""
        return memory(self.directory) if "memory" in self.run.artifacts else None

    @property
    def answers(self) -> tuple[ShownAnswer, ...]:
        """The answer on the run, then those on its trace and its memory, where this machine can read them."""
        answers = [self.answer]
        for name in ("trace", "memory"):
            try:
                found: Traced | Remembered | None = getattr(self, name)
            except ModuleNotFoundError as error:
                warn(f"the {name} is kept, and read where {error.name} is installed: {self.directory}")
            except StepscopeError as error:
                warn(f"the {name} is kept, and cannot be read: {error}")
            else:
                answers += [found.answer] if found is not None else []
        return tuple(answers)


def measured(run: Run, directory: Path) -> Measured:
    """The run with its answer."""
    from stepscope.runs.answer import answer_run

    return Measured(run, directory, shown(answer_run(run, str(directory))))


def show(name: str | Path = "last", *, runs: str | Path = "runs") -> Measured:
    """A run that is stored, read back from disk, as `stepscope show` shows it.

        stepscope.show()                  # the newest under runs/
        stepscope.show("results/cpu/first").samples["step"].median_s

    name: a run directory, a part of its name, or `last`.
    runs: the folder in which names are looked up.

    Raises InputError where there is no such run, or it cannot be read. Needs no PyTorch.
    """
    found, folder = find_run(str(name), Path(runs)), find_place(str(name), Path(runs))
    inside = folder if (folder / RUN_FILE).is_file() else next(iter(find_run_files(folder)), folder / RUN_FILE).parent
    return measured(found, inside)


def trace(
    path: str | Path = "last",
    *,
    range: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    ranges: bool = True,
    runs: str | Path = "runs",
) -> Traced:
    """Where the time of a captured step went: by phase, family, kernel and module, every nanosecond accounted for.

        found = stepscope.trace("trace.json.gz")
        found                              # in a notebook: tables and findings
        found.answer.table("module")       # one of them
        found.summary.families             # a polars frame

    path: a trace of torch.profiler (.json, .json.gz), an nsys report or export, a run directory, a part of a run's
    name, or `last`.
    range: only what was launched inside ranges of this name.
    phase: only what was launched in this phase (`forward`, `backward`, `optimizer`).
    step: only what was launched in this step; the first is 0.
    ranges: has no effect. A capture without ranges is read in any case.
    runs: the folder in which names are looked up.

    Times are in nanoseconds in frames, and with their unit where shown.

    Raises InputError, with what is there, where there is no such file, range, phase or step, or the file is damaged.
    Needs no PyTorch.
    """
    give_pages_back()
    from stepscope.traces.captures.answer import answer_trace
    from stepscope.traces.captures.checks import check_trace
    from stepscope.traces.captures.digest import load_capture
    from stepscope.traces.captures.part import part_of

    place = find_place(str(path), Path(runs))
    whole = load_capture(place, say=warn)
    findings = check_trace(whole)
    is_part = (range, phase, step) != (None, None, None)
    summary = part_of(whole, str(place), step=step, phase=phase, name=range) if is_part else whole
    return Traced(place, summary, findings, shown(answer_trace(summary, findings, str(place))))


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
    give_pages_back()
    from stepscope.allocations.answer import answer_memory
    from stepscope.allocations.at_moment import moment_at
    from stepscope.allocations.explain import explain
    from stepscope.allocations.snapshot import read_snapshot

    place = find_place(str(path), Path(runs))
    explained = explain(read_snapshot(place, device=device))
    explained.self_check()
    moment = moment_at(explained, at)
    return Remembered(place, explained, moment, shown(answer_memory(explained, moment, stacks)))
