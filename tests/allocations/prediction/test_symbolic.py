"""Symbolic tensors: what is alive adds up, dies in time, and comes to what the formulas say."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.prediction.caching_allocator import NO_BLOCK, CachingAllocator
from stepscope.allocations.prediction.estimate import (
    STEPS_TO_FAIL,
    PlayedStep,
    SymbolicStep,
    estimate,
    estimate_quickly,
    symbolic_model,
)
from stepscope.allocations.prediction.symbolic_tensors import (
    CATEGORIES,
    KEPT_OPERATORS,
    Ledger,
    Parameter,
    RoundingAllocator,
    Segment,
    Storage,
    Tape,
    Tensor,
)
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import configure
from stepscope.core.units import MIB
from stepscope.core.workloads import TextbookWorkload
from tests.conftest import mini

pytestmark = pytest.mark.slow

DTYPES = ("fp32", "bf16", "bf16-pure")
ATTENTIONS = ("reference", "sdpa-math", "sdpa")
CHECKPOINTINGS = ("none", "selective", "every-1", "every-2", "every-3")
COMPILES = ("eager", "default")
GRADIENTS = CATEGORIES.index("gradients")


def small(**changes: Any) -> TextbookWorkload:
    return mini(**{"layers": 4, "batch_size": 4, **changes})


def exact() -> Ledger:
    """Bytes as asked for."""
    return Ledger(RoundingAllocator(1))


# ---- the ledger


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "move", "begin"]), st.integers(0, 3000)), max_size=60))
def test_categories_sum_to_the_total_and_the_peak_is_the_highest_moment(steps: list[tuple[str, int]]):
    ledger = Ledger(RoundingAllocator(512))
    held: list[Storage] = []
    highest, at_highest = 0, ledger.live.copy()
    for what, number in steps:
        if what == "take":
            held.append(ledger.storage(number, number % len(CATEGORIES)))
        elif what == "begin":
            ledger.begin()
            highest, at_highest = ledger.total, ledger.live.copy()
        elif held and what == "drop":
            del held[number % len(held)]
        elif held and ledger.total != highest:  # a move at the highest moment may or may not be in its picture
            held[number % len(held)].become(number % len(CATEGORIES))
        assert sum(ledger.live) == ledger.total
        assert sum(-(-storage.bytes // 512) * 512 for storage in held) == ledger.total
        if ledger.total > highest:
            highest, at_highest = ledger.total, ledger.live.copy()
        assert ledger.peak == highest
    if ledger.total != highest:
        assert ledger.at_peak == at_highest


# ---- graphs by hand


def chain(tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """A product, something cheap, a product: 100 elements each, all inputs of products and of Silu kept."""
    y = tape.op("Mm", 100, 4, [weight, x], saves=[x])
    z = tape.op("Silu", 100, 4, [y], saves=[y])
    del y
    return tape.op("Mm", 100, 4, [weight, z], saves=[z])


def leaf(ledger: Ledger, weight: Parameter) -> Tensor:
    """A tensor that has a way back to a parameter."""
    return Tape(ledger, recording=True).op("Embedding", 100, 4, [weight])


@pytest.mark.parametrize(
    ("keeps", "after_forward", "peak_of_backward"),
    [
        # x, y, z and the output. Backward: the output's gradient, then those of weight and z, on top.
        (None, 4 * 400, 4 * 400 + 3 * 400),
        # x and the output. Backward: the output's gradient; y and z anew, no second output; two gradients of 400.
        (frozenset[str](), 2 * 400, 2 * 400 + 400 + 2 * 400 + 2 * 400),
        # y stays beside them, a product's output; z comes anew.
        (KEPT_OPERATORS["selective"], 3 * 400, 3 * 400 + 400 + 400 + 2 * 400),
        # There is no attention to keep: as with nothing.
        (KEPT_OPERATORS["attention"], 2 * 400, 2 * 400 + 400 + 2 * 400 + 2 * 400),
    ],
)
def test_what_a_segment_keeps_and_makes_again(keeps: frozenset[str] | None, after_forward: int, peak_of_backward: int):
    ledger, weight = exact(), Parameter("weight", 100, 4)
    tape = Tape(ledger, recording=True)
    x = leaf(ledger, weight)

    def run(tape: Tape, x: Tensor) -> Tensor:
        return chain(tape, x, weight)

    out = run(tape, x) if keeps is None else tape.run(Segment(run, x, keeps))
    del x
    assert ledger.total == after_forward
    ledger.begin()
    tape.backward(out)
    assert ledger.peak == peak_of_backward
    del out
    assert ledger.total == ledger.live[GRADIENTS] == 400


def test_a_gradient_that_comes_twice_is_added_in_place():
    ledger, weight = exact(), Parameter("weight", 100, 4)
    for _ in range(2):
        tape = Tape(ledger, recording=True)
        tape.backward(chain(tape, leaf(ledger, weight), weight))
        assert ledger.total == ledger.live[GRADIENTS] == 400


def test_without_recording_nothing_is_kept():
    ledger, weight = exact(), Parameter("weight", 100, 4)
    out = chain(Tape(ledger, recording=False), Tensor(ledger.storage(400), 100, 4, None), weight)
    assert ledger.total == 400 and out.node is None
    assert ledger.peak == 3 * 400  # x, y, z; then z, the output, and x for the caller


# ---- the model, every choice


def forward(workload: TextbookWorkload, ledger: Ledger, *, abridged: bool = False) -> tuple[Any, Tape, Tensor]:
    model = symbolic_model(workload, "cuda")
    model.abridged = abridged
    tape = Tape(ledger, recording=True)
    tape.after_rerun = model.end_autocast
    loss = model.loss(tape, model.head(tape, model.run_blocks(tape, model.embedding(tape))))
    model.end_autocast()
    return model, tape, loss


def saved(**choices: Any) -> int:
    """Bytes alive when forward has ended: the loss, and what backward needs."""
    ledger = exact()
    _kept = forward(small(**choices), ledger)
    return ledger.total


@pytest.mark.parametrize("compile", COMPILES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_after_backward_gradients_are_all_that_is_alive(dtype: str, attention: str, compile: str):
    for checkpointing in CHECKPOINTINGS:
        ledger = exact()
        workload = small(dtype=dtype, attention=attention, compile=compile, checkpointing=checkpointing)
        model, tape, loss = forward(workload, ledger)
        tape.backward(loss)
        assert all(p.gradient is not None and p.gradient.bytes == p.bytes for p in model.parameters), checkpointing
        del tape, loss
        itemsize = 2 if dtype == "bf16-pure" else 4
        assert ledger.live[GRADIENTS] == itemsize * parameter_count(workload.model)
        assert ledger.total == sum(ledger.live) == ledger.live[GRADIENTS], checkpointing
        for parameter in model.parameters:
            parameter.gradient = None
        assert ledger.total == 0 and not any(ledger.live)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_steady_step_leaves_what_it_found(dtype: str, attention: str):
    """Before the third step there is what there was before the first, the optimizer's state and the loss. (On a CPU,
    where blocks are multiples of 64 bytes, as these tensors are.)"""
    itemsize = 2 if dtype == "bf16-pure" else 4
    for checkpointing, phase, compile, accumulation in itertools.product(
        ("none", "selective", "every-3"), ("forward", "forward-backward", "train"), COMPILES, (1, 2)
    ):
        workload = small(
            dtype=dtype, attention=attention, checkpointing=checkpointing, phase=phase, compile=compile,
            accumulation=accumulation,
        )  # fmt: skip
        predicted = estimate(workload, "cpu")
        parameters = itemsize * parameter_count(workload.model)
        angles = 2 * itemsize * workload.seq_len * workload.model.head_dim
        batches = 4 * 2 * 8 * workload.tokens
        state = 2 * parameters if phase == "train" else 0
        loss = 64 if phase != "forward" else 0  # the step keeps the last one
        assert predicted.after_parameters == parameters + angles + batches + state + loss, workload.key


@pytest.mark.parametrize("phase", ["forward", "forward-backward", "train"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_categories_sum_to_the_peak_in_every_phase(dtype: str, phase: str):
    for attention, checkpointing, compile, accumulation in itertools.product(
        ATTENTIONS, ("none", "selective", "every-2"), COMPILES, (1, 2)
    ):
        workload = small(
            dtype=dtype, attention=attention, checkpointing=checkpointing, phase=phase, compile=compile,
            accumulation=accumulation,
        )  # fmt: skip
        predicted = estimate(workload)
        peaks = {"forward": predicted.forward_peak}
        if phase != "forward":
            peaks["backward"] = predicted.backward_peak or 0
        if phase == "train":
            peaks["optimizer"] = predicted.optimizer_peak or 0
        assert {name: sum(alive.values()) for name, alive in predicted.by_phase.items()} == peaks
        assert predicted.peak_bytes == max(peaks.values()) == peaks[predicted.peak_phase]
        assert sum(predicted.categories.values()) == predicted.peak_bytes
        assert predicted.reserved_peak is not None and predicted.reserved_peak >= predicted.peak_bytes
        assert all(count > 0 for count in predicted.categories.values())
        assert predicted.categories["workspaces"] in (32 * MIB, 64 * MIB)  # one a thread, however many micro-batches


# ---- what is kept, by formula


@pytest.mark.parametrize("seq_len", [16, 32])
def test_a_block_in_fp32_keeps_10_r_4_f_2_ss(seq_len: int):
    """And of smaller things both norms' reciprocal roots, the mask, and the sums of softmax."""
    choices = {"seq_len": seq_len, "batch_size": 2}
    block = saved(layers=4, **choices) - saved(layers=3, **choices)
    batch, heads, d_model, d_ff = 2, 2, 32, 64
    tokens = batch * seq_len
    r, f, ss, rows = tokens * d_model, tokens * d_ff, batch * heads * seq_len**2, batch * heads * seq_len
    assert block == 4 * (10 * r + 4 * f + 2 * ss) + 4 * 2 * tokens + seq_len**2 + 4 * rows


