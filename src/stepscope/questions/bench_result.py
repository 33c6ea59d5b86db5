"""What a bench measured: verdicts first, then times, as the document that --json writes."""

from typing import Literal

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.files import decode_document, json_document
from stepscope.core.samples import Interval, Samples

# 1  2026-11  first
BENCH_VERSION = 1

Judged = Literal["right", "wrong", "refused", "not judged"]
"""refused: it raised an error on a case that it need not take, such as an odd length."""
Timed = Literal["measured", "wrong", "refused", "out of memory", "failed", "interrupted", "not reached", "interpreted"]


class ResultError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of an output, or of an input's gradient, against float64, relative to its norm."""

    result: str
    error: float | None
    """None where a number is not finite."""
    allowed: float
    rival: float | None
    """The error that the yardstick has itself, in the same dtype."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate found of one function in one case."""

    function: str
    case: str
    """What is special about it: as timed, odd lengths, views ..."""
    inputs: str
    """Its tensors, in the spelling of --shape."""
    dtype: str
    judged: Judged
    reason: str = ""
    errors: tuple[ResultError, ...] = ()
    repeats: bool | None = None
    """Whether a second call gave the same bits; None where it was not run."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one function on one size."""

    function: str
    sizes: dict[str, int] = {}
    inputs: str
    dtype: str
    outcome: Timed
    reason: str = ""
    forward: Samples | None = None
    backward: Samples | None = None
    """None where there is no backward."""
    host: Samples | None = None
    """What the host needed to issue a call and its backward."""
    hidden: bool = False
    """Whether the host had issued all of it before the device began, so that the times are the device's own."""
    first_s: float | None = None
    """The first call on this size, which compiles and autotunes."""
    saved_bytes: int | None = None
    """What autograd keeps for backward, beside the inputs."""
    beyond_bytes: int | None = None
    """The peak of memory beside inputs, outputs and gradients; None on a CPU, where nobody counts."""
    ratio: float | None = None
    """How many times as long as the first function it takes, forward and backward, pair by pair in turns."""
    interval: Interval | None = None

    @property
    def seconds(self) -> float | None:
        """The median of forward and backward together; None where it has no time."""
        both = self.both
        return both.median_s if both is not None else None

    @property
    def both(self) -> Samples | None:
        """Forward and backward of each pass together."""
        if self.forward is None or self.backward is None:
            return self.forward
        values = tuple(a + b for a, b in zip(self.forward.values_s, self.backward.values_s, strict=False))
        return Samples(values_s=values, clock=self.forward.clock)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one size, by the reference's operators, and the least bytes that it moves."""

    sizes: dict[str, int] = {}
    inputs: str
    forward_flops: int | None = None
    """Of matrix products, causal attention as half of the square; None where an operator has no formula."""
    backward_flops: int | None = None
    forward_bytes: int
    """Inputs read once and outputs written once."""
    backward_bytes: int = 0
    """What the reference keeps and the outputs' gradients read once, the inputs' gradients written once."""

    @property
    def flops(self) -> int | None:
        """FLOPs of forward and backward."""
        return None if self.forward_flops is None else self.forward_flops + (self.backward_flops or 0)

    @property
    def moved_bytes(self) -> int:
        """Bytes of forward and backward."""
        return self.forward_bytes + self.backward_bytes


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of it."""

    kind: str = "bench"
    version: int = BENCH_VERSION
    created: str
    environment: Environment
    functions: dict[str, str]
    """What each name stands for, as it was spelled; the first is the one that is asked about."""
    reference: str
    """What judges, in float64; empty where nothing does."""
    yardstick: str
    """Whose error in the same dtype says how far off is too far."""
    dtype: str
    arguments: dict[str, str] = {}
    """Arguments that are no tensors, as they were given."""
    left_out: dict[str, tuple[str, ...]] = {}
    """By function, the arguments that it has no parameter for, and was called without."""
    backward: bool
    seconds: float
    """How long each function was timed on each size."""
    verdicts: tuple[Verdict, ...] = ()
    timings: tuple[Timing, ...] = ()
    works: tuple[Work, ...] = ()
    interpreted: tuple[str, ...] = ()
    """Functions whose kernels ran in Triton's interpreter: they are judged and not timed."""
    matmul_flops_s: float | None = None
    """The best matrix product of this dtype here."""
    copy_bytes_s: float | None = None
    """The best copy here."""
    interrupted: bool = False

    def wrong(self, function: str) -> tuple[Verdict, ...]:
        """The verdicts that refuse this function."""
        return tuple(v for v in self.verdicts if v.function == function and v.judged == "wrong")


def encode_bench(bench: Bench) -> bytes:
    """JSON, one document."""
    return json_document(bench).encode()


def decode_bench(data: bytes, source: str) -> Bench:
    """What `encode_bench` wrote. Raises InputError that names the source."""
    return decode_document(data, Bench, source, holds="a bench of functions", newest=BENCH_VERSION, again="with --json")
