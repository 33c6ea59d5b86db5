"""A Run: one workload measured once, with everything needed to trust it or doubt it."""

from datetime import UTC, datetime
from typing import Literal

import msgspec

from stepscope.core.answer import Finding
from stepscope.core.device_spec import Ceilings, DeviceSpec
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, RanksEvidence
from stepscope.core.files import identity_of
from stepscope.core.formulas import Work
from stepscope.core.samples import Samples
from stepscope.core.workloads import Workload

# 1  2026-11  first: workload, settings, environment, samples, evidence, work, summary, findings
SCHEMA_VERSION = 1

Status = Literal["unfinished", "done", "interrupted", "out-of-memory", "failed", "timed-out", "killed", "skipped"]
REPEATED: tuple[Status, ...] = ("unfinished", "interrupted")
"""A sweep measures these again; every other status is a result. A run is `unfinished` from its start to its end, and
stays so if its process dies without a word."""


def instant_of(text: str) -> float:
    """The seconds since 1970 of a date and time in ISO 8601, in UTC where it names no zone; 0 of any other text."""
    try:
        moment = datetime.fromisoformat(f"{text}-01" if len(text) == len("2026-11") else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return 0.0


_FIRST_SETTINGS = ("warmup_floor", "warmup_cap", "warmup_seconds", "steps_floor", "steps_cap", "seconds", "profile")
"""The fields that every digest has, see core/files.py. Do not add to it."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is measured. Floor equal to cap fixes a number."""

    warmup_floor: int = 3
    warmup_cap: int = 30
    warmup_seconds: float = 10.0
    """Seconds that warm-up may take: after the floor it goes on until steps are steady, up to the cap or this time."""
    steps_floor: int = 10
    steps_cap: int = 100
    seconds: float = 5.0
    """Measuring goes on until this much time has passed, between the floor and the cap of steps."""
    profile: bool = True
    """Whether one more step runs under the profiler, after the timed ones."""

    @property
    def identity(self) -> dict[str, object]:
        """What digests are made of."""
        return identity_of(self, _FIRST_SETTINGS)

    def __post_init__(self) -> None:
        for field, least in (
            ("warmup_floor", 0),
            ("warmup_cap", self.warmup_floor),
            ("steps_floor", 1),
            ("steps_cap", self.steps_floor),
            ("warmup_seconds", 0),
            ("seconds", 0),
        ):
            if not getattr(self, field) >= least:  # so written, a NaN is refused too
                raise InputError(f"{field} is {getattr(self, field)}: it must be at least {least}")


def settings_from(
    warmup: int | None, steps: int | None, seconds: float | None = None, no_profile: bool = False
) -> Settings:
    """How to measure, from what the user fixed; a fixed number is a floor equal to its cap."""
    default = Settings()
    return Settings(
        warmup_floor=default.warmup_floor if warmup is None else warmup,
        warmup_cap=default.warmup_cap if warmup is None else warmup,
        steps_floor=default.steps_floor if steps is None else steps,
        steps_cap=default.steps_cap if steps is None else steps,
        seconds=default.seconds if seconds is None else seconds,
        profile=not no_profile,
    )


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a run among those that measured the same experiment, each in a process of its own."""

    set: str
    """What all of them have in common, and no other run has."""
    number: int
    """Which of them it is, from 1."""
    of: int
    """How many were asked for."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a run ended before its time."""

    message: str
    during: str
    """The stage: start, build, warm-up, measure; plan for a skipped cell, refused for one the device cannot run."""
    phase: str | None = None
    module: str | None = None
    """Module path whose forward was running, where known."""

    @property
    def where(self) -> str:
        """The stage, the phase and the module, as far as they are known, with commas between."""
        return ", ".join(part for part in (self.during, self.phase, self.module) if part)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The record that travels: everything a report needs, on any machine."""

    schema_version: int = SCHEMA_VERSION
    id: str
    created: str
    """UTC, ISO 8601."""
    tag: str | None = None
    sweep: str | None = None
    """Digest of the sweep that this run is a cell of."""
    repeat: Repeat | None = None
    """Where the experiment was repeated in several processes: which of them this is."""
    beside: str | None = None
    """Where the steps were measured turn by turn with another run's, in the same process: that run's id."""
    status: Status
    failure: Failure | None = None
    workload: Workload
    settings: Settings
    environment: Environment | None = None
    """The machine; None only if the run ended before its process could look."""
    device_spec: DeviceSpec | None = None
    ceilings: Ceilings | None = None
    samples: dict[str, Samples] = {}
    """`step` by the host clock round a synchronised region; `host`, the time to issue the step's work; and each
    phase (forward, backward, optimizer) by the device's own clock."""
    shared: RanksEvidence | None = None
    """What each of the ranks measured that shared the step; None of a step of one process. `samples` then has the step
    of all ranks together, and the phases of the first."""
    warmup_steady: bool | None = None
    evidence: Evidence = Evidence()
    work: dict[str, Work] = {}
    summary: dict[str, float | None] = {}
    """Figures derived from the above when the run was written (`runs/metrics.py`), for readers of the JSON."""
    artifacts: dict[str, str] = {}
    """Files beside run.json, by kind."""
    findings: tuple[Finding, ...] = ()

    @property
    def instant(self) -> float:
        """When it was measured, in seconds since 1970: runs sort by it, in whatever time zone each was written."""
        return instant_of(self.created)

    @property
    def day(self) -> str:
        """The day on which it was measured, as in 2026-11-22."""
        return self.created[:10]

    def finding(self, kind: str) -> Finding | None:
        """The first finding of this kind, or None."""
        return next((f for f in self.findings if f.kind == kind), None)
