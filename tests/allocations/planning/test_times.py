"""The time of a step, worked out by hand and against runs that were stored."""

import gzip
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.allocations.planning.times import (
    ATTENTION_SHARES,
    MATMUL_SHARES,
    OTHERS_BESIDE,
    PARTS,
    PRODUCTS_BESIDE,
    UNIT_S,
    Clock,
    Rates,
    _added,  # pyright: ignore[reportPrivateUsage]
    _Hiding,  # pyright: ignore[reportPrivateUsage]
    attention_share,
    rates_of,
)
from stepscope.allocations.prediction.layouts import RankMemory, bytes_of
from stepscope.core.device_spec import DATASHEET, DeviceSpec
from stepscope.core.errors import InputError
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.formulas.communication import Copies, data_copies
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.formulas.transformer import step_flops
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.networks import Network
from stepscope.core.run_directory import load_runs
from stepscope.core.workloads import TextbookWorkload

CONFIG = ModelConfig(name="test", d_model=512, d_ff=1024, layers=8, heads=8, vocabulary=1024)
RATES = Rates(
    peak_flops_per_s=2e14, matmul_flops_per_s=1e14, attention_flops_per_s=5e13, elementwise_bytes_per_s=1e12,
    fused_bytes_per_s=2e12, optimizer_bytes_per_s=1e12, launch_s=0.0, assumptions=(),
)  # fmt: skip
NETWORK = Network(
    name="by hand", node=8, inside_bytes_per_s=100e9, between_bytes_per_s=10e9, inside_latency_s=0.0,
    between_latency_s=0.0, call_s=0.0, share=1.0,
)  # fmt: skip
TOKENS, D, F = 512, 512, 1024
PEAK = 989.4e12
"""FLOPs in bf16 that the datasheet of an H200 names."""


def step(layout: Layout, *, network: Network = NETWORK, rates: Rates = RATES, **fields: object):
    usual: dict[str, object] = {
        "model": CONFIG, "batch_size": layout.data * layout.micro_batch * layout.micro_batches, "seq_len": 512,
        "dtype": "bf16", "attention": "flash", "compile": "default", "optimizer": "adamw-fused",
    }  # fmt: skip
    workload = TextbookWorkload(**{**usual, **fields})  # type: ignore[arg-type]
    memory = RankMemory(workload, PlannedModel(config=CONFIG))
    return Clock(workload, memory, rates, network).step(layout)


def test_linear_layers_in_blocks_run_at_the_datasheets_rate():
    """Half of the seconds of bf16's linear layers at twice its rate; attention and the head stay."""
    few = step(Layout(), rates=msgspec.structs.replace(RATES, blocks_flops_per_s=2e14)).parts["matrix products"]
    linear = 3 * 2 * TOKENS * 8 * (4 * D * D + 3 * D * F) / 1e14
    assert step(Layout()).parts["matrix products"] - few == pytest.approx(linear / 2)
    b200, mxfp4 = DATASHEET["NVIDIA B200"], BLOCK_FORMATS["mxfp4"]
    workload = TextbookWorkload(model=CONFIG, batch_size=4, seq_len=512, dtype="bf16")
    assert rates_of(b200, workload, 0.5, mxfp4).blocks_flops_per_s == 4.5e15
    with pytest.raises(InputError, match="H200 does not multiply blocks of mxfp4: choose another --recipe"):
        rates_of(DATASHEET["NVIDIA H200"], workload, None, mxfp4)


def without_kernels(found: float, products: int) -> float:
    """Time of products without what each takes however small it is."""
    return found - products * 5.6e-6


def test_one_rank_by_hand():
    found = step(Layout())
    matrices = 8 * (4 * D * D + 3 * D * F) + D * 1024
    assert without_kernels(found.parts["matrix products"], 3 * 8 * 7) == pytest.approx(6 * TOKENS * matrices / 1e14)
    scores = 2 * TOKENS * TOKENS * D * 8
    assert found.parts["attention"] == pytest.approx(3.5 * scores / 5e13)
    parameters = matrices + D * 1024 + 17 * D
    assert found.parts["optimizer"] == pytest.approx(28 * parameters / 1e12)
    assert found.step_s == pytest.approx(sum(found.parts.values()))
    assert set(found.parts) == set(PARTS)
    assert not any(found.parts[part] for part in PARTS if "parallel" in part or "pipeline" in part)


