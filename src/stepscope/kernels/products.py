"""Matrix products by the fastest algorithm of cuBLASLt among those that give PyTorch's bits.

    product(left, right)  ->  left (M, K) right (K, N)

cuBLASLt lists up to eight algorithms for a product, and PyTorch's is the one that cuBLAS expects to be the fastest. Of
large products it often is not: on an H200 a vocabulary's logits (2,048 x 151,936 of 896 terms) took 765 us by PyTorch's
and 706 by the sixth (results/h200/own-step/products.txt). PyTorch has no way to ask for another one, so its library is
called here through ctypes, with PyTorch's own handle.

The second call of a shape tries all of them on its operands, and later calls take the fastest of those whose results
are PyTorch's to the bit: only time changes, and a step repeats its bits whichever was chosen. Where most rows of the
result are alike, as of zeros or NaN, all algorithms have the same bits: the fourth call tries then, the eighth, and so
on. Small products, other dtypes and other devices are PyTorch's, and so is what a CUDA graph captures, or a profiler
follows, before its shape was tried.
"""

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.utils.flop_counter import register_flop_formula

from stepscope.kernels.operators import define, followed

_LEAST_FLOPS = 1 << 34
"""The FLOPs from which a product is tried: some 20 us. Of 36 smaller ones one had a faster algorithm, by 3 %."""
_GAIN = 0.98
"""The share of PyTorch's time that another algorithm must stay below."""
_TRIED_AT = 2
"""The call of a shape that tries: shapes that come once are not worth it."""
_LEAST_UNLIKE = 0.125
"""The share of a result's rows that must be unlike each other: of masked language models 15 % of rows have a target."""
_MOST_SHAPES = 64
"""How many shapes are tried: where lengths differ from step to step, trials would never end."""
_MOST_COUNTED = 4096
"""How many shapes are counted that were not tried."""
_TRIED_US = 500.0
"""For how long an algorithm runs in each of two rounds."""
_WORKSPACE = 32 << 20
"""Bytes that an algorithm may ask for: as many as PyTorch gives cuBLAS on Hopper."""
_MOST_LISTED = 16
_ALIGNMENT = 256
"""The multiple of bytes at which cuBLASLt takes every operand to begin, unless it is told otherwise."""

# The numbers of cublasLt.h and library_types.h.
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
_SUMS, _FACTORS = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
_TRANSPOSED = 3, 4  # CUBLASLT_MATMUL_DESC_TRANSA, and TRANSB
_MOST_BYTES = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES


