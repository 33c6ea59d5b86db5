"""Lets modules of a user's own model be computed by other kernels, where they compute the same.

A norm is a module with one weight (M) and an epsilon, or LayerNorm; a SwiGLU has three linear layers: gate, up and
down; another MLP a linear layer and GELU (formulas.py); a loss is a language model of Hugging Face's (`LanguageModel`).
What it is called says nothing: before it is replaced, a module is held against its replacement, forward and backward,
on random numbers, by the bounds of the gate (`gate.py`): at several shapes, in its own dtype, and under autocast where
its weights are fp32. Weights of norms and MLPs are random there, too, since fresh norms are all ones. What differs is
left, and named. Of modules that are alike but for their weights, as those of a model's blocks, one is held for all, and
for models made later.

A module that is replaced gets another class, a subclass of its own. Its parameters, buffers and hooks stay the same
objects with the same names. Calls that the kernel does not take, of other arguments or on another device, run the
module's own forward.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import typing
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.core.errors import InputError, choose, named_line
from stepscope.core.parts import (
    ATTENTIONS,
    PARTS,
    REFERENCE,
    Kernels,
    Part,
    PartFound,
    TensorDtype,
    check_parts,
    is_users,
    named_kernels,
)
from stepscope.core.workloads import PROJECTIONS
from stepscope.kernels.operators import transformed_by_func
from stepscope.kernels.parts.projections import (
    class_again,
    convolutions_of,
    groups_of,
    join_projections,
    joined,
    lie_together,
    projections_found,
)
from stepscope.training.attention import implementation
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.attention.pytorch import attention_found, calls_by_name, swap_attention
from stepscope.training.half_optimizers import ROUNDS, round_norms
from stepscope.training.parts import part_function
from stepscope.training.parts.formulas import MlpLayers, epsilon_of, mlp_layers, only_watched, product_of, widths_of
from stepscope.training.parts.gate import (
    CALL_ERRORS,
    SEED,
    TURNS,
    Frozen,
    PartCase,
    Trial,
    Unlike,
    autocast_or_not,
    gradients_of,
    hold,
    kind_of,
    lasts,
    require_users_part,
    trials_of_one_tensor,
    trials_of_tables,
    ways_of,
)
from stepscope.training.parts.rotation import (
    Turning,
    calling_another,
    kind_of_turning,
    turned_by,
    turning_of,
    why_not_turned,
)

# The loss of a Hugging Face language model, from its head's input: without the logits of the batch.
#
# Such a model has a base, which gives hidden states (B, S, M), a head, a linear layer, and a forward that takes labels
# (B, S) and returns the loss beside the logits. In training, the replacement calls the base and gives its hidden
# states, the head's weight and the labels, each one position on, to a kernel; it returns the loss, and no logits. A
# masked language model, as BERT, transforms its hidden states before the head (`_TRANSFORMS`), whose bias it adds, and
# has its labels in place: few positions have one, and of the others the kernel computes nothing. A call without labels
# or without gradients, one that asks for something else, and one whose head is spread over several processes run the
# model's own forward. So does one whose head has a hook or an adapter by now, or whose loss function is another one.
#
# What a model does between head and loss, as a cap on its logits, is seen when the two are held against each other:
# with random hidden states in place of the base, so large that logits reach 30 or so. What it does before its base is
# seen there, too: the base must get the arguments that the model got, and none besides.


IGNORED = -100
"""The label of a position that counts for nothing."""

_PASSED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache", "use_cache",
           "cache_position", "token_type_ids")  # fmt: skip
"""Arguments of forward that say nothing of head and loss: the base gets them. Transformers 5.24 calls
`past_key_values` `cache`."""
_OF_LOSS = ("labels", "num_items_in_batch")
_USUAL_BASE = "model"
_NOT_OF_STATES = ("num_items_in_batch", "return_dict", "output_attentions", "output_hidden_states", "use_cache",
                  "output_router_logits", "logits_to_keep")  # fmt: skip
"""Arguments of a base on which its hidden states do not depend."""
_OF_HEAD = "gradient of the head"
_BLUR = 64 * 2**-24
"""How far results of a masked language model may be off: an exponential of a logit that is 30 from the highest is off
by 30 roundings of fp32, where its exponent is rounded, and the norm before the head amplifies that in backward. Of
BERT's gradients on an H200 the kernel's were off by 1.5e-6, PyTorch's by 0.6e-6."""
_LOGITS_SPREAD = 8.0
"""The standard deviation of a trial's logits."""


