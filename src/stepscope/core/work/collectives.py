"""Collectives: their kinds, the size of a message, and the bytes that a link carries for it.

The bus factor makes rates of different kinds comparable with a link's peak: n ranks that all-reduce S bytes move at
least 2 (n - 1) / n S bytes over each link, by the formulas of nccl-tests (doc/PERFORMANCE.md).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """A kind of collective. `spelling` fits its names in process groups, NCCL and fused kernels; the first kind whose
    spelling fits counts. `factor`: bytes on each link for each byte of the message, for n ranks. `ends_together`: no
    rank can be done before the last one has come.
    """

    name: str
    spelling: str
    example: str
    factor: Callable[[int], float]
    ends_together: bool = True


def _once(ranks: int) -> float:
    """A link carries the message once."""
    return 1.0


def _others(ranks: int) -> float:
    """A link carries what the other ranks hold."""
    return (ranks - 1) / ranks


KINDS = (
    CollectiveKind(
        name="all-reduce",
        spelling=r"all_?reduce",
        example="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        factor=lambda ranks: 2 * _others(ranks),
    ),
    CollectiveKind(
        name="reduce-scatter", spelling=r"reduce_?scatter", example="_reduce_scatter_base", factor=_others
    ),
    CollectiveKind(name="all-gather", spelling=r"all_?gather", example="_allgather_base", factor=_others),
    CollectiveKind(name="all-to-all", spelling=r"all_?to_?all", example="nccl:all_to_all", factor=_others),
    CollectiveKind(
        name="broadcast", spelling=r"broadcast", example="broadcast", factor=_once, ends_together=False
    ),
    CollectiveKind(name="barrier", spelling=r"barrier", example="barrier", factor=_once),
    CollectiveKind(
        name="send and receive",
        spelling=r"send|recv|receive",
        example="ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        factor=_once,
        ends_together=False,
    ),
    CollectiveKind(
        name="reduce", spelling=r"reduce", example="ncclDevKernel_Reduce_Sum_f32_RING_LL", factor=_once,
        ends_together=False,
    ),
    CollectiveKind(name="gather", spelling=r"gather", example="gather", factor=_once, ends_together=False),
    CollectiveKind(name="scatter", spelling=r"scatter", example="scatter", factor=_once, ends_together=False),
)  # fmt: skip
OTHER = CollectiveKind(name="other", spelling="", example="", factor=_once, ends_together=False)


def sent_and_received(
    kind: str, message_bytes: int, ranks: int, *, is_root: bool = False, receives: bool = False
) -> tuple[float, float]:
    """The bytes that have to leave a rank for such a collective, and those that have to reach it.

    They are lower bounds, which ring algorithms meet; what a rank relays for others is not counted. Messages are those
    of nccl-tests. is_root: whether the rank is the one that a broadcast or scatter comes from, or that a reduce or
    gather goes to. receives: whether a point-to-point call is a receive.
    """
    others = ranks - 1
    if kind == "barrier":
        return 0.0, 0.0
    if kind == "send and receive":
        return (0.0, float(message_bytes)) if receives else (float(message_bytes), 0.0)
    if kind in ("broadcast", "reduce"):
        at_root, elsewhere = float(others * message_bytes), float(message_bytes)
    elif kind in ("scatter", "gather"):
        at_root, elsewhere = others / ranks * message_bytes, message_bytes / ranks
    else:
        moved = named_kind(kind).factor(ranks) * message_bytes
        return moved, moved
    if kind in ("broadcast", "scatter"):
        return (at_root, 0.0) if is_root else (0.0, elsewhere)
    return (0.0, at_root) if is_root else (elsewhere, 0.0)


_ITEM_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "short": 2, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by the name that PyTorch gives the type in a trace, in lower case."""


def kind_of(name: str) -> CollectiveKind:
    """The kind of collective that a name means: of a process group's call, or of a kernel."""
    name = name[:400].lower()
    return next((kind for kind in KINDS if re.search(kind.spelling, name)), OTHER)


def named_kind(name: str) -> CollectiveKind:
    """The kind of that name."""
    return next((kind for kind in KINDS if kind.name == name), OTHER)


_MOST_BYTES = 2**62
"""No message has more: such a number of elements is damaged."""


def message_bytes(elements: int | None, dtype: str | None) -> int | None:
    """The size of a message of so many elements, or None where either is unknown or cannot be."""
    size = _ITEM_BYTES.get((dtype or "").lower(), 1 if (dtype or "").lower().startswith("float8") else None)
    return elements * size if elements is not None and size and 0 <= elements * size <= _MOST_BYTES else None


def algorithm_bandwidth(message_bytes: int, seconds: float) -> float:
    """Bytes of the message for each second (nccl-tests, doc/PERFORMANCE.md, `algbw`)."""
    return message_bytes / seconds


def bus_bandwidth(kind: str, message_bytes: int, ranks: int, seconds: float) -> float:
    """Bytes that each link carries in a second (the same page, `busbw`). Of all-gather and reduce-scatter the message
    is the whole, of which each rank has a part before or after; of all-to-all it is what one rank sends."""
    return algorithm_bandwidth(message_bytes, seconds) * named_kind(kind).factor(ranks)
