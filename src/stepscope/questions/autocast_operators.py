"""What autocast does with each operator: observed, by running it and reading the dtype that comes out.

Each operator runs on fp32 inputs, on 16-bit ones, and, where it takes several, on both kinds at once. Of the three
dtypes follows what autocast does with it; no list of PyTorch's is read.

The rules of CUDA can be observed without a GPU: autocast decides by the device that a tensor says it is on, before any
kernel runs, and tensors without data (`FakeTensorMode`) say that they are on one.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.errors import InputError, one_line
from stepscope.recording.fake_memory import without_tracebacks

Treatment = Literal["sent down", "kept up", "promotes", "as its inputs", "refuses"]
"""sent down: 16 bits come out of fp32. kept up: fp32 comes out of 16 bits. promotes: of inputs of two dtypes autocast
casts those of 16 bits to fp32. as its inputs: autocast leaves it alone (mixed inputs are promoted by PyTorch itself, or
refused). refuses: runs without autocast, and raises under it."""

TREATMENTS: tuple[Treatment, ...] = ("sent down", "kept up", "promotes", "as its inputs", "refuses")

LOW: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

REFUSED = "refused"

_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Shape = tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `bf16`, `int64`."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Operator:
    """An operator, and the shapes of inputs on which it costs nothing."""

    name: str
    run: Callable[..., Tensor]
    shapes: tuple[Shape, ...] = ((8, 8),)


_ONE: tuple[Shape, ...] = ((8, 8),)
_TWO, _THREE = 2 * _ONE, 3 * _ONE
_IMAGE: Shape = (1, 4, 8, 8)
_FILTER: Shape = (4, 4, 3, 3)
_HEADS: Shape = (1, 2, 8, 8)
_VECTOR: Shape = (8,)


def _of(shapes: tuple[Shape, ...], *functions: Callable[..., Tensor]) -> list[Operator]:
    """Operators that take inputs of the same shapes, under their own names."""
    return [Operator(function.__name__, function, shapes) for function in functions]


OPERATORS: tuple[Operator, ...] = (
    *_of(_TWO, F.linear, torch.matmul, torch.mm),
    *_of(((2, 8, 8), (2, 8, 8)), torch.bmm),
    *_of(_THREE, torch.addmm),
    *_of(((2, 8, 8), (2, 8, 8), (2, 8, 8)), torch.baddbmm),
    *_of(((8, 8), _VECTOR), torch.mv),
    Operator("einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), _TWO),
    *_of(((1, 4, 8), (4, 4, 3)), F.conv1d),
    *_of((_IMAGE, _FILTER), F.conv2d, F.conv_transpose2d),
    *_of((_HEADS, _HEADS, _HEADS), F.scaled_dot_product_attention),
    *_of(((8, 8), (1,)), F.prelu),
    Operator("layer_norm", lambda x: F.layer_norm(x, (8,))),
    Operator("rms_norm", lambda x: F.rms_norm(x, (8,))),
    Operator("group_norm", lambda x: F.group_norm(x, 2), (_IMAGE,)),
    Operator("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), (_IMAGE,)),
    Operator("softmax", lambda x: torch.softmax(x, -1)),
    Operator("log_softmax", lambda x: torch.log_softmax(x, -1)),
    Operator("logsumexp", lambda x: torch.logsumexp(x, -1)),
    Operator("cross_entropy", lambda x: F.cross_entropy(x, x.argmax(-1))),
    Operator("nll_loss", lambda x: F.nll_loss(x, x.argmax(-1))),
    *_of(_TWO, F.mse_loss, F.l1_loss),
    Operator("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), _TWO),
    *_of(_TWO, F.binary_cross_entropy_with_logits, F.binary_cross_entropy),
    *_of(_ONE, torch.exp, torch.log),
    Operator("pow", lambda x: torch.pow(x, 2)),
    *_of(_ONE, torch.rsqrt, torch.reciprocal, torch.sqrt, F.softplus, torch.relu, F.gelu, F.silu, torch.sigmoid),
    *_of(_ONE, torch.tanh, torch.sum, torch.mean, torch.var, torch.amax, torch.prod),
    Operator("cumsum", lambda x: torch.cumsum(x, -1)),
    Operator("vector_norm", torch.linalg.vector_norm),
    *_of(_TWO, torch.add, torch.mul),
    Operator("cat", lambda x, y: torch.cat([x, y]), _TWO),
    Operator("stack", lambda x, y: torch.stack([x, y]), _TWO),
    *_of(_THREE, torch.addcmul),
    *_of(_TWO, torch.atan2),
    Operator("cross", lambda x, y: torch.cross(x, y, dim=-1), ((8, 3), (8, 3))),
    *_of((_VECTOR, _VECTOR), torch.dot),
    Operator("tensordot", lambda x, y: torch.tensordot(x, y, dims=1), _TWO),
    Operator("scatter_add", lambda x, y: torch.scatter_add(x, 0, y.long(), y), _TWO),
    Operator("index_put", lambda x, y: torch.index_put(x, (x.argmax(-1),), y), _TWO),
    *_of(((8, 8), (8, 8), (4, 8, 8)), F.bilinear),
    Operator("grid_sample", lambda x, y: F.grid_sample(x, y, align_corners=False), (_IMAGE, (1, 4, 4, 2))),
)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The dtypes that an operator gives: of fp32 inputs, of 16-bit ones, of both at once, and of both without autocast.

    None where there is nothing to run (one input), or nothing that runs on this device; `refused` where it raised.
    """

    of_fp32: str | None = None
    of_low: str | None = None
    of_both: str | None = None
    of_both_without: str | None = None
    casts_of_both: int = 0
    """Casts that autocast adds where both kinds come in."""

    @property
    def treatment(self) -> Treatment | None:
        """What autocast does with the operator; None where it could not be observed."""
        if self.of_fp32 is None or self.of_low is None:
            return None
        if self.of_fp32 == self.of_low == REFUSED:
            return "refuses"
        if self.of_fp32 in LOW:
            return "sent down"
        if self.of_low == "fp32":
            return "kept up"
        if self.of_both == "fp32" and self.casts_of_both > 0:
            return "promotes"
        return "as its inputs"


