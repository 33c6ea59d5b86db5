"""`stepscope study collectives`, with two real ranks over gloo."""

import json
from pathlib import Path

import msgspec

from stepscope.core.collective_figures import CollectiveFits
from tests.command import stepscope


def test_two_ranks_time_every_collective(tmp_path: Path):
    asked = ("study", "collectives", "--ranks", 2, "--backend", "gloo", "--sizes", "1KiB,10kB", "--seconds", 0)
    done = stepscope(*asked, "--json", STEPSCOPE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    times = next(table for table in answer["tables"] if table["title"] == "Times")
    assert len(times["rows"]) == 12
    for _, backend, ranks, size, seconds, algorithm, bus, share, samples in times["rows"]:
        assert (backend, ranks, share, samples) == ("gloo", 2, None, 5)
        assert size in (1024, 10000) and seconds > 0
        assert abs(algorithm - size / seconds) < 1e-6 * algorithm and bus in (algorithm, algorithm / 2)
    (kept,) = tmp_path.glob("collectives-*.json")
    assert len(msgspec.json.decode(kept.read_bytes(), type=CollectiveFits).fits) == 6

    stored = tmp_path / "answer.json"
    stored.write_text(done.stdout)
    again = stepscope("study", "collectives", "--from", stored, "--only", "latency")
    assert again.returncode == 0 and "reduce-scatter" in again.stdout


def test_what_cannot_be_is_one_line():
    for options, said in (
        (("--ranks", "1"), "--ranks"),
        (("--backend", "mpi"), "mpi"),
        (("--sizes", "1KiB", "--largest", "1MiB"), "leave one out"),
        (("--largest", "10"), "sizes begin at 1 KiB"),
        (("--backend", "nccl", "--ranks", "999"), "cuda"),
    ):
        done = stepscope("study", "collectives", *options)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
