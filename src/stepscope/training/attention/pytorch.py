"""PyTorch's scaled_dot_product_attention, and each of its backends; and any attention where transformers calls it."""

import contextlib
import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.core.errors import InputError
from stepscope.core.parts import ATTENTIONS, PartFound, has_few_programs
from stepscope.kernels.operators import as_autocast
from stepscope.training.attention import AttentionFunction, implementation
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
# A model's base makes a mask before its blocks run, of a function of positions that is put together of a few. Where
# these say no more than causal, a window and documents (position_ids that restart), and no token is padding, the blocks
# get a `_Mask` in its place: what it says, for kernels that take it so, and how transformers makes the tensor, for any
# other call. Of a compiled or captured model the positions cannot be looked at: they are taken for those of documents,
# unless the model made them itself.
#
# A call that the kernel does not take (another mask, a bias, a cache, dropout of some) runs the model's own attention,
# with the mask that transformers makes. With dropout a call is held without it.


class _Mask:
    """What a mask of transformers' says, where that is causal, a window and documents alone."""

    def __init__(
        self, causal: bool, window: int | None, bounds: Tensor | None, make: Callable[[], Tensor | None] | None = None
    ) -> None:
        self.causal, self.window, self.bounds = causal, window, bounds
        self.make, self.made = make, None

    def tensor(self) -> Tensor | None:
        """The mask as transformers makes it: once for all blocks."""
        if self.make is not None:
            self.made, self.make = self.make(), None
        return self.made

    # A model that reads its mask by itself, or cuts it, gets the tensor, and keeps its own attention.

    def __getitem__(self, places: Any) -> Any:
        tensor: Any = self.tensor()
        return tensor[places]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


@dataclass
class _Call:
    """The call of a model that runs, and what its attentions did since that was asked last."""

    plain: bool = False
    """Whether it gives no mask, positions or cache."""
    weights: bool = False
    """Whether it asks for the weights of its attentions."""
    judged: bool = False
    """Whether each attention is held against the model's own, on random numbers."""
    mask: str = ""
    """What the last mask has that kernels do not take."""
    seen: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    """By module, its type and why it kept its own attention; empty where it did not."""


_CALL = _Call()
_NOT_PLAIN = ("attention_mask", "position_ids", "past_key_values", "cache", "cache_position")
_DROPOUT = "it has dropout"
_UNLIKE = ("position_bias", "sinks", "head_mask", "output_attentions")
_OWN = ("sdpa", "eager")
"""What transformers calls the implementations whose place an attention takes."""


def swap_attention(model: nn.Module, name: str, function: AttentionFunction) -> Callable[[], None]:
    """Let this function compute the attention of transformers' models in a model, in place, where it may; returns what
    undoes it. Raises InputError for a model that calls its attention in no such way."""
    every = (getattr(part, "config", None) for part in model.modules())
    configs: list[Any] = [*{id(each): each for each in every if getattr(each, "_attn_implementation", None)}.values()]
    named = [str(each._attn_implementation) for each in configs]
    if not named or {*named} - {*_OWN}:
        said = ", ".join(sorted({*named} - {*_OWN})) or "no attention that transformers calls by name"
        raise InputError(
            f"attention {name} takes the place of sdpa or eager, and {type(model).__name__} has {said}; leave out "
            "attention"
        )
    if not calls_by_name(model):
        raise InputError(
            f"attention {name} takes the place of what transformers calls by name, and {type(model).__name__} has "
            "attention written out in its own code; leave out attention"
        )
    for own in {*named}:
        _register(own, name, function)  # every time: a function of this name may be another one by now
    parts = [part for part in model.modules() if hasattr(part, "config") and hasattr(part, "base_model_prefix")]
    classes = [type(part) for part in parts]
    for config, own in zip(configs, named, strict=True):
        config._attn_implementation = _registered(own, name)
    for part in parts:
        part.__class__ = _noting_calls(type(part), name)

    def undo() -> None:
        for config, own in zip(configs, named, strict=True):
            config._attn_implementation = own
        for part, kind in zip(parts, classes, strict=True):
            part.__class__ = kind

    return undo


def calls_by_name(model: nn.Module) -> bool:
    """Whether some module of a model is of code that has transformers call the attention that its configuration names.
    Such a name stands in configurations of all models, and others write their attention out, or choose it by that."""
    return any(_BY_NAME in _names_beside(type(module)) for module in model.modules())


_BY_NAME = "ALL_ATTENTION_FUNCTIONS"
"""The name by which transformers' models know these attentions."""


@functools.cache
def _names_beside(kind: type[nn.Module]) -> frozenset[str]:
    """The names in the file of a class's forward."""
    return frozenset(getattr(inspect.unwrap(kind.forward), "__globals__", ()))


