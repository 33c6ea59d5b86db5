"""One record for each attention, with what the rooms need to know about it. This file does not need torch.

To add an attention, write its function in a file of `training/attention/`, its record in `ATTENTIONS`, and a test case.
"""

from typing import Literal

import msgspec

from stepscope.core.errors import choose

Attention = str
"""The name of an attention: one of `ATTENTIONS`, or `auto`, which stands for the first of `PREFERRED` that runs."""

AUTO: Attention = "auto"

TensorDtype = Literal["fp64", "fp32", "bf16", "fp16"]
"""The dtype of queries, keys and values."""

Compiler = Literal["triton", "inductor"]

Scores = Literal["whole", "pieces", "fused"]
"""How the scores are made. whole: by one matrix product. pieces: by products whose number depends on the sequence
length. fused: inside a kernel that never stores them."""

Memory = Literal["scores", "nothing", "tiled", "math", "efficient", "flash", "cudnn", "chosen", "fused", "hopper"]
"""The formulas for what autograd saves and what a step needs.

scores: the exponentials and their quotient. nothing: everything is recomputed. tiled: the output and the logsumexp,
with keys and values repeated for each head. math, efficient, flash, cudnn: as PyTorch's backend of that name. chosen:
as the backend that PyTorch chooses. fused: the output and the logsumexp. hopper: as fused, and the buffers of the
kernels for Hopper."""

_ALL: tuple[TensorDtype, ...] = ("fp64", "fp32", "bf16", "fp16")
_FUSED: tuple[TensorDtype, ...] = ("fp32", "bf16", "fp16")
_HALF: tuple[TensorDtype, ...] = ("bf16", "fp16")

LARGEST_EXPONENT: dict[TensorDtype, int] = {"fp64": 709, "fp32": 88, "bf16": 88, "fp16": 11}
"""The largest integer whose exp is finite, by dtype."""


class AttentionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a call that decide which implementations can run it. Unknown lengths and heads are None."""

    device_type: str
    dtype: TensorDtype
    head_dim: int
    queries: int | None = None
    keys: int | None = None
    heads: int | None = None
    key_heads: int | None = None
    window: int | None = None
    documents: bool = False
    """Whether the rows hold several documents, and a query sees only keys of its own."""
    largest_score: float | None = None
    """The largest absolute score of a query and a key that it sees; None if the numbers are unknown."""
    backward: bool = True
    """Whether gradients are needed."""


class AttentionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an attention: where it runs, what it keeps, how large its error may be, and how a trace shows it.

    Every attention takes the following, so no field says it: causal or not; any numbers of queries and keys from
    `shortest` on, also unequal ones; fewer heads of keys and values than of queries, if their number divides the
    queries'; non-contiguous tensors; any scale, also zero or negative.
    """

    function: str
    """The implementation's location, as `module:name`. The first call imports it."""

    # ---- where it runs

    device_types: tuple[str, ...] = ("cpu", "cuda")
    trains_on: tuple[str, ...] = ("cpu", "cuda")
    """The device types on which it has a backward pass."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability that a GPU needs."""
    cuda_dtypes: tuple[TensorDtype, ...] = _ALL
    cpu_dtypes: tuple[TensorDtype, ...] = _ALL
    min_head_dim: int = 1
    max_head_dim: int | None = None
    """The largest head_dim on a GPU and in Triton's interpreter. Elsewhere there is no limit."""
    head_dim_multiple: int = 1
    shortest: int = 1
    """The smallest number of queries, and of keys, that it takes."""
    window: bool = True
    """Whether it takes a sliding window."""
    documents: bool = False
    """Whether it takes documents, as their bounds (kernels/documents.py): a keyword argument `bounds`."""
    subtracts_maximum: bool = True
    """Whether it subtracts the row's maximum, which allows scores of any size. If not, their exp must be finite."""
    compiler: Compiler | None = None
    """The compiler of its kernels, which runs for each new shape. triton: it runs on a GPU, or anywhere in Triton's
    interpreter. inductor: it calls torch.compile itself."""
    kernel_by_length: bool = False
    """Whether long sequences run a different kernel."""
    proposed: bool = True
    """Whether it is proposed to a user. An attention that is only for the lab is not."""

    # ---- what it makes and keeps

    scores: Scores = "fused"
    repeats_keys: bool = False
    """Whether a fused attention copies shared keys and values for each head of queries."""
    memory: Memory | None = None
    """The formula for what it saves and needs; None where there is none."""
    predicted: Literal["always", "eager", "never"] = "never"
    """Which steps with it have a predicted memory: all, only eager ones, or none."""

    kept_operators: tuple[str, ...] = ()
    """Fused operators whose outputs checkpointing by operator keeps (core/checkpointing.py, `KEEPING`), as
    `namespace::name`. They do not run again."""

    in_fp32: bool = False
    """Whether even 16-bit tensors are multiplied in fp32."""

    # ---- how large its error may be

    rounds_scores: bool = False
    """Whether it rounds scores and weights to the tensors' dtype. In 16 bits its error may be twice the others'."""
    rounds_weights: str = ""
    """What is known of a fault: its backward rounds the weights to 16 bits before it makes the scores' gradient from
    them. Empty if it has no such fault."""

    # ---- how a trace shows it

    signs: str = ""
    """A pattern of names of host operators and of kernels. A replayed CUDA graph has only kernels. Empty if the
    attention is written out in operators that others use too."""
    signs_when_compiled: bool = False
    """Whether compiled code calls the same operators."""
    calls_softmax: bool = False
    """Whether an attention without signs calls PyTorch's softmax; others without signs call exp."""
    chooses_among: tuple[Attention, ...] = ()
    """The attentions that PyTorch may run in its place."""

    @property
    def triton(self) -> bool:
        """Whether it is written in Triton."""
        return self.compiler == "triton"

    def fault(self, call: AttentionCall) -> str | None:
        """The reason why it cannot run this call, in words that follow its name; None if it can."""
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
        for asked, taken, what in (
            (call.window is not None, self.window, "sliding window"),
            (call.documents, self.documents, "documents in one row"),
        ):
            if asked and not taken:
                return f"takes no {what}"
        return None

    def fault_of_scores(self, call: AttentionCall) -> str | None:
        """The reason why it does not take these numbers on any device, compiled or not; None if it does."""
        if not self.subtracts_maximum and call.largest_score is not None:
            limit = LARGEST_EXPONENT[call.dtype]
            if call.largest_score > limit:
                return f"subtracts no maximum: in {call.dtype} it takes scores up to {limit}"
        return None


_WRITTEN_OUT = "stepscope.training.attention.written_out"
_PYTORCH = "stepscope.training.attention.pytorch"

