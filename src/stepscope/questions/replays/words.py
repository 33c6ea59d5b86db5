"""Shares and lists of names, as sentences have them."""

from collections.abc import Sequence

MOST_NAMED = 4
"""Names that a sentence lists; it counts the others."""


def share(value: float) -> str:
    """A relative difference: in percent where it is large, as a power of ten where it is rounding."""
    if value == 0:
        return "nothing"
    return f"{100 * value:.3g} %" if 1e-4 <= value < float("inf") else f"{value:.2g}"


def listed(names: Sequence[str]) -> str:
    """Names as a list in words; of many the first ones, and how many more there are."""
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
