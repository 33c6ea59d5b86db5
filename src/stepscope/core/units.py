"""Quantities are stored in seconds, bytes and FLOPs, and formatted only here, at the edge."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from stepscope.core.errors import InputError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_SIZE_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip


def counted(number: int, thing: str) -> str:
    """A number of things: `1 step`, `2 steps`, `2 processes`."""
    return f"{number:,} {thing}{'' if number == 1 else 'es' if thing.endswith('ss') else 's'}"


def format_seconds(seconds: float) -> str:
    """Four significant digits in the unit that reads best: 20.21 ms, 1.203 s, 12.4 us."""
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds:.4g} s" if abs(seconds) < 1e4 else f"{seconds:,.0f} s"


def format_milliseconds(seconds: float) -> str:
    """Milliseconds as a bare number, for columns whose head names the unit (ms)."""
    milliseconds = seconds * 1e3
    digits = 1 if abs(milliseconds) >= 100 else 2 if abs(milliseconds) >= 1 else 4
    return f"{milliseconds:.{digits}f}"


def ms_text(nanoseconds: float | None, digits: int = 3, below_one: int = 3) -> str:
    """Nanoseconds as a number of milliseconds; `below_one` digits if there is less than one. Unknown is empty."""
    if nanoseconds is None:
        return ""
    milliseconds = nanoseconds * 1e-6
    return f"{milliseconds:.{digits if milliseconds >= 1 else below_one}f}"


def in_ms(nanoseconds: float) -> str:
    """Nanoseconds in a sentence: 20.21 ms, 0.0012 ms."""
    return f"{ms_text(nanoseconds, 2, 4)} ms"


def format_bytes(count: float) -> str:
    """Bytes in binary units: 80.00 GiB, 12.3 MiB, 512 B."""
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def format_rate(per_second: float, unit: str) -> str:
    """A rate with decimal prefixes, as datasheets print it: 624.3 TFLOP/s, 4.28 TB/s."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(per_second) >= scale:
            return f"{per_second / scale:.4g} {prefix}{unit}"
    return f"{per_second:.4g} {unit}"


def format_joules(joules: float) -> str:
    """Four significant digits in the unit that reads best: 78.2 J, 38.18 mJ."""
    if joules >= 1:
        return f"{joules:.4g} J" if joules < 1e4 else f"{joules:,.0f} J"
    return f"{joules * 1e3:.4g} mJ" if joules >= 1e-3 else f"{joules * 1e6:.4g} uJ"


def format_share(share: float) -> str:
    """A share of one as a percentage."""
    return f"{share * 100:.1f} %"


def format_count(count: int) -> str:
    """A count with separated thousands, as for parameters."""
    return f"{count:,}"


UNITS: dict[str, tuple[str, float, Callable[[float], str]]] = {
    "B": ("B", 1, format_bytes),
    "s": ("s", 1, format_seconds),
    "ms of s": ("", 1e3, format_milliseconds),
    "ms of ns": ("", 1e-6, ms_text),
    "+ms of s": ("", 1e3, lambda seconds: f"{'+' if seconds > 0 else ''}{format_milliseconds(seconds)}"),
    "us of ns": ("", 1e-3, lambda nanoseconds: f"{nanoseconds * 1e-3:.1f}"),
    "TFLOP/s of FLOP/s": ("", 1e-12, lambda rate: f"{rate * 1e-12:.2f}"),
    "GB/s of B/s": ("", 1e-9, lambda rate: f"{rate * 1e-9:.0f}"),
    "%": ("%", 100, format_share),
    "+%": ("%", 100, lambda share: f"{'+' if share > 0 else ''}{format_share(share)}"),
    "FLOP": ("FLOP", 1, lambda count: format_rate(count, "FLOP")),
    "FLOP/s": ("FLOP/s", 1, lambda rate: format_rate(rate, "FLOP/s")),
    "B/s": ("B/s", 1, lambda rate: format_rate(rate, "B/s")),
}
"""How figures read in a table, by the unit of their column: the unit that a column of bare numbers names in its head
(empty where the head names it already), the factor to that unit, and the text of a figure."""


_SPEC = r"\+?,?(?:(?:\.\d)?[feg]|d)?"
UNIT_FORMAT = re.compile(rf"{_SPEC}|[^{{}}]*\{{:{_SPEC}\}}[^{{}}]*")


def figure_text(value: float, unit: str) -> str:
    """A figure of a column of this unit: one of UNITS, or a format of Python's such as `.2f` or `{:+.1f} x`."""
    if unit in UNITS:
        return UNITS[unit][2](value)
    return unit.format(value) if "{" in unit else format(value, unit)


def parse_bytes(text: str) -> int:
    """`80GiB`, `80 GB`, `1024`: a size in bytes. GiB is 2**30, GB is 10**9."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].lower() not in _SIZE_UNITS:
        raise InputError(f"cannot read the size {text!r}: write a number and a unit, as in 80GiB or 80GB")
    size = float(match[1]) * _SIZE_UNITS[match[2].lower()]
    if not 1 <= size < 2**60:
        raise InputError(f"the size {text[:40]!r} is out of range: it must be above zero and below 1 EiB")
    return int(size)


MOST_SECONDS = 1e7
"""The longest span that is accepted, over a hundred days: more is a slip, and would overflow."""


_SECONDS = {"min": 60, "h": 3600, "s": 1}


def parse_seconds(text: str, option: str, *, zero: bool = False) -> float:
    """`90`, `0.5`, `90s`, `10min`, `1h`: a span of time that was given as `option`; zero only where it means
    something."""
    unit = next((unit for unit in _SECONDS if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * _SECONDS.get(unit, 1)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 or (zero and seconds == 0)) or seconds > MOST_SECONDS:
        least = "0" if zero else "above 0"
        raise InputError(f"{option} is {text[:40]!r}: write seconds, {least} to {MOST_SECONDS:,.0f}, as in {option} 90")
    return seconds


_WINDOW = re.compile(r"(?:(\d+(?:\.\d+)?)(us|ms|s))?:(?:(\d+(?:\.\d+)?)(us|ms|s))?")
_NANOSECONDS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_NO_END_NS = 2**61


class Window(NamedTuple):
    """A stretch of time, its end excluded."""

    begin_ns: int
    end_ns: int


def parse_window(text: str) -> Window:
    """`12ms:20ms`, `1.5s:`, `:300us`."""
    match = _WINDOW.fullmatch(text.strip())
    begin_ns = round(float(match[1] or 0) * _NANOSECONDS[match[2] or "s"]) if match else 0
    end_ns = round(float(match[3]) * _NANOSECONDS[match[4]]) if match and match[3] else _NO_END_NS
    if match is None or not begin_ns < end_ns <= _NO_END_NS:
        raise InputError(f"cannot read the window {text[:40]!r}: write begin and end, as in 12ms:20ms, 1.5s: or :300us")
    return Window(begin_ns, end_ns)


def parse_flops_per_s(text: str) -> float:
    """`989e12`, `989T`, `0.99P`: a rate in FLOP/s."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([GTP]?)(?:FLOP/?s?)?\s*", text)
    if not match or not 0 < float(match[1]) < 1e30:
        raise InputError(f"cannot read the rate {text!r}: write FLOP/s above zero, as in 989T or 989e12")
    return float(match[1]) * {"": 1.0, "G": 1e9, "T": 1e12, "P": 1e15}[match[2]]
