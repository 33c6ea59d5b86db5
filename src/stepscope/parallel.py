"""The lessons of data parallel training as modules of a loop of your own, within a job of torch.distributed.

from stepscope.parallel import FullyShardedDataParallel, OverlappedDataParallel, ShardedOptimizer
"""

import importlib
from typing import Any

_PLACES = {
    "BucketedDataParallel": "ddp_textbook",
    "FullyShardedDataParallel": "fsdp_textbook",
    "OverlappedDataParallel": "ddp_textbook",
    "ShardedOptimizer": "zero1",
    "without_matrices": "fsdp_textbook",
}
"""What is public, by its file. It is imported when it is asked for: it needs PyTorch."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"stepscope.training.parallel.strategies.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
