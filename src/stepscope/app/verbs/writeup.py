"""`stepscope writeup`: the questions of an assignment, answered from what was measured on this machine."""

import contextlib
import gc
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec

from stepscope.app.cli.output import emit, told_where_long
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError, choose, warn
from stepscope.core.formulas.spelled import cell_name, parameters_of
from stepscope.core.interrupts import awaited
from stepscope.core.options import BUDGET, MEASURING, OUTPUT, Argument, Option, Rule, verb
from stepscope.core.run import REPEATED
from stepscope.core.units import GIB, counted, format_bytes, format_rate, format_share, parse_bytes

if TYPE_CHECKING:
    from stepscope.allocations.prediction.fit import Budget
    from stepscope.core.environment import Environment
    from stepscope.core.run import Run as StoredRun
    from stepscope.recording.nvml import Gpu
    from stepscope.rendering.writeup import Group, Machine, Measure, Scale, Target, WriteUp


Assignment = Annotated[
    str, Option("Whose questions are answered: an edition of CS336's.", choices=("cs336-2025", "cs336-2026"))
]
Run = Annotated[bool, Option("Measure what is missing, the cheapest first. Ctrl-C keeps what is there.")]
Sizes = Annotated[
    str,
    Option(
        "What is measured: all that the questions ask (full), tiny models (small), or what fits into this machine's "
        "memory and --minutes, the rest predicted (auto).",
        choices=("auto", "full", "small"),
    ),
]
Memory = Annotated[
    int | None,
    Option(
        "How much PyTorch may allocate, as in 12GiB, so that a GPU stands for a smaller one.",
        BUDGET,
        takes=parse_bytes,
        metavar="SIZE",
    ),
]
Minutes = Annotated[
    float | None,
    Option(
        "About how long --scale auto measures: the costliest cells are left out (default: 40, or 15 on a CPU).",
        MEASURING,
        least=1,
    ),
]
Output = Annotated[
    Path,
    Option("The document to write: .md with its plots beside it, or .html.", OUTPUT, metavar="FILE", short="-o"),
]

MINUTES_ON_GPU, MINUTES_ON_CPU = 40.0, 15.0
START_S, STEPS_ON_CPU = 6.0, ("--warmup", "1", "--steps", "3")
"""Seconds that a cell takes before its first step; how few steps a CPU measures of a large model."""
LONGEST_ON_CPU_S = 90.0
"""A cell of a CPU that takes longer is left out: its time is scaled from smaller ones."""
LADDER = ("tiny", "small", "medium", "large", "xl", "2.7B")
"""Models from the smallest to the largest: what is measured in place of one that does not fit."""
_SLOW_TO_LEARN_S = 120.0
"""So much of the plan is taken as kept when the time that is left is forecast from what has been measured."""
_WORTH_S = 10.0
"""A small command stands in for a whole one where it saves so much."""
_OWN_BYTES = GIB
"""What a GPU's driver may hold of it where no process does."""


