"""The model as mathematics: attention, rotation, norm, causality, gradients."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.attention_support import SUPPORT
from stepscope.core.errors import InputError
from stepscope.core.workload import Attention, Dtype
from stepscope.measure import ranges
from stepscope.models.attention import IMPLEMENTATIONS, attention_for, reference
from stepscope.models.training_step import build_model
from stepscope.models.transformer import RMSNorm, RotaryEmbedding, SwiGLU, Transformer
from tests.conftest import mini

CPU = [name for name in IMPLEMENTATIONS if "cpu" in SUPPORT[name].device_types]


def qkv(seq: int, head_dim: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, seq, head_dim, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Attention one query at a time, from its definition."""
    out = torch.zeros_like(q)
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = range(i + 1) if causal else range(k.shape[2])
                scores = [math.exp(float(q[batch, head, i] @ k[batch, head, j]) * scale) for j in keys]
                total = sum(scores)
                for j in keys:
                    out[batch, head, i] += scores[j] / total * v[batch, head, j]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CPU)
def test_attention_is_its_definition(name: Attention, causal: bool):
    q, k, v = (t.detach() for t in qkv(7, 4))
    out = IMPLEMENTATIONS[name](q, k, v, causal=causal)
    torch.testing.assert_close(out, by_loops(q, k, v, causal, 0.5))


@given(seq=st.integers(1, 33), head_dim=st.sampled_from([2, 6, 16]), causal=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_reference_has_sdpas_values_and_gradients(seq: int, head_dim: int, causal: bool, seed: int):
    ours, theirs = qkv(seq, head_dim, seed=seed), qkv(seq, head_dim, seed=seed)
    out = reference(*ours, causal=causal, scale=0.3)
    q, k, v = theirs
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(seed))
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_reference_survives_scores_whose_exponential_overflows():
    q, k, v = (t.detach().float() for t in qkv(5, 4))
    out = reference(q * 300, k * 300, v, causal=True)
    assert torch.isfinite(out).all()


def test_reference_passes_gradcheck():
    q, k, v = qkv(4, 2)
    assert torch.autograd.gradcheck(lambda *x: reference(*x, causal=True), (q, k, v))


def test_rotation_keeps_length_and_makes_scores_depend_on_distance_alone():
    rotary = RotaryEmbedding(8, 32)
    rotary.initialise()
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotary(q.expand(1, 1, 32, 8))[0, 0], rotary(k.expand(1, 1, 32, 8))[0, 0]
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(32))
    scores = turned_q @ turned_k.T
    for distance in (0, 3, 11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores.diagonal(3)[0], scores.diagonal(11)[0])


def test_norm_is_pytorchs_and_computed_in_fp32():
    norm = RMSNorm(64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (64,), norm.weight, eps=1e-5))
    loud = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300^2 is beyond fp16
    norm.weight.data.fill_(1.0)
    assert norm(loud).dtype == torch.float16
    torch.testing.assert_close(norm(loud), torch.ones(1, 64, dtype=torch.float16))


def test_swiglu_by_hand():
    layer = SwiGLU(mini().model)
    x = torch.randn(3, 32)
    gate, up = x @ layer.gate.weight.T, x @ layer.up.weight.T
    torch.testing.assert_close(layer(x), (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T)


def test_no_token_sees_a_later_one():
    model = build_model(mini(), "cpu")
    tokens = torch.randint(101, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 101
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", [n for n in CPU if n != "reference"])
def test_the_model_is_the_same_with_every_attention(name: Attention):
    models: Sequence[Transformer] = [build_model(mini(attention=a), "cpu") for a in ("reference", name)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(101, (2, 16))
    torch.testing.assert_close(models[1](tokens), models[0](tokens), rtol=1e-4, atol=1e-5)


def test_gradients_of_the_model_against_float64():
    model = build_model(mini(), "cpu")
    precise = build_model(mini(), "cpu").double()
    precise.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    tokens, targets = torch.randint(101, (2, 16)), torch.randint(101, (32,))
    for each in (model, precise):
        F.cross_entropy(each(tokens).flatten(0, 1), targets).backward()
    for ours, reference_parameter in zip(model.parameters(), precise.parameters(), strict=True):
        assert ours.grad is not None and reference_parameter.grad is not None
        error = (ours.grad.double() - reference_parameter.grad).norm() / reference_parameter.grad.norm()
        assert error < 1e-5


def test_a_fresh_model_predicts_about_uniformly():
    model = build_model(mini(), "cpu")
    tokens, targets = torch.randint(101, (4, 16)), torch.randint(101, (64,))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets)
    assert abs(float(loss.detach()) - math.log(101)) < 1.0


def test_a_model_on_meta_takes_no_memory_and_knows_its_shapes():
    model = build_model(mini(), "meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model(torch.empty(2, 16, dtype=torch.long, device="meta")).shape == (2, 16, 101)


@pytest.mark.parametrize(
    ("name", "device_type", "dtype", "head_dim", "says"),
    [
        ("sdpa-cudnn", "cpu", "bf16", 64, "does not run on cpu"),
        ("sdpa-flash", "cuda", "fp32", 64, "does not run in fp32"),
        ("sdpa-flash", "cuda", "bf16", 512, "head_dim up to 256"),
    ],
)
def test_an_attention_that_cannot_run_names_those_that_can(
    name: Attention, device_type: str, dtype: Dtype, head_dim: int, says: str
):
    workload = mini(attention=name, dtype=dtype, d_model=head_dim, heads=1)
    with pytest.raises(InputError, match=says) as caught:
        attention_for(workload, device_type)
    assert "reference, sdpa" in str(caught.value)


def test_ranges_name_modules_and_the_three_parts_of_attention():
    model = build_model(mini(), "cpu")
    tokens = torch.randint(101, (1, 16))
    with ranges.emitted_to(ranges.ProfilerEmitter()), ranges.detailed(model), torch.profiler.profile() as profiler:
        model(tokens)
    names = [event.name for event in profiler.events() or []]
    for part in ("attention scores", "softmax", "attention output"):
        assert names.count(part) == 2  # one a layer
    for path in ("embedding", "blocks.0", "blocks.1.attention", "blocks.1.feed_forward.down", "head"):
        assert names.count(path) == 1
    assert not any(hook for module in model.modules() for hook in module._forward_hooks)


def test_silent_ranges_are_one_shared_object():
    assert ranges.named_range("step") is ranges.detail_range("softmax")
