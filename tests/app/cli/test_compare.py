"""`stepscope compare`, on steps that are measured here: a planted delay is seen and named, and a build fails by it."""

import json
from pathlib import Path

import pytest

from stepscope.core.run_directory import load_runs
from tests.command import stepscope

ROOT = Path(__file__).parents[3]
STORED = ROOT / "results" / "h200"
DELAYED = ROOT / "docs" / "examples" / "delayed.py"
QUICK = ("--steps", "12", "--warmup", "3", "--no-profile", "--device", "cpu")


@pytest.mark.long
@pytest.mark.slow
def test_a_slower_backward_fails_a_build_by_name(tmp_path: Path):
    done = stepscope(
        "run", "--module", f"{DELAYED}:make", "--against", "--arg backward_ms=80", "--repeat", "5", *QUICK,
        "--runs", tmp_path, timeout=400,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    runs, _ = load_runs([tmp_path])
    base, slow = dict.fromkeys(run.repeat.set for run in runs if run.repeat)
    if not base < slow:
        base, slow = slow, base
    assert slow == f"{base}-against"
    compared = ("compare", f"set:{base}", f"set:{slow}", "--across", "arguments", "--runs", tmp_path)
    found = stepscope(*compared, "--fail-if-slower", "3%")
    assert found.returncode == 1 and "slower" in found.stdout and "most of it in backward" in found.stdout
    assert "slower than 3.0 % allows" in found.stderr and "most of it in backward" in found.stderr
    told = json.loads(stepscope(*compared, "--json").stdout)
    (pair,) = told["pairs"]
    assert pair["verdict"] == "slower" and pair["change"]["paired"] and pair["change"]["processes"] == [5, 5]
    assert sum(row[2] - row[1] for row in pair["buckets"]) > 0
    faster = stepscope("compare", f"set:{slow}", f"set:{base}", "--across", "arguments", "--runs", tmp_path,
                       "--fail-if-slower", "3%", "--strict")  # fmt: skip
    assert faster.returncode == 0 and "faster" in faster.stdout


def test_stored_runs_in_every_style(tmp_path: Path):
    sides = ("compare", STORED / "plain", STORED / "tf32", "--across", "dtype")
    plain = stepscope(*sides)
    assert plain.returncode == 0 and "fp32 to tf32 is 0.397 (-60.3 %)" in " ".join(plain.stdout.split())
    told = json.loads(stepscope(*sides, "--json").stdout)
    assert len(told["pairs"]) == 20 and {pair["verdict"] for pair in told["pairs"]} == {"none, fewer than 5"}
    for pair in told["pairs"]:
        assert sum(row[1] for row in pair["buckets"]) > 0 and pair["runs"][0] != pair["runs"][1]
    assert stepscope(*sides, "--style", "csv", "--only", "step of").stdout.count("\n") >= 21
    assert stepscope(*sides, "--save", tmp_path / "change.svg").returncode == 0
    assert (tmp_path / "change.svg").stat().st_size > 1000


def test_captures_say_which_work_and_which_modules_changed():
    place = STORED / "attention-steps"
    sides = [f"{place}:model=2.7B:seq_len=1024:attention={name}" for name in ("reference", "flash")]
    done = stepscope("compare", *sides, "--across", "attention")
    assert done.returncode == 0, done.stderr
    assert "captured work" in done.stdout and "modules" in done.stdout
    (pair,) = json.loads(stepscope("compare", *sides, "--across", "attention", "--json").stdout)["pairs"]
    assert len(pair["work"]) > 5 and len(pair["modules"]) > 3
    work, step = (sum(row[1] for row in pair[name]) for name in ("work", "buckets"))
    assert work == pytest.approx(step), "work and idle time are the step"
    idle = {row[0]: row[1] for row in pair["work"]}
    assert sum(row[1] for row in pair["modules"]) == pytest.approx(
        step - idle["device idle"] - idle.get("at the same time as other work", 0.0)
    )


def test_three_sides_have_one_base():
    place = STORED / "plain"
    done = stepscope("compare", place, place, STORED / "tf32", "--across", "dtype", "--json")
    assert [one["before"] for one in json.loads(done.stdout)] == [str(place)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((STORED / "plain",), "is one side"),
        ((STORED / "plain", "nothing-here"), "names no path, and no run, set, sweep, tag or commit"),
        ((STORED / "plain", STORED / "tf32"), "--across dtype"),
        ((STORED / "plain", STORED / "tf32", "--across", "colour"), "unknown across 'colour'"),
        ((STORED / "plain", STORED / "plain", "--value", "sideways"), "unknown part of the step"),
        ((STORED / "plain", STORED / "plain", "--fail-if-slower", "much"), "--fail-if-slower"),
        ((STORED / "plain", STORED / "plain", "--strict"), "--strict belongs to a limit, as --fail-if-slower"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(arguments: tuple[object, ...], said: str):
    done = stepscope("compare", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 1)])
def test_what_cannot_be_decided_passes_unless_it_is_strict(strict: tuple[str, ...], code: int):
    done = stepscope("compare", STORED / "plain", STORED / "plain", "--fail-if-slower", "3%", *strict)
    assert done.returncode == code and "20 limits cannot be decided with what was run: " in done.stderr
    assert done.stderr.count(" by more than 3.0 %: too few processes") == 3  # and 17 more