class Casts(TorchDispatchMode):
    """A counter of the casts between floating dtypes that run inside: those of the named tensors, and all others.

    The mode stands below autocast, so that it sees autocast's casts as operators.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in named}
        self.of_named: Counter[str] = Counter()
        self.others = 0
        self.bytes_of_named = 0
        """Bytes of all copies that casts made of the named tensors."""

    @property
    def count(self) -> int:
        return self.of_named.total() + self.others

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            return result
        before, after = args[0].dtype, result.dtype
        if before != after and before.is_floating_point and after.is_floating_point:
            name = self._names.get(id(args[0]))
            if name is None:
                self.others += 1
            else:
                self.of_named[name] += 1
                self.bytes_of_named += result.nbytes
        return result


@contextlib.contextmanager
def autocast_region(device_type: str, dtype: torch.dtype, *, cache: bool = True) -> Iterator[None]:
    """While open, autocast is on. Raises InputError where this build or device has none of this dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            region = torch.autocast(device_type, dtype=dtype, cache_enabled=cache)
        except RuntimeError as error:
            raise InputError(f"no {dtype_name(dtype)} autocast on {device_type}: {one_line(error)}") from error
    with region:
        if not torch.is_autocast_enabled(device_type):
            raise InputError(
                f"autocast of PyTorch {torch.__version__} takes no {dtype_name(dtype)} on {device_type}: "
                f"choose --dtype {'bf16' if dtype == torch.float16 else 'fp16'}"
            )
        yield


def observe_operators(device: torch.device, low: torch.dtype) -> dict[str, Observed]:
    """What autocast does with each of OPERATORS on this device."""
    generator = torch.Generator().manual_seed(0)

    def made(shape: Shape, dtype: torch.dtype) -> Tensor:
        # Between 1/4 and 3/4: every operator is defined there, a probability's logarithm too.
        return (torch.rand(shape, generator=generator) / 2 + 0.25).to(device, dtype)

    return {op.name: _observe(op, made, lambda: autocast_region(device.type, low), low) for op in OPERATORS}


def observe_cuda_rules(low: torch.dtype) -> dict[str, Observed]:
    """What autocast does with each of OPERATORS on CUDA, seen without a GPU on tensors that hold no data."""
    mode = FakeTensorMode()
    gpu = torch.device("cuda", 0)

    def made(shape: Shape, dtype: torch.dtype) -> Tensor:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), gpu)

    with without_tracebacks(), mode:  # some operators cannot be told
        return {op.name: _observe(op, made, lambda: _cuda_region(low), low) for op in OPERATORS}


@contextlib.contextmanager
def _cuda_region(dtype: torch.dtype) -> Iterator[None]:
    """While open, autocast is on for CUDA, as in `torch.autocast("cuda")` on a machine that has a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def _observe(
    op: Operator,
    made: Callable[[Shape, torch.dtype], Tensor],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    low: torch.dtype,
) -> Observed:
    fp32 = [made(shape, torch.float32) for shape in op.shapes]
    if _result(op, fp32) == REFUSED:
        return Observed()
    lows = [made(shape, low) for shape in op.shapes]
    both = [fp32[0], *lows[1:]]
    several = len(both) > 1
    with Casts() as casts_without:
        without = _result(op, both) if several else None
    with region(), Casts() as casts:
        of_both = _result(op, both) if several else None
    with region():
        return Observed(
            of_fp32=_result(op, fp32),
            of_low=_result(op, lows),
            of_both=of_both,
            of_both_without=without,
            casts_of_both=casts.count - casts_without.count,
        )


@torch.no_grad()
def _result(op: Operator, inputs: list[Tensor]) -> str:
    try:
        return dtype_name(op.run(*inputs).dtype)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # how operators say no, on fake tensors too
        return REFUSED
