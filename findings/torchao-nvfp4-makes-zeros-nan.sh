#!/bin/sh
# torchao 0.18.0 (torch 2.13.0, Python 3.11): NVFP4Tensor with the per-tensor scale that torchao's own function gives makes
# NaN of a tensor of zeros (a gradient of padding, a weight that begins at zero). Without a per-tensor scale, its
# default, a weight of deviation 0.002 becomes zero in 95 of 100 numbers: the scales of its blocks lie below the least
# that e4m3 has. Neither warns.
#
# Seen:
#   zeros with a per-tensor scale: all NaN: True
#   zeros among numbers of deviation 0.002: 95 % without, 7 % with a per-tensor scale
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 torchao==0.18.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

def through(values, scaled):
    scale = per_tensor_amax_to_scale(values.abs().max()) if scaled else None
    return NVFP4Tensor.to_nvfp4(values, per_tensor_scale=scale).dequantize(torch.float32)

lost = bool(through(torch.zeros(16, 32), True).isnan().all())
weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 0.002
without, with_scale = (float((through(weight, scaled) == 0).float().mean()) for scaled in (False, True))
print("zeros with a per-tensor scale: all NaN:", lost)

print(f"zeros among numbers of deviation 0.002: {100 * without:.0f} % without, {100 * with_scale:.0f} % with a per-tensor scale")
sys.exit(0 if lost and without > 0.9 and with_scale < 0.1 else 1)
PY
