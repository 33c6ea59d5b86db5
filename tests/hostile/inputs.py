"""Damages real files and shows them to the verbs that read them: each is read or refused in one line.

    python -m tests.hostile.inputs --cases 240 --seed 0 --out results/cpu/hostile/inputs.json

Most cases run in one process that is watched from outside, a tenth through the command itself. The same seed makes the
same files.
"""

import argparse
import contextlib
import gzip
import io
import itertools
import json
import os
import pickle
import random
import resource
import select
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import LONGEST_MESSAGE
from stepscope.core.units import GIB, MIB
from tests.traces.test_mutations import STRANGE, STRANGE_CELLS, damaged

ROOT = Path(__file__).parents[2]
DATA, RESULTS = ROOT / "tests/data", ROOT / "results"
DEADLINE_S = 60.0
"""Of a case, on a machine that may be busy with other things; most take a tenth of a second."""
MEMORY_BYTES = 4 * GIB
"""Address space of the process that reads, its libraries and their threads included."""
EXIT_CODES = (0, 1, 2, 3)
THROUGH_COMMAND = 10
"""One case in so many goes through the command."""
HOSTILE_TEXTS = (
    "\x1b]0;owned\x07\x1b[2J",
    "\x9b31m",
    "\u202eevil\u2066",
    "a\r\nb\x00",
    "=1+1",
    "[red]x[/]",
    "x" * 100_000,
)

Dice = random.Random
Write = Callable[[Dice, Path], list[str]]
"""Writes a hostile file below a folder, and returns the command line that reads it."""


# Damage


def changed_tree(tree: Any, dice: Dice, times: int = 4) -> Any:
    """The tree of dicts and lists with one to `times` of its nodes changed, dropped, doubled or of another type."""
    tree = msgspec.msgpack.decode(msgspec.msgpack.encode(tree))
    for _ in range(dice.randint(1, times)):
        holder: Any = tree
        while True:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            if not keys:
                break
            key: Any = dice.choice(keys)
            if isinstance(holder[key], (dict, list)) and holder[key] and dice.random() < 0.85:
                holder = holder[key]
                continue
            what = dice.random()
            if what < 0.5:
                holder[key] = dice.choice((*STRANGE, *HOSTILE_TEXTS))
            elif what < 0.7:
                del holder[key]
            elif isinstance(holder, list):
                holder.insert(key, holder[dice.randrange(len(holder))])
            elif isinstance(holder, dict):
                holder[dice.choice(HOSTILE_TEXTS)] = holder[key]
            break
    return tree


