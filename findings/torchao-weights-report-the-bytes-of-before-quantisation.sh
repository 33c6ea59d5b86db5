#!/bin/sh
# torchao 0.18.0 (torch 2.13.0, Python 3.11): a weight that quantize_() has made int8 still says float32, with
# element_size() 4, and its untyped_storage() says the bytes of a float32 weight and has no memory behind it. So every
# usual way to ask for a model's size says that nothing was saved. What is held are the tensors that
# __tensor_flatten__() names.
#
# Seen:
#   before: 4194304 bytes
#   after:  dtype torch.float32, numel() * element_size() 4194304, nbytes 4194304, untyped_storage().nbytes() 4194304
#   held:   qdata 1048576, scale 4096, zero_point 1024: 1053696 bytes
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 torchao==0.18.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import sys

import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False))
before = model[0].weight.nbytes
print(f"before: {before} bytes")
quantize_(model, Int8WeightOnlyConfig())
weight = model[0].weight
told = (weight.numel() * weight.element_size(), weight.nbytes, weight.untyped_storage().nbytes())
print(f"after:  dtype {weight.dtype}, numel() * element_size() {told[0]}, nbytes {told[1]}, "
      f"untyped_storage().nbytes() {told[2]}")
names, _ = weight.__tensor_flatten__()
inner = {name: getattr(weight, name) for name in names if isinstance(getattr(weight, name), torch.Tensor)}
held = sum(tensor.nbytes for tensor in inner.values())
print("held:  ", ", ".join(f"{name} {tensor.nbytes}" for name, tensor in inner.items()) + f": {held} bytes")
sys.exit(0 if set(told) == {before} and held < before / 3 else 1)
PY
