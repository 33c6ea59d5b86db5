"""What was taken for a step of a loop that is not ours, and what its steps evaluate."""

import msgspec

from stepscope.core.units import counted, format_seconds


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of modules with gradients off in timed steps: an evaluation now and then, or a teacher in each."""

    modules: tuple[str, ...]
    """Their classes."""
    where: str
    """The user's line of the first such call; empty where it is not known."""
    steps: int
    """Timed steps that have such calls."""
    of: int
    """All timed steps."""
    median_s: float
    """What they take in such a step, with what lies between two of them."""

    @property
    def is_part_of_a_step(self) -> bool:
        """Whether most steps have it. The times of other steps are stored without it."""
        return 2 * self.steps >= self.of


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of `torch.save` in timed steps, which write a checkpoint now and then."""

    where: str
    """The user's line of the first one; empty where it is not known."""
    steps: int
    """Timed steps that save."""
    of: int
    """All timed steps."""
    median_s: float
    """What saving takes in such a step. On a GPU it waits for what was launched before."""

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        verb = "saves" if self.steps == 1 else "save"
        took = format_seconds(self.median_s)
        return f"{counted(self.steps, 'step')} of {self.of} {verb} for {took} (torch.save{where})"


class WatchedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken for a step of a loop that is not ours, and which of its steps were timed."""

    why: str
    """What decided it, in words."""
    modules: tuple[str, ...]
    """Classes of the modules whose calls are forward."""
    optimizers: tuple[str, ...] = ()
    """Classes of the optimizers; the first one's step ends a step. Empty where the loop says where a step ends."""
    forwards: int = 0
    """Calls of these modules in the step that was looked at."""
    backwards: int = 0
    evaluations: int = 0
    """Times that the optimizer's step evaluated its closure, which runs forward and backward."""
    autocast: str | None = None
    """The dtype of autocast in forward; None where it was off."""
    parameter_dtype: str = ""
    """The dtype of most parameters."""
    first_step: int | None = None
    """The number of the first timed step in its loop, from 0; None where none was timed."""
    timed_steps: tuple[tuple[int, int], ...] = ()
    """The first and the last number of each span of timed steps; other steps between them were recorded. Empty in runs
    from before there were several."""
    backwards_between: tuple[int, int] | None = None
    """The fewest and the most backwards in a timed step; None where none was timed, and in runs from before it was
    counted."""
    ended_by: str | None = None
    """The exception that ended the loop after its timed steps, in a line. The times are whole all the same."""
    module_forwards: tuple[int, ...] = ()
    """Calls of each of `modules` in the step that was looked at; this and what follows is not in earlier runs."""
    optimizer_models: tuple[str, ...] = ()
    """The models that each of `optimizers` updates, by their classes."""
    optimizer_steps: tuple[int, ...] = ()
    """How often each of `optimizers` steps in a step of the loop."""
    in_backward: int = 0
    """Optimizers that step inside backward, whose end then ends a step."""
    forwards_between: tuple[int, int] | None = None
    """The fewest and the most forwards in a timed step."""
    forwards_mean: float | None = None
    """The mean of them, where they vary: more than a tenth of the timed steps ran others than most."""
    trainable: int | None = None
    """Numbers in the model's parameters that train: an optimizer holds them, and they require a gradient."""
    evaluated: Evaluated | None = None
    """Calls with gradients off; None where no timed step has any."""
    tokens: int | None = None
    """Token ids that the forwards of a step took, where their batches differ in length; None where they do not."""
    saved: Saved | None = None
    """What the timed steps save; None where none does, and in runs from before it was looked at."""
