"""Run directories that come from another machine."""

from pathlib import Path

import msgspec
import pytest

from stepscope.core.errors import StepscopeError
from stepscope.core.run import Run
from stepscope.core.run_directory import create_run_directory, load_run, load_runs, save_run
from stepscope.engine.cluster import land, pack
from tests.conftest import make_run


def measured(out: Path, step: float) -> Run:
    directory = create_run_directory(out, make_run().workload)
    run = make_run(step=[step] * 3, id=directory.name)
    save_run(run, directory)
    (directory / "log.txt").write_text(f"took {step}")
    return run


def test_a_run_lands_as_it_was_with_all_its_files(tmp_path: Path):
    there, home = tmp_path / "there", tmp_path / "home"
    run = measured(there, 0.5)
    (there / run.id / "deeper").mkdir()
    (there / run.id / "deeper" / "file").write_bytes(b"\x00\xff")
    (there / "without-a-run").mkdir()
    (directory,) = land(pack(there), home)
    assert directory == home / run.id and load_run(directory) == run
    for file in ("run.json", "log.txt", "deeper/file"):
        assert (directory / file).read_bytes() == (there / run.id / file).read_bytes()
    assert [path.name for path in home.iterdir()] == [run.id]


def test_a_run_that_cannot_land_finds_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = measured(tmp_path / "there", 0.5)
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StepscopeError, match=r"cannot write .*; the run was saved as \S+") as caught:
        land(pack(tmp_path / "there"), tmp_path / "home")
    assert load_run(Path(str(caught.value).rpartition(" ")[2])) == run


def test_runs_of_one_name_from_two_nodes_are_both_kept(tmp_path: Path):
    home = tmp_path / "home"
    first = measured(tmp_path / "a", 0.5)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / first.id).rename(tmp_path / "b" / first.id)
    changed = msgspec.structs.replace(first, tag="other")
    save_run(changed, tmp_path / "b" / first.id)
    carried = pack(tmp_path / "b")
    save_run(first, tmp_path / "b" / first.id)
    (one,), (other,) = land(pack(tmp_path / "b"), home), land(carried, home)
    assert one.name == first.id and other.name != first.id
    assert [load_run(one).tag, load_run(other).tag] == [None, "other"]
    assert {run.id for run in load_runs([home])[0]} == {one.name, other.name}
    assert (other / "log.txt").is_file()
