"""What autograd saved for backward, read off the graph when forward has ended.

No hook runs in forward for it: hooks on saved tensors make autograd keep other objects than it would, and what is to
be measured is what it keeps. Every node of the graph shows its saved tensors as attributes instead
(`MulBackward0._raw_saved_self`), under the names that autograd's formulas give them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import Node

_RAW = "_raw_saved_"
_NODE_SUFFIX = re.compile(r"Backward\d*$")


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor that a node of the graph keeps."""

    tensor: torch.Tensor
    operator: str
    """Name of the operator: `Mul` for the node MulBackward0; for a Python function, its class."""
    name: str
    """The operator's name for the tensor: `self`, `result`; `saved[2]` for the third of a Python function."""
    sequence_nr: int
    """Autograd's sequence number of the node."""


def saved_tensors(root: Node) -> Iterator[SavedTensor]:
    """Every tensor that the graph below `root` keeps, in the order in which forward made the nodes.

    Tensors that hooks hold for autograd, as in activation checkpointing, are left out: to ask for them would run the
    forward again.
    """
    nodes, waiting = {root}, [root]
    while waiting:
        fresh = {edge for edge, _ in waiting.pop().next_functions if edge is not None} - nodes
        waiting += fresh
        nodes |= fresh
    for node in sorted(nodes, key=lambda node: node._sequence_nr()):
        for attribute in _saved_attributes(type(node)):
            name = attribute.removeprefix(_RAW)
            raw = getattr(node, attribute)
            several = isinstance(raw, tuple)
            for i, saved in enumerate(raw if several else (raw,)):
                tensor = _held_by_autograd(saved)
                if tensor is not None:
                    yield SavedTensor(
                        tensor=tensor,
                        operator=_NODE_SUFFIX.sub("", node.name().rpartition("::")[2]),
                        name=f"{'saved' if attribute == '_raw_saved_tensors' else name}[{i}]" if several else name,
                        sequence_nr=node._sequence_nr(),
                    )


@cache
def _saved_attributes(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith(_RAW))


def _held_by_autograd(saved: Any) -> torch.Tensor | None:
    """The tensor that autograd holds; None where a hook holds it, or the node was given none."""
    if getattr(saved, "unpack_hook", None) is not None:
        return None
    try:
        held = saved.data
    except (AttributeError, RuntimeError):  # an optional tensor that was not there; a PyTorch without this view
        return None
    return held if isinstance(held, torch.Tensor) else None
