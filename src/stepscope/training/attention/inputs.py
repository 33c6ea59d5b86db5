"""A call of attention by name, after a check of its tensors; an error names the implementations that would work."""

from typing import Any

import torch
from torch import Tensor

from stepscope.core.attention_support import resolve_attention
from stepscope.core.errors import InputError
from stepscope.core.parts import Attention, AttentionCall, TensorDtype
from stepscope.kernels.documents import check_bounds, document_bounds
from stepscope.training.attention import fault_of_device, implementation

DTYPES: dict[torch.dtype, TensorDtype] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
TORCH_DTYPES: dict[TensorDtype, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


def attend(
    name: Attention, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float | None = None, window: int | None = None, cu_seqlens: Tensor | None = None,
    finite: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the named implementation. Raises InputError for what it does not take, and, where `finite` is asked
    for, for NaN and infinity. cu_seqlens: the borders of documents (kernels/documents.py).
    """
    chosen = check_inputs(name, q, k, v, window=window, documents=cu_seqlens is not None, finite=finite)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    if cu_seqlens is not None:
        options["bounds"] = document_bounds(cu_seqlens, q.shape[0], q.shape[2])
        check_bounds(options["bounds"], q, k)
    return implementation(chosen)(q, k, v, **options)


def check_inputs(
    name: Attention, q: Tensor, k: Tensor, v: Tensor,
    *, window: int | None = None, documents: bool = False, finite: bool = False,
) -> Attention:  # fmt: skip
    """The implementation that runs: `name`, or what `auto` picks. Raises InputError for what it does not take.

    finite: also look for NaN and infinity. On a GPU this waits for everything launched, so a step must not ask for it.
    """
    _check_shapes(name, q, k, v)
    if window is not None and window < 1:
        raise InputError(f"attention {name}: window is {window}: a query sees itself at least, with window 1")
    call = attention_call(q, k, v, window=window, documents=documents)
    chosen = resolve_attention(name, call, here=fault_of_device)
    if finite:
        for what, tensor in (("queries", q), ("keys", k), ("values", v)):
            _check_finite(chosen, what, tensor)
    return chosen


def attention_call(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, documents: bool = False
) -> AttentionCall:
    """The AttentionCall that these tensors make. Raises InputError for a dtype that no implementation takes."""
    if q.dtype not in DTYPES:
        raise InputError(
            f"attention is not made in {str(q.dtype).removeprefix('torch.')}: give one of {', '.join(TORCH_DTYPES)}"
        )
    return AttentionCall(
        device_type=q.device.type,
        dtype=DTYPES[q.dtype],
        head_dim=q.shape[-1],
        queries=q.shape[-2],
        keys=k.shape[-2],
        heads=q.shape[1],
        key_heads=k.shape[1],
        window=window,
        documents=documents,
        backward=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)),
    )


def _check_shapes(name: Attention, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError unless the shapes of q, k and v make up a call, for whatever implementation."""
    shapes = f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)}"
    for tensor in (q, k, v):
        if tensor.ndim != 4:
            raise InputError(f"attention {name} takes (batch, heads, seq, head_dim), not {_shape(tensor)} ({shapes})")
        if 0 in tensor.shape:
            raise InputError(f"attention {name} has nothing to do on an empty tensor ({shapes}): give one with a row")
    if k.shape != v.shape:
        raise InputError(f"attention {name} takes keys and values of one shape ({shapes})")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise InputError(f"attention {name} takes queries and keys of one batch and one head_dim ({shapes})")
    if q.shape[1] % k.shape[1]:
        raise InputError(
            f"attention {name}: {k.shape[1]} heads of keys do not divide {q.shape[1]} heads of queries ({shapes})"
        )
    if len({tensor.dtype for tensor in (q, k, v)}) > 1 or len({tensor.device for tensor in (q, k, v)}) > 1:
        kinds = ", ".join(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (q, k, v))
        raise InputError(f"attention {name} takes q, k and v of one dtype on one device, not {kinds}")


def _check_finite(name: Attention, what: str, tensor: Tensor) -> None:
    finite = tensor.isfinite()
    if finite.all():  # counting takes a copy in 64 bits
        return
    word = "NaN" if tensor.isnan().any() else "infinity"
    raise InputError(
        f"attention {name}: {int((~finite).sum())} of the {tensor.numel()} numbers of the {what} are not finite, as "
        f"{word}: every output that sees one is NaN"
    )


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