@dataclass(frozen=True)
class LanguageModel:
    """The names of a model's base and of its head."""

    base: str
    head: str
    loss: Callable[..., Any] | None
    """The function that computes its loss from logits; None of a masked language model, whose forward has it."""
    transform: tuple[str, ...] = ()
    """What a masked language model has between base and head, one after the other."""
    embedding: str = ""
    """The path of the embedding of its tokens; empty where there is none of PyTorch's."""

    def embedding_of(self, module: nn.Module) -> Any:
        """The embedding of such a model's tokens; None where it has none by now."""
        path = self.embedding.split(".") if self.embedding else ["_"]
        return functools.reduce(lambda home, name: getattr(home, name, None), path, module)

    def head_of(self, module: nn.Module) -> Any:
        """The head of such a model."""
        return functools.reduce(getattr, self.head.split("."), module)

    def around_head(self, module: nn.Module) -> list[Any]:
        """The modules in which the head lies, the model first."""
        return [*itertools.accumulate(self.head.split(".")[:-1], getattr, initial=module)]

    def transformed(self, module: nn.Module, states: Tensor) -> Tensor:
        """What the head gets of the base's hidden states."""
        home = self.around_head(module)[-1]
        for name in self.transform:
            states = F.gelu(states) if name == _GELU else getattr(home, name)(states)
        return states


_GELU = "gelu"
_TRANSFORMS = (("transform",), ("dense", _GELU, "layer_norm"), ("vocab_transform", "activation", "vocab_layer_norm"))
"""What stands before the head of masked language models, beside it: in BERT, RoBERTa and DistilBERT. GELU is a
function."""


def _loss_function(module: nn.Module) -> Any:
    """The loss function of a model of Hugging Face's, of a method the function behind it."""
    function = getattr(module, "loss_function", None)
    return getattr(function, "__func__", function)


def language_model(module: nn.Module) -> LanguageModel | None:
    """The base and the head of a causal or masked language model of Hugging Face's; None for any other module."""
    prefix, find_head = getattr(module, "base_model_prefix", ""), getattr(module, "get_output_embeddings", None)
    children = dict(module.named_children())
    base = prefix if prefix in children else _USUAL_BASE  # Llama 4's prefix is that of its multimodal class
    if base not in children or find_head is None:
        return None
    head_module = find_head()
    head = next((name for name, each in module.named_modules() if each is head_module), None)
    if head is None or type(head_module) is not nn.Linear:
        return None
    home = LanguageModel(base, head, None).around_head(module)[-1]
    of_tokens = _tokens_embedding(module)
    embedding = next((name for name, each in module.named_modules() if each is of_tokens), "")
    for names in _TRANSFORMS:
        if all(name == _GELU or hasattr(home, name) for name in names):
            return LanguageModel(base, head, None, names, embedding)
    if head not in children or head_module.bias is not None:
        return None
    loss = _loss_function(module)
    of_causal = LanguageModel(base, head, loss, embedding=embedding)
    return of_causal if callable(loss) and isinstance(loss, Hashable) else None


def _tokens_embedding(module: Any) -> nn.Module | None:
    """The embedding of tokens, as a model of Hugging Face's names it; None of a class that may compute another one."""
    try:
        embedding = module.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a base that is no such model
        return None
    kind = type(embedding)
    return embedding if getattr(kind, "_stepscope_original", kind) is nn.Embedding else None


