"""What ran when, for which module and phase: worked out by hand, and in a plain way on random captures."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.range_names import PHASES
from stepscope.traces.captures import attribution as places_module
from stepscope.traces.captures.attribution import ROOT, Attribution, attribute, phase_of, range_kind
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.table import CALL_SCHEMA, WORK_SCHEMA, with_launches
from tests.captures import (
    AUTOGRAD,
    ELEMENTWISE,
    GEMM,
    MAIN,
    Capture,
    Row,
    nsys_tables,
    trace_table,
    training_steps,
    write_kineto,
    write_sqlite,
)
from tests.handmade_trace import PROCESS

OTHER = 4400
"""One more thread."""


def attributed(capture: Capture) -> Attribution:
    """Its attribution, which must be exact."""
    made = attribute(trace_table(capture))
    made.self_check()
    return made


def places(capture: Capture, *columns: str) -> list[tuple]:
    """These columns of its work; phase and module if none are named."""
    return attributed(capture).work.select(columns or ("phase", "module")).rows()


@pytest.mark.parametrize("spelling", ["Kineto", "Nsight Systems"])
def test_a_training_step(tmp_path: Path, spelling: str):
    capture = training_steps(steps=2, layers=2)
    if spelling == "Kineto":
        made = attribute(read_trace(write_kineto(capture, tmp_path / "trace.json.gz")))
        # Each of 16 nodes has the profiler's own arrow, to the operator that the sequence number leads to.
        assert (made.links_checked, made.links_agree) == (16, 16)
    else:
        made = attribute(read_trace(write_sqlite(nsys_tables(capture), tmp_path / "trace.sqlite")))
    made.self_check()
    assert (made.steps, made.busy_ns) == (2, capture.busy_ns())
    phases = made.rows.group_by("phase").agg(pl.col("busy_ns").sum(), pl.col("calls").sum()).sort("phase").rows()
    # Two steps of four parts: a product of 400 ns and a function of 50, two backward of 300; one of 70; one copy.
    assert phases == [(None, 40, 2), ("forward", 3600, 16), ("backward", 4800, 16), ("optimizer", 140, 2)]
    assert made.unattributed_ns == 40
    modules = made.rows.filter(pl.col("phase") == "forward").group_by("module").agg(pl.col("busy_ns").sum())
    parts = {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention", "mlp")}
    assert dict(modules.rows()) == dict.fromkeys(parts, 900)
    if spelling == "Kineto":  # nsys sees no operators, and the forward thread alone has ranges
        backward = made.rows.filter(pl.col("phase") == "backward").group_by("module").agg(pl.col("busy_ns").sum())
        assert dict(backward.rows()) == dict.fromkeys(parts, 1200)


def test_backward_launched_from_another_thread():
    """[11] The phase range stands on the main thread: by thread, backward would take no time at all."""
    capture = Capture()
    capture.range("forward", 0, 100)
    capture.kernel(50, 10)
    capture.range("backward", 100, 200)
    capture.kernel(120, 1, name=ELEMENTWISE)
    capture.kernel(150, 300, thread=AUTOGRAD)
    assert places(capture, "phase", "duration_ns") == [("forward", 10), ("backward", 1), ("backward", 300)]


def test_the_launching_threads_own_phase_comes_first():
    """Another thread runs ahead: its optimizer is open while this one is still in backward."""
    capture = Capture()
    capture.range("backward", 0, 1000)
    capture.range("optimizer", 400, 900, thread=OTHER)
    capture.kernel(500, 1)
    capture.kernel(500, 2, thread=OTHER)
    capture.kernel(500, 3, thread=AUTOGRAD)  # has none of its own: the last begun
    capture.kernel(950, 4, thread=OTHER)  # its own is closed
    assert places(capture, "phase") == [("backward",), ("optimizer",), ("optimizer",), ("backward",)]


def test_a_kernel_is_launched_by_its_own_process():
    """[12] Two ranks number their launches alike: by the id alone, both kernels would be of the later launch."""
    capture = Capture()
    for process, launched in ((101, 500), (202, 1500)):
        capture.range("forward", 0, 1000, process=process, thread=process)
        capture.range("optimizer", 1000, 2000, process=process, thread=process)
        capture.kernel(launched, 10, process=process, thread=process, correlation=7)
    assert places(capture, "process", "phase", "launch_ns", "launch_thread") == [
        (101, "forward", 500, 101),
        (202, "optimizer", 1500, 202),
    ]


def test_what_runs_after_its_range_has_closed_belongs_to_it():
    """The device lags behind the host: the launch decides."""
    capture = Capture()
    for at, phase in enumerate(PHASES):
        capture.range(phase, 100 * at, 100 * at + 90)
        capture.range("layers.0", 100 * at + 20, 100 * at + 60)
        capture.kernel(100 * at + 50, 5000, delay=7000)
    assert places(capture) == [(phase, "layers.0") for phase in PHASES]


def test_a_range_holds_its_first_moment_and_not_its_last():
    capture = Capture()
    capture.range("forward", 100, 200)
    for at in (99, 100, 199, 200):
        capture.kernel(at, 1)
    assert places(capture, "phase", "ranged") == [
        (None, False), ("forward", True), ("forward", True), (None, False),
    ]  # fmt: skip


def test_the_innermost_module():
    capture = Capture()
    capture.range("forward", 0, 1000)
    capture.range("model", 10, 900)
    capture.range("model.layers.0", 20, 500)
    capture.range("model.layers.0.attention", 30, 200)
    capture.range("softmax", 100, 150)
    for at in (5, 15, 25, 120, 180, 300, 600, 950):
        capture.kernel(at, 1)
    attention = "model.layers.0.attention"
    assert [module for _, module in places(capture)] == [
        ROOT, "model", "model.layers.0", attention, attention, "model.layers.0", "model", ROOT,
    ]  # fmt: skip
    assert [part for (part,) in places(capture, "part")] == [None] * 3 + ["softmax"] + [None] * 4


@pytest.mark.parametrize("around", [(0, 1000), (100, 1000), (0, 900), (100, 901)])
def test_ranges_round_phases_are_no_modules(around: tuple[int, int]):
    """ "epoch" holds a whole phase, with more time at one of its ends; only its name is left out."""
    capture = Capture()
    capture.range("epoch", *around)
    capture.range("forward", 100, 900)
    capture.range("layers.0", 100, 800)  # begins with its phase
    capture.kernel(150, 1)
    capture.kernel(850, 2)
    assert places(capture) == [("forward", "layers.0"), ("forward", ROOT)]


@pytest.mark.parametrize("inner", [[(100, 900), (300, 500)], [(100, 900), (100, 500)], [(300, 950), (400, 500)]])
def test_ranges_round_any_of_phases_that_overlap_are_no_modules(inner: list[tuple[int, int]]):
    """Not only round the first that begins in them: a phase of the same extent, or one that ends after them."""
    capture = Capture()
    for start, end in inner:
        capture.range("backward", start, end)
    capture.range("epoch", 100, 900)
    capture.kernel(450, 1)
    assert places(capture) == [("backward", ROOT)]


def forward_through(name: str) -> Capture:
    """A forward that launches a kernel inside a range of this name."""
    capture = Capture()
    capture.range("forward", 0, 500)
    capture.range(name, 10, 400)
    capture.kernel(100, 10)
    return capture


def test_a_compiled_graph_is_no_module():
    capture = forward_through("## Call CompiledFxGraph fz2wlegbtayr426cbo6cuyg3jiwuts3ptvxi56dg4dj7ydbh2hpo ##")
    capture.range("encoder", 200, 300)
    capture.kernel(250, 10)
    assert places(capture) == [("forward", ROOT), ("forward", "encoder")]


def test_a_module_as_long_as_its_phase_is_a_module():
    capture = Capture()
    capture.range("forward", 100, 900)
    capture.range("model", 100, 900)
    capture.kernel(150, 1)
    assert places(capture) == [("forward", "model")]


def with_node(capture: Capture, at: int, name: str, *, forward_thread: int = 1, sequence: int, duration: int) -> None:
    """A node of backward on autograd's thread, and the kernel that it launches."""
    tie = {"thread": AUTOGRAD, "sequence": sequence, "forward_thread": forward_thread}
    capture.operator(f"autograd::engine::evaluate_function: {name}", at, at + 90, **tie)
    capture.operator(name, at + 10, at + 80, **tie)
    capture.kernel(at + 50, duration, thread=AUTOGRAD)


