"""The energy that a device takes while steps run, by the counter that it keeps itself.

A GPU's is NVML's (nvmlDeviceGetTotalEnergyConsumption), a processor's is RAPL as Linux shows it. Both count a whole
device, with whatever else runs on it.
"""

import contextlib
import time
from pathlib import Path
from typing import NamedTuple

import torch

from stepscope.core.evidence import Energy
from stepscope.recording.nvml import total_energy_j

LEAST_S = 2.0
"""The shortest time that a counter is asked about. Recent GPUs renew theirs every 20 to 100 ms (PETSc's manual of
PetscLogGpuEnergyMeter), so that two readings are off by 5 % at most."""
POWERCAP = Path("/sys/class/powercap")


class _Counter(NamedTuple):
    energy_j: float
    wraps_at_j: float
    """Where the counter begins again at zero; 0 where it does not."""


class EnergyMeter:
    """Counts a device's energy from `start` on."""

    def __init__(self, device: torch.device, powercap: Path = POWERCAP) -> None:
        self._device, self._powercap = device, powercap
        self._began_s = 0.0
        self._began: dict[str, _Counter] = {}

    def start(self) -> bool:
        """Begin to count. Returns whether the device has a counter."""
        self._began, self._began_s = self._read(), time.monotonic()
        return bool(self._began)

    def read(self, steps: int, *, are_samples: bool) -> Energy | None:
        """The energy of the steps that ran since `start`; None if they took less than LEAST_S, or nothing counts."""
        duration_s, now = time.monotonic() - self._began_s, self._read()
        if not steps or not now or duration_s < LEAST_S or now.keys() != self._began.keys():
            return None
        taken = [_between(self._began[name], now[name]) for name in now]
        if min(taken) < 0:  # the driver was loaded anew
            return None
        of = "gpu" if self._device.type == "cuda" else "cpu-packages"
        return Energy(energy_j=sum(taken), steps=steps, duration_s=duration_s, of=of, are_samples=are_samples)

    def _read(self) -> dict[str, _Counter]:
        if self._device.type != "cuda":
            return _packages(self._powercap)
        energy = total_energy_j(self._device)
        return {} if energy is None else {"gpu": _Counter(energy, 0.0)}


def _between(start: _Counter, end: _Counter) -> float:
    taken = end.energy_j - start.energy_j
    return taken + end.wraps_at_j if taken < 0 and end.wraps_at_j else taken


def _packages(powercap: Path) -> dict[str, _Counter]:
    """The counters of the processor's packages; none where the system has none, or lets only its owner read them."""
    found: dict[str, _Counter] = {}
    with contextlib.suppress(OSError, ValueError):
        for zone in powercap.glob("intel-rapl:*"):
            # A zone may also be a part of a package, or the whole platform.
            if (zone / "name").read_text().startswith("package-"):
                energy, wraps_at = ((zone / name).read_text() for name in ("energy_uj", "max_energy_range_uj"))
                found[zone.name] = _Counter(int(energy) * 1e-6, int(wraps_at) * 1e-6)
        return found
    return {}
