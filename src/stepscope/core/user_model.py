"""What the command line and a config.json say of a user's model, read without running any of the user's code."""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from stepscope.core import files
from stepscope.core.errors import InputError, name_shown
from stepscope.core.files import read_document
from stepscope.core.model_config import PRESETS
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.workloads import Workload, is_configuration


def parse_arguments(written: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values of `name=value` texts, by name: a number, true, false, null or a list as JSON has it, True or False as
    Python has it, else text.

    `width=64,128` names two values; `sizes=[64,128]` is one. Raises InputError for any other form.
    """
    values: dict[str, tuple[Any, ...]] = {}
    for text in written:
        name, equals, value = text.partition("=")
        if not (equals and re.fullmatch(r"[^\W\d]\w*", name)):
            raise InputError(f"--arg {text!r}: write name=value")
        if name in values:
            raise InputError(f"--arg {name} is given twice: write its values once, as in --arg {name}=1,2")
        whole = _json(value)
        if whole is None and (other := re.search(r",\s*([^\W\d]\w*)=", value)):
            raise InputError(
                f"--arg {text!r}: {other[1]} is another argument: write --arg {name}=... --arg {other[1]}=..., and a "
                f"text that holds such a thing in double quotes, as in --arg '{name}=\"a,b=c\"'"
            )
        values[name] = (whole,) if whole is not None or value == "null" else tuple(map(_value, value.split(",")))
    return values


def code_digest(factory: str) -> str:
    """A digest of the file in which a factory stands; empty where it cannot be found without importing it."""
    file = file_of(factory)
    return files.code_digest(file) if file else ""


def code_folder(file: str | Path | None) -> Path:
    """The folder whose commit is that of a user's code: that of the code's file, wherever the user stands. The current
    one where there is no file, as in a notebook, or where it is a command of the environment's and not the user's."""
    if file is None or Path(file).is_relative_to(sys.prefix) or not Path(file).exists():
        return Path.cwd()
    return Path(file).resolve().parent


def file_of(factory: str) -> Path | None:
    """The file in which a factory stands; None where it cannot be found without importing it."""
    return Path(factory) if is_configuration(factory) else files.code_file(factory.rpartition(":")[0])


def configuration_named(name: str) -> str:
    """The config.json that a model's name on the Hugging Face Hub means, as it lies in the local cache; any other word
    as it is. Nothing is downloaded. Raises InputError for such a name that the cache does not have."""
    if is_configuration(name) or name in PRESETS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return name
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    revision = main.read_text().strip() if main.is_file() else "*"
    if found := sorted(folder.glob(f"snapshots/{revision}/config.json")):
        return str(found[-1])
    if "/" not in name:
        return name
    raise InputError(
        f"--model {name} is not in the Hugging Face cache {cache}: get its configuration with `hf download {name} "
        "config.json` and ask again, or give a file, as in --model config.json"
    )


def _value(text: str) -> Any:
    value = _json(text)
    return text if value is None and text != "null" else value


def _json(text: str) -> Any:
    """The text as JSON, or Python's True or False; None where it is none, or an object, which no argument is."""
    if text in ("True", "False"):
        return text == "True"
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, dict) else value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# What the config.json of a model asks for that its step does by options, or not at all: none of it is passed over in
# silence.


_DTYPE = ("dtype", "torch_dtype")
_QUANTISED = ("quantization_config", "compression_config")
BY_OPTIONS = (*_DTYPE, *_QUANTISED, "gradient_checkpointing")
"""Fields of a configuration that a step does not take from there, in whatever part of it they stand."""

_SPELLED = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16",
            "double": "float64"}  # fmt: skip
"""PyTorch's other names of its dtypes, and those that people write."""
_NEAREST = {
    "bfloat16": "--dtype bf16-pure makes them bfloat16",
    "float16": "no option makes them float16, and --dtype fp16 multiplies in it",
    "float32": "--dtype fp32 keeps them",
}


def without_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration without those of BY_OPTIONS, in its parts too, as of text and vision."""
    return {
        name: without_options(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in BY_OPTIONS or type(value) is int  # a token or a label may have any name, as in `label2id`
    }


def unmet(workload: Workload) -> tuple[str, ...]:
    """What the config.json of a workload's model, or an argument in its place, asks for and its step does not do, a
    sentence each; none where the model comes from elsewhere, or the file cannot be read, which whoever makes the model
    says."""
    if not is_configuration(workload.factory):
        return ()
    try:
        fields = json.loads(read_document(Path(workload.factory)))
    except (OSError, ValueError, RecursionError):
        return ()
    return tuple(_unmet({**fields, **workload.arguments}, workload.dtype)) if isinstance(fields, dict) else ()


def _unmet(fields: dict[str, Any], dtype: Dtype) -> Iterator[str]:
    stored = "bfloat16" if PRECISIONS[dtype].weights == 2 else "float32"
    requested: dict[str, list[str]] = {}
    for path, value in _values_of(fields, _DTYPE):
        if value not in (None, "", "auto"):
            written = str(value).removeprefix("torch.")
            requested.setdefault(_SPELLED.get(written, written), []).append(f"{path} {name_shown(str(value))}")
    for name, words in requested.items():
        if name != stored:
            nearest = _NEAREST.get(name, "no option makes them so")
            verb = "is" if len(words) == 1 else "are"
            yield f"{' and '.join(words)} {verb} not followed: parameters are made in {stored}; {nearest}"
    for path, value in _values_of(fields, _QUANTISED):
        if value:
            methods = [method for _, method in _values_of({"": value}, ("quant_method",))]
            words = name_shown(" ".join(map(str, (path, *methods))))
            yield f"{words} is not followed: parameters are made in {stored}, not quantised"
    if any(value for _, value in _values_of(fields, ("gradient_checkpointing",))):
        yield "gradient_checkpointing is not followed: --checkpointing every-1 runs each block again in backward"


def _values_of(fields: Mapping[str, Any], names: tuple[str, ...], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of these fields, with their paths, in a configuration and its parts. A dtype may itself be by part."""
    for name, value in fields.items():
        if name in _DTYPE and name in names and isinstance(value, dict):
            parts = cast("dict[str, Any]", value)
            yield from ((f"{path}{name}.{part}".rstrip("."), each) for part, each in parts.items())
        elif name in names and type(value) is not int:
            yield f"{path}{name}", value
        elif isinstance(value, dict) and name not in BY_OPTIONS:
            yield from _values_of(cast("dict[str, Any]", value), names, f"{path}{name}.")
