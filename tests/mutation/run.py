"""Do the tests see faults? Each mutant is put into a copy of the tree, and the tests that stand beside it are run.

    python -m tests.mutation.run [--only NAME...] [--out DIRECTORY]

First the tests must pass without any mutant. Then a mutant is *killed* by the first test that fails, and *survives*
where none does. Exit code 0: all were killed; 1: one survived; 2: an old text is not in its file exactly once, a test
fails by itself, or a mutant breaks the tests' collection. With --out, the outcome is kept there as mutants.json and
mutants.txt; with --only, that of the others stays as it was found there.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent.parent
TIME_LIMIT_S = 900
PACKAGES = ("torch", "numpy", "polars", "msgspec", "pytest", "hypothesis")

Status = Literal["killed", "survived", "broken"]
"""broken: the tests could not be collected, or their process ended in another way; nothing is known of the mutant."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one mutant."""

    mutant: str
    file: str
    falsifies: str
    status: Status
    seconds: float
    by: str | None
    """The test that failed first, or what ended the run otherwise."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Every mutant's outcome, with the versions of what was run."""

    versions: dict[str, str]
    outcomes: tuple[Outcome, ...]


class ListError(Exception):
    """The list of mutants, or the tests that it names, are not fit to be run."""


def mutated(mutant: Mutant, root: Path) -> str:
    """The mutant's file with its fault in it. Raises ListError unless the old text stands there exactly once."""
    text = (root / "src" / "stepscope" / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ListError(f"'{mutant.name}': its old text is {count} times in src/stepscope/{mutant.file}, not once")
    return text.replace(mutant.old, mutant.new)


def copy_tree(root: Path, to: Path) -> None:
    """Copy what git knows of and does not ignore, as it lies there now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


class Bench:
    """A copy of the tree in which mutants are tried, one at a time."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        # Compiled files are known by time and size: a mutant of the same size, soon after, would not be seen.
        self._environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        self._environment |= {"COLUMNS": "400", "PYTEST_ADDOPTS": ""}
        code = "import stepscope; print(stepscope.__file__)"
        command = [sys.executable, "-c", code]
        where = subprocess.run(command, cwd=tree, env=self._environment, capture_output=True, text=True, check=True)
        if not Path(where.stdout.strip()).is_relative_to(tree):
            raise ListError(f"the tests would run {where.stdout.strip()}, not the copy in {tree}")

    def run(self, tests: Sequence[str]) -> tuple[Status, str | None]:
        """Run test files until the first failure."""
        files = [f"tests/{name}" for name in tests]
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
        options += ["--hypothesis-seed=0", "--hypothesis-profile=any-counterexample"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *files], cwd=self.tree, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=TIME_LIMIT_S)
            except subprocess.TimeoutExpired:
                return "killed", f"no end within {TIME_LIMIT_S} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if process.returncode == 0:
            return "survived", None
        if process.returncode == 1 and failed:
            return "killed", failed[1].removeprefix("tests/")
        return "broken", " ".join(output.split())[-300:]

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Put the fault in, run its tests, and take it out again."""
        file = self.tree / "src" / "stepscope" / mutant.file
        sound, fault = file.read_text(), mutated(mutant, self.tree)
        start = time.monotonic()
        try:
            file.write_text(fault)
            status, by = self.run(mutant.tests)
        finally:
            file.write_text(sound)
        return Outcome(
            mutant=mutant.name, file=mutant.file, falsifies=mutant.falsifies, status=status,
            seconds=round(time.monotonic() - start, 1), by=by,
        )  # fmt: skip


def run_mutants(mutants: Sequence[Mutant], root: Path = ROOT) -> Report:
    """Try each mutant in a copy of the tree. Raises ListError where a test fails without any."""
    for mutant in mutants:
        mutated(mutant, root)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory).resolve()
        copy_tree(root, tree)
        bench = Bench(tree)
        failing: list[str] = []
        for test in sorted({test for mutant in mutants for test in mutant.tests}):
            status, by = bench.run((test,))
            _tell(f"{'passes without a mutant' if status == 'survived' else 'FAILS':<24} {test}")
            failing += [f"tests/{test} does not pass without a mutant: {by}"] if status != "survived" else []
        if failing:
            raise ListError("\n".join(failing))
        outcomes: list[Outcome] = []
        for mutant in mutants:
            outcomes.append(bench.try_mutant(mutant))
            _tell(_line(outcomes[-1]))
    versions = {"python": sys.version.split()[0], **{package: version(package) for package in PACKAGES}}
    return Report(versions=versions, outcomes=tuple(outcomes))


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _line(outcome: Outcome) -> str:
    name, seconds = f"{outcome.file}: {outcome.mutant}", f"{outcome.seconds:.1f} s"
    return f"{outcome.status:<8} {seconds:>8}  {name:<80} {outcome.by or ''}".rstrip()


def render(report: Report) -> str:
    """The report as text: a line for each mutant, then what they come to."""
    counts = {status: sum(o.status == status for o in report.outcomes) for status in ("killed", "survived", "broken")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    seconds = sum(outcome.seconds for outcome in report.outcomes)
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    lines = [_line(outcome) for outcome in report.outcomes]
    return "\n".join([*lines, "", f"{len(lines)} mutants: {summary}, in {seconds:.0f} s", versions, ""])


def keep(report: Report, directory: Path) -> None:
    """Write the report, as JSON and as text; the others' outcomes stay, if they are of the same versions."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "mutants.json"
    earlier = msgspec.json.decode(file.read_bytes(), type=Report) if file.exists() else report
    kept = earlier.outcomes if earlier.versions == report.versions else ()
    outcomes = {outcome.mutant: outcome for outcome in (*kept, *report.outcomes)}
    listed = tuple(outcomes[mutant.name] for mutant in MUTANTS if mutant.name in outcomes)
    whole = Report(versions=report.versions, outcomes=listed)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    (directory / "mutants.txt").write_text(render(whole))


def main() -> int:
    """Run the chosen mutants; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose name, or file, has one of these in it")
    parser.add_argument("--out", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if not arguments.only or any(word in f"{mutant.file}: {mutant.name}" for word in arguments.only)
    ]
    # The tests have a process group of their own: ended by a signal, this process must end them first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not chosen:
        sys.stderr.write(f"no mutant is named so: {', '.join(arguments.only)}\n")
        return 2
    try:
        report = run_mutants(chosen)
    except ListError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(render(report).rpartition("\n\n")[2])
    if arguments.out:
        keep(report, arguments.out)
    statuses = {outcome.status for outcome in report.outcomes}
    return 2 if "broken" in statuses else 1 if "survived" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
