"""The loss of a Hugging Face model without its logits: where a kernel computes the same, it takes its place."""

import copy
import importlib
import json
import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="the fused parts are written in Triton, which is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from stepscope.core.errors import InputError
from stepscope.recording.ranges import detailed
from stepscope.training.parts import formulas
from stepscope.training.parts import replaced as replaced_module
from stepscope.training.parts.replaced import replace_parts
from tests.command import stepscope
from tests.conftest import at_length

transformers: Any = importlib.import_module("transformers")
"""Without types: by `import`, its hundreds of models take a checker ten seconds."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 67,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
QUICK = ("--warmup", 1, "--steps", 3, "--device", "cpu", "--no-profile")


def language_model(kind: str = "qwen2", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config).to(DEVICE).train()


@pytest.fixture(scope="module", autouse=True)
def _every_kind_of_model_is_held_once() -> Iterator[None]:
    """To hold a kernel against a model's own code takes most of the time of a test. It gives the same for each model of
    the same class, way, configuration and parameters: the first test with such a model holds it, whatever it is for.
    A kernel that was found unlike is held again."""
    held = set[Any]()

    def hold(model: nn.Module, replacement: type[nn.Module], *trials: Any) -> None:
        parameters = tuple(
            (name, *each.shape, each.dtype, each.requires_grad) for name, each in model.named_parameters()
        )
        told = (replacement, str(getattr(model, "config", None)), repr(model), parameters, frozenset(vars(model)))
        if told not in held:
            held_each_time(model, replacement, *trials)
            held.add(told)

    held_each_time = replaced_module.hold
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(replaced_module, "hold", hold)
        yield


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(3, 25, device=DEVICE).view(2, 11)
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def numbers(model: Any, **more: Any) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    loss = model(**batch(), **more).loss
    loss.backward()
    return float(loss.detach()), [p.grad.double() for p in model.parameters() if p.grad is not None]


def same(left: tuple[float, list[Tensor]], right: tuple[float, list[Tensor]], bound: float = 1e-5) -> bool:
    assert len(left[1]) == len(right[1]) > 0
    assert left[0] == pytest.approx(right[0], rel=bound)
    return all(float((a - b).norm()) <= bound * float(b.norm()) for a, b in zip(left[1], right[1], strict=True))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        *at_length(("qwen2", {}), ("gemma", {})),
        ("llama", {}),
        ("granite", {"logits_scaling": 1.0}),
        ("mixtral", {"num_local_experts": 2}),
        ("gpt_neox", {"tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_a_replaced_model_has_its_own_loss_and_gradients(kind: str, changes: dict[str, Any]):
    model = language_model(kind, **changes)
    own = numbers(model), numbers(model, num_items_in_batch=31)
    replaced = replace_parts(model, loss="fused")
    assert [(each.part, each.type, each.modules, each.replaced) for each in replaced.found] == [
        ("loss", type(model).__name__, 1, True)
    ]
    assert model(**batch()).logits is None
    assert same(numbers(model), own[0])
    # As the Trainer counts the labels of all micro-batches of a step.
    assert same(numbers(model, num_items_in_batch=torch.tensor(31, device=DEVICE)), own[1])
    replaced.restore()
    assert model(**batch()).logits.shape == (2, 11, 67)


MASKED: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 2},
}
"""Masked language models, and what their configurations call otherwise."""


def masked_model(kind: str) -> Any:
    torch.manual_seed(0)
    of_bert = {**SIZES, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    more = MASKED[kind] and {"attention_dropout": 0.0, "dropout": 0.0, "vocab_size": 67, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**(more or of_bert), **MASKED[kind]})
    return getattr(transformers, f"{kind}ForMaskedLM")(config).to(DEVICE).train()


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [*((kind, False) for kind in MASKED), ("Bert", True), *at_length(("Roberta", True), ("DistilBert", True))],
)
def test_a_masked_language_model_has_its_own_loss_and_gradients(kind: str, compiled: bool):
    """Labels in place, a bias, and a transform before the head."""
    model = masked_model(kind)
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_()
    own = numbers(model), numbers(model, num_items_in_batch=31)
    assert [str(each) for each in replace_parts(model, loss="fused").found] == [
        f"loss fused: 1 {kind}ForMaskedLM replaced"
    ]
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    for right, found in zip(own, (numbers(model), numbers(model, num_items_in_batch=31)), strict=True):
        joined = (right[0], [torch.cat([each.flatten() for each in right[1]])])  # a key's bias has a gradient near zero
        assert same((found[0], [torch.cat([each.flatten() for each in found[1]])]), joined)
    labels = torch.full((2, 11), -100, device=DEVICE)
    assert model(input_ids=batch()["input_ids"], labels=labels).loss.isnan()
    with pytest.warns(UserWarning, match=r"MaskedLM left, compiled computes no loss of a masked language model"):
        replace_parts(masked_model(kind), loss="compiled")


def test_a_masked_language_model_whose_head_is_hooked_runs_its_own_loss():
    model = masked_model("Bert")
    replace_parts(model, loss="fused")
    assert model(**batch()).logits is None
    handle = model.cls.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="computes this loss by its own code: its head cls.predictions.decoder"):
        assert model(**batch()).logits is not None
    handle.remove()
    assert model(**batch()).logits is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_it_does_in_16_bits(dtype: torch.dtype, autocast: bool):
    """Against float64, no further off than twice the model's own code."""
    model = language_model()
    exact = numbers(copy.deepcopy(model).double())
    model = model if autocast else model.to(dtype)
    with torch.autocast(DEVICE.type, dtype, enabled=autocast):
        own = numbers(model)
        assert replace_parts(model, loss="fused").replaced
        found = numbers(model)
    assert found[0] == pytest.approx(exact[0], rel=0.01)
    for ours, plain, right in zip(found[1], own[1], exact[1], strict=True):
        assert float((ours - right).norm()) <= 2 * float((plain - right).norm()) + 1e-3 * float(right.norm())


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gemma2", {}, "they compute something else: the loss is off by"),  # a cap on the logits
        ("granite", {"logits_scaling": 1.01}, "they compute something else: the loss is off by"),
        ("cohere", {}, "they compute something else: the loss is off by"),
        ("opt", {"word_embed_proj_dim": 32, "ffn_dim": 48}, "their base is not called for hidden states alone"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_differs_between_head_and_loss_is_seen(kind: str, changes: dict[str, Any], why: str, dtype: torch.dtype):
    model = language_model(kind, **changes).to(dtype)
    (left,) = replace_parts(model, loss="fused").left
    assert why in left.why and model(**batch()).logits is not None


class SmoothedLoss:
    """A loss of the user's own."""

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        flat = logits[:, :-1].reshape(-1, vocab_size).float()
        return nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.01)


