"""The rotation of queries and keys in a user's own model: swapped where a kernel computes the same, or left, named."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")

from stepscope.core.errors import InputError
from stepscope.training.parts.replaced import replace_parts
from tests.conftest import in_the_interpreter_at_length

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "n_embd": 32,
    "n_layer": 1, "n_head": 4, "rotary_dim": 4, "attention_dropout": 0.0, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
IDS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def made(kind: str, **more: Any) -> Any:
    """A small model of a class of transformers, in eval() where it has dropout."""
    cls = getattr(transformers, kind)
    usual = cls.config_class()
    torch.manual_seed(0)
    sizes = {name: size for name, size in {**SIZES, **more}.items() if hasattr(usual, name)}
    return cls(cls.config_class(**sizes)).to(DEVICE).eval()


def step(model: Any, forward: Any = None, *, autocast: bool = False, **more: Any) -> list[Tensor]:
    """The loss of a model, and its gradients."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        loss = (forward or model.forward)(input_ids=IDS, labels=IDS, **more).loss
    return [loss.detach(), *torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])]


def apart(ours: list[Tensor], own: list[Tensor]) -> float:
    """The largest difference of two steps' results, relative to each result's norm."""
    pairs = zip(ours, own, strict=True)
    return max(float((a - b).float().norm() / b.float().norm().clamp(min=1e-4)) for a, b in pairs)


def calls_of(model: Any, **more: Any) -> int:
    """How often a step of a model calls the kernel's operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        step(model, **more)
    counts = {event.key: event.count for event in profiler.key_averages()}
    return counts.get("stepscope::rotate_halves", 0)


OTHERS = (
    "Qwen2",
    "Mistral",
    "Gemma",
    "Gemma3",
    "Olmo2",
    "StableLm",
    "Phi",
    "SmolLM3",
    "Granite",
    "Phi3",
    "Glm4Moe",
    "Nemotron",
)
"""Queries and keys of Qwen 3, Gemma 3 and OLMo 2 are normed. StableLM and Phi turn a slice of the width, which their
forward cuts; in GPT-NeoX, Phi-3, GLM-4 and Nemotron the function does."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPTNeoX", *in_the_interpreter_at_length(*OTHERS)])
def test_families_that_turn_halves_are_swapped_and_compute_the_same(family: str):
    more = {"sliding_window": 4} if family in ("Gemma3", "Mistral") else {}
    model = made(f"{family}ForCausalLM", **more)
    own = step(model)
    (found,) = replace_parts(model, rope="fused").found
    assert found.replaced and found.modules == 1 and found.type == f"{family}Attention"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls_of(model) == 2
    assert apart(step(model), own) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("CohereForCausalLM", "they compute something else: turned queries"),  # neighbours
        ("GlmForCausalLM", "they compute something else: turned queries"),
        ("GPTJForCausalLM", "their apply_rotary_pos_emb takes tensor, sin, cos, and not q, k, cos and sin"),
        ("Llama4ForCausalLM", "their apply_rotary_emb takes xq, xk, freqs_cis, and not q"),
        ("GptOssForCausalLM", "they cannot be called with q, k, cos and sin"),  # tables of half the width
    ],
)
def test_families_that_turn_otherwise_are_left_and_named(kind: str, why: str):
    model = made(kind)
    with pytest.warns(UserWarning, match="keeps code of its own: rope fused"):
        replaced = replace_parts(model, rope="fused")
    assert [each.why.startswith(why) for each in replaced.left] == [True], str(replaced)
    assert calls_of(model) == 0


def test_a_model_without_such_an_attention_is_refused_in_one_line():
    with pytest.raises(InputError, match="it has no attention whose forward calls a function of q, k, cos and sin"):
        replace_parts(made("GPT2LMHeadModel"), rope="fused")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.float32, True), *in_the_interpreter_at_length((torch.bfloat16, False))],
)
def test_a_swapped_model_is_checkpointed_compiled_copied_and_restored(dtype: torch.dtype, autocast: bool):
    model = made("LlamaForCausalLM").to(dtype)
    model.loss_type = "ForCausalLM"
    own, types = step(model, autocast=autocast), [type(module) for module in model.modules()]
    replaced = replace_parts(model, rope="fused", projections="joint", attention="sdpa")
    bound = 1e-5 if dtype == torch.float32 and not autocast else 0.03
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert apart(step(one, autocast=autocast), own) < bound
    model.train()
    model.gradient_checkpointing_enable()
    assert apart(step(model, model, autocast=autocast), own) < bound and calls_of(model) == 3
    model.gradient_checkpointing_disable()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        assert apart(step(model, compiled.__call__, autocast=autocast), own) < bound
    assert counter.frame_count == 1
    replaced.restore()
    assert [type(module) for module in model.modules()] == types and calls_of(model) == 0
    assert torch.equal(step(model, autocast=autocast)[0], own[0])


