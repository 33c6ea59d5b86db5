"""From a kernel's name to a `KernelName`."""

import re
from dataclasses import replace

from stepscope.traces.kernels.names.matrix_products import GRAMMARS
from stepscope.traces.kernels.names.name import NAME_LIMIT, Dtype, KernelName, Library, split_name

OPERATION_LIMIT = 512
"""Characters of an operation or function that patterns look at; the longest real ones have some 250."""


def decode(name: str) -> KernelName:
    """What the name says. Any text is a name: one that says nothing has a function and no more."""
    function, arguments, complete = split_name(name)
    operation = _operation(function, arguments)
    decoded = KernelName(
        name=name,
        function=function,
        arguments=arguments,
        operation=operation,
        library=_library(function[:OPERATION_LIMIT], operation),
    )
    for grammar in GRAMMARS:
        if (product := grammar(decoded, operation)) is not None:
            return product
    for decoder in (_attention, _small_product, _communication):
        if (other := decoder(decoded)) is not None:
            return other
    return _elements(decoded) if complete and decoded.library == "ATen" else decoded


def is_tf32(decoded: KernelName) -> bool:
    """Whether the kernel rounds fp32 operands to TF32's 10 bits (row 3 of docs/measuring.md).

    Three TF32 products for one of fp32, as xFormers's fp32 attention takes, do not count: they keep fp32's precision.
    """
    return decoded.input_dtype == "tf32"


_WRAPPERS = re.compile(r"cutlass::(?:Kernel2?|device_kernel)")


def _operation(function: str, arguments: str) -> str:
    if _WRAPPERS.fullmatch(function):
        return split_name(arguments.partition(",")[0]).function.rpartition("::")[2][:OPERATION_LIMIT]
    if function == "ck_tile::kentry":
        return _instantiated(arguments)[:OPERATION_LIMIT] or "kentry"
    return function.rpartition("::")[2][:OPERATION_LIMIT]


_MANGLED_CLASS = re.compile(r"(?:Li\d{1,4}E)*NS_(\d{1,3})")


def _instantiated(arguments: str) -> str:
    """The class that Composable Kernel's wrapper is instantiated with, after its numbers; "" where it is not there."""
    if mangled := _MANGLED_CLASS.match(arguments):
        return arguments[mangled.end() : mangled.end() + int(mangled[1])]
    words = (word.strip() for word in arguments.partition("<")[0].split(","))
    return next((word.rpartition("::")[2] for word in words if not word.isdecimal()), "")


_LIBRARIES: tuple[tuple[Library, str, str], ...] = (
    # library, pattern of the function with its namespaces, pattern of the operation. The first that fits.
    ("Triton", r"^triton_(?:poi|red|per|tem|for|mm)_", ""),
    ("FlashAttention", r"(?:^|::)flash(?:_fwd|_bwd)?_|^flash::|^pytorch_flash::", r"^enable_sm\d|^FlashAttn"),
    ("xFormers", r"^fmha_cutlass[FB]_", r"^attention_kernel_batched_impl|^attention_kernel_backward_batched_impl"),
    ("cuDNN", r"^cudnn|(?:^|::)cudnn|_scudnn_|implicit_convolve_sgemm", ""),
    # cuBLAS ships CUTLASS kernels of its own: whose call it was, the name does not say.
    ("CUTLASS", r"^cutlass(?:::|3x_|_)", ""),
    ("cuBLAS", r"^nvjet_|^sm\d+a?_xmma_\w+_cublas$|^(?:maxwell|pascal|volta|turing|ampere|ada|hopper)_\w*gemm", ""),
    ("cuBLAS", r"^cublas|splitKreduce_kernel$|^gemv(?:2[NT]|NSP|Nx|x)|::gemvx::|^gemm(?:SN|k1)_", ""),
    ("cuBLAS", r"^dot_kernel$|^reduce_1Block_kernel$", ""),
    ("NCCL", r"^nccl(?:Dev)?Kernel", ""),
    ("Tensile", r"^Cijk?_A", ""),
    ("MIOpen", r"^(?:MIOpen|miopen)", ""),
    ("Composable Kernel", r"^ck(?:_tile)?::", ""),
    ("Transformer Engine", r"^transformer_engine::", ""),
    # CUB lies in others' namespaces too (at_cuda_detail::cub), Thrust's kernels in cuda_cub.
    ("Thrust", r"^thrust::|::cuda_cub::", ""),
    ("CUB", r"(?:^|::)cub::", ""),
    ("Apex", r"^(?:cuApplyLayerNorm|cuComputeGradInput|cuComputePartGradGammaBeta|cuComputeGradGammaBeta)$", ""),
    ("ATen", r"^(?:at|c10|aten)::", ""),
    ("ATen", r"^softmax_warp_(?:forward|backward)$|^\(anonymous namespace\)::(?:elementwise_kernel_with_index|"
             r"softmax_warp_|indexing_backward_kernel|cunn_SoftMax)", ""),
)  # fmt: skip
_LIBRARY_PATTERNS: list[tuple[Library, re.Pattern[str], re.Pattern[str] | None]] = [
    (lib, re.compile(fun), re.compile(op) if op else None) for lib, fun, op in _LIBRARIES
]


