"""The kernels that find the gradients' global norm, and the coefficient that clips them to a bound.

Clipping by the norm (Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1), with the small number that
torch.nn.utils.clip_grad_norm_ adds, over every element of every gradient:

    n = sqrt(sum g^2)
    c = min(1, max_norm / (n + 1e-6))
    g <- c g

The first kernel reads each gradient once and leaves a sum for each of its programs; the second adds these up, in the
same order each time, so the bits are the same each time. The last line is the update's (`update.py`), in registers: a
gradient is read twice and never written. Norm and coefficient stay on the device. A norm that is infinite makes c 0,
and one that is no number makes c none: what becomes of such gradients is as PyTorch has it.
"""

import triton
import triton.language as tl

from stepscope.kernels.adamw.update import CHUNK

SUMS = tl.constexpr(4096)
"""The most programs that sum squares: about two for each that an H200 holds at once. The order of the sum depends on
their number, which therefore does not depend on the device."""


@triton.jit
def square_sums(
    addresses,  # int64 (5, tensors), as in update.py
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
    found,  # fp32 (2,): the norm and the coefficient
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
    tl.store(found, norm)
    tl.store(found + 1, coefficient)
