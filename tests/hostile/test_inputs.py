"""Inputs, places and limits that nobody meant well: one line and an exit code, and nothing moves the terminal."""

import contextlib
import csv
import gzip
import io
import json
import os
import pickle
import pty
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core import files as caches
from stepscope.core.errors import LONGEST_MESSAGE, middle_cut, printable, visible, warn
from stepscope.core.profilers import find_nsys
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, encode_run
from tests.command import stepscope
from tests.conftest import at_length, make_run
from tests.handmade_snapshot import handmade

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "stepscope")
ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r\x00\x7f"
"""Sets a title, clears the screen (with a C1 introducer too), turns the direction of writing, returns the carriage."""


def run_verb(*arguments: object, cwd: Path | None = None, **streams: Any) -> subprocess.CompletedProcess[str]:
    if not streams:
        return stepscope(*arguments, cwd=cwd, timeout=60)
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, text=True, errors="replace", check=False, timeout=60, **streams)


def is_refused(done: subprocess.CompletedProcess[str], says: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("stepscope: "), done.stderr
    assert says in done.stderr, done.stderr


# Without a home


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HOME, and a user id without an account: in a process that is one, `pwd` knows nobody."""
    import pwd

    def nobody(_: int) -> object:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "STEPSCOPE_CACHE", "STEPSCOPE_NSYS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_there_is_no_cache_and_nothing_fails():
    assert caches.home_directory() is None and caches.cache_directory() is None
    assert not caches.replace_file(None, b"kept")
    find_nsys()
    import torch

    from stepscope.kernels.flash import tuning_cache
    from stepscope.recording.ceilings import load_ceilings

    assert load_ceilings(torch.device("cpu")) is None
    assert tuning_cache.kept_path("cpu") is None and tuning_cache.kept_choices.__wrapped__("cpu") == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an account")
def test_a_report_is_refused_for_want_of_nsys_where_there_is_no_home(tmp_path: Path):
    capture = tmp_path / "x.nsys-rep"
    capture.write_bytes(b"NSYS")
    tmp_path.chmod(0o755)
    program = (
        "import os, sys\nimport stepscope.traces.readers.nsys\nfrom stepscope.app.cli import app\n"
        "asked, sys.argv = sys.argv, ['stepscope', 'trace', '/dev/null']\n"  # this user may not read the libraries
        "try:\n    app.main()\nexcept SystemExit:\n    sys.argv = asked\n"
        "os.chdir(sys.argv.pop(1))\nos.setuid(54321)\nos.environ.pop('HOME', None)\nos.environ['PATH'] = '/nowhere'\n"
        "app.main()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), "trace", capture.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "needs nsys" in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


# Streams and limits


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("run", "--help"), ("study", "--help"), ("models",)]
)
def test_a_full_disk_under_stdout_is_one_line(arguments: tuple[str, ...]):
    with Path("/dev/full").open("w") as full:
        is_refused(run_verb(*arguments, stdout=full, stderr=subprocess.PIPE), "No space left")


def test_a_full_stderr_keeps_the_exit_code():
    with Path("/dev/full").open("w") as full:
        for arguments in ((), ("run", "--model", "none")):
            assert run_verb(*arguments, stdout=subprocess.PIPE, stderr=full).returncode == 2


@pytest.mark.parametrize("verb", [("run",), ("study", "softmax"), ("device",), ("bench", "torch:relu")])
def test_too_little_memory_for_torch_is_one_line(verb: tuple[str, ...], tmp_path: Path):
    limited = ["bash", "-c", 'ulimit -v 600000; exec "$@"', "-", *COMMAND, *verb]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    is_refused(done, "raise the limit to 2 GiB", code=3)


def test_a_long_value_is_echoed_in_part_with_the_remedy():
    done = run_verb("run", "--steps", "9" * 60_000 + "x")
    assert done.returncode == 2 and len(done.stderr) < LONGEST_MESSAGE + 100
    done = run_verb("table", "--where", "x" * 100_000)
    is_refused(done, "write field=value")
    assert len(done.stderr) < LONGEST_MESSAGE + 100


@pytest.mark.parametrize(("width", "cut"), [(6, "abcdef"), (5, "ab…ef"), (4, "ab…f"), (2, "a…"), (1, "…"), (0, "")])
def test_the_middle_is_cut(width: int, cut: str):
    assert middle_cut("abcdef", width) == cut


# What is shown


def test_what_cannot_be_seen_is_shown_as_json_escapes_it():
    for character in [
        *map(chr, range(0x20)),
        "\x7f",
        *map(chr, range(0x80, 0xA0)),
        "\u202e",
        "\u2066",
        "\ud800",
        "\U000e0041",
    ]:
        if character in "\n\t":
            continue
        shown = visible(f"a{character}b")
        assert shown.isascii() and shown.isprintable() and character not in shown
        assert json.loads(f'"{shown}"') == f"a{character}b"
        assert printable(f"a{character}b").isprintable()
    for text in ("plain\ttext\n", "größe µs ± 3 × │ ━ …", "thin\u2009and\u00a0fixed"):
        assert visible(text) == text
    stream = io.StringIO()
    warn("two\nlines\x1b", stream)
    assert stream.getvalue() == "stepscope: two lines\\u001b\n"


def hostile_run(folder: Path) -> Path:
    """A run directory with an escape in every free text that a run has."""
    fields = json.loads(encode_run(make_run(forward=[0.01, 0.02])))
    environment = fields["environment"]
    for name, value in environment.items():
        if isinstance(value, str) and name != "device_type":
            environment[name] = f"{value}{ESCAPE}"
    environment["versions"] = {f"torch{ESCAPE}": f"9{ESCAPE}"}
    for samples in fields["samples"].values():
        samples["clock"] = ESCAPE
    fields["tag"] = f"=1+1{ESCAPE}"
    fields["evidence"]["notes"] = [ESCAPE]
    fields["findings"] = [
        {"kind": f"x{ESCAPE}", "severity": "warning", "sentence": ESCAPE, "remedy": ESCAPE, "figures": {}}
    ]
    folder.mkdir(parents=True)
    (folder / RUN_FILE).write_text(json.dumps(fields))
    return folder


def is_clean(text: str) -> bool:
    return all(
        character.isprintable() or character in "\n" or (character.isspace() and character > "\x9f")
        for character in text
    )


@pytest.mark.parametrize(
    "verb",
    [("show",), ("show", "--json"), ("ls",), ("ls", "--json"), ("table",), ("table", "--rows", "tag", "--style")],
)
def test_no_escape_of_a_foreign_run_reaches_stdout(tmp_path: Path, verb: tuple[str, ...]):
    place = hostile_run(tmp_path / "runs" / "one")
    styles = ("terminal", "markdown", "csv", "jsonl") if verb[-1] == "--style" else (None,)
    for style in styles:
        arguments = [verb[0], str(place), *verb[1:], *([style] if style else [])]
        done = run_verb(*arguments)
        assert done.returncode == 0, done.stderr
        assert is_clean(done.stdout) and is_clean(done.stderr), (style, done.stdout)
        if "--json" in verb:
            json.loads(done.stdout)
    if verb == ("show", "--json"):
        assert msgspec.json.decode(run_verb("show", place, "--json").stdout, type=Run).tag == f"=1+1{ESCAPE}"


def on_a_terminal(*arguments: object) -> str:
    """What the command writes to a terminal, without rich's own colours."""
    reader, terminal = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    with subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=terminal, stderr=terminal, env=environment) as child:
        os.close(terminal)
        written = b""
        try:
            while chunk := os.read(reader, 65536):
                written += chunk
        except OSError:  # Linux says so where the other side is closed
            pass
        child.wait(60)
    os.close(reader)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("verb", ["show", "ls", "table"])
