"""Grids of workloads: every combination of the listed choices."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workload import Workload


def grid(*, model: Sequence[str | ModelConfig], **choices: Sequence[Any] | Any) -> list[Workload]:
    """Workloads for every combination; a choice is any field of Workload, one value or a list of them.

    >>> [w.key.rpartition("-")[0] for w in grid(model=["small"], seq_len=[128, 256], dtype="bf16")]
    ['small-b4-s128-bf16-train', 'small-b4-s256-bf16-train']
    """
    models = [configure(m) if isinstance(m, str) else m for m in model]
    lists = {name: _as_list(values) for name, values in choices.items()}
    found = [Workload(model=chosen_model, **chosen) for chosen_model in models for chosen in combinations(lists)]
    return list(dict.fromkeys(found))


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value of each choice.

    Where a step that nobody shares is asked for beside shared ones, it is one process, whatever the numbers of ranks.

    >>> [tuple(each.values()) for each in combinations({"parallel": ["none", "ddp"], "ranks": [2, 4]})]
    [('none', 1), ('none', 1), ('ddp', 2), ('ddp', 4)]
    """
    beside = len(set(choices.get("parallel", ()))) > 1
    for combination in itertools.product(*choices.values()):
        chosen = dict(zip(choices, combination, strict=True))
        if beside and chosen["parallel"] == NOT_PARALLEL and "ranks" in chosen:
            chosen["ranks"] = 1
        yield chosen


def _as_list(values: Sequence[Any] | float | None) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]