def test_model_flops_are_those_of_the_workload():
    workload = TextbookWorkload(model=CONFIG, batch_size=4, seq_len=512)
    assert PlannedModel(config=CONFIG).step_flops(workload.tokens, 512) == step_flops(workload)


def test_tensor_parallelism_halves_products_and_adds_collectives():
    found = step(Layout(tensor=2))
    alone = step(Layout())
    products = 3 * 8 * 7
    assert without_kernels(found.parts["matrix products"], products) == pytest.approx(
        without_kernels(alone.parts["matrix products"], products) / 2
    )
    message = TOKENS * D * 2
    collectives = 8 * 8 + 4  # four a block in forward and in backward; two for embedding, two for head
    seconds = collectives * message / 2 / 100e9 + 3 * TOKENS * 4 / 100e9
    assert found.parts["tensor parallel"] == pytest.approx(seconds)


def test_a_pipeline_has_a_bubble():
    found = step(Layout(pipeline=4, micro_batches=8))
    block = sum(step(Layout(pipeline=4)).parts[part] for part in ("matrix products", "attention", "elementwise"))
    assert found.parts["pipeline bubble"] == pytest.approx(3 / 8 * 8 * block, rel=0.5)
    halved = step(Layout(pipeline=4, micro_batches=8, chunks=2))
    assert halved.parts["pipeline bubble"] == pytest.approx(found.parts["pipeline bubble"] / 2)


def test_data_parallelism_hides_behind_backward_as_far_as_it_goes():
    slow = msgspec.structs.replace(NETWORK, inside_bytes_per_s=1e9)
    quick = msgspec.structs.replace(NETWORK, inside_bytes_per_s=1e15)
    assert step(Layout(data=2), network=quick).parts["data parallel"] == pytest.approx(0, abs=1e-6)
    exposed = step(Layout(data=2), network=slow).parts["data parallel"]
    parameters = PlannedModel(config=CONFIG).parameters
    sent = parameters * 4 / 1e9
    assert 0.8 * sent < exposed < sent


def test_computation_beside_a_collective_by_hand():
    """A collective of 4 s in 4 pieces: one has nothing to hide behind, and 3 s pass beside computation."""
    added = _added(4.0, _Hiding(seconds=40.0, beside=1.5, pieces=4))
    assert added.exposed == pytest.approx(1.0)
    assert added.slower == pytest.approx(1.0)  # 3 s of it are enough for 2 s of computation
    # Computation of 1.6 s, of which 1.2 s hide something, takes 1.8 s of the 3; the rest is bare.
    short = _added(4.0, _Hiding(seconds=1.6, beside=1.5, pieces=4))
    assert short.slower == pytest.approx(0.6)
    assert short.exposed == pytest.approx(1.0 + 3.0 - 1.8)


@given(
    sent=st.floats(0, 100), more=st.floats(0, 10), computing=st.floats(0, 100), slower=st.floats(1, 3),
    pieces=st.integers(1, 200),
)  # fmt: skip
def test_what_a_collective_adds_lies_between_its_bare_rest_and_itself(
    sent: float, more: float, computing: float, slower: float, pieces: int
):
    behind = _Hiding(seconds=computing, beside=slower, pieces=pieces)
    added = sum(_added(sent, behind))
    free = sum(_added(sent, behind._replace(beside=1.0)))
    assert free == pytest.approx(max(sent / pieces, sent - computing * (pieces - 1) / pieces), abs=1e-9)
    assert free - 1e-9 <= added <= sent + 1e-9
    assert added <= sum(_added(sent + more, behind)) + 1e-9


