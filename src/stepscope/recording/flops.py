"""FLOPs of a step of any model, counted while the step runs by the rules that read traces, and what no rule covers.

A multiply-add counts two, attention as the full square also where it is causal, and what backward runs again counts
too. Operators that the rules do not know, flex attention and those of libraries, count by their formulas in
`torch.utils.flop_counter`. An operator that multiplies and has no formula, and a kernel that
a program launches through Triton itself, has unknown FLOPs: it is named, and never taken for zero.
"""

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stepscope.core.evidence import CollectiveCalls
from stepscope.core.formulas import CausalConvention, Convention, Work
from stepscope.core.formulas.communication import OTHER, kind_of, sent_and_received
from stepscope.core.formulas.operator_formulas import Operand, OperatorCall, TensorList, Unknown, Value
from stepscope.core.formulas.operator_rules import call_work, is_product
from stepscope.core.parts import PARTS
from stepscope.recording.precision import SCALED_CAST_KERNELS, SCALED_CASTS
from stepscope.recording.step import Recorder

_PRODUCT = re.compile(
    r"mm(?![ai])|matmul|mv$|dot|conv|attention|transformer|rnn|lstm|gru|bilinear|linear|einsum|fft|outer|cdist|"
    r"euclidean_dist|scan"
)
"""Names of ATen's operators that multiply, or may; cummax and lgamma do not."""
_NO_PRODUCT = re.compile(r"^_?(convert|upsample|linspace)")
_ELEMENTWISE = re.compile(
    "|".join(way.signs for part in ("norm", "rope", "mlp") for way in PARTS[part].values() if way.signs)
)
"""Names of the operators and kernels of parts that multiply no matrices, as norms in PyTorch's operators do not."""
_NO_WORK = ("profiler", "prim", "prims", "inductor", "c10d", "_c10d_functional", "fsdp", "debugprims", "rngprims")
"""Namespaces of operators that do no arithmetic of the model's own."""


def product_flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: object, causal: CausalConvention = "full"
) -> int | None:
    """FLOPs of an operator that multiplies; None where nothing says that it does.

    By the rules that also read traces (core/formulas/operator_rules.py), with causal attention as `causal` has it;
    where they do not know the operator or these arguments, by its formula in PyTorch's counter. Raises Unknown where
    none knows them, and what such a formula raises.
    """
    multiplies = not isinstance(func, HigherOrderOperator) and is_product(func._schema.name)
    work = call_work(_call(func, args, kwargs), causal) if multiplies else None
    if work is not None:
        return work.flops
    packet = getattr(func, "_overloadpacket", func)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if multiplies:
        raise Unknown
    return None


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall:
    """The arguments as a trace would record them, in the schema's order, with the defaults of those left out."""
    left_out = func._schema.arguments[len(args) :]
    values = [*args, *(kwargs.get(each.name, each.default_value) for each in left_out)]
    return OperatorCall(func._schema.name, tuple(map(_argument, values)), tuple(map(_value, values)))


def _argument(value: Any) -> Operand | TensorList | None:
    if isinstance(value, torch.Tensor):
        if value.layout in _SPARSE:
            raise Unknown  # its shape does not say how many numbers multiply
        return Operand(tuple(map(int, value.shape)), _NAMES.get(value.dtype), value.element_size())
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
        return TensorList(tuple(operand for each in value if isinstance(operand := _argument(each), Operand)))
    return None


