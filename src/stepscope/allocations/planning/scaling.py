"""How a plan changes with the number of ranks, and with the speed of the links."""

import itertools
from collections.abc import Iterator

import msgspec

from stepscope.allocations.planning.search import Machine, Plan, Planned, search
from stepscope.allocations.planning.space import CHECKPOINTINGS
from stepscope.allocations.planning.times import Clock
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.network import MOST_RANKS

DOUBLINGS = range(-3, 4)
_WORTH_IT = 1.5
"""A doubling that makes a step less than so many times faster is where a plan says that scaling stops."""
LINK_FACTORS = (0.25, 0.5, 2.0, 4.0)


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout for another number of ranks and the same batch."""

    ranks: int
    best: Planned | None
    why_not: str = ""


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """The best step with links of another speed."""

    links: str
    factor: float
    best: Planned


def scaling(plan: Plan, machine: Machine) -> tuple[Scaled, ...]:
    """The best layouts for fewer ranks and more, of the kind of sharding and checkpointing that is best here."""
    if not plan.best:
        return ()
    best = plan.best[0].layout
    fixed = {name: value for name, value in plan.question.fixed.items() if name not in ("data", "shard")}
    if best.data * best.context > 1:
        fixed["sharding"] = best.sharding
    # A mixture is what the memory of so many ranks leaves: other numbers have another, or no need of one.
    alike = best.checkpointing in CHECKPOINTINGS
    checkpointings = (best.checkpointing,) if alike else plan.question.checkpointings
    found: list[Scaled] = []
    for ranks in _numbers(plan.question.ranks):
        if ranks == plan.question.ranks:
            found.append(Scaled(ranks=ranks, best=plan.best[0]))
            continue
        question = msgspec.structs.replace(plan.question, ranks=ranks, fixed=fixed, checkpointings=checkpointings)
        other = search(question, machine, shown=1)
        found.append(Scaled(ranks=ranks, best=next(iter(other.best), None), why_not=_why_not(other)))
    return tuple(found)


def _numbers(ranks: int) -> Iterator[int]:
    for power in DOUBLINGS:
        if power < 0 and ranks % 2**-power:
            continue
        number = ranks * 2**power if power >= 0 else ranks // 2**-power
        if 1 <= number <= MOST_RANKS:
            yield number


def _why_not(plan: Plan) -> str:
    reasons = plan.too_large or plan.refused
    return "" if plan.best else max(reasons, key=reasons.__getitem__, default="no layout")


def stops_at(scaled: tuple[Scaled, ...], ranks: int) -> Scaled | None:
    """The first number of ranks, from this one on, whose doubling is not worth it; None where each is."""
    known = [one for one in scaled if one.ranks >= ranks and one.best]
    for one, twice in itertools.pairwise(known):
        if one.best and twice.best and one.best.time.step_s / twice.best.time.step_s < _WORTH_IT:
            return one
    return known[-1] if known and known[-1].ranks < scaled[-1].ranks else None


def sensitivity(plan: Plan, machine: Machine) -> tuple[Sensitivity, ...]:
    """The best of the fastest layouts, should links within nodes, or between them, be slower or faster."""
    if not plan.best or plan.question.ranks == 1:
        return ()
    memory = RankMemory(plan.question.workload, plan.question.model)
    found: list[Sensitivity] = []
    network = machine.network
    for links, which in (("within a node", "inside"), ("between nodes", "between")):
        if links == "between nodes" and plan.question.ranks <= network.node:
            continue
        for factor in LINK_FACTORS:
            clock = Clock(plan.question.workload, memory, machine.rates, network.faster(**{which: factor}))
            candidates = {*plan.fastest, *(one.layout for one in plan.best)}
            layout = min(candidates, key=lambda layout, clock=clock: (clock.step(layout).step_s, layout.name))
            best = Planned(layout=layout, time=clock.step(layout), peak_bytes=0, needs=None)
            found.append(Sensitivity(links=links, factor=factor, best=best))
    return tuple(found)
