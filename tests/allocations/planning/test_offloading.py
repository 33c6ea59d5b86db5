"""How many blocks a plan lets keep what they keep in the host's memory, and how long their copies take."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.allocations.planning.search import Machine, planned, search
from stepscope.allocations.planning.times import Clock, copies_s, rates_of, said_of
from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import budget_of_device, budget_of_memory, will_fit
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.checkpointing import offload_of
from stepscope.core.device_spec import DATASHEET, HOST_BYTES_PER_S, pcie_generation
from stepscope.core.layout import Layout
from stepscope.core.model_config import configure
from stepscope.core.networks import NETWORKS
from stepscope.core.units import GIB
from tests.allocations.planning.test_search import question

LONG = question(
    2, fixed={"data": 2, "sharding": "zero3"}, model=configure("8B"), batch_size=2, seq_len=32_768, norm="fused",
    rope="fused", mlp="fused", loss="fused", compile="eager",
)  # fmt: skip
H200 = Machine(
    budget=budget_of_device("H200"), rates=rates_of(DATASHEET["NVIDIA H200"], LONG.workload),
    network=NETWORKS["nvlink4-ib400"],
)  # fmt: skip
LAYOUT = Layout(data=2, shard=2, sharding="zero3", micro_batch=1)
WAITING = "waiting for copies to the host"


def of(blocks: int) -> Layout:
    return msgspec.structs.replace(LAYOUT, checkpointing=f"offload-{blocks}")


def test_what_a_block_of_eight_billion_parameters_sends():
    """Query, key, value and output of attention's products, attention itself, gate and up, in 16 bits; and the
    logsumexp of each row and head in fp32. Not what `down` returns."""
    memory, tokens = RankMemory(LONG.workload, LONG.model), 32_768
    sent = tokens * (5 * 4096 + 2 * 11_008) * 2 + tokens * 32 * 4
    assert memory.offloaded(of(1)) == memory.offloaded(of(20)) == sent
    assert copies_s(of(17), memory, H200.rates) == pytest.approx(sent / 2 / HOST_BYTES_PER_S)
    assert copies_s(LAYOUT, memory, H200.rates) == 0
    planned_so = planned(of(20), memory, Clock(LONG.workload, memory, H200.rates, H200.network))
    assert planned_so.host_bytes == 20 * sent
    alone = msgspec.structs.replace(LONG.workload, batch_size=1, checkpointing="offload-20", dtype="bf16-pure")
    assert estimate(alone).host_bytes == 20 * sent


def test_eight_billion_parameters_on_two_gpus_offload_what_forward_hides():
    """The search ends where no copy is waited for and one more would make copies longer than 0.95 of forward; no
    step of `selective-K` that fits is as fast."""
    (found,) = search(LONG, H200).best
    blocks = offload_of(found.layout.checkpointing)
    assert blocks and found.layout == of(blocks) and not found.time.parts[WAITING] and not found.time.parts["run again"]
    memory = RankMemory(LONG.workload, LONG.model)
    forward_s = Clock(LONG.workload, memory, H200.rates, H200.network).forward_s(found.layout)
    assert copies_s(of(blocks), memory, H200.rates) <= 0.95 * forward_s < copies_s(of(blocks + 1), memory, H200.rates)
    compiled = msgspec.structs.replace(LONG, workload=msgspec.structs.replace(LONG.workload, compile="default"))
    kept, mixed = (
        search(msgspec.structs.replace(LONG, checkpointings=(one,)), H200).best for one in ("selective", "selective-21")
    )
    assert not kept and mixed[0].time.step_s > 1.03 * found.time.step_s
    assert offload_of(search(compiled, H200).best[0].layout.checkpointing) is None


def test_copies_longer_than_forward_are_waited_for():
    memory = RankMemory(LONG.workload, LONG.model)
    clock = Clock(LONG.workload, memory, H200.rates, H200.network)
    hidden, all_of_them = clock.step(of(20)), clock.step(of(34))
    slow = clock.step(msgspec.structs.replace(LAYOUT, checkpointing="selective"))
    assert hidden.step_s == pytest.approx(slow.step_s)
    assert all_of_them.parts[WAITING] == pytest.approx(
        34 * (copies_s(of(34), memory, H200.rates) - clock.forward_s(of(20)))
    )
    assert all_of_them.step_s > 1.05 * hidden.step_s


def test_older_links_hide_fewer_copies():
    """An A100 is on PCIe 4.0, and a device of an unknown name is taken to be."""
    rates = {name: rates_of(DATASHEET[name], LONG.workload) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")}
    assert [one.host_bytes_per_s for one in rates.values()] == [HOST_BYTES_PER_S, HOST_BYTES_PER_S / 2]
    assert "to copy 25 GB a second and from it" in said_of(rates["NVIDIA A100-SXM4-80GB"])
    assert [pcie_generation(name) for name in ("Tesla T4", "NVIDIA B200", "another")] == [3, 5, 4]


def test_a_replayed_step_offloads_nothing():
    """It is planned as before where nobody asked for blocks that offload."""
    replayed = msgspec.structs.replace(LONG, workload=msgspec.structs.replace(LONG.workload, graph="step"))
    (found,) = search(replayed, H200).best
    assert offload_of(found.layout.checkpointing) is None


@given(share=st.floats(0.2, 1.2))
def test_less_memory_lets_more_blocks_offload(share: float):
    """What is found fits; of fewer blocks, the copies are hidden as well or the step does not fit."""
    memory = RankMemory(LONG.workload, LONG.model)
    least, most = (memory.needs(of(blocks), exactly=True).peak for blocks in (34, 1))
    here = msgspec.structs.replace(H200, budget=budget_of_memory(int(1.04 * (least + share * (most - least))) + GIB))
    (found,) = search(LONG, here).best
    blocks = offload_of(found.layout.checkpointing)
    assert found.peak_bytes <= here.room(2)
    if blocks and found.time.parts[WAITING]:
        assert memory.needs(of(blocks - 1), exactly=True).peak > here.room(2)


def test_one_rank_offloads_too():
    asked = question(
        1, fixed={"micro_batch": 1}, batch_size=1, seq_len=32_768, model=configure("2.7B"), compile="eager"
    )
    budget = budget_of_device("H100")
    found = search(asked, Machine(budget=budget, rates=H200.rates, network=H200.network))
    best = next(one for one in found.best if offload_of(one.layout.checkpointing))
    step = msgspec.structs.replace(asked.workload, checkpointing=best.layout.checkpointing)
    assert will_fit(step, budget) and estimate(step).peak_bytes == best.peak_bytes
