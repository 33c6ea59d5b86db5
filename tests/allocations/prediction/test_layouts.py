"""What a rank of a layout needs, against the prediction for one GPU and by hand."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.prediction.estimate import WORKSPACE_BYTES, estimate_quickly
from stepscope.allocations.prediction.layouts import (
    RankMemory,
    Shards,
    Stage,
    StageNeeds,
    bytes_of,
    moved_by_stage,
    stage_needs,
)
from stepscope.core.float_formats import BLOCK_FORMATS
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.workloads import TextbookWorkload

CONFIG = ModelConfig(name="test", d_model=512, d_ff=1024, layers=8, heads=8, vocabulary=1024, kv_heads=4)
MODEL = PlannedModel(config=CONFIG)


def workload(**fields: object) -> TextbookWorkload:
    usual: dict[str, object] = {
        "model": CONFIG, "batch_size": 4, "seq_len": 512, "dtype": "bf16", "attention": "sdpa", "compile": "default",
        "optimizer": "adamw-fused",
    }  # fmt: skip
    return TextbookWorkload(**{**usual, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", ["eager", "default"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "selective-3", "every-1"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16-pure"])
def test_a_stage_of_one_rank_is_the_step_of_one_gpu(compiled: str, checkpointing: str, dtype: str):
    """Its peaks are those of `fit`, but for what is there before: parameters, optimizer state, data and workspaces. The
    latter come with the first product, which may be at the peak."""
    config = msgspec.structs.replace(configure("llama3-8B"), layers=8)
    step = workload(
        model=config, batch_size=2, seq_len=2048, compile=compiled, checkpointing=checkpointing, dtype=dtype,
        attention="flash",
    )  # fmt: skip
    alone = estimate_quickly(step)
    found = stage_needs(Stage(workload=step, model=PlannedModel(config=config), gradients="made"))
    before = ("parameters", "optimizer state", "inputs", "workspaces", "rounding")

    def without(phase: str) -> int:
        return sum(count for name, count in alone.by_phase[phase].items() if name not in before)

    assert alone.saved_for_backward is not None
    assert found.saved == alone.saved_for_backward - WORKSPACE_BYTES
    assert found.forward == pytest.approx(without("forward"), abs=WORKSPACE_BYTES + 4096)
    assert found.backward == pytest.approx(without("backward"), abs=WORKSPACE_BYTES + 4096)


def test_operands_in_blocks_are_kept_and_rounded_by_hand():
    """For T tokens, r = T d, f = T d_ff: in 16 bits a block keeps both norms' outputs and silu(gate) * up, 2 (2 r + f)
    bytes, in a format (3 r + f) numbers; each of two tensor parallel ranks half. Rounding reads 16 bits of a layer's
    operands, x and w in forward, dy and w in backward, and writes them in the format. The sums of gradients of both
    norms' outputs are in place, since no product gives a view."""
    step, forms = workload(dtype="bf16-pure", attention="flash", compile="eager", batch_size=1), ("mxfp8", "mxfp4")
    config = msgspec.structs.replace(CONFIG, kv_heads=None)
    r, f, w = 512 * 512, 512 * 1024, 4 * 512**2 + 3 * 512 * 1024
    for tensor in (1, 2):
        asked = {"workload": msgspec.structs.replace(step, model=config), "tensor": tensor}
        wide = Stage(model=PlannedModel(config=config), **asked)
        for name, each in zip(forms, (33 / 32, 17 / 32), strict=True):
            few = Stage(model=PlannedModel(config=config, form=BLOCK_FORMATS[name]), **asked)
            kept = stage_needs(wide).saved - stage_needs(few).saved
            assert kept == 8 * (2 * (2 * r + f) - (3 * r + f) * each) / tensor
            if tensor == 1:
                less, more = moved_by_stage(wide), moved_by_stage(few)
                inputs, outputs, norms = 6 * r + f, 5 * r + 2 * f, 3 * r + f
                assert more.forward - less.forward == 8 * (2 * (inputs + w) + (inputs + w + norms) * each)
                assert more.backward - less.backward == 8 * (2 * (outputs + w) + (2 * outputs + w) * each - 4 * r)


