#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): a hook that is registered on a module inside of one that torch.compile has compiled,
# once that has run, is never called, and nothing says so: compiled code does not look whether modules have hooks
# (torch._dynamo.config.skip_nnmodule_hook_guards). One on the compiled module itself is called, and one that was there
# before the first call.
#
# Seen (calls of a hook in one step, backend "eager"):
#   inside, before the first call: 1
#   inside, after it: 0
#   on the compiled module, after it: 1
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 numpy==2.3.5
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from torch import nn


def calls(before, outer):
    torch._dynamo.reset()
    model, seen, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [], torch.ones(2, 4)
    compiled = torch.compile(model, backend="eager")
    if not before:
        compiled(x)
    (compiled if outer else model[0]).register_forward_hook(lambda *_: seen.append(1))
    compiled(x)
    return len(seen)


found = {
    "inside, before the first call": calls(True, False),
    "inside, after it": calls(False, False),
    "on the compiled module, after it": calls(False, True),
}
for name, count in found.items():
    print(f"{name}: {count}")
sys.exit(0 if [*found.values()] == [1, 0, 1] else 1)
PY
