#!/bin/sh
# triton 3.6.0 and 3.7.1 (no GPU needed: compiled for compute capability 9.0): 3.7.1 compiles a @triton.jit function that
# returns None in a branch whose condition is known when it compiles. 3.6.0 raises a CompilationError, since it cannot
# make a tensor of None: a kernel that was written with the one does not run with the other.
#
# Seen:
#   3.6.0: CompilationError
#   3.7.1: compiled
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat >"$place/nothing.py" <<'PY'
import os

os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.dirname(__file__), "cache")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError


@triton.jit
def scale_of(scales):
    if scales is None:
        return None
    else:
        return tl.load(scales)


@triton.jit
def copy(source, scales, out):
    scale = scale_of(scales)
    value = tl.load(source)
    if scale is not None:
        value *= scale
    tl.store(out, value)


signature = {"source": "*fp32", "scales": "constexpr", "out": "*fp32"}
try:
    triton.compile(ASTSource(fn=copy, signature=signature, constexprs={"scales": None}), target=GPUTarget("cuda", 90, 32))
    print(f"{triton.__version__}: compiled")
except CompilationError as error:
    print(f"{triton.__version__}: {type(error).__name__}")
PY
seen=""
for version in 3.6.0 3.7.1; do
    python3 -m pip install --quiet --target "$place/$version" "triton==$version"
    seen="$seen$(PYTHONPATH="$place/$version" python3 "$place/nothing.py" 2>/dev/null)
"
done
printf '%s' "$seen"
[ "$seen" = "3.6.0: CompilationError
3.7.1: compiled
" ]