def test_a_rank_needs_more_for_each_block_that_keeps_more():
    """What it needs with attention alone, and what a block's products return: five of the stream's size, two of d_ff's;
    once the last block runs, nothing that it kept is gone. Quickly and exactly alike, where parameters stay whole."""
    config = msgspec.structs.replace(configure("8B"), layers=8)
    step = workload(model=config, batch_size=2, seq_len=32_768, dtype="bf16", attention="flash")
    memory = RankMemory(step, PlannedModel(config=config))
    layouts = [
        Layout(data=2, sharding="zero1", shard=2, checkpointing=checkpointing)
        for checkpointing in ("attention", "selective-1", "selective-4", "selective-7", "selective")
    ]
    quick = [memory.needs(layout).peak for layout in layouts]
    assert quick == [memory.needs(layout, exactly=True).peak for layout in layouts]
    r, f = 32_768 * config.d_model, 32_768 * config.d_ff
    products = 2 * (3 * r + 2 * 32_768 * config.key_width + 2 * f)
    assert [peak - quick[0] for peak in quick[1:]] == [blocks * products for blocks in (1, 4, 7, 8)]


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_and_sequence_parallel_ranks_keep_their_share_of_activations(tensor: int):
    """Korthikanti et al. 2022, equation 4: with sequence parallelism all that a block keeps is divided by t."""
    step = workload(dtype="bf16-pure")
    whole, share = (
        stage_needs(Stage(workload=step, model=MODEL, tensor=t, first=False, last=False)).saved for t in (1, tensor)
    )
    assert share == pytest.approx(whole / tensor, rel=0.001)