@pytest.mark.slow
def test_positions_of_each_sequence_have_tables_of_their_own():
    model = made("LlamaForCausalLM")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], device=DEVICE)
    own = step(model, position_ids=positions)
    replace_parts(model, rope="fused")
    assert apart(step(model, position_ids=positions), own) < 1e-5 and calls_of(model, position_ids=positions) == 2


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    """An attention of a user's own, with tables (S, D), which may be parameters."""

    def __init__(self, *, learnt: bool = False):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        angles = torch.linspace(0, 3, 20).view(5, 4).repeat(1, 2)
        self.cos, self.sin = (nn.Parameter(each, requires_grad=learnt) for each in (angles.cos(), angles.sin()))

    def forward(self, x: Tensor) -> Tensor:
        q, k = turn(self.query(x)[:, None], self.key(x)[:, None], self.cos, self.sin)
        return q @ k.transpose(-1, -2)


class Derived(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Decorated(Attention):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return turn(self.query(x)[:, None], self.key(x)[:, None], self.cos, self.sin)[0]


class OfHeads(Attention):
    """An attention with as many heads as a batch has samples, and tables of its own for each head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.query, self.key))
        cos, sin = (each.view(5, 2, 4).transpose(0, 1) for each in (self.cos, self.sin))
        return turn(q, k, cos, sin)[0]


def turn_at(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    return turn(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


class Placed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.query(x)[:, :, None], self.key(x)[:, :, None]
        return turn_at(q, k, self.cos[None], self.sin[None], 2)[0]


def gradients(module: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 80, device=DEVICE).view(2, 5, 8).requires_grad_()
    trained = [each for each in module.parameters() if each.requires_grad]
    return [*torch.autograd.grad(module(x).square().sum(), [x, *trained])]


def test_an_attention_of_a_user_s_own_is_swapped_and_tables_that_take_gradients_keep_theirs():
    attention = Attention().to(DEVICE)
    own = gradients(attention)
    hooked: list[object] = []
    attention.register_forward_hook(lambda *_: hooked.append(1))
    assert replace_parts(nn.Sequential(attention), rope="fused").replaced
    assert apart(gradients(attention), own) < 1e-5 and hooked
    learnt = Attention(learnt=True).to(DEVICE)
    own = gradients(learnt)
    assert replace_parts(nn.Sequential(learnt), rope="fused").replaced
    with pytest.warns(UserWarning, match="turn turns .* by the model's own code: its tables take gradients"):
        assert apart(gradients(learnt), own) == 0


class Detached(Attention):
    """Its queries get no gradient, or neither queries nor keys do."""

    def forward(self, x: Tensor) -> Tensor:
        return turn_detached(self.query(x)[:, None], self.key(x)[:, None], self.cos, self.sin)[0]


class AllDetached(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return turn_all_detached(self.query(x)[:, None], self.key(x)[:, None], self.cos, self.sin)[0]


def turn_detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turn(q.detach(), k, cos, sin)


def turn_all_detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return turn(q.detach(), k.detach(), cos, sin)


@pytest.mark.parametrize("kind", [Detached, AllDetached])
def test_a_function_that_gives_no_gradient_is_left(kind: type[Attention]):
    with pytest.warns(UserWarning, match="gradient of queries is there, and their own code gives none"):
        assert not replace_parts(nn.Sequential(kind().to(DEVICE)), rope="fused").replaced


def test_tables_of_each_head_and_a_place_that_is_given_by_position_keep_the_model_s_code():
    x = torch.linspace(-1, 1, 80, device=DEVICE).view(2, 5, 8)
    for kind, why in ((OfHeads, "its tables are of each head"), (Placed, "it has other arguments")):
        attention = kind().to(DEVICE)
        own = attention(x)
        assert replace_parts(nn.Sequential(attention), rope="fused").replaced
        with pytest.warns(UserWarning, match=why):
            assert torch.equal(attention(x), own)


def test_what_no_forward_calls_by_its_name_is_left():
    patched: Any = Attention().to(DEVICE)
    patched.forward = patched.forward
    for module, why in ((Decorated(), "their forward has a decorator"), (patched, "patched by somebody else")):
        with pytest.warns(UserWarning, match=why):
            assert not replace_parts(nn.Sequential(module.to(DEVICE)), rope="fused").replaced
    with pytest.raises(InputError, match="it has no attention whose forward calls"):
        replace_parts(nn.Sequential(Derived().to(DEVICE)), rope="fused")
