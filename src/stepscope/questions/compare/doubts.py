"""What to doubt in a comparison, in sentences: the same ones in every study."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stepscope.core.finding import Finding, note, warning
from stepscope.questions.compare.comparison import Comparison, Pair
from stepscope.runs.disagreement import disagreeing

_NAMED = 4
"""Cells that a sentence names; the others are counted."""


def listed(found: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(found)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def speed_ups_of(pairs: Iterable[Pair[Any]]) -> dict[str, float]:
    """The speed-ups by the pairs' names."""
    return {pair.label: pair.speed_up.value for pair in pairs}


def doubtful_runs(study: Comparison[Any, Any]) -> Iterator[Finding]:
    """Runs whose own checks found their figures wrong."""
    wrong = [f"{cell.label} ({kind})" for cell in study.cells for kind in cell.errors]
    if wrong:
        yield warning("doubtful-run", f"A check found these wrong: {listed(wrong)}.")


def unlike_environments(pairs: Sequence[Pair[Any]]) -> Iterator[Finding]:
    """A pair that was measured in different environments: the first alone, the others differ in the same as a rule."""
    for pair in pairs:
        base, other = pair.base.run.environment, pair.other.run.environment
        found = base.differences(other) if base and other else {}
        # The commit and the folder's state change with every result that is kept.
        moving = {field: values for field, values in found.items() if not field.startswith("git_")}
        if moving:
            field, (first, second) = next(iter(moving.items()))
            yield warning(
                "different-environments",
                f"{pair.label} and {pair.base.value} were measured in different environments: {field} {second} and "
                f"{first}.",
            )
            return


def replaced_runs(study: Comparison[Any, Any]) -> Iterator[Finding]:
    """How many runs of a cell were left out for a better or newer one, and whether they say otherwise."""
    if study.replaced:
        yield note(
            "several-runs",
            f"{study.replaced} more runs of these cells were left out: one with a capture goes before one without, "
            "then the newest.",
        )
    yield from disagreeing(study.disagreements)
