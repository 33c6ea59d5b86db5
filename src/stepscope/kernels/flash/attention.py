"""FlashAttention-2 for PyTorch: operators with fake kernels, autograd and a FLOP formula, and two Functions.

    flash_attention(q, k, v, causal=..., scale=None, window=None, cu_seqlens=None, ...) -> out   (B, H, S, D)
    FlashAttention.apply(q, k, v, is_causal=False) -> out                       (..., S, D)
    FlashAttentionTiled.apply(q, k, v, is_causal=False) -> out                  (..., S, D), in PyTorch: tiled.py

With `causal`, query i sees key j if j <= i (top-left alignment if S and T differ, like `is_causal` of PyTorch's
scaled_dot_product_attention). With a window w it must also hold that i - j < w and, without causal, that j - i < w. A
row that sees no key gives zeros, logsumexp -inf and no gradient. With documents (`kernels/documents.py`) query i sees
only keys of its own. tiles.py says what a softcap, sinks, ALiBi's slopes, a bias and dropout are. Under autocast both
run in autocast's dtype, like PyTorch's attention.

Forward is deterministic. Backward is deterministic unless its kernels sum dQ in memory, in an order that differs
between runs: the kernels for Hopper (16 bits, head_dim 64 to 128 in steps of 8, no slopes, bias or dropout), and a
`fused` backward if chosen. Neither runs under `torch.use_deterministic_algorithms(True)`, unless it is forced.

Where q, k and v are the columns of one product's rows, as of joint projections (parts/projections.py), their gradients
are such columns, too, of rows that the product's backward takes as they are. So it does under torch.compile where one
layer makes the three (`columns_as_rows` in kernels/operators.py).
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.core.errors import InputError
from stepscope.kernels.documents import check_bounds, document_bounds
from stepscope.kernels.flash.tiled import FlashAttentionTiled
from stepscope.kernels.operators import (
    SEEDS,
    SEEDS_END,
    as_autocast,
    define,
    refuse_transforms,
    transformed_by_func,
    watched,
)

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["FlashAttention", "FlashAttentionTiled", "check_inputs", "flash_attention"]

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def _launching() -> tuple["ModuleType", "ModuleType", "ModuleType"]:
    """The modules that need Triton, imported by the first call."""
    try:
        from stepscope.kernels.flash import launch, recorded_launches, tuning_cache  # noqa: PLC0415
    except ImportError as error:
        raise InputError(f"flash attention needs Triton 3.6 or later ({error}): choose another attention") from error
    return launch, recorded_launches, tuning_cache


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with a stride of 1 along the head dimension, which the kernels require; copied if necessary."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _dense_target(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _needed(window: int | None, q: Tensor, k: Tensor, causal: bool) -> int | None:
    """The window, or None if it hides no key. A large window would overflow the 32-bit positions in the kernels."""
    if window is None or window >= (q.shape[2] if causal else max(q.shape[2], k.shape[2])):
        return None
    return window


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    bounds: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    launch, recorded_launches, tuning = _launching()
    if q.device.type == "cpu" and not launch.interpreted():
        raise InputError(
            "attention flash runs on an NVIDIA GPU, and these tensors lie on cpu: move them, choose another attention, "
            "or set TRITON_INTERPRET=1 before Triton is imported, which runs its kernels in Python"
        )
    window = _needed(window, q, k, causal)
    out = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, logsumexp
    target = _dense_target(out)
    precision = tuning.precision_for(q)

    given = _given(bounds=bounds, sinks=sinks, slopes=slopes, bias=bias, seeds=seeds)

    def call(tensors: tuple[Tensor, ...], launcher: Any) -> None:
        found = dict(zip(given, tensors[5:], strict=False))
        launch.launch_forward(
            *tensors[:5],
            causal=causal,
            scale=scale,
            window=window,
            precision=precision,
            parts=tensors[5 + len(given) :],
            bounds=found.pop("bounds", None),
            scoring=launch.Scoring(softcap, dropout=dropout, **found),
            configuration=tuning.forward_configuration(
                q, causal=causal, dropout=seeds is not None, scored=_scored(softcap, slopes, bias)
            ),
            launcher=launcher,
        )

    parts = launch.parts_for(precision, q, k, v)
    tensors = (_dense(q), _dense(k), _dense(v), target, logsumexp, *given.values(), *parts)
    options = (causal, scale, window, softcap, dropout, _layouts(given), tuning.state(q))
    key = _forward_key(q, tensors[1], tensors[2], options)
    recorded_launches.run(key, tensors, call)
    if target is not out:
        out.copy_(target)
    elif (
        recorded_launches.native.extension() is not None
        and not (window or given or softcap)
        and _as_given(tensors, q, k, v)
    ):
        recorded_launches.teach_native(
            q, k, v, out, logsumexp, causal=causal, scale=scale, configuration=tuning.configuration_number(), key=key,
            by_python=functools.partial(_by_operator, causal, scale),
        )  # fmt: skip
    return out, logsumexp


def _scored(softcap: float | None, slopes: Tensor | None, bias: Tensor | None) -> bool:
    """Whether something is done to each score, beside the scale and dropout."""
    return softcap is not None or slopes is not None or bias is not None


def _as_given(tensors: tuple[Tensor, ...], *originals: Tensor) -> bool:
    """Whether the kernels had these tensors themselves, in 16 bits: what is copied first is launched from Python."""
    return originals[0].element_size() == 2 and all(map(operator.is_, tensors, originals))


def _forward_key(q: Tensor, k: Tensor, v: Tensor, options: tuple[object, ...]) -> tuple[object, ...]:
    # These strides determine those of every tensor that is allocated in forward.
    return "forward", q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, *options


def _backward(
    gradient: Tensor, logsumexp_gradient: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    logsumexp: Tensor, causal: bool, scale: float, window: int | None, bounds: Tensor | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, slopes: Tensor | None = None,
    bias: Tensor | None = None, dropout: float = 0.0, seeds: Tensor | None = None,
    of_slopes: bool = False, of_bias: bool = False, width: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """All gradients. With a width, those of q, k and v are the columns of rows of so many numbers, the first result."""
    launch, recorded_launches, tuning = _launching()
    window = _needed(window, q, k, causal)
    first = dq, dk, dv = _empty_gradients(q, k, v, width)
    rows = dq if width else None
    if rows is not None:
        dq, dk, dv = _columns(rows, q, k)
    of_scores = _like_scoring(q, sinks, slopes if of_slopes else None, bias if of_bias else None)
    if q.numel() == 0:
        return *(each.zero_() for each in first), *(each.zero_() for each in of_scores)
    targets = (_dense_target(dq), _dense_target(dk), _dense_target(dv))
    configuration = tuning.backward_configuration(
        q, causal=causal, dropout=seeds is not None, scored=_scored(softcap, slopes, bias)
    )
    dense = _dense(gradient), _dense(q), _dense(k), _dense(v)
    shares = launch.shares_for(q, k)
    statistics = launch.statistics_for(q, configuration)
    limited = window is not None or bounds is not None
    sums_for = functools.partial(
        launch.sums_for, configuration, statistics, causal=causal, limited=limited,
        in_triton=launch.Scoring(slopes=slopes, bias=bias, seeds=seeds).in_triton,
    )  # fmt: skip
    sums = sums_for(*dense[1:], dense[0])
    if shares is not None and sums is not None:
        # The kernel in Gluon has programs of heads of keys alone.
        dense = (*dense[:2], *(each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in dense[2:]))
        sums = sums_for(*dense[1:], dense[0])
    precision = tuning.precision_for(q)
    # A tensor that was saved between the passes may have a new layout. The kernels address logsumexp without strides.
    always = (*dense, _dense(out), logsumexp.contiguous(), *targets, statistics)
    parts = launch.parts_for(precision, q, k, v, gradient)
    distances = launch.distances_for(q, k) if of_slopes or (of_bias and bias is not None and bias.dim() == 2) else None
    of_dk, of_dv = shares or (None, None)
    given = _given(
        of_dk=of_dk, of_dv=of_dv, sums=sums, bounds=bounds, slopes=slopes, bias=bias, seeds=seeds, distances=distances,
        words=launch.words_for(configuration, q, k, seeds, limited=limited),
        of_bias=of_scores[2] if of_bias and bias is not None and bias.dim() == 4 else None,
        logsumexp_gradient=logsumexp_gradient,
    )  # fmt: skip
    tensors = (*always, *given.values(), *parts)

    def call(tensors: tuple[Tensor, ...], launcher: Any) -> None:
        found = dict(zip(given, tensors[len(always) :], strict=False))
        backward = launch.Backward(
            *tensors[: len(always)], causal=causal, scale=scale, window=window, precision=precision,
            tma=configuration.tma, rows_first=configuration.rows_first, parts=tensors[len(always) + len(given) :],
            sums=found.get("sums"), bounds=found.get("bounds"),
            scoring=launch.Scoring(
                softcap, None, found.get("slopes"), found.get("bias"), dropout, found.get("seeds")
            ),
            words=found.get("words"), shares=shares and (found["of_dk"], found["of_dv"]), launcher=launcher,
        )  # fmt: skip
        launch.run_backward(backward, configuration, found.get("logsumexp_gradient"))
        for name in ("distances", "of_bias"):
            if name in found:
                backward.bias(found[name], distances=name == "distances")

    strides = tensors[0].stride(), q.stride(), k.stride(), v.stride(), tensors[4].stride(), _layouts(given)
    key = (
        "backward",
        q.shape,
        k.shape,
        strides,
        q.dtype,
        q.device,
        causal,
        scale,
        window,
        softcap,
        dropout,
        width,
        shares is None,
        tuning.state(q),
    )
    recorded_launches.run(key, tensors, call)
    for gradient_of, target in zip((dq, dk, dv), targets, strict=True):
        if target is not gradient_of:
            gradient_of.copy_(target)
    arguments = (gradient, q, k, v, out, logsumexp, dq, dk, dv)
    plain = not (window or softcap or given.keys() - {"of_dk", "of_dv", "sums"} or sinks is not None)
    if recorded_launches.native.extension() is not None and plain and _as_given(always, *arguments):
        recorded_launches.teach_native(
            q, k, v, out, logsumexp, causal=causal, scale=scale, configuration=tuning.configuration_number(),
            key=_forward_key(q, k, v, (causal, scale, window, None, 0.0, (), tuning.state(q))),
            by_python=functools.partial(_by_operator, causal, scale),
            backward=recorded_launches.Backward(key, gradient, rows, (dq, dk, dv), statistics, shares or (), sums),
        )  # fmt: skip
    if sinks is not None:
        of_scores[0].copy_(_sinks_gradient(statistics, sinks, q))
    if distances is not None:
        by_distance = launch.by_distance(distances, q.shape[2], k.shape[2])
        _fill_of_distances(of_scores, by_distance, q, k, of_bias=of_bias and "of_bias" not in given)
    return *first, *of_scores


def _fill_of_distances(of_scores: tuple[Tensor, ...], by_distance: Tensor, q: Tensor, k: Tensor, of_bias: bool) -> None:
    """Fill the gradients of the slopes, if there are any, and of a bias of distances, from that of each distance."""
    if of_scores[1].numel():
        far = torch.arange(1 - q.shape[2], k.shape[2], device=q.device).abs()
        of_scores[1].copy_(-(by_distance * far).sum(1))
    if of_bias:
        of_scores[2].copy_(by_distance)


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are there, as the kernels take them: the last dimension of a bias dense, the others whole."""
    return {
        name: _dense(each) if name == "bias" else each.contiguous()
        for name, each in tensors.items()
        if each is not None
    }


