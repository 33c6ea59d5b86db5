"""Notes what a watched loop saves, so that a step which writes a checkpoint has a name."""

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from threading import get_ident
from typing import Any

import torch

from stepscope.core.evidence import Saved
from stepscope.recording.habits import users_line
from stepscope.recording.watch.entry_points import Undo, replace
from stepscope.recording.watch.phases import Phases


class Saves:
    """The calls of `torch.save` in the loop's thread, by steps. A library that writes files in another way, as
    safetensors does, is not seen."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Seconds of each step that saves, by its number."""
        self._where = ""

    def watch(self, phases: Phases, step: Callable[[], int]) -> Undo:
        """Note the calls from now on. step: returns the number of the step that is under way."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def save(*args: Any, **kwargs: Any) -> Any:
                if get_ident() != phases.thread:
                    return original(*args, **kwargs)
                began_s, number = time.perf_counter(), step()
                try:
                    return original(*args, **kwargs)
                finally:
                    took_s = time.perf_counter() - began_s
                    self._seconds[number] = self._seconds.get(number, 0.0) + took_s
                    if not self._where and (line := users_line()) is not None:
                        self._where = line.where

            return save

        return replace(torch, "save", make)

    def of(self, spans: Sequence[tuple[int, int]]) -> Saved | None:
        """What the steps with these numbers saved, the first and the last of each span; None where they saved
        nothing."""
        took = [took_s for step, took_s in self._seconds.items() if any(first <= step <= last for first, last in spans)]
        if not took:
            return None
        of = sum(last - first + 1 for first, last in spans)
        return Saved(where=self._where, steps=len(took), of=of, median_s=median(took))
