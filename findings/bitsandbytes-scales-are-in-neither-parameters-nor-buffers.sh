#!/bin/sh
# bitsandbytes 0.50.2 (torch 2.13.0, Python 3.11): the scales of a 4-bit linear layer are in neither parameters() nor
# buffers() of its module. They are attributes of the weight (weight.quant_state). So the usual sum over both, which
# transformers' get_memory_footprint() makes too, says less than the layer holds: by an eighth of the weights at the
# default block of 64 without double quantisation.
#
# Seen:
#   parameters() and buffers(): 524288 bytes
#   weight.quant_state:          65600 bytes, none of it in either
#   state_dict():               weight, weight.absmax, weight.quant_map, weight.quant_state.bitsandbytes__nf4
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0 bitsandbytes==0.50.2
PYTHONPATH="$place" python3 - <<'PY'
import sys

import bitsandbytes
import torch

layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compress_statistics=False, quant_type="nf4").to("cpu")


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


state = layer.weight.quant_state
scales = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
listed = [*layer.parameters(), *layer.buffers()]
inside = {tensor.untyped_storage().data_ptr() for tensor in listed}
print(f"parameters() and buffers(): {size(listed)} bytes")
hidden = [tensor for tensor in scales if tensor.untyped_storage().data_ptr() not in inside]
print(f"weight.quant_state:          {size(scales)} bytes, of which in neither: {size(hidden)}")
print("state_dict():              ", ", ".join(layer.state_dict()))
same = size(listed) == 1024 * 1024 // 2 and size(hidden) == size(scales) >= size(listed) // 8
sys.exit(0 if same else 1)
PY