def test_a_loss_function_of_the_user_s_own_is_left():
    model = language_model()
    model.loss_function = SmoothedLoss()
    (left,) = replace_parts(model, loss="fused").left
    assert "they compute something else" in left.why


def test_no_logits_are_kept_for_backward():
    """The reference keeps log-probabilities of every position; the kernel, gradients as large as its inputs."""
    model = language_model(vocab_size=997)

    def keeps_logits() -> bool:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            model(**batch())
        return any(997 in tensor.shape and 22 in tensor.shape for tensor in saved)

    assert keeps_logits()
    replace_parts(model, loss="fused")
    assert not keeps_logits()


@pytest.mark.parametrize(
    "call",
    [{"logits_to_keep": 3}, {"labels": None}, {"output_router_logits": True}, {"output_hidden_states": True}],
    ids=str,
)
def test_a_call_that_asks_for_something_else_gives_it(call: dict[str, Any]):
    model = language_model("mixtral", num_local_experts=2)
    tokens = batch() | ({} if "logits_to_keep" not in call else {"labels": None})
    own = model(**tokens | call)
    replace_parts(model, loss="fused")
    found = model(**tokens | call)
    assert torch.equal(found.logits, own.logits) and (found.loss is None) == (own.loss is None)
    assert own.loss is None or torch.equal(found.loss, own.loss)