@functools.cache
def _noting_calls(original: type[nn.Module], name: str) -> type[nn.Module]:
    """The class of a model whose forward notes whether its call is plain. It can be copied and pickled."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _CALL.plain, _CALL.weights
        _CALL.plain = len(args) < 2 and all(kwargs.get(name) is None for name in _NOT_PLAIN)
        asked = kwargs.get("output_attentions"), getattr(self.config, "output_attentions", False)
        _CALL.weights = _CALL.weights or any(asked)
        _CALL.mask = ""
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            _CALL.plain, _CALL.weights = before

    def reduce(self: nn.Module, _protocol: object) -> tuple[Any, ...]:
        return _instance_of, (original, name), self.__dict__

    kept = {each: getattr(original, each) for each in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (original,), {"forward": forward, "__reduce_ex__": reduce, **kept})


def _instance_of(original: type[nn.Module], name: str) -> nn.Module:
    """A model without its state, as pickle makes it, perhaps in another process."""
    for own in _OWN:
        _register(own, name, implementation(name))
    kind = _noting_calls(original, name)
    return kind.__new__(kind)


def _registered(own: str, name: str) -> str:
    return f"stepscope-{name}" if own == "sdpa" else f"stepscope-{name}-{own}"


def _register(own: str, name: str, function: AttentionFunction) -> None:
    """Make the function known to transformers in the place of its own, with what makes masks for it."""
    transformers: Any = importlib.import_module("transformers")
    masking: Any = importlib.import_module("transformers.masking_utils")
    make_mask: Any = getattr(masking, f"{own}_mask")
    sdpa_forward = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
        said = mask
        if mask is None:  # transformers' eager attention reads no more than its mask
            causal = more.get("is_causal")
            causal = own == "sdpa" and bool(getattr(module, "is_causal", True) if causal is None else causal)
            said = _Mask(causal and q.shape[2] > 1, None, None)
        why_not = _why_not(q, k, v, said, more) or _lacks(name, function, said, more)
        by_own = why_not == _DROPOUT and function is sdpa and own == "sdpa" and mask is None
        if not torch.compiler.is_compiling():
            _CALL.seen[id(module)] = type(module).__name__, "" if by_own else why_not
        if why_not:
            return _own_attention(module, own, sdpa_forward)(module, q, k, v, _tensor(mask), **more)
        if _CALL.judged and not torch.is_autocast_enabled(q.device.type):
            theirs = functools.partial(_own_attention(module, own, sdpa_forward), module)
            error = _error_on_random_numbers(function, theirs, (q, k, v), said, {**more, "dropout": 0.0})
            if not error <= _ROUNDING.get(q.dtype, _ROUNDING_OF_16_BITS):
                raise InputError(
                    f"attention {name} computes something else than {type(module).__name__}: on random numbers its "
                    f"outputs are {error:.2g} of their norm away; leave out attention"
                )
        if _CALL.judged and more.get("dropout"):  # no two draw the same: so the model's gradients can be compared
            return _own_attention(module, own, sdpa_forward)(module, q, k, v, _tensor(mask), **more)
        return _attention_of(function, (q, k, v), said, more).transpose(1, 2).contiguous(), None

    def mask_of(*args: Any, **of_call: Any) -> Any:
        said = None if args else _said(masking, of_call)
        skips = of_call.get("allow_is_causal_skip") or of_call.get("allow_is_bidirectional_skip")
        if said is None or not (skips or said.bounds is not None):
            return make_mask(*args, **of_call)
        if said.window is None and said.bounds is None:
            if not said.causal:
                # Some releases of transformers make a mask of ones wherever they are compiled or captured.
                return None if of_call.get("allow_is_bidirectional_skip") else make_mask(**of_call)
            if own == "sdpa":
                return None
        said.make = functools.partial(make_mask, **of_call)
        return said

    transformers.AttentionInterface.register(_registered(own, name), attend)
    masking.AttentionMaskInterface.register(_registered(own, name), mask_of)
    _mark(masking)


@functools.cache
def _mark(masking: Any) -> None:
    """Let the functions that transformers makes masks of say what they are: (causal, window, packed sequences). What
    they compute stays the same."""

    def marked(name: str, says: Callable[..., tuple[bool, int | None, Tensor | None] | None]) -> None:
        make = getattr(masking, name, None)
        if make is None:  # another release has it
            return

        @functools.wraps(make)
        def making(*args: Any, **kwargs: Any) -> Any:
            function = make(*args, **kwargs)
            function.says = says(*args, **kwargs)
            return function

        setattr(masking, name, making)

    def packed(mask_function: Any, position_ids: Tensor, packed_sequence_mask: Tensor) -> Any:
        inside = _says(masking, mask_function)
        return None if inside is None else (*inside[:2], packed_sequence_mask)

    def both(*functions: Any) -> tuple[bool, int | None, Tensor | None] | None:
        one, other = map(functools.partial(_says, masking), functions) if len(functions) == 2 else (None, None)
        if one is None or other is None:
            return None
        (causal, window, packed), (also_causal, other_window, other_packed) = one, other
        if None not in (window, other_window) or (packed is not None and other_packed is not None):
            return None
        return causal or also_causal, window or other_window, other_packed if packed is None else packed

    marked("and_masks", both)  # by which transformers 5.17 adds documents
    marked("packed_sequence_mask_function", lambda packed_sequence_mask: (False, None, packed_sequence_mask))
    marked("sliding_window_causal_mask_function", lambda sliding_window: (True, sliding_window, None))
    # For a window on both sides transformers gives the number of keys on one side, without the query's own.
    marked("sliding_window_bidirectional_mask_function", lambda sliding_window: (False, sliding_window + 1, None))
    marked("packed_sequence_compatibility_function", packed)
    find_packed = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None if _CALL.plain else find_packed(position_ids)


def _says(masking: Any, function: Any) -> tuple[bool, int | None, Tensor | None] | None:
    """Whether a mask's function is causal, its window and its packed sequences; None where it is something else."""
    if function is masking.causal_mask_function or function is masking.bidirectional_mask_function:
        return function is masking.causal_mask_function, None, None
    return getattr(function, "says", None)


