#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): torch.utils.flop_counter.FlopCounterMode does not divide the gradient of a grouped
# convolution's weight by its groups. Forward counts them. So a depthwise layer of 96 channels counts 97 times its
# forward in backward, where the two gradients take twice forward's FLOPs, and any utilisation that is computed from
# this count is too high by as much.
#
# Seen:
#   forward:  884736
#   backward: 85819392 (97.0 times forward; both gradients of a layer without groups: 2.0 times)
#
# Exit code 0: as seen. Another: the behaviour has changed, or the package cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - <<'PY'
import sys

import torch
from torch.utils.flop_counter import FlopCounterMode


def counted(groups):
    """FLOPs of forward, and of backward with the gradients of input and weight."""
    layer = torch.nn.Conv2d(96, 96, 3, padding=1, groups=groups, bias=False)
    x = torch.randn(2, 96, 16, 16, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = layer(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


forward, backward = counted(groups=96)
whole_forward, whole_backward = counted(groups=1)
print(f"forward:  {forward}")
print(f"backward: {backward} ({backward / forward:.1f} times forward; "
      f"both gradients of a layer without groups: {whole_backward / whole_forward:.1f} times)")
sys.exit(0 if forward == 2 * 2 * 16 * 16 * 96 * 9 and whole_backward == 2 * whole_forward and backward > 90 * forward else 1)
PY
