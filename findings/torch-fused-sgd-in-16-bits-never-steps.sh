#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): torch.optim.SGD(fused=True) leaves a parameter of 1000 numbers in float16 or bfloat16
# as it is. There is no error and no warning. The same optimizer without `fused`, and fused in float32, step.
#
# Seen (ten steps of 0.1 x 0.1 from 1):
#   float32:  plain 0.9, fused 0.9
#   float16:  plain 0.9023, fused 1
#   bfloat16: plain 0.8828, fused 1
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch


def stepped(dtype, fused):
    parameter = torch.ones(1000, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    parameter.grad = torch.full_like(parameter, 0.1)
    for _ in range(10):
        optimizer.step()
    return parameter[0].item()


ends = {}
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    ends[dtype] = stepped(dtype, False), stepped(dtype, True)
    print(f"{str(dtype)[6:] + ':':9} plain {ends[dtype][0]:.4g}, fused {ends[dtype][1]:.4g}")
still = all(ends[dtype][1] == 1 > ends[dtype][0] for dtype in (torch.float16, torch.bfloat16))
sys.exit(0 if still and ends[torch.float32][1] < 1 else 1)
PY