def test_backward_of_two_forward_threads():
    """Both threads count from the same number: the pair of thread and number tells them apart."""
    capture = Capture()
    for thread, module, numbers in ((MAIN, "tower.a", range(3)), (OTHER, "tower.b", range(1, 6))):
        for number in numbers:
            capture.range(f"{module}.{number}", 100 * number, 100 * number + 90, thread=thread)
            capture.operator("aten::mm", 100 * number + 10, 100 * number + 80, thread=thread, sequence=number)
            capture.kernel(100 * number + 50, 1, thread=thread)
    capture.range("forward", 0, 900)
    capture.range("backward", 1000, 3000)
    at = 1000
    for forward_thread, numbers in ((1, range(3)), (2, range(1, 6))):
        for number in numbers:
            with_node(capture, at, "MmBackward0", sequence=number, forward_thread=forward_thread, duration=2)
            at += 100
    found = [module for phase, module in places(capture) if phase == "backward"]
    assert found == [f"tower.a.{number}" for number in range(3)] + [f"tower.b.{number}" for number in range(1, 6)]


def test_of_operators_with_one_number_the_last_makes_the_node():
    """The number counts nodes made so far: a module that makes none in its beginning shares it with what follows."""
    capture = Capture()
    capture.range("forward", 0, 500)
    capture.range("embedding", 0, 100)
    capture.operator("aten::ones", 10, 20, sequence=7)
    capture.range("linear", 100, 300)
    capture.operator("aten::linear", 110, 200, sequence=7)
    capture.operator("aten::addmm", 120, 190, sequence=7)
    capture.kernel(150, 4)
    capture.range("backward", 600, 900)
    with_node(capture, 650, "AddmmBackward0", sequence=7, duration=5)
    assert places(capture) == [("forward", "linear"), ("backward", "linear")]


