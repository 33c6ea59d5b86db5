#!/bin/sh
# accelerate 1.15.0 with torch 2.13.0 (CPU, Python 3.11): inside of accelerator.accumulate(model), backward, step and
# zero_grad take the accumulation into account: step and zero_grad do nothing before the last micro-batch.
# accelerator.clip_grad_norm_ does not: it clips at each, so that the first micro-batches count for less. To clip once,
# ask for accelerator.sync_gradients.
#
# Seen (the norm of the gradient after each of two micro-batches of gradients of norm 200, clipped to 1):
#   as written: 1.0, 1.0
#   the share of the first micro-batch in the last gradient: 0.005
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 accelerate==1.15.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
layer = torch.nn.Linear(2, 1, bias=False)
model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
norms = []
# The gradient of the first micro-batch is along the first number, that of the second along the second.
for batch in (torch.tensor([[400.0, 0.0]]), torch.tensor([[0.0, 400.0]])):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(round(float(layer.weight.grad.norm()), 3))
        first, second = layer.weight.grad.abs().flatten().tolist()
        optimizer.step()
share = round(first / (first + second), 3)
print("as written:", ", ".join(map(str, norms)))
print("the share of the first micro-batch in the last gradient:", share)
sys.exit(0 if norms == [1.0, 1.0] and share < 0.05 else 1)
PY
