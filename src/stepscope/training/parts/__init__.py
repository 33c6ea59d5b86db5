"""The parts of the textbook's transformer that others than its own code can compute: norm, rope, mlp and loss, and the
projections of one input as one product.

`core/parts.py` has a record of each. `parts_for` makes of a workload what its model is given: a function for each part,
or None where the code of training/transformer.py and training/training_step.py is taken.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stepscope.core.parts import PARTS, Kernels, Part, check_parts, is_users
from stepscope.core.precisions import PRECISIONS
from stepscope.core.workloads import TextbookWorkload

Norm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
"""(x, branch, weight, epsilon) to x + branch, or x without a branch, and its RMSNorm."""
Rope = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q, k, cos, sin) to queries and keys (B, H, S, D) turned by tables (S or more, D)."""
Mlp = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) to silu(gate) * up."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, weight, targets) to the mean cross-entropy of the head's logits of x (..., M) with targets (...)."""
Projections = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
"""(x, weights) to x (..., M) times each of several weights (N_i, M), as views of one tensor."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that compute the parts; None for the textbook's own code."""

    norm: Norm | None = None
    rope: Rope | None = None
    mlp: Mlp | None = None
    loss: Loss | None = None
    projections: Projections | None = None


REFERENCE_PARTS = Parts()


def part_function(part: Part, name: Kernels) -> Any:
    """The function that computes a part; None for the reference."""
    if is_users(name):
        return importlib.import_module("stepscope.training.user_functions").users_part(part, name)
    module, _, function = PARTS[part][name].function.partition(":")
    # Imported only when it is called: the kernels need Triton.
    return getattr(importlib.import_module(module), function) if module else None


def parts_for(workload: TextbookWorkload, device_type: str) -> Parts:
    """The functions that the workload's model runs here. Raises an InputError that names the part which cannot."""
    config = workload.model
    widths: dict[Part, int] = {"norm": config.d_model, "rope": config.head_dim, "loss": config.vocabulary}
    check_parts(workload.parts, device_type, PRECISIONS[workload.dtype].tensors, widths)
    chosen: dict[str, Any] = {part: part_function(part, name) for part, name in workload.parts.items()}
    if workload.projections == "joint":
        from stepscope.kernels.parts.projections import joint_projections  # noqa: PLC0415  (it defines an operator)

        chosen["projections"] = joint_projections
    return Parts(**chosen)
