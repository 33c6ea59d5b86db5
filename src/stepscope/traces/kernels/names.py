"""What a kernel's name says: its grammar, the decoded name, and a short label."""

import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from stepscope.core.errors import middle_cut, name_shown

# The type that a decoded name is, and the parting of a C++ name into function and template arguments.


Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int32"]
Unit = Literal["tensor core", "cuda core"]
Library = Literal[
    "cuBLAS", "CUTLASS", "cuDNN", "Triton", "ATen", "NCCL", "FlashAttention", "xFormers", "CUB", "Thrust", "Tensile",
    "MIOpen", "Composable Kernel", "Apex", "Transformer Engine",
]  # fmt: skip

NAME_LIMIT = 4096
"""Characters of a name that are looked at. What says something stands near the front; a hostile name may be huge."""


class KernelName(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel's name decoded. What the name does not say is None or empty, never guessed."""

    name: str
    function: str
    """The function with its namespaces, without return type, template arguments and parameters."""
    arguments: str = ""
    """The template arguments, as written."""
    operation: str = ""
    """What runs: the function without namespaces, or what a wrapper such as cutlass::Kernel2 is instantiated with."""
    library: Library | None = None
    architecture: str | None = None
    """The GPU architecture that the kernel was written for: sm80, gfx942."""
    input_dtype: Dtype | None = None
    """The type in which products are taken, or elements read: tf32 where fp32 operands are rounded to it."""
    accumulate_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    transposes: Literal["nn", "nt", "tn", "tt"] | None = None
    """Whether A and B are transposed (t) or not (n), as column-major operands, in the terms of BLAS."""
    tile: tuple[int, int, int | None] | None = None
    """What a thread block works on at a time: M, N, K of a product; queries and keys of attention."""
    cluster: tuple[int, int] | None = None
    """Thread blocks that work together and share what they load, along M and N."""
    stages: int | None = None
    """Tiles of K held in shared memory at once: one in use, the others on their way."""
    split_k: bool = False
    """Whether the K of one tile is divided among several thread blocks."""
    second_pass: bool = False
    """Whether the kernel only adds up the partial results of a split product."""
    sliced_k: int | None = None
    """Slices of K within one thread block."""
    unit: Unit | None = None
    schedule: tuple[str, ...] = ()
    cut: bool = False
    """Whether its end is missing, as profilers and write-ups cut names for a table."""
    head_dim: int | None = None
    """The largest head dimension that the kernel takes; smaller ones are padded."""


_BRACKETS = re.compile(r"[<(){}\[\]]|(?<!-)>")  # an arrow closes nothing
_OPENS = {">": "<", ")": "(", "}": "{", "]": "["}
_ANONYMOUS = "(anonymous namespace)"
_MARK = "\x00"  # stands for the anonymous namespace, whose brackets are none


class NameParts(NamedTuple):
    function: str
    arguments: str
    complete: bool
    """Whether the template arguments came to their end."""


def split_name(name: str) -> NameParts:
    """Function and template arguments of a C++ name, mangled or not, cut off or not; other names come back whole."""
    text = name[:NAME_LIMIT].strip()
    if text.startswith("_Z") and (mangled := _split_mangled(text)):
        return mangled
    # CUDA kernels return void, and demanglers say so of templates only. Nsight Systems writes <unnamed>.
    text = text.removeprefix("void ").replace(_ANONYMOUS, _MARK).replace("<unnamed>", _MARK)
    pieces: list[str] = []
    arguments: list[str] = []
    open_brackets: list[str] = []
    start = inside = 0
    for match in _BRACKETS.finditer(text):
        bracket, at = match[0], match.start()
        if bracket not in _OPENS:
            if not open_brackets:
                pieces.append(text[start:at])
                start = len(text)
                if bracket == "(":  # the parameters begin
                    break
                inside = at + 1
            open_brackets.append(bracket)
        elif open_brackets and _OPENS[bracket] == open_brackets[-1]:  # else a comparison
            open_brackets.pop()
            if not open_brackets:
                if bracket == ">":
                    arguments.append(text[inside:at])
                start = at + 1
    else:
        if open_brackets and open_brackets[0] == "<":  # cut off within the template arguments
            arguments.append(text[inside:])
    pieces.append(text[start:])
    function = "".join(pieces).strip() or text
    written = ", ".join(arguments)
    return NameParts(function.replace(_MARK, _ANONYMOUS), written.replace(_MARK, _ANONYMOUS), not open_brackets)


def whole_of(name: str) -> str:
    """What is whole of a name that ends in dots, for what was cut off: the word before them may be half of one."""
    text = name[:NAME_LIMIT].rstrip()
    return _without_last_word(text.rstrip(".…")) if text.endswith(("..", "…")) else name


def _without_last_word(text: str) -> str:
    return text.rstrip(string.ascii_letters + string.digits)


_IDENTIFIER = re.compile(r"[KV]*(?:(St)|(\d{1,4}))")


def _split_mangled(text: str) -> NameParts | None:
    """The names in an Itanium-mangled function name, as far as they are spelt out."""
    parts: list[str] = []
    nested = text.startswith("_ZN")
    at = 3 if nested else 2
    while match := _IDENTIFIER.match(text, at):
        at = match.end()
        if match[1]:
            parts.append("std")
            continue
        part, at = text[at : at + int(match[2])], at + int(match[2])
        parts.append(_ANONYMOUS if part.startswith("_GLOBAL__N") else part)
        if not nested:
            break
    if not parts:
        return None
    arguments = text[at + 1 :] if text[at : at + 1] == "I" else ""
    if length := re.match(r"\d{1,4}", arguments):  # a type spelt out: what a wrapper is instantiated with
        arguments = arguments[length.end() : length.end() + int(length[0])]
    return NameParts("::".join(parts), arguments, not arguments)


# The grammars of matrix product kernels' names.
#
# None of the vendors documents its names. CUTLASS's are made by a script that can be read
# (python/cutlass_library/gemm_operation.py); the others are decoded as far as runs of known dtype, shape and layout
# confirm it, and what is not confirmed stays None. What confirms it stands beside each grammar.


_TRANSPOSES = Literal["nn", "nt", "tn", "tt"]

_DTYPES: dict[str, Dtype] = {
    "f64": "fp64", "f32": "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "fp16": "fp16",
    "e4m3": "fp8", "e5m2": "fp8", "i8": "int8", "s8": "int8", "int8": "int8", "i32": "int32", "s32": "int32",
}  # fmt: skip
_TYPE = r"(tf32|bf16|f16|f32|f64|e4m3|e5m2|i8|i32|s8|s32)"


Grammar = Callable[[KernelName], KernelName | None]
GRAMMARS: list[Grammar] = []
"""What decodes names; the first that knows a name tells what it says."""


def _grammar(decode_of: Grammar) -> Grammar:
    GRAMMARS.append(decode_of)
    return decode_of


def _transposes(letters: str) -> _TRANSPOSES:
    return cast("_TRANSPOSES", letters.lower())


_SHAPE = r"(\d{1,5})x(\d{1,5})"
_SCHEDULE = re.compile(r"warpspecialized|cooperative|pingpong|persistent|stream_k|coop[AB]|2cta")


def _with_shape(decoded: KernelName, shape: tuple[str, str, str | None]) -> KernelName:
    """The decoded name with its tile, and with what the name says in words: stages, cluster, schedule, split K."""
    operation = decoded.operation
    m, n, k = shape
    stage = re.search(r"_stage(\d{1,3})(?=_|$)", operation)
    cluster = re.search(rf"_cgasize{_SHAPE}x", operation)
    return replace(
        decoded,
        tile=(int(m), int(n), int(k) if k else None),
        stages=int(stage[1]) if stage else decoded.stages,
        cluster=(int(cluster[1]), int(cluster[2])) if cluster else decoded.cluster,
        schedule=tuple(dict.fromkeys(_SCHEDULE.findall(operation))),
        split_k=bool(re.search(r"split_?k", operation, re.IGNORECASE)),
    )


# (type of A and B, type of the output), (type in which products are taken, accumulator), type of alpha and beta.
# e4m3bf16_e4m3f32_f32 is fp8 in and bf16 out, i8f32_i8i32_f32 int8 in and fp32 out. After them the layouts of A, B
# and of the output. Write-ups print such names cut short, at the end or with some of the five types left out: nothing
# tells which types are left then, so none is decoded.
_XMMA = re.compile(r"sm(\d{2,3})a?_xmma_gemm(?=_|$)")
_XMMA_TYPES = re.compile(rf"_{_TYPE}{_TYPE}_{_TYPE}{_TYPE}_{_TYPE}(?=_|$)")
_XMMA_LAYOUT = re.compile(r"_([nt]{2})_[nt](?=_|$)")
_XMMA_TILE = re.compile(rf"_tilesize{_SHAPE}x(\d{{1,5}})")


@_grammar
def _xmma(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    match = _XMMA.match(operation)
    if match is None:
        return None
    types, layout = _XMMA_TYPES.match(operation, match.end()), _XMMA_LAYOUT.search(operation, match.end())
    decoded = replace(decoded, architecture=f"sm{match[1]}", transposes=_transposes(layout[1]) if layout else None)
    if types is not None:
        _, output, product, accumulator, _ = types.groups()
        # ffma is the CUDA cores' instruction; tensor16x8x8 an mma.sync shape; a warp group only multiplies by wgmma.
        tensor = re.search(r"_tensor\d|_warpgroupsize\d", operation)
        # execute_split_k_kernel follows an execute_kernel of the same name and takes 6 us where that takes 356: it
        # adds up.
        second_pass = "execute_split_k_kernel" in operation
        decoded = replace(
            decoded,
            input_dtype=_DTYPES[product],
            accumulate_dtype=_DTYPES[accumulator],
            output_dtype=_DTYPES[output],
            unit=None
            if second_pass or decoded.cut
            else "tensor core"
            if tensor
            else "cuda core"
            if "_ffma" in operation
            else None,
            second_pass=second_pass,
        )
    tile = _XMMA_TILE.search(operation, match.end())
    return _with_shape(decoded, (tile[1], tile[2], tile[3])) if tile else decoded


_GENERATIONS = {
    "maxwell": "sm50",
    "pascal": "sm60",
    "volta": "sm70",
    "turing": "sm75",
    "ampere": "sm80",
    "ada": "sm89",
    "hopper": "sm90",
}
_LETTERS: dict[str, Dtype] = {"s": "fp32", "d": "fp64", "h": "fp16", "i": "int32"}

# CUTLASS 2's grammar, which cuBLAS's own older kernels share: output type (left out where it is the accumulator's),
# the accumulator's letter, the Tensor Core instruction's shape (16816: m16n8k16), the type operands are rounded to,
# input type (left out where it is the accumulator's), tile MxN, K x stages, layouts of A and B.
_CUTLASS_2 = re.compile(
    r"(?:cutlass_(?:(\d{2,3})_)?(?:wmma_)?(tensorop|simt)|(maxwell|pascal|volta|turing|ampere|ada|hopper))_"
    r"(?:(bf16|f16|fp16|f32|fp32|tf32|s8|int8)_)?([sdhi])(\d{2,5})?(tf32|bf16|f16)?gemm"
    r"(?:_relu)?(?:_(bf16|f16|fp16|f32|fp32|tf32|s8|int8|f64)(?=_))?"
)
_TILE = re.compile(rf"_{_SHAPE}(?:_{_SHAPE})?(?=_|$)")
_LAYOUT = re.compile(r"_([nt]{2})(?=_|$)")


@_grammar
def _cutlass_2(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    match = _CUTLASS_2.match(operation)
    if match is None:
        return None
    architecture, operator, generation, output, letter, instruction, rounded, source = match.groups()
    rest = operation[match.end() :]
    accumulator = _LETTERS[letter]
    product: Dtype | None
    if rounded or source:
        product = _DTYPES[rounded or source]
    elif decoded.cut and not rest.strip("_"):  # the type may stand behind
        product = None
    elif instruction is None or letter in "hd":
        product = accumulator
    else:
        # fp32 has no Tensor Core instruction of its own: m16n8k8 and m16n8k4 take it as TF32. Seen so in TF32 runs.
        product = "tf32" if letter == "s" and instruction in {"1688", "1684"} else None
    layout, tile = _LAYOUT.search(rest), _TILE.search(rest)
    stages = re.search(rf"_stages_{_SHAPE}(?=_|$)", rest)
    sliced = re.search(r"_sliced\d{1,3}x(\d{1,3})(?=_|$)", rest)
    decoded = replace(
        decoded,
        architecture=_GENERATIONS[generation] if generation else f"sm{architecture}" if architecture else None,
        input_dtype=product,
        accumulate_dtype=accumulator,
        output_dtype=_DTYPES[output] if output else accumulator,
        transposes=_transposes(layout[1]) if layout else None,
        sliced_k=int(sliced[1]) if sliced else None,
        unit="tensor core" if instruction or operator == "tensorop" else "cuda core",
    )
    if tile is None:
        return decoded
    k, depth = (stages[1], stages[2]) if stages else (tile[3], tile[4])
    decoded = replace(decoded, stages=int(depth) if depth else None)
    return _with_shape(decoded, (tile[1], tile[2], k))


# CUTLASS 3: types of A, B, accumulator, C, D; tile; cluster; stages (0: as many as fit); layouts of A, B and C.
_CUTLASS_3 = re.compile(
    rf"cutlass3x_sm(\d{{2,3}})_(?:bs|sp)?tensorop_(?:[a-z]\d+x\d+x\d+(tf32)?)?gemm_{_TYPE}_{_TYPE}_{_TYPE}_"
    rf"(?:void|[a-z0-9]+)_{_TYPE}_{_SHAPE}x(\d{{1,5}})_{_SHAPE}x\d+_(\d{{1,3}})_([nt]{{2}})"
)


@_grammar
def _cutlass_3(decoded: KernelName) -> KernelName | None:
    match = _CUTLASS_3.match(decoded.operation)
    if match is None:
        return None
    architecture, rounded, a, b, accumulator, output, m, n, k, cluster_m, cluster_n, stages, layout = match.groups()
    product = _DTYPES[a] if a == b else None
    if rounded or product == "fp32":  # Tensor Cores take fp32 operands as TF32
        product = "tf32"
    decoded = replace(
        decoded,
        architecture=f"sm{architecture}",
        input_dtype=product,
        accumulate_dtype=_DTYPES[accumulator],
        output_dtype=_DTYPES[output],
        transposes=_transposes(layout),
        cluster=(int(cluster_m), int(cluster_n)),
        stages=int(stages) or None,
        unit="tensor core",
    )
    return _with_shape(decoded, (m, n, k))


# nvjet, cuBLAS's kernels for Hopper and later. Certain: t, in bf16 runs alone; the tile's 64x4 as K x stages (larger
# tiles have fewer, shared memory being what it is), then the cluster; and the first two capitals as the layouts of A
# and B: over a step of linear layers and attention as many TN as NN as NT run (109 of 327 each), as they do in fp32,
# whichever the third, the output's. Well supported by others' runs: h is fp16, q fp8, s fp32 (hss writes fp32), and
# qqtst is A, B, C, accumulator, output. Not known: `v` and `h` after the cluster, `bz`, and whether the tile's sides
# change places with a third letter T. Other letters stay None; so do fp32 inputs without the word tf32, which may
# be emulated by bf16.
_NVJET = re.compile(
    r"nvjet_(?:sm(\d{2,3})_)?([a-z]{3}|[a-z]{5})_(tf32_)?(?:mma_)?(\d{1,5})x(\d{1,5})(?:x(\d{1,5})_(\d{1,3}))?"
    r"(?:_(\d{1,5})x(\d{1,3})(?:_(\d{1,2})x(\d{1,2})(?=_|$))?)?(?=_|$)"
)
_NVJET_LETTERS: dict[str, Dtype] = {"t": "bf16", "h": "fp16", "s": "fp32", "q": "fp8"}


@_grammar
def _nvjet(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    match = _NVJET.match(operation)
    if match is None:
        return replace(decoded, unit="tensor core") if operation.startswith("nvjet_") else None
    architecture, codes, tf32, m, n, k_of_three, stages_after, k, stages, cluster_m, cluster_n = match.groups()
    letters = [_NVJET_LETTERS.get(letter) for letter in codes]
    source = letters[0] if len(letters) == 3 or letters[0] == letters[1] else None
    if source == "fp32":
        source = "tf32" if tf32 else None
    layout = re.search(r"_([NT]{2})[NT]{1,2}$", operation)
    depth = stages_after or stages
    decoded = replace(
        decoded,
        architecture=f"sm{architecture}" if architecture else None,
        input_dtype=source,
        accumulate_dtype=letters[-2],
        output_dtype=letters[-1],
        transposes=_transposes(layout[1]) if layout else None,
        cluster=(int(cluster_m), int(cluster_n)) if cluster_m and not k_of_three else None,
        stages=int(depth) if depth else None,
        unit="tensor core",
    )
    return _with_shape(decoded, (m, n, k_of_three or k))


# Tensile, which makes rocBLAS's and hipBLASLt's kernels. Indices stand in the order of memory: A with i (its row in
# the product) first is column-major, not transposed. BBS: input, output, compute types.
_TENSILE = re.compile(r"Cijk?_A(il|li)k?_B(lj|jl)k?_([A-Z0-9]+)_")
_TENSILE_TYPES: dict[str, tuple[Dtype, Dtype, Dtype]] = {
    "SB": ("fp32", "fp32", "fp32"),
    "DB": ("fp64", "fp64", "fp64"),
    "HHS": ("fp16", "fp16", "fp32"),
    "BBS": ("bf16", "bf16", "fp32"),
    "HSS": ("fp16", "fp32", "fp32"),
    "BSS": ("bf16", "fp32", "fp32"),
}


@_grammar
def _tensile(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    match = _TENSILE.match(operation)
    if match is None:
        return None
    source, output, accumulator = _TENSILE_TYPES.get(match[3], (None, None, None))
    tile = re.search(rf"_MT{_SHAPE}x(\d{{1,5}})", operation)
    architecture = re.search(r"_ISA([0-9a-f]{3,4})(?=_|$)", operation)
    split = re.search(r"_GSU(\d{1,3})(?=_|$)", operation)
    return replace(
        decoded,
        architecture=f"gfx{architecture[1]}" if architecture else None,
        input_dtype=source,
        accumulate_dtype=accumulator,
        output_dtype=output,
        transposes=_transposes(("n" if match[1] == "il" else "t") + ("n" if match[2] == "lj" else "t")),
        tile=(int(tile[1]), int(tile[2]), int(tile[3])) if tile else None,
        split_k=bool(split and int(split[1]) > 1),
    )


OPERATION_LIMIT = 512
"""Characters of an operation or function that patterns look at; the longest real ones have some 250."""


@lru_cache(1024)
def decode(name: str) -> KernelName:
    """What the name says. Any text is a name: one that says nothing has a function and no more."""
    whole = whole_of(name)
    function, arguments, complete = split_name(whole)
    cut = whole != name or not (complete or whole.startswith("_Z"))
    if cut and not complete:  # the last word may be half of one
        arguments = _without_last_word(arguments)
    operation = _operation(function, arguments)
    decoded = KernelName(
        name=name,
        cut=cut,
        function=function,
        arguments=arguments,
        operation=operation,
        library=_library(function[:OPERATION_LIMIT], operation),
    )
    for grammar in GRAMMARS:
        if (known := grammar(decoded)) is not None:
            return known
    if cut and _WRAPPERS.fullmatch(function):  # FlashAttention's kernels have the wrapper, too
        return replace(decoded, library=None)
    return _elements(decoded) if complete and decoded.library == "ATen" else decoded


def is_tf32(decoded: KernelName) -> bool:
    """Whether the kernel rounds fp32 operands to TF32's 10 bits (row 3 of docs/measuring.md).

    Three TF32 products for one of fp32, as xFormers's fp32 attention takes, do not count: they keep fp32's precision.
    """
    return decoded.input_dtype == "tf32"


_WRAPPERS = re.compile(r"cutlass::(?:Kernel2?|device_(?:kernel)?)?")


_MANGLED_CLASS = re.compile(r"(?:Li\d{1,4}E)*NS_(\d{1,3})")


def _operation(function: str, arguments: str) -> str:
    """What runs: the function, or the class that CUTLASS's or Composable Kernel's wrapper is instantiated with."""
    name = function
    if _WRAPPERS.fullmatch(function):
        name = split_name(arguments.partition(",")[0]).function
    elif function == "ck_tile::kentry":
        if mangled := _MANGLED_CLASS.match(arguments):
            name = arguments[mangled.end() : mangled.end() + int(mangled[1])]
        else:  # the class comes after numbers
            words = (word.strip() for word in arguments.partition("<")[0].split(","))
            name = next((word for word in words if not word.isdecimal()), "")
        name = name or "kentry"
    return name.rpartition("::")[2][:OPERATION_LIMIT]


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
    (
        "ATen",
        r"^softmax_warp_(?:forward|backward)$|^\(anonymous namespace\)::(?:elementwise_kernel_with_index|"
        r"softmax_warp_|indexing_backward_kernel|cunn_SoftMax)",
        "",
    ),
)
_LIBRARY_PATTERNS: list[tuple[Library, re.Pattern[str], re.Pattern[str] | None]] = [
    (lib, re.compile(fun), re.compile(op) if op else None) for lib, fun, op in _LIBRARIES
]


def _library(function: str, operation: str) -> Library | None:
    for library, by_function, by_operation in _LIBRARY_PATTERNS:
        if by_function.search(function) or (by_operation and by_operation.search(operation)):
            return library
    return None


_ELEMENT = re.compile(
    r"\b(?:c10::BFloat16|(?:cutlass::)?bfloat16_t|__nv_bfloat16|nv_bfloat16|c10::Half|"
    r"(?:cutlass::)?half_t|__half|double|float|c10::Float8_\w+|__nv_fp8_e\dm\d|e4m3_t|e5m2_t)"
    r"(?![\w:])"
)


_ELEMENT_DTYPES: tuple[tuple[str, Dtype], ...] = (
    ("bfloat16", "bf16"), ("half", "fp16"), ("double", "fp64"), ("float8", "fp8"), ("fp8", "fp8"), ("e4m3", "fp8"),
    ("e5m2", "fp8"), ("float", "fp32"),
)  # fmt: skip


def _dtypes(arguments: str) -> list[Dtype]:
    """Floating types among template arguments, each once, in order."""
    elements = (element.lower() for element in _ELEMENT.findall(arguments[:NAME_LIMIT]))
    return list(dict.fromkeys(next(dtype for part, dtype in _ELEMENT_DTYPES if part in one) for one in elements))


_TRAITS = re.compile(r"[Ff]lash_(?:fwd|bwd)_kernel_traits<(?:\(int\))?(\d+), ?(?:\(int\))?(\d+), ?(?:\(int\))?(\d+)")
_FMHA = re.compile(r"fmha_cutlass[FB]_(f32|f16|bf16)_\w*?(\d+)x(\d+)_(?:k(\d+)|rf)\w*_sm(\d+)")
_CUDNN_SDPA = re.compile(
    r"cudnn_generated_\w+?_sdpa_sm(\d{2,3})_flash_[bf]prop_wgmma_(?:f16|f8)_\w*?\d+x\d+x(\d{1,4})_\d+x\d+x\d+"
    r"(?:_cga(\d{1,2})x(\d{1,2})x\d+)?"
)
_FMHA_DTYPES: dict[str, Dtype] = {"f32": "fp32", "f16": "fp16", "bf16": "bf16"}


@_grammar
def _attention(decoded: KernelName) -> KernelName | None:
    operation = decoded.operation
    if match := _FMHA.match(operation):
        # On sm80 and later its fp32 products too run on Tensor Cores, as three TF32 products for one of fp32
        # (OpMultiplyAddFastF32). k64: head dimensions up to 64; rf: the output is accumulated in registers.
        dtype = _FMHA_DTYPES[match[1]]
        tensor = int(match[5]) >= 80 or (int(match[5]) >= 70 and dtype == "fp16")
        return replace(
            decoded,
            architecture=f"sm{match[5]}",
            input_dtype=dtype,
            tile=(int(match[2]), int(match[3]), None),
            unit="tensor core" if tensor else "cuda core",
        )
    if match := _CUDNN_SDPA.match(operation):
        # f16 stands for both 16-bit types: bf16 runs carry it. The third side is the head dimension, padded:
        # 64 gives 64, 80 gives 128. What the other two are is not known.
        return replace(
            decoded,
            architecture=f"sm{match[1]}",
            head_dim=int(match[2]),
            cluster=(int(match[3]), int(match[4])) if match[3] else None,
            unit="tensor core",
        )
    if decoded.library == "FlashAttention" and (match := _TRAITS.search(decoded.arguments)):
        # Flash_fwd_kernel_traits<head dimension, queries, keys of a tile, warps, ...>: every product is an mma.
        element = _dtypes(decoded.arguments)
        products = re.search(r"flash_fwd_(?:splitkv_)?kernel|flash_bwd_dq_dk_dv", operation)
        head, queries, keys = (int(match[i][:5]) for i in (1, 2, 3))
        return replace(
            decoded,
            head_dim=head,
            tile=(queries, keys, None),
            input_dtype=next((dtype for dtype in element if dtype in {"bf16", "fp16"}), None),
            accumulate_dtype="fp32" if products else None,
            unit="tensor core" if products else None,
        )
    return None


_SMALL = re.compile(
    r"(?:^|::)(?:gemv|gemmSN_|gemmk1_|dot_kernel$|reduce_1Block_kernel$|splitKreduce_kernel$)|::gemvx::"
)


@_grammar
def _small_product(decoded: KernelName) -> KernelName | None:
    """cuBLAS's products with a vector or a narrow matrix, and its second passes."""
    if decoded.library != "cuBLAS" or not _SMALL.search(decoded.function[:OPERATION_LIMIT]):
        return None
    # Their template arguments are types without names: with one type among them all are known, with two none is.
    dtypes = _dtypes(decoded.arguments)
    dtype = dtypes[0] if len(dtypes) == 1 and not decoded.cut else None
    layout = re.match(r"gemmSN_([NT]{2})_", decoded.operation)
    reduces = "splitKreduce" in decoded.operation
    # Of other types these may yet use Tensor Cores; fp32 and fp64 named without TF32 or an instruction do not.
    on_cuda_cores = dtype in {"fp32", "fp64"} and not reduces
    return replace(
        decoded,
        input_dtype=dtype,
        accumulate_dtype=dtype,
        output_dtype=dtype,
        split_k=reduces,
        second_pass=reduces,
        transposes=_transposes(layout[1]) if layout else None,
        unit="cuda core" if on_cuda_cores else None,
    )


_NCCL = re.compile(r"nccl(?:Dev)?Kernel_\w*?_(f32|f16|bf16|f64|f8e4m3|f8e5m2|float|half|double|i8|i32)(?=_|$)")
_NCCL_DTYPES: dict[str, Dtype] = {
    "f32": "fp32", "float": "fp32", "f16": "fp16", "half": "fp16", "bf16": "bf16", "f64": "fp64", "double": "fp64",
    "f8e4m3": "fp8", "f8e5m2": "fp8", "i8": "int8", "i32": "int32",
}  # fmt: skip


@_grammar
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
    dtypes = _dtypes(", ".join(functor.groups()) if functor else arguments)
    if len(dtypes) != 1:
        return decoded
    target = _CAST_TARGET.search(arguments)
    output = _CAST_DTYPES[target[1]] if target else dtypes[0]
    # Where loads and stores cast, the types in memory are known at run time only; a comparison gives booleans.
    casts = "gpu_kernel_impl<" in arguments
    return replace(
        decoded,
        input_dtype=None if casts or "LoadWithCast" in arguments else dtypes[0],
        output_dtype=None if casts or "StoreWithCast" in arguments or "CompareFunctor" in arguments else output,
    )


# A kernel's name in short: what tells it apart, without namespaces and parameter lists.


_FUNCTORS = re.compile(r"\b\w*(?:Functor\w*|_kernel_cuda\w*|_kernel_impl|_kernel|Ops|_functor)\b")
_PLUMBING = re.compile(r"gpu_kernel_impl\w*|func_wrapper\w*|ReduceOp|elementwise_kernel|vectorized_\w+|unrolled_\w+")
"""Wrappers that every pointwise kernel has; they tell nothing apart."""
_NOT_CPP = re.compile(r"\[(?!clone|with|abi:)")
"""A bracket that no C++ name has: markup, or an escape sequence. Such a name is text, of which nothing is left out."""
_NAMELESS = "(no name)"
_LEXEMES, _LEXEMES_OF_MANGLED = re.compile(r"\w+|[^\w\s]"), re.compile(r"\d+|[^\W\d]+|[^\w\s]")
_LONGEST_DIFFERENCE = 40
"""Characters of what tells kernels of one label apart."""


def kernel_label(name: str) -> str:
    """What runs, and the functors that it applies: `elementwise_kernel BinaryFunctor MulFunctor`."""
    if not name.strip():
        return _NAMELESS
    if not name.isprintable() or _NOT_CPP.search(name.partition("<")[0].partition("(")[0]):
        return name
    decoded = decode(name)
    base = decoded.operation or decoded.function
    if decoded.library == "ATen" and decoded.arguments:
        names = dict.fromkeys(token for token in _FUNCTORS.findall(decoded.arguments) if not _PLUMBING.fullmatch(token))
        base = " ".join([base, *list(names)[:2]])
    return base


def kernel_labels(names: Iterable[str]) -> dict[str, str]:
    """A label for each name, ready to be shown. Names that share a label get what differs, or a number, behind it."""
    by_label: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        by_label[name_shown(kernel_label(name))].append(name)
    labels: dict[str, str] = {}
    for label, sharing in by_label.items():
        labels |= {sharing[0]: label} if len(sharing) == 1 else _told_apart(label, sharing)
    counts = Counter(labels.values())
    return {name: label if counts[label] == 1 else name_shown(f"{label} {name}") for name, label in labels.items()}


def _told_apart(label: str, names: list[str]) -> dict[str, str]:
    """The label with what each of the names has between the text that all begin and that all end with."""
    pattern = _LEXEMES_OF_MANGLED if all(name.startswith("_Z") for name in names) else _LEXEMES
    lexemes = [pattern.findall(name[:NAME_LIMIT]) for name in names]
    begin, end = _shared(lexemes), _shared([each[::-1] for each in lexemes])
    labels: dict[str, str] = {}
    for number, (name, each) in enumerate(zip(names, lexemes, strict=True), 1):
        between = " ".join(each[begin : max(begin, len(each) - end)])
        spaced = re.sub(r"(?<!,) (?=\W)|(?<=[^\w,]) ", "", between)  # as C++ is written: behind a comma alone
        difference = name_shown(middle_cut(spaced, _LONGEST_DIFFERENCE))
        longer = f"{label} <{difference}>" if difference else label
        labels[name] = longer if longer not in labels.values() and difference else f"{longer} ({number})"
    return labels


def _shared(rows: list[list[str]]) -> int:
    """How many lexemes from the front all rows share."""
    return next((i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
