"""Fused parts in a user's own model: what is replaced computes the same, what differs is left and named."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")

from stepscope.core import parts as records
from stepscope.core.errors import InputError
from stepscope.training.half_optimizers import halve
from stepscope.training.parts import replaced as replaced_module
from stepscope.training.parts.replaced import replace_parts
from tests.conftest import at_length

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class SwiGLU(nn.Module):
    def __init__(self, act: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(12, 20, bias=False), nn.Linear(12, 20, bias=False)
        self.down_proj, self.act = nn.Linear(20, 12, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Gelu(nn.Module):
    """A linear layer, GELU and another layer, by the names of GPT-2."""

    def __init__(self, act: Any, dropout: float = 0.0, *, at_end: bool = True):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(12, 20), nn.Linear(20, 12)
        self.act, self.dropout, self.at_end = act, nn.Dropout(dropout), at_end

    def forward(self, x: Tensor) -> Tensor:
        out = self.c_proj(self.act(self.c_fc(x)))
        return self.dropout(out) if self.at_end else out


class Shifted(nn.Module):
    """Gemma's norm: the weight is what is added to 1."""

    def __init__(self, power: float = 2.0):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.zeros(12)), 1e-5, power

    def forward(self, x: Tensor) -> Tensor:
        normal = x.float() * torch.rsqrt(x.float().abs().pow(self.power).mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.float())).type_as(x)


