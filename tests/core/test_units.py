"""Formatting and parsing of quantities."""

import pytest

from stepscope.core.errors import InputError
from stepscope.core.units import (
    format_bytes,
    format_milliseconds,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flops_per_s,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.02021, "20.21 ms"), (1.2034, "1.203 s"), (12.4e-6, "12.4 us"), (3e-9, "3 ns")],
)
def test_seconds(seconds: float, text: str):
    assert format_seconds(seconds) == text


def test_other_quantities():
    assert format_milliseconds(0.36254) == "362.5"
    assert format_milliseconds(0.02021) == "20.21"
    assert format_bytes(80 * 2**30) == "80.00 GiB"
    assert format_bytes(512) == "512 B"
    assert format_rate(624.3e12, "FLOP/s") == "624.3 TFLOP/s"
    assert format_rate(4.28e12, "B/s") == "4.28 TB/s"


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("4096", 4096)],
)
def test_sizes_are_read(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "80 cats", "0", "0GiB", "-1GiB", "GiB"])
def test_unreadable_sizes_are_refused(text: str):
    with pytest.raises(InputError):
        parse_bytes(text)


def test_rates_are_read():
    assert parse_flops_per_s("989T") == parse_flops_per_s("989e12") == 989e12
    assert parse_flops_per_s("0.5P") == 5e14
    for text in ("", "fast", "0T", "-3T"):
        with pytest.raises(InputError):
            parse_flops_per_s(text)