def test_the_numbers_of_two_steps():
    """Numbers go on counting; each step's backward leads to its own forward."""
    capture = Capture()
    for step in range(2):
        at = 10_000 * step
        capture.range(f"ProfilerStep#{step}", at, at + 9000)
        capture.range("forward", at, at + 1000)
        capture.range(f"only in step {step}", at + 10, at + 500)
        capture.operator("aten::mm", at + 100, at + 200, sequence=step)
        capture.kernel(at + 150, 3)
        capture.range("backward", at + 2000, at + 3000)
        with_node(capture, at + 2100, "MmBackward0", sequence=step, duration=5)
    made = attributed(capture)
    assert made.steps == 2
    assert made.work.select("step", "phase", "module").rows() == [
        (step, phase, f"only in step {step}") for step in range(2) for phase in ("forward", "backward")
    ]


def test_recomputation_inside_backward():
    """Checkpointed: forward runs again on autograd's thread, in a node's range, with numbers of its own."""
    capture = forward_through("layers.0")
    capture.operator("CheckpointFunction", 20, 300, sequence=4)
    capture.range("backward", 600, 2000)
    tie = {"thread": AUTOGRAD, "sequence": 4, "forward_thread": 1}
    capture.operator("CheckpointFunctionBackward", 700, 1500, **tie)
    capture.operator("aten::mm", 750, 850, thread=AUTOGRAD, sequence=90)
    capture.kernel(800, 20, thread=AUTOGRAD)
    capture.operator("MmBackward0", 900, 1000, thread=AUTOGRAD, sequence=90, forward_thread=2)
    capture.kernel(950, 30, thread=AUTOGRAD)
    assert places(capture, "phase", "role", "duration_ns") == [
        ("forward", "forward", 10), ("backward", "recomputation", 20), ("backward", "backward", 30),
    ]  # fmt: skip


def test_a_range_named_recomputation_says_it_without_operators():
    """As under an NVTX tool: inside a backward node's range, and round the modules that run again."""
    capture = forward_through("blocks.0")
    capture.range("backward", 600, 2000)
    capture.range("blocks.1.down", 700, 1500, thread=AUTOGRAD)
    capture.range("recomputation", 710, 1000, thread=AUTOGRAD)
    capture.range("blocks.0", 720, 900, thread=AUTOGRAD)
    capture.kernel(800, 20, thread=AUTOGRAD)
    capture.kernel(1200, 30, thread=AUTOGRAD)
    assert places(capture, "phase", "role", "module", "duration_ns") == [
        ("forward", "forward", "blocks.0", 10), ("backward", "recomputation", "blocks.0", 20),
        ("backward", "backward", "blocks.1.down", 30),
    ]  # fmt: skip