def json_of(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def damaged_json(text: bytes, dice: Dice) -> bytes:
    """A document with other bytes, or with other values."""
    return damaged(text, dice) if dice.random() < 0.4 else json_of(changed_tree(json.loads(text), dice))


# Files and the verbs that read them


def unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def runs() -> Write:
    sources = [next(RESULTS.glob(f"{place}/**/run.json")).read_bytes() for place in ("cpu/first", "h200/first")]
    verbs = (["show"], ["show", "--json"], ["ls"], ["ls", "--json"], ["table"], ["table", "--rows", "tag,dtype"])
    styles = ([], ["--style", "csv"], ["--style", "markdown"], ["--style", "jsonl"])

    def write(dice: Dice, folder: Path) -> list[str]:
        (folder / "run").mkdir()
        (folder / "run/run.json").write_bytes(damaged_json(dice.choice(sources), dice))
        verb, *options = dice.choice(verbs)
        return [verb, str(folder / "run"), *options, *(dice.choice(styles) if verb == "table" else [])]

    return write


def documents() -> Write:
    sources = [
        (RESULTS / "cpu/precision/softmax.json", ["study", "softmax"]),
        (RESULTS / "h200/device.json", ["device"]),
        (RESULTS / "cpu/attention/gate.json", ["study", "attention"]),
    ]
    loaded = [(path.read_bytes(), verb) for path, verb in sources]

    def write(dice: Dice, folder: Path) -> list[str]:
        text, verb = dice.choice(loaded)
        (folder / "answer.json").write_bytes(damaged_json(text, dice))
        return [*verb, "--from", str(folder / "answer.json"), *dice.choice(([], ["--json"]))]

    return write


def digests() -> Write:
    place = next(RESULTS.glob("h200/kernels/**/trace-kineto.json")).parent
    run, digest = (place / "run.json").read_bytes(), (place / "trace-kineto.json").read_bytes()

    def write(dice: Dice, folder: Path) -> list[str]:
        (folder / "run").mkdir()
        (folder / "run/run.json").write_bytes(run)
        (folder / "run/trace-kineto.json").write_bytes(damaged_json(digest, dice))
        return ["study", "kernels", "--from", str(folder), *dice.choice(([], ["--json"]))]

    return write


def kineto() -> Write:
    texts = [unpacked(DATA / f"{name}.json.gz") for name in ("idle_item", "idle_streams", "kineto_inference_bf16")]

    def write(dice: Dice, folder: Path) -> list[str]:
        text = damaged_json(dice.choice(texts), dice)
        packed = dice.random() < 0.5
        file = folder / ("trace.json.gz" if packed else "trace.json")
        data = gzip.compress(text, 1) if packed else text
        file.write_bytes(damaged(data, dice) if packed and dice.random() < 0.2 else data)
        return ["trace", str(file), *dice.choice(([], ["--json"]))]

    return write


def nsys() -> Write:
    whole = unpacked(DATA / "nsys_train.sqlite.gz")

    def write(dice: Dice, folder: Path) -> list[str]:
        file = folder / "trace.sqlite"
        if dice.random() < 0.3:
            file.write_bytes(damaged(whole, dice))
        else:
            file.write_bytes(whole)
            with contextlib.closing(sqlite3.connect(file)) as connection, connection:
                damage_tables(connection, dice)
        return ["trace", str(file), *dice.choice(([], ["--json"], ["--no-ranges"]))]

    return write


def damage_tables(connection: sqlite3.Connection, dice: Dice) -> None:
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for _ in range(dice.randint(1, 4)):
        table = dice.choice(tables)
        columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
        column, value = dice.choice(columns), dice.choice((*STRANGE_CELLS, *HOSTILE_TEXTS))
        what = dice.random()
        with contextlib.suppress(sqlite3.Error):  # a key may refuse: then the table stays
            if what < 0.1:
                connection.execute(f'DELETE FROM "{table}"')
            elif what < 0.2:
                connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            elif what < 0.4:
                connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
            else:
                some = f"rowid % {dice.randint(1, 50)} = 0"
                connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {some}', (value,))


def snapshots() -> Write:
    names = ("snapshot_train", "snapshot_default", "snapshot_expandable")
    # Our own files, written by the tests of PyTorch's allocator.
    return damaged_snapshots([unpacked(DATA / f"{name}.pickle.gz") for name in names])


def damaged_snapshots(pickles: list[bytes]) -> Write:
    """Pickles that may be loaded, with other bytes or with other values."""
    contents = [msgspec.to_builtins(pickle.loads(text)) for text in pickles]

    def write(dice: Dice, folder: Path) -> list[str]:
        i = dice.randrange(len(pickles))
        if dice.random() < 0.4:
            text = damaged(pickles[i], dice)
        else:
            text = pickle.dumps(changed_tree(contents[i], dice, times=3), protocol=dice.choice((2, 4, 5)))
        packed = dice.random() < 0.5
        file = folder / ("snapshot.pickle.gz" if packed else "snapshot.pickle")
        file.write_bytes(gzip.compress(text, 1) if packed else text)
        return ["memory", str(file), *dice.choice(([], ["--json"], ["--at", "end"]))]

    return write


KINDS: dict[str, Callable[[], Write]] = {
    "runs": runs, "answers": documents, "digests": digests, "kineto": kineto, "nsys": nsys, "snapshots": snapshots,
}  # fmt: skip


# Running and judging


class Done(msgspec.Struct, kw_only=True):
    """How a case ended."""

    code: int | None
    """None: it was ended at the deadline, or died."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    """Of the process so far."""


class Worker:
    """A process that runs one command line after another in itself; ended and started again where one hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._written = tempfile.TemporaryFile()  # noqa: SIM115  (by libraries, to stderr itself)
        self._errors = 0

    def run(self, arguments: list[str]) -> Done:
        if self._process is None:
            command = [sys.executable, "-m", "tests.hostile.inputs", "--worker"]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._written
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        began = time.monotonic()
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if ready else b""
        if line:
            done = msgspec.json.decode(line, type=Done)
            done.stderr += self._newly_written()
            return done
        self.end()
        return Done(code=None, seconds=time.monotonic() - began)

    def _newly_written(self) -> str:
        text = os.pread(self._written.fileno(), 1 << 20, self._errors)
        self._errors += len(text)
        return text.decode("utf-8", "replace")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def work() -> None:
    """The worker's side: command lines on stdin, a `Done` for each on the stdout that it began with."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers, sys.stdout = sys.stdout, sys.stderr
    from stepscope.app.cli.app import main as command

    for line in sys.stdin:
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        began, code = time.monotonic(), None
        sys.argv = ["stepscope", *json.loads(line)]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command()
            except SystemExit as end:
                code = end.code
            except BaseException as error:  # what the interpreter would print a traceback of
                err.write(f"Traceback: {type(error).__name__}: {error}\n")
                code = 1
        texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]  # pyright: ignore
        done = Done(
            code=code if isinstance(code, int) else 0,
            stdout=texts[0],
            stderr=texts[1],
            seconds=time.monotonic() - began,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        answers.write(msgspec.json.encode(done).decode() + "\n")
        answers.flush()


def through_command(arguments: list[str]) -> Done:
    """The same by the command itself, in a process of its own."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    began = time.monotonic()
    command = [sys.executable, "-m", "stepscope", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False, preexec_fn=limit)
    except subprocess.TimeoutExpired:
        return Done(code=None, seconds=time.monotonic() - began)
    out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    return Done(code=done.returncode, stdout=out, stderr=err, seconds=time.monotonic() - began)


def faults_of(done: Done, arguments: list[str]) -> list[str]:
    """What the case shows to be wrong with the tool."""
    if done.code is None:
        return [f"no end within {DEADLINE_S:.0f} s, or its process died"]
    found = []
    if done.code not in EXIT_CODES:
        found.append(f"exit code {done.code}")
    if "Traceback" in done.stderr:
        found.append(f"a traceback: {done.stderr.strip().splitlines()[-1][:300]}")
    # A verb that reads a folder says of each file in it that it leaves out.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("stepscope: left out: ")]
    if len(lines) != (done.code in (2, 3)) and not any("is left out" in line for line in lines):
        found.append(f"{len(lines)} lines on stderr: {done.stderr[:300]!r}")
    if "memory does not suffice" in done.stderr:
        found.append("more memory than the limit")
    found += [
        f"a line of {len(line)} characters" for line in done.stderr.splitlines() if len(line) > LONGEST_MESSAGE + 20
    ]
    for name, text in (("stdout", done.stdout), ("stderr", done.stderr)):
        moving = {
            seen for seen in text if not (seen.isprintable() or seen in "\n\t" or (seen.isspace() and seen > "\x9f"))
        }
        if moving:
            found.append(f"{sorted(moving)!a} on {name}")
    if "--json" in arguments and done.code in (0, 1):
        try:  # a study of kernels writes a line for each run, the others one document
            for text in done.stdout.splitlines() if "kernels" in arguments else [done.stdout]:
                json.loads(text)
        except ValueError as error:
            found.append(f"no JSON: {error}")
    return found


def campaign(
    cases: int,
    seed: int,
    tell: Callable[[str], None],
    *,
    kinds: dict[str, Callable[[], Write]] = KINDS,
    commanded_each: int = THROUGH_COMMAND,
    jobs: int = 1,
) -> dict[str, Any]:
    """Run so many cases, the kinds in turn. What comes back is the result as it is kept."""
    writers = {kind: make() for kind, make in kinds.items()}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepscope-hostile-") as folder, ThreadPoolExecutor(jobs) as pool:

        def written(number: int, kind: str) -> tuple[Path, list[str]]:
            place = Path(folder, str(number))
            place.mkdir()
            return place, writers[kind](random.Random(f"{seed} {kind} {number}"), place)

        numbered = list(zip(range(cases), itertools.cycle(kinds), strict=False))
        parts = [
            pool.submit(_share, numbered[job::jobs], written, commanded_each=commanded_each, tell=tell)
            for job in range(jobs)
        ]
        judged = sorted((one for part in parts for one in part.result()), key=lambda one: one["case"])
    counts = {kind: Counter[str]() for kind in kinds}
    for one in judged:
        counts[one["kind"]][one["end"]] += 1
    return {
        "campaign": "inputs",
        "seed": seed,
        "cases": cases,
        "through_command": sum(one["by_command"] for one in judged),
        "kinds": {kind: dict(sorted(count.items())) for kind, count in counts.items()},
        "seconds": round(time.monotonic() - began, 1),
        "slowest_s": round(max((one["seconds"] for one in judged), default=0.0), 2),
        "peak_mib": round(max((one["peak_bytes"] for one in judged), default=0) / MIB),
        "deadline_s": DEADLINE_S,
        "memory_limit_mib": MEMORY_BYTES // MIB,
        "faults": [
            {name: one[name] for name in ("case", "kind", "arguments", "faults")} for one in judged if one["faults"]
        ],
    }


def _share(
    numbered: list[tuple[int, str]],
    written: Callable[[int, str], tuple[Path, list[str]]],
    *,
    commanded_each: int,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """These cases, one after the other, each with how it ended."""
    worker, judged = Worker(), []
    for number, kind in numbered:
        place, arguments = written(number, kind)
        by_command = number % commanded_each == commanded_each - 1
        done = through_command(arguments) if by_command else worker.run(arguments)
        wrong = faults_of(done, arguments)
        end = "faults" if wrong else {0: "read", 1: "read"}.get(done.code or 0, "refused")
        shown = [argument.replace(str(place), "CASE") for argument in arguments]
        if wrong:
            tell(f"case {number} ({kind}): {'; '.join(wrong)}: {' '.join(shown)}")
        judged.append(
            {
                "case": number, "kind": kind, "arguments": shown, "faults": wrong, "end": end,
                "by_command": by_command, "seconds": done.seconds, "peak_bytes": done.peak_bytes,
            }
        )  # fmt: skip
        shutil.rmtree(place)
    worker.end()
    return judged


def closing_line(result: dict[str, Any]) -> str:
    """The result in one sentence."""
    total = Counter[str]()
    for count in result["kinds"].values():
        total.update(count)
    return (
        f"{result['campaign']}: {result['cases']:,} hostile files, seed {result['seed']}: {total['read']:,} read, "
        f"{total['refused']:,} refused in one line, {len(result['faults'])} faults; "
        f"slowest {result['slowest_s']} s, peak {result['peak_mib']:,} MiB"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 where no case shows a fault, 1 where one does."""
    # Each thread of polars reserves address space, and a machine of many cores would have more than the limit allows.
    os.environ.setdefault("POLARS_MAX_THREADS", "2")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="Keep the result in this file.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        work()
        return 0
    result = campaign(given.cases, given.seed, lambda line: print(line, file=sys.stderr, flush=True))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(closing_line(result))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