class _Listed(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class _Algorithm:
    """One of cuBLASLt's for operands of one shape."""

    library: Any
    matmul: ctypes.c_void_p
    layouts: tuple[Any, ...]
    """How the right factor, the left one and the result lie."""
    listed: _Listed

    def __call__(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        workspace = left.new_empty(self.listed.workspace, dtype=torch.uint8)
        one, nothing = ctypes.c_float(1), ctypes.c_float(0)
        of_right, of_left, of_out = self.layouts
        places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (right, left, out, workspace)]
        with torch.cuda.device(left.device):  # which has a handle of its own
            status = self.library.cublasLtMatmul(
                ctypes.c_void_p(torch.cuda.current_blas_handle()), self.matmul, ctypes.byref(one), places[0], of_right,
                places[1], of_left, ctypes.byref(nothing), places[2], of_out, places[2], of_out,
                ctypes.byref(self.listed.algorithm), places[3], ctypes.c_size_t(self.listed.workspace),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )  # fmt: skip
        if status:
            raise RuntimeError(f"cuBLASLt: status {status} of a product {tuple(left.shape)} x {tuple(right.shape)}")


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (M, K) right (K, N), of one dtype, in `out` (M, N) or a new tensor. Autocast leaves it alone, and autograd
    does not record it."""
    if out is None and torch.compiler.is_compiling():
        return torch.ops.stepscope.product(left, right)
    return _made(left, right, out)


def _made(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The product as it runs: another thread may compile meanwhile, of which PyTorch tells all threads."""
    if out is None:
        out = left.new_empty(left.shape[0], right.shape[1])
    if followed(left, right, out) or not _is_chosen(left, right, out):
        return torch.mm(left, right, out=out)
    torch.ops.stepscope.chosen_product(left, right, out)
    return out


def _is_chosen(left: Tensor, right: Tensor, out: Tensor) -> bool:
    """Whether another algorithm than PyTorch's makes this product."""
    (rows, terms), columns = left.shape, right.shape[1]
    if not left.is_cuda or left.dtype not in _DTYPES or 2 * rows * terms * columns < _LEAST_FLOPS:
        return False
    if (left.data_ptr() | right.data_ptr() | out.data_ptr()) % _ALIGNMENT or columns % 4 or not out.is_contiguous():
        return False
    key = _key(left, right, out)
    if key not in _known:
        full = len(_known) >= _MOST_SHAPES or len(_calls) >= _MOST_COUNTED
        if full or torch.cuda.is_current_stream_capturing() or _profiler_enabled():
            return False
        _calls[key] += 1
        if _calls[key] < _TRIED_AT or _calls[key].bit_count() > 1:
            return False
        with torch.cuda.device(left.device):
            if not _tells(torch.mm(left, right, out=out)):
                return False
            _known[key] = _fastest(left, right, out)
    return _known[key] is not None


def _tells(out: Tensor) -> bool:
    """Whether algorithms that differ would show it in a result."""
    return len(_signature(out)[1].unique()) >= _LEAST_UNLIKE * len(out)


_Run = Callable[[Tensor, Tensor, Tensor], None]
_calls: Counter[object] = Counter()
_known: dict[object, _Run | None] = {}
"""By kind of operands the algorithm that is taken; None for PyTorch's."""


def _key(*operands: Tensor) -> object:
    rules = torch.backends.cuda.matmul  # by which PyTorch chooses, too
    flags = (
        rules.allow_bf16_reduced_precision_reduction,
        rules.allow_fp16_reduced_precision_reduction,
        rules.allow_fp16_accumulation,
    )
    return operands[0].device, operands[0].dtype, flags, *((each.shape, each.stride()) for each in operands)


def _run_chosen(*operands: Tensor) -> None:
    run = _known[_key(*operands)]
    assert run is not None  # else nobody calls it
    run(*operands)


define(
    "product(Tensor left, Tensor right) -> Tensor",
    _made,
    lambda left, right: left.new_empty(left.shape[0], right.shape[1]),
)
# An operator, so that a trace has its shapes.
define("chosen_product(Tensor left, Tensor right, Tensor(a!) out) -> ()", _run_chosen, lambda *_: None)


@register_flop_formula(torch.ops.stepscope.product)
def _flops(left_shape: Any, right_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * left_shape[0] * left_shape[1] * right_shape[1]


def _fastest(left: Tensor, right: Tensor, out: Tensor) -> _Run | None:
    """The fastest algorithm with PyTorch's bits, which `out` holds in the end; None for PyTorch's own."""

    def pytorch(left: Tensor, right: Tensor, out: Tensor) -> None:
        torch.mm(left, right, out=out)

    pytorch(left, right, out)
    bits = _signature(out)
    runs: list[_Run] = [pytorch]
    for run in _listed(left, right, out):
        out.zero_()
        try:
            run(left, right, out)
        except RuntimeError:  # cuBLASLt refuses what it listed, or there is no memory for its workspace
            continue
        if all(map(torch.equal, _signature(out), bits)):
            runs.append(run)
    first = _seconds(lambda: pytorch(left, right, out), 1)
    times = max(2, min(20, math.ceil(_TRIED_US / 1e6 / first)))
    rounds = [[_seconds(functools.partial(run, left, right, out), times) for run in runs] for _ in range(2)]
    least = [min(of) for of in zip(*rounds, strict=True)]
    best = min(range(len(runs)), key=least.__getitem__)
    pytorch(left, right, out)
    return runs[best] if least[best] < _GAIN * least[0] else None


def _signature(out: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the bits of each row and column: two results that differ have others. No copy of a result is made: four
    numbers are one of 64 bits, whose sums PyTorch makes as they lie."""
    words = out.view(torch.int64)
    return words.sum(0), words.sum(1)


def _seconds(run: Callable[[], None], times: int) -> float:
    """The time of a call among so many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def _listed(left: Tensor, right: Tensor, out: Tensor) -> list[_Run]:
    """What cuBLASLt lists for these operands, its favourite first; nothing where it does not take them."""
    library = _library()
    if library is None:
        return []
    # cuBLASLt has columns side by side: it makes out^T = right^T left^T.
    tensors = right, left, out
    layouts = [_layout(library, tensor) for tensor in tensors]
    if any(layout is None for layout in layouts) or not _by_rows(out):
        return []
    matmul, preference, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(0)
    calls = [library.cublasLtMatmulDescCreate(ctypes.byref(matmul), _SUMS, _FACTORS)]
    for place, tensor in zip(_TRANSPOSED, tensors, strict=False):
        turned = ctypes.c_int32(not _by_rows(tensor))
        calls.append(library.cublasLtMatmulDescSetAttribute(matmul, place, ctypes.byref(turned), ctypes.c_size_t(4)))
    calls.append(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    most = ctypes.c_uint64(_WORKSPACE)
    calls.append(
        library.cublasLtMatmulPreferenceSetAttribute(preference, _MOST_BYTES, ctypes.byref(most), ctypes.c_size_t(8))
    )
    found, handle = (_Listed * _MOST_LISTED)(), ctypes.c_void_p(torch.cuda.current_blas_handle())
    places = (layouts[0], layouts[1], layouts[2], layouts[2])
    calls.append(
        library.cublasLtMatmulAlgoGetHeuristic(
            handle, matmul, *places, preference, _MOST_LISTED, found, ctypes.byref(count)
        )
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if any(calls):
        return []
    taken = [each for each in found[: count.value] if each.state == 0]
    return [_Algorithm(library, matmul, tuple(layouts), each) for each in taken]


def _by_rows(tensor: Tensor) -> bool:
    return tensor.stride(1) == 1


def _layout(library: Any, tensor: Tensor) -> ctypes.c_void_p | None:
    """How a matrix lies, its rows as cuBLASLt's columns; None where neither rows nor columns lie side by side."""
    rows, columns = tensor.shape if _by_rows(tensor) else tensor.shape[::-1]
    beside, step = tensor.stride()[::-1] if _by_rows(tensor) else tensor.stride()
    layout = ctypes.c_void_p()
    sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(step)
    if beside != 1 or step < columns:
        return None
    failed = library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _DTYPES[tensor.dtype], *sizes)
    return None if failed else layout


@functools.cache
def _library() -> Any:
    """cuBLASLt, which PyTorch has loaded; None where it has another."""
    version = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{version}") if version else None
    except OSError:
        return None
