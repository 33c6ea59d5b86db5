"""What the config.json of a model asks for that its step does by options, or not at all: none of it is passed over in
silence."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from stepscope.core.bounded_file import read_document
from stepscope.core.own_arguments import is_configuration
from stepscope.core.own_workload import AnyWorkload, OwnWorkload

BY_OPTIONS = ("dtype", "torch_dtype", "quantization_config", "gradient_checkpointing")
"""Fields of a configuration that a step does not take from there, in whatever part of it they stand."""

_WEIGHTS = {"bf16-pure": "bfloat16", "bf16-master": "bfloat16"}
"""The dtype of parameters where it is not fp32, by the option `--dtype`."""
_NEAREST = {
    "bfloat16": "--dtype bf16-pure makes them bfloat16",
    "float16": "no option makes them float16, and --dtype fp16 multiplies in it",
}


def without_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without those of BY_OPTIONS, in its parts too, as of text and vision."""
    return {
        name: without_options(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in BY_OPTIONS
    }


def unmet(workload: AnyWorkload) -> tuple[str, ...]:
    """What the config.json of a workload's model asks for and its step does not do, a sentence each; none where the
    model comes from elsewhere, or the file cannot be read, which whoever makes the model says."""
    if not isinstance(workload, OwnWorkload) or not is_configuration(workload.factory):
        return ()
    try:
        fields = json.loads(read_document(Path(workload.factory)))
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(_unmet(cast("dict[str, Any]", fields), workload.dtype)) if isinstance(fields, dict) else ()


def _unmet(fields: dict[str, Any], dtype: str) -> Iterator[str]:
    made = _WEIGHTS.get(dtype, "float32")
    asked = {
        str(value).removeprefix("torch."): f"{path} {value}"
        for path, value in _found(fields, ("dtype", "torch_dtype"))
        if value not in (None, "auto")
    }
    for name, words in asked.items():
        if name != made:
            nearest = _NEAREST.get(name, "no option makes them so") if name != "float32" else "--dtype fp32 keeps them"
            yield f"{words} is not followed: parameters are made in {made}; {nearest}"
    for path, value in _found(fields, ("quantization_config",)):
        if value:
            methods = [method for _, method in _found({"": value}, ("quant_method",))]
            words = " ".join(map(str, (path, *methods)))
            yield f"{words} is not followed: parameters are made in {made}, not quantised"
    if any(value for _, value in _found(fields, ("gradient_checkpointing",))):
        yield "gradient_checkpointing is not followed: --checkpointing every-1 runs each block again in backward"


def _found(fields: Mapping[str, Any], names: tuple[str, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of these fields, with their paths, in a configuration and its parts."""
    for name, value in fields.items():
        if name in names:
            yield f"{path}{name}", value
        elif isinstance(value, dict) and name not in BY_OPTIONS:
            yield from _found(cast("dict[str, Any]", value), names, f"{path}{name}.")
