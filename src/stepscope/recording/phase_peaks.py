"""The memory of a step's phases, from a GPU allocator's counters."""

import msgspec
import torch

from stepscope.core.evidence import PhaseMemory
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, OPTIMIZER
from stepscope.recording.nvml import read_gpu
from stepscope.recording.observe import parameter_bytes, resident_tensors, storages_of
from stepscope.recording.step import Recorder, Step


class PhasePeaks(Recorder):
    """Records a GPU allocator's counters around the phases of one step; of phases of one name, the largest figure.

    Make it just before the step: what is allocated then counts as what was there before.
    """

    def __init__(self, step: Step, device: torch.device, held_before_bytes: int = 0) -> None:
        self._step, self._device = step, device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        self._requested_before = torch.cuda.memory_stats(device).get("requested_bytes.all.current")
        self._reserved_before = torch.cuda.memory_reserved(device)
        self._expected = sum(storages_of(resident_tensors(step, device)).values()) + held_before_bytes
        self._peaks: dict[str, int] = {}
        self._reserved = self._at_start = 0
        self._saved: int | None = None
        self._gradients: int | None = None

    def phase_begins(self, name: str) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._at_start = torch.cuda.memory_allocated(self._device)

    def phase_ends(self, name: str) -> None:
        self.phase_failed(name)
        if name == FORWARD:
            self._saved = max(torch.cuda.memory_allocated(self._device) - self._at_start, self._saved or 0)
        elif name in (BACKWARD, FORWARD_BACKWARD):
            self._gradients = gradient_bytes(self._step)

    def phase_failed(self, name: str) -> None:
        """Read the peaks of a phase that has ended, or that ran out of memory: it also had one."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peaks[name] = max(peak, self._peaks.get(name, 0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))

    def memory(self) -> PhaseMemory:
        """The memory of each phase. A step that replays CUDA graphs has no peaks: a replayed graph's tensors live in
        its private pool, which is reserved but never counted as allocated, so the peaks would be too low.
        """
        torch.cuda.synchronize(self._device)
        # What this process holds beyond its allocator: the driver's context, the libraries' kernels and workspaces. The
        # driver counts all processes together, so it is not known where there are, or may be, others.
        reading, outside = read_gpu(self._device), None
        if reading is not None and reading.other_processes == 0:
            free, total = torch.cuda.mem_get_info(self._device)
            outside = total - free - torch.cuda.memory_reserved(self._device)
        memory = PhaseMemory(
            parameter_bytes=parameter_bytes(self._step),
            after_parameters=self._before,
            requested_before=self._requested_before,
            reserved_before=self._reserved_before,
            reserved_peak=self._reserved,
            outside_allocator=outside,
        )
        if self._step.cuda_graphs:
            return memory
        return msgspec.structs.replace(
            memory,
            resident_expected=self._expected,
            forward_peak=self._peaks.get(FORWARD),
            turns_peak=self._peaks.get(FORWARD_BACKWARD),
            saved_for_backward=self._saved if BACKWARD in self._peaks else None,
            backward_peak=self._peaks.get(BACKWARD),
            gradient_bytes=self._gradients,
            optimizer_peak=self._peaks.get(OPTIMIZER),
        )


def gradient_bytes(step: Step) -> int:
    """Bytes of the gradients on the parameters, as tensors."""
    return sum(storages_of(p.grad for p in step.model.parameters() if p.grad is not None).values())