def test_the_loss_of_a_router_is_not_lost():
    """It is added where the configuration says so, after the model was replaced, too."""
    model = language_model("mixtral", num_local_experts=2)
    replace_parts(model, loss="fused")
    model.config.output_router_logits = True
    found = model(**batch())
    assert float(found.loss - model.router_aux_loss_coef * found.aux_loss) < float(found.loss)


def outcome(model: Any, call: dict[str, Any]) -> tuple[str, str] | float:
    try:
        return float(model(**call).loss.detach())
    except Exception as error:
        return type(error).__name__, str(error)


class Adapted(nn.Module):
    """A head with an adapter beside it, which shows the weight of the head, as PEFT's do."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head, self.more = head, nn.Parameter(torch.ones(67, device=DEVICE))

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.more.cumsum(0)


def adapted(model: Any) -> None:
    model.lm_head = Adapted(model.lm_head)


def biased(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.arange(67.0, device=DEVICE))


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _module, _args, logits: 0.5 * logits)


def hooked_before(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda _module, args: (0.5 * args[0],))


def patched(model: Any) -> None:
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: 0.5 * own(x)


def smoothed(model: Any) -> None:
    model.loss_function = SmoothedLoss()


@pytest.mark.parametrize("change", [adapted, biased, hooked, hooked_before, patched, smoothed])
def test_a_head_or_a_loss_that_changes_later_is_not_passed_by(change: Any):
    own, model = language_model(), language_model()
    replace_parts(model, loss="fused")
    change(own)
    change(model)
    said = "loss function is another one" if change is smoothed else "head lm_head is no plain linear layer"
    with pytest.warns(UserWarning, match=f"Qwen2ForCausalLM computes this loss by its own code: its {said}"):
        assert outcome(model, batch()) == pytest.approx(outcome(own, batch()), rel=1e-6)
    assert model(**batch()).logits is not None


@pytest.mark.parametrize("frozen", ["model", "lm_head", "model.layers"])
def test_the_rest_of_a_model_that_is_frozen_in_part_is_trained(frozen: str):
    """And tied weights by what is left of them."""
    for tied in (False, True):
        model = language_model(tie_word_embeddings=tied)
        model.get_submodule(frozen).requires_grad_(requires_grad=False)
        if tied and frozen == "model":
            continue  # nothing is trained
        own = numbers(model)
        replace_parts(model, loss="fused")
        assert same(numbers(model), own) and model(**batch()).logits is None


def test_a_kernel_that_drops_the_head_s_gradient_below_a_frozen_body_is_left(monkeypatch: pytest.MonkeyPatch):
    def drops(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return formulas.linear_cross_entropy(x, weight if x.requires_grad else weight.detach(), targets)

    monkeypatch.setattr(replaced_module, "part_function", lambda _part, _name: drops)
    replaced_module._class_of.cache_clear()
    model = language_model()
    with pytest.warns(UserWarning, match="where their input is frozen, gradient of the head is missing"):
        (left,) = replace_parts(model, loss="fused").left
    replaced_module._class_of.cache_clear()
    assert left.modules == 1 and model(**batch()).logits is not None


@dataclass
class OutputOfALaterRelease(ModelOutput):
    last_hidden_state: Any = None
    what_5_24_calls_cache: Any = None


class BaseOfALaterRelease(transformers.Qwen2Model):
    def forward(self, input_ids: Any = None, **kwargs: Any) -> OutputOfALaterRelease:  # pyright: ignore[reportIncompatibleMethodOverride]
        return OutputOfALaterRelease(super().forward(input_ids, **kwargs)[0])


class OfALaterRelease(transformers.Qwen2ForCausalLM):
    """A model whose base returns other fields than bases do today, as they do since `past_key_values` is `cache`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = BaseOfALaterRelease(config)

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out: Any = self.model(input_ids, **kwargs)
        logits = self.lm_head(out[0])
        assert out.what_5_24_calls_cache is None and not hasattr(out, "past_key_values_of_nobody")
        loss: Any = self.loss_function(logits, labels, 67, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_the_fields_of_outputs_are_those_of_the_release():
    model: Any = OfALaterRelease(language_model().config)
    model.to(DEVICE).train()
    own = numbers(model)
    assert replace_parts(model, loss="fused").replaced
    assert same(numbers(model), own) and model(**batch()).logits is None


def test_what_was_asked_for_and_not_done_is_said(recwarn: pytest.WarningsRecorder):
    """In one line, with the part, the reason and what to do; nothing where all was done."""
    replace_parts(language_model(), "fused")
    assert not [each for each in recwarn if "keeps code of its own" in str(each.message)]
    replace_parts(language_model("gemma2"), "fused")
    (said,) = [str(each.message) for each in recwarn if "keeps code of its own" in str(each.message)]
    assert "Gemma2ForCausalLM keeps code of its own: mlp fused: 1 Gemma2MLP left, they compute something else" in said
    assert "; loss fused: 1 Gemma2ForCausalLM left, they compute" in said and said.endswith("alone if that is right")
    assert "\n" not in said


@pytest.mark.parametrize(
    "asked", [{"logits_to_keep": 1}, {"output_router_logits": True}, {"return_dict": False}], ids=str
)
def test_a_call_of_training_that_asks_for_more_than_the_loss_is_told_whose_loss_it_gets(asked: dict[str, Any]):
    own, model = language_model("mixtral", num_local_experts=2), language_model("mixtral", num_local_experts=2)
    replace_parts(model, loss="fused")
    with pytest.warns(
        UserWarning, match=f"MixtralForCausalLM computes this loss by its own code: .*{next(iter(asked))}"
    ):
        found = outcome(model, batch() | asked)
    assert found == outcome(own, batch() | asked)


def test_ranges_of_modules_leave_the_loss_fused():
    """What is traced is what is timed."""
    model = language_model()
    replace_parts(model, loss="fused")
    with detailed(model):
        assert model(**batch()).logits is None


@pytest.mark.parametrize(
    "change",
    [
        {"labels": batch()["labels"].int()},
        {"labels": batch()["labels"] > 5},
        {"labels": batch()["labels"].view(1, 22)},
        {"labels": batch()["labels"].view(22)},
        {"labels": batch()["labels"][:, :10]},
        {"shift_labels": batch()["labels"]},
        {"ignore_index": 5},
        {"labels": batch()["labels"].masked_fill(batch()["labels"] == 9, -9)},
    ],
    ids=lambda change: ", ".join(f"{name} {getattr(each, 'shape', each)}" for name, each in change.items()),
)
def test_labels_that_the_kernel_does_not_take_are_the_model_s_own_affair(change: dict[str, Any]):
    if DEVICE.type == "cuda" and -9 in change.get("labels", ()):
        pytest.skip("a GPU's assertion ends the process")
    own, model = language_model(), language_model()
    replace_parts(model, loss="fused")
    assert outcome(model, batch() | change) == outcome(own, batch() | change)


def test_a_call_that_the_model_does_not_take_is_refused_in_its_words():
    model = language_model()
    replace_parts(model, loss="fused")
    tokens = batch()["input_ids"]
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(tokens, **batch())


def test_torch_func_transforms_the_model_s_own_loss():
    model = language_model()
    replace_parts(model, loss="fused")
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda given: functional_call(model, given, (), batch()).loss)(parameters)
    _, right = numbers(model)
    assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(found.values(), right, strict=True))


