"""What a bench is asked for, and what it measured, without PyTorch.

Inputs of a function on the command line are shapes, dtypes and sizes:

--shape 8x16xNx64*3 --size N=1024,2048         three tensors, for two values of N
--shape 4096xV,4096:int64<V --size V=50257     logits, and targets below V
--shape 2xSx64*3,mask=SxS:bool --size S=512    a mask by its name

A Bench has verdicts first, then times: it is the document that --json writes.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.files import decode_document, json_document
from stepscope.core.samples import Interval, Samples

Size = int | str
"""A dimension: a number, or the name of a size."""

FLOATS = ("fp64", "fp32", "bf16", "fp16")
INTEGERS = ("int64", "int32", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")
MOST_CASES = 64
MOST_NUMBERS = 2**40
_ARGUMENT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<dims>(?:\d+|[A-Z][A-Z0-9_]*)(?:x(?:\d+|[A-Z][A-Z0-9_]*))*)"
    r"(?:\*(?P<times>\d+))?(?::(?P<dtype>\w+)(?:<(?P<below>\d+|[A-Z][A-Z0-9_]*))?)?"
)
_HOW = "write sizes joined by x, as in 8x16x1024x64*3 for three tensors, or 4096x1000,4096:int64<1000"


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a call."""

    shape: tuple[Size, ...]
    dtype: str = ""
    """Empty for the dtype that the call is measured in."""
    below: Size | None = None
    """What integers are below; they are drawn from 0 on."""
    name: str = ""
    """The keyword by which it is given; empty for one given by its place."""

    def sized(self, sizes: Mapping[str, int]) -> "TensorSpec":
        """The tensor with the numbers of these sizes. Raises InputError for one that has none."""
        below = None if self.below is None else _number(self.below, sizes)
        return msgspec.structs.replace(self, shape=tuple(_number(one, sizes) for one in self.shape), below=below)


def parse_shape(text: str) -> tuple[TensorSpec, ...]:
    """The tensors that --shape names. Raises InputError for what cannot be read."""
    specs: list[TensorSpec] = []
    for part in text.replace(" ", "").split(","):
        match = _ARGUMENT.fullmatch(part)
        if match is None:
            raise InputError(f"--shape {text!r}: {part!r} is no shape: {_HOW}")
        dtype, below = match["dtype"] or "", match["below"]
        if dtype and dtype not in DTYPES:
            raise InputError(f"--shape {text!r}: {dtype!r} is no dtype: choose among {', '.join(DTYPES)}")
        if (dtype in INTEGERS) != (below is not None):
            raise InputError(f"--shape {text!r}: integers need what they are below, as in int64<50257, and only these")
        times = int(match["times"] or 1)
        if not 1 <= times <= 16 or (times > 1 and match["name"]):
            raise InputError(f"--shape {text!r}: {part!r}: *N repeats a tensor without a name, up to 16 times")
        spec = TensorSpec(
            shape=tuple(map(_size, match["dims"].split("x"))),
            dtype=dtype,
            name=match["name"] or "",
            below=None if below is None else _size(below),
        )
        specs += [spec] * times
    named = [spec.name for spec in specs if spec.name]
    if len(named) != len(set(named)):
        raise InputError(f"--shape {text!r} names an argument twice")
    return tuple(specs)


def parse_sizes(written: Sequence[str]) -> tuple[dict[str, int], ...]:
    """The cases that `NAME=1024,2048` texts name: every combination of their values, the first name slowest."""
    sizes: dict[str, tuple[int, ...]] = {}
    for text in written:
        name, _, values = text.partition("=")
        if not re.fullmatch(r"[^\W\d]\w*", name) or not re.fullmatch(r"\d+(,\d+)*", values):
            raise InputError(f"--size {text!r}: write NAME=NUMBER,NUMBER, as in N=1024,2048")
        if name in sizes:
            raise InputError(f"--size {name} is given twice: write its values once, as in --size {name}=1024,2048")
        sizes[name] = tuple(dict.fromkeys(map(int, values.split(","))))
        if min(sizes[name]) < 1 or max(sizes[name]) > MOST_NUMBERS:
            raise InputError(f"--size {text!r}: sizes are whole numbers from 1 to {MOST_NUMBERS}")
    cases = math.prod(map(len, sizes.values()))
    if cases > MOST_CASES:
        raise InputError(f"--size makes {cases} cases, at most {MOST_CASES} are measured at once: give fewer values")
    return tuple(dict(zip(sizes, values, strict=True)) for values in itertools.product(*sizes.values()))


def size_words(sizes: Mapping[str, int]) -> str:
    """The sizes of a case in words: `N 1024, D 64`."""
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def shape_words(specs: Sequence[TensorSpec]) -> str:
    """The tensors in the spelling of --shape."""
    words: list[str] = []
    for spec, run in itertools.groupby(specs):
        times = len(list(run))
        bound = "" if spec.below is None else f"<{spec.below}"
        words.append(
            (f"{spec.name}=" if spec.name else "")
            + "x".join(map(str, spec.shape))
            + (f"*{times}" if times > 1 else "")
            + (f":{spec.dtype}{bound}" if spec.dtype else "")
        )
    return ",".join(words)


def _size(text: str) -> Size:
    return int(text) if text.isdigit() else text


def _number(size: Size, sizes: Mapping[str, int]) -> int:
    if isinstance(size, str) and size not in sizes:
        raise InputError(f"--shape has the size {size}, which has no value: give --size {size}=1024")
    number = sizes[size] if isinstance(size, str) else size
    if not 1 <= number <= MOST_NUMBERS:
        raise InputError(f"--shape has the size {number}: sizes are whole numbers from 1 to {MOST_NUMBERS}")
    return number


# The shapes on which a function is judged beside the one that is timed: small ones, and odd ones that no tile divides.

_LINKED = 64
"""Sizes up to it stay as they are: widths of heads, batches, numbers of heads."""


def smaller(specs: Sequence[TensorSpec], most: int) -> tuple[TensorSpec, ...]:
    """The tensors with every larger size cut to `most`. Sizes that are equal stay equal."""
    return _changed(specs, {size: min(size, most) for size in _sizes(specs)})


def odd(specs: Sequence[TensorSpec], most: int) -> tuple[TensorSpec, ...]:
    """The tensors with every size above 64 made odd, or where there is none the largest, and none above `most`. Sizes
    that are equal stay equal."""
    changes: dict[int, int] = {}
    sizes = sorted(_sizes(specs))
    for size in sizes:
        number = min(size, most) - 1 - 2 * len(changes)
        changes[size] = size if size <= _LINKED else number - (number % 2 == 0)
    if sizes and changes[sizes[-1]] == sizes[-1] > 2:
        changes[sizes[-1]] = sizes[-1] - 1 - sizes[-1] % 2
    return _changed(specs, changes)


def _sizes(specs: Sequence[TensorSpec]) -> set[int]:
    return {
        size
        for spec in specs
        for size in (*spec.shape, *([] if spec.below is None else [spec.below]))
        if isinstance(size, int)
    }


def _changed(specs: Sequence[TensorSpec], changes: Mapping[int, int]) -> tuple[TensorSpec, ...]:
    return tuple(
        msgspec.structs.replace(
            spec,
            shape=tuple(changes.get(size, size) if isinstance(size, int) else size for size in spec.shape),
            below=changes.get(spec.below, spec.below) if isinstance(spec.below, int) else spec.below,
        )
        for spec in specs
    )


# ---- what was measured

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
    """FLOPs of matrix products, causal attention as half of the square; None where an operator has no formula."""
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
    """The function whose error in the same dtype says how far off is too far."""
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
