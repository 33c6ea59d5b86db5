"""Runs on disk: written whole or not at all, read back equal, and every fault named in one line."""

import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.app.verbs.stored_runs import listed_runs
from stepscope.core.errors import InputError
from stepscope.core.run import SCHEMA_VERSION
from stepscope.core.run_directory import (
    create_run_directory,
    encode_run,
    find_place,
    find_run,
    last_run,
    load_run,
    load_runs,
    save_run,
)
from stepscope.questions.compare import side_named
from tests.conftest import make_run, workload
from tests.hostile import churn


def saved(out: Path, **changes: Any) -> Path:
    run = make_run(step=[1.0] * 6, **changes)
    directory = create_run_directory(out, run.workload)
    save_run(msgspec.structs.replace(run, id=directory.name), directory)
    return directory


def test_what_is_saved_is_read_back(out: Path):
    run = make_run(forward=[1.0, 2.0], backward=[3.0, 4.0], optimizer=[0.1, 0.2], tag="mine")
    directory = create_run_directory(out, run.workload)
    save_run(run, directory)
    assert load_run(directory) == load_run(directory / "run.json") == run
    assert [file.name for file in directory.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("field", "number", "says"),
    [
        ("flops", 10**400, "a number of 401 digits"), ("flops", -7, "does not hold a run"),
        ("memory_limit_bytes", 10**31, "a number of 32 digits"),
    ],
)  # fmt: skip
def test_numbers_that_count_nothing_are_refused(out: Path, field: str, number: int, says: str):
    file = saved(out) / "run.json"
    known = {"flops": rb'("flops":\s*)\d+', "memory_limit_bytes": rb'("memory_limit_bytes":\s*)null'}[field]
    damaged, times = re.subn(known, lambda found: found[1] + str(number).encode(), file.read_bytes(), count=1)
    assert times
    file.write_bytes(damaged)
    with pytest.raises(InputError, match=says):
        load_run(file)


def test_the_name_of_a_directory_is_time_and_key(out: Path):
    name = create_run_directory(out, workload()).name
    assert name.endswith(workload().key) and name[8] == "T" and name[:8].isdigit()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cut short"),
        (b'{"schema_version": 1, "id": "x', "cut short"),
        (b"[]", "no run"),
        (b"\xff\xfe{", "no run"),
        (b'{"schema_version": 1}', "does not hold a run"),
        (b'{"schema_version": 999}', "schema version 999.*upgrade"),
        (b'{"schema_version": 0}', "schema version 0.*measure it again"),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, content: bytes, says: str):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value) and "run.json" in str(caught.value)


@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_no_mutation_of_a_run_raises_anything_else(tmp_path_factory: pytest.TempPathFactory, cut: float, flip: int):
    data = bytearray(encode_run(make_run(step=[1.0] * 3)))
    place = int(cut * (len(data) - 1))
    file = tmp_path_factory.getbasetemp() / "mutated.json"
    for mutated in (bytes(data[:place]), bytes(data[:place] + bytes([flip]) + data[place + 1 :])):
        file.write_bytes(mutated)
        try:
            assert load_run(file).schema_version == SCHEMA_VERSION
        except InputError as error:
            assert "\n" not in str(error)


def test_a_faulty_run_among_others_is_reported_and_left_out(out: Path):
    good = saved(out)
    bad = saved(out)
    (bad / "run.json").write_text("{")
    runs, faults = load_runs([out])
    assert [run.id for run in runs] == [good.name]
    assert len(faults) == 1 and bad.name in faults[0]


