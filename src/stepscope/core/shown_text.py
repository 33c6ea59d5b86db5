"""Text as it may be shown: nothing in it moves a cursor, turns the direction of writing, or fills a screen."""

import contextlib
import re
import sys
from typing import TextIO

LONGEST_MESSAGE = 2000
"""The most characters of a message on stderr, since an echoed value may be as long as a command line."""

_OTHER_THAN_ASCII = re.compile(r"[^\n\t -~]")


def visible(text: str) -> str:
    """The text with every control and format character as JSON escapes it: `\\u001b`. Lines and tabs stay.

    Format characters are those that Unicode gives no width: marks of direction, joiners, tags. Inside JSON text, where
    they occur in strings alone, the escape means the character itself.
    """
    return _OTHER_THAN_ASCII.sub(_escaped_unless_seen, text)


def printable(text: str) -> str:
    """The text on one line: white space of any kind is a space, and other characters that are not seen are escaped."""
    if text.isprintable():
        return text
    return "".join(" " if character.isspace() else _escaped(character) for character in text)


LONGEST_NAME = 200
"""Characters of a name from a file, which may have any length; real ones are shorter, and whole where there is room."""


def name_shown(text: str) -> str:
    """A name from a file, cleaned and cut for a cell of a table."""
    return middle_cut(printable(text), LONGEST_NAME)


def message_line(text: str) -> str:
    """The text as one line of stderr, what is too long left out in its middle: the remedy stands at the end."""
    return middle_cut(printable(text), LONGEST_MESSAGE)


def warn(line: str, stream: TextIO | None = None) -> None:
    """Print one line on stderr, or another stream; one that is gone, closed or full stops nothing."""
    out = stream or sys.stderr
    if out is not None:  # print() would take stdout for it
        with contextlib.suppress(OSError, ValueError):
            print(f"stepscope: {message_line(line)}", file=out, flush=True)


def middle_cut(text: str, width: int) -> str:
    """At most `width` characters, with an ellipsis for what is left out of the middle."""
    if len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _escaped_unless_seen(found: re.Match[str]) -> str:
    character = found.group()
    # A line may be broken at either of the two separators, and at no other kind of white space beyond ASCII.
    is_space = character.isspace() and character > "\x9f" and character not in "\u2028\u2029"
    return character if is_space else _escaped(character)


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
