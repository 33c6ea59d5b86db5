"""Measured calls of attention: the call, its outcome, its times and its memory."""

from typing import Literal, get_args

import msgspec

from stepscope.core.attention_verdict import AttentionShape
from stepscope.core.attentions import ATTENTIONS, Attention, TensorDtype, check_attention
from stepscope.core.document import decode_document, json_document
from stepscope.core.environment import Environment
from stepscope.core.samples import Samples
from stepscope.core.workload import Dtype

# 1  2026-11  first
TIMINGS_VERSION = 1

CallCompile = Literal["none", "default"]
"""How an implementation is called: as it is, or through torch.compile."""
CALL_COMPILES: tuple[CallCompile, ...] = get_args(CallCompile)

Launches = Literal["hidden", "shown"]
"""hidden: before each pass the device is kept busy, by overwriting its L2 cache, until the host has issued the pass, so
that the times are the device's own. shown: a pass begins on an idle device, and a short one takes as long as its
launches; the L2 cache is as the pass before left it."""

CallOutcome = Literal[
    "measured", "wrong", "not supported", "out of memory", "failed", "interrupted", "not reached"
]  # fmt: skip
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
        check_attention(self.implementation)

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

    @property
    def working_set_bytes(self) -> int:
        """Bytes that a fused kernel reads and writes in forward and backward: inputs, output and three gradients."""
        return 2 * self.input_bytes

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


class AttentionTiming(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def both(self) -> Samples | None:
        """Forward and backward, pass by pass."""
        if self.forward is None or self.backward is None or not self.forward.count:
            return None
        return self.forward.plus(self.backward)


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
        return tuple(name for name in timed if ATTENTIONS[name].triton)


def encode_timings(timings: AttentionTimings) -> bytes:
    """The timings as one JSON document."""
    return json_document(timings).encode()


def decode_timings(data: bytes, source: str) -> AttentionTimings:
    """The timings that `encode_timings` wrote. Raises InputError that names the source."""
    return decode_document(
        data, AttentionTimings, source, holds="timings of attention", newest=TIMINGS_VERSION, again="with --figures"
    )