def _library(function: str, operation: str) -> Library | None:
    for library, by_function, by_operation in _LIBRARY_PATTERNS:
        if by_function.search(function) or (by_operation and by_operation.search(operation)):
            return library
    return None


_ELEMENT = re.compile(r"\b(?:c10::BFloat16|(?:cutlass::)?bfloat16_t|__nv_bfloat16|nv_bfloat16|c10::Half|"
                      r"(?:cutlass::)?half_t|__half|double|float|c10::Float8_\w+|__nv_fp8_e\dm\d|e4m3_t|e5m2_t)"
                      r"(?![\w:])")  # fmt: skip


_ELEMENT_DTYPES: tuple[tuple[str, Dtype], ...] = (
    ("bfloat16", "bf16"), ("half", "fp16"), ("double", "fp64"), ("float8", "fp8"), ("fp8", "fp8"), ("e4m3", "fp8"),
    ("e5m2", "fp8"), ("float", "fp32"),
)  # fmt: skip


def _element_dtype(text: str) -> Dtype:
    lower = text.lower()
    return next(dtype for part, dtype in _ELEMENT_DTYPES if part in lower)


def _dtypes(arguments: str) -> list[Dtype]:
    """Floating types among template arguments, each once, in order."""
    return list(dict.fromkeys(_element_dtype(match) for match in _ELEMENT.findall(arguments[:NAME_LIMIT])))


_TRAITS = re.compile(r"[Ff]lash_(?:fwd|bwd)_kernel_traits<(?:\(int\))?(\d+), ?(?:\(int\))?(\d+), ?(?:\(int\))?(\d+)")
_FMHA = re.compile(r"fmha_cutlass[FB]_(f32|f16|bf16)_\w*?(\d+)x(\d+)_(?:k(\d+)|rf)\w*_sm(\d+)")
_CUDNN_SDPA = re.compile(
    r"cudnn_generated_\w+?_sdpa_sm(\d{2,3})_flash_[bf]prop_wgmma_(?:f16|f8)_\w*?\d+x\d+x(\d{1,4})_\d+x\d+x\d+"
    r"(?:_cga(\d{1,2})x(\d{1,2})x\d+)?"
)
_FMHA_DTYPES: dict[str, Dtype] = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