def net(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    parts = modules or (nn.RMSNorm(12, eps=1e-5), SwiGLU(nn.SiLU()), Shifted())
    return nn.Sequential(nn.Linear(7, 12), *parts).to(DEVICE)


def gradients(model: nn.Module, *, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 7, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        out = model(x)
    return out.detach(), list(
        torch.autograd.grad(out.float(), [*model.parameters()], torch.randn(out.shape).to(DEVICE))
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_a_replaced_model_has_its_own_results_gradients_and_keys(autocast: bool):
    model = net()
    before, keys = gradients(model, autocast=autocast), {k: t.data_ptr() for k, t in model.state_dict().items()}
    replaced = replace_parts(model, norm="fused", mlp="fused")
    assert [(each.type, each.modules) for each in replaced.replaced] == [("RMSNorm", 1), ("Shifted", 1), ("SwiGLU", 1)]
    assert not replaced.left
    assert {k: t.data_ptr() for k, t in model.state_dict().items()} == keys
    bound = 2e-2 if autocast else 1e-5
    of_before = pickle.dumps(model, protocol=0).replace(b"_instance_of", b"_made_again")
    for now in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(of_before)):
        after = gradients(now, autocast=autocast)
        assert after[0].dtype == before[0].dtype
        for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
            assert float((one - other).norm()) <= bound * float(other.norm())
    types = [type(module) for module in net().modules()]
    replaced.restore()
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(gradients(model, autocast=autocast)[0], before[0])


def test_the_kernels_run_in_a_replaced_model():
    model = net()
    replace_parts(model, norm="fused", mlp="fused")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gradients(model)
    called = {event.key: event.count for event in profiler.key_averages()}
    assert called["stepscope::rms_norm_forward"] == 2
    assert called["stepscope::silu_product_backward"] == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_of_a_linear_layer_is_replaced_with_its_bias(tanh: bool, autocast: bool):
    act = nn.GELU(approximate="tanh" if tanh else "none")
    first = Gelu(act, 0.4)
    model = net(first, Gelu(act, 0.4))
    before = gradients(model, autocast=autocast)
    replaced = replace_parts(model, mlp="fused")
    assert [(each.type, each.modules) for each in replaced.found] == [("Gelu", 2)] and not replaced.left
    assert type(first.dropout) is nn.Dropout
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        after = gradients(model, autocast=autocast)  # the same dropouts, of the same seed
    called = {event.key: event.count for event in profiler.key_averages()}
    assert called["stepscope::biased_gelu_forward"] == called["stepscope::biased_gelu_backward"] == 2
    for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert float((one - other).norm()) <= (2e-2 if autocast else 1e-5) * float(other.norm())
    again = gradients(pickle.loads(pickle.dumps(model)), autocast=autocast)
    assert torch.equal(again[0], after[0])
    seen: list[Any] = []
    first.c_fc.register_forward_hook(lambda *call: seen.append(call))
    act.register_forward_hook(lambda *call: seen.append(call))  # which both have
    hooked = gradients(model, autocast=autocast)
    assert len(seen) == 3 and float((hooked[0] - before[0]).norm()) <= 1e-2 * float(before[0].norm())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norms_are_replaced(bias: bool, autocast: bool):
    model = net(nn.LayerNorm(12, eps=1e-3, bias=bias), nn.LayerNorm(12, elementwise_affine=False))
    before = gradients(model, autocast=autocast)
    replaced = replace_parts(model, norm="fused")
    assert [(each.type, each.modules) for each in replaced.found] == [("LayerNorm", 1)] and not replaced.left
    after = gradients(model, autocast=autocast)
    assert after[0].dtype == before[0].dtype
    for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert float((one - other).norm()) <= (2e-2 if autocast else 1e-5) * float(other.norm())
    with pytest.raises(InputError, match="norm compiled replaces nothing in Sequential: it has no RMSNorm"):
        replace_parts(net(nn.LayerNorm(12)), norm="compiled")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layer_norm_has_its_own_dtype_under_autocast(dtype: torch.dtype):
    norm = nn.LayerNorm(12, device=DEVICE, dtype=dtype)
    x = torch.randn(3, 12, device=DEVICE, dtype=dtype)
    kinds: list[torch.dtype] = []
    for replacing in (False, True):
        if replacing:
            replace_parts(nn.Sequential(norm), norm="fused")
        with torch.autocast(DEVICE.type, torch.bfloat16):
            kinds.append(norm(x).dtype)
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_beside_weights_in_bf16_a_norm_gives_the_dtype_of_its_input(kind: Any, first: bool):
    model = nn.Sequential(kind(12, eps=1e-5), nn.Linear(12, 12)).to(DEVICE)
    replaced = replace_parts(model, norm="fused")
    x = torch.randn(3, 12, device=DEVICE)
    exact = model[0](x)
    if first:
        halve(model)
    else:
        replaced.restore()
        halve(model)
        replaced = replace_parts(model, norm="fused")
    again = pickle.loads(pickle.dumps(model))[0]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        for norm in (model[0], again):
            assert norm(x).dtype == torch.float32
            narrow = norm(x.bfloat16())
            assert narrow.dtype == torch.bfloat16
            torch.testing.assert_close(narrow.float(), exact, rtol=2e-2, atol=2e-2)
        replaced.restore()
        assert again(x.bfloat16()).dtype == torch.bfloat16
        model.float()
        replace_parts(model, norm="fused")
        assert model[0](x.bfloat16()).dtype == torch.float32


def test_other_activations_and_dropouts_that_are_not_called_keep_their_code():
    for act in (nn.ReLU(), nn.SiLU(), nn.GELU(), nn.PReLU(), "gelu"):
        if isinstance(act, nn.GELU):
            continue
        with pytest.raises(InputError, match="mlp fused replaces nothing in Sequential: it has no SwiGLU of gate, up"):
            replace_parts(net(Gelu(act)), mlp="fused")
    (left,) = replace_parts(net(Gelu(nn.GELU(), 0.1, at_end=False)), mlp="fused").left
    assert left.why.startswith("they compute something else")
    with pytest.raises(InputError, match="it has no SwiGLU of gate, up and down"):
        replace_parts(net(Gelu(nn.GELU())), mlp="compiled")


class Mlp(nn.Module):
    """A linear layer, GELU and another layer, with a dropout between them and something before it."""

    def __init__(self, act: Any, dropout: float = 0.0, *, bias: bool = True):
        super().__init__()
        self.lin1, self.activation, self.dropout = nn.Linear(12, 20), act, nn.Dropout(0.5 if not bias else 0.0)
        self.between, self.lin2 = nn.Dropout(dropout), nn.Linear(20, 12, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        states = self.between(self.activation(self.lin1(x)))
        return self.dropout(self.lin2(states)) if self.lin2.bias is not None else self.lin2(self.dropout(states))


class Limited(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x).clamp(-7.0, 7.0))


class Asserting(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        assert input.dim() == 4
        return super().forward(input)


def _asserting(x: Tensor) -> Tensor:
    assert x.dim() == 3
    return nn.functional.gelu(x)


def test_what_has_a_limit_or_refuses_a_trial_is_left():
    limits = net(Limited(nn.SiLU()), nn.RMSNorm(12, eps=1e-5), Asserting(12))
    with pytest.warns(UserWarning, match="Limited left.*something else"):
        left = replace_parts(limits, norm="fused", mlp="fused").left
    assert [each.type for each in left] == ["Asserting", "Limited"] and "AssertionError" in left[0].why
    for act in (lambda x: nn.functional.gelu(x).clamp(-10.0, 10.0), lambda x: x.transpose(1, 2), _asserting):
        with pytest.raises(InputError, match="mlp fused replaces nothing"):
            replace_parts(net(Mlp(act)), mlp="fused")
    without_bias = net(Mlp(nn.GELU(), bias=False))  # its dropout stands before the second layer
    with pytest.warns(UserWarning, match="something else"):
        assert not replace_parts(without_bias, mlp="fused").replaced


def test_activations_are_looked_at_without_their_hooks_and_random_numbers():
    called: list[Any] = []
    drawing, hooked = Mlp(nn.RReLU()), Mlp(nn.GELU())
    hooked.activation.register_forward_hook(lambda *call: called.append(call))
    model, state = net(drawing, hooked), torch.get_rng_state()
    with pytest.warns(UserWarning, match="has a hook or a patched forward"):
        assert not replace_parts(model, mlp="fused").replaced
    assert torch.equal(torch.get_rng_state(), state) and not called


def test_what_is_changed_after_the_swap_is_computed_as_it_is_now():
    changes: list[Any] = [
        lambda mlp: setattr(mlp, "activation", nn.ReLU()),
        lambda mlp: setattr(mlp.activation, "approximate", "tanh"),
        lambda mlp: setattr(mlp.between, "p", 0.9),
        lambda mlp: mlp.between.register_forward_hook(lambda *call: call[-1] * 2),
    ]
    for change in changes:
        mlp, norm = Mlp(nn.GELU()), nn.LayerNorm(12)
        model = net(mlp, norm)
        replaced = replace_parts(model, norm="fused", mlp="fused")
        assert not replaced.left
        change(mlp)
        norm.weight = None  # pyright: ignore[reportAttributeAccessIssue]
        now = gradients(model)[0]
        norm.bias = None  # pyright: ignore[reportAttributeAccessIssue]
        without_bias = gradients(model)[0]
        replaced.restore()
        assert torch.equal(gradients(model)[0], without_bias)
        torch.testing.assert_close(now, without_bias, rtol=1e-6, atol=1e-6)  # a bias of zeros
    for act in (nn.functional.gelu, nn.functional.relu):  # a function in the place of a module
        mlp = SwiGLU(nn.SiLU())
        model = net(mlp)
        replaced = replace_parts(model, mlp="fused")
        mlp.act = nn.GELU() if act is nn.functional.gelu else nn.ReLU()
        now = gradients(model)[0]
        replaced.restore()
        assert torch.equal(now, gradients(model)[0])


class _Scaling(nn.Module):
    """Query, key and value, of which the first is scaled in place."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q *= 0.5
        return q * k + v.mul_(2.0)


def test_joint_projections_may_be_changed_in_place():
    model = net(_Scaling())
    before = gradients(model)
    replaced = replace_parts(model, projections="joint")
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (model, compiled):
        after = gradients(run)
        for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    replaced.restore()
    assert torch.equal(gradients(model)[0], before[0])


def test_a_weight_that_is_made_when_its_layer_is_called_is_no_part_of_a_joint_product():
    def doubled(layer: Any, _: Any) -> None:
        layer.weight.data.mul_(2.0)

    own = net(_Scaling())
    model = copy.deepcopy(own)
    replace_parts(model, projections="joint")
    for each in (own, model):
        projections: Any = each[1]
        projections.k_proj.register_forward_pre_hook(doubled)
    (expected, due), (found, gradient) = gradients(own), gradients(model)
    for one, other in zip((found, *gradient), (expected, *due), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def test_what_wraps_a_replaced_module_stays_when_that_is_restored():
    norm, projections = nn.LayerNorm(12), _Scaling()
    model = net(norm, projections)
    replaced = replace_parts(model, norm="fused", projections="joint")
    for module in (norm, projections.q_proj):
        parametrize.register_parametrization(module, "weight", _Twice())
    wrapped = gradients(model)[0]
    replaced.restore()
    assert not any("stepscope" in base.__module__ for base in type(projections.q_proj).__mro__)
    torch.testing.assert_close(gradients(model)[0], wrapped, rtol=1e-5, atol=1e-5)
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is nn.LayerNorm


def test_a_call_that_fails_leaves_what_an_earlier_one_replaced():
    model = net()
    replace_parts(model, norm="fused")
    for parts in ({"attention": "flash"}, {"projections": "joint"}, {"mlp": "fused", "attention": "flash"}):
        model[2] = nn.Identity() if "projections" in parts else model[2]
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(InputError, match="leave out"):
            replace_parts(model, **parts)  # pyright: ignore[reportArgumentType]
        assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("kind", ["Falcon", "GPTNeo"])
def test_attention_that_is_written_out_in_a_models_own_code_is_refused(kind: str):
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_hidden_layers": 1, "vocab_size": 40}
    sizes |= {"num_heads": 2, "attention_types": [[["global"], 1]]} if kind == "GPTNeo" else {"num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config)
    named = config._attn_implementation
    with pytest.raises(InputError, match="has attention written out in its own code; leave out attention"):
        replace_parts(model, attention="flash")
    assert config._attn_implementation == named and "attention" in replaced_module.absent_from(model)


def test_a_module_that_computes_something_else_is_left_and_named():
    model = net(SwiGLU(nn.GELU()), SwiGLU(nn.SiLU()), Shifted(power=1.5), nn.RMSNorm(12, eps=1e-3))
    types = [type(module) for module in model.modules()]
    replaced = replace_parts(model, "fused")
    left = {each.type: each for each in replaced.left if each.modules}
    assert set(left) == {"SwiGLU", "Shifted"}
    assert left["SwiGLU"].where == "1"
    assert "they compute something else: " in left["SwiGLU"].why
    assert "the largest difference is " in left["SwiGLU"].why
    assert {each.part for each in replaced.left if not each.modules} == {"rope", "loss"}
    assert [type(each).__mro__[1] for each in (model[2], model[4])] == [SwiGLU, nn.RMSNorm]
    assert [type(each) for each in (model[1], model[3])] == [types[2], Shifted]


def test_of_modules_that_are_alike_one_is_held_for_all(monkeypatch: pytest.MonkeyPatch):
    """What differs in a size, an attribute, an object of its own or a hook is held by itself."""
    held: list[str] = []
    check = replaced_module.hold

    def noted(module: nn.Module, *rest: Any) -> None:
        held.append(f"{type(module).__name__} {getattr(module, 'eps', '')}")
        check(module, *rest)

    monkeypatch.setattr(replaced_module, "hold", noted)
    modules = [module for _ in range(3) for module in (nn.RMSNorm(12, eps=1e-5), SwiGLU(nn.SiLU()))]
    hooked, trained = SwiGLU(nn.SiLU()), nn.RMSNorm(12, eps=1e-5)
    hooked.register_forward_hook(lambda *_: None)
    nn.init.constant_(trained.weight, 2.0)
    model = net(*modules, trained, nn.RMSNorm(12, eps=1e-3), hooked)
    before = gradients(model)
    replaced = replace_parts(model, norm="fused", mlp="fused")
    assert [(each.type, each.modules) for each in replaced.replaced] == [("RMSNorm", 5), ("SwiGLU", 4)]
    assert set(held) == {"RMSNorm 1e-05", "RMSNorm 0.001", "SwiGLU "}
    assert held.count("RMSNorm 1e-05") == held.count("RMSNorm 0.001") and held.count("SwiGLU ") == 2
    after = gradients(model)
    for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())
    held.clear()
    with_constants = [SwiGLU(nn.Hardtanh(0.0, top)) for top in (1.0, 2.0)]
    assert len(replace_parts(net(*with_constants), mlp="fused").left) == 1 and len(held) == 2


def test_a_model_made_again_is_held_again_only_where_its_code_has_changed(monkeypatch: pytest.MonkeyPatch):
    held: list[str] = []
    check = replaced_module.hold

    def noted(module: nn.Module, *rest: Any) -> None:
        held.append(type(module).__name__)
        check(module, *rest)

    monkeypatch.setattr(replaced_module, "hold", noted)

    def replaced() -> list[int]:
        model = nn.Sequential(nn.RMSNorm(12, eps=1e-4), SwiGLU(nn.SiLU())).to(DEVICE)
        found = replace_parts(model, norm="fused", mlp="fused")
        return [each.modules for each in found.replaced]

    assert replaced() == [1, 1] and set(held) == {"RMSNorm", "SwiGLU"}
    held.clear()
    assert replaced() == [1, 1] and not held
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: self.down_proj(self.gate_proj(x) * self.up_proj(x)))
    assert replaced() == [1] and set(held) == {"SwiGLU"}


def test_what_is_left_keeps_no_numbers_of_its_trials():
    def tensors() -> int:
        return sum(isinstance(each, Tensor) for each in gc.get_objects())

    model = net(SwiGLU(nn.GELU()), Shifted(power=1.5))
    replace_parts(model, "fused")
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        left = replace_parts(model, "fused").left
        assert tensors() == before and len(left) == 4
    finally:
        gc.enable()


def test_a_dropout_inside_is_seen():
    model = net(SwiGLU(nn.Sequential(nn.SiLU(), nn.Dropout(0.1)))).eval()
    (left,) = replace_parts(model, mlp="fused").left
    assert "gives other numbers when it is called again" in left.why
    assert not any(module.training for module in model.modules())


def test_what_is_compiled_is_held_by_its_formula():
    """No trial compiles anything, and the first call of the model does."""
    model = net()
    before = gradients(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    replaced = replace_parts(model, norm="compiled")
    assert [each.modules for each in replaced.replaced] == [1, 1]
    assert not torch._dynamo.utils.counters["stats"]
    after = gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for one, other in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())


def test_wrong_input_is_one_line(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="norm fused replaces nothing in Sequential: it has no RMSNorm"):
        replace_parts(net(nn.LayerNorm(12, elementwise_affine=False)), norm="fused")
    with pytest.raises(InputError, match="replace_parts needs a part"):
        replace_parts(net())
    if DEVICE.type == "cpu":
        monkeypatch.delenv(records.INTERPRETER, raising=False)
        with pytest.raises(InputError, match="norm fused runs on cpu in Triton's interpreter only"):
            replace_parts(net(), norm="fused")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Llama", {"RMSNorm": True, "Attention": True, "MLP": True, "ForCausalLM": True}),
        *at_length(("Qwen2", {"RMSNorm": True, "Attention": True, "MLP": True, "ForCausalLM": True})),
        ("Gemma", {"RMSNorm": True, "Attention": True, "MLP": False, "ForCausalLM": True}),
        ("GPT2", {"LayerNorm": True, "MLP": True, "LMHeadModel": True}),
    ],
)
def test_hugging_faces_models(kind: str, said: dict[str, bool]):
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    if kind != "GPT2":
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind.lower(), **sizes)).to(
        DEVICE
    )
    for module in model.modules():
        module.p = 0.0  # of dropouts, whose numbers differ from call to call
    tokens = torch.arange(14, device=DEVICE).view(2, 7)
    before = model(input_ids=tokens, labels=tokens).loss
    replaced = replace_parts(model, "fused")
    found = {each.type.removeprefix(kind): each.replaced for each in replaced.found if each.modules}
    assert found == said
    after = model(input_ids=tokens, labels=tokens).loss
    assert float(after.detach()) == pytest.approx(float(before.detach()), rel=1e-5)
    after.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
