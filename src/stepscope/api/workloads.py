"""Makes the textbook's workload from what a caller in Python says: preset, sizes, and the step's choices."""

from typing import Any

from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.workload import Workload

_SIZES = tuple(field for field in ModelConfig.__struct_fields__ if field != "name")


def given(**said: Any) -> dict[str, Any]:
    """The arguments that a caller gave: one that is None was left out."""
    return {name: value for name, value in said.items() if value is not None}


def textbook(preset: object, said: dict[str, Any]) -> Workload:
    """The textbook's workload, with Workload's defaults for the rest. Raises InputError for choices that cannot be."""
    if not isinstance(preset, str):
        raise InputError(f"the model is {type(preset).__name__}: give the name of a preset, as in 'small'")
    chosen = dict(said)
    sizes = {name: chosen.pop(name) for name in _SIZES if name in chosen}
    return Workload(model=configure(preset, **sizes), **chosen)
