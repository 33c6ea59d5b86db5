"""What somebody sees on the page of a run, of several runs, of a capture, and of any other answer: a file each.

A page is made of the Answers that verbs show in a terminal, in an order for the eye, and of a sentence and a few large
figures that are in none of them. Nothing here knows of HTML: html.py shows a Page.
"""

from typing import ClassVar

import msgspec

from stepscope.core.answer import Answer, Finding, Panel

GENERATOR = '<meta name="generator" content="stepscope">'
"""What every page says near its beginning: a file without it is not ours, and is not overwritten."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the large figures at the head of a page."""

    name: str
    value: str
    """The figure with its unit, or a word where there is none."""
    note: str = ""
    """Its interval, or what it is held against."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a page under a title."""

    title: str
    answer: Answer
    """What is shown: lead, tables, panels, sentences."""
    part: str = ""
    """The part of the page that it belongs to, where sections are many."""
    commands: tuple[str, ...] = ()
    """Commands that measure what is missing here."""


class RunIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Many runs, newest first, as index.js reads them."""

    columns_of_figures: ClassVar[tuple[str, ...]] = (
        "id", "cell", "created", "instant", "status", "step", "low", "high", "tokens", "samples", "mfu", "peak",
        "doubts", "tag", "trend", "place",
    )  # fmt: skip
    place: str
    """Their folder, as a shell takes it; empty where no command is to be shown."""
    figures: dict[str, list[float | int | str | None]]
    """Columns of all runs: `cell` is a place in names, devices and fields, `trend` in histories, `place` in one of
    these. Times are in milliseconds, memory in GiB, shares in %."""
    names: list[str]
    devices: list[str]
    fields: dict[str, list[str | int | float | None]]
    """What cells differ in."""
    histories: list[list[float]]
    """The typical steps of each workload on a device, oldest first."""
    changes: list[list[int]]
    """The places in each history where its level changed."""
    since: list[float | None]
    """Its change from the first level to the last, in %."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTML file shows."""

    title: str
    kind: str
    """What it is of: run, set, sweep, comparison, capture, ranks, snapshot, index, or answer."""
    sentence: str
    """The one sentence that says the most."""
    figures: tuple[Figure, ...] = ()
    findings: tuple[Finding, ...] = ()
    checked: bool = False
    """Whether checks ran, so that no finding is good news."""
    index: RunIndex | None = None
    sections: tuple[Section, ...] = ()
    reproduce: tuple[str, ...] = ()
    """Commands that measure the same again."""
    shown_by: tuple[str, ...] = ()
    """Commands that show the same in a terminal, and measure nothing."""

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Every plot on it, in order."""
        return tuple(panel for section in self.sections for panel in section.answer.panels)
