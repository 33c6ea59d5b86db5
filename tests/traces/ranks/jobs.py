"""Traces of a job's ranks, made by hand: each computes, then all meet in an all-reduce, step after step."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.captures import AUTOGRAD, Capture, kineto_trace

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP_NS = 100_000_000
TRANSFER_NS = 2_000_000
ELEMENTS = 25_000_000
FIRST_STEP = 7


@dataclass
class Made:
    """A job of `ranks`: how much longer each computes in `layers.1.mlp`, and how far each clock is off, in ns."""

    ranks: int = 2
    steps: int = 4
    later_ns: dict[int, int] = field(default_factory=dict[int, int])
    clocks_ns: dict[int, int] = field(default_factory=dict[int, int])
    sequences: bool = True
    told: bool = True
    """Whether the kernels say what their collectives are."""

    def computes_ns(self, rank: int) -> int:
        """What a rank computes in a step before it meets the others."""
        return 10_000_000 + self.later_ns.get(rank, 0)

    def trace(self, rank: int) -> dict[str, Any]:
        """The Kineto trace of a rank."""
        made, clock = Capture(), 1_000_000_000 + self.clocks_ns.get(rank, 0)
        longest = max(self.computes_ns(each) for each in range(self.ranks))
        sizes: list[int] = []
        for step in range(self.steps):
            begin = clock + step * STEP_NS
            made.range(f"ProfilerStep#{FIRST_STEP + step}", begin, begin + STEP_NS - 1000)
            made.range("forward", begin + 1000, begin + 900_000)
            made.range("layers.0.mlp", begin + 2000, begin + 3000)
            made.kernel(begin + 2500, 4_000_000, delay=7500)
            made.range("layers.1.mlp", begin + 4000, begin + 5000)
            made.kernel(begin + 4500, self.computes_ns(rank) - 4_000_000, delay=4_005_500)
            made.range("backward", begin + 910_000, begin + 990_000)
            arrives = begin + 10_000 + self.computes_ns(rank)
            ends = begin + 10_000 + longest + TRANSFER_NS
            made.kernel(
                begin + 950_000, ends - arrives, name=ALL_REDUCE, thread=AUTOGRAD, delay=arrives - begin - 950_000
            )
            sizes.append(ELEMENTS)
        trace = kineto_trace(made)
        trace["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": self.ranks}
        met = [event for event in trace["traceEvents"] if event["name"] == ALL_REDUCE]
        for place, event in enumerate(met):
            if self.told:
                event["args"] |= {
                    "Collective name": "allreduce", "In msg nelems": sizes[place], "Out msg nelems": sizes[place],
                    "Group size": self.ranks, "dtype": "Float", "Process Group Name": "0",
                }  # fmt: skip
                if self.sequences:
                    event["args"]["Seq"] = 100 + place
        return trace

    def write(self, folder: Path) -> list[Path]:
        """Write every rank's trace."""
        folder.mkdir(exist_ok=True)
        paths = [folder / f"job_{rank}.json" for rank in range(self.ranks)]
        for rank, path in enumerate(paths):
            path.write_text(json.dumps(self.trace(rank)))
        return paths
