"""`stepscope study speed`: the split of a gain by hand, cells that pair up, the answer from kept runs, and a sweep."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, PhaseMemory
from stepscope.core.run import Failure, Run, Settings
from stepscope.core.run_directory import create_run_directory, save_run
from stepscope.core.workloads import DTYPES
from stepscope.questions.speed import (
    LAW,
    MEMORY,
    MISSING,
    PARTS,
    TIMES,
    Parts,
    TimedCell,
    amdahl,
    answer_speed,
    dtypes_here,
    pair_up,
    speed_cells,
)
from stepscope.traces.captures.digest import FamilyRow, TraceDigest
from stepscope.traces.captures.summary import PhaseSummary
from tests.command import WITHOUT_POLARS, Done, stepscope
from tests.conftest import make_run, workload
from tests.questions.refused import check_refused
from tests.shown import check_golden

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results" / "h200"
GOLDEN = Path(__file__).parents[1] / "golden" / "study-speed.txt"
MS = 1_000_000


def parts(products: float, rest: float, between: float | None, **more: float) -> Parts:
    return Parts(products_s=products, rest_s=rest, between_s=between, **more)


def test_amdahl_by_hand():
    """fp32: 80 s of products, 15 of other kernels, 5 without. bf16: 8, 18, 10. So 100 s become 36."""
    law = amdahl(parts(80, 15, 5), parts(8, 18, 10))
    assert law.product_share == 0.8
    assert (law.products_speed_up, law.rest_speed_up) == (10, 15 / 18)
    assert law.whole == 100 / 36
    assert law.whole == pytest.approx(1 / (0.8 / 10 + 0.15 / (15 / 18) + 0.05 / (5 / 10)))
    assert (law.products_gain_s, law.rest_gain_s, law.between_gain_s) == (72, -3, -5)
    assert law.by_products_alone == pytest.approx(1 / (0.8 / 10 + 0.2)) == pytest.approx(100 / 28)
    assert law.limit == pytest.approx(1 / (1 - 0.8)) == 5
    assert law.kernels == 95 / 26


def test_amdahl_where_a_part_takes_no_time():
    law = amdahl(parts(80, 0, None), parts(20, 5, None))
    assert (law.products_speed_up, law.rest_speed_up, law.limit, law.between_gain_s) == (4, None, None, None)
    assert law.by_products_alone == 4 and law.whole == 80 / 25


seconds = st.floats(1e-6, 1e3)


@given(st.tuples(seconds, seconds, seconds), st.tuples(seconds, seconds, seconds))
def test_the_law_gives_the_whole_and_gains_add_up(base: tuple[float, ...], other: tuple[float, ...]):
    law = amdahl(parts(*base), parts(*other))
    total = law.base.total_s
    shares = [part / total for part in base]
    ratios = [a / b for a, b in zip(base, other, strict=True)]
    assert law.whole == pytest.approx(1 / sum(p / s for p, s in zip(shares, ratios, strict=True)))
    # Free products are better than faster ones, and no better than the law's bound.
    assert law.limit is not None and law.by_products_alone <= law.limit * (1 + 1e-9)


def digest(forward: tuple[int, int], backward: tuple[int, int], optimizer_ns: int = 0, **more: Any) -> TraceDigest:
    """(kernel time, of it products) of the phases, in milliseconds a step."""
    phases = [
        PhaseSummary(
            phase=name, kernels=10, busy_ns=busy * MS, gemm_ns=gemm * MS, range_ns=None, product_kernels=None,
            expected_products=None, unprofiled_s=None,
        )
        for name, (busy, gemm) in (("forward", forward), ("backward", backward), ("optimizer", (optimizer_ns, 0)))
    ]  # fmt: skip
    busy = int(sum(phase.busy_ns for phase in phases))
    fields: dict[str, Any] = {
        "profiler": "Kineto", "steps": 1, "kernels": 30, "busy_ns": busy, "union_ns": busy, "unattributed_ns": 0,
        "copies": 0, "copies_ns": 0, "gemm_fraction": 0.5, "phases": tuple(phases), "families": (), "top": (),
        "top_without_products": (), "attention": (), "findings": (),
    }  # fmt: skip
    return TraceDigest(**{**fields, **more})


def timed(dtype: str, forward_ms: float, backward_ms: float, *, gpu: bool = True, **changes: Any) -> Run:
    of = changes.pop("of", None) or workload(dtype=dtype)
    run = make_run(of, forward=[forward_ms * 1e-3] * 6, backward=[backward_ms * 1e-3] * 6, **changes)
    assert run.environment is not None
    if not gpu:
        return run
    environment = msgspec.structs.replace(run.environment, device_type="cuda", device_name="a GPU")
    return msgspec.structs.replace(run, environment=environment)


def test_parts_of_a_step_are_those_of_forward_and_backward():
    families = (
        FamilyRow(family="copy/cast", phase="forward", calls=1, busy_ns=1 * MS),
        FamilyRow(family="copy/cast", phase="backward", calls=1, busy_ns=2 * MS),
        FamilyRow(family="copy/cast", phase="optimizer", calls=1, busy_ns=4 * MS),
    )
    made = digest((30, 20), (50, 40), optimizer_ns=10, families=families)
    found = TimedCell(run=timed("fp32", 40, 60), digest=made).parts
    assert found is not None and found.between_s is not None
    assert found.products_s == pytest.approx(0.060) and found.rest_s == pytest.approx(0.020)
    assert found.between_s == pytest.approx(0.020) and found.casts_s == pytest.approx(0.003) and found.kernels == 20
    assert found.product_share == pytest.approx(0.75)
    on_cpu = TimedCell(run=timed("fp32", 40, 60, gpu=False), digest=made).parts
    assert on_cpu is not None and on_cpu.between_s is None and on_cpu.total_s == pytest.approx(0.080)
    # Kernels that took longer captured than timed leave no time below zero.
    tight = TimedCell(run=timed("fp32", 20, 40), digest=made).parts
    assert tight is not None and tight.between_s == 0
    assert TimedCell(run=timed("fp32", 40, 60)).parts is None


def test_only_what_differs_in_nothing_but_its_dtype_is_a_pair():
    fp32, bf16 = TimedCell(run=timed("fp32", 10, 20)), TimedCell(run=timed("bf16", 5, 10))
    other_length = TimedCell(run=timed("tf32", 5, 10, of=workload(dtype="tf32", seq_len=256)))
    other_device = TimedCell(run=timed("tf32", 5, 10, gpu=False))
    forward = TimedCell(run=make_run(workload(dtype="tf32", phase="forward"), forward=[1.0] * 6))
    study = pair_up([bf16, other_length, forward, other_device, fp32], DTYPES)
    assert [(pair.base, pair.other) for pair in study.pairs] == [(fp32, bf16)]
    assert study.pairs[0].speed_up.value == 2
    assert forward not in study.cells and len(study.cells) == 4


def test_of_several_runs_one_with_a_capture_then_the_newest():
    old, new = timed("fp32", 10, 20, created="2026-01-01"), timed("fp32", 11, 21, created="2026-01-02")
    captured = TimedCell(run=old, digest=digest((8, 4), (18, 9)))
    both = pair_up([captured, TimedCell(run=new)], DTYPES)
    assert both.cells == (captured,) and both.replaced == 1
    assert pair_up([TimedCell(run=old), TimedCell(run=new)], DTYPES).cells[0].run is new


def memory(forward_peak: int, saved: int) -> Evidence:
    return Evidence(
        memory=PhaseMemory(parameter_bytes=400, forward_peak=forward_peak, saved_for_backward=saved)
    )  # fmt: skip


def test_findings_against_folk_wisdom_where_the_figures_are_against_it():
    base = TimedCell(run=timed("fp32", 40, 60, evidence=memory(1000, 500)), digest=digest((36, 30), (54, 40)))
    slow = TimedCell(run=timed("bf16", 60, 65, evidence=memory(1100, 550)), digest=digest((15, 5), (15, 5)))
    fast = TimedCell(run=timed("tf32", 20, 30, evidence=memory(1000, 500)), digest=digest((16, 10), (24, 15)))
    found = {
        (f.kind, f.evidence.get("speed_up")): f for f in answer_speed(pair_up([base, slow, fast], DTYPES)).findings
    }
    slower = found.pop(("slower", 0.8))
    assert "in bf16 is slower than in fp32: 125 ms for 100 ms" in slower.sentence
    assert "kernels take 30 ms for 90 ms, but for 95 ms (fp32: 10 ms) no kernel runs" in slower.sentence
    rise = found.pop(("forward-peak-rises", None))
    assert "bf16 raises the peak of forward in 1 of 1 cells" in rise.sentence and "+10.0 %" in rise.sentence
    assert "100 B more" in rise.sentence and "200 B" in rise.sentence
    kinds = [kind for kind, _ in found]
    assert "slower" not in kinds and "forward-peak-rises" not in kinds and "forward-peak-falls" not in kinds
    law = found["bound", 2.0].sentence  # tf32: 70 ms of products become 25, 20 of others 15, 10 without a kernel stay
    assert "70.0 % of fp32's time is in products, which run 2.80 times as fast, the other kernels 1.33 times" in law
    assert "wins 45 ms in products, wins 5 ms in other kernels" in law
    assert f"alone the speed-up would be {100 / 55:.2f}; were products free, fp32's rest would bound it at 3.33" in law
    assert "What is left in tf32 is 50.0 % products, 30.0 % other kernels, 20.0 % without a kernel" in law


def test_what_is_not_known_is_absent_and_what_ended_is_said():
    failure = Failure(message="CUDA out of memory", during="measure", phase="forward")
    lost = msgspec.structs.replace(timed("tf32", 1, 1), status="out-of-memory", failure=failure, samples={})
    cells = [TimedCell(run=run) for run in (timed("fp32", 40, 60), timed("bf16", 20, 30), lost)]
    found = answer_speed(pair_up(cells, DTYPES), lacking=("tf32",))
    assert [table.title for table in found.tables] == [TIMES, MISSING]
    assert found.table(MISSING).rows[0][1:] == ("tf32", "ended out-of-memory (measure, forward): CUDA out of memory")
    assert {"speed-up", "no-capture", "dtype-lacking"} == {finding.kind for finding in found.findings}
    (panel,) = found.panels
    assert [(point.line, point.y) for point in panel.points] == [("bf16", 2.0)]
    with pytest.raises(InputError, match="ended out-of-memory"):
        answer_speed(pair_up([TimedCell(run=lost)], DTYPES))


def test_cells_of_the_sweep():
    from stepscope.core.model_config import configure

    models = [configure("small"), configure("tiny")]
    cells = speed_cells(models=models, seq_lens=[16], batch_size=1, dtypes=("fp32", "bf16"), settings=Settings())
    named = [(cell.workload.model.name, cell.workload.dtype, cell.workload.phase) for cell in cells]
    assert named == [(m, d, "forward-backward") for m in ("tiny", "small") for d in ("fp32", "bf16")]
    assert dtypes_here(["fp32", "tf32", "bf16"], "cpu") == (("fp32", "bf16"), ("tf32",))
    assert dtypes_here(["fp32", "tf32"], "cuda") == (("fp32", "tf32"), ())


def study(*arguments: object) -> Done:
    return stepscope("study", "speed", *arguments)


def test_text_of_the_kept_kernels():
    """What a reader sees. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    done = study("--from", RESULTS / "kernels")
    assert done.returncode == 0, done.stderr
    check_golden(done.stdout, GOLDEN)


