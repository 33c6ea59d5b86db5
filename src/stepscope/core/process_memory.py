"""Whether this process may have enough memory to load PyTorch at all."""

import os

from stepscope.core.errors import DeviceError
from stepscope.core.units import MIB, format_bytes

LEAST_FOR_TORCH = 768 * MIB
"""Bytes of address space below which PyTorch's libraries raise, abort or retry for ever while they load."""


def address_space_limit() -> int | None:
    """Bytes of address space that this process may have (`ulimit -v`); None where nothing limits it."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def require_room_for_torch() -> None:
    """Raise DeviceError where the limit leaves no room for PyTorch. Packages that import PyTorch call this before."""
    limit = address_space_limit()
    if limit is not None and limit < LEAST_FOR_TORCH:
        raise DeviceError(
            f"this process may have {format_bytes(limit)} of memory (ulimit -v), which is too little to load PyTorch: "
            "raise the limit to 2 GiB or more"
        )


# How the allocator of polars treats memory that is no longer used.


def give_pages_back() -> None:
    """Have polars give pages that are no longer used back at once: a sixth less at the peak.

    Its allocator reads this when polars is loaded, so it has to be said before.
    """
    os.environ.setdefault("_RJEM_MALLOC_CONF", "narenas:2,dirty_decay_ms:50,muzzy_decay_ms:0")