def test_what_a_compiled_block_moves_by_hand():
    """In bf16 with T tokens, K = d/2 and f = 2 d. Forward: each norm reads x and writes its output and a number in fp32
    a token, queries and keys are turned, gate and up become one, two residual sums."""
    step = workload(dtype="bf16-pure", batch_size=1)
    one, two = (
        moved_by_stage(
            Stage(
                workload=msgspec.structs.replace(step, model=msgspec.structs.replace(CONFIG, layers=n)),
                model=MODEL, first=False, last=False,
            )
        )
        for n in (1, 2)
    )  # fmt: skip
    d, tokens = 512, 512
    norms, rotary, gate, sums = 2 * (2 * d), 2 * (d + d // 2), 3 * 2 * d, 2 * 3 * d
    numbers = 2 * tokens * 4
    attention_reads = 0
    assert two.forward - one.forward == pytest.approx(
        tokens * 2 * (norms + rotary + gate + sums) + numbers + attention_reads, rel=0.03
    )


@pytest.mark.parametrize(
    ("sharding", "parameters", "gradients", "moments"),
    # Bytes of a parameter on each of 4 ranks in mixed precision, without what is gathered.
    [
        ("ddp", 4, 4, 8),
        ("ddp-views", 4, 4, 8),
        ("zero1", 4, 4, 2),
        ("zero1-master", 1, 4, 2),
        ("zero2", 1, 1, 2),
        ("zero3", 1, 1, 2),
    ],
)
def test_sharding_divides_states(sharding: str, parameters: int, gradients: int, moments: int):
    layout = Layout(data=4, shard=4 if SHARDINGS[sharding].shares else 1, sharding=sharding, micro_batches=2)
    count = parameter_count(CONFIG)
    found = RankMemory(workload(), MODEL).needs(layout)
    assert found.parameters == pytest.approx(parameters * count, abs=8)
    assert found.gradients == pytest.approx(gradients * count, abs=8)
    assert found.moments == pytest.approx(moments * count, abs=16)


def test_what_is_gathered():
    memory = RankMemory(workload(), MODEL)
    count, block, outside = parameter_count(CONFIG), MODEL.block, MODEL.outside_blocks
    once = memory.needs(Layout(data=4, shard=4, sharding="zero2", micro_batches=2))
    # A copy of all parameters; in backward the gradients of a block or of what is outside, as made and as reduced.
    assert 2 * count <= once.gathered <= 2 * count + (2 + 4) * max(block, outside) + 2 * outside
    each = memory.needs(Layout(data=4, shard=4, sharding="zero3", micro_batches=2))
    # Parameters of two blocks, embedding and head, and in backward gradients besides.
    assert 2 * outside <= each.gathered <= 2 * (2 * block + outside) + (2 + 4) * max(block, outside) + 2 * outside


def units_of(layers: int, *, ranks: int = 4, **fields: object) -> tuple[Stage, StageNeeds]:
    """A stage of so many blocks whose parameters come and go, under torch.compile, and what it needs."""
    config = msgspec.structs.replace(CONFIG, layers=layers)
    shards = Shards(ranks=ranks, block=MODEL.block, root=MODEL.outside_blocks, gathered_bytes=4, reduced_bytes=4)
    stage = Stage(workload=workload(model=config, **fields), model=MODEL, gradients="made", shards=shards)
    return stage, stage_needs(stage)


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_parameters_of_two_blocks_are_whole_at_a_time(layers: int):
    """In forward a block's parameters and the buffer that they came in, and those outside blocks; what is saved is what
    a rank saves that has all of them."""
    stage, found = units_of(layers)
    block, outside = MODEL.block, MODEL.outside_blocks
    assert found.gathered_forward == pytest.approx(4 * (2 * block + outside), abs=4096)
    assert found.saved == stage_needs(msgspec.structs.replace(stage, shards=None)).saved
    assert found.forward - found.gathered_forward <= stage_needs(msgspec.structs.replace(stage, shards=None)).forward


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 5), ranks=st.sampled_from([2, 4, 8]), compiled=st.sampled_from(["eager", "default"]),
    checkpointing=st.sampled_from(["none", "selective", "every-1"]), batch=st.integers(1, 3),
)  # fmt: skip
def test_shards_and_what_is_whole_for_a_while_bound_what_units_need(
    layers: int, ranks: int, compiled: str, checkpointing: str, batch: int
):
    """Beside what a rank with whole parameters needs: in forward two blocks and what is outside; in backward the same,
    and gradients of a block three times over (as made, as reduced before, and of what is outside), and all shards."""
    stage, found = units_of(layers, ranks=ranks, compile=compiled, checkpointing=checkpointing, batch_size=batch)
    alone = stage_needs(msgspec.structs.replace(stage, shards=None, gradients="elsewhere"))
    block, outside = MODEL.block, MODEL.outside_blocks
    count = layers * block + outside
    assert alone.forward <= found.forward <= alone.forward + 4 * (2 * block + outside) + 4096
    most = alone.backward + 4 * (2 * block + outside) + 4 * (3 * max(block, outside) + outside) + 4 * count // ranks
    assert found.backward <= most + 65_536
    assert found.gathered_forward <= found.forward
    assert found.gathered_backward <= found.backward


@pytest.mark.parametrize(("sharding", "buckets"), [("ddp", 4), ("ddp-views", 0), ("zero1", 0)])
def test_buckets_hold_each_gradient_once_more(sharding: str, buckets: int):
    layout = Layout(data=4, shard=4 if sharding == "zero1" else 1, sharding=sharding)
    found = RankMemory(workload(), MODEL).needs(layout)
    assert found.buckets == buckets * parameter_count(CONFIG)
    assert RankMemory(workload(), MODEL).needs(Layout()).buckets == 0  # one rank sends nothing


@pytest.mark.parametrize("part", ["norm", "rope", "mlp", "loss"])
def test_a_stage_with_a_fused_part_is_the_step_of_one_gpu(part: str):
    step = workload(compile="eager", **{part: "fused"})
    alone = estimate_quickly(step)
    found = stage_needs(Stage(workload=step, model=MODEL, gradients="made"))
    assert alone.saved_for_backward is not None
    assert found.saved == alone.saved_for_backward - WORKSPACE_BYTES
    assert found.saved <= stage_needs(Stage(workload=workload(compile="eager"), model=MODEL)).saved + (
        2 * 4 * 512 * 1024 if part == "loss" else 0  # it keeps the head's gradient in fp32
    )


