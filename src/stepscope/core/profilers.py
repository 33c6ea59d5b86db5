"""NVIDIA's Nsight Systems on this machine: where its programs lie, and what they make of a capture."""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from stepscope.core.errors import StepscopeError, one_line
from stepscope.core.files import home_directory

TIMEOUT_S = 1800.0

_INSTALLED = (
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    "/usr/local/cuda*/bin",
    "/usr/lib/nsight-systems/bin",
)
_OWN = ".cache/stepscope/nsight-systems/usr/lib/nsight-systems/bin"
"""Where `scripts/install-nsys` puts it, below the home directory."""


def find_nsys() -> Path | None:
    """The `nsys` to use: STEPSCOPE_NSYS, the one on PATH, or the newest in the usual places."""
    named = os.environ.get("STEPSCOPE_NSYS")
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    home = home_directory()
    folders = [folder for each in _INSTALLED for folder in sorted(Path("/").glob(each.lstrip("/")), reverse=True)]
    folders += [home / _OWN] if home else []
    return next((nsys for folder in folders if os.access(nsys := folder / "nsys", os.X_OK)), None)


def how_to_get_nsys() -> str:
    """One line for the user whose machine has none."""
    named = os.environ.get("STEPSCOPE_NSYS")
    if named:
        return f"STEPSCOPE_NSYS names {named}, which cannot be run"
    return (
        "install Nsight Systems from https://developer.nvidia.com/nsight-systems "
        "(on Debian: scripts/install-nsys) and put nsys on PATH or name it in STEPSCOPE_NSYS"
    )


def find_importer(nsys: Path) -> Path | None:
    """The program that turns a raw capture into a report; None where nsys was installed without it.

    nsys lies in bin/ or in target-linux-x64/; the importer in a host-linux-x64/ next to either.
    """
    for folder in (nsys.resolve().parent, nsys.parent, nsys.absolute().parent):
        for importer in sorted(folder.parent.glob("host-linux-*/QdstrmImporter")):
            if os.access(importer, os.X_OK):
                return importer
    return None


def import_stream(importer: Path, stream: Path, report: Path) -> None:
    """Make a report of a raw capture. Raises StepscopeError."""
    # Debian's package leaves the libraries beside the importer to be found.
    libraries = os.pathsep.join(filter(None, [str(importer.parent), os.environ.get("LD_LIBRARY_PATH")]))
    command = [str(importer), "-f", "-i", str(stream), "-o", str(report)]
    _run(command, report, {**os.environ, "LD_LIBRARY_PATH": libraries})


def export_report(nsys: Path, report: Path, sqlite: Path) -> None:
    """Export a report to SQLite. Some versions write beside the report, too. Raises StepscopeError."""
    command = [str(nsys), "export", "--type", "sqlite", "-f", "true", "-o", str(sqlite), str(report)]
    _run(command, sqlite, dict(os.environ))


def last_words(output: str) -> str:
    """The most telling line of what a program wrote: the last with an error in it, or else the last."""
    lines = [line.strip() for line in re.split(r"[\r\n]", output)]
    lines = [line for line in lines if line and not re.match(r"(\[\d+/\d+\]|Processing|Generat|/|https?://\S+$)", line)]
    telling = [line for line in lines if re.search(r"error|fail|cannot|unable|denied|not found", line, re.IGNORECASE)]
    chosen = telling or lines
    return one_line(Exception(chosen[-1])) if chosen else ""


_LIBC = ctypes.CDLL(None)
"""Loaded before any fork."""
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the system end this process with its parent, however that ends; Linux alone can."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(command: list[str], target: Path, environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=_end_with_parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepscopeError(f"{command[0]}: {one_line(error)}") from None
    if done.returncode or not target.exists():
        reason = (
            last_words(done.stderr) or last_words(done.stdout) or f"exit code {done.returncode}, and no {target.name}"
        )
        raise StepscopeError(f"{Path(command[0]).name}: {reason}")


# Escapes texts in a profiler's JSON that it wrote without escaping, as Kineto does with the names of ranges.


_LONGEST = 10_000
"""Characters of a name of several lines."""
_FIELD = re.compile(rb'^([ \t]*"[^"\n\\]{1,80}": ")(.*)("[ \t]*,?[ \t]*\r?)$', re.MULTILINE)
"""A line that is one field with a text."""
_NAMED = re.compile(rb'^([ \t{]*"ph": .*"name": ")(.*)(", "pid": [^\n]*)$', re.MULTILINE)
"""A line of several fields, as older versions write events."""
_OVER_LINES = re.compile(
    rb'("name": ")([^\n]{0,%d}[^\n",\s][ \t]*\n.{0,%d}?)(",\s{0,40}"pid": )' % (_LONGEST, _LONGEST), re.DOTALL
)
"""A name with line breaks: its first line ends neither as a text nor as a field does."""
_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args)"')
"""Where one event ends and the next begins, which no name holds."""
_ESCAPED = {b"\n": rb"\n", b"\r": rb"\r", b"\t": rb"\t", b'"': rb"\"", b"\\": rb"\\"}
_CHARACTER = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|["\\\n\r\t]')


def with_texts_escaped(text: bytes, *, complete: bool = True) -> tuple[bytes, int]:
    """The text with quotes and backslashes escaped in fields that are no JSON without it, and how many fields.

    Whole lines are looked at; what is escaped already stays. complete: whether the last line is whole, too.
    """
    count = 0

    def escaped(match: re.Match[bytes]) -> bytes:
        nonlocal count
        plain = b'"' not in match[2] and b"\\" not in match[2]
        if plain or _BETWEEN_EVENTS.search(match[2]) or _is_json(match.group()):
            return match.group()
        count += 1
        characters = _CHARACTER.sub(lambda one: one[0] if len(one[0]) > 1 else _ESCAPED[one[0]], match[2])
        return match[1] + characters + match[3]

    whole = text.rfind(b"\n") + 1 if text.endswith((b"\n", b"\r")) or not complete else len(text)
    lines, rest = text[:whole], text[whole:]
    for pattern in (_FIELD, _NAMED, _OVER_LINES):
        lines = pattern.sub(escaped, lines)
    return lines + rest, count


def _is_json(line: bytes) -> bool:
    """Whether a line is JSON: fields of an object, or the object itself."""
    fields = line.strip().rstrip(b",").rstrip()
    for whole in (b"{" + fields + b"}", fields):
        try:
            msgspec.json.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        return True
    return False
