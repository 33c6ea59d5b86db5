#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): a cast of infinity to float8_e4m3fn gives 448, a number like any other, so that an
# overflow upstream can no longer be seen behind it; to float8_e5m2 it stays infinity. A cast to float8_e8m0fnu drops the
# sign (-1 becomes 1), takes zero to 2^-127, and 1.01 x 2^-127 to 2^-126. None of it warns. (e8m0 has neither sign nor
# zero: one expects NaN, which ml_dtypes 0.6.0 gives.)
#
# Seen:
#   infinity: e4m3fn 448.0, e5m2 inf
#   e8m0: -1 becomes 1.0, 0 becomes 2^-127, 1.01 x 2^-127 becomes 2^-126
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import math
import sys

import torch


def cast(number, dtype):
    return torch.tensor(number).to(dtype).float().item()


wide, narrow = cast(math.inf, torch.float8_e5m2), cast(math.inf, torch.float8_e4m3fn)
signed, zero, above = (cast(number, torch.float8_e8m0fnu) for number in (-1.0, 0.0, 1.01 * 2.0**-127))
print(f"infinity: e4m3fn {narrow}, e5m2 {wide}")
print(f"e8m0: -1 becomes {signed}, 0 becomes 2^{math.log2(zero):g}, 1.01 x 2^-127 becomes 2^{math.log2(above):g}")
seen = narrow == 448 and wide == math.inf and (signed, zero, above) == (1.0, 2.0**-127, 2.0**-126)
sys.exit(0 if seen else 1)
PY
