"""What every campaign needs: where its result goes, and what it says at the end."""

import argparse
import contextlib
import os
import platform
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

STEPSCOPE = (sys.executable, "-m", "stepscope")
SOURCES = str(Path(__file__).parents[2] / "src")


def environment(**changes: str) -> dict[str, str]:
    """The environment of the processes: these sources, and one thread, so that many run beside each other."""
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([SOURCES, before] if before else [SOURCES])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every campaign has."""
    made = argparse.ArgumentParser(description=description, allow_abbrev=False)
    made.add_argument("--seed", type=int, default=0, help="of the random moments")
    made.add_argument("--out", type=Path, help="a JSON file for the result")
    return made


def conclude(name: str, result: dict[str, Any], faults: list[str], sentence: str, out: Path | None) -> int:
    """Print the closing line, write the result, and give the exit code: 1 where something did not survive."""
    for fault in faults:
        print(fault)
    closing = f"{name}: {sentence}; {len(faults)} faults" if faults else f"{name}: {sentence}; no fault"
    print(closing)
    if out is not None:
        told = {
            "campaign": name, "closing_line": closing, **result, "faults": faults,
            "python": platform.python_version(), "system": platform.platform(terse=True), "cores": os.cpu_count(),
        }  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    return 1 if faults else 0


def as_in_a_terminal() -> None:
    """Called in a child: signals that this process ignores, under nohup or in a script's background, end the child."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def answers_signals(pid: int) -> bool:
    """Whether the process has come so far that it answers SIGTERM itself: our first lines have run."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def wait_until_it_answers(pid: int, seconds: float = 60.0) -> bool:
    """Wait until a process answers signals; False if it has ended before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if answers_signals(pid):
            return True
        if not alive(pid):
            return False
        time.sleep(0.001)
    return False


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def processes_with(variable: str) -> list[int]:
    """Processes in whose environment this `NAME=value` stands: what a campaign started, however deep."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def generator(seed: int) -> random.Random:
    """Random numbers that come again with the same seed."""
    return random.Random(seed)
