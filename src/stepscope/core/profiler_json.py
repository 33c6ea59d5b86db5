"""Escapes texts in a profiler's JSON that it wrote without escaping, as Kineto does with the names of ranges."""

import re

import msgspec

_LONGEST = 10_000
"""Characters of a name of several lines."""
_FIELD = re.compile(rb'^([ \t]*"[^"\n\\]{1,80}": ")(.*)("[ \t]*,?[ \t]*\r?)$', re.MULTILINE)
"""A line that is one field with a text."""
_NAMED = re.compile(rb'^([ \t{]*"ph": .*"name": ")(.*)(", "pid": [^\n]*)$', re.MULTILINE)
"""A line of several fields, as older versions write events."""
_OVER_LINES = re.compile(
    rb'("name": ")([^\n]{0,%d}[^\n",\s][ \t]*\n.{0,%d}?)(",\s{0,40}"pid": )' % (_LONGEST, _LONGEST), re.DOTALL
)
"""A name with line breaks: its first line ends neither as a text nor as a field does."""
_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id|args)"')
"""Where one event ends and the next begins, which no name holds."""
_CHARACTER = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|["\\\n\r\t]')


def with_texts_escaped(text: bytes, *, complete: bool = True) -> tuple[bytes, int]:
    """The text with quotes and backslashes escaped in fields that are no JSON without it, and how many fields.

    Whole lines are looked at; what is escaped already stays. complete: whether the last line is whole, too.
    """
    count = 0

    def escaped(match: re.Match[bytes]) -> bytes:
        nonlocal count
        plain = b'"' not in match[2] and b"\\" not in match[2]
        if plain or _BETWEEN_EVENTS.search(match[2]) or _is_json(match.group()):
            return match.group()
        count += 1
        return match[1] + _CHARACTER.sub(_escape, match[2]) + match[3]

    whole = text.rfind(b"\n") + 1 if text.endswith((b"\n", b"\r")) or not complete else len(text)
    lines, rest = text[:whole], text[whole:]
    for pattern in (_FIELD, _NAMED, _OVER_LINES):
        lines = pattern.sub(escaped, lines)
    return lines + rest, count


def _is_json(line: bytes) -> bool:
    """Whether a line is JSON: fields of an object, or the object itself."""
    fields = line.strip().rstrip(b",").rstrip()
    for whole in (b"{" + fields + b"}", fields):
        try:
            msgspec.json.decode(whole)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        return True
    return False


def _escape(match: re.Match[bytes]) -> bytes:
    one = match.group()
    return {b"\n": rb"\n", b"\r": rb"\r", b"\t": rb"\t"}.get(one, one if len(one) > 1 else b"\\" + one)
