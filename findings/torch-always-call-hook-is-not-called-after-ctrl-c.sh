#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): a forward hook registered with always_call=True, which by its documentation runs
# whether or not the module's forward raises, runs after a ValueError and not after a KeyboardInterrupt, nor after any
# other exception that is no Exception. What such a hook should close, as a range of a profiler or a mode that the hook
# before forward entered, stays open when Ctrl-C comes in a notebook or a REPL, and goes on acting on what runs next.
#
# Seen (was the hook called?):
#   ValueError: True
#   KeyboardInterrupt: False
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
for error in (ValueError, KeyboardInterrupt):

    class Stopped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error

    module, called = Stopped(), []
    module.register_forward_hook(lambda *_: called.append(True), always_call=True)
    try:
        module(torch.ones(1))
    except error:
        seen.append(bool(called))
        print(f"{error.__name__}: {seen[-1]}")
sys.exit(0 if seen == [True, False] else 1)
PY
