"""Where an experiment runs: its device and versions, as its answer names them."""

import contextlib
import platform
from collections.abc import Iterator

import torch

import stepscope
from stepscope.measure.environment import cpu_name


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def versions() -> dict[str, str]:
    """Versions of the software that the figures depend on."""
    return {"stepscope": stepscope.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """While open, PyTorch computes on one thread of the CPU: for operators too small to be worth sharing out.

    Threads wait for each other by spinning. Where another process wants one of two cores, training a model of 0.2M
    parameters took 1.5 s on two threads and 0.24 s on one; on a quiet machine 0.20 s and 0.23 s.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
