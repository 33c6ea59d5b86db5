"""The tables over many captures: each sentence says what its cells' figures say, and no more."""

from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import Answer
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.questions.kernels import MISSING, CapturedCell, _price_of_profiling, answer_kernels, longest_of_both
from stepscope.traces.captures.digest import (
    FamilyRow,
    RoofRow,
    TraceDigest,
    digest_of,
    load_digest,
    save_digest,
)
from stepscope.traces.captures.summary import AttentionRow, KernelRow, PhaseSummary
from tests.captures import training_steps, write_kineto
from tests.conftest import make_run, workload
from tests.textbook import textbook
from tests.traces.captures.test_checks import summarise


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


def answer(made: TraceDigest, question: str) -> Answer:
    return answer_kernels([CapturedCell(run=make_run(), digest=made)], question)


def said(made: TraceDigest, question: str) -> str:
    return " ".join(finding.sentence for finding in answer(made, question).findings)


FORWARD = phase("forward", 100, 80, 4)
OPTIMIZER = phase("optimizer", 50, 0, 0)


def test_the_share_falls_for_the_optimizers_sake_where_it_multiplies_nothing():
    backward = phase("backward", 200, 160, 8)
    assert "in 1 of 1 cells: the optimizer multiplies no matrices." in said(digest(FORWARD, backward, OPTIMIZER), "d")
    # One that does (Muon), no optimizer, and a share that does not fall, are not explained by it.
    multiplies = phase("optimizer", 50, 10, 5)
    assert "in 1 of 1 cells." in said(digest(FORWARD, backward, multiplies), "d")
    assert "in 0 of 1 cells." in said(digest(FORWARD, backward), "d")


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
    assert [sum(share is not None for share in row[1:]) for row in shares(runs)] == [3, 3, 2]


def shares(runs: list[Run]) -> tuple[tuple[object, ...], ...]:
    """The rows of table d, of inference, forward and the whole step: training has an optimizer, and no backward."""
    inference, training = digest(FORWARD), digest(FORWARD, OPTIMIZER)
    cells = [CapturedCell(run=run, digest=inference if run.workload.phase == "forward" else training) for run in runs]
    return answer_kernels(cells, "d").tables[0].rows


@pytest.mark.parametrize(("products", "twice"), [(8, True), (9, False)])
def test_twice_the_matrix_products_where_they_are(products: float, twice: bool):
    sentence = said(digest(FORWARD, phase("backward", 250, 160, products)), "f")
    assert "backward takes 2.50" in sentence
    assert ("for twice the matrix products" in sentence) == twice


def test_no_verdict_for_most_of_a_familys_time_is_mixed():
    family = FamilyRow(family="softmax", phase="forward", calls=1, busy_ns=10)
    roof = RoofRow(family="softmax", device_ns=10, intensity=1, bound_ns=5, over_bound=2, verdict=None)
    made = msgspec.structs.replace(digest(FORWARD), families=(family,), roofs=(roof,))
    assert answer(made, "h").tables[0].rows[0][1:] == ("2.00 mixed",)
    assert said(made, "h") == "Softmax is mixed in 1 of 1 cells."


def kernel(name: str, of: str, busy: float) -> KernelRow:
    return KernelRow(phase=of, name=name, family="other", calls=2, busy_ns=busy, share=0.1)


