#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): copy.deepcopy(optimizer) copies parameters, states and groups, and no hook of its
# step; a deep copy of a module keeps the module's. What a hook does, as an average of the weights, ends with the copy.
#
# Seen (calls of hooks of the copies):
#   of the module's forward: 1
#   of the optimizer's step: 0
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import copy
import sys

import torch

calls = {"of the module's forward": 0, "of the optimizer's step": 0}


def count(name):
    calls[name] += 1


module = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(module.parameters())
module.register_forward_hook(lambda *_: count("of the module's forward"))
optimizer.register_step_post_hook(lambda *_: count("of the optimizer's step"))
module, optimizer = copy.deepcopy((module, optimizer))
module(torch.ones(1, 2)).sum().backward()
optimizer.step()
for name, number in calls.items():
    print(f"{name}: {number}")
sys.exit(0 if [*calls.values()] == [1, 0] else 1)
PY
