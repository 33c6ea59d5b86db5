"""Times on a device that does not wait for its host.

Short work takes as long as the host needs to issue it. So a step may begin with a lead: the device overwrites its L2
cache, again and again, until the host has had time to issue the rest. Its own work then follows without a gap, and
finds nothing in the cache.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stepscope.core.run import Settings
from stepscope.recording.device import Clock, Device, timing_device
from stepscope.recording.step import Driven, Phase
from stepscope.recording.timer import Measurement, StepFailed, measure, measure_one

LEAD = "lead"
"""The name of the phase that is the lead."""
_TIMES_AS_LONG = 2.0
"""The lead's length, as a multiple of the time that the host needs to issue a step."""
_MOST_FILLS = 400
_SMALLEST_BUFFER_BYTES = 1 << 26
_TRIAL = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0)
"""How the steps are run that tell how long the host needs to issue one."""


class Led(Driven, Protocol):
    """A subject whose first phase is the lead that it was given, if any."""

    lead: Callable[[], object] | None


@dataclass(eq=False)
class LedCall:
    """A single call as something to measure, with an optional lead before it."""

    run: Callable[[], object]
    lead: Callable[[], object] | None = field(init=False, default=None)

    @property
    def phases(self) -> Sequence[Phase]:
        return with_lead(self.lead, Phase(name="call", run=self.run))

    def prepare(self) -> None:
        pass


def with_lead(lead: Callable[[], object] | None, *phases: Phase) -> tuple[Phase, ...]:
    """The phases with the lead as the first of them, if there is one."""
    return phases if lead is None else (Phase(name=LEAD, run=lead), *phases)


@dataclass(eq=False)
class Leads:
    """Gives each subject a lead as long as it needs. fill: a function that overwrites the cache once."""

    timing: Device
    fill: Callable[[], object]
    clock: Clock | None = None

    def give(self, name: str, subject: Led) -> None:
        """Measure some steps without a lead, and have the next ones begin with one. Raises StepFailed."""
        subject.lead = None
        issue_s = self._trial(name, subject).samples["host"].median_s or 0.0
        subject.prepare()
        subject.lead = self._fills(min(_MOST_FILLS, math.ceil(_TIMES_AS_LONG * issue_s / self._fill_s)))

    @functools.cached_property
    def _fill_s(self) -> float:
        fills = 10
        measured = self._trial("fill", LedCall(self._fills(fills)))
        return (measured.samples["call"].median_s or 1e-4) / fills

    def _trial(self, name: str, subject: Driven) -> Measurement:
        return measure({name: subject}, device=self.timing, settings=_TRIAL, clock=self.clock)[name]

    def _fills(self, times: int) -> Callable[[], object]:
        return lambda: [self.fill() for _ in range(times)]


def overwrite_cache(device: torch.device) -> Callable[[], object]:
    """A function that overwrites a GPU's L2 cache: four times its size, and 64 MiB at least."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(max(4 * l2_bytes, _SMALLEST_BUFFER_BYTES), dtype=torch.uint8, device=device).zero_


def launches_hidden(measured: Measurement) -> bool:
    """Whether the host had issued the whole step before the device began its own work."""
    lead = measured.samples.get(LEAD)
    if lead is None or not lead.count:
        return False
    return (measured.samples["host"].median_s or 0.0) <= (lead.median_s or 0.0)


def median_call_s(run: Callable[[], object], device: torch.device, settings: Settings) -> float:
    """The median of the device's own time for a call, with a lead on a GPU. Raises what the call raises."""
    timing, call = timing_device(device), LedCall(run)
    if device.type == "cuda":
        try:
            Leads(timing, overwrite_cache(device)).give("call", call)
        except StepFailed as failure:
            raise (failure.__cause__ or failure) from None
    median_s = measure_one(call, device=timing, settings=settings)["call"].median_s
    assert median_s is not None
    return median_s
