#!/bin/sh
# torch 2.13.0 (Python 3.11): CPU's autocast casts cross_entropy to float32 as one operator; CUDA's does not name it. There
# log_softmax, inside of it, is cast. So a list of one device's rules says nothing of the other's: layer norm and softmax
# are named by CUDA's alone. (A build for CPUs registers the rules of both.)
#
# Seen (named by CPU's, by CUDA's):
#   cross_entropy_loss: True, False
#   log_softmax.int:    False, True
#   softmax.int:        False, True
#   layer_norm:         False, True
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch

seen = []
for name in ("cross_entropy_loss", "log_softmax.int", "softmax.int", "layer_norm"):
    keys = ("AutocastCPU", "AutocastCUDA")
    named = [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in keys]
    seen.append(named)
    print(f"{name + ':':19} {named[0]}, {named[1]}")
sys.exit(0 if seen == [[True, False], [False, True], [False, True], [False, True]] else 1)
PY
