"""Recording with NVIDIA's Nsight Systems: the flags for a step, and what must not stay in the export.

Needs no torch: the machine that imports a capture need not be the one that took it.
"""

import contextlib
import re
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stepscope.core.errors import InputError, one_line
from stepscope.core.profilers import find_importer, find_nsys, how_to_get_nsys, last_words

_QUIET = ("--sample=none", "--cpuctxsw=none")
_CUDA = ("-t", "cuda,nvtx", *_QUIET, "-c", "cudaProfilerApi", "--capture-range-end=stop-shutdown",
         "--cuda-flush-interval=100", "--cuda-graph-trace=node")  # fmt: skip
"""Seen on an H200 with driver 580 and CUDA 13, under an nsys that knows CUDA 12.4: without the capture range and the
flush interval 12 of 11,000 kernels arrived, with no error. Without tracing nodes a CUDA graph left nothing at all."""
_HOST = ("-t", "nvtx", *_QUIET)
"""On a CPU there is no CUDA profiler's API to wait for: everything is recorded, from the process's start."""


@dataclass(frozen=True, kw_only=True)
class Nsys:
    """An Nsight Systems that runs here."""

    path: Path
    version: str
    importer: Path | None
    """Path of the importer, which turns a recorded stream into a report; None where only the recorder is installed."""


def require_nsys() -> Nsys:
    """The Nsight Systems of this machine, or an InputError that says how to get one."""
    path = find_nsys()
    if path is None:
        raise InputError(f"no nsys on this machine: {how_to_get_nsys()}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{path} cannot be run: {one_line(error)}") from None
    match = re.search(r"Nsight Systems version (\S+)", done.stdout)
    if done.returncode or not match:
        message = last_words(done.stderr or done.stdout) or f"it ended with code {done.returncode}"
        raise InputError(f"{path} is no Nsight Systems that works: {message}")
    return Nsys(path=path, version=match[1], importer=find_importer(path))


def profile_command(nsys: Nsys, output: Path, command: list[str], *, cuda: bool) -> list[str]:
    """`nsys profile` of a command, into `output` and the suffix that nsys gives it."""
    name = str(output).replace("%", "%%")  # nsys reads %h as the host's name, and so on
    return [str(nsys.path), "profile", *(_CUDA if cuda else _HOST), "-f", "true", "-o", name, *command]


def failure_of(output: str, code: int) -> str:
    """One line for an nsys that left no report."""
    return last_words(output) or f"nsys ended with code {code} and no report"


def forget_machine(sqlite: Path) -> None:
    """Take out of an export what nsys adds unasked: the environment of every process that it saw, the names of other
    processes, the host's name and the places of files. A run directory can be shown to others.
    """
    others = ">> 24 NOT IN (SELECT globalTid >> 24 FROM NVTX_EVENTS)"
    statements = (
        "UPDATE StringIds SET value = '' WHERE instr(CAST(value AS BLOB), x'00') > 0",
        "DELETE FROM TARGET_INFO_SYSTEM_ENV WHERE name NOT GLOB 'Cpu*'",
        "UPDATE StringIds SET value = '' WHERE value GLOB '*quadd_session*'",
        "DELETE FROM META_DATA_CAPTURE WHERE name GLOB 'PROCESS_*' AND name NOT GLOB '*COLLECT*'",
        "DELETE FROM META_DATA_CAPTURE WHERE name = 'DEVICE_DISPLAY_NAME'",
        "DELETE FROM META_DATA_EXPORT WHERE name IN ('EXPORT_HOST', 'EXPORT_USER')"
        " OR name GLOB 'EXPORT_PARAM_*_FILE' OR name GLOB 'EXPORT_PARAM_*_PATH*'",
        "UPDATE StringIds SET value = '' WHERE id IN (SELECT contentId FROM ProcessStreams)",
        f"DELETE FROM PROCESSES WHERE globalPid {others}",
        "UPDATE PROCESSES SET name = replace(name, rtrim(name, replace(name, '/', '')), '')",  # the file's name alone
        f"UPDATE StringIds SET value = '' WHERE id IN (SELECT nameId FROM ThreadNames WHERE globalTid {others})"
        " AND id NOT IN (SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL)",
        f"DELETE FROM ThreadNames WHERE globalTid {others}",
    )
    with contextlib.closing(sqlite3.connect(sqlite, isolation_level=None)) as connection:
        for statement in statements:
            with contextlib.suppress(sqlite3.Error):  # which tables exist differs between versions
                connection.execute(statement)
        with contextlib.suppress(sqlite3.Error):
            connection.execute("VACUUM")  # else the deleted rows stay in the file
