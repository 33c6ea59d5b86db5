"""The old place of the names of `core/workloads.py`, for recipes that were written for them; it warns."""

import warnings
from typing import Any

from stepscope.core import workloads


def __getattr__(name: str) -> Any:
    now = "TextbookWorkload" if name == "Workload" else name
    if name.startswith("__") or not hasattr(workloads, now):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {workloads.__name__}.{now}", FutureWarning, stacklevel=2)
    return getattr(workloads, now)
