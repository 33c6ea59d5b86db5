"""What stepscope writes into a memory snapshot beside PyTorch's own keys, and the categories of memory.

A snapshot knows addresses, sizes and stacks. Only the process that took it knows which address was which tensor; these
notes carry that over, as plain data under the key `stepscope` of the pickled dict.
"""

from typing import Literal, get_args

import msgspec

from stepscope.core.evidence import PhaseMemory
from stepscope.core.workloads import Workload

NOTES_KEY = "stepscope"
"""Key of the notes in the snapshot's dict."""

SEGMENTS_BEFORE_KEY = "segments_before"
"""Key of the allocator's segments (PyTorch's own form) at the moment when the history begins: with them every block's
true size is known, the rounding and the remainders that were not split off included."""

# 1  2026-11  first
NOTES_VERSION = 1

MemoryCategory = Literal[
    "parameters",
    "frozen quantised weights",
    "gradients",
    "optimizer state",
    "saved for backward",
    "cast copies",
    "inputs",
    "temporaries",
    "workspaces",
    "there before",
    "rounding",
]
"""What a byte on the device is there for. parameters: and buffers. frozen quantised weights: those of 4 or 8 bits that
no gradient reaches, with their scales, as the base of QLoRA. saved for backward: activations that autograd keeps. cast
copies: 16-bit copies of parameters that autocast keeps until it ends. inputs: the batches. temporaries: everything that
a phase allocates and frees again, and what a loop keeps beside. workspaces: what libraries hold, and what nothing else
explains. there before: what lived before the history of a snapshot without notes, where nothing tells what it was.
rounding: what the allocator gives beyond what was asked (to 512 bytes, and remainders too small to split off)."""

CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)


class TensorNote(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that was at an address at a moment."""

    address: int
    """The address of the tensor's storage."""
    at_us: int
    """The moment, on the clock of the events: an allocation that is live then at this address is this tensor."""
    bytes: int
    """Bytes of the tensor's storage."""
    category: MemoryCategory
    name: str
    """The name of the parameter, `blocks.3.attention.query.weight`, also for its gradient, copies and optimizer state;
    for a saved tensor, what the operator calls it: `self`, `result`."""
    shape: tuple[int, ...]
    dtype: str
    operator: str = ""
    """For a saved tensor, the operator that saved it, as autograd names it: `Mul`, `Exp`."""
    module: str = ""
    """Path of the module whose forward made it."""


class KeptTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that recorded steps made and that was alive when they were over, and what held it."""

    address: int
    """The address of the tensor's storage."""
    kept_by: str
    """A path from a name to the tensor, as in `losses[...] in main()`, or whose graph it is in."""


class PhaseSpan(msgspec.Struct, frozen=True, kw_only=True):
    """When a phase ran, on the clock of the events."""

    name: str
    start_us: int
    end_us: int


class MemoryNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What the process knew when it took the snapshot."""

    version: int = NOTES_VERSION
    workload: Workload | None = None
    device_name: str = ""
    measured: PhaseMemory | None = None
    """The allocator's own counters over the same step."""
    phases: tuple[PhaseSpan, ...] = ()
    tensors: tuple[TensorNote, ...] = ()
    step_ends_us: tuple[int, ...] = ()
    """When each of several recorded steps ended; empty where one was recorded."""
    kept: tuple[KeptTensor, ...] = ()
    """What held the tensors of these steps when the last one was over."""