class ToldOfLabels(transformers.Qwen2Model):
    """A base that attends otherwise where it knows the labels, as those do whose prefix attends to itself."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        out: Any = super().forward(*args, **kwargs)
        if labels is not None:
            out.last_hidden_state = out.last_hidden_state * (labels != -100)[..., None]
        return out


class TellsItsBase(transformers.Qwen2ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = ToldOfLabels(config)

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = self.model(input_ids, labels=labels, **kwargs)
        logits = self.lm_head(out[0])
        return CausalLMOutputWithPast(loss=self.loss_function(logits, labels, 67), logits=logits)  # pyright: ignore[reportArgumentType]


class LeavesOutThePadding(transformers.Qwen2ForCausalLM):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if attention_mask is not None and labels is not None:
            labels = labels.masked_fill(attention_mask == 0, -100)
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (TellsItsBase, "their forward gives its base another labels than it gets"),
        (LeavesOutThePadding, "they compute something else"),
    ],
)
def test_what_a_forward_makes_of_its_arguments_is_seen(kind: Any, why: str):
    model = kind(language_model().config).to(DEVICE).train()
    (left,) = replace_parts(model, loss="fused").left
    assert why in left.why


@pytest.mark.parametrize(("kind", "replaced"), [("qwen2", True), ("gemma2", False)])
def test_a_head_of_zeros_hides_no_cap(kind: str, replaced: bool):
    model = language_model(kind)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert [each.replaced for each in replace_parts(model, loss="fused").found] == [replaced]
    assert not model.lm_head.weight.any()


@pytest.mark.parametrize(("kind", "changes"), [("mixtral", {"num_local_experts": 2}), ("bloom", {"n_head": 2})])
def test_what_is_returned_is_of_the_model_s_own_class(kind: str, changes: dict[str, Any]):
    model = language_model(kind, **changes)
    own = model(**batch())
    replace_parts(model, loss="fused")
    found = model(**batch())
    assert type(found) is type(own) and found.logits is None and found.attentions is None


def test_evaluation_has_its_logits():
    model = language_model()
    replace_parts(model, loss="fused")
    with torch.no_grad():
        assert model(**batch()).logits is not None
    assert model.eval()(**batch()).logits is not None


def test_labels_that_all_count_for_nothing():
    """The mean of nothing is not a number, as PyTorch has it; a sum over a step's labels is zero."""
    model = language_model()
    replace_parts(model, loss="fused")
    nothing = {**batch(), "labels": torch.full((2, 11), -100, device=DEVICE)}
    assert math.isnan(float(model(**nothing).loss.detach()))
    loss = model(**nothing, num_items_in_batch=22).loss
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is None or not p.grad.isnan().any() for p in model.parameters())


