"""When a training run departs from another: smoothed losses, and what another start alone changes of them.

Losses of single steps jump with their batches, and even fp32 ends elsewhere where it starts from other parameters. So
a difference means something only where it is larger than what starts do, and stays so:

    A run departs at the first step from which on, for the last tenth of the run or longer, its smoothed loss is farther
    from that of fp32 than runs of fp32 from different starts, over the same batches, are from each other, there or up
    to a tenth of the run away from there; or from which on its loss is not finite.

Steps count from 1.
"""

import itertools
import math
from collections.abc import Sequence


def window_of(steps: int) -> int:
    """Steps that a smoothed loss is the mean of: a twentieth of the run."""
    return max(1, steps // 20)


def reach_of(steps: int) -> int:
    """A tenth of the run: how far away starts are looked at, and how long a difference must last."""
    return max(1, steps // 10)


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the finite ones among the last `window` losses, fewer at the beginning; NaN where none is."""
    means = []
    for end in range(1, len(losses) + 1):
        finite = [loss for loss in losses[max(0, end - window) : end] if math.isfinite(loss)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means


def not_finite_from(losses: Sequence[float]) -> int | None:
    """The step from which on no loss is finite."""
    last = max((step for step, loss in enumerate(losses, start=1) if math.isfinite(loss)), default=0)
    return last + 1 if last < len(losses) else None


def starts_apart(runs: Sequence[Sequence[float]], reach: int) -> list[float]:
    """At each step, how far two of these smoothed runs are apart at most, there or up to `reach` steps away."""
    apart = [
        max(abs(one - other) for one, other in itertools.combinations(at_step, 2))
        for at_step in zip(*runs, strict=True)
    ]
    return [max(apart[max(0, i - reach) : i + reach + 1]) for i in range(len(apart))]


def departure(
    losses: Sequence[float], reference: Sequence[float], apart: Sequence[float], *, window: int, reach: int
) -> int | None:
    """The step at which a run departs, by the rule above; None where it does not.

    losses: of the run, as they are; it may have been stopped early, once nothing was finite. reference: smoothed losses
    of fp32; apart: `starts_apart`.
    """
    run = smoothed(losses, window)
    within = [i for i, loss in enumerate(run, start=1) if abs(loss - reference[i - 1]) <= apart[i - 1]]
    beyond_from = max(within, default=0) + 1
    lost = not_finite_from(losses)
    if lost is not None:
        # The mean outlives the last finite loss by a window.
        return min(lost, beyond_from)
    return beyond_from if beyond_from <= len(reference) - reach + 1 else None
