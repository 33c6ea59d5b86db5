#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): torch.utils.flop_counter.FlopCounterMode counts 0 FLOPs, without a word, for products
# that it has no formula for: grouped products (torch._grouped_mm, which mixtures of experts run), fused attention on a
# CPU, and a matrix by a vector. The total of a model that has them is too low and says nothing of it.
#
# Seen:
#   grouped product of 24 x 16 by 3 x 16 x 8: 0 of 6144
#   scaled_dot_product_attention on a CPU:    0 of 65536
#   matrix by vector, 64 x 32:                0 of 4096
#   matrix by matrix, 64 x 32 by 32 x 8:      32768 of 32768
#
# Exit code 0: as seen. Another: the behaviour has changed, or the package cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - <<'PY'
import sys

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


rows, experts = torch.randn(24, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
ends = torch.tensor([8, 12, 24], dtype=torch.int32)
q = torch.randn(1, 2, 16, 32)
matrix = torch.randn(64, 32)
cases = (
    ("grouped product of 24 x 16 by 3 x 16 x 8:", lambda: torch._grouped_mm(rows, experts, offs=ends), 2 * 24 * 16 * 8, 0),
    ("scaled_dot_product_attention on a CPU:   ", lambda: F.scaled_dot_product_attention(q, q, q), 4 * 2 * 16 * 16 * 32, 0),
    ("matrix by vector, 64 x 32:               ", lambda: matrix @ torch.randn(32), 2 * 64 * 32, 0),
    ("matrix by matrix, 64 x 32 by 32 x 8:     ", lambda: matrix @ torch.randn(32, 8), 2 * 64 * 32 * 8, 2 * 64 * 32 * 8),
)
same = True
for name, run, true, seen in cases:
    found = counted(run)
    print(f"{name} {found} of {true}")
    same = same and found == seen
sys.exit(0 if same else 1)
PY
