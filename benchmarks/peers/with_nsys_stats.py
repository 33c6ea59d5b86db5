"""Nsight Systems' own summaries of an export: by kernel, and by range and kernel. STEPSCOPE_NSYS may name the nsys."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

REPORTS = ("cuda_gpu_kern_sum", "nvtx_kern_sum")

trace = Path(sys.argv[1])
out = trace.parent.parent / "stats"
command = [os.environ.get("STEPSCOPE_NSYS") or "nsys", "stats", "--format", "csv", "--output", str(out), str(trace)]
command[2:2] = [f"--report={report}" for report in REPORTS]
said = subprocess.run(command, capture_output=True, text=True, check=True)
rows = {}
for report in REPORTS:
    with out.with_name(f"stats_{report}.csv").open(newline="") as file:
        rows[report] = sum(1 for _ in csv.reader(file)) - 1
if min(rows.values()) < 1:  # nsys reports its own failures and exits with 0
    raise SystemExit(said.stdout + said.stderr)
sys.stdout.write(json.dumps({"tables": rows}))
