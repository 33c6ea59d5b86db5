"""AdamW in one launch for every parameter of a group, whatever their number and sizes, with clipping by their norm.

AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), in fp32, element by element:

    m <- m + (1 - beta1) (g - m)                      exp_avg
    v <- v + (1 - beta2) (g^2 - v)                    exp_avg_sq
    w <- w (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

w is the parameter in fp32: the parameter itself, or the master weight of one in bf16, which gets w's rounding in the
same pass. So a parameter in bf16 moves 28 bytes: it reads its gradient (2), w, m and v (4 each) and writes these three
and itself (2). Of gradients that are clipped, g is c times what is read, with the coefficient that is found below.

The tensors are found by a table of their addresses. A program takes a chunk, or one after another where there are fewer
programs: so few of them can do all of the work beside something else. The launch costs the same however many tensors
there are. One program for each chunk of 1024 elements was the fastest of 14 ways on an H200 (970 million parameters).

Clipping by the norm (Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1), with the small number that
torch.nn.utils.clip_grad_norm_ adds, over every element of every gradient:

    n = sqrt(sum g^2)
    c = min(1, max_norm / (n + 1e-6))
    g <- c g

The first kernel reads each gradient once and leaves a sum for each of its programs; the second adds these up, in the
same order each time, so the bits are the same each time. The last line is the update's, in registers: a gradient is
read twice and never written. Norm and coefficient stay on the device. A norm that is infinite makes c 0, and one that
is no number makes c none: what becomes of such gradients is as PyTorch has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.launching import ALIGNMENT_BYTES, interpreted, launch

CHUNK = tl.constexpr(1024)
"""Elements that a program updates at a time."""


@triton.jit
def adamw_update(
    addresses,  # int64 (5, tensors): of the parameter, its gradient, w, m, v
    sizes,  # int64 (tensors,): elements
    halves,  # int32 (tensors,): 1 where the parameter and its gradient are bf16
    chunk_tensors,  # int32 (chunks,): the tensor of each chunk
    chunk_starts,  # int64 (chunks,): its first element
    moving,  # fp64 (4,): lr, beta1^t, beta2^t, t
    clip,  # fp32 (2,): the gradients' norm, and the coefficient that clips them; read where CLIPPED
    tensors,
    chunks,
    rest1,  # 1 - beta1, which fp32 would make 1e-5 wrong of a beta near one
    rest2,
    eps,
    weight_decay,
    ALIGNED: tl.constexpr,
    CLIPPED: tl.constexpr,
):
    coefficient = tl.load(clip + 1) if CLIPPED else 1.0
    lr = tl.load(moving)
    step_size = (lr / (1.0 - tl.load(moving + 1))).to(tl.float32)
    correction = (1.0 / (1.0 - tl.load(moving + 2))).to(tl.float32)
    decay = (1.0 - lr * weight_decay).to(tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor = tl.load(chunk_tensors + chunk)
        start = tl.load(chunk_starts + chunk)
        left = tl.load(sizes + tensor) - start
        row = addresses + tensor
        parameter = tl.load(row)
        gradient = tl.load(row + tensors)
        w = tl.load(row + 2 * tensors)
        m = tl.load(row + 3 * tensors)
        v = tl.load(row + 4 * tensors)
        half = tl.load(halves + tensor)
        # A whole chunk needs no mask, and only without one are its loads as wide as the memory takes them.
        if left >= CHUNK:
            _update(parameter, gradient, w, m, v, half, start, left, step_size, correction, decay, coefficient,
                    rest1, rest2, eps, ALIGNED, CLIPPED, False)  # fmt: skip
        else:
            _update(parameter, gradient, w, m, v, half, start, left, step_size, correction, decay, coefficient,
                    rest1, rest2, eps, ALIGNED, CLIPPED, True)  # fmt: skip


@triton.jit
def _update(
    parameter, gradient, w, m, v, half, start, left, step_size, correction, decay, coefficient, rest1, rest2, eps,
    ALIGNED: tl.constexpr, CLIPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, CHUNK)
    mask = offsets < left if MASKED else None
    w_ptrs = _fp32_at(w, start, ALIGNED) + offsets
    m_ptrs = _fp32_at(m, start, ALIGNED) + offsets
    v_ptrs = _fp32_at(v, start, ALIGNED) + offsets
    if half:
        g = tl.load(_bf16_at(gradient, start, ALIGNED) + offsets, mask=mask).to(tl.float32)
    else:
        g = tl.load(_fp32_at(gradient, start, ALIGNED) + offsets, mask=mask)
    if CLIPPED:
        g *= coefficient
    m_new = tl.load(m_ptrs, mask=mask)
    m_new += rest1 * (g - m_new)
    v_new = tl.load(v_ptrs, mask=mask)
    v_new += rest2 * (g * g - v_new)
    w_new = tl.load(w_ptrs, mask=mask) * decay - step_size * m_new / (tl.sqrt(v_new * correction) + eps)
    tl.store(w_ptrs, w_new, mask=mask)
    tl.store(m_ptrs, m_new, mask=mask)
    tl.store(v_ptrs, v_new, mask=mask)
    if half:
        tl.store(_bf16_at(parameter, start, ALIGNED) + offsets, w_new.to(tl.bfloat16), mask=mask)


@triton.jit
def _fp32_at(address, start, ALIGNED: tl.constexpr):
    """A pointer to an element of the fp32 tensor at this address."""
    return _aligned(address.to(tl.pointer_type(tl.float32)) + start, ALIGNED)


@triton.jit
def _bf16_at(address, start, ALIGNED: tl.constexpr):
    return _aligned(address.to(tl.pointer_type(tl.bfloat16)) + start, ALIGNED)


@triton.jit
def _aligned(pointer, ALIGNED: tl.constexpr):
    # Chunks begin at multiples of CHUNK elements, so they are aligned as their tensors are.
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


# ---- clipping

SUMS = tl.constexpr(4096)
"""The most programs that sum squares: about two for each that an H200 holds at once. The order of the sum depends on
their number, which therefore does not depend on the device."""


@triton.jit
def square_sums(
    addresses,  # int64 (5, tensors), as in adamw_update
    sizes,
    halves,
    chunk_tensors,
    chunk_starts,
    sums,  # fp32 (programs,): what each program found
    tensors,
    chunks,
    ALIGNED: tl.constexpr,
):
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor = tl.load(chunk_tensors + chunk)
        start = tl.load(chunk_starts + chunk)
        left = tl.load(sizes + tensor) - start
        gradient = tl.load(addresses + tensors + tensor)
        half = tl.load(halves + tensor)
        if left >= CHUNK:
            g = _gradient_at(gradient, half, start, left, ALIGNED, False)
        else:
            g = _gradient_at(gradient, half, start, left, ALIGNED, True)
        total += g * g
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _gradient_at(address, half, start, left, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """A chunk of the gradient at this address, in fp32; zeros beyond its end."""
    offsets = tl.arange(0, CHUNK)
    mask = offsets < left if MASKED else None
    other = 0.0 if MASKED else None
    # What is known of a pointer is said where it is made: said of a function's argument, it is lost with the function.
    if half:
        half_ptr = address.to(tl.pointer_type(tl.bfloat16)) + start
        half_ptr = tl.multiple_of(half_ptr, 16) if ALIGNED else half_ptr
        g = tl.load(half_ptr + offsets, mask=mask, other=other).to(tl.float32)
    else:
        full_ptr = address.to(tl.pointer_type(tl.float32)) + start
        full_ptr = tl.multiple_of(full_ptr, 16) if ALIGNED else full_ptr
        g = tl.load(full_ptr + offsets, mask=mask, other=other)
    return g


@triton.jit
def clip_coefficient(
    sums,  # fp32 (count,)
    out,  # fp32 (2,): the norm and the coefficient
    count,
    max_norm,
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, count, BLOCK):
        total += tl.load(sums + start + offsets, mask=start + offsets < count, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    coefficient = max_norm / (norm + 1e-6)
    # Where, and no minimum: that of a number and of what is none may be the number.
    coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)
    tl.store(out, norm)
    tl.store(out + 1, coefficient)


# ---- launches

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
    ) -> None:
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
        self._rest_is_aligned = all(address % ALIGNMENT_BYTES == 0 for addresses in fixed for address in addresses)

    def _new_host_row(self) -> Tensor:
        """A row of the table on the host; pinned, so that its copy need not wait for the device."""
        return torch.empty(len(self._updated), dtype=torch.int64, pin_memory=self._device.type == "cuda")

    def run(
        self, gradients: Sequence[Tensor], moving: Moving, programs: int | None = None, clip: Tensor | None = None
    ) -> None:
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
            square_sums,
            (self.sums,),
            *self._tables,
            into,
            len(self._updated),
            self._chunks,
            ALIGNED=self._gradients_are_aligned,
            **_options(),
        )

    @property
    def _tables(self) -> tuple[Tensor, ...]:
        return self._addresses, self._sizes, self._halves, self._chunk_tensors, self._chunk_starts

    @property
    def _gradients_are_aligned(self) -> bool:
        return all(address % ALIGNMENT_BYTES == 0 for address in self._gradients)

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
