"""AMD's TraceLens: its whole report of a PyTorch trace, as CSV files."""

import json
import sys
from pathlib import Path

from TraceLens.Reporting.generate_perf_report_pytorch import (  # pyright: ignore[reportMissingImports]
    generate_perf_report_pytorch,
)

trace = Path(sys.argv[1])
tables = generate_perf_report_pytorch(str(trace), output_csvs_dir=str(trace.parent.parent / "report"))
sys.stdout.write(json.dumps({"tables": {name: len(table) for name, table in tables.items()}}))
