"""What was measured of collectives, and the latencies and bandwidths fitted to it, kept as ceilings are."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from stepscope.core.bounded_file import read_document
from stepscope.core.cache_directory import cache_directory, replace_file
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.samples import Samples


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one size: how long it took from the first rank's start to the last one's end."""

    kind: str
    backend: str
    ranks: int
    message_bytes: int
    samples: Samples | None = None
    """Seconds of one collective, each the mean of `calls` in a row."""
    calls: int = 1
    failure: str = ""
    """Why it has no time."""


class CollectiveFit(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and bandwidth of one kind of collective among so many ranks: t = latency + bytes / bandwidth."""

    kind: str
    backend: str
    ranks: int
    latency_s: float
    bytes_per_s: float | None
    """Bytes of the message; None where time did not grow with size."""
    residual: float
    count: int

    def seconds(self, message_bytes: float) -> float:
        """How long a message of this size takes, by the fit."""
        return self.latency_s + (message_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


class CollectiveFits(msgspec.Struct, frozen=True, kw_only=True):
    """The fits of one device under one build of PyTorch."""

    device_name: str
    torch_version: str
    measured_at: str
    """When the newest of them was measured."""
    fits: tuple[CollectiveFit, ...] = ()

    def fit(self, kind: str, backend: str, ranks: int) -> CollectiveFit | None:
        """The fit of this kind among so many ranks, or None."""
        wanted = (kind, backend, ranks)
        return next((fit for fit in self.fits if (fit.kind, fit.backend, fit.ranks) == wanted), None)


def keep_fits(where: Environment, measured_at: str, fits: Iterable[CollectiveFit]) -> None:
    """Keep these fits for later predictions, beside those of other kinds and ranks that are kept already."""
    fresh = tuple(fits)
    again = {(fit.kind, fit.backend, fit.ranks) for fit in fresh}
    version = where.versions.get("torch", "")
    stored = kept_fits(where.device_name, version)
    others = (fit for fit in (stored.fits if stored else ()) if (fit.kind, fit.backend, fit.ranks) not in again)
    found = CollectiveFits(
        device_name=where.device_name, torch_version=version, measured_at=measured_at, fits=(*others, *fresh)
    )
    replace_file(_place(where.device_name, version), msgspec.json.encode(found))


def kept_fits(device_name: str, torch_version: str) -> CollectiveFits | None:
    """The fits of this device under this build; None where there is nothing that can be read."""
    path = _place(device_name, torch_version)
    try:
        return msgspec.json.decode(read_document(path), type=CollectiveFits) if path else None
    except (InputError, OSError, ValueError, RecursionError):
        return None


def _place(device_name: str, torch_version: str) -> Path | None:
    caches = cache_directory()
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{device_name}-torch{torch_version}")
    return caches / f"collectives-{slug}.json" if caches else None