def test_places_and_names_of_arguments_are_those_of_the_model():
    model = language_model()
    tokens, labels = batch().values()
    own = float(model(tokens, None, labels=labels).loss.detach())
    replace_parts(model, loss="fused")
    for found in (model(tokens, torch.ones_like(tokens), labels=labels), model(tokens, labels=labels, use_cache=False)):
        assert found.logits is None and float(found.loss.detach()) == pytest.approx(own, rel=1e-5)
    assert float(model(tokens, labels=labels)[0].detach()) == pytest.approx(own, rel=1e-5)  # as code of tuples reads it


def test_modes_copies_and_frozen_heads(tmp_path: Path):
    model = language_model()
    model.model.layers[0].eval()
    model.lm_head.requires_grad_(requires_grad=False)
    modes = {name: module.training for name, module in model.named_modules()}
    own = numbers(model)
    keys = [*model.state_dict()]
    replace_parts(model, loss="fused")
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert [*model.state_dict()] == keys and model.lm_head.weight.grad is None
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(**batch()).logits is None and same(numbers(other), own)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == ["Qwen2ForCausalLM"]


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples with unequal numbers of labels, and a column that no model takes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        tokens = torch.arange(at + 3, at + 14)
        labels = tokens.clone()
        labels[:at] = -100
        return {"input_ids": tokens, "labels": labels, "length": torch.tensor(11)}


def test_the_trainer_of_transformers_trains_it_alike(tmp_path: Path):
    """It looks for columns of the data set, for labels, and for how to count them, in forward's signature."""
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")

    def losses(model: Any) -> list[float]:
        asked = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, logging_steps=1,
            report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2, use_cpu=DEVICE.type == "cpu",
        )  # fmt: skip
        trainer: Any = transformers.Trainer(
            model=model, args=asked, train_dataset=Sentences(), eval_dataset=Sentences()
        )
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each] + [
            trainer.evaluate()["eval_loss"]
        ]

    own, model = losses(language_model()), language_model()
    replace_parts(model, "fused")
    assert losses(model) == pytest.approx(own, rel=1e-4)


def test_it_generates_as_before():
    model = language_model().eval()
    prompt = torch.tensor([[3, 4, 5]], device=DEVICE)
    own = model.generate(prompt, max_new_tokens=4, do_sample=False)
    replace_parts(model, "fused")
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), own)


