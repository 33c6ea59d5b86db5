"""What the tests of the launcher run on ranks."""

import os
import signal
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from stepscope.core.errors import InputError
from stepscope.training.training_step import Ranks


def call(argument: bytes, ranks: Ranks, device: torch.device, say: Callable[[str], object]) -> dict[str, object]:
    """The sum of all ranks' numbers; or, on the rank that `at` says, what `how` says."""
    asked = msgspec.json.decode(argument, type=dict[str, str | int])
    number = torch.tensor([ranks.rank + 1])
    dist.all_reduce(number)
    say("the lesson")
    if ranks.rank == asked.get("at"):
        match asked["how"]:
            case "raise":
                raise ValueError("no more\nand a second line")
            case "refuse":
                raise InputError("this cannot be: say another")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                print("the last line", flush=True)
                os._exit(7)
            case _:
                time.sleep(600)
    if "how" in asked:
        dist.all_reduce(number)  # waits for the rank that does not come
    return {"sum": int(number), "rank": ranks.rank, "said": asked.get("word"), "device": device.type}


def losses(argument: bytes, ranks: Ranks, device: torch.device, say: Callable[[str], object]) -> dict[str, list[float]]:
    """The losses of steps that these ranks share, by how the step runs: as it is, and replayed."""
    from stepscope.core.model_config import configure
    from stepscope.core.workloads import TextbookWorkload
    from stepscope.engine.stages import make_step
    from stepscope.training.training_step import AssembledStep

    found: dict[str, list[float]] = {}
    strategy = msgspec.json.decode(argument, type=dict[str, str])["strategy"]
    for graph in ("none", "step"):
        workload = TextbookWorkload(
            model=configure("tiny"), seq_len=64, optimizer="adamw-fused", parallel=strategy, ranks=ranks.ranks,
            graph=graph,
        )  # fmt: skip
        step, _ = make_step(workload, device, None, ranks)
        assert isinstance(step, AssembledStep)
        found[graph] = []
        for _ in range(8):
            step.prepare()
            for phase in step.phases:
                phase.run()
            assert step.loss is not None
            found[graph].append(float(step.loss))
    return found
