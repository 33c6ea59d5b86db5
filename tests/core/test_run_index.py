"""The index of a folder of runs: the answers are those of the runs themselves, whatever happens to either."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.run_directory import INDEX_FILE, RUN_FILE, load_runs, save_run, write_atomically
from stepscope.runs import index as run_index
from stepscope.runs.answer import answer_list
from stepscope.runs.index import list_runs
from stepscope.runs.tables import TableQuery, answer_table
from tests.conftest import make_run

QUERY = TableQuery(
    rows=("tag", "seq_len"),
    columns=("dtype",),
    values=("step", "forward-backward", "host", "first_step", "largest_step", "peak_memory", "mfu_datasheet"),
    statistic="median-interval",
)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "change", "remove", "damage", "list"]), st.integers(0, 9)), max_size=12
)


def put(folder: Path, number: int, scale: float = 1.0) -> Path:
    """Write run `number` into the folder."""
    times = [scale * (0.1 + number / 100 + step / 1000) for step in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)]
    run = msgspec.structs.replace(
        make_run(forward=times, backward=times, optimizer=times),
        id=f"r{number}", created=f"2026-01-{number + 1:02d}T00:00:00+00:00", tag=f"t{number}",
    )  # fmt: skip
    directory = folder / f"20260101T00000{number}.000-r"
    directory.mkdir(exist_ok=True)
    save_run(run, directory)
    return directory


def assert_same(folder: Path):
    listing, (runs, faults) = list_runs([folder], fewest=1), load_runs([folder])
    assert listing.faults == faults
    assert listing.notes == []
    assert answer_list(listing.runs) == answer_list(runs)
    if runs:
        for bare in (True, False):
            assert answer_table(listing.runs, QUERY, bare=bare) == answer_table(runs, QUERY, bare=bare)


@settings(max_examples=40, deadline=None)
@given(ACTIONS)
def test_answers_are_those_of_the_runs_after_any_changes(actions: list[tuple[str, int]]):
    folder = Path(tempfile.mkdtemp())
    try:
        for turn, (action, number) in enumerate(actions):
            directory = folder / f"20260101T00000{number}.000-r"
            if action == "add":
                put(folder, number)
            elif action == "change" and directory.exists():
                put(folder, number, 1 + turn / 10)
            elif action == "remove":
                shutil.rmtree(directory, ignore_errors=True)
            elif action == "damage" and directory.exists():
                (directory / RUN_FILE).write_text("{")
            else:
                assert_same(folder)
        assert_same(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(5):
        put(tmp_path, number)
    list_runs([tmp_path], fewest=1)
    assert (tmp_path / INDEX_FILE).is_file()
    return tmp_path


def test_a_known_run_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[Path] = []
    load = run_index.load_run

    def counted(path: Path) -> Run:
        read.append(path)
        return load(path)

    monkeypatch.setattr(run_index, "load_run", counted)
    put(folder, 3, 2.0)
    list_runs([folder], fewest=1)
    assert [path.parent.name for path in read] == ["20260101T000003.000-r"]


def test_a_run_that_was_changed_in_place_with_its_time_set_back_is_read_again(folder: Path):
    """Size, time of modification and inode are then as before: `cp -p`, `rsync --inplace` and `touch -r` do so."""
    file = folder / "20260101T000002.000-r" / RUN_FILE
    before, data = file.stat(), file.read_bytes()
    with file.open("r+b") as stream:
        stream.write(data.replace(b'"tag": "t2"', b'"tag": "t9"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert [run.tag for run in list_runs([folder], fewest=1).runs] == ["t0", "t1", "t9", "t3", "t4"]


def test_samples_in_an_index_that_are_none_name_the_file_to_delete(folder: Path):
    """By its checksum it is whole: somebody made it so."""
    file = folder / INDEX_FILE
    index = msgspec.msgpack.decode(file.read_bytes()[8:], type=run_index._Index)
    index.entries[0].samples["step"] = msgspec.Raw(b"\x05")
    payload = msgspec.msgpack.encode(index)
    file.write_bytes(run_index._checksum(payload) + payload)
    with pytest.raises(InputError, match=f"{INDEX_FILE} is damaged: delete it"):
        answer_list(list_runs([folder], fewest=1).runs)


@pytest.mark.parametrize("place", [999, -1])
def test_an_index_whose_places_lead_nowhere_is_damaged(folder: Path, place: int):
    """By its checksum it is whole: somebody made it so."""
    file = folder / INDEX_FILE
    index = msgspec.msgpack.decode(file.read_bytes()[8:], type=run_index._Index)
    index.entries[0] = msgspec.structs.replace(index.entries[0], workload=place)
    payload = msgspec.msgpack.encode(index)
    file.write_bytes(run_index._checksum(memoryview(payload)) + payload)
    listing = list_runs([folder], fewest=1)
    assert listing.notes == [f"{file} was damaged: the runs themselves were read"]
    assert answer_list(listing.runs) == answer_list(load_runs([folder])[0])


@pytest.mark.parametrize("place", [0, 9, 60, -1])
def test_a_damaged_index_is_told_and_the_runs_are_read(folder: Path, place: int):
    data = bytearray((folder / INDEX_FILE).read_bytes())
    data[place] ^= 1
    (folder / INDEX_FILE).write_bytes(data)
    listing = list_runs([folder], fewest=1)
    assert answer_list(listing.runs) == answer_list(load_runs([folder])[0])
    assert listing.notes == [f"{folder / INDEX_FILE} was damaged: the runs themselves were read"]
    assert_same(folder)  # it was written again


@pytest.mark.parametrize("data", [b"", b"short"])
def test_an_index_that_was_cut_short(folder: Path, data: bytes):
    (folder / INDEX_FILE).write_bytes(data)
    assert len(list_runs([folder], fewest=1).notes) == 1
    assert_same(folder)


def test_an_index_of_another_version_is_replaced_without_a_word(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def other() -> str:
        return "0 0 of another"

    with monkeypatch.context() as patched:
        patched.setattr(run_index, "_made_by", other)
        list_runs([folder], fewest=1)
        assert b"of another" in (folder / INDEX_FILE).read_bytes()
    assert_same(folder)
    assert b"of another" not in (folder / INDEX_FILE).read_bytes()


def test_a_folder_where_nothing_can_be_written(folder: Path):
    (folder / INDEX_FILE).unlink()
    (folder / INDEX_FILE).mkdir()  # a rename onto a directory fails for root too
    listing = list_runs([folder], fewest=1)
    assert len(listing.runs) == 5
    assert any("cannot write" in note for note in listing.notes)
    assert [path.name for path in folder.iterdir() if "tmp" in path.name] == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX")
def test_a_disk_without_room(folder: Path):
    (folder / INDEX_FILE).unlink()
    code = (
        "import resource, sys; from pathlib import Path; from stepscope.runs.index import list_runs;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "found = list_runs([Path(sys.argv[1])], fewest=1); print(len(found.runs)); print(found.notes[0])"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "5" and "cannot write" in done.stdout
    assert [path.name for path in folder.iterdir() if "index" in path.name] == []


def test_several_writers_at_once(folder: Path):
    code = (
        "import sys; from pathlib import Path; from stepscope.runs.index import list_runs;"
        "print({len(list_runs([Path(sys.argv[1])], fewest=1).runs) for _ in range(30)})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) for _ in range(3)]
    while any(writer.poll() is None for writer in writers):
        (folder / INDEX_FILE).unlink(missing_ok=True)  # each has to write it again
        put(folder, 2)
        assert_same(folder)
    assert [writer.communicate()[0] for writer in writers] == [b"{5}\n"] * 3


def test_a_run_written_again_with_the_size_and_time_of_before(folder: Path):
    file = folder / "20260101T000003.000-r" / RUN_FILE
    before = file.stat()
    text = file.read_bytes().replace(b'"tag":"t3"', b'"tag":"t9"').replace(b'"tag": "t3"', b'"tag": "t9"')
    write_atomically(text, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert [run.tag for run in list_runs([folder], fewest=1).runs][3] == "t9"


def test_few_runs_have_no_index(tmp_path: Path):
    put(tmp_path, 1)
    assert len(list_runs([tmp_path]).runs) == 1
    assert not (tmp_path / INDEX_FILE).exists()


def test_a_run_named_twice_is_listed_once(folder: Path):
    inside = folder / "20260101T000002.000-r"
    (folder / "link").mkdir()
    (folder / "link" / RUN_FILE).symlink_to(inside / RUN_FILE)
    listing = list_runs([folder, inside, inside / RUN_FILE], fewest=1)
    assert answer_list(listing.runs) == answer_list(load_runs([folder, inside, inside / RUN_FILE])[0])
