"""Compiles the cast to 8 bits for Hopper, without a GPU, and prints how often its PTX has each instruction, as JSON.

A process of its own: where Triton interprets its kernels, as the tests here do, it compiles none.
"""

import json
import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepscope.kernels.eight_bits import cast_to_eight_bits as kernel

NAMES = kernel.arg_names
CONSTANTS = {"ALONG": True, "ACROSS": True, "ROWS": 128, "COLUMNS": 64}
ALIGNED = {
    (at,): [["tt.divisibility", 16]]
    for at, name in enumerate(NAMES)
    if name in ("bits", "along", "across", "rows", "columns")
}

found: dict[str, Counter[str]] = {}
for dtype in ("fp8e4nv", "fp8e5"):
    types = {"bits": "*i16", "along": f"*{dtype}", "across": f"*{dtype}", "scale": "*fp32", "end": "fp32"}
    types |= dict.fromkeys(("rows", "columns", "tiles"), "i32")
    signature = {name: types.get(name, "constexpr") for name in NAMES}
    constants = {(NAMES.index(name),): value for name, value in CONSTANTS.items()}
    built = triton.compile(
        ASTSource(kernel, signature, constants, ALIGNED), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}
    )
    found[dtype] = Counter(re.findall(r"^\s*(?:@\S+ )?((?:cvt|div|ld\.global|st\.global)\S*)", built.asm["ptx"], re.M))
print(json.dumps(found))
