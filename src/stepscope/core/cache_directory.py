"""The directory of caches, which keeps what was measured of this machine for later runs."""

import contextlib
import os
from pathlib import Path


def home_directory() -> Path | None:
    """The user's home; None where there is no HOME and the user id has no account, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_directory() -> Path | None:
    """$STEPSCOPE_CACHE, or stepscope/ in the user's directory of caches. It need not exist; None without a home."""
    if named := os.environ.get("STEPSCOPE_CACHE"):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches, "stepscope")
    home = home_directory()
    return home / ".cache/stepscope" if home else None


def replace_file(path: Path | None, content: bytes) -> bool:
    """Write the file in one step, so that nobody reads half of it. False where there is no place to keep it."""
    if path is None:
        return False
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