def test_last_is_the_run_that_began_latest_for_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever its directory is called, whatever the zone of its time, and beside a file that cannot be read."""
    begun = {"a-first": "2026-03-01T09:00:00+00:00", "m-latest": "2026-03-01T08:00:00-05:00",
             "z-oldest": "2026-02-28T23:00:00.000+00:00"}  # fmt: skip
    for name, created in begun.items():
        (tmp_path / name).mkdir()
        save_run(msgspec.structs.replace(make_run(step=[1.0] * 6), id=name, created=created), tmp_path / name)
    (tmp_path / "zz-damaged").mkdir()
    (tmp_path / "zz-damaged" / "run.json").write_text("{")
    latest = tmp_path / "m-latest"
    assert last_run(tmp_path) == latest / "run.json" and find_run("last", tmp_path).id == "m-latest"
    assert find_place("last", tmp_path) == latest
    assert [run.id for run, _ in side_named("last", tmp_path).runs] == ["m-latest"]
    monkeypatch.chdir(tmp_path.parent)
    assert [run.id for run in listed_runs([Path("last")], tmp_path)] == ["m-latest"]
    assert last_run(tmp_path / "nowhere") is None


def test_the_time_at_which_a_run_began_is_found_wherever_it_stands_in_the_file(out: Path):
    first, second = saved(out), saved(out, created="2026-06-01T00:00:00+00:00", of=workload(seq_len=32))
    fields = msgspec.json.decode((second / "run.json").read_bytes())
    created = fields.pop("created")
    (second / "run.json").write_bytes(msgspec.json.encode({**fields, "created": created}))
    assert last_run(out) == second / "run.json" and first.name < second.name


def test_runs_are_found_by_a_part_of_their_name(out: Path):
    first, second = saved(out), saved(out, of=workload(seq_len=32))
    assert find_run("last", out).id == second.name
    assert find_run("-s32-", out).id == second.name
    assert find_run(str(first), out).id == first.name
    with pytest.raises(InputError, match=r"2 runs in .* match"):
        find_run("tiny", out)
    with pytest.raises(InputError, match="no run named 'huge'"):
        find_run("huge", out)


def test_a_place_that_cannot_be_written_is_known_before_measuring(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(InputError, match=r"cannot write runs to .*--runs"):
        create_run_directory(blocked, workload())
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="cannot write runs"):
            create_run_directory(tmp_path / "runs", workload())
        tmp_path.chmod(0o700)


def in_a_process_with_little_disk(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code where no file may grow beyond 4 kB: what a full disk does to a write, done by the kernel."""
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    return subprocess.run(
        [sys.executable, "-c", limited + textwrap.dedent(code)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},  # it would be cut, too
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_full_disk_loses_nothing_that_was_measured(tmp_path: Path):
    result = in_a_process_with_little_disk(
        f"""
        from pathlib import Path
        from stepscope.core.errors import StepscopeError
        from stepscope.core.run_directory import create_run_directory, save_run
        from tests.conftest import make_run
        run = make_run(step=[1.0] * 1000)
        directory = create_run_directory(Path({str(tmp_path)!r}) / "runs", run.workload)
        try:
            save_run(run, directory)
        except StepscopeError as error:
            print(error)
        assert list(directory.iterdir()) == [], "half a file was left"
        """,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "cannot write" in result.stdout and "stands above" in result.stdout
    rescued = msgspec.json.decode(result.stderr.encode())
    assert len(rescued["samples"]["step"]["values_s"]) == 1000


def test_a_run_that_cannot_go_to_its_place_goes_to_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = make_run(step=[1.0] * 4)
    with pytest.raises(Exception, match="the run was saved as") as caught:
        save_run(run, tmp_path / "gone")
    assert load_run(Path(str(caught.value).rpartition(" ")[2])) == run


def test_the_refuge_is_private_and_its_name_is_nobodys_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = make_run(step=[1.0] * 4)
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / f"stepscope-{run.id}.json").symlink_to(tmp_path / "theirs")
    refuges = []
    for _ in range(2):
        with pytest.raises(Exception, match="the run was saved as") as caught:
            save_run(run, tmp_path / "gone")
        refuges.append(Path(str(caught.value).rpartition(" ")[2]))
    assert len(set(refuges)) == 2 and all(load_run(refuge.parent) == run for refuge in refuges)
    assert all(refuge.parent.stat().st_mode & 0o777 == 0o700 for refuge in refuges)
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.slow
def test_directories_that_vanish_while_they_are_walked_are_left_out():
    assert churn.main(["--seconds", "3"]) == 0


def test_many_runs_of_one_workload_in_one_millisecond(out: Path):
    now = datetime.now(UTC)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create_run_directory(out, workload(), now), range(40)))
    assert len(set(made)) == 40
