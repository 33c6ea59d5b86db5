"""The tables over many captures: each sentence says what its cells' figures say, and no more."""

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from stepscope.analysis.trace_digest import FamilyRow, RoofRow, TraceDigest, digest_of, load_digest, save_digest
from stepscope.analysis.trace_summary import PhaseSummary
from stepscope.core.run import Run
from stepscope.report.kernel_study import StudiedCell, render_kernel_study
from tests.captures import training_steps, write_kineto
from tests.conftest import make_run, workload
from tests.test_trace_checks import summarise


def phase(name: str, busy: float, gemm: float, products: float) -> PhaseSummary:
    return PhaseSummary(
        phase=name, kernels=10, busy_ns=busy, gemm_ns=gemm, range_ns=busy, product_kernels=products,
        expected_products=None, unprofiled_s=None,
    )  # fmt: skip


def digest(*phases: PhaseSummary) -> TraceDigest:
    busy = sum(each.busy_ns for each in phases)
    return TraceDigest(
        profiler="Kineto", steps=1, kernels=30, busy_ns=int(busy), union_ns=int(busy), unattributed_ns=0, copies=0,
        copies_ns=0, gemm_fraction=sum(each.gemm_ns for each in phases) / busy, phases=phases, families=(), top=(),
        top_without_products=(), attention=(), findings=(),
    )  # fmt: skip


def text(made: TraceDigest, question: str) -> str:
    console = Console(width=300)
    with console.capture() as captured:
        console.print(render_kernel_study([StudiedCell(run=make_run(), digest=made)], question))
    return captured.get()


FORWARD = phase("forward", 100, 80, 4)
OPTIMIZER = phase("optimizer", 50, 0, 0)


def test_the_share_falls_for_the_optimizers_sake_where_it_multiplies_nothing():
    backward = phase("backward", 200, 160, 8)
    assert "in 1 of 1 cells: the optimizer multiplies no matrices." in text(digest(FORWARD, backward, OPTIMIZER), "d")
    # One that does (Muon), no optimizer, and a share that does not fall, are not explained by it.
    multiplies = phase("optimizer", 50, 10, 5)
    assert "in 1 of 1 cells." in text(digest(FORWARD, backward, multiplies), "d")
    assert "in 0 of 1 cells." in text(digest(FORWARD, backward), "d")


def test_inference_stands_beside_the_training_that_differs_in_nothing_else():
    """Checkpointing changes no inference: both plans have it beside them. Training on another device has none."""
    runs = [
        make_run(workload(phase="forward"), forward=[0.1]),
        make_run(workload(), forward=[0.1], backward=[0.2]),
        make_run(workload(checkpointing="every-1"), forward=[0.1], backward=[0.2]),
    ]
    environment = runs[0].environment
    assert environment is not None
    elsewhere = msgspec.structs.replace(environment, device_name="another GPU")
    runs.append(msgspec.structs.replace(runs[1], environment=elsewhere))
    assert [line.count(" %") for line in shares(runs)] == [3, 3, 2], "inference, forward and the whole step"


def shares(runs: list[Run]) -> list[str]:
    """The rows of table d: FORWARD is inference, and FORWARD with OPTIMIZER is training."""
    inference, training = digest(FORWARD), digest(FORWARD, OPTIMIZER)
    cells = [StudiedCell(run=run, digest=inference if run.workload.phase == "forward" else training) for run in runs]
    console = Console(width=300)
    with console.capture() as captured:
        console.print(render_kernel_study(cells, "d"))
    return [line for line in captured.get().splitlines() if "-b2-" in line]


@pytest.mark.parametrize(("products", "said"), [(8, True), (9, False)])
def test_twice_the_matrix_products_where_they_are(products: float, said: bool):
    shown = text(digest(FORWARD, phase("backward", 250, 160, products)), "f")
    assert "backward takes 2.50" in shown
    assert ("for twice the matrix products" in shown) == said


def test_no_verdict_for_most_of_a_familys_time_is_mixed():
    family = FamilyRow(family="softmax", phase="forward", calls=1, busy_ns=10)
    roof = RoofRow(family="softmax", device_ns=10, intensity=1, bound_ns=5, over_bound=2, verdict=None)
    made = msgspec.structs.replace(digest(FORWARD), families=(family,), roofs=(roof,))
    shown = text(made, "h")
    assert "2.00 mixed" in shown and "Softmax is mixed in 1 of 1 cells." in shown


def test_a_digest_has_the_figures_of_its_capture(tmp_path: Path):
    summary = summarise(write_kineto(training_steps(steps=2, layers=2), tmp_path / "t.json"))
    made = digest_of(summary, ())
    save_digest(made, tmp_path)
    assert load_digest(tmp_path) == msgspec.json.decode(msgspec.json.encode(made), type=TraceDigest) == made
    assert (made.steps, made.kernels, made.busy_ns) == (2, 34, 3600 + 4800 + 140)
    forward = made.phase("forward")
    assert forward is not None and (forward.kernels, forward.busy_ns, forward.gemm_ns) == (8, 1800, 1600)
