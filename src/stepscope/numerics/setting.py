"""Where an experiment runs: its device and versions, as its answer names them."""

import platform

import torch

import stepscope


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    return {"stepscope": stepscope.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