def _said(masking: Any, of_call: Mapping[str, Any]) -> "_Mask | None":
    """What the mask of such a call of transformers' says; None, with the reason in `_CALL`, where it says more."""
    length, padding = of_call.get("q_length"), of_call.get("attention_mask")
    function = _says(masking, of_call.get("mask_function", masking.causal_mask_function))
    why = ""
    if function is None or of_call.get("use_vmap"):
        why = " of more than causal, a window and documents"
    elif of_call.get("kv_length") != length or any(
        not isinstance(of_call.get(name, 0), int) or of_call.get(name, 0) for name in ("q_offset", "kv_offset")
    ):
        why = " of a cache"
    elif padding is not None and (
        masking.is_tracing(padding) or padding.shape != (of_call.get("batch_size"), length) or not bool(padding.all())
    ):
        why = " of padding"
    if why:
        _CALL.mask = why
        return None
    assert function is not None and isinstance(length, int)
    causal, window, packed = function
    bounds = None
    if packed is not None:  # (B, S), sequence after sequence: the first position of each one's, and that after its last
        packed = packed.expand(of_call["batch_size"], length).contiguous()
        ends = [torch.searchsorted(packed, packed, out_int32=True, right=right) for right in (False, True)]
        bounds = torch.stack(ends)
    return _Mask(causal, None if window is None or window >= length else window, bounds)


def _why_not(q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Mapping[str, Any]) -> str:
    """Why a call of transformers' keeps its own attention; empty where it need not."""
    if not isinstance(mask, _Mask):
        return f"it has a mask{_CALL.mask}"
    unlike, window = q.shape[2] != k.shape[2] or q.shape[3] != v.shape[3], more.get("sliding_window")
    window = window if window is not None and window < k.shape[2] else None
    reasons = (
        (unlike, "its queries have another length or width than its keys and values"),
        (not unlike and window != mask.window, "its window is another one than its mask's"),
        (
            more.get("cu_seq_lens_q") is not None and mask.bounds is None,
            "it has cu_seq_lens_q, and position_ids that do not restart",
        ),
        (_CALL.weights, "its weights are asked for (output_attentions)"),
        *((more.get(name) is not None and more[name] is not False, f"it has {name}") for name in _UNLIKE),
    )
    return next((why for holds, why in reasons if holds), "")


def _lacks(name: str, function: AttentionFunction, mask: "_Mask", more: Mapping[str, Any]) -> str:
    """What a call needs that the attention of this name does not take; empty where there is nothing."""
    record = ATTENTIONS[name]
    if more.get("dropout") and not record.scoring:
        return _DROPOUT
    masks = function.__module__ == __name__  # PyTorch's would make a mask in each block; transformers makes one for all
    if mask.bounds is not None and (masks or not record.documents):
        return f"it has documents, and {name} takes none without a mask"
    if mask.window is not None and (masks or not record.window):
        return f"it has a window, and {name} takes none without a mask"
    scoring = next((each for each in ("softcap", "s_aux") if more.get(each) is not None), None)
    return f"it has {scoring}, and {name} takes none" if scoring is not None and not record.scoring else ""


