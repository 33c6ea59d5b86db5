#!/bin/sh
# torch 2.11.0 (Python 3.11): Python takes a bool for the index of a tuple, torch.compile does not. With fullgraph=True it
# raises the TypeError that a wrong index would. Without, the whole function runs as it is, and nothing says so: no
# warning, no graph break is counted, no graph is made. torch 2.13.0 compiles it.
#
# Seen (a product with `(2.0, 3.0)[x.dim() == 1]`, backend that counts graphs):
#   fullgraph: TypeError, indices must be integers or slices, not <class 'bool'>
#   without: [3.0, 3.0], graphs: 0, graph breaks counted: 0, bytes on stderr: 0
#   with int() around it: [3.0, 3.0], graphs: 1, graph breaks counted: 0, bytes on stderr: 0
#
# Exit code 0: this is so. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.11.0 numpy==2.3.5
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import os
import sys
import tempfile

import torch
from torch._dynamo.utils import counters


def by_bool(x):
    return x * 1.0 * (2.0, 3.0)[x.dim() == 1]


def by_int(x):
    return x * 1.0 * (2.0, 3.0)[int(x.dim() == 1)]


def compiled(function):
    torch._dynamo.reset()
    counters.clear()
    graphs, stderr = [], os.dup(2)

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        result = torch.compile(function, backend=backend)(torch.ones(2)).tolist()
        os.dup2(stderr, 2)
        return result, len(graphs), sum(counters["graph_break"].values()), os.fstat(said.fileno()).st_size


try:
    torch.compile(by_bool, backend="eager", fullgraph=True)(torch.ones(2))
    raised = "nothing"
except Exception as error:
    what = "indices must be integers or slices, not <class 'bool'>"
    raised = f"TypeError, {what}" if "TypeError" in str(error) and what in str(error) else type(error).__name__
print("fullgraph:", raised)
found = {"without": compiled(by_bool), "with int() around it": compiled(by_int)}
for name, seen in found.items():
    print("%s: %s, graphs: %d, graph breaks counted: %d, bytes on stderr: %d" % (name, *seen))
right = [([3.0, 3.0], graphs, 0, 0) for graphs in (0, 1)]
sys.exit(0 if raised.startswith("TypeError") and [*found.values()] == right else 1)
PY
