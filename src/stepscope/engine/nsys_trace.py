"""Takes a trace by Nsight Systems: the cell runs once more, in a process of its own that nsys watches.

The measuring process asks (`trace_under_nsys`), the watched one answers (`engine/nsys_trace.py`) by a file, since nsys
has stdout for itself and may end its process when the capture ends. Needs no torch.
"""

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.core import interrupts, profilers
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.evidence import Capture
from stepscope.core.interrupts import end_with_stdin
from stepscope.core.run_directory import EXPORT_FILE, REPORT_FILE, STREAM_FILE
from stepscope.core.samples import Samples
from stepscope.engine.request import StepRequest

# Recording with NVIDIA's Nsight Systems: the flags for a step, and what must not stay in the export.
#
# Needs no torch: the machine that imports a capture need not be the one that took it.


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
    path = profilers.find_nsys()
    if path is None:
        raise InputError(f"no nsys on this machine: {profilers.how_to_get_nsys()}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{path} cannot be run: {one_line(error)}") from None
    match = re.search(r"Nsight Systems version (\S+)", done.stdout)
    if done.returncode or not match:
        message = profilers.last_words(done.stderr or done.stdout) or f"it ended with code {done.returncode}"
        raise InputError(f"{path} is no Nsight Systems that works: {message}")
    return Nsys(path=path, version=match[1], importer=profilers.find_importer(path))


def profile_command(nsys: Nsys, output: Path, command: list[str], *, cuda: bool) -> list[str]:
    """`nsys profile` of a command, into `output` and the suffix that nsys gives it."""
    name = str(output).replace("%", "%%")  # nsys reads %h as the host's name, and so on
    return [str(nsys.path), "profile", *(_CUDA if cuda else _HOST), "-f", "true", "-o", name, *command]


def failure_of(output: str, code: int) -> str:
    """One line for an nsys that left no report."""
    return profilers.last_words(output) or f"nsys ended with code {code} and no report"


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


END_GRACE_S = 30.0
"""Seconds that nsys may take to end once the process that it watched has ended."""
INTERRUPT_GRACE_S = 2.0
"""Seconds that nsys may take to end when the user has stopped it; nothing of its trace is kept then."""
ARTIFACTS = {"nsys": EXPORT_FILE, "nsys-rep": REPORT_FILE, "qdstrm": STREAM_FILE}
"""Files of a trace by nsys in a run directory, by kind; `nsys` is the one that is read."""


class WatchedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to the watched process, on stdin."""

    request: StepRequest
    answer: str
    """The file to write the answer to."""


class WatchedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of the watched process, or why there is none."""

    samples: dict[str, Samples] = {}
    error: str | None = None


def nsys_for(device_type: str) -> Nsys:
    """The Nsight Systems that can trace a step on this device, or an InputError before anything is measured."""
    from stepscope.recording import ranges  # noqa: PLC0415  (torch, which the rest of this file does without)

    if ranges.watched():
        raise InputError("a tool that records NVTX ranges watches this process already: leave out --record nsys")
    nsys = require_nsys()
    if device_type != "cuda" and not ranges.nvtx_available():
        raise InputError(ranges.NO_NVTX)
    return nsys


def trace_under_nsys(
    request: StepRequest, nsys: Nsys, directory: Path, *, cuda: bool
) -> tuple[Capture, dict[str, str]]:
    """Run the cell again under `nsys profile`; returns the capture, and its files in the run directory by kind.

    A failure is never raised: the capture tells it.
    """
    failure, answer, kept = None, None, {}
    try:
        with _folder(directory) as folder:
            output, code, answer, recorded = _watch(nsys, request, folder, cuda)
            if answer is None and not recorded:
                # On a busy machine nsys sometimes ends before it has started the process that it is to watch.
                output, code, answer, recorded = _watch(nsys, request, folder, cuda)
            if answer is None or answer.error or not recorded:
                raise StepscopeError((answer and answer.error) or failure_of(output, code))
            kept, failure = _keep(nsys, folder, directory)
    except (StepscopeError, OSError) as error:
        failure = one_line(error)
    artifact = next((kind for kind in ARTIFACTS if kind in kept), None)
    samples = answer.samples if answer else {}
    capture = Capture(tool="nsys", tool_version=nsys.version, samples=samples, artifact=artifact, failure=failure)
    return capture, kept


