"""Reads what the command line says of a user's factory, without running any of the user's code."""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from stepscope.core.errors import InputError


def parse_arguments(written: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values of `name=value` texts, by name: a number, true, false, null or a list as JSON has it, else text.

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


def is_configuration(named: str) -> bool:
    """Whether a model is named by the config.json of a Hugging Face model, and not by a factory or a preset."""
    return named.endswith(".json")


def code_digest(factory: str) -> str:
    """A digest of the file in which a factory stands; empty where it cannot be found without importing it."""
    file = _file_of(factory)
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else ""
    except OSError:
        return ""


def _file_of(factory: str) -> Path | None:
    place = factory if is_configuration(factory) else factory.rpartition(":")[0]
    if place.endswith((".py", ".json")):
        return Path(place)
    # Only the top of a package is looked up: finding what is inside would import it.
    top, _, inside = place.partition(".")
    if not top:
        return None
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)
    if found is None or found.origin is None:
        return None
    home = Path(found.origin)
    parts = inside.split(".") if inside else []
    beside = home.parent.joinpath(*parts) if parts else None
    candidates = [beside.with_suffix(".py"), beside / "__init__.py"] if beside else [home]
    return next((file for file in candidates if file.is_file()), None)


def _value(text: str) -> Any:
    value = _json(text)
    return text if value is None and text != "null" else value


def _json(text: str) -> Any:
    """The text as JSON; None where it is none, or an object, which no argument is."""
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, dict) else value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