def test_a_block_under_autocast_keeps_a_copy_of_each_of_its_weights():
    """The input, x / rms and the product's input for both norms; as many half-sized inputs as products have."""
    block = saved(layers=4, dtype="bf16", attention="sdpa") - saved(layers=3, dtype="bf16", attention="sdpa")
    tokens, d_model, d_ff, head_dim, rows = 64, 32, 64, 16, 4 * 2 * 16
    r, f = tokens * d_model, tokens * d_ff
    norms = 2 * (4 * 2 * r + 4 * tokens)
    # q, k, v and the output; of gate and up one input each, though they are alike; silu and the product of both.
    inputs = 2 * (3 * r + 3 * r + r) + 4 * rows + 2 * (2 * r) + 2 * (4 * f)
    angles = 2 * 2 * 2 * 16 * head_dim  # cos and sin, for queries and for keys
    weights = 2 * (4 * d_model**2 + 3 * d_model * d_ff)
    assert block == norms + inputs + angles + weights


@pytest.mark.parametrize("compile", COMPILES)
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_more_is_run_again_the_less_is_kept(dtype: str, attention: str, compile: str):
    kept = [
        saved(dtype=dtype, attention=attention, compile=compile, checkpointing=checkpointing)
        for checkpointing in ("none", "selective", "every-1", "every-2", "every-4")
    ]
    assert all(more > less for more, less in itertools.pairwise(kept))


