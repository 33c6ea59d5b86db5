#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): torch.utils.checkpoint, not reentrant, runs forward again in backward and stops as
# soon as all tensors that backward needs are there, in the middle of the last module. That module's forward pre-hook
# has been called again, its forward hook is not: a stack that one pushes to and the other pops from is wrong for the
# rest of the step. A hook with always_call=True is called.
#
# Seen (calls in one step of three modules in a checkpoint):
#   forward pre-hooks: 6
#   forward hooks: 5
#   forward hooks, always_call=True: 6
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys
from collections import Counter

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

calls = Counter()
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
for module in model:
    module.register_forward_pre_hook(lambda *_: calls.update(["forward pre-hooks"]))
    module.register_forward_hook(lambda *_: calls.update(["forward hooks"]))
    module.register_forward_hook(lambda *_: calls.update(["forward hooks, always_call=True"]), always_call=True)
checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
for name, count in calls.items():
    print(f"{name}: {count}")
sys.exit(0 if [*calls.values()] == [6, 5, 6] else 1)
PY
