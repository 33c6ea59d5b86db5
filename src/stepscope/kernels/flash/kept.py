"""Configurations that tuning chose for the FlashAttention kernels: one file per device and version of Triton."""

import functools
import re
import warnings
from pathlib import Path

import msgspec
import torch
import triton

from stepscope.core.errors import InputError, one_line
from stepscope.core.files import cache_directory, read_document, replace_file
from stepscope.kernels.flash.configuration import BackwardConfiguration, ForwardConfiguration, Problem


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest correct configurations for a class of calls, with their times and the defaults' times."""

    problem: Problem
    batch_heads: int
    """The product of batch and heads in the calls that were measured."""
    forward: ForwardConfiguration
    backward: BackwardConfiguration
    forward_ms: float | None = None
    """The median time in milliseconds, as for all times here; None if the budget ended before it was measured."""
    backward_ms: float | None = None
    default_forward_ms: float | None = None
    """The default's median time; None also if the default failed or was wrong."""
    default_backward_ms: float | None = None
    deterministic: bool = False
    """Whether PyTorch had to be deterministic. The backward kernel in Gluon is not, so it was not measured then."""

    def __str__(self) -> str:
        lines = [f"{self.problem}, tuned at batch x heads {self.batch_heads}"]
        backward = msgspec.structs.replace(self.backward, hopper=None) if self.deterministic else self.backward
        for name, chosen, ms, default_ms in (
            ("forward", self.forward, self.forward_ms, self.default_forward_ms),
            ("backward", backward, self.backward_ms, self.default_backward_ms),
        ):
            measured = "default, not measured" if ms is None else f"{ms:.3f} ms"
            beside = "" if default_ms is None else f" (the default {default_ms:.3f})"
            lines.append(f"  {name:8} {chosen}: {measured}{beside}")
        if self.deterministic and self.backward.hopper is not None:
            lines.append(f"  where PyTorch need not be deterministic, backward is {self.backward}, not measured")
        return "\n".join(lines)


class Choices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file with a device's choices."""

    device_name: str
    triton_version: str
    choices: tuple[Choice, ...]


def device_name(device: torch.device) -> str:
    """The GPU's name as CUDA reports it; "cpu" for Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def kept_path(name: str) -> Path | None:
    """The file of the choices for a device of this name; None if there is no cache directory."""
    slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{name}-triton{triton.__version__}")
    caches = cache_directory()
    return caches / f"flash-attention-{slug}.json" if caches else None


@functools.cache
def kept_choices(name: str) -> dict[Problem, Choice]:
    """The kept choices by problem, read once. A file that cannot be read gives one warning and no choices."""
    path = kept_path(name)
    if path is None:
        return {}
    try:
        found = msgspec.json.decode(read_document(path), type=Choices)
    except FileNotFoundError:
        return {}
    except (InputError, OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"flash attention: what was tuned, {path}, cannot be read ({one_line(error)}): the defaults are taken; "
            "delete the file or tune again",
            stacklevel=2,
        )
        return {}
    return {choice.problem: choice for choice in found.choices}


def keep(name: str, choice: Choice) -> Path | None:
    """Store the choice, which replaces an earlier one for the same problem. Returns None if it cannot be stored."""
    kept_choices.cache_clear()
    choices = kept_choices(name) | {choice.problem: choice}
    content = Choices(device_name=name, triton_version=triton.__version__, choices=tuple(choices.values()))
    path = kept_path(name)
    return path if replace_file(path, msgspec.json.format(msgspec.json.encode(content))) else None