@pytest.mark.parametrize("compile", COMPILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_attention_is_its_output_and_the_logsumexp(dtype: str, compile: str):
    sizes = {"dtype": dtype, "attention": "sdpa", "compile": compile}
    nothing, attention, products = (
        saved(checkpointing=checkpointing, **sizes) for checkpointing in ("every-1", "attention", "selective")
    )
    itemsize = 4 if dtype in ("fp32", "tf32") else 2
    assert attention - nothing == 4 * (itemsize * 64 * 32 + 4 * 64 * 2)  # four layers of 64 tokens, two heads
    assert attention < products
    for last in (1, 2, 3):
        mixed = saved(checkpointing=f"selective-{last}", **sizes)
        assert mixed - attention == (products - attention) * last / 4


def test_every_group_keeps_its_input_alone():
    r = 4 * 64 * 32
    assert saved(checkpointing="every-1") - saved(checkpointing="every-2") == 2 * r
    assert saved(checkpointing="every-3") == saved(checkpointing="every-2")  # 3 + 1, 2 + 2
    assert saved(checkpointing="every-3") - saved(checkpointing="every-4") == r


@pytest.mark.parametrize("compile", COMPILES)
def test_only_written_out_attention_grows_with_the_square_of_the_sequence(compile: str):
    def curvature(attention: str) -> int:
        short, middle, long = (saved(attention=attention, seq_len=s, compile=compile) for s in (32, 64, 96))
        return long - 2 * middle + short

    assert curvature("sdpa") == 0
    # Two tensors of scores in four layers; beside them, op by op, a mask of bools.
    of_scores, of_mask = 4 * 2 * 4 * (4 * 2), 4 * (1 if compile == "eager" else 0)
    assert curvature("reference") == (of_scores + of_mask) * (32**2 * 2)


def test_micro_batches_keep_their_share():
    whole, halves = saved(batch_size=4), saved(batch_size=4, accumulation=2)
    assert 0.5 <= halves / whole < 0.51  # a mask and the loss do not shrink


# ---- quickly


class Noted(CachingAllocator):
    """An allocator that notes every block that it gives, and gets back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[tuple[int, int]] = []

    def allocate(self, size: int) -> tuple[int, int]:
        block = super().allocate(size)
        self.blocks.append(block)
        return block

    def free(self, block: int) -> None:
        self.blocks.append((block, 0))
        super().free(block)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bf16", "accumulation": 2, "checkpointing": "every-1", "optimizer": "adamw-bf16-state"},
        {"attention": "sdpa", "dtype": "bf16-master", "checkpointing": "every-2", "clip": 1.0},
        {"attention": "sdpa", "dtype": "fp8", "checkpointing": "selective", "seq_len": 64},
        {"projections": "joint", "dtype": "bf16", "accumulation": 2, "checkpointing": "selective"},
        {"compile": "default", "dtype": "bf16", "accumulation": 4},
        {"phase": "forward", "dtype": "bf16"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())) or "as it is",
)
def test_a_step_of_few_blocks_tells_every_request_of_one_with_many(changes: dict[str, Any]):
    """The last group is shorter than the others where two blocks run again together."""
    workload = mini(**{"layers": 27, "batch_size": 4, **changes})
    whole, played = Noted(), Noted()
    steps = SymbolicStep(workload, "cuda", whole), PlayedStep(workload, "cuda", played)
    for step in steps:
        step.run(STEPS_TO_FAIL)
    of_size = [block for block in whole.blocks if block[0] != NO_BLOCK]
    assert [block for block in played.blocks if block[0] != NO_BLOCK] == of_size
    assert played.reserved_peak == whole.reserved_peak


GRID: Sequence[dict[str, Any]] = [
    {"model": model, "seq_len": s, "dtype": dtype, "attention": attention, "checkpointing": checkpointing}
    for model, s, dtype, attention, checkpointing in itertools.product(
        ("small", "xl"), (128, 1024), ("fp32", "bf16"), ("reference", "sdpa"),
        ("none", "every-1", "every-5", "selective", "selective-7"),
    )
    if attention == "sdpa" or checkpointing != "selective-7"
]  # fmt: skip


def grid_workload(choices: dict[str, Any], **more: Any) -> TextbookWorkload:
    return TextbookWorkload(**{**choices, "model": configure(choices["model"]), **more})


@pytest.mark.parametrize("compile", COMPILES)
def test_blocks_in_one_piece_come_to_the_same(compile: str):
    """What the first and the last two tell of those between. A peak may lie amid the blocks: in one piece, a block's
    gradients are all there before what it saved is gone, so the quick figure is larger by no more than that."""
    for choices in GRID:
        workload = grid_workload(choices, compile=compile)
        figures = []
        for abridged in (False, True):
            ledger = Ledger()
            model, tape, loss = forward(workload, ledger, abridged=abridged)
            forward_peak, kept = ledger.peak, ledger.total
            ledger.begin()
            tape.backward(loss)
            figures.append((forward_peak, kept, ledger.peak, ledger.total))
            del model, tape, loss
        for whole, in_one_piece in zip(*figures, strict=True):
            of_a_block = figures[0][1] / workload.model.layers
            assert -0.0005 * whole <= in_one_piece - whole <= of_a_block, workload.key


@pytest.mark.long
def test_the_quick_prediction_lacks_the_remainders_of_the_cache_alone():
    """Each at most 1 MiB: three hundredths of the whole, or a few tens of MiB."""
    for choices in GRID:
        for phase in ("train", "forward"):
            workload = grid_workload(choices, phase=phase)
            quick, whole = estimate_quickly(workload).peak_bytes, estimate(workload).peak_bytes
            assert -0.002 * whole <= whole - quick <= max(0.03 * whole, 64 * MIB), workload.key


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_flash_holds_in_backward_what_the_symbolic_model_says(capability: tuple[int, int]):
    """By every default of the kernels in Triton: two numbers for each row, and no sum of dQ beside dQ."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from stepscope.kernels.flash.configuration import Problem, default_backward
    from stepscope.kernels.flash.launch import statistics_for

    batch, heads = 2, 3
    for head_dim, itemsize, causal, length in itertools.product(
        (16, 64, 80, 128, 256), (2, 4), (True, False), (128, 1024, 1100, 16384)
    ):
        problem = Problem(
            capability=capability, head_dim=head_dim, bytes_per_element=itemsize, causal=causal,
            log2_queries=(length - 1).bit_length(),
        )  # fmt: skip
        configuration = default_backward(problem)
        assert configuration.way != "fused", f"{problem} sums dQ up in memory, which the symbolic model leaves out"
        q = torch.empty(batch, heads, length, head_dim, device="meta")
        held, predicted = statistics_for(q, configuration).nbytes, batch * heads * length * 2 * 4
        assert held == predicted if length % 128 == 0 else predicted < held < predicted + batch * heads * 128 * 2 * 4


class Counting(RoundingAllocator):
    """How many bytes were asked for."""

    bytes = 0

    def allocate(self, size: int) -> tuple[int, int]:
        self.bytes += size
        return super().allocate(size)


@pytest.mark.parametrize(
    ("dtype", "seq_len", "head_dim", "summed", "split"),
    [
        ("bf16", 2048, 64, True, False), ("bf16", 2048, 128, True, False), ("bf16", 1024, 64, False, False),
        ("bf16", 2048, 16, False, False), ("fp32", 128, 64, False, False), ("fp32", 128, 96, False, True),
        ("fp32", 128, 128, False, True), ("fp32", 128, 192, False, False),
    ],
)  # fmt: skip
def test_flash_holds_in_backward_what_hoppers_kernels_do(
    dtype: str, seq_len: int, head_dim: int, summed: bool, split: bool
):
    """Sums of dQ in fp32, and of fp32 three parts in bf16 of q, k, v and dO, in rows of 128 numbers. Against
    `sdpa-efficient`, which adds dQ up in fp32 in 16 bits at any length, and has one number for each row where flash has
    two."""
    layers, batch, heads, d_model = 2, 4, 1, head_dim

    def taken_in_backward(attention: str) -> int:
        allocator = Counting(1)
        sizes = {"layers": layers, "batch_size": batch, "seq_len": seq_len, "d_model": d_model, "heads": heads}
        _model, tape, loss = forward(small(attention=attention, dtype=dtype, **sizes), Ledger(allocator))
        allocator.bytes = 0
        tape.backward(loss)
        return allocator.bytes

    rows, numbers = batch * heads * seq_len, batch * seq_len * d_model
    fewer = 4 * numbers if dtype == "bf16" and not summed else 0
    more = 4 * rows * 128 * 6 if split else 0
    assert taken_in_backward("flash") - taken_in_backward("sdpa-efficient") == layers * (4 * rows - fewer + more)
