"""Checkpoints a user's module: finds its blocks, and makes each of them run again in backward.

Blocks are the items of a ModuleList or Sequential whose items are all of one class, which is made of modules itself.
A list inside a block is part of the block: the experts of a layer are no blocks.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stepscope.core.checkpointing import KEEPING, group_of, offload_of, selective_of
from stepscope.core.errors import InputError
from stepscope.training.checkpointing import OUTPUTS_KEPT_OF_ANY, checkpointed


def find_blocks(module: nn.Module) -> dict[str, Sequence[nn.Module]]:
    """The outermost lists of blocks in a module, by path, in the module's own order."""
    found: dict[str, Sequence[nn.Module]] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and not inside and _are_blocks(part):
            found[path] = tuple(part.children())
    return found


def checkpoint_blocks(module: nn.Module, checkpointing: str, name: str) -> tuple[nn.Module, ...]:
    """Make the module's blocks run again in backward as `checkpointing` says; returns them. Raises InputError where
    there are none, or they cannot be grouped."""
    found = find_blocks(module)
    blocks = tuple(block for each in found.values() for block in each)
    if checkpointing == "none":
        return blocks
    if not blocks:
        raise InputError(
            f"{name} cannot run with checkpointing {checkpointing}: it has no blocks, no ModuleList or Sequential of "
            "modules of one class"
        )
    _turn_caches_off(module)
    size = _group_size(checkpointing, max(map(len, found.values())), name)
    if size in (None, 1):
        for block in blocks:
            _run_again(block, checkpointing)
        return blocks
    for path, several in found.items():
        home = module.get_submodule(path)
        if not isinstance(home, nn.Sequential):
            raise InputError(
                f"{name} cannot run with checkpointing {checkpointing}: its own forward calls the blocks of {path} one "
                f"by one; choose every-1, {' or '.join(KEEPING)}"
            )
        home.forward = functools.partial(_run_groups, several, size)  # type: ignore[method-assign]
    return blocks


def _are_blocks(home: nn.Module) -> bool:
    items = list(home.children())
    return len(items) > 1 and len({type(item) for item in items}) == 1 and any(True for _ in items[0].children())


def _group_size(checkpointing: str, most: int, name: str) -> int | None:
    """The number K of `every-K`; None for those of KEEPING."""
    if checkpointing in KEEPING:
        return None
    group = group_of(checkpointing)
    if selective_of(checkpointing) is not None or offload_of(checkpointing) is not None:
        raise InputError(
            f"{name} cannot run with checkpointing {checkpointing}: the textbook's models alone have blocks that keep "
            f"unlike or offload; choose every-1, {' or '.join(KEEPING)}"
        )
    if group is None:
        choices = ", ".join(("none", *KEEPING, "every-1"))
        raise InputError(f"unknown checkpointing {checkpointing!r}: choose {choices} or every-K")
    if group > most:
        raise InputError(
            f"checkpointing {checkpointing} groups more blocks than {name} has in a list: choose every-1 to {most}"
        )
    return group


def _turn_caches_off(module: nn.Module) -> None:
    # A block of transformers writes its keys and values to a cache. If it runs again in backward, it writes them twice.
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _run_again(block: nn.Module, checkpointing: str) -> None:
    """Checkpoint a block in place. Backward runs the module again, and not only its forward, so that hooks on it see
    it."""
    forward, contexts = block.forward, OUTPUTS_KEPT_OF_ANY.get(checkpointing)
    running_again = threading.local()

    def again(*args: Any, **kwargs: Any) -> Any:
        running_again.now = True
        try:
            return block(*args, **kwargs)
        finally:
            running_again.now = False

    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(running_again, "now", False):
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # Compiled code calls no hooks either.
            return checkpointed(forward, *args, contexts=contexts, random=True, **kwargs)
        return checkpointed(_first_then(forward, again), *args, contexts=contexts, random=True, **kwargs)

    block.forward = run  # type: ignore[method-assign]


def _first_then(first: Callable[..., Any], later: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `first` when it is called for the first time, and `later` afterwards."""
    functions = iter((first,))

    def call(*args: Any, **kwargs: Any) -> Any:
        return next(functions, later)(*args, **kwargs)

    return call


def _run_groups(blocks: Sequence[nn.Module], size: int, *args: Any) -> Any:
    """Sequential's forward, by groups of blocks that run again whole."""
    for start in range(0, len(blocks), size):
        group = blocks[start : start + size]
        args = (checkpointed(functools.partial(_through, group), *args, random=True),)
    return args[0]


def _through(blocks: Sequence[nn.Module], *args: Any) -> Any:
    for block in blocks:
        args = (block(*args),)
    return args[0]
