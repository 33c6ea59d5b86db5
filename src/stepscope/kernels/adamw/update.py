"""The kernel that updates every parameter of a group, whatever their number and sizes, in one launch.

AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), in fp32, element by element:

    m <- m + (1 - beta1) (g - m)                      exp_avg
    v <- v + (1 - beta2) (g^2 - v)                    exp_avg_sq
    w <- w (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

w is the parameter in fp32: the parameter itself, or the master weight of one in bf16, which gets w's rounding in the
same pass. So a parameter in bf16 moves 28 bytes: it reads its gradient (2), w, m and v (4 each) and writes these three
and itself (2). Of gradients that are clipped, g is c times what is read, with the coefficient that `norm.py` found.

The tensors are found by a table of their addresses. A program takes a chunk, or one after another where there are fewer
programs: so few of them can do all of the work beside something else. The launch costs the same however many tensors
there are. One program for each chunk of 1024 elements was the fastest of 14 ways on an H200 (970 million parameters).
"""

import triton
import triton.language as tl

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
