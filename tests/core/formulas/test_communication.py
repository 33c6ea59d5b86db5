"""Bytes and seconds of communication, worked out by hand."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.formulas.communication import (
    Bytes,
    Group,
    SharedLayer,
    Transfer,
    bus_bytes_per_s,
    latency_s,
    layer_bytes,
    ring_all_reduces_s,
    transfer_s,
    transfers_of,
)
from stepscope.core.formulas.planned_model import PlannedModel, bubble_turns, chunks_in_flight
from stepscope.core.formulas.transformer import block_shapes, parameter_count
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.model_config import PUBLIC_SHAPES, ModelConfig
from stepscope.core.networks import NETWORKS, Network, measured_network
from stepscope.core.strategies import STRATEGIES
from stepscope.core.study_results import CollectiveFit

SMALL = PlannedModel(config=ModelConfig(name="small", d_model=8, d_ff=16, layers=4, heads=4, vocabulary=32, kv_heads=2))
FP32 = Bytes(parameters=4, gradients=4, compute=4, residual=4)
MIXED = Bytes(parameters=4, gradients=4, compute=2, residual=2)
BLOCK = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8
OUTSIDE = 2 * 32 * 8 + 8


def link_bytes(layout: Layout, sizes: Bytes = FP32, model: PlannedModel = SMALL, seq_len: int = 16) -> dict[str, float]:
    """Bytes that a rank's link carries in a step, by dimension and what it is."""
    found: dict[str, float] = {}
    for transfer in transfers_of(model, layout, seq_len, sizes):
        times = 1 if transfer.when == "step" else layout.micro_batches
        name = f"{transfer.dimension} {transfer.what}"
        found[name] = found.get(name, 0) + times * transfer.link_bytes
    return found


def test_the_parameters_of_a_plan_are_those_of_the_model():
    for config in (SMALL.config, *PUBLIC_SHAPES.values()):
        assert PlannedModel(config=config).parameters == parameter_count(config)
    # Grattafiori et al. 2024 say 8B, 70B and 405B; meta-llama's model cards 8.03B, 70.6B and 405.9B.
    assert [round(parameter_count(c) / 1e9, 2) for c in PUBLIC_SHAPES.values()] == [8.03, 70.55, 405.85]


def test_tensor_parallelism_halves_matrices_and_leaves_norms():
    assert SMALL.local_block(2) == 8 * 8 // 2 + 2 * 2 * 8 + 8 * 8 // 2 + 3 * 8 * 16 // 2 + 2 * 8
    # Four ranks share two heads of keys: each keeps one head of them, 2 wide.
    assert SMALL.local_block(4) == 8 * 8 // 4 + 2 * 2 * 8 + 8 * 8 // 4 + 3 * 8 * 16 // 4 + 2 * 8


def test_experts_multiply_feed_forward_networks():
    model = PlannedModel(config=SMALL.config, experts=4, active=2)
    assert model.block == BLOCK + 3 * 3 * 8 * 16 + 4 * 8
    assert model.local_block(1) + model.local_experts(1, 1) == model.block
    assert model.local_experts(1, 2) == 2 * 3 * 8 * 16
    assert model.flops_per_token(8)[0] == 2 * (BLOCK - 2 * 8 + 3 * 8 * 16 + 4 * 8)


def test_data_parallelism_moves_gradients_twice_less_a_share():
    both = BLOCK * 4 + OUTSIDE
    assert link_bytes(Layout(data=4, shard=1)) == {"data gradients": pytest.approx(2 * 3 / 4 * both * 4)}