@pytest.mark.parametrize("thread", [MAIN, AUTOGRAD])
def test_forward_run_again_inside_backward_is_backward(thread: int):
    capture = Capture()
    capture.range("step 0", 0, 3000)
    capture.range("forward", 10, 500)
    capture.kernel(100, 10)
    capture.range("backward", 600, 2000)
    capture.range("forward", 700, 2000, thread=thread)
    capture.kernel(800, 20, thread=thread)
    capture.kernel(2000, 40)
    assert places(capture, "phase", "duration_ns") == [("forward", 10), ("backward", 20), (None, 40)]
    assert attributed(capture).instances.filter(pl.col("what") == "forward").height == 1


def test_forward_beside_another_threads_backward_is_forward():
    """Two threads that train: the second's forward begins and ends while the first runs backward."""
    capture = Capture()
    capture.range("backward", 0, 1000)
    capture.range("forward", 100, 200, thread=OTHER)
    capture.kernel(150, 10, thread=OTHER)
    capture.range("backward", 300, 1200, thread=OTHER)
    capture.kernel(1100, 20, thread=OTHER)
    assert places(capture, "phase") == [("forward",), ("backward",)]


def test_steps_without_marks_are_the_fewer_of_forward_and_optimizer():
    """Two micro-batches for one run of the optimizers, twice."""
    capture = Capture()
    for begin in (0, 10_000):
        for batch in (0, 1000):
            capture.range("forward", begin + batch, begin + batch + 400)
            capture.kernel(begin + batch + 100, 10)
            capture.range("backward", begin + batch + 500, begin + batch + 900)
        capture.range("Optimizer.step#AdamW.step", begin + 3000, begin + 3400)
    assert attributed(capture).steps == 2
    for begin in (0, 10_000):
        capture.range("Optimizer.step#SGD.step", begin + 3500, begin + 3600)
        capture.range("Optimizer.step#Muon.step", begin + 3700, begin + 3800)
    assert attributed(capture).steps == 2  # three optimizers run in each of them
    assert attributed(capture).instances.filter(pl.col("what") == "optimizer").height == 6


@pytest.mark.parametrize("names", [("AdamW", "AdamW"), ("Muon", "AdamW")])
def test_two_optimizers_of_one_unmarked_backward_are_one_step(names: tuple[str, str]):
    """Nothing marks forward; of two optimizers of one class, only the backward passes tell the step."""
    capture = training_steps(steps=3, layers=1)
    steps = [row for row in capture.ranges if row["name"].startswith("ProfilerStep")]
    capture.ranges = [row for row in capture.ranges if row["name"].startswith("layers.")]
    for row in steps:
        for place, name in enumerate(names):
            begin = row["end"] - 100 + 40 * place
            capture.range(f"Optimizer.step#{name}.step", begin, begin + 30)
    assert attributed(capture).steps == 3


def test_a_step_marked_twice_is_one_step():
    """By the profiler and by the user, who leaves the release of gradients outside."""
    capture = Capture()
    for number, begin in enumerate((0, 1000, 2000)):
        capture.range(f"ProfilerStep#{number}", begin, begin + 1000)
        capture.kernel(begin + 10, 5, name=ELEMENTWISE)
        capture.range("step", begin + 100, begin + 900)
        capture.kernel(begin + 200, 5)
    made = attributed(capture)
    assert made.steps == 3
    assert made.work["step"].to_list() == [0, 0, 1, 1, 2, 2]


def test_gradients_accumulated():
    capture = Capture()
    capture.range("backward", 0, 1000)
    name = "torch::autograd::AccumulateGrad"
    capture.operator(f"autograd::engine::evaluate_function: {name}", 100, 300, thread=AUTOGRAD)
    capture.operator(name, 120, 280, thread=AUTOGRAD)
    capture.kernel(200, 7, name=ELEMENTWISE, thread=AUTOGRAD)
    capture.kernel(500, 8, name=ELEMENTWISE, thread=AUTOGRAD)
    assert places(capture, "phase", "role") == [("backward", "gradient accumulation"), ("backward", "backward")]


