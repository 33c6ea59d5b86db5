"""Activation checkpointing: what a model's blocks keep for backward, and what they run again instead.

Chen et al. 2016 (arXiv:1604.06174) keep the inputs of groups of layers and run each group forward again when backward
reaches it; Korthikanti et al. 2022 (arXiv:2205.05198) keep what is dear to compute and run the cheap rest again.

offload-K copies by a mode of our own: PyTorch's selective checkpointing keeps outputs where they are, and its
`save_on_cpu` waits for each copy. The device's memory is let go two blocks later, where the compute stream waits for
the copies: by order, so that a peak can be predicted.
"""

import contextlib
import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from stepscope.core.checkpointing import BLOCKS_ON_THE_WAY, Span, grouped, nested_parts
from stepscope.core.parts import ATTENTIONS
from stepscope.core.range_names import RECOMPUTATION
from stepscope.core.units import GIB
from stepscope.kernels.parts.projections import OPERATOR
from stepscope.recording.fake_memory import of_host
from stepscope.recording.precision import SCALED_PRODUCTS
from stepscope.recording.ranges import detail_range
from stepscope.training.attention import implementation
from stepscope.training.transformer import BlockRunner, keep_all

# What blocks keep for backward, in the host's memory: copied there while forward goes on, and back ahead of use.
#
# Each block keeps the outputs of its dear operators, as with selective checkpointing (`checkpointing.py`). Those of
# some blocks go to the host, on a stream of its own, and the device has their memory again when `BLOCKS_ON_THE_WAY`
# more blocks have run. In backward they return while later blocks compute: the copies of one begin when backward
# reaches the next block that offloads. They need the link to the host, which nothing else uses meanwhile, and no
# multiprocessor. Nothing waits if copies take less than the blocks beside them: a product of d_model to any width makes
# d_model FLOPs for each byte in 16 bits, whatever the width.


_PIECE = 32 * 2**20
"""Bytes of a piece of the host's memory: a power of two, to which PyTorch rounds what it locks."""
_ALIGNED = 512


