"""Counts the collectives that this rank calls in a step: kinds, messages, and the bytes that it sends and receives.

Every collective of PyTorch is an operator of the dispatcher: those of `torch.distributed`, those of DTensor and of
compiled graphs (functional collectives), and those that the C++ of DistributedDataParallel calls in backward. A mode
that is told of every operator sees them all. An operator of a DTensor is let through first, so that the collectives
that it is made of are seen.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.ranks import CollectiveCalls
from stepscope.core.work.collectives import OTHER, kind_of, sent_and_received
from stepscope.recording.local_part import whole_numel
from stepscope.recording.step import Recorder

_NAMESPACES = ("c10d", "_c10d_functional")
_ROOTS = ("root_rank", "src", "root")
"""Names of arguments that say which rank of the group is the root."""

_Key = tuple[str, str, int]
"""Phase, kind and number of ranks."""


class TrafficCounts(Recorder):
    """Counts the collectives of the next step by phase. Compiled modules run eagerly: they communicate the same."""

    def __init__(self) -> None:
        self._phase = ""
        self._calls: Counter[_Key] = Counter()
        self._message, self._sent, self._received = Counter[_Key](), Counter[_Key](), Counter[_Key]()

    @contextlib.contextmanager
    def running(self) -> Iterator["TrafficCounts"]:
        """A context in which collectives are counted."""
        with torch.compiler.set_stance("force_eager"), _Collectives(self):
            yield self

    def phase_begins(self, name: str) -> None:
        self._phase = name

    def count(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Add a call, if it is one of a collective."""
        name = func._schema.name.partition("::")[2]
        kind = kind_of(name)
        if kind is OTHER:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        message = max((_bytes(value) for value in (*given.values(), out)), default=0)
        group = _group_of(given)
        size = group.size() if group is not None else dist.get_world_size()
        root = next((given[name] for name in _ROOTS if name in given), None)
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
                phase=key[0], kind=key[1], ranks=key[2], calls=calls, message_bytes=self._message[key],
                sent_bytes=self._sent[key], received_bytes=self._received[key],
            )
            for key, calls in self._calls.items()
        )  # fmt: skip


class _Collectives(TorchDispatchMode):
    """A mode that tells of operators of torch.distributed."""

    def __init__(self, counts: TrafficCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor's own dispatch calls what it is made of, under this mode
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._counts.count(func, args, out)
        return out


def _bytes(value: Any) -> int:
    """The bytes of a tensor, or of all in a list."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _group_of(given: dict[str, Any]) -> Any:
    """The process group that a call names, by itself or by its name; None where it says neither."""
    if (name := given.get("group_name")) is not None:
        return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateImportUsage]
    boxed = given.get("process_group")
    return dist.ProcessGroup.unbox(boxed) if boxed is not None else None


def whole_bytes(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """The bytes of the whole parameters, however they are sharded, and of those that are trained."""
    sizes = [(whole_numel(one) * one.element_size(), one.requires_grad) for one in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)
