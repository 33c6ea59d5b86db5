"""A model's step with each attention: groups, what moved, the text, and a sweep read again."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.app.cli.app import app
from stepscope.core.answer import Finding, decode_answer, encode_answer
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, PhaseMemory
from stepscope.core.model_config import configure
from stepscope.core.run import Failure, Run
from stepscope.core.run_directory import load_runs
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.attention_step import (
    FAMILIES,
    MEMORY,
    MISSING,
    MOVED,
    ON_CPU,
    ON_GPU,
    TIMES,
    StepCell,
    StepGroup,
    StepPair,
    answer_steps,
    compare_steps,
    usual_attentions,
)
from stepscope.questions.comparison import compared_cells
from stepscope.traces.captures.digest import FamilyRow, PlaceRow, TraceDigest, load_digest
from tests.command import stepscope
from tests.conftest import make_run, workload
from tests.shown import check_golden, shown
from tests.textbook import textbook

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "study-attention-steps.txt"
MS = 1_000_000
GIB = 2**30


def stepped(
    attention: str, forward_ms: float, backward_ms: float, peak: float, saved: float, *, optimizer_ms: float = 8,
    **changes: Any,
) -> Run:  # fmt: skip
    """Six steps; memory in GiB."""
    memory = PhaseMemory(
        parameter_bytes=GIB, forward_peak=round(peak * GIB), saved_for_backward=round(saved * GIB),
        backward_peak=round((peak - 1) * GIB),
    )  # fmt: skip
    run = make_run(
        workload(attention=attention, dtype="bf16", seq_len=1024),
        forward=[forward_ms * 1e-3] * 6, backward=[backward_ms * 1e-3] * 6, optimizer=[optimizer_ms * 1e-3] * 6,
        evidence=Evidence(memory=memory), **changes,
    )  # fmt: skip
    assert run.environment is not None
    environment = msgspec.structs.replace(run.environment, device_type="cuda", device_name="a GPU")
    return msgspec.structs.replace(run, environment=environment)


def digest(inside: dict[str, float] | None = None, **families_ms: float) -> TraceDigest:
    """Half of each family in forward, half in backward; `inside`, the part of it in attention itself, the rest in
    attention's projections.
    """
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
    if inside is not None:
        fields["places"] = tuple(
            PlaceRow(module=module, family=family, busy_ns=ms * MS)
            for family, whole in families_ms.items()
            for module, ms in (
                ("blocks.*.attention", inside.get(family, 0.0)),
                ("blocks.*.attention.query", whole - inside.get(family, 0.0)),
            )
        )
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


def group_cells(cells: list[StepCell]) -> tuple[list[StepGroup], tuple[StepCell, ...]]:
    """The groups, and the cells without a time."""
    study, groups = compare_steps(cells)
    return groups, study.unmeasured


def test_the_reference_is_the_base_whatever_the_order():
    (group,), (missing,) = group_cells(CELLS)
    assert [cell.value for cell in group.cells] == ["reference", "flash"] and missing.value == "unsafe"
    (pair,) = group.pairs
    assert (pair.base, pair.other) == group.cells and pair.speed_up.value == pytest.approx(128 / 64)


def test_what_moved_by_hand():
    (group,), _ = group_cells(CELLS)
    moves = dict(group.pairs[0].moves)
    assert list(moves) == ["softmax", "products", "copies", "attention"]
    assert moves == pytest.approx({"softmax": -0.030, "products": -0.020, "copies": -0.010, "attention": 0.006})
    assert StepPair(base=group.base, other=StepCell(run=CELLS[0].run)).moves == []


def test_other_models_dtypes_and_devices_are_other_groups():
    other = msgspec.structs.replace(
        CELLS[0].run, workload=workload(attention="flash", dtype="fp16", seq_len=1024), id="another"
    )
    groups, _ = group_cells([*CELLS, StepCell(run=other)])
    assert [len(group.cells) for group in groups] == [2, 1]
    newer = StepCell(run=msgspec.structs.replace(CELLS[0].run, created="2027-01-01"))
    (group,), _ = group_cells([newer, *CELLS[:2]])
    assert group.cells[1].digest is not None, "a run with a capture goes before a newer one without"


def test_a_step_within_a_memory_limit_is_not_set_beside_one_without():
    """A limit makes the allocator give its cache back and ask again, which takes time that is no attention's."""
    reference, flash = stepped("reference", 40, 80, 18, 11), stepped("flash", 20, 36, 10, 4)
    assert flash.environment is not None
    limited = msgspec.structs.replace(flash.environment, memory_limit_bytes=12 * GIB)
    groups, _ = group_cells(
        [StepCell(run=reference), StepCell(run=msgspec.structs.replace(flash, environment=limited))]
    )
    assert [[cell.value for cell in group.cells] for group in groups] == [["reference"], ["flash"]]


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
    assert "moves by -54.00 ms in families that attention has a part in: softmax -30.00 ms, products" in found["moved"]
    assert "kernels fill 100.0 of 128.0 ms with reference, 46.00 of 64.00 ms with flash" in found["launch-bound"]
    assert "2 captures were not read" in found["unread"] and "unsafe ran out of memory" in found["out of memory"]