@pytest.mark.parametrize(
    ("sharding", "gradients", "parameters"),
    # Of 3/4 of the parameters, times of 4 and of 2 bytes: two micro-batches.
    [("zero1", 2 * 4, 4), ("zero1-master", 4, 2), ("zero2", 2 * 4, 2), ("zero3", 2 * 4, 2 * 2 * 2)],
)
def test_sharding_decides_what_is_sent_and_how_often(sharding: str, gradients: int, parameters: int):
    layout = Layout(data=4, sharding=sharding, shard=4, micro_batches=2)
    both = (BLOCK * 4 + OUTSIDE) * 3 / 4
    assert link_bytes(layout, MIXED) == {
        "data gradients": pytest.approx(gradients * both),
        "data parameters": pytest.approx(parameters * both),
    }


def test_the_lesson_zero1_broadcasts_each_parameter():
    """As many bytes as a gather of all, but a message for each tensor, of which all but the owner's come in."""
    layout = Layout(data=4, sharding="zero1-each", shard=4)
    found = [t for t in transfers_of(SMALL, layout, 16, FP32) if t.what == "parameters"]
    (gathered, *_) = [t for t in transfers_of(SMALL, Layout(data=4, sharding="zero1", shard=4), 16, FP32)
                      if t.what == "parameters"]  # fmt: skip
    assert {t.kind for t in found} == {"broadcast"} and {t.when for t in found} == {"step"}
    assert gathered.kind == "all-gather" and found[0].times == gathered.times * len(block_shapes(SMALL.config))
    assert found[0].message_bytes == BLOCK * 4 // len(block_shapes(SMALL.config))


@pytest.mark.parametrize(
    ("strategy", "sharding"), [("ddp", "ddp"), ("zero1", "zero1"), ("fsdp2", "zero3"), ("fsdp-textbook", "zero3")]
)
def test_a_plan_sends_what_the_strategy_that_runs_does(strategy: str, sharding: str):
    """In fp32, by the record of the strategy (core/strategies.py), to the byte."""
    layout = Layout(data=4, sharding=sharding, shard=1 if sharding == "ddp" else 4)
    both = 4 * (BLOCK * 4 + OUTSIDE)
    assert sum(link_bytes(layout).values()) == STRATEGIES[strategy].sends(both, both, 4)


def test_replicas_reduce_their_shares():
    layout = Layout(data=8, sharding="zero3", shard=4)
    found = {(t.kind, t.group): t for t in transfers_of(SMALL, layout, 16, FP32)}
    across = found["all-reduce", Group(2, 4)]
    assert across.message_bytes == OUTSIDE * 4 / 4
    assert layout.replicas == 2


def test_tensor_parallelism_sends_the_activations_of_a_block_four_times():
    tokens, d, e = 2 * 16, 8, 2
    found = link_bytes(Layout(tensor=2, micro_batch=2, checkpointing="none"), MIXED)
    assert found["tensor activations"] == 4 * (4 + 4) * tokens * d * e / 2
    assert found["tensor kept shares"] == 4 * 2 * tokens * d * e / 2
    again = link_bytes(Layout(tensor=2, micro_batch=2, checkpointing="every-1"), MIXED)
    assert again["tensor activations"] == 4 * (4 + 8) * tokens * d * e / 2
    kept = link_bytes(Layout(tensor=2, micro_batch=2, checkpointing="attention"), MIXED)
    assert kept["tensor activations"] == again["tensor activations"]
    mixed = link_bytes(Layout(tensor=2, micro_batch=2, checkpointing="selective-1"), MIXED)
    assert mixed["tensor activations"] == (4 * (4 + 4) + 3 * 4) * tokens * d * e / 2


def test_context_parallelism_gathers_keys_and_values():
    found = link_bytes(Layout(context=4, micro_batch=1), MIXED)
    keys = 16 * 4 * 2  # S k e
    assert found["context keys and values"] == 4 * (2 + 2) * keys * 3 / 4
    assert found["context their gradients"] == 4 * 2 * keys * 3 / 4
    # Attention that runs again gathers them again; its output, where it is kept, does not need them.
    for checkpointing, times in (("every-1", 2), ("attention", 1), ("selective", 1), ("selective-2", 1)):
        again = link_bytes(Layout(context=4, micro_batch=1, checkpointing=checkpointing), MIXED)
        assert again["context keys and values"] == 4 * (2 + 2 * times) * keys * 3 / 4


