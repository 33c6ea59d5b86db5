#!/bin/sh
# torch 2.13.0 (CPU, Python 3.11): the policy of selective activation checkpointing is called in forward alone. In the
# recomputation it is not called at all, so ctx.is_recompute, which it is handed, is False in every call. A policy that
# counts its calls to tell operators apart must not expect each of them twice.
#
# Seen (two products and a relu):
#   calls in forward: 3, in backward: 0, with is_recompute: 0
#
# Exit code 0: as seen. Another: the behaviour has changed, or the packages cannot be had.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m pip install --quiet --target "$place" torch==2.13.0
PYTHONPATH="$place" python3 - 2>/dev/null <<'PY'
import functools
import sys

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

calls = []


def policy(ctx, operator, *_args, **_kwargs):
    calls.append(ctx.is_recompute)
    kept = operator == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


weight, x = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
contexts = functools.partial(create_selective_checkpoint_contexts, policy)
y = checkpoint(lambda v: (v @ weight).relu() @ weight, x, use_reentrant=False, context_fn=contexts)
forward = len(calls)
y.sum().backward()
print(f"calls in forward: {forward}, in backward: {len(calls) - forward}, with is_recompute: {sum(calls)}")
sys.exit(0 if forward == 3 and len(calls) == 3 and not any(calls) else 1)
PY
