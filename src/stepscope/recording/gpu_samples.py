"""A GPU's clocks, power and temperature while steps run, read by a small process of its own.

To read them takes the driver's time and the host's, so the process that is measured does not. The sampler reads until
it is told to stop, and only then writes what it read. It knows nothing of PyTorch, and the GPU has no context of it.
One that dies, or does not answer, leaves nothing; it never fails a run.
"""

import contextlib
import os
import select
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from stepscope.core.environment import Extent, GpuSamples
from stepscope.recording.nvml import Sample, gpu_sampling, gpu_uuid

if TYPE_CHECKING:
    import torch  # the sampler does without it

PERIOD_S = 0.1
_COMMAND = (sys.executable, "-P", "-m", "stepscope.recording.gpu_samples")
"""-P, since the user's current directory may hold a select.py of theirs."""
_ANSWER_S = 5.0
"""The longest wait for the sampler, when it starts and when it ends."""
_READY = b"ready\n"
_MOST = 36_000
"""The most readings that are kept, the last ones: an hour's."""

_Row = tuple[float, Sample]
"""When the GPU was read, on the monotonic clock that all processes of a system share, and what it was."""


class GpuSampler:
    """A running sampler of one GPU; `close` it whatever happens."""

    def __init__(self, uuid: str, period_s: float = PERIOD_S) -> None:
        """Return when the sampler reads, so that its start falls into no measured step."""
        self._period_s = period_s
        self._rows: list[_Row] = []
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                (*_COMMAND, uuid, str(period_s)),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C on the terminal interrupts the steps alone
            )
        ready = False
        try:
            ready = self._process is not None and self._is_ready()
        finally:
            if not ready:
                self.close()

    def read(self, begin_s: float, end_s: float) -> GpuSamples | None:
        """Stop, and return what was read between two moments of the monotonic clock; None where nothing was."""
        if self._process is not None:
            try:
                # A byte, and not the pipe's end alone: a process that was forked meanwhile may hold it open.
                written, _ = self._process.communicate(b"\n", timeout=_ANSWER_S)
                self._rows = msgspec.json.decode(written, type=list[_Row])
            except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
                pass
            finally:
                self.close()
        return summarised([sample for at_s, sample in self._rows if begin_s <= at_s <= end_s], self._period_s)

    def close(self) -> None:
        """End the sampler. What it has not told is lost."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _is_ready(self) -> bool:
        assert self._process is not None and self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        return bool(readable) and os.read(self._process.stdout.fileno(), len(_READY)) == _READY


def sampler_of(device: "torch.device") -> GpuSampler | None:
    """A sampler that reads the device from now on; None on a CPU."""
    return GpuSampler(gpu_uuid(device)) if device.type == "cuda" else None


@contextlib.contextmanager
def gpu_sampled(device: "torch.device") -> Iterator[GpuSampler | None]:
    """A context in which a sampler reads the device; None on a CPU."""
    sampler = sampler_of(device)
    try:
        yield sampler
    finally:
        if sampler is not None:
            sampler.close()


def summarised(samples: Sequence[Sample], period_s: float) -> GpuSamples | None:
    """The lowest, median and highest of each quantity; None without samples."""
    if not samples:
        return None
    clock, power, temperature = (
        [value for value in values if value is not None] for values in zip(*samples, strict=True)
    )
    return GpuSamples(
        count=len(samples),
        period_s=period_s,
        sm_clock_mhz=_extent(clock),
        power_w=_extent(power),
        temperature_c=_extent(temperature),
    )


def _extent(values: Sequence[float]) -> Extent | None:
    if not values:
        return None
    return Extent(lowest=min(values), median=statistics.median(values), highest=max(values))


def main(uuid: str, period_s: float) -> int:
    """Read the GPU until a byte comes on stdin, then write the readings to stdout."""
    parent, rows = os.getppid(), deque[_Row](maxlen=_MOST)
    os.nice(19)  # it must not take a core from the steps
    with gpu_sampling(uuid) as read:
        if read is None:
            return 1
        sys.stdout.buffer.write(_READY)
        sys.stdout.buffer.flush()
        next_s = time.monotonic()
        while not select.select([sys.stdin], [], [], max(0.0, next_s - time.monotonic()))[0]:
            if os.getppid() != parent:  # killed, it said nothing
                return 1
            now_s = time.monotonic()
            rows.append((now_s, read()))
            next_s = max(next_s + period_s, now_s)
    sys.stdout.buffer.write(msgspec.json.encode(list(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
