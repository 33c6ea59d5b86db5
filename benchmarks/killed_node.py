"""Does a sweep lose anything when a machine dies? A cluster of several nodes of Ray's, and one is killed in the middle.

    python benchmarks/killed_node.py [--nodes 3] [--cells 9] [--runs DIR] [--json FILE]
    python benchmarks/killed_node.py --show FILE...        # a result kept with --json

The nodes are all on this machine: a head that measures nothing, and nodes that measure one cell at a time. When so many
cells have ended as there are nodes, the last node is ended by SIGKILL, with the cell that it measures. Afterwards the
same command is given again, without the cluster: it finds every result.
"""

import argparse
import itertools
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

import msgspec

from stepscope.core.run_directory import load_runs
from stepscope.core.units import counted
from stored import measure_or_show

CELL_S = 2
STORE_BYTES = 80 * 2**20


class Result(msgspec.Struct, kw_only=True):
    """What was seen."""

    command: str
    cells: int
    nodes: int
    killed_after: int
    """Cells that had ended when the node was killed."""
    told: list[str]
    """What the sweep said while it ran, line by line."""
    code: int
    statuses: dict[str, int]
    """How many runs ended so."""
    by_node: dict[str, int]
    """How many results each node left."""
    run_twice: int
    """Cells with more than one result."""
    found_again: int
    """Cells that the same command found measured, when it was given again without the cluster."""


def main_command(arguments: argparse.Namespace, *more: str) -> list[str]:
    lengths = ",".join(str(8 + 2 * i) for i in range(arguments.cells))
    sizes = ("--d-model", "32", "--d-ff", "64", "--layers", "2", "--heads", "2", "--vocabulary", "101")
    measured = ("--device", "cpu", "--seconds", str(CELL_S), "--no-profile", "--runs", str(arguments.runs))
    return ["stepscope", "sweep", "--model", "tiny", *sizes, "--seq-len", lengths, *measured, *more]


def lines_of(stream: IO[str], heard: list[str]) -> None:
    """Keep what the sweep says, as it says it."""
    heard.extend(line.rstrip("\n").removeprefix("stepscope: ") for line in stream)


def measure(arguments: argparse.Namespace) -> Result:
    """Start the cluster and the sweep, kill a node, and count what is there afterwards."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(arguments.nodes)]
    command = main_command(arguments, "--on", "auto")
    heard: list[str] = []
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], env={**os.environ, "RAY_ADDRESS": cluster.address}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        reader = threading.Thread(target=lines_of, args=(process.stderr, heard), daemon=True)
        reader.start()
        while len(heard) < arguments.nodes and process.poll() is None:
            time.sleep(0.05)
        time.sleep(CELL_S / 2)  # the next cells have begun by then
        killed_after = len(heard)
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        code = process.wait(timeout=600)
        reader.join()
    finally:
        cluster.shutdown()
    again = subprocess.run([sys.executable, "-m", *main_command(arguments)], capture_output=True, text=True, check=True)
    runs, _ = load_runs([arguments.runs])
    workloads = Counter(run.workload.key for run in runs)
    return Result(
        command=" ".join(command), cells=arguments.cells, nodes=arguments.nodes, killed_after=killed_after, told=heard,
        code=code, statuses=dict(Counter(run.status for run in runs)),
        by_node=dict(Counter(str(run.environment and run.environment.node) for run in runs)),
        run_twice=sum(times > 1 for times in workloads.values()), found_again=again.stderr.count("(already measured)"),
    )  # fmt: skip


def render_markdown(result: Result) -> str:
    """What was seen, in lines."""
    ended = ", ".join(f"{count} {status}" for status, count in result.statuses.items())
    numbered = ", ".join(f"{count} on {node}" for node, count in result.by_node.items())
    facts = (
        f"$ {result.command}",
        *result.told,
        "",
        f"A node was killed after {counted(result.killed_after, 'cell')}. Exit code {result.code}.",
        f"Of {counted(result.cells, 'cell')}: {ended}; {numbered}; {result.run_twice} with two results.",
        f"The same command again, without the cluster: {result.found_again} found measured.",
    )
    return "\n".join(itertools.chain(facts, [""]))


def main() -> None:
    """Print the result; with --json also keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cells", type=int, default=9)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE")
    measure_or_show(parser.parse_args(), Result, measure=measure, render_markdown=render_markdown)


if __name__ == "__main__":
    main()
