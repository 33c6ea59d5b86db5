"""Finds what a step of any module would allocate, on fake tensors, and the operators that fake tensors cannot follow.

The textbook's step never looks at a value. A user's step may: it leaves out a mask that hides nothing, or reads a
count. So a small tensor keeps its values if it was computed from no fake tensor. Token ids, positions and masks are
then real, and code that reads them takes its real path. Tensors that depend on weights and activations are fake. If an
operator needs a value of one, or the shape of its output depends on one, it is named: it is refused, or counted at its
largest.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves

from stepscope.core.errors import InputError
from stepscope.core.range_names import OPTIMIZER
from stepscope.core.units import MIB
from stepscope.recording import scaled_mm
from stepscope.recording.fake_memory import FakeMemory

LARGEST_REAL = 64 * MIB
"""Bytes up to which integers and conditions keep their values, if they were computed from no fake tensor."""

LARGEST_REAL_FLOATS = MIB
"""Bytes up to which floating numbers keep their values, if they were computed from no fake tensor."""

_aten = torch.ops.aten
_OURS = frozenset({"aten", "prims", "prim", "profiler", "inductor", "transformers", "torchvision"})
_GROUPED = torch.ops.aten._grouped_mm.default
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "cudnn_convolution", "mkldnn_convolution"})
_HOUSES = tuple(str(Path(file).parent) for file in (torch.__file__, sys.modules["stepscope"].__file__ or ""))


class FakeMemoryOfOwn(FakeMemory):
    """FakeMemory for a step of which nothing is known. Enter it inside a FakeTensorMode that takes real tensors.

    name: the module's name in messages.
    """

    def __init__(self, *, name: str, workspace_bytes: int = 0) -> None:
        super().__init__(workspace_bytes=workspace_bytes)
        self._name = name
        self.at_most: Counter[str] = Counter()
        """Calls of operators whose output was counted at its largest, since its shape depends on data."""
        self.custom: Counter[str] = Counter()
        """Calls of operators that are not PyTorch's, whose own memory nobody knows."""
        self.convolutions = 0
        """Calls of convolutions."""
        self.convolution_bytes = 0
        """Bytes of the input, weight and output of the largest convolution."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not fake and self._stays_real(func, args, kwargs, bool(tensors)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            outputs = _grouped(*args, **kwargs) if func is _GROUPED else func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            outputs = self._at_most(func, args)
        except UnsupportedOperatorException as error:
            why = "has no fake implementation: register one by torch.library.register_fake"
            raise self._refused(func, why) from error
        self._look_at(func, tensors, outputs)
        return outputs

    def _stays_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: bool) -> bool:
        """Whether an operator that reads no fake tensor may really run: its output is small, or there is none."""
        if reads and func._schema.is_mutable:
            return True
        try:
            outputs = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return True
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return all(
            tensor.nbytes <= (LARGEST_REAL_FLOATS if tensor.is_floating_point() else LARGEST_REAL) for tensor in made
        )

    def _number(self, tensor: Tensor, func: Any) -> bool | float:
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                return func(tensor)
        if self._phase == OPTIMIZER or not self._phase:
            return super()._number(tensor, func)
        raise self._refused(func, "reads a value that depends on the weights: what follows cannot be foreseen")

    def _at_most(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The largest output that an operator may have, where its shape depends on data."""
        packet, given = func.overloadpacket, args[0] if args else None
        if not isinstance(given, Tensor):
            raise self._refused(func, "has an output whose shape depends on data")
        if packet is _aten.nonzero:
            found: Any = torch.empty(given.numel(), given.dim(), dtype=torch.int64)
        elif packet is _aten.masked_select:
            found = given.new_empty(given.numel())
        elif packet is _aten.index and all(index is None or isinstance(index, Tensor) for index in args[1]):
            found = func(given, list(_whole(args[1])))
        else:
            raise self._refused(func, "has an output whose shape depends on data")
        self.at_most[str(func)] += 1
        return found

    def _look_at(self, func: Any, tensors: list[Tensor], outputs: Any) -> None:
        name = func.overloadpacket.__name__
        if func.namespace not in _OURS and func._schema.name not in (*scaled_mm.OPERATORS, *scaled_mm.CASTS):
            self.custom[str(func)] += 1
        elif func.namespace == "aten" and name in _CONVOLUTIONS:
            self.convolutions += 1
            made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            self.convolution_bytes = max(self.convolution_bytes, sum(t.nbytes for t in (*tensors, *made)))

    def _refused(self, func: Any, why: str) -> InputError:
        return InputError(f"{self._name} cannot be predicted: {func}{_where()} {why}")


def _grouped(
    rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The output of a grouped product, in any dtype: PyTorch's own fake implementation takes bf16 alone. Its rows are
    padded to 16 bytes (aten/src/ATen/native/GroupedMMUtils.h)."""
    shape = [rows.shape[-2], matrices.shape[-1]]
    if rows.dim() == matrices.dim():
        shape = [offs.shape[0] if rows.dim() == 2 and offs is not None else rows.shape[0], *shape]
    dtype = out_dtype or rows.dtype
    unit = 16 // dtype.itemsize
    width = -(-shape[-1] // unit) * unit
    return rows.new_empty([*shape[:-1], width], dtype=dtype)[..., : shape[-1]]


def _whole(indices: list[Tensor | None]) -> Iterator[Tensor | None]:
    """The indices, where each condition is replaced by the places of all its elements."""
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            yield index
        else:
            yield from (torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.dim()))


def _where() -> str:
    """The line of the user's code that is running, in brackets; empty if none is found."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if Path(file).is_file() and not file.startswith(_HOUSES):
            return f" ({Path(file).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
