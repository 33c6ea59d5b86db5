"""What is predicted of a step of a user's own module: its peak, whether it fits, and what would make it fit."""

import msgspec

from stepscope.allocations.prediction.fit import Budget, Plan
from stepscope.core.errors import InputError
from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import MemoryCategory
from stepscope.core.workloads import FactoryWorkload

KEPT_FREE = 0.04
"""Share of the memory that is left free. The prediction does not see memory that an operator's kernel takes and gives
back."""

KEPT_FREE_FOR_CUSTOM = 0.1
"""Share of the memory that is left free in addition, if the step calls operators that are not PyTorch's."""


MOST_SEARCHED = 2**20
"""Where the search for the largest batch ends: a number so large is said to be a bound."""

CONVOLUTION_WORKSPACE_BYTES = 72 * 2**20
"""For cuDNN's workspaces, the bytes of the largest convolution's operands and so many more are kept free: copies in
another layout, and partial sums. No convolution took more on an H200 (results/h200/convolutions/workspaces.json)."""


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """What the prediction cannot see in a step, or counts at its largest."""

    convolutions: int = 0
    """Calls of convolutions in three steps; on a GPU, cuDNN takes workspaces for them."""
    convolution_bytes: int = 0
    """Bytes of the operands and outputs of the largest convolution."""
    custom: tuple[str, ...] = ()
    """Operators that are not PyTorch's."""
    at_most: tuple[str, ...] = ()
    """Operators whose output was counted at its largest, since its shape depends on data: the peak is a bound."""

    def kept_free(self, budget: Budget) -> int:
        """Bytes of the memory that a step must leave free to fit."""
        share = KEPT_FREE + (KEPT_FREE_FOR_CUSTOM if self.custom else 0)
        return int(budget.usable_bytes * share) + self.workspace_bytes

    @property
    def workspace_bytes(self) -> int:
        """The most that cuDNN takes for a convolution; 0 where there is none."""
        return self.convolution_bytes + CONVOLUTION_WORKSPACE_BYTES if self.convolutions else 0


class OwnEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted bytes of one steady step."""

    peak_bytes: int
    peak_phase: str
    categories: dict[MemoryCategory, int]
    """Bytes that are alive at the peak, by category; they add up to `peak_bytes` exactly."""
    memory: PhaseMemory
    unseen: Unseen = Unseen()


class OwnVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a step fits into a budget, and what would make it fit."""

    budget: Budget
    fits: bool
    kept_free_bytes: int
    """Bytes of the budget that must stay free."""
    fails_in: str | None = None
    plans: tuple[Plan, ...] = ()
    largest_batch: int | None = None
    """The largest batch that fits, in samples; 0 if not even one fits, None if the size cannot be changed."""
    longest_sequence: int | None = None
    """The longest sequence that fits, in tokens; 0 if none fits, None if there is no seq_len to change."""
    longest_is_the_models: bool = False
    """Whether the model takes no longer sequence than that, whatever the memory."""


class OwnFit(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of a step, and a verdict for each budget."""

    workload: FactoryWorkload
    """The workload with the model as it was found."""
    estimate: OwnEstimate
    verdicts: tuple[OwnVerdict, ...] = ()


def decode_own_fit(data: bytes, what: str) -> OwnFit:
    """The prediction that a process of its own wrote."""
    try:
        return msgspec.json.decode(data, type=OwnFit)
    except msgspec.DecodeError as error:
        raise InputError(f"{what} left no prediction: {error}") from error
