"""Reads an exception that the device raised: in which module, and where in which file."""

from collections.abc import Iterable
from types import TracebackType
from typing import cast

import torch


def failing_module(model: torch.nn.Module, tb: TracebackType | None) -> str | None:
    """Path of the innermost module whose forward was running when the error was raised."""
    modules = cast("Iterable[tuple[str, torch.nn.Module]]", model.named_modules())  # PyTorch leaves it without a type
    paths = {id(module): path for path, module in modules if path}
    found = None
    while tb is not None:
        found = paths.get(id(tb.tb_frame.f_locals.get("self")), found)
        tb = tb.tb_next
    return found


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of the error and its causes, whose frames hold the tensors of the step that failed."""
    waiting: list[BaseException | None] = [error]
    while waiting:
        known = waiting.pop()
        if known is not None and known.__traceback__ is not None:
            known.__traceback__ = None
            waiting += [known.__cause__, known.__context__]
