"""Which layout a stored run is, and plans beside published figures."""

from pathlib import Path

import pytest

from stepscope.allocations.planning.answer import PUBLISHED, answer_verification
from stepscope.allocations.prediction.layouts import RankMemory, bytes_of
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.layout import Layout, layout_of, step_of
from stepscope.core.model_config import configure
from stepscope.core.run_directory import load_runs
from stepscope.core.workloads import TextbookWorkload


def ran(parallel: str, ranks: int, **fields: object) -> TextbookWorkload:
    return TextbookWorkload(model=configure("tiny"), batch_size=8, parallel=parallel, ranks=ranks, **fields)  # type: ignore[arg-type]


def test_a_run_of_several_ranks_has_a_layout():
    assert layout_of(ran("none", 1, accumulation=2)) == Layout(micro_batch=4, micro_batches=2)
    assert layout_of(ran("ddp-bucketed", 4)) == Layout(data=4, sharding="ddp-views", micro_batch=2)
    assert layout_of(ran("ddp-flat", 4)) == Layout(data=4, sharding="ddp-after", micro_batch=2)
    assert layout_of(ran("ddp-naive", 4)) == Layout(data=4, sharding="ddp-each-after", micro_batch=2)
    assert layout_of(ran("ddp:bucket=50", 4)) == Layout(data=4, micro_batch=2)
    assert layout_of(ran("zero1", 2)) == Layout(data=2, sharding="zero1-each", shard=2, micro_batch=4)
    assert layout_of(ran("fsdp2", 2)) == Layout(data=2, sharding="zero3-autocast", shard=2, micro_batch=4)
    in_bf16 = layout_of(ran("fsdp2:compute=bf16", 2, dtype="bf16"))
    assert in_bf16 == Layout(data=2, sharding="zero3", shard=2, micro_batch=4)
    for unplanned in ("tensor", "fsdp2:reshard=no", "fsdp2:offload=yes"):
        assert layout_of(ran(unplanned, 2)) is None


def test_a_layout_has_a_run_where_a_strategy_has_it():
    step = ran("none", 1, dtype="bf16", attention="sdpa")
    sharded = Layout(data=2, sharding="zero3", shard=2, micro_batch=2, micro_batches=2, checkpointing="selective-3")
    found = step_of(step, sharded)
    assert found == ran(
        "fsdp2:compute=bf16", 2, accumulation=2, dtype="bf16", attention="sdpa", checkpointing="selective-3"
    )
    alone = step_of(step, Layout(micro_batch=4, micro_batches=2))
    assert alone == ran("none", 1, accumulation=2, dtype="bf16", attention="sdpa")
    plain = step_of(step, Layout(data=4, micro_batch=2))
    assert plain is not None and plain.parallel == "ddp"
    for kind in ("zero1", "zero1-each"):  # the lesson runs both: they differ in their messages alone
        lesson = step_of(step, Layout(data=4, sharding=kind, shard=4, micro_batch=2))
        assert lesson is not None and lesson.parallel == "zero1"
    of_no_strategy = (
        Layout(tensor=2, micro_batch=8), Layout(data=2, sharding="zero2", shard=2, micro_batch=4),
        Layout(context=2, sharding="zero3", shard=2, micro_batch=8),
    )  # fmt: skip
    assert [step_of(step, one) for one in of_no_strategy] == [None] * 3
    assert (
        step_of(ran("none", 1, dtype="bf16-master", optimizer="adamw-one-launch"), Layout(data=2, micro_batch=4))
        is None
    )


def test_fsdp_under_autocast_gathers_what_is_stored_and_casts_it():
    step = TextbookWorkload(model=configure("small"), batch_size=4, seq_len=512, dtype="bf16", attention="sdpa")
    memory = RankMemory(step, PlannedModel(config=step.model))
    cast, wide = (
        memory.needs(Layout(data=2, shard=2, sharding=sharding, micro_batch=2), exactly=True)
        for sharding in ("zero3", "zero3-autocast")
    )
    assert wide.gathered > cast.gathered  # at another moment of the step
    assert (wide.parameters, wide.moments) == (cast.parameters, cast.moments)
    assert bytes_of(step, "zero3-autocast").residual == 4


@pytest.mark.parametrize("folder", ["h100-x2", "h200-x2"])
def test_memory_of_ranks_is_within_three_per_cent_of_what_was_measured(folder: str):
    """Of the lessons those without hooks in backward: hooks kept modules alive, and what two layers of the check needed
    was still there when these runs were measured."""
    runs, faults = load_runs([Path(__file__).parents[3] / "results" / folder / "parallel"])
    assert not faults
    rows = answer_verification(runs).table("Stored runs").rows
    off = {
        str(row[0]): float(row[6]) / 100
        for row in rows
        if isinstance(row[6], float) and not any(lesson in str(row[0]) for lesson in ("overlap", "bucketed"))
    }
    assert off
    assert {name: share for name, share in off.items() if abs(share) > 0.03} == {}


def test_every_published_figure_has_a_plan():
    answer = answer_verification([])
    rows = answer.table("Published figures").rows
    assert len(rows) == len(PUBLISHED)
    assert [table.title for table in answer.tables] == ["Published figures"]
    for one in PUBLISHED:
        tokens = one.batch_size * one.seq_len
        assert one.layout.data * one.layout.micro_batch * one.layout.micro_batches == one.batch_size
        if "405B" in one.model:
            assert tokens == pytest.approx(16.8e6, rel=0.01)  # "16M" in the paper
            assert one.layout.ranks in (8192, 16384)


def test_blocks_compiled_one_by_one_have_the_peak_of_an_eager_step():
    """With fused parts between."""
    runs, faults = load_runs([Path(__file__).parents[3] / "results" / "h100-x2" / "parallel"])
    assert not faults
    rows = answer_verification(runs).table("Stored runs").rows
    compiled = [row for row in rows if "compile-blocks" in str(row[0]) and "-x2" not in str(row[0])]
    assert compiled
    assert all(row[5] == pytest.approx(row[4], rel=1e-6) for row in compiled)


def test_steps_that_wait_are_told_apart():
    """By the part of the step in which the device computes, whatever it waits for."""
    runs, faults = load_runs([Path(__file__).parents[3] / "results" / "h200" / "best"])
    assert not faults
    answer = answer_verification(runs)
    shares = {str(row[0]): row[7] for row in answer.table("Stored runs").rows}
    assert shares["small-b4-s512-bf16-train-sdpa-compile-default-adamw-fused"] == pytest.approx(0.605, abs=0.01)
    kinds = {finding.kind: finding for finding in answer.findings}
    assert kinds["steps-waiting"].evidence["steps"] == sum(float(str(share)) < 0.8 for share in shares.values())
    worst = kinds["steps-busy"].evidence["worst"]
    assert isinstance(worst, float)
    assert worst <= max(abs(float(str(row[3]))) for row in answer.table("Stored runs").rows)
