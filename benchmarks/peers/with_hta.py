"""HolisticTraceAnalysis: load a trace, then its tables of kernels, of busy and idle time, and of ops and launches."""

import json
import logging
import sys
from pathlib import Path

from hta.trace_analysis import TraceAnalysis  # pyright: ignore[reportMissingImports]

logging.disable(logging.WARNING)
# All steps: by default the last is left out. Far more kernels than there are names, so that none is summed as "others".
analysis = TraceAnalysis(trace_dir=str(Path(sys.argv[1]).parent), include_last_profiler_step=True)
kernel_types, kernels = analysis.get_gpu_kernel_breakdown(visualize=False, num_kernels=10_000)
tables = {
    "kernel_types": kernel_types,
    "kernels": kernels,
    "temporal": analysis.get_temporal_breakdown(visualize=False),
    "idle": analysis.get_idle_time_breakdown(visualize=False)[0],
}
rows = {name: len(table) for name, table in tables.items()}
sys.stdout.write(json.dumps({"events": len(analysis.t.get_trace(0)), "tables": rows}))
