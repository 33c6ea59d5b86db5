"""What all comparisons of runs share: what must be the same, which run stands for a cell, and the pairs."""

from typing import Any

import msgspec
import pytest

from stepscope.core.figures import gibibytes, median_within_ms, milliseconds, percent, times_within
from stepscope.core.run import Failure, Run
from stepscope.core.samples import Samples
from stepscope.core.units import in_ms, ms_text
from stepscope.questions.attention_step import StepCell
from stepscope.questions.comparison import (
    ComparedRun,
    Comparison,
    Pair,
    compare_runs,
    missing_cells,
    over_sizes,
)
from stepscope.questions.compile import CompileCell
from stepscope.questions.speed import TimedCell
from tests.conftest import make_run, workload

KINDS: tuple[tuple[type[ComparedRun], str], ...] = ((StepCell, "sdpa"), (CompileCell, "default"), (TimedCell, "bf16"))

OTHERWISE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2}, "batch_size": {"batch_size": 4}, "seq_len": {"seq_len": 32}, "dtype": {"dtype": "fp16"},
    "phase": {"phase": "forward-backward"}, "attention": {"attention": "chunked"},
    "compile": {"compile": "max-autotune"}, "graph": {"graph": "step"}, "optimizer": {"optimizer": "adamw-fused"},
    "checkpointing": {"checkpointing": "every-1"}, "accumulation": {"accumulation": 2}, "seed": {"seed": 1},
    "parallel": {"parallel": "ddp"}, "ranks": {"parallel": "ddp", "ranks": 2},
    "norm": {"norm": "fused"}, "rope": {"rope": "fused"}, "mlp": {"mlp": "fused"}, "loss": {"loss": "fused"},
    "clip": {"clip": 1.0}, "projections": {"projections": "joint"},
}  # fmt: skip
"""Another value of each field of a workload."""


def timed(**changes: Any) -> Run:
    of = {name: changes.pop(name) for name in list(changes) if name in {*OTHERWISE, "layers"}}
    return make_run(workload(**of), forward=[0.1] * 6, backward=[0.2] * 6, **changes)


def compared(*cells: ComparedRun) -> Comparison[Any, Any]:
    return compare_runs(cells, Pair, order=lambda cell: cell.run.created)


@pytest.mark.parametrize(("kind", "value"), KINDS)
@pytest.mark.parametrize("field", OTHERWISE)
def test_runs_that_differ_in_anything_else_are_no_pair(kind: type[ComparedRun], value: str, field: str):
    assert set(OTHERWISE) == {each.name for each in msgspec.structs.fields(workload())}, "a field is not tried here"
    base, other = kind(run=timed()), kind(run=timed(**{kind.FIELD: value}))
    assert [(pair.base, pair.other) for pair in compared(other, base).pairs] == [(base, other)]
    if field != kind.FIELD:
        stranger = kind(run=timed(**{**OTHERWISE[field], kind.FIELD: value}))
        found = compared(base, stranger)
        assert not found.pairs and set(found.alone) == {base, stranger}


@pytest.mark.parametrize(("kind", "value"), KINDS)
@pytest.mark.parametrize("change", [{"device_name": "another"}, {"memory_limit_bytes": 2**33}])
def test_runs_on_another_device_or_within_a_limit_are_no_pair(
    kind: type[ComparedRun], value: str, change: dict[str, Any]
):
    other = timed(**{kind.FIELD: value})
    assert other.environment is not None
    moved = msgspec.structs.replace(other, environment=msgspec.structs.replace(other.environment, **change))
    assert not compared(kind(run=timed()), kind(run=moved)).pairs


def test_the_newest_measured_run_stands_for_a_cell():
    failed = msgspec.structs.replace(
        timed(created="2026-03"), status="out-of-memory", failure=Failure(message="no more", during="measure")
    )
    old, new = timed(created="2026-01"), timed(created="2026-02")
    found = compared(*(StepCell(run=run) for run in (new, failed, old)))
    assert [cell.run for cell in found.cells] == [new] and found.replaced == 2 and not found.unmeasured
    (lost,) = compared(StepCell(run=failed)).unmeasured
    table = missing_cells("Not measured", "attention", [lost], [("a", "b", "c")])
    assert table.rows == ((lost.name, "reference", "ended out-of-memory (measure): no more"), ("a", "b", "c"))


def test_a_pair_says_what_its_samples_say():
    base = CompileCell(run=timed())
    slow = CompileCell(run=make_run(workload(compile="default"), forward=[0.2] * 6, backward=[0.2] * 6))
    few = CompileCell(run=make_run(workload(compile="max-autotune"), forward=[0.2], backward=[0.1]))
    slower, untold = compared(base, slow, few).pairs
    assert slower.verdict == "slower"
    assert slower.won_s("forward") == pytest.approx(-0.1) and slower.won_s("optimizer") is None
    assert untold.verdict == "untold"
    same = compared(base, CompileCell(run=timed(compile="default"))).pairs[0]
    assert same.verdict == "level"


def test_figures_over_sizes_name_their_line():
    cell = TimedCell(run=timed(dtype="bf16"))
    (panel,) = over_sizes("speed-up", [(cell, 2.0, True)], several_shapes=False)
    (point,) = panel.points
    assert (point.line, point.y, point.doubted) == ("bf16", 2.0, True)
    assert point.x == pytest.approx(cell.parameters / 1e6, rel=1e-3)
    (panel,) = over_sizes("speed-up", [(cell, 2.0, False)], several_shapes=True)
    assert panel.points[0].line == "bf16, b2-s16-train"
    assert over_sizes("speed-up", [], several_shapes=False) == ()


def test_figures_are_rounded_and_the_unknown_stays_unknown():
    assert (milliseconds(0.0123456), gibibytes(3 * 2**29), percent(0.12345)) == (12.35, 1.5, 12.3)
    assert (milliseconds(None), gibibytes(None), percent(None), median_within_ms(None)) == (
        None,
        None,
        None,
        (None,) * 3,
    )
    assert times_within(None) == (None, None, None)
    one = Samples(values_s=(0.5,), clock="c")
    assert times_within(one.speedup_over(Samples(values_s=(1.0,), clock="c"))) == (2.0, None, None)
    assert (ms_text(1_234_567), ms_text(1_234_567, 2), ms_text(999_999, 2, 4), ms_text(None)) == (
        "1.235", "1.23", "1.0000", "",
    )  # fmt: skip
    assert (in_ms(20_214_000), in_ms(1_200)) == ("20.21 ms", "0.0012 ms")
