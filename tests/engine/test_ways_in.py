"""`fit` of what users bring: adapters, quantised weights, others' optimizers and attention."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from stepscope.allocations.prediction.fit import FakeEstimate, budget_of_memory
from stepscope.core.errors import InputError
from stepscope.core.units import GIB
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.fake_module import fit_module
from tests.engine.ways_in import HEADS, LAYERS, VOCABULARY, WIDTH

FACTORIES = Path(__file__).with_name("ways_in.py")
TOKENS, RANK = 4 * 256, 8


def estimate(factory: str, **arguments: Any) -> FakeEstimate:
    workload = FactoryWorkload(factory=f"{FACTORIES}:{factory}", arguments=arguments, model=UserModel(name=""))
    (found,) = fit_module(workload, [], search=False)
    return found.estimate


def of_layers() -> list[tuple[int, int]]:
    """The widths into and out of a block's linear layers."""
    return [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]


def test_adapters_alone_have_gradients_and_states():
    """By hand: a frozen layer keeps no input, and its adapter keeps its own in fp32 and the product of rank 8. Backward
    leaves gradients of adapters alone, and AdamW's two states of them."""
    found = estimate("adapters")
    adapters = LAYERS * sum(4 * RANK * (inner + outer) for inner, outer in of_layers())
    frozen = LAYERS * sum(2 * (inner * outer + outer) for inner, outer in of_layers())
    frozen += 2 * (2 * VOCABULARY * WIDTH + (2 * LAYERS + 1) * 2 * WIDTH)
    assert found.memory.parameter_bytes == adapters + frozen
    assert found.categories["optimizer state"] == pytest.approx(2 * adapters, abs=LAYERS * 8 * 8)
    inputs = LAYERS * sum(TOKENS * 4 * (inner + RANK) for inner, _ in of_layers())
    saved = found.memory.saved_for_backward
    # Beside them: what GELU and attention keep in bf16, norms, and log-softmax of the scores.
    attention = TOKENS * 2 * 4 * WIDTH + TOKENS * 4 * 4
    others = LAYERS * (attention + TOKENS * 2 * 4 * WIDTH + 2 * TOKENS * (2 * WIDTH + 8))
    assert saved is not None
    assert inputs + others < saved < 1.1 * (inputs + others + 2 * TOKENS * VOCABULARY)


def test_a_block_that_checkpoints_itself_runs_again_as_on_cuda():
    """Its attention is the same kernel in both runs, and only its input is kept: of a fused one, no scores."""
    kept, again = estimate("adapters"), estimate("adapters", checkpoints=True)
    saved = again.memory.saved_for_backward
    assert saved is not None
    assert LAYERS * TOKENS * 2 * WIDTH < saved < LAYERS * TOKENS * 2 * WIDTH + 3 * TOKENS * 2 * VOCABULARY
    assert again.memory.optimizer_peak == kept.memory.optimizer_peak