@dataclass(frozen=True)
class _Names:
    """The arguments that a forward takes."""

    places: tuple[str, ...]
    by_name: frozenset[str]
    any_name: bool
    """Whether it takes arguments of any name."""

    def bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name. None for a call that the forward does not take, and for one with arguments
        for the base that are not among its own: of these nothing tells that it passes them on."""
        placed = dict(zip(self.places, args, strict=False))
        fits = all(name not in placed and (self.any_name or name in self.by_name) for name in kwargs)
        bound = {**placed, **kwargs}
        passed = all(name in self.by_name for name in bound if name in _PASSED and name != "use_cache")
        return bound if fits and passed and len(args) <= len(self.places) else None


@functools.cache
def _names(forward: Callable[..., Any]) -> _Names:
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return _Names(tuple(places), frozenset(named), any(each.kind is each.VAR_KEYWORD for each in parameters))


def loss_forward(original: Callable[..., Any], kernel: Callable[..., Tensor], of: LanguageModel) -> Callable[..., Any]:
    """A forward that computes the loss from hidden states, wherever it may."""
    from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415  (its models come from it)

    # The class of what the forward returns, as it says itself: code that reads `aux_loss` finds it there.
    fitting = (each for each in _declared_outputs(original) if {"loss", "logits"} <= _fields(each))
    names, returned = _names(original), next(fitting, CausalLMOutputWithPast)
    rest = sorted(_fields(returned) - {"loss", "logits"})

    # With its own signature: Transformers reads there which columns of a data set a model takes.
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = names.bound(args, kwargs)
        trains = self.training and torch.is_grad_enabled() and not transformed_by_func()
        if call is None or not trains or not isinstance(call.get("labels"), Tensor):
            return original(self, *args, **kwargs)
        why = _why_not(self, of, call)
        if why is not None:
            _say_own(self, why)
            return original(self, *args, **kwargs)
        passed = {name: value for name, value in call.items() if name in _PASSED}
        run, head, embedding = (
            functools.partial(getattr(self, of.base), **passed),
            of.head_of(self),
            of.embedding_of(self),
        )
        tied = hasattr(embedding, "run_for_head") and embedding.weight is head.weight
        outputs, weight = embedding.run_for_head(run) if tied else (run(), head.weight)
        hidden, labels = outputs[0], call["labels"].to(outputs[0].device)
        if hidden.shape[:-1] != labels.shape:  # a base that puts positions of its own beside those of the input
            _say_own(self, "its base returns other positions than it gets")
            return original(self, *args, **kwargs)
        if of.transform:
            loss = kernel(of.transformed(self, hidden), weight, labels, head.bias, few_labels=True)
            # In the dtype of the logits, as PyTorch's; autocast makes that fp32.
            loss = loss if torch.is_autocast_enabled(loss.device.type) else loss.to(hidden.dtype)
            return returned(loss=loss, **{name: getattr(outputs, name, None) for name in rest})
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        loss = kernel(hidden, weight, targets)
        counted = call.get("num_items_in_batch")
        if counted is not None:  # micro-batches of one step, whose sums count alike
            own_count = (targets != IGNORED).sum()
            loss = torch.where(own_count > 0, loss * (own_count / counted), 0.0)
        return returned(loss=loss, **{name: getattr(outputs, name, None) for name in rest})

    return forward


def _why_not(module: nn.Module, of: LanguageModel, call: Mapping[str, Any]) -> str | None:
    """Why a kernel does not take this call of training: it asks for more than the loss, or head or loss function are
    not those that were held. None where it does."""
    labels, config = call["labels"], getattr(module, "config", None)
    tokens, embeddings = call.get("input_ids"), call.get("inputs_embeds")
    positions = embeddings.shape[:2] if isinstance(embeddings, Tensor) else None
    positions = tokens.shape if isinstance(tokens, Tensor) else positions
    if labels.dim() != 2 or labels.dtype != torch.int64 or labels.shape != positions:
        return f"its labels are {str(labels.dtype).removeprefix('torch.')}{list(labels.shape)}, not an int64 a position"
    whole = all(map(only_watched, of.around_head(module)[1:]))
    if not whole or not _is_plain(of.head_of(module), biased=of.transform != ()):
        return f"its head {of.head} is no plain linear layer: it has an adapter, a bias, a hook, or is in shards"
    # Transformers knows no loss of masked language models, and would warn: a break in a compiled graph.
    if of.loss is not None and _loss_function(module) is not of.loss:
        return "its loss function is another one than was held"
    if getattr(config, "return_dict", True) is False:
        return "it returns a tuple (return_dict)"
    if getattr(config, "output_router_logits", False):
        return "it adds the loss of a router (output_router_logits)"
    unusual = (
        name
        for name, value in call.items()
        if name not in _PASSED and name not in _OF_LOSS and value is not None and (name, value) != ("logits_to_keep", 0)
    )
    return next((f"the call asks for {name}" for name in unusual), None)


def _say_own(module: nn.Module, why: str) -> None:
    """Warn that a call runs the model's own loss, once for each reason, as Python's filter has it."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{type(module).__name__} computes this loss by its own code: {why}", stacklevel=3)


def _is_plain(head: object, *, biased: bool) -> bool:
    """Whether a head is its product and nothing else: an adapter, a hook or a patched forward may come later. biased:
    whether it may have a bias."""
    if type(head) is not nn.Linear or (head.bias is not None and not biased):
        return False
    return only_watched(head) and head.weight.dim() == 2 and not hasattr(head.weight, "placements")


def _declared_outputs(forward: Callable[..., Any]) -> list[Any]:
    """The classes of outputs that a forward names as what it returns."""
    from transformers.utils.generic import ModelOutput  # noqa: PLC0415

    try:
        declared = typing.get_type_hints(inspect.unwrap(forward)).get("return")
    except (NameError, TypeError, AttributeError):  # names that only a type checker knows
        return []
    kinds = typing.get_args(declared) or (declared,)
    return [each for each in kinds if isinstance(each, type) and issubclass(each, ModelOutput)]