def _value(value: Any) -> Value:
    if isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value):
        return tuple(map(int, value))
    return value if isinstance(value, int) else None


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_NAMES = {
    torch.int32: "int",
    torch.float4_e2m1fn_x2: "c10::Float4_e2m1fn_x2",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""The names, in traces, of dtypes by which a rule counts: those of offsets, and of two numbers in one element."""


class FlopCounts(TorchDispatchMode, Recorder):
    """Counts the FLOPs of the last step by phase, of every operator below autograd and autocast. The step must run
    eagerly: a compiled region calls no operators."""

    supports_higher_order_operators = True

    def __init__(self, causal: CausalConvention = "full") -> None:
        """causal: whether causal attention counts as half of the square, or as all of it."""
        super().__init__()
        self._causal: CausalConvention = causal
        self.unknown: Counter[str] = Counter()
        """Calls of what may multiply and has no formula, by the operator's or the kernel's name."""
        self._flops: dict[str, int] = {}
        self._phase = ""
        self._products = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["FlopCounts"]:
        """A context in which operators are counted, and compiled modules run eagerly."""
        with torch.compiler.set_stance("force_eager"), self.counting():
            yield self

    @contextlib.contextmanager
    def counting(self) -> Iterator["FlopCounts"]:
        """A context in which operators are counted, for a program in which nothing is compiled."""
        with self._triton_launches(), self:
            yield self

    def step_begins(self) -> None:
        self._flops.clear()

    def phase_begins(self, name: str) -> None:
        self._phase = name
        self._flops.setdefault(name, 0)

    @property
    def work(self) -> dict[str, Work]:
        """The work of each phase."""
        return {
            phase: Work(flops=flops, convention=Convention(causal=self._causal, recompute=True))
            for phase, flops in self._flops.items()
        }

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, inside: bool) -> bool:
        """Whether the operator has FLOPs. `inside`: whether one that it calls had some, and it needs none."""
        try:
            flops = product_flops(func, args, kwargs, out, self._causal)
        except Exception:
            self.unknown[func.name().partition(".")[0]] += 1
            return False
        if flops is not None:
            self._flops[self._phase] = self._flops.get(self._phase, 0) + flops
        elif not inside and func.namespace not in _NO_WORK and self._may_multiply(func):
            self.unknown[func.name().partition(".")[0]] += 1
        return flops is not None

    @staticmethod
    def _may_multiply(func: Any) -> bool:
        if isinstance(func, HigherOrderOperator):
            return _PRODUCT.search(func.name()) is not None
        if func._schema.name in SCALED_CASTS or _ELEMENTWISE.search(func._schema.name):
            return False
        if func.namespace != "aten":
            return True  # an operator of the user's own, or of a library: nobody knows
        name = func._schema.name.removeprefix("aten::")
        return _PRODUCT.search(name) is not None and _NO_PRODUCT.search(name) is None

    @contextlib.contextmanager
    def _triton_launches(self) -> Iterator[None]:
        """While open, launches of Triton kernels are counted as unknown."""
        # Only where the program has imported Triton itself.
        knobs = getattr(sys.modules.get("triton"), "knobs", None)
        if knobs is None:
            yield
            return

        def launched(metadata: Any) -> None:
            name = metadata.get()["name"]
            if name not in SCALED_CAST_KERNELS and not _ELEMENTWISE.search(name):
                self.unknown[f"Triton kernel {name}"] += 1

        hooks: Any = knobs.runtime.launch_enter_hook
        hooks.add(launched)
        try:
            yield
        finally:
            hooks.remove(launched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A composite operator shows what it is made of, as PyTorch's counter has it.
        if not isinstance(func, HigherOrderOperator) and func is not torch.ops.prim.device.default:
            with self:
                made_of = func.decompose(*args, **kwargs)
            if made_of is not NotImplemented:
                return made_of
        before = self._products
        with self._inside(func):
            out = func(*args, **kwargs)
        self._products += self._count(func, args, kwargs, out, inside=self._products > before)
        return out

    @contextlib.contextmanager
    def _inside(self, func: Any) -> Iterator[None]:
        """A context in which what an operator that is written in Python calls is told of too, as a trace shows it."""
        definition = OPDEFS.get(func.name().partition(".")[0])
        if definition is None or is_product(func._schema.name) or func._overloadpacket in flop_registry:
            yield
            return
        written = dict(definition._backend_fns)

        def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        for device, function in written.items():
            definition._backend_fns[device] = functools.partial(counted, function)
        try:
            yield
        finally:
            definition._backend_fns.update(written)


# Counts the collectives that this rank calls in a step: kinds, messages, and the bytes that it sends and receives.
#
# Every collective of PyTorch is an operator of the dispatcher: those of `torch.distributed`, those of DTensor and of
# compiled graphs (functional collectives), and those that the C++ of DistributedDataParallel calls in backward. A mode
# that is told of every operator sees them all. An operator of a DTensor is let through first, so that the collectives
# that it is made of are seen.

_NAMESPACES = ("c10d", "_c10d_functional")
_ROOTS = ("root_rank", "src", "root")
"""Names of arguments that say which rank of the group is the root."""

_CollectiveKey = tuple[str, str, int]
"""Phase, kind and number of ranks."""


class TrafficCounts(TorchDispatchMode, Recorder):
    """Counts the collectives of the next step by phase, which must run eagerly: compiled modules communicate the
    same."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = ""
        self._calls: Counter[_CollectiveKey] = Counter()
        self._message, self._sent, self._received = (
            Counter[_CollectiveKey](),
            Counter[_CollectiveKey](),
            Counter[_CollectiveKey](),
        )

    def phase_begins(self, name: str) -> None:
        self._phase = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor's own dispatch calls what it is made of, under this mode
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Add a call, if it is one of a collective."""
        name = func._schema.name.partition("::")[2]
        kind = kind_of(name)
        if kind is OTHER:
            return
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        message = max((_bytes(value) for value in (*arguments.values(), out)), default=0)
        # A call names its process group by itself, by its name, or not at all.
        group: Any = None
        if (group_name := arguments.get("group_name")) is not None:
            group = dist.distributed_c10d._resolve_process_group(group_name)  # pyright: ignore[reportPrivateImportUsage]
        elif (boxed := arguments.get("process_group")) is not None:
            group = dist.ProcessGroup.unbox(boxed)
        size = group.size() if group is not None else dist.get_world_size()
        root = next((arguments[name] for name in _ROOTS if name in arguments), None)
        is_root = root is not None and root == (group.rank() if group is not None else dist.get_rank())
        sent, received = sent_and_received(
            kind.name, message, size, is_root=is_root, receives=name.startswith(("recv", "irecv"))
        )
        key = (self._phase, kind.name, size)
        self._calls[key] += 1
        self._message[key] += message
        self._sent[key] += round(sent)
        self._received[key] += round(received)

    @property
    def counted(self) -> tuple[CollectiveCalls, ...]:
        """What was counted, in the order in which the kinds came."""
        return tuple(
            CollectiveCalls(
                phase=phase,
                kind=kind,
                ranks=ranks,
                calls=calls,
                message_bytes=self._message[phase, kind, ranks],
                sent_bytes=self._sent[phase, kind, ranks],
                received_bytes=self._received[phase, kind, ranks],
            )
            for (phase, kind, ranks), calls in self._calls.items()
        )


def _bytes(value: Any) -> int:
    """The bytes of a tensor, or of all in a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
