"""Conditions on the fields of runs: how they are written, and which runs meet them."""

from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.core.run_directory import save_run
from stepscope.questions.compare import side_named
from stepscope.runs.fields import conditions_in, meeting
from tests.command import stepscope
from tests.conftest import make_run, mini


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("dtype=fp32", [("dtype", ("fp32",))]),
        ("dtype=fp32,bf16", [("dtype", ("fp32", "bf16"))]),
        ("dtype=fp32,model=small", [("dtype", ("fp32",)), ("model", ("small",))]),
        ("dtype=fp32,bf16,model=small,xl,seq_len=512",
         [("dtype", ("fp32", "bf16")), ("model", ("small", "xl")), ("seq_len", ("512",))]),
        (" dtype = fp32 , bf16 , model = small ", [("dtype", ("fp32", "bf16")), ("model", ("small",))]),
        ("parallel=ddp,fsdp2:reshard=no,model=xl", [("parallel", ("ddp", "fsdp2:reshard=no")), ("model", ("xl",))]),
        ("tag=lr=3e-4,decay=0.1,dtype=bf16", [("tag", ("lr=3e-4", "decay=0.1")), ("dtype", ("bf16",))]),
        ("arg.rope=theta=1,scale=2,arg.width=16", [("arg.rope", ("theta=1", "scale=2")), ("arg.width", ("16",))]),
        ("dtype=fp32,,bf16,", [("dtype", ("fp32", "bf16"))]),
    ],
)  # fmt: skip
def test_a_comma_before_the_name_of_a_field_begins_a_condition(text: str, conditions: list[object]):
    assert conditions_in(text) == conditions


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dtype", "cannot read --where 'dtype'"), ("dtype=", "cannot read --where"), ("", "cannot read --where"),
        ("dtype=fp32,model=", "cannot read --where"), ("fp32,dtype=bf16", "cannot read --where"),
        ("dtype=fp32,modle=small", "unknown field 'modle'"), ("colour=red", "unknown field 'colour'"),
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text: str, says: str):
    with pytest.raises(InputError, match=says):
        conditions_in(text)


def test_a_value_that_no_run_has_is_said():
    runs = [make_run(mini(dtype=dtype), step=[1.0]) for dtype in ("fp32", "bf16")]
    kept, nowhere = meeting(runs, conditions_in("dtype=fp32,fp99,seq_len=16"))
    assert kept == runs[:1] and nowhere == ["None of 2 runs has dtype=fp99."]


def test_every_verb_reads_conditions_alike(tmp_path: Path):
    cells = [mini(dtype=dtype, seq_len=seq_len) for dtype in ("fp32", "bf16") for seq_len in (16, 32)]
    for number, cell in enumerate(cells):
        directory = tmp_path / f"2026010{number + 1}T000000.000-{cell.key}"
        directory.mkdir()
        save_run(make_run(cell, forward=[1.0] * 6, step=[1.0 + number] * 6), directory)
    for verb in ("table", "history"):
        done = stepscope(verb, tmp_path, "--where", "dtype=fp32,seq_len=32", "--style", "csv")
        assert done.returncode == 0 and done.stdout.count("\n") == 2, done.stdout
        wrong = stepscope(verb, tmp_path, "--where", "dtype=fp32,seqlen=32")
        assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "unknown field 'seqlen'" in wrong.stderr
    for text in ("dtype=fp32,seq_len=32", "dtype=fp32:seq_len=32"):
        ((run, _),) = side_named(f"{tmp_path}:{text}", tmp_path).runs
        assert run.workload == cells[1]
    with pytest.raises(InputError, match=r"no run there has parallel=fsdp2:reshard=no"):
        side_named(f"{tmp_path}:parallel=fsdp2:reshard=no", tmp_path)
    with pytest.raises(InputError, match="unknown field 'modle'"):
        side_named(f"{tmp_path}:dtype=fp32:modle=tiny", tmp_path)
