"""Runs a function on several ranks that talk over gloo, each a process, and brings home what each returns."""

import importlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.core.interrupts import leave
from stepscope.training.training_step import Ranks
from tests.interpreter import quicken

_IMPORTED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pytest",
    "stepscope.training.training_step", "stepscope.training.parallel.correctness",
]  # fmt: skip
"""What takes ranks long to import: one process does it for all tests, and each rank is forked from that."""


class Here(Ranks):
    """The ranks of a group that is there already."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.backend = rank, ranks, "gloo"

    def gathered(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]


def on_ranks(count: int, function: Callable[[int, int], Any]) -> list[Any]:
    """What the function returns on each rank, of (rank, ranks); the ranks are started afresh, and killed when one of
    them fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        here = (count, folder, function, dict(os.environ))  # the process that forks has the variables of its start
        ranks = [context.Process(target=_rank, args=(rank, *here)) for rank in range(count)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(240)
        alive = [process for process in ranks if process.is_alive()]
        for process in alive:
            process.kill()
        assert not alive, "ranks still waited for one another after four minutes"
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * count, f"exit codes {codes}"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def _rank(
    rank: int, count: int, folder: str, function: Callable[[int, int], Any], variables: dict[str, str]
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        importlib.import_module("triton.runtime.interpreter")
        quicken()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(function(rank, count)))
    dist.destroy_process_group()
    leave(0)  # as a rank of a run does: in the usual end gloo's threads abort a process now and then
