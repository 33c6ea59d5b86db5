#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): GradScaler.step(optimizer) leaves an update out where a gradient is not finite. It
# then does not call the optimizer's step; that of a fused optimizer it calls all the same, with `found_inf`, and the
# step's hooks with it. The parameters stay, so whoever counts updates by hooks counts one that was none.
#
# Seen (calls of a step post hook, whether the parameters stayed):
#   plain: 0, True
#   fused: 1, True
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch


def seen(fused):
    parameter, calls = torch.nn.Parameter(torch.ones(4)), []
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.step(optimizer)
    return len(calls), bool((parameter == 1).all())


plain, fused = seen(False), seen(True)
print(f"plain: {plain[0]}, {plain[1]}")
print(f"fused: {fused[0]}, {fused[1]}")
sys.exit(0 if (plain, fused) == ((0, True), (1, True)) else 1)
PY
