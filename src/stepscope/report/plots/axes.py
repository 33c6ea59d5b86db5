"""Axes that plots share: logarithmic ones with few, round ticks, and labels that keep apart."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

NUMBER = ",.10~r"
"""d3's format: plain decimals, thousands separated, no trailing zeros."""


_POWERS = f"abs(log(datum.value) / LN10) < 4.5 ? format(datum.value, '{NUMBER}') : format(datum.value, '~e')"
"""Vega's expression for a tick's label: beyond 10,000 and below 0.0001 a power of ten, as in 1e-7."""


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive ends, with their twofold and fivefold where that stays readable."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) <= 3.2 else (1,)
    # Powers of ten by text: 10.0**-3 * 5 is not 0.005.
    return [tick for decade in decades for step in steps if low <= (tick := float(f"{step}e{decade}")) <= high]


def log_axis(low: float, high: float, *, grid: bool = True) -> alt.Axis:
    """For a logarithmic scale whose domain this is."""
    ticks = log_ticks(low, high)
    # Less than one interval of them: leave the choice to Vega.
    values: dict[str, Any] = {"values": ticks} if len(ticks) > 2 else {"tickCount": 4}
    return alt.Axis(format=NUMBER, labelOverlap="greedy", labelExpr=_POWERS, grid=grid, **values)


def kept_apart(places: Sequence[float], gap: float) -> list[float]:
    """The places moved as little as keeps them so far from each other, in the order given."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    # Blocks of labels that touch, as [sum of wanted starts, labels]: each lies about the mean of what it wants.
    blocks: list[list[float]] = []
    for i in order:
        blocks.append([places[i], 1])
        while len(blocks) > 1 and _start(blocks[-2], gap) + blocks[-2][1] * gap > _start(blocks[-1], gap):
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    moved = [_start(block, gap) + k * gap for block in blocks for k in range(int(block[1]))]
    result = [0.0] * len(places)
    for i, place in zip(order, moved, strict=True):
        result[i] = place
    return result


def _start(block: list[float], gap: float) -> float:
    total, count = block
    return total / count - (count - 1) * gap / 2
