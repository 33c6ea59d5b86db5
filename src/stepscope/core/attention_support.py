"""What each implementation of attention runs on. Known without torch: a prediction refuses what a run would."""

import importlib.util
import os
from collections.abc import Callable
from typing import Literal

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.workload import ATTENTIONS, Attention, Dtype, Workload

TensorDtype = Literal["fp64", "fp32", "bf16", "fp16"]
"""Of queries, keys and values."""

_TENSOR_DTYPE: dict[Dtype, TensorDtype] = {
    "fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-pure": "bf16",
}  # fmt: skip
_ALL: tuple[TensorDtype, ...] = ("fp64", "fp32", "bf16", "fp16")
_FUSED: tuple[TensorDtype, ...] = ("fp32", "bf16", "fp16")
_HALF: tuple[TensorDtype, ...] = ("bf16", "fp16")

LARGEST_EXPONENT: dict[TensorDtype, int] = {"fp64": 709, "fp32": 88, "bf16": 88, "fp16": 11}
"""Up to which exp is finite, in whole numbers."""

INTERPRETER = "TRITON_INTERPRET"
"""The variable of the environment that has Triton run its kernels in Python, on tensors of the CPU."""


class AttentionCall(msgspec.Struct, frozen=True, kw_only=True):
    """What one call asks of an implementation. Lengths and heads that are not known yet are None."""

    device_type: str
    dtype: TensorDtype
    head_dim: int
    queries: int | None = None
    keys: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    window: int | None = None
    largest_score: float | None = None
    """Of all queries and keys that meet, without its sign; None where the numbers are not known."""
    backward: bool = True
    """Whether gradients are asked for."""


class AttentionSupport(msgspec.Struct, frozen=True, kw_only=True):
    """Where an implementation runs.

    What is no field, all of them take: causal or not; any number of queries and of keys from `shortest` on, the two
    unequal too; keys and values of fewer heads than the queries, where those divide these; non-contiguous tensors; any
    scale, zero and below too.
    """

    device_types: tuple[str, ...] = ("cpu", "cuda")
    trains_on: tuple[str, ...] = ("cpu", "cuda")
    """Where it has a backward."""
    cuda_dtypes: tuple[TensorDtype, ...] = _ALL
    cpu_dtypes: tuple[TensorDtype, ...] = _ALL
    min_head_dim: int = 1
    max_head_dim: int | None = None
    """On a GPU, and in Triton's interpreter; elsewhere nothing depends on it."""
    head_dim_multiple: int = 1
    shortest: int = 1
    """Queries, and keys."""
    window: bool = True
    """Whether it takes a sliding window."""
    triton: bool = False
    """Whether it is written in Triton: on a GPU, or anywhere in Triton's interpreter."""
    subtracts_maximum: bool = True
    """Whether it takes scores of any size: without the maximum of its row subtracted, exp of a score must be finite."""

    def fault(self, call: AttentionCall) -> str | None:
        """Why it does not run so, to follow its name; None where it does."""
        return self._fault_of_place(call) or self._fault_of_sizes(call) or self.fault_of_scores(call)

    def _fault_of_place(self, call: AttentionCall) -> str | None:
        if call.device_type not in self.device_types:
            return f"does not run on {call.device_type}"
        if call.backward and call.device_type not in self.trains_on:
            return f"has no backward on {call.device_type}"
        dtypes = self.cpu_dtypes if call.device_type == "cpu" else self.cuda_dtypes
        if call.dtype not in dtypes:
            return f"does not run in {call.dtype} (it takes {', '.join(dtypes)})"
        return None

    def _fault_of_sizes(self, call: AttentionCall) -> str | None:
        limited = call.device_type != "cpu" or self.triton
        if limited and self.max_head_dim is not None and call.head_dim > self.max_head_dim:
            return f"takes head_dim up to {self.max_head_dim}, not {call.head_dim}"
        if limited and call.head_dim < self.min_head_dim:
            return f"takes head_dim from {self.min_head_dim} on, not {call.head_dim}"
        if limited and call.head_dim % self.head_dim_multiple:
            return f"takes head_dim in multiples of {self.head_dim_multiple}, not {call.head_dim}"
        for length, what in ((call.queries, "queries"), (call.keys, "keys")):
            if length is not None and length < self.shortest:
                return f"takes {what} from {self.shortest} on, not {length}"
        if call.window is not None and not self.window:
            return "takes no sliding window"
        return None

    def fault_of_scores(self, call: AttentionCall) -> str | None:
        """The same of the numbers alone, wherever it runs, and compiled too."""
        if not self.subtracts_maximum and call.largest_score is not None:
            limit = LARGEST_EXPONENT[call.dtype]
            if call.largest_score > limit:
                return f"subtracts no maximum: in {call.dtype} it takes scores up to {limit}"
        return None


_ANYWHERE = AttentionSupport()