def _attention(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    if match := _FMHA.match(operation):
        # On sm80 and later its fp32 products too run on Tensor Cores, as three TF32 products for one of fp32
        # (OpMultiplyAddFastF32). k64: head dimensions up to 64; rf: the output is accumulated in registers.
        dtype = _FMHA_DTYPES[match[1]]
        tensor = int(match[5]) >= 80 or (int(match[5]) >= 70 and dtype == "fp16")
        return replace(
            decoded, architecture=f"sm{match[5]}", input_dtype=dtype, tile=(int(match[2]), int(match[3]), None),
            unit="tensor core" if tensor else "cuda core",
        )  # fmt: skip
    if match := _CUDNN_SDPA.match(operation):
        # f16 stands for both 16-bit types: bf16 runs carry it. The third side is the head dimension, padded:
        # 64 gives 64, 80 gives 128. What the other two are is not known.
        return replace(
            decoded, architecture=f"sm{match[1]}", head_dim=int(match[2]),
            cluster=(int(match[3]), int(match[4])) if match[3] else None, unit="tensor core",
        )  # fmt: skip
    if decoded.library == "FlashAttention" and (match := _TRAITS.search(decoded.arguments)):
        # Flash_fwd_kernel_traits<head dimension, queries, keys of a tile, warps, ...>: every product is an mma.
        element = _dtypes(decoded.arguments)
        products = re.search(r"flash_fwd_(?:splitkv_)?kernel|flash_bwd_dq_dk_dv", operation)
        head, queries, keys = (int(match[i][:5]) for i in (1, 2, 3))
        return replace(
            decoded, head_dim=head, tile=(queries, keys, None),
            input_dtype=next((dtype for dtype in element if dtype in {"bf16", "fp16"}), None),
            accumulate_dtype="fp32" if products else None, unit="tensor core" if products else None,
        )  # fmt: skip
    return None


_SMALL = re.compile(
    r"(?:^|::)(?:gemv|gemmSN_|gemmk1_|dot_kernel$|reduce_1Block_kernel$|splitKreduce_kernel$)|::gemvx::"
)


def _small_product(decoded: KernelName) -> KernelName | None:
    """cuBLAS's products with a vector or a narrow matrix, and its second passes."""
    if decoded.library != "cuBLAS" or not _SMALL.search(decoded.function[:OPERATION_LIMIT]):
        return None
    # Their template arguments are types without names: with one type among them all are known, with two none is.
    found = _dtypes(decoded.arguments)
    dtype = found[0] if len(found) == 1 else None
    layout = re.match(r"gemmSN_([NT])([NT])_", decoded.operation)
    reduces = "splitKreduce" in decoded.operation
    letters = f"{layout[1]}{layout[2]}".lower() if layout else ""
    return replace(
        decoded, input_dtype=dtype, accumulate_dtype=dtype, output_dtype=dtype, split_k=reduces, second_pass=reduces,
        transposes="nn" if letters == "nn" else "nt" if letters == "nt" else "tn" if letters == "tn"
        else "tt" if letters == "tt" else None,
        # Of other types these may yet use Tensor Cores; fp32 and fp64 named without TF32 or an instruction do not.
        unit="cuda core" if dtype in {"fp32", "fp64"} and not reduces else None,
    )  # fmt: skip


_NCCL = re.compile(r"nccl(?:Dev)?Kernel_\w*?_(f32|f16|bf16|f64|f8e4m3|f8e5m2|float|half|double|i8|i32)(?=_|$)")
_NCCL_DTYPES: dict[str, Dtype] = {
    "f32": "fp32", "float": "fp32", "f16": "fp16", "half": "fp16", "bf16": "bf16", "f64": "fp64", "double": "fp64",
    "f8e4m3": "fp8", "f8e5m2": "fp8", "i8": "int8", "i32": "int32",
}  # fmt: skip


def _communication(decoded: KernelName) -> KernelName | None:
    match = _NCCL.match(decoded.operation)
    if match is None:
        return None
    dtype = _NCCL_DTYPES[match[1]]
    return replace(decoded, input_dtype=dtype, output_dtype=dtype)


_FUNCTOR = re.compile(r"(?:[AB]Unary|Binary)Functor<([\w:]+), ([\w:]+), ([\w:]+),")
_CAST_TARGET = re.compile(r"\b(bfloat16|float16|float8)\w*_copy_kernel_cuda")
_CAST_DTYPES: dict[str, Dtype] = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


def _elements(decoded: KernelName) -> KernelName:
    """The element types of PyTorch's own kernels, where the template arguments leave no choice."""
    arguments = decoded.arguments
    # A functor's operands come first, then the type it computes in, which is fp32 where they are bf16.
    functor = _FUNCTOR.search(arguments)
    found = _dtypes(", ".join(functor.groups()) if functor else arguments)
    if len(found) != 1:
        return decoded
    target = _CAST_TARGET.search(arguments)
    output = _CAST_DTYPES[target[1]] if target else found[0]
    # Where loads and stores cast, the types in memory are known at run time only; a comparison gives booleans.
    casts = "gpu_kernel_impl<" in arguments
    return replace(
        decoded,
        input_dtype=None if casts or "LoadWithCast" in arguments else found[0],
        output_dtype=None if casts or "StoreWithCast" in arguments or "CompareFunctor" in arguments else output,
    )
