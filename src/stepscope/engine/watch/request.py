"""The request to watch a loop. It needs no torch."""

import re
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.run import Settings
from stepscope.engine.request import MemoryRequest, TraceRequest

FIRST_STEP = 2
"""The first step that can be timed: the two before show what a step is."""


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to watch a loop: which steps are timed, what is recorded, and where the run goes."""

    runs: Path
    settings: Settings = Settings()
    between: tuple[int, int] | None = None
    """The first step that is timed, and the first after it that is not. If it is None, the settings decide."""
    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None
    step_of: str | None = None
    """The class of the model or the optimizer whose step counts; None where the loop shows it."""
    tag: str | None = None
    program: str = ""
    """The script and its arguments, without its folder; empty for a loop watched from inside."""


def steps_between(text: str) -> tuple[int, int]:
    """The first step and the end of a range: `20:40` means steps 20 to 39. Raises InputError."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None:
        raise InputError(f"cannot read --steps {text!r}: write FIRST:END, as in 20:40 for steps 20 to 39")
    return checked_steps(int(match[1]), int(match[2]))


def checked_steps(first: int, end: int) -> tuple[int, int]:
    """The first step and the end, after a check that these steps can be timed. Raises InputError."""
    if first < FIRST_STEP:
        raise InputError(
            f"steps {first}:{end} begin too early: steps 0 and 1 show what a step is, so write "
            f"{FIRST_STEP}:{max(end, FIRST_STEP + 1)}"
        )
    if end <= first:
        raise InputError(f"steps {first}:{end} hold no step: the second number is the first step that is not timed")
    return first, end


def settings_between(between: tuple[int, int] | None, settings: Settings | None = None) -> Settings:
    """The settings that time exactly these steps. Without steps, the given settings or the defaults."""
    if between is None:
        return settings or Settings()
    first, end = between
    return Settings(warmup_floor=first, warmup_cap=first, steps_floor=end - first, steps_cap=end - first, seconds=0)