@pytest.mark.parametrize("double", [True, False])
def test_weights_of_4_bits_with_their_scales(double: bool):
    """By hand: half a byte a weight; a scale for 64 of them, of 4 bytes, or of one with a scale of 4 for 256; the table
    of 16 values, and that of 256 for scales. Their operators are known, so that no margin is kept for them."""
    pytest.importorskip("bitsandbytes")
    found = estimate("quantised", double=double)
    weights = [inner * outer for inner, outer in of_layers() for _ in range(LAYERS)]
    scales = [(each // 64 + each // 64 // 256 * 4 + 4 * 256 if double else each // 64 * 4) + 4 * 16 for each in weights]
    assert found.categories["frozen quantised weights"] == pytest.approx(sum(weights) // 2 + sum(scales), abs=4 * 8)
    assert found.unseen is not None
    assert found.unseen.custom == ()


def test_an_autocast_of_cuda_casts_where_it_was_made_before_the_step():
    before = estimate("casting")
    assert before == estimate("casting", before=False)
    assert before.categories["cast copies"] > 0


def test_pytorchs_attention_of_packed_sequences_is_no_strangers():
    unseen = estimate("packed").unseen
    assert unseen is not None
    assert unseen.custom == ()


def test_states_of_8_bits_that_are_paged_are_of_no_allocator():
    """By hand: AdamW's two states have a byte a number and a scale of 4 for 256, of parameters of 4,096 or more; others
    stay fp32. The states of those of 100,000 or more are paged, and their scales are not."""
    pytest.importorskip("bitsandbytes")
    sizes = [VOCABULARY * WIDTH] * 2 + [WIDTH] * 2 * (2 * LAYERS + 1)
    sizes += LAYERS * [size for inner, outer in of_layers() for size in (inner * outer, outer)]
    small = 2 * sum(4 * size for size in sizes if size < 4096)
    codes = {size: 2 * size for size in sizes if size >= 4096}
    scales = 2 * sum(4 * (size // 256) for size in sizes if size >= 4096) + 2 * 4 * 256
    states, paged = (
        estimate("updated", name=name).categories["optimizer state"] for name in ("AdamW8bit", "PagedAdamW8bit")
    )
    assert states == pytest.approx(small + scales + sum(codes[size] for size in sizes if size >= 4096), rel=1e-3)
    assert paged == states - sum(codes[size] for size in sizes if size >= 100_000)


def test_flex_attention_keeps_what_another_fused_kernel_keeps_and_its_mask():
    """A CPU has no gradient of it. By hand: as packed attention, q, k, v, the output and a sum in fp32 a row; and a
    mask of 2 x 2 blocks. Not compiled, it makes the scores in fp32."""
    fused, other, packed = estimate("flexible", compiled=True), estimate("flexible", compiled=False), estimate("packed")
    kept = [each.memory.saved_for_backward or 0 for each in (fused, other, packed)]
    assert 0 <= kept[0] - kept[2] <= LAYERS * 16 * 512
    assert kept[1] == pytest.approx(kept[0], abs=LAYERS * 16 * 512)
    scores = 4 * HEADS * 4 * 256 * 256
    assert other.memory.backward_peak is not None
    assert fused.memory.backward_peak is not None
    assert other.memory.backward_peak - fused.memory.backward_peak > scores


def test_flex_attention_of_few_queries_sums_parts_of_the_keys_and_shared_keys_keep_more_free():
    """By hand: 132 multiprocessors take 16 splits for 4 heads of 4 sequences, and 32 where two of them share keys, each
    with an output, a maximum and a sum in fp32 a row."""
    plain, grouped = (estimate("flexible", compiled=True, length=64, shared=shared) for shared in (1, 2))
    split = 4 * HEADS * 64 * (WIDTH // HEADS + 2) * 4
    peaks = [each.memory.forward_peak or 0 for each in (plain, grouped)]
    assert peaks[1] - peaks[0] == 16 * split
    budget = budget_of_memory(GIB)
    kept = [each.unseen.kept_free(budget) for each in (plain, grouped) if each.unseen]
    assert kept[1] - kept[0] == pytest.approx(0.01 * GIB, abs=1)


@pytest.mark.parametrize("name", ["bitsandbytes.AdamW8bit", "torchao.AdamW4bit"])
def test_optimizers_of_libraries_are_taken_by_name_where_they_are_installed(name: str):
    """By name, one holds what a factory's own of that class does."""
    library, _, kind = name.partition(".")
    named = FactoryWorkload(factory=f"{FACTORIES}:plain", model=UserModel(name=""), optimizer=name)
    if importlib.util.find_spec(library) is None:
        with pytest.raises(InputError, match=f"not installed: pip install -U {library}$"):
            fit_module(named, [], search=False)
        return
    (found,) = fit_module(named, [], search=False)
    assert found.estimate.categories == estimate("updated", name=kind, library=library).categories
