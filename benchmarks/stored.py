"""Results of a benchmark as files: kept with --json, shown again with --show."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console

from stepscope.core.errors import StepscopeError
from stepscope.core.samples import Samples

R = TypeVar("R", bound=msgspec.Struct)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one contestant."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    other_cores: float | None
    """Cores that others kept busy meanwhile: a figure taken beside much of it is worth little."""


def ratios_of(measured: Samples, base: Samples) -> Samples:
    """Measured / base of each pair."""
    pairs = zip(measured.values_s, base.values_s, strict=True)
    return Samples(values_s=tuple(one / other for one, other in pairs), clock="pairs")


def bounds_of(ratios: Samples) -> str:
    """The interval of the ratios' median, as deviations from 1, or that there is none."""
    interval = ratios.interval()
    return f"{(interval.low - 1) * 100:+.2f} to {(interval.high - 1) * 100:+.2f} %" if interval else "cannot be told"


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
    render_markdown: Callable[[R], str],
    render: Callable[[R, Console], None] | None = None,
) -> None:
    """Print the result, and with --json also keep it; with --show print results kept before, in Markdown.

    render: prints it in a terminal, where that is not to be the Markdown.
    """
    if arguments.show:
        kept = [msgspec.json.decode(path.read_bytes(), type=kind) for path in arguments.show]
        sys.stdout.write("\n".join(map(render_markdown, kept)))
        return
    try:
        result = measure(arguments)
    except (OSError, ValueError, StepscopeError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    if render is None:
        Console().print(render_markdown(result), soft_wrap=True, markup=False, highlight=False)
    else:
        render(result, Console())
    keep(result, arguments.json)
