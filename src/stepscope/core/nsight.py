"""Where NVIDIA's Nsight Systems lies on this machine: its `nsys`, and the importer of captures made elsewhere."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from stepscope.core.cache_directory import home_directory

_INSTALLED = (
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    "/usr/local/cuda*/bin",
    "/usr/lib/nsight-systems/bin",
)
_OWN = ".cache/stepscope/nsight-systems/usr/lib/nsight-systems/bin"
"""Where `scripts/install-nsys` puts it, below the home directory."""


def find_nsys() -> Path | None:
    """The `nsys` to use: STEPSCOPE_NSYS, the one on PATH, or the newest in the usual places."""
    named = os.environ.get("STEPSCOPE_NSYS")
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    return next((nsys for folder in _folders() if os.access(nsys := folder / "nsys", os.X_OK)), None)


def _folders() -> Iterator[Path]:
    for pattern in _INSTALLED:
        yield from sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
    home = home_directory()
    if home is not None:
        yield home / _OWN


def how_to_get_nsys() -> str:
    """One line for the user whose machine has none."""
    named = os.environ.get("STEPSCOPE_NSYS")
    if named:
        return f"STEPSCOPE_NSYS names {named}, which cannot be run"
    return (
        "install Nsight Systems from https://developer.nvidia.com/nsight-systems "
        "(on Debian: scripts/install-nsys) and put nsys on PATH or name it in STEPSCOPE_NSYS"
    )
