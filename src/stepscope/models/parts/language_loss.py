"""The loss of a Hugging Face causal language model, from its head's input: without the logits of the batch.

Such a model has a base, which gives hidden states (B, S, M), a head, a linear layer without bias, and a forward that
takes labels (B, S) and returns the loss beside the logits. In training, the replacement calls the base and gives its
hidden states, the head's weight and the labels, each one position on, to a kernel; it returns the loss, and no logits.
A call without labels or without gradients, one that asks for something else, and one whose head is spread over several
processes run the model's own forward.

What a model does between head and loss, as a cap on its logits, is seen when the two are held against each other: with
random hidden states in place of the base, so large that logits reach 30 or so.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.models.parts.trials import CALL_ERRORS, SEED, Trial, Unlike, autocast_or_not, ways_of

IGNORED = -100
"""The label of a position that counts for nothing."""

_PASSED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache",
           "cache_position", "token_type_ids")  # fmt: skip
"""Arguments of forward that say nothing of head and loss: the base gets them."""
_OF_LOSS = ("labels", "num_items_in_batch")
_USUAL_BASE = "model"
_LOGITS_SPREAD = 8.0
"""The standard deviation of a trial's logits."""


@dataclass(frozen=True)
class LanguageModel:
    """The names of a model's base and of its head."""

    base: str
    head: str


def language_model(module: nn.Module) -> LanguageModel | None:
    """The base and the head of a causal language model of Hugging Face's; None for any other module."""
    prefix, find_head = getattr(module, "base_model_prefix", ""), getattr(module, "get_output_embeddings", None)
    children = dict(module.named_children())
    base = prefix if prefix in children else _USUAL_BASE  # Llama 4's prefix is that of its multimodal class
    if base not in children or find_head is None or not callable(getattr(module, "loss_function", None)):
        return None
    found = find_head()
    head = next((name for name, child in children.items() if child is found), None)
    if head is None or type(found) is not nn.Linear or found.bias is not None:
        return None
    return LanguageModel(base, head)


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names of the arguments that a forward takes by place, and whether it takes any by name."""
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return (
        tuple(each.name for each in parameters if each.kind in places),
        any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
    )


def loss_forward(
    own: Callable[..., Any], kernel: Callable[..., Tensor], of: LanguageModel
) -> Callable[..., Any]:  # fmt: skip
    """A forward that computes the loss from hidden states, wherever it may."""
    places, _ = _names(own)

    # With its own signature: Transformers reads there which columns of a data set a model takes.
    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(places, args, strict=False)), **kwargs}
        if not _takes(self, given, getattr(self, of.head).weight):
            return own(self, *args, **kwargs)
        outputs = getattr(self, of.base)(**{name: value for name, value in given.items() if name in _PASSED})
        hidden, labels = outputs[0], given["labels"].to(outputs[0].device)
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        loss = kernel(hidden, getattr(self, of.head).weight, targets)
        counted = given.get("num_items_in_batch")
        if counted is not None:  # micro-batches of one step, whose sums count alike
            own_count = (targets != IGNORED).sum()
            loss = torch.where(own_count > 0, loss * (own_count / counted), 0.0)
        return _output(loss, outputs)

    return forward


def _takes(module: nn.Module, given: Mapping[str, Any], weight: Tensor) -> bool:
    """Whether this is a call of training that asks for the loss, and for nothing else."""
    labels, config = given.get("labels"), getattr(module, "config", None)
    return (
        module.training
        and torch.is_grad_enabled()
        and isinstance(labels, Tensor)
        and labels.dim() == 2
        and not labels.is_floating_point()
        and weight.dim() == 2
        and not hasattr(weight, "placements")
        and getattr(config, "return_dict", True) is not False
        and not getattr(config, "output_router_logits", False)  # the loss of a router is added to this one
        and all(
            name in _PASSED or name in _OF_LOSS or value is None or (name == "logits_to_keep" and value == 0)
            for name, value in given.items()
        )
    )  # fmt: skip


def _output(loss: Tensor, outputs: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415  (its models come from it)

    rest = {name: getattr(outputs, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
    return CausalLMOutputWithPast(loss=loss, **rest)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class _BaseOutputs:
    """What a base returns that was asked for nothing but hidden states."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]


class _GivenStates(nn.Module):
    """In place of a model's base: it returns hidden states that were given."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_args: Any, **_kwargs: Any) -> _BaseOutputs:
        return _BaseOutputs(self.states)


@dataclass(frozen=True)
class _OfStates:
    """A call of a language model with hidden states and labels in place of its base's."""

    module: nn.Module
    of: LanguageModel
    states: Tensor
    labels: Tensor
    more: Mapping[str, Any]
    autocast: bool

    @property
    def device(self) -> torch.device:
        return self.states.device

    @property
    def lowest(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.states.dtype

    def run(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        name = f"{self.of.head}.weight"
        weight = self.module.get_parameter(name)
        leaves = [(t if dtype is None else t.to(dtype)).detach().requires_grad_() for t in (self.states, weight)]
        base = getattr(self.module, self.of.base)
        setattr(self.module, self.of.base, _GivenStates(leaves[0]))
        try:
            with autocast_or_not(self.autocast and dtype is None, self.device):
                out = functional_call(
                    self.module, {name: leaves[1]}, (),
                    {"input_ids": self.labels.clamp(min=0), "labels": self.labels, **self.more},
                )  # fmt: skip
            of_states, of_weight = torch.autograd.grad(out.loss, leaves)
        except torch.OutOfMemoryError as error:
            raise Unlike("there is no memory to hold them against it") from error
        except CALL_ERRORS as error:
            raise Unlike(f"their base is not called for hidden states alone: {type(error).__name__}") from error
        finally:
            setattr(self.module, self.of.base, base)
        # Of 150,000 rows some are enough, and gradients of a head are as large as the head.
        return {
            "the loss": out.loss.detach(),
            "gradient of hidden states": of_states,
            "gradient of the head": of_weight[_rows(self.labels, weight.shape[0])],
        }


def _rows(labels: Tensor, vocabulary: int) -> Tensor:
    """The tokens whose rows of the head are compared: those of the labels, the first, the last, and some between."""
    spread = torch.linspace(0, vocabulary - 1, 61, device=labels.device).long()
    return torch.cat([labels[labels >= 0], spread]).unique()


def trials_of_states(module: nn.Module, of: LanguageModel) -> Iterator[Trial]:
    """Calls of a language model with random hidden states, in its head's dtype, and under autocast where that is
    fp32."""
    weight = module.get_parameter(f"{of.head}.weight")
    generator = torch.Generator(device=weight.device).manual_seed(SEED)
    vocabulary, width = weight.shape
    spread = _LOGITS_SPREAD / (float(weight[:1024].float().norm(dim=1).mean()) or 1.0)
    _, by_name = _names(type(module).forward)
    for dtype, autocast in ways_of(weight.dtype):
        for samples, length in ((2, 3), (1, 7)):
            shape = samples, length
            states = spread * torch.randn((*shape, width), generator=generator, device=weight.device)
            labels = torch.randint(vocabulary, shape, generator=generator, device=weight.device)
            labels[0, 1] = IGNORED
            more = {"num_items_in_batch": 11} if by_name and samples == 1 else {}
            yield _OfStates(module, of, states.to(dtype), labels, more, autocast)