ATTENTIONS: dict[Attention, AttentionRecord] = {
    # Written out: scores, mask, softmax with the maximum subtracted, weighted sum.
    "reference": AttentionRecord(
        function=f"{_WRITTEN_OUT}:reference", scores="whole", memory="scores", predicted="always", rounds_scores=True,
        documents=True,
    ),
    # PyTorch's scaled_dot_product_attention. PyTorch chooses the backend, and the run names it.
    "sdpa": AttentionRecord(
        function=f"{_PYTORCH}:sdpa", memory="chosen", predicted="always", documents=True,
        chooses_among=("sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn"),
    ),
    # The next four run the backend of that name, or raise an error.
    "sdpa-math": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_math", scores="whole", memory="math", predicted="always", in_fp32=True,
        documents=True,
        signs=r"^aten::_scaled_dot_product_attention_math",
    ),
    "sdpa-efficient": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_efficient", memory="efficient", predicted="always", repeats_keys=True,
        documents=True,
        kept_operators=("aten::_scaled_dot_product_efficient_attention",),
        # It loads 16 bytes at a time (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
        device_types=("cuda",), cuda_dtypes=_FUSED, head_dim_multiple=8,
        rounds_weights="known of PyTorch's memory-efficient kernel, seen with PyTorch 2.11: its backward keeps the "
        "weights in 16 bits and makes dS = P (dP - D) of the rounded ones, one rounding more than FlashAttention "
        "(kernel_backward.h)",
        signs=r"_scaled_dot_product_efficient_attention|^fmha_cutlass[FB]_|PyTorchMemEffAttention",
        signs_when_compiled=True,
    ),
    "sdpa-flash": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_flash", memory="flash", predicted="always",
        kept_operators=(
            "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
        cuda_dtypes=_HALF, max_head_dim=256, window=False,
        signs=r"_scaled_dot_product_flash_attention|pytorch_flash::flash_|FlashAttnFwdSm\d", signs_when_compiled=True,
    ),
    "sdpa-cudnn": AttentionRecord(
        function=f"{_PYTORCH}:sdpa_cudnn", memory="cudnn", predicted="always",
        kept_operators=("aten::_scaled_dot_product_cudnn_attention",),
        # Beyond 128, only cuDNN 9.22 or later has a backward, and only on some GPUs.
        device_types=("cuda",), cuda_dtypes=_HALF, max_head_dim=128, head_dim_multiple=8, shortest=2,
        documents=True,
        signs=r"_scaled_dot_product_cudnn_attention|^cudnn\w*_sdpa_", signs_when_compiled=True,
    ),
    # Written out, without the maximum that keeps exp from overflowing.
    "unsafe": AttentionRecord(
        function=f"{_WRITTEN_OUT}:unsafe", scores="whole", memory="scores", predicted="eager", rounds_scores=True,
        subtracts_maximum=False, proposed=False,
    ),
    # Written out for a chunk of queries at a time.
    "chunked": AttentionRecord(
        function=f"{_WRITTEN_OUT}:chunked", scores="pieces", memory="nothing", rounds_scores=True, calls_softmax=True,
    ),
    # PyTorch's FlexAttention, compiled.
    "flex": AttentionRecord(
        function="stepscope.training.attention.flex:flex", memory="fused", compiler="inductor",
        trains_on=("cuda",), cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, min_head_dim=16, max_head_dim=256,
        documents=True,
        signs=r"flex_attention|FlexAttention",
    ),
    # FlashAttention-2 tile by tile in PyTorch.
    "flash-tiled": AttentionRecord(
        function="stepscope.kernels.flash.tiled:flash_tiled", scores="pieces", memory="tiled",
        signs=r"FlashAttentionTiled",
    ),
    # FlashAttention-2 in Triton. Ampere is the first to have bf16 and copies from memory during arithmetic.
    "flash": AttentionRecord(
        function="stepscope.kernels.flash.attention:flash_attention", memory="hopper", predicted="always",
        kept_operators=("stepscope::flash_attention_forward",), compiler="triton", kernel_by_length=True,
        capability=(8, 0), cuda_dtypes=_FUSED, cpu_dtypes=_FUSED, max_head_dim=256,
        documents=True,
        signs=r"^stepscope::flash_attention_forward|^flash_forward", signs_when_compiled=True,
    ),
}  # fmt: skip

PREFERRED: dict[str, tuple[Attention, ...]] = {
    "cuda": ("flash", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa", "reference"),
}
PREFERRED_ELSEWHERE: tuple[Attention, ...] = ("sdpa", "reference")
"""Attentions that `auto` tries in this order without CUDA. `flash` is left out: Triton's interpreter is for testing."""


def check_attention(name: Attention) -> None:
    """Raise an InputError if there is no implementation of this name, as a file may say."""
    choose(name, tuple(ATTENTIONS), "attention")


def scores_of(name: Attention) -> Scores:
    """How an attention makes its scores; `auto` picks a fused one."""
    return ATTENTIONS[name].scores if name != AUTO else "fused"


def is_kept(name: Attention) -> bool:
    """Whether an attention is an operator whose output checkpointing can keep; `auto` picks one that is."""
    if name == AUTO:
        return True
    record = ATTENTIONS[name]
    return bool(record.kept_operators) or any(map(is_kept, record.chooses_among))


def attention_names() -> tuple[Attention, ...]:
    """The names that a workload may ask for, with `auto` last."""
    return (*ATTENTIONS, AUTO)