def test_the_longest_of_both_phases_by_the_longest_of_each():
    """`b` is first in neither phase, and in both together; where a ranking was cut short, it may not be known."""
    phases = (FORWARD, phase("backward", 200, 160, 8))
    rows = [
        kernel("a", "forward", 40),
        kernel("b", "forward", 35),
        kernel("c", "backward", 50),
        kernel("b", "backward", 45),
    ]
    both, *_ = longest_of_both(msgspec.structs.replace(digest(*phases), top=tuple(rows)))
    assert (both.name, both.busy_ns, both.calls, both.phase) == ("b", 80, 4, "forward + backward")
    assert both.share == pytest.approx(80 / 300)

    cut = [kernel(f"k{i}", "forward", 34) for i in range(6)]  # c may take 34 of forward: 84 together
    assert longest_of_both(msgspec.structs.replace(digest(*phases), top=(*rows, *cut))) == []
    apart = [kernel("a", "forward", 90), kernel("c", "backward", 50)]  # nothing is cut: `a` takes no time in backward
    both = longest_of_both(msgspec.structs.replace(digest(*phases), top=tuple(apart)))
    assert [(row.name, row.busy_ns) for row in both] == [("a", 90), ("c", 50)]


def test_the_kernels_of_softmax_and_its_work_are_figures():
    parts = (("scores product (Q K^T)", 40.0, 4_000_000), ("scale and mask", 5.0, None),
             ("softmax", 20.0, 500_000), ("output product (P V)", 60.0, 4_000_000))  # fmt: skip
    attention = tuple(AttentionRow(part=part, busy_ns=ns * 1e3, flops=flops) for part, ns, flops in parts)
    made = msgspec.structs.replace(
        digest(FORWARD), attention=attention, softmax_kernels=(kernel("exp_kernel", "forward", 15e3),)
    )
    found = answer(made, "ei")
    row = dict(zip(found.tables[0].columns, found.tables[0].rows[0], strict=True))
    layers = textbook(make_run()).model.layers
    assert row["softmax of a layer µs"] == 20 / layers
    assert (row["products GFLOP"], row["softmax GFLOP"]) == (0.008, 0.0005)
    assert (row["time ratio"], row["FLOP ratio"], row["ratio of ratios"]) == (5.0, 16.0, 3.2)
    assert found.tables[1].rows[0][1:] == ("exp_kernel", 2, 0.015, 10.0)


def test_a_cell_that_ran_out_of_memory_is_a_row_of_every_table():
    """A step of 128 tokens was captured, one of 4096 ran out of memory: the tables by cell and by length have both."""
    failed = make_run(workload(phase="train", seq_len=4096), status="out-of-memory")
    phases = digest(phase("forward", 100e6, 70e6, 4), phase("backward", 200e6, 130e6, 8))
    made = msgspec.structs.replace(phases, top=(kernel("sgemm", "forward", 60e6), kernel("dgrad", "backward", 90e6)))
    found = answer_kernels(
        [CapturedCell(run=make_run(workload(phase="train", seq_len=128)), digest=made)], "abd", [failed]
    )
    by_length = next(table for table in found.tables if table.title.startswith("(b) The kernel that takes longest by"))
    assert by_length.columns == ("model", "tokens", "training: forward", "training: backward")
    assert [row[1:] for row in by_length.rows] == [(128, "sgemm (10.0 %)", "dgrad (10.0 %)"), (4096, "OOM", "OOM")]
    by_letter = {table.title[:3]: table for table in found.tables if table is not by_length}
    for letter in ("(a)", "(b)", "(d)"):
        assert "s4096" in str(by_letter[letter].rows[-1][0]) and by_letter[letter].rows[-1][1] == "OOM"
    ((cell, why),) = found.table(MISSING).rows
    assert "s4096" in str(cell) and "out-of-memory" in str(why)


def test_a_digest_has_the_figures_of_its_capture(tmp_path: Path):
    summary = summarise(write_kineto(training_steps(steps=2, layers=2), tmp_path / "t.json"))
    made = digest_of(summary, ())
    save_digest(made, tmp_path)
    assert load_digest(tmp_path) == msgspec.json.decode(msgspec.json.encode(made), type=TraceDigest) == made
    assert (made.steps, made.kernels, made.busy_ns) == (2, 34, 3600 + 4800 + 140)
    forward = made.phase("forward")
    assert forward is not None and (forward.kernels, forward.busy_ns, forward.gemm_ns) == (8, 1800, 1600)