SUPPORT: dict[Attention, AttentionSupport] = {
    "reference": _ANYWHERE,
    "sdpa": _ANYWHERE,
    "sdpa-math": _ANYWHERE,
    # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Its loads are of 16 bytes.
    "sdpa-efficient": AttentionSupport(device_types=("cuda",), cuda_dtypes=_FUSED, head_dim_multiple=8),
    "sdpa-flash": AttentionSupport(cuda_dtypes=_HALF, max_head_dim=256, window=False),
    # Beyond 128 only cuDNN from 9.22 on has a backward, and on some GPUs.
    "sdpa-cudnn": AttentionSupport(
        device_types=("cuda",), cuda_dtypes=_HALF, max_head_dim=128, head_dim_multiple=8, shortest=2
    ),
    "unsafe": AttentionSupport(subtracts_maximum=False),
    "chunked": _ANYWHERE,
    "flex": AttentionSupport(
        trains_on=("cuda",), cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, min_head_dim=16, max_head_dim=256
    ),
    "flash-tiled": _ANYWHERE,
    "flash": AttentionSupport(cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, max_head_dim=256, triton=True),
}
"""`auto` is none of them: it stands for the first of PREFERRED that runs."""

PREFERRED: dict[str, tuple[Attention, ...]] = {
    "cuda": ("flash", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa", "reference"),
}
_PREFERRED_ELSEWHERE: tuple[Attention, ...] = ("sdpa", "reference")
"""Not `flash`: Triton's interpreter is for testing."""

_FOR_THE_LAB: tuple[Attention, ...] = ("unsafe",)
"""Not proposed to anybody."""


WRITTEN_OUT: tuple[Attention, ...] = ("reference", "sdpa-math", "unsafe")
"""Those that make all scores, as one matrix product."""

IN_PIECES: tuple[Attention, ...] = ("chunked", "flash-tiled")
"""Those whose number of matrix products depends on the sequence."""

PREDICTED: tuple[Attention, ...] = tuple(name for name in SUPPORT if name not in (*IN_PIECES, "flex"))
"""Those whose memory is predicted; `unsafe` in eager steps alone."""


def tensor_dtype(dtype: Dtype) -> TensorDtype:
    """What the model's attention gets in a workload of this dtype."""
    return _TENSOR_DTYPE[dtype]


def fault_here(name: Attention, device_type: str) -> str | None:
    """What this machine lacks for the implementation, to follow its name; None where it has all."""
    if not SUPPORT[name].triton:
        return None
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if device_type != "cuda" and os.environ.get(INTERPRETER) != "1":
        return f"runs on {device_type} in Triton's interpreter only, with {INTERPRETER}=1 in the environment"
    return None


FaultHere = Callable[[Attention, str], str | None]
"""(name, device type) -> what a machine lacks for it, as `fault_here` says of this one."""


def _no_fault(_name: Attention, _device_type: str) -> None:
    """Of a machine that has all there is: predictions are for another machine than this."""


def find_fault(name: Attention, call: AttentionCall, here: FaultHere = fault_here) -> str | None:
    """Why the implementation does not run so on this machine; None where it does. The name is not `auto`."""
    return SUPPORT[name].fault(call) or here(name, call.device_type)


def resolve_attention(name: Attention, call: AttentionCall, here: FaultHere = fault_here) -> Attention:
    """The implementation that the name stands for: itself, or for `auto` the first preferred one that runs so.

    Raises an InputError that says what the named one lacks, and which ones would work.
    """
    choose(name, ATTENTIONS, "attention")
    if name == "auto":
        preferred: tuple[Attention, ...] = PREFERRED.get(call.device_type, _PREFERRED_ELSEWHERE)
        for each in preferred:
            if find_fault(each, call, here) is None:
                return each
        raise InputError(f"no attention runs on {call.device_type} in {call.dtype}: choose cpu or cuda")
    fault = find_fault(name, call, here)
    if fault is None:
        return name
    others = [n for n in SUPPORT if n not in _FOR_THE_LAB and find_fault(n, call, here) is None]
    remedy = f"choose one of {', '.join(others)}" if others else "none of the others does"
    raise InputError(f"attention {name} {fault}: {remedy}")


def attention_of(workload: Workload, device_type: str, here: FaultHere = fault_here) -> Attention:
    """The implementation that a workload's model runs: the one it names, or what `auto` picks.

    Raises an InputError that says what the named one lacks, and which ones would work.
    """
    call = AttentionCall(
        device_type=device_type, dtype=tensor_dtype(workload.dtype), head_dim=workload.model.head_dim,
        queries=workload.seq_len, keys=workload.seq_len, heads=workload.model.heads, key_heads=workload.model.heads,
        backward=workload.phase != "forward",
    )  # fmt: skip
    return resolve_attention(workload.attention, call, here)


def predicted_attention(workload: Workload, device_type: str) -> Attention:
    """The same for a machine that has everything installed, where the memory that it takes is predicted.

    Raises InputError where it is not: what such a step keeps, or makes on the way, is not on paper.
    """
    name = attention_of(workload, device_type, here=_no_fault)
    predicted = _predicted(workload)
    if name not in predicted:
        step = "a step" if workload.compile == "eager" else "a compiled step"
        raise InputError(
            f"the memory of {step} with attention {name} is not predicted: choose one of {', '.join(predicted)}"
        )
    return name


def is_predicted(workload: Workload) -> bool:
    """Whether the memory of its attention is predicted, should it run."""
    return workload.attention in ("auto", *_predicted(workload))


def _predicted(workload: Workload) -> tuple[Attention, ...]:
    return PREDICTED if workload.compile == "eager" else tuple(n for n in PREDICTED if n not in _FOR_THE_LAB)
