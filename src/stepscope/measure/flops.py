"""FLOPs of a step of any model, counted by PyTorch's own formulas while the step runs, and what no formula covers.

The formulas are those of `torch.utils.flop_counter`: a multiply-add counts two, attention as the full square also where
it is causal, and what backward runs again counts too. An operator that multiplies and has no formula, and a kernel that
a program launches through Triton itself, has unknown FLOPs: it is named, and never taken for zero.
"""

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from stepscope.core.parts import PARTS
from stepscope.core.work import Convention, Work
from stepscope.measure import scaled_mm
from stepscope.measure.step import Recorder

CONVENTION = Convention(causal="full", recompute=True)

_PRODUCT = re.compile(r"mm|matmul|mv$|dot|conv|attention|rnn|lstm|gru|bilinear|linear|einsum|fft|outer|cdist|scan")
"""Names of ATen's operators that multiply, or may."""
_NO_PRODUCT = re.compile(r"^_?(convert|upsample|linspace)")
_ELEMENTWISE = re.compile(
    "|".join(way.signs for part in ("norm", "rope", "mlp") for way in PARTS[part].values() if way.signs)
)
"""Names of the operators and kernels of parts that multiply no matrices, as norms in PyTorch's operators do not."""
_NO_WORK = ("profiler", "prim", "prims", "inductor", "c10d", "_c10d_functional", "fsdp", "debugprims", "rngprims")
"""Namespaces of operators that do no arithmetic of the model's own."""


def _sdpa(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return sdpa_flop_count(query.shape, _for_each_query_head(key, query), _for_each_query_head(value, query))


def _sdpa_backward(grad: Any, query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    keys, values = _for_each_query_head(key, query), _for_each_query_head(value, query)
    return sdpa_backward_flop_count(grad.shape, query.shape, keys, values)


def _for_each_query_head(shared: Any, query: Any) -> tuple[int, ...]:
    """The shape (B, H, S, D) of keys or values with as many heads as queries, each of which is multiplied by its own;
    PyTorch 2.11 counts no heads that queries share."""
    batch, _, length, head_dim = shared.shape
    return (batch, query.shape[1], length, head_dim)


def _matrix_by_vector(matrix: Any, _vector: Any, *_: object, **__: object) -> int:
    return 2 * math.prod(matrix.shape)


def _sum_and_matrix_by_vector(_sum: Any, matrix: Any, *_: object, **__: object) -> int:
    return 2 * math.prod(matrix.shape)


_aten = torch.ops.aten
_FORMULAS: dict[object, Callable[..., int]] = {
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_cudnn_attention,
        ),
        _sdpa,
    ),
    **dict.fromkeys(
        (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
            _aten._scaled_dot_product_efficient_attention_backward,
            _aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _sdpa_backward,
    ),
    _aten.mv: _matrix_by_vector,
    _aten.dot: _matrix_by_vector,
    _aten.addmv: _sum_and_matrix_by_vector,
}
"""Formulas that PyTorch's counter does not have, or not for every shape."""


class FlopCounts(Recorder):
    """Counts the FLOPs of the next step by phase. It must run eagerly: a compiled region calls no operators."""

    def __init__(self) -> None:
        self.unknown: Counter[str] = Counter()
        """Calls of what may multiply and has no formula, by the operator's or the kernel's name."""
        self._flops: dict[str, int] = {}
        self._phase = ""

    @contextlib.contextmanager
    def running(self) -> Iterator["FlopCounts"]:
        """A context in which operators are counted, and compiled modules run eagerly."""
        with torch.compiler.set_stance("force_eager"), self.counting():
            yield self

    @contextlib.contextmanager
    def counting(self) -> Iterator["FlopCounts"]:
        """A context in which operators are counted, for a program in which nothing is compiled."""
        with self._triton_launches(), _Operators(self._count):
            yield self

    def phase_begins(self, name: str) -> None:
        self._phase = name
        self._flops.setdefault(name, 0)

    @property
    def work(self) -> dict[str, Work]:
        """The work of each phase."""
        return {phase: Work(flops=flops, convention=CONVENTION) for phase, flops in self._flops.items()}

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = func._overloadpacket
        try:
            if packet in _FORMULAS:
                return self._add(_FORMULAS[packet](*args, **kwargs))
            if packet in flop_registry:
                return self._add(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception:
            self.unknown[func.name().partition(".")[0]] += 1
            return None
        if func.namespace not in _NO_WORK and self._may_multiply(func):
            self.unknown[func.name().partition(".")[0]] += 1
        return None

    def _add(self, flops: int) -> None:
        self._flops[self._phase] = self._flops.get(self._phase, 0) + int(flops)

    @staticmethod
    def _may_multiply(func: Any) -> bool:
        if func._schema.name in scaled_mm.CASTS or _ELEMENTWISE.search(func._schema.name):
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
            if name not in scaled_mm.CAST_KERNELS and not _ELEMENTWISE.search(name):
                self.unknown[f"Triton kernel {name}"] += 1

        hooks: Any = knobs.runtime.launch_enter_hook
        hooks.add(launched)
        try:
            yield
        finally:
            hooks.remove(launched)


class _Operators(TorchDispatchMode):
    """A mode that tells of every operator below autograd and autocast."""

    def __init__(self, tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A composite operator shows what it is made of, as PyTorch's counter has it.
        if func is not torch.ops.prim.device.default and func._overloadpacket not in flop_registry:
            with self:
                made_of = func.decompose(*args, **kwargs)
            if made_of is not NotImplemented:
                return made_of
        out = func(*args, **kwargs)
        self._tell(func, args, kwargs, out)
        return out