def test_the_answer_travels_and_is_drawn(tmp_path: Path):
    kept, drawn = tmp_path / "speed.json", tmp_path / "speed.svg"
    done = study("--from", RESULTS / "kernels", "--seq-len", "512", "--json")
    kept.write_text(done.stdout)
    tables = {table["title"]: table for table in json.loads(done.stdout)["tables"]}
    assert set(tables) == {TIMES, MEMORY, PARTS, LAW} and len(tables[TIMES]["rows"]) == 6
    again = study("--from", kept, "--save", drawn)
    assert again.returncode == 0 and "large-b4-s512-train" in again.stdout and "s1024" not in again.stdout
    assert drawn.read_text().startswith("<svg")


def test_runs_of_two_folders_without_captures():
    done = study(
        "--from", RESULTS / "plain", "--from", RESULTS / "tf32", "--model", "2.7B", "--seq-len", "512", "--json"
    )
    found = json.loads(done.stdout)
    assert [table["title"] for table in found["tables"]] == [TIMES, MEMORY]  # no shares without a capture
    rows = {row[1]: dict(zip(found["tables"][0]["columns"], row, strict=True)) for row in found["tables"][0]["rows"]}
    assert rows["fp32"]["speed-up"] is None and rows["fp32"]["both ms"] == 1011
    assert (rows["tf32"]["speed-up"], rows["bf16"]["speed-up"]) == (4.061, 5.655)
    assert "no-capture" in {finding["kind"] for finding in found["findings"]}


