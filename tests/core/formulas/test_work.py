"""Formulas of parameters and FLOPs, against the model itself and PyTorch's own counter."""

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepscope.core.formulas import Convention, Work, adamw_work, matmul_work
from stepscope.core.formulas.planned_model import PlannedModel
from stepscope.core.formulas.spelled import describe_workload
from stepscope.core.formulas.transformer import (
    block_shapes,
    forward_flops,
    parameter_count,
    phase_work,
    product_counts,
    recomputed_flops,
    shapes_outside_blocks,
    step_flops,
)
from stepscope.core.model_config import PRESETS, configure
from stepscope.training.training_step import TrainingStep, build_model
from tests.conftest import mini, workload

KNOWN = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


def test_parameter_counts_of_the_presets():
    assert {name: parameter_count(PRESETS[name]) for name in KNOWN} == KNOWN


@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_counts_what_the_model_has(name: str):
    of_presets = workload(model=name)
    for of in (of_presets, workload(model=configure(name, kv_heads=1, tied=True))):
        model = build_model(of, "meta")
        assert sum(p.numel() for p in model.parameters()) == parameter_count(of.model)
        assert all(p.is_meta for p in model.parameters())
        shapes = {name: tuple(p.shape) for name, p in model.blocks[0].named_parameters()}
        assert shapes == block_shapes(of.model)
        outside = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("blocks.")}
        assert outside == shapes_outside_blocks(of.model)


def test_a_window_counts_the_pairs_that_are_seen():
    """6 queries with a window of 3: 1 + 2 + 3 + 3 + 3 + 3 = 15 pairs; two products of 2 B d FLOPs a pair and layer."""
    whole = mini(seq_len=6, batch_size=2)
    model = msgspec.structs.replace(whole.model, window=3)
    seen = msgspec.structs.replace(whole, model=model)
    d, layers = model.d_model, model.layers
    of_pair = 2 * 2 * 2 * d * layers
    assert forward_flops(seen) == forward_flops(whole) - of_pair * 36 // 2 + of_pair * 15
    assert forward_flops(seen, "full") == forward_flops(whole, "full"), "the whole square"
    wide = msgspec.structs.replace(whole, model=msgspec.structs.replace(model, window=6))
    assert forward_flops(wide) == forward_flops(whole)
    planned, without = PlannedModel(config=model), PlannedModel(config=whole.model)
    assert planned.flops_per_token(6)[1] == 4 * d * 15 // 6
    assert without.flops_per_token(6)[1] == 4 * d * 18 // 6


def test_a_tied_head_multiplies_as_one_of_its_own_does():
    """Counters of others leave it out (docs/traps.md)."""
    tied, apart = (workload(model=configure("tiny", tied=shared)) for shared in (True, False))
    assert step_flops(tied) == step_flops(apart)


@pytest.mark.parametrize("phase", ["forward", "forward-backward"])
def test_flops_are_those_that_pytorch_counts(phase: str):
    """The counter sees the full square of causal attention, so the full convention must agree to the last FLOP."""
    step = TrainingStep(mini(phase=phase, seq_len=24, batch_size=3), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        for each in step.phases:
            each.run()
    assert counter.get_total_flops() == step_flops(step.workload, causal="full")


@pytest.mark.parametrize(
    "checkpointing", ["none", "every-1", "every-2", "every-3", "selective", "nested-1", "nested-2"]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_recomputed_flops_are_those_that_pytorch_counts(checkpointing: str, accumulation: int):
    """Three layers in groups of two leave a last group of one."""
    changes = {"phase": "forward-backward", "layers": 3, "batch_size": 4, "accumulation": accumulation}
    step = TrainingStep(mini(**changes, checkpointing=checkpointing), torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        for each in step.phases:
            each.run()
    again = recomputed_flops(step.workload, causal="full")
    assert counter.get_total_flops() == step_flops(step.workload, causal="full") + again
    assert step_flops(step.workload) == step_flops(mini(**changes))
    assert (again > 0) == checkpointing.startswith(("every", "nested"))


def test_recomputed_flops_by_hand():
    # One token in two layers of 4 d^2 + 3 d f weights; each group leaves out one product of d x f.
    two_groups, one_group = (mini(batch_size=1, seq_len=1, checkpointing=f"every-{k}") for k in (1, 2))
    blocks = 2 * 2 * (4 * 32 * 32 + 3 * 32 * 64) + 2 * 4 * 32
    assert recomputed_flops(two_groups, "full") == blocks - 2 * 2 * 32 * 64
    assert recomputed_flops(one_group, "full") == blocks - 2 * 32 * 64
    assert (product_counts(two_groups)[1], product_counts(one_group)[1]) == (16, 17)
    assert product_counts(mini(checkpointing="every-2", attention="sdpa-flash"))[1] == 13
    # Attention that is kept: the products with weights of both blocks, but for the last of each.
    kept = mini(batch_size=1, seq_len=1, checkpointing="attention", attention="sdpa")
    assert recomputed_flops(kept, "full") == recomputed_flops(kept, "half") == 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert product_counts(kept)[1] == 12
    assert product_counts(mini(checkpointing="selective"))[1] == product_counts(mini())[1] == 0
    # Of two blocks the first alone runs its products again.
    mixed = mini(batch_size=1, seq_len=1, checkpointing="selective-1", attention="sdpa")
    assert (recomputed_flops(mixed), product_counts(mixed)[1]) == (recomputed_flops(kept) // 2, 6)


def test_by_hand():
    # One token: 2 FLOPs a weight; attention to itself: 2 products of 2*1*1*d, in each of 2 layers.
    one = mini(batch_size=1, seq_len=1)
    weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 101
    assert forward_flops(one, "full") == 2 * weights + 2 * 4 * 32
    assert forward_flops(one, "half") == 2 * weights + 2 * 2 * 32
    phases = phase_work(one)
    assert phases["backward"].flops == 2 * phases["forward"].flops
    assert phases["optimizer"].bytes_moved == 7 * 4 * parameter_count(one.model)
    clipped = phase_work(mini(clip=1.0))["optimizer"]
    assert clipped.bytes_moved == 8 * 4 * parameter_count(one.model)  # each gradient is read a second time
    bf16_state = phase_work(mini(optimizer="adamw-bf16-state"))["optimizer"]
    assert bf16_state.bytes_moved == (3 * 4 + 4 * 2) * parameter_count(one.model)
    assert phase_work(mini(dtype="bf16-pure"))["optimizer"].bytes_moved == 7 * 2 * parameter_count(one.model)


def test_operations():
    assert matmul_work(2, 3, 5, bytes_per_element=4) == Work(flops=60, bytes_read=(10 + 15) * 4, bytes_written=24)
    assert adamw_work(10, 4).bytes_read == 160
    work = matmul_work(64, 64, 64, 2)
    assert (work.flops, work.bytes_moved) == (2 * 64**3, 3 * 64 * 64 * 2)


def test_unlike_conventions_do_not_add():
    half, full = Work(flops=1), Work(flops=2, convention=Convention(causal="full"))
    assert (half + half).flops == 2
    with pytest.raises(ValueError, match="unlike FLOP conventions: causal half"):
        _ = half + full


def test_a_workload_s_line_names_the_parts_that_are_not_the_textbook_s():
    assert "bf16, train, sdpa attention, eager" in describe_workload(mini(dtype="bf16", attention="sdpa"))
    one = describe_workload(mini(norm="fused", projections="joint"))
    assert "reference attention, fused norm, projections joint, eager" in one
    assert " fused parts, eager" in describe_workload(mini(norm="fused", rope="fused", mlp="fused", loss="fused"))