def test_a_cell_of_another_plan_has_another_name():
    run = CELLS[1].run
    plan = {"checkpointing": "every-1", "compile": "default", "optimizer": "adamw-fused"}
    other = StepCell(run=msgspec.structs.replace(run, workload=workload(dtype="bf16", seq_len=1024, **plan)))
    assert other.name == f"{CELLS[1].name} compile-default adamw-fused checkpoint-every-1"


def test_what_auto_picked_is_said():
    run = stepped("auto", 20, 36, 10, 4)
    run = msgspec.structs.replace(run, evidence=msgspec.structs.replace(run.evidence, attention="sdpa-cudnn"))
    assert said(CELLS[1], StepCell(run=run))["picked"] == f"auto is sdpa-cudnn in {CELLS[1].name}."
    assert "picked" not in said(*CELLS)


def test_one_attention_alone_and_doubted_runs_are_said():
    assert "one attention alone was measured there (reference)" in said(CELLS[1])["nothing to compare"]
    doubt = Finding(kind="gpu-shared", severity="warning", sentence="Others.")
    doubted = msgspec.structs.replace(CELLS[0].run, findings=(doubt,))
    found = said(CELLS[1], StepCell(run=doubted))
    assert "1 of the 2 steps compared are doubted by their own checks: gpu-shared (1)." in found["doubtful-runs"]
    assert "doubtful-runs" not in said(*CELLS) and "nothing to compare" not in said(*CELLS)


def test_other_software_and_runs_left_out_are_said():
    flash = CELLS[0].run
    assert flash.environment is not None
    versions = {**flash.environment.versions, "torch": "0.1"}
    elsewhere = msgspec.structs.replace(
        flash, environment=msgspec.structs.replace(flash.environment, versions=versions)
    )
    other = said(CELLS[1], StepCell(run=elsewhere))["different-environments"]
    assert "with flash and reference were measured in different environments: torch" in other and "0.1" in other
    again = msgspec.structs.replace(CELLS[0].run, created="2027-01-01")
    assert "1 more runs of these cells were left out" in said(*CELLS, StepCell(run=again))["several-runs"]
    assert not {"different-environments", "several-runs"} & set(said(*CELLS))


def said(*cells: StepCell) -> dict[str, str]:
    return {finding.kind: finding.sentence for finding in answer_steps(cells).findings}


def test_what_attention_moved_stands_apart_from_what_moved_elsewhere():
    base = StepCell(run=stepped("reference", 40, 80, 18, 11), digest=digest({"softmax": 30}, softmax=32, products=60))
    ours = StepCell(run=stepped("flash", 20, 36, 10, 4), digest=digest({"fused": 6}, softmax=3, products=57, fused=6))
    (group,), _ = group_cells([base, ours])
    assert dict(group.pairs[0].moves_inside) == pytest.approx({"softmax": -0.030, "fused": 0.006, "products": 0})
    assert ours.outside_s == pytest.approx(0.060) and base.outside_s == pytest.approx(0.062)
    moved = said(base, ours)["moved"]
    assert moved.endswith(
        "by -24.00 ms in attention itself: softmax -30.00 ms, fused +6.00 ms; in all else, where both do the same, by "
        "-2.00 ms."
    )
    (softmax, *_), table = answer_steps([base, ours]).table(MOVED).rows, answer_steps([base, ours]).table(FAMILIES)
    assert softmax[2:] == ("softmax", -29.0, -30.0, 1.0)
    assert [row[1:] for row in table.rows[-3:]] == [
        ("in attention itself", 30.0, 6.0), ("in all else", 62.0, 60.0), ("all kernels", 92.0, 66.0),
    ]  # fmt: skip


def test_noise_is_not_credited_to_attention():
    """What moves in attention is smaller than what moves where both do the same."""
    base = StepCell(run=stepped("reference", 40, 80, 18, 11), digest=digest({"softmax": 2}, softmax=2, products=60))
    ours = StepCell(run=stepped("flash", 38, 80, 10, 4), digest=digest({"fused": 1}, fused=1, products=63))
    found = said(base, ours)
    assert "moved" not in found
    assert found["not distinguishable"].endswith(
        "by -1.00 ms in attention itself, and by +3.00 ms in all else, where both do the same: what attention moves is "
        "not distinguishable from noise."
    )


def test_a_step_is_faster_by_more_than_the_optimizer_differs_or_not_at_all():
    base = StepCell(run=stepped("reference", 40, 80, 18, 11))
    gained = StepCell(run=stepped("flash", 30, 80, 10, 4, optimizer_ms=8.1))
    (group,), _ = group_cells([base, gained])
    assert group.noise == pytest.approx(0.0125) and not group.why_alike(group.pairs[0])
    assert "faster" in said(base, gained)
    noisy = StepCell(run=stepped("flash", 32, 80, 10, 4, optimizer_ms=10))  # the step -4.7 %, the optimizer +25 %
    found = said(base, noisy)
    assert "faster" not in found and "slower" not in found
    assert (
        "the steps differ by 4.7 %, and the optimizer, which runs no attention, by up to 25.0 %"
        in (found["not distinguishable"])
    )


