"""Several ranks that share a training step: each strategy is a file of strategies/, and a record in core/strategies.py.

    from stepscope.parallel import FullyShardedDataParallel, OverlappedDataParallel, ShardedOptimizer

are the lessons as modules of a loop of your own, within a job of torch.distributed.
"""

import importlib
from typing import Any

_PLACES = {
    "BucketedDataParallel": "ddp_bucketed", "FullyShardedDataParallel": "fsdp_textbook",
    "OverlappedDataParallel": "ddp_overlap", "ShardedOptimizer": "zero1",
}  # fmt: skip
"""What is public, by its file. It is imported when it is asked for: the files import this package."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"stepscope.parallel.strategies.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
