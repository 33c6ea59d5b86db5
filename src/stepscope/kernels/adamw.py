"""AdamW in one launch for every parameter of a group, whatever their number and sizes, with clipping by their norm.

AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), in fp32, element by element:

    m <- m + (1 - beta1) (g - m)                      exp_avg
    v <- v + (1 - beta2) (g^2 - v)                    exp_avg_sq
    w <- w (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

w is the parameter in fp32: the parameter itself, or the master weight of one in bf16. Of a master the parameter is the
rounding and has its upper bits, so the lower 16 alone are kept beside it (`lower_bits`): the master is exact, and takes
2 bytes. A parameter in bf16 then moves 26 bytes: it reads its gradient, itself and the lower bits (2 each), m and v (4
each), and writes all but the gradient. Of gradients that are clipped, g is c times what is read, with the coefficient
that is found below.

Moments may be kept in 8 bits (Dettmers et al. 2022, arXiv:2110.02861, keeps them so by another code): a code for each
number, and for each BLOCK of them a scale in fp32, the largest of the block. A parameter in bf16 then moves 14 bytes.
Codes have 3 bits of mantissa, and below 2^-16 of the largest (m, with a sign) or 2^-32 (v) they are evenly spaced. Both
are rounded stochastically: beta2 = 0.999 moves v by less than half a code's step, which rounding to nearest would lose
for ever. Two things keep a coarse code from a step that AdamW would not make. The least v is the first code, not zero.
And the Cauchy-Schwarz inequality bounds the quotient of exact moments, so m is held within it:

    |m| <= sqrt(v) (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))       where beta1^2 < beta2

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.kernels.launching import ALIGNMENT_BYTES, interpreted, launch

CHUNK = tl.constexpr(1024)
"""Elements that a program updates at a time."""

BLOCK = tl.constexpr(256)
"""Elements whose moments share a scale, where they have 8 bits: eight for each thread of a warp."""

WIDE, HALF_AS_WIDE = tl.constexpr(16), tl.constexpr(8)
"""Bytes of 16-bit numbers that a thread reads at once."""

NAN = tl.constexpr(0x7FC0)
"""The bits of bf16's NaN, which rounding by adding would miss."""

