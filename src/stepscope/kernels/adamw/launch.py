"""Launches of the AdamW kernel: the tables that it finds its tensors by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.kernels.adamw.norm import SUMS, clip_coefficient, square_sums
from stepscope.kernels.adamw.update import CHUNK, adamw_update
from stepscope.kernels.launching import interpreted, launch

_ALIGNMENT = 16
_BLOCK = 1024
"""Sums of squares that are added at a time."""


class Moving:
    """What changes from update to update, on the device, so that a replayed CUDA graph moves it too."""

    def __init__(self, betas: tuple[float, float], device: torch.device, updates: int = 0) -> None:
        """updates: how many there were."""
        beta1, beta2 = betas
        powers = [0.0, beta1**updates, beta2**updates, updates]
        self.values = torch.tensor(powers, dtype=torch.float64, device=device)
        """fp64 (4,): lr, beta1^t, beta2^t, t."""
        self._factors = torch.tensor([1.0, beta1, beta2, 1.0], dtype=torch.float64, device=device)
        self._terms = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)
        self._lr: float | None = None

    def advance(self, lr: float | Tensor) -> None:
        """Begin another update at this learning rate. A tensor is read on the device whenever this runs there."""
        if isinstance(lr, Tensor):
            self.values[0].copy_(lr)
        elif lr != self._lr:
            self._lr = lr
            self.values[0].fill_(lr)
        torch.addcmul(self._terms, self.values, self._factors, out=self.values)


@dataclass(frozen=True, kw_only=True)
class Updated:
    """One parameter (any shape, dense) with what its update reads and writes. Elements lie in the same order in all."""

    parameter: Tensor
    """bf16 or fp32."""
    master: Tensor
    """fp32: the parameter itself, or the master weight of one in bf16."""
    exp_avg: Tensor
    """fp32."""
    exp_avg_sq: Tensor
    """fp32."""


class UpdateOfMany:
    """The update of some parameters, in one launch. It keeps their addresses, so they must stay where they are.

    Gradients may move: their addresses are written anew wherever they did.
    """

    def __init__(
        self, updated: Sequence[Updated], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:  # fmt: skip
        self._updated = list(updated)
        self._numbers = (1 - betas[0], 1 - betas[1], eps, weight_decay)
        self._device = updated[0].parameter.device
        sizes = torch.tensor([each.parameter.numel() for each in updated])
        counts = (sizes + CHUNK.value - 1) // CHUNK.value
        self._chunks = int(counts.sum())
        self._sizes = sizes.to(self._device)
        halves = [each.parameter.dtype == torch.bfloat16 for each in updated]
        self._halves = torch.tensor(halves, dtype=torch.int32, device=self._device)
        tensors = torch.repeat_interleave(torch.arange(len(updated)), counts)
        firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        self._chunk_tensors = tensors.to(self._device, torch.int32)
        self._chunk_starts = ((torch.arange(self._chunks) - firsts) * CHUNK.value).to(self._device)
        fixed = [
            [
                tensor.data_ptr()
                for tensor in (each.parameter, each.parameter, each.master, each.exp_avg, each.exp_avg_sq)
            ]
            for each in updated
        ]
        self._addresses = torch.tensor(fixed).T.contiguous().to(self._device)
        self._spare = self._new_host_row()
        self._captured: list[Tensor] = []
        self._gradients: list[int] = []
        self._rest_is_aligned = all(address % _ALIGNMENT == 0 for addresses in fixed for address in addresses)

    def _new_host_row(self) -> Tensor:
        """A row of the table on the host; pinned, so that its copy need not wait for the device."""
        return torch.empty(len(self._updated), dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def run(
        self, gradients: Sequence[Tensor], moving: Moving, programs: int | None = None, clip: Tensor | None = None
    ) -> None:  # fmt: skip
        """Update every parameter. gradients: in the parameters' order, of their dtypes and layouts. programs: how many
        do the work; None for one for each chunk. clip: fp32 (2,), the gradients' norm and the coefficient by which they
        are multiplied."""
        if not self._chunks:
            return
        self._find(gradients)
        rest1, rest2, eps, weight_decay = self._numbers
        launch(
            adamw_update, (min(self._chunks, programs or self._chunks),),
            *self._tables, moving.values, moving.values if clip is None else clip,
            len(self._updated), self._chunks, rest1, rest2, eps, weight_decay,
            ALIGNED=self._rest_is_aligned and self._gradients_are_aligned, CLIPPED=clip is not None, **_options(),
        )  # fmt: skip

    @property
    def sums(self) -> int:
        """How many sums of squares its gradients make."""
        return min(self._chunks, SUMS.value)

    def sum_squares(self, gradients: Sequence[Tensor], into: Tensor) -> None:
        """Write `sums` numbers, which add up to the squares of all gradients. gradients: as `run` takes them."""
        if not self._chunks:
            return
        self._find(gradients)
        launch(
            square_sums, (self.sums,), *self._tables, into, len(self._updated), self._chunks,
            ALIGNED=self._gradients_are_aligned, **_options(),
        )  # fmt: skip

    @property
    def _tables(self) -> tuple[Tensor, ...]:
        return self._addresses, self._sizes, self._halves, self._chunk_tensors, self._chunk_starts

    @property
    def _gradients_are_aligned(self) -> bool:
        return all(address % _ALIGNMENT == 0 for address in self._gradients)

    def _find(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients' addresses into the table, where they are not there already."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses == self._gradients:
            return
        row, self._gradients = self._spare, addresses
        row.copy_(torch.tensor(addresses))
        self._addresses[1].copy_(row, non_blocking=True)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Each replay reads this row again. No memory may be pinned now, so there is no next one.
            self._captured.append(row)
        else:
            self._spare = self._new_host_row()


class Clipping:
    """The global norm of the gradients of several updates, and the coefficient that clips it to a bound."""

    def __init__(self, max_norm: float, device: torch.device) -> None:
        self._max_norm = float(max_norm)
        self.values = torch.zeros(2, dtype=torch.float32, device=device)
        """fp32 (2,): the norm and the coefficient, of the gradients that were last measured."""
        self._sums = torch.empty(0, dtype=torch.float32, device=device)

    def measure(self, updates: Sequence[tuple[UpdateOfMany, Sequence[Tensor]]]) -> None:
        """Find both of all gradients, each with the update that will take them. Nothing waits for the device."""
        count = sum(update.sums for update, _ in updates)
        if count > len(self._sums):
            self._sums = self._sums.new_empty(count)
        begin = 0
        for update, gradients in updates:
            update.sum_squares(gradients, self._sums[begin:])
            begin += update.sums
        launch(clip_coefficient, (1,), self._sums, self.values, count, self._max_norm, BLOCK=_BLOCK, **_options())


def _options() -> dict[str, int]:
    return {} if interpreted() else {"num_warps": 4}