def _layouts(given: dict[str, Tensor]) -> tuple[object, ...]:
    """What launches depend on beside the addresses of these tensors."""
    return tuple((name, each.dtype, each.shape, each.stride()) for name, each in given.items())


def _like_scoring(q: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Tensors for the gradients of the sinks, the slopes and the bias, without a number where there is none."""
    return tuple(
        q.new_empty(0, dtype=torch.float32) if each is None else each.new_empty(each.shape) for each in tensors
    )


def _sinks_gradient(statistics: Tensor, sinks: Tensor, q: Tensor) -> Tensor:
    """Minus the sum, over a head's rows, of the sink's weight times delta, of a backward pass's row statistics."""
    logsumexp_2, delta = statistics.view(2, q.shape[0], q.shape[1], -1)
    weights = torch.exp2(sinks[:, None] * math.log2(math.e) - logsumexp_2)
    return -(weights * delta).sum(dim=(0, 2))


def _like_gradients(
    _: Tensor, __: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool,
    scale: float, window: int | None, bounds: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None, bias: Tensor | None = None, dropout: float = 0.0,
    seeds: Tensor | None = None, of_slopes: bool = False, of_bias: bool = False, width: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Empty gradients of a backward pass: of q, k, v, the sinks, the slopes and the bias."""
    of_scores = _like_scoring(q, sinks, slopes if of_slopes else None, bias if of_bias else None)
    return *_empty_gradients(q, k, v, width), *of_scores


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v; with a width, as the columns of the first result's rows."""
    if width:
        return q.new_empty(q.shape[0], q.shape[2], width), q.new_empty(0), q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _row_width(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The numbers of the rows whose columns q, k and v are, and nobody else; 0 where they are not.

    By strides alone, which a compiler knows. Columns of several such products have gradients in rows of their own,
    which hold no more than the three.
    """
    head_dim, width = q.shape[3], (q.shape[1] + 2 * k.shape[1]) * q.shape[3]
    alike = q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (head_dim, width, 1)
    return width if alike and q.shape[2] == k.shape[2] else 0


def _columns(rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of rows (B, S, width) as heads like q, those after them as heads like k, and once more."""
    heads = rows.view(q.shape[0], q.shape[2], -1, q.shape[3]).transpose(1, 2)
    of_q, of_k, of_v = heads.split([q.shape[1], k.shape[1], k.shape[1]], dim=1)
    return of_q, of_k, of_v


def _side_by_side(backward: Callable[..., Sequence[Tensor]], *inputs: Any) -> Sequence[Tensor]:
    """The results of a backward pass, of which those of q, k and v lie side by side where these do.

    The operator returns their rows, since a compiler takes its results for tensors apart.
    """
    q, k, v = inputs[2:5]
    width = _row_width(q, k, v)
    if not width:
        return backward(*inputs)
    rows, _, _, *of_scores = backward(*inputs, width=width)
    return *_columns(rows, q, k), *of_scores


def _by_operator(causal: bool, scale: float, gradient: Tensor | None, *saved: Tensor) -> Sequence[Tensor]:
    """The gradients of a plain call by the operator, of the output's gradient and of what forward saved."""
    run = torch.ops.stepscope.flash_attention_backward
    return _side_by_side(run, gradient, None, *saved, causal, scale, None, None)


_SCORING = (
    "Tensor? bounds=None, float? softcap=None, Tensor? sinks=None, Tensor? slopes=None, Tensor? bias=None,"
    " float dropout=0.0, Tensor? seeds=None"
)
define(
    f"flash_attention_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale, int? window, {_SCORING})"
    " -> (Tensor, Tensor)",
    _forward,
    lambda q, *_: (torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)),
)
define(
    "flash_attention_backward(Tensor gradient, Tensor? logsumexp_gradient, Tensor q, Tensor k, Tensor v, Tensor out,"
    f" Tensor logsumexp, bool causal, float scale, int? window, {_SCORING}, bool of_slopes=False, bool of_bias=False,"
    " SymInt width=0)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _like_gradients,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options, bounds, ctx.softcap, sinks, slopes, bias, ctx.dropout, seeds = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, sinks, slopes, bias, seeds)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, gradient: Tensor | None, logsumexp_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        if logsumexp_gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        gradient = torch.zeros_like(ctx.saved_tensors[3])
    run = functools.partial(_side_by_side, torch.ops.stepscope.flash_attention_backward)
    return _all_gradients(ctx, run, gradient, logsumexp_gradient)


def _all_gradients(ctx: Any, backward: Callable[..., Sequence[Tensor]], *upstream: Tensor | None) -> Any:
    """The gradients of all inputs of forward, by the operator of backward."""
    *saved, bounds, sinks, slopes, bias, seeds = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad[8:], False, False, False)[:3]  # without what a call left out at its end
    *gradients, of_sinks, of_slopes, of_bias = backward(
        *upstream, *saved, *ctx.options, bounds, ctx.softcap, sinks, slopes, bias, ctx.dropout, seeds, *wanted[1:]
    )
    of_scores = (each if asked else None for asked, each in zip(wanted, (of_sinks, of_slopes, of_bias), strict=True))
    return *gradients, None, None, None, None, None, *of_scores, None, None


torch.library.register_autograd("stepscope::flash_attention_forward", _autograd, setup_context=_setup_context)


def _refuse(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    raise NotImplementedError("attention flash has no second derivative: choose another attention")


torch.library.register_autograd("stepscope::flash_attention_backward", _refuse)


@register_flop_formula(torch.ops.stepscope.flash_attention_forward)
def _forward_flops(q_shape: Any, k_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of forward: two products of 2 B H S T D, the full square, as PyTorch counts its own attention. What causal,
    a window or documents hide is counted too: a count sees shapes."""
    batches, heads, queries, head_dim = q_shape
    return 4 * batches * heads * queries * k_shape[2] * head_dim


@register_flop_formula(torch.ops.stepscope.flash_attention_backward)
def _backward_flops(_: Any, __: Any, q_shape: Any, k_shape: Any, *___: Any, out_shape: Any = None, **____: Any) -> int:
    """FLOPs of backward: five products including the recomputed scores, as PyTorch counts its own attention."""
    batches, heads, queries, head_dim = q_shape
    return 10 * batches * heads * queries * k_shape[2] * head_dim


def check_inputs(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> None:
    """Raise an InputError of one line for inputs that the kernels do not take, by shapes, dtypes and devices only."""
    q_shape, k_shape = q.shape, k.shape  # read once: each reading makes a new object
    if len(q_shape) != 4 or len(k_shape) != 4 or v.shape != k_shape:
        raise InputError(
            f"attention flash takes q (B, H, S, D) and k, v (B, H', T, D), "
            f"not {tuple(q_shape)}, {tuple(k_shape)}, {tuple(v.shape)}"
        )
    batches, heads, queries, head_dim = q_shape
    kv_batches, kv_heads, keys, kv_head_dim = k_shape
    if batches != kv_batches or head_dim != kv_head_dim or kv_heads == 0 or heads % kv_heads:
        raise InputError(
            f"attention flash: q {tuple(q_shape)} and k {tuple(k_shape)} must agree in batch and head_dim, "
            "and the heads of k must divide those of q"
        )
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise InputError(f"attention flash takes head_dim 1 to {MAX_HEAD_DIM}, not {head_dim}")
    if queries == 0 or keys == 0:
        raise InputError(
            f"attention flash: an empty sequence (queries {queries}, keys {keys}); give one position or more"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise InputError(f"attention flash takes fp32, fp16 or bf16, one for all, not {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise InputError(
            f"attention flash: q, k and v lie on {q.device}, {k.device} and {v.device}; move them together"
        )
    if window is not None and (isinstance(window, float) or window < 1):
        raise InputError(f"attention flash takes a window of 1 or more whole positions, not {window}")


def check_scoring(
    q: Tensor, k: Tensor, softcap: float | None, sinks: Tensor | None, slopes: Tensor | None, bias: Tensor | None
) -> None:
    """Raise an InputError of one line for what cannot be done to the scores of these tensors."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise InputError(f"attention flash takes a softcap above zero, not {softcap:g}: leave it out for none")
    for name, tensor in (("sinks", sinks), ("slopes", slopes)):
        if tensor is None:
            continue
        if tensor.shape != (q.shape[1],) or tensor.dtype != torch.float32 or tensor.device != q.device:
            raise InputError(
                f"attention flash takes {name} ({q.shape[1]},) in fp32 on {q.device}, one for each head of queries, "
                f"not {tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            )
    if bias is None:
        return
    batches, heads, queries, keys = *q.shape[:3], k.shape[2]
    kinds = (
        (heads, queries + keys - 1),
        (heads, queries, keys),
        (1, heads, queries, keys),
        (batches, *q.shape[1:3], keys),
    )
    if bias.shape not in kinds:
        raise InputError(
            "attention flash takes a bias (heads, queries + keys - 1), by distance, or (heads, queries, keys), also of "
            f"each batch: here {kinds[0]} or {kinds[1]}, not {tuple(bias.shape)}; expand it"
        )
    if bias.dtype not in (torch.float32, q.dtype) or bias.device != q.device:
        raise InputError(
            f"attention flash takes a bias in fp32, or in the queries' dtype, on {q.device}, "
            f"not {str(bias.dtype).removeprefix('torch.')} on {bias.device}"
        )


def checked_seeds(q: Tensor, dropout: float, seeds: Tensor | None) -> Tensor | None:
    """The seeds of a call with this dropout, drawn if there are none; raises an InputError of one line."""
    if not 0 <= dropout < 1:
        raise InputError(f"attention flash takes a dropout of 0 or more and below 1, not {dropout:g}")
    if seeds is not None and (seeds.shape != (SEEDS,) or seeds.dtype != torch.int64 or seeds.device != q.device):
        raise InputError(
            f"attention flash takes seeds (2,) in int64 on {q.device}, not {tuple(seeds.shape)} in "
            f"{str(seeds.dtype).removeprefix('torch.')} on {seeds.device}"
        )
    if not dropout:
        return None
    return torch.randint(SEEDS_END, (SEEDS,), device=q.device) if seeds is None else seeds


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    cu_seqlens: Tensor | None = None, bounds: Tensor | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None, bias: Tensor | None = None, dropout: float = 0.0,
    seeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v, with scale 1 / sqrt(D) by default. The module says what causal and window hide.

    cu_seqlens: the borders of documents. bounds: what `document_bounds` made of them, once for several calls.
    softcap: scores s become softcap tanh(s / softcap), as in Gemma 2 (arXiv:2408.00118). sinks: (H,) fp32, a score that
    each row of a head has besides, whose value is zero. slopes: (H,) fp32, of ALiBi: scores get -slope |i - j|. bias:
    added to scores, in fp32 or the dtype of q: (H, S + T - 1) by distance, whose number j - i + S - 1 is of query i and
    key j, or (H, S, T), or (B, H, S, T); where it is -inf, a query does not see the key. All three may have gradients.
    dropout: the probability that a weight becomes zero, to the nearest 256th but for 0 and 1; the others are divided by
    the true probability of being kept, so that their mean is exact. seeds: (2,) int64 on the device, which
    choose those weights, the same again for the same seeds; by default drawn from PyTorch's generator, anew in each
    replay of a CUDA graph.
    """
    q, k, v = as_autocast(q, k, v)
    check_inputs(q, k, v, window)
    if cu_seqlens is not None:
        bounds = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
    if bounds is not None:
        check_bounds(bounds, q, k)
    if softcap is not None or sinks is not None or slopes is not None or bias is not None:
        check_scoring(q, k, softcap, sinks, slopes, bias)
        bias = bias[None] if bias is not None and bias.dim() == 3 else bias
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if dropout or seeds is not None:
        seeds = checked_seeds(q, dropout, seeds)
    scoring = softcap, sinks, slopes, bias, dropout, seeds
    if watched(q, k, v):
        if transformed_by_func():
            return _TransformedForward.apply(q, k, v, causal, scale, window, bounds, *scoring)[0]
        return torch.ops.stepscope.flash_attention_forward(q, k, v, causal, scale, window, bounds, *scoring)[0]
    if sinks is not None or slopes is not None or bias is not None:
        # They may need gradients of their own, which `_Direct` does not return.
        return torch.ops.stepscope.flash_attention_forward(q, k, v, causal, scale, window, bounds, *scoring)[0]
    if window is None and bounds is None and softcap is None and seeds is None:
        _, recorded_launches, tuning = _launching()
        out = recorded_launches.call_native(q, k, v, causal, scale, tuning.configuration_number())
        if out is not None:
            return out
    return _Direct.apply(q, k, v, (causal, scale, window, bounds, *scoring))


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float,
    window: int | None, *scoring: Any,
) -> Sequence[Tensor]:  # fmt: skip
    # With gradients enabled, this backward is itself differentiated. The operator then raises, since it cannot be.
    apart = torch.is_grad_enabled() or watched(q, k, v) or type(gradient) is not Tensor
    run = torch.ops.stepscope.flash_attention_backward if apart else _backward
    return _side_by_side(run, gradient, None, q, k, v, out, logsumexp, causal, scale, window, *scoring)[:3]


class _Direct(torch.autograd.Function):
    """Attention without the operator's layers. The options are one argument, since each argument costs time in both
    passes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[Any, ...],
    ) -> Tensor:
        out, logsumexp = _forward(q, k, v, *options)
        ctx.save_for_backward(q, k, v, out, logsumexp, options[-1])
        ctx.options = options[:-1]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, seeds = ctx.saved_tensors
        return *_gradients(gradients[0], *saved, *ctx.options, seeds), None


class FlashAttention(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False)` on (..., seq, head_dim); saves q, k, v, out and the logsumexp (..., seq).

    torch.func transforms `flash_attention` alone, since this class sets its context in its forward.
    """

    @classmethod
    def apply(cls, *args: Any, **options: Any) -> Any:
        """Run forward and record backward, as `Function.apply` does; raises inside a transform of torch.func."""
        refuse_transforms("FlashAttention.apply", "flash_attention")
        return super().apply(*args, **options)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        q, k, v = as_autocast(q, k, v)  # autograd casts the gradients back
        q4, k4, v4 = _four_dimensional(q), _four_dimensional(k), _four_dimensional(v)
        # Keys may have fewer heads than queries. Only with 4 dimensions is it known which one is the heads.
        if not q.dim() == k.dim() == v.dim() or (q.dim() != 4 and not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]):
            raise InputError(
                "attention flash takes q, k and v (..., seq, head_dim) of the same leading dimensions, "
                f"not {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
            )
        check_inputs(q4, k4, v4)
        ctx.is_causal = is_causal
        ctx.scale = 1 / math.sqrt(q.shape[-1])
        run = torch.ops.stepscope.flash_attention_forward if watched(q, k, v) else _forward
        out, logsumexp = run(q4, k4, v4, is_causal, ctx.scale, None)
        out = out.reshape(q.shape)
        ctx.save_for_backward(q, k, v, out, logsumexp.reshape(q.shape[:-1]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        q4 = _four_dimensional(q)
        dq, dk, dv = _gradients(
            gradients[0].reshape(q4.shape), q4, _four_dimensional(k), _four_dimensional(v), out.reshape(q4.shape),
            logsumexp.reshape(q4.shape[:3]), ctx.is_causal, ctx.scale, None,
        )  # fmt: skip
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None


def _four_dimensional(tensor: Tensor) -> Tensor:
    """(..., S, D) as (B, H, S, D): H is the last leading dimension, and the others are the batch."""
    if tensor.dim() < 2:
        raise InputError(f"attention flash takes (..., seq, head_dim), not {tuple(tensor.shape)}")
    if tensor.dim() == 4:
        return tensor
    *batches, rows, columns = tensor.shape
    if not batches:
        return tensor[None, None]
    return tensor.reshape(math.prod(batches[:-1]), batches[-1], rows, columns)


# FlashAttention under torch.func: `grad`, `vjp`, `vmap` and combinations (`jacrev`, per-sample gradients).
#
# These transform a Function only if it sets its context outside its forward. They transform an operator only if it has
# a rule for `vmap`, which here folds the mapped dimension into the batch. Forward mode and second derivatives have no
# rule and are refused with one line. Calls without a transform do not come here.


_SUPPORTED = "attention flash supports torch.func's grad, vjp, vmap and jacrev"


class _TransformedForward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, *positions: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.stepscope.flash_attention_forward(q, k, v, causal, scale, window, *positions)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])  # the logsumexp is not returned to the caller

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gradients(ctx, _TransformedBackward.apply, gradients[0])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InputError(f"{_SUPPORTED}, not forward mode (jvp, jacfwd, hessian): take attention reference")


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return torch.ops.stepscope.flash_attention_backward(gradient, None, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise InputError(f"{_SUPPORTED}, but has no second derivative: take attention reference")


def _of_many(run: Callable[..., Sequence[Tensor]], tensors: int) -> Callable[..., Any]:
    """The rule for `vmap` of an operator with so many tensors, three options, and the bounds of documents and what is
    done to scores, which a call may leave out."""

    def fold(size: int, dim: int | None, tensor: Tensor | None, batch: int = 0) -> Tensor | None:
        # The mapped dimension becomes part of the batch, which stands at this place.
        if tensor is None:
            return None
        whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        return whole.movedim(0, batch).flatten(batch, batch + 1)

    def run_many(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
        size, options = info.batch_size, inputs[tensors : tensors + 3]
        folded = [fold(size, dim, tensor) for dim, tensor in zip(in_dims[:tensors], inputs[:tensors], strict=True)]
        bounds = [
            fold(size, dim, bounds, batch=1)
            for dim, bounds in zip(in_dims[tensors + 3 :][:1], inputs[tensors + 3 :][:1], strict=True)
        ]
        scoring = inputs[tensors + 4 :]
        if any(isinstance(each, Tensor) for each in scoring):
            raise InputError(
                f"{_SUPPORTED}, but vmap takes no sinks, slopes, bias or dropout: take attention reference"
            )
        outputs = run(*folded, *options, *bounds, *scoring)
        # The last results of backward are gradients of sinks, slopes and a bias, of which there are none here.
        whole = tuple(out.unflatten(0, (size, -1)) if out.dim() > 1 else out.expand(size, 0) for out in outputs)
        return whole, (0,) * len(outputs)

    return run_many


torch.library.register_vmap(
    "stepscope::flash_attention_forward", _of_many(torch.ops.stepscope.flash_attention_forward, 3)
)
torch.library.register_vmap(
    "stepscope::flash_attention_backward", _of_many(torch.ops.stepscope.flash_attention_backward, 7)
)
