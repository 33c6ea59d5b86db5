"""Fake tensors on the CPU that are treated as CUDA treats its own.

A PyTorch that was built without CUDA has no autograd for fake CUDA tensors. Fake CPU tensors work everywhere. An
operator's tensors depend on the device for three reasons only, all above autograd: which operators autocast runs in
fp32, which kernel scaled_dot_product_attention becomes, and what dropout saves. This mode decides each as CUDA does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

AttentionBackend = Literal["math", "efficient", "flash", "cudnn"]

# CastPolicy::fp32 and fp32_set_opt_dtype of ATen/autocast_mode.h, by the names that Python gives the operators. Of the
# 16-bit list, CPU and CUDA differ in recurrent cells alone.
_IN_FP32 = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus", "layer_norm", "rms_norm", "group_norm", "nll_loss",
    "cross_entropy", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "dist", "logsumexp", "prod",
    "softmax", "log_softmax", "cumprod", "cumsum", "norm", "binary_cross_entropy_with_logits",
})  # fmt: skip
_SUMS_INTO_FP32 = frozenset({"sum"})
"""Operators that reduce in fp32 without a copy of their input in fp32."""


class AsOnCuda(TorchFunctionMode):
    """A mode in which autocast("cpu") casts what autocast("cuda") would, and fused attention and dropout are CUDA's."""

    def __init__(
        self, attention: Callable[[Tensor], AttentionBackend] | None = None, *, heads_as_given: bool = False
    ) -> None:
        """attention: the backend for these queries (B, H, S, D); None leaves it to the CPU, which casts alike.
        heads_as_given: keys that several heads share are never repeated: the efficient kernel, which takes none, leaves
        them to the math one (sdp_utils.cpp)."""
        super().__init__()
        self._heads_as_given = heads_as_given
        self._attention = attention

    @contextlib.contextmanager
    def throughout(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Enter the mode in each forward of these modules, in backward too: a checkpoint runs its module again there,
        and autograd's engine leaves every mode of this kind.
        """
        handles: list[RemovableHandle] = []
        entered: list[bool] = []

        def enter(*_: object) -> None:
            entered.append(self not in _get_current_function_mode_stack())
            if entered[-1]:
                self.__enter__()

        def leave(*_: object) -> None:
            if entered.pop():
                self.__exit__(None, None, None)

        for module in modules:
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention and self._attention is not None:
            return self._attend(*args, **kwargs)
        if func is F.dropout:
            return _dropout(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self._inside():
                return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if name in _IN_FP32:
                args = tuple(_in_fp32(value) for value in args)
                kwargs = {key: _in_fp32(value) for key, value in kwargs.items()}
            elif name in _SUMS_INTO_FP32 and kwargs.get("dtype") is None and _is_half(args[0]):
                kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """While open, attention that is written in Python calls this mode. PyTorch takes a mode off while it handles a
        function, so the operators that the function calls would be the CPU's."""
        softmax, attend, dropout = F.softmax, F.scaled_dot_product_attention, F.dropout

        def softmax_as_on_cuda(*args: Any, **kwargs: Any) -> Tensor:
            return self.__torch_function__(softmax, (), args, kwargs)

        F.softmax = softmax_as_on_cuda
        F.dropout = functools.partial(_dropout, dropout)
        if self._attention is not None:
            F.scaled_dot_product_attention = self._attend
        try:
            yield
        finally:
            F.softmax, F.scaled_dot_product_attention, F.dropout = softmax, attend, dropout

    def _attend(  # noqa: PLR0917  (the parameters of scaled_dot_product_attention, which is called by place, too)
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention by the operators that at::scaled_dot_product_attention calls on CUDA.

        enable_gqa: keys and values have fewer heads than queries. For the efficient kernel, which requires as many,
        they are repeated.
        """
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        bias = _bias(attn_mask, query)
        assert self._attention is not None
        backend = self._attention(query)
        if self._heads_as_given and backend == "efficient" and key.shape[1] < query.shape[1]:
            backend = "math"
        aten = torch.ops.aten
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if backend == "efficient":
            group = query.shape[1] // key.shape[1]
            if group > 1:
                key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, differentiable, dropout_p, is_causal, scale=scale
            )[0]
        if backend == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, differentiable, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "flash":
            head_dim = query.shape[-1]
            scale = head_dim**-0.5 if scale is None else scale
            padding = -head_dim % 8
            if padding:
                query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[
                0
            ]
            return out[..., :head_dim] if padding else out
        return aten._scaled_dot_product_attention_math(
            query, key, value, bias, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def _bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as the kernels add it to the scores: of the queries' dtype, (B, H, S, S) by views."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if query.dim() != 4:
        return mask
    return mask.to(query.dtype).expand(*query.shape[:2], *mask.shape[-2:])


def _dropout(
    otherwise: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout as CUDA's fused kernel has it, which saves a mask of one byte an element, where a CPU saves the factors
    in the dtype of the input (aten/src/ATen/native/Dropout.cpp)."""
    if training and not inplace and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return otherwise(input, p, training, inplace)


def _is_half(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
