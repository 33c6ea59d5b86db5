"""Counts the collectives that this rank calls in a step: kinds, messages, and the bytes that it sends and receives.

Every collective of PyTorch is an operator of the dispatcher: those of `torch.distributed`, those of DTensor and of
compiled graphs (functional collectives), and those that the C++ of DistributedDataParallel calls in backward. A mode
that is told of every operator sees them all. An operator of a DTensor is let through first, so that the collectives
that it is made of are seen.
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.evidence import CollectiveCalls
from stepscope.core.formulas.communication import OTHER, kind_of, sent_and_received
from stepscope.recording.step import Recorder

_NAMESPACES = ("c10d", "_c10d_functional")
_ROOTS = ("root_rank", "src", "root")
"""Names of arguments that say which rank of the group is the root."""

_Key = tuple[str, str, int]
"""Phase, kind and number of ranks."""


class TrafficCounts(TorchDispatchMode, Recorder):
    """Counts the collectives of the next step by phase, which must run eagerly: compiled modules communicate the
    same."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = ""
        self._calls: Counter[_Key] = Counter()
        self._message, self._sent, self._received = Counter[_Key](), Counter[_Key](), Counter[_Key]()

    def phase_begins(self, name: str) -> None:
        self._phase = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor's own dispatch calls what it is made of, under this mode
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Add a call, if it is one of a collective."""
        name = func._schema.name.partition("::")[2]
        kind = kind_of(name)
        if kind is OTHER:
            return
        arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        message = max((_bytes(value) for value in (*arguments.values(), out)), default=0)
        # A call names its process group by itself, by its name, or not at all.
        group: Any = None
        if (group_name := arguments.get("group_name")) is not None:
            group = dist.distributed_c10d._resolve_process_group(group_name)  # pyright: ignore[reportPrivateImportUsage]
        elif (boxed := arguments.get("process_group")) is not None:
            group = dist.ProcessGroup.unbox(boxed)
        size = group.size() if group is not None else dist.get_world_size()
        root = next((arguments[name] for name in _ROOTS if name in arguments), None)
        is_root = root is not None and root == (group.rank() if group is not None else dist.get_rank())
        sent, received = sent_and_received(
            kind.name, message, size, is_root=is_root, receives=name.startswith(("recv", "irecv"))
        )
        key = (self._phase, kind.name, size)
        self._calls[key] += 1
        self._message[key] += message
        self._sent[key] += round(sent)
        self._received[key] += round(received)

    @property
    def counted(self) -> tuple[CollectiveCalls, ...]:
        """What was counted, in the order in which the kinds came."""
        return tuple(
            CollectiveCalls(
                phase=phase,
                kind=kind,
                ranks=ranks,
                calls=calls,
                message_bytes=self._message[phase, kind, ranks],
                sent_bytes=self._sent[phase, kind, ranks],
                received_bytes=self._received[phase, kind, ranks],
            )
            for (phase, kind, ranks), calls in self._calls.items()
        )


def _bytes(value: Any) -> int:
    """The bytes of a tensor, or of all in a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
