"""`stepscope study compile`: paying back by hand and at random, kernels by kind, fallbacks, kept runs, bad input."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.answer import Finding, decode_answer
from stepscope.core.errors import InputError
from stepscope.core.evidence import CompileReport, Evidence, KernelTotal, PhaseMemory, ProfiledStep
from stepscope.core.model_config import configure
from stepscope.core.run import Failure, Run, Settings
from stepscope.core.run_directory import create_run_directory, save_run
from stepscope.core.samples import Samples
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.comparison import compared_cells
from stepscope.questions.compile import (
    ATTENTION,
    COPIES,
    COST,
    ELEMENTWISE,
    GENERATED,
    KERNELS,
    MEMORY,
    MISSING,
    OPTIMIZER,
    PRODUCTS,
    REDUCTIONS,
    REPORT,
    TIMES,
    CompileCell,
    Total,
    answer_compile,
    check_modes,
    cold_caches,
    kernels_of_capture,
    kernels_of_profile,
    pair_up,
    payback,
)
from stepscope.recording.compilation import compile_report, reset_compilation
from stepscope.traces.captures.digest import FamilyRow, TraceDigest
from tests.command import WITHOUT_POLARS, Done, stepscope
from tests.conftest import make_run, workload
from tests.questions.refused import check_refused
from tests.shown import check_golden

RESULTS = Path(__file__).parents[2] / "results" / "h200"
GOLDEN = Path(__file__).parents[1] / "golden" / "study-compile.txt"

PRODUCT = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >()"
SUM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MaxOps<float> > >(int)"
FUSED = "triton_poi_fused_add_mul_silu_3"
ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)"
    "::TensorListMetadata<3>, at::native::(anonymous namespace)::PointwiseOpScalarListFunctor<float, 3, 3, 0> >()"
)


def steps(values: list[float], warmup: list[float]) -> Samples:
    return Samples(values_s=tuple(values), warmup_s=tuple(warmup), clock="a clock")


def test_paying_back_by_hand():
    """Eager: 2 s, then 1 s each. Compiled: 11 s, then 0.5 s. Both have spent 20 s after 19 steps."""
    paid = payback(steps([1.0] * 3, [2.0]), steps([0.5] * 3, [11.0]))
    assert paid is not None
    assert (paid.extra_s, paid.won_s, paid.steps, paid.least, paid.most) == (9.5, 0.5, 19, None, None)
    # All that the warm-up took counts, not the first step alone: graphs are captured in the second.
    paid = payback(steps([1.0] * 3, [2.0, 1.0]), steps([0.5] * 3, [11.0, 4.5]))
    assert paid is not None and paid.extra_s == 13.5 and paid.steps == 27
    slower = payback(steps([1.0] * 3, [2.0]), steps([1.5] * 3, [11.0]))
    assert slower is not None and slower.steps is None and slower.won_s == -0.5
    at_once = payback(steps([1.0] * 3, [5.0, 1.0]), steps([0.5] * 3, [4.0, 0.5]))
    assert at_once is not None and at_once.steps == 1
    assert payback(steps([1.0] * 3, []), steps([0.5] * 3, [11.0])) is None
    assert payback(steps([], [1.0]), steps([0.5] * 3, [11.0])) is None


def test_the_range_of_steps_is_that_of_the_speed_up():
    paid = payback(steps([1.0] * 6, [1.0]), steps([0.5, 0.9, 0.4, 0.5, 0.5, 0.5], [10.5]))
    assert paid is not None and paid.steps == 20 and paid.least is not None and paid.most is not None
    assert paid.least <= 20 <= paid.most
    undecided = payback(steps([1.0] * 6, [1.0]), steps([0.4, 1.2, 0.4, 0.9, 0.9, 1.2], [10.9]))
    assert undecided is not None and undecided.steps is not None and undecided.most is None


durations = st.integers(1, 40).map(lambda tick: tick / 8)  # sums of these are exact
runs_of_steps = st.builds(
    steps, st.lists(durations, min_size=1, max_size=4), st.lists(durations, min_size=1, max_size=4)
)


@given(runs_of_steps, runs_of_steps)
def test_from_then_on_the_compiled_process_is_ahead(base: Samples, other: Samples):
    paid = payback(base, other)
    assert paid is not None

    def spent(samples: Samples, count: int) -> float:
        return math.fsum([*samples.warmup_s, *[samples.median_s or 0.0] * count][:count])

    horizon = 4000
    ahead = [spent(other, count) <= spent(base, count) for count in (*range(1, 60), horizon)]
    if paid.steps is None:
        assert (base.median_s or 0) <= (other.median_s or 0)
    else:
        assert all(spent(other, count) <= spent(base, count) for count in range(paid.steps, paid.steps + 60))
        assert paid.steps == 1 or spent(other, paid.steps - 1) > spent(base, paid.steps - 1)
        assert ahead[-1]


def profile(**calls: tuple[int, float]) -> ProfiledStep:
    names = {"product": PRODUCT, "add": ADD, "sum": SUM, "fused": FUSED, "adam": ADAM, "copy": "Memcpy DtoD (Device)"}
    kernels = tuple(KernelTotal(name=names[key], calls=n, total_s=total) for key, (n, total) in calls.items())
    busy_s = sum(kernel.total_s for kernel in kernels)
    return ProfiledStep(step_s=1.0, kernel_launches=1, busy_s=busy_s, kernels=kernels)


def report(**changes: Any) -> CompileReport:
    fields: dict[str, Any] = {
        "frames_total": 1, "frames_compiled": 1, "graphs": 1, "graph_breaks": 0, "recompiles": 0, "limit_hit": False,
        "compile_s": 8.0, "cached_graphs": 0,
    }  # fmt: skip
    return CompileReport(**{**fields, **changes})


EAGER = profile(product=(10, 0.40), add=(100, 0.20), sum=(20, 0.10), adam=(4, 0.10))
COMPILED = profile(product=(10, 0.40), fused=(30, 0.06), adam=(4, 0.10), copy=(3, 0.01))


def cell(
    mode: str, step_s: float, *, gpu: bool = True, digest: TraceDigest | None = None, **changes: Any
) -> CompileCell:
    """A run whose forward, backward and optimizer take 0.3, 0.5 and 0.2 of its step."""
    of = changes.pop("of", {})
    shown: dict[str, Any] = {"profile": EAGER if mode == "eager" else COMPILED}
    if mode != "eager":
        shown["compilation"] = report()
    evidence = Evidence(**{**shown, **changes.pop("evidence", {})})
    run = make_run(
        workload(compile=mode, **of), forward=[step_s * 0.3] * 6, backward=[step_s * 0.5] * 6,
        optimizer=[step_s * 0.2] * 6, step=[step_s] * 6,
        warmup=changes.pop("warmup", [step_s if mode == "eager" else 10.0]), evidence=evidence, **changes,
    )  # fmt: skip
    assert run.environment is not None
    if gpu:
        environment = msgspec.structs.replace(run.environment, device_type="cuda", device_name="a GPU")
        run = msgspec.structs.replace(run, environment=environment)
    return CompileCell(run=run, digest=digest)


def findings(*cells: CompileCell) -> dict[str, Finding]:
    return {finding.kind: finding for finding in answer_compile(pair_up(cells)).findings}


def test_what_the_optimizer_gains_is_process_noise():
    """It is the same code in both: of the 300 ms that the step wins, its 60 ms are noise."""
    eager, compiled = cell("eager", 1.0), cell("default", 0.7)
    sentence = findings(eager, compiled)["process-noise"].sentence
    assert "takes 60 ms less in " in sentence and "where the step wins 300 ms: that much is noise" in sentence
    (label,) = (pair.label for pair in pair_up([eager, compiled]).pairs)
    assert label in sentence
    as_before = {**compiled.run.samples, "optimizer": eager.run.samples["optimizer"]}
    steady = CompileCell(run=msgspec.structs.replace(compiled.run, samples=as_before))
    assert "process-noise" not in findings(eager, steady)


STORED = b"""
{
 "study": "compile",
 "question": "How much does torch.compile give?",
 "device": "NVIDIA H200",
 "versions": {"torch": "2.11.0"},
 "tables": [],
 "findings": [
  {
   "kind": "not compiling's",
   "severity": "warning",
   "sentence": "The optimizer is the same code in both, and yet takes 60 ms less in small.",
   "remedy": "",
   "evidence": {"optimizer_s": 0.06, "step_s": 0.3}
  },
  {"kind": "paid-after", "severity": "note", "sentence": "It is paid for after 34 steps.", "remedy": "", "evidence": {}}
 ]
}
"""


@pytest.mark.slow
def test_a_stored_answer_keeps_its_noise_under_the_present_kind(tmp_path: Path):
    answer = decode_answer(STORED, "answer.json")
    assert [finding.kind for finding in answer.findings] == ["process-noise", "paid-after"]
    stored = json.loads(STORED)["findings"]
    (tmp_path / "answer.json").write_bytes(STORED)
    done = stepscope("study", "compile", "--from", "answer.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"] == [{**stored[0], "kind": "process-noise"}, stored[1]]


def test_kernels_by_name_and_by_capture():
    run = cell("default", 1.0).run
    assert kernels_of_profile(run) == {
        PRODUCTS: Total(calls=10, busy_s=0.40),
        GENERATED: Total(calls=30, busy_s=0.06),
        OPTIMIZER: Total(calls=4, busy_s=0.10),  # lists of tensors; the copy is no kernel
    }
    rows = [
        ("matrix multiplication", "forward", 4, 4e6), ("matrix multiplication", "backward", 8, 8e6),
        ("softmax", "forward", 2, 1e6), ("reduction", "backward", 3, 1e6), ("copy/cast", "forward", 5, 1e6),
        ("attention (fused)", "forward", 1, 1e6), ("activation/elementwise", "optimizer", 7, 2e6),
    ]  # fmt: skip
    families = tuple(FamilyRow(family=f, phase=p, calls=n, busy_ns=ns) for f, p, n, ns in rows)
    found = kernels_of_capture(digest(families))
    assert {kind: total.calls for kind, total in found.items()} == {
        PRODUCTS: 12, REDUCTIONS: 5, COPIES: 5, ATTENTION: 1, OPTIMIZER: 7,
    }  # fmt: skip
    assert found[PRODUCTS].busy_s == pytest.approx(0.012)


def test_generated_kernels_are_one_kind_whatever_their_families():
    rows = [("normalisation", "forward", 6, 6e6), ("softmax", "forward", 2, 1e6), ("reduction", "optimizer", 3, 3e6)]
    generated = [
        ("normalisation", "forward", 4, 5e6),
        ("softmax", "forward", 2, 1e6),
        ("reduction", "optimizer", 3, 3e6),
    ]
    families, of_compiler = (
        tuple(FamilyRow(family=f, phase=p, calls=n, busy_ns=ns) for f, p, n, ns in each) for each in (rows, generated)
    )
    found = kernels_of_capture(msgspec.structs.replace(digest(families), generated=of_compiler))
    assert {kind: total.calls for kind, total in found.items()} == {REDUCTIONS: 2, GENERATED: 6, OPTIMIZER: 3}
    assert found[REDUCTIONS].busy_s == pytest.approx(0.001) and found[GENERATED].busy_s == pytest.approx(0.006)


def digest(families: tuple[FamilyRow, ...]) -> TraceDigest:
    busy = int(sum(row.busy_ns for row in families))
    return TraceDigest(
        profiler="Kineto", steps=1, kernels=30, busy_ns=busy, union_ns=busy, unattributed_ns=0, copies=0, copies_ns=0,
        gemm_fraction=0.5, phases=(), families=families, top=(), top_without_products=(), attention=(), findings=(),
    )  # fmt: skip


def test_a_gain_is_that_of_its_parts():
    """1 s, of it 0.8 in kernels, becomes 0.7, of it 0.56: 0.24 by fusion, and 0.06 less without a kernel."""
    study = pair_up([cell("eager", 1.0), cell("default", 0.7)])
    (pair,) = study.pairs
    assert pair.kernels is not None
    assert pair.kernels.none_s == pytest.approx((0.2, 0.14))
    assert pair.kernels.won_s([PRODUCTS]) == 0 and pair.kernels.won_s() == pytest.approx(0.24)
    found = {finding.kind: finding for finding in answer_compile(study).findings}
    assert "a step wins 300 ms: 240 ms by fusion, 60 ms where no kernel ran." in found["gain"].sentence
    assert (
        "134 kernels a step become 44. 30 generated ones, 60 ms, stand for 120 others, 300 ms"
        in found["fused"].sentence
    )
    assert "elementwise 100 to 0; softmax, norms, reductions 20 to 0" in found["fused"].sentence
    assert (
        "in 1 of 1 cells: they take 1.000 to 1.000 times as long as before, in 1 of" in found["products-same"].sentence
    )
    assert found["optimizer-eager"].evidence["share"] == pytest.approx(0.2)
    assert "No fallback to eager in 1 of 1 compiled cells: each of the 1 frames" in found["no-fallback"].sentence
    assert (
        "launches 30 kernels that the compiler generated; no eager step has one"
        in found["compiled-object-ran"].sentence
    )
    assert "costs 9.3 s and wins 300 ms a step, so it is paid for after 31 steps" in found["paid-after"].sentence


def test_where_launches_set_the_pace():
    """Kernels take 0.8 s of 1.25 eagerly, 0.56 s of 1.12 compiled: as many seconds stay, and half of the step."""
    found = findings(cell("eager", 1.25), cell("default", 1.12))
    sentence = found["launch-bound"].sentence
    assert "no kernel runs for 36.0 % of the eager step (134 kernels) and 50.0 % of the compiled one" in sentence
    assert "--compile reduce-overhead" in sentence
    assert "launch-bound" not in findings(cell("eager", 0.9), cell("default", 0.6))


def test_a_capture_on_both_sides_goes_before_names():
    rows = (FamilyRow(family="matrix multiplication", phase="forward", calls=7, busy_ns=5e8),)
    captured = [cell("eager", 1.0, digest=digest(rows)), cell("default", 0.7, digest=digest(rows))]
    pair = pair_up(captured).pairs[0]
    assert pair.kernels is not None and pair.kernels.of()[0] == Total(calls=7, busy_s=0.5)
    assert "kinds-by-name" not in findings(*captured)
    pair = pair_up([captured[0], cell("default", 0.7)]).pairs[0]  # one alone: names, on both sides
    assert pair.kernels is not None and pair.kernels.of()[0].calls == 134


@pytest.mark.parametrize(
    ("evidence", "ran", "kind", "severity", "words"),
    [
        ({"compilation": report(frames_compiled=0)}, "eager", "compile-not-used", "error", "ran eagerly"),
        (
            {"compilation": report(limit_hit=True, recompiles=8, recompile_reasons=("size mismatch at 0",))},
            "eager", "compile-fallback", "error", "Reason: size mismatch at 0. Its speed-up compares eager with eager.",
        ),
        (
            {"compilation": report(graph_breaks=2, graph_break_reasons=("print",))},
            "in part", "compile-fallback", "warning", "broke the graph 2 times (print)",
        ),
        ({"compilation": report(recompiles=1)}, "compiled", "compile-fallback", "warning", "recompiled 1 times"),
        ({"profile": EAGER}, "eager", "no-generated-kernel", "error", "Its speed-up compares eager with eager."),
    ],
)  # fmt: skip
def test_a_fallback_is_said(evidence: dict[str, Any], ran: str, kind: str, severity: str, words: str):
    """Rows 4 and 5 of docs/measuring.md, whatever was judged when the run was written."""
    other = cell("default", 0.98, evidence=evidence)
    assert other.ran == ran
    answered = answer_compile(pair_up([cell("eager", 1.0), other]))
    found = {finding.kind: finding for finding in answered.findings}
    assert found[kind].severity == severity and words in found[kind].sentence
    assert "no-fallback" not in found and "compiled-object-ran" not in found
    assert ("fused" in found) == (ran != "eager")
    (row,) = answered.table(REPORT).rows
    assert row[2] == ran


def test_where_compiling_does_not_pay():
    slower = findings(cell("eager", 1.0), cell("default", 1.25))
    assert "takes 1.25 s, eagerly 1 s" in slower["slower"].sentence and "never-paid" in slower
    assert "paid-after" not in slower
    same = findings(cell("eager", 1.0), cell("default", 1.0))
    assert "holds 1" in same["no-difference"].sentence and "never-paid" in same


@pytest.mark.parametrize("step_s", [0.98, 1.02])
def test_a_change_no_larger_than_the_optimizers_is_neither_a_gain_nor_a_loss(step_s: float):
    """20 ms of a step, where the optimizer, which is not compiled, differs by 50."""
    eager, compiled = cell("eager", 1.0), cell("default", step_s)
    of = compiled.run.samples["optimizer"]
    noisy = msgspec.structs.replace(of, values_s=(0.25,) * of.count)
    other = msgspec.structs.replace(compiled.run, samples={**compiled.run.samples, "optimizer": noisy})
    found = findings(eager, CompileCell(run=other))
    assert "cannot be told for" in found["no-more-than-noise"].sentence
    assert not {"paid-after", "never-paid", "slower"} & set(found)


def test_code_from_caches_is_no_compiling():
    assert "from-caches" in findings(
        cell("eager", 1.0), cell("default", 0.5, evidence={"compilation": report(cached_graphs=2)})
    )
    old = findings(cell("eager", 1.0), cell("default", 0.5, evidence={"compilation": report(cached_graphs=None)}))
    assert "caches-unknown" in old and "from-caches" not in old


def test_what_is_not_known_is_absent():
    nothing: dict[str, Any] = {"profile": None, "compilation": None}
    bare = [cell("eager", 1.0, evidence=nothing, warmup=[]), cell("default", 0.5, evidence=nothing, warmup=[])]
    answered = answer_compile(pair_up(bare))
    assert [table.title for table in answered.tables] == [TIMES, COST, REPORT]
    assert answered.table(COST).rows[0][2:] == (None, None, None, None, None, None, None, None, None)
    assert answered.table(REPORT).rows[0][2] == "not known"
    assert {"no-report", "no-kernels", "speed-up"} <= {finding.kind for finding in answered.findings}
    assert [panel.y_title for panel in answered.panels] == ["speed-up of the step over eager", "step, ms"]
    on_cpu = answer_compile(pair_up([cell("eager", 1.0, gpu=False), cell("default", 0.5, gpu=False)]))
    assert KERNELS not in [table.title for table in on_cpu.tables]
    assert "on-cpu" in {finding.kind for finding in on_cpu.findings}


def test_what_ended_and_what_stands_alone():
    failure = Failure(message="CUDA out of memory", during="warm-up", phase="backward")
    lost = cell("max-autotune", 1.0)
    lost = CompileCell(run=msgspec.structs.replace(lost.run, status="out-of-memory", failure=failure, samples={}))
    alone = cell("default", 1.0, of={"seq_len": 32})
    study = pair_up([cell("eager", 1.0), cell("default", 0.5), lost, alone])
    assert [row[1:] for row in answer_compile(study).table(MISSING).rows] == [
        ("max-autotune", "ended out-of-memory (warm-up, backward): CUDA out of memory"),
        ("default", "no eager run beside it"),
    ]
    for cells, words in (([lost], "ended out-of-memory"), ([alone], "there is default"), ([], "no run here")):
        with pytest.raises(InputError, match=words):
            answer_compile(pair_up(cells))


def test_only_the_mode_differs_within_a_pair():
    eager, default, graphs = cell("eager", 1.0), cell("default", 0.5), cell("reduce-overhead", 0.4)
    others = [
        cell("default", 0.5, of={"attention": "sdpa"}),
        cell("default", 0.5, of={"phase": "forward"}),
        cell("default", 0.5, gpu=False),
    ]
    study = pair_up([graphs, *others, default, eager])
    assert [(pair.base, pair.other) for pair in study.pairs] == [(eager, default), (eager, graphs)]
    assert {pair.other.name for pair in study.pairs} == {eager.name}
    assert set(study.alone) == set(others)
    newer = cell("eager", 1.1, created="2027-01-01")
    assert pair_up([newer, eager, default]).pairs[0].base is newer
    rows = (FamilyRow(family="other", phase="forward", calls=1, busy_ns=1),)
    captured = cell("eager", 1.2, digest=digest(rows))
    study = pair_up([captured, newer, default])
    assert study.pairs[0].base is captured and study.replaced == 1


def test_memory_by_figure():
    def held(peak: int, saved: int) -> dict[str, Any]:
        return {"memory": PhaseMemory(parameter_bytes=1, forward_peak=peak, saved_for_backward=saved)}

    cells = cell("eager", 1.0, evidence=held(2**30, 2**29)), cell("default", 0.5, evidence=held(3 * 2**28, 2**28))
    answered = answer_compile(pair_up(cells))
    assert [row[2:] for row in answered.table(MEMORY).rows] == [
        ("forward peak", 1.0, 0.75, -25.0), ("saved for backward", 0.5, 0.25, -50.0), ("step's peak", 1.0, 0.75, -25.0),
    ]  # fmt: skip
    found = {finding.kind: finding for finding in answered.findings}
    assert "by -50.0 %, 512.00 MiB to 256.00 MiB" in found["memory-saved"].sentence


def test_cells_of_the_sweep():
    cells = compared_cells(
        models=[configure("small"), configure("tiny")], seq_lens=[16], batch_size=1, dtypes=["fp32"],
        phase=["forward", "train"], compile=["eager", "default"], attention=["sdpa"], settings=Settings(),
    )  # fmt: skip
    named = [
        (c.workload.model.name, c.workload.phase, c.workload.compile, c.workload.attention)
        for c in cells
        if isinstance(c.workload, TextbookWorkload)
    ]
    assert named == [
        (m, p, c, "sdpa") for m in ("tiny", "small") for p in ("forward", "train") for c in ("eager", "default")
    ]
    with pytest.raises(InputError, match="always measured"):
        check_modes(["eager"])


def test_cells_compile_from_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", raising=False)
    with cold_caches():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder.is_dir() and os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"
    assert not folder.exists() and os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES" not in os.environ


def test_dynamo_says_why_it_compiled_again():
    reset_compilation()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for size in (2, 3):
        compiled(torch.ones(size))
    found = compile_report()
    assert found.recompiles == 1 and found.cached_graphs == 0
    (reason,) = found.recompile_reasons
    assert "size" in reason
    reset_compilation()


def study(*arguments: object) -> Done:
    return stepscope("study", "compile", *arguments)


def test_text_of_the_kept_sweep_on_a_bare_machine():
    """What a reader sees, where polars is not installed too. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    bare = subprocess.run(
        [sys.executable, "-c", WITHOUT_POLARS, "study", "compile", "--from", str(RESULTS / "compile")],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert bare.returncode == 0, bare.stderr
    check_golden(bare.stdout, GOLDEN)


def test_kept_figures_are_those_of_the_runs():
    """By hand from run.json: large in bf16 takes 121.86 ms, 57.84 compiled, which cost 49.85 s once."""
    cells = [CompileCell(run=run) for run in stored(RESULTS / "compile")]
    pair = next(pair for pair in pair_up(cells).pairs if pair.other.name == "large-b4-s512-bf16-train")
    assert pair.speed_up.value == pytest.approx(121.86 / 57.84, rel=1e-3)
    assert pair.kernels is not None and pair.kernels.of([ELEMENTWISE])[0].calls == 2791
    assert pair.payback is not None and pair.payback.steps is not None
    assert pair.payback.steps == pytest.approx((49.85 - 0.385) / (0.12186 - 0.05784), rel=5e-3)


def stored(place: Path) -> list[Run]:
    from stepscope.core.run_directory import find_run_files, load_run

    return [load_run(file) for file in find_run_files(place)]


@pytest.mark.slow
def test_the_answer_travels_is_chosen_from_and_drawn(tmp_path: Path):
    kept, drawn = tmp_path / "compile.json", tmp_path / "compile.svg"
    done = study(
        "--from", RESULTS / "compile", "--from", RESULTS / "best", "--dtype", "bf16", "--model", "small", "--json"
    )
    kept.write_text(done.stdout)
    tables = {table["title"]: table for table in json.loads(done.stdout)["tables"]}
    assert set(tables) == {TIMES, COST, REPORT, KERNELS, MEMORY, MISSING}
    assert {row[0] for row in tables[TIMES]["rows"]} == {"small-b4-s512-bf16-train"}
    assert {row[1] for row in tables[MISSING]["rows"]} == {"default", "reduce-overhead"}  # those of best have no eager
    again = study("--from", kept, "--only", "costs", "--save", drawn)
    assert again.returncode == 0 and COST in again.stdout and TIMES not in again.stdout
    assert drawn.read_text().startswith("<svg")


def test_bad_input_is_one_line(tmp_path: Path):
    lone, text = tmp_path / "lone", tmp_path / "text.json"
    text.write_text("{")
    run = cell("default", 1.0).run
    save_run(run, create_run_directory(lone, run.workload))
    refused: list[tuple[list[object], str]] = [
        (["--from", text], "holds no answer"),
        (["--from", text, "--model", "small"], "is a finished answer"),
        (["--from", lone], "both eager and compiled (there is default)"),
        (["--from", lone, "--compile", "eager"], "always measured"),
        (["--device", "cpu", "--compile", "fast"], "unknown compile mode 'fast'"),
        (["--device", "cpu", "--phase", "both"], "unknown phase 'both'"),
        (["--device", "cpu", "--seq-len", "x"], "cannot read --seq-len 'x'"),
    ]
    check_refused("compile", lone, refused)
