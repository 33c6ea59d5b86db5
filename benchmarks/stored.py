"""Results of a benchmark as files: kept with --json, shown again with --show."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from stepscope.core.errors import StepscopeError

R = TypeVar("R", bound=msgspec.Struct)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one contestant."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    other_cores: float | None
    """Cores that others kept busy meanwhile: a figure taken beside much of it is worth little."""


def keep(result: msgspec.Struct, path: Path | None) -> None:
    """Write the result into this file, if there is one."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def measure_or_show(
    arguments: argparse.Namespace,
    kind: type[R],
    *,
    measure: Callable[[argparse.Namespace], R],
    render: Callable[[R, Console], None],
    render_markdown: Callable[[R], str],
) -> None:
    """Print the result, and with --json also keep it; with --show print results kept before, in Markdown."""
    if arguments.show:
        kept = [msgspec.json.decode(path.read_bytes(), type=kind) for path in arguments.show]
        sys.stdout.write("\n".join(map(render_markdown, kept)))
        return
    try:
        result = measure(arguments)
    except (OSError, ValueError, StepscopeError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    render(result, Console())
    keep(result, arguments.json)
