#!/bin/sh
# torch 2.13.0 (Python 3.11): `torch.profiler.profile(schedule=..., acc_events=True)` keeps the events of all cycles in
# `events()`. Each cycle counts from its own beginning, so that four steps with a tenth of a second between them all
# begin within the first two: what sorts these events, or takes one's beginning from another's, gets negative times.
#
# Seen:
#   four steps, 0.1 s apart, begin within 0.2 s: True
#
# Exit code 0: as seen. Another: the behaviour has changed, or the package cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile, schedule

layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64)
cycles = schedule(wait=0, warmup=0, active=1, repeat=4)
with profile(activities=[ProfilerActivity.CPU], schedule=cycles, acc_events=True) as profiler:
    for _ in range(4):
        layer(x)
        profiler.step()
        time.sleep(0.1)
starts_us = [event.time_range.start for event in profiler.events() if event.name == "aten::addmm"]
together = len(starts_us) == 4 and max(starts_us) - min(starts_us) < 200_000
print("four steps, 0.1 s apart, begin within 0.2 s:", together)
sys.exit(0 if together else 1)
PY
