"""What is said before a sweep of cells that will not fit."""

import msgspec

from stepscope.allocations.prediction.fit import budget_of_memory
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.sweep import cells_that_will_not_fit, is_foretold
from stepscope.engine.sweep_plan import Cell, SweepPlan

STEP = TextbookWorkload(
    model=configure("8B"), batch_size=2, seq_len=4096, dtype="bf16", attention="sdpa", checkpointing="every-1",
    optimizer="adamw-fused",
)  # fmt: skip


def step(**changes: object) -> TextbookWorkload:
    return msgspec.structs.replace(STEP, **changes)


def test_a_step_that_ranks_share_is_judged_by_what_a_rank_keeps():
    """16 bytes a parameter: 121 GiB in one process, and half of it in each of two ranks that shard all."""
    alone, sharded, whole = step(), step(parallel="fsdp2", ranks=2), step(parallel="ddp", ranks=2)
    cells = tuple(Cell(workload=workload) for workload in (alone, sharded, whole))
    found = cells_that_will_not_fit(SweepPlan(cells=cells), budget_of_memory(110 * 2**30))
    assert found == [alone, whole]


def test_nothing_is_foretold_of_ranks_that_no_layout_stands_for():
    assert is_foretold(step(parallel="zero1", ranks=2))
    assert not is_foretold(step(parallel="tensor", ranks=2))
    assert not is_foretold(step(parallel="fsdp2:offload=yes", ranks=2))
    assert is_foretold(step(parallel="fsdp2", ranks=2, loss="fused"))
    assert not is_foretold(step(parallel="fsdp2", ranks=2, loss="liger"))
    assert is_foretold(step(loss="fused"))
