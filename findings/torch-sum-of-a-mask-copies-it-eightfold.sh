#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): the sum of a mask, or of any tensor of small integers, first makes a copy of it in 64
# bits. `mask.sum()` of a bool mask of 256 MiB takes 2 GiB for a moment, eight times the mask, where the count of tokens
# that have a label, or of pairs that an attention mask lets through, is asked for in a training step.
# `torch.count_nonzero` of the same mask takes next to nothing.
#
# Seen (MiB more than before the call, at its peak):
#   sum of 256 MiB of bool: 2053
#   sum of 512 MiB of int16: 2053
#   sum of 1024 MiB of float32: 5
#   count_nonzero of 256 MiB of bool: 1
#
# Exit code 0: as seen. Another: the behaviour has changed, or the package cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
cat > "$place/peak.py" <<'PY'
import resource
import sys

import torch

kind, dtype = sys.argv[1:]
numbers = torch.ones(2**28, dtype=getattr(torch, dtype))


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


before = peak_mib()
getattr(torch, kind)(numbers)
more = round(peak_mib() - before)
print(f"{kind} of {numbers.nbytes >> 20} MiB of {dtype}: {more}")
copies = kind == "sum" and not numbers.is_floating_point()
sys.exit(0 if (2000 < more < 2200 if copies else more < 100) else 1)
PY
for each in "sum bool" "sum int16" "sum float32" "count_nonzero bool"; do
    # shellcheck disable=SC2086
    PYTHONPATH="$place" python3 "$place/peak.py" $each
done
