"""Where what was found out about this machine is kept for later runs."""

import contextlib
import os
from pathlib import Path


def cache_directory() -> Path:
    """$STEPSCOPE_CACHE, or stepscope/ in the user's directory of caches. It need not exist."""
    base = os.environ.get("STEPSCOPE_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "stepscope"
    )
    return Path(base)


def replace_file(path: Path, content: bytes) -> bool:
    """Write the file in one step, so that nobody reads half of it. False where there is no place to keep it."""
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
