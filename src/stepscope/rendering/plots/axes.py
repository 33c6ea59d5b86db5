"""Axes that plots share: logarithmic ones with few, round ticks."""

import math
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
