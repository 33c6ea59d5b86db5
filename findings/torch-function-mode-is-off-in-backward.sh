#!/usr/bin/env bash
# PyTorch 2.13.0: while loss.backward() or torch.autograd.backward(loss) runs, a TorchFunctionMode that is open round it
# is off. A checkpoint that is not reentrant runs a part of forward again there, and the mode, which saw its operators
# the first time, sees none of them. A mode that changes an operator, as one that rounds operands, so changes forward
# and not what is run again; PyTorch then refuses backward (CheckpointError) where what is kept has other shapes or
# dtypes, and says nothing where it has other numbers.
#
# Seen with torch 2.13.0 (CPU build):
#   linear layers seen in forward: 1
#   by loss.backward(), which runs it again: 0
#   by torch.autograd.backward(loss): 0
#
# Exits with 0 while this is so, and with 1 once it changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
"$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Count(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += func is F.linear
        return func(*args, **(kwargs or {}))


def seen(backward):
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with Count() as count:
        loss = checkpoint(layer, x, use_reentrant=False).square().sum()
        forward = count.seen
        backward(loss)
    return forward, count.seen - forward


by_method, by_function = seen(lambda loss: loss.backward()), seen(torch.autograd.backward)
print("linear layers seen in forward:", by_method[0])
print("by loss.backward(), which runs it again:", by_method[1])
print("by torch.autograd.backward(loss):", by_function[1])
sys.exit(0 if (by_method, by_function) == ((1, 0), (1, 0)) else 1)
PYTHON
