"""Attentions by name, one signature: (q, k, v, *, causal, scale=None, window=None) -> out.

Shape legend: B batch, H heads, S query positions, T key positions, D head_dim. Queries are (B, H, S, D), keys and
values (B, H or fewer heads, T, D): where they have fewer, each serves as many consecutive query heads (grouped-query
attention). What a query sees:

    causal           query i sees the keys j <= i, also where S and T differ (aligned at the top left)
    window w         query i sees the keys with |i - j| < w; with causal, those in (i - w, i]
    documents        query i sees the keys of its own document, of several in a row (kernels/documents.py): `bounds`, an
                     argument of the implementations whose record says so
    nothing at all   (S >= T + w: the window is past the last key) makes a row of zeros

`core/parts.py` has a record of each. `attention_for` is for the model; `inputs.attend` is for one call, and checks
its tensors.
"""

import importlib
from typing import Protocol

import torch
from torch import Tensor

from stepscope.core.attention_support import attention_of, fault_here
from stepscope.core.parts import ATTENTIONS, Attention, is_users
from stepscope.core.workloads import TextbookWorkload


class AttentionFunction(Protocol):
    """softmax(q k^T * scale) v over the keys that each query sees, with scale 1/sqrt(D) unless given."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor: ...


def implementation(name: Attention) -> AttentionFunction:
    """The function of this name. It does not check its tensors. The name is not `auto`."""
    if is_users(name):
        return importlib.import_module("stepscope.training.user_functions").users_part("attention", name)
    module, _, function = ATTENTIONS[name].function.partition(":")
    # Imported only when it is called: FlexAttention takes half a second, and the kernels need Triton.
    return getattr(importlib.import_module(module), function)


def fault_of_device(name: Attention, device_type: str) -> str | None:
    """What this machine's packages and GPU lack for the implementation; None where they lack nothing."""
    fault, needed = fault_here(name, device_type), ATTENTIONS[name].capability
    if fault is None and device_type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < needed:
            needs, has = (".".join(map(str, version)) for version in (needed, capability))
            return f"needs a GPU of compute capability {needs} or higher, not {has}"
    return fault


def chosen_attention(workload: TextbookWorkload, device_type: str) -> Attention:
    """The attention that the workload's model runs here: the one it names, or what `auto` picks.

    Raises an InputError that says what the named one lacks and which ones would work.
    """
    return attention_of(workload, device_type, here=fault_of_device)


def attention_for(workload: TextbookWorkload, device_type: str) -> AttentionFunction:
    """The function of the attention that the workload's model runs here."""
    return implementation(chosen_attention(workload, device_type))