class HostCopies:
    """The host's memory of one model's blocks, and the stream of the copies; steps use both again."""

    def __init__(self, operators: Iterable[Any]) -> None:
        self.operators = frozenset(operators)
        self.pieces: list[Tensor] = []
        """Pieces that nobody holds."""
        self._piece_count = 0
        self._device_type: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self._leaving: deque[weakref.ref[KeptByBlock] | None] = deque()

    def block(self) -> "KeptByBlock":
        return KeptByBlock(self)

    def takes(self, device: torch.device) -> bool:
        """Whether what lies there is copied: it is where the step's first output lies. What a step on a GPU has in the
        host's memory already stays there."""
        self._device_type = self._device_type or device.type
        return device.type == self._device_type

    def copying(self, device: torch.device) -> AbstractContextManager[object]:
        """A context whose copies begin when the device is done with all before, and run beside what follows."""
        if not _copies_by_itself(device):
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """The moment when all copies so far are made."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def piece(self, device: torch.device) -> Tensor:
        """A piece to which the device copies by itself. One that came back before is written again: copies run one
        after another, so that what it held has been read."""
        if self.pieces:
            return self.pieces.pop()
        with of_host():
            try:
                piece = torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=_copies_by_itself(device))
            except RuntimeError as error:
                held = f"{self._piece_count * _PIECE / GIB:.1f} GiB"
                raise RuntimeError(
                    f"the host's memory has no room for what offload-K keeps beyond {held}: choose fewer blocks"
                ) from error
        self._piece_count += 1
        return piece

    def ran(self, block: "KeptByBlock | None") -> None:
        """A block has run, which is given if it offloads: let go of what an earlier one holds of the device. Blocks are
        referred to weakly: a forward whose loss is dropped holds nothing."""
        self._leaving.append(None if block is None else weakref.ref(block))
        self.let_go(BLOCKS_ON_THE_WAY)

    def let_go(self, kept: int = 0) -> None:
        """Let go of what all but the last so many blocks hold of the device."""
        while len(self._leaving) > kept:
            reference = self._leaving.popleft()
            if reference is not None and (block := reference()) is not None:
                block.let_go()


class KeptByBlock:
    """What one block keeps, from its forward to its backward."""

    def __init__(self, copies: HostCopies) -> None:
        self.copies = copies
        self._newest: tuple[Any, Any] | None = None
        self._outputs: defaultdict[Any, deque[Any]] = defaultdict(deque)
        self._away: list[_Away] = []
        self._pieces: list[Tensor] = []
        self._rest: Tensor | None = None
        """What is free of the last piece."""
        self._left: torch.cuda.Event | None = None
        self._back: torch.cuda.Event | None = None
        self._fetched = self._begun = False

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the block's forward, and of its second run in backward."""
        return _Keeping(self), _Giving(self)

    def keep(self, operator: Any, output: Any) -> None:
        """Send what the operator before returned. Backward asks for no output of a block's last product, since the
        product itself keeps its inputs alone; so the newest waits for another. One that is missing is computed."""
        if self._newest is not None:
            before, sent = self._newest
            leaves = [leaf for away in tree_leaves(sent) if isinstance(away, (_Away, _Wrapped)) for leaf in away.leaves]
            for leaf in leaves:
                leaf.send(self)
            self._away += leaves
            self._outputs[before].append(sent)
        self._newest = operator, tree_map_only(Tensor, _away, output)

    def places(self, count: int, device: torch.device) -> list[Tensor]:
        """Room for so many bytes of the device, behind what the block has sent before."""
        pieces: list[Tensor] = []
        while count:
            if self._rest is None or not len(self._rest):
                self._rest = self.copies.piece(device)
                self._pieces.append(self._rest)
            place = self._rest[:count]
            pieces.append(place)
            self._rest = self._rest[-(-len(place) // _ALIGNED) * _ALIGNED :]
            count -= len(place)
        return pieces

    def end_forward(self) -> None:
        self._newest = None
        self._left = self.copies.mark()

    def let_go(self) -> None:
        """Give the device the memory of what was copied, once it is."""
        _await(self._left)
        for away in self._away:
            away.let_go()

    def fetch(self) -> None:
        """Begin to copy back what was kept."""
        self.copies.let_go()
        if not self._fetched:
            self._fetched = True
            for away in self._away:
                away.fetch()
            self.copies.pieces += self._pieces
            self._pieces, self._rest = [], None
            self._back = self.copies.mark()

    def begin_again(self) -> None:
        self.fetch()
        self._begun = True
        _await(self._back)
        self._away.clear()

    def __del__(self) -> None:
        if self._back is not None and not self._begun:
            _await(self._back)  # nobody asked for what comes back: its memory is not free until it is there

    def take(self, operator: Any) -> Any:
        """What the operator returned at this place in forward; None where it was not kept."""
        outputs = self._outputs[operator]
        return tree_map_only((_Away, _Wrapped), lambda away: away.take(), outputs.popleft()) if outputs else None


def _away(tensor: Tensor) -> "_Away | _Wrapped":
    return _Wrapped(tensor) if is_traceable_wrapper_subclass(tensor) else _Away(tensor)


class _Wrapped:
    """A tensor that is made of others, as a DTensor is of this rank's part."""

    def __init__(self, tensor: Any) -> None:
        names, self._context = tensor.__tensor_flatten__()
        # Some name beside their tensors what these lie on.
        parts = {name: getattr(tensor, name) for name in names}
        self._parts = {name: _away(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
        away = [part for part in self._parts.values() if isinstance(part, (_Away, _Wrapped))]
        self.leaves: list[_Away] = [leaf for part in away for leaf in part.leaves]
        self._type, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()

    def take(self) -> Tensor:
        parts = {
            name: part.take() if isinstance(part, (_Away, _Wrapped)) else part for name, part in self._parts.items()
        }
        return self._type.__tensor_unflatten__(parts, self._context, self._size, self._stride)


class _Away:
    """A tensor that is on the device, on its way or in the host's memory."""

    def __init__(self, tensor: Tensor) -> None:
        # Below autograd a view has a count of writes of its own, unless this key of the dispatcher is asked.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor: Tensor | None = tensor.detach()
        self._version, self._device = tensor._version, tensor.device
        self._block: KeptByBlock | None = None
        self._places: list[Tensor] = []

    @property
    def leaves(self) -> "list[_Away]":
        """This one alone, as of a tensor that is made of others there are several."""
        return [self]

    def send(self, block: KeptByBlock) -> None:
        """Begin to copy the tensor to the host."""
        tensor = self._unchanged()
        if not block.copies.takes(self._device):
            return
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = self._tensor = tensor.contiguous()
            self._version = tensor._version
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._block, self._places = block, block.places(tensor.nbytes, self._device)
        self._copy(self._places, self._parts(tensor))

    def let_go(self) -> None:
        self._unchanged()
        if self._block is not None:
            self._tensor = None

    def _unchanged(self) -> Tensor:
        assert self._tensor is not None
        if self._tensor._version != self._version:
            raise RuntimeError(
                "an operator wrote in place over what checkpointing offload-K keeps: choose --checkpointing every-1"
            )
        return self._tensor

    def fetch(self) -> None:
        if self._block is None:
            return
        self._tensor = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)
        self._copy(self._parts(self._tensor), self._places)
        self._places = []

    def _copy(self, to: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        assert self._block is not None
        with self._block.copies.copying(self._device):
            for place, part in zip(to, parts, strict=True):
                place.copy_(part, non_blocking=True)

    def _parts(self, tensor: Tensor) -> Sequence[Tensor]:
        """The bytes of a dense tensor in the order of its memory, cut as its places are."""
        in_order = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return in_order.split([len(place) for place in self._places])

    def take(self) -> Tensor:
        """The tensor, which belongs to the caller alone from now on."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        return tensor


class _Keeping(TorchDispatchMode):
    """Keeps the outputs of a block's operators in its forward."""

    def __init__(self, kept: KeptByBlock) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self._kept.copies.operators:
            self._kept.keep(func, output)
        return output

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._kept.end_forward()


class _Giving(TorchDispatchMode):
    """Gives the outputs that were kept to the block's second run, in their order."""

    def __init__(self, kept: KeptByBlock) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> Any:
        self._kept.begin_again()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = self._kept.take(func) if func in self._kept.copies.operators else None
        return func(*args, **(kwargs or {})) if output is None else output


def _copies_by_itself(device: torch.device) -> bool:
    """Whether the device copies while it computes. Where sizes alone are counted, there may be none."""
    return device.type == "cuda" and torch.cuda.is_available()


def _await(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", OPERATOR, *SCALED_PRODUCTS)


_OTHER_PRODUCTS = ("aten::convolution", "aten::_grouped_mm")
"""Products of models that are not ours: convolutions, and the products of experts."""


def _attentions() -> tuple[str, ...]:
    names: list[str] = []
    for attention, record in ATTENTIONS.items():
        if record.kept_operators:
            implementation(attention)  # its module defines its operators
            names += record.kept_operators
    return tuple(names)


_ATTENTIONS = _attentions()


def _operators(*names: str) -> list[Any]:
    parts = [name.split("::") for name in names]
    return [getattr(getattr(torch.ops, namespace), operator).default for namespace, operator in parts]


KEPT_OPERATORS: dict[str, list[Any]] = {
    "selective": _operators(*_PRODUCTS, *_ATTENTIONS),
    "attention": _operators(*_ATTENTIONS),
}
"""Operators whose outputs each checkpointing of KEEPING keeps: matrix products (a Linear is one) and fused attention.
Each output is kept, also that of a block's last product, which backward never asks for."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_group_inputs(group_size: int) -> BlockRunner:
    """A runner by groups of consecutive blocks: each group keeps only its input, and backward runs it again whole."""

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        blocks = tuple(blocks)
        for first in range(0, len(blocks), group_size):
            x_BSM = checkpointed(functools.partial(keep_all, blocks[first : first + group_size]), x_BSM)
        return x_BSM

    return run


def nest_calls(calls: int) -> BlockRunner:
    """A runner by calls that hold calls (`nested-K`): each keeps only its input, and that while what holds it runs
    again. PyTorch's checkpoint may be nested so (torch/utils/checkpoint.py, "Nestable Checkpoint")."""

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        for part in nested_parts(tuple(blocks), calls):
            inner = keep_all if len(part) == 1 else run
            x_BSM = checkpointed(functools.partial(inner, part), x_BSM)
        return x_BSM

    return run


def keep_outputs(contexts: Callable[[], Contexts]) -> BlockRunner:
    """A runner of single blocks: each keeps its input and what the contexts keep, and backward runs the rest again."""

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        for block in blocks:
            x_BSM = checkpointed(functools.partial(keep_all, (block,)), x_BSM, contexts=contexts)
        return x_BSM

    return run


def runner_of(spans: Sequence[Span]) -> BlockRunner:
    """A runner of a whole model's blocks, each span as it keeps for backward."""
    return _runner_of(spans[0]) if len(spans) == 1 and not spans[0].on_host else one_after_another(spans)


def one_after_another(spans: Sequence[Span]) -> BlockRunner:
    """A runner of blocks of which some offload, or keep otherwise than others."""
    copies = HostCopies(KEPT_OPERATORS["selective"])

    def run(blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        offloaded: list[tuple[KeptByBlock, Tensor]] = []
        for span, groups in grouped(tuple(blocks), spans):
            for group in groups:
                kept = copies.block() if span.on_host else None
                x_BSM = (_runner_of(span) if kept is None else keep_outputs(kept.contexts))(group, x_BSM)
                copies.ran(kept)
                if kept is not None:
                    offloaded.append((kept, x_BSM))
        # What a block keeps returns when backward reaches the next block that offloads; the last one's, at the end.
        outputs = [output for _, output in offloaded[1:]] + [x_BSM]
        for (kept, _), output in reversed(list(zip(offloaded, outputs, strict=False))):
            if output.requires_grad:
                output.register_hook(lambda _gradient, kept=kept: kept.fetch())
        return x_BSM

    return run


def _runner_of(span: Span) -> BlockRunner:
    if span.checkpointing == "none":
        return keep_all
    if span.calls is not None:
        return nest_calls(span.calls)
    contexts = OUTPUTS_KEPT.get(span.checkpointing)
    return keep_group_inputs(span.group) if contexts is None else keep_outputs(contexts)


def checkpointed(
    function: Callable[..., Any],
    *args: Any,
    contexts: Callable[[], Contexts] | None = None,
    random: bool = False,
    **kwargs: Any,
) -> Any:
    """What the function returns. It keeps its arguments for backward, which runs it again.

    contexts: the contexts of both runs, which may keep more. random: whether the function draws random numbers, as
    dropout does. Then the state of the generators is kept, so that the second run draws the same.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if not torch.compiler.is_compiling():

        def named() -> Contexts:
            forward, again = (contexts or noop_context_fn)()
            return forward, _Recomputation(again)

        options["context_fn"] = named
    elif contexts is not None:
        options["context_fn"] = contexts  # torch.compile takes these two and no others; it emits no ranges either
    return checkpoint(function, *args, **options, **kwargs)


def _keeping(operators: list[Any]) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        return create_selective_checkpoint_contexts(operators)

    return contexts


OUTPUTS_KEPT = {name: _keeping(operators) for name, operators in KEPT_OPERATORS.items()}
"""By checkpointing of KEEPING, contexts that keep the outputs of its KEPT_OPERATORS."""

OUTPUTS_KEPT_OF_ANY = {
    **OUTPUTS_KEPT,
    "selective": _keeping([*KEPT_OPERATORS["selective"], *_operators(*_OTHER_PRODUCTS)]),
}
"""By checkpointing of KEEPING, contexts for a model of a user's own, whose products may be convolutions or experts'."""


class KeptCalls(TorchDispatchMode):
    """Counts the calls of operators whose outputs a checkpointing of KEEPING keeps."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self._operators = KEPT_OPERATORS[checkpointing]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in self._operators
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Recomputation:
    """The range of what runs again. It is made in forward and entered in backward, for emitters that watch then."""

    inner: AbstractContextManager[Any]
    _range: AbstractContextManager[object] = field(init=False, default_factory=contextlib.nullcontext)

    def __enter__(self) -> None:
        self._range = detail_range(RECOMPUTATION)
        self._range.__enter__()
        self.inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        # PyTorch raises an exception of its own here, as soon as it has the last tensor that backward needs.
        self.inner.__exit__(*raised)
        self._range.__exit__(*raised)
