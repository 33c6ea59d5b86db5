"""benchmarks/attention.py: shapes as written, a race on a CPU, no time for a wrong one, the table of what is kept."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.attention import HEADS, SHAPES, main, parse_shape, render_markdown, rows_of

from benchmarks import flash_tune
from stepscope.core.attention_call import decode_timings
from stepscope.core.errors import InputError
from tests.questions.test_study_attention import STORY, timing, timings_by_hand

ROOT = Path(__file__).parents[2]


def test_shapes_are_read_as_they_are_written():
    shape, dtype = parse_shape("4,12,1024,64,causal")
    assert (shape.batch, shape.heads, shape.key_heads, shape.queries, shape.keys) == (4, 12, 12, 1024, 1024)
    assert shape.head_dim == 64 and shape.causal and dtype == "bf16"
    assert parse_shape("8,1,4096,64,full,fp32")[1] == "fp32" and not parse_shape("8,1,4096,64,full")[0].causal
    assert len({parse_shape(text) for text in SHAPES}) == 8
    for bad in (
        "",
        "1,2,3",
        "1,2,3,4,maybe",
        "1,2,3,4,full,int8",
        "0,2,3,4,full",
        "1,2,3,4,full,bf16,5",
        "a,b,c,d,full",
    ):
        with pytest.raises(InputError, match="cannot read --shape"):
            parse_shape(bad)


def test_rows_by_hand():
    rows = rows_of(STORY)
    assert all(len(row) == len(HEADS) for row in rows)
    by_name = {(row[0], row[2]): row for row in rows}
    ours, naive = by_name["1, 16, 4096, 64, causal", "flash"], by_name["1, 16, 4096, 64, causal", "reference"]
    assert (ours[3], ours[5], ours[-1]) == ("0.100", "0.300", "1.00") and naive[-1] == "8.00"
    assert ours[6] == "0.299 to 0.301"
    flops = 4 * 16 * 4096**2 * 64 / 2
    assert float(ours[7]) == pytest.approx(flops / 0.1e-3 / 1e12, rel=1e-3)
    assert float(ours[8]) == pytest.approx(3.5 * flops / 0.3e-3 / 1e12, rel=1e-3)
    assert by_name["1, 16, 1024, 64, causal", "sdpa-math"][3:] == ("wrong", *[""] * 7)


def test_what_must_be_said_is_said():
    text = render_markdown(STORY)
    assert "the gate saw right, on 2 calls" in text and "L2 cache is overwritten" in text
    assert "wrong; the gate: (1, 16, 203, 64, causal) in bf16: dq is not finite" in text
    of_cpu = msgspec.structs.replace(STORY.environment, device_type="cpu")
    interpreted = render_markdown(msgspec.structs.replace(STORY, environment=of_cpu))
    assert "interpreter ran flash, in Python: no times" in interpreted and "interpreter" not in text
    row = msgspec.structs.replace(timing("flash", 64, 1, 2), launches="shown")
    assert "launches of flash (1, 16, 64, 64, causal) in bf16 show" in render_markdown(timings_by_hand(row))


@pytest.mark.slow
def test_a_race_on_a_cpu_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kept = tmp_path / "race.json"
    command = ["--device", "cpu", "--only", "sdpa-flash", "sdpa-efficient", "--seconds", "11"]  # too few for ceilings
    sizes = ["--shape", "1,2,64,32,causal,bf16", "--shape", "1,2,64,32,full,fp32", "--cell-seconds", "0"]
    assert main([*command, *sizes, "--json", str(kept)]) == 0
    told = capsys.readouterr().out
    fused, lacking = decode_timings(kept.read_bytes(), "race").timings
    assert fused.outcome == "measured" and fused.checked == 5 and lacking.outcome == "not supported"
    assert main(["--show", str(kept)]) == 0
    assert capsys.readouterr().out == told and told.count("\n| ") == 4
    assert main([*command, "--shape", "1,2"]) == 2
    assert capsys.readouterr().err.startswith("cannot read --shape '1,2'")


def test_what_cannot_be_kept_read_or_timed_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--device", "cpu", "--json", str(tmp_path)]) == 2
    found = capsys.readouterr()
    assert found.err == f"cannot open {tmp_path}: Is a directory\n" and not found.out, "before anything is measured"
    assert main(["--show", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"cannot open {tmp_path / 'none.json'}: No such file or directory\n"
    assert main(["--device", "cpu", "--only", "sdpa-cudnn", "--shape", "1,1,32,16,full", "--seconds", "5"]) == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_a_name_that_no_race_has_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["--device", "cpu", "--only", "nope"]) == 2
    found = capsys.readouterr()
    assert not found.out and "unknown name of --only 'nope': choose one of flash, sdpa-flash" in found.err


@pytest.mark.parametrize("given", ["-1", "0", "nan", "inf", "soon", "1e30"])
@pytest.mark.parametrize("script", ["attention.py", "flash_tune.py", "flash_experiments.py"])
def test_seconds_that_nothing_can_be_measured_in_are_refused_in_a_line(script: str, given: str):
    """As scripts: nothing heavy is imported before the answer."""
    found = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--seconds", given],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 2 and not found.stdout
    assert found.stderr == f"--seconds is {given!r}: write seconds, above 0 to 10,000,000, as in --seconds 90\n"


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--cell-seconds", "-1", "--cell-seconds is '-1': write seconds, 0 to"),
        ("--workers", "-2", "--workers is -2: write 0"),
    ],
)
def test_other_numbers_are_refused_too(option: str, given: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--device", "cpu", option, given]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_shapes_of_tuning_are_read_as_they_are_written():
    assert flash_tune.parse_shape("1,16,16384,128") == (1, 16, 16384, 128)
    for bad in ("1,2,3", "1,2,3,0", "1,2,3,-4", "a,b,c,d", ""):
        with pytest.raises(InputError, match="a shape is batch,heads,sequence,head_dim"):
            flash_tune.parse_shape(bad)
