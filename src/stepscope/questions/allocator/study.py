"""What would a setting of PyTorch's caching allocator give? The same step without it and with it, each in a process of
its own: the allocator reads its settings once, when a process first uses the GPU."""

import os
from contextlib import AbstractContextManager

from stepscope.core.errors import InputError
from stepscope.questions.child_environment import child_environment

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variable of the settings, and its name before PyTorch 2.9, which later ones still read."""
EXPANDABLE = "expandable_segments:True"


def check_setting(setting: str) -> str:
    """The setting, if it can be one that the environment does not have yet. Raises InputError."""
    name, colon, value = setting.partition(":")
    if not (name.strip() and colon and value.strip()) or not setting.isprintable():
        raise InputError(f"cannot read --setting {setting[:40]!r}: write name:value, as in {EXPANDABLE}")
    if any(name in _names(os.environ.get(variable, "")) for variable in VARIABLES):
        raise InputError(f"{name} is set in this environment already: unset {' and '.join(VARIABLES)} to compare")
    return setting


def allocator_setting(setting: str) -> AbstractContextManager[None]:
    """A context in which processes start with this setting beside those of the environment."""
    there = next(filter(None, map(os.environ.get, VARIABLES)), "")
    return child_environment(dict.fromkeys(VARIABLES, ",".join(filter(None, [there, setting]))))


def _names(settings: str) -> list[str]:
    return [setting.partition(":")[0].strip() for setting in settings.split(",")]