_BLOCKS = tl.constexpr(CHUNK.value // BLOCK.value)
SIGNED_BASE, UNSIGNED_BASE = tl.constexpr((1016 - 127) << 20), tl.constexpr((1016 - 255) << 20)
SIGNED_LEAST, UNSIGNED_LEAST = tl.constexpr(1.125 * 2.0**-16), tl.constexpr(1.125 * 2.0**-32)
"""The number that is added before fp32's sign, exponent and first three bits of mantissa are taken as a code, and the
bits of it: so codes below it are evenly spaced down to zero, and the largest, 127 or 255, stands for 1."""


@triton.jit
def adamw_update(
    addresses,  # int64 (7, tensors): of the parameter, its gradient, w's lower bits, m, v, and the scales of m and v
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
    bound,  # the most of m / sqrt(v); read where EIGHT
    ALIGNED: tl.constexpr,
    CLIPPED: tl.constexpr,
    EIGHT: tl.constexpr,  # m and v are codes of 8 bits
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
        m_scale, v_scale = row + 5 * tensors, row + 6 * tensors
        update = tl.load(moving + 3).to(tl.int64)
        seed = (update * 0x85EBCA6B + chunk * CHUNK) & 0xFFFFFFFF
        half = tl.load(halves + tensor)
        # A whole chunk needs no mask, and only without one are its loads as wide as the memory takes them.
        if left >= CHUNK:
            _update(parameter, gradient, w, m, v, m_scale, v_scale, half, start, left, step_size, correction, decay,
                    coefficient, rest1, rest2, eps, bound, seed, ALIGNED, CLIPPED, EIGHT, False)  # fmt: skip
        else:
            _update(parameter, gradient, w, m, v, m_scale, v_scale, half, start, left, step_size, correction, decay,
                    coefficient, rest1, rest2, eps, bound, seed, ALIGNED, CLIPPED, EIGHT, True)  # fmt: skip


@triton.jit
def _update(
    parameter, gradient, w, m, v, m_scale, v_scale, half, start, left, step_size, correction, decay, coefficient,
    rest1, rest2, eps, bound, seed,
    ALIGNED: tl.constexpr, CLIPPED: tl.constexpr, EIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    blocks = tl.arange(0, _BLOCKS)
    offsets = (blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]) if EIGHT else tl.arange(0, CHUNK)
    mask = offsets < left if MASKED else None
    # A thread reads 4 elements of every tensor, where the others have 32 bits: with 8 of 16 bits, values would change
    # threads. Beside 8 of 8 bits it is the faster way.
    wide: tl.constexpr = WIDE if EIGHT else HALF_AS_WIDE
    if half:
        g = tl.load(_bf16_at(gradient, start, ALIGNED, wide) + offsets, mask=mask).to(tl.float32)
        w_old = _load_master(parameter, w, start, offsets, mask, ALIGNED, wide)
    else:
        g = tl.load(_fp32_at(gradient, start, ALIGNED) + offsets, mask=mask)
        w_old = tl.load(_fp32_at(parameter, start, ALIGNED) + offsets, mask=mask)
    if CLIPPED:
        g *= coefficient
    if EIGHT:
        begun = blocks * BLOCK < left if MASKED else None
        m_scales = tl.load(m_scale).to(tl.pointer_type(tl.float32)) + start // BLOCK + blocks
        v_scales = tl.load(v_scale).to(tl.pointer_type(tl.float32)) + start // BLOCK + blocks
        m_codes = _code_at(m, start, ALIGNED) + offsets
        v_codes = _code_at(v, start, ALIGNED) + offsets
        m_new = _load_codes(m_codes, m_scales, mask, begun, True)
        v_new = _load_codes(v_codes, v_scales, mask, begun, False)
    else:
        m_ptrs = _fp32_at(m, start, ALIGNED) + offsets
        v_ptrs = _fp32_at(v, start, ALIGNED) + offsets
        m_new = tl.load(m_ptrs, mask=mask)
        v_new = tl.load(v_ptrs, mask=mask)
    m_new += rest1 * (g - m_new)
    v_new += rest2 * (g * g - v_new)
    if EIGHT:
        root = tl.sqrt(v_new)
        m_new = tl.maximum(tl.minimum(m_new, bound * root), -bound * root)
        root *= tl.sqrt(correction)
    else:
        root = tl.sqrt(v_new * correction)
    w_new = w_old * decay - step_size * m_new / (root + eps)
    if half:
        _store_master(parameter, w, start, offsets, w_new, mask, ALIGNED, wide)
    else:
        tl.store(_fp32_at(parameter, start, ALIGNED) + offsets, w_new, mask=mask)
    if EIGHT:
        if MASKED:  # what lies beyond the end is no part of a block's largest
            m_new = tl.where(mask, m_new, 0.0)
            v_new = tl.where(mask, v_new, 0.0)
        random = _random_bits(offsets, seed)
        _store_codes(m_codes, m_scales, m_new, (random & 0xFFFFF).to(tl.int32), mask, begun, True)
        _store_codes(v_codes, v_scales, v_new, (random >> 12).to(tl.int32), mask, begun, False)
    else:
        tl.store(m_ptrs, m_new, mask=mask)
        tl.store(v_ptrs, v_new, mask=mask)


@triton.jit
def _load_master(parameter, lower, start, offsets, mask, ALIGNED: tl.constexpr, BYTES: tl.constexpr):
    """A master weight in fp32, of the parameter in bf16 and the lower bits beside it (`master_of`)."""
    upper = tl.load(_int16_at(parameter, start, ALIGNED, BYTES) + offsets, mask=mask).to(tl.int32)
    rest = tl.load(_int16_at(lower, start, ALIGNED, BYTES) + offsets, mask=mask).to(tl.int32)
    rest = tl.where((upper & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
    return ((upper << 16) + rest).to(tl.float32, bitcast=True)


@triton.jit
def _store_master(parameter, lower, start, offsets, w, mask, ALIGNED: tl.constexpr, BYTES: tl.constexpr):
    bits = w.to(tl.int32, bitcast=True)
    is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
    upper = tl.where(is_number, (bits + 0x8000) >> 16, NAN)
    tl.store(_int16_at(parameter, start, ALIGNED, BYTES) + offsets, upper.to(tl.int16), mask=mask)
    tl.store(_int16_at(lower, start, ALIGNED, BYTES) + offsets, bits.to(tl.int16), mask=mask)


@triton.jit
def _load_codes(codes, scales, mask, begun, SIGNED: tl.constexpr):
    """What the codes of each block stand for."""
    base: tl.constexpr = SIGNED_BASE if SIGNED else UNSIGNED_BASE
    least: tl.constexpr = SIGNED_LEAST if SIGNED else UNSIGNED_LEAST
    code = tl.load(codes, mask=mask).to(tl.int32)
    scale = tl.load(scales, mask=begun)[:, None]
    size = code & 127 if SIGNED else code
    value = (((size << 20) + base).to(tl.float32, bitcast=True) - least) * scale
    return tl.where(code > 127, -value, value) if SIGNED else value


@triton.jit
def _store_codes(codes, scales, value, random, mask, begun, SIGNED: tl.constexpr):
    """Store the largest of each block, and for each number one of the codes beside its share of it, so that their mean
    is the number. random: 20 bits."""
    base: tl.constexpr = SIGNED_BASE if SIGNED else UNSIGNED_BASE
    least: tl.constexpr = SIGNED_LEAST if SIGNED else UNSIGNED_LEAST
    size = tl.abs(value) if SIGNED else value
    largest = tl.max(size, 1)
    tl.store(scales, largest, mask=begun)
    one_over = tl.where(largest > 1e-37, 1.0 / tl.maximum(largest, 1e-37), 0.0)[:, None]
    code = ((size * one_over + least).to(tl.int32, bitcast=True) + (random - base)) >> 20
    code = tl.minimum(code, 127) + tl.where(value < 0.0, 128, 0) if SIGNED else tl.maximum(tl.minimum(code, 255), 1)
    tl.store(codes, code.to(tl.uint8), mask=mask)


@triton.jit
def _random_bits(offsets, seed):
    """32 bits for each element, other ones at each update: a hash of both."""
    x = (offsets.to(tl.uint32) + seed.to(tl.uint32)) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA77
    return x ^ (x >> 13)


@triton.jit
def _code_at(address, start, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.uint8)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


# Chunks begin at multiples of CHUNK elements, so they are aligned as their tensors are. What is known of a pointer is
# said where it is made: said of a function's argument it is lost, and loads are as narrow as an element.


@triton.jit
def _fp32_at(address, start, ALIGNED: tl.constexpr):
    """A pointer to an element of the fp32 tensor at this address."""
    pointer = address.to(tl.pointer_type(tl.float32)) + start
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _bf16_at(address, start, ALIGNED: tl.constexpr, BYTES: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.bfloat16)) + start
    return tl.multiple_of(pointer, BYTES) if ALIGNED else pointer


@triton.jit
def _int16_at(address, start, ALIGNED: tl.constexpr, BYTES: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.int16)) + start
    return tl.multiple_of(pointer, BYTES) if ALIGNED else pointer


# ---- clipping

SUMS = tl.constexpr(4096)
"""The most programs that sum squares: about two for each that an H200 holds at once. The order of the sum depends on
their number, which therefore does not depend on the device."""


@triton.jit
def square_sums(
    addresses,  # int64 (7, tensors), as in adamw_update
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


def most_of_quotient(beta1: float, beta2: float) -> float:
    """The most that |exp_avg| / sqrt(exp_avg_sq) can be, whatever the gradients were; infinity where nothing bounds
    it."""
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


class Moving:
    """What changes from update to update, on the device, so that a replayed CUDA graph moves it too."""

    def __init__(self, betas: tuple[float, float], device: torch.device, updates: int = 0) -> None:
        """updates: how many there were."""
        beta1, beta2 = self._betas = tuple(betas)
        powers = [0.0, beta1**updates, beta2**updates, updates]
        self.values = torch.tensor(powers, dtype=torch.float64, device=device)
        """fp64 (4,): lr, beta1^t, beta2^t, t."""
        self._factors = torch.tensor([1.0, beta1, beta2, 1.0], dtype=torch.float64, device=device)
        self._terms = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64, device=device)
        self._lr: float | None = None

    def advance(self, lr: float | Tensor, betas: tuple[float, float]) -> None:
        """Begin another update at this learning rate. A tensor is read on the device whenever this runs there."""
        if tuple(betas) != self._betas:  # as a schedule of momentum sets them
            self._betas = tuple(betas)
            for factor, beta in zip(self._factors[1:3], betas, strict=True):
                factor.fill_(beta)
            torch.pow(self._factors[1:3], self.values[3], out=self.values[1:3])
        if isinstance(lr, Tensor):
            self.values[0].copy_(lr)
        elif lr != self._lr:
            self._lr = lr
            self.values[0].fill_(lr)
        torch.addcmul(self._terms, self.values, self._factors, out=self.values)


def lower_bits(parameter: Tensor, master: Tensor | None = None) -> Tensor:
    """Let a parameter in bf16 be the rounding of its master in fp32, by default of its own value; returns the lower 16
    bits of the master, int16, laid out as the parameter is.

    From the middle of two numbers of bf16 it rounds away from zero, where PyTorch's cast takes the even one: so the
    rounding and the lower bits, as a signed number, add up to the master's bits (`master_of`).
    """
    if master is None:
        return torch.zeros_like(parameter, dtype=torch.int16)
    bits = torch.empty_like(parameter, dtype=torch.float32).copy_(master).view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    parameter.copy_(torch.where(master.isnan(), math.nan, upper))
    return bits.to(torch.int16)


def master_of(parameter: Tensor, lower: Tensor) -> Tensor:
    """The master weight in fp32 of a parameter in bf16 and the lower bits beside it.

    Below zero there is no master, so none rounds to zero with negative bits. But a weight may be set to zero by hand,
    as pruning does, beside the bits of another number: the sum would be NaN.
    """
    upper = parameter.detach().view(torch.int16).int()
    lower = torch.where(upper & 0x7FFF == 0, lower.clamp(min=0), lower)
    return ((upper << 16) + lower).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Updated:
    """One parameter (any shape, dense) with what its update reads and writes. Elements lie in the same order in all."""

    parameter: Tensor
    """bf16 or fp32."""
    lower: Tensor | None
    """int16: the lower bits of the master weight of one in bf16 (`lower_bits`)."""
    exp_avg: Tensor
    """fp32; or uint8, codes that need scales."""
    exp_avg_sq: Tensor
    """As exp_avg."""
    scales: tuple[Tensor, Tensor] | None = None
    """Scales of both moments' codes: fp32, one for each BLOCK of elements as they lie. All of an update, or none."""


class UpdateOfMany:
    """The update of some parameters, in one launch. It keeps their addresses, so they must stay where they are
    (`has_moved`).

    Gradients may move: their addresses are written anew wherever they did.
    """

    def __init__(
        self, updated: Sequence[Updated], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._updated = list(updated)
        self.set_numbers(betas=betas, eps=eps, weight_decay=weight_decay)
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
        self._eight = updated[0].scales is not None
        fixed = [
            [
                tensor.data_ptr()
                for tensor in (
                    *(each.parameter, each.parameter, each.parameter if each.lower is None else each.lower),
                    *(each.exp_avg, each.exp_avg_sq),
                    *(each.scales or (each.exp_avg, each.exp_avg_sq)),
                )
            ]
            for each in updated
        ]
        self._places = [addresses[0] for addresses in fixed]
        self._addresses = torch.tensor(fixed).T.contiguous().to(self._device)
        self._spare = self._new_host_row()
        self._captured: list[Tensor] = []
        self._gradients: list[int] = []
        self._rest_is_aligned = all(address % ALIGNMENT_BYTES == 0 for addresses in fixed for address in addresses)

    def set_numbers(self, *, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Compute by these from the next launch on."""
        self._numbers = (1 - betas[0], 1 - betas[1], eps, weight_decay, min(most_of_quotient(*betas), 1e38))

    def has_moved(self) -> bool:
        """Whether a parameter has another storage by now, as where something set its `data`."""
        return [each.parameter.data_ptr() for each in self._updated] != self._places

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
        launch(
            adamw_update, (min(self._chunks, programs or self._chunks),),
            *self._tables, moving.values, moving.values if clip is None else clip,
            len(self._updated), self._chunks, *self._numbers,
            ALIGNED=self._rest_is_aligned and self._gradients_are_aligned, CLIPPED=clip is not None, EIGHT=self._eight,
            **_options(),
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
