"""Driving NVIDIA's Nsight Systems: the flags that record a step, the import and the export of what it recorded.

Needs no torch: the machine that imports a capture need not be the one that took it.
"""

import contextlib
import os
import re
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.nsight import find_nsys, how_to_get_nsys

TIMEOUT_S = 1800.0

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
    """Turns the stream that the target part records into a report. Absent where only the target part is installed."""


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
        said = _last_words(done.stderr or done.stdout) or f"it ended with code {done.returncode}"
        raise InputError(f"{path} is no Nsight Systems that works: {said}")
    return Nsys(path=path, version=match[1], importer=_importer(path))


def profile_command(nsys: Nsys, output: Path, command: list[str], *, cuda: bool) -> list[str]:
    """`nsys profile` of a command, into `output` and the suffix that nsys gives it."""
    name = str(output).replace("%", "%%")  # nsys reads %h as the host's name, and so on
    return [str(nsys.path), "profile", *(_CUDA if cuda else _HOST), "-f", "true", "-o", name, *command]


def failure_of(output: str, code: int) -> str:
    """One line for an nsys that left no report."""
    return _last_words(output) or f"nsys ended with code {code} and no report"


def import_stream(nsys: Nsys, stream: Path, report: Path) -> None:
    """Make a report of the stream that the target part of nsys left."""
    if nsys.importer is None:
        raise StepscopeError(
            f"{nsys.path} has no importer beside it: Nsight Systems' host part turns {stream.name} into a report"
        )
    # Debian's package leaves the libraries beside the importer to be found.
    libraries = os.pathsep.join(filter(None, [str(nsys.importer.parent), os.environ.get("LD_LIBRARY_PATH")]))
    command = [str(nsys.importer), "-f", "-i", str(stream), "-o", str(report)]
    _run(command, report, {**os.environ, "LD_LIBRARY_PATH": libraries})


def export_sqlite(nsys: Nsys, report: Path, sqlite: Path) -> None:
    """Export a report to SQLite, without what it tells of the machine beside the trace."""
    command = [str(nsys.path), "export", "--type", "sqlite", "-f", "true", "-o", str(sqlite), str(report)]
    _run(command, sqlite, dict(os.environ))
    _forget_machine(sqlite)


def _run(command: list[str], target: Path, environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepscopeError(f"{command[0]}: {one_line(error)}") from None
    if done.returncode or not target.exists():
        said = _last_words(done.stderr) or _last_words(done.stdout) or f"code {done.returncode}, and no {target.name}"
        raise StepscopeError(f"{Path(command[0]).name}: {said}")


def _importer(nsys: Path) -> Path | None:
    """nsys lies in bin/ or in target-linux-x64/; the importer in a host-linux-x64/ next to either."""
    for folder in (nsys.resolve().parent, nsys.parent, nsys.absolute().parent):
        for importer in sorted(folder.parent.glob("host-linux-*/QdstrmImporter")):
            if os.access(importer, os.X_OK):
                return importer
    return None


def _last_words(output: str) -> str:
    """The most telling line of what a program wrote: the last with an error in it, or else the last."""
    lines = [line.strip() for line in re.split(r"[\r\n]", output)]
    lines = [line for line in lines if line and not re.match(r"(\[\d+/\d+\]|Processing|Generat|/|https?://\S+$)", line)]
    telling = [line for line in lines if re.search(r"error|fail|cannot|unable|denied|not found", line, re.IGNORECASE)]
    chosen = telling or lines
    return one_line(Exception(chosen[-1])) if chosen else ""


def _forget_machine(sqlite: Path) -> None:
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
