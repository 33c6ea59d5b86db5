"""Whether a step can fit at all: Linux ends a process that takes more memory than there is; one line comes before."""

import os

import torch

from stepscope.core.errors import InputError
from stepscope.core.workload import Workload
from stepscope.work.transformer import parameter_count


def check_room(workload: Workload, device: torch.device, *, bytes_per_parameter: int) -> None:
    """Raise InputError where parameters and what is kept for backward alone are more than the device has.

    Of what is kept only the largest is counted, in fp32: the logits and their gradient, and in each layer the weights
    of attention and the inner activations of the feed-forward. So what passes may still not fit.
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
