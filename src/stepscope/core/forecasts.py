"""Forecasts, kept in the folder of the runs that will show whether they came true.

`<runs>/forecasts.jsonl` has a line for each, appended by whatever foretold something. A forecast is never changed: what
was measured afterwards is found among the runs by the key of the workload, when somebody asks.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from stepscope import __version__
from stepscope.core.errors import InputError, one_line
from stepscope.core.files import read_document
from stepscope.core.run_directory import FORECASTS_FILE

PEAK_BYTES: Literal["peak_bytes"] = "peak_bytes"
"""The most bytes that PyTorch's allocator hands out in a steady step on a GPU."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What was foretold of one workload, before it was measured."""

    version: int = 1
    made: str
    """UTC, ISO 8601."""
    by: str
    """The verb that foretold it."""
    stepscope: str = __version__
    workload: str
    """The key of the workload."""
    device_type: str = "cuda"
    quantity: str = PEAK_BYTES
    value: float | None = None
    """None where only a verdict was given."""
    budget_bytes: int | None = None
    """The memory that the verdict is about, as PyTorch's allocator may use it; None where no memory was named."""
    fits: bool | None = None
    """Whether it was said to fit into the budget."""
    is_bound: bool = False
    """Whether the truth was said to lie at or below the value."""


def forecast_of_peak(
    by: str,
    workload: str,
    peak_bytes: int | None,
    *,
    budget_bytes: int | None,
    fits: bool | None,
    is_bound: bool = False,
) -> Forecast:
    """A forecast of the peak of a step's memory, or of a verdict on it, made now."""
    made = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Forecast(
        made=made, by=by, workload=workload, value=peak_bytes, budget_bytes=budget_bytes, fits=fits, is_bound=is_bound
    )


def keep_forecasts(folder: Path, forecasts: Sequence[Forecast]) -> str | None:
    """Append forecasts to those of a folder of runs. Returns why it could not be done, or None.

    All lines go in one write to a file that is opened for appending: processes that foretell at once do not mix them.
    """
    lines = b"".join(msgspec.json.encode(forecast) + b"\n" for forecast in forecasts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / FORECASTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, lines)
        finally:
            os.close(file)
    except OSError as error:
        return f"the forecast is not kept: cannot write {folder / FORECASTS_FILE}: {error.strerror or error}"
    return None


def read_forecasts(folder: Path) -> tuple[list[Forecast], list[str]]:
    """The forecasts that a folder of runs keeps, in the order they were made, and a line on those that are no use."""
    file = folder / FORECASTS_FILE
    try:
        data = read_document(file)
    except FileNotFoundError:
        return [], []
    except (OSError, InputError) as error:
        return [], [f"{file}: its forecasts cannot be read: {one_line(error)}"]
    found: list[Forecast] = []
    damaged = 0
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Forecast))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            damaged += bool(line.strip())
    return found, [f"{file}: {damaged} of its lines are no forecast"] if damaged else []
