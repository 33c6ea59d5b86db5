"""`stepscope trace` of several ranks, as a user types it."""

import gzip
import json
from pathlib import Path

from tests.command import stepscope
from tests.traces.ranks.jobs import Made


def test_a_folder_files_and_a_rank(tmp_path: Path):
    paths = Made(ranks=2, later_ns={1: 5_000_000}).write(tmp_path / "job")
    folder, files = (stepscope("trace", *words, "--json") for words in ([tmp_path / "job"], paths))
    assert folder.returncode == files.returncode == 0
    document = json.loads(folder.stdout)
    assert document == json.loads(files.stdout)
    assert {row["rank"]: row["waiting_ns"] for row in document["ranks"]} == {0: 20_000_000, 1: 0}
    assert document["collectives"][0]["kind"] == "all-reduce"
    paths[0].write_text("")  # a rank that is not asked for is not read
    one = stepscope("trace", tmp_path / "job", "--rank", "1")
    assert one.returncode == 0 and "rank 1 of 2" in one.stdout.splitlines()[0]
    alone = stepscope("trace", paths[1])
    assert alone.stdout == one.stdout


def test_what_cannot_be_is_one_line(tmp_path: Path):
    paths = Made().write(tmp_path)
    refused = {
        ("--rank", "7"): "none of these captures is of rank 7: choose one of 0, 1",
        ("--step", "1"): "what chooses a part is for one capture, and these are 2: choose one with --rank",
        ("--top", "3"): "--top is for one capture, and these are 2: choose one with --rank",
        (str(paths[0]),): f"{paths[0]} is named twice: name each capture once",
    }
    for words, said in refused.items():
        done = stepscope("trace", *paths, *words)
        assert done.returncode == 2 and said in done.stderr.splitlines()[-1], done.stderr
    link = tmp_path / "link.json"
    link.symlink_to(paths[0])
    done = stepscope("trace", paths[0], link)
    assert done.returncode == 2 and f"{link} is named twice" in done.stderr, done.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    done = stepscope("trace", empty)
    assert done.returncode == 2 and "this directory holds no trace" in done.stderr


def test_a_damaged_rank_is_named_and_the_others_go_on(tmp_path: Path):
    paths = Made(ranks=3).write(tmp_path)
    paths[1].write_text('{"traceEvents": [{"ph": "X", ')
    done = stepscope("trace", tmp_path, "--json")
    assert done.returncode == 2 and f"left out: {paths[1]}: the JSON ends" in done.stderr, done.stderr
    assert [row["rank"] for row in json.loads(done.stdout)["ranks"]] == [0, 2]
    paths[0].write_text("")
    alone = stepscope("trace", tmp_path, "--json")
    assert alone.returncode == 2 and not alone.stdout and "job_0.json" in alone.stderr, alone.stderr


def test_a_job_against_another_rank_by_rank(tmp_path: Path):
    Made(ranks=2).write(tmp_path / "before")
    Made(ranks=2, later_ns={1: 5_000_000}).write(tmp_path / "after")
    done = stepscope("trace", tmp_path / "after", "--against", tmp_path / "before", "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["ranks"]
    assert (first["before"]["waiting"], first["after"]["waiting"]) == (0, 5_000_000)
    assert second["after"]["computation"] - second["before"]["computation"] == 5_000_000
    shown = stepscope("trace", tmp_path / "after", "--against", tmp_path / "before")
    assert "waiting by rank, ms a step" in shown.stdout
    alone = stepscope("trace", tmp_path / "after", "--against", tmp_path / "before" / "job_0.json")
    assert alone.returncode == 2 and "name a folder of the same ranks" in alone.stderr


def test_all_ranks_in_one_file_for_perfetto(tmp_path: Path):
    Made(ranks=2, clocks_ns={1: 40_000_000}).write(tmp_path / "job")
    out = tmp_path / "job.json.gz"
    done = stepscope("trace", tmp_path / "job", "--perfetto", out, "--json")
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    groups = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.split(":")[0] for name in groups.values()} == {"rank 0", "rank 1"}
    ends = {
        groups[event["pid"]][:6]: event["ts"] + event["dur"]
        for event in events
        if event["ph"] == "X" and "AllReduce" in event["name"]
    }
    assert ends["rank 0"] == ends["rank 1"]  # on one clock