def test_a_pipeline_sends_the_residual_stream_of_each_chunk():
    found = link_bytes(Layout(pipeline=2, chunks=2, micro_batches=3), MIXED)
    assert found["pipeline activations"] == found["pipeline their gradients"] == 3 * 2 * 16 * 8 * 2


def test_experts_get_their_tokens_and_give_them_back():
    model = PlannedModel(config=SMALL.config, experts=4, active=2)
    found = link_bytes(Layout(data=4, expert=4, shard=1), MIXED, model)
    assert found["expert tokens"] == 4 * (2 + 2) * 16 * 2 * 8 * 2 * 3 / 4
    dense = (model.local_block(1) * 4 + OUTSIDE) * 4 * 2 * 3 / 4
    assert found["data gradients"] == pytest.approx(dense)  # experts have one holder each


LAYOUTS = st.builds(
    Layout,
    tensor=st.sampled_from([1, 2, 4]), context=st.sampled_from([1, 2]), data=st.sampled_from([1, 2, 4]),
    sharding=st.sampled_from(sorted(SHARDINGS)), pipeline=st.sampled_from([1, 2]),
)  # fmt: skip


@given(layout=LAYOUTS, micro_batch=st.integers(1, 4))
def test_activations_scale_with_the_micro_batch_and_parameters_do_not(layout: Layout, micro_batch: int):
    layout = msgspec.structs.replace(layout, shard=layout.data * layout.context)
    one, several = link_bytes(layout), link_bytes(msgspec.structs.replace(layout, micro_batch=micro_batch))
    for what, count in one.items():
        assert several[what] == pytest.approx(count * (1 if what.startswith("data") else micro_batch))


NETWORK = Network(
    name="by hand", node=4, inside_bytes_per_s=100e9, between_bytes_per_s=10e9, inside_latency_s=1e-6,
    between_latency_s=5e-6, call_s=10e-6, share=0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("group", "rate"),
    [
        (Group(4, 1), 100e9),  # within a node
        (Group(8, 1), 40e9),  # all four of a node send at once
        (Group(8, 2), 20e9),  # two of a node
        (Group(2, 4), 10e9),  # one of each node
        (Group(4, 8), 10e9),
    ],
)
def test_a_ring_is_as_fast_as_what_leaves_a_node(group: Group, rate: float):
    assert bus_bytes_per_s(NETWORK, group) == rate * 0.5


def test_latencies_follow_the_rings_of_nccl():
    assert latency_s(NETWORK, "all-gather", Group(4, 1)) == pytest.approx(10e-6 + 3 * 1e-6)
    assert latency_s(NETWORK, "all-gather", Group(8, 1)) == pytest.approx(10e-6 + 6 * 1e-6 + 5e-6)
    assert latency_s(NETWORK, "all-reduce", Group(16, 1)) == pytest.approx(10e-6 + 2 * (3 * 1e-6 + 2 * 5e-6))
    assert latency_s(NETWORK, "send and receive", Group(2, 4)) == pytest.approx(15e-6)


def test_a_collective_takes_its_latency_and_its_bytes():
    transfer = Transfer("data", "gradients", "all-reduce", 8_000_000, 1, Group(4, 1), "step")
    assert transfer_s(NETWORK, transfer) == pytest.approx(10e-6 + 2 * 3e-6 + 1.5 * 8e6 / 50e9)


def test_an_h100_all_reduce_over_nodes_comes_near_what_is_published():
    """nccl-tests on DGX H100 with 400 Gb/s a GPU report some 370 GB/s of bus bandwidth; the share of 0.8 is below."""
    assert bus_bytes_per_s(NETWORKS["nvlink4-ib400"], Group(64, 1)) == 0.8 * 400e9


