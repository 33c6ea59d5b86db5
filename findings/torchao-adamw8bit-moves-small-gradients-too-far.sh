#!/bin/sh
# torchao 0.18.0 (torch 2.13.0, Python 3.11): AdamW8bit keeps moments in blocks of 256 with a scale for each. Beside one
# gradient of 10 the second moments of gradients of 0.001, a hundred-millionth of the largest, are zero or its least
# code: after 100 steps their parameters have moved six times as far as with torch.optim.AdamW. In blocks without a
# large gradient they move alike.
#
# Seen:
#   moved, times as far as with torch.optim.AdamW: 5.95 beside the large gradient, 1.00 in another block
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 torchao==0.18.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from torchao.optim import AdamW8bit

gradient = torch.full((4096,), 1e-3)
gradient[0] = 10.0

def moved(optimizer):
    parameter = torch.nn.Parameter(torch.zeros(4096))
    steps = optimizer([parameter], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = gradient.clone()
        steps.step()
    return parameter.detach()

times = moved(AdamW8bit) / moved(torch.optim.AdamW)
beside, apart = float(times[1]), float(times[3000])
print(f"moved, times as far as with torch.optim.AdamW: {beside:.2f} beside the large gradient, {apart:.2f} in another block")
sys.exit(0 if beside > 5 and abs(apart - 1) < 0.01 else 1)
PY
