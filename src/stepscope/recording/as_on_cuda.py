"""Fake tensors on the CPU that are treated as CUDA treats its own.

A PyTorch that was built without CUDA has no autograd for fake CUDA tensors. Fake CPU tensors work everywhere. An
operator's tensors depend on the device for three reasons only, all above autograd: which operators autocast runs in
fp32, which kernel scaled_dot_product_attention becomes, and what dropout saves. A mode decides each as CUDA does.
"""

import contextlib
import functools
import importlib
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from stepscope.core.units import MIB

AttentionBackend = Literal["math", "efficient", "flash", "cudnn"]

# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE of ATen/autocast_mode.h, by the names that Python gives the operators,
# with functions that are made of them: `square` of `pow`. Of the 16-bit list, CPU and CUDA differ in recurrent cells.
_UPSAMPLES = (
    *("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d"),
    *("nearest_exact1d", "nearest_exact2d", "nearest_exact3d", "bilinear2d_aa", "bicubic2d_aa"),
)
_IN_FP32 = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow", "__pow__", "__rpow__", "square", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm", "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "interpolate", "prod", "softmax", "softmin", "log_softmax", "cumprod", "cumsum", "norm",
    "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", *(f"upsample_{name}" for name in _UPSAMPLES),
    *(f"_upsample_{name}" for name in _UPSAMPLES),
})  # fmt: skip
_SUMS_INTO_FP32 = frozenset({"sum"})
"""Operators that reduce in fp32 without a copy of their input in fp32."""