def test_no_escape_of_a_foreign_run_reaches_a_terminal(tmp_path: Path, verb: str):
    shown = on_a_terminal(verb, hostile_run(tmp_path / "runs" / "one"))
    assert shown and is_clean(shown), shown


def test_cells_of_csv_are_inert_and_numbers_stay_numbers(tmp_path: Path):
    for i, tag in enumerate(("=1+1", "+cmd", "-cmd|x", "@sum", "\tx", "plain", "-5")):
        run = msgspec.structs.replace(make_run(step=[0.01, 0.02]), tag=tag, id=f"run-{i}")
        (tmp_path / f"run-{i}").mkdir()
        (tmp_path / f"run-{i}" / RUN_FILE).write_bytes(encode_run(run))
    done = run_verb("table", tmp_path, "--rows", "tag", "--style", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["tag"] for row in rows} == {"'=1+1", "'+cmd", "'-cmd|x", "'@sum", "'\tx", "plain", "-5"}
    assert all(float(row["step_median_s"]) > 0 for row in rows)


# Files


@pytest.mark.parametrize(
    "verb",
    [
        ("device", "--from"),
        ("study", "formats", "--from"),
        ("study", "attention", "--from"),
        ("show",),
        ("memory",),
        ("trace",),
    ],
)
def test_a_device_that_never_ends_and_a_pipe_that_nobody_writes_are_refused(verb: tuple[str, ...], tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in ("/dev/zero", pipe):
        is_refused(run_verb(*verb, path), str(path))


def test_a_document_of_no_bound_is_refused(tmp_path: Path):
    file = tmp_path / "report.json"
    file.touch()
    os.truncate(file, 1 << 40)
    is_refused(run_verb("device", "--from", file), "larger than 64.00 MiB")


def test_an_export_without_strings_is_read(tmp_path: Path):
    export = tmp_path / "trace.sqlite"
    export.write_bytes(gzip.decompress((Path(__file__).parents[1] / "data/nsys_train.sqlite.gz").read_bytes()))
    with contextlib.closing(sqlite3.connect(export)) as connection, connection:
        connection.execute("DELETE FROM StringIds")
    done = run_verb("trace", export, "--json")
    assert done.returncode in (0, 1) and json.loads(done.stdout), done.stderr
    assert not done.stderr


# Code of the user's own


ENDS = {
    "os._exit(0)": "import os\nos._exit(0)\n",
    "SystemExit": "def sweep():\n    raise SystemExit(0)\n",
    "KeyboardInterrupt": "raise KeyboardInterrupt\n",
    "GeneratorExit": "def sweep():\n    raise GeneratorExit\n",
    "a BaseException": "class Odd(BaseException): pass\ndef sweep():\n    raise Odd('\\x1b[2J')\n",
    "a signal": "import os\nos.kill(os.getpid(), 11)\n",
    "a recursion": "def sweep():\n    return sweep()\n",
    "no words": "class E(Exception):\n    def __str__(self): raise ValueError\ndef sweep():\n    raise E\n",
    "closed files": "import os\ndef sweep():\n    os.closerange(3, 50)\n    return []\n",
    "closed streams": "import sys\ndef sweep():\n    sys.stdout.close()\n    sys.stderr.close()\n    return []\n",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_recipe_that_ends_its_process_is_named(tmp_path: Path, how: str):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(ENDS[how])
    is_refused(run_verb("sweep", recipe, "--runs", tmp_path / "runs"), str(recipe))
    assert not (tmp_path / "runs").exists()


def test_a_recipe_whose_process_is_killed_is_named_too(tmp_path: Path):
    """Mostly for memory: then the recipe is not wrong, and the exit code is another."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import os\nos.kill(os.getpid(), 9)\n")
    done = run_verb("sweep", recipe, "--runs", tmp_path / "runs")
    assert done.returncode == 3 and f"the process of the recipe {recipe} was killed" in done.stderr


def test_what_a_recipe_starts_ends_with_it(tmp_path: Path):
    recipe, started = tmp_path / "recipe.py", tmp_path / "pid"
    recipe.write_text(
        f"import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\ndef sweep():\n    return []\n"
    )
    assert run_verb("sweep", recipe, "--runs", tmp_path / "runs").returncode == 2
    status = Path("/proc", started.read_text(), "status")  # what is dead may wait there for its new parent
    assert not status.exists() or "\nState:\tZ" in status.read_text()


def test_what_a_recipe_prints_is_no_result(tmp_path: Path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("print('hello')\ndef sweep():\n    return []\n")
    done = run_verb("sweep", recipe, "--runs", tmp_path / "runs")
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("hello\n")


@pytest.mark.parametrize("ends", ["os._exit(0)", "raise KeyboardInterrupt", *at_length("raise BaseException('odd')")])
def test_a_module_that_ends_its_process_is_named(tmp_path: Path, ends: str):
    (tmp_path / "ending_module.py").write_text(f"import os\ndef factory():\n    {ends}\n")
    is_refused(
        run_verb("study", "autocast", "--module", "ending_module:factory", cwd=tmp_path), "ending_module:factory"
    )


# The campaign


@pytest.mark.long
def test_a_short_campaign_finds_no_fault(tmp_path: Path):
    """`make hostile` runs the long one."""
    out = tmp_path / "inputs.json"
    command = [sys.executable, "-m", "tests.hostile.inputs", "--cases", "48", "--seed", "1", "--out", str(out)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["cases"] == 48 and not result["faults"]
    assert all(count.get("read", 0) + count.get("refused", 0) == 8 for count in result["kinds"].values())
    assert done.stdout.startswith("inputs: 48 hostile files")


def test_half_a_surrogate_pair_in_a_snapshot_is_json(tmp_path: Path):
    content = handmade().content(notes=True, before=True)
    content["device_traces"][0][0]["frames"] = [{"filename": "\ud800.py", "line": 1, "name": "\udfff"}]
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps(content))
    done = run_verb("memory", file, "--json")
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    assert run_verb("memory", file).returncode == 0
    content["segments"][0]["\ud800"] = 1
    file.write_bytes(pickle.dumps(content))
    is_refused(run_verb("memory", file), "surrogates not allowed")
