"""Activation checkpointing: the same gradients from less memory, and every second run of a block is named."""

import gc
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.formulas.transformer import product_counts
from stepscope.core.range_names import MARKING, RECOMPUTATION
from stepscope.core.run_directory import KINETO_FILE
from stepscope.recording import capture, driven, ranges
from stepscope.recording.compilation import compile_report, reset_compilation
from stepscope.recording.device import HostDevice
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.training.training_step import TrainingStep
from stepscope.training.transformer import Block
from tests.conftest import at_length, mini, run_steps
from tests.cpu_allocations import allocated_bytes
from tests.recording.test_capture import Recorder

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS, BATCH, SEQUENCE, WIDTH, FEED_FORWARD, HEADS = 4, 2, 16, 32, 64, 2
CHECKPOINTINGS = (
    "none",
    "selective",
    "offload-1",
    "offload-3",
    "offload-4",
    "every-1",
    "every-2",
    "every-3",
    "every-4",
    "nested-1",
    "nested-2",
)


def step_with(checkpointing: str, **changes: Any) -> TrainingStep:
    defaults = {"layers": LAYERS, "phase": "forward-backward"}
    return TrainingStep(mini(checkpointing=checkpointing, **{**defaults, **changes}), CPU)


def run_step(step: TrainingStep) -> list[Tensor]:
    """One step; the gradients, where it has no optimizer."""
    run_steps(step)
    return [p.grad for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", CHECKPOINTINGS[1:])
@pytest.mark.parametrize("attention", ["reference", "sdpa", *at_length("sdpa-math")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", *at_length("fp16", "bf16-pure")])
def test_gradients_are_bitwise_those_without(checkpointing: str, attention: str, dtype: str):
    """The same operators run again on the same numbers, under the same autocast."""
    plain, ours = (run_step(step_with(c, attention=attention, dtype=dtype)) for c in ("none", checkpointing))
    assert len(plain) == len(ours) == 9 * LAYERS + 3
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("checkpointing", ["attention", "selective-1", "selective-3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", *at_length("fp16", "bf16-pure")])
def test_gradients_are_bitwise_those_without_where_attention_is_kept(dtype: str, checkpointing: str):
    plain, ours = (run_step(step_with(c, attention="sdpa", dtype=dtype)) for c in ("none", checkpointing))
    assert len(plain) == len(ours) == 9 * LAYERS + 3
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


class Calls(TorchDispatchMode):
    """The operators that run, by the name of their packet."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("checkpointing", "attentions", "products"),
    [
        ("none", LAYERS, 0), ("selective", LAYERS, 0), ("offload-3", LAYERS, 0), ("attention", LAYERS, 6 * LAYERS),
        ("every-1", 2 * LAYERS, 6 * LAYERS), ("selective-1", LAYERS, 6 * 3), ("selective-3", LAYERS, 6 * 1),
    ],
)  # fmt: skip
def test_of_kept_attention_backward_runs_all_products_but_the_last_again(
    checkpointing: str, attentions: int, products: int
):
    """Of each block: query, key, value, output, gate and up. PyTorch stops before down, whose output none asks for."""
    step = step_with(checkpointing, attention="sdpa")
    step.prepare()
    with Calls() as calls:
        for phase in step.phases:
            phase.run()
    assert calls.counts["_scaled_dot_product_flash_attention_for_cpu"] == attentions
    assert calls.counts["_scaled_dot_product_flash_attention_for_cpu_backward"] == LAYERS
    forward, again = product_counts(step.workload)
    assert calls.counts["mm"] == 3 * (7 * LAYERS + 1) + products == 3 * forward + again


# As few blocks as have a whole group and a rest: each takes a cold compiler half a minute and more.
@pytest.mark.long
@pytest.mark.parametrize(
    ("checkpointing", "layers", "dtype", "attention"),
    [
        ("every-2", 3, "fp32", "reference"), ("selective", 2, "bf16", "reference"), ("attention", 2, "fp32", "sdpa"),
        ("selective-1", 2, "fp32", "sdpa"),
    ],
)  # fmt: skip
def test_compiled_gradients_are_those_without(checkpointing: str, layers: int, dtype: str, attention: str):
    reset_compilation()
    choices = {"dtype": dtype, "layers": layers, "attention": attention}
    plain = run_step(step_with("none", **choices))
    ours = run_step(step_with(checkpointing, compile="default", **choices))
    report = compile_report()
    assert (report.graphs, report.graph_breaks, report.recompiles) == (1, 0, 0)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[dtype]
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance * float(a.abs().max()))


def test_nothing_of_the_model_is_renamed():
    plain, ours = (step_with(c).model for c in ("none", "every-3"))
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_inference_runs_every_block_once():
    step = TrainingStep(mini(phase="forward", checkpointing="every-1"), CPU)
    assert forwards_of_blocks(step) == [0, 1]
    assert step.loss is None


def forwards_of_blocks(step: TrainingStep) -> list[int]:
    """The numbers of the blocks whose forward began, in order."""
    order: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, i=i: order.append(i)) for i, block in enumerate(step.model.blocks)
    ]
    run_step(step)
    for handle in handles:
        handle.remove()
    return order


@pytest.mark.parametrize(
    ("checkpointing", "again"),
    [
        ("none", []),
        ("every-1", [3, 2, 1, 0]),
        ("selective", [3, 2, 1, 0]),
        ("every-2", [2, 3, 0, 1]),
        ("every-3", [3, 0, 1, 2]),
        ("every-4", [0, 1, 2, 3]),
        # A call that holds calls runs again up to the input of its last.
        ("nested-2", [2, 3, 2, 0, 1, 0]),
        ("nested-1", [3, 0, 1, 2, 0, 1, 0]),
    ],
)
def test_backward_runs_the_groups_again_from_the_last(checkpointing: str, again: list[int]):
    assert forwards_of_blocks(step_with(checkpointing)) == [0, 1, 2, 3, *again]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_last_blocks_keep_their_products_and_those_before_run_them_again(last: int):
    """In backward, the last block first: the products with weights that run inside each block's second forward."""
    step = step_with(f"selective-{last}", attention="sdpa")
    run_step(step)
    step.prepare()
    counts: list[int] = []
    with Calls() as calls:
        step.phases[0].run()
        handles = [
            block.register_forward_pre_hook(lambda *_: counts.append(calls.counts["mm"])) for block in step.model.blocks
        ]
        step.phases[1].run()
        counts.append(calls.counts["mm"])
    for handle in handles:
        handle.remove()
    # Each block's own backward has 14; the head's two came before the first block.
    assert [after - before for before, after in itertools.pairwise(counts)] == [14] * last + [20] * (LAYERS - last)


def saved_bytes(**changes: Any) -> dict[str, int]:
    """By the allocator, for each checkpointing: bytes that forward leaves behind for backward."""
    saved = {}
    keeps_attention = ("attention", "selective-1", "selective-3") if changes.get("attention") == "sdpa" else ()
    for checkpointing in (*CHECKPOINTINGS, *keeps_attention):
        step = step_with(checkpointing, **changes)
        for _ in range(2):  # the first may leave what libraries keep
            run_step(step)
        step.prepare()
        step.loss = None
        gc.collect()  # what an earlier step left in cycles must not be freed while we count
        saved[checkpointing] = allocated_bytes(step.phases[0].run)[0]
    return saved


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_what_is_saved_to_the_byte(attention: str):
    saved = saved_bytes(attention=attention)
    assert saved["none"] > saved["selective"] > saved["every-1"] > saved["every-2"] > saved["every-4"]
    assert saved["every-3"] == saved["every-2"]  # two groups each, and a group keeps its input alone
    residual = 4 * BATCH * SEQUENCE * WIDTH
    assert saved["every-1"] - saved["every-2"] == 2 * residual
    assert saved["every-1"] - saved["every-4"] == 3 * residual
    # query, key, value, output and down, the output of attention, gate and up; and scores, or their log-sum-exp.
    rows = BATCH * HEADS * SEQUENCE
    kept = (
        6 * residual
        + 2 * 4 * BATCH * SEQUENCE * FEED_FORWARD
        + 4 * rows * (SEQUENCE if attention == "reference" else 1)
    )
    assert saved["selective"] - saved["every-1"] == LAYERS * kept
    if attention == "sdpa":
        assert saved["attention"] - saved["every-1"] == LAYERS * (residual + 4 * rows)
        for last in (1, 3):
            more = last * (kept - residual - 4 * rows)
            assert saved[f"selective-{last}"] - saved["attention"] == more


def test_less_is_saved_under_autocast_too():
    saved = saved_bytes(dtype="bf16")
    assert saved["none"] > saved["selective"] > saved["every-1"] > saved["every-2"] > saved["every-4"]


def test_no_block_draws_random_numbers():
    """Why no generator's state is stored for the second run."""
    step = step_with("every-1")
    step.prepare()
    before = torch.get_rng_state()
    for phase in step.phases:
        phase.run()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("checkpointing", CHECKPOINTINGS[:-2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranges_name_what_runs_again(checkpointing: str, accumulation: int):
    step, recorder = step_with(checkpointing, accumulation=accumulation), Recorder()
    with ranges.emitted_to(recorder), capture.details(step):
        driven.timed_steps(step, HostDevice(), 1)
    assert not recorder.open
    backward = [names[2:] for names in recorder.pushed if len(names) > 2 and names[1] == "backward"]
    groups = {"none": 0, "every-2": 2, "every-3": 2, "every-4": 1}.get(checkpointing, LAYERS)
    assert sum(names == (RECOMPUTATION,) for names in backward) == groups * accumulation
    assert all(names[0] == RECOMPUTATION for names in backward)
    inside = Counter(names[1] for names in backward if len(names) == 2)
    assert inside == (Counter({f"blocks.{i}": accumulation for i in range(LAYERS)}) if groups else Counter())


@pytest.mark.parametrize("checkpointing", ["selective", "every-2"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranges_of_backward_stand_round_what_runs_again(checkpointing: str, accumulation: int):
    """Under an NVTX tool: backward's own ranges, and inside the node that asked first the blocks run again."""
    step, recorder = step_with(checkpointing, accumulation=accumulation), Recorder()
    with ranges.emitted_to(recorder):
        driven.trace_nvtx(step, CPU, HostDevice(), 2)
    assert not recorder.open
    phases = [names[1] for names in recorder.pushed if len(names) == 2]
    micro_batch = ["forward", MARKING, "backward"]
    assert phases == 2 * accumulation * micro_batch
    backward = [names[2:] for names in recorder.pushed if len(names) > 2 and names[1] == "backward"]
    first = Counter(names[0] for names in backward)
    # The last micro-batch of each step has ranges of its own nodes as the first has.
    assert first["gradient accumulation"] == 2 * accumulation * (9 * LAYERS + 3)
    assert all(first[f"blocks.{i}.feed_forward.down"] for i in range(LAYERS))
    again = [names for names in backward if RECOMPUTATION in names]
    assert {names[names.index(RECOMPUTATION) + 1] for names in again if names[-1] != RECOMPUTATION} == {
        f"blocks.{i}" for i in range(LAYERS)
    }


@pytest.mark.parametrize("checkpointing", ["selective", *at_length("none", "every-2")])
def test_a_real_capture_gives_what_runs_again_its_place(checkpointing: str, tmp_path: Path):
    step = step_with(checkpointing, accumulation=2)
    run_step(step)
    driven.capture_kineto(step, CPU, HostDevice(), tmp_path, steps=2)
    made = attribute(read_trace(tmp_path / KINETO_FILE))
    made.self_check()
    assert made.steps == 2 and made.links_agree == made.links_checked > 0
    again = made.work.filter(pl.col("role") == "recomputation")
    if checkpointing == "none":
        assert not again.height
        return
    assert set(again["phase"]) == {"backward"}
    modules = Counter(str(path) for path in again["module"])
    assert all(modules[f"blocks.{i}.{part}"] for i in range(LAYERS) for part in ("attention", "feed_forward_norm"))
    assert not {"head", "norm", "embedding"} & set(modules)
    # The softmax of every block runs again once. (Selective checkpointing has each operator recorded twice.)
    exponentials = made.work.filter(pl.col("name").cast(pl.String) == "aten::exp")
    counts = Counter(exponentials["role"])
    assert counts["recomputation"] == counts["forward"] >= 2 * LAYERS * step.workload.accumulation
    assert set(counts) == {"forward", "recomputation"}


def test_failing_blocks_leave_no_range_open(monkeypatch: pytest.MonkeyPatch):
    step, recorder = step_with("every-2"), Recorder()
    calls = 0
    forward = Block.forward

    def failing(block: Block, x_BSM: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == LAYERS + 2:  # the second block of the group that runs again
            raise RuntimeError("out of memory")
        return forward(block, x_BSM)

    monkeypatch.setattr(Block, "forward", failing)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        ranges.emitted_to(recorder),
        capture.details(step),
    ):
        driven.timed_steps(step, HostDevice(), 1)
    assert not recorder.open
