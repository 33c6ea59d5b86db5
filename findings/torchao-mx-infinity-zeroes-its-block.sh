#!/bin/sh
# torchao 0.18.0 (torch 2.13.0, Python 3.11): an infinity in a block of an MXTensor stays an infinity, though fp4 and fp6 have
# none, and the other 31 numbers of its block become 0. A NaN makes all 32 NaN. So an overflow in one number silently
# takes its neighbours away. (The standard, OCP MX 1.0, leaves infinities open.)
#
# Seen (a block of ones with one infinity; another with a NaN):
#   e4m3: 31 zeros, 1 infinity; e2m3: 31 zeros, 1 infinity; e2m1: 31 zeros, 1 infinity
#   with NaN, e2m1: 32 NaN
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 torchao==0.18.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from torchao.prototype.mx_formats.mx_tensor import MXTensor


def through(number, element):
    block = torch.ones(1, 32)
    block[0, 3] = number
    return MXTensor.to_mx(block, element, 32).dequantize(torch.float32)


elements = {"e4m3": torch.float8_e4m3fn, "e2m3": "fp6_e2m3", "e2m1": torch.float4_e2m1fn_x2}
counts = {}
for name, element in elements.items():
    block = through(torch.inf, element)
    counts[name] = int((block == 0).sum()), int(block.isinf().sum())
print("; ".join(f"{name}: {zeros} zeros, {infinite} infinity" for name, (zeros, infinite) in counts.items()))
nan = int(through(torch.nan, torch.float4_e2m1fn_x2).isnan().sum())
print(f"with NaN, e2m1: {nan} NaN")
sys.exit(0 if set(counts.values()) == {(31, 1)} and nan == 32 else 1)
PY
