"""Latency and bandwidth, fitted to times that are made up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.formulas.communication import KINDS, bus_bandwidth, fit_latency_and_bandwidth

SIZES = [4**i * 1024 for i in range(8)]


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency_s: float, bytes_per_s: float):
    fit = fit_latency_and_bandwidth([(size, latency_s + size / bytes_per_s) for size in SIZES])
    assert fit is not None
    assert fit.residual < 1e-6 and fit.count == 8
    for size in SIZES:
        assert math.isclose(fit.seconds(size), latency_s + size / bytes_per_s, rel_tol=1e-5)


def test_errors_count_relative_to_the_time():
    """Two sizes with each two times, 10 % to either side: the line goes between them, and misses each by 10 %."""
    fit = fit_latency_and_bandwidth([(1000, 0.9e-3), (1000, 1.1e-3), (10**9, 0.9), (10**9, 1.1)])
    assert fit is not None
    # Of each pair the smallest sum of (x / 0.9 - 1)^2 + (x / 1.1 - 1)^2 is at x = (1/0.9 + 1/1.1) / (1/0.81 + 1/1.21).
    middle = (1 / 0.9 + 1 / 1.1) / (1 / 0.81 + 1 / 1.21)
    assert fit.seconds(10**9) == pytest.approx(middle)
    assert fit.seconds(1000) == pytest.approx(middle * 1e-3)
    assert fit.residual == pytest.approx(math.hypot(middle / 0.9 - 1, middle / 1.1 - 1) / math.sqrt(2))


def test_neither_parameter_is_below_zero():
    faster = fit_latency_and_bandwidth([(1000, 2.0), (2000, 1.0)])
    assert faster is not None and faster.bytes_per_s is None
    assert faster.latency_s == pytest.approx((1 / 2 + 1) / (1 / 4 + 1))  # the weighted mean
    above = fit_latency_and_bandwidth([(1000, 1.0), (2000, 4.0)])
    assert above is not None and above.latency_s == 0.0
    assert above.bytes_per_s == pytest.approx((1000**2 + 500**2) / (1000 + 500))
    assert fit_latency_and_bandwidth([(1000, 1.0), (1000, 2.0)]) is None


def test_bandwidths_are_those_of_nccl_tests():
    """A message of 1 GB in 0.1 s among 4 ranks (doc/PERFORMANCE.md of nccl-tests)."""
    found = {kind.name: bus_bandwidth(kind.name, 10**9, 4, 0.1) for kind in KINDS}
    assert found["all-reduce"] == pytest.approx(1.5e10)
    for name in ("all-gather", "reduce-scatter", "all-to-all"):
        assert found[name] == pytest.approx(0.75e10)
    assert found["broadcast"] == found["send and receive"] == 1e10