def test_bad_input_is_one_line(tmp_path: Path):
    lone = tmp_path / "lone"
    run = timed("bf16", 5, 10)
    save_run(run, create_run_directory(lone, run.workload))
    refused: list[tuple[list[object], str]] = [
        (["--from", lone], "measured both in fp32 and in another dtype (there is bf16)"),
        (["--device", "cpu", "--dtype", "bf16"], "lacks fp32"),
        (["--device", "cpu", "--dtype", "fp32,tf32"], "not on a CPU"),
    ]
    check_refused("speed", lone, refused)


@pytest.mark.long
def test_a_bare_machine_measures_and_another_reads_the_captures(tmp_path: Path):
    """Without polars the sweep answers as far as it goes; with it the same folder has the shares."""
    sizes = (
        "--device",
        "cpu",
        "--model",
        "tiny",
        "--seq-len",
        "16",
        "--steps",
        "5",
        "--warmup",
        "1",
        "--seconds",
        "0",
    )
    bare = subprocess.run(
        [sys.executable, "-c", WITHOUT_POLARS, "study", "speed", *sizes, "--runs", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert TIMES in bare.stdout and PARTS not in bare.stdout, bare.stderr
    assert "polars, which reads them, is not installed" in bare.stdout.replace("\n", " ")
    assert f"study speed --from {tmp_path}" in bare.stderr
    done = study("--from", tmp_path, "--keep-digests")
    assert done.returncode == 0 and PARTS in done.stdout and LAW in done.stdout, done.stderr
    assert len(list(tmp_path.glob("*/trace-kineto.json"))) == 2
