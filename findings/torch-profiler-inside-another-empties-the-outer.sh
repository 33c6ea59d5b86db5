#!/usr/bin/env bash
# torch 2.13.0: of two torch.profiler.profile contexts, one inside the other, the inner one ends the outer one's
# session. The outer one raises nothing and returns a result with no events at all, those from before the inner one
# included. All that is said is a warning in C++ on stderr, once the outer one stops.
# A good engineer expects an error at the inner start (as for two cProfile.Profile.enable()), or both results whole.
#
# Seen on Linux, Python 3.11, CPU build:
#   inner 2 matrix products, outer 0 of 4
# Exits 0 while this is so, and 1 once the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.profiler import ProfilerActivity, profile


def products(profiler):
    return sum(event.name == "aten::mm" for event in profiler.events())


x = torch.ones(8, 8)
with profile(activities=[ProfilerActivity.CPU]) as outer:
    x @ x
    with profile(activities=[ProfilerActivity.CPU]) as inner:
        x @ x
        x @ x
    x @ x
print(f"inner {products(inner)} matrix products, outer {products(outer)} of 4")
sys.exit(not (products(inner) == 2 and products(outer) == 0))
PYTHON
