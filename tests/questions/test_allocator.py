"""`study allocator`: one step without a setting of the allocator and with it."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope.app.cli.app import app
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, PhaseMemory
from stepscope.core.run import Run
from stepscope.core.units import GIB
from stepscope.questions.allocator import EXPANDABLE, VARIABLES, allocator_setting, answer_allocator
from tests.command import stepscope
from tests.conftest import make_run


def run_that_reserved(reserved: int | None, step_s: float = 0.1) -> Run:
    memory = PhaseMemory(parameter_bytes=1, after_parameters=GIB, forward_peak=4 * GIB, reserved_peak=reserved)
    return make_run(step=[step_s] * 10, forward=[step_s] * 10, evidence=Evidence(memory=memory))


def test_what_is_no_longer_reserved():
    answer = answer_allocator([run_that_reserved(6 * GIB), run_that_reserved(5 * GIB)], EXPANDABLE)
    (table,) = answer.tables
    assert [row[:4] for row in table.rows] == [
        ("as it is", 6 * GIB, 4 * GIB, 2 * GIB),
        (EXPANDABLE, 5 * GIB, 4 * GIB, GIB),
    ]
    (found,) = answer.findings
    assert found.evidence["before"] == 6 * GIB and found.evidence["after"] == 5 * GIB
    assert "reserves 5.00 GiB at the peak, without it 6.00 GiB (-16.7 %)" in found.sentence
    assert found.remedy == f"export PYTORCH_ALLOC_CONF={EXPANDABLE}"


def test_a_setting_that_gives_nothing():
    answer = answer_allocator([run_that_reserved(5 * GIB), run_that_reserved(5 * GIB)], EXPANDABLE)
    assert [found.kind for found in answer.findings] == ["allocator-setting", "no-gain"]
    assert "1.00 GiB of what is reserved at the peak, 20.0 %, is unused" in answer.findings[1].sentence


def test_a_run_that_ended_early():
    lost = msgspec.structs.replace(run_that_reserved(None), status="out-of-memory", samples={})
    answer = answer_allocator([run_that_reserved(5 * GIB), lost], EXPANDABLE)
    assert [found.kind for found in answer.findings] == ["not-compared"]


def test_processes_have_the_setting_beside_the_environments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLES[1], "max_split_size_mb:64")
    monkeypatch.delenv(VARIABLES[0], raising=False)
    with allocator_setting(EXPANDABLE):
        said = f"import os; print(os.environ[{VARIABLES[0]!r}])"
        found = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout
    assert found == f"max_split_size_mb:64,{EXPANDABLE}\n"
    assert os.environ[VARIABLES[1]] == "max_split_size_mb:64" and VARIABLES[0] not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "this study needs a GPU"),
        (["--setting", "fast"], "cannot read --setting 'fast': write name:value"),
        (["--model", "huge"], "unknown model 'huge'"),
    ],
    ids=["cpu", "setting", "model"],
)
def test_wrong_input_is_one_line(arguments: list[str], words: str):
    with pytest.raises(InputError) as refused:
        app(["study", "allocator", *arguments], standalone_mode=False)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_setting_that_is_there_already(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLES[0], "expandable_segments:False")
    with pytest.raises(InputError, match="expandable_segments is set in this environment already"):
        app(["study", "allocator"], standalone_mode=False)


@pytest.mark.gpu
def test_measured_on_a_gpu(tmp_path: Path):
    done = stepscope(
        "study", "allocator", "--model", "tiny", "--seq-len", "128", "--steps", "10", "--no-profile", "--runs", tmp_path
    )
    assert done.returncode in (0, 1), done.stderr
    assert "reserves" in done.stdout and EXPANDABLE in done.stdout
