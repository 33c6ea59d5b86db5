"""nsys-ai without DuckDB's SQLite extension, as on a machine without a network: the same tables by sqlite3 and Python.

Opened here by sqlite3 directly: nsys-ai itself first tries to download the extension, some ten seconds a command.
"""

import json
import sqlite3
import sys

from nsys_ai.skills.registry import run_skill  # pyright: ignore[reportMissingImports]

connection = sqlite3.connect(sys.argv[1])
connection.row_factory = sqlite3.Row
skills = {"nvtx_layer_breakdown": {"limit": 10_000}, "top_kernels": {"limit": 10_000}, "gpu_idle_gaps": {}}
rows = {name: len(run_skill(name, connection, raw=True, **options)) for name, options in skills.items()}
sys.stdout.write(json.dumps({"tables": rows}))