@verb(
    "writeup",
    "stepscope writeup results/h200 -o writeup.md",
    "stepscope writeup --run --memory 12GiB -o writeup.html",
    conflicts=(
        Rule("needs", ("--memory", "--run"), "--memory limits what is measured: add --run"),
        Rule("needs", ("--minutes", "--run"), "--minutes bounds what is measured: add --run"),
    ),
)
def command(
    sweeps: Annotated[
        list[str] | None,
        Argument(
            "Folders of runs, a sweep, a tag, or answers that --json wrote (default: --runs).",
            metavar="[SWEEP]...",
            names_a_run=True,
        ),
    ] = None,
    *,
    assignment: Assignment = "cs336-2025",
    output: Output = Path("writeup.md"),
    run: Run,
    scale: Sizes = "auto",
    memory: Memory = None,
    minutes: Minutes = None,
    runs: Path,
) -> int:
    """Answer the questions of an assignment from stored runs; a question without data names its command."""
    from stepscope.core.run_directory import load_runs
    from stepscope.rendering.picture import Drawer
    from stepscope.rendering.writeup import SCALES, Material, Target, assignment_named, gather, write_up

    questions = assignment_named(assignment)
    if assignment == "cs336":
        warn("cs336 is cs336-2025 here; --assignment cs336-2026 has the questions of April 2026")
    choose(scale, SCALES, "scale")
    size, target = cast("Scale", scale), Target(file=output)
    if size != "auto" and (memory is not None or minutes is not None):
        raise InputError(f"--scale {size} measures all of its cells: leave out --memory and --minutes, or the scale")

    def read() -> "Material":
        places = list(sweeps or ([str(runs)] if runs.is_dir() else []))
        store = [str(target.store)] if target.store.is_dir() else []
        try:
            return gather([*places, *store], runs)
        except InputError:
            if any(
                not Path(place).is_dir() or any(file.is_file() for file in Path(place).rglob("*")) for place in places
            ):
                raise
            # Everything is still to be measured, and the document says how. A kill may leave marks alone in the store.
            return Material(faults=tuple(load_runs([target.store])[1]) if store else ())

    @told_where_long("answering from stored runs", time.monotonic)  # and waits for what draws
    def written() -> "WriteUp":
        drawer = Drawer()  # plots are drawn while the next question is answered
        gc.disable()  # predictions and runs are a million objects, none of them in a cycle
        try:
            document = write_up(questions, read(), machine, lambda one: target.ask(one, drawer))
            target.write(document, size, drawer.draw)
        finally:
            gc.enable()
            drawer.close()
        return document

    machine = target.machine if size == "auto" else None
    began = time.time()
    document = written()
    for fault in document.faults:
        warn(f"left out: {fault}")
    if not run:
        return _said(document, target, run=run)
    from stepscope.engine.sweep import locked

    with locked(target.store / ".lock", "another writeup measures", "choose another place with -o"):
        if size == "auto":
            machine = _this_machine(target, memory)
            document = written()
        chosen = [Chosen(measure=one, first=(one.words(size),)) for one in document.missing(target.store)]
        if machine is not None:
            # More time than before: what the small commands and a part of the cells have answered is measured whole.
            longer = _budget_s(minutes, machine) > 60 * machine.minutes
            missing = document.missing(target.store, cut_short(machine) if longer else frozenset())
            chosen = _planned(missing, machine, target, minutes)
            machine = target.machine
            document = written()  # what the plan leaves out for time is known
        failed, stopped = _measure_all(chosen, machine, target, written)
        if machine is not None and (ended := target.machine) is not None and not stopped:
            target.remember(msgspec.structs.replace(ended, minutes=_budget_s(minutes, machine) / 60))
        _said(written(), target, run=run, failed=failed)
        warn(time_spent(load_runs([target.store])[0], began, time.time() - began))
        return EXIT_INTERRUPTED if stopped else EXIT_DONE