def test_overlapping_intervals_are_not_told_apart():
    def run(attention: str, forward_ms: list[float]) -> Run:
        return make_run(
            workload(attention=attention), forward=[ms * 1e-3 for ms in forward_ms], backward=[0.08] * 6,
            optimizer=[0.008] * 6,
        )  # fmt: skip

    base, ours = run("reference", [40, 48, 42, 47, 44, 41]), run("flash", [39, 47, 40, 46, 43, 42])
    sentence = said(StepCell(run=base), StepCell(run=ours))["not distinguishable"]
    assert "of their ratio" in sentence and sentence.endswith("holds 1.")


def test_the_fastest_is_named_with_those_it_is_not_told_apart_from():
    three = [
        StepCell(run=stepped("reference", 40, 80, 18, 11)),
        StepCell(run=stepped("flash", 20, 36, 10, 4)),
        StepCell(run=stepped("sdpa", 20, 38, 10, 4, optimizer_ms=8.4)),
    ]
    assert said(*three)["fastest"].endswith(
        "the shortest of 3 steps is that with flash, 64.00 ms, not distinguishable from sdpa."
    )
    assert "fastest" not in said(*three[:2])


def test_text_of_the_answer():
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    text = "\n".join(line.rstrip() for line in shown(answer_steps(CELLS)).splitlines()) + "\n"
    check_golden(text, GOLDEN)
    answer = answer_steps(CELLS)
    assert decode_answer(encode_answer(answer).encode(), "here") == answer


def test_nothing_measured_is_said_with_its_reason():
    with pytest.raises(InputError, match=r"no step was measured: .*unsafe ended out-of-memory .*no more"):
        answer_steps(CELLS[2:])
    with pytest.raises(InputError, match="no step was measured"):
        answer_steps([])


def test_cells_differ_in_attention_alone():
    assert usual_attentions("cuda") == ("reference", "sdpa-cudnn", "flash")
    assert (ON_GPU.seq_len, ON_CPU.seq_len) == (1024, 64)
    cells = compared_cells(
        models=[configure("small"), configure("tiny")], seq_lens=[64], batch_size=2, dtypes=["bf16"],
        attention=["reference", "flash"], settings=CELLS[0].run.settings,
    )  # fmt: skip
    named = [
        (cell.workload.model.name, cell.workload.attention, cell.workload.phase)
        for cell in cells
        if isinstance(cell.workload, TextbookWorkload)
    ]
    assert named == [
        ("tiny", "reference", "train"), ("tiny", "flash", "train"),
        ("small", "reference", "train"), ("small", "flash", "train"),
    ]  # fmt: skip


@pytest.mark.long
def test_a_step_is_measured_kept_and_read_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "runs"
    command = ["study", "attention-step", "--device", "cpu", "--model", "tiny", "--seq-len", "16", "--steps", "2"]
    app([*command, "--attention", "sdpa", "--runs", str(out)], standalone_mode=False)
    first = capfd.readouterr().out
    assert TIMES in first and FAMILIES in first
    assert [textbook(run).attention for run in load_runs([out])[0]] == ["sdpa"]
    app(["study", "attention-step", "--from", str(out), "--keep-digests"], standalone_mode=False)
    assert capfd.readouterr().out == first
    app(["study", "attention", "--from", str(out)], standalone_mode=False)
    assert capfd.readouterr().out == first
    (file,) = out.glob("*/trace-kineto.json")
    kept = load_digest(file.parent)
    assert kept is not None and kept.steps == 5
    modules = {place.module for place in kept.places}
    assert {"blocks.*.attention", "blocks.*.attention.query", "embedding"} <= modules
    by_family = {row.family: 0.0 for row in kept.families}
    for row in (*kept.families, *kept.places):
        by_family[row.family] += row.busy_ns * (1 if hasattr(row, "phase") else -1)
    assert by_family == pytest.approx(dict.fromkeys(by_family, 0.0), abs=1), "places make up the families"


def test_folders_without_a_step_say_what_to_read(tmp_path: Path):
    def read(*words: str) -> str:
        with pytest.raises(InputError) as raised:
            app(["study", "attention", "--from", str(tmp_path), *words], standalone_mode=False)
        return str(raised.value)

    assert read() == f"no run of a training step in {tmp_path}: give one that this study filled"
    (tmp_path / "gate.json").touch()
    assert read().endswith(f"give one of its files, as in {tmp_path / 'gate.json'}")


def test_steps_of_stored_runs_are_drawn(tmp_path: Path):
    runs = Path(__file__).parents[2] / "results" / "h200" / "attention-steps"
    done = stepscope("study", "attention-step", "--from", runs, "--save", tmp_path / "steps.svg", "--only", "findings")
    assert done.returncode == 0, done.stderr
    assert ">flash</text>" in (tmp_path / "steps.svg").read_text()