def _watch(nsys: Nsys, request: StepRequest, folder: Path, cuda: bool) -> tuple[str, int, WatchedAnswer | None, bool]:
    """nsys and the process it watches, from start to end: what they printed, nsys' exit code, what the process
    answered, and whether nsys recorded it."""
    command = [sys.executable, "-P", "-m", "stepscope.engine.nsys_trace"]
    watched = WatchedRequest(request=request, answer=str((folder / "answer.json").absolute()))
    output = (folder / "output.txt").absolute()
    with output.open("wb") as printed:
        process = subprocess.Popen(
            profile_command(nsys, folder.absolute() / "trace", command, cuda=cuda),
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C on the terminal reaches this process alone, which passes it on
        )
    assert process.stdin is not None
    try:
        # stdin stays open: it is the watched process's lifeline, as a cell's is in a sweep.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(watched) + b"\n")
            process.stdin.flush()
        code = process.wait(profilers.TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise StepscopeError(f"nsys did not end after {profilers.TIMEOUT_S:.0f} s") from None
    finally:
        _end(process)
    answer = None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        answer = msgspec.json.decode((folder / "answer.json").read_bytes(), type=WatchedAnswer)
    recorded = any((folder / name).exists() for name in (REPORT_FILE, STREAM_FILE))
    return output.read_text(errors="replace"), code, answer, recorded


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Close the lifeline, wait for nsys to end, and kill it if it does not."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_GRACE_S if interrupts.received() is None else INTERRUPT_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _keep(nsys: Nsys, folder: Path, directory: Path) -> tuple[dict[str, str], str | None]:
    """Make the report and its export from the files in `folder`, and move all of them to the run directory.

    A file that can be kept is kept, whatever fails later. The second value says what failed, and the remedy.
    """
    stream, report, sqlite = (folder / name for name in (STREAM_FILE, REPORT_FILE, EXPORT_FILE))
    failure = None
    try:
        if not report.exists():
            if nsys.importer is None:
                raise StepscopeError(
                    f"{STREAM_FILE} awaits its import: `stepscope trace {directory}` reads it "
                    "where Nsight Systems is installed whole"
                )
            profilers.import_stream(nsys.importer, stream, report)
        profilers.export_report(nsys.path, report, sqlite)
        forget_machine(sqlite)
    except StepscopeError as error:
        failure = one_line(error)
    kept: dict[str, str] = {}
    for kind, name in ARTIFACTS.items():
        # The stream is redundant once it has become a report.
        if (folder / name).exists() and not (kind == "qdstrm" and report.exists()):
            # nsys writes into a report the environment of every process that it can see, so only its owner may read it.
            (folder / name).chmod(0o644 if kind == "nsys" else 0o600)
            (folder / name).replace(directory / name)
            kept[kind] = name
    return kept, failure


@contextlib.contextmanager
def _folder(directory: Path) -> Generator[Path]:
    """A temporary folder in the run directory for files that are not whole yet."""
    folder = directory / f".nsys-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# The process that nsys watches: it warms up the cell's steps without ranges, then runs them with every range.
#
# Started by `engine/nsys_trace.py` as `python -m stepscope.engine.nsys_trace`. nsys may end it when the capture ends:
# what it measured is written before.


def main() -> int:
    """Answer the request on stdin. Exit code 0 when the steps were traced."""
    line = sys.stdin.readline()
    end_with_stdin()
    watched = msgspec.json.decode(line, type=WatchedRequest)
    answer = Path(watched.answer)
    try:
        _trace(watched.request, lambda samples: _write(answer, WatchedAnswer(samples=samples)))
    except Exception as error:
        _write(answer, WatchedAnswer(error=one_line(error)))
        raise
    return 0


def _trace(request: StepRequest, keep: Callable[[dict[str, Samples]], None]) -> None:
    from stepscope.recording import ranges  # noqa: PLC0415
    from stepscope.recording.capture import capture_range  # noqa: PLC0415
    from stepscope.recording.device import limit_memory, timing_device  # noqa: PLC0415
    from stepscope.recording.driven import trace_nvtx  # noqa: PLC0415
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415
    from stepscope.recording.precision import matmul_precision  # noqa: PLC0415
    from stepscope.recording.timer import timed_steps  # noqa: PLC0415
    from stepscope.training.making import make_step  # noqa: PLC0415  (torch, after the lifeline)

    if not ranges.current_emitters():
        raise RuntimeError("no NVTX ranges can be emitted: this PyTorch has none, and nvtx finds no tool that listens")
    device = resolve_device(request.device)
    limit_memory(device, request.memory_limit_bytes)
    timing = timing_device(device)
    with matmul_precision(request.workload.dtype):
        step, _ = make_step(request.workload, device)
        with ranges.silenced():
            timed_steps(step, timing, max(request.settings.warmup_floor, 1))
        with capture_range(device):
            keep(trace_nvtx(step, device, timing, request.trace.steps))


def _write(target: Path, answer: WatchedAnswer) -> None:
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(target)


if __name__ == "__main__":
    sys.exit(main())
