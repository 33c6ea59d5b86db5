"""A page without what tells who measured it where: names of hosts and users, paths, arguments, lines of source."""

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from stepscope.core.answer import Page

_QUOTED = r"\"[^\"\n]*[\\/][^\"\n]*\"|'[^'\n]*[\\/][^'\n]*'"
_PATH = (
    r"(?:file:/{2,3}|~|\b[A-Za-z]:)?(?:[\\/][\w.@+%=~-]+){2,}[\\/]?|(?<![\w/])(?:\.{1,2}/)[\w.@+%=~/-]+"
    r"|(?<![\w/\]])[\w.@+%~-]+(?:/[\w.@+%~-]+){2,}"
)
_SOURCE = r"[\w./\\-]+\.(?:py|cu|cpp|cc|h|pyx)(?::\w+)?(?::\d+)?(?:\([^)]*\))?"
_MADE_BY = r"(made by )\S+(?: with [^)]*)?"
_WATCHED_IN = r"(watched in )[^),]+"
_COMMIT = r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b|(?:(?<=\bat )|(?<=\bcommits ))[0-9a-f]{7,40}\b"
"""Digits and letters mixed; of a commit that is digits alone, or letters, only what stands after a word for it."""
_COMMIT_ROW = "git commit"
_TAG, _HOST = r"\b(tag )[^;,\s]+", r"\b(host(?:name)?:? )[\w.:-]+"
_PATTERN = re.compile(f"(?P<quoted>{_QUOTED})|(?P<source>{_SOURCE})|(?P<path>{_PATH})")
_COMMON = {"last", "runs", "results", "traces", "trace", "memory"}
"""Words of a path that say nothing of anybody."""


def redacted(page: Page, given: Iterable[str] = ()) -> Page:
    """The page with `[path]`, `[source]`, `[host]` and the like in their places, and without the commands that made it.

    given: what the user named, paths or names: wherever they stand, and their parts, they are left out, too.
    """
    names, asked = _names(), _given([*given, *_commits(page)])

    def clean(text: str) -> str:
        text = asked.sub("[path]", text) if asked is not None else text
        text = re.sub(_HOST, r"\1[host]", re.sub(_TAG, r"\1[tag]", text))
        text = re.sub(_MADE_BY, r"\1[source]", re.sub(_WATCHED_IN, r"\1[source]", text))
        text = re.sub(_COMMIT, "[commit]", text)
        text = _PATTERN.sub(lambda found: "[source]" if found["source"] else "[path]", text)
        return names.sub("[host]", text) if names is not None else text

    cleaned: Page = msgspec.convert(_mapped(msgspec.to_builtins(page), clean), Page)
    figures = tuple(
        msgspec.structs.replace(one, name=own.name) for one, own in zip(cleaned.figures, page.figures, strict=True)
    )
    return msgspec.structs.replace(cleaned, figures=figures, reproduce=(), shown_by=())


def _given(given: Iterable[str]) -> re.Pattern[str] | None:
    """The names that a user gave, whole and in their parts, the longest first."""
    found: set[str] = set()
    for name in given:
        parts = [part for part in re.split(r"[\\/]", name) if len(part) > 3 and part not in _COMMON]
        found |= {name, *parts, *(part.partition(".")[0] for part in parts)}
    kept = sorted((name for name in found if len(name) > 3 and name not in _COMMON), key=len, reverse=True)
    # A part of a longer word is no name: `test` is none in `latest`, and `acme` is one in `acme_2`.
    return re.compile("|".join(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])" for name in kept)) if kept else None


def _commits(page: Page) -> Iterator[str]:
    """The commits that tables name, which may be digits alone."""
    for section in page.sections:
        for table in section.answer.tables:
            yield from (str(row[1]) for row in table.rows if row[0] == _COMMIT_ROW and len(row) > 1)


def _names() -> re.Pattern[str] | None:
    """This machine's name and its user's, where they are long enough to be told from words."""
    found: list[str] = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with contextlib.suppress(OSError, KeyError):  # in a container a user may have no name
        found.append(getpass.getuser())
    distinct = sorted({name for name in found if len(name) > 3 and name != "localhost"}, key=len, reverse=True)
    return re.compile("|".join(rf"\b{re.escape(name)}\b" for name in distinct)) if distinct else None


_KEPT = frozenset({"kind", "study", "tone", "severity", "units", "level"})
"""Fields that hold words of stepscope's own."""


def _mapped(value: Any, clean: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: item if key in _KEPT else _mapped(item, clean) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, clean) for item in value]
    return value
