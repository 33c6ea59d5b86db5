#!/bin/sh
# torch 2.13.0 (Python 3.11): `F.rms_norm` is one operator, aten::_fused_rms_norm, which keeps its input and a root for
# each row. It has kernels for GPUs alone: on a CPU, and on meta and fake tensors of one, five operators run in its place
# and keep a second tensor of the input's size. What predicts a GPU's memory by them counts too much.
#
# Seen:
#   kept for backward beside weights: 2 tensors of 4 x 16, 1 root for each of 4 rows; operator: MulBackward0
#
# Exit code 0: as seen. Another: the behaviour has changed, or the package cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch

x, weight = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
kept = {}

def pack(tensor):
    kept[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
    return tensor

with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    out = torch.nn.functional.rms_norm(x, (16,), weight)
whole, roots = ([*kept.values()].count(shape) for shape in ((4, 16), (4, 1)))
name = type(out.grad_fn).__name__
print(f"kept for backward beside weights: {whole} tensors of 4 x 16, {roots} root for each of 4 rows; operator: {name}")
sys.exit(0 if whole == 2 and name == "MulBackward0" else 1)
PY