def _measure_all(
    chosen: "Sequence[Chosen]", machine: "Machine | None", target: "Target", written: "Callable[[], WriteUp]"
) -> tuple[list[str], bool]:
    """Run the commands, and have the document written after each measure but the last. Returns what could not be
    measured, and whether Ctrl-C ended it."""
    failed = list[str]()
    for one, words in _commands(chosen, machine, target):
        code = _measure(one.measure, words, target)
        if code in (EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            return failed, True
        if code not in (EXIT_DONE, EXIT_CHECK_FAILED):
            failed.append(one.measure.name)
            warn(f"{one.measure.name} could not be measured (exit code {code}): the other questions go on")
        if words == one.commands(machine)[-1]:
            one.measure.mark(target.store).unlink(missing_ok=True)
            if (at := target.machine) is not None and one.measure.name not in failed:
                small = {*at.small, one.measure.name} if one.is_small else {*at.small} - {one.measure.name}
                target.remember(msgspec.structs.replace(at, small=tuple(sorted(small))))
            if one is not chosen[-1]:
                written()
    return failed, False


def cut_short(machine: "Machine") -> set[str]:
    """Names of measures that more time would measure further."""
    return {*machine.small, *(cell.partition(" ")[0] for cell in machine.too_long)}


def _planned(
    measures: "Sequence[Measure]", machine: "Machine", target: "Target", minutes: float | None
) -> "list[Chosen]":
    """What is measured of each measure, which is printed; what is left out for time is remembered."""
    from stepscope.core.run_directory import load_runs

    places = [(measure, measure.place(target.store)) for measure in measures]
    there = {measure.name: load_runs([place])[0] for measure, place in places if place.is_dir()}
    gone = {measure.name for measure, place in places if not place.exists()}
    machine = msgspec.structs.replace(machine, small=tuple(name for name in machine.small if name not in gone))
    choices = [choose_cells(measure, machine, there.get(measure.name, ())) for measure, _ in places]
    kept = within(minutes, machine, choices)
    chosen = [one for one in kept if one.measure.name not in machine.small or one.commands(machine)]
    too_long = {*machine.too_long}
    for one in chosen:
        left, measured = (
            {f"{one.measure.name} {cell_name(cell)}" for group in groups for cell in group.cells}
            for groups in (one.too_long, one.groups)
        )
        too_long = (too_long | left) - measured
    target.remember(msgspec.structs.replace(machine, too_long=tuple(sorted(too_long))))
    print(plan_text(machine, chosen, minutes), file=sys.stderr, flush=True)
    return chosen


def _commands(
    chosen: "Sequence[Chosen]", machine: "Machine | None", target: "Target"
) -> "Iterator[tuple[Chosen, tuple[str, ...]]]":
    """The commands one after the other, each announced with the time that is left by the plan and the pace so far."""
    begun = time.monotonic()
    for place, one in enumerate(chosen):
        left = sum(each.seconds for each in chosen[place:])
        spent = sum(each.seconds for each in chosen[:place])
        pace = (time.monotonic() - begun + _SLOW_TO_LEARN_S) / (spent + _SLOW_TO_LEARN_S)
        about = f", about {_clock(left * pace)} left" if machine is not None else ""
        for words in one.commands(machine):
            warn(f"measuring {place + 1} of {len(chosen)}{about}: {shlex.join(('stepscope', *words))}")
            yield one, words


# What is measured here: the cells that fit, and how long they take.


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What is measured of a measure on this machine."""

    measure: "Measure"
    first: tuple[tuple[str, ...], ...] = ()
    """The words of commands that run as they stand."""
    first_s: float = 0.0
    """Seconds that these take, as estimated."""
    words: tuple[str, ...] = ()
    """The words of the command that measures the groups, before its options are narrowed to them."""
    groups: "tuple[Group, ...]" = ()
    """Cells to measure."""
    group_s: tuple[float, ...] = ()
    """Seconds that each group takes, as estimated."""
    too_large: "tuple[Group, ...]" = ()
    """Cells that do not fit into the memory."""
    too_long: "tuple[Group, ...]" = ()
    """Cells for which the time does not suffice."""
    asked: int = 0
    """How many cells the question asks for."""
    done: int = 0
    """How many cells were measured before."""
    why: str = ""
    """Why what is asked for is not measured, where that is not for the size or the time of its cells."""

    small: tuple[tuple[str, ...], ...] = ()
    """The words of the small command; none where what it measures is there."""

    @property
    def is_small(self) -> bool:
        """Whether a small command, which measures less than the full one, is all that is measured."""
        return not self.groups and self.first == self.small and self.measure.small != self.measure.full

    @property
    def seconds(self) -> float:
        """How long it takes, as estimated."""
        return self.first_s + sum(self.group_s)

    @property
    def least_s(self) -> float:
        """How long with as few cells as can be: one, or none beside a command that runs as it stands."""
        return self.first_s if self.first else min(self.group_s, default=0.0)

    @property
    def saved_s(self) -> float:
        """What the small command saves of that."""
        return self.least_s - len(self.small) * self.measure.small_s

    def made_small(self) -> "Chosen":
        """The small command in place of all that is chosen."""
        return replace(
            self,
            first=self.small,
            first_s=len(self.small) * self.measure.small_s,
            groups=(),
            group_s=(),
            too_long=(*self.too_long, *self.groups),
            why=self.why if self.groups else "the small command, for time",
        )

    def commands(self, machine: "Machine | None") -> list[tuple[str, ...]]:
        """The words of each command, in the order in which they run."""
        on_cpu = machine is not None and not machine.on_gpu
        few = STEPS_ON_CPU if on_cpu else ()
        commands = [*self.first, *((*words, *few) for words in self.measure.commands(self.words, self.groups))]
        limit = machine.memory_limit_bytes if machine is not None else None
        if limit is None or not self.measure.takes_memory:
            return commands
        limited = ("--memory", f"{limit // GIB}GiB" if limit % GIB == 0 else f"{limit}B")
        return [words if "--device" in words else (*words, *limited) for words in commands]


def choose_cells(measure: "Measure", machine: "Machine", there: "Iterable[StoredRun]" = ()) -> Chosen:
    """The cells of a measure that fit into the machine's memory and were not measured yet. there: runs of its folder.

    Where a question asks for one model and not all of its cells fit, the smaller model of which most do is measured
    beside them. A CPU measures the small command, and of a sweep's cells those that it ends in time.
    """
    full = machine.takes(measure.words("full"))
    small = () if measure.name in machine.small else (machine.takes(measure.words("small")),)
    first_s = len(small) * measure.small_s
    asked = measure.groups(full)
    count = sum(len(group.cells) for group in asked)
    if machine.on_gpu and not asked and machine.gpus >= measure.gpus:
        return Chosen(measure=measure, small=small, first=(full,), first_s=measure.takes_s)
    is_sweep = full[0] == "sweep"
    few_gpus = f"needs {measure.gpus} GPUs: on the CPU with tiny models" if machine.gpus < measure.gpus else ""
    if few_gpus or not machine.on_gpu:
        if measure.of_memory:
            return Chosen(measure=measure, too_large=tuple(asked), asked=count, why="a CPU counts no peak")
        instead = Chosen(measure=measure, small=small, first=small, first_s=first_s, asked=count, why=few_gpus)
        if not is_sweep or few_gpus:
            return instead if few_gpus else replace(instead, too_long=tuple(asked))
    else:
        instead = Chosen(measure=measure, small=small, asked=count)
    fitting = [group for group in asked if group.fits(machine.memory)]
    too_large = tuple(group for group in asked if group not in fitting)
    if machine.on_gpu and too_large:
        fitting += _smaller(measure, full, machine)
    if not fitting and machine.on_gpu:
        return replace(instead, first=small, first_s=first_s, too_large=too_large)
    known = [run for run in there if is_sweep and run.workload.sizes is not None]
    ended = {run.workload for run in known if run.status not in (*REPEATED, "skipped")}
    waiting = [group for group in fitting if not ended.issuperset(group.cells)]
    seconds = {id(group): _group_seconds(measure, group, machine) for group in waiting}
    slow = [group for group in waiting if not machine.on_gpu and seconds[id(group)] > LONGEST_ON_CPU_S]
    kept = [group for group in waiting if group not in slow]
    return replace(
        instead,
        words=full,
        groups=tuple(kept),
        group_s=tuple(seconds[id(group)] for group in kept),
        too_large=too_large,
        too_long=tuple(slow),
        done=sum(len(group.cells) for group in fitting if group not in waiting),
    )


def _smaller(measure: "Measure", full: Sequence[str], machine: "Machine") -> "list[Group]":
    """The cells that fit of the model below the one that the measure names of which most fit, the largest of several;
    none where it names several models."""
    from stepscope.core.formulas.transformer import parameter_count
    from stepscope.core.model_config import configure

    model = full[full.index("--model") + 1]
    if "," in model:
        return []
    size, best = parameter_count(configure(model)), list["Group"]()
    for smaller in (name for name in LADDER if parameter_count(configure(name)) < size):
        groups = measure.groups([smaller if word == model else word for word in full])
        fitting = [group for group in groups if group.fits(machine.memory)]
        if smaller == LADDER[1] and fitting:
            best = []  # the smallest is for machines that hold no other
        if fitting and len(fitting) >= len(best):
            best = fitting
    return best


def _group_seconds(measure: "Measure", group: "Group", machine: "Machine") -> float:
    """How long a group takes: of each cell its start, its steps by their FLOPs, and what the measure adds."""
    from stepscope.core.formulas.transformer import step_flops
    from stepscope.core.run import Settings

    usual, seconds = Settings(), 0.0
    measured_s = usual.seconds if measure.full.startswith("sweep") else 1.0
    for cell in group.cells:
        step_s = step_flops(cell, "full") / machine.flops_per_s
        steps = min(usual.steps_cap, max(usual.steps_floor, math.ceil(measured_s / step_s))) + usual.warmup_floor + 3
        seconds += START_S + measure.takes_s + step_s * (steps if machine.on_gpu else 6)
    return seconds


def within(minutes: float | None, machine: "Machine", chosen: Sequence[Chosen]) -> list[Chosen]:
    """The measures with what can be measured in so many minutes: the costliest groups are left out first, but on a GPU
    the last of none. Where even those last take longer, small commands stand in for what they save most of."""
    budget_s = _budget_s(minutes, machine)
    kept = list(chosen)
    while machine.on_gpu and sum(one.least_s for one in kept) > budget_s:
        i = max(range(len(kept)), key=lambda i: kept[i].saved_s)
        if kept[i].saved_s < _WORTH_S:
            break
        kept[i] = kept[i].made_small()
    while sum(one.seconds for one in kept) > budget_s:
        groups = [
            (seconds, i, j)
            for i, one in enumerate(kept)
            for j, seconds in enumerate(one.group_s)
            if len(one.groups) > 1 or one.first
        ]
        if not groups:
            break
        _, i, j = max(groups)
        one = kept[i]
        kept[i] = replace(
            one,
            groups=(*one.groups[:j], *one.groups[j + 1 :]),
            group_s=(*one.group_s[:j], *one.group_s[j + 1 :]),
            too_long=(*one.too_long, one.groups[j]),
        )
    return kept


def _budget_s(minutes: float | None, machine: "Machine") -> float:
    return 60 * (minutes or (MINUTES_ON_GPU if machine.on_gpu else MINUTES_ON_CPU))


def plan_text(machine: "Machine", chosen: Sequence[Chosen], minutes: float | None = None) -> str:
    """What is measured, about how long each takes, and what is left out and why, as a table for the terminal."""
    rows = [("measure", "cells", "about", "left out")]
    for one in chosen:
        asked = {cell for group in one.measure.groups(machine.takes(one.measure.words("full"))) for cell in group.cells}
        now = [cell for group in one.groups for cell in group.cells]
        cells = f"{len(asked.intersection(now))} of {len(asked)}" if asked and not one.why else ""
        instead = dict.fromkeys(cell.name for cell in now if cell not in asked)
        instead |= dict.fromkeys(_after("--model", words) for words in one.first) if asked else {}
        more = [f"{name} instead" if name else "" for name in instead]
        left = [one.why] if one.why else []
        left += [f"too large: {_named(one.too_large)}"] if one.too_large and not one.why else []
        left += [f"too long: {_named(one.too_long)}"] if one.too_long else []
        there = [f"{one.done} there"] if one.done else []
        rows.append(
            (one.measure.name, ", ".join(filter(None, (cells, *more, *there))), _clock(one.seconds), "; ".join(left))
        )
    rows.append(("all", "", _clock(sum(one.seconds for one in chosen)), ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    rate = format_rate(machine.flops_per_s, "FLOP/s")
    head = f"stepscope: {machine.name}: {machine.memory.said}; {rate} in a short forward pass."
    bf16 = () if machine.has_bf16 else ("  This GPU has no bf16: fp16 is measured instead, and sdpa instead of flash.",)
    end = "  What is left out is predicted, and marked so. Ctrl-C keeps what is there; the same command goes on."
    return "\n".join((head, *bf16, *lines, end, *_longer(minutes, machine, chosen)))


def _longer(minutes: float | None, machine: "Machine", chosen: Sequence[Chosen]) -> list[str]:
    """That the plan takes longer than was asked for, and what takes longest of that which cannot be made shorter."""
    budget_s, takes_s = _budget_s(minutes, machine), sum(one.seconds for one in chosen)
    if takes_s <= budget_s:
        return []
    longest = sorted(chosen, key=lambda one: one.seconds, reverse=True)[:4]
    named = ", ".join(f"{one.measure.name} {_clock(one.seconds)}" for one in longest)
    return [
        f"  This takes {_clock(takes_s)}, not {_clock(budget_s)}, and nothing here can be made shorter. The longest: "
        f"{named}."
    ]


def _after(flag: str, words: Sequence[str]) -> str:
    """The value of an option among words; empty where it is not there."""
    return words[words.index(flag) + 1] if flag in words else ""


def _named(groups: "Sequence[Group]") -> str:
    """Cells by what tells them from others: each model with the first of its others, and how many more."""
    by_model: dict[str, list[str]] = {}
    for group in sorted(groups, key=lambda group: parameters_of(group.cells[0]) or 0):
        chosen = dict(group.chosen)
        by_model.setdefault(chosen.pop("model"), []).append("-".join(chosen.values()))
    listed: list[str] = []
    for model, others in by_model.items():
        more = f" and {len(others) - 3} more" if len(others) > 4 else ""
        listed.append(f"{model} {' '.join(others[:3] if more else others)}{more}")
    return ", ".join(listed)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _this_machine(target: "Target", memory: int | None) -> "Machine":
    """What this machine is: its free memory, and its rate by a short forward pass, which is measured once."""
    from stepscope.core.formulas.transformer import known_work
    from stepscope.core.range_names import FORWARD
    from stepscope.recording.nvml import gpus_here
    from stepscope.rendering.writeup import Machine
    from stepscope.runs.metrics import samples_of

    gpus, place, before = gpus_here(), target.store / "rate", target.machine
    if memory is not None and not gpus:
        import torch

        if not torch.cuda.is_available():  # a GPU that NVML does not know may be there
            raise InputError("--memory stands for a smaller GPU; it does not apply to a CPU: leave it out")
    if (found := _last_done(place)) is None:
        words = ["run", "--model", "small", "--phase", "forward", "--warmup", "1", "--steps", "3", "--no-profile"]
        words += ["--seq-len", "512"] if gpus else ["--seq-len", "128", "--batch-size", "1"]
        warn("measuring this machine's rate by a short forward pass")
        if _waited(_started([*words, "--runs", str(place)])) == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        found = _last_done(place)
    samples = samples_of(found, FORWARD) if found is not None else None
    where = found.environment if found is not None else None
    if found is None or where is None or samples is None or not samples.median_s:
        raise InputError(f"this machine's rate could not be measured: see {place}, or choose --scale small")
    on_gpu = where.device_type != "cpu"
    major, _, minor = (where.compute_capability or "").partition(".")
    machine = Machine(
        name=where.device_name,
        on_gpu=on_gpu,
        memory=_memory_of(where, gpus, memory),
        flops_per_s=sum(work.flops for work in known_work(found.workload).values()) / samples.median_s,
        gpus=max(len(gpus), 1) if on_gpu else 0,
        capability=(int(major), int(minor)) if major and minor else None,
        memory_limit_bytes=memory,
        too_long=before.too_long if before is not None else (),
        small=before.small if before is not None else (),
        minutes=before.minutes if before is not None else 0.0,
    )
    target.remember(machine)
    return machine


def _last_done(place: Path) -> "StoredRun | None":
    from stepscope.core.run_directory import load_runs

    runs = load_runs([place])[0] if place.is_dir() else []
    return next((run for run in reversed(runs) if run.status == "done"), None)


def _memory_of(where: "Environment", gpus: "Sequence[Gpu]", limit: int | None) -> "Budget":
    """What a process may allocate: up to the limit, of what is free. Raises InputError for a limit above the device."""
    from stepscope.allocations.prediction.fit import budget_of_memory, budget_of_total

    if where.device_type == "cpu":
        from stepscope.recording.device import host_memory

        usable = int(0.8 * (host_memory()[1] or 4 * GIB))  # the predicted peak is that of a GPU's allocator
        said = f"{format_bytes(usable)} of the host's free memory"
        return msgspec.structs.replace(budget_of_memory(usable), said=said)
    total = gpus[0].total_bytes if gpus else where.memory_bytes or 0
    if limit is not None and limit > total:
        raise InputError(f"--memory {format_bytes(limit)} is more than the GPU has ({format_bytes(total)})")
    budget = budget_of_memory(limit) if limit is not None else budget_of_total(total, where.device_name)
    usable = budget_of_total(gpus[0].free_bytes, where.device_name).usable_bytes if gpus else budget.usable_bytes
    if usable >= budget.usable_bytes - (_OWN_BYTES if limit is None else 0):
        return budget
    held = format_bytes(total - gpus[0].free_bytes)
    said = f"{format_bytes(gpus[0].free_bytes)} free of {format_bytes(total)}, other processes hold {held}"
    return msgspec.structs.replace(budget, usable_bytes=usable, said=said)


def _measure(one: "Measure", words: Sequence[str], target: "Target") -> int:
    """Run the command in a process of its own. Returns its exit code; an answer is kept only when it is whole."""
    place = one.place(target.store)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if one.leaves == "runs":
            one.mark(target.store).touch()
            return _waited(_started([*words, "--runs", str(place)]))
        part = place.with_suffix(".part")
        part.unlink(missing_ok=True)  # a command that outlived a killed write-up may still write into it
        with part.open("wb") as stream:
            code = _waited(_started([*words, "--json"], stream.fileno()))
        if code in (EXIT_DONE, EXIT_CHECK_FAILED):
            part.replace(place)
        else:
            part.unlink()
    except OSError as error:
        raise InputError(f"cannot write {place}: {error.strerror or error}") from error
    return code


def _started(words: Sequence[str], stdout: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "stepscope", *words], stdout=stdout)


def _waited(process: "subprocess.Popen[bytes]") -> int:
    """The exit code; after Ctrl-C that of an interrupt, once the command has put away what it had."""
    try:
        return awaited(process.wait)
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)  # a terminal has told it already, `kill` has not
        awaited(process.wait)
        return EXIT_INTERRUPTED


_NO_STEPS = ("start", "check ranks", "build", "warm-up", "measure", "ceiling", "end")
"""Stages of a run without steps that are recorded."""


def time_spent(runs: "Iterable[StoredRun]", began: float, whole_s: float) -> str:
    """Which shares of so many seconds went into steps, by the runs that were measured since `began`, in seconds since
    1970. What a study that leaves no runs times is not counted."""
    stages_s = Counter[str]()
    for run in runs:
        if run.instant >= began - 0.001:  # it is written in whole milliseconds
            stages_s.update(run.evidence.stages_s)
    timed_s, recorded_s = stages_s["measure"], sum(stages_s[each] for each in stages_s if each not in _NO_STEPS)
    steps, timed, recorded, warm = (
        format_share(min(1.0, seconds / whole_s))
        for seconds in (timed_s + recorded_s, timed_s, recorded_s, stages_s["warm-up"])
    )
    return (
        f"this took {_clock(whole_s)}: {steps} in steps that were timed ({timed}) or recorded ({recorded}), {warm} in "
        "warm-up and compiling; the rest is start-up, making models, studies without steps, predictions and writing"
    )


def _said(document: "WriteUp", target: "Target", *, run: bool, failed: Sequence[str] = ()) -> int:
    emit(f"{target.file}: {document.count} of {counted(len(document.answered), 'question')} answered\n")
    if document.others:
        warn(f"the runs here are of {', '.join(document.others)}, and no question asks for such a model")
    if failed:
        warn(f"not measured: {', '.join(dict.fromkeys(failed))}")
    elif not run and any(one.answer is None for one in document.answered):
        warn("the document names a command for each question without data; --run measures them all")
    return EXIT_DONE
