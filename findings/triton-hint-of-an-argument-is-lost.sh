#!/bin/sh
# triton 3.7.1 (no GPU needed: compiled for compute capability 9.0): tl.multiple_of, which says what a pointer is a
# multiple of, holds where the pointer is made in the same function. Said in a @triton.jit function of a pointer that it
# was given, it is lost without a word, and every load and store is one element wide, though the function is inlined.
#
# Seen (loads of 16 bytes and of 4 in the PTX of a copy of 1024 numbers of fp32, 128 threads):
#   said where the pointer is made: 2, 0
#   said in a function that is given the pointer: 0, 8
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" triton==3.7.1
cat >"$place/copies.py" <<'PY'
import os
import sys

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.dirname(__file__), "cache")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def aligned(pointer):
    return tl.multiple_of(pointer, 16)


@triton.jit
def said_where_made(table, out):
    start = tl.load(table)
    offsets = tl.arange(0, 1024)
    source = tl.multiple_of(start.to(tl.pointer_type(tl.float32)), 16)
    tl.store(out + offsets, tl.load(source + offsets))


@triton.jit
def said_of_an_argument(table, out):
    start = tl.load(table)
    offsets = tl.arange(0, 1024)
    source = aligned(start.to(tl.pointer_type(tl.float32)))
    tl.store(out + offsets, tl.load(source + offsets))


def loads(kernel):
    source = ASTSource(fn=kernel, signature={"table": "*i64", "out": "*fp32"}, constexprs={})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return ptx.count("ld.global.v4.b32"), ptx.count("ld.global.b32")


made, given = loads(said_where_made), loads(said_of_an_argument)
print("said where the pointer is made: %d, %d" % made)
print("said in a function that is given the pointer: %d, %d" % given)
sys.exit(0 if (made, given) == ((2, 0), (0, 8)) else 1)
PY
PYTHONPATH="$place" python3 "$place/copies.py" 2>/dev/null
