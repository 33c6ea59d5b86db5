"""One way to run the step, judged: whether it gives what the plain step gives, and why not."""

from dataclasses import dataclass
from typing import Literal

from stepscope.core.errors import StepscopeError
from stepscope.questions.parity.departure import Departure, find_departure
from stepscope.questions.parity.micro_batches import Explained, empty_micro_batches, explain
from stepscope.questions.parity.plain import Plain, StepVariant
from stepscope.questions.replays.results import Distance, StepResult, distance

Verdict = Literal["agrees", "agrees, losses added", "departs", "draws anew", "fails"]
"""agrees, losses added: the losses of the micro-batches make up the batch's as a sum, and not as a mean. draws anew:
forward draws random numbers, which other micro-batches draw anew, so that nothing can be told."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A variant, how far it is from the plain step, and why."""

    plain: Plain
    """The plain step that it is held against."""
    variant: StepVariant
    verdict: Verdict
    found: StepResult | None = None
    off: Distance | None = None
    """How far it is from the plain step. It stands here, with what it gave, unless the variant does not run; where its
    losses are added up, it is that of the sum."""
    explained: Explained | None = None
    """How its micro-batches make up the batch, where they do not as a mean."""
    empty: tuple[int, ...] = ()
    """Micro-batches without a target."""
    departure: Departure | None = None
    failure: str = ""

    @property
    def loss(self) -> float | None:
        """Its loss: the mean of its micro-batches', or their sum where that is what they make up."""
        if self.found is None:
            return None
        return sum(self.found.losses) if self.verdict == "agrees, losses added" else self.found.loss

    @property
    def times(self) -> float:
        """How many times as far as rounding it is."""
        return self.plain.times(self.off) if self.off else 0.0


def judge(plain: Plain, variant: StepVariant) -> Judged:
    """Run a variant and hold it against the plain step."""
    try:
        found = plain.setting.run(variant)
    except StepscopeError as error:
        return Judged(variant=variant, plain=plain, verdict="fails", failure=str(error))
    off = distance(found, plain.result)
    if plain.agrees(off):
        return Judged(variant=variant, plain=plain, verdict="agrees", found=found, off=off)
    if variant.accumulation > 1:
        if plain.draws:
            return Judged(variant=variant, plain=plain, verdict="draws anew", found=found, off=off)
        empty = tuple(empty_micro_batches(plain, variant.accumulation)) if not found.is_finite else ()
        explained = None if empty else explain(plain, variant, found)
        if explained is not None and not explained.counted:
            return Judged(
                variant=variant, plain=plain, verdict="agrees, losses added", found=found, off=explained.off,
                explained=explained,
            )  # fmt: skip
        if empty or explained:
            return Judged(
                variant=variant, plain=plain, verdict="departs", found=found, off=off, explained=explained, empty=empty
            )
    try:
        departure = find_departure(plain, variant)
    except StepscopeError:  # hooks may be more than a compiler takes; that it departs is known all the same
        departure = None
    return Judged(variant=variant, plain=plain, verdict="departs", found=found, off=off, departure=departure)
