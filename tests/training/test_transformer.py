"""The model as mathematics: attention, rotation, norm, causality, gradients."""

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.core.attention_support import predicted_attention
from stepscope.core.errors import InputError
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.parts import ATTENTIONS, Attention
from stepscope.core.workloads import Dtype
from stepscope.recording import ranges
from stepscope.training.attention import attention_for, implementation
from stepscope.training.attention.written_out import reference
from stepscope.training.training_step import build_model
from stepscope.training.transformer import (
    Block,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    Transformer,
    to_rotated_halves,
    to_rotated_neighbours,
)
from tests.conftest import mini

CPU = [n for n, record in ATTENTIONS.items() if record.compiler is None and "cpu" in record.device_types]


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
    out = implementation(name)(q, k, v, causal=causal)
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


def test_the_angles_of_rotation_by_hand():
    """Pair i turns by 10000^(-2i/D) a position (Su et al. 2021, section 3.2.2), from its first half to its second."""
    rotary = RotaryEmbedding(4, 101)
    rotary.initialise()
    turned = rotary(torch.tensor([0.5, 1.0, 0.0, 0.0]).expand(1, 1, 101, 4))[0, 0]
    for position in (0, 1, 100):
        fast, slow = position, position / 100
        expected = [0.5 * math.cos(fast), math.cos(slow), 0.5 * math.sin(fast), math.sin(slow)]
        torch.testing.assert_close(turned[position], torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_fresh_weights_have_the_deviation_that_the_docstring_states():
    """sqrt(2 / (fan_in + fan_out)) of a normal cut at 3 deviations; 1 in the embedding, and 1 in every norm."""
    model = build_model(mini(d_model=128, d_ff=384, vocabulary=1009), "cpu")
    density, within = math.exp(-4.5) / math.sqrt(2 * math.pi), math.erf(3 / math.sqrt(2))
    of_cut = math.sqrt(1 - 6 * density / within)  # 0.9866: what cutting leaves of the deviation
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        deviation = 1.0 if name == "embedding.weight" else math.sqrt(2 / sum(weight.shape))
        found = float(weight.detach().double().std())
        # The deviation of n normal samples is itself known to 1 / sqrt(2 n) of it; five of those.
        assert found == pytest.approx(of_cut * deviation, rel=5 / math.sqrt(2 * weight.numel())), name
        assert weight.detach().abs().max() <= 3.0001 * deviation, name


def neighbours_rotated(x_BHSD: torch.Tensor) -> torch.Tensor:
    """Su et al. 2021, equation 12: (x[2i], x[2i + 1]) is a complex number, turned by position * 10000^(-2i/D)."""
    seq_len, head_dim = x_BHSD.shape[-2:]
    rates = torch.tensor([10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    turns = torch.exp(1j * torch.arange(seq_len, dtype=torch.float64)[:, None] * rates)
    numbers = torch.view_as_complex(x_BHSD.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * turns).flatten(-2)


class NeighboursRotated(torch.nn.Module):
    def forward(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return neighbours_rotated(x_BHSD).to(x_BHSD.dtype)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 8), (4, 64)])
def test_permuted_weights_give_the_scores_of_a_model_that_rotates_neighbours(heads: int, head_dim: int):
    """Against complex numbers in float64; without the permutation the scores are others."""
    generator = torch.Generator().manual_seed(1)
    width, seq_len = heads * head_dim, 50
    x = torch.randn(2, seq_len, width, generator=generator, dtype=torch.float64)
    weights = [torch.randn(width, width, generator=generator, dtype=torch.float64) for _ in range(2)]
    halves = RotaryEmbedding(head_dim, seq_len)
    halves.initialise()

    def scores(rotate: Callable[[torch.Tensor], torch.Tensor], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        q, k = (rotate((x @ weight.T).unflatten(-1, (heads, -1)).transpose(1, 2)) for weight in (query, key))
        return q @ k.mT / math.sqrt(head_dim) / width

    theirs = scores(neighbours_rotated, *weights)
    ours = scores(halves, *(to_rotated_halves(weight, heads) for weight in weights))
    # The module has its angles, positions up to 49, in fp32.
    assert torch.allclose(ours, theirs, atol=seq_len * 2.0**-23 * 4)
    assert head_dim == 2 or not torch.allclose(scores(halves, *weights), theirs, atol=0.1)
    for weight in weights:
        assert torch.equal(to_rotated_neighbours(to_rotated_halves(weight, heads), heads), weight)


def test_permuted_weights_give_the_logits_of_a_model_that_rotates_neighbours():
    workload = mini()
    theirs = build_model(workload, torch.device("cpu")).double()
    ours, unchanged = copy.deepcopy(theirs), copy.deepcopy(theirs)
    for block, other in zip(ours.blocks, theirs.blocks, strict=True):
        assert isinstance(block, Block) and isinstance(other, Block)
        other.attention.rotary = NeighboursRotated()  # pyright: ignore[reportAttributeAccessIssue]
        for name in ("query", "key"):
            theirs_weight = getattr(other.attention, name).weight.data
            getattr(block.attention, name).weight.data = to_rotated_halves(theirs_weight, workload.model.heads)
    tokens = torch.randint(workload.model.vocabulary, (2, workload.seq_len))
    assert torch.allclose(ours(tokens), theirs(tokens), atol=1e-5)
    assert not torch.allclose(unchanged(tokens), theirs(tokens), atol=1e-3)


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


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", ["reference", "sdpa", "sdpa-math", "chunked", "flash-tiled"])
def test_shared_keys_are_those_of_a_model_that_has_each_of_them_for_itself(name: Attention, kv_heads: int):
    """Keys and values of a group written out once for each of its heads give the same logits."""
    shared = build_model(mini(attention=name, d_model=64, heads=4, kv_heads=kv_heads), "cpu")
    whole = build_model(mini(d_model=64, heads=4), "cpu")
    weights = shared.state_dict()
    for key in weights:
        if key.endswith(("attention.key.weight", "attention.value.weight")):
            weights[key] = weights[key].unflatten(0, (kv_heads, 16)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
    whole.load_state_dict(weights)
    tokens = torch.randint(101, (2, 16))
    torch.testing.assert_close(shared(tokens), whole(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "sdpa", "chunked", "flash-tiled"])
def test_with_a_window_no_query_sees_keys_beyond_it(name: Attention):
    """Two layers with a window of 3 reach 4 tokens back: what lies before changes nothing, to the last bit."""
    model = build_model(mini(attention=name, window=3, layers=2), "cpu")
    tokens = torch.randint(100, (1, 16))
    other = tokens.clone()
    other[0, 5] = 100
    changed = (model(tokens) != model(other)).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_a_softcap_that_is_nothing_leaves_all_keys_alike():
    """As a query of zeros does, whose scores are zero."""
    capped, zero = (build_model(mini(attention="reference", softcap=cap), "cpu") for cap in (1e-7, None))
    zero.load_state_dict(capped.state_dict())
    for block in zero.blocks:
        torch.nn.init.zeros_(block.get_parameter("attention.query.weight"))
    tokens = torch.randint(100, (2, 16))
    torch.testing.assert_close(capped(tokens), zero(tokens), rtol=1e-4, atol=1e-5)


def test_sinks_take_weight_train_and_are_counted():
    """A sink far below all scores is none; one far above takes all the weight, so that attention adds nothing."""
    model, plain = (build_model(mini(attention="reference", sinks=given), "cpu") for given in (True, False))
    assert sum(p.numel() for p in model.parameters()) == parameter_count(mini(sinks=True).model)
    tokens = torch.randint(100, (2, 16))
    model(tokens).square().mean().backward()
    sinks = [model.get_parameter(f"blocks.{i}.attention.sinks") for i in range(len(model.blocks))]
    assert all(not sink.any() and sink.grad is not None and sink.grad.all() for sink in sinks)
    plain.load_state_dict(model.state_dict(), strict=False)
    for level, weight in ((-1e4, 1.0), (1e4, 0.0)):
        for i, sink in enumerate(sinks):
            torch.nn.init.constant_(sink, level)
            plain.get_parameter(f"blocks.{i}.attention.output.weight").data.mul_(weight)
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)


def test_sinks_are_refused_where_nothing_computes_them():
    with pytest.raises(InputError, match=r"attention sdpa takes no softcap, sinks, .*: choose one of reference"):
        build_model(mini(attention="sdpa", sinks=True), "cpu")
    with pytest.raises(InputError, match="parallel context computes attention without sinks: leave out --sinks"):
        mini(sinks=True, seq_len=16, parallel="context", ranks=2)
    with pytest.raises(InputError, match="parallel tensor splits heads, and not their sinks: leave out --sinks"):
        mini(sinks=True, parallel="tensor", ranks=2)
    with pytest.raises(InputError, match="attention reference and sinks is not predicted: choose one of flash"):
        predicted_attention(mini(attention="reference", sinks=True), "cuda")


def test_a_softcap_is_refused_where_nothing_computes_it():
    with pytest.raises(InputError, match=r"attention sdpa takes no softcap, .*: choose one of reference"):
        build_model(mini(attention="sdpa", softcap=30.0), "cpu")
    with pytest.raises(InputError, match="parallel context computes attention without a softcap"):
        mini(softcap=30.0, seq_len=16, parallel="context", ranks=2)
    with pytest.raises(InputError, match="attention reference and a softcap is not predicted: choose one of flash"):
        predicted_attention(mini(attention="reference", softcap=30.0), "cuda")
    assert predicted_attention(mini(attention="auto", softcap=30.0), "cuda") == "flash"
    with pytest.raises(InputError, match="softcap is 0: it must be a number above zero"):
        mini(softcap=0)


def test_a_window_is_refused_where_nothing_computes_it():
    with pytest.raises(InputError, match="attention sdpa-flash takes no sliding window: choose one of"):
        build_model(mini(attention="sdpa-flash", window=3), "cpu")
    with pytest.raises(InputError, match="parallel context computes attention without a window"):
        mini(window=3, seq_len=16, parallel="context", ranks=2)  # also where its attention is none that is spread
    with pytest.raises(InputError, match="memory of a step with attention sdpa and a window is not predicted"):
        predicted_attention(mini(attention="sdpa", window=3), "cuda")
    assert predicted_attention(mini(attention="auto", window=3), "cuda") == "flash"


def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    tied, untied = (build_model(mini(tied=t), "cpu") for t in (True, False))
    assert tied.head.weight is tied.embedding.weight
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach()})
    tokens = torch.randint(101, (2, 16))
    for model in (tied, untied):
        model(tokens).logsumexp(-1).sum().backward()
    both = [untied.embedding.weight.grad, untied.head.weight.grad]
    assert both[0] is not None and both[1] is not None
    torch.testing.assert_close(tied.embedding.weight.grad, both[0] + both[1])
    # A head's deviation: with the embedding's, 1, logits would be as large as the root of d_model.
    assert float(tied.head.weight.detach().std()) == pytest.approx((2 / (32 + 101)) ** 0.5, rel=0.1)


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