def _attention_of(
    function: Callable[..., Tensor], call: tuple[Tensor, Tensor, Tensor], mask: "_Mask", more: Mapping[str, Any]
) -> Tensor:
    """The function of a call that it takes: (B, H, S, D)."""
    sinks = more.get("s_aux")
    options = {
        "window": mask.window,
        "bounds": mask.bounds,
        "softcap": more.get("softcap"),
        "dropout": more.get("dropout") or None,
        "sinks": None if sinks is None else sinks.float(),
    }
    q, k, v = as_autocast(*call)
    few = q.is_cuda and has_few_programs(k.shape[0] * k.shape[1], k.shape[2])
    if few and function.__module__ not in (__name__, _FLASH):
        k, v = for_all_heads(q, k, v)
    needed = {name: value for name, value in options.items() if value is not None}
    return function(q, k, v, causal=mask.causal, scale=more.get("scaling"), **needed)


_FLASH = "stepscope.kernels.flash.attention"
"""The module whose backward has programs for heads of queries by itself (`shares_for` in kernels/flash/launch.py)."""
_EAGER: dict[type, Callable[..., Any]] = {}
"""By class of a module, its own attention written out: found before a compiler traces the call."""


def _own_attention(module: Any, own: str, sdpa_forward: Callable[..., Any]) -> Callable[..., Any]:
    """What computes a module's attention where nothing takes its place."""
    if own == "sdpa":
        return sdpa_forward
    if type(module) not in _EAGER:
        _EAGER[type(module)] = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    return _EAGER[type(module)]


def _tensor(mask: Any) -> Any:
    return mask.tensor() if isinstance(mask, _Mask) else mask


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """While it runs, transformers makes the masks that it makes while a CUDA graph is captured: tensors where it makes
    none elsewhere. Steps before a capture run so too, since compiled blocks that got no mask until then would compile
    anew inside the capture, which no capture outlives."""
    checks: Any = sys.modules.get("transformers.utils.import_utils")
    own = getattr(checks, "is_cuda_stream_capturing", None)
    if own is None:
        yield
        return
    checks.is_cuda_stream_capturing = lambda: True
    try:
        yield
    finally:
        checks.is_cuda_stream_capturing = own


_HELD_LENGTH, _SPREAD = 256, 8.0
"""Positions of the calls in which modules are held, and the standard deviation of their scores."""
_ROUNDING = {torch.float32: 0.01}
_ROUNDING_OF_16_BITS = 0.05


@torch.no_grad()
def _error_on_random_numbers(
    function: Callable[..., Tensor],
    theirs: Callable[..., Any],
    like: tuple[Tensor, Tensor, Tensor],
    mask: "_Mask",
    more: Mapping[str, Any],
) -> float:
    """How far a function's outputs are from those of a model's own attention in fp32, as a share of their norm, on
    random numbers: fresh models have scores near zero, where a softcap or another scale changes next to nothing."""
    (_, _, length, width), device = like[0].shape, like[0].device
    length, generator = min(length, _HELD_LENGTH), torch.Generator(device).manual_seed(0)
    size = (_SPREAD / (abs(more.get("scaling") or width**-0.5) * width**0.5)) ** 0.5
    q, k, v = (
        (size * torch.randn((1, each.shape[1], length, width), generator=generator, device=device)).to(each.dtype)
        for each in like
    )
    tensor = mask.tensor()
    tensor = None if tensor is None else tensor[:1, :, :length, :length]
    bounds = None if mask.bounds is None else mask.bounds[:, :1, :length].clamp(max=length).contiguous()
    own = theirs(q.float(), k.float(), v.float(), tensor, **more)[0].transpose(1, 2)
    ours = _attention_of(function, (q, k, v), _Mask(mask.causal, mask.window, bounds), more).float()
    return ((ours - own).norm() / own.norm()).item()


@contextlib.contextmanager
def calls_held() -> Iterator[Counter[tuple[str, str]]]:
    """While it runs, each call that a swapped attention takes is held against the module's own. Afterwards there is
    the count of modules by type and by why they kept their own attention (empty: they did not); outside compilers."""
    counts: Counter[tuple[str, str]] = Counter()
    _CALL.seen, _CALL.judged = {}, True
    try:
        yield counts
    finally:
        counts.update(_CALL.seen.values())
        _CALL.seen, _CALL.judged = {}, False


def attention_found(model: nn.Module, name: str, calls: Mapping[tuple[str, str], int] | None = None) -> list[PartFound]:
    """The modules whose attention is that of this name, and those that kept their own, as their calls were counted.
    Before any call, those that look for it by transformers' interface."""
    if calls is None:
        forwards = ((type(each).__name__, inspect.unwrap(type(each).forward)) for each in model.modules())
        calls = Counter((kind, "") for kind, each in forwards if _BY_NAME in each.__code__.co_names)
    return [
        PartFound(part="attention", kernels=name, type=kind, modules=count, replaced=not why, why=why)
        for (kind, why), count in calls.items()
    ]
