"""The search over layouts: which can be, which fit, and which is fastest."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.planning.answer import scaling, sensitivity, stops_at
from stepscope.allocations.planning.search import Machine, Question, Space, search
from stepscope.allocations.planning.times import rates_of
from stepscope.allocations.prediction.fit import budget_of_memory, divisors, fit
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.device_spec import DATASHEET
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.layout import Layout, parse_layout, settled
from stepscope.core.model_config import ModelConfig
from stepscope.core.networks import NETWORKS
from stepscope.core.units import GIB
from stepscope.core.workloads import TextbookWorkload

CONFIG = ModelConfig(name="test", d_model=512, d_ff=1024, layers=8, heads=8, vocabulary=1024, kv_heads=4)


def question(ranks: int, *, experts: int = 1, fixed: dict[str, int | str] | None = None, **fields: object) -> Question:
    usual: dict[str, object] = {
        "model": CONFIG, "batch_size": 16, "seq_len": 512, "dtype": "bf16", "attention": "flash", "compile": "default",
        "optimizer": "adamw-fused",
    }  # fmt: skip
    workload = TextbookWorkload(**{**usual, **fields})  # type: ignore[arg-type]
    model = PlannedModel(config=workload.model, experts=experts)
    return Question(workload=workload, model=model, ranks=ranks, node=8, fixed=fixed or {})


def machine(memory_bytes: int = 80 * GIB, workload: TextbookWorkload | None = None) -> Machine:
    step = workload or question(1).workload
    rates = rates_of(DATASHEET["NVIDIA H100 80GB HBM3"], step)
    return Machine(budget=budget_of_memory(memory_bytes), rates=rates, network=NETWORKS["nvlink4-ib400"])


def test_every_grid_shares_out_all_ranks():
    space = Space(question(16))
    grids = list(space.grids())
    assert all(g.tensor * g.context * g.pipeline * g.data == 16 for g in grids)
    # 16 = 2^4 over four dimensions: (4 + 3 choose 3).
    assert space.grids_seen == 35 == len(grids) + sum(space.refused.values())
    assert space.refused == {"tensor parallel ranks do not divide the heads": 1, "more pipeline stages than blocks": 1}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (question(3, fixed={"tensor": 3}), "tensor parallel ranks do not divide the heads"),
        (question(32, fixed={"data": 32}), "data parallel ranks do not divide the batch"),
        (question(4, fixed={"context": 4}, seq_len=500), "context parallel ranks do not divide the sequence"),
        (question(2, fixed={"context": 2}, attention="reference"), "context parallel needs fused attention"),
        (question(2, fixed={"tensor": 2}, loss="fused", compile="eager"), "a fused loss takes the whole vocabulary"),
        (question(16, fixed={"pipeline": 16}), "more pipeline stages than blocks"),
        (
            msgspec.structs.replace(question(2, fixed={"pipeline": 2}), checkpointings=("selective-2",)),
            "blocks that keep unlike, or offload (--checkpointing), are not divided among pipeline stages",
        ),
    ],
)
def test_a_grid_that_cannot_be_has_a_reason(asked: Question, reason: str):
    space = Space(asked)
    assert list(space.grids()) == []
    assert [name for name in space.refused if name.startswith(reason)]


def test_settled_dimensions_stay():
    found = search(question(8, fixed={"tensor": 2, "sharding": "zero3", "micro_batch": 2}), machine())
    assert found.best
    for one in found.best:
        assert one.layout.tensor == 2
        assert one.layout.micro_batch == 2
        assert one.layout.sharding == "zero3" or one.layout.data * one.layout.context == 1


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_what_settles_a_layout_leaves_no_other(ranks: int, experts: int):
    asked = question(ranks, experts=experts)
    layouts = [layout for grid in Space(asked).grids() for alike in Space(asked).layouts(grid) for layout in alike]
    assert len(layouts) > 3
    for layout in layouts[::7]:
        alone = msgspec.structs.replace(
            asked, fixed=parse_layout(settled(layout, experts)), checkpointings=(layout.checkpointing,)
        )
        space = Space(alone)
        assert [one for grid in space.grids() for alike in space.layouts(grid) for one in alike] == [layout]


def test_interleaved_schedules_take_micro_batches_in_multiples_of_the_pipeline():
    space = Space(question(4, fixed={"pipeline": 4, "chunks": 2}))
    layouts = [layout for grid in space.grids() for alike in space.layouts(grid) for layout in alike]
    assert layouts
    assert all(layout.micro_batches % 4 == 0 for layout in layouts)


def test_one_rank_agrees_with_fit_to_the_byte():
    asked = question(1)
    found = search(asked, machine(3 * GIB))
    assert found.best
    for one in found.best:
        workload = msgspec.structs.replace(
            asked.workload, accumulation=one.layout.micro_batches, checkpointing=one.layout.checkpointing
        )
        alone = fit(workload, budget_of_memory(3 * GIB))
        assert (one.peak_bytes, True) == (alone.estimate.peak_bytes, alone.fits)


def test_what_is_found_is_the_fastest_that_fits():
    found = search(question(8), machine())
    steps = [one.time.step_s for one in found.best]
    assert steps == sorted(steps)
    assert found.layouts == found.fitting + sum(found.too_large.values())
    tight = search(question(8), machine(GIB + 256 * 2**20))
    assert 0 < tight.fitting < found.fitting
    assert tight.best[0].time.step_s >= found.best[0].time.step_s


def test_where_nothing_fits_the_nearest_is_named():
    found = search(question(8), machine(GIB + 2**20))
    assert (found.best, found.fitting) == ((), 0)
    assert found.nearest is not None
    assert found.nearest.peak_bytes > 2**20


@pytest.mark.parametrize("checkpointing", ["selective", "every-1"])
def test_what_fits_by_its_very_stages_fits(checkpointing: str):
    """Where parameters come and go, interpolation counts more than the stage needs."""
    asked = msgspec.structs.replace(
        question(2, fixed={"data": 2, "sharding": "zero3", "micro_batch": 4}, seq_len=4096),
        checkpointings=(checkpointing,),
    )
    memory = RankMemory(asked.workload, asked.model)
    layout = Layout(data=2, sharding="zero3", shard=2, micro_batch=4, micro_batches=2, checkpointing=checkpointing)
    quick, exact = memory.needs(layout).peak, memory.needs(layout, exactly=True).peak
    assert exact < quick
    (found,) = search(asked, machine(int(1.04 * (exact + quick) / 2) + GIB)).best
    assert (found.layout, found.peak_bytes) == (layout, exact)
    none = search(asked, machine(int(1.04 * exact) + GIB - 2**20))
    assert (none.best, none.fitting, none.layouts) == ((), 0, sum(none.too_large.values()))


@settings(max_examples=8, deadline=None)
@given(small=st.floats(1.05, 1.6), more=st.floats(0, 1))
def test_more_memory_never_makes_fewer_layouts_fit(small: float, more: float):
    few, many = (search(question(4), machine(int(size * GIB)), shown=1) for size in (small, small + more))
    assert few.fitting <= many.fitting


def test_experts_are_shared_out():
    found = search(question(4, experts=4, fixed={"expert": 4}), machine())
    assert {one.layout.expert for one in found.best} == {4}
    assert all(one.time.parts["expert parallel"] > 0 for one in found.best)


def test_scaling_keeps_the_batch():
    found = search(question(4), machine())
    rows = scaling(found, machine())
    assert [row.ranks for row in rows] == [1, 2, 4, 8, 16, 32]
    assert rows[2].best == found.best[0]
    stop = stops_at(rows, 4)
    assert stop is None or stop.ranks >= 4


def test_faster_links_never_slow_the_best_step():
    found = search(question(16), machine())
    rows = sensitivity(found, machine())
    for links in ("within a node", "between nodes"):
        steps = [row.best.time.step_s for row in rows if row.links == links]
        assert steps == sorted(steps, reverse=True)
        assert len(steps) == 4


def test_the_simplest_of_nearly_the_same_speed():
    found = search(question(16, batch_size=64), machine())
    if found.simplest is not None:
        assert found.simplest.time.step_s <= 1.05 * found.best[0].time.step_s


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert Layout().ranks == 1
