"""AMD's TraceLens: build its tree, then the time line of the device, and the table of ops that launch kernels."""

import json
import sys

from TraceLens import TreePerfAnalyzer  # pyright: ignore[reportMissingImports]

analyzer = TreePerfAnalyzer.from_file(sys.argv[1])
launchers = analyzer.get_df_kernel_launchers()
tables = {
    "timeline": analyzer.get_df_gpu_timeline(),
    "launchers": launchers,
    "launchers_summary": analyzer.get_df_kernel_launchers_summary(launchers),
}
sys.stdout.write(json.dumps({"tables": {name: len(table) for name, table in tables.items()}}))
