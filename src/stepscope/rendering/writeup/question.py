"""A question of an assignment: what it asks, which Answer answers it, and the command that measures what is missing."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.core.answer import Answer
from stepscope.rendering.writeup.material import Material

Source = Callable[[Material], Answer | None]
"""Finds the Answer in what was measured; None where the material does not hold it."""

Scale = Literal["full", "small"]
SCALES: tuple[Scale, ...] = ("full", "small")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A command that measures what questions lack. Several questions may name one: it runs once."""

    name: str
    """Of the folder or file, in the store, that it leaves."""
    full: str
    """The words after `stepscope`, at the sizes that the question asks about."""
    small: str
    """The same with models that a CPU measures in a minute."""
    leaves: Literal["runs", "answer"] = "runs"
    cost: int
    """Its place in the order of measuring: the cheapest first."""

    def words(self, scale: Scale) -> tuple[str, ...]:
        """The words after `stepscope`, but for where the result goes."""
        return tuple(shlex.split(self.full if scale == "full" else self.small))

    def place(self, store: Path) -> Path:
        """What it leaves in a store: a folder of runs, or an answer."""
        return store / (self.name if self.leaves == "runs" else f"{self.name}.json")

    def mark(self, store: Path) -> Path:
        """A file that is there while the command runs: one that is left says that it was interrupted."""
        return store / f"{self.name}.unfinished"

    def command(self, scale: Scale, store: Path) -> str:
        """The whole command, as a user copies it."""
        place = shlex.quote(str(self.place(store)))
        if self.leaves == "runs":
            return shlex.join(("stepscope", *self.words(scale), "--runs")) + f" {place}"
        make = "" if store == Path() else f"mkdir -p {shlex.quote(str(store))} && "
        return f"{make}{shlex.join(('stepscope', *self.words(scale), '--json'))} > {place}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question."""

    id: str
    asks: str
    source: Source | None = None
    measure: Measure | None = None
    """None where nothing is to be measured: the source computes, or the question waits."""
    later: str = ""
    """What will answer it, where stepscope does not measure that yet."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The questions on one subject."""

    title: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """All questions, in the order in which they are asked."""

    name: str
    title: str
    parts: tuple[Part, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """Those of all parts."""
        return tuple(question for part in self.parts for question in part.questions)
