#!/usr/bin/env bash
# Liger-Kernel 0.8.5: its fused linear cross-entropy gives the head's weight no gradient where the hidden state needs
# none, as where the body of a model is frozen and only its head is trained. There is no error: weight.grad stays None,
# and an optimizer leaves the head as it is. PyTorch's cross-entropy of the same linear layer gives the gradient.
# (ops/fused_linear_cross_entropy.py makes the gradients only `if input_requires_grad`.)
#
# Seen with torch 2.13.0 (CPU build), triton 3.7.1 in its interpreter, liger-kernel 0.8.5:
#   same loss: True
#   gradient of the head, PyTorch: 8 x 5, norm above 0: True
#   gradient of the head, Liger, hidden state trained: True
#   gradient of the head, Liger, hidden state frozen: None
#
# Exits with 0 while this is so, and with 1 once the gradient is there.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-compile torch==2.13.0 triton==3.7.1 numpy packaging
"$place/venv/bin/pip" install --quiet --no-compile --no-deps liger-kernel==0.8.5
TRITON_INTERPRET=1 "$place/venv/bin/python" - <<'PYTHON'
import sys

import torch
import torch.nn.functional as F
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

torch.manual_seed(0)
hidden, targets = torch.randn(6, 5), torch.tensor([0, 1, 7, 3, -100, 2])
weight = torch.randn(8, 5, requires_grad=True)
right = F.cross_entropy(F.linear(hidden, weight), targets)
(of_pytorch,) = torch.autograd.grad(right, weight)


def liger(trained):
    weight.grad = None
    loss = liger_fused_linear_cross_entropy(hidden.clone().requires_grad_(trained), weight, targets)
    loss.backward()
    return loss.detach(), weight.grad


loss, of_frozen = liger(False)
_, of_trained = liger(True)
print("same loss:", torch.allclose(loss, right.detach(), atol=1e-6))
print("gradient of the head, PyTorch: 8 x 5, norm above 0:", bool(of_pytorch.norm() > 0))
print("gradient of the head, Liger, hidden state trained:", torch.allclose(of_trained, of_pytorch, atol=1e-6))
print("gradient of the head, Liger, hidden state frozen:", of_frozen)
sys.exit(0 if of_frozen is None else 1)
PYTHON
