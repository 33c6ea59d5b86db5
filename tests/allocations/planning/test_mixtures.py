"""How many blocks keep more, where not all can: the most that fit, found with few peaks."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.planning.answer import scaling
from stepscope.allocations.planning.search import Machine, Question, Space, mixed, on_line, search, with_most
from stepscope.allocations.planning.times import Clock, rates_of
from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory, will_fit
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.checkpointing import KEEPING, keeping, selective_of
from stepscope.core.device_spec import DATASHEET
from stepscope.core.layout import Layout
from stepscope.core.model_config import configure
from stepscope.core.networks import NETWORKS
from stepscope.core.units import GIB
from tests.allocations.planning.test_search import CONFIG, machine, question

LAYERS = CONFIG.layers
LONG = question(2, fixed={"data": 2, "micro_batch": 2}, batch_size=4, seq_len=8192, dtype="bf16")
SHARDED = tuple(
    Layout(data=2, shard=1 if sharding == "ddp" else 2, sharding=sharding, micro_batch=2)
    for sharding in ("ddp", "zero1", "zero1-master", "zero2", "zero3")
)


def found_among(peaks: list[int], room: int) -> tuple[int, list[int]]:
    """The number of blocks that is found where each has this peak, and the numbers whose peaks were asked for."""
    layers, asked = len(peaks) - 1, list[int]()

    def fits(layout: Layout) -> bool:
        asked.append(selective_of(layout.checkpointing) or 0)
        return peaks[asked[-1]] <= room

    found = with_most(Layout(), layers, on_line(layers, peaks[0], peaks[-1], room), fits)
    return selective_of(found.checkpointing) or 0, asked


@pytest.mark.parametrize(
    ("peaks", "room", "blocks", "asked"),
    [
        # 100 and 7 a block: 30 more are four blocks, and five would be 135.
        ([100 + 7 * k for k in range(11)], 130, 4, [4, 5]),
        ([100 + 7 * k for k in range(11)], 128, 4, [4, 5]),
        # Not a block more, and all but one.
        ([100 + 7 * k for k in range(11)], 106, 0, [1]),
        ([100 + 7 * k for k in range(11)], 169, 9, [9]),
        # The optimizer's peak hides what five blocks keep: the line says 2, and halving finds 6.
        ([max(150, 108 + 7 * k) for k in range(11)], 155, 6, [1, 2, 6, 8, 7]),
        ([5, 9], 8, 0, []),
    ],
)
def test_the_most_blocks_by_hand(peaks: list[int], room: int, blocks: int, asked: list[int]):
    assert found_among(peaks, room) == (blocks, asked)


@given(steps=st.lists(st.integers(0, 50), min_size=1, max_size=130), share=st.floats(0, 1))
def test_the_most_blocks_of_any_peaks_that_grow(steps: list[int], share: float):
    peaks = [sum(steps[:count]) for count in range(len(steps))] + [sum(steps) + 1]
    room = int(share * (peaks[-1] - 1))
    blocks, asked = found_among(peaks, room)
    assert peaks[blocks] <= room < peaks[blocks + 1]
    assert len(asked) <= 2 + math.ceil(math.log2(len(steps)))


@settings(max_examples=25, deadline=None)
@given(layout=st.sampled_from(SHARDED), share=st.floats(-0.1, 1.1), exactly=st.booleans())
def test_a_rank_keeps_as_much_as_fits(layout: Layout, share: float, exactly: bool):
    """The layout fits, and one block more that keeps what its products return does not."""
    memory = RankMemory(LONG.workload, LONG.model)

    def peak(blocks: int) -> int:
        one = msgspec.structs.replace(layout, checkpointing=keeping(blocks, LAYERS))
        return memory.needs(one, exactly=exactly).peak

    room = int(peak(0) + share * (peak(LAYERS) - peak(0)))
    found = mixed(layout, memory, room, exactly=exactly)
    if found is None:
        assert peak(0) > room
        return
    (blocks,) = (blocks for blocks in range(LAYERS + 1) if keeping(blocks, LAYERS) == found.checkpointing)
    assert peak(blocks) <= room
    assert blocks == LAYERS or peak(blocks + 1) > room


@settings(max_examples=6, deadline=None)
@given(share=st.floats(0.1, 0.9), sharding=st.sampled_from(["zero1-master", "zero2", "zero3"]))
def test_the_search_finds_the_mixture_that_fits(share: float, sharding: str):
    """It fits and a block more would not, as its very stages have it, and it is faster than what else fits."""
    asked = msgspec.structs.replace(LONG, fixed={**LONG.fixed, "sharding": sharding})
    memory = RankMemory(asked.workload, asked.model)
    layout = Layout(data=2, shard=2, sharding=sharding, micro_batch=2)

    def peak(checkpointing: str) -> int:
        return memory.needs(msgspec.structs.replace(layout, checkpointing=checkpointing), exactly=True).peak

    most, least = map(peak, KEEPING)
    here = machine(int(1.04 * (least + share * (most - least))) + GIB)
    room = here.room(2)
    found = search(asked, here).best[0]
    blocks = selective_of(found.layout.checkpointing)
    assert found.layout == msgspec.structs.replace(layout, checkpointing=found.layout.checkpointing)
    assert found.peak_bytes == peak(found.layout.checkpointing) <= room
    assert peak(keeping((blocks or 0) + 1, LAYERS)) > room
    others = [
        one.time.step_s
        for checkpointing in ("none", *KEEPING, "every-1")
        for one in search(msgspec.structs.replace(asked, checkpointings=(checkpointing,)), here).best
    ]
    assert others and found.time.step_s <= min(others)


def test_one_rank_keeps_as_much_as_fits():
    asked = question(1, fixed={"micro_batch": 4}, batch_size=4, seq_len=4096)
    alone = {
        one: estimate(msgspec.structs.replace(asked.workload, checkpointing=one)).peak_bytes
        for one in (keeping(blocks, LAYERS) for blocks in range(LAYERS + 1))
    }
    budget = budget_of_memory((alone["attention"] + 2 * alone["selective"]) // 3)
    found = search(asked, Machine(budget=budget, rates=machine().rates, network=NETWORKS["nvlink4-ib400"]))
    best = found.best[0]
    blocks = selective_of(best.layout.checkpointing) or 0
    assert blocks and best.peak_bytes == alone[best.layout.checkpointing]
    fits = [
        will_fit(msgspec.structs.replace(asked.workload, checkpointing=keeping(each, LAYERS)), budget)
        for each in (blocks, blocks + 1)
    ]
    assert fits == [True, False]
    assert found.layouts == found.fitting + sum(found.too_large.values()) == 4


def test_eight_billion_parameters_on_two_gpus():
    """The search ends at a mixture, faster than `every-1` and than `selective-11`, which was found by hand.
    Its blocks cannot offload (test_offloading.py): it is compiled."""
    step = question(
        2, fixed={"data": 2, "sharding": "zero3"}, model=configure("8B"), batch_size=2, seq_len=32_768, norm="fused",
        rope="fused", mlp="fused", loss="fused",
    )  # fmt: skip
    here = Machine(
        budget=budget_of_device("H200"), rates=rates_of(DATASHEET["NVIDIA H200"], step.workload),
        network=NETWORKS["nvlink4-ib400"],
    )  # fmt: skip
    (found,) = search(step, here).best
    blocks = selective_of(found.layout.checkpointing) or 0
    assert blocks > 11
    assert found.peak_bytes <= here.room(2) < 0.96 * here.budget.usable_bytes
    (by_hand,), (whole,) = (
        search(msgspec.structs.replace(step, checkpointings=(one,)), here).best for one in ("selective-11", "every-1")
    )
    assert found.time.step_s < by_hand.time.step_s < whole.time.step_s
    alone, more = (
        search(msgspec.structs.replace(step, checkpointings=(keeping(each, 34),)), here).best
        for each in (blocks, blocks + 1)
    )
    assert (alone, more) == ((found,), ())


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(context=2, shard=2, sharding="zero2"), *SHARDED])
def test_what_computes_more_again_is_slower(layout: Layout):
    """The order of the search: it times nothing beyond a choice that is too slow already."""
    memory = RankMemory(LONG.workload, LONG.model)
    clock = Clock(LONG.workload, memory, machine().rates, NETWORKS["nvlink4-ib400"])
    mixtures = [keeping(blocks, LAYERS) for blocks in range(LAYERS, -1, -1)]
    steps = [
        clock.step(msgspec.structs.replace(layout, checkpointing=one)).step_s for one in ("none", *mixtures, "every-1")
    ]
    assert steps == sorted(steps)


def test_scaling_asks_again_what_checkpointing_fits():
    """A mixture is for the memory of so many ranks: twice as many need none. One that was asked for stays."""
    layout = SHARDED[-1]
    memory = RankMemory(LONG.workload, LONG.model)
    peaks = [memory.needs(msgspec.structs.replace(layout, checkpointing=one), exactly=True).peak for one in KEEPING]
    here = machine(int(1.04 * sum(peaks) / 2) + GIB)
    found = search(msgspec.structs.replace(LONG, fixed={"data": 2, "sharding": "zero3"}), here)
    assert selective_of(found.best[0].layout.checkpointing)
    chosen = {row.ranks: row.best.layout.checkpointing for row in scaling(found, here) if row.best}
    assert chosen[4] == "none"
    asked = msgspec.structs.replace(LONG, fixed={"data": 2, "sharding": "zero3"}, checkpointings=("selective-1",))
    settled = scaling(search(asked, here), here)
    assert {row.best.layout.checkpointing for row in settled if row.best} == {"selective-1"}


def checkpointings(asked: Question, share: float) -> set[str]:
    """The fastest layouts' checkpointing in little memory: `share` of the way from what `every-1` needs to `none`."""
    memory = RankMemory(asked.workload, asked.model)
    layout = next(iter(Space(asked).layouts(next(iter(Space(asked).grids())))))[0]
    low, high = (memory.needs(msgspec.structs.replace(layout, checkpointing=one)).peak for one in ("every-1", "none"))
    found = search(asked, machine(int(1.04 * (low + share * (high - low))) + GIB))
    return {one.layout.checkpointing for one in found.best}


def test_where_a_mixture_is_none():
    """Blocks of a pipeline's stages keep alike: there it is `attention` or `selective`. Where attention is no fused
    operator, or the checkpointing is settled, there is nothing to mix."""
    sharded: dict[str, int | str] = {"data": 2, "micro_batch": 2, "sharding": "ddp"}
    staged: dict[str, int | str] = {"pipeline": 2, "micro_batch": 2, "chunks": 1}
    long = question(2, fixed=sharded, batch_size=4, seq_len=8192)
    shares = [share / 20 for share in range(22)]
    found = {
        name: set[str]().union(*(checkpointings(asked, share) for share in shares))
        for name, asked in {
            "ranks of data": long,
            "stages": msgspec.structs.replace(long, fixed=staged),
            "attention in pieces": question(2, fixed=sharded, batch_size=4, seq_len=1024, attention="reference"),
            "settled": msgspec.structs.replace(long, checkpointings=("every-1",)),
        }.items()
    }
    assert len([one for one in found["ranks of data"] if selective_of(one)]) > 2
    assert found["stages"] == {"none", "selective", "attention", "every-1"}
    assert found["attention in pieces"] <= {"none", "selective", "every-1"}
    assert found["settled"] == {"every-1"}