def test_copies_around_collectives_by_hand():
    """In bf16 with fp32 parameters, for P of them on each of 4 ranks."""
    model = PlannedModel(config=CONFIG)
    workload = TextbookWorkload(model=CONFIG, batch_size=4, seq_len=512, dtype="bf16", attention="flash")
    count = model.parameters

    def copies(sharding: str) -> Copies:
        layout = Layout(data=4, shard=4 if SHARDINGS[sharding].shares else 1, sharding=sharding)
        return data_copies(model, layout, bytes_of(workload, sharding))

    assert copies("ddp") == Copies(step=4 * 4 * count)  # into the bucket and back: two reads, two writes
    assert copies("ddp-views") == Copies(step=2 * 4 * count)
    assert copies("zero1-master") == Copies()
    # A quarter is read and written; what was gathered is read from the buffer and written.
    wide, gathered = copies("zero3-autocast"), count * (2 * 4 + 8 / 4)
    assert (wide.forward, wide.backward, wide.step) == (gathered, gathered + count * 8, 0)
    narrow, gathered = copies("zero3"), count * (2 * 2 + (4 + 2) / 4)
    assert (narrow.forward, narrow.backward) == (gathered, gathered + count * (2 + 4))
    once = copies("zero2")
    assert (once.forward, once.backward, once.step) == (0, count * (2 + 4), gathered)
    assert data_copies(model, Layout(), bytes_of(workload, "ddp")) == Copies()


def test_what_is_sent_after_backward_hides_behind_nothing():
    sent_s = 4 * PlannedModel(config=CONFIG).parameters / 100e9  # on two ranks all-reduce moves its message once
    calls = msgspec.structs.replace(NETWORK, call_s=1e-4)
    rates = msgspec.structs.replace(RATES, products_beside=2.0, others_beside=1.0)
    for sharding, messages in (("ddp-after", 1), ("ddp-each-after", 8 * 9 + 3)):
        parts = step(Layout(data=2, sharding=sharding), network=calls, rates=rates).parts
        assert parts["data parallel"] == pytest.approx(sent_s + messages * 1e-4)
        assert parts["slower beside collectives"] == 0
    hidden = step(Layout(data=2, sharding="ddp-views"), network=calls, rates=rates).parts
    assert hidden["data parallel"] < sent_s / 2 and hidden["slower beside collectives"] > 0


def test_a_step_says_what_collectives_cost_its_computation():
    rates = msgspec.structs.replace(RATES, products_beside=2.0, others_beside=1.0)
    free, slower = (step(Layout(data=2), rates=each) for each in (RATES, rates))
    assert free.parts["slower beside collectives"] == 0
    assert slower.parts["slower beside collectives"] > 0
    assert slower.parts["data parallel"] == pytest.approx(free.parts["data parallel"])
    assert slower.step_s == pytest.approx(free.step_s + slower.parts["slower beside collectives"])
    copied = 4 * 4 * PlannedModel(config=CONFIG).parameters / 2e12
    assert slower.parts["copies for collectives"] == pytest.approx(copied)
    said = msgspec.structs.replace(NETWORK, beside=1.0)
    assert step(Layout(data=2), rates=rates, network=said).step_s == pytest.approx(free.step_s)