def test_no_two_columns_share_a_head():
    kept = Path(__file__).parents[2] / "results" / "h200" / "kernels"
    cells = [
        CapturedCell(run=load_run(file), digest=made, other=load_digest(file.parent, "nsys"))
        for file in find_run_files(kept)
        if (made := load_digest(file.parent))
    ]
    tables = answer_kernels(cells).tables
    assert len(tables) >= 8
    for table in tables:
        assert len(set(table.columns)) == len(table.columns), table.columns


def captured(seq_len: int, softmax: float, elementwise: float, **times: list[float]) -> CapturedCell:
    """A cell of inference of this length, whose forward has so much of two families."""
    rows = tuple(
        FamilyRow(family=family, phase="forward", calls=1, busy_ns=ns)
        for family, ns in (("softmax", softmax), ("activation/elementwise", elementwise))
    )
    longest = (kernel("softmax_warp_forward", "forward", softmax),)
    forward = digest(phase("forward", softmax + elementwise, 0, 4))
    made = msgspec.structs.replace(forward, families=rows, top_without_products=longest)
    return CapturedCell(run=make_run(workload(phase="forward", seq_len=seq_len), **times), digest=made)


def test_what_grows_faster_than_the_tokens_is_said_to_work_on_the_scores():
    sentence = " ".join(
        f.sentence for f in answer_kernels([captured(64, 10, 50), captured(256, 160, 200)], "c").findings
    )
    assert (
        "From 64 to 256 tokens a sequence, over 1 pair of cells, forward takes 16 times as long in softmax, 4 times"
        in (sentence)
    )
    assert "What grows faster than the 4 times as many tokens works on the scores" in sentence
    assert not answer_kernels([captured(64, 10, 50)], "c").findings
    even = answer_kernels([captured(64, 10, 50), captured(256, 40, 200)], "c").findings[0].sentence
    assert "None grows much faster than the tokens do, 4 times." in even


def test_the_host_sets_the_time_where_kernels_fill_little_of_it():
    """Forward takes 1 us by the timer and its kernels 100 ns; backward 1.2 us and 200 ns."""
    made = digest(FORWARD, phase("backward", 200, 160, 8))
    cell = CapturedCell(run=make_run(forward=[1e-6], backward=[1.2e-6]), digest=made)
    answered = answer_kernels([cell], "f")
    assert [row[1:3] for row in answered.tables[0].rows] == [(2.0, 1.2)]
    sentence = answered.findings[-1].sentence
    assert "By the timer backward takes 1.20 times as long as forward." in sentence
    assert "kernels fill 10.0 % of forward and 16.7 % of backward: the host sets the time there" in sentence
    full = CapturedCell(run=make_run(forward=[1e-7], backward=[2e-7]), digest=made)
    assert "the host" not in answer_kernels([full], "f").findings[-1].sentence


def test_a_ranking_of_both_phases_is_as_long_as_what_was_kept_tells():
    rows = (kernel("a", "forward", 40), kernel("b", "backward", 90), kernel("c", "backward", 20))
    made = msgspec.structs.replace(digest(FORWARD, phase("backward", 200, 160, 8)), top=rows)
    table = answer(made, "j").tables[0]
    assert [row[1:3] for row in table.rows] == [(1, "b"), (2, "a"), (3, "c")]


def test_the_price_of_profiling_is_said_as_it_was_measured():
    """A kernel of the short step costs 2 us more, one of the long step a tenth of that, hidden behind the device."""
    added = [(2e-6, 4e-6, "short"), (2e-7, 1e-4, "long")]
    sentence = _price_of_profiling(added).sentence
    assert "adds 200 ns to 2 us to each kernel" in sentence
    assert "is slowed 1.50 times" in sentence and "(long) 1.00 times: small models" in sentence
    assert "small models" not in _price_of_profiling([(2e-7, 4e-6, "short"), (1e-4, 1e-4, "long")]).sentence
