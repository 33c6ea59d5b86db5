"""`stepscope study kernels` on runs measured before, and on this machine."""

import json
from pathlib import Path

import pytest

from tests.command import Done, stepscope

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow

KEPT = Path(__file__).parents[3] / "results" / "h200" / "kernels"


def study(*arguments: object) -> Done:
    return stepscope("study", "kernels", *arguments)


def test_tables_of_digests_kept_with_the_results():
    done = study("--from", KEPT, "--where", "model=small", "--where", "dtype=fp32", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6  # three sequence lengths, inference and training
    assert {row["workload"]["model"]["name"] for row in rows} == {"small"}
    chosen = study("--from", KEPT, "--only", "d")
    assert chosen.stdout.startswith("(d) ") and "(a) " not in chosen.stdout
    sentences = study("--from", KEPT, "--only", "findings")
    assert sentences.stdout.startswith("Under the profiler a step takes") and "(d) " not in sentences.stdout
    by_the_other = study("--from", KEPT, "--tool", "nsys", "--only", "g", "--where", "model=small")
    assert "Nsight Systems and the other profiler" in by_the_other.stdout


def test_wrong_questions_fields_and_places(tmp_path: Path):
    for arguments, word in (
        (["--from", KEPT, "--only", "z"], "unknown question 'z'"),
        (["--from", KEPT, "--where", "modl=small"], "unknown field 'modl'"),
        (["--from", KEPT, "--where", "model=huge"], "meets --where model=huge: there are runs of small, medium, large"),
        (["--from", KEPT.parent / "tf32"], "no run here (of "),
        (["--from", KEPT, "--tool", "perf"], "unknown tool 'perf'"),
        (["--from", tmp_path / "none"], "no runs at"),
        (["--from", tmp_path], "no run here holds a capture"),
        (["--model", "tiny", "--seq-len", "x"], "--seq-len 'x'"),
    ):
        done = study(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert word in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.long
def test_captures_and_their_tables_here(tmp_path: Path):
    done = study(
        "--model", "tiny", "--seq-len", "16", "--batch-size", "1", "--phase", "train", "--steps", "2", "--warmup", "1",
        "--seconds", "0", "--runs", tmp_path, "--keep-digests",
    )  # fmt: skip
    assert "(a) " in done.stdout and "(f) " in done.stdout, done.stderr
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (run / "trace.kineto.json.gz").is_file()
    (run / "trace.kineto.json.gz").unlink()
    again = study("--from", tmp_path, "--only", "a")
    assert again.returncode == 0 and "tiny-b1-s16-fp32-train" in again.stdout


def test_every_style_and_what_is_printed_before_it_is_drawn(tmp_path: Path):
    chosen = ("--from", KEPT, "--where", "model=small", "--only", "d")
    rows = [json.loads(line) for line in study(*chosen, "--style", "jsonl").stdout.splitlines()]
    assert rows and all(isinstance(row, dict) for row in rows)
    assert study(*chosen, "--style", "markdown").stdout.startswith("**(d) ")
    both = study(*chosen, "--style", "csv", "--json")
    assert both.returncode == 2 and "two forms of one answer" in both.stderr
    drawn = study(*chosen, "--save", tmp_path / f"{'x' * 300}.svg")
    assert drawn.returncode == 2 and drawn.stdout == study(*chosen).stdout
    ignored = study("--from", KEPT, "--seq-len", "128", "--steps", "3")
    assert (ignored.returncode, ignored.stdout) == (2, "")
    assert ignored.stderr == "stepscope: --seq-len, --steps says nothing with --from: leave it out\n"


def test_a_raw_stream_is_read_where_no_digest_is_kept(tmp_path: Path):
    """A stream that is no stream is said to be that, and not passed over."""
    source = next(KEPT.glob("*/run.json"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_bytes(source.read_bytes())
    nothing = study("--from", tmp_path, "--tool", "nsys")
    assert "left out" not in nothing.stderr and "holds a capture" in nothing.stderr
    (tmp_path / "run" / "trace.qdstrm").write_bytes(b"no stream")
    read = study("--from", tmp_path, "--tool", "nsys")
    assert "left out" in read.stderr and "trace.qdstrm" in read.stderr


def test_stored_warm_ups_are_shown_again():
    shown = stepscope("study", "warmup", "--from", ROOT / "results" / "h200" / "warmup")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [line.split()[0] for line in shown.stdout.splitlines() if "±" in line and "std" not in line] == list("0125")
    none = stepscope("study", "warmup", "--from", ROOT / "results" / "h200" / "limit-80GiB")
    assert none.returncode == 2
    assert none.stderr.count("\n") == 1 and "was measured after several numbers of warm-up steps" in none.stderr
