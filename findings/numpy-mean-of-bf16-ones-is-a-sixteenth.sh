#!/bin/sh
# NumPy 2.4.6 with ml_dtypes 0.6.0 (Python 3.11): the mean of 4096 ones in bfloat16 is 0.0625, and their sum 256. NumPy
# adds numbers of a type that is not its own one after another in that type, where 256 + 1 is 256 again; for float16, a
# type of its own, mean() adds up in float32. There is no warning. A good engineer expects 1 of both.
#
# Seen:
#   bfloat16: sum 256, mean 0.0625; float16: mean 1.0
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" numpy==2.4.6 ml_dtypes==0.6.0
PYTHONPATH="$place" python3 - <<'PY'
import sys

import ml_dtypes
import numpy

ones = numpy.ones(4096, dtype=ml_dtypes.bfloat16)
half = float(numpy.ones(4096, dtype=numpy.float16).mean())
print(f"bfloat16: sum {ones.sum()}, mean {ones.mean()}; float16: mean {half}")
sys.exit(0 if float(ones.mean()) == 0.0625 and half == 1.0 else 1)
PY