@pytest.fixture
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_compiled_anew")
def test_a_compiler_finds_one_graph():
    model = language_model()
    replace_parts(model, "fused")
    own = numbers(model)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    loss = whole(**batch()).loss
    loss.backward()
    assert same((float(loss.detach()), [p.grad.double() for p in model.parameters() if p.grad is not None]), own)


TOKENS = [[3, 3, 0, 4, 9, 3, 66, 0, 3, 3, 3], [3, 3, 5, 3, 3, 3, 3, 3, 9, 0, 66]]
"""One of them more often than a program sums up at once, and BERT's padding, whose row has no gradient of its own."""


def nodes_of(loss: Tensor) -> set[str]:
    """The names of the operations that backward of a loss goes through."""
    names, waiting, seen = set[str](), [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            waiting += [each for each, _ in node.next_functions]
    return names


@pytest.mark.parametrize("kind", ["Qwen2", *at_length("Bert")])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("_compiled_anew")
def test_a_tied_embedding_adds_its_gradient_to_the_head_s(kind: str, compiled: bool):
    """Over two micro-batches, with a hook on each whole gradient; a copy and a pickled model do the same."""
    model = language_model(tie_word_embeddings=True) if kind == "Qwen2" else masked_model(kind)
    tokens = torch.tensor(TOKENS, device=DEVICE)
    batches = [{**batch(), "input_ids": each} for each in (tokens, tokens.flip(0))]

    def gradients(model: Any) -> tuple[float, list[Tensor]]:
        model.zero_grad()
        ready: list[Tensor] = []
        weight = model.get_input_embeddings().weight
        assert weight is model.get_output_embeddings().weight
        handle = weight.register_post_accumulate_grad_hook(lambda p: ready.append(p.grad.clone()))
        for each in batches:
            (0.5 * model(**each).loss).backward()
        handle.remove()
        assert len(ready) == 2 and torch.equal(ready[1], weight.grad)
        return 0.0, [torch.cat([p.grad.flatten() for p in model.parameters()]), *ready]

    own, described = gradients(model), repr(model)
    replaced = replace_parts(model, loss="fused")
    assert "_TiedBackward" in nodes_of(model(**batches[0]).loss) and repr(model) == described
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(each), own)
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    assert same(gradients(model), own) and same(gradients(model), own)
    replaced.restore()
    assert type(model.get_input_embeddings()) is nn.Embedding


def test_an_embedding_of_its_own_or_a_frozen_one_or_a_scaled_one_keeps_its_backward():
    """Also a weight that is tied no longer, and a loss that may hold its gradients."""
    model = language_model(tie_word_embeddings=True)
    replace_parts(model, loss="fused")
    assert "_TiedBackward" in nodes_of(model(**batch()).loss)
    model.get_input_embeddings().scale_grad_by_freq = True
    assert "_TiedBackward" not in nodes_of(model(**batch()).loss)
    model.get_input_embeddings().scale_grad_by_freq = False
    model.lm_head.weight.requires_grad_(False)
    assert "_TiedBackward" not in nodes_of(model(**batch()).loss)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "_TiedBackward" not in nodes_of(model(**batch()).loss)
    apart = language_model()
    replace_parts(apart, loss="fused")
    assert "_TiedBackward" not in nodes_of(apart(**batch()).loss)
    compiled = language_model(tie_word_embeddings=True)
    replace_parts(compiled, loss="compiled")
    assert type(compiled.get_input_embeddings()) is nn.Embedding


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tied_embedding_under_checkpointing_of_the_whole_base(reentrant: bool):
    """It runs once more in backward, when no loss is computed."""
    model = language_model(tie_word_embeddings=True)
    own = numbers(model)
    replace_parts(model, loss="fused")
    whole, recorded = model.model.forward, torch.zeros((), requires_grad=True, device=DEVICE)

    def forward(input_ids: Tensor, **more: Any) -> Any:
        return checkpoint(
            lambda _, tokens: whole(input_ids=tokens, **more)[:1], recorded, input_ids, use_reentrant=reentrant
        )

    model.model.forward = forward
    assert same(numbers(model), own)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [0, *at_length(1)])  # each of a layer's kernels takes a compiler seconds
