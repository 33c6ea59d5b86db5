#!/bin/sh
# PyTorch's profiler writes the names of ranges into its Chrome trace without escaping double quotes, so that one
# record_function('say "hi"') makes the whole trace a file that no JSON reader takes. A name that holds a tab, or a
# letter beyond ASCII, becomes "unknown", and a backslash becomes a slash.
#
# Version: torch 2.13.0 (CPU). Expected: JSON, with the names as given. Seen:
#   json: Expecting ',' delimiter
#   'say "hi"' is written as "name": "say "hi"",
#   'maß' is written as "name": "unknown",
#   'a\b' is written as "name": "a/b",
# Exits 0 while the behaviour is as described, and 1 once it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" torch==2.13.0 numpy
PYTHONPATH="$folder/packages" python3 - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

NAMES = {'say "hi"': '"name": "say "hi"",', "ma\u00df": '"name": "unknown",', "a\\b": '"name": "a/b",'}
path = Path(sys.argv[1], "trace.json")
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for name in NAMES:
        with record_function(name):
            torch.ones(2).add(1)
profiler.export_chrome_trace(str(path))
text = path.read_text()
try:
    json.loads(text)
    broken = False
except ValueError as error:
    broken = True
    print("json:", error.args[0].split(":")[0])
for name, written in NAMES.items():
    print(repr(name), "is written as", written if written in text else "something else")
sys.exit(0 if broken and all(written in text for written in NAMES.values()) else 1)
PYTHON
