"""The command line as its users meet it: exit codes, one clear line, nothing on stdout but the result."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from stepscope.core.run import Run
from stepscope.core.run_directory import load_runs
from tests.command import python, stepscope
from tests.conftest import cache_of_tests

pytestmark = pytest.mark.slow

KNOWN = {
    "small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "xl": 1_998_235_200, "2.7B": 3_406_809_600,
}  # fmt: skip
QUICK = ["--d-model", "32", "--d-ff", "64", "--layers", "2", "--heads", "2", "--seq-len", "16", "--device", "cpu"]
QUICK += ["--warmup", "1", "--steps", "60"]


def test_models_json_has_the_parameter_counts():
    result = stepscope("models", "--json")
    listed = {row["name"]: row for row in json.loads(result.stdout)}
    assert {name: listed[name]["parameters"] for name in KNOWN} == KNOWN
    assert listed["2.7B"]["d_model"] == 2560 and listed["2.7B"]["head_dim"] == 80
    assert {row["cs336-2026"]: name for name, row in listed.items() if row["cs336-2026"]}["xl"] == "2.7B"
    assert (listed["xl"]["cs336-2025"], listed["xl"]["cs336-2026"]) == ("xl", None)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One real run by the command line, with its directory of runs."""
    out = tmp_path_factory.mktemp("cli") / "runs"
    cache = str(cache_of_tests(tmp_path_factory))
    return out, stepscope("run", *QUICK, "--runs", str(out), "--tag", "mine", "--json", STEPSCOPE_CACHE=cache)


def test_run_json_is_the_run_and_nothing_else(measured: tuple[Path, subprocess.CompletedProcess[str]]):
    out, result = measured
    assert result.returncode == 0, result.stderr
    run = msgspec.json.decode(result.stdout, type=Run)
    (stored,), faults = load_runs([out])
    assert run == stored and not faults
    assert run.status == "done" and run.tag == "mine" and run.samples["step"].count == 60
    assert set(run.samples) == {"step", "host", "forward", "backward", "optimizer"}
    assert run.evidence.profile and run.evidence.observation and run.evidence.precision and run.ceilings
    assert run.environment and run.environment.host and run.environment.versions["torch"]
    assert run.summary["mfu_measured"] and run.summary["mfu_datasheet"] is None
    assert "Traceback" not in result.stderr


