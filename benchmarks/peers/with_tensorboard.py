"""The TensorBoard profiler plugin: what its server makes of a run, every view of it."""

import json
import sys
from pathlib import Path

from torch_tb_profiler.io.cache import Cache  # pyright: ignore[reportMissingImports]
from torch_tb_profiler.profiler.loader import RunLoader  # pyright: ignore[reportMissingImports]


def main() -> None:
    """The loader parses in a process of its own and swallows failures: no profile means it failed."""
    run = RunLoader("run", str(Path(sys.argv[1]).parent), Cache()).load()
    profiles = list(run.profiles.values())
    if not profiles:
        raise SystemExit("the plugin made no profile")
    sys.stdout.write(json.dumps({"views": [view.name for view in profiles[0].views]}))


if __name__ == "__main__":
    main()
