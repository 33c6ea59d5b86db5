#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): nn.MultiheadAttention of a sequence whose keys are all masked (a row of padding in a
# batch) gives NaN with need_weights=True, its default, and numbers with need_weights=False, in training. In eval mode,
# without gradients, it gives NaN either way. So one batch trains or not by an argument that is about what is returned,
# and a model that trained well gives NaN when it is evaluated.
#
# Seen (does the output have NaN?):
#   training, need_weights=True: True; need_weights=False: False
#   eval:     need_weights=True: True; need_weights=False: True
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch

attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
masked = torch.ones(1, 3, dtype=torch.bool)
seen = []
for name, training in (("training,", True), ("eval:    ", False)):
    attention.train(training)
    with torch.set_grad_enabled(training):
        outputs = [attention(x, x, x, key_padding_mask=masked, need_weights=need)[0] for need in (True, False)]
    seen += [bool(output.isnan().any()) for output in outputs]
    print(f"{name} need_weights=True: {seen[-2]}; need_weights=False: {seen[-1]}")
sys.exit(0 if seen == [True, False, True, True] else 1)
PY