def test_the_run_is_listed_shown_and_tabled(measured: tuple[Path, subprocess.CompletedProcess[str]]):
    out, _ = measured
    listed = stepscope("ls", "--runs", str(out))
    assert listed.returncode == 0 and "mine" in listed.stdout and "done" in listed.stdout
    assert "no runs" in stepscope("ls", "--runs", str(out), "--tag", "other").stdout
    shown = stepscope("show", "last", "--runs", str(out))
    assert shown.returncode == 0
    for word in ("parameters (d_model 32", "forward", "backward", "optimizer", "95 % interval", "tokens/s", "MFU"):
        assert word in shown.stdout
    again = stepscope("show", "last", "--runs", str(out), "--json")
    assert msgspec.json.decode(again.stdout, type=Run) == load_runs([out])[0][0]
    table = stepscope("table", str(out), "--tag", "mine", "--value", "forward,backward", "--stat", "mean-std")
    assert table.returncode == 0 and "±" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--model", "smal"], "unknown model 'smal': choose one of tiny, small"),
        (["fit", "--model", "org/name-1B"], "with `hf download org/name-1B config.json` and ask again"),
        (["run", "--dtype", "fp64"], "unknown dtype 'fp64'"),
        (["run", "--seq-len", "0"], "seq_len is 0: it must be a whole number of at least 1"),
        (["run", "--batch-size", "-3"], "batch_size is -3"),
        (["run", "--heads", "7"], "heads 7 do not divide d_model 128"),
        (["run", "--attention", "flash3"], "unknown attention 'flash3'"),
        (["run", "--compile", "hard"], "unknown compile mode 'hard'"),
        (["run", "--optimizer", "sgd"], "unknown optimizer 'sgd'"),
        (["run", "--device", "tpu"], "unknown device 'tpu'"),
        (["run", "--device", "cuda:99"], "no GPU for --device cuda:99"),
        (["run", "--memory", "lots"], "cannot read the size 'lots'"),
        (["run", "--device", "cpu", "--memory", "1GiB"], "does not apply to a CPU"),
        (["run", "--peak-flops", "much"], "cannot read the rate 'much'"),
        (["run", "--device", "cpu", "--dtype", "tf32"], "tf32 needs an NVIDIA GPU"),
        (["run", "--device", "cpu", "--attention", "sdpa-cudnn"], "sdpa-cudnn does not run on cpu"),
        (["run", "--runs", "/dev/null/runs", *QUICK], "cannot write runs to /dev/null/runs"),
        (["run", "--steps", "many"], "Invalid value for '--steps'"),
        (["run", "--warmup", "-1"], "Invalid value for '--warmup'"),
        (["run", "--record", "vtune"], "unknown record 'vtune': choose one of memory, kineto, nsys"),
        (["run", "--record", "kineto", "--trace-steps", "0"], "trace-steps is 0: it must be 1 to 1000"),
        (["run", "--trace-stacks"], "--trace-stacks belongs to --record kineto"),
        (["run", "--memory-steps", "3"], "--memory-steps belongs to --record memory: add it"),
        (["run", "--record", "memory", "--memory-steps", "2"], "memory-steps is 2: it must be 1 for where the memory"),
        (["run", "--colour"], "--colour"),
        (["study", "attention-gate", "--heads", "2"], "No such option: --heads"),
        (["study", "attention-step", "--head-dim", "2"], "No such option: --head-dim"),
        (["study", "attention", "--tag", "mine"], "No such option: --tag"),
        (["study", "attention", "--every-shape"], "No such option: --every-shape: study attention has none, and study"),
        (["trace", "--parallel", "ddp"], "--parallel: trace has none, and run, sweep, fit, tune and 1 more have it"),
        (["compare", "a", "b", "--where", "x=1"], "study kernels have it: name a folder, a sweep or a tag"),
        (["run", "--seqlen", "4"], "No such option '--seqlen'. (Did you mean one of: "),
        (["sweep", "--seq-len", "12,x"], "cannot read --seq-len '12,x'"),
        (["sweep", "--model", ","], "--model is empty"),
        (["sweep", "missing.py"], "no recipe at missing.py"),
        (["show", "nothing-like-it"], "no run named 'nothing-like-it'"),
        (["ls", "no/such/place"], "no runs at no/such/place"),
        (["table", "no/such/place"], "no runs at no/such/place"),
        (["table", ".", "--rows", "size"], "unknown field 'size'"),
        (["table", ".", "--style", "latex"], "unknown style 'latex'"),
        (["table", ".", "--where", "dtype"], "cannot read --where 'dtype'"),
        (["table", "."], "no runs to show"),
        (["study", "warmup", "--warmup", "a"], "cannot read --warmup 'a'"),
        (["study", "warmup", "--warmup", "-1"], "warmup_floor is -1"),
        (["device", "--device", "cuda:99"], "no GPU for --device cuda:99"),
        (["nonsense"], "nonsense"),
        (["run", "--model", ""], "unknown model ''"),
        (["run", "--tag", ""], "the tag is ''"),
        (["run", "--tag", "a\x1b[31mb"], "the tag is 'a\\x1b[31mb'"),
        (["run", "--tag", "two\nlines"], "printable characters"),
        (["run", "--memory", "9" * 400], "out of range"),
        (["run", "--seed", "9" * 30], "seed is"),
        (["run", "--d-model", "99999999999", "--heads", "7"], "d_model is 99999999999"),
        (["run", "--phase", "forward", "--optimizer", "sgd"], "unknown optimizer 'sgd'"),
        (
            ["run", "--checkpointing", "some"],
            "unknown checkpointing 'some': choose none, selective, selective-K for any K below the number of layers, ",
        ),
        (["run", "--checkpointing", "attention"], "attention reference is no such operator: choose --attention sdpa, "),
        (["run", "--checkpointing", "every-0"], "unknown checkpointing 'every-0'"),
        (["run", "--attention", "sdpa", "--checkpointing", "selective-0"], "unknown checkpointing 'selective-0'"),
        (
            ["run", "--model", "tiny", "--attention", "sdpa", "--checkpointing", "selective-4"],
            "choose selective-1 to ",
        ),
        (["run", "--checkpointing", "selective-1"], "attention reference is no such operator: choose --attention sdpa"),
        (["run", "--model", "tiny", "--checkpointing", "every-5"], "choose every-1 to every-4"),
        (["run", "--device", "cpu", "--checkpointing", "every-5"], "choose every-1 to every-4"),
        (["run", "--batch-size", "6", "--accumulation", "4"], "choose accumulation 3 or 6"),
        (["run", "--accumulation", "0"], "accumulation is 0"),
        (["run", "--clip", "0"], "--clip holds 0: write numbers above zero"),
        (["run", "--clip", "-1"], "--clip holds -1: write numbers above zero"),
        (["run", "--clip", "nan"], "--clip holds 'nan', which is not finite"),
        (["sweep", "--clip", "none,much"], "--clip holds 'much', which is no number"),
        (["plan", "--clip", "1"], "--clip says nothing with plan"),
        (["run", "--accumulation", "half"], "Invalid value for '--accumulation'"),
        (["sweep", "--accumulation", "1,3"], "batch_size 4 cannot be split into 3 equal micro-batches"),
        (["sweep", "--checkpointing", "none,some"], "unknown checkpointing 'some'"),
        (["sweep", "recipe.py", "--checkpointing", "none"], "leave out --checkpointing"),
        (["run", "--seconds", "nan"], "seconds"),
        (["run", "--runs", "x" * 300, *QUICK], "cannot write runs to"),
        (["sweep", "recipe.py", "--model", "small"], "leave out --model"),
        (["sweep", "--runs", "x" * 300], "cannot write runs to"),
        (["show", "x" * 300], "no run named"),
        (["ls", "x" * 300], "no runs at"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line_and_code_2(arguments: list[str], says: str, tmp_path: Path):
    result = stepscope(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("stepscope: ") and says in line
    assert not list(tmp_path.rglob("run.json"))


def test_where_the_directory_is_gone_is_one_line(tmp_path: Path):
    gone = tmp_path / "gone"
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m stepscope run --device cpu"
    gone.mkdir()
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "stepscope: the current directory is gone: change to one that is there\n"


def test_out_of_memory_is_code_3_and_a_run_that_says_where(tmp_path: Path):
    sizes = ("--d-model", "16", "--heads", "8", "--seq-len", "2200000", "--batch-size", "1")  # 128 TiB of scores
    result = stepscope("run", *QUICK, *sizes, "--runs", str(tmp_path))
    assert result.returncode == 3, result.stderr
    assert "out-of-memory (warm-up, forward, blocks.0.attention)" in result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    (run,), _ = load_runs([tmp_path])
    assert run.status == "out-of-memory" and run.artifacts["failure"] == "failure.txt"
    (traceback,) = tmp_path.rglob("failure.txt")
    assert 'File "stepscope/training/attention/written_out.py"' in traceback.read_text()
    assert str(Path(__file__).parents[3]) not in traceback.read_text()


def run_until(stages: tuple[str, ...], *arguments: str) -> "subprocess.Popen[str]":
    """`stepscope run`, as far as the first word of any of these stages."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if any(stage in line for stage in stages):
            break
    return process


def test_ctrl_c_leaves_a_usable_run(tmp_path: Path):
    process = run_until(("measure",), *QUICK, "--steps", "10000000", "--runs", str(tmp_path))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted (measure" in stdout and "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path])
    assert run.status == "interrupted" and run.samples["step"].count >= 1
    assert run.failure is not None and run.failure.message == "interrupted by SIGINT"


def test_ctrl_c_names_what_a_process_of_its_own_kept(tmp_path: Path):
    command = ("run", *QUICK, "--steps", "10000000", "--repeat", "2", "--runs", str(tmp_path))
    with subprocess.Popen([sys.executable, "-m", "stepscope", *command], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/run.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.0)  # the run is on disk when it begins, before it is warm
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    (run,), _ = load_runs([tmp_path])
    assert run.status == "interrupted" and run.samples["step"].count >= 1
    assert stderr.splitlines()[-1] == f"stepscope: interrupted, kept in {tmp_path / run.id}"


@pytest.mark.long
def test_ctrl_c_while_observing_keeps_the_times(tmp_path: Path):
    process = run_until(("profile", "ceiling"), *QUICK, "--runs", str(tmp_path))
    for _ in range(3):  # an impatient user
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    _, stderr = process.communicate(timeout=60)
    assert "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path])
    assert run.status == "done" and run.samples["step"].count == 60
    # Caught while observing, the run says so. Later there was nothing left to interrupt but the report, and while
    # Python takes itself down not even that.
    assert process.returncode == 130 if run.failure else process.returncode in (0, 130, -signal.SIGINT)


@pytest.mark.long
def test_a_display_that_is_gone_is_no_failure_of_the_device(tmp_path: Path):
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "stepscope", "run", *QUICK, "--no-profile", "--runs", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=full, text=True, check=False,
        )  # fmt: skip
    assert result.returncode == 0 and "backward" in result.stdout


def test_streams_that_are_closed_full_or_narrow(measured: tuple[Path, subprocess.CompletedProcess[str]]):
    out, _ = measured
    closed = subprocess.run(
        f"{sys.executable} -m stepscope models >&-", shell=True, capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    full = subprocess.run(
        f"{sys.executable} -m stepscope models > /dev/full", shell=True, capture_output=True, text=True, check=False
    )
    assert full.returncode == 2 and full.stderr.startswith("stepscope: cannot write the result to stdout")
    narrow = stepscope("show", "last", "--runs", str(out), PYTHONIOENCODING="ascii")
    assert narrow.returncode == 0 and "forward" in narrow.stdout


def test_help_without_arguments_is_the_whole_help():
    result = stepscope()
    assert result.returncode == 2 and "sweep" in result.stderr and "table" in result.stderr


def test_hostile_run_files_are_one_line_each(tmp_path: Path, measured: tuple[Path, subprocess.CompletedProcess[str]]):
    out, _ = measured
    (good,) = out.rglob("run.json")
    text = good.read_text()
    hostile = {
        "deep": "[" * 200_000,
        "negative": text.replace('"values_s": [', '"values_s": [-1.0,', 1),
        "huge": text.replace('"values_s": [', '"values_s": [1e308,', 1),
    }
    for name, content in hostile.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
        result = stepscope("show", str(tmp_path / name))
        assert result.returncode == 2 and len(result.stderr.strip().splitlines()) == 1, result.stderr
    (tmp_path / "marked").mkdir()
    (tmp_path / "marked" / "run.json").write_text(text.replace('"tag": "mine"', '"tag": "[/bold]\\u001b[31m"'))
    listed = stepscope("ls", str(tmp_path))
    assert listed.returncode == 0 and "[/bold]" in listed.stdout and "\x1b" not in listed.stdout
    assert listed.stderr.count("left out") == 3


def test_a_step_with_checkpointing_and_accumulation(tmp_path: Path):
    said = ["--checkpointing", "every-2", "--accumulation", "2", "--optimizer", "adamw-bf16-state", "--clip", "0.5"]
    result = stepscope("run", *QUICK, *said, "--runs", str(tmp_path))
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "adamw-bf16-state, gradients clipped to a norm of 0.5, checkpointing every-2, 2 micro-batches of 2" in text
    assert "Checkpointing runs another" in text and "of hardware FLOPs" in text
    (run,), _ = load_runs([tmp_path])
    assert (run.workload.checkpointing, run.workload.accumulation, run.workload.clip) == ("every-2", 2, 0.5)
    assert run.evidence.updates is not None and (run.evidence.updates.gradient_norm or 0) > 0
    assert list(run.samples) == ["step", "host", "forward", "backward", "optimizer"]
    assert {len(samples.values_s) for samples in run.samples.values()} == {60}
    table = stepscope("table", str(tmp_path), "--rows", "checkpointing,accumulation,micro_batch_size", "--style", "csv")
    assert "every-2,2,2," in table.stdout


def test_a_failed_check_is_code_1(tmp_path: Path):
    # A peak stated far too low makes the measured rate impossible: an error that is certain to be found.
    result = stepscope("run", *QUICK, "--peak-flops", "1000", "--runs", str(tmp_path))
    assert result.returncode == 1, result.stderr
    assert "error impossible-rate" in result.stdout


BRIEFLY = """
import os, sys
from stepscope.app.cli.app import main
from stepscope.core.run import Settings
from stepscope.recording import ceilings

os.environ["STEPSCOPE_CACHE"] = sys.argv.pop(1)  # others judge their runs by what a device really reaches
ceilings._MATMUL_SIZES["cpu"] = (128, 256)
ceilings._TRIAL = ceilings._SUSTAINED["cpu"] = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, seconds=0)
main()
"""
"""The command, which takes its ceilings from a few small products. Products in 16 bits take a CPU long."""


def test_device_json(tmp_path: Path):
    device = ("-c", BRIEFLY, tmp_path / "cache", "device", "--device", "cpu", "--json")
    result = python(*device, cwd=tmp_path)
    report = json.loads(result.stdout)
    assert set(report["ceilings"]["matmul"]) == {"fp32", "bf16", "fp16"}
    assert all(ceiling["rate"] > 1e8 for ceiling in report["ceilings"]["matmul"].values())
    assert report["spec"] is None and report["ceilings"]["copy"]["rate"] > 1e8
    stored = python(*device)
    assert json.loads(stored.stdout)["ceilings"] == report["ceilings"]


def test_a_closed_pipe_is_no_failure(measured: tuple[Path, subprocess.CompletedProcess[str]]):
    out, _ = measured
    command = f"{sys.executable} -m stepscope show last --out {out} --json | head -c 1"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr and result.stdout == "{"


def test_warm_up_study(tmp_path: Path):
    result = stepscope(
        "study",
        "warmup",
        "--model",
        "tiny",
        "--seq-len",
        "8",
        "--steps",
        "3",
        "--warmup",
        "0,2",
        "--runs",
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "After 0 warm-up steps the mean step is" in result.stdout
    runs, _ = load_runs([tmp_path])
    assert sorted(len(run.samples["step"].warmup_s) for run in runs) == [0, 2]


def test_version():
    assert stepscope("--version").stdout == "stepscope 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--seconds", "inf"], "--seconds is inf: write a finite number"),
        (["run", "--save", "no/run.svg"], "cannot write the plot no/run.svg: there is no folder no, make it first"),
        (
            ["study", "formats", "--only", "Findings", "--style", "csv"],
            "--style csv writes tables, findings are sentences: ask for markdown",
        ),
        (["fit", "--against", "runs", "--tied"], "--against takes its workloads from the runs: leave out --tied"),
        *(
            (
                [*verb, "--trace-steps", "3"],
                "--trace-steps belongs to --record kineto or nsys: add one of them, or leave the steps out",
            )
            for verb in (["run"], ["sweep"], ["run", "--record", "memory"])
        ),
        *(
            ([verb, *empty], "--runs is empty: name a path, or write `--runs .` for the current directory")
            for verb, *empty in (["ls", "--runs", ""], ["run", "--runs="], ["show", "last", "--runs", ""])
        ),
        *(
            (
                ["run", "--against", empty],
                f"--against {empty!r} names no run: it takes a run's name, or options of the workload in which the "
                'other step differs, as in --against "--compile default"',
            )
            for empty in ("", " ")
        ),
        (["study", "formats", "--from", "a.json", "--value", "3"], "--value says nothing with --from: leave it out"),
        (
            ["study", "underflow", "--from", "a.json", "--model", "tiny"],
            "--model says nothing with --from: leave it out",
        ),
        (["study", "compile", "--from", "a", "--steps", "3"], "--steps says nothing with --from: leave it out"),
        (
            ["study", "attention-step", "--from", "a", "--model", "tiny", "--device", "cpu"],
            "--model says nothing with --from: leave it out",
        ),
        (
            ["study", "attention-gate", "--from", "a", "--dtype", "fp32"],
            "--dtype says nothing with --from: leave it out",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(arguments: list[str], says: str, tmp_path: Path):
    done = stepscope(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"stepscope: {says}\n")
    assert not list(tmp_path.iterdir())


def test_a_list_of_no_runs_is_a_word_for_people_and_nothing_for_programs(tmp_path: Path):
    assert stepscope("ls", tmp_path).stdout == "no runs\n"
    assert stepscope("ls", tmp_path, "--style", "csv").stdout.startswith("run,cell,status,step (s)")
    assert stepscope("ls", tmp_path, "--style", "jsonl").stdout == ""
    assert stepscope("ls", tmp_path, "--only", "models").returncode == 2


def test_a_completion_that_asks_for_nothing_is_one_line():
    done = stepscope(_STEPSCOPE_COMPLETE="bash_complete")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
