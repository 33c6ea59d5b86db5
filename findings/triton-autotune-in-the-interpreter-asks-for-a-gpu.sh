#!/usr/bin/env bash
# Triton 3.7.1: an autotuned kernel does not run in its interpreter on a machine without a GPU. The interpreter is for
# machines that have none, and runs the same kernel with any one of its configurations; with two, the autotuner times
# them first, for which it asks for the active driver, and there is none. So a file of kernels whose authors tuned them
# cannot be checked on a CPU as it is.
#
# Seen with torch 2.13.0 (CPU build), triton 3.7.1 in its interpreter:
#   one configuration: right
#   two configurations: RuntimeError: 0 active drivers ([]). There should only be one.
#
# Exits with 0 while this is so, and with 1 once two configurations run.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-compile torch==2.13.0 triton==3.7.1 numpy
cat > "$place/kernels.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl


def doubled(configurations):
    @triton.autotune([triton.Config({"BLOCK": block}) for block in configurations], key=["count"])
    @triton.jit
    def double(x, y, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        tl.store(y + at, 2 * tl.load(x + at, mask=inside), mask=inside)

    x = torch.arange(50.0)
    y = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return "right" if torch.equal(y, 2 * x) else "wrong"


print("one configuration:", doubled([16]))
try:
    print("two configurations:", doubled([16, 32]))
except RuntimeError as error:
    print(f"two configurations: RuntimeError: {error}")
    sys.exit(0 if "active drivers" in str(error) else 1)
sys.exit(1)
PYTHON
TRITON_INTERPRET=1 "$place/venv/bin/python" "$place/kernels.py"
