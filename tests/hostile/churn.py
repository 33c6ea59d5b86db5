"""Directories of runs that appear and vanish while `ls`, `table`, `show` and a sweep's start walk through them.

python -m tests.hostile.churn --seconds 120 --out results/cpu/hostile/churn.json
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stepscope.app.cli.app import app
from stepscope.core.errors import StepscopeError
from stepscope.core.run_directory import encode_run, load_runs
from tests.conftest import make_run
from tests.hostile.campaign import conclude, parser

DIRECTORIES = 12
STARTS = 20
"""Passes as at the start of a sweep, which reads what is there, for each of a verb."""


def main(arguments: list[str] | None = None) -> int:
    """Walk, while others make and remove."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=120.0, help="for how long")
    asked = options.parse_args(arguments)
    faults: list[str] = []
    passes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, _churning(Path(folder)):
        verbs = {
            "ls": ["ls", folder],
            "table": ["table", folder, "--style", "csv", "--rows", "tag"],
            "show": ["show", "last", "--runs", folder],
        }
        for words in verbs.values():
            walk(words)  # what they import takes longer than many passes
        deadline = time.monotonic() + asked.seconds
        while time.monotonic() < deadline:
            for name, words in verbs.items():
                passes[name] += 1
                if fault := walk(words):
                    faults.append(f"{name}: {fault}")
            for _ in range(STARTS):
                passes["start of a sweep"] += 1
                try:
                    faults += load_runs([Path(folder)])[1]
                except Exception as error:
                    faults.append(f"start of a sweep: {type(error).__name__}: {error}")
    total = passes.total()
    result = {"passes": dict(passes), "seconds": asked.seconds, "directories": DIRECTORIES}
    return conclude(
        "churn", result, faults, f"{total} passes of ls, table, show and a sweep's start under churn", asked.out
    )


def walk(words: list[str]) -> str:
    """One verb in this process; what it should not have done. That a run has vanished it may say in one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            app(words, standalone_mode=False)
    except StepscopeError as error:
        return "" if "no run" in str(error) and "\n" not in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return said.getvalue().partition("\n")[0] if "cannot read" in said.getvalue() else ""


CHURN = """
import itertools, os, shutil, sys
place, directories = sys.argv[1], int(sys.argv[2])
data = sys.stdin.buffer.read()
made = []
for i in itertools.count():
    made.append(os.path.join(place, f"20260101T000000.{i:09}-tiny"))
    os.makedirs(made[-1])
    with open(os.path.join(made[-1], "part"), "wb") as file:
        file.write(data)
    os.rename(os.path.join(made[-1], "part"), os.path.join(made[-1], "run.json"))  # as save_run does
    if len(made) > directories:
        shutil.rmtree(made.pop(0))
"""


@contextlib.contextmanager
def _churning(out: Path) -> Iterator[None]:
    """Inside, two processes make runs there and remove them, as sweeps, and people that tidy up, do."""
    processes = []
    for tag in ("a", "b"):
        command = [sys.executable, "-S", "-c", CHURN, str(out / tag), str(DIRECTORIES)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(encode_run(make_run(step=[1.0] * 6, tag=tag)))
        process.stdin.close()
        processes.append(process)
    try:
        while not out.exists() or not all((out / tag).exists() for tag in ("a", "b")):
            time.sleep(0.01)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
