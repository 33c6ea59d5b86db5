"""Measured calls of attention, and the verdict of the gate on an implementation."""

import math
from functools import cached_property
from typing import Literal, get_args

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.errors import GateFailure
from stepscope.core.files import decode_document
from stepscope.core.formulas import SOFTMAX_FLOPS, AttentionSizes, attention_flops
from stepscope.core.parts import ATTENTIONS, Attention, AttentionCall, TensorDtype, choose_name
from stepscope.core.samples import Samples
from stepscope.core.workloads import Dtype, TextbookWorkload

# The gate's report on an implementation of attention: an error for each tensor, a verdict for each case.


Layout = Literal["contiguous", "transposed", "strided", "one head", "one batch", "one number"]
"""How a tensor (batch, heads, seq, head_dim) lies in memory. transposed: a view of (batch, seq, heads, head_dim), as in
a model. strided: transposed, and every second number of each row. one head, one batch, one number: a single head, batch
or number 1 that is expanded, with strides of zero, as the gradient that a sum hands back."""

Numbers = Literal["normal", "offset", "rising", "falling"]
"""What the scores are. normal: of the size 1. offset: those of each query lie around a number of its own, hundreds
above or below zero. rising, falling: half a unit from one key to the next, so that a query's largest is its last, or
its first."""

Differentiated = Literal["qkv", "q", "kv"]
"""Which of queries, keys and values ask for a gradient."""

Outcome = Literal["passed", "failed", "not supported"]


Bias = Literal["none", "by distance", "of heads", "of batches"]
"""What is added to scores: nothing, a number of each distance j - i of a head, or one of each score of a head, the same
in all batches or not."""


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """One call: sizes, mask and scale, and what its tensors are like."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool
    window: int | None = None
    layout: Layout | tuple[Layout, Layout, Layout, Layout] = "contiguous"
    """One layout for all tensors, or one each for queries, keys, values and the output's gradient."""
    scale: float | None = None
    """The factor on the scores; None is 1 / sqrt(head_dim)."""
    numbers: Numbers = "normal"
    differentiated: Differentiated = "qkv"
    documents: tuple[int, ...] = ()
    """The lengths of the documents, through the batch row by row; none where each row is one."""
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False
    """Whether each head has a sink, and a slope of ALiBi (`kernels/flash/tiles.py`)."""
    bias: Bias = "none"
    dropout: float = 0.0
    """The probability that a weight is set to zero, by the same seeds in all implementations."""

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout, Layout]:
        """The layouts of queries, keys, values and the output's gradient, in this order."""
        one = self.layout
        return one if isinstance(one, tuple) else (one, one, one, one)

    def call(
        self, device_type: str, dtype: TensorDtype, *, backward: bool = True, largest_score: float | None = None
    ) -> AttentionCall:
        """The AttentionCall that this shape makes on that type of device."""
        return AttentionCall(
            device_type=device_type, dtype=dtype, head_dim=self.head_dim, queries=self.queries, keys=self.keys,
            heads=self.heads, key_heads=self.key_heads, window=self.window, backward=backward,
            documents=bool(self.documents), largest_score=largest_score,
            scoring=any((self.softcap is not None, self.sinks, self.slopes, self.bias != "none", self.dropout)),
        )  # fmt: skip

    def __str__(self) -> str:
        grouped = f" over {self.key_heads}" if self.key_heads != self.heads else ""
        keys = f" x {self.keys}" if self.keys != self.queries else ""
        words = [
            f"{self.batch}, {self.heads}{grouped}, {self.queries}{keys}, {self.head_dim}",
            "causal" if self.causal else "full",
            *([f"window {self.window}"] if self.window is not None else []),
            *([f"scale {self.scale:g}"] if self.scale is not None else []),
            *([f"scores {self.numbers}"] if self.numbers != "normal" else []),
            *([f"documents of {', '.join(map(str, self.documents))}"] if self.documents else []),
            *([f"softcap {self.softcap:g}"] if self.softcap is not None else []),
            *(["sinks"] if self.sinks else []),
            *(["slopes"] if self.slopes else []),
            *([f"bias {self.bias}"] if self.bias != "none" else []),
            *([f"dropout {self.dropout:g}"] if self.dropout else []),
            *([f"gradients of {' and '.join(self.differentiated)} alone"] if self.differentiated != "qkv" else []),
        ]
        if isinstance(self.layout, tuple):
            words += [f"{what} {layout}" for what, layout in zip(("q", "k", "v", "dO"), self.layout, strict=True)]
        elif self.layout != "contiguous":
            words.append(self.layout)
        return ", ".join(words)


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the output or of a gradient against float64."""

    tensor: Literal["out", "dq", "dk", "dv", "dsinks", "dslopes", "dbias"]
    error: float | None
    """|found - exact| / |exact|; None where something is not finite."""
    allowed: float
    sdpa: float
    """The error of PyTorch's scaled_dot_product_attention in the same dtype, on the same inputs (see `yardsticks`)."""
    row_error: float | None
    """The largest |found - exact| of a row, over the root of the mean square |exact| of rows."""
    row_allowed: float

    @property
    def share(self) -> float:
        """The error as a share of what is allowed, of the whole or of the worst row; infinite where one is None."""
        if self.error is None or self.row_error is None or not (self.allowed and self.row_allowed):
            return math.inf
        return max(self.error / self.allowed, self.row_error / self.row_allowed)

    @property
    def passed(self) -> bool:
        return self.share <= 1


class AttentionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on one call."""

    dtype: TensorDtype
    shape: AttentionShape
    outcome: Outcome
    errors: tuple[TensorError, ...] = ()
    """The errors of the output and, where there is a backward, of the gradients that are asked for."""
    repeats: bool | None = None
    """Whether a second run gave the same bits; None where there was none."""
    reason: str = ""
    """Why the call is not supported, or failed without a result."""
    allowance: str = ""
    """Why it may be further off than others; empty where it may not."""
    yardsticks: tuple[str, ...] = ()
    """The error that every implementation is allowed on this call, where it is not twice sdpa's."""
    known: str = ""
    """The fault of this implementation's authors that explains a failure; empty where none is known."""

    @property
    def sentence(self) -> str:
        """One line that says what is wrong."""
        where = f"({self.shape}) in {self.dtype}"
        if self.reason:
            return f"{where}: {self.reason}"
        wrong: list[str] = []
        for each in self.errors:
            if each.error is None:
                wrong.append(f"{each.tensor} is not finite")
            elif each.error > each.allowed:
                wrong.append(f"{each.tensor} is off by {each.error:.2g} where {each.allowed:.2g} is allowed")
            elif not each.passed:
                wrong.append(f"a row of {each.tensor} is off by {each.row_error:.2g} where {each.row_allowed:.2g} is")
        if not wrong:
            return f"{where}: {self.outcome}"
        others = [each.tensor for each in self.errors if not each.passed][1:]
        parts = [
            f"{where}: {wrong[0]}",
            f" ({self.allowance})" if self.allowance else "",
            f"; so are {', '.join(others)}" if len(others) > 1 else f"; so is {others[0]}" if others else "",
            f" ({self.known})" if self.known else "",
        ]
        return "".join(parts)


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on every call that it was asked for."""

    implementation: Attention
    device: str
    seed: int
    verdicts: tuple[AttentionVerdict, ...]

    def __post_init__(self) -> None:
        choose_name(self.implementation, ATTENTIONS, "attention")

    @property
    def failures(self) -> tuple[AttentionVerdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.outcome == "failed")

    @property
    def passed(self) -> bool:
        """Whether something was computed, and all results are right."""
        return not self.failures and any(verdict.outcome == "passed" for verdict in self.verdicts)

    def require(self) -> None:
        """Raise GateFailure unless it passed; called before any of its times is shown."""
        if self.passed:
            return
        if not self.failures:
            why = next((verdict.sentence for verdict in self.verdicts), "it was asked for nothing")
            raise GateFailure(f"attention {self.implementation} was not seen to be right: {why}")
        raise GateFailure(
            f"attention {self.implementation} is wrong in {len(self.failures)} of {len(self.verdicts)} cases, "
            f"so that no time of it is shown: {self.failures[0].sentence}"
        )


# 1  2026-11  first
TIMINGS_VERSION = 1

CallCompile = Literal["none", "default"]
"""How an implementation is called: as it is, or through torch.compile."""
CALL_COMPILES: tuple[CallCompile, ...] = get_args(CallCompile)

Launches = Literal["hidden", "shown"]
"""hidden: before each pass the device is kept busy, by overwriting its L2 cache, until the host has issued the pass, so
that the times are the device's own. shown: a pass begins on an idle device, and a short one takes as long as its
launches; the L2 cache is as the pass before left it."""

CallOutcome = Literal["measured", "wrong", "not supported", "out of memory", "failed", "interrupted", "not reached"]
"""The outcome of a cell. wrong: the implementation failed the gate, and is not timed."""

BYTES: dict[TensorDtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per number of each dtype."""
PRODUCTS: dict[str, Dtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""For each dtype, the one whose ceiling its matrix products are compared with. fp32 is true fp32: TF32 is off."""


class AttentionCell(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation on one shape."""

    implementation: Attention
    dtype: TensorDtype
    shape: AttentionShape
    compile: CallCompile = "none"

    def __post_init__(self) -> None:
        choose_name(self.implementation, ATTENTIONS, "attention")

    @property
    def line(self) -> str:
        """The implementation, and whether it is compiled."""
        return self.implementation if self.compile == "none" else f"{self.implementation}, compiled"

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k, v and the output's gradient together."""
        shape = self.shape
        rows = 2 * shape.heads * shape.queries + 2 * shape.key_heads * shape.keys
        return shape.batch * rows * shape.head_dim * BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.line} ({self.shape}) in {self.dtype}"


class CallMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one call."""

    saved_bytes: int
    """What autograd keeps for backward beside q, k and v, the output too where it keeps it: distinct storages."""
    before_backward_bytes: int
    """Alive between forward and backward: q, k, v, the output's gradient, the output, and what is saved."""
    peak_bytes: int | None = None
    """The most that was alive in forward and backward, the same inputs counted; None where no allocator counts."""


class AttentionTiming(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The outcome, times and memory of one cell."""

    cell: AttentionCell
    outcome: CallOutcome
    reason: str = ""
    checked: int = 0
    """How many calls the gate found correct before the cell was timed."""
    forward: Samples | None = None
    """Times of forward, which also saves what backward needs."""
    backward: Samples | None = None
    host: Samples | None = None
    """Times that the host needed to issue the pass."""
    launches: Launches | None = None
    """Whether launches were hidden in fact; those that were asked to be hidden may still have been shown."""
    memory: CallMemory | None = None

    @cached_property  # an answer asks thousands of times
    def both(self) -> Samples | None:
        """Forward and backward, pass by pass."""
        if self.forward is None or self.backward is None or not self.forward.count:
            return None
        return self.forward.plus(self.backward) if self.forward.adds_to(self.backward) else None


class AttentionTimings(msgspec.Struct, frozen=True, kw_only=True):
    """A whole measurement, as it is kept."""

    kind: Literal["attention-timings"] = "attention-timings"
    version: int = TIMINGS_VERSION
    created: str
    environment: Environment
    seconds: float
    """How long each cell was measured, in seconds."""
    launches: Launches
    """Whether launches were asked to be hidden."""
    interleaved: bool = True
    """Whether implementations of one shape took turns, pass by pass."""
    ceilings: dict[str, float] = {}
    """FLOP/s of the best matrix product on this device, by dtype."""
    timings: tuple[AttentionTiming, ...] = ()
    preset: str = ""

    @property
    def interpreted(self) -> tuple[Attention, ...]:
        """Timed implementations whose kernels ran in Triton's interpreter: on a CPU, all that are written in Triton."""
        if self.environment.device_type != "cpu":
            return ()
        timed: dict[Attention, None] = {row.cell.implementation: None for row in self.timings if row.forward}
        return tuple(name for name in timed if ATTENTIONS[name].compiler == "triton")


def decode_timings(data: bytes, source: str) -> AttentionTimings:
    """The timings of their document. Raises InputError that names the source."""
    return decode_document(
        data, AttentionTimings, source, holds="timings of attention", newest=TIMINGS_VERSION, again="with --figures"
    )


# Work and saved bytes of one call of attention, by formula.
#
# B batch, H heads of queries, G heads of keys, S queries, T keys, D head_dim, e bytes of a number.


CONVENTION = (
    "4 B H S T D FLOPs forward and 2.5 times as many backward, half of it where causal, whatever an implementation "
    "does: written-out attention makes the whole square, and four products backward"
)


def call_flops(shape: AttentionShape, *, backward: bool = False) -> int:
    """FLOPs of forward's two products (Dao 2023, FlashAttention-2, section 4.1), or of the five of fused backward; half
    as many where causal."""
    sizes = AttentionSizes(
        batch=shape.batch,
        heads=shape.heads,
        queries=shape.queries,
        keys=shape.keys,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
    )
    return attention_flops(sizes, "half" if shape.causal else "full", backward=backward)


class SavedByFormula(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that autograd keeps for backward besides q, k and v, with the output where it keeps that."""

    bytes: int
    terms: str


_BLOCK_OF_ROWS = 32
"""PyTorch's memory-efficient kernel pads the rows of the logsumexp to a multiple of this (kAlignLSE)."""
_EIGHT = 8
"""PyTorch's FlashAttention pads head_dim to a multiple of this."""


def saved_by_formula(cell: AttentionCell, device_type: str) -> SavedByFormula | None:
    """Saved bytes by the formula that the attention's record names (`memory`). None where there is no formula, where
    the call is compiled (the compiler chooses), and where PyTorch chooses the backend on a GPU.

    scores    exp of the scores and their quotient by its row's sum, each B H S T; the sums, B H S; the mask, S T bytes.
              Not the scores: exp's derivative is its result, and the maximum is detached.
    nothing   each chunk is made again
    math      scaled q and k, the softmax's result; in 16 bits all of it in fp32, and v too
              (aten/src/ATen/native/transformers/attention.cpp)
    others    the output, B H S D, and the logsumexp, B H S in fp32

    Keys and values of fewer heads are repeated first, and kept so, by all but the fused ones.
    """
    shape, e = cell.shape, BYTES[cell.dtype]
    if cell.compile != "none" or shape.window is not None:
        return None
    heads, wide = shape.batch * shape.heads, max(e, 4)
    rows, grouped = heads * shape.queries, shape.key_heads != shape.heads
    keys = heads * shape.keys * shape.head_dim
    repeated, repeats = (2 * keys * e, " + 2 B H T D e") if grouped else (0, "")
    output = rows * shape.head_dim * e
    match ATTENTIONS[cell.implementation].memory:
        case None:
            return None
        case "scores":
            mask = shape.queries * shape.keys if shape.causal else 0
            size = 2 * rows * shape.keys * e + rows * e + mask + repeated
            terms = "2 B H S T e + B H S e" + (" + S T" if mask else "") + repeats
        case "nothing":
            size, terms = 0, "0"
        case "math":
            own_values = grouped or wide != e
            size = (rows * shape.head_dim + keys + rows * shape.keys + (keys if own_values else 0)) * wide
            terms = f"{wide} B H (S T + S D + {'2 ' if own_values else ''}T D)"
        case "tiled":
            size, terms = output + rows * wide + repeated, f"B H S D e + {wide} B H S" + repeats
        case "efficient":
            filled = 4 * heads * -(-shape.queries // _BLOCK_OF_ROWS) * _BLOCK_OF_ROWS
            size, terms = output + filled + repeated, "B H S D e + 4 B H S, S filled to 32" + repeats
        case "chosen" if device_type != "cpu":
            return None
        case "flash" | "cudnn" if device_type != "cpu" and (grouped or shape.head_dim % _EIGHT):
            return None  # copies of q, k and v, filled or repeated, as the release has it
        case _:
            size, terms = output + rows * wide, f"B H S D e + {wide} B H S"
    return SavedByFormula(bytes=size, terms=terms)


def product_and_softmax_flops(workload: TextbookWorkload) -> tuple[int, int]:
    """FLOPs of Q K^T, or of P V, and of softmax, in one forward pass of the whole model: 2 B H S S D and 5 B H S S in
    each of L layers; the full square, since written-out causal attention computes all of it and masks."""
    scores = workload.batch_size * workload.model.heads * workload.seq_len**2 * workload.model.layers
    return 2 * scores * workload.model.head_dim, SOFTMAX_FLOPS * scores
