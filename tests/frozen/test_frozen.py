"""What users and their scripts rely on, held against golden files: help, signatures, keys of experiments, imports.

    python -m tests.frozen.test_frozen        # writes the golden files again

README.md beside this file says which differences are permitted.
"""

import functools
import hashlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import stepscope
from stepscope.app.cli.app import app
from stepscope.core.model_config import configure
from stepscope.core.run import Repeat, Run, Settings
from stepscope.core.run_directory import load_runs
from stepscope.core.workloads import TextbookWorkload, WatchedWorkload
from stepscope.engine.request import MemoryRequest, TraceRequest
from stepscope.engine.sweep_plan import Cell, SweepPlan
from tests.frozen.json_keys import key_paths

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
PLAIN = {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command, the program first."""
    yield path
    for name in sorted(getattr(command, "commands", {})):
        yield from commands(command.get_command(None, name), (*path, name))


def options_of_every_verb() -> str:
    """Each verb with its options in their order, and what each takes. The words of help are free."""
    lines: list[str] = []
    program: Any = app
    for path in commands(program):
        command = program
        for word in path:
            command = command.get_command(None, word)
        lines.append(" ".join(("stepscope", *path)))
        for option in command.params:
            names = ", ".join((*option.opts, *option.secondary_opts))
            kind = "flag" if getattr(option, "is_flag", False) else option.metavar or ""
            lines.append(f"    {names}  {kind}{'  several' if option.multiple else ''}")
        shown = CliRunner().invoke(app, [*path, "--help"], env=PLAIN)
        assert shown.exit_code == 0, shown.output
    return "\n".join(lines) + "\n"


def public_names() -> str:
    """Every name of `import stepscope`: parameters with their defaults, or what a result has."""
    lines: list[str] = []
    for name in sorted(stepscope.__all__):
        thing = getattr(stepscope, name)
        lines.append(name)
        if inspect.isclass(thing):
            lines += [f"    .{member}" for member in dir(thing) if not member.startswith("_")]
        elif callable(thing):
            for parameter in inspect.signature(thing).parameters.values():
                default = "" if parameter.default is parameter.empty or callable(parameter.default) else (
                    f" = {parameter.default!r}"
                )  # fmt: skip
                lines.append(f"    {parameter.kind.name.lower()} {parameter.name}{default}")
    return "\n".join(lines) + "\n"


@functools.cache
def stored_runs() -> list[Run]:
    """The runs under results/."""
    runs, faults = load_runs([ROOT / "results"])
    assert not faults
    return runs


def keys_of_stored_runs() -> str:
    """The digest of what names the runs under results/, a line a month: the workload's key and identity, the settings'
    identity, and the key of the sweep of this run alone."""
    months: dict[str, list[str]] = {}
    for run in stored_runs():
        identities = [
            msgspec.json.encode(part.identity, order="sorted").decode() for part in (run.workload, run.settings)
        ]
        sweep = "-"  # a script drove its own steps: no sweep measures it
        if not isinstance(run.workload, WatchedWorkload):
            cell = Cell(workload=run.workload, settings=run.settings, repeat=run.repeat)
            device = run.environment.device_type if run.environment else "cpu"
            sweep = SweepPlan(cells=(cell,), devices=(device,), tag=run.tag).key
        months.setdefault(run.id[:6], []).append(" ".join((run.id, run.workload.key, *identities, sweep)))
    return "".join(
        f"{month}  {len(keys)} runs  {hashlib.sha256(chr(10).join(sorted(keys)).encode()).hexdigest()[:16]}\n"
        for month, keys in sorted(months.items())
    )


def keys_of_sweeps() -> str:
    """The keys of sweeps that differ in one thing each."""
    tiny, small = (TextbookWorkload(model=configure(name)) for name in ("tiny", "small"))
    cell = Cell(workload=tiny)
    plans = {
        "one cell": SweepPlan(cells=(cell,)),
        "two cells": SweepPlan(cells=(cell, Cell(workload=small))),
        "settings": SweepPlan(cells=(Cell(workload=tiny, settings=Settings(seconds=3.0)),)),
        "a repeat": SweepPlan(cells=(Cell(workload=tiny, repeat=Repeat(set="a", number=1, of=2)),)),
        "against": SweepPlan(cells=(Cell(workload=tiny, against=small),)),
        "devices": SweepPlan(cells=(cell,), devices=("cuda:0", "cuda:1")),
        "another folder": SweepPlan(cells=(cell,), out="elsewhere"),
        "a tag": SweepPlan(cells=(cell,), tag="mine"),
        "a limit of memory": SweepPlan(cells=(cell,), memory_limit_bytes=1 << 30),
        "a peak": SweepPlan(cells=(cell,), peak_flops_per_s=1e15),
        "traced": SweepPlan(cells=(cell,), trace=TraceRequest(tools=("kineto",))),
        "memory recorded": SweepPlan(cells=(cell,), memory=MemoryRequest()),
    }
    return "".join(f"{plan.key}  {name}\n" for name, plan in plans.items())


def json_of_stored_runs() -> str:
    """Every key of the documents of the runs under results/."""
    documents = [msgspec.json.decode(msgspec.json.encode(run)) for run in stored_runs()]
    return "".join(f"{path}\n" for path in sorted(key_paths(*documents)))


FROZEN = {
    "options.txt": options_of_every_verb,
    "names.txt": public_names,
    "keys.txt": keys_of_stored_runs,
    "sweeps.txt": keys_of_sweeps,
    "json/stored-runs.txt": json_of_stored_runs,
}


@pytest.mark.parametrize("file", FROZEN)
def test_what_others_rely_on_stays(file: str):
    assert FROZEN[file]() == (GOLDEN / file).read_text(encoding="utf-8")


def test_every_import_that_the_documents_name_works():
    """Whatever a document imports from us, except what needs a library that is not here."""
    imports: set[tuple[str, str]] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        found = re.findall(
            r"^\s*from (stepscope[\w.]*) import ([\w, ]+)$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        imports |= {(module, name.strip()) for module, names in found for name in names.split(",")}
    assert {module for module, _ in imports} >= {"stepscope.kernels", "stepscope.parallel"}
    for module, name in sorted(imports):
        try:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
        except ModuleNotFoundError as error:
            assert error.name in {"accelerate", "lightning", "transformers"}, error


if __name__ == "__main__":
    for file, make in FROZEN.items():
        (GOLDEN / file).write_text(make(), encoding="utf-8")
