"""A model's step with each attention: groups, what moved, the text, and a sweep read again."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.analysis.attention_steps import (
    FAMILIES,
    MEMORY,
    MISSING,
    MOVED,
    TIMES,
    StepCell,
    answer_steps,
    group_cells,
)
from stepscope.analysis.trace_digest import FamilyRow, TraceDigest
from stepscope.cli.app import app
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, PhaseMemory
from stepscope.core.experiment import decode_experiment, encode_experiment
from stepscope.core.model_config import configure
from stepscope.core.run import Failure, Run
from stepscope.core.run_directory import load_runs
from stepscope.report.experiment import render_experiment
from stepscope.studies.attention_steps import step_cells, step_sizes_for
from tests.conftest import make_run, workload

GOLDEN = Path(__file__).parent / "golden" / "study-attention-steps.txt"
MS = 1_000_000
GIB = 2**30


def stepped(attention: str, forward_ms: float, backward_ms: float, peak: float, saved: float, **changes: Any) -> Run:
    """Six steps with an optimizer of 8 ms; memory in GiB."""
    memory = PhaseMemory(
        parameter_bytes=GIB, forward_peak=round(peak * GIB), saved_for_backward=round(saved * GIB),
        backward_peak=round((peak - 1) * GIB),
    )  # fmt: skip
    run = make_run(
        workload(attention=attention, dtype="bf16", seq_len=1024),
        forward=[forward_ms * 1e-3] * 6, backward=[backward_ms * 1e-3] * 6, optimizer=[8e-3] * 6,
        evidence=Evidence(memory=memory), **changes,
    )  # fmt: skip
    assert run.environment is not None
    environment = msgspec.structs.replace(run.environment, device_type="cuda", device_name="a GPU")
    return msgspec.structs.replace(run, environment=environment)


def digest(**families_ms: float) -> TraceDigest:
    """Half of each family in forward, half in backward."""
    rows = tuple(
        FamilyRow(family=family, phase=phase, calls=1, busy_ns=ms * MS / 2)
        for family, ms in families_ms.items()
        for phase in ("forward", "backward")
    )
    busy = int(sum(families_ms.values()) * MS)
    fields: dict[str, Any] = {
        "profiler": "Kineto", "steps": 1, "kernels": 30, "busy_ns": busy, "union_ns": busy, "unattributed_ns": 0,
        "copies": 0, "copies_ns": 0, "gemm_fraction": 0.5, "phases": (), "families": rows, "top": (),
        "top_without_products": (), "attention": (), "findings": (),
    }  # fmt: skip
    return TraceDigest(**fields)


CELLS = [
    StepCell(run=stepped("flash", 20, 36, 10, 4), digest=digest(products=40, softmax=0, attention=6)),
    StepCell(run=stepped("reference", 40, 80, 18, 11), digest=digest(products=60, softmax=30, copies=10)),
    StepCell(
        run=msgspec.structs.replace(
            stepped("unsafe", 1, 1, 1, 1), status="out-of-memory", failure=Failure(message="no more", during="measure")
        )
    ),
]


def test_the_reference_is_the_base_whatever_the_order():
    (group,), (missing,) = group_cells(CELLS)
    assert [cell.attention for cell in group.cells] == ["reference", "flash"] and missing.attention == "unsafe"
    ratio = group.speed_up(group.cells[1])
    assert ratio is not None and ratio.value == pytest.approx(128 / 64) and group.speed_up(group.base) is None


def test_what_moved_by_hand():
    (group,), _ = group_cells(CELLS)
    moves = dict(group.moves(group.cells[1]))
    assert list(moves) == ["softmax", "products", "copies", "attention"]
    assert moves == pytest.approx({"softmax": -0.030, "products": -0.020, "copies": -0.010, "attention": 0.006})
    assert group.moves(StepCell(run=CELLS[0].run)) == []


def test_other_models_dtypes_and_devices_are_other_groups():
    other = msgspec.structs.replace(
        CELLS[0].run, workload=workload(attention="flash", dtype="fp16", seq_len=1024), id="another"
    )
    groups, _ = group_cells([*CELLS, StepCell(run=other)])
    assert [len(group.cells) for group in groups] == [2, 1]
    newer = StepCell(run=msgspec.structs.replace(CELLS[0].run, created="2027-01-01"))
    (group,), _ = group_cells([newer, *CELLS[:2]])
    assert group.cells[1].digest is not None, "a run with a capture goes before a newer one without"


def test_tables_and_sentences():
    answer = answer_steps(CELLS, unread=2)
    times = answer.table(TIMES)
    assert times.rows[1][1:6] == ("flash", 20.0, 36.0, 8.0, 64.0) and times.rows[1][8] == 2.0
    assert answer.table(MEMORY).rows[1][2:] == (10.0, 10.0, 4.0, -7.0)
    assert answer.table(FAMILIES).rows[0][1:] == ("products", 60.0, 40.0)
    assert answer.table(FAMILIES).rows[-1][1:] == ("all kernels", 100.0, 46.0)
    assert len(answer.table(MOVED).rows) == 4 and answer.table(MISSING).rows[0][1] == "unsafe"
    found = {finding.kind: finding.sentence for finding in answer.findings}
    assert "is 2 (2 to 2) times as fast as with reference" in found["faster"]
    assert "7.00 GiB less is saved for backward" in found["memory"] and "18.00 GiB to 10.00 GiB" in found["memory"]
    assert found["moved"].endswith("softmax -30.00 ms, products -20.00 ms, copies -10.00 ms, attention +6.00 ms.")
    assert "2 captures were not read" in found["unread"] and "unsafe ran out of memory" in found["out of memory"]


def test_text_of_the_answer():
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    from rich.console import Console

    console = Console(width=200, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(render_experiment(answer_steps(CELLS)))
    text = "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
    if os.environ.get("STEPSCOPE_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    answer = answer_steps(CELLS)
    assert decode_experiment(encode_experiment(answer).encode(), "here") == answer


def test_nothing_measured_is_said_with_its_reason():
    with pytest.raises(InputError, match=r"no step was measured: .*unsafe ended out-of-memory .*no more"):
        answer_steps(CELLS[2:])
    with pytest.raises(InputError, match="no step was measured"):
        answer_steps([])


def test_cells_differ_in_attention_alone():
    sizes = step_sizes_for("cuda")
    assert sizes.implementations == "reference,sdpa-cudnn,flash" and sizes.seq_len == "1024"
    cells = step_cells(
        models=[configure("small"), configure("tiny")], seq_lens=[64], batch_size=2, dtypes=["bf16"],
        attentions=["reference", "flash"], settings=CELLS[0].run.settings,
    )  # fmt: skip
    named = [(cell.workload.model.name, cell.workload.attention, cell.workload.phase) for cell in cells]
    assert named == [
        ("tiny", "reference", "train"), ("tiny", "flash", "train"),
        ("small", "reference", "train"), ("small", "flash", "train"),
    ]  # fmt: skip


def test_a_step_is_measured_kept_and_read_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "runs"
    command = ["study", "attention", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--steps", "2"]
    app([*command, "--implementations", "sdpa", "--out", str(out)], standalone_mode=False)
    first = capfd.readouterr().out
    assert TIMES in first and FAMILIES in first
    assert [run.workload.attention for run in load_runs([out])[0]] == ["sdpa"]
    app(["study", "attention", "--read", str(out)], standalone_mode=False)
    assert capfd.readouterr().out == first