@pytest.mark.usefixtures("_compiled_anew")
def test_a_compiler_copies_no_table_of_a_tied_embedding(layers: int):
    model = language_model(tie_word_embeddings=True, num_hidden_layers=layers)
    own = numbers(model)
    replace_parts(model, loss="fused")
    compiled: Any = torch.compile(model, fullgraph=True)

    def step() -> None:
        compiled(**batch()).loss.backward()

    _, codes = run_and_get_code(step)
    (code,) = (each for each in codes if "stepscope.add_embedded" in each)
    (table,) = re.findall(r"stepscope\.add_embedded\.default\((\w+),", code)
    assert re.search(rf"return \(.*\b{table}\b", code)
    # A GPU may write the head's gradient, times that of the loss, to a table of its own.
    assert code.count(f"empty_strided_{DEVICE.type}((67, 32)") <= (DEVICE.type == "cuda")
    assert same(numbers(model), own)


def test_a_model_without_such_a_loss_is_one_line():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    vision: Any = transformers.ViTForImageClassification(config)
    for model in (vision.to(DEVICE), nn.Sequential(nn.Linear(4, 4)).to(DEVICE)):
        with pytest.raises(InputError, match=r"loss fused replaces nothing in .*: it has no language model"):
            replace_parts(model, loss="fused")


def test_the_command_says_that_the_loss_was_replaced(tmp_path: Path):
    fields = {"model_type": "qwen2", **SIZES}
    (tmp_path / "tiny.json").write_text(json.dumps(fields))
    asked = ("run", "--model", "tiny.json", "--batch-size", 2, "--seq-len", 16)
    done = stepscope(*asked, "--loss", "fused", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 Qwen2ForCausalLM by fused loss" in " ".join(done.stdout.split())
    (stored,) = tmp_path.glob("runs/*/run.json")
    run = json.loads(stored.read_bytes())
    assert run["workload"]["loss"] == "fused" and "part-mismatch" not in [each["kind"] for each in run["findings"]]
    assert run["evidence"]["operators"]["calls"]["forward"]["stepscope::linear_cross_entropy_forward"] == 1


EVERY_SIZE = {
    **SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "d_model": 32, "word_embed_proj_dim": 32,
    "ffn_dim": 48, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "num_layers": 2, "n_ctx": 64,
    "n_inner": 48, "num_heads": 4, "d_ff": 48, "is_decoder": True, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "moe_topk": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "activation_dropout": 0.0,
}  # fmt: skip


def smallest(kind: str) -> Any:
    """A small model of this kind; None where these sizes make none that runs."""
    try:
        config = transformers.AutoConfig.for_model(kind)
        text = config.get_text_config(decoder=True)
        for name, size in EVERY_SIZE.items():
            if hasattr(text, name):
                setattr(text, name, size)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
        if sum(p.numel() for p in made.parameters()) > 10**7:
            return None
        model = transformers.AutoModelForCausalLM.from_config(config).to(DEVICE).train()
        numbers(model)
    except Exception:  # each of two hundred families has conditions of its own
        return None
    return model


@pytest.mark.long
def test_every_causal_language_model_there_is():
    """Each kind that transformers has: what is replaced trains by its own numbers, and the rest is as it was."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    outcomes: dict[str, str] = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        torch.manual_seed(0)
        model = smallest(kind)
        if model is None:
            continue
        torch.manual_seed(1)
        loss, gradients = numbers(model)
        try:
            found = replace_parts(model, loss="fused").found[0]
        except InputError:
            outcomes[kind] = "has none"
            continue
        outcomes[kind] = "replaced" if found.replaced else "left"
        torch.manual_seed(1)
        again, others = numbers(model)
        assert again == pytest.approx(loss, rel=1e-4), kind
        for one, other in zip(others, gradients, strict=True):  # of a key's bias, in truth zero, there is only noise
            assert float((one - other).norm()) <= 1e-3 * float(other.norm()) + 1e-8, kind
    print(outcomes)
    assert list(outcomes.values()).count("replaced") >= 60 and list(outcomes.values()).count("left") >= 10
