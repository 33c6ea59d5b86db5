"""nsys-ai at its best: DuckDB over a Parquet cache that it builds, then time by range, kernels, idle gaps."""

import json
import sys

import nsys_ai.profile  # pyright: ignore[reportMissingImports]
from nsys_ai.skills.registry import run_skill  # pyright: ignore[reportMissingImports]

with nsys_ai.profile.open(sys.argv[1]) as profile:
    if profile.db is None:
        raise SystemExit(f"nsys-ai fell back to sqlite3: {getattr(profile, 'cache_error', '')}")
    skills = {"nvtx_layer_breakdown": {"limit": 10_000}, "top_kernels": {"limit": 10_000}, "gpu_idle_gaps": {}}
    rows = {name: len(run_skill(name, profile.db, raw=True, **options)) for name, options in skills.items()}
sys.stdout.write(json.dumps({"tables": rows}))