class AsOnCuda(TorchFunctionMode):
    """A mode in which autocast("cpu") casts what autocast("cuda") would, and fused attention and dropout are CUDA's."""

    def __init__(self, attention: Callable[[Tensor], AttentionBackend] | Literal["chosen"] | None = None) -> None:
        """attention: the backend for these queries (B, H, S, D), and keys that several heads share are repeated where
        it takes none; "chosen" is the one that PyTorch takes (`chosen_backend`); None leaves it to the CPU, which casts
        alike."""
        super().__init__()
        self._attention = attention
        self.recurrent = 0
        """Calls of recurrent layers, whose workspace is counted at its largest."""
        self.grouped_flex = 0
        """Calls of FlexAttention whose keys several query heads share."""
        self._dropout_states: Tensor | None = None

    @contextlib.contextmanager
    def throughout(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Enter the mode in each forward of these modules, and in backward: a checkpoint runs a part of forward again
        there. PyTorch takes a mode off while it handles `Tensor.backward`, and autograd's engine has the modes of its
        caller.
        """
        entered: list[contextlib.ExitStack] = []
        run_engine: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def enter(*_: object) -> None:
            entered.append(self._entered())

        def leave(*_: object) -> None:
            entered.pop().close()

        def run_inside(*args: Any, **kwargs: Any) -> Any:
            with self._entered():
                return run_engine(*args, **kwargs)

        with asked_of_cuda(), _flexible(self._attend_flexibly), contextlib.ExitStack() as undo:
            for module in modules:
                undo.callback(module.register_forward_pre_hook(enter).remove)
                undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            undo.callback(lambda: [leave() for _ in range(len(entered))])  # PyTorch calls no hook after a Ctrl-C
            undo.callback(setattr, torch.autograd, "_engine_run_backward", run_engine)
            torch.autograd._engine_run_backward = run_inside  # type: ignore[attr-defined]
            yield

    def _entered(self) -> contextlib.ExitStack:
        """What leaves the mode again, if it had to be entered."""
        stack = contextlib.ExitStack()
        if self not in _get_current_function_mode_stack():
            stack.enter_context(self)
        return stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "device" in kwargs or name in {"to", "cuda"}:
            func, args, kwargs = _here(func, args, kwargs)
        if func is F.scaled_dot_product_attention and self._attention is not None:
            return self._attend(*args, **kwargs)
        if func is F.dropout:
            return _dropout(func, *args, **kwargs)
        if name in _KEPT_BY_LAYER and len(args) == _ARGUMENTS_OF_RECURRENT:
            self.recurrent += 1
            if args[5] and self._dropout_states is None:
                self._dropout_states = args[0].new_empty(_DROPOUT_STATES, dtype=torch.uint8)
            return _recurrent(_KEPT_BY_LAYER[name], *args)
        if func is F.multi_head_attention_forward:
            with self._inside():
                return func(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func is F.cross_entropy and _is_half(args[0] if args else kwargs["input"]):
                return _cross_entropy(*args, **kwargs)
            if name in _IN_FP32:
                args = tuple(value.float() if _is_half(value) else value for value in args)
                kwargs = {key: value.float() if _is_half(value) else value for key, value in kwargs.items()}
            elif name in _SUMS_INTO_FP32 and kwargs.get("dtype") is None and _is_half(args[0]):
                kwargs["dtype"] = torch.float32
        func = functools.partial(_rms_norm, func) if func in (F.rms_norm, torch.rms_norm) else func
        return func(*args, **kwargs)

    def _attend_flexibly(self, query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, ...]:
        self.grouped_flex += query.shape[1] != key.shape[1]
        return _flex_attention(query, key, *others)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """While open, attention that is written in Python calls this mode. PyTorch takes a mode off while it handles a
        function, so the operators that the function calls would be the CPU's."""
        softmax, attend, dropout = F.softmax, F.scaled_dot_product_attention, F.dropout

        F.softmax = lambda *args, **kwargs: self.__torch_function__(softmax, (), args, kwargs)
        F.dropout = functools.partial(_dropout, dropout)
        if self._attention is not None:
            F.scaled_dot_product_attention = self._attend
        try:
            yield
        finally:
            F.softmax, F.scaled_dot_product_attention, F.dropout = softmax, attend, dropout

    def _attend(  # noqa: PLR0917  (the parameters of scaled_dot_product_attention, which is called by place, too)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention by the operators that at::scaled_dot_product_attention calls on CUDA.

        enable_gqa: keys and values have fewer heads than queries. For the efficient kernel, which requires as many,
        they are repeated.
        """
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
            attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        with torch.autocast("cpu", enabled=False):  # what attention is made of is not cast again
            return self._attend_in(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def _attend_in(  # noqa: PLR0917  (as of _attend)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        assert self._attention is not None
        if callable(self._attention):
            backend = self._attention(query)
        else:
            backend = chosen_backend(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        bias = _bias(attn_mask, query, key, backend)
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
            attend = aten._scaled_dot_product_flash_attention
            out = attend(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :head_dim] if padding else out
        if dropout_p:
            return _math_with_dropout(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
        return aten._scaled_dot_product_attention_math(
            query, key, value, bias, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def _here(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call that puts a tensor on a GPU by its name, as one that puts it where the step is run."""

    def place(value: Any) -> Any:
        names_gpu = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
        return torch.device("cpu") if names_gpu else value

    if func is torch.device:  # which may have an index beside the name
        return place, (func(*args, **kwargs),), {}
    if func is Tensor.cuda:
        return Tensor.to, (args[0], torch.device("cpu")), {}
    return func, tuple(map(place, args)), {key: place(value) for key, value in kwargs.items()}


class _Here(TorchFunctionMode):
    """A mode in which what is made on a GPU, or moved there, stays on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, args, kwargs = _here(func, args, kwargs or {})
        return func(*args, **kwargs)


@contextlib.contextmanager
def made_here() -> Iterator[None]:
    """While open, code that makes a model for a GPU makes it on the CPU, and asks of autocast as in `asked_of_cuda`."""
    with asked_of_cuda(), _Here():
        yield


@contextlib.contextmanager
def asked_of_cuda() -> Iterator[None]:
    """While open, code that asks whether CUDA's autocast is on, as a module does that casts by itself, hears of the
    CPU's, and the autocast("cuda") that a module makes or enters is the CPU's: without CUDA it would cast nothing, and
    one that is made then is off for ever."""
    enabled, usual = torch.is_autocast_enabled, torch.get_autocast_dtype
    make, begin = torch.autocast.__init__, torch.autocast.__enter__
    entered: list[torch.autocast] = []

    def made(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or usual("cuda")
        make(self, device_type, dtype, enabled, cache_enabled)

    def begun(self: torch.autocast) -> Any:
        if self.device == "cuda":
            self.device = "cpu"
            entered.append(self)
        return begin(self)

    torch.autocast.__init__, torch.autocast.__enter__ = made, begun
    torch.is_autocast_enabled = lambda device_type="cuda": enabled("cpu" if device_type == "cuda" else device_type)
    torch.get_autocast_dtype = lambda device_type: usual("cpu" if device_type == "cuda" else device_type)
    try:
        yield
    finally:
        torch.is_autocast_enabled, torch.get_autocast_dtype = enabled, usual
        torch.autocast.__init__, torch.autocast.__enter__ = make, begin
        for each in entered:
            each.device = "cuda"


def chosen_backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool, enable_gqa: bool
) -> AttentionBackend:
    """The backend that PyTorch takes on a Hopper GPU: the first that is able, of cuDNN, flash, efficient and math
    (ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h). Raises RuntimeError as it does, where the user
    has disabled math and no other is able.

    query (B, H, S, D), key (B, H or fewer, T, D), value (B, as key, T, E); mask: broadcast to (B, H, S, T).
    """
    cuda, tensors = torch.backends.cuda, (query, key, value)
    half, dims = _is_half(query), (query.shape[-1], value.shape[-1])
    heads = [tensor.shape[1] for tensor in tensors if tensor.dim() > 2]
    fused = (
        all(t.dim() == 4 and t.dtype == query.dtype for t in tensors)
        and len({t.shape[0] for t in tensors}) == 1
        and min(query.shape[2], key.shape[2]) > 0
        and all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
        and (mask is None or mask.stride(-1) == 1)
    )
    same = len(set(heads)) == 1
    shared = same or (enable_gqa and fused and all(heads[0] % count == 0 for count in heads))
    able: dict[AttentionBackend, bool] = {
        "cudnn": cuda.cudnn_sdp_enabled() and half and shared and max(dims) <= 256 and not any(d % 8 for d in dims)
        and key.shape[-2] > 1 and _fits_scores(mask, query, key),
        "flash": cuda.flash_sdp_enabled() and half and shared and len(set(heads[1:])) == 1 and mask is None
        and dims[0] == dims[1] <= 256 and not (is_causal and query.shape[-2] != key.shape[-2]),
        "efficient": cuda.mem_efficient_sdp_enabled() and (half or query.dtype == torch.float32) and same
        and not any(d % (8 if half else 4) for d in dims),
    }  # fmt: skip
    chosen: AttentionBackend | None = next((name for name, is_able in able.items() if fused and is_able), None)
    if chosen is None and not cuda.math_sdp_enabled():
        raise RuntimeError("No available kernel. Aborting execution.")
    return chosen or "math"


def _fits_scores(mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether cuDNN takes the mask: of 2 or 4 sizes that broadcast to the scores' as they are, without a gradient."""
    if mask is None or mask.dim() not in (2, 4):
        return mask is None
    of_scores = (*query.shape[:3], key.shape[2])[-mask.dim() :]
    fits = all(size in (1, of) for size, of in zip(mask.shape, of_scores, strict=True))
    return fits and not mask.requires_grad


def _bias(mask: Tensor | None, query: Tensor, key: Tensor, backend: AttentionBackend) -> Tensor | None:
    """The mask as the kernels add it to the scores: a condition in the queries' dtype, and views of (B, H, S, T). For
    the efficient one rows lie in multiples of 8 elements (pad_bias of ATen/native/transformers/attention.cpp)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
    if query.dim() != 4 or backend == "math":
        return mask
    if backend == "efficient" and (mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1])):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(*query.shape[:3], key.shape[2])


def _math_with_dropout(  # noqa: PLR0917  (as of _attend)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """_scaled_dot_product_attention_math (ATen/native/transformers/attention.cpp) with CUDA's dropout in it: half
    precision is computed in fp32, unless the user allows otherwise."""
    dtype, root = query.dtype, (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    if is_causal:
        bias = _bias(query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril(), query, key, "math")
    if _is_half(query) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    scores = scores if bias is None else scores + bias
    weights = torch.native_dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True)[0]
    del scores
    returned_too = weights.to(dtype)
    out = (weights @ value).to(dtype)
    del returned_too
    return out


def _cross_entropy(  # noqa: PLR0917  (the parameters of cross_entropy)
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of half-precision scores under CUDA's autocast, whose lists do not name it: log-softmax keeps their
    dtype, and the loss of it is taken in fp32 (ATen/native/LossNLL.cpp, ATen/autocast_mode.h)."""
    with torch.autocast("cpu", enabled=False):
        if target.is_floating_point() or label_smoothing:
            weight = weight if weight is None else weight.to(input.dtype)
            return F.cross_entropy(
                input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
            )
        log_probabilities = input.log_softmax(0 if input.dim() == 1 else 1).float()
        return F.nll_loss(log_probabilities, target, weight, size_average, ignore_index, reduce, reduction)


def _dropout(
    otherwise: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout as CUDA's fused kernel has it, which saves a mask of one byte an element, where a CPU saves the factors
    in the dtype of the input (aten/src/ATen/native/Dropout.cpp)."""
    if training and not inplace and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, True)[0]
    return otherwise(input, p, training, inplace)


def _is_half(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


# Recurrent layers as cuDNN computes them (ATen/native/cudnn/RNN.cpp), which a CPU does step by step.

_KEPT_BY_LAYER = {"lstm": 6, "gru": 7, "rnn_tanh": 2, "rnn_relu": 2}
"""Tensors of an output's size that cuDNN keeps of a layer, the output among them (results/h200/fit-truth/
recurrent.json)."""
_ARGUMENTS_OF_RECURRENT = 9
"""Of sequences of one length; those that are packed have others."""
_WORKSPACE_OF_RECURRENT, _OF_HALF, _LEAST_WORKSPACE = 12.5, 24.0, 22 * MIB
"""The most that a workspace took in the same file: so many outputs, in fp16 more, and so many bytes beside them."""

_DROPOUT_STATES = 9 * MIB
"""What cuDNN keeps for the dropout between layers: the allocator held 6.2 to 8.6 MiB more beside it."""


def _recurrent(  # noqa: PLR0917  (the parameters of torch.lstm and its kind, which are called by place)
    kept: int,
    x: Tensor,
    state: Any,
    weights: list[Tensor],
    _biases: bool,
    layers: int,
    _dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The output (T, B, D H) or (B, T, D H) and the last states (L D, B, H), D = 2 where it runs both ways."""
    states = state if isinstance(state, (list, tuple)) else (state,)
    if torch.is_autocast_enabled("cpu"):
        x, *states = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (x, *states))
        weights = [weight.to(x.dtype) for weight in weights]
    x = x.transpose(0, 1) if batch_first else x
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    reserved = kept * layers - 1 if training and torch.is_grad_enabled() else 0
    with torch.autocast("cpu", enabled=False):
        out: Any = _Recurrent.apply(width, reserved, x.contiguous(), *states, *weights)
    return out.transpose(0, 1) if batch_first else out, *(state.new_empty(state.shape) for state in states)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, width: int, reserved: int, x: Tensor, *states_and_weights: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:2], width))
        kept = x.new_empty(out.numel() * reserved)
        _recurrent_workspace(out)
        ctx.save_for_backward(x, out, kept, *states_and_weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, out, _, *states_and_weights = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x = torch.empty_like(x)
        # All gradients of weights are parts of one buffer.
        together = x.new_empty(sum(tensor.numel() for tensor in states_and_weights))
        _recurrent_workspace(out)
        del gradient
        parts = together.split([tensor.numel() for tensor in states_and_weights])
        return None, None, of_x, *(part.view_as(of) for part, of in zip(parts, states_and_weights, strict=True))


def _recurrent_workspace(out: Tensor) -> None:
    share = _OF_HALF if out.dtype == torch.float16 else _WORKSPACE_OF_RECURRENT
    out.new_empty(int(out.nbytes * share) + _LEAST_WORKSPACE, dtype=torch.uint8)


# RMSNorm as CUDA's one kernel computes it, where a CPU has five operators.


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The norm over the last dimensions. Of a weight in another dtype there is no kernel (`rms_norm_symint` of
    ATen/native/layer_norm.cpp)."""
    if not isinstance(input, FakeTensor) or (weight is not None and weight.dtype != input.dtype):
        return func(input, normalized_shape, weight, eps)
    rows = input.numel() // max(1, math.prod(normalized_shape))
    return _RmsNorm.apply(input, weight, rows)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and a root for each row, in fp32 where the input has 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out, roots = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32 if _is_half(x) else x.dtype)
        ctx.save_for_backward(x, roots, *([] if weight is None else [weight]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, _, *weights = ctx.saved_tensors
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weights[0]) if weights and ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


# FlexAttention as CUDA computes it, which a CPU does without gradients.


_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def _flexible(attend: Callable[..., Any]) -> Iterator[None]:
    """While open, `flex_attention` attends by a function as on CUDA: the kernel of one that was compiled, or what
    PyTorch runs of one that was not. Compiled functions are not compiled again: no compiler follows fake tensors
    here."""
    with contextlib.ExitStack() as undo:
        if "torch._dynamo" in sys.modules:
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            # It brings most of what this needs, so a model may import it as late as in its forward.
            importlib.import_module(_FLEX_ATTENTION)
        place = sys.modules.get(_FLEX_ATTENTION)
        changes = {
            "flex_attention_hop": attend,
            "_validate_device": lambda *_: None,
            "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        }
        for name, change in changes.items() if place is not None else ():
            undo.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, change)
        yield


def _flex_attention(  # noqa: PLR0917  (the parameters of the operator, which is called by place)
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple[Any, ...], scale: float, options: Any
) -> tuple[Tensor, ...]:
    """The output (B, H, S, E) of queries (B, H, S, D), with the logsumexp (B, H, S) of the scores, and no maxima."""
    compiled = any(frame.f_code.co_name == "compile_wrapper" for frame, _ in traceback.walk_stack(None))
    captured = [cell.cell_contents for cell in getattr(score_mod, "__closure__", None) or ()]
    learned = [each for each in captured if isinstance(each, Tensor) and each.requires_grad]
    return _Flexible.apply((score_mod, block_mask, scale, options), compiled, query, key, value, *learned)


class _Flexible(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  (as autograd calls it)
        ctx: Any, others: tuple[Any, ...], compiled: bool, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor
    ) -> tuple[Tensor, ...]:
        score_mod, block_mask, scale, options = others
        if compiled:  # one kernel, whose output lies as its queries do
            _parts = _of_splits(query, value, block_mask[3])
            alike = query.shape[-1] == value.shape[-1]
            out = torch.empty_like(query) if alike else query.new_empty((*query.shape[:-1], value.shape[-1]))
            found = out, query.new_empty(query.shape[:-1], dtype=torch.float32), query.new_empty(0)
        else:
            from torch._higher_order_ops.flex_attention import sdpa_dense  # noqa: PLC0415  (half a second)

            found = sdpa_dense(query, key, value, score_mod, block_mask, scale, options)
        ctx.others, ctx.compiled = others, compiled
        tensors = (each for each in block_mask if isinstance(each, Tensor))
        ctx.save_for_backward(query, key, value, *found[:2], *learned, *tensors)
        ctx.learned = len(learned)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients_of: Tensor) -> Any:
        query, key, value, out, sums, *rest = ctx.saved_tensors
        learned = [torch.empty_like(each) for each in rest[: ctx.learned]]
        if ctx.compiled:
            delta = torch.empty_like(sums)
            gradients = tuple(torch.empty_like(each) for each in (query, key, value))
            del delta
        else:
            from torch._higher_order_ops.flex_attention import sdpa_dense_backward  # noqa: PLC0415

            score_mod, block_mask, scale, options = ctx.others
            gradients = sdpa_dense_backward(
                *(query, key, value, out, sums, gradients_of[0], None, score_mod, _of_scores),
                *(block_mask, scale, options, (), ()),
            )[:3]
        return None, None, *gradients, *learned


_MULTIPROCESSORS = 132
"""Streaming multiprocessors of an H200."""


def _of_splits(query: Tensor, value: Tensor, blocks: Tensor) -> list[Tensor]:
    """What FlexAttention's kernel for fewer than 128 queries makes beside its output: outputs of parts of the keys, and
    their maxima and sums, in fp32 (PyTorch 2.13, torch/_inductor/kernel/flex/flex_decoding.py, `_use_flex_decoding`,
    `get_split_k`). Its backward makes no gradient of keys for each query head (flex_attention.py)."""
    batch, heads, queries, _ = query.shape
    shared = heads // value.shape[1]
    if queries >= 128 or shared & (shared - 1) or blocks.shape[1] != 1:
        return []
    splits = max(1, 2 * (_MULTIPROCESSORS // max(1, batch * value.shape[1])))
    rows = batch, splits, heads, queries
    return [query.new_empty(shape, dtype=torch.float32) for shape in (rows, rows, (*rows, value.shape[-1]))]


def _of_scores(*arguments: Any) -> list[Any]:
    """The gradient of the scores before `score_mod`, as large as that after it: the last argument."""
    return [arguments[-1], None, None, None, None]
