"""Grids of workloads: every combination of the listed choices."""

import itertools
from collections.abc import Sequence
from typing import Any

from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.workload import Workload


def grid(*, model: Sequence[str | ModelConfig], **choices: Sequence[Any] | Any) -> list[Workload]:
    """Workloads for every combination; a choice is any field of Workload, one value or a list of them.

    >>> [w.key.rpartition("-")[0] for w in grid(model=["small"], seq_len=[128, 256], dtype="bf16")]
    ['small-b4-s128-bf16-train', 'small-b4-s256-bf16-train']
    """
    models = [configure(m) if isinstance(m, str) else m for m in model]
    lists = {name: _as_list(values) for name, values in choices.items()}
    return [
        Workload(model=chosen_model, **dict(zip(lists, combination, strict=True)))
        for chosen_model in models
        for combination in itertools.product(*lists.values())
    ]


def _as_list(values: Sequence[Any] | float | None) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]