def test_bubbles_and_chunks_in_flight():
    assert bubble_turns(Layout(pipeline=4, micro_batches=8)) == 3
    assert bubble_turns(Layout(pipeline=4, chunks=2, micro_batches=8)) == 1.5
    assert [chunks_in_flight(Layout(pipeline=4, micro_batches=8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert chunks_in_flight(Layout(pipeline=4, micro_batches=2), 0) == 2
    # Korthikanti et al. 2022, section 4.2.3: L (1 + (p - 1) / (p v)) of a rank's blocks: here (1 + 3 / 8) x 8 chunks.
    assert chunks_in_flight(Layout(pipeline=4, chunks=2, micro_batches=8), 0) == 11


def measured(
    kind: str, ranks: int, latency_s: float, bytes_per_s: float | None, backend: str = "nccl"
) -> CollectiveFit:
    return CollectiveFit(
        kind=kind, backend=backend, ranks=ranks, latency_s=latency_s, bytes_per_s=bytes_per_s, residual=0.0, count=5
    )


NAMED = NETWORKS["nvlink4-ib400"]
FITTED = measured_network(NAMED, [measured("all-reduce", 2, 1e-3, 1e9), measured("all-gather", 2, 1e-3, None)], "here")


def sent(kind: str, ranks: int, stride: int = 1, message_bytes: int = 10**9) -> Transfer:
    return Transfer("data", "gradients", kind, message_bytes, 1, Group(ranks, stride), "step")


def test_measured_links_take_what_they_took():
    assert transfer_s(FITTED, sent("all-reduce", 2)) == pytest.approx(1.001)
    assert transfer_s(FITTED, sent("all-gather", 2)) == 1e-3  # it did not grow with size
    # Four ranks keep the rate of the bus: 2 (n - 1) / n is 1.5 where it was 1. There are two hops more, up and down.
    assert transfer_s(FITTED, sent("all-reduce", 4)) == pytest.approx(1e-3 + 1.5 + 2 * 2 * NAMED.inside_latency_s)


def test_what_was_not_measured_is_as_the_name_says():
    for transfer in (sent("reduce-scatter", 2), sent("all-reduce", 2, stride=8), sent("all-reduce", 16)):
        assert transfer_s(FITTED, transfer) == transfer_s(NAMED, transfer)


def test_measured_links_are_faster_too_where_links_are():
    assert transfer_s(FITTED.faster(inside=2.0), sent("all-reduce", 2)) == pytest.approx(0.501)
    assert transfer_s(FITTED.faster(between=2.0), sent("all-reduce", 2)) == pytest.approx(1.001)


def test_the_nearest_number_of_ranks_below_counts_and_nccl_before_gloo():
    fits = [measured("all-reduce", ranks, ranks, 1e9) for ranks in (2, 4)]
    found = measured_network(NAMED, [*fits, measured("all-reduce", 3, 9, 1e9, "gloo")], "here")
    chosen = [found.fit_for("all-reduce", ranks) for ranks in (2, 3, 4, 8)]
    assert [fit.ranks for fit in chosen if fit] == [2, 2, 4, 4] and found.fit_for("broadcast", 2) is None


LAYER = SharedLayer(d_model=8, d_ff=16, tokens=64, element_bytes=2, flops_per_s=1000.0, bytes_per_s=100.0)


def test_a_feed_forward_layer_by_hand():
    """D 8, F 16, B 64, e 2, C 1000, W 100 on 4 GPUs: the weights are 768 bytes, the input 1,024."""
    dp_f, dp_b, fsdp_f, fsdp_b, tp_f, tp_b, both_f, both_b = LAYER.passes(4, 2)
    assert [one.flops for one in (dp_f, dp_b, both_f, both_b)] == [12288, 24576, 12288, 24576]  # 6 or 12 B D F / 4
    assert [one.data_bytes for one in (dp_f, dp_b, fsdp_f, fsdp_b)] == [0, 1152, 576, 1152]
    assert [one.tensor_bytes for one in (tp_f, tp_b)] == [1536, 1536]  # 2 * 3 / 4 * 1024
    # Half of the weights among 2 GPUs, and half of the tokens' activations among the other 2.
    assert (both_f.data_bytes, both_f.tensor_bytes) == (192, 512)
    assert (both_b.data_bytes, both_b.tensor_bytes) == (384, 512)
    assert (dp_b.most, fsdp_f.most, fsdp_b.most) == (7.4, 7.4, 7.4)  # 1 + 2 * 64 * 100 / 2000
    assert tp_f.most == pytest.approx(3.4) and tp_b.most == pytest.approx(5.8)
    assert dp_f.most == float("inf") and both_f.most == pytest.approx(7.4 * 3.4)


@pytest.mark.parametrize("place", range(1, 8))
def test_at_the_bound_a_layer_sends_for_as_long_as_it_computes(place: int):
    """At its bound a layout sends for as long as it computes, FSDP with TP each kind of bytes. Where one kind is sent
    after the other, no split of the GPUs between the two axes is bound later than the closed form says."""
    one = LAYER.passes(4, 2)[place]
    data, tensor = (one.most, 1.0) if place < 4 else (1.0, one.most) if place < 6 else (7.4, one.most / 7.4)
    there = LAYER.one_pass(one.layout, one.when, data, tensor, 1 if place in (2, 6) else 0 if place == 4 else 2)
    sends = [sent / LAYER.bytes_per_s for sent in (there.data_bytes, there.tensor_bytes) if sent]
    assert sends == pytest.approx([there.flops / LAYER.flops_per_s] * len(sends))
    if place >= 6:
        a, b = 6.4, one.most / 7.4 - 1
        assert one.most_in_turn == pytest.approx((a + b + a * b) ** 2 / (4 * a * b))
        tried = max((1 + x / 100) * (1 + b * (1 - x / 100 / a)) for x in range(641))
        assert tried <= one.most_in_turn and tried == pytest.approx(one.most_in_turn, rel=1e-3)


@pytest.mark.parametrize(("ranks", "tensor"), [(4, 2), (2, 1)])
def test_closed_forms_are_what_plans_send(ranks: int, tensor: int):
    """All in the bytes of one dtype, 32 sequences of 2 tokens."""
    sizes = Bytes(parameters=2, gradients=2, compute=2, residual=2)
    data = ranks // tensor
    layouts = {
        "DP": Layout(data=ranks, micro_batch=32 // ranks),
        "FSDP": Layout(data=ranks, sharding="zero3", shard=ranks, micro_batch=32 // ranks),
        "TP": Layout(tensor=ranks, micro_batch=32),
        "FSDP with TP": Layout(tensor=tensor, data=data, sharding="zero3", shard=data, micro_batch=32 // data),
    }
    for one in LAYER.passes(ranks, tensor):
        planned = layer_bytes(SMALL.config, layouts[one.layout], 2, sizes, one.when == "forward")
        assert planned == one.data_bytes + one.tensor_bytes, one
    wider = PlannedModel(config=msgspec.structs.replace(SMALL.config, d_ff=32))
    more = wider.flops_per_token(2)[0] - SMALL.flops_per_token(2)[0]
    assert LAYER.passes(ranks, tensor)[0].flops == 64 * more / ranks


def test_the_ring_of_whole_messages_takes_half_as_many_times_longer_as_there_are_ranks():
    assert ring_all_reduces_s(800, 4, 100.0) == (12.0, 24.0)
    link = Network(
        name="", node=8, inside_bytes_per_s=100, between_bytes_per_s=1, share=1.0, call_s=0, inside_latency_s=0
    )
    assert transfer_s(link, Transfer("data", "", "all-reduce", 800, 1, Group(4, 1), "step")) == 12.0
