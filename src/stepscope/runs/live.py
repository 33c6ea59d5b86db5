"""What a watched script is told: figures as it runs, once a second into its folder, and three lines at first."""

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.core.answer import Finding
from stepscope.core.range_names import DATA, FORWARD, OPTIMIZER, REST, STEP
from stepscope.core.run import Run, instant_of
from stepscope.core.units import counted, format_bytes, format_count, format_rate, format_seconds, format_share
from stepscope.runs import metrics
from stepscope.runs.advice import advice_on

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
    try:
        temporary.write_bytes(msgspec.json.encode(live) + b"\n")
        temporary.replace(directory / LIVE_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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


# Three lines that a watched script is told first: what its step takes, what holds it back, what to change first.


_WRONG = (
    "parameters-not-finite", "parameters-unchanged", "no-gradient", "update-after-backward", "eval-while-training",
    "graph-kept-alive", "memory-grows",
)  # fmt: skip
"""Findings that say the loop trains something else than is meant, or ends early: they come before any speed."""

_COSTS: dict[str, Callable[[Run, Finding], float | None]] = {
    "waiting-for-data": lambda run, finding: _share(finding),
    "rest-is-large": lambda run, finding: _share(finding),
    "optimizer-loops": lambda run, _: _part(run, OPTIMIZER),
    "host-waits": lambda run, _: None,
    "micro-batches-synchronised": lambda run, _: None,
    "fp32-beside-half": lambda run, _: None,
    "batch-not-pinned": lambda run, _: _part(run, DATA),
    "gradients-zeroed": lambda run, _: None,
    "checkpointing-not-needed": lambda run, finding: (_share(finding) or 0.0) * (_part(run, FORWARD) or 0.0),
}
"""Findings on what costs time, and the largest share of a step that mending them can save; None where that is not
known from times."""


def rate_words(run: Run) -> str:
    """What a step takes, and how many samples or tokens a second that is."""
    step_s = metrics.median_s(run, STEP)
    if not step_s:
        return ""
    samples, tokens = metrics.samples_per_s(run), metrics.tokens_per_s(run)
    rate, of = (tokens, "tokens") if tokens else (samples, "samples")
    words = f", {format_count(round(rate)) if rate >= 1000 else format(rate, '.4g')} {of}/s" if rate else ""
    return f"a step takes {format_seconds(step_s)}{words}"


def first_lines(run: Run, directory: Path | None = None) -> tuple[str, ...]:
    """Three sentences on a measured run, which lies in this directory; none where no step was timed."""
    words = rate_words(run)
    return (f"A{words[1:]}: {_ceiling(run)}.", _most(run), _change_first(run, directory)) if words else ()


def _ceiling(run: Run) -> str:
    """How far the step is from what the device can do."""
    rate, dtype = metrics.model_flops_per_s(run), run.workload.dtype
    measured, datasheet = metrics.mfu_measured(run), metrics.mfu_datasheet(run)
    if rate is None:
        return "its FLOPs are not known, and so not how far it is from this device's ceiling"
    share = measured or datasheet
    if share is None:
        unknown = f"this device's ceiling in {dtype} is not known (`stepscope device` measures it)"
        return f"{format_rate(rate, 'FLOP/s')}; {unknown}"
    of = "the best product measured here" if measured else "the datasheet's peak"
    return f"{format_rate(rate, 'FLOP/s')}, {format_share(share)} of {of} in {dtype}"


def _most(run: Run) -> str:
    """The part that takes most of a step."""
    shares = {part: share for part in metrics.parts_of(run) if (share := _part(run, part))}
    if not shares:
        return "Its parts were not timed."
    part = max(shares, key=lambda name: shares[name])
    names = {DATA: "Waiting for data", REST: "What is neither data, forward, backward nor optimizer"}
    took = format_seconds(metrics.median_s(run, part) or 0.0)
    return f"{names.get(part, part.capitalize())} takes most of it: {took}, {format_share(shares[part])}."


def _change_first(run: Run, directory: Path | None) -> str:
    """The advice on the script, or the remedy of the finding, that should give most, and how much that can be."""
    doubted = [finding for finding in run.findings if finding.severity != "note"]
    wrong = next((finding for kind in _WRONG for finding in doubted if finding.kind == kind), None)
    if wrong is not None:
        return f"Change first: {wrong.remedy}. {wrong.sentence}"
    costs = {
        finding.kind: (finding, _COSTS[finding.kind](run, finding))
        for finding in run.findings
        if finding.kind in _COSTS and (metrics.on_gpu(run) or finding.kind != "host-waits")
    }
    advice = advice_on(run, directory)[0] if run.evidence.loop is not None else []
    finding, share = max(costs.values(), key=lambda each: each[1] or 0.0, default=(None, None))
    # What a finding gives begins at nothing. One that there is advice on is said as that, however wide its interval.
    most = 0.0 if finding is None or finding.kind in {one.kind for one in advice} else share or 0.0
    worth = [one for one in advice if one.expected >= 0.005]
    first = next((one for one in worth if one.expected >= most / 3 or (finding and one.kind == finding.kind)), None)
    if first is not None:
        where = f" at {first.where}" if first.where else ""
        finding = run.finding(first.kind)
        why = f" {finding.sentence}" if finding is not None else ""
        diff = "`stepscope advise last` says more" if first.no_patch else "`stepscope advise last --patch` writes it"
        return f"Change first: {first.put}{where} ({first.saves} of a step; {diff}).{why}"
    if finding is None:
        return "None of the habits that were looked for costs this loop time."
    gives = f"up to {format_share(share)} of a step" if share else "how much that gives is not known from times alone"
    return f"Change first: {finding.remedy} ({gives}). {finding.sentence}"


def _share(finding: Finding) -> float | None:
    share = finding.evidence.get("share")
    return share if isinstance(share, float) else None


def _part(run: Run, part: str) -> float | None:
    """The part's share of the median step."""
    part_s, step_s = metrics.median_s(run, part), metrics.median_s(run, STEP)
    return part_s / step_s if part_s and step_s else None
