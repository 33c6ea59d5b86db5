"""The keys of a JSON document: its shape, without its figures."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.shown import check_golden

GOLDEN = Path(__file__).parent / "golden" / "json"
STORED_RUNS = "stored-runs"
"""The golden file with the keys of all runs under results/, which many machines measured."""

KEYED_BY_DATA = tuple(
    f".{name}"
    for name in (
        "artifacts", "arguments", "by_phase", "by_phase{}", "calls", "calls{}", "categories", "devices",
        "flops_per_s", "functions", "inputs", "left_out", "matmul", "model_forwards", "options", "other_events",
        "pairs[].parts", "peak_flops_per_s", "ranges", "refused", "roles", "samples", "stages_s", "timings[].sizes",
        "too_large", "tones", "tried[].change", "uncounted", "unmatched", "used_devices", "versions", "work",
        "works[].sizes",
    )
)  # fmt: skip
"""Maps whose keys are data: names of phases, libraries, operators, devices, files."""

BY_FIGURES = ("asides", "findings", "lead", "panels", "tables")
"""Parts of an answer whose own keys depend on its figures: a point that is missing says why."""

IN_BRIEF = {
    "device", "lines[].figures", "lines[].kind", "lines[].remedy", "lines[].severity", "lines[].text", "lines[].what",
    "study", "version",
}  # fmt: skip
"""Every key of --brief --json. A line that is no finding has only its text and what it is."""


def documents(text: str) -> list[Any]:
    """The documents that a verb wrote with --json: one, or one a line."""
    return [json.loads(part) for part in ([text] if text[:2] in ("{\n", "[\n") else text.splitlines())]


def key_paths(*values: Any) -> set[str]:
    """The path of every key, as `findings[].kind`. A list is `[]`, a map whose keys are data `{}`."""
    return {path.removeprefix(".") for value in values for path in _walk(value, "")}


def _walk(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _walk(inner, f"{path}{{}}" if path.endswith(KEYED_BY_DATA) else f"{path}.{name}")
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _walk(inner, f"{path}[]")
    else:
        yield path + ("{}" if isinstance(value, dict) else "[]" if isinstance(value, list) else "")


def keys_of_any_answer(paths: Iterable[str]) -> set[str]:
    """The keys of an answer that do not depend on its figures, so that any machine's are the same."""
    return {_first(path) if _first(path) in BY_FIGURES else path for path in paths}


def check_keys(name: str, paths: Iterable[str]) -> None:
    """The keys are those of the golden file of this name."""
    check_golden("".join(f"{path}\n" for path in sorted(paths)), _file(name))


def check_keys_of_new_runs(name: str, text: str) -> None:
    """The keys of runs that were measured now: those of stored runs, and the few in the golden file of this name."""
    new, stored = (
        {re.sub(r"(findings\[\]\.evidence)\b.*", r"\1", path) for path in paths}
        for paths in (key_paths(*documents(text)), _file(STORED_RUNS).read_text().splitlines())
    )
    assert {_first(path) for path in new} == {_first(path) for path in stored}
    check_keys(name, new - stored)


def check_keys_in_brief(text: str) -> None:
    """The keys of --brief --json, which all verbs have in common."""
    paths = {re.sub(r"(figures)\b.*", r"\1", path) for path in key_paths(*documents(text))}
    assert paths <= IN_BRIEF and {_first(path) for path in paths} == {_first(path) for path in IN_BRIEF}, paths


def _first(path: str) -> str:
    """The key of the document itself with which a path begins."""
    return re.split(r"\W", path, maxsplit=1)[0]


def _file(name: str) -> Path:
    return GOLDEN / f"{name.replace(' ', '-')}.txt"
