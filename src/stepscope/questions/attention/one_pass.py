"""One pass of attention, forward and backward: its inputs, its phases, what it saves, and compiling it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.core.attention_timing import CallCompile
from stepscope.core.attention_verdict import AttentionShape
from stepscope.core.attentions import Attention, TensorDtype
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.recording.device import timing_device
from stepscope.recording.lead import with_lead
from stepscope.recording.precision import matmul_precision
from stepscope.recording.saved_tensors import saved_tensors
from stepscope.recording.step import Phase
from stepscope.training.attention import AttentionFunction, implementation
from stepscope.training.attention.compiled import compile_for_each_shape
from stepscope.training.attention.inputs import TORCH_DTYPES


class AttentionPass:
    """Forward and backward of one call as a subject of `measure`."""

    def __init__(self, function: AttentionFunction, shape: AttentionShape, inputs: "CallInputs") -> None:
        self._function, self._shape, self._inputs = function, shape, inputs
        self.out: Tensor | None = None
        self._gradients: tuple[Tensor, ...] = ()
        self.lead: Callable[[], object] | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self._inputs.leaves

    @property
    def phases(self) -> Sequence[Phase]:
        forward, backward = Phase(name=FORWARD, run=self.forward), Phase(name=BACKWARD, run=self.backward)
        return with_lead(self.lead, forward, backward)

    def prepare(self) -> None:
        self.out, self._gradients = None, ()

    def forward(self) -> None:
        self.out = self._function(*self._inputs.leaves, causal=self._shape.causal, window=self._shape.window)

    def backward(self) -> None:
        assert self.out is not None
        # Not `.backward()`, which would add to what a pass before left, or copy.
        self._gradients = torch.autograd.grad(self.out, self._inputs.leaves, self._inputs.gradient)


@dataclass(frozen=True, kw_only=True)
class CallInputs:
    """Random numbers of one shape: q, k and v, and the output's gradient."""

    leaves: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor

    @classmethod
    def draw(cls, shape: AttentionShape, dtype: TensorDtype, device: torch.device) -> "CallInputs":
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, length: int) -> Tensor:
            size = (shape.batch, heads, length, shape.head_dim)
            return torch.randn(size, generator=generator, device=device, dtype=TORCH_DTYPES[dtype])

        q = normal(shape.heads, shape.queries).requires_grad_()
        k, v = (normal(shape.key_heads, shape.keys).requires_grad_() for _ in range(2))
        return cls(leaves=(q, k, v), gradient=normal(shape.heads, shape.queries))


def saved_storages(out: Tensor, inputs: Sequence[Tensor]) -> dict[int, int]:
    """Bytes of every storage, by its address, that autograd keeps for the backward of `out`, but those of `inputs`.

    Numbers that autograd wraps as tensors without a dimension (the scale, say) are left out: they lie on the host.
    """
    if out.grad_fn is None:
        return {}
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    storages = [saved.tensor.untyped_storage() for saved in saved_tensors(out.grad_fn) if saved.tensor.ndim]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.data_ptr() not in own}


def call_once(
    name: Attention, compile: CallCompile, shape: AttentionShape, dtype: TensorDtype, device: torch.device
) -> None:
    """Run one pass, so that the kernels that it compiles are in the caches on disk."""
    with matmul_precision("fp32"):
        function = implementation(name) if compile == "none" else compile_for_each_shape(implementation(name))
        made = AttentionPass(function, shape, CallInputs.draw(shape, dtype, device))
        made.forward()
        made.backward()
        made.prepare()
    timing_device(device).synchronize()
