"""Looks at the operators of a step: products in 32 bits beside others in 16, and copies from memory that is not
pinned."""

import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.work.operators.calls import Unknown
from stepscope.recording.flops import product_flops
from stepscope.recording.habits.code_lines import users_line
from stepscope.recording.habits.host_reads import HostReads

_MANY_AT_ONCE = ("_foreach_", "_fused_", "_amp_foreach_")
"""The first parts of the names of operators that update many tensors at once."""
_SMALL_BYTES = 4096
"""A copy of less than a page costs no time that pinning could save."""


class OperatorHabits(TorchDispatchMode):
    """A mode below autograd and autocast. It looks at each operator, and tells HostReads its inputs and outputs.

    Its errors do not reach the user's loop: after the first one it looks at nothing more.
    """

    supports_higher_order_operators = True

    def __init__(self, reads: HostReads, modules: Mapping[int, str], device: torch.device) -> None:
        super().__init__()
        self.phase = ""
        self.looking = True
        """False while the tool itself calls operators."""
        self.in_optimizer = 0
        """Operators that the optimizer has called."""
        self.many_at_once = False
        """Whether one of the optimizer's operators takes many tensors."""
        self.product_flops: Counter[str] = Counter()
        """FLOPs of forward's products by the dtype of their operands, without those that attention takes in fp32 by
        design."""
        self.fp32_modules: Counter[str] = Counter()
        self.unpinned: Counter[tuple[str, str]] = Counter()
        self._reads, self._modules = reads, modules
        self._on_gpu = device.type == "cuda"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.looking:
            try:
                self._look(func, args, kwargs or {}, out)
            except Exception:  # This runs inside the loop, which an error of ours must not end.
                self.looking = False
        return out

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)  # an operator of higher order, as flex attention, has none
        if self.phase == OPTIMIZER:
            self.in_optimizer += 1
            self.many_at_once = self.many_at_once or packet.__name__.startswith(_MANY_AT_ONCE)
        if self.phase == FORWARD:
            self._look_at_product(func, args, kwargs, out)
        if not self._on_gpu:
            self._reads.follow(tree_leaves((args, kwargs)), tree_leaves(out), always=self.phase == BACKWARD)
        elif packet in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self._look_at_copy(args, out)

    def _look_at_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            flops = product_flops(func, args, kwargs, out)
        except Unknown:
            return
        if not flops:
            return
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()}
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        if dtype is None or (dtype is torch.float32 and self._reads.in_attention_of_half):
            return
        self.product_flops[str(dtype).removeprefix("torch.")] += flops
        if dtype is torch.float32:
            self.fp32_modules[self._module()] += flops

    def _module(self) -> str:
        """The path of the innermost module of the model that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = self._modules.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back
        return ""

    def _look_at_copy(self, args: tuple[Any, ...], out: Any) -> None:
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        source = tensors[-1]  # The first argument of copy_ is the destination.
        if not isinstance(out, torch.Tensor) or out.device.type != "cuda" or source.device.type != "cpu":
            return
        if source.nbytes < _SMALL_BYTES or source.is_pinned():
            return
        line = users_line()
        if line is not None:
            self.unpinned[line.where, line.function] += 1
