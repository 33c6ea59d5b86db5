"""Where an experiment runs: the name of its machine, its versions, its threads, and whether a step can fit at all."""

import contextlib
import os
import platform
from collections.abc import Iterator

import torch

import stepscope
from stepscope.core.errors import InputError
from stepscope.core.work.transformer import parameter_count
from stepscope.core.workload import Workload
from stepscope.recording.environment import cpu_name

_SMALL_WORK = 2**28
"""Parameters times tokens of a step: below it one thread of a CPU is as fast as several."""


def processor_name(device: torch.device) -> str:
    """The name of the GPU, or of the CPU."""
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


def threads_for(parameters: int, tokens: int) -> contextlib.AbstractContextManager[None]:
    """While open, PyTorch computes on one thread if steps are too small for more."""
    return one_thread() if parameters * tokens < _SMALL_WORK else contextlib.nullcontext()


def check_room(workload: Workload, device: torch.device, *, bytes_per_parameter: int) -> None:
    """Raise InputError where parameters and what is kept for backward alone are more than the device has.

    Linux ends a process that takes more memory than there is; this line comes before. Of what is kept only the largest
    is counted, in fp32: the logits and their gradient, and in each layer the weights of attention and the inner
    activations of the feed-forward. So what passes may still not fit.
    """
    model, tokens = workload.model, workload.batch_size * workload.seq_len
    parameters = parameter_count(model) * bytes_per_parameter
    by_layer = tokens * (model.heads * workload.seq_len + model.d_ff) * 4
    activations = model.layers * by_layer + 2 * tokens * model.vocabulary * 4
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if parameters + activations > room:
        raise InputError(
            f"model {model.name} needs {parameters / 1e9:.1f} GB for parameters, gradients and copies and "
            f"{activations / 1e9:.1f} GB for activations of {tokens:,} tokens, and there are {room / 1e9:.1f} GB: "
            "choose a smaller preset, which has the same modules, or fewer tokens"
        )
