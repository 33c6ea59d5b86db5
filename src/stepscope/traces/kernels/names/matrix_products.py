"""The grammars of matrix product kernels' names.

None of the vendors documents its names. CUTLASS's are made by a script that can be read
(python/cutlass_library/gemm_operation.py); the others are decoded as far as runs of known dtype, shape and layout
confirm it, and what is not confirmed stays None. What confirms it stands beside each grammar.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, cast

from stepscope.traces.kernels.names.name import Dtype, KernelName

_TRANSPOSES = Literal["nn", "nt", "tn", "tt"]

_DTYPES: dict[str, Dtype] = {
    "f64": "fp64", "f32": "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "f16": "fp16", "fp16": "fp16",
    "e4m3": "fp8", "e5m2": "fp8", "i8": "int8", "s8": "int8", "int8": "int8", "i32": "int32", "s32": "int32",
}  # fmt: skip
_TYPE = r"(tf32|bf16|f16|f32|f64|e4m3|e5m2|i8|i32|s8|s32)"


def _transposes(letters: str) -> _TRANSPOSES:
    return cast("_TRANSPOSES", letters.lower())


def _numbers(*texts: str) -> tuple[int, ...]:
    return tuple(int(text) for text in texts)


_SHAPE = r"(\d{1,5})x(\d{1,5})"
_SCHEDULE = re.compile(r"warpspecialized|cooperative|pingpong|persistent|stream_k|coop[AB]|2cta")


def _schedule(operation: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_SCHEDULE.findall(operation)))


def _with_shape(decoded: KernelName, operation: str, shape: tuple[str, str, str | None]) -> KernelName:
    """The decoded name with its tile, and with what the name says in words: stages, cluster, schedule, split K."""
    m, n, k = shape
    stage = re.search(r"_stage(\d{1,3})(?=_|$)", operation)
    cluster = re.search(rf"_cgasize{_SHAPE}x", operation)
    return replace(
        decoded,
        tile=(int(m), int(n), int(k) if k else None),
        stages=int(stage[1]) if stage else decoded.stages,
        cluster=_numbers(cluster[1], cluster[2]) if cluster else decoded.cluster,
        schedule=_schedule(operation),
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


def _xmma(decoded: KernelName, operation: str) -> KernelName | None:
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
            unit=None if second_pass else "tensor core" if tensor else "cuda core" if "_ffma" in operation else None,
            second_pass=second_pass,
        )
    tile = _XMMA_TILE.search(operation, match.end())
    return _with_shape(decoded, operation, (tile[1], tile[2], tile[3])) if tile else decoded


_GENERATIONS = {
    "maxwell": "sm50", "pascal": "sm60", "volta": "sm70", "turing": "sm75", "ampere": "sm80", "ada": "sm89",
    "hopper": "sm90",
}  # fmt: skip
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


def _cutlass_2(decoded: KernelName, operation: str) -> KernelName | None:
    match = _CUTLASS_2.match(operation)
    if match is None:
        return None
    architecture, operator, generation, output, letter, instruction, rounded, source = match.groups()
    rest = operation[match.end() :]
    accumulator = _LETTERS[letter]
    product: Dtype | None
    if rounded or source:
        product = _DTYPES[rounded or source]
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
    return _with_shape(decoded, operation, (tile[1], tile[2], k))


# CUTLASS 3: types of A, B, accumulator, C, D; tile; cluster; stages (0: as many as fit); layouts of A, B and C.
_CUTLASS_3 = re.compile(
    rf"cutlass3x_sm(\d{{2,3}})_(?:bs|sp)?tensorop_(?:[a-z]\d+x\d+x\d+(tf32)?)?gemm_{_TYPE}_{_TYPE}_{_TYPE}_"
    rf"(?:void|[a-z0-9]+)_{_TYPE}_{_SHAPE}x(\d{{1,5}})_{_SHAPE}x\d+_(\d{{1,3}})_([nt]{{2}})"
)


def _cutlass_3(decoded: KernelName, operation: str) -> KernelName | None:
    match = _CUTLASS_3.match(operation)
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
        cluster=_numbers(cluster_m, cluster_n),
        stages=int(stages) or None,
        unit="tensor core",
    )
    return _with_shape(decoded, operation, (m, n, k))


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


def _nvjet(decoded: KernelName, operation: str) -> KernelName | None:
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
        cluster=_numbers(cluster_m, cluster_n) if cluster_m and not k_of_three else None,
        stages=int(depth) if depth else None,
        unit="tensor core",
    )
    return _with_shape(decoded, operation, (m, n, k_of_three or k))


# Tensile, which makes rocBLAS's and hipBLASLt's kernels. Indices stand in the order of memory: A with i (its row in
# the product) first is column-major, not transposed. BBS: input, output, compute types.
_TENSILE = re.compile(r"Cijk?_A(il|li)k?_B(lj|jl)k?_([A-Z0-9]+)_")
_TENSILE_TYPES: dict[str, tuple[Dtype, Dtype, Dtype]] = {
    "SB": ("fp32", "fp32", "fp32"), "DB": ("fp64", "fp64", "fp64"), "HHS": ("fp16", "fp16", "fp32"),
    "BBS": ("bf16", "bf16", "fp32"), "HSS": ("fp16", "fp32", "fp32"), "BSS": ("bf16", "fp32", "fp32"),
}  # fmt: skip


def _tensile(decoded: KernelName, operation: str) -> KernelName | None:
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


GRAMMARS: tuple[Callable[[KernelName, str], KernelName | None], ...] = (
    _xmma, _cutlass_2, _cutlass_3, _nvjet, _tensile,
)  # fmt: skip
