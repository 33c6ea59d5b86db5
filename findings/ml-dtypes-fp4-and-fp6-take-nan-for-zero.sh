#!/bin/sh
# ml_dtypes 0.6.0 (NumPy 2.4.6, Python 3.11): a cast of NaN to float4_e2m1fn, float6_e2m3fn or float6_e3m2fn, which have
# no NaN, gives zero, without a warning; infinity gives the largest number. So a run that has gone wrong looks like one
# of zeros. And a cast to float8_e8m0fnu takes 1.01 x 2^-127 to 2^-126, where 2^-127 is 99 times nearer.
#
# Seen:
#   NaN becomes: float4_e2m1fn 0, float6_e2m3fn 0, float6_e3m2fn 0
#   infinity becomes: float4_e2m1fn 6, float6_e2m3fn 7.5, float6_e3m2fn 28
#   1.01 x 2^-127 in e8m0: 2^-126
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" numpy==2.4.6 ml_dtypes==0.6.0
PYTHONPATH="$place" python3 - <<'PY'
import math
import sys

import ml_dtypes
import numpy

NAMES = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")


def became(number):
    with numpy.errstate(all="ignore"):
        return [abs(float(numpy.float32(number).astype(getattr(ml_dtypes, name)))) for name in NAMES]


of_nan, of_infinity = became(math.nan), became(math.inf)
scale = math.log2(float(numpy.float32(1.01 * 2.0**-127).astype(ml_dtypes.float8_e8m0fnu)))
print("NaN becomes:", ", ".join(f"{name} {number:g}" for name, number in zip(NAMES, of_nan)))
print("infinity becomes:", ", ".join(f"{name} {number:g}" for name, number in zip(NAMES, of_infinity)))
print(f"1.01 x 2^-127 in e8m0: 2^{scale:g}")
sys.exit(0 if of_nan == [0, 0, 0] and of_infinity == [6, 7.5, 28] and scale == -126 else 1)
PY
