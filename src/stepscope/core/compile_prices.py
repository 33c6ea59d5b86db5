"""What graph breaks and recompilations of a user's module cost, as it was measured: plain data that travels."""

from typing import NamedTuple

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.samples import Samples


class GraphBreak(NamedTuple):
    """A line at which dynamo ended a graph: its file and number, the function that it is in, and dynamo's own words."""

    place: str
    function: str
    reason: str


class CompiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step compiled in one way: with some breaks avoided, or for any shape."""

    pieces: float
    """Calls of compiled graphs in a step's forward: 1 where nothing breaks it."""
    compile_s: float
    graphs: int
    """Graphs that were compiled."""
    saved_bytes: int | None = None
    """Bytes that forward leaves for backward."""
    peak_bytes: int | None = None
    """The step's peak, on a GPU."""
    samples: Samples | None = None
    """Times of the steps; None where they were not timed."""
    breaks: tuple[GraphBreak, ...] = ()


class PricedBreak(msgspec.Struct, frozen=True, kw_only=True):
    """Breaks that one change avoids, and the step with them and without them, where all else is the same."""

    breaks: tuple[GraphBreak, ...]
    how: str = ""
    """What avoids them, as a setting of dynamo; empty where nothing here can."""
    with_them: CompiledStep | None = None
    without: CompiledStep | None = None
    eagerly: CompiledStep | None = None
    """The step with their functions left to run eagerly; measured where they cannot be avoided."""
    why_not: str = ""
    """Why they have no price."""

    @property
    def pieces(self) -> float:
        """Calls of compiled graphs that they add to a step."""
        if self.with_them is None or self.without is None:
            return 0.0
        return self.with_them.pieces - self.without.pieces

    @property
    def saved_bytes(self) -> int | None:
        """Bytes that they add to what is saved for backward."""
        saved = [each.saved_bytes for each in (self.with_them, self.without) if each is not None]
        return saved[0] - saved[1] if len(saved) == 2 and saved[0] is not None and saved[1] is not None else None

    @property
    def decided_s(self) -> float:
        """Seconds that they add to a step, by the medians; 0 where the samples leave open whether they add any."""
        if self.with_them is None or self.without is None:
            return 0.0
        slow, fast = self.with_them.samples, self.without.samples
        ratio = fast.speedup_over(slow) if fast is not None and slow is not None else None
        if ratio is None or ratio.undecided or slow is None or fast is None:
            return 0.0
        return (slow.median_s or 0.0) - (fast.median_s or 0.0)


class Recompilation(msgspec.Struct, frozen=True, kw_only=True):
    """A function that was compiled again, since a guard failed."""

    function: str
    place: str
    guard: str
    step: int
    """The step that it delayed; the first is 0."""
    seconds: float


class CompilePrices(msgspec.Struct, frozen=True, kw_only=True):
    """A module's step compiled as it is, and in other ways."""

    module: str
    as_it_is: CompiledStep
    clean: CompiledStep
    """With all breaks avoided that can be."""
    breaks: tuple[PricedBreak, ...] = ()
    recompilations: tuple[Recompilation, ...] = ()
    gave_up_at: str = ""
    """The guard whose failure reached dynamo's limit of recompilations; empty where none did."""
    steps: int = 0
    """Steps in which recompilations were looked for."""
    dynamic: CompiledStep | None = None
    """Compiled with dynamic=True; None where nothing was compiled again."""
    environment: Environment | None = None
    date: str = ""

    @property
    def ranked(self) -> tuple[PricedBreak, ...]:
        """The breaks, the dearest first: by time where the samples tell, then by pieces, then by what is saved."""
        return tuple(
            sorted(self.breaks, key=lambda each: (-each.decided_s, -each.pieces, -(each.saved_bytes or 0), each.how))
        )