def test_operators_that_emit_nvtx_wrote(tmp_path: Path):
    """They are ranges for nsys; here they are operators again, and lead backward to its modules."""
    capture = forward_through("layers.3")
    capture.range("aten::mm, seq = 12, op_id = 34", 20, 200)
    capture.range("aten::relu, op_id = 35", 210, 300)
    capture.kernel(250, 11, name=ELEMENTWISE)
    capture.range("backward", 600, 1000)
    capture.range("MmBackward0, seq = 12, op_id = 77", 650, 800, thread=AUTOGRAD)
    capture.range("aten::mm, op_id = 78, sizes = [[1, 2], []]", 660, 700, thread=AUTOGRAD)
    capture.kernel(680, 12, thread=AUTOGRAD)
    made = attribute(read_trace(write_sqlite(nsys_tables(capture), tmp_path / "trace.sqlite")))
    made.self_check()
    assert made.work.select("phase", "operator").rows() == [
        ("forward", "aten::mm"), ("forward", "aten::relu"), ("backward", "aten::mm"),
    ]  # fmt: skip
    assert made.work["module"].to_list() == ["layers.3"] * 3
    assert sorted(made.table.ranges["name"].to_list()) == ["backward", "forward", "layers.3"]


def test_without_a_launch_record_nothing_is_dropped():
    """[13] Time without a launch is in the whole and in no range."""
    capture = Capture()
    capture.range("forward", 0, 10**6)
    capture.kernel(100, 70)
    capture.kernel(200, 30, call=None)
    made = attributed(capture)
    assert (made.busy_ns, made.attributed_ns, made.unattributed_ns) == (100, 70, 30)
    assert made.rows.filter(~pl.col("ranged")).select("phase", "module", "calls", "busy_ns").rows() == [
        (None, None, 1, 30)
    ]


def test_of_an_empty_capture():
    made = attributed(Capture())
    assert (made.busy_ns, made.unattributed_ns, made.steps, made.rows.height) == (0, 0, 1, 0)


NAMES = [
    "forward", "backward", "optimizer", "ProfilerStep#1", "epoch", "layers.0", "layers.0.attention", "layers.1",
    "softmax", "nccl:all_reduce",
]  # fmt: skip
THREADS = [(1, 1), (1, 2), (2, 1), (2, 3)]
"""Processes and threads; two processes have a thread of one number."""


@st.composite
def captures(draw: st.DrawFn) -> Capture:
    """Ranges that nest on each thread, with names that do and do not mean something, and kernels from anywhere."""
    capture = Capture()

    def fill(process: int, thread: int, start: int, end: int, depth: int) -> None:
        at = start
        for _ in range(draw(st.integers(0, 3))):
            if at >= end:
                return
            first = draw(st.integers(at, end - 1))
            last = draw(st.integers(first + 1, end))
            capture.range(draw(st.sampled_from(NAMES)), first, last, process=process, thread=thread)
            if depth < 3:
                fill(process, thread, first, last, depth + 1)
            at = last

    for process, thread in draw(st.lists(st.sampled_from(THREADS), unique=True, max_size=4)):
        fill(process, thread, 0, 60, 0)
    for _ in range(draw(st.integers(1, 12))):
        process, thread = draw(st.sampled_from(THREADS))
        call = draw(st.sampled_from(["cudaLaunchKernel", "cudaLaunchKernel", "cudaLaunchKernel", None]))
        name = draw(st.sampled_from([GEMM, ELEMENTWISE]))
        at, duration = draw(st.integers(-2, 62)), draw(st.integers(0, 10**6))
        capture.kernel(at, duration, name=name, process=process, thread=thread, call=call)
    return capture


def last_begun(ranges: list[Row], at: int) -> Row | None:
    """The last begun of those open; of those begun together the shortest, of equal ones the last."""
    found = [
        row for row in sorted(ranges, key=lambda row: (row["start"], -row["end"])) if row["start"] <= at < row["end"]
    ]
    return found[-1] if found else None


