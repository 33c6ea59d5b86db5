"""Figures of a watched script as it runs: its watch writes them into the run's folder once a second."""

import contextlib
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.core.run import instant_of
from stepscope.core.units import counted, format_bytes, format_count, format_seconds, format_share

LIVE_FILE = "live.json"
_STALE_S = 5.0
"""Seconds without new figures after which that is said."""
_STUCK = 10
"""So many usual steps without a new one are said."""


class LiveFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a watched script does now, as one of its processes sees it. A figure that is not known is None."""

    run: str
    written: str
    """UTC, ISO 8601."""
    stage: str
    """measuring, running or over."""
    step: int
    """Steps that have ended."""
    idle_s: float
    """Seconds since the last step ended."""
    step_s: float | None = None
    """Seconds from the end of one step to the end of the next: the mean of the last ten seconds."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs over the datasheet's peak."""
    data_share: float | None = None
    """The share of the host's time that passes in a DataLoader's next; None while steps are measured."""
    memory: str = "memory"
    """What `memory_bytes` counts: the peak of PyTorch's allocator, or the process's resident memory."""
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    """What is free on the GPU, or in the host."""
    steps_left: int | None = None
    steps_of: str = ""
    """Who knows how many steps there are."""
    rank: int = 0
    world_size: int = 1
    host: str = ""
    pid: int = 0
    pid_began: str = ""
    """When the process began, in the kernel's ticks: a number may be another process's later."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the steps to go take at the present pace."""
        return None if self.steps_left is None or self.step_s is None else self.steps_left * self.step_s

    @property
    def age_s(self) -> float:
        """Seconds since these figures were written."""
        return max(0.0, datetime.now(UTC).timestamp() - instant_of(self.written))


def named_figures(live: LiveFigures) -> list[tuple[str, str]]:
    """Each figure that is known: its name, and itself in words."""
    figures = [("step", f"{live.step:,}")]
    if live.steps_left is not None:
        figures.append(("to go", f"{_to_go(live)}, by {live.steps_of}"))
    if live.step_s is not None:
        figures.append(("a step", format_seconds(live.step_s)))
    for of, rate in (("tokens", live.tokens_per_s), ("samples", live.samples_per_s)):
        if rate is not None:
            figures.append((f"{of}/s", format_count(round(rate)) if rate >= 1000 else format(rate, ".4g")))
    if live.mfu is not None:
        figures.append(("MFU", format_share(live.mfu)))
    if live.data_share is not None:
        figures.append(("waits for data", format_share(live.data_share)))
    if live.memory_bytes is not None:
        figures.append((live.memory, format_bytes(live.memory_bytes)))
    if live.memory_left_bytes is not None:
        figures.append(("memory left", format_bytes(live.memory_left_bytes)))
    if live.world_size > 1:
        figures.append(("figures of", f"rank {live.rank} of {live.world_size}"))
    return figures


def live_line(live: LiveFigures) -> str:
    """The figures in one line."""
    known = dict(named_figures(live))
    words = [f"step {known['step']}"]
    if live.stage == "measuring":
        words[0] += " (measuring)"
    if live.idle_s > max(_STALE_S, _STUCK * (live.step_s or 0.0)):
        words.append(f"none ended for {_duration(live.idle_s)}")
    if live.steps_left is not None:
        words.append(f"{_to_go(live)} to go")
    if live.step_s is not None:
        words.append(f"{known['a step']} a step")
    rate = next((name for name in ("tokens/s", "samples/s") if name in known), None)
    if rate is not None:
        words.append(f"{known[rate]} {rate}")
    words += [f"{name} {known[name]}" for name in ("MFU", "waits for data") if name in known]
    if live.memory_bytes is not None:
        left = f" ({known['memory left']} left)" if "memory left" in known else ""
        words.append(f"memory {known[live.memory]}{left}")
    if live.world_size > 1:
        words.append(known["figures of"])
    return ", ".join(words)


def _to_go(live: LiveFigures) -> str:
    seconds = live.seconds_left
    return counted(live.steps_left or 0, "step") + (f" and {_duration(seconds)}" if seconds is not None else "")


def _duration(seconds: float) -> str:
    """Seconds as people tell time that is left: 8 s, 3 min 20 s, 5 h 10 min, 2 d 4 h."""
    whole = round(seconds)
    for larger, unit, smaller, rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= larger:
            return f"{whole // larger} {unit} {whole % larger // smaller} {rest}"
    return f"{whole} s"


def write_live(live: LiveFigures, directory: Path) -> None:
    """Write the figures in place of those before. Raises OSError. The disk may keep them in mind: they are soon old."""
    temporary = directory / f".{LIVE_FILE}.{live.pid}.tmp"
    temporary.write_bytes(msgspec.json.encode(live) + b"\n")
    temporary.replace(directory / LIVE_FILE)


def read_live(directory: Path) -> LiveFigures | None:
    """The figures in this run's folder; None where there are none that can be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode((directory / LIVE_FILE).read_bytes(), type=LiveFigures)
    return None


def process_began(pid: int) -> str | None:
    """When this process began, in the kernel's ticks; empty where the system does not tell, None if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def is_over(live: LiveFigures) -> str | None:
    """Why no more figures will come, in words; None while they may."""
    if live.stage == "over":
        return f"it is over, after {live.step:,} steps"
    if live.host == socket.gethostname() and process_began(live.pid) != live.pid_began:
        return f"it stopped writing {_duration(live.age_s)} ago at step {live.step:,}, and its process is gone"
    return None


def is_late(live: LiveFigures) -> str | None:
    """That the figures are old, in words; None while they are new."""
    age_s = live.age_s
    return f"nothing was written for {_duration(age_s)}" if age_s > _STALE_S else None
