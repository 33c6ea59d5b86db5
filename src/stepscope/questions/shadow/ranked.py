"""How far each part of a step, alone in 16 bits, moves the gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.questions.replays.results import Distance
from stepscope.questions.shadow.parts import Part

NOISE_FACTOR = 2.0
"""How many times as far as the step again a change may be and still be noise."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A part, and how far the step is moved where it alone is in 16 bits."""

    part: Part
    off: Distance | None = None
    """None where it does not run."""
    finite: bool = True
    worst: str = ""
    """The parameter whose gradient is farthest, for its own size."""
    worst_off: float = 0.0
    """How far that is, relative to its own norm."""
    refused: str = ""

    @property
    def error(self) -> float:
        """How far the gradients are off; infinite where they are not finite, and negative where it does not run."""
        if self.off is None:
            return -1.0
        return self.off.gradients if self.finite else float("inf")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All parts, the one that moves the gradients farthest first."""

    to: str
    parts: Sequence[Ranked]
    at_once: Ranked | None
    """All parts together; None where that does not run."""
    layers: Sequence[Ranked]
    """The layers of the first part, one at a time."""
    noise: float
    """How far the step again is, relative."""
    idle: Sequence[str]
    """Modules that compute nothing."""
    quiet: Sequence[str]
    """Modules whose dropout is off."""
    draws: bool
    """Whether forward draws random numbers all the same."""

    def is_noise(self, ranked: Ranked) -> bool:
        """Whether a part moves the gradients no farther than the step again does."""
        return ranked.off is not None and ranked.error <= NOISE_FACTOR * self.noise
