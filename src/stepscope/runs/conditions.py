"""Conditions on the fields of runs, as in `dtype=fp32,bf16`: one way to write them, for all who choose runs."""

import re
from collections.abc import Iterable, Sequence

from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.units import counted
from stepscope.runs.fields import FIELDS, check_arguments, field_named, field_text

Condition = tuple[str, tuple[str, ...]]
"""A field, and the values of which a run has one."""

_NAMED = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=\s*(.*)", re.DOTALL)
_FREE = ("tag", "factory", "code")
"""Fields whose values may hold `name=`, beside the arguments of factories."""


def conditions_in(text: str, option: str = "--where") -> list[Condition]:
    """The conditions in `field=value[,value][,field=value...]`: a comma before the name of a field begins the next.

    Raises InputError for any other form, and for a name that is no field's. Where the field's values are free text, as
    those of a tag, what follows the comma is another value unless it begins with the name of a field.
    """
    found: list[tuple[str, list[str]]] = []
    for piece in text.split(","):
        named = _NAMED.fullmatch(piece)
        if named is not None and (not found or is_field(named[1]) or not holds_names(found[-1][0])):
            field_named(named[1])
            found.append((named[1], [named[2].strip()]))
        elif found:
            found[-1][1].append(piece.strip())
        else:
            break
    kept = [(field, tuple(value for value in values if value)) for field, values in found]
    if not kept or not all(values for _, values in kept):
        raise InputError(f"cannot read {option} {text!r}: write field=value, as in dtype=bf16")
    return kept


def is_field(name: str) -> bool:
    """Whether a name is that of a field, or of an argument of a factory."""
    return name in FIELDS or name.startswith("arg.")


def holds_names(field: str) -> bool:
    """Whether values of this field may hold `name=` themselves."""
    return field in _FREE or field.startswith("arg.")


def matches(run: Run, field: str, wanted: Sequence[str]) -> bool:
    """Whether the run's field of that name is one of the values wanted. Raises InputError for an unknown field."""
    value = field_named(field).read(run)
    return bool({str(value), field_text(value)} & set(wanted))


def meeting(runs: Sequence[Run], conditions: Iterable[Condition]) -> tuple[list[Run], list[str]]:
    """The runs that meet all conditions, and a sentence for each value that no run has at all."""
    conditions = list(conditions)
    check_arguments(runs, (field for field, _ in conditions))
    kept = [run for run in runs if all(matches(run, *condition) for condition in conditions)]
    nowhere = [
        f"None of {counted(len(runs), 'run')} has {field}={value}."
        for field, values in conditions for value in values
        if not any(matches(run, field, (value,)) for run in runs)
    ]  # fmt: skip
    return kept, nowhere


def in_words(conditions: Iterable[Condition]) -> str:
    """The conditions as they may be written."""
    return " and ".join(f"{field}={','.join(values)}" for field, values in conditions)
