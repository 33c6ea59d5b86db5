"""PyTorch's scaled_dot_product_attention, and each of its backends; and any attention where transformers calls it."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.core.errors import InputError
from stepscope.kernels.operators import as_autocast
from stepscope.training.attention import AttentionFunction
from stepscope.training.attention.written_out import for_all_heads, fully_masked_queries, hidden_scores, with_zeros


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's scaled_dot_product_attention; PyTorch chooses the backend. A sliding window becomes a mask (S, T), and
    documents become one (B, 1, S, T)."""
    masked = fully_masked_queries(q, k, window)
    if masked:
        return with_zeros(sdpa, masked, q, k, v, causal=causal, scale=scale, window=window)
    # The fused backends read only rows whose D numbers lie side by side.
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    if scale is not None and scale <= 0:
        # Its CPU kernel scales masked scores, which are -inf: a scale of 0 makes NaN, a negative one +infinity.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    grouped = q.shape[1] != k.shape[1]
    if window is None and bounds is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    hidden = hidden_scores(q, k, causal=causal, window=window, bounds=bounds)
    assert hidden is not None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=scale, enable_gqa=grouped)


BACKENDS: dict[str, SDPBackend] = {
    "sdpa-math": SDPBackend.MATH,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""PyTorch's backends by the names of the attentions that run them."""


def _by(backend: str) -> AttentionFunction:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa(q, k, v, causal=causal, scale=scale, window=window, bounds=bounds)

    return attention


sdpa_math, sdpa_cudnn = _by("sdpa-math"), _by("sdpa-cudnn")


def sdpa_efficient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's memory-efficient backend. Some releases lack grouped heads there, so keys and values are repeated."""
    k, v = for_all_heads(q, k, v)
    with sdpa_kernel(BACKENDS["sdpa-efficient"]):
        return sdpa(q, k, v, causal=causal, scale=scale, window=window, bounds=bounds)


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """PyTorch's FlashAttention. It has only square causal masks, so unequal lengths are cut: no query sees keys from S
    on, and queries from T on see all keys.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    with sdpa_kernel(BACKENDS["sdpa-flash"]):
        if not causal or queries == keys:
            return sdpa(q, k, v, causal=causal, scale=scale, window=window)
        if queries < keys:
            return sdpa(q, k[:, :, :queries], v[:, :, :queries], causal=True, scale=scale, window=window)
        square = sdpa(q[:, :, :keys], k, v, causal=True, scale=scale, window=window)
        return torch.cat([square, sdpa(q[:, :, keys:], k, v, causal=False, scale=scale, window=window)], dim=-2)


# An attention behind transformers' interface, by which its models call what `config._attn_implementation` names.
#
# A model's base makes a mask before its blocks run, and a causal one wherever it is compiled or captured into a graph:
# positions could be those of packed documents, and their values cannot be looked at there. With a mask, fused kernels
# do not run. A call that gives neither mask nor positions nor a cache has whole sequences, so none is needed: such a
# call is plain. In any other call, and where an attention has what the kernel has not (a mask, dropout, a bias, a
# window shorter than the sequence, sinks), transformers' own call of SDPA runs, with the mask that transformers makes.


class _Call:
    """The call of a model that runs: whether it is plain, and what the last trial saw."""

    plain = False
    taken = 0
    why_not = ""


_CALL = _Call()
_NOT_PLAIN = ("attention_mask", "position_ids", "past_key_values", "cache", "cache_position")
_DROPOUT = "it has dropout"
_UNLIKE = ("position_bias", "softcap", "s_aux", "sinks", "head_mask", "output_attentions")


def swap_attention(model: nn.Module, name: str, function: AttentionFunction) -> Callable[[], None]:
    """Let this function compute the attention of transformers' models in a model, in place, where it may; returns what
    undoes it. Raises InputError for a model that calls its attention in no such way."""
    every = (getattr(part, "config", None) for part in model.modules())
    configs: list[Any] = [*{id(each): each for each in every if getattr(each, "_attn_implementation", None)}.values()]
    named = [str(each._attn_implementation) for each in configs]
    if {*named} != {"sdpa"}:
        said = ", ".join(sorted({*named} - {"sdpa"})) or "no attention that transformers calls by name"
        raise InputError(
            f"attention {name} takes the place of sdpa, and {type(model).__name__} has {said}; leave out --attention"
        )
    _register(f"stepscope-{name}", function)
    parts = [part for part in model.modules() if hasattr(part, "config") and hasattr(part, "base_model_prefix")]
    classes = [type(part) for part in parts]
    for config in configs:
        config._attn_implementation = f"stepscope-{name}"
    for part in parts:
        part.__class__ = _noting_calls(type(part))

    def undo() -> None:
        for config in configs:
            config._attn_implementation = "sdpa"
        for part, kind in zip(parts, classes, strict=True):
            part.__class__ = kind

    return undo


@functools.cache
def _noting_calls(original: type[nn.Module]) -> type[nn.Module]:
    """The class of a model whose forward notes whether its call is plain."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _CALL.plain
        _CALL.plain = len(args) < 2 and all(kwargs.get(name) is None for name in _NOT_PLAIN)
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            _CALL.plain = before

    names = ("__module__", "__qualname__", "__doc__")
    return type(
        original.__name__, (original,), {"forward": forward, **{each: getattr(original, each) for each in names}}
    )


@functools.cache
def _register(name: str, function: AttentionFunction) -> None:
    """Make the function known to transformers by this name, with a mask for what it does not take."""
    transformers: Any = importlib.import_module("transformers")
    masking: Any = importlib.import_module("transformers.masking_utils")
    own: Any = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **more: Any) -> tuple[Tensor, None]:
        why_not = _why_not(q, k, v, mask, more)
        by_own = why_not == _DROPOUT and function is sdpa  # which has dropout, and here no mask
        if not torch.compiler.is_compiling():
            _CALL.why_not, _CALL.taken = why_not or _CALL.why_not, _CALL.taken + (by_own or not why_not)
        if why_not:
            return own(module, q, k, v, mask, **more)
        causal = more.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        q, k, v = as_autocast(q, k, v)
        out = function(q, k, v, causal=bool(causal) and q.shape[2] > 1, scale=more.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    def mask_of(*args: Any, **of_call: Any) -> Any:
        length, keys = of_call.get("q_length"), of_call.get("kv_length")
        window = of_call.get("local_size")
        whole = length is None or length == keys
        if _CALL.plain and of_call.get("allow_is_causal_skip") and whole and (window is None or keys <= window):
            return None
        return masking.sdpa_mask(*args, **of_call)

    transformers.AttentionInterface.register(name, attend)
    masking.AttentionMaskInterface.register(name, mask_of)
    packed = masking.find_packed_sequence_indices
    if not hasattr(packed, "of_stepscope"):

        def unless_plain(position_ids: Tensor) -> Tensor | None:
            return None if _CALL.plain else packed(position_ids)

        unless_plain.of_stepscope = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        masking.find_packed_sequence_indices = unless_plain


def _why_not(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, more: Mapping[str, Any]) -> str:
    """Why a call of transformers' keeps its own attention; empty where it need not."""
    if mask is not None:
        return "it has a mask"
    if more.get("dropout"):
        return _DROPOUT
    if q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3]:
        return "its queries have another length or width than its keys and values"
    window = more.get("sliding_window")
    if window is not None and window < k.shape[2]:
        return "it has a window"
    return next((f"it has {name}" for name in _UNLIKE if more.get(name) is not None and more[name] is not False), "")


def calls_seen() -> tuple[int, str]:
    """How many calls the swapped attention took since this was asked last, and why one was left; outside compilers."""
    seen = _CALL.taken, _CALL.why_not
    _CALL.taken, _CALL.why_not = 0, ""
    return seen