def test_computation_beside_collectives_is_as_slow_as_was_measured():
    """Of results/h100-x2/traced: kernels of one name and grid, all their time beside a collective or none of it."""
    alone: dict[tuple[str, str], list[float]] = defaultdict(list)
    beside: dict[tuple[str, str], list[float]] = defaultdict(list)
    traces = sorted((Path(__file__).parents[3] / "results" / "h100-x2" / "traced").glob("**/trace.kineto.json.gz"))
    assert len(traces) == 2
    for trace in traces:
        events = msgspec.json.decode(gzip.decompress(trace.read_bytes()))["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        collectives = [(one["ts"], one["ts"] + one["dur"]) for one in kernels if "nccl" in one["name"]]
        for one in (one for one in kernels if "nccl" not in one["name"]):
            begin, end = one["ts"], one["ts"] + one["dur"]
            shared = sum(max(0, min(end, last) - max(begin, first)) for first, last in collectives)
            if shared == 0 or shared > 0.95 * (end - begin):
                (beside if shared else alone)[one["name"][:60], str(one["args"]["grid"])].append(one["dur"])
    known = [name for name, times in alone.items() if len(times) > 2 and len(beside[name]) > 2]
    for is_product, constant, count in ((True, PRODUCTS_BESIDE, 1007), (False, OTHERS_BESIDE, 1865)):
        names = [name for name in known if name[0].startswith("nvjet") is is_product]
        took = {name: (statistics.median(alone[name]), statistics.median(beside[name])) for name in names}
        slow, fast = (sum(len(beside[name]) * took[name][i] for name in names) for i in (1, 0))
        assert sum(len(beside[name]) for name in names) == count
        assert slow / fast == pytest.approx(constant, abs=0.01)


def test_checkpointing_runs_a_forward_again():
    plain, again = step(Layout()), step(Layout(checkpointing="every-1"))
    assert plain.parts["run again"] == 0
    blocks = 2 * TOKENS * 8 * (4 * D * D + 3 * D * F) / 1e14 + 2 * TOKENS * TOKENS * D * 8 / 5e13
    last_products = 8 * 2 * TOKENS * D * F / 1e14
    assert without_kernels(again.parts["run again"], 8 * 7) == pytest.approx(blocks - last_products)


def test_checkpointing_that_keeps_attention_runs_it_once():
    every, kept = (step(Layout(checkpointing=checkpointing)) for checkpointing in ("every-1", "attention"))
    attention = 2 * TOKENS * TOKENS * D * 8 / 5e13
    assert every.parts["run again"] - kept.parts["run again"] == pytest.approx(attention)


@pytest.mark.parametrize(
    ("part", "forward", "backward"),
    # Bytes of a block for each token, with fp32 residual stream and bf16 products under autocast, F = 2 D. Each result
    # is written, and what it is made of read. In backward also what it kept is read.
    [
        # The norm of x (4 + 2) and that of the sum with the branch (4 + 2, 4 + 2). Back come 2, and 4 or 4 + 2 go.
        ("norm", 18 * D, None),
        # Queries and keys (4 + 4), of which the keys that it makes are not told apart. Back: 2 of queries, 4 go.
        ("rope", 6 * D, 6 * D),
        # Gate, up, and their product; back: one comes, two are read and two go.
        ("mlp", 6 * F, 10 * F),
    ],
)
def test_what_fused_parts_move_by_hand(part: str, forward: int, backward: int | None):
    choices: dict[str, Any] = {part: "fused"}
    workload = TextbookWorkload(model=CONFIG, batch_size=1, seq_len=512, dtype="bf16", attention="flash", **choices)
    memory = RankMemory(workload, PlannedModel(config=CONFIG))
    one, two = (memory.moved(Layout(), first=False, last=False, blocks=count) for count in (1, 2))
    assert two.fused_forward - one.fused_forward == pytest.approx(TOKENS * forward, rel=0.01)
    if backward is not None:
        assert two.fused_backward - one.fused_backward == pytest.approx(TOKENS * backward, rel=0.01)
    plain = RankMemory(msgspec.structs.replace(workload, **{part: "reference"}), PlannedModel(config=CONFIG))
    assert plain.moved(Layout(), first=False, last=False, blocks=1).fused_forward == 0
    assert one.forward < plain.moved(Layout(), first=False, last=False, blocks=1).forward


def test_a_fused_loss_turns_logits_into_gradients_where_they_are():
    """Forward moves the logits twice; its products, which make the gradients, are counted as products."""
    workload = TextbookWorkload(model=CONFIG, batch_size=1, seq_len=512, dtype="bf16", attention="flash", loss="fused")
    found = RankMemory(workload, PlannedModel(config=CONFIG)).moved(Layout(), first=True, last=True, blocks=1)
    logits, hidden, head = TOKENS * 1024 * 2, TOKENS * D * 2, D * 1024 * 4
    assert found.fused_forward == pytest.approx(2 * logits + 2 * hidden + head, rel=0.01)


def test_a_mixture_takes_the_time_of_its_blocks():
    attention, mixed, selective = (
        step(Layout(checkpointing=one)) for one in ("attention", "selective-2", "selective")
    )  # fmt: skip
    assert mixed.step_s == pytest.approx((6 * attention.step_s + 2 * selective.step_s) / 8)
    assert mixed.parts["run again"] == pytest.approx(6 / 8 * attention.parts["run again"])


def test_a_step_op_by_op_waits_for_launches():
    slow_host = msgspec.structs.replace(RATES, launch_s=100e-6)
    assert step(Layout(), compile="eager").parts["launches"] == 0
    assert step(Layout(), compile="eager", rates=slow_host).parts["launches"] > 0.01


def test_a_host_that_shares_out_blocks_has_hooks_to_run():
    """They hide behind the device's work as launches do; where the device waits, a step takes as long as they do."""
    slow_host, shared = msgspec.structs.replace(RATES, launch_s=1e-9), Layout(data=4, sharding="zero3", shard=4)
    found = step(shared, compile="eager", rates=slow_host)
    assert found.forward_s >= CONFIG.layers * UNIT_S[0] and found.backward_s >= CONFIG.layers * UNIT_S[1]
    assert found.parts["launches"] > 0 and step(shared).parts["launches"] == 0  # compiled, nobody waits for them
    busy = msgspec.structs.replace(slow_host, matmul_flops_per_s=1e10)
    assert step(shared, compile="eager", rates=busy).parts["launches"] == 0
    alone = step(Layout(data=4, sharding="zero1", shard=4), compile="eager", rates=slow_host)
    assert alone.parts["launches"] == 0


@pytest.mark.parametrize("names", [("zero1-master", "zero3", "zero2"), ("zero3", "zero2", "zero1-master")])
def test_one_clock_tells_each_layout_its_own_time(names: tuple[str, ...]):
    """What a clock remembers of one layout is another's only where both take the same."""
    workload = TextbookWorkload(
        model=CONFIG, batch_size=4, seq_len=512, dtype="bf16", attention="flash", optimizer="adamw-fused"
    )
    memory, rates = RankMemory(workload, PlannedModel(config=CONFIG)), msgspec.structs.replace(RATES, launch_s=1e-9)
    clock = Clock(workload, memory, rates, NETWORK)
    layouts = [Layout(data=4, sharding=name, shard=4) for name in names]
    assert [clock.step(one) for one in layouts] == [
        Clock(workload, memory, rates, NETWORK).step(one) for one in layouts
    ]
    waits = {one.sharding: clock.step(one).parts["launches"] for one in layouts}
    assert waits["zero1-master"] == 0 and waits["zero2"] == waits["zero3"] > 0


def test_slower_links_never_make_a_step_faster():
    layouts = [
        Layout(tensor=2, data=2), Layout(context=4), Layout(pipeline=4, micro_batches=4),
        Layout(data=16, sharding="zero3", shard=16), Layout(data=16, sharding="zero1", shard=16),
    ]  # fmt: skip
    for layout in layouts:
        times = [
            step(layout, network=msgspec.structs.replace(NETWORK, between_bytes_per_s=rate, inside_bytes_per_s=rate))
            for rate in (1e9, 1e10, 1e11)
        ]
        steps = [found.step_s for found in times]
        assert steps == sorted(steps, reverse=True)


def test_shares_are_those_that_were_measured():
    """Of results/h200/device.json: products of 4096 x 4096 matrices against the datasheet."""
    file = Path(__file__).parents[3] / "results" / "h200" / "device.json"
    report = msgspec.json.decode(file.read_bytes())
    for dtype, share in MATMUL_SHARES.items():
        measured = report["ceilings"]["matmul"][dtype]["rate"] / report["spec"]["peak_flops_per_s"][dtype]
        assert share == pytest.approx(measured, abs=0.001)


@pytest.mark.parametrize("name", ["flash", "sdpa-cudnn", "flex", "sdpa-flash"])
@pytest.mark.parametrize(("tokens", "within"), [(16_384, 0.06), (4_096, 0.26)])
def test_attention_s_shares_are_those_that_were_measured(name: str, tokens: int, within: float):
    """Of results/h200/attention/grid-bf16.json: 16 heads, forward and backward together. Of 4,096 tokens these leave
    multiprocessors idle at the end; with a head_dim of 128, those of 16,384 were measured another time, too."""
    file = Path(__file__).parents[3] / "results" / "h200" / "attention" / "grid-bf16.json"
    for head_dim in (64, 128):
        seconds = sum(_attention_s(file, name, head_dim, tokens))
        measured = 3.5 * _attention_flops(tokens, head_dim) / seconds / PEAK
        assert attention_share(name, head_dim, tokens) == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    ("folder", "cell", "name", "kernels"),
    [
        ("attention-steps", "2.7B-b4-s1024-bf16-train-flash", "flash", "flash_"),
        ("attention-steps", "2.7B-b4-s1024-bf16-train-sdpa-cudnn", "sdpa-cudnn", "cudnn_generated"),
        ("attention-steps", "large-b4-s1024-bf16-train-sdpa-cudnn", "sdpa-cudnn", "cudnn_generated"),
        ("best", "large-b4-s512-bf16-train-sdpa-compile-default-adamw-fused", "sdpa", "cudnn_generated"),
        ("best", "2.7B-b4-s512-bf16-train-sdpa-compile-default-adamw-fused", "sdpa", "cudnn_generated"),
    ],
)
def test_short_attention_is_as_slow_as_in_steps(folder: str, cell: str, name: str, kernels: str):
    """Of the kernels of a profiled step on an H200."""
    runs, faults = load_runs([Path(__file__).parents[3] / "results" / "h200" / folder])
    assert not faults
    run = next(run for run in runs if run.workload.key.rpartition("-")[0] == cell)
    workload, profile = run.workload, run.evidence.profile
    assert workload.sizes is not None
    assert profile is not None
    seconds = sum(kernel.total_s for kernel in profile.kernels if kernel.name.startswith(kernels))
    model = workload.model
    flops = 3.5 * model.layers * workload.tokens * 2 * workload.seq_len * model.d_model
    assert attention_share(name, model.head_dim, workload.seq_len) == pytest.approx(flops / seconds / PEAK, rel=0.16)