def test_a_pipeline_holds_what_is_in_flight():
    memory = RankMemory(workload(dtype="bf16-pure"), MODEL)
    layout = Layout(pipeline=4, micro_batches=8)
    first = stage_needs(
        Stage(
            workload=workload(
                dtype="bf16-pure", batch_size=1, model=msgspec.structs.replace(CONFIG, layers=2)
            ),
            model=MODEL, last=False,
        )
    )  # fmt: skip
    found = memory._of_rank(layout, 0, True)  # pyright: ignore[reportPrivateUsage]
    assert found.saved == 3 * first.saved


def test_more_experts_are_more_parameters_of_a_rank():
    model = PlannedModel(config=CONFIG, experts=4, active=1)
    layouts = [Layout(data=4, expert=expert, micro_batches=2) for expert in (1, 2, 4)]
    sizes = [RankMemory(workload(), model).needs(layout).parameters for layout in layouts]
    expert = 8 * 3 * 512 * 1024 * 4
    assert (sizes[0] - sizes[1], sizes[1] - sizes[2]) == (2 * expert, expert)


@settings(max_examples=25, deadline=None)
@given(
    sharding=st.sampled_from([name for name, one in SHARDINGS.items() if one.shares]),
    tensor=st.sampled_from([1, 2, 4]),
    micro_batches=st.integers(1, 3),
    checkpointing=st.sampled_from(["none", "selective", "every-1"]),
)
def test_more_ranks_to_shard_over_never_need_more(sharding: str, tensor: int, micro_batches: int, checkpointing: str):
    memory = RankMemory(workload(), MODEL)
    peaks = [
        memory.needs(
            Layout(
                data=n, shard=n, sharding=sharding, tensor=tensor, micro_batches=micro_batches,
                checkpointing=checkpointing,
            )
        ).peak
        for n in (2, 4, 8)
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True)


@settings(max_examples=15, deadline=None)
@given(
    tensor=st.sampled_from([1, 2]), context=st.sampled_from([1, 2]), pipeline=st.sampled_from([1, 2]),
    micro_batch=st.integers(1, 4), sharding=st.sampled_from(["ddp", "zero3"]),
)  # fmt: skip
def test_interpolation_is_near_what_a_stage_needs(
    tensor: int, context: int, pipeline: int, micro_batch: int, sharding: str
):
    """It says yes or no to thousands of layouts; those that are shown are predicted stage by stage."""
    layout = Layout(
        tensor=tensor, context=context, pipeline=pipeline, data=2, micro_batch=micro_batch, micro_batches=2,
        sharding=sharding, shard=2 * context if sharding != "ddp" else 1,
    )  # fmt: skip
    memory = RankMemory(workload(), MODEL)
    assert memory.needs(layout).peak == pytest.approx(memory.needs(layout, exactly=True).peak, rel=0.08)


def test_bytes_follow_the_dtype():
    assert bytes_of(workload(dtype="fp32"), "zero3").compute == 4
    assert bytes_of(workload(), "ddp").residual == 4
    assert bytes_of(workload(), "zero3").residual == 2
    assert bytes_of(workload(dtype="bf16-pure"), "ddp").gradients == 2


def test_a_published_shape_has_a_prediction():
    """8B on 8 GPUs under FSDP, 2 sequences of 8,192 each, checkpointing selective: torchtitan's allocator reserved 77.0
    GiB (benchmarks/llama3_h100_202412_torchtitan.md), which is more than a peak of what is allocated."""
    config = configure("llama3-8B")
    step = workload(model=config, batch_size=16, seq_len=8192, attention="flash")
    layout = Layout(data=8, shard=8, sharding="zero3", micro_batch=2, checkpointing="selective")
    found = RankMemory(step, PlannedModel(config=config)).needs(layout)
    assert 0.85 * 77.0 < found.peak / 2**30 < 77.0