def _fields(kind: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


@functools.cache
def _optional_fields(base: Callable[..., Any]) -> frozenset[str]:
    """The fields of what a base's forward returns that are None where nobody asks for them, as this release of
    transformers has them."""
    import transformers.modeling_outputs as modeling_outputs  # noqa: PLC0415, PLR0402  (its models come from it)

    every = set[str]().union(*map(_fields, (*vars(modeling_outputs).values(), *_declared_outputs(base))))
    return frozenset(every - {"last_hidden_state", "loss", "logits"})


class _BaseOutputs:
    """What a base returns that was asked for nothing but hidden states."""

    def __init__(self, states: Tensor, base: Callable[..., Any]) -> None:
        self.last_hidden_state, self._base = states, base

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        if name not in _optional_fields(self._base):
            raise AttributeError(f"a base is not known to return {name}")


class _GivenStates(nn.Module):
    """In place of a model's base: it returns hidden states that were given, if it is called as the base would be."""

    def __init__(self, states: Tensor, base: nn.Module, call: Mapping[str, Any]) -> None:
        super().__init__()
        self.states, self.call, self.of = states, call, type(base).forward
        self.signature = inspect.signature(self.of)

    def forward(self, *args: Any, **kwargs: Any) -> _BaseOutputs:
        bound, known = self.signature.bind_partial(self, *args, **kwargs).arguments, self.signature.parameters
        for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            of_kind = next((each.name for each in known.values() if each.kind is kind), None)
            more = bound.pop(of_kind, {}) if of_kind else {}
            bound |= more if isinstance(more, dict) else {}
        named = {
            name: value
            for name, value in [*bound.items()][1:]
            if value is not None and name not in _NOT_OF_STATES and not (name in known and value is known[name].default)
        }
        other = next((name for name in {**named, **self.call} if named.get(name) is not self.call.get(name)), None)
        if other is not None:
            raise Unlike(f"their forward gives its base another {other} than it gets")
        return _BaseOutputs(self.states, self.of)


@dataclass(frozen=True, kw_only=True)
class _OfStates(Trial):
    """A call of a language model with hidden states and labels in place of its base's."""

    of: LanguageModel
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    more: Mapping[str, Any]

    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        leaves = {self.of_input: self.x, _OF_HEAD: self.weight, f"{_OF_HEAD}'s bias": self.bias}
        leaves = {
            name: (tensor if dtype is None else tensor.to(dtype))
            .detach()
            .requires_grad_(frozen != ("input" if name == self.of_input else "weights"))
            for name, tensor in leaves.items()
            if tensor is not None
        }
        states, *of_head = leaves.values()
        base = getattr(self.module, self.of.base)
        call = {"input_ids": self.labels.clamp(min=0), **self.more}
        for_base = {argument: value for argument, value in call.items() if argument in _PASSED}
        setattr(self.module, self.of.base, _GivenStates(states, base, for_base))
        try:
            with autocast_or_not(self.autocast and dtype is None, self.x.device):
                weights = dict(zip((f"{self.of.head}.{name}" for name in ("weight", "bias")), of_head, strict=False))
                weights |= self._others(dtype)
                out = functional_call(self.module, weights, (), {**call, "labels": self.labels})
            gradients = gradients_of(out.loss, leaves)
        except torch.OutOfMemoryError as error:
            raise Unlike("there is no memory to hold them against it") from error
        except CALL_ERRORS as error:
            raise Unlike(f"their base is not called for hidden states alone: {named_line(error)}") from error
        finally:
            setattr(self.module, self.of.base, base)
        # It is as large as the head, and some of its 150,000 rows are enough: those of the labels, the first, the last,
        # and some between.
        spread = torch.linspace(0, self.weight.shape[0] - 1, 61, device=self.labels.device).long()
        rows = torch.cat([self.labels[self.labels >= 0], spread]).unique()
        shown = {name: each if name == self.of_input else each[rows] for name, each in gradients.items()}
        return {"the loss": out.loss.detach(), **shown}

    def _others(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """The parameters between base and head by name, in a dtype: those of a masked language model's transform."""
        head = self.of.head_of(self.module)
        rest = (
            (name, each)
            for name, each in self.module.named_parameters()
            if each is not head.weight and each is not head.bias
        )
        return {name: each.detach().to(dtype or each.dtype) for name, each in rest}


def trials_of_states(module: nn.Module, of: LanguageModel) -> Iterator[Trial]:
    """Calls of a language model with random hidden states, in its head's dtype, and under autocast where that is
    fp32."""
    weight = module.get_parameter(f"{of.head}.weight")
    generator = torch.Generator(device=weight.device).manual_seed(SEED)
    vocabulary, width = weight.shape
    size = float(weight[:1024].float().norm(dim=1).mean())
    if size == 0:  # a head that starts at zero, whose logits would be zero, capped or not
        weight = torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)
        size = width**0.5
    blur = 0.0
    if of.transform:  # which may norm the states: the head is as large instead
        blur = _BLUR
        weight, size = weight * (_LOGITS_SPREAD / size), _LOGITS_SPREAD
    bias = of.head_of(module).bias
    if bias is not None:
        bias = torch.randn(bias.shape, generator=generator, device=weight.device).to(bias.dtype)
    names = _names(type(module).forward)
    for dtype, autocast in ways_of(weight.dtype):
        for samples, length in ((2, 3), (1, 7)):
            shape = samples, length
            states = _LOGITS_SPREAD / size * torch.randn((*shape, width), generator=generator, device=weight.device)
            labels = torch.randint(vocabulary, shape, generator=generator, device=weight.device)
            labels[0, 1] = IGNORED
            # What a batch may say beside tokens and labels. Of a position that the mask leaves out the label counts.
            mask = torch.ones(shape, dtype=torch.int64, device=weight.device)
            mask[:, 3:4] = 0
            every = {
                "attention_mask": mask,
                "position_ids": torch.arange(length, device=weight.device).expand(shape),
                "token_type_ids": torch.zeros_like(mask),
                "num_items_in_batch": 11,
            }
            more = {
                name: value
                for name, value in every.items()
                if samples == 1 and (name in names.by_name or (name in _OF_LOSS and names.any_name))
            }
            yield _OfStates(
                module=module, x=states.to(dtype), of_input="gradient of hidden states", autocast=autocast, blur=blur,
                of=of, weight=weight, bias=bias, labels=labels, more=more,
            )  # fmt: skip


_NAMES: dict[torch.dtype, TensorDtype] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NOT_RMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_ABSENT: dict[Part, str] = {
    "norm": "no RMSNorm",
    "rope": "no attention whose forward calls a function of q, k, cos and sin",
    "mlp": "no SwiGLU of gate, up and down",
    "loss": "no language model of transformers with a head of one product",
}
"""What a model has not, where it has no module of a part."""
_ROWS = 64
"""Rows of a call on which a user's function is judged, before a module is held against it."""


@dataclass(frozen=True)
class _Way:
    """How a module's own code is said by a kernel."""

    mlp: MlpLayers | None = None
    """The layers of an MLP."""
    offset: float = 0.0
    """What a norm adds to its weight; 1 in Gemma."""
    centered: bool = False
    """Whether a norm is LayerNorm, with or without a bias."""
    promoted: bool = False
    """Whether a norm's result has the dtype of input times weight, and turned queries that of queries times tables;
    otherwise they have that of the input."""
    language_model: LanguageModel | None = None
    """The base and the head of a model that returns its loss."""
    turning: Turning | None = None
    """The function by which an attention turns queries and keys."""


@dataclass(frozen=True)
class Replaced:
    """What `replace_parts` found in a model: `replaced` and `left`, by type. `restore()` undoes it."""

    model: nn.Module
    """The model, which was changed in place."""
    found: tuple[PartFound, ...]
    """All that was found, by part and type of module."""
    _undo: tuple[Callable[[], None], ...] = ()
    """What takes back attention and projections."""

    @property
    def replaced(self) -> tuple[PartFound, ...]:
        """The modules that other kernels compute now."""
        return tuple(each for each in self.found if each.replaced)

    @property
    def left(self) -> tuple[PartFound, ...]:
        """The modules that stayed as they were, and why."""
        return tuple(each for each in self.found if not each.replaced)

    def restore(self) -> None:
        """Let every module of the model be computed by its own code again. Parameters are not touched."""
        for undo in reversed(self._undo):
            undo()
        for module in self.model.modules():
            bases: tuple[Any, ...] = type(module).__mro__
            replacement = next((each for each in bases if "_stepscope_original" in vars(each)), None)
            if replacement is not None:
                module.__class__ = class_again(bases[0], replacement, replacement._stepscope_original)

    def __str__(self) -> str:
        return "; ".join(map(str, self.found))


def replace_in(model: nn.Module, chosen: Mapping[Part, Kernels]) -> Replaced:
    """Replace in place what the chosen kernels compute equally. Raises InputError, one line, for kernels that do not
    run where the model lies, and for a part that the model does not have.

    Where all parts that are modules are chosen, those that the model does not have are named in the result; but it
    must have one of them.
    """
    requested: dict[Part, Kernels] = {part: name for part, name in chosen.items() if name != REFERENCE}
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to replace")
    if first.dtype not in _NAMES:
        raise InputError(f"{type(model).__name__} is {first.dtype}: parts take fp32, bf16 and fp16")
    check_parts(requested, first.device.type, _NAMES[first.dtype], {})
    with _whole_or_not(model):
        return _replaced_parts(model, requested)


@contextlib.contextmanager
def _whole_or_not(model: nn.Module) -> Iterator[None]:
    """Where an InputError leaves it, every module has its class again, be it its own or one of an earlier call."""
    before = [(module, type(module)) for module in model.modules()]
    try:
        yield
    except InputError:
        for module, kind in before:
            module.__class__ = kind
        raise


def _replaced_parts(model: nn.Module, requested: Mapping[Part, Kernels]) -> Replaced:
    records = [record for part, name in requested.items() for record in _replaced(model, part, name)]
    missing = [record for record in records if not record.modules]
    of_modules: list[Part] = [part for part in PARTS if part in requested]
    every = {*PARTS} - {"rope"} <= {*requested}  # norm, mlp and loss were all, before rope was one
    if every and not any(record.modules for record in records):
        names = " and ".join(dict.fromkeys(requested[part] for part in of_modules))
        raise InputError(
            f"kernels {names} replace nothing in {type(model).__name__}: it has "
            f"{', '.join(_ABSENT[part] for part in of_modules)}; leave out --kernels"
        )
    if missing and not every:
        first_missing = missing[0]
        raise InputError(
            f"{first_missing.part} {first_missing.kernels} replaces nothing in {type(model).__name__}: "
            f"{first_missing.why}; leave out --{first_missing.part}"
        )
    round_norms(model)
    return Replaced(model, tuple(records))


_HELD: dict[Hashable, type[nn.Module] | Unlike] = {}
"""Replacements that were held already: ranks that share a step make its model again and again to check each other."""


def _replaced(model: nn.Module, part: Part, name: Kernels) -> list[PartFound]:
    """Replace the modules that compute a part, and say which were replaced and which were not."""
    outcomes: dict[tuple[str, bool, str], list[tuple[str, Unlike | None]]] = {}
    held: dict[Hashable, type[nn.Module] | Unlike] = {}
    for path, module in model.named_modules():
        ways = _ways(module, part, name)
        if not ways:
            continue
        kind = kind_of(module) if part != "rope" else kind_of_turning(module)
        if kind not in held:
            lasting = (hold, part_function(part, name), kind) if lasts(kind) else None
            held[kind] = _HELD.get(lasting) or _replacement(module, part, name, ways)
            if lasting is not None and not isinstance(held[kind], Unlike):
                _HELD[lasting] = held[kind]
        replacement = held[kind]
        unlike = replacement if isinstance(replacement, Unlike) else None
        if not isinstance(replacement, Unlike):
            module.__class__ = replacement
            _tie(module, part, name, ways[0])
        # Modules that differ by unequal numbers are one line, with the largest.
        reason = "" if unlike is None else "differs" if unlike.error < float("inf") else unlike.why
        outcomes.setdefault((type(module).__name__, unlike is None, reason), []).append((path, unlike))
    if not outcomes:
        return [PartFound(part=part, kernels=name, type="", modules=0, replaced=False, why=f"it has {_ABSENT[part]}")]
    records: list[PartFound] = []
    for (type_name, fits, _), each in outcomes.items():
        differing = [unlike for _, unlike in each if unlike is not None]
        why = max(differing, key=lambda unlike: unlike.error).why if differing else ""
        records.append(
            PartFound(
                part=part, kernels=name, type=type_name, modules=len(each), replaced=fits, why=why, where=each[0][0]
            )
        )
    return records


def _tie(module: nn.Module, part: Part, name: Kernels, way: _Way) -> None:
    """Let an embedding whose weight is the head's add its gradient to the head's, where the loss allows that."""
    embedding = None if way.language_model is None else way.language_model.embedding_of(module)
    if PARTS[part][name].own_gradients and type(embedding) is nn.Embedding:
        from stepscope.kernels.parts.loss import TiedEmbedding  # noqa: PLC0415  (it needs Triton)

        embedding.__class__ = TiedEmbedding


def _ways(module: nn.Module, part: Part, name: Kernels = "fused") -> list[_Way]:
    """How a kernel of this name may say what this module computes; none where it is no such part."""
    if part == "norm":
        held = dict(module.named_parameters())
        centered = isinstance(module, nn.LayerNorm) and PARTS[part][name].layer_norm
        own = ["weight", "bias"] if centered and "bias" in held else ["weight"]
        bare = [*held] == own and held["weight"].dim() == 1 and not [*module.children()] and not [*module.buffers()]
        other = isinstance(module, _NOT_RMS) and not centered
        if not bare or other or epsilon_of(module, held["weight"].dtype) is None:
            return []
        offsets = (0.0,) if centered else (0.0, 1.0)
        return [_Way(centered=centered, offset=each, promoted=wide) for each in offsets for wide in (True, False)]
    if part == "rope":
        called = [*turning_of(type(module)).items()][:1]
        return [
            _Way(turning=Turning(name=name, function=function, partial=partial), promoted=promoted)
            for name, function in called
            for partial in (True, False)
            for promoted in (True, False)
        ]
    if part == "loss":
        model_parts = language_model(module)
        return [] if model_parts is None else [_Way(language_model=model_parts)]
    return [_Way(mlp=layers) for layers in mlp_layers(module, gelu=PARTS[part][name].gelu)]


def _weight_of(module: nn.Module, way: _Way) -> Tensor | None:
    """The weight that says on which device and in which dtype a module computes; None where that is no plain tensor."""
    weights = [*module.parameters()]
    if way.language_model is not None:
        weights = [module.get_parameter(f"{way.language_model.head}.weight")]
    if way.turning is not None:  # those of its projections, of which some may be of other kinds
        weights = [each for each in weights if each.is_floating_point()]
    plain = all(type(p) is nn.Parameter and not p.is_meta for p in weights)
    return weights[0] if weights and plain and weights[0].dtype in _NAMES else None


def _why_left(module: nn.Module, part: Part, name: Kernels, way: _Way, weight: Tensor | None) -> str:
    """Why a module is not even held against its replacement; empty where it is."""
    original = type(module)
    reasons = (
        (hasattr(original, "_stepscope_original"), "they are replaced already"),
        ("forward" in vars(module), "their forward was patched by somebody else"),
        (weight is None, "their weights are no plain floating tensors"),
        (
            way.mlp is not None and way.mlp.changed_in(module),
            "what their kernel does not call has a hook or a patched forward",
        ),
    )
    why = next((why for holds, why in reasons if holds), "")
    why = why or (why_not_turned(original) if way.turning is not None else "")
    if why or weight is None:
        return why
    width = weight.shape[-1] if way.turning is None else None  # that of heads is seen in each call
    fault = PARTS[part][name].fault(weight.device.type, _NAMES[weight.dtype], width)
    if way.language_model is not None and way.language_model.transform and not PARTS[part][name].few_labels:
        fault = "computes no loss of a masked language model"
    return f"{name} {fault}" if fault is not None else ""


def _replacement(module: nn.Module, part: Part, name: Kernels, ways: list[_Way]) -> type[nn.Module] | Unlike:
    """The class that replaces a module's, of the first way that computes the same; or why none does."""
    original, weight = type(module), _weight_of(module, ways[0])
    why = _why_left(module, part, name, ways[0], weight)
    if why or weight is None:
        return Unlike(why)
    model = ways[0].language_model
    if is_users(name):
        width = weight.shape[0 if part == "mlp" else -1]  # the first weight of a SwiGLU is that of gate or up
        of_part = {"norm": (_ROWS, width, 0), "mlp": (_ROWS, width), "rope": (2, 4, 2, 8, _ROWS)}
        sizes = of_part.get(part, (_ROWS, *weight.shape[::-1]))
        require_users_part(name, PartCase(part, sizes), _NAMES[weight.dtype], weight.device)
    nearest: Unlike | None = None
    for way in ways:
        replacement = _class_of(original, part, name, way)
        try:
            if model is not None:
                trials = trials_of_states(module, model)
            elif way.turning is not None:
                function, partial = way.turning.function, way.turning.partial
                unsqueezes = "unsqueeze_dim" in inspect.signature(function).parameters
                trials = trials_of_tables(module, function, unsqueezes=unsqueezes, partial=partial)
            else:
                widths = (weight.shape[-1], weight.shape[-1]) if way.mlp is None else widths_of(module, way.mlp)
                epsilon = epsilon_of(module, weight.dtype) or 0.0
                trials = trials_of_one_tensor(module, epsilon, widths, limited=way.mlp is not None)
            hold(module, replacement, trials, () if way.mlp is None else way.mlp.after)
        except Unlike as unlike:
            # Without its traceback, which would hold all numbers of the trial.
            nearest = Unlike(unlike.why, unlike.error) if nearest is None or unlike.error < nearest.error else nearest
            continue
        return replacement
    assert nearest is not None
    return nearest


@functools.cache
def _class_of(original: type[nn.Module], part: Part, name: Kernels, way: _Way) -> type[nn.Module]:
    """A subclass of a module's class whose forward is the kernel's. It has the same name, so that a model is described
    in the same words, and can be copied and pickled."""
    kernel = part_function(part, name)
    home: Any = inspect.getmodule(kernel)  # which has LayerNorm beside RMSNorm, and GELU beside SwiGLU
    more: dict[str, Any] = {}
    if way.language_model is not None:
        forward = loss_forward(original.forward, kernel, way.language_model)
    elif way.turning is not None:
        turned = turned_by(kernel, PARTS[part][name], way.turning, promoted=way.promoted)
        forward = calling_another(original.forward, way.turning.name, turned)
        more = {TURNS: staticmethod(turned)}
    else:

        @functools.wraps(original.forward)
        def by_kernel(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or not _takes(self, args[0]):
                return original.forward(self, *args, **kwargs)
            if part == "norm" and self.weight is not None:
                return _norm(home.layer_norm if way.centered else kernel, way, self, args[0])
            if way.mlp is None or way.mlp.changed_in(self):
                return original.forward(self, args[0])
            layers = [getattr(self, each) for each in way.mlp.first]
            if way.mlp.gelu:
                states = home.biased_gelu(product_of(layers[0], args[0]), layers[0].bias, tanh=way.mlp.tanh)
            else:
                states = kernel(*(layer(args[0]) for layer in layers))
            for each in way.mlp.after:
                states = getattr(self, each)(states)
            return states

        forward = by_kernel

    def reduce(self: nn.Module, _protocol: object) -> tuple[Any, ...]:
        return _instance_of, (original, part, name, way), self.__dict__

    return type(
        original.__name__,
        (original,),
        {
            "forward": forward,
            "__reduce_ex__": reduce,
            **{name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")},
            "_stepscope_original": original,
            ROUNDS: False,
            **more,
        },
    )


def _instance_of(original: type[nn.Module], part: Part, name: Kernels, way: _Way) -> nn.Module:
    """A module without its state, as pickle makes it."""
    replacement = _class_of(original, part, name, way)
    return replacement.__new__(replacement)


_made_again = _instance_of
"""The name in models that were pickled before."""


def _takes(module: nn.Module, x: object) -> bool:
    """Whether a kernel takes this input: a floating tensor where the module's weights lie, neither of them spread."""
    weight = next(module.parameters(), None)
    return (
        isinstance(x, Tensor)
        and weight is not None
        and x.dim() > 0
        and x.dtype in _NAMES
        and x.device == weight.device
        and not hasattr(x, "placements")
        and not hasattr(weight, "placements")
    )


def _norm(kernel: Callable[..., Any], way: _Way, module: nn.Module, x: Tensor) -> Tensor:
    own: Any = module
    promoted = way.promoted and not getattr(own, ROUNDS)
    dtype = torch.promote_types(x.dtype, own.weight.dtype) if promoted else x.dtype
    if way.centered:
        widens = promoted and x.is_cuda and torch.is_autocast_enabled("cuda")  # a CPU's autocast leaves it
        dtype = torch.promote_types(dtype, torch.float32) if widens else dtype
        return kernel(x, own.weight, own.bias, epsilon_of(module, x.dtype), dtype)
    by = own.weight if not way.offset else way.offset + own.weight.float()
    return kernel(x, None, by, epsilon_of(module, x.dtype), dtype=dtype)[1]


def replace_parts(
    model: nn.Module,
    kernels: str | Mapping[str, str] | None = None,
    *,
    norm: Kernels | None = None,
    rope: Kernels | None = None,
    mlp: Kernels | None = None,
    loss: Kernels | None = None,
    attention: str | None = None,
    projections: str | None = None,
) -> Replaced:
    """Let other kernels compute norms, rope, MLPs and the loss of a model, in place, where they compute the same.

        replaced = stepscope.replace_parts(model, norm="fused", mlp="fused")
        print(replaced)         # what was replaced, what was left, and why
        replaced.restore()      # the model's own code again

    kernels: compiled, fused, liger or quack (no mlp), for all parts or by part; norm, rope, mlp and loss say it of one,
    also by a function of your own, as in norm="mine.py:fn". A module is held against its replacement first,
    forward and backward, on random numbers, and of those that are alike one for all; what differs is left, and a
    warning says what was asked for and not done. Move the model to its device and dtype before. Parameters and the keys
    of the state dict stay the same.
    The loss is that of a language model of Hugging Face's, causal or masked, which gets labels: in training it then
    returns its loss alone, without logits. attention: flash, sdpa or another of stepscope's, where transformers' models
    call SDPA or eager attention; projections: joint, linear layers of one input as one product, and patches as one.

    Raises InputError where the kernels do not run on the model's device, and where the model has no module of what was
    asked for; GateFailure where a function of your own is wrong.
    """
    said = {"norm": norm, "rope": rope, "mlp": mlp, "loss": loss}
    by_part = {part: name for part, name in said.items() if name is not None}
    chosen = (named_kernels(kernels) if kernels is not None else {}) | named_kernels(by_part)
    if not chosen and attention is None and projections is None:
        raise InputError("replace_parts needs a part: say norm='fused', mlp='fused', loss='fused' or kernels='fused'")
    choose(projections or "apart", PROJECTIONS, "projections")
    choose(attention or "sdpa", tuple(ATTENTIONS), "attention")
    with _whole_or_not(model), contextlib.ExitStack() as undone:
        replaced = replace_in(model, chosen) if chosen else Replaced(model, ())
        if attention is not None:
            undo = undone.callback(swap_attention(model, attention, implementation(attention)))
            found = replaced.found + tuple(attention_found(model, attention))
            replaced = dataclasses.replace(replaced, found=found, _undo=(undo,))
        if projections == "joint":
            undo = join_projections(model)
            found = replaced.found + tuple(projections_found(model))
            replaced = dataclasses.replace(replaced, found=found, _undo=(*replaced._undo, undo))
        undone.pop_all()
    for group in joined(model):
        lie_together([layer.weight for layer in group.layers])
    left = [str(each) for each in replaced.left if each.part in PARTS]
    if left:
        warnings.warn(
            f"{type(model).__name__} keeps code of its own: {'; '.join(left)}; ask for the other parts alone if that "
            "is right",
            stacklevel=2,
        )
    return replaced


def absent_from(model: nn.Module) -> tuple[str, ...]:
    """Fields of a workload whose choices would replace nothing in this model, since it has no such module."""
    modules = [*model.modules()]
    named = any(getattr(getattr(each, "config", None), "_attn_implementation", None) for each in modules)
    absent = [] if named and calls_by_name(model) else ["attention"]
    joinable = any(True for _ in groups_of(model)) or any(not why for _, _, why in convolutions_of(model))
    absent += [] if joinable else ["projections"]
    return *absent, *(part for part in PARTS if not any(_ways(each, part) for each in modules))
