"""Training in every precision, against loops by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stepscope.core.errors import InputError
from stepscope.questions.quality_answer import not_finite_from
from stepscope.questions.quality_training import (
    BLOCK_VARIANTS,
    VARIANTS,
    batches,
    initial_model,
    rate_at,
)
from tests.questions.quality.small import CPU, SMALL, WORDS, trained

pytestmark = pytest.mark.slow


def test_fp32_is_the_loop_that_anyone_would_write():
    model, data = initial_model(SMALL, 0), batches(SMALL, WORDS.train, CPU, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(1, SMALL.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, SMALL.steps, SMALL.learning_rate)
        tokens, targets = data.at(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = trained("fp32")
    assert run.losses == losses
    assert all(torch.equal(a, b) for a, b in zip(run.parameters, model.parameters(), strict=True))
    with torch.no_grad():
        held_out = torch.tensor(list(WORDS.held_out))
        sequences = held_out[: len(held_out) // 17 * 17].view(-1, 17)
        logits = model(sequences[:, :-1])
        by_hand = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten()).item()
    assert run.final_loss == pytest.approx(by_hand, rel=1e-5)
    assert run.losses[-1] < run.losses[0] - 1


def test_tokens_and_targets_are_neighbours_in_the_text():
    tokens, targets = batches(SMALL, WORDS.train, CPU, 3).at(SMALL.steps)
    assert tokens.shape == targets.shape == (2, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])
    for row in tokens:
        assert bytes(row.tolist()) in WORDS.train


def test_every_variant_begins_with_the_same_parameters_and_batches():
    """So its first loss is fp32's, up to the format it is computed in."""
    first = trained("fp32").losses[0]
    seen = set()
    for name in (*VARIANTS, "mxfp8", "nvfp4-recipe"):
        if name in ("fp32", "tf32"):
            continue
        run = trained(name)
        assert run.losses[0] == pytest.approx(first, rel=2e-2), name
        assert len(run.losses) == SMALL.steps and tuple(run.losses) not in seen
        seen.add(tuple(run.losses))
    other_start = trained("fp32", start_seed=1)
    assert other_start.losses[0] != first
    assert initial_model(SMALL, 1).head.weight.equal(initial_model(SMALL, 1).head.weight)


@pytest.mark.parametrize("name", ["bf16-pure-stochastic", "nvfp4-recipe"])
def test_a_run_is_the_same_again_whatever_ran_before(name: str):
    one = trained(name)
    torch.rand(7)
    before = torch.get_rng_state()
    assert trained(name).losses == one.losses
    assert torch.equal(torch.get_rng_state(), before)


def test_master_weights_are_an_fp32_training_seen_through_bf16():
    """By hand: fp32 parameters take AdamW's update; forward and backward have their rounding."""
    model = initial_model(SMALL, 0).to(torch.bfloat16)
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    optimizer, data = torch.optim.AdamW(masters), batches(SMALL, WORDS.train, CPU, 0)
    losses = []
    for step in range(1, SMALL.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_at(step, SMALL.steps, SMALL.learning_rate)
        tokens, targets = data.at(step)
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    run = trained("bf16-pure-master")
    # PyTorch's AdamW decays before it adds, ours in one sum: they round differently in the last place of fp32.
    assert run.losses == pytest.approx(losses, abs=2e-2)
    assert run.losses[:3] == pytest.approx(losses[:3], abs=1e-3)
    assert all(torch.equal(parameter, parameter.bfloat16().float()) for parameter in run.parameters)


def test_zeros_and_swallowed_updates_are_counted():
    slow = dataclasses.replace(SMALL, learning_rate=1e-3)
    share = trained("bf16-pure", slow).swallowed
    assert share is not None and share > 0.5
    assert trained("bf16-pure-master", slow).swallowed == pytest.approx(0, abs=0.01)
    assert trained("fp32").swallowed is None
    # Every byte that a batch lacks has a row of zeros in the embedding's gradient; elsewhere zeros are rare in fp32.
    zeros = trained("fp32").zero_gradients
    assert zeros is not None and zeros < 1e-3


def test_fp16_scales_its_loss_and_without_a_scale_nothing_is_skipped():
    assert trained("fp16").skipped_steps is not None
    assert trained("fp16-unscaled").skipped_steps is None


def test_a_run_that_is_lost_is_stopped():
    lost = trained("fp16-unscaled", dataclasses.replace(SMALL, steps=400, learning_rate=1e6))
    begun = not_finite_from(lost.losses)
    assert begun is not None and len(lost.losses) < 400 and math.isnan(lost.final_loss)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [rate_at(step, 100, 1.0) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert max(rates) == rates[9] == 1.0 and rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)


def test_the_finer_the_blocks_the_nearer_to_fp32():
    losses = {name: trained(name).losses for name in ("fp32", "mxint8", "mxfp4")}
    apart = {name: sum(abs(a - b) for a, b in zip(each, losses["fp32"], strict=True)) for name, each in losses.items()}
    assert 0 < apart["mxint8"] < apart["mxfp4"] / 3


def test_a_recipe_leaves_the_attention_of_the_first_and_the_last_layer_alone():
    """PyTorch's attention multiplies by a matrix of its own, and is no nn.Linear."""
    torch.manual_seed(0)
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 3).train()
    x = torch.randn(2, 8, 16)
    attentions: list[Any] = [layer.self_attn for layer in layers.layers]
    plain = [attention(x, x, x)[0] for attention in attentions]
    with BLOCK_VARIANTS["mxfp4-recipe"].products(layers):
        in_blocks = [attention(x, x, x)[0] for attention in attentions]
    assert [torch.equal(*pair) for pair in zip(plain, in_blocks, strict=True)] == [True, False, True]


def test_blocks_that_no_layer_takes_are_refused():
    convolution, two = nn.Conv1d(4, 4, 3), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with (
        pytest.raises(InputError, match=r"no linear layer of the model takes operands in mxfp4: it has none"),
        BLOCK_VARIANTS["mxfp4"].products(convolution),
    ):
        convolution(torch.randn(2, 4, 8))
    with (
        pytest.raises(InputError, match=r"operands in nvfp4: the recipe leaves the first and the last alone"),
        BLOCK_VARIANTS["nvfp4-recipe"].products(two),
    ):
        two(torch.randn(2, 8))
    two(torch.randn(2, 8))