def joined(ranges: list[Row]) -> list[Row]:
    """Those that overlap or touch as one."""
    pieces: list[Row] = []
    for row in sorted(ranges, key=lambda row: row["start"]):
        if pieces and row["start"] <= pieces[-1]["end"]:
            pieces[-1]["end"] = max(pieces[-1]["end"], row["end"])
        else:
            pieces.append(dict(row))
    return pieces


def run_again(capture: Capture, row: Row) -> bool:
    """Whether it is forward inside backward, of its thread or, where that has none, of another."""
    if phase_of(row["name"]) != "forward":
        return False
    backward = [r for r in capture.ranges if phase_of(r["name"]) == "backward" and r["process"] == row["process"]]
    own = [r for r in backward if r["thread"] == row["thread"]]
    return any(r["start"] <= row["start"] < r["end"] and row["end"] <= r["end"] for r in joined(own or backward))


def plainly(capture: Capture, call: Row | None) -> tuple[str | None, str | None, bool]:
    """Phase, module and whether it is ranged, of work with that launch, by looking at every range."""
    if call is None:
        return None, None, False
    ours = [row for row in capture.ranges if row["process"] == call["process"] and not run_again(capture, row)]
    mine = [row for row in ours if row["thread"] == call["thread"]]
    at = call["start"]
    own = last_begun([row for row in mine if phase_of(row["name"])], at)
    if own is None:
        own = last_begun(
            [row for phase in PHASES for row in joined([r for r in ours if phase_of(r["name"]) == phase])], at
        )
    launching = {(row["process"], row["thread"]) for row in capture.calls}
    inner = [row for row in capture.ranges if range_kind(row["name"]) in ("step", "phase")]
    inner = [row for row in inner if not run_again(capture, row)]
    outer = {
        row["name"]
        for row in capture.ranges
        for held in inner
        if (row["process"], row["thread"]) == (held["process"], held["thread"])
        and (row["process"], row["thread"]) in launching
        and row["start"] <= held["start"] <= held["end"] <= row["end"]
        and row["end"] - row["start"] > held["end"] - held["start"]
    }
    module = last_begun([row for row in mine if range_kind(row["name"]) == "module" and row["name"] not in outer], at)
    ranged = any(row["start"] <= at < row["end"] for row in capture.ranges if row["process"] == call["process"])
    phase = phase_of(own["name"]) if own else None
    return phase, module["name"] if module else ROOT if phase else None, ranged


@pytest.mark.slow
@given(captures(), st.sampled_from([2, 1 << 17]))
@settings(max_examples=120, deadline=None)
def test_random_captures(capture: Capture, stretch: int):
    """In stretches or in one go, as in the plain way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places_module, "_STRETCH", stretch)
        made = attributed(capture)
    calls = {(row["process"], row["correlation"]): row for row in capture.calls}
    expected = [plainly(capture, calls.get((row["process"], row["correlation"]))) for row in capture.launched]
    assert made.work.select("phase", "module", "ranged").rows() == expected
    assert made.busy_ns == capture.busy_ns()
    assert made.rows["calls"].sum() == len(capture.launched)
    assert made.rows["busy_ns"].sum() == capture.busy_ns()
    whole = sum(
        row["end"] - row["start"] for row, (_, _, ranged) in zip(capture.launched, expected, strict=True) if ranged
    )
    assert made.attributed_ns == whole


ids = st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=1, max_size=30)


@given(st.lists(st.integers(1, 40), unique=True, min_size=1), ids, st.booleans())
def test_work_is_tied_to_the_call_of_its_id_in_whatever_order_both_stand(
    known: list[int], wanted: list[int | None], counts_up: bool
):
    known = sorted(known) if counts_up else known
    calls = [(at, 1, PROCESS, MAIN, "cudaLaunchKernel", one, None) for at, one in enumerate(known)]
    rows = [(at, 1, 0, 7, "kernel", GEMM, PROCESS, one, None, None) for at, one in enumerate(wanted)]
    tied = with_launches(
        pl.DataFrame(rows, schema=WORK_SCHEMA, orient="row"), pl.DataFrame(calls, schema=CALL_SCHEMA, orient="row")
    )
    places: dict[int | None, int] = {one: at for at, one in enumerate(known)}
    assert tied["launch_row"].to_list() == [places.get(one) for one in wanted]
    assert tied["launch_ns"].to_list() == [places.get(one) for one in wanted]