def test_attention_reaches_more_with_more_tokens():
    for name in (*ATTENTION_SHARES, "chunked"):
        shares = [attention_share(name, 128, tokens) for tokens in (128, 1_024, 8_192, 131_072)]
        assert shares == sorted(shares)
        assert shares[0] > 0
        assert shares[-1] < 1


def _attention_flops(tokens: int, head_dim: int) -> float:
    """Of 16 heads in forward, the causal half."""
    return 2 * 16 * tokens * tokens * head_dim


def _attention_s(file: Path, name: str, head_dim: int, tokens: int) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    for timing in msgspec.json.decode(file.read_bytes())["timings"]:
        shape = timing["cell"]["shape"]
        if (timing["cell"]["implementation"], shape["head_dim"], shape["queries"]) == (name, head_dim, tokens):
            return (
                statistics.median(timing["forward"]["values_s"]), statistics.median(timing["backward"]["values_s"])
            )  # fmt: skip
    raise AssertionError(f"{name} was not measured")


def test_a_device_without_the_dtype_is_one_line():
    workload = TextbookWorkload(model=configure("small"), dtype="bf16")
    with pytest.raises(InputError, match="Tesla T4 multiplies no matrices of bf16"):
        rates_of(DATASHEET["Tesla T4"], workload)
    unknown = DeviceSpec(name="new", peak_flops_per_s={"bf16": 1e15}, source="")
    with pytest.raises(InputError, match="new multiplies no"):
        rates_of(unknown, workload)
